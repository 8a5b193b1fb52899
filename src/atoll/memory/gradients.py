"""Gradients of chunks that do not stay on the device.

As autograd finishes a parameter's gradient, a hook takes it away from the parameter, and a thread moves it
into its chunk's payload "gradient" while backward goes on. What the script reads as `p.grad` is a
`GradientProxy`: whatever is done with it is done with the payload. So `torch.nn.utils.clip_grad_norm_` works,
and never holds all gradients. Source: docs/memory.md, "Gradients".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.chunks import Chunk
from atoll.core.errors import DeadlineError, UserError
from atoll.memory import copies
from atoll.memory.interrupts import uninterrupted
from atoll.memory.leaving import Leaving, wait_for
from atoll.memory.payloads import GRADIENT, Payloads
from atoll.memory.proxies import GradientProxy, LostSource, OwnSource
from atoll.memory.stepqueue import DEADLINE, StepQueue
from atoll.tensors.binding import carve, check_usable
from atoll.tensors.torch_compat import (
    AsPlainTensors,
    count_unscaling,
    hook_first,
    storage_handle,
    storage_uses,
    version_of,
)

_GRAD: Any = torch.Tensor.grad  # autograd's own, whatever a parameter's class makes of `grad`


class TrainedChunk:
    """A chunk that receives gradients: `names[i]` and `parameters[i]` belong to `chunk.slots[i]`.

    To be made while the parameters have memory: their shapes and strides are noted.
    """

    def __init__(self, chunk: Chunk, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self.chunk, self.names, self.parameters = chunk, list(names), list(parameters)
        self.extent = chunk.extent  # elements
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.likes = [  # each parameter's shape, strides and dtype
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in parameters
        ]

    @property
    def words(self) -> str:
        """Return the chunk's parameters, for people: `'h.0.weight'`, or `'h.0.bias' to 'h.0.weight'`."""
        first, last = self.names[0], self.names[-1]
        return repr(first) if len(self.names) == 1 else f"{first!r} to {last!r}"

    def part(self, flat: Tensor, slot: int) -> Tensor:
        """The part of `flat`, (extent,), that is slot `slot`'s, with its parameter's shape and strides."""
        like = self.likes[slot]
        return flat.as_strided(
            like.shape, like.stride(), flat.storage_offset() + self.chunk.slots[slot].offset
        )

    def run(self, flat: Tensor, slot: int) -> Tensor:
        """The same, 1-D, in the order of memory."""
        place = self.chunk.slots[slot]
        return flat[place.offset : place.offset + place.numel]

    def place(self, slot: int) -> tuple[int, int]:
        """From where to where a slot lies; of one without elements, an element beside it: who holds that
        keeps what is kept of the slot."""
        place = self.chunk.slots[slot]
        if place.numel:
            return place.offset, place.offset + place.numel
        last = max(self.extent - 1, 0)
        return min(place.offset, last), min(place.offset, last) + 1


class Slot:
    """One parameter's gradient, as a proxy asks for it."""

    def __init__(self, chunk: ChunkGradients, index: int) -> None:
        self._chunk, self._index = chunk, index
        self.edits = 0  # how often the script has written into it, by the proxy
        self.proxy: weakref.ref[GradientProxy] | None = None

    def show(self) -> GradientProxy:
        """The proxy: the same object for as long as anybody has it."""
        proxy = self.proxy() if self.proxy is not None else None
        if proxy is None:
            trained = self._chunk.trained
            proxy = GradientProxy.of(self, trained.likes[self._index], trained.device)
            self.proxy = weakref.ref(proxy)
        return proxy

    @contextmanager
    def lend(self, *, overwrites: bool = False) -> Iterator[Tensor]:
        del overwrites  # what is there is at hand
        self._chunk.arrive()
        kept = self._chunk.kept.get(self._index)
        if kept is not None:
            before = version_of(kept)
            yield kept
            self._chunk.norms.pop(self._index, None)
            self._chunk.changes += 1
            if version_of(kept) != before:
                self._note_edit()
            return
        trained = self._chunk.trained
        with self._chunk.settled() as flat:
            with torch.inference_mode(False):  # a tensor that counts its versions
                home = carve(flat, trained.chunk.slots[self._index].offset, trained.likes[self._index])
                lent = self._chunk.on_device(home)
            before = version_of(lent)
            yield lent
            if version_of(lent) != before:
                self._note_edit()
                self._chunk.changes += 1
                self._chunk.norms.pop(self._index, None)
                with self._chunk.borrow(writes=True):
                    if lent is not home:
                        home.copy_(lent)

    def _note_edit(self) -> None:
        self.edits += 1
        self._chunk.note_edit(self._index)

    def keep(self) -> Tensor:
        self._chunk.arrive()
        kept = self._chunk.kept.get(self._index)
        if kept is None:
            like, device = self._chunk.trained.likes[self._index], self._chunk.trained.device
            with self.lend() as gradient, torch.inference_mode(False):
                kept = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
                self._chunk.kept[self._index] = kept.copy_(gradient)
                self._chunk.changes += 1  # whatever is done with it from now on
        return kept

    def leave(self) -> None:
        """This gradient is replaced: whoever has a view or the proxy has the old one for himself."""
        proxy = self.proxy() if self.proxy is not None else None
        if proxy is not None:
            failed = self._chunk.failed
            proxy.source = OwnSource(self.keep()) if failed is None else LostSource(failed)
        self.proxy = None
        self._chunk.kept.pop(self._index, None)


class ChunkGradients:
    """The state of one chunk's gradients; their values are in the payload."""

    slot_kind = Slot

    def __init__(self, trained: TrainedChunk, payloads: Payloads, steps: StepQueue, leaving: Leaving) -> None:
        """`steps` are those of the optimizer; `leaving` carries what comes."""
        self.trained, self.payloads, self.steps, self._leaving = trained, payloads, steps, leaving
        self.key = trained.chunk.id, GRADIENT
        payloads.add(self.key, trained.chunk.numel, trained.dtype)
        self.filled = False  # there is something in the payload
        self.present = [False] * len(trained.parameters)
        self.slots = [self.slot_kind(self, index) for index in range(len(trained.parameters))]
        # By slot: a copy in memory of its own that counts as the gradient, while the script has views of it.
        self.kept: dict[int, Tensor] = {}
        # What the values in the payload are still to be multiplied by, and in which slots.
        self.factors: list[tuple[Tensor, list[bool]]] = []
        self.norms: dict[int, Tensor] = {}  # by slot, of the gradients as they now are
        self.changes = 0  # of what counts as a gradient, by whomever
        self._is_read_ahead = False  # a step that is made ahead of its time reads the payload
        self._reading = threading.Condition()
        self.stepping = False  # a step that is under way will still read the payload
        self.coming: Future[None] | None = None  # the latest gradient that is, or was, on its way here
        self.stepped_after: Future[None] | None = None  # the latest that the step under way counts
        self.failed: BaseException | None = None  # what the first gradient that did not arrive has raised
        self.told = False  # somebody was told of it

    def note_edit(self, index: int) -> None:
        """The script has written to a slot's gradient."""

    def wait_stepped(self) -> None:
        """Wait until no step of the chunk is under way or to come."""
        self.steps.wait_stepped(self.trained.chunk.id)

    def arrive(self, *, whatever: bool = False) -> None:
        """Wait until no gradient is on its way here; raises what the way has raised, unless `whatever`."""
        wait_for(self.coming, f"the gradients of {self.trained.names[0]!r}")
        self.tell(whatever=whatever)

    def tell(self, *, whatever: bool = False) -> None:
        """Raise it, unless `whatever`."""
        if self.failed is not None and not whatever:
            self.told = True
            raise self.failed

    @contextmanager
    def borrow(self, *, writes: bool) -> Iterator[Tensor]:
        """The payload, (extent,), with the factors applied; the padding between slots is zero."""
        filled, self.filled = self.filled, True
        factors, self.factors = self.factors, []
        with (
            torch.no_grad(),
            self.payloads.pin(self.key, writes=writes or bool(factors), overwrites=not filled) as payload,
        ):
            flat = payload[: self.trained.extent]
            if not filled:
                self._clear_padding(flat)
            for factor, present in factors:
                for slot, here in enumerate(present):
                    if here:
                        self.counted(flat, slot).mul_(factor)
            yield flat

    def on_device(self, gradient: Tensor) -> Tensor:
        """Return a gradient on the device where its parameter is trained, copied where needed."""
        return gradient if gradient.device == self.trained.device else gradient.to(self.trained.device)

    def counted(self, flat: Tensor, slot: int) -> Tensor:
        """Return the payload's part that counts as this slot's gradient, 1-D."""
        return self.trained.run(flat, slot)

    def _clear_padding(self, flat: Tensor) -> None:
        end = 0
        for slot in self.trained.chunk.slots:
            flat[end : slot.offset].zero_()
            end = slot.offset + slot.numel

    @contextmanager
    def settled(self, *, writes: bool = False) -> Iterator[Tensor]:
        """The same, once all gradients are here and no step reads it any more, with what the script has
        changed in views."""
        self.arrive()
        self.wait_stepped()
        with self._with_edits(writes=writes) as flat:
            yield flat

    @contextmanager
    def _with_edits(self, *, writes: bool) -> Iterator[Tensor]:
        with self.borrow(writes=writes or bool(self.kept)) as flat:
            for index, kept in list(self.kept.items()):
                self.take_in(flat, index, kept)
                self.norms.pop(index, None)
                self.changes += 1
                if storage_uses(storage_handle(kept.untyped_storage())) <= 2:  # only we have it
                    del self.kept[index]
            yield flat

    def take_in(self, flat: Tensor, index: int, kept: Tensor) -> None:
        """Copy into the payload what counts as a slot's gradient."""
        self.trained.part(flat, index).copy_(kept)

    def take(self, index: int, gradient: Tensor, measures: float | None) -> None:
        """Let a gradient come; it counts from now on."""
        self.wait_stepped()  # here: a step that is begun later waits for the gradient
        self._change()
        add = partial(self._add, index, gradient, measures, adds=self.present[index])
        self.coming = self._leaving.carry(add, gradient.nbytes, gradient.device)
        self.present[index] = True

    def replace(self, index: int, gradient: Tensor) -> None:
        """The script has set this slot's gradient."""
        self.forget(index)
        self.take(index, gradient, None)
        self.arrive()  # the script may go on to change its tensor

    def _add(self, index: int, gradient: Tensor, measures: float | None, *, adds: bool) -> None:
        """Add a gradient, or set it; on the thread that carries it."""
        try:
            with self._with_edits(writes=True) as flat:
                part = self.trained.part(flat, index)
                copies.to_host(part, gradient, adds=adds)
                if index in self.kept:
                    self.kept[index].copy_(part)
                self.norms.pop(index, None)
                if measures is not None:
                    self.norms[index] = torch.linalg.vector_norm(part, measures)
        except BaseException as error:  # whatever it is, who reads the gradient is to raise it
            self.failed = self.failed or error

    def forget(self, index: int) -> None:
        """Drop a slot's gradient, if present."""
        if self.present[index]:
            self.arrive(whatever=True)
            self._change()
            self.slots[index].leave()
            self.present[index] = False
            self.norms.pop(index, None)
            self.release()

    def _change(self) -> None:
        """A gradient is to come, or to go: nobody may read the payload ahead of the step any more. Raises
        DeadlineError where a step that does so does not end."""
        with self._reading:
            self.changes += 1
            if not self._reading.wait_for(lambda: not self._is_read_ahead, DEADLINE):
                raise DeadlineError(
                    f"waited {DEADLINE:.0f} s for the optimizer's step of {self.trained.words} during "
                    "backward, which has not ended: this machine's processors stand still"
                )

    @contextmanager
    def read_ahead(self, changes: int) -> Iterator[Tensor | None]:
        """The gradients as they lie, (extent,), for a step ahead of its time; None where there were other
        `changes` by now. Until the end no gradient comes or goes."""
        with self._reading:
            self._is_read_ahead = self.changes == changes
        try:
            with self.payloads.pin(self.key) if self._is_read_ahead else nullcontext() as payload:
                yield None if payload is None else payload[: self.trained.extent]
        finally:
            with self._reading:
                self._is_read_ahead = False
                self._reading.notify_all()

    def release(self) -> None:
        """Let go of the payload if nothing in it counts any more."""
        if not any(self.present) and not self.stepping:
            self.factors, self.norms, self.filled = [], {}, False
            self.failed, self.told = None, False
            self.payloads.drop(self.key)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients, at once or as they are next read."""
        self.arrive()
        self.wait_stepped()
        self.factors.append((factor, list(self.present)))
        self.changes += 1
        self.norms.clear()
        for kept in self.kept.values():
            kept.mul_(factor.to(kept.device))

    def measure(self, norm_type: float) -> None:
        """Find the norms that are not known."""
        self.arrive()
        missing = {i for i, here in enumerate(self.present) if here and i not in self.norms}
        missing.update(self.kept)
        if missing:
            with self.settled() as flat:
                for index in missing:
                    self.norms[index] = torch.linalg.vector_norm(self.trained.part(flat, index), norm_type)


class Gradients:
    """The gradients of all chunks that are trained.

    They lie in `payloads`; `steps` are the optimizer's. `arrived(chunk, slot)` is told of each gradient that
    backward has finished, on autograd's thread, when it is on its way; `room` bytes of them may be, beside
    the latest. `beside` are parameters whose gradients are PyTorch's own, by their number: clipped with the
    others. Tensors given and taken have the parameter's shape, dtype and device.
    """

    def __init__(
        self,
        chunks: Sequence[TrainedChunk],
        payloads: Payloads,
        steps: StepQueue,
        arrived: Callable[[TrainedChunk, int], None] = lambda _chunk, _slot: None,
        room: int = 0,
        beside: Mapping[int, nn.Parameter] | None = None,
    ) -> None:
        count_unscaling()
        self._leaving = Leaving(room)
        self._chunks: Mapping[int, ChunkGradients] = {
            each.chunk.id: self._held(each, payloads, steps, self._leaving) for each in chunks
        }
        self.beside = beside or {}
        self._arrived = arrived
        self._places = {
            id(parameter): (each, index)
            for each in self._chunks.values()
            for index, parameter in enumerate(each.trained.parameters)
        }
        self._measures: float | None = None  # the kind of norm that is taken as gradients come
        self.latest_norm: Tensor | None = None  # the global norm when it was last asked for, before clipping
        self._handles = []
        for each, index in self._places.values():
            parameter = each.trained.parameters[index]
            self._handles.append(hook_first(parameter, self._hook(each, index)))
            gradient = _own_gradient(parameter)
            if gradient is not None:
                check_usable(each.trained.names[index], gradient)
                self._take(each, index)

    def _held(
        self, trained: TrainedChunk, payloads: Payloads, steps: StepQueue, leaving: Leaving
    ) -> ChunkGradients:
        return ChunkGradients(trained, payloads, steps, leaving)

    def close(self) -> None:
        """Leave the gradients to the parameters as plain tensors. Raises, at the end, why one has not arrived
        of which nobody was told; those of its chunk are None."""
        for handle in self._handles:
            handle.remove()
        untold: BaseException | None = None
        for each, index in self._places.values():
            each.arrive(whatever=True)
            untold = untold or (None if each.told else each.failed)
            self._give_back(each, index)
        self._places.clear()
        self._leaving.close()
        if untold is not None:
            raise untold

    def _give_back(self, each: ChunkGradients, index: int) -> None:
        if each.present[index]:
            gradient = each.slots[index].keep() if each.failed is None else None
            each.forget(index)
            _set_own_gradient(each.trained.parameters[index], gradient)

    def abandon(self) -> None:
        """Let go of the parameters and end the thread, after an error."""
        for handle in self._handles:
            handle.remove()
        self._leaving.close()

    @property
    def waited(self) -> float:
        """Seconds that backward has waited for gradients to leave."""
        return self._leaving.waited

    def once_arrived(self, job: Callable[[], None]) -> None:
        """Do `job` on the thread that carries gradients, after those that are on their way."""
        self._leaving.then(job)

    def holds(self, parameter: nn.Parameter) -> bool:
        """True if the parameter's gradient lies in a chunk."""
        return id(parameter) in self._places

    @uninterrupted
    def grad_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the value of `parameter.grad`: None, or a `GradientProxy`."""
        place = self._places.get(id(parameter))
        if place is None:
            return _own_gradient(parameter)
        each, index = place
        return each.slots[index].show() if each.present[index] else None

    @uninterrupted
    def set_grad(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """`parameter.grad = gradient`, whose values are copied."""
        place = self._places.get(id(parameter))
        if place is None:
            _set_own_gradient(parameter, gradient)
            return
        each, index = place
        _set_own_gradient(parameter, None)  # what a backward that was ended may have left
        if gradient is not None and self.grad_of(parameter) is gradient:
            return  # `p.grad *= 2`
        if gradient is None:
            each.forget(index)
            return
        name, like = each.trained.names[index], each.trained.likes[index]
        if gradient.shape != like.shape or gradient.dtype != like.dtype:
            raise UserError(
                f"{name}.grad was set to a tensor of shape {tuple(gradient.shape)} and {gradient.dtype}; "
                f"the parameter has {tuple(like.shape)} and {like.dtype}"
            )
        check_usable(name, gradient)
        values = gradient.detach().clone() if isinstance(gradient, GradientProxy) else gradient
        each.replace(index, values)

    @uninterrupted
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ of all gradients, to the bit; returns the norm before.

        Gradients are read a chunk at a time, and are multiplied as they are next read: by the step.
        """
        norm = self.norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the global norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be "
                "clipped; set error_if_nonfinite=False to go on regardless"
            )
        self.scale(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
        return norm

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar, as they are next read."""
        if float(factor) != 1.0:
            for each in self._chunks.values():
                if any(each.present):
                    each.scale(factor)
            for parameter in self.beside.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device))

    @uninterrupted
    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The global norm, a scalar: per-parameter norms, combined in registration order."""
        norm_type = float(norm_type)
        if norm_type != self._measures:
            self._measures = norm_type
            for each in self._chunks.values():
                each.norms.clear()
        norms = self._norms(norm_type)
        if not norms:
            return torch.tensor(0.0)
        first = norms[min(norms)]
        stacked = torch.stack([norms[parameter].to(first.device) for parameter in sorted(norms)])
        self.latest_norm = torch.linalg.vector_norm(stacked, norm_type)
        return self.latest_norm

    def _norms(self, norm_type: float) -> dict[int, Tensor]:
        """By the number of its parameter, the norm of each gradient."""
        norms: dict[int, Tensor] = {}
        for each in self._chunks.values():
            each.measure(norm_type)
            for index, norm in each.norms.items():
                norms[each.trained.chunk.slots[index].parameter] = norm
        for number, parameter in self.beside.items():
            if parameter.grad is not None:
                norms[number] = torch.linalg.vector_norm(parameter.grad, norm_type)
        return norms

    def changes(self, chunk: int) -> int | None:
        """Counts what has happened to a chunk's gradients; None where they are not yet as they lie."""
        each = self._chunks[chunk]
        return None if each.kept or each.factors or each.failed is not None else each.changes

    def once_here(self, chunk: int, job: Callable[[], None]) -> None:
        """Do `job` when the chunk's gradients that are on their way have come: here, or on the thread that
        carries them."""
        coming = self._chunks[chunk].coming
        assert coming is not None
        coming.add_done_callback(lambda _: job())

    def read_ahead(self, chunk: int, changes: int) -> AbstractContextManager[Tensor | None]:
        """A chunk's gradients as they lie, for a step ahead of its time. See `ChunkGradients.read_ahead`."""
        return self._chunks[chunk].read_ahead(changes)

    def present(self, chunk: int) -> tuple[bool, ...]:
        """Which slots of a chunk have a gradient."""
        return tuple(self._chunks[chunk].present)

    @contextmanager
    def whole(self, chunk: int) -> Iterator[Tensor]:
        """The chunk's gradients where they lie, (extent,), zeros where there are none: to be read, or, after
        `come_as`, changed."""
        each = self._chunks[chunk]
        with each.settled(writes=True) as flat:
            for slot, here in enumerate(each.present):
                if not here:
                    each.trained.run(flat, slot).zero_()
            yield flat
        each.release()

    def come_as(self, chunk: int, present: Sequence[bool]) -> None:
        """Within `whole`: what is written there are the gradients of these slots. Whoever has a view of one
        that was there has it for himself."""
        each = self._chunks[chunk]
        for index in list(each.kept):
            each.slots[index].leave()
        each.norms.clear()
        each.present = list(present)

    def begin_step(self, chunk: int) -> tuple[bool, ...]:
        """The chunk's gradients as they are now are to be stepped with; which slots have one."""
        each = self._chunks[chunk]
        if each.kept:
            with each.settled():
                pass
        each.stepping, each.stepped_after = True, each.coming
        return tuple(each.present)

    def end_step(self, chunk: int) -> None:
        """The step that was begun is over, or will not come: the gradients may be let go of."""
        each = self._chunks[chunk]
        each.stepping = False
        each.release()

    @contextmanager
    def stepped_with(self, chunk: int) -> Iterator[Tensor]:
        """Those gradients, (extent,), at the end of which the step is over; what it made of them counts."""
        each = self._chunks[chunk]
        try:
            # Not for what a later backward sends: it waits for this step.
            wait_for(each.stepped_after, f"the gradients of {each.trained.names[0]!r}")
            each.tell()
            with each.borrow(writes=False) as flat:
                before = version_of(flat)
                yield flat
                if version_of(flat) != before:
                    with each.payloads.pin(each.key, writes=True):  # so that it is kept where it leaves
                        each.norms.clear()
        finally:
            each.stepping = False
            each.release()

    def _hook(self, each: ChunkGradients, index: int) -> Callable[[Tensor], None]:
        @uninterrupted
        def on_gradient(_: Tensor) -> None:
            self._take(each, index)
            self._arrived(each.trained, index)

        return on_gradient

    def _take(self, each: ChunkGradients, index: int) -> None:
        """Move the gradient that autograd has left at the parameter. A parameter used in a reentrant
        checkpoint is served twice in a backward: each time what came since the last."""
        parameter = each.trained.parameters[index]
        gradient = _own_gradient(parameter)
        assert gradient is not None
        _set_own_gradient(parameter, None)  # first: what is left there the next backward would add to
        check_usable(each.trained.names[index], gradient)
        each.take(index, gradient, self._measures)


def _own_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient that autograd has left at the parameter, whatever its class makes of `grad`."""
    with AsPlainTensors():
        gradient: Tensor | None = _GRAD.__get__(parameter)
        return gradient


def _set_own_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    with AsPlainTensors():
        _GRAD.__set__(parameter, gradient)
