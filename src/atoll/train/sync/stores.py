"""The places in which a worker of a parameter server has its gradients, their means and its values: the
device, or tiers.

An exchange has one `Store`. It reads gradients from the store as they leave, puts means and new values into
it, and asks it for the script's changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.exchange.coding import bytes_of
from atoll.net.returning import MOST_UNDER_WAY, Made, Payload
from atoll.tensors.binding import BoundChunk, Buffer
from atoll.tensors.changed import ChangedParameters, Looks
from atoll.tensors.sparse import copy_gradient
from atoll.tensors.torch_compat import version_of
from atoll.train.gradients.messages import BucketChunk
from atoll.train.gradients.reducer import Clipping
from atoll.train.gradients.tiersums import Holder, TierCarrier, gradient_from, note_nonfinite, values_from

_SMALL_BYTES = 4 * 2**20  # of a model on a CPU, of which every mean is compared: that takes a millisecond
UNDER_WAY = MOST_UNDER_WAY  # the most chunks that are on their way, out or in, at once

# Returns a run of a chunk's gradients as it leaves, given `present`, `start` and `stop`.
Leaving: TypeAlias = Callable[[Sequence[bool], int, int], memoryview]


class Store(Protocol):
    """The place of the chunks that one exchange sends and takes."""

    @property
    def window(self) -> int | None:
        """The most chunks that may be on their way in at once; None: all of them."""

    # -- gradients ----------------------------------------------------------------------------------------

    def begin_leaving(self) -> None:
        """Prepare for an iteration's gradients to leave."""

    def present(self, bound: BoundChunk) -> list[bool]:
        """Return, for each of a chunk's parameters, True if it has a gradient that is to leave."""

    def read(self, bound: BoundChunk, turn: int | None) -> Tensor | Leaving:
        """Return a chunk's gradients as they leave, (extent,), with zeros for absent ones.

        The result may be a function that puts a run of them together as it leaves. With a `turn` the
        gradients stay unchanged while those of another turn leave; None: they stay unchanged until the shard
        has answered.
        """

    def sparse_chunks(self) -> list[int]:
        """Return the chunks that have sparse gradients, or had some in an earlier iteration."""

    def put_away(self) -> Callable[[], None]:
        """Take the script's gradients out of the way of an iteration of others; return a function that puts
        them back."""

    def own_nonfinite(self) -> list[str] | None:
        """Return the parameters whose own gradients held NaN or infinity as they left; None if they were not
        examined."""

    # -- the mean -----------------------------------------------------------------------------------------

    def keep(self, bound: BoundChunk, values: Tensor) -> Tensor:
        """Return a chunk's mean, (extent,), in memory in which it can stay until `put_mean`."""

    def put_mean(self, bound: BoundChunk, values: Tensor, present: Sequence[bool]) -> None:
        """Let `p.grad` show a chunk's mean, (extent,), for parameters that are `present`, and None for
        others."""

    def end_mean(self) -> None:
        """Notice the script's edits from now on: all chunks of the mean are there."""

    def has_mean(self) -> bool:
        """True if the mean is still shown, and not all zeros."""

    def edited(self, of: Collection[int] | None = None) -> list[int]:
        """Return the chunks, among those `of` (None: all), in which the script has changed or replaced a
        gradient since the mean was shown."""

    def clip(self, by: Clipping) -> tuple[Tensor, float]:
        """Clip the gradients that are shown; return the norm before, and the factor for the shards.

        The factor is 1 if the script has edited the mean, since the edited mean itself is sent.
        """

    def made_of_mean(self, chunk: int) -> tuple[Sequence[bool], Tensor, Payload]:
        """Return a chunk's mean as the script has edited it: for each slot whether it has a gradient, the
        gradients, (extent,), and a payload with them."""

    # -- values -------------------------------------------------------------------------------------------

    def changed(self) -> str:
        """Return the first parameter to which the script has written; empty if there is none.

        A parameter that was changed and changed back, say to evaluate with an average of the weights, is
        unchanged.
        """

    def take_changes(self) -> list[int]:
        """Return the chunks to which the script has written, and forget these changes. Raises UserError for a
        change that may have come with others that were not noticed."""

    def made_of_values(self, chunk: int) -> tuple[Tensor, Payload]:
        """Return the values, (extent,), on the CPU, of a chunk that `take_changes` has named, and the payload
        that carries them."""

    def forget_changes(self) -> None:
        """Forget the script's changes so far: the shards know them too."""

    def begin_values(self) -> None:
        """Prepare for all values to change."""

    def write_values(self, bound: BoundChunk, values: Tensor, present: Sequence[bool] | None = None) -> None:
        """Give a chunk new values, (extent,).

        Parameters that are not `present`, if that is given, may keep theirs until `write_rest` or the next
        new values.
        """

    def write_rest(self, of: Collection[int] | None = None) -> None:
        """Give parameters that have kept former values the latest ones, in the chunks `of`; None: in all."""

    def end_values(self, *, stepped: bool) -> None:
        """Note that all values have come. `stepped`: they follow from a step of the script's."""

    def close(self) -> None:
        """Let go of all memory."""


class Resident:
    """The store on the device: each chunk's gradients and values lie there whole."""

    window = None

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        published: Mapping[int, BucketChunk] | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        """Hold the chunks.

        Args:
            chunks: the chunks.
            published: the chunks' gradients, by chunk; None: gradients lie where autograd leaves them.
            keeps: True to keep this worker's own gradients when the mean is shown, since no sum was shown
                before.
        """
        self._bounds, self._keeps = list(chunks), keeps
        self._gradients = published if published is not None else {}
        self._shown: list[tuple[Tensor | None, int, int]] = []
        self._means: dict[int, Tensor] = {}  # by chunk: the mean that is shown, if this one is compared
        self._mean_looks = Looks()
        self._is_small = sum(each.flat.nbytes for each in self._bounds) <= _SMALL_BYTES
        self._is_small &= all(each.flat.is_cpu for each in self._bounds)
        self._outgoing: dict[tuple[int, int], Buffer] = {}  # by chunk and turn: copies on their way
        self._written: dict[int, Tensor] = {}  # by chunk: the values that were written into the parameters
        self._is_written: set[int] = set()  # chunks that hold what was written into them
        # By chunk: the latest values, and for each slot whether its parameter has them:
        self._rest: dict[int, tuple[Tensor, Sequence[bool]]] = {}
        self._comparing = {bound.chunk.id: ChangedParameters(bound) for bound in chunks}
        self._versions, self._looks = self._seen(), Looks()

    def close(self) -> None:
        self._outgoing.clear()

    # -- gradients ----------------------------------------------------------------------------------------

    def present(self, bound: BoundChunk) -> list[bool]:
        return [parameter.grad is not None for parameter in bound.parameters]

    def read(self, bound: BoundChunk, turn: int | None) -> Tensor:
        chunk = self._gradients.get(bound.chunk.id)
        if chunk is None:
            flat = gradient_as_it_lies(bound, self.present(bound)) if turn is None else None
            return self._copy(bound, turn or 0) if flat is None else flat
        chunk.collect()
        flat = chunk.published.flat
        return flat if turn is None else flat.clone()

    def begin_leaving(self) -> None:
        """Do nothing: gradients are not examined as they leave."""

    def sparse_chunks(self) -> list[int]:
        if self._gradients:
            return [chunk_id for chunk_id, chunk in self._gradients.items() if chunk.had_sparse]
        return [bound.chunk.id for bound in self._bounds if _has_sparse(bound)]

    def put_away(self) -> Callable[[], None]:
        shown = []
        for parameter, view in (pair for chunk in self._gradients.values() for pair in chunk.slots()):
            gradient = parameter.grad  # a mean that the script keeps lies where others' sums go
            shown.append((parameter, view.clone() if gradient is view else gradient))
            parameter.grad = None

        def put_back() -> None:
            for parameter, gradient in shown:
                parameter.grad = gradient

        return put_back

    def own_nonfinite(self) -> list[str] | None:
        return None

    def _copy(self, bound: BoundChunk, turn: int) -> Tensor:
        place = bound.chunk.id, turn
        outgoing = self._outgoing.get(place)
        if outgoing is None:
            memory = bound.flat.new_zeros(bound.chunk.extent)
            outgoing = self._outgoing[place] = Buffer(bound.chunk, bound.parameters, memory)
        for parameter, view in zip(bound.parameters, outgoing.views, strict=True):
            copy_gradient(view, parameter.grad)
        return outgoing.flat

    # -- the mean -----------------------------------------------------------------------------------------

    def keep(self, bound: BoundChunk, values: Tensor) -> Tensor:
        return self._gradients[bound.chunk.id].published.flat.copy_(values)

    def put_mean(self, bound: BoundChunk, values: Tensor, present: Sequence[bool]) -> None:
        chunk = self._gradients[bound.chunk.id]
        if values is not chunk.published.flat:
            chunk.published.flat.copy_(values)
        chunk.publish(present) if self._keeps else chunk.show(present)

    def end_mean(self) -> None:
        self._shows(compares=self._mean_looks.compares() or self._is_small)

    def _shows(self, *, compares: bool) -> None:
        """Notice the script's edits from now on. `compares`: those too that raise no version."""
        self._shown = self._gradients_seen()
        self._means = {
            chunk_id: chunk.published.flat.detach().to("cpu", copy=True)
            for chunk_id, chunk in (self._gradients if compares else {}).items()
        }

    def has_mean(self) -> bool:
        views = [(p, view) for c in self._gradients.values() for p, view in c.slots()]
        return any(parameter.grad is view and bool(view.any()) for parameter, view in views)

    def edited(self, of: Collection[int] | None = None) -> list[int]:
        now = iter(zip(self._shown, self._gradients_seen(), strict=True))
        found = []
        for chunk_id, chunk in self._gradients.items():
            pairs = [next(now) for _ in chunk.bound.parameters]
            if of is not None and chunk_id not in of:
                continue
            seen = any(before[0] is not after[0] or before[1:] != after[1:] for before, after in pairs)
            if seen or self._is_edited_unseen(chunk_id):
                found.append(chunk_id)
        return found

    def _is_edited_unseen(self, chunk: int) -> bool:
        """True if the script has changed a chunk's mean without a new version, if this mean is compared."""
        if chunk not in self._means:
            return False
        now = self._gradients[chunk].published.flat.detach().cpu()
        names = self._comparing[chunk].names_between(self._means[chunk], now)
        if names and self._mean_looks.missed_some and not self._is_small:
            raise UserError(
                f"the gradient of parameter {names[0]!r} was changed by the script through p.grad.data, and "
                "changes before may have been lost; write with torch.no_grad(): p.grad.clamp_(...), say"
            )
        if names:
            self._mean_looks.compare_always()
        return bool(names)

    def clip(self, by: Clipping) -> tuple[Tensor, float]:
        edited = self.edited()
        norm, coefficient = by.clip()
        if edited:  # the edited gradients themselves are sent
            return norm, 1.0
        self._shows(compares=bool(self._means))
        return norm, coefficient

    def made_of_mean(self, chunk: int) -> tuple[Sequence[bool], Tensor, Payload]:
        gradients = self._gradients[chunk]
        present, flat = gradients.collect(), gradients.published.flat
        return present, flat, bytes_of(flat)

    def _gradients_seen(self) -> list[tuple[Tensor | None, int, int]]:
        """Return each gradient, its version, and where its values lie."""
        return [
            (p.grad, -1, 0) if p.grad is None else (p.grad, version_of(p.grad), _place(p.grad))
            for chunk in self._gradients.values()
            for p in chunk.bound.parameters
        ]

    # -- values -------------------------------------------------------------------------------------------

    def changed(self) -> str:
        for (name, version), (_, now) in zip(self._versions, self._seen(), strict=True):
            if version != now and self._differs(name):
                return name
        return self._changed_unseen() if self._looks.compares() else ""

    def take_changes(self) -> list[int]:
        seen = zip(self._versions, self._seen(), strict=True)
        raised = {name for (name, before), (_, now) in seen if before != now}
        compares, taken = self._looks.compares(), []
        for bound in self._bounds:
            former = self._written.get(bound.chunk.id)
            if former is None or not (compares or raised.intersection(bound.names)):
                continue
            now = bound.flat[: former.numel()].detach().cpu()
            changed = self._comparing[bound.chunk.id].names_between(former, now)
            if not raised.issuperset(changed):
                if self._looks.missed_some:
                    raise UserError(
                        f"parameter {changed[0]!r} was changed by the script through p.data, and changes "
                        "before may have been lost; write with torch.no_grad(): p.clamp_(...), say"
                    )
                self._looks.compare_always()
            if changed:
                self._written[bound.chunk.id] = now.clone()
                taken.append(bound.chunk.id)
        self._versions = self._seen()
        return taken

    def made_of_values(self, chunk: int) -> tuple[Tensor, Payload]:
        return self._written[chunk], bytes_of(self._written[chunk])

    def forget_changes(self) -> None:
        self._versions = self._seen()
        self._is_written.clear()

    def begin_values(self) -> None:
        """Do nothing: values are written one chunk after the other."""

    def write_values(self, bound: BoundChunk, values: Tensor, present: Sequence[bool] | None = None) -> None:
        former = self._written.get(bound.chunk.id)
        self._rest.pop(bound.chunk.id, None)
        if present is not None and former is not None and not all(present):
            self._rest[bound.chunk.id] = values, present
            values = values.clone()
            for run in _runs_without(present, bound):
                values[run] = former[run]
        changed = self._comparing[bound.chunk.id].between(former, values)
        self._written[bound.chunk.id] = values
        self._is_written.add(bound.chunk.id)
        bound.flat[: values.numel()].copy_(values)
        if changed:
            torch.autograd.graph.increment_version(changed)

    @torch.no_grad()
    def write_rest(self, of: Collection[int] | None = None) -> None:
        for bound in self._bounds if self._rest else ():
            if bound.chunk.id not in self._rest or (of is not None and bound.chunk.id not in of):
                continue
            values, present = self._rest.pop(bound.chunk.id)
            changed = self._comparing[bound.chunk.id].between(self._written[bound.chunk.id], values)
            self._written[bound.chunk.id] = values
            for run in _runs_without(present, bound):  # the script may have changed the others for a while
                bound.flat[run] = values[run].to(bound.flat.device)
            if changed:
                torch.autograd.graph.increment_version(changed)

    def end_values(self, *, stepped: bool) -> None:
        del stepped
        self._versions = self._seen()

    def _seen(self) -> list[tuple[str, int]]:
        return [
            (name, version_of(parameter))
            for bound in self._bounds
            for name, parameter in zip(bound.names, bound.parameters, strict=True)
        ]

    def _changed_unseen(self) -> str:
        """Return the name of a parameter whose values the script has changed without a new version."""
        for bound in self._bounds:
            if bound.chunk.id in self._is_written:
                values = self._written[bound.chunk.id]
                now = bound.flat[: values.numel()].cpu()
                for name in self._comparing[bound.chunk.id].names_between(values, now):
                    return name
        return ""

    def _differs(self, name: str) -> bool:
        bound = next(bound for bound in self._bounds if name in bound.names)
        values = self._written.get(bound.chunk.id)
        return values is None or not torch.equal(bound.flat[: values.numel()].cpu(), values)


class InTiers:
    """The store in tiers.

    A gradient is read from its tier when it leaves, and again if a shard dies before it has answered. Means
    and new values go into their tiers as they come. At most `UNDER_WAY` chunks are under way at once,
    whatever the model's size.
    """

    window = UNDER_WAY

    def __init__(self, chunks: Iterable[BoundChunk], held: Holder, sums: TierCarrier | None = None) -> None:
        """Hold the chunks. `sums` are the group's sums, in a group; None: gradients are this worker's own."""
        self._bounds = {bound.chunk.id: bound for bound in chunks}
        self._held, self._sums = held, sums
        self._nonfinite: list[str] = []  # parameters with NaN or infinity in this iteration's own gradients
        self._all_edited = False  # True if the mean was clipped after the script had edited it
        self._checksums: dict[int, list[int]] = {}  # by chunk: the checksum of each slot as it was written

    def close(self) -> None:
        """Do nothing: the tiers belong to the model."""

    # -- gradients ----------------------------------------------------------------------------------------

    def present(self, bound: BoundChunk) -> list[bool]:
        if self._sums is not None and self._sums.are_apart:
            return self._sums.present[bound.chunk.id]
        return self._held().present(bound.parameters)

    def read(self, bound: BoundChunk, turn: int | None) -> Leaving:
        del turn
        return partial(self._leaving, bound)

    def begin_leaving(self) -> None:
        self._nonfinite = []

    def sparse_chunks(self) -> list[int]:
        return []  # a gradient in tiers is dense, and leaves as it is read

    def put_away(self) -> Callable[[], None]:
        return lambda: None  # sums lie apart from the script's gradients

    def _leaving(self, bound: BoundChunk, present: Sequence[bool], start: int, stop: int) -> memoryview:
        """Return a run of a chunk's gradients, put together as it leaves."""
        held = self._held()
        if self._sums is None:
            flat = gradient_from(held, bound, present)
            note_nonfinite(bound, flat, self._nonfinite)
        elif not any(present):
            return bytes_of(torch.zeros(stop - start, dtype=bound.dtype))
        elif self._sums.are_apart:
            flat = held.read_sums(bound.chunk, bound.parameters)
        else:
            slots = zip(present, bound.chunk.slots, strict=True)
            within = [here and s.offset < stop and s.offset + s.numel > start for here, s in slots]
            flat = gradient_from(held, bound, within)
        run = flat[start:stop]
        return bytes_of(run if run.numel() == flat.numel() else run.clone())  # the copy frees the rest

    def own_nonfinite(self) -> list[str] | None:
        return list(self._nonfinite) if self._sums is None else None

    # -- the mean -----------------------------------------------------------------------------------------

    def keep(self, bound: BoundChunk, values: Tensor) -> Tensor:
        del bound
        return values  # a few chunks at a time

    def put_mean(self, bound: BoundChunk, values: Tensor, present: Sequence[bool]) -> None:
        self._held().put_gradients(bound.chunk, bound.parameters, present, values)

    def end_mean(self) -> None:
        self._all_edited = False

    def has_mean(self) -> bool:
        held = self._held()
        for bound in self._bounds.values():
            present = held.present(bound.parameters)
            if any(present) and bool(gradient_from(held, bound, present).any()):
                return True
        return False

    def edited(self, of: Collection[int] | None = None) -> list[int]:
        held = self._held()
        return [
            chunk_id
            for chunk_id, bound in self._bounds.items()
            if (of is None or chunk_id in of) and (self._all_edited or held.edited(bound.parameters))
        ]

    def clip(self, by: Clipping) -> tuple[Tensor, float]:
        edited = self.edited()
        norm, coefficient = by.clip()
        self._all_edited = self._all_edited or bool(edited)  # then the step sends all chunks
        return norm, 1.0 if edited else coefficient

    def made_of_mean(self, chunk: int) -> tuple[Sequence[bool], Tensor, Payload]:
        present, flat = self._edit(chunk)
        return present, flat, Made(lambda: bytes_of(self._edit(chunk)[1]))

    def _edit(self, chunk: int) -> tuple[Sequence[bool], Tensor]:
        held, bound = self._held(), self._bounds[chunk]
        present = held.present(bound.parameters)
        return present, gradient_from(held, bound, present)

    # -- values -------------------------------------------------------------------------------------------

    def changed(self) -> str:
        for bound, now in self._written_back():
            for name, before, after in zip(bound.names, self._checksums[bound.chunk.id], now, strict=True):
                if before != after:
                    return name
        self._held().written.clear()
        return ""

    def take_changes(self) -> list[int]:
        taken = []
        for bound, now in self._written_back():
            if now != self._checksums[bound.chunk.id]:
                self._checksums[bound.chunk.id] = now
                taken.append(bound.chunk.id)
        self._held().written.clear()
        return taken

    def made_of_values(self, chunk: int) -> tuple[Tensor, Payload]:
        values = partial(values_from, self._held(), self._bounds[chunk])
        return values(), Made(lambda: bytes_of(values()))

    def _written_back(self) -> Iterator[tuple[BoundChunk, list[int]]]:
        """Yield each chunk to which the script may have written, and its checksums now."""
        held = self._held()
        held.write_back()
        for bound in self._bounds.values() if held.written else ():
            if held.is_written(bound.parameters) and bound.chunk.id in self._checksums:
                yield bound, _checksums(bound, values_from(held, bound))

    def forget_changes(self) -> None:
        self._held().write_back()
        self._held().written.clear()
        self._checksums.clear()

    def begin_values(self) -> None:
        self._held().begin_values()

    def write_values(self, bound: BoundChunk, values: Tensor, present: Sequence[bool] | None = None) -> None:
        del present  # tensors that autograd saved are read from their tier again
        self._held().write_values(bound.chunk, bound.parameters, values)
        self._checksums[bound.chunk.id] = _checksums(bound, values)

    def write_rest(self, of: Collection[int] | None = None) -> None:
        """Do nothing: all values are written at once."""

    def end_values(self, *, stepped: bool) -> None:
        self._held().end_values(stepped=stepped)


def _runs_without(present: Sequence[bool], bound: BoundChunk) -> list[slice]:
    """Return the runs of a chunk's parameters that are not `present`."""
    slots = zip(bound.chunk.slots, present, strict=True)
    return [slice(slot.offset, slot.offset + slot.numel) for slot, here in slots if not here]


def gradient_as_it_lies(bound: BoundChunk, present: Sequence[bool]) -> Tensor | None:
    """Return the gradient of a chunk of one parameter, flat and in place, if it lies as in the chunk; else
    None.

    It must not change before the shard's answer, so it is of no use if the script goes on at once.
    """
    parameter = bound.parameters[0]
    gradient = parameter.grad
    if len(present) > 1 or not present[0] or gradient is None or gradient.layout != torch.strided:
        return None
    alike = gradient.dtype == bound.flat.dtype and gradient.stride() == parameter.stride()
    if not alike or gradient.numel() != bound.chunk.extent or gradient.device.type != "cpu":
        return None
    return gradient.detach().as_strided((bound.chunk.extent,), (1,))


def _has_sparse(bound: BoundChunk) -> bool:
    return any(parameter.grad is not None and parameter.grad.is_sparse for parameter in bound.parameters)


def _place(gradient: Tensor) -> int:
    return gradient.data_ptr() if gradient.layout == torch.strided else 0


def _checksums(bound: BoundChunk, flat: Tensor) -> list[int]:
    """Return a checksum of each slot of `flat`, (extent,)."""
    runs = (flat[slot.offset : slot.offset + slot.numel] for slot in bound.chunk.slots)
    return [zlib.crc32(bytes_of(run)) for run in runs]
