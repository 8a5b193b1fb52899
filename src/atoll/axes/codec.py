"""The protocol of a codec: how a run of numbers is written for the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Protocol):
    """Writes runs as bytes and reads them back; pure functions, which keep nothing.

    What a codec drops is kept by one `Feedback`, never by the codec. NaN stays NaN, so that whoever steps
    can refuse it.
    """

    name: str
    lossless: bool  # True where `decode` gives back every bit
    block: int  # elements that are written together; a block never leaves its run

    def size(self, elements: int) -> int:
        """The bytes of so many elements."""

    def encode(self, values: Tensor, into: memoryview, seed: int) -> None:
        """Write `values`, (elements,), on the host, into `size(elements)` bytes. The same values and seed
        give the same bytes."""

    def decode(self, encoded: memoryview, into: Tensor) -> None:
        """Read back into `into`, (elements,). Sizes are checked first. Raises WireError for bytes that are no
        such run: they may come from outside."""
