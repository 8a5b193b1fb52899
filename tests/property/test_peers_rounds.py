"""The synchronisation round's rules, a1 to a6, one by one; and how a node ends."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from peers_world import settings_for

from atoll.core.errors import UserError
from atoll.peers import outputs
from atoll.peers.node import Node
from atoll.peers.outputs import Output, Send, SendPart
from atoll.peers.rounds import TRANSITIONS, Event, Rounds, State
from atoll.peers.settings import NodeSettings
from atoll.peers.views import first_view
from atoll.wire.messages import Message
from atoll.wire.peers import AbortRound, AnswerRound, AskRound, EndRound, NodeReport, RefuseRound, RoundId
from atoll.wire.peerviews import Life, View, ViewDecided, ViewMember


def nodes(count: int) -> list[Node]:
    view = first_view(1, [ViewMember(Life(node, 1)) for node in range(count)])
    made = [
        Node(Life(n, 1), view, settings_for(0), np.random.Generator(np.random.PCG64(n)), 0.0)
        for n in range(count)
    ]
    for each in made:
        each.poll(0.0)
    return made


def sent(done: list[Output], kind: type[Message]) -> dict[int, Message]:
    return {
        each.to: each.message for each in done if isinstance(each, Send) and isinstance(each.message, kind)
    }


def asking(node: Node) -> dict[int, Message]:
    """It has made iteration 0, and wants what comes of it, for longer than that takes: its requests."""
    node.handle_contributed(0.1, 0)
    assert not sent(node.handle_wanted(0.1, 1, 1), AskRound)
    return sent(node.poll(node.sync.rounds.until), AskRound)


# -- the table ----------------------------------------------------------------------------------------------


def test_each_state_is_come_to_and_left() -> None:
    states, events = set(get_args(State)), set(get_args(Event))
    assert {state for state, _ in TRANSITIONS} == states
    assert {event for _, event in TRANSITIONS} == events
    assert {state for state, _ in TRANSITIONS.values()} == states
    for state in states - {"idle"}:
        assert TRANSITIONS[state, "eased"][0] == TRANSITIONS[state, "reset"][0] == "idle"


@pytest.mark.parametrize("state", ["waiting", "backing", "asking"])
def test_a_timer_runs_in_each_state_that_only_time_may_end(state: State) -> None:
    assert (state, "late" if state == "asking" else "due") in TRANSITIONS


def test_an_event_without_a_line_changes_nothing() -> None:
    rounds = Rounds(1)
    assert rounds.go("refused", 5.0) == ""
    assert (rounds.state, rounds.until) == ("idle", float("inf"))


# -- the flag -----------------------------------------------------------------------------------------------


def test_the_flag_is_set_once_and_a_repeated_request_does_not_restart_its_timer() -> None:
    rounds, first, other = Rounds(2), RoundId(4, 0, 1), RoundId(3, 1, 1)
    assert rounds.take_part(first, 5.0)
    assert rounds.take_part(first, 9.0)
    assert rounds.flag_until == 5.0
    assert not rounds.take_part(other, 9.0)
    assert not rounds.clear(RoundId(3, 3, 1))
    assert rounds.flag == first
    assert rounds.clear(first)
    assert rounds.take_part(other, 9.0)


def test_a_starter_s_next_round_takes_the_place_of_the_one_before() -> None:
    rounds = Rounds(2)
    assert rounds.take_part(RoundId(4, 0, 1), 5.0)
    assert rounds.take_part(RoundId(4, 0, 2), 9.0)
    assert (rounds.flag, rounds.flag_until) == (RoundId(4, 0, 2), 9.0)


def test_a_request_that_comes_after_its_round_s_end_sets_no_flag() -> None:
    rounds = Rounds(2)
    rounds.clear(RoundId(4, 0, 1))
    assert not rounds.take_part(RoundId(4, 0, 1), 5.0)
    assert rounds.flag is None


def test_when_its_timer_runs_out_the_flag_is_false_again() -> None:
    first, _, third = nodes(3)
    request = asking(first)[2]
    third.handle_message(1.0, 0, request)  # type: ignore[arg-type]
    until = third.sync.rounds.flag_until
    third.poll(until - 0.001)
    assert third.sync.rounds.flag is not None
    third.poll(until)
    assert third.sync.rounds.flag is None


# -- rounds -------------------------------------------------------------------------------------------------


def test_no_round_is_started_before_w_has_had_its_usual_time_to_rise() -> None:
    (node, *_) = nodes(3)
    node.handle_contributed(0.1, 0)
    done = node.handle_wanted(0.1, 1, 1)
    assert node.sync.rounds.state == "waiting"
    assert not sent(done, AskRound)
    assert not sent(node.poll(node.sync.rounds.until - 0.001), AskRound)
    assert set(sent(node.poll(node.sync.rounds.until), AskRound)) == {1, 2}


def test_of_two_starters_that_meet_the_lower_wins_and_the_other_joins() -> None:
    first, second, _ = nodes(3)
    of_first, of_second = asking(first), asking(second)
    done = first.handle_message(1.0, 1, of_second[0])  # type: ignore[arg-type]
    assert set(sent(done, RefuseRound)) == {1}
    assert first.sync.rounds.state == "asking"
    done = second.handle_message(1.0, 0, of_first[1])  # type: ignore[arg-type]
    assert set(sent(done, AbortRound)) == {0, 2}
    assert set(sent(done, AnswerRound)) == {0}
    assert second.sync.rounds.state == "turned"


def test_who_takes_part_in_another_s_refuses_and_the_starter_backs_off_with_jitter() -> None:
    first, second, third = nodes(3)
    third.handle_message(1.0, 1, asking(second)[2])  # type: ignore[arg-type]
    done = third.handle_message(1.0, 0, asking(first)[2])  # type: ignore[arg-type]
    refusal = sent(done, RefuseRound)[0]
    done = first.handle_message(2.0, 2, refusal)  # type: ignore[arg-type]
    assert set(sent(done, AbortRound)) == {1, 2}
    assert first.sync.rounds.state == "backing"
    low, high = settings_for(0).backoff
    assert 2.0 + low / 2 <= first.sync.rounds.until <= 2.0 + 1.5 * high
    assert not sent(first.poll(first.sync.rounds.until - 0.001), AskRound)
    assert set(sent(first.poll(first.sync.rounds.until), AskRound)) == {1, 2}


def test_a_round_whose_answers_do_not_all_come_is_given_up_at_its_deadline() -> None:
    first, second, _ = nodes(3)
    answer = sent(second.handle_message(1.0, 0, asking(first)[1]), AnswerRound)[0]  # type: ignore[arg-type]
    first.handle_message(1.0, 1, answer)  # type: ignore[arg-type]
    done = first.poll(first.sync.rounds.until)
    assert set(sent(done, AbortRound)) == {1, 2}
    assert first.sync.rounds.state == "backing"
    assert any(isinstance(each, outputs.Note) and "[2]" in each.reason for each in done)


def test_with_all_answers_in_everyone_is_told_the_least_iteration_and_who_holds_what() -> None:
    first, second, third = nodes(3)
    for node in (second, third):
        node.handle_contributed(0.2, 0)
    requests, ends = asking(first), {}
    for node in (first, second, third):  # everyone has everything, and nobody knows that of the others
        for life in (Life(n, 1) for n in range(3) if n != node.life.node):
            done = node.handle_part(0.3, outputs.Key("iterations", 0, life))
            assert not [each for each in done if isinstance(each, outputs.Apply)]
    applied: list[int] = []
    for node in (second, third):
        name = node.life.node
        answer = sent(node.handle_message(0.7, 0, requests[name]), AnswerRound)[0]  # type: ignore[arg-type]
        done = first.handle_message(0.8, name, answer)  # type: ignore[arg-type]
        ends = sent(done, EndRound)
        applied += [each.iteration for each in done if isinstance(each, outputs.Apply)]
    assert set(ends) == {1, 2}
    assert applied == [0]
    end = ends[2]
    assert isinstance(end, EndRound)
    assert end.iteration == 1
    done = third.handle_message(0.9, 0, end)
    assert [each.iteration for each in done if isinstance(each, outputs.Apply)] == [0]
    assert third.sync.rounds.flag is None


def test_a_round_of_an_older_view_changes_nothing_and_is_answered_by_the_newest() -> None:
    first, second, _ = nodes(3)
    request = asking(first)[1]
    old = first.view
    view = View(old.founding, old.number + 1, old.members, (), old.last)
    second.handle_message(0.9, 2, ViewDecided(view=view))
    done = second.handle_message(1.0, 0, request)  # type: ignore[arg-type]
    assert second.sync.rounds.flag is None
    assert set(sent(done, ViewDecided)) == {0}


# -- the end ------------------------------------------------------------------------------------------------


def test_a_node_ends_when_all_have_all_that_it_made() -> None:
    first, second = nodes(2)
    mailbox: list[tuple[Node, Node, Output]] = []
    ended = []

    def act(node: Node, done: list[Output]) -> None:
        other = second if node is first else first
        mailbox.extend((node, other, each) for each in done)
        ended.extend(node.life.node for each in done if isinstance(each, outputs.Finished))

    for node in (first, second):
        act(node, node.handle_contributed(0.1, 0))
        act(node, node.handle_finished(0.1))
    assert not ended
    while mailbox:
        node, other, each = mailbox.pop(0)
        if isinstance(each, Send):
            act(other, other.handle_message(0.2, node.life.node, each.message))  # type: ignore[arg-type]
        elif isinstance(each, SendPart):
            act(other, other.handle_part(0.2, each.key))
        elif isinstance(each, outputs.Apply):
            act(node, node.handle_applied(0.2, each.iteration))
    for now in (0.7, 1.3):  # the others hear it with the next heartbeat
        for node in (first, second):
            act(node, node.poll(now))
        while mailbox:
            node, other, each = mailbox.pop(0)
            if isinstance(each, Send):
                act(other, other.handle_message(now, node.life.node, each.message))  # type: ignore[arg-type]
    assert sorted(ended) == [0, 1]
    assert first.deadline == second.deadline == float("inf")


def test_a_node_whose_end_nobody_hears_of_ends_after_its_linger() -> None:
    first, _ = nodes(2)
    first.handle_contributed(0.1, 0)
    first.handle_finished(0.1)
    end = 0.1 + first.settings.linger
    assert not [each for each in first.poll(end - 0.01) if isinstance(each, outputs.Finished)]
    (finished,) = [each for each in first.poll(end) if isinstance(each, outputs.Finished)]
    assert "node 1 (1) did not take all in time" in finished.reason


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"stale_max": -1}, "stale_max = -1: it is 0 (synchronous) or more"),
        ({"room": -1}, "room = -1"),
        ({"silence": (2.0, 1.0)}, "silence = (2, 1)"),
        ({"heartbeat": 0.0}, "heartbeat = 0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float], line: str) -> None:
    with pytest.raises(UserError, match=line.replace("(", r"\(").replace(")", r"\)")):
        NodeSettings(**wrong)  # type: ignore[arg-type]


def test_what_the_devices_must_not_say() -> None:
    (node,) = nodes(1)
    with pytest.raises(ValueError, match="its next is 0"):
        node.handle_contributed(0.1, 1)
    with pytest.raises(ValueError, match="cannot need global iteration 2"):
        node.handle_wanted(0.1, 1, 2)
    with pytest.raises(ValueError, match="whose W is 0"):
        node.handle_applied(0.1, 1)
    node.handle_met(0.1, 0, 0)
    with pytest.raises(ValueError, match="comes to meeting 2; its next is 1"):
        node.handle_met(0.1, 2, 0)
    with pytest.raises(ValueError, match=r"is not in view 1"):
        Node(Life(7, 1), node.view, settings_for(0), np.random.Generator(np.random.PCG64(0)), 0.0)


def test_a_report_says_who_it_is_of_and_another_s_is_not_taken() -> None:
    first, second = nodes(2)
    second.handle_contributed(0.1, 0)
    first.handle_contributed(0.1, 0)
    first.handle_part(0.2, outputs.Key("iterations", 0, Life(1, 1)))
    second.handle_part(0.2, outputs.Key("iterations", 0, Life(0, 1)))
    report = sent(second.poll(0.8), NodeReport)[0]
    for sender, count in ((2, 0), (1, 1)):
        done = first.handle_message(0.9, sender, report)  # type: ignore[arg-type]
        assert len([each for each in done if isinstance(each, outputs.Apply)]) == count
