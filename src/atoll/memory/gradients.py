"""Gradients of chunks that do not stay on the device.

When autograd has finished a parameter's gradient, a hook takes the gradient away from the parameter, and a
thread copies it into its chunk's payload "gradient" while backward goes on. The script reads `p.grad` as a
`GradientProxy`, which passes every operation on to the payload. So `torch.nn.utils.clip_grad_norm_` works,
and never holds all gradients at once. Source: docs/memory.md, "Gradients".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
from atoll.tensors.binding import carve, dtype_as, laid
from atoll.tensors.graphs import with_graph
from atoll.tensors.sparse import check_summable
from atoll.tensors.torch_compat import AsPlainTensors, hook_first, storage_handle, storage_uses, version_of
from atoll.tensors.torch_scaling import count_unscaling

_GRAD: Any = torch.Tensor.grad  # autograd's own, whatever a parameter's class makes of `grad`


@dataclass
class GradientKinds:
    """The unusual kinds of gradients that this worker has had.

    Attributes:
        sparse: one was sparse; in a chunk it is dense.
        graphs: one carried a graph, which lies outside the budgets.
    """

    sparse: bool = False
    graphs: bool = False


class TrainedChunk:
    """A chunk that receives gradients: `names[i]` and `parameters[i]` belong to `chunk.slots[i]`.

    Construct it while the parameters have memory: it notes their shapes and strides. The chunk's elements are
    real: a complex parameter has two for each of its own.
    """

    def __init__(self, chunk: Chunk, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self.chunk, self.names, self.parameters = chunk, list(names), list(parameters)
        self.extent = chunk.extent  # elements
        self.dtype, self.device = parameters[0].dtype.to_real(), parameters[0].device
        self.likes = [  # each parameter's shape, strides and dtype
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in parameters
        ]

    @property
    def words(self) -> str:
        """The chunk's parameters, for people: `'h.0.weight'`, or `'h.0.bias' to 'h.0.weight'`."""
        first, last = self.names[0], self.names[-1]
        return repr(first) if len(self.names) == 1 else f"{first!r} to {last!r}"

    def part(self, flat: Tensor, slot: int) -> Tensor:
        """Return the view of `flat`, (extent,), that is a slot's, with its parameter's shape and strides;
        complex if the parameter is."""
        return laid(self.run(flat, slot), self.likes[slot])

    def dtype_of(self, slot: int, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a slot's `part` of a payload of `dtype`."""
        return dtype_as(dtype, self.likes[slot])

    def run(self, flat: Tensor, slot: int) -> Tensor:
        """Return the view of `flat`, (extent,), that is a slot's: 1-D, (numel,), in the order of memory."""
        place = self.chunk.slots[slot]
        return flat[place.offset : place.offset + place.numel]

    def place(self, slot: int) -> tuple[int, int]:
        """Return the (begin, end) of a slot's elements in the chunk.

        For a slot without elements it is the place of a neighbouring element: whoever holds that element
        keeps the slot's state.
        """
        place = self.chunk.slots[slot]
        if place.numel:
            return place.offset, place.offset + place.numel
        last = max(self.extent - 1, 0)
        return min(place.offset, last), min(place.offset, last) + 1


class GradientSlot:
    """One parameter's gradient, as the `GradientSource` of its proxy."""

    def __init__(self, chunk: ChunkGradients, index: int) -> None:
        self._chunk, self._index = chunk, index
        self.edits = 0  # how often the script has written into the gradient through the proxy
        self.proxy: weakref.ref[GradientProxy] | None = None

    def show(self) -> GradientProxy:
        """Return the gradient's proxy: one object for as long as the script holds it."""
        proxy = self.proxy() if self.proxy is not None else None
        if proxy is None:
            trained = self._chunk.trained
            proxy = GradientProxy.of(self, trained.likes[self._index], trained.device)
            self.proxy = weakref.ref(proxy)
        return proxy

    def see(self) -> Tensor:
        """Return what the script sees as `p.grad`: a tensor if it carries a graph, else the proxy."""
        chunk, kept = self._chunk, self._chunk.kept.get(self._index)
        if kept is not None and not kept.requires_grad:  # detached, as by zero_grad(set_to_none=False)
            chunk.graphs.pop(self._index, None)
        return self.keep() if self._index in chunk.graphs else self.show()

    @contextmanager
    def lend(self, *, overwrites: bool = False) -> Iterator[Tensor]:
        del overwrites  # the old content costs nothing to give
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
            with torch.inference_mode(False):  # so that the tensor counts its versions
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
                with torch.no_grad():
                    kept.copy_(gradient)
                own = self._chunk.graphs.get(self._index)
                kept = kept if own is None else with_graph(kept, own)
                self._chunk.kept[self._index] = kept
                self._chunk.changes += 1  # the script may write to the copy unseen from now on
        return kept

    def leave(self) -> None:
        """Detach the proxy and the script's views, before the gradient is replaced or dropped.

        Whoever has them keeps the old gradient, which counts for nobody else any more.
        """
        proxy = self.proxy() if self.proxy is not None else None
        if proxy is not None:
            failed = self._chunk.failed
            proxy.source = OwnSource(self.keep()) if failed is None else LostSource(failed)
        self.proxy = None
        self._chunk.kept.pop(self._index, None)


class ChunkGradients:
    """The state of one chunk's gradients. The gradients themselves lie in the chunk's payload."""

    slot_kind = GradientSlot

    def __init__(self, trained: TrainedChunk, payloads: Payloads, steps: StepQueue, leaving: Leaving) -> None:
        """Add the chunk's payload "gradient" to `payloads`.

        Args:
            steps: the optimizer's steps.
            leaving: carries gradients off the device.
        """
        self.trained, self.payloads, self.steps, self._leaving = trained, payloads, steps, leaving
        self.key = trained.chunk.id, GRADIENT
        payloads.add(self.key, trained.chunk.numel, trained.dtype)
        self.filled = False  # there is something in the payload
        self.present = [False] * len(trained.parameters)
        self.slots = [self.slot_kind(self, index) for index in range(len(trained.parameters))]
        # By slot: a copy that counts as the gradient while the script has views of it.
        self.kept: dict[int, Tensor] = {}
        # By slot: this worker's own gradient, if it carries a graph. What the script sees has this graph.
        self.graphs: dict[int, Tensor] = {}
        # Factors by which the payload is still to be multiplied, each with a flag for each slot.
        self.factors: list[tuple[Tensor, list[bool]]] = []
        self.norms: dict[int, Tensor] = {}  # by slot, the norms of the present gradients that are known
        self.changes = 0  # how often any of the chunk's gradients may have changed
        self._is_read_ahead = False  # a speculative step reads the payload now
        self._reading = threading.Condition()
        self.stepping = False  # a step that is under way will still read the payload
        self.coming: Future[None] | None = None  # the latest gradient that is, or was, on its way here
        self.stepped_after: Future[None] | None = None  # the latest gradient that the step under way uses
        self.failed: BaseException | None = None  # the error of the first gradient that did not arrive
        self.told = False  # `failed` was raised to somebody

    def note_edit(self, index: int) -> None:
        """Note that the script has written to a slot's gradient. Here nothing keeps count."""

    def wait_stepped(self) -> None:
        """Wait until no step of the chunk is under way or to come."""
        self.steps.wait_stepped(self.trained.chunk.id)

    def arrive(self, *, whatever: bool = False) -> None:
        """Wait until no gradient is on its way here. Raises the error of one that failed, unless
        `whatever`."""
        wait_for(self.coming, f"the gradients of {self.trained.names[0]!r}")
        self.tell(whatever=whatever)

    def tell(self, *, whatever: bool = False) -> None:
        """Raise the error of a gradient that did not arrive, if there is one, unless `whatever`."""
        if self.failed is not None and not whatever:
            self.told = True
            raise self.failed

    @contextmanager
    def borrow(self, *, writes: bool) -> Iterator[Tensor]:
        """Pin the payload, (extent,), with outstanding factors applied. The padding between slots is zero."""
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
        """Borrow the payload when all gradients have arrived and no step reads it.

        Changes that the script made through views are copied into the payload first.
        """
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
                uses = storage_uses(storage_handle(kept.untyped_storage()))
                if uses <= 2 and index not in self.graphs:  # the script has no view left
                    del self.kept[index]
            yield flat

    def take_in(self, flat: Tensor, index: int, kept: Tensor) -> None:
        """Copy a slot's gradient from the copy that the script has views of into the payload."""
        self.trained.part(flat, index).copy_(kept)

    def take(self, index: int, gradient: Tensor, measures: float | None) -> None:
        """Start a gradient on its way to the payload. It counts from now on, and adds to one that is
        present."""
        self.wait_stepped()  # here: a step that is begun later waits for the gradient
        self._change()
        if gradient.requires_grad:
            self._note_graph(index, gradient)
            gradient = gradient.detach()
        add = partial(self._add, index, gradient, measures, adds=self.present[index])
        self.coming = self._leaving.carry(add, gradient.nbytes, gradient.device)
        self.present[index] = True

    def _note_graph(self, index: int, gradient: Tensor) -> None:
        """Keep the graph of a gradient that is about to be taken. As in plain torch, the sum with a gradient
        that is present is another tensor."""
        before = self.kept.get(index, self.graphs.get(index))
        if self.present[index]:
            with self.settled():  # takes in what the script has changed in views
                pass
            self.slots[index].leave()
        if before is not None:
            with torch.enable_grad():
                gradient = before + gradient
        self.graphs[index] = gradient

    def drop_graphs(self) -> None:
        """Let all gradients be plain values again."""
        for index in self.graphs.keys() & self.kept.keys():
            self.kept[index] = self.kept[index].detach()
        self.graphs.clear()

    def replace(self, index: int, gradient: Tensor) -> None:
        """Set a slot's gradient to one that the script has assigned."""
        self.forget(index)
        self.take(index, gradient, None)
        self.arrive()  # the script may go on to change its tensor

    def _add(self, index: int, gradient: Tensor, measures: float | None, *, adds: bool) -> None:
        """Add a gradient to the slot's, or set it, on the thread that carries gradients."""
        try:
            with self._with_edits(writes=True) as flat:
                part = self.trained.part(flat, index)
                copies.to_host(part, gradient, adds=adds)
                if index in self.kept:
                    self.kept[index].copy_(part)
                self.norms.pop(index, None)
                if measures is not None:
                    self.norms[index] = torch.linalg.vector_norm(part, measures)
        except BaseException as error:  # raised to whoever reads the gradient
            self.failed = self.failed or error

    def forget(self, index: int) -> None:
        """Drop a slot's gradient, if present."""
        if self.present[index]:
            self.arrive(whatever=True)
            self._change()
            self.slots[index].leave()
            self.graphs.pop(index, None)
            self.present[index] = False
            self.norms.pop(index, None)
            self.release()

    def _change(self) -> None:
        """Announce that a gradient is about to come or go: no speculative step may read the payload any more.

        Raises DeadlineError if a speculative step that reads it does not end.
        """
        with self._reading:
            self.changes += 1
            if not self._reading.wait_for(lambda: not self._is_read_ahead, DEADLINE):
                raise DeadlineError(
                    f"waited {DEADLINE:.0f} s for the optimizer's step of {self.trained.words} during "
                    "backward, which has not ended: this machine's processors stand still"
                )

    @contextmanager
    def read_ahead(self, changes: int) -> Iterator[Tensor | None]:
        """Lend the gradients as they lie, (extent,), to a speculative step; None if `changes` is no longer
        the count.

        No gradient comes or goes within.
        """
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
        """Drop the payload if no gradient is present and no step reads it."""
        if not any(self.present) and not self.stepping:
            self.factors, self.norms, self.filled = [], {}, False
            self.failed, self.told = None, False
            self.payloads.drop(self.key)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients that are present: the payload when it is next read, copies at once."""
        self.arrive()
        self.wait_stepped()
        self.factors.append((factor, list(self.present)))
        self.changes += 1
        self.norms.clear()
        with torch.no_grad():
            for kept in self.kept.values():
                kept.mul_(factor.to(kept.device))

    def measure(self, norm_type: float) -> None:
        """Compute the norms of order `norm_type` that are not known."""
        self.arrive()
        missing = {i for i, here in enumerate(self.present) if here and i not in self.norms}
        missing.update(self.kept)
        if missing:
            with self.settled() as flat:
                for index in missing:
                    self.norms[index] = torch.linalg.vector_norm(self.trained.part(flat, index), norm_type)


class ModelGradients:
    """The gradients of all chunks that are trained.

    Tensors given and taken have the parameter's shape, dtype and device.

    Args:
        payloads: hold the gradients.
        steps: the optimizer's steps.
        arrived: called with (chunk, slot), on autograd's thread, when a gradient that backward has finished
            is on its way.
        room: bytes of gradients that may be on their way, beside the latest.
        beside: parameters whose gradients are PyTorch's own, by their number in the model; they are clipped
            with the others.
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
        self._measures: float | None = None  # the order of the norm that is taken of arriving gradients
        self.kinds = GradientKinds()
        self.latest_norm: Tensor | None = None  # the latest global norm, before clipping
        self._handles = []
        for each, index in self._places.values():
            parameter = each.trained.parameters[index]
            self._handles.append(hook_first(parameter, self._hook(each, index)))
            gradient = own_gradient(parameter)
            if gradient is not None:
                self._take(each, index)
                each.arrive()

    def _held(
        self, trained: TrainedChunk, payloads: Payloads, steps: StepQueue, leaving: Leaving
    ) -> ChunkGradients:
        return ChunkGradients(trained, payloads, steps, leaving)

    def close(self) -> None:
        """Give the gradients to the parameters as plain tensors.

        A chunk of which a gradient did not arrive has none. The error is raised at the end, unless it was
        raised to somebody before.
        """
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
            set_own_gradient(each.trained.parameters[index], gradient)

    def leave(self) -> list[tuple[nn.Parameter, Callable[[], Tensor]]]:
        """Remove the hooks and end the thread. Return the parameters that have a gradient, each with a
        function that reads a copy of it, until `left`."""
        for handle in self._handles:
            handle.remove()
        found: list[tuple[nn.Parameter, Callable[[], Tensor]]] = []
        for each, index in self._places.values():
            each.arrive()
            if each.present[index]:
                found.append((each.trained.parameters[index], partial(_copy_of, each.slots[index])))
        self._leaving.close()
        return found

    def left(self) -> None:
        """Let proxies that the script holds keep what they show: the chunks' gradients go."""
        for each, index in self._places.values():
            if each.present[index]:
                each.slots[index].leave()
        self._places.clear()

    def abandon(self) -> None:
        """Remove the hooks and end the thread, after an error."""
        for handle in self._handles:
            handle.remove()
        self._leaving.close()

    @property
    def waited(self) -> float:
        """Seconds that backward has waited for gradients to leave."""
        return self._leaving.waited

    def once_arrived(self, job: Callable[[], None]) -> None:
        """Run `job` on the thread that carries gradients, after those that are on their way."""
        self._leaving.then(job)

    def holds(self, parameter: nn.Parameter) -> bool:
        """True if the parameter's gradient lies in a chunk."""
        return id(parameter) in self._places

    @uninterrupted
    def grad_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the value of `parameter.grad`: None, a `GradientProxy`, or a tensor that carries a graph."""
        place = self._places.get(id(parameter))
        if place is None:
            return own_gradient(parameter)
        each, index = place
        if not each.present[index]:
            return None
        return each.slots[index].see()

    @uninterrupted
    def set_grad(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Assign `parameter.grad = gradient`, by copying its values. Raises UserError for another shape or
        dtype."""
        place = self._places.get(id(parameter))
        if place is None:
            set_own_gradient(parameter, gradient)
            return
        each, index = place
        set_own_gradient(parameter, None)  # an interrupted backward may have left one there
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
        gradient = self._usable(name, gradient)
        values = gradient.detach().clone() if isinstance(gradient, GradientProxy) else gradient
        each.replace(index, values)

    @uninterrupted
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip as torch.nn.utils.clip_grad_norm_ does, to the bit; return the norm before.

        Gradients are measured a chunk at a time, and multiplied when they are next read: by the step. Raises
        RuntimeError for a norm that is not finite if `error_if_nonfinite`.
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
        """Multiply all gradients by a scalar: those of chunks when they are next read."""
        if float(factor) != 1.0:
            for each in self._chunks.values():
                if any(each.present):
                    each.scale(factor)
            for parameter in self.beside.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device))

    @uninterrupted
    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the global norm, a scalar: the parameters' norms combined in registration order."""
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
        """Return the norm of each gradient, by its parameter's number."""
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
        """Return the count of changes to a chunk's gradients; None while the payload differs from them
        (views, factors, errors)."""
        each = self._chunks[chunk]
        return None if each.kept or each.factors or each.failed is not None else each.changes

    def once_here(self, chunk: int, job: Callable[[], None]) -> None:
        """Run `job` when the chunk's gradients that are on their way have arrived: on this thread if they
        have, else on the carrying thread."""
        coming = self._chunks[chunk].coming
        assert coming is not None
        coming.add_done_callback(lambda _: job())

    def read_ahead(self, chunk: int, changes: int) -> AbstractContextManager[Tensor | None]:
        """Lend a chunk's gradients to a speculative step. See `ChunkGradients.read_ahead`."""
        return self._chunks[chunk].read_ahead(changes)

    def present(self, chunk: int) -> tuple[bool, ...]:
        """Return one flag for each slot of a chunk: whether it has a gradient."""
        return tuple(self._chunks[chunk].present)

    @contextmanager
    def whole(self, chunk: int) -> Iterator[Tensor]:
        """Lend the chunk's gradients where they lie, (extent,), with zeros where there are none, to be read.

        They may be changed after `come_as`.
        """
        each = self._chunks[chunk]
        with each.settled(writes=True) as flat:
            for slot, here in enumerate(each.present):
                if not here:
                    each.trained.run(flat, slot).zero_()
            yield flat
        each.release()

    def come_as(self, chunk: int, present: Sequence[bool]) -> None:
        """Within `whole`, let what is written there be the gradients of the slots flagged in `present`.

        Whoever has a view of an older gradient keeps the older values.
        """
        each = self._chunks[chunk]
        for index in list(each.kept):
            each.slots[index].leave()
        each.norms.clear()
        each.present = list(present)

    def drop_graphs(self) -> None:
        """Let all gradients be plain values again, as a step is made: each worker has the graph of its own
        part alone."""
        for each in self._chunks.values():
            each.drop_graphs()

    def begin_step(self, chunk: int) -> tuple[bool, ...]:
        """Begin a step with a chunk's gradients as they are now; return which slots have one."""
        each = self._chunks[chunk]
        if each.kept:
            with each.settled():
                pass
        each.stepping, each.stepped_after = True, each.coming
        return tuple(each.present)

    def end_step(self, chunk: int) -> None:
        """End a step that is over or cancelled: the chunk's gradients may be dropped."""
        each = self._chunks[chunk]
        each.stepping = False
        each.release()

    @contextmanager
    def stepped_with(self, chunk: int) -> Iterator[Tensor]:
        """Lend the gradients, (extent,), that `begin_step` has fixed. At the end the step is over.

        What the optimizer writes into them counts as the gradients (SGD's foreach kernels with nesterov may
        write there).
        """
        each = self._chunks[chunk]
        try:
            # Later gradients are not waited for: they wait for this step.
            wait_for(each.stepped_after, f"the gradients of {each.trained.names[0]!r}")
            each.tell()
            with each.borrow(writes=False) as flat:
                before = version_of(flat)
                yield flat
                if version_of(flat) != before:
                    with each.payloads.pin(each.key, writes=True):  # so that eviction keeps the change
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
        """Take the gradient that autograd has left at the parameter.

        A parameter used in a reentrant checkpoint is served twice in a backward: each time with the gradient
        since the last.
        """
        parameter = each.trained.parameters[index]
        gradient = own_gradient(parameter)
        assert gradient is not None
        set_own_gradient(parameter, None)  # first: the next backward would add to what is left there
        each.take(index, self._usable(each.trained.names[index], gradient), self._measures)

    def _usable(self, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient of the parameter `name` as it can lie in a chunk: dense.

        Raises UserError for one that cannot.
        """
        check_summable(name, gradient)
        self.kinds.graphs |= gradient.requires_grad
        if not gradient.is_sparse:
            return gradient
        self.kinds.sparse = True
        return gradient.to_dense()


def _copy_of(slot: GradientSlot) -> Tensor:
    with slot.lend() as gradient, torch.inference_mode(False), torch.no_grad():
        return gradient.detach().clone()


def own_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient that autograd has left at the parameter, whatever its class makes of `grad`."""
    with AsPlainTensors():
        gradient: Tensor | None = _GRAD.__get__(parameter)
        return gradient


def set_own_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    with AsPlainTensors():
        _GRAD.__set__(parameter, gradient)
