"""The protocol of a codec: the encoding of a run of gradients for sending (docs/codecs.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Protocol):
    """Writes runs of float32 values as bytes and reads them back; pure functions, which keep nothing.

    What a codec drops is kept by one `Feedback`, never by the codec. A run is written in blocks, one after
    the other; each block can be read without the others, since a link may lose parts of a run. Zeros stay
    zeros: they stand where a parameter has no gradient. A block with NaN or infinity is read as one with NaN
    or infinity, so that whoever steps can refuse it.
    """

    name: str
    lossless: bool  # True where `decode` gives back every bit
    block: int  # values that are written together; the last block of a run may be shorter

    def size(self, elements: int) -> int:
        """The bytes of a run of so many values: the sum of its blocks' bytes."""

    def encode(self, values: Tensor, into: memoryview, seed: int) -> None:
        """Write `values`, (elements,), float32, on the CPU, into `size(elements)` bytes. The same values and
        seed give the same bytes. The seed rises by one with each contribution of a run: a codec may take
        turns by it."""

    def decode(self, encoded: memoryview, into: Tensor) -> None:
        """Read `encoded`, which has `size(elements)` bytes, into `into`, (elements,), float32, on the CPU.
        The bytes may come from outside: raises WireError for what `encode` never writes."""
