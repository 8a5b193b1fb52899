"""Who was lost in a run and came back: `launch/losses.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.hub.decisions import FILE, Decision, Decisions, decision_reader, read_decisions
from atoll.launch.losses import Losses, who_of


def decided(what: str, choice: str, reason: str = "so it is") -> Decision:
    return Decision(0.0, what, choice, reason)


WORKER = "worker 1, incarnation 3"


def test_a_worker_that_comes_back_and_one_that_does_not() -> None:
    losses = Losses()
    assert not losses.take(decided("worker joined", WORKER), 1.0)  # as all do
    assert losses.lines() == []
    losses.lost("worker 1", 4.0)  # by the launcher, and later by the hub
    assert losses.take(decided("worker died", WORKER), 5.5)
    assert losses.take(decided("fenced", WORKER), 5.6)
    assert losses.take(decided("worker joined", "worker 1, incarnation 4"), 7.0)
    losses.lost("worker 2", 8.0)
    assert losses.lines() == [
        "lost, and came back: worker 1 at 4.0 s, back after 3.0 s",
        "lost for good: worker 2 at 8.0 s",
    ]


def test_many_losses_are_two_lines() -> None:
    losses = Losses()
    for at in (10.0, 20.0, 30.0):
        losses.lost("worker 1", at)
        losses.back("worker 1", 1.1 * at)
    for rank in range(2, 8):
        losses.lost(f"worker {rank}", 40.0)
    back, gone = losses.lines()
    assert back.endswith(": worker 1 3 times from 10.0 s, back after 1.0 s to 3.0 s")
    assert gone.endswith("; worker 5 at 40.0 s; 2 more")


def test_a_shard_and_the_hub_that_are_started_again() -> None:
    losses = Losses()
    losses.lost("shard 0", 2.0)
    assert losses.take(decided("shard came back", "shard 0"), 5.0)
    losses.lost("the hub", 6.0)
    assert losses.take(decided("hub", "listens at tcp://127.0.0.1:5 again"), 6.5)
    assert losses.take(decided("site died", "site 'a'"), 7.0)
    assert losses.lines() == [
        "lost, and came back: shard 0 at 2.0 s, back after 3.0 s; the hub at 6.0 s, back after 500.0 ms",
        "lost for good: site 'a' at 7.0 s",
    ]


def test_a_shard_that_is_held_twice_is_back_when_it_is_so_again() -> None:
    losses = Losses(twice=True)
    assert not losses.take(decided("shard 0", "its standby is in sync"), 1.0)
    losses.lost("shard 0", 2.0)
    assert losses.take(decided("shard died", "shard 0"), 2.1)
    assert losses.take(decided("shard 0", "its standby at tcp://127.0.0.1:6 goes on"), 2.4)
    assert losses.take(decided("shard joined", "shard 0"), 4.0)
    assert losses.lines() == [
        "lost for good: a process of shard 0 at 2.0 s, its standby went on after 400.0 ms"
    ]
    assert losses.take(decided("shard 0", "its standby is in sync"), 5.0)
    assert losses.lines() == [
        "lost, and came back: a process of shard 0 at 2.0 s, its standby went on after 400.0 ms, "
        "held twice again after 3.0 s"
    ]


@pytest.mark.parametrize(
    ("what", "choice", "is_fault"),
    [
        ("ring broken", "ring 1", True),
        ("journal", "written again", True),
        ("log", "not reached", True),
        ("shards", "tcp://127.0.0.1:5", False),
        ("ring", "ring 1 of 2 workers", False),
        ("fenced", WORKER, False),  # who has left well is fenced too
        ("worker left", WORKER, False),
        ("epoch 1 of sampler 0", "over", False),
        ("hub", "listens at tcp://127.0.0.1:5", False),
        ("run", "over", False),
    ],
)
def test_which_decisions_are_about_a_fault(what: str, choice: str, is_fault: bool) -> None:
    losses = Losses()
    assert losses.take(decided(what, choice), 1.0) == is_fault
    assert losses.lines() == []


def test_whom_a_decision_is_about() -> None:
    assert who_of(decided("worker died", WORKER)) == "worker 1"
    assert who_of(decided("shard died", "shard 0")) == "shard 0"


def test_decisions_are_read_as_they_come(tmp_path: Path) -> None:
    reader = decision_reader(tmp_path)
    assert list(reader.read()) == []
    decisions = Decisions(tmp_path, clock=lambda: 7.0)
    decisions.add("ring", "ring 1", "all are there")
    assert [each.choice for each in list(reader.read())] == ["ring 1"]
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time":')  # by a hub that was killed then
    assert list(reader.read()) == []
    decisions.close()
    decisions = Decisions(tmp_path, clock=lambda: 8.0)
    decisions.add("ring", "ring 2", "all are there")
    decisions.close()
    assert list(reader.read()) == [Decision(8.0, "ring", "ring 2", "all are there")]
    assert [each.choice for each in read_decisions(tmp_path)] == ["ring 1", "ring 2"]
