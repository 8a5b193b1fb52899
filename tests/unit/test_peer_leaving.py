"""A worker that has come to its end waits for its CPU side as long as that waits for the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from peer_side import FakeSide

from atoll.peers.settings import NodeSettings
from atoll.train.members.peersintroduction import Introduction
from atoll.train.sync import peersworker as worker
from atoll.train.sync.peersstart import CpuSide
from atoll.wire.device import DeviceMessage, Left, NodeAt


class SlowSide(FakeSide):
    """Says Left after `leaves` seconds of a clock that only waits move."""

    def __init__(self, leaves: float) -> None:
        super().__init__()
        self.now, self.leaves = 0.0, leaves

    def receive(self, timeout: float = 0.0) -> tuple[DeviceMessage, list[int]] | None:
        self.now += timeout
        return (Left(), []) if self.now >= self.leaves else None


@pytest.mark.parametrize("leaves", [NodeSettings().linger, 1000.0], ids=["as the last moment comes", "never"])
def test_a_worker_lets_its_cpu_side_see_to_the_others(monkeypatch: pytest.MonkeyPatch, leaves: float) -> None:
    side = SlowSide(leaves)
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: side.now))
    meeting = SimpleNamespace(
        run="test", node=0, late=False, incarnation=1, hub="", founding=0, devices=[1, 1]
    )
    nodes = [NodeAt(node=node, incarnation=1, address="tcp://127.0.0.1:1") for node in range(2)]
    introduction = Introduction(cast(Any, meeting), nodes, None)
    node = worker.NodeWorker(introduction, cast(CpuSide, side), 60.0)
    # What FakeSide answers at once is not this side's.
    side.send = lambda message, descriptors=(): side.heard.append(message)  # type: ignore[method-assign]
    node.finish(3)
    if leaves < 100.0:
        assert leaves <= side.now < leaves + 0.5, "it has heard that the others have all"
    else:
        assert NodeSettings().linger < side.now < NodeSettings().linger + 10.0
