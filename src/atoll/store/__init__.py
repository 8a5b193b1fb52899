"""The store's decisions: what is committed, what is applied where and when, who lives, who has which samples.

Pure state machines on ids and opaque handles; the runtimes (`server`, `hub`) hold the tensors, sockets and
clocks. Source: docs/server.md; Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
OSDI 2014.
"""

from __future__ import annotations
