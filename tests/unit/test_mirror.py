"""What of one standby is nothing to the next; and who may speak for a shard at the one that keeps the log."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atoll.server import mirror
from atoll.server.durability import Durability
from atoll.server.heard import Heard
from atoll.server.mirror import Mirror
from atoll.server.peers import Peers
from atoll.wire.messages import (
    VERSION,
    Duty,
    Hello,
    LostBlocks,
    LostTouch,
    Push,
    Welcome,
    decode_untrusted,
    encode,
)


class NobodyThere:
    """A connection to a standby from which nothing comes."""

    losses, connected = 0, True

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def abandon(self) -> None: ...

    def send(self, *_message: Any) -> None: ...

    def receive(self, _timeout: float) -> None: ...


class Slow:
    """A journal whose disk stands still until the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def when_written(self, act: Callable[[], None]) -> None:
        self.waiting.append(act)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Mirror, Any, Slow]:
    """A mirror whose gate is closed, far on in its stream to standby 2, which it has lost; its hub and
    journal."""
    monkeypatch.setattr(mirror, "Client", NobodyThere)
    said: list[object] = []
    hub: Any = SimpleNamespace(duty=None, welcome=Welcome(run="r", incarnation=1), say=said.append, said=said)
    journal: Any = Slow()
    made = Mirror(0, "r", None, hub, journal)
    made._place, made.gated, made._lost = (2, "tcp://127.0.0.1:1", 1), True, True
    made._stream, made._number, made._acked = "a", 50_000, 49_990
    return made, hub, journal


def follow(made: Mirror, hub: Any, partner: int) -> None:
    address = f"tcp://127.0.0.1:{partner}" if partner else ""
    hub.duty = Duty(term=partner, primary=True, partner=partner, address=address, serves=True)
    source: Any = SimpleNamespace(model=None)
    made.poll(source)


def test_what_a_link_has_lost_is_told_to_the_standby_and_the_journal() -> None:
    """The header that came does not say it."""
    kept: list[bytes] = []
    note: Any = SimpleNamespace(append=lambda told, _payload: kept.append(bytes(told.message)))
    push = Push(incarnation=1, iteration=0, chunk=0, chunks_in_all=1, present=b"\1")
    lost = msgspec.structs.replace(push, lost=LostBlocks(2, b"\1", "borne"))
    hello = Hello(version=VERSION, run="r", role="worker", worker=0, incarnation=1)
    Durability(note, note, None).note_message(Heard(b"peer", hello, lost, memoryview(bytes(8))), encode(push))
    assert [decode_untrusted(header) for header in kept] == [lost, lost]


def test_an_answer_held_for_a_standby_that_is_gone_waits_for_no_number_of_the_next(
    parts: tuple[Mirror, Any, Slow],
) -> None:
    made, hub, journal = parts
    left: list[str] = []
    made.when_kept(lambda: left.append("answer"))
    follow(made, hub, 0)
    follow(made, hub, 7)
    made._stream, made._number, made._acked, made._gate, made.gated = "b", 40, 40, 40, True
    assert left == []
    for act in journal.waiting:
        act()
    made.release()
    assert left == ["answer"]


def test_the_next_standby_is_not_lost_because_the_one_before_was(parts: tuple[Mirror, Any, Slow]) -> None:
    made, hub, _ = parts
    follow(made, hub, 7)
    assert not [each for each in hub.said if isinstance(each, LostTouch)]


def test_a_shard_that_another_has_taken_the_place_of_does_not_get_it_back() -> None:
    server: Any = SimpleNamespace()
    peers = Peers(server, "r")

    def hello(standing: int) -> Hello:
        return Hello(version=VERSION, run="r", role="shard", shard=1, incarnation=standing)

    assert peers.greet(b"first", hello(3)) == ""
    assert peers.greet(b"second", hello(5)) == ""
    assert peers.greet(b"first, again", hello(3)) == "shard 1 lives in a later incarnation, 5"
    assert peers.shard(1) == b"second"
    assert peers.greet(b"second, again", hello(5)) == ""
