"""The decisions of nodes that train without a server: what is applied when, rounds, and who is in the view.

Pure state machines on keys; the runtime (`cpuside`) holds the gradients, the sockets and the clock.
Source: docs/peers.md.
"""

from __future__ import annotations
