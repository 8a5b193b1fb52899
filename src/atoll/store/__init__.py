"""The decisions of a parameter server and of the hub: which contributions count, what is applied where and
when, which members live, and which worker has which samples.

They are pure state machines on ids and opaque handles. The processes around them (`server`, `hub`) hold the
tensors, sockets and clocks. Source: docs/server.md; Li et al., "Scaling Distributed Machine Learning with the
Parameter Server", OSDI 2014.
"""

from __future__ import annotations
