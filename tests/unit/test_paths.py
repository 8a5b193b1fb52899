"""Addresses: what goes to one that is not validated, how one is validated, and when data moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ltp.paths import (
    AMPLIFICATION,
    CHALLENGE_BYTES,
    FORGET_SECONDS,
    HOLD_SECONDS,
    LEAST_RESEND_SECONDS,
    MOST_CHALLENGES,
    MOST_PATHS,
    UNLIMITED,
    Moved,
    Paths,
)
from atoll.wire.datagrams import HEADER, SEAL_BYTES
from atoll.wire.linkcontrol import Challenge, encode

A, B, C = ("10.0.0.1", 4000), ("10.0.0.2", 4001), ("10.0.0.3", 4002)


def server() -> Paths:
    return Paths(0.0, np.random.default_rng(0))


def validate(paths: Paths, now: float, path: tuple[str, int], number: int) -> None:
    """The address sends something that is ahead, and answers the challenge that comes."""
    paths.handle_received(now, path, 1400, number)
    tokens = dict(paths.poll_challenges(now))
    assert paths.handle_answer(now, path, tokens[path])


def test_the_known_address_is_believed() -> None:
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    assert paths.active == A
    assert paths.allowance(A) == UNLIMITED
    assert paths.poll_moves(0.0) is None
    assert paths.poll_challenges(0.0) == []
    assert paths.poll_deadline() == math.inf
    assert paths.allowance(B) == 0


def test_the_first_address_gets_three_times_its_bytes_until_it_has_answered() -> None:
    paths = server()
    assert paths.active is None
    paths.handle_received(1.0, A, 1400, 0)
    assert paths.poll_deadline() <= 1.0
    assert paths.poll_moves(1.0) == Moved(A, None, "the first address that a sealed datagram came from")
    assert paths.poll_moves(1.0) is None
    assert (paths.active, paths.allowance(A)) == (A, 4200)
    ((path, token),) = paths.poll_challenges(1.0)
    assert path == A
    assert len(token) == 8
    paths.handle_sent(A, CHALLENGE_BYTES)
    paths.handle_sent(A, 4000)
    assert paths.allowance(A) == 4200 - 4000 - CHALLENGE_BYTES
    paths.handle_received(1.1, A, 100, 1)
    assert paths.allowance(A) == 4500 - 4000 - CHALLENGE_BYTES
    assert paths.handle_answer(1.2, A, token)
    assert paths.allowance(A) == UNLIMITED
    assert paths.poll_deadline() == math.inf


def test_a_challenge_is_no_longer_than_is_counted_for_it() -> None:
    longest = encode(Challenge(sequence=2**53 - 1, token=bytes(8)))
    assert HEADER.itemsize + len(longest) + SEAL_BYTES <= CHALLENGE_BYTES


def test_a_wrong_token_and_one_from_elsewhere_validate_nothing() -> None:
    paths = server()
    paths.handle_received(0.0, A, 1400, 0)
    ((_, token),) = paths.poll_challenges(0.0)
    assert not paths.handle_answer(0.1, A, bytes(8))
    assert not paths.handle_answer(0.1, A, b"")
    assert not paths.handle_answer(0.1, B, token)
    assert not paths.validated(A)
    assert paths.handle_answer(0.1, A, token)
    assert not paths.handle_answer(0.2, A, token)  # it is used up
    assert not paths.handle_answer(0.2, A, b"")


def test_a_challenge_goes_again_until_it_is_given_up() -> None:
    paths = server()
    paths.round_trip = 0.1
    paths.handle_received(0.0, A, 10_000, 0)
    sent, now = [], 0.0
    while (now := max(paths.poll_deadline(), now)) < math.inf:
        paths.poll_moves(now)
        for _, token in paths.poll_challenges(now):
            sent.append((now, token))
            paths.handle_sent(A, CHALLENGE_BYTES)
    gaps = np.diff([at for at, _ in sent])
    assert gaps.round(6).tolist() == [0.3, *[0.5] * (MOST_CHALLENGES - 2)]
    assert len({token for _, token in sent}) == 1  # a late answer counts
    assert len(sent) == MOST_CHALLENGES
    assert (paths.active, len(paths)) == (A, 1)  # there is no other
    paths.handle_received(30.0, A, 1000, 1)
    ((_, token),) = paths.poll_challenges(30.0)
    assert token != sent[0][1]


def test_a_short_round_trip_does_not_send_challenges_all_the_time() -> None:
    paths = server()
    paths.round_trip = 1e-4
    paths.handle_received(0.0, A, 1400, 0)
    paths.poll_moves(0.0)
    paths.poll_challenges(0.0)
    assert paths.poll_deadline() == LEAST_RESEND_SECONDS


def test_a_long_round_trip_is_waited_for_before_a_challenge_goes_again() -> None:
    paths = server()
    paths.round_trip = 0.6
    paths.handle_received(0.0, A, 10_000, 0)
    paths.poll_moves(0.0)
    paths.poll_challenges(0.0)
    assert paths.poll_deadline() == pytest.approx(1.8)


def test_five_lost_challenges_delay_a_session_by_little() -> None:
    """As under a flood of datagrams, which fills the room where they wait to be read."""
    paths, now = server(), 0.0
    paths.handle_received(0.0, A, 10_000, 0)
    paths.poll_moves(0.0)
    for _ in range(6):
        now = max(now, paths.poll_deadline())
        ((_, token),) = paths.poll_challenges(now)
    assert paths.handle_answer(now, A, token)
    assert now < 2.5


def test_an_address_that_does_not_answer_is_forgotten() -> None:
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    paths.handle_received(0.0, B, 100_000, 7)
    now = 0.0
    while (now := max(paths.poll_deadline(), now)) < math.inf:
        paths.poll_challenges(now)
        assert paths.poll_moves(now) is None
    assert (len(paths), paths.active) == (1, A)


def test_challenges_obey_the_allowance() -> None:
    paths = server()
    paths.handle_received(0.0, A, 50, 0)
    assert paths.allowance(A) == 150
    assert len(paths.poll_challenges(0.0)) == 1
    paths.handle_sent(A, CHALLENGE_BYTES)
    paths.poll_moves(0.0)
    assert paths.poll_deadline() == math.inf  # until more comes from there
    assert paths.poll_challenges(100.0) == []
    paths.handle_received(100.0, A, 50, 1)
    assert len(paths.poll_challenges(100.0)) == 1


def test_data_moves_to_an_address_that_has_answered() -> None:
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    paths.handle_received(1.0, A, 1400, 10)
    paths.handle_received(2.0, B, 1400, 11)
    assert paths.poll_moves(2.0) is None
    assert paths.active == A
    ((path, token),) = paths.poll_challenges(2.0)
    assert path == B
    assert paths.handle_answer(2.1, B, token)
    moved = paths.poll_moves(2.1)
    assert moved is not None
    assert (moved.path, moved.before) == (B, A)
    assert "answered" in moved.reason
    assert paths.active == B


def test_late_ones_from_the_old_address_move_nothing() -> None:
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    validate(paths, 1.0, B, 100)
    assert paths.poll_moves(1.0)
    paths.handle_received(5.0, A, 1400, 99)
    assert paths.poll_moves(5.0) is None
    paths.handle_received(5.0, C, 1400, 98)  # nor do they begin anything
    assert paths.poll_challenges(5.0) == []
    assert len(paths) == 2


def test_a_copy_that_ran_ahead_does_not_move_data_away() -> None:
    """Somebody on the path sends copies on from an address of their own, and does not answer."""
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    for number in range(50):
        now = number / 10
        paths.handle_received(now, B if number % 2 else A, 1400, number)
        paths.poll_challenges(now)
        assert paths.poll_moves(now) is None
    assert paths.active == A


def test_data_moves_back_at_once_to_an_address_that_is_known() -> None:
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    validate(paths, 1.0, B, 1)
    assert paths.poll_moves(1.0)
    paths.handle_received(1.0 + HOLD_SECONDS, A, 1400, 2)
    moved = paths.poll_moves(1.0 + HOLD_SECONDS)
    assert moved is not None
    assert (moved.path, moved.before) == (A, B)


def test_flapping_addresses_move_data_once_a_second_at_most() -> None:
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    validate(paths, 0.0, B, 0)
    moves = []
    for number in range(1, 1001):
        now = number / 100
        paths.handle_received(now, A if number % 2 else B, 1400, number)
        if paths.poll_moves(now):
            moves.append(now)
    assert 2 <= len(moves) <= 11
    assert min(np.diff(moves)) >= HOLD_SECONDS
    assert len(paths) == 2


def test_a_move_that_was_held_is_made_when_it_may() -> None:
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    validate(paths, 1.0, B, 1)
    paths.poll_moves(1.0)
    paths.handle_received(1.2, A, 1400, 2)
    assert paths.poll_moves(1.2) is None
    assert paths.poll_deadline() == 1.0 + HOLD_SECONDS
    assert paths.poll_moves(1.0 + HOLD_SECONDS)
    assert paths.active == A


def test_an_address_that_was_long_silent_is_asked_again() -> None:
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    validate(paths, 1.0, B, 1)
    paths.poll_moves(1.0)
    paths.handle_received(1.5, A, 10_000, 0)
    later = 2.0 + FORGET_SECONDS
    paths.handle_received(later, A, 1400, 2)
    assert not paths.validated(A)
    assert paths.poll_moves(later) is None
    assert [path for path, _ in paths.poll_challenges(later)] == [A]
    assert paths.allowance(A) == AMPLIFICATION * 1400
    paths.handle_received(later + 1000, B, 1400, 3)  # the one in use is believed however long it was silent
    assert paths.validated(B)


def test_the_table_is_bounded_and_keeps_who_is_in_use() -> None:
    paths = Paths(0.0, np.random.default_rng(0), known=A)
    validate(paths, 1.0, B, 1)
    for port in range(10_000):
        paths.handle_received(1.0 + port / 1e5, ("10.9.9.9", port), 1400, 2 + port)
        assert len(paths) <= MOST_PATHS
    assert (paths.active, paths.validated(A), paths.validated(B)) == (A, True, True)


def test_the_first_address_is_kept_while_nobody_has_answered() -> None:
    paths = server()
    for port in range(20):
        paths.handle_received(port / 10, ("10.9.9.9", port), 1400, port)
    assert paths.active == ("10.9.9.9", 0)
    assert paths.allowance(("10.9.9.9", 0)) == 4200
    assert len(paths) == MOST_PATHS


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["receive", "late", "answer", "forge", "send", "wait"]),
        st.integers(0, 6),
        st.integers(1, 3000),
    ),
    max_size=80,
)


@given(EVENTS, st.booleans())
def test_whatever_happens_the_rules_hold(events: list[tuple[str, int, int]], told: bool) -> None:
    """Never more than three times its bytes to an address since it came into the table; data moves only to
    one that answered; the table is bounded; a deadline that has come is over after the polls."""
    paths = Paths(0.0, np.random.default_rng(1), known=0 if told else None)
    now, number = 0.0, 0
    tokens: dict[object, bytes] = {}
    answered = {0} if told else set[int]()
    received: dict[int, int] = {}
    sent: dict[int, int] = {}
    for kind, path, size in events:
        if kind == "receive":
            number += 1
            paths.handle_received(now, path, size, number)
            received[path] = received.get(path, 0) + size
        elif kind == "late":
            paths.handle_received(now, path, size, max(number - 1, 0))
            received[path] = received.get(path, 0) + size
        elif kind == "answer" and path in tokens and paths.handle_answer(now, path, tokens[path]):
            answered.add(path)
        elif kind == "forge":
            assert not paths.handle_answer(now, path, bytes([size % 256]) * 8)
        elif kind == "send":
            size = min(paths.allowance(path), size)
            paths.handle_sent(path, size)
            if not paths.validated(path):
                sent[path] = sent.get(path, 0) + size
        elif kind == "wait":
            now += size / 1000
        for challenged, token in paths.poll_challenges(now):
            tokens[challenged] = token
            if not paths.validated(challenged):
                paths.handle_sent(challenged, CHALLENGE_BYTES)
                sent[challenged] = sent.get(challenged, 0) + CHALLENGE_BYTES  # type: ignore[index, call-overload]
        before = paths.active
        moved = paths.poll_moves(now)
        if moved is not None and moved.before is not None:
            assert moved.path in answered
            assert (moved.path, moved.before) == (paths.active, before)
        assert len(paths) <= MOST_PATHS
        assert paths.poll_deadline() > now
        for each, bytes_sent in sent.items():
            assert each in answered or bytes_sent <= AMPLIFICATION * received.get(each, 0)


def test_a_poll_without_input_draws_nothing() -> None:
    paths = server()
    with pytest.raises(StopIteration):
        next(iter(paths.poll_challenges(1e9)))
    assert paths.poll_deadline() == math.inf
