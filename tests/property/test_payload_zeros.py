"""Payloads without their runs of zeros: every bit comes back, and no bytes from outside do more than that."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.exchange.zeros import BLOCK, with_zeros, without_zeros
from atoll.wire.base import WireError


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Runs of zeros and of other bytes, in pieces that keep no block's bounds."""
    some = st.binary(min_size=1, max_size=3 * BLOCK)
    pieces = st.one_of(st.integers(0, 6 * BLOCK).map(bytes), some)
    return b"".join(draw(st.lists(pieces, max_size=8)))


@given(payloads(), st.integers(0, 7))
def test_every_bit_comes_back(payload: bytes, start: int) -> None:
    raw = memoryview(bytes(start) + payload)[start:]  # at any address
    shortened = without_zeros(raw)
    if shortened is None:
        return
    assert shortened.nbytes < len(payload)
    assert bytes(with_zeros(memoryview(bytes(start) + bytes(shortened))[start:], len(payload))) == payload


@pytest.mark.parametrize("value", [-0.0, float("nan"), float("-inf"), 1e-45])
def test_a_value_that_is_not_plus_zero_is_no_zero(value: float) -> None:
    flat = np.zeros(1000, np.float32)
    flat[[0, 500, 999]] = value
    shortened = without_zeros(memoryview(flat).cast("B"))
    assert shortened is not None
    assert bytes(with_zeros(shortened, flat.nbytes)) == flat.tobytes()


@pytest.mark.parametrize(("size", "left"), [(0, None), (3, None), (4, None), (5, 4), (64, 4), (4_000, 4)])
def test_zeros_alone_are_the_number_of_their_runs(size: int, left: int | None) -> None:
    shortened = without_zeros(memoryview(bytes(size)))
    assert (None if shortened is None else shortened.nbytes) == left


def test_what_has_few_zeros_is_left_as_it_is() -> None:
    assert without_zeros(memoryview(bytes([1] * 10 * BLOCK))) is None
    assert without_zeros(memoryview(bytes([1] * 9 + [0] * 9))) is None


def test_a_table_goes_in_the_bytes_of_its_rows_and_eight_for_each_run() -> None:
    table = np.zeros((1000, 64), np.float32)
    table[[3, 4, 500, 999]] = 1.0
    shortened = without_zeros(memoryview(table.reshape(-1)).cast("B"))
    assert shortened is not None
    assert shortened.nbytes == 4 + 3 * 8 + 4 * 256


def read(shortened: memoryview, size: int) -> memoryview | str:
    """The payload, or why it is refused."""
    try:
        return with_zeros(shortened, size)
    except WireError as error:
        return str(error)


@given(st.binary(max_size=200), st.integers(0, 4 * BLOCK))
def test_any_bytes_are_a_payload_or_refused_in_a_line(raw: bytes, size: int) -> None:
    found = read(memoryview(raw), size)
    assert found.isprintable() if isinstance(found, str) else found.nbytes == size


@given(payloads(), st.data())
def test_changed_bytes_are_a_payload_of_that_size_or_refused(payload: bytes, data: st.DataObject) -> None:
    shortened = without_zeros(memoryview(payload))
    if shortened is None:
        return
    raw = bytearray(shortened)
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=3)):
        raw[at] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(0, len(raw))) :]
    found = read(memoryview(bytes(raw)), len(payload))
    assert isinstance(found, str) or found.nbytes == len(payload)


def made(*numbers: int, values: int = 0) -> memoryview:
    return memoryview(struct.pack(f"<{len(numbers)}I", *numbers) + bytes([7] * values))


SIZE = 10 * BLOCK + 3  # eleven blocks
MOST = 2**32 - 1
OF = "of a payload without its zeros"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, f"0 bytes {OF}"),
        (memoryview(b"\1\0\0"), f"3 bytes {OF}"),
        (made(1, 0, 1, values=SIZE), f"{SIZE + 12} bytes {OF}, which has {SIZE} with them"),
        (made(2, 0, 1), f"2 runs in 12 bytes {OF}"),
        (made(MOST), f"{MOST} runs in 4 bytes {OF}"),
        (made(1, 3, 0), "an empty run in a payload without its zeros"),
        (made(2, 0, 1, 0, 1, values=2 * BLOCK), "an empty run in a payload without its zeros"),
        (made(1, 11, 1, values=BLOCK), f"runs up to block 12 {OF}, which has 11"),
        (made(1, MOST, MOST), f"runs up to block {2 * MOST} {OF}, which has 11"),
        (made(1, 3, 2, values=BLOCK), f"{BLOCK} bytes in the runs {OF}, not {2 * BLOCK}"),
        (made(1, 10, 1, values=BLOCK), f"{BLOCK} bytes in the runs {OF}, not 3"),
        (made(0, values=5), f"5 bytes in the runs {OF}, not 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: memoryview | None, said: str) -> None:
    with pytest.raises(WireError) as raised:
        with_zeros(given, SIZE)
    assert str(raised.value) == said


def test_no_memory_is_taken_before_the_bytes_are_known_to_be_right() -> None:
    with pytest.raises(WireError):
        with_zeros(made(1, 3, 2**32 - 1, values=BLOCK), 2**60)


def test_the_last_block_may_be_short() -> None:
    found = bytes(with_zeros(made(1, 9, 2, values=BLOCK + 3), SIZE))
    assert found == bytes(9 * BLOCK) + bytes([7] * (BLOCK + 3))
