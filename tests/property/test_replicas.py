"""Properties of a shard that is held twice: whoever joins, dies, stands still, comes back or is promoted, and
however often the hub is started again, what was acknowledged is held by whoever is primary.

The processes are modelled by what they hold: how many records were told to them, of those that were ever
acknowledged. A process acknowledges as the primary's side does (server/mirror.py): alone only where the hub's
latest word to it names no standby that it has closed its gate for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.hub.book import Book
from atoll.hub.records import (
    AnyRecord,
    Came,
    Died,
    Knows,
    Paired,
    Promoted,
    decode_record,
    encode_record,
)
from atoll.store.members import Membership
from atoll.wire.messages import Duty

# One thing at a time, and what usually happens together: a process is killed and missed, all words arrive.
SINGLE = ("start", "kill", "bury", "promote", "hear", "copy", "say", "work", "hello", "restart", "compact")
TOGETHER = ("start", "lose", "miss", "settle", "work", "promote", "hello")
KINDS = (*SINGLE, *2 * TOGETHER)
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 5)), max_size=40)


@dataclass
class Process:
    """One process of the shard: what it has in memory, and the hub's latest word to it."""

    life: str
    token: str
    incarnation: int = 0
    before: int = 0  # what its directory says
    held: frozenset[int] = frozenset()
    duty: Duty | None = None
    gate: int = 0  # the incarnation of the standby without which it acknowledges nothing
    alive: bool = True
    mirrors: int = 0  # as a standby: the incarnation of the primary whose stream it holds
    mail: list[Duty] = field(default_factory=list)  # on its way, perhaps late

    @property
    def is_primary(self) -> bool:
        return self.duty is not None and self.duty.primary


@dataclass
class Disk:
    """A directory that outlives its processes."""

    held: frozenset[int] = frozenset()
    incarnation: int = 0
    good: bool = False  # holds a whole shard


class World:
    """A hub, and processes of one shard in up to three directories (the first is none)."""

    def __init__(self) -> None:
        self.now = 0.0
        self.book = Book(Membership(1, 10.0, 1, None, 0.25, 2))
        self.records: list[AnyRecord] = []
        self.processes: list[Process] = []
        self.disks = {"a": Disk(), "b": Disk()}
        self.acknowledged: frozenset[int] = frozenset()
        self.count = 0
        self.acted: dict[int, int] = {}  # term -> who was told to be primary in it

    @property
    def pair(self) -> Any:
        return self.book.members.shards.pairs[0]

    def keep(self, record: AnyRecord) -> None:
        self.records.append(record)

    def tell(self) -> None:
        """The hub's word to all that it knows; it may arrive late."""
        for process in self.processes:
            if process.incarnation and self.book.members.shards.pair_of(process.incarnation) is not None:
                partner = self.pair.partner_of(process.incarnation)
                primary = self.pair.primary
                duty = Duty(
                    term=self.pair.term,
                    primary=primary is not None and primary.incarnation == process.incarnation,
                    partner=partner.incarnation if partner is not None else 0,
                    synced=self.pair.synced,
                    serves=self.pair.serves,
                )
                process.mail.append(duty)

    def happen(self, kind: str, who: int, what: int) -> None:
        self.now += 1.0
        living = [process for process in self.processes if process.alive]
        process = living[who % len(living)] if living else None
        if kind == "start":
            self.start(["", "a", "b"][what % 3])
        elif kind in ("restart", "compact"):
            self.restart(kind == "compact")
        elif kind == "bury":
            self.bury(who)
        elif kind == "promote":
            self.promote()
        elif process is None:
            return
        elif kind == "settle":
            self.settle()
        elif kind == "kill":
            process.alive = False
        elif kind in ("lose", "miss"):  # it is dead, or only silent
            process.alive = kind == "miss"
            if process.incarnation in set(self.book.members.roll.known):
                self.die(process.incarnation)
        elif kind == "hear" and process.mail:
            self.hear(process, process.mail.pop(what % len(process.mail)))
        elif kind == "copy":
            self.copy(process)
        elif kind == "say":
            self.say(process, what)
        elif kind == "work":
            self.work(process)
        elif kind == "hello":
            self.hello(process)
        self.check()

    def settle(self) -> None:
        """All words arrive, and the standby catches up."""
        for _ in range(3):
            for process in self.processes:
                while process.alive and process.mail:
                    self.hear(process, process.mail.pop(0))
            for process in self.processes:
                if process.alive:
                    self.copy(process)
                    self.say(process, 0)
                    self.say(process, 1)

    def start(self, token: str) -> None:
        if token and any(each.alive and each.token == token for each in self.processes):
            return  # the directory is locked
        process = Process(f"life {len(self.processes)}", token)
        if token and self.disks[token].good:
            process.before, process.held = self.disks[token].incarnation, self.disks[token].held
        self.processes.append(process)
        self.hello(process)

    def hello(self, process: Process) -> None:
        """As hub/pairs.py does it: who has the directory is dead, or else would hold it."""
        if self.pair.known(process.life) is None:
            for half in self.pair.halves():
                if process.token and half.token == process.token:
                    self.die(half.incarnation)
            self.promote()
        came = Came(
            at=self.now, role="shard", wish=-1, shard=0, address=f"at {process.life}", site="",
            token=process.token, before=process.before, life=process.life, since=process.incarnation,
        )  # fmt: skip
        there = set(self.book.members.roll.known)
        admission = self.book.come(came)
        if admission.refused:
            if not admission.waits:
                process.alive = False  # it ends with a line
            return
        if admission.incarnation not in there:
            self.keep(came)
        process.incarnation = admission.incarnation
        if process.token:
            self.disks[process.token].incarnation = admission.incarnation
        self.tell()

    def bury(self, who: int) -> None:
        """The hub misses one: dead, or only silent."""
        there = sorted(set(self.book.members.roll.known))
        if there:
            self.die(there[who % len(there)])

    def die(self, incarnation: int) -> None:
        died = Died(at=self.now, incarnation=incarnation)
        self.book.die(died)
        self.keep(died)
        self.tell()

    def promote(self) -> None:
        promotable = self.pair.promotable()
        if promotable is None:
            return
        assert self.pair.synced
        promoted = Promoted(at=self.now, shard=0)
        self.book.apply(promoted)
        self.keep(promoted)
        self.tell()

    def restart(self, compact: bool) -> None:
        """The hub is killed, and reads what it has written."""
        if compact:
            self.records = [decode_record(encode_record(Knows(at=self.now, state=self.book.state())))]
        other = Book(Membership(1, 10.0, 1, None, 0.25, 2))
        for record in self.records:
            other.apply(decode_record(encode_record(record)))
        assert other.state() == self.book.state()
        self.book = other

    def hear(self, process: Process, duty: Duty) -> None:
        if process.duty is not None and duty.term < process.duty.term:
            return
        process.duty = duty
        if duty.primary:
            process.mirrors = 0
            if process.gate and duty.partner != process.gate:
                process.gate = 0
        elif duty.partner != process.mirrors:
            process.mirrors = 0  # it acknowledges nothing to another

    def standby_of(self, primary: Process) -> Process | None:
        """The living standby that the hub has named to it, and that knows it."""
        assert primary.duty is not None
        for each in self.processes:
            named = each.alive and each.incarnation == primary.duty.partner and not each.is_primary
            if named and each.duty is not None and each.duty.partner == primary.incarnation:
                return each
        return None

    def copy(self, process: Process) -> None:
        """A primary copies its state to its standby, and closes the gate."""
        if not process.is_primary or process.gate:
            return
        standby = self.standby_of(process)
        if standby is not None:
            standby.held, standby.mirrors = process.held, process.incarnation
            process.gate = standby.incarnation
            if standby.token:
                self.disks[standby.token].good = False

    def say(self, process: Process, what: int) -> None:
        """A primary tells the hub what it is, or that its standby is in sync; what is late is told again."""
        if not process.is_primary or process.duty is None:
            return
        standby = process.gate if what % 2 else 0
        if what % 2 and not process.gate:
            return
        paired = Paired(at=self.now, shard=0, primary=process.incarnation, standby=standby)
        if self.book.members.shards.pair_of(process.incarnation) == 0 and self.book.pair(paired):
            self.keep(paired)
            self.tell()

    def work(self, process: Process) -> None:
        """Somebody who takes itself for the primary hears a record, and acknowledges it if it may."""
        if not process.is_primary:
            return
        self.count += 1
        process.held |= {self.count}
        if process.gate:
            standby = self.standby_of(process)
            if (
                standby is None
                or standby.incarnation != process.gate
                or standby.mirrors != process.incarnation
            ):
                return  # nothing leaves
            standby.held = process.held
            if standby.token:
                self.disks[standby.token].held, self.disks[standby.token].good = standby.held, True
        if process.token:
            self.disks[process.token].held, self.disks[process.token].good = process.held, True
        self.acknowledged |= {self.count}

    def check(self) -> None:
        """Whoever the hub says is primary holds all that was acknowledged, and one at most does at a time."""
        primary = self.pair.primary
        if primary is None:
            return
        for process in self.processes:
            if process.incarnation == primary.incarnation and process.life == primary.life:
                assert self.acknowledged <= process.held, (self.acknowledged, process)


@pytest.mark.check
@settings(max_examples=1500, deadline=None)
@given(EVENTS)
def test_the_primary_holds_all_that_was_acknowledged(events: list[tuple[str, int, int]]) -> None:
    world = World()
    for token in (1, 2):
        world.happen("start", 0, token)
    for event in [("settle", 0, 0), ("work", 0, 0), *events]:
        world.happen(*event)
