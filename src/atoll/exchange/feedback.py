"""Error feedback: the parts of a gradient that a link or a codec drops are added to a later one
(docs/ltp-training.md).

For each element, times the contributions' weights: given = applied + held back. The shard's answer says which
parts were lost, and it counts: a contribution may be sent twice, and only one copy of it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.chunks import Chunk
from atoll.core.config import LinkOptions
from atoll.core.errors import RunError
from atoll.exchange.coding import CODED_DTYPE, PLAIN, Coding, bytes_of
from atoll.exchange.zeros import without_zeros
from atoll.net.lossychunks import Priorities
from atoll.net.returning import elements_in_block
from atoll.net.tunnel import Lossy
from atoll.wire.lost import BORNE, flaw, missing_of
from atoll.wire.messages import LostBlocks


@dataclass(frozen=True)
class Losses:
    """The losses of the gradients to one shard since the beginning.

    Attributes:
        borne: lost blocks that a later contribution carries, or that counted as absent.
        filled: lost blocks that were filled with other values.
        held: the sum of the absolute values that are held back now, over that of the latest gradient.
    """

    borne: int = 0
    filled: int = 0
    held: float = 0.0


@dataclass(frozen=True)
class Written:
    """A run of a contribution on its way.

    Attributes:
        payload: the encoded bytes.
        values: the values as the receiver reads them.
        lossy: the blocks of the payload that must arrive; None for all of it.
        shortened: True if the payload is without its runs of zeros (exchange/zeros.py).
    """

    payload: memoryview
    values: Tensor
    lossy: Lossy | None
    shortened: bool = False


class Feedback:
    """The error feedback of one model's trained chunks over one link. Contributions are known by their
    exchange's number.

    The residual of a chunk is sent with the next contribution, and with no other until that one is settled.
    Elements that are not finite are never held back, as they would never leave again.

    Attributes:
        dropped: the number of elements that were not held back since they were not finite.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        shard_of: Mapping[int, int],
        link: LinkOptions,
        coding: Coding = PLAIN,
        *,
        named: Callable[[Chunk], str] = lambda chunk: f"a parameter in chunk {chunk.id}",
        block_elements: Callable[[str], int] | None = None,
    ) -> None:
        """Check that parts of the chunks may be lost.

        Args:
            chunks: the trained chunks.
            shard_of: the shard of each chunk, by the chunk's id.
            link: how contributions travel.
            coding: how they are written. If neither link nor codec loses anything, they pass unchanged.
            named: returns the parameter to name if a chunk cannot be sent.
            block_elements: returns the elements of a dtype in a block on the link; None to compute it from
                `link`.

        Raises:
            PrepareError: No part of a chunk may be lost.
        """
        for chunk in chunks:
            facts = {"dtype": chunk.dtype, "parameter": named(chunk)}
            check("prepare", Choices({**facts, "link.lossy": link.lossy, "link.fill": link.fill}))
        self._link, self._coding, self._shard_of = link, coding, dict(shard_of)
        self._elements_on_link = block_elements or partial(elements_in_block, link)
        self._dtypes = {chunk.id: chunk.dtype for chunk in chunks}
        self._residuals = {
            chunk.id: _Residual(chunk) for chunk in chunks if link.holds_back or coding.loses(chunk.dtype)
        }
        self._priorities = Priorities(link.high_share)
        self._flights: dict[int, dict[int, _Flight]] = {}  # by exchange and chunk, until they are settled
        self._lost: dict[tuple[int, bool], int] = {}  # lost blocks, by shard and whether they were borne

    @property
    def loses(self) -> bool:
        """True if the link or the codec may lose anything."""
        return self._link.lossy or self.keeps

    @property
    def holds_back(self) -> bool:
        """True if parts that the link loses are sent with a later contribution."""
        return self._link.holds_back

    @property
    def keeps(self) -> bool:
        """True if parts that the link or the codec loses are sent with a later contribution."""
        return bool(self._residuals)

    @property
    def dropped(self) -> int:
        return sum(residual.dropped for residual in self._residuals.values())

    @property
    def under_way(self) -> list[int]:
        """The exchanges of contributions that are not settled."""
        return list(self._flights)

    # -- a contribution's way --------------------------------------------------------------------------

    def write(
        self,
        exchange: int,
        chunk: int,
        values: Tensor,
        present: Sequence[bool | int],
        weight: float,
        *,
        start: int = 0,
        along: Mapping[int, Tensor] | None = None,
        sparse: bool = False,
    ) -> Written:
        """Write a run of a contribution, with the residual added.

        Writing it again gives the same bytes, as the residual does not change until the contribution is
        settled. A contribution without weight goes without the residual, and no block of it may be lost.

        Args:
            exchange: the contribution's number.
            values: (elements,), the chunk's gradients from element `start` on. If no residual is added and no
                codec writes them, they are sent from where they lie, and must not change until the
                contribution is answered.
            present: for each slot of the chunk, whether it has a gradient; the residual of other slots stays.
            weight: the contribution's weight.
            along: by chunk, (extent,): added in place of the residual here, to a contribution that another
                member may have sent before (see `again`), so that its bytes do not depend on the sender.
            sparse: True if the gradients are sparse, so that most of them may be zeros: the payload then goes
                without its runs of zeros, unless that is no shorter, or parts of it may be lost.
        """
        flight, held = None, None
        drops = self._link.lossy or chunk in self._residuals
        if drops and weight > 0 and any(present) and values.numel():
            values = values.detach().to("cpu")  # it is sent from there
            stop = start + values.numel()
            flights = self._flights.setdefault(exchange, {})
            flight = flights.get(chunk)
            if flight is None:
                residual = self._residuals.get(chunk) if along is None else None
                claim = residual.claim(present, start, stop, weight) if residual is not None else None
                flight = flights[chunk] = _Flight(weight, claim)
            flight.start = start
            if along is not None:
                held = along[chunk][start:stop] if chunk in along else None
            elif flight.claim is not None:
                held = flight.claim.of(start, stop)
        added = values if held is None else values + held
        payload, read = self._code(exchange, chunk, added)
        lossy = None if flight is None else self._leave(exchange, chunk, added, read)
        shortened = without_zeros(payload) if sparse and lossy is None else None
        if shortened is None:
            return Written(payload, read, lossy)
        return Written(shortened, read, None, shortened=True)

    def _code(self, exchange: int, chunk: int, added: Tensor) -> tuple[memoryview, Tensor]:
        """Return a run's payload, and its values as the receiver reads them."""
        dtype = self._dtypes[chunk]
        if not self._coding.writes(dtype):
            return bytes_of(added), added
        payload = self._coding.encode(added.detach().to("cpu"), exchange + chunk)
        return payload, self._coding.decode(payload, added.numel()) if self._coding.loses(dtype) else added

    def _leave(self, exchange: int, chunk: int, added: Tensor, decoded: Tensor) -> Lossy | None:
        """Note what of a run leaves. Return the blocks of it that must arrive; None for all of it."""
        flight = self._flights[exchange][chunk]
        if decoded is not added and chunk in self._residuals:
            flight.error = added - decoded
        if not self._link.lossy:
            return None
        flight.decoded = decoded
        dtype, block = self._dtypes[chunk], self._block_elements(chunk)
        numbers = (decoded.float() if decoded.dtype == torch.bfloat16 else decoded).numpy()
        # If the link's blocks end within the codec's, no block is more important than another.
        high = self._priorities.high(chunk, numbers, block, flight.start) if block else None
        coded = CODED_DTYPE if self._coding.writes(dtype) else dtype
        return Lossy(chunk=chunk, iteration=exchange, dtype=coded, high=high)

    def _block_elements(self, chunk: int) -> int:
        """Return the elements of a chunk in a block on the link; 0 if that ends within a codec's block."""
        dtype = self._dtypes[chunk]
        if not self._coding.writes(dtype):
            return self._elements_on_link(dtype)
        return self._coding.elements_in(self._elements_on_link(CODED_DTYPE))

    def again(self, exchange: int) -> dict[int, Tensor]:
        """Prepare to send a contribution again, from here or from another member.

        Returns the residuals that were added to it, by chunk, (extent,), for reading only. Answers to the
        earlier copy are ignored.
        """
        found = {}
        for chunk, flight in self._flights.get(exchange, {}).items():
            flight.forget()
            if flight.claim is not None:
                found[chunk] = flight.claim.of(0, flight.claim.before.numel())
        return found

    def answered(self, exchange: int, chunk: int, lost: LostBlocks | None) -> None:
        """Note which blocks of a contribution's chunk were lost, as the shard's answer says. Only the first
        answer counts.

        Raises RunError for losses that cannot be of that chunk.
        """
        flight = self._flights.get(exchange, {}).get(chunk)
        if flight is None or flight.is_answered or flight.decoded is None:
            return
        decoded, flight.decoded, flight.is_answered = flight.decoded, None, True
        if lost is None:
            return
        elements, shard = decoded.numel(), self._shard_of[chunk]
        if wrong := flaw(lost, elements):
            raise RunError(f"shard {shard}, of chunk {chunk} of iteration {exchange}: {wrong}")
        missing = missing_of(lost, elements)
        size = max(1, self._block_elements(chunk) // lost.block)
        key = shard, self.holds_back or lost.how == BORNE
        self._lost[key] = self._lost.get(key, 0) + -(-int(missing.sum()) // size)
        if self.holds_back and missing.any():
            flight.lost = _Lost.of(decoded, missing, lost.block, flight.start)

    def settle(self, exchange: int, chunk: int | None = None, *, counted: bool = True) -> None:
        """Settle a contribution, or one chunk of it.

        Args:
            counted: True if it counted: the residual is then the part of it that was not applied. False
                restores the residual from before it.
        """
        flights = self._flights.get(exchange, {})
        for each in list(flights) if chunk is None else [chunk] * (chunk in flights):
            flight, residual = flights.pop(each), self._residuals.get(each)
            if residual is None:
                continue
            if not counted:
                residual.give_back(flight)
            else:
                residual.keep(flight)
        if not flights:
            self._flights.pop(exchange, None)

    def clear(self) -> None:
        """Drop all residuals and contributions on their way, as other parameters were loaded."""
        self._flights.clear()
        for residual in self._residuals.values():
            residual.values = None

    # -- reports, and checkpoints ----------------------------------------------------------------------

    def losses(self, shard: int) -> Losses:
        """Return the losses of the gradients to one shard up to now."""
        chunks = [chunk for chunk, place in self._shard_of.items() if place == shard]
        held = sum(self._residuals[chunk].size for chunk in chunks if chunk in self._residuals)
        whole = sum(self._priorities.size(chunk) for chunk in chunks)
        return Losses(
            borne=self._lost.get((shard, True), 0),
            filled=self._lost.get((shard, False), 0),
            held=held / whole if whole > 0 else 0.0,
        )

    def state(self) -> dict[int, tuple[Tensor, float]]:
        """Return the residuals, by chunk: (extent,), for reading only, and the weight that they refer to.

        Parts of contributions on their way are not in them.
        """
        return {
            chunk: (residual.values, residual.weight)
            for chunk, residual in self._residuals.items()
            if residual.values is not None
        }

    def restore(self, state: Mapping[int, tuple[Tensor, float]]) -> None:
        """Take over residuals that `state` has returned; values are copied."""
        for chunk, (values, weight) in state.items():
            if chunk in self._residuals:
                self._residuals[chunk].values = values.clone()
                self._residuals[chunk].weight = weight


@dataclass(frozen=True)
class _Claim:
    """The part of a residual that is sent with a contribution.

    Attributes:
        before: the residual before, (extent,).
        weight: the weight that it refers to.
        spans: the elements that are claimed; None for all.
        part: the factor by which they are sent.
        moved: the factor of them that has left the residual.
        changes: how often the residual had changed by then.
    """

    before: Tensor
    weight: float
    spans: list[slice] | None
    part: float
    moved: float
    changes: int

    def of(self, start: int, stop: int) -> Tensor:
        """Return the values to add to the run from element `start` to `stop`."""
        return _times(self.values[start:stop], self.part)

    @property
    def values(self) -> Tensor:
        """The claimed residual, (extent,), with zeros outside the spans."""
        if self.spans is None:
            return self.before
        values = torch.zeros_like(self.before)
        for here in self.spans:
            values[here] = self.before[here]
        return values


@dataclass(frozen=True)
class _Lost:
    """The lost blocks of a run of a chunk.

    Attributes:
        start: the run's first element.
        stop: the end of the run.
        block: elements in a block.
        which: indices of the lost whole blocks, (lost,).
        rows: the values of those blocks, (lost, block).
        rest: the values of the last block, if it is shorter than the others and lost; else empty.
    """

    start: int
    stop: int
    block: int
    which: Tensor
    rows: Tensor
    rest: Tensor

    @classmethod
    def of(cls, values: Tensor, missing: npt.NDArray[np.bool_], block: int, start: int) -> _Lost:
        whole = values.numel() // block
        which = torch.from_numpy(np.flatnonzero(missing[:whole]))
        rows = values[: whole * block].view(whole, block)[which]
        rest = values[whole * block :].clone() if len(missing) > whole and missing[-1] else values[:0]
        return cls(start, start + values.numel(), block, which, rows, rest)


@dataclass
class _Flight:
    """A chunk of a contribution on its way.

    Attributes:
        weight: the contribution's weight.
        claim: the residual that is sent with it.
        start: the first element of the run that this side sends.
        decoded: the run as the receiver reads it, until it is answered.
        error: the part of the run that the codec dropped.
        is_answered: True once the shard has answered.
        lost: the blocks that the link lost.
    """

    weight: float
    claim: _Claim | None
    start: int = 0
    decoded: Tensor | None = None
    error: Tensor | None = None
    is_answered: bool = False
    lost: _Lost | None = None

    def forget(self) -> None:
        """Forget what this side has sent of it, which does not count."""
        self.decoded = self.error = self.lost = None
        self.is_answered = False


class _Residual:
    """The residual of one chunk that no contribution has claimed.

    Attributes:
        values: (extent,), on the CPU and in the chunk's dtype; None for nothing.
        weight: the weight of the contributions that it refers to.
        dropped: elements that were not finite, and so were not held back.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self.values: Tensor | None = None
        self.weight = 1.0
        self.dropped = 0
        self._changes = 0

    @property
    def size(self) -> float:
        """The sum of the absolute values."""
        return 0.0 if self.values is None else float(self.values.abs().sum(dtype=torch.float64))

    def claim(self, present: Sequence[bool | int], start: int, stop: int, weight: float) -> _Claim | None:
        """Claim the residual of a contribution's elements `start` to `stop`; None for nothing.

        It is rescaled: sent * new weight = held * old weight. If the new weight is smaller, only as much is
        sent as counted before: a last batch of few samples must not be scaled up many times.
        """
        held = self.values
        if held is None:
            return None
        part, moved = min(1.0, self.weight / weight), min(1.0, weight / self.weight)
        spans: list[slice] | None = list(self._spans(present, start, stop))
        if all(present) and stop - start == held.numel() and moved == 1:
            spans, self.values = None, None
        else:
            rest = held.clone()
            for here in spans or ():
                rest[here] *= 1.0 - moved
            self.values = rest if rest.any() else None
        self._changes += 1
        return _Claim(held, self.weight, spans, part, moved, self._changes)

    def give_back(self, flight: _Flight) -> None:
        """Restore the residual that was claimed by a contribution that counted in no step."""
        claim = flight.claim
        if claim is None:
            return
        if self._changes == claim.changes:
            self.values, self.weight = claim.before, claim.weight
        elif self.values is None:
            self.values, self.weight = _times(claim.values, claim.moved), claim.weight
        else:
            self.values += _times(claim.values, claim.moved) * (claim.weight / self.weight)
        self._changes += 1

    def keep(self, flight: _Flight) -> None:
        """Hold back what the codec and the link dropped of a contribution that counts."""
        error, lost = flight.error, flight.lost
        if error is not None:
            run, factor = self._run(flight.start, flight.start + error.numel(), flight.weight)
            run.copy_(self._finite(run + error * factor))
        if lost is not None:
            run, factor = self._run(lost.start, lost.stop, flight.weight)
            whole = run.numel() // lost.block * lost.block
            blocks, rest = run[:whole].view(-1, lost.block), run[whole:]
            blocks[lost.which] = self._finite(blocks[lost.which] + lost.rows * factor)
            if lost.rest.numel():
                rest.copy_(self._finite(rest + lost.rest * factor))

    def _run(self, start: int, stop: int, weight: float) -> tuple[Tensor, float]:
        """Return the elements `start` to `stop` of the residual, to be changed, and the factor for values of
        this weight."""
        self._changes += 1
        if self.values is None:
            self.weight = weight
            self.values = torch.zeros(self._chunk.extent, dtype=getattr(torch, self._chunk.dtype))
        return self.values[start:stop], weight / self.weight

    def _spans(self, present: Sequence[bool | int], start: int, stop: int) -> Iterator[slice]:
        """Yield the slices of the present slots within a run."""
        for slot, here in zip(self._chunk.slots, present, strict=True):
            first, last = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if here and first < last:
                yield slice(first, last)

    def _finite(self, values: Tensor) -> Tensor:
        """Return `values` with 0 in place of elements that are not finite; changes `values`."""
        wrong = ~torch.isfinite(values)
        self.dropped += int(wrong.sum())
        return values.masked_fill_(wrong, 0)


def _times(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1 else values.mul(factor)
