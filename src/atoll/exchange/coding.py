"""Encoding of runs of gradients into payloads and back, for all ends of the way.

A codec writes float32. Runs of other dtypes travel unchanged, and so do all runs if the codec is `float32`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.axes.codec import Codec
from atoll.chunks.specs import itemsize
from atoll.core.config import PLAIN_CODEC
from atoll.core.errors import RunError
from atoll.core.texts import one_line
from atoll.exchange.codecs import Float32
from atoll.exchange.seeds import seed_of
from atoll.wire.base import WireError
from atoll.wire.lost import LostBlocks, flaw, missing_of, spans_of

CODED_DTYPE = "uint8"  # the dtype of a coded payload on a lossy link


class Coding:
    """The run's codec, and whether it applies to a dtype."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._plain = codec.name == PLAIN_CODEC

    @property
    def name(self) -> str:
        return self.codec.name

    def writes(self, dtype: str) -> bool:
        """True if the codec changes the bytes of runs of a dtype ("float32")."""
        return dtype == "float32" and not self._plain

    def loses(self, dtype: str) -> bool:
        """True if runs of a dtype may come back with other bits."""
        return self.writes(dtype) and not self.codec.lossless

    def size(self, elements: int, dtype: str) -> int:
        """Return the bytes of a run's payload."""
        return self.codec.size(elements) if self.writes(dtype) else elements * itemsize(dtype)

    def encode(self, values: Tensor, number: int) -> memoryview:
        """Return a run's payload, in new memory.

        Args:
            values: (elements,), on the CPU, of a dtype that the codec writes.
            number: the contribution's number, from which the codec's seed is drawn.

        Raises RunError if the codec fails.
        """
        memory = np.empty(self.codec.size(values.numel()), np.uint8)
        if values.numel():
            try:
                self.codec.encode(values, memory.data, seed_of(number))
            except Exception as error:  # a codec may be anybody's code
                raise RunError(f"sync.codec {self.name!r} cannot write a gradient: {_line(error)}") from error
        return memory.data

    def decode(self, payload: memoryview | None, elements: int) -> Tensor:
        """Return the run in a payload: (elements,), float32, in new memory.

        Raises WireError for bytes that are no such payload.
        """
        size, got = self.codec.size(elements), 0 if payload is None else payload.nbytes
        if got != size:
            raise WireError(f"{got} bytes, and {elements} elements take {size} by sync.codec {self.name!r}")
        values = torch.empty(elements)
        if payload is not None and elements:
            try:
                self.codec.decode(payload, values)
            except Exception as error:  # the bytes are from outside, and the codec may be anybody's code
                raise WireError(f"no run by sync.codec {self.name!r}: {_line(error)}") from error
        return values

    def decode_lossy(
        self, payload: memoryview | None, elements: int, lost: LostBlocks
    ) -> tuple[Tensor, LostBlocks]:
        """Return the run in a payload of which the link has lost blocks of bytes, and the lost blocks of
        elements.

        Zeros stand in every block of the codec of which any byte is lost.

        Raises WireError for bytes, or losses, that do not fit a payload of `elements` elements.
        """
        wrong = flaw(lost, 0 if payload is None else payload.nbytes)
        if wrong:
            raise WireError(wrong)
        values = self.decode(payload, elements)
        size, block = self.codec.size(self.codec.block), self.codec.block
        if lost.block % size == 0:
            block *= lost.block // size
            found = LostBlocks(block, lost.missing, lost.how)
        else:
            missing = np.zeros(-(-elements // block), np.bool_)
            for start, stop in spans_of(lost, payload.nbytes if payload is not None else 0):
                missing[start // size : -(-stop // size)] = True
            found = LostBlocks(block, np.packbits(missing, bitorder="little").tobytes(), lost.how)
        gaps = np.repeat(missing_of(found, elements), block)[:elements]
        return values.masked_fill_(torch.from_numpy(gaps), 0), found

    def elements_in(self, payload_bytes: int) -> int:
        """Return the elements of a coded run in a link's block of so many bytes; 0 if the block ends within a
        codec's block."""
        size = self.codec.size(self.codec.block)
        return 0 if payload_bytes % size else payload_bytes // size * self.codec.block


PLAIN = Coding(Float32())


def bytes_of(flat: Tensor) -> memoryview:
    """Return the memory of a 1-D tensor on the CPU; of one elsewhere, that of a copy."""
    host = flat.detach().to("cpu")
    return memoryview(host.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _line(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)
