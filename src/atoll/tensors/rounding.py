"""Stochastic rounding from float32 to bfloat16, with random numbers that depend on an element's place alone.

A value goes to the neighbour above or below, the more probably the nearer it is, so that the expected result
is the value. The random numbers are functions of (seed, step, position of the parameter, index of the
element): they are equal on every worker and every device, however many workers there are.

Sources: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015; Salmon et al., "Parallel
Random Numbers: As Easy as 1, 2, 3", SC 2011 (the generator Philox-4x32-10).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 2**32 - 1
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 8  # draws of 16 bits in a block of four words
_DROPPED = 16  # bits that a float32 has more than a bfloat16
_MOST = 2**20  # elements of one batch: its temporary tensors take about 20 MiB


class Stream(NamedTuple):
    """The elements `start` to `stop` of one parameter in one step; `start` is a multiple of 8."""

    step: int
    position: int  # of the parameter in its model
    start: int
    stop: int

    @property
    def blocks(self) -> int:
        """The number of the generator's blocks."""
        return -(-(self.stop - self.start) // _LANES)


def philox(counter: Sequence[Tensor], key: Sequence[int]) -> list[Tensor]:
    """Return four words for each counter: tensors of int64 with values from 0 to 2^32 - 1.

    Args:
        counter: four words for each block: int64 tensors of one shape.
        key: two words.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(_ROUNDS):
        # A product of two words may pass 2^63 and wrap; its 64 bits are right.
        one, two = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = _high(two).bitwise_xor_(b).bitwise_xor_(first), two & _WORD
        c, d = _high(one).bitwise_xor_(d).bitwise_xor_(second), one & _WORD
        first, second = (first + _WEYL[0]) & _WORD, (second + _WEYL[1]) & _WORD
    return [a, b, c, d]


def _high(product: Tensor) -> Tensor:
    return (product >> 32).bitwise_and_(_WORD)


def draws(seed: int, streams: Sequence[Stream], device: torch.device) -> list[Tensor]:
    """Return a whole number from 0 to 65,535 (int32) for each element of each stream."""

    def of_blocks(words: Sequence[int]) -> Tensor:
        runs = zip(streams, words, strict=True)
        return torch.cat([torch.full((each.blocks,), word, device=device) for each, word in runs])

    index = torch.cat([torch.arange(each.blocks, device=device) + each.start // _LANES for each in streams])
    counter = [
        index,
        of_blocks([each.position for each in streams]),
        of_blocks([each.step & _WORD for each in streams]),
        of_blocks([each.step >> 32 for each in streams]),
    ]
    words = philox(counter, (seed & _WORD, seed >> 32))
    lanes = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=1)
    parts = torch.split(lanes.to(torch.int32).flatten(), [each.blocks * _LANES for each in streams])
    return [part[: each.stop - each.start] for part, each in zip(parts, streams, strict=True)]


def rounded(values: Tensor, draw: Tensor) -> Tensor:
    """Return float32 `values` as bfloat16: away from zero where `draw`, out of 65,536, is large enough.

    Of the 65,536 draws as many lead away from zero as the dropped bits say. NaN and infinities stay.
    """
    bits = (values.view(torch.int32) + draw).bitwise_and_(-(1 << _DROPPED))
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


def stochastically_rounded(
    seed: int, values: Sequence[Tensor], places: Sequence[tuple[int, int]], most: int = _MOST
) -> list[Tensor]:
    """Return float32 tensors of one device, each rounded stochastically to bfloat16.

    Args:
        seed: of the run, from 0 to 2^64 - 1.
        values: the tensors.
        places: for each tensor the number of its step, and its position in the model.
        most: elements that are rounded at once, a multiple of 8; it does not change the result.
    """
    flat = [each.reshape(-1) for each in values]
    results = [torch.empty(each.shape, dtype=torch.bfloat16, device=each.device) for each in flat]
    for batch in _batches(list(map(len, flat)), most):
        streams = [Stream(*places[index], start, stop) for index, start, stop in batch]
        for (index, start, stop), draw in zip(batch, draws(seed, streams, flat[0].device), strict=True):
            results[index][start:stop] = rounded(flat[index][start:stop], draw)
    return [result.view(each.shape) for result, each in zip(results, values, strict=True)]


def _batches(sizes: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield batches of at most `most` elements: (index of the tensor, start, stop)."""
    batch: list[tuple[int, int, int]] = []
    room = most
    for index, size in enumerate(sizes):
        for start in range(0, size, most):
            stop = min(size, start + most)
            if batch and stop - start > room:
                yield batch
                batch, room = [], most
            batch.append((index, start, stop))
            room -= stop - start
    if batch:
        yield batch
