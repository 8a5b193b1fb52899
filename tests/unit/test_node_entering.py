"""The script's state for a node that comes in: in pieces from each member, checked before it is kept; and for
how long a member keeps what it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from atoll.cpuside import takeover
from atoll.cpuside.entering import Entering, Newcomers, Scripted, digest_of, most_script
from atoll.cpuside.network import Network
from atoll.wire.nodes import Script
from atoll.wire.peerviews import Life, View, ViewMember

FIRST, MOST = 7, 1000


@pytest.fixture
def entering(monkeypatch: pytest.MonkeyPatch) -> Entering:
    """One that waits for a script's state at FIRST; pieces are of 16 bytes."""
    monkeypatch.setattr(takeover, "_PIECE", 16)
    made = Entering(60.0, returned=False)
    made.first = FIRST
    return made


def pieces(state: bytes, iteration: int = FIRST, digest: bytes = b"") -> Iterator[tuple[Script, memoryview]]:
    raw = memoryview(state)
    for start, piece in takeover.pieces_of(raw):
        told = digest or digest_of(raw)
        yield Script(iteration, meeting=3, number=1, start=start, total=len(state), digest=told), piece


def take(entering: Entering, sender: int, given: Iterator[tuple[Script, memoryview]]) -> list[str]:
    return [said for each in given if (said := entering.take_script(sender, *each, MOST))]


def test_the_first_that_is_whole_counts(entering: Entering) -> None:
    one, other = list(pieces(bytes(range(100)))), list(pieces(bytes(range(50, 140))))
    assert len(one) == 7
    assert len(other) == 6
    for number in range(6):
        assert entering.script is None
        assert take(entering, 1, iter(one[number : number + 1])) == []
        assert take(entering, 2, iter(other[number : number + 1])) == []
    assert entering.script is not None
    assert entering.script[:3] == (FIRST, 3, 1)
    assert bytes(entering.script.state) == bytes(range(50, 140))
    take(entering, 1, iter(one[6:]))
    assert bytes(entering.script.state) == bytes(range(50, 140))


def test_a_member_may_begin_again_and_what_is_out_of_order_is_nothing(entering: Entering) -> None:
    given = list(pieces(bytes(range(64))))
    take(entering, 1, iter([given[0], given[2], given[1], given[3]]))
    assert entering.script is None
    take(entering, 1, iter(given))  # on a new connection
    assert entering.script is not None
    assert bytes(entering.script.state) == bytes(range(64))


def test_it_may_be_of_nothing_and_of_another_iteration(entering: Entering) -> None:
    take(entering, 1, pieces(b"x" * 40, iteration=FIRST - 2))
    assert entering.script is None
    take(entering, 2, pieces(b""))  # a member that had none to give
    assert entering.script is not None
    assert bytes(entering.script.state) == b""


def test_what_is_wrong_is_told_and_kept_nowhere(entering: Entering) -> None:
    assert take(entering, 1, pieces(bytes(MOST))) == []
    entering = Entering(60.0, returned=False)
    entering.first = FIRST
    huge = Script(FIRST, meeting=0, number=0, start=0, total=2**60, digest=b"")
    assert take(entering, 1, iter([(huge, memoryview(b"abc"))])) == [
        f"{2**60} bytes of a script's state, where {MOST} is the most"
    ]
    beyond = Script(FIRST, meeting=0, number=0, start=0, total=2, digest=digest_of(memoryview(b"ab")))
    assert take(entering, 1, iter([(beyond, memoryview(b"abc"))])) == []
    assert take(entering, 1, pieces(b"y" * 40, digest=b"another")) == [
        "a script's state that is not as it was sent"
    ]
    assert entering.script is None
    assert most_script(10**9) > 10**9


class Sent:
    """A network that notes to whom a script's state goes."""

    def __init__(self) -> None:
        self.to: list[int] = []

    def send_chunk(self, node: int, _message: Script, _payload: memoryview) -> None:
        self.to.append(node)


def view(number: int, *members: ViewMember) -> View:
    return View(0, number, members)


def test_a_script_s_state_is_kept_for_a_newcomer_until_it_contributes_or_is_left_out() -> None:
    own, newcomer = ViewMember(Life(0, 1)), ViewMember(Life(1, 2), first=FIRST)
    alone, both = view(1, own), view(2, own, newcomer)
    sent, newcomers = Sent(), Newcomers()
    network = cast(Network, sent)
    script = Scripted(FIRST, meeting=3, number=1, state=b"abc")
    assert newcomers.view(alone, both, own.life) == [FIRST]
    newcomers.captured(script, network)
    newcomers.up(1, network)
    assert sent.to == [1, 1]
    newcomers.view(both, view(3, own), own.life)  # it has died
    newcomers.up(1, network)
    assert sent.to == [1, 1]
    assert newcomers.kept == 0
    newcomers.captured(script, network)  # the script came there all the same
    assert newcomers.kept == 0


def test_what_the_script_was_at_is_kept_for_the_other_newcomer() -> None:
    own, one, other = (
        ViewMember(Life(0, 1)),
        ViewMember(Life(1, 2), first=FIRST),
        ViewMember(Life(2, 2), first=FIRST + 4),
    )
    sent, newcomers = Sent(), Newcomers()
    network = cast(Network, sent)
    newcomers.view(view(1, own), view(2, own, one), own.life)
    newcomers.view(view(2, own, one), view(3, own, one, other), own.life)
    for first in (FIRST, FIRST + 4):
        newcomers.captured(Scripted(first, meeting=3, number=1, state=b"abc"), network)
    newcomers.contributed(one.life)
    assert newcomers.kept == 1
    newcomers.up(2, network)
    assert sent.to == [1, 2, 2]
