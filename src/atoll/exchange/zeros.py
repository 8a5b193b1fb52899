"""Payloads that go without their runs of zeros, for chunks with sparse gradients (docs/codecs.md).

A payload is cut into blocks of `BLOCK` bytes, of which the last may be shorter. A shortened payload has, in
little-endian order: the number of its runs of blocks that are not zero (uint32), for each run the number of
zero blocks before it and the number of its own blocks (two uint32), and the blocks of all runs. A block is
zero if all of its bits are: -0.0, NaN and infinity come back as they were.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from atoll.wire.base import WireError

BLOCK = 64  # bytes
_WORD = np.dtype(np.uint64)
_NUMBER = np.dtype("<u4")


def without_zeros(payload: memoryview) -> memoryview | None:
    """Return the payload without its runs of zeros, in new memory; None if that is not shorter."""
    raw = np.frombuffer(payload, np.uint8)
    whole, rest = divmod(len(raw), BLOCK)
    blocks, tail = raw[: whole * BLOCK], raw[whole * BLOCK :]
    # A comparison leaves a byte for each of a block's eight words, and these eight bytes are a word again.
    kept = (blocks.view(_WORD) != 0).view(_WORD) != 0
    keeps_tail = bool(tail.any())
    edges = np.flatnonzero(np.diff(np.append(kept, keeps_tail), prepend=False, append=False))
    before = np.diff(edges, prepend=0)  # of zero blocks and of others, in turn
    size = _NUMBER.itemsize * (1 + len(edges)) + BLOCK * int(before[1::2].sum())
    size -= BLOCK - rest if keeps_tail else 0
    if size >= len(raw):
        return None
    shortened = np.empty(size, np.uint8)
    head = shortened[: _NUMBER.itemsize * (1 + len(edges))].view(_NUMBER)
    head[0], head[1:] = len(edges) // 2, before
    values = shortened[head.nbytes :]
    ends = len(values) - (rest if keeps_tail else 0)
    np.compress(kept, blocks.reshape(whole, BLOCK), axis=0, out=values[:ends].reshape(-1, BLOCK))
    values[ends:] = tail[: len(values) - ends]
    return shortened.data


def with_zeros(shortened: memoryview | None, size: int) -> memoryview:
    """Return the payload of `size` bytes that `without_zeros` has shortened, in new memory.

    The bytes may come from outside. Nothing of the size `size` is allocated before they are checked.

    Raises WireError for bytes that `without_zeros` never writes for such a payload.
    """
    raw = np.frombuffer(b"" if shortened is None else shortened, np.uint8)
    runs, values = _runs_in(raw, size)
    ends = runs.cumsum()  # where zero blocks and others end, in turn
    whole, rest = divmod(size, BLOCK)
    blocks = whole + (rest > 0)
    if len(ends) and ends[-1] > blocks:
        raise WireError(f"runs up to block {ends[-1]} of a payload without its zeros, which has {blocks}")
    lengths = runs[1::2]
    keeps_tail = bool(rest and len(ends) and ends[-1] == blocks)
    expected = BLOCK * int(lengths.sum()) - (BLOCK - rest if keeps_tail else 0)
    if len(values) != expected:
        raise WireError(f"{len(values)} bytes in the runs of a payload without its zeros, not {expected}")
    payload = np.zeros(size, np.uint8)
    where = np.repeat(ends[::2] - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())
    kept = values[: len(values) - rest] if keeps_tail else values
    payload[: whole * BLOCK].reshape(whole, BLOCK)[where[: len(kept) // BLOCK]] = kept.reshape(-1, BLOCK)
    if keeps_tail:
        payload[whole * BLOCK :] = values[len(kept) :]
    return payload.data


def _runs_in(raw: npt.NDArray[np.uint8], size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return the lengths of the runs in a shortened payload, of zero blocks and of others in turn, and the
    bytes behind them. Raises WireError for lengths that are not there, or 0."""
    if len(raw) >= max(size, 1):
        raise WireError(f"{len(raw)} bytes of a payload without its zeros, which has {size} with them")
    if len(raw) < _NUMBER.itemsize:
        raise WireError(f"{len(raw)} bytes of a payload without its zeros")
    count = int(raw[: _NUMBER.itemsize].view(_NUMBER)[0])
    end = _NUMBER.itemsize * (1 + 2 * count)
    if end > len(raw):
        raise WireError(f"{count} runs in {len(raw)} bytes of a payload without its zeros")
    runs = raw[_NUMBER.itemsize : end].view(_NUMBER).astype(np.int64)
    if not runs[1:].all():  # only the first run may have no zeros before it
        raise WireError("an empty run in a payload without its zeros")
    return runs, raw[end:]
