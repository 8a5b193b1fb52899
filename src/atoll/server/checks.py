"""Validation of gradients that workers send to a shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.chunks import ChunkMap
from atoll.tensors.finite import is_finite
from atoll.tensors.payload import tensor_of
from atoll.wire.lost import flaw
from atoll.wire.messages import Push, Replace, Setup, run_of

if TYPE_CHECKING:
    from atoll.server.model import Holder


class Checks:
    """Validates gradients for the chunks of one Setup, which `holder` holds."""

    def __init__(self, setup: Setup, layout: ChunkMap, holder: Holder) -> None:
        self._setup, self._layout, self._holder = setup, layout, holder

    def extent(self, chunk: int) -> int:
        """Number of elements of a chunk."""
        return self._holder.nbytes(chunk) // self._holder.dtype(chunk).itemsize

    def run_bytes(self, chunk: int, share: int, shares: int) -> slice:
        """Byte range within a chunk of run `share` out of `shares`."""
        size = self._holder.dtype(chunk).itemsize
        start, stop = run_of(self.extent(chunk), share, shares)
        return slice(start * size, stop * size)

    def places(self, chunk: int, present: bytes) -> list[tuple[int, int]] | None:
        """Return the (begin, end) element ranges for which a contribution has gradients, sorted; None: all
        elements."""
        if all(present):
            return None
        slots = zip(self._layout.chunks[chunk].slots, present, strict=True)
        return sorted((slot.offset, slot.offset + slot.numel) for slot, here in slots if here)

    def gradient(self, message: Push | Replace, payload: memoryview | None) -> str:
        """Return why a message is no valid gradient of a chunk or of a run of a chunk; empty if valid.

        Gradients of which none is present need no payload.
        """
        chunk, holder = message.chunk, self._holder
        if chunk not in holder.chunks:
            return f"this shard does not hold chunk {chunk}"
        if len(message.present) != holder.slots(chunk):
            return f"chunk {chunk} has {holder.slots(chunk)} parameters, not {len(message.present)}"
        share, shares = (message.share, message.shares) if isinstance(message, Push) else (0, 1)
        if share >= shares:
            return no_share(share, shares)
        run = self.run_bytes(chunk, share, shares)
        expected = run.stop - run.start
        got = payload.nbytes if payload is not None else 0
        if not got and not any(message.present):
            return ""
        if got == expected and (payload is not None or shares > 1):  # a run may be empty
            lost = message.lost if isinstance(message, Push) else None
            return flaw(lost, expected // holder.dtype(chunk).itemsize) if lost is not None else ""
        return wrong_size(chunk, payload, expected, f"'s share {share} of {shares}" if shares > 1 else "")

    def finite(self, worker: int, push: Push, payload: memoryview | None) -> str:
        """Return why gradients with NaN or infinity are refused; empty if all are finite. Under bsp always
        empty: there workers push before they check, and check the mean together."""
        setup = self._setup
        if setup.consistency == "bsp" or not setup.finite or not any(push.present) or not payload:
            return ""
        gradients = tensor_of(payload, self._holder.dtype(push.chunk))
        if is_finite(gradients):
            return ""
        start, _ = run_of(self.extent(push.chunk), push.share, push.shares)
        first = start + int(gradients.isfinite().logical_not().nonzero()[0])
        specs = self._layout.specs
        names = [
            specs[slot.parameter].name[:200]
            for slot in self._layout.chunks[push.chunk].slots
            if slot.offset <= first < slot.offset + slot.numel and 0 <= slot.parameter < len(specs)
        ]
        of = f" of {names[0]!r}" if names else ""
        return (
            f"worker {worker} pushed a gradient{of} with NaN or infinity, in iteration {push.iteration}: it "
            "is not taken; sync.nonfinite says what a worker does with one"
        )


def no_share(share: int, shares: int) -> str:
    """Message for a share index out of range."""
    return f"share {share} of {shares}: shares are counted from 0 to {shares - 1}"


def wrong_size(chunk: int, payload: memoryview | None, expected: int, of: str = "") -> str:
    """Message for a payload whose size does not fit its chunk."""
    return f"chunk {chunk}{of} takes {expected} bytes, and {0 if payload is None else payload.nbytes} came"
