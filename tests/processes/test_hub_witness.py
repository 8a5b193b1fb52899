"""The hub as the witness of runs of two nodes: it votes once, whatever happens to it and to its disk."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_parts import DEADLINE, HubProcess, Service, hub_of, wait_for

from atoll.net.endpoint import Client
from atoll.peers.change import Change
from atoll.peers.views import ViewChangeSettings, Wish, first_view
from atoll.testing.faults import Fault
from atoll.wire.messages import (
    VERSION,
    Accept,
    Accepted,
    Hello,
    Outbid,
    Prepare,
    Promised,
    Refused,
    ViewDecided,
    decode_untrusted,
    encode,
)
from atoll.wire.peers import WITNESS
from atoll.wire.peerviews import Ballot, Held, Life, Report, View, ViewMember

TWO = first_view(1, [ViewMember(Life(node, 0)) for node in range(2)])
ALONE = [
    View(1, 2, (ViewMember(Life(node, 0)),), (ViewMember(Life(1 - node, 0)),), TWO.last) for node in range(2)
]


class Node:
    """A node's connection for votes; it says Hello before all that it says, for the hub may be a new one."""

    def __init__(self, address: str, node: int, run: str = "r") -> None:
        self._client = Client(address, None, limit=2**21, name="hub")
        self._hello = encode(Hello(version=VERSION, run=run, role="node", worker=node))

    def say(self, message: Any) -> None:
        self._client.send(self._hello)
        self._client.send(encode(message))

    def hear(self, seconds: float) -> Any:
        """What the hub says next, if it does within these seconds."""
        received = self._client.receive(seconds)
        return None if received is None else decode_untrusted(received[0])

    def close(self) -> None:
        self._client.close()


def ask(hub: Service | HubProcess, message: Prepare | Accept, run: str = "r", node: int | None = None) -> Any:
    """The hub's answer to whose ballot it is, over a connection that nothing else comes over; asked again
    each half second, for the hub may be killed meanwhile."""
    one = Node(hub.address, message.ballot.node if node is None else node, run)
    until = time.monotonic() + DEADLINE
    try:
        while time.monotonic() < until:
            one.say(message)
            if (answer := one.hear(0.5)) is not None:
                return answer
    finally:
        one.close()
    raise AssertionError(f"no answer to {message} within {DEADLINE:g} s")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def prepare(node: int, round: int, view: View = TWO) -> Prepare:
    return Prepare(view=view, ballot=Ballot(round, node))


def accept(node: int, round: int) -> Accept:
    """A node wants to go on alone."""
    return Accept(view=TWO, ballot=Ballot(round, node), next=ALONE[node])


def test_the_hub_votes_for_members_of_views_of_two(folder: Path) -> None:
    three = first_view(1, [ViewMember(Life(node, 0)) for node in range(3)])
    later = View(1, 5, TWO.members, (), TWO.last)
    with hub_of(folder, workers=2, shards=0, run="r") as hub:
        assert isinstance(ask(hub, prepare(0, 1)), Promised)
        assert isinstance(ask(hub, accept(0, 1)), Accepted)
        assert ask(hub, prepare(1, 0)) == Outbid(founding=1, view=1, ballot=Ballot(1, 0))
        assert ask(hub, prepare(1, 2)).accepted == (Ballot(1, 0), ALONE[0])
        assert isinstance(ask(hub, prepare(0, 1, later)), Promised)
        assert ask(hub, prepare(1, 9)) == ViewDecided(view=later)
        for refused in (
            ask(hub, prepare(0, 1, three)),
            ask(hub, prepare(7, 1)),
            ask(hub, prepare(0, 2), node=1),
        ):
            assert refused.reason == "the hub votes on what follows views of two nodes, for these two"
        assert "this hub is of run 'r'" in ask(hub, prepare(0, 1), run="another").reason
        (said,) = hub.decisions("view")
        assert said.choice == "view 2, nodes 0: node 1 is out: its iterations below 0 count"


@pytest.mark.parametrize("point", ["hub.record", "hub.recorded"])
def test_a_hub_that_is_killed_at_a_vote_does_not_vote_twice(folder: Path, point: str) -> None:
    """Before or after a vote is written down: at the first one, and again at a later one (the first
    record of a new journal is its own)."""
    plan = [Fault(point, iteration=2, times=2)]
    with HubProcess(folder, workers=2, shards=0, plan=plan) as hub:
        assert isinstance(ask(hub, prepare(0, 1)), Promised)
        assert isinstance(ask(hub, accept(0, 1)), Accepted)
        assert isinstance(ask(hub, prepare(1, 0)), Outbid)
        assert ask(hub, prepare(1, 2)).accepted == (Ballot(1, 0), ALONE[0])
        hub.kill()
        assert ask(hub, accept(0, 1)) == Outbid(founding=1, view=1, ballot=Ballot(2, 1))
        assert hub.starts >= 3


def test_no_vote_is_given_that_the_disk_does_not_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = False

    def sync(file: int, _sync: Any = os.fdatasync) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _sync(file)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr("atoll.hub.ledger._RETRY_SECONDS", 0.1)
    with hub_of(folder, workers=2, shards=0, run="r") as hub:
        assert isinstance(ask(hub, prepare(0, 1)), Promised)
        full = True
        one = Node(hub.address, 0)
        one.say(accept(0, 1))
        wait_for(lambda: hub.decisions("journal"), "the disk to be full")
        one.say(accept(0, 1))
        assert one.hear(0.5) is None
        one.close()
        full = False
        assert isinstance(ask(hub, accept(0, 1)), Accepted)
    with hub_of(folder, workers=2, shards=0, run="r") as hub:
        assert ask(hub, prepare(1, 2)).accepted == (Ballot(1, 0), ALONE[0])


def test_a_hub_that_keeps_no_journal_has_no_vote() -> None:
    """Another one could be started in its place, which does not know what it has voted."""
    with hub_of(None, workers=2, shards=0, run="r") as hub:
        refused = ask(hub, prepare(0, 1))
        assert isinstance(refused, Refused)
        assert refused.reason == "this hub has no directory to keep votes in; give it --directory"


def report_of(node: int) -> Report:
    held = tuple(Held(member.life, 0) for member in TWO.members)
    return Report(Life(node, 0), TWO.number, 0, 0, 0, held)


def test_of_two_halves_that_lost_each_other_one_decides_while_the_hub_is_killed(folder: Path) -> None:
    """Each wants the other out, neither hears the other, and both ask one hub, which is killed meanwhile."""
    with HubProcess(folder, workers=2, shards=0) as hub:
        nodes = [Node(hub.address, node) for node in range(2)]
        rng = np.random.default_rng(3)
        changes = [Change(node, TWO, ViewChangeSettings(0.2, 0.1), rng) for node in range(2)]
        decided: dict[int, View] = {}
        steps = [
            change.handle_wish(time.monotonic(), Wish({1 - node: "silent"}), report_of(node))
            for node, change in enumerate(changes)
        ]
        ends, kills = time.monotonic() + DEADLINE, [time.monotonic() + 0.4 * each for each in (1, 2)]
        while len(decided) < 2 or kills:
            assert time.monotonic() < ends, f"only {sorted(decided)} know what was decided"
            if kills and time.monotonic() > kills[0]:
                kills.pop(0)
                hub.kill()
            for node, change in enumerate(changes):
                step, now = steps[node], time.monotonic()
                for to, message in step.sends:
                    if to == WITNESS:
                        nodes[node].say(message)
                if step.decided is not None:
                    decided[node] = step.decided
                heard = nodes[node].hear(0.02)
                if node in decided or heard is None or isinstance(heard, Refused):
                    steps[node] = change.poll(now, report_of(node))
                else:
                    steps[node] = change.handle_message(now, WITNESS, heard, report_of(node))
        assert decided[0] == decided[1]
        assert len(decided[0].members) == 1
        for each in nodes:
            each.close()
