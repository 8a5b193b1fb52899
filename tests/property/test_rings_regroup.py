"""Properties of rings that go on: for any order of deaths, reports, lost answers and second deaths, nobody
waits for ever, all make the same round next, and no result that somebody has gone on with is made again."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.store.regroup import Regroup, RegroupState
from atoll.wire.messages import Enter, Reform, Reformed, decode_untrusted, encode

WORLD = 3


@dataclass
class Worker:
    """A member as `train/group/rounds.py` has it, without tensors: each round's result is who contributed."""

    incarnation: int
    name: int
    group: int = 1
    rank: int = 0
    round: int = 0
    holds: bool = False
    fresh: bool = False
    wish: int = 0
    asked: Reform | Enter | None = None  # without an answer so far
    results: dict[int, tuple[int, ...]] = field(default_factory=dict)  # round -> the names that are in it
    held: tuple[int, ...] = ()


class Run:
    """Workers, their rings and the hub. What c10d does in a ring is here: a round's result comes to members
    one by one, and its confirmation too, but only after all hold it."""

    def __init__(self, at_least: int = 1) -> None:
        self.rings, self.at_least = 1, at_least
        self.regroup = Regroup(self.form, at_least)
        self.alive = {each: Worker(each, each - 1, rank=each - 1) for each in range(1, WORLD + 1)}
        self.members: dict[int, list[int]] = {1: list(self.alive)}
        self.mail: list[tuple[int, Reformed]] = []  # answers under way
        self.truth: dict[int, tuple[int, ...]] = {}  # round -> its result, once anybody has gone on with it
        self.came = WORLD
        self.regroup.handle_formed(1, {each: each - 1 for each in self.alive})

    def form(self, members: list[int], after: int) -> int:
        self.rings = max(self.rings, after) + 1
        self.members[self.rings] = list(members)
        return self.rings

    def whole(self, worker: Worker) -> bool:
        """Whether it is in a ring whose members all live, are in it and have not said that it broke."""
        return bool(worker.group) and all(
            member in self.alive and self.alive[member].group == worker.group and not self.alive[member].asked
            for member in self.members[worker.group]
        )

    # What happens

    def holds(self, worker: Worker) -> None:
        """It gets the round's result: all members are in this round, or past it."""
        if worker.asked or worker.fresh or not self.whole(worker) or worker.holds:
            return
        others = [self.alive[member] for member in self.members[worker.group]]
        if all(other.round >= worker.round for other in others):
            worker.holds = True
            worker.held = tuple(sorted(other.name for other in others))

    def confirms(self, worker: Worker) -> None:
        """It passes the round's confirmation: all members hold the round, or are past it. Members may have
        died since they said so."""
        if worker.asked or not worker.holds:
            return
        others = [self.alive[member] for member in self.members[worker.group] if member in self.alive]
        together = [other for other in others if other.group == worker.group]
        gone = len(together) < len(self.members[worker.group])
        if all(
            other.round > worker.round or (other.round == worker.round and other.holds) for other in together
        ):
            if gone and worker.round not in self.truth:
                return  # whether the dead said so before is not known here
            self.goes_on(worker)

    def goes_on(self, worker: Worker) -> None:
        self.truth.setdefault(worker.round, worker.held)
        assert self.truth[worker.round] == worker.held
        worker.results[worker.round] = worker.held
        worker.round, worker.holds = worker.round + 1, False

    def breaks(self, worker: Worker, admits: bool = False) -> None:
        """It notices that its ring is broken, or newcomers are to enter."""
        if worker.asked is not None or worker.group == 0:
            return
        worker.wish += 1
        worker.asked = Reform(
            incarnation=worker.incarnation,
            number=worker.wish,
            group=worker.group,
            rank=worker.rank,
            round=worker.round,
            holds=worker.holds,
            fresh=worker.fresh,
            admits=admits and not worker.holds,
        )
        self.tell(worker)

    def tell(self, worker: Worker) -> None:
        """It asks, for the first time or once more."""
        asked = worker.asked
        if isinstance(asked, Reform):
            live = {each.incarnation: each.name for each in self.alive.values()}
            self.mail += self.regroup.handle_reform(worker.incarnation, asked, live)  # type: ignore[arg-type]
        elif isinstance(asked, Enter):
            self.mail += self.regroup.handle_enter(worker.incarnation, worker.name, asked)  # type: ignore[arg-type]

    def dies(self, worker: Worker, said_goodbye: bool) -> None:
        del self.alive[worker.incarnation]
        self.mail += self.regroup.handle_left(worker.incarnation, said_goodbye=said_goodbye)  # type: ignore[arg-type]

    def comes(self) -> None:
        """A newcomer is ready to enter."""
        if not self.regroup.under_way or self.came >= WORLD + 3:
            return
        self.came += 1
        worker = Worker(self.came, self.came - 1, group=0, fresh=True, wish=1)
        worker.asked = Enter(incarnation=self.came, number=1)
        self.alive[self.came] = worker
        self.tell(worker)

    def restarts(self) -> None:
        """The hub is started again with what it has written down; who waits asks again."""
        written = msgspec.json.encode(self.regroup.state)
        self.regroup = Regroup(self.form, self.at_least)
        self.regroup.restore(msgspec.json.decode(written, type=RegroupState))
        for worker in self.alive.values():
            if worker.asked is not None:
                self.tell(worker)

    def loses_mail(self) -> None:
        """Answers are lost; who waits asks again."""
        self.mail.clear()

    def delivers(self) -> None:
        """Answers arrive; late ones, and those that come twice, too."""
        mail, self.mail = self.mail, []
        for peer, answer in mail:
            answer = decode_untrusted(encode(answer))  # type: ignore[assignment]
            worker = self.alive.get(peer)
            if worker is None or worker.asked is None:
                continue
            worker.asked = None
            self.takes(worker, answer)

    def takes(self, worker: Worker, ring: Reformed) -> None:
        if not ring.group:
            del self.alive[worker.incarnation]
            return
        assert ring.workers == [member - 1 for member in self.members[ring.group]]
        assert ring.group > worker.group
        if worker.fresh:
            assert ring.workers.index(worker.name) >= len(ring.workers) - ring.newcomers
        else:
            assert ring.workers.index(worker.name) < len(ring.workers) - ring.newcomers
            assert ring.round in (worker.round, worker.round + 1)
            if ring.round > worker.round:
                assert worker.holds
                self.goes_on(worker)
            else:
                assert worker.round not in self.truth  # nobody has gone on with what is made again
        worker.round, worker.holds = ring.round, False
        worker.group, worker.rank = ring.group, ring.workers.index(worker.name)

    def gets_state(self, worker: Worker) -> None:
        first = self.alive.get(self.members.get(worker.group, [0])[0])
        if worker.fresh and not worker.asked and first is not None and first.group == worker.group:
            worker.fresh = False
            assert first.round >= worker.round


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["holds"] * 6
            + ["confirms"] * 6
            + ["breaks"] * 3
            + ["deliver"] * 5
            + ["dies", "leaves", "comes", "admits", "again", "lost", "state", "state", "restart"]
        ),
        st.integers(0, 63),  # who: by a bit each, or by number
    ),
    min_size=8,
    max_size=80,
)


def act(run: Run, what: str, index: int) -> None:
    workers = list(run.alive.values())
    if what == "deliver":
        run.delivers()
    elif what == "lost":
        run.loses_mail()
    elif what == "comes":
        run.comes()
    elif what == "restart":
        run.restarts()
    elif what in ("holds", "confirms"):
        for place, worker in enumerate(workers):
            if index >> place & 1:
                run.holds(worker) if what == "holds" else run.confirms(worker)
    elif workers:
        worker = workers[index % len(workers)]
        if what == "state":
            run.gets_state(worker)
        elif what in ("breaks", "admits"):
            run.breaks(worker, admits=what == "admits")
        elif what in ("dies", "leaves"):
            run.dies(worker, said_goodbye=what == "leaves")
        elif worker.asked is not None:
            run.tell(worker)


@given(ACTIONS, st.integers(1, 3))
def test_rings_go_on_and_all_members_agree_on_what_counts(
    actions: list[tuple[str, int]], at_least: int
) -> None:
    run = Run(at_least)
    for what, index in actions:
        act(run, what, index)
    # From here on nobody dies: all that live find one another, in one ring, at one round.
    for _ in range(4):
        for worker in list(run.alive.values()):
            if worker.asked is not None:
                run.tell(worker)
            elif not run.whole(worker):
                run.breaks(worker)
        run.delivers()
    inside = [worker for worker in run.alive.values() if worker.group]
    assert not any(worker.asked for worker in inside)
    assert len({worker.group for worker in inside}) <= 1
    if inside:
        assert run.members[inside[0].group] == [w.incarnation for w in sorted(inside, key=lambda w: w.rank)]
        assert max(w.round for w in inside) - min(w.round for w in inside) <= 1
        assert len(inside) >= at_least or inside[0].group == 1
    for worker in run.alive.values():
        for number, result in worker.results.items():
            assert run.truth[number] == result


# -- by example ---------------------------------------------------------------------------------------------


def reform(incarnation: int, round: int, *, holds: bool = False, group: int = 1, number: int = 1) -> Reform:
    return Reform(
        incarnation=incarnation, number=number, group=group, rank=incarnation - 1, round=round, holds=holds
    )


def ring_of(world: int, at_least: int = 1) -> Regroup:
    numbers = iter(range(2, 100))
    regroup = Regroup(lambda _members, after: max(after + 1, next(numbers)), at_least)
    regroup.handle_formed(1, {each: each - 1 for each in range(1, world + 1)})
    return regroup


@pytest.mark.parametrize(
    ("first", "second", "next_round"),
    [
        ((7, False), (7, False), 7),
        ((7, True), (7, False), 7),  # nobody can have gone on
        ((7, True), (7, True), 8),  # the dead one may have
        ((7, True), (8, False), 8),
        ((8, True), (7, True), 8),  # a root of a broadcast holds its own at once
    ],
)
def test_which_round_is_made_next(first: tuple[int, bool], second: tuple[int, bool], next_round: int) -> None:
    regroup = ring_of(3)
    assert regroup.handle_left(3) == []
    assert regroup.handle_reform("a", reform(1, first[0], holds=first[1]), {}) == []
    assert regroup.awaited == [2]
    answers = regroup.handle_reform("b", reform(2, second[0], holds=second[1]), {})
    assert answers == [(peer, Reformed(group=2, workers=[0, 1], round=next_round, lost=[2])) for peer in "ab"]


def test_the_death_of_the_last_that_is_awaited_forms_the_ring() -> None:
    regroup = ring_of(3)
    regroup.handle_reform("a", reform(1, 4), {})
    regroup.handle_reform("c", reform(3, 4), {})
    answers = regroup.handle_left(2, said_goodbye=True)
    assert answers == [(peer, Reformed(group=2, workers=[0, 2], round=4, left=[1])) for peer in "ac"]


def test_who_was_left_out_is_told_that_the_ring_has_gone_on() -> None:
    regroup = ring_of(2)
    regroup.handle_left(2)
    regroup.handle_reform("a", reform(1, 4), {})
    with pytest.raises(UserError, match="ring 1 has gone on, as ring 2, without this member"):
        regroup.handle_reform("b", reform(2, 4), {})


def test_a_hub_that_was_started_again_learns_the_ring_from_its_members() -> None:
    numbers = iter(range(2, 100))
    regroup = Regroup(lambda _members, after: max(after + 1, next(numbers)))
    live = {11: 0, 13: 2}
    assert regroup.handle_reform("c", Reform(incarnation=13, number=1, group=6, rank=1, round=3), live) == []
    answers = regroup.handle_reform("a", Reform(incarnation=11, number=4, group=6, rank=0, round=3), live)
    assert answers == [(peer, Reformed(group=7, workers=[0, 2], round=3)) for peer in "ac"]


def test_newcomers_enter_where_all_members_admit_them_and_no_sooner() -> None:
    regroup = ring_of(2)
    assert regroup.handle_enter("n", 5, Enter(incarnation=9, number=1)) == []
    assert regroup.waiting == 1
    regroup.handle_reform("a", reform(1, 4), {})
    answers = regroup.handle_reform("b", reform(2, 4), {})  # a break: not the time for it
    assert [peer for peer, _ in answers] == ["a", "b"]
    for incarnation, peer in ((1, "a"), (2, "b")):
        again = Reform(incarnation=incarnation, number=2, group=2, rank=incarnation - 1, round=5, admits=True)
        answers = regroup.handle_reform(peer, again, {})
    expected = Reformed(group=3, workers=[0, 1, 5], newcomers=1, round=5)
    assert answers == [(peer, expected) for peer in "abn"]
    assert regroup.waiting == 0


def test_without_those_who_hold_the_state_there_is_no_next_ring() -> None:
    regroup = ring_of(1)
    regroup.handle_enter("n", 5, Enter(incarnation=9, number=1))
    regroup.handle_reform("a", Reform(incarnation=1, number=1, group=1, rank=0, round=5, admits=True), {})
    regroup.handle_left(1)
    fresh = Reform(incarnation=9, number=2, group=2, rank=1, round=5, fresh=True)
    ((_, answer),) = regroup.handle_reform("n", fresh, {})
    assert (answer.group, answer.reason) == (0, "those who held the training's state are gone")


def test_a_hub_that_was_started_again_knows_who_had_asked() -> None:
    regroup = ring_of(2)
    regroup.handle_enter("n", 5, Enter(incarnation=9, number=1))
    admits = [
        Reform(incarnation=each, number=1, group=1, rank=each - 1, round=4, admits=True) for each in (1, 2)
    ]
    regroup.handle_reform("a", admits[0], {})
    again = ring_of(2)
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(regroup.state), type=RegroupState), "-")
    assert (again.waiting, again.awaited) == (1, [2])
    answers = again.handle_reform("b", admits[1], {})
    expected = Reformed(group=2, workers=[0, 1, 5], newcomers=1, round=4)
    assert answers == [(peer, expected) for peer in "-b-"]


def test_who_is_left_when_the_others_have_finished_is_not_too_few() -> None:
    regroup = ring_of(2, at_least=2)
    assert regroup.handle_left(1, said_goodbye=True, finished=True) == []
    answers = regroup.handle_reform("b", reform(2, 7, holds=True), {})
    assert answers == [("b", Reformed(group=2, workers=[1], round=8, left=[0]))]


def test_nobody_enters_a_ring_of_which_a_member_has_come_to_the_end() -> None:
    regroup = ring_of(2)
    regroup.handle_left(2, said_goodbye=True, finished=True)
    assert not regroup.under_way
    with pytest.raises(UserError, match="it has ended"):
        regroup.handle_enter("n", 5, Enter(incarnation=9, number=1))
