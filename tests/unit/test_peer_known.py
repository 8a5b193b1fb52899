"""What a node leaves in the run's directory for the next one of its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.config import HUB_VARIABLE, RUN_VARIABLE, Config
from atoll.observe.rundir import DIRECTORY_VARIABLE
from atoll.train.node.introduction import Known, _Kept, known_before
from atoll.wire.device import NodeAt

NODES = [NodeAt(node=node, incarnation=1, address=f"tcp://127.0.0.1:{5000 + node}") for node in range(2)]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Kept:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    for name in (HUB_VARIABLE, RUN_VARIABLE, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    kept = _Kept(tmp_path / "nodes", 1)
    kept.write(Known("run", 1, 1, NODES, "", 0))
    return kept


def test_one_that_is_started_again_finds_the_others(kept: _Kept) -> None:
    kept.close()
    known = known_before(Config())
    assert known is not None
    assert known.late
    assert known.incarnation == 2
    assert known.exchange("here")[0] == NODES[0]


def test_a_run_that_has_ended_is_not_gone_on_with(kept: _Kept) -> None:
    kept.close(finished=True)
    assert known_before(Config()) is None


def test_where_torchrun_starts_its_workers_again_all_begin_anew(
    kept: _Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.close()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert known_before(Config()) is None
    monkeypatch.setenv(HUB_VARIABLE, "tcp://127.0.0.1:4000")  # each launch is one node, which may die alone
    assert known_before(Config()) is not None
