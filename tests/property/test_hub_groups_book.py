"""Properties of what the hub writes down of groups: whatever happens, and wherever it is cut off and read
again, with a compact state or without, the hub knows and answers what it would have without the restart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.groups.formation import Formation
from atoll.groups.grouping import Grouping
from atoll.hub.book import GLOBAL, Book, no_fences
from atoll.hub.contributors import Contributors
from atoll.hub.decisions import Decisions
from atoll.hub.groups import Groups
from atoll.hub.links import LinkDesk
from atoll.hub.planner import GroupingSettings
from atoll.hub.records import (
    AnyRecord,
    Came,
    Decided,
    Died,
    Knows,
    LeaseRequest,
    Left,
    Linked,
    UsageReport,
    decode_record,
    encode_record,
)
from atoll.hub.rings import Rings
from atoll.hub.turn import Turn
from atoll.store.leases import Leases
from atoll.store.members import Membership
from atoll.wire.messages import (
    Cut,
    Fenced,
    Grouped,
    Heartbeat,
    InGroup,
    JoinGroup,
    Lease,
    Leased,
    LinkPlace,
    Reform,
    Used,
)

KINDS = (
    *("asks",) * 6,
    *("arrives",) * 4,
    *("decide",) * 3,
    *("lease",) * 4,
    *("comes", "left", "died", "time", "fenced", "news", "pace", "reform", "place", "linked"),
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 2**16)), min_size=10, max_size=60
)
LENGTH = 200
CUTS = (  # one names the asker or not, or more samples than can be cut
    *(None, Cut({0: 2, 1: 0, 2: 1, 3: 3}, 1), Cut({0: 2, 1: 1, 2: 1, 3: 3}, 1)) * 3,
    *(Cut({0: 2, 1: 1}), Cut(dict.fromkeys(range(4), 2**31 - 1))),
)


class Hub:
    """A book, its rings and its groups; `answers` is all that was answered, `records` all that was written.
    What the planner thread would decide, the test does."""

    def __init__(self, consistency: Any) -> None:
        self.now, self.number, self.consistency = 0.0, 0, consistency
        self.answers: list[Any] = []
        self.turn = Turn(lambda: self.now)
        self.given: list[tuple[int, int]] = []  # positions, of epoch 0
        members, settings = Membership(4, 10.0, 1), GroupingSettings(consistency=consistency, patience=20.0)
        self.formation = Formation(4, members.roll.new_incarnation, lockstep=consistency == "bsp")
        desk = LinkDesk(5.0, self.turn.keep)
        self.contributors = Contributors(members, self.formation, desk)
        self.rings = Rings(members, Decisions(), self.turn, self.contributors)
        leases, fences = Leases(), no_fences(members)
        self.groups = Groups(
            settings, members, leases, fences, self.formation, desk, self.rings, Decisions(), self.turn
        )
        self.book = Book(members, self.rings, self.groups, leases, fences)

    @property
    def records(self) -> list[AnyRecord]:
        return self.turn.records

    def restarted(self, compact: bool) -> Hub:
        """Another one, that has read what this one wrote."""
        other = Hub(self.consistency)
        other.records[:] = (
            [decode_record(encode_record(Knows(at=self.now, state=self.book.state())))]
            if compact
            else list(self.records)
        )
        for raw in map(encode_record, list(other.records)):
            record = decode_record(raw)
            other.now = record.at
            other.book.apply(record)
        other.now, other.number = self.now, self.number
        other.turn.answers.clear()
        # What heartbeats tell is not written down.
        other.groups._placement._progress = dict(self.groups._placement._progress)
        other.answers = list(self.answers)  # what is gone through again answers nobody
        return other

    # -- what happens -------------------------------------------------------------------------------------

    def happen(self, kind: str, who: int, what: int) -> None:
        self.now += 0.5
        self.number += 1
        self.act(kind, who, what)
        self.answers += [unnumbered(message) for _, message in self.turn.answers]
        self.turn.answers.clear()

    def act(self, kind: str, who: int, what: int) -> None:
        live = self.book.members.workers.live()
        incarnation = live.get(who, 0)
        if kind == "comes":
            self.comes(who)
        elif kind in ("left", "died") and incarnation:
            record = (Left if kind == "left" else Died)(at=self.now, incarnation=incarnation)
            gone = self.book.leave(record) if isinstance(record, Left) else self.book.die(record)
            self.records.append(record)
            self.answers.append(gone)
        elif kind == "asks":
            self.asks(who, incarnation, what)
        elif kind == "arrives":
            number = (self.formation.contributors_of(who) or [(9, 9)])[-1][0]
            self.groups.handle(b"x", InGroup(incarnation=incarnation, contributor=number))
        elif kind == "decide":
            groups: dict[int, list[int]] = {}
            for rank in live:
                what, place = divmod(what, 3)
                groups.setdefault(place, []).append(rank)
            together = [list(group) for group in Grouping(groups.values())]
            self.groups.decide(Decided(at=self.now, groups=together, reason="so"))
        elif kind == "lease":
            self.lease(who, incarnation, what)
        elif kind in ("fenced", "news"):
            self.told(kind == "news", who, what)
        elif kind == "pace" and incarnation:
            beat = Heartbeat(run="r", incarnation=incarnation, iteration=what % 100, pace=0.1 + what % 7)
            self.groups.beat(who, beat)
        elif kind == "place" and incarnation:
            place = LinkPlace(incarnation=incarnation, host=f"host {what % 3}", port=1, token=b"")
            self.groups.handle_links(b"x", place)
        elif kind == "linked" and incarnation:
            self.link(what)
        elif kind == "time":
            self.now += what % 8
            self.groups.pass_time(self.now)
        elif kind == "reform":
            wish = Reform(
                incarnation=incarnation, number=self.number, group=1 + what % 3, rank=who, round=3, holds=True
            )
            self.rings.handle(b"x", wish)

    def link(self, what: int) -> None:
        """A link was measured. Which one is under way is not written down."""
        hosts = ("host 0", f"host {what % 3}")
        linked = Linked(at=self.now, hosts=hosts, bandwidth=1.0 + what, latency=0.5)
        self.records.append(linked)
        self.groups.replay(linked)

    def comes(self, who: int) -> None:
        self.number += 1
        came = Came(
            at=self.now, role="worker", wish=who, shard=0, address="", site="", token=f"{self.number}"
        )
        admission = self.book.come(came)
        if not admission.refused:
            self.records.append(came)
        self.answers.append((admission.worker, admission.incarnation, admission.refused))

    def asks(self, who: int, incarnation: int, what: int) -> None:
        grouping = self.contributors.grouping_of(incarnation)
        held = [Used(sampler=0, epoch=0, start=start, stop=stop) for start, stop in self.given[-2:]]
        wish = JoinGroup(
            incarnation=incarnation,
            number=self.number,
            grouping=grouping - (what % 5 == 0 < grouping),
            iteration=what % 4,
            held=held if what % 3 == 0 else [],
        )
        self.groups.handle(b"x", wish)
        if what % 7 == 0:
            self.groups.handle(b"x", wish)

    def lease(self, who: int, incarnation: int, what: int) -> None:
        if not incarnation:
            return
        keys = self.formation.contributors_of(who)
        in_group = keys[-1][0] >= 4
        lease = Lease(
            incarnation=incarnation,
            sampler=0,
            epoch=what % 2,
            length=LENGTH,
            count=3,
            number=self.number,
            contributor=keys[-1][0] if in_group else 0,
            block=1 + what % 4 if in_group else 0,
            cut=CUTS[what % len(CUTS)],
        )
        asked, before = LeaseRequest(at=self.now, rank=who, lease=lease), self.book.lease_changes()
        try:
            leased, _ = self.book.lease(asked)
            self.answers.append(unnumbered(leased))
            if leased.epoch == 0 and leased.start < leased.stop:
                self.given.append((leased.start, leased.stop))
        except UserError as error:
            self.answers.append(str(error))
            assert self.book.lease_changes() == before  # a refusal is not written down
        if recorded := self.book.recorded(asked, before):
            self.records.append(recorded)

    def told(self, news: bool, who: int, what: int) -> None:
        keys = self.formation.contributors_of(who)[:1] if news else sorted(self.book.fences[GLOBAL])
        if not keys:
            return
        worker, incarnation = keys[what % len(keys)]
        used = [Used(sampler=0, epoch=0, start=start, stop=stop) for start, stop in self.given[: what % 4]]
        fenced = Fenced(worker=worker, incarnation=incarnation, iteration=1, used=used, news=news)
        told = UsageReport(at=self.now, log=GLOBAL, fenced=fenced)
        self.answers.append(self.book.told(told))
        self.records.append(told)


def unnumbered(message: Any) -> Any:
    return msgspec.structs.replace(message, number=0) if hasattr(message, "number") else message


def begun(consistency: Any) -> Hub:
    hub = Hub(consistency)
    for rank in range(4):
        hub.comes(rank)
        incarnation = hub.book.members.workers.live()[rank]
        hub.groups.beat(rank, Heartbeat(run="r", incarnation=incarnation, iteration=4, pace=0.1))
    return hub


@pytest.mark.check
@example(  # the reason of a decision is told when its groups form, after the restart too
    before=[("asks", 0, 0)] * 9 + [("decide", 0, 3)],
    after=[("asks", 0, 0)] * 7 + [("asks", 2, 1), ("asks", 3, 1), ("left", 0, 0)],
    compact=True,
    consistency="asp",
)
@settings(max_examples=250)
@given(EVENTS, EVENTS, st.booleans(), st.sampled_from(["asp", "bsp"]))
def test_a_hub_with_groups_that_read_its_records_answers_as_the_one_that_wrote_them(
    before: list[Any], after: list[Any], compact: bool, consistency: str
) -> None:
    one = begun(consistency)
    for each in before:
        one.happen(*each)
    other = one.restarted(compact)
    assert other.book.state() == one.book.state()
    other.given = list(one.given)
    for each in after:
        one.happen(*each)
        other.happen(*each)
    assert nobodys(other.answers) == nobodys(one.answers)
    assert other.book.state() == one.book.state()
    assert other.restarted(False).book.state() == one.book.state()
    event(f"formed: {any(isinstance(each, Grouped) and each.group for each in one.answers)}")
    event(f"blocks: {any(isinstance(each, Leased) and each.length for each in one.answers)}")


def nobodys(answers: list[Any]) -> list[Any]:
    """But for what is told of groups: who waited before a restart is nobody until it asks again."""
    return [each for each in answers if not isinstance(each, Grouped)]


def asked(hub: Hub, who: int, count: int, block: int = 0) -> Leased:
    """The answer to a worker that asks for samples, and is ready to wait for those that others hold."""
    keys = hub.formation.contributors_of(who)
    lease = Lease(
        incarnation=hub.book.members.workers.live()[who],
        sampler=0,
        epoch=0,
        length=LENGTH,
        count=count,
        contributor=keys[-1][0] if block else 0,
        block=block,
        patient=True,
    )
    return hub.groups.lease(who, lease)


def test_a_worker_that_a_new_group_waits_for_does_not_wait_for_samples_that_the_group_holds() -> None:
    """Or it would wait as long as it is ready to, and the group that it holds up would be given up."""
    hub = begun("asp")
    assert asked(hub, 0, LENGTH).stop == LENGTH
    assert not asked(hub, 1, 2).over  # whoever holds them may die
    hub.groups.decide(Decided(at=hub.now, groups=[[0, 1], [2, 3]], reason="so"))
    hub.asks(0, hub.book.members.workers.live()[0], 1)
    assert asked(hub, 1, 2).over
    hub.asks(1, hub.book.members.workers.live()[1], 1)
    assert not asked(hub, 1, 2).over  # it is on its way, and nobody waits for it


def test_a_group_that_is_waited_for_does_not_wait_for_samples_that_others_hold() -> None:
    hub = begun("asp")
    hub.groups.decide(Decided(at=hub.now, groups=[[0, 1]], reason="so"))
    for who in (0, 1):
        hub.asks(who, hub.book.members.workers.live()[who], 1)
    for who in (0, 1):
        number = hub.formation.contributors_of(who)[-1][0]
        incarnation = hub.book.members.workers.live()[who]
        hub.groups.handle(b"x", InGroup(incarnation=incarnation, contributor=number))
    assert asked(hub, 2, LENGTH).stop == LENGTH
    assert not asked(hub, 0, 2, block=1).over
    hub.groups.decide(Decided(at=hub.now, groups=[[0, 1, 2]], reason="so"))
    found = asked(hub, 0, 2, block=1)
    assert found.over
    assert asked(hub, 1, 2, block=1) == found  # and all its members hear the same
