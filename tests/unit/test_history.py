"""What a node's CPU side keeps of applied iterations, and compares with the other nodes."""

from __future__ import annotations

import pytest

from atoll.core.errors import RunError
from atoll.cpuside.history import History
from atoll.exchange.globalparameters import IterationOutcome


def test_nodes_with_other_parameters_are_told_what_to_do() -> None:
    history = History(lambda _: None, lambda *_: None, stale_max=0)
    history.note(4, 1, IterationOutcome(4, True, None, {}, b"\x01"), [])
    history.compare(4, 1, b"\x01", node=1, own=0)
    history.compare(3, 1, b"\x02", node=1, own=0)  # which is no longer known
    with pytest.raises(RunError) as told:
        history.compare(4, 1, b"\x02", node=1, own=0)
    line = str(told.value)
    assert line.startswith("after iteration 5 the parameters of node 1 and of node 0 differ (02 and 01)")
    assert line.endswith("or use strategy 'server'")
