"""What a node leaves in the run's directory for the next one of its name, and for the others in the store."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
from torch.distributed import DistStoreError, HashStore

from atoll.core.config import HUB_VARIABLE, RANK_VARIABLE, RUN_VARIABLE, Config
from atoll.core.errors import ConfigError, DeadlineError, RunError, UserError
from atoll.observe.rundir import DIRECTORY_VARIABLE
from atoll.train.api.place import Place
from atoll.train.members import peersintroduction as module
from atoll.train.members.peersintroduction import (
    Introduction,
    NodeFile,
    StoreMeeting,
    _hear_leader,
    _Kept,
    _tell_devices,
    known_before,
)
from atoll.train.sync.peersstart import CpuSide
from atoll.wire.device import NodeAt

NODES = [NodeAt(node=node, incarnation=1, address=f"tcp://127.0.0.1:{5000 + node}") for node in range(2)]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Kept:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv(RANK_VARIABLE, raising=False)
    for name in (HUB_VARIABLE, RUN_VARIABLE, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    kept = _Kept(tmp_path / "nodes", 1)
    kept.write(NodeFile("run", 1, 1, NODES, "", 0))
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


def test_a_node_comes_back_with_as_many_devices_as_it_had(
    kept: _Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.write(NodeFile("run", 1, 1, NODES, "", 0, [1, 2]))
    kept.close()
    line = "node 1 had 2 devices when the run began, and comes back with 1: start as many workers as then"
    with pytest.raises(ConfigError, match=line):
        known_before(Config())
    assert known_before(Config(), devices=2) is None  # RANK is a device's then
    monkeypatch.setenv(RANK_VARIABLE, "1")
    found = known_before(Config(), devices=2)
    assert found is not None
    assert (found.node, found.devices) == (1, [1, 2])


class LostStore(HashStore):
    """One that knows at once that a node does not come any more, as a hub's does: it calls that a deadline's
    end."""

    def wait(self, keys: list[str], timeout: timedelta = timedelta(0)) -> None:
        if keys == ["peers/1"]:
            raise DistStoreError("timed out: worker 0 waited 600 s for 'peers/1'\nand more")
        super().wait(keys, timeout)


def test_who_waited_for_a_node_that_is_lost_says_for_how_long_it_did() -> None:
    meeting = StoreMeeting(Place(rank=0, world=2, store=LostStore()), 600.0)
    line = (
        r"^node 1 of 2 was lost before it had said where it listens \(node 0 waited \d+\.\d s for that\): "
        r"start the run again$"
    )
    with pytest.raises(RunError, match=line) as caught:
        meeting.exchange("tcp://127.0.0.1:1")
    assert not isinstance(caught.value, DeadlineError)
    late = StoreMeeting(Place(rank=0, world=2, store=HashStore()), 0.1)
    with pytest.raises(DeadlineError, match=r"node 0 waited \d+\.\d s for node 1 of 2 .*sync.timeout, 0.1 s"):
        late.exchange("tcp://127.0.0.1:1")


def test_a_nodes_devices_hear_of_its_introduction_from_the_one_that_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = Place(rank=0, world=2, store=HashStore())
    met = StoreMeeting(Place(rank=1, world=2, store=HashStore()), 1.0)
    met.devices = [1, 2]
    introduction = Introduction(met, NODES, None)
    assert _tell_devices(leader, lambda: (introduction, cast(CpuSide, None))) is not None
    heard = _hear_leader(replace(leader, rank=1), 1.0)
    assert (heard.node, heard.nodes, heard.devices, heard.late) == (1, NODES, [1, 2], False)
    assert (introduction.place.rank, heard.place.rank, heard.place.world) == (1, 2, 3)

    def fail() -> None:
        raise UserError("the hub refuses this key")

    leader = replace(leader, store=HashStore())
    with pytest.raises(UserError, match="the hub refuses this key"):
        _tell_devices(leader, fail)
    with pytest.raises(UserError, match="the hub refuses this key"):
        _hear_leader(replace(leader, rank=1), 1.0)

    def full() -> None:
        raise PermissionError(13, "no more room", "nodes/1.json")

    leader = replace(leader, store=HashStore())
    with pytest.raises(PermissionError):
        _tell_devices(leader, full)
    with pytest.raises(RunError, match="the node's first worker ended with PermissionError: .*no more room"):
        _hear_leader(replace(leader, rank=1), 1.0)

    for name in ("_START_SECONDS", "LEADER_SECONDS"):
        monkeypatch.setattr(module, name, 0.0)
    line = r"device 1 of a node waited up to 0 s for the node's first worker to be introduced"
    with pytest.raises(DeadlineError, match=line):
        _hear_leader(replace(leader, rank=1, store=HashStore()), 0.1)
