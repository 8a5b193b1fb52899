"""The store's decisions: what is committed, what is applied where and when, who lives, who has which samples.

Pure state machines on ids and opaque handles; the runtimes (`server`, `hub`) hold the tensors, sockets and
clocks. Source: S4, "The store".
"""

from __future__ import annotations
