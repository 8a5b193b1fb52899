"""The books of a tunnel: order, windows, what is refused; and what goes in a batch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.net import tunnelorder
from atoll.net.tunnelorder import (
    INLINE_BYTES,
    WINDOW_BYTES,
    Inbox,
    Outbox,
    TunnelMessage,
)
from atoll.wire.messages import HEADER_BYTES, LostBlocks, WireError
from atoll.wire.tunnel import (
    BATCH_BYTES,
    MOST_MESSAGES,
    WINDOW_MESSAGES,
    Batch,
    TunnelEntry,
    decode_batch_untrusted,
    encode_batch,
)

LIMIT = 2**20


def message(size: int = 0, header: bytes = b"h") -> TunnelMessage:
    return TunnelMessage(header, memoryview(bytes(size)) if size else None)


def transfers(outbox: Outbox, inbox: Inbox, most: int = 16) -> Iterator[tuple[str, int, object]]:
    """What an end sends now: a batch, and the payloads that are apart."""
    first, batch = outbox.take(most)
    yield "batch", first, encode_batch(inbox.batch(first, batch))
    for number, each in enumerate(batch, first):
        if each.apart:
            yield "payload", number, each.payload


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, INLINE_BYTES, INLINE_BYTES + 1, 2**17]), max_size=60),
    st.integers(0, 2**32),
    st.integers(1, 40),
)
def test_messages_come_in_order_however_transfers_come(sizes, seed, window):
    """A network that hands transfers on in any order; an application that takes what it likes."""
    rng = random.Random(seed)
    sent = [
        TunnelMessage(b"%d" % number, memoryview(rng.randbytes(size)) if size else None)
        for number, size in enumerate(sizes)
    ]
    here, there, inbox, back = Outbox(), Outbox(), Inbox(LIMIT), Inbox(LIMIT)
    for each in sent:
        here.put(each)
    network: list[tuple[str, int, object]] = []
    waits: list[TunnelMessage] = []
    came: list[TunnelMessage] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tunnelorder, "WINDOW_MESSAGES", window)
        patched.setattr(tunnelorder, "WINDOW_BYTES", 2**18)
        for _ in range(10_000):
            if len(came) == len(sent) and not network:
                break
            action = rng.randrange(4)
            if action == 0 and here.ready:
                network += transfers(here, back)
            elif action == 1 and network:
                kind, number, content = network.pop(rng.randrange(len(network)))
                if kind == "batch":
                    inbox.handle_batch(decode_batch_untrusted(content))
                else:
                    inbox.handle_payload(number, content, None)
                waits += inbox.in_order()
            elif action == 2 and waits:
                came.append(waits.pop(0))
                inbox.handle_taken(came[-1])
            elif action == 3 and inbox.is_to_tell:
                ((_, _, told),) = transfers(there, inbox)
                here.handle_taken(decode_batch_untrusted(told).taken)
            assert inbox._held <= 2**18 + LIMIT
        assert [(each.header, bytes(each.payload or b"")) for each in came] == [
            (each.header, bytes(each.payload or b"")) for each in sent
        ]
        assert [each.payload is None for each in came] == [each.payload is None for each in sent]
    assert inbox._held == 0


def test_a_batch_has_what_waits_up_to_its_bytes_and_the_transfers_that_are_free():
    outbox = Outbox()
    for size in (10, 2**20, 2**20, 2**20, 10):
        outbox.put(message(size))
    assert [each.bytes for each in outbox.take(2)[1]] == [11, 2**20 + 1, 2**20 + 1]
    assert (outbox.next, outbox.waiting) == (3, 2)
    assert len(outbox.take(0)[1]) == 1, "a batch has one message at least"
    assert len(outbox.take(0)[1]) == 1
    for _ in range(20):
        outbox.put(message(INLINE_BYTES, b"h" * 100))
    first, batch = outbox.take(16)
    assert first == 5
    assert sum(each.bytes for each in batch) <= BATCH_BYTES < sum(each.bytes for each in batch) + 2**14 + 100


def test_a_window_closes_after_so_many_messages_or_bytes_and_opens_as_they_are_taken():
    outbox = Outbox()
    for _ in range(WINDOW_MESSAGES + 5):
        outbox.put(message())
    while outbox.ready:
        outbox.take(16)
    assert (outbox.next, outbox.waiting) == (WINDOW_MESSAGES, 5)
    outbox.handle_taken(3)
    assert len(outbox.take(16)[1]) == 3
    outbox.handle_taken(outbox.next)
    large = Outbox()
    for _ in range(3):
        large.put(TunnelMessage(b"", memoryview(bytearray(WINDOW_BYTES // 2 + 1))))
    large.take(16)
    assert large.next == 2, "one message may pass it"
    large.handle_taken(1)
    assert large.ready


def test_what_was_taken_is_told_before_the_other_end_has_to_wait():
    """Else both would wait: this end's silence would leave the window closed."""
    inbox = Inbox(LIMIT)
    told = 0
    for number in range(3 * WINDOW_MESSAGES):
        inbox.handle_batch(Batch(first=number, taken=0, entries=[TunnelEntry(b"h")]))
        (each,) = inbox.in_order()
        inbox.handle_taken(each)
        if inbox.is_to_tell:
            told = inbox.batch(0, []).taken
        assert inbox.taken - told < WINDOW_MESSAGES / 2
    big = Inbox(WINDOW_BYTES)
    big.handle_batch(Batch(first=0, taken=0, entries=[TunnelEntry(b"h", apart=True, size=WINDOW_BYTES // 2)]))
    big.handle_payload(0, memoryview(bytearray(WINDOW_BYTES // 2)), None)
    assert not big.is_to_tell
    big.handle_taken(big.in_order()[0])
    assert big.is_to_tell


def test_what_was_lost_of_a_payload_comes_with_it():
    inbox, lost = Inbox(LIMIT), LostBlocks(330, b"\x02", "borne")
    inbox.handle_payload(0, memoryview(bytes(4000)), lost)
    assert inbox.in_order() == []
    inbox.handle_batch(Batch(first=0, taken=0, entries=[TunnelEntry(b"h", apart=True, size=4000)]))
    (came,) = inbox.in_order()
    assert (came.header, came.payload.nbytes, came.lost) == (b"h", 4000, lost)


def wrong(batches: list[Batch], payloads: list[tuple[int, int]] = ()) -> str:
    inbox = Inbox(LIMIT)
    try:
        for number, size in payloads:
            inbox.handle_payload(number, memoryview(bytearray(size)), None)
        for batch in batches:
            inbox.handle_batch(batch)
        inbox.in_order()
    except WireError as error:
        return str(error)
    raise AssertionError("nothing was wrong")


def test_what_cannot_be_is_refused():
    one = Batch(first=0, taken=0, entries=[TunnelEntry(b"h")])
    assert "message 0" in wrong([one, one])
    far = Batch(first=WINDOW_MESSAGES, taken=0, entries=[TunnelEntry(b"h")])
    assert (
        wrong([far]) == f"message {WINDOW_MESSAGES}, where 0 is the next and {WINDOW_MESSAGES - 1} the last"
    )
    apart = Batch(first=0, taken=0, entries=[TunnelEntry(b"h", apart=True, size=100)])
    assert wrong([apart], [(0, 99)]) == "message 0: a payload of 99 bytes, and not 100"
    assert wrong([one], [(0, 99)]) == "message 0: a payload, where none was said"
    large = Batch(first=0, taken=0, entries=[TunnelEntry(b"h", apart=True, size=LIMIT + 1)])
    assert "the most" in wrong([large])
    flood = [(number, 2**26) for number in range(4)]
    assert "are not taken" in wrong([], flood)
    with pytest.raises(WireError, match="5 messages were taken, of 0"):
        Outbox().handle_taken(5)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "no batch"),
        (b"\x93\x00\x00", "no batch"),
        (msgspec.msgpack.encode([0, 0, [[b"h", None, True, 0]]]), "apart"),
        (msgspec.msgpack.encode([0, 0, [[b"h", b"p", True, 1]]]), "apart"),
        (msgspec.msgpack.encode([0, 0, [[b"h", None, False, 1]]]), "a size"),
        (msgspec.msgpack.encode([-1, 0, []]), "no batch"),
        (msgspec.msgpack.encode([MOST_MESSAGES, 0, [[b"h"]]]), "the most"),
        (msgspec.msgpack.encode([0, 0, [], 1]), "no batch"),
        (msgspec.msgpack.encode([0, 0, [[b""]] * (WINDOW_MESSAGES + 1)]), "length <= 1024"),
        (bytes(HEADER_BYTES + 2 * BATCH_BYTES + 1), "is the most"),
    ],
)
def test_bytes_that_are_no_batch(raw, why):
    with pytest.raises(WireError, match=why):
        decode_batch_untrusted(raw)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_an_error_of_one_line(raw):
    batch, error = None, ""
    try:
        batch = decode_batch_untrusted(raw)
    except WireError as refused:
        error = str(refused)
    assert "\n" not in error
    assert batch is None or decode_batch_untrusted(encode_batch(batch)) == batch
