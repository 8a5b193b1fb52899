"""Properties of views over random schedules: whoever crashes, comes back, is cut off or wrongly suspected,
one view of each number is decided, each iteration has one content everywhere, and things go on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from views_world import FAULTS_END, Fault, World

from atoll.peers.change import Change
from atoll.peers.views import (
    Fetch,
    Joiner,
    Transition,
    ViewChangeSettings,
    Wish,
    describe,
    first_view,
    next_view,
)
from atoll.peers.witness import Witness
from atoll.wire.peers import WITNESS
from atoll.wire.peerviews import (
    Accept,
    Accepted,
    Ballot,
    Held,
    Life,
    Outbid,
    Prepare,
    Promised,
    Report,
    View,
    ViewDecided,
    ViewMember,
    ViewMessage,
)

KINDS = ("crash", "restart", "restart", "part", "part", "heal", "suspect", "witness dies", "witness restarts")
FAULTS = st.lists(
    st.builds(
        Fault,
        st.floats(0.3, FAULTS_END - 0.1),
        st.sampled_from(KINDS),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    max_size=8,
)


def check(nodes: int, faults: list[Fault], loss: float, seed: int) -> World:
    """What must hold at each step is checked by the world. A view that loses its majority while it is being
    decided is not one that can go on, whatever was there before."""
    world = World(nodes, faults, loss, seed)
    world.run()
    if world.has_majority() and not world.goes_on():
        views = {node: peer.view.number if peer.view else 0 for node, peer in world.peers.items() if peer.up}
        assert not world.has_majority(), f"stuck at {len(world.contributors)} iterations, views {views}"
    return world


@pytest.mark.check
@settings(max_examples=20)
@given(st.integers(2, 5), FAULTS, st.sampled_from((0.0, 0.05, 0.3)), st.integers(0, 2**32 - 1))
def test_one_view_of_each_number_one_content_of_each_iteration_and_it_goes_on(
    nodes: int, faults: list[Fault], loss: float, seed: int
) -> None:
    check(nodes, faults, loss, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=3000)
@given(st.integers(1, 7), FAULTS, st.sampled_from((0.0, 0.05, 0.3)), st.integers(0, 2**32 - 1))
def test_many_more_schedules(nodes: int, faults: list[Fault], loss: float, seed: int) -> None:
    check(nodes, faults, loss, seed)


def test_two_of_five_crash_and_the_others_go_on() -> None:
    world = check(5, [Fault(1.0, "crash", 0), Fault(1.05, "crash", 3)], 0.0, 1)
    view = world.views[max(world.views)]
    assert [member.life.node for member in view.members] == [1, 2, 4]
    assert len(world.contributors) > 50


def test_a_partition_of_two_and_three_heals_and_all_five_are_members_again() -> None:
    world = check(5, [Fault(1.0, "part", 0), Fault(1.0, "part", 3), Fault(6.0, "heal", 0)], 0.0, 1)
    view = world.views[max(world.views)]
    assert [member.life for member in view.members] == [(0, 1), (1, 0), (2, 0), (3, 1), (4, 0)]


def test_of_two_one_goes_on_with_the_witness_and_none_without() -> None:
    alone = check(2, [Fault(1.0, "crash", 1)], 0.0, 1)
    assert [member.life.node for member in alone.views[max(alone.views)].members] == [0]
    stuck = World(2, [Fault(0.5, "witness dies", 0), Fault(1.0, "crash", 1)], 0.0, 1)
    stuck.run()
    assert not stuck.has_majority()
    assert not stuck.goes_on()
    assert list(stuck.views) == [1]


# -- two halves ------------------------------------------------------------------------------------------

MOVES = st.lists(
    st.tuples(st.sampled_from(("deliver", "drop", "again", "late")), st.integers(0, 9)), max_size=80
)


def report_of(node: int, view: View) -> Report:
    """One who holds 5 of everybody's."""
    held = tuple(Held(member.life, 5) for member in view.members)
    return Report(Life(node, 0), view.number, 5, 5, 0, held)


@settings(max_examples=100)
@given(MOVES, st.integers(0, 2**32 - 1), st.booleans())
def test_two_halves_and_a_witness_never_decide_two_views(
    moves: list[tuple[str, int]], seed: int, restarts: bool
) -> None:
    """Each wants the other out, and what they say comes in any order, late, twice or never. A witness that is
    made anew of what it kept is the same one."""
    view = first_view(1, [ViewMember(Life(node, 0)) for node in range(2)])
    rng, now, decided = np.random.default_rng(seed), 0.0, list[View]()
    changes = {node: Change(node, view, ViewChangeSettings(0.1, 0.05), rng) for node in range(2)}
    witness, mail = Witness(), list[tuple[int, int, ViewMessage]]()

    def take(node: int, step: Transition) -> None:
        mail.extend((node, to, message) for to, message in step.sends)
        if step.decided is not None and step.decided not in decided:
            decided.append(step.decided)

    for node, change in changes.items():
        take(node, change.handle_wish(now, Wish({1 - node: "silent"}), report_of(node, view)))
    for move, which in moves:
        if move == "late" or not mail:
            now += 0.07
            for node, change in changes.items():
                take(node, change.poll(now, report_of(node, view)))
            continue
        at = which % len(mail)
        sender, to, message = mail[at] if move == "again" else mail.pop(at)
        if move == "drop":
            continue
        if to == WITNESS:
            assert isinstance(message, (Prepare, Accept))
            witness = Witness(witness.state) if restarts else witness
            answer = witness.handle(sender, message)
            if answer is not None:
                mail.append((WITNESS, sender, answer))
        else:
            take(to, changes[to].handle_message(now, sender, message, report_of(to, view)))
    assert len(decided) <= 1


def test_a_witness_answers_members_of_views_of_two_and_remembers_one_vote() -> None:
    two = first_view(3, [ViewMember(Life(node, 0)) for node in (4, 7)])
    three = first_view(3, [ViewMember(Life(node, 0)) for node in (4, 7, 8)])
    older = first_view(2, two.members)
    later = View(3, 9, two.members)
    witness = Witness()
    assert witness.handle(4, Prepare(view=three, ballot=Ballot(1, 4))) is None
    assert witness.handle(8, Prepare(view=two, ballot=Ballot(1, 8))) is None
    assert witness.state is None
    assert isinstance(witness.handle(4, Prepare(view=two, ballot=Ballot(1, 4))), Promised)
    alone = View(3, 2, (ViewMember(Life(4, 0)),), (ViewMember(Life(7, 0), 0, 5),))
    assert isinstance(witness.handle(4, Accept(view=two, ballot=Ballot(1, 4), next=alone)), Accepted)
    low = witness.handle(7, Prepare(view=two, ballot=Ballot(0, 7)))
    assert isinstance(low, Outbid)
    assert low.ballot == Ballot(1, 4)
    promised = witness.handle(7, Prepare(view=two, ballot=Ballot(2, 7)))
    assert isinstance(promised, Promised)
    assert promised.accepted == (Ballot(1, 4), alone)
    assert isinstance(witness.handle(4, Prepare(view=later, ballot=Ballot(1, 4))), Promised)
    told = witness.handle(7, Prepare(view=two, ballot=Ballot(3, 7)))
    assert isinstance(told, ViewDecided)
    assert told.view == later
    assert witness.handle(7, Prepare(view=older, ballot=Ballot(9, 7))) is None


# -- what the next view begins with ----------------------------------------------------------------------


def test_the_next_view_begins_with_the_most_that_is_reported_of_each_stream() -> None:
    a, b, c = (Life(node, 0) for node in range(3))
    view = first_view(1, [ViewMember(life) for life in (a, b, c)])
    reports = [
        Report(a, 1, 9, 6, 2, (Held(a, 9, 3), Held(b, 7, 3), Held(c, 6, 4))),
        Report(b, 1, 8, 5, 3, (Held(a, 8, 4), Held(b, 8, 3), Held(c, 7, 3))),
    ]
    wish = Wish({2: "silent"}, [Joiner(5, "new", "host:1"), Joiner(0, "again", "host:2")])
    following = next_view(view, wish, reports, ahead=3)
    assert following.removed == (ViewMember(a, 0, 9, 4), ViewMember(c, 0, 7, 4))
    assert following.members == (
        ViewMember(Life(0, 1), 12, 12, 3, 6, "host:2", "again"),
        ViewMember(b, 0, 8, 3),
        ViewMember(Life(5, 0), 12, 12, 3, 6, "host:1", "new"),
    )
    assert following.last == {0: 1, 1: 0, 2: 0, 5: 0}
    words = (
        "node 0 is out: its iterations below 9 count; node 2 is out (silent): its iterations below 7 count"
    )
    assert describe(view, following, wish.remove).startswith(f"view 2, nodes 0, 1, 5: {words}; node 0 is in")


def test_a_removed_one_is_forgotten_when_all_who_stay_have_applied_what_counts_of_it() -> None:
    a, b, gone = (Life(node, 0) for node in range(3))
    view = View(
        1,
        2,
        (ViewMember(a, 0, 7, 2), ViewMember(b, 0, 7, 2)),
        (ViewMember(gone, 0, 7, 2),),
        {0: 0, 1: 0, 2: 0},
    )
    held = (Held(a, 9, 2), Held(b, 9, 2), Held(gone, 7, 2))

    def left(*reports: Report) -> int:
        return len(next_view(view, Wish(), reports, ahead=1).removed)

    assert left(Report(a, 2, 9, 7, 2, held), Report(b, 2, 9, 7, 2, held)) == 0
    assert left(Report(a, 2, 9, 7, 2, held), Report(b, 2, 9, 6, 2, held)) == 1
    assert left(Report(a, 2, 9, 7, 1, held), Report(b, 2, 9, 7, 2, held)) == 1
    assert left(Report(a, 2, 9, 7, 2, held)) == 1


def test_nobody_votes_before_it_holds_what_its_view_began_with() -> None:
    view = first_view(1, [ViewMember(Life(node, 0), 0, 4) for node in range(3)])
    change = Change(0, view, ViewChangeSettings(0.1, 0.05), np.random.default_rng(1))
    lacking = report_of(0, view)
    short = Report(lacking.life, 1, 5, 3, 0, (*lacking.held[:2], Held(Life(2, 0), 3)))
    asked = Prepare(view=view, ballot=Ballot(1, 1))
    step = change.handle_message(0.0, 1, asked, short)
    assert step.sends == ()
    assert not change.promised
    assert not change.ready
    assert [fetch.held for fetch in change.wanted] == [Held(Life(2, 0), 4)]
    step = change.handle_message(0.1, 1, asked, lacking)
    assert [(to, type(message)) for to, message in step.sends] == [(1, Promised)]
    assert change.promised
    assert change.ready
    assert not change.wanted


def test_a_newcomer_without_its_state_has_no_vote_though_nothing_else_is_lacking() -> None:
    """All that was contributed has been applied, so it lacks nothing but the state; it and the witness would
    be a majority."""
    view = View(1, 4, (ViewMember(Life(0, 0), 0, 5), ViewMember(Life(1, 1), 8, 8, 0, 5, token="new")))
    change = Change(1, view, ViewChangeSettings(0.1, 0.05), np.random.default_rng(1))
    change.has_state = False
    report = Report(Life(1, 1), 4, 8, 5, 0, (Held(Life(0, 0), 5), Held(Life(1, 1), 8)))
    assert change.handle_wish(0.0, Wish({0: "silent"}), report).sends == ()
    assert change.poll(1.0, report).sends == ()
    assert change.handle_message(1.0, 0, Prepare(view=view, ballot=Ballot(1, 0)), report).sends == ()
    change.has_state = True
    sends = change.poll(2.0, report).sends
    assert [(to, type(message)) for to, message in sends] == [(WITNESS, Prepare), (0, Prepare)]


def test_nobody_accepts_before_it_holds_what_the_next_view_begins_with() -> None:
    view = first_view(1, [ViewMember(Life(node, 0)) for node in range(3)])
    change = Change(0, view, ViewChangeSettings(0.1, 0.05), np.random.default_rng(1))
    following = View(1, 2, view.members[:2], (ViewMember(Life(2, 0), 0, 6),), view.last)
    asked = Accept(view=view, ballot=Ballot(1, 1), next=following)
    report = report_of(0, view)
    assert change.handle_message(0.0, 1, asked, report).sends == ()
    assert change.wanted == (Fetch(Held(Life(2, 0), 6), 1),)
    whole = Report(report.life, 1, 5, 5, 0, (*report.held[:2], Held(Life(2, 0), 6)))
    step = change.poll(0.1, whole)
    assert [(to, type(message)) for to, message in step.sends] == [(1, Accepted)]
