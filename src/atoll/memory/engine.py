"""Brings chunks to the device before they are used, and takes them away when others need the room.

The device's arena is cut into blocks. A resident chunk takes one block, or several in a row. Its parameters
are views with storages of their own. Anybody else who holds a view (the script, a checkpoint, a custom
function) raises that storage's use count. Such a chunk is held: it stays where it is until the view is gone.
So nobody loses memory that they still use. Source: docs/memory.md, "How a parameter is reached" and "Moves".
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.scriptline import at_script_line, waiting_line
from atoll.core.units import format_bytes
from atoll.memory.arena import Arena, exactly
from atoll.memory.bringing import Bringing
from atoll.memory.gradients import ModelGradients, TrainedChunk
from atoll.memory.home import Home
from atoll.memory.initialising import resident_bytes, spilled_to
from atoll.memory.interrupts import uninterrupted
from atoll.memory.moved import Moved
from atoll.memory.parameters import give_back, place_of, version
from atoll.memory.residents import Residents
from atoll.memory.saved import Packed, ParameterSlot
from atoll.memory.stays import Stay
from atoll.moves import Cache, Full, StepStatistics
from atoll.moves.cache import CachePlacement
from atoll.tensors.torch_compat import marked, outside_dispatch_modes, outside_transforms


class Engine:
    """Keeps the chunks of a model in the device's arena, by the decisions of `moves`.

    All methods may be called from several threads.

    Args:
        chunks: the chunks that move.
        home: holds the values that count, and is told what the script writes.
        gradients: the gradients that parameters show.
        moved: counts moves.
        beside: bytes of the device's budget outside the arena.

    Attributes:
        written_back: chunks that were written back so far.
        waited: seconds that uses have waited for chunks.
        lost_writes: parameters into whose copies a transform of torch.func has written, by name.
    """

    def __init__(
        self,
        chunks: Sequence[TrainedChunk],
        arena: Arena,
        cache: Cache[int],
        home: Home,
        gradients: ModelGradients,
        moved: Moved,
        beside: int = 0,
    ) -> None:
        self.chunks = {each.chunk.id: each for each in chunks}
        self.arena, self.cache, self.home, self.gradients = arena, cache, home, gradients
        self._moved, self._beside = moved, beside
        self._residents = Residents(self.chunks, arena, self)
        self._resident = self._residents.here
        self._bringing = Bringing(home, arena.device)
        self.written_back, self.waited = 0, 0.0
        self.lost_writes: list[str] = []
        self.lock = threading.RLock()
        self._pins = Counter[int]()  # by chunk
        # Chunks that are stepped elsewhere: until `refresh`, their copies on the device are not written back.
        self._void: set[int] = set()
        self._void_by = 0  # the thread that steps them
        # Set while chunks come or leave. A call that finds it set knows that an earlier one was cut short
        # (Ctrl-C, an error).
        self._cut_short = False
        self.is_closed = False
        self._why_closed = "this graph was made before close() of memory.fit; make its forward again"

    def take_over(self) -> None:
        """Move all values to the home, chunk by chunk, and free the parameters' own memory."""
        for each in sorted(self.chunks.values(), key=_taken_first):
            self.home.take(each)
            self._residents.take_over(each)

    def close(self) -> None:
        """Give every parameter memory of its own, with its present value. After an error, call it again."""
        with self.lock:
            self._mend()
            for chunk, each in self.chunks.items():
                if (stay := self._resident.get(chunk)) is not None:
                    self._bringing.settle(stay)
                    self._write_back(chunk)
                for slot, parameter in enumerate(each.parameters):
                    if place_of(parameter) is not None:
                        give_back(parameter, self.home.value(each, slot))
            self._bringing.close()
            self.is_closed = True
            self._residents.forget()

    def leave(self, why: str) -> None:
        """Free the device's memory. All values lie in the home, from which others take them.

        Parameters are left without values. A graph that was made before raises UserError with `why`.
        """
        with self.lock:
            self._mend()
            for stay in self._resident.values():
                self._bringing.settle(stay)
            self.write_back()
            self._why_closed = why
            self._bringing.close()
            self.is_closed = True
            self._residents.forget()
            self.arena.release()

    def abandon(self, why: str) -> None:
        """Drop all chunks. Parameters are left without values; using one raises UserError with `why`."""
        self._why_closed = why
        self._bringing.abandon()
        with self.lock:
            self.is_closed = True
            self._residents.forget()

    # Uses

    def pin(self, chunks: Sequence[int], *, gives_out: bool = False) -> None:
        """Make these chunks resident together until `unpin`. Raises UserError if the budget is too small.

        Args:
            gives_out: True if the script gets views of the chunks.
        """
        with self.lock, outside_transforms():
            pinned_here: list[int] = []
            try:
                for chunk in chunks:
                    stay = self._bring(chunk, chunks)
                    stay.given_out |= gives_out
                    if gives_out and self.home.must_tell:
                        stay.seal()
                    self._pins[chunk] += 1
                    pinned_here.append(chunk)
                self._prefetch()
            except BaseException:
                self.unpin(pinned_here)
                raise

    def unpin(self, chunks: Iterable[int]) -> None:
        """End `pin`. A chunk of which somebody has a view by now may be written through it without a
        count."""
        with self.lock:
            for chunk in chunks:
                self._pins[chunk] -= 1
                if not self._pins[chunk] and (stay := self._resident.get(chunk)) is not None and stay.ready:
                    stay.given_out |= stay.is_viewed

    def derive(self, packed: Packed) -> Tensor:
        """Return the tensor that was packed: a view of the parameter's memory, which holds the chunk while
        the view lives."""
        place = packed.place
        with self.lock, outside_transforms():
            stay = self._bring(place.chunk)
            view = stay.views[place.slot]
            if packed.whole:
                derived = view.detach()
            elif packed.dtype == view.dtype:
                derived = view.as_strided(packed.size, packed.stride, packed.offset)
            else:
                storage, other = (
                    stay.storages[place.slot],
                    torch.empty(0, dtype=packed.dtype, device=view.device),
                )
                derived = other.set_(storage, packed.offset, packed.size, packed.stride)
            self._prefetch()
            return marked(derived, conj=packed.conj, neg=packed.neg)

    def _bring(self, chunk: int, together: Sequence[int] = ()) -> Stay:
        """Return the stay of a chunk on the device, after making room as `moves` decides.

        Args:
            together: the chunks that the call uses at once, for the error.
        """
        self._check_open()
        self._mend()
        self._cut_short = True
        try:
            decision = self._decide(chunk)
        except Full as full:  # it changed nothing
            self._cut_short = False
            raise self._too_small(chunk, full, together) from None
        if not decision.hit:
            self._evict(decision)
            began = time.perf_counter()
            stay = self._residents.enter(chunk, decision.place)
            self._bringing.bring(stay)
            self.waited += time.perf_counter() - began
            self._residents.lay(stay)
            self._moved.count("to_device", stay.each)
        return self._settled(chunk)

    def _check_open(self) -> None:
        if self.is_closed:
            raise UserError(self._why_closed)

    def _decide(self, chunk: int) -> CachePlacement[int]:
        try:
            return self.cache.handle_use(chunk, held=self._is_held)
        except Full:
            gc.collect()  # views may hang on in cycles, such as those of an exception
            for stay in self._resident.values():
                self._bringing.settle(stay)  # a chunk on its way may leave again once it is there
        return self.cache.handle_use(chunk, held=self._is_held)

    def _mend(self) -> None:
        """Repair the state that a move left when it was cut short, at whatever point.

        Only `_resident` is trusted. Its chunks that are ready stay, with what was written into them. The
        others go, once no thread copies into them any more. Arena and cache follow.
        """
        if not self._cut_short:
            return
        for stay in list(self._resident.values()):
            self._bringing.settle(stay)
        self._bringing.settle_all()
        self.cache.resume(self._residents.keep_ready())
        self._cut_short = False

    def _too_small(self, chunk: int, full: Full, together: Sequence[int]) -> UserError:
        """Return the error for a chunk that finds no room. `together` are the chunks that the call uses at
        once."""
        names = [repr(self.chunks[c].names[0]) for c in self._resident if self._is_held(c)]
        if len(names) > 3:
            names[3:] = [f"{len(names) - 3} more"]
        beside = f" beside {', '.join(names)}, which are in use or of which views are kept" if names else ""
        needed = {*together, chunk, *(c for c in self._resident if self._is_held(c))}
        least = (
            max(full.least_blocks, sum(map(self._residents.blocks, needed))) * self.arena.block_bytes
            + self._beside
        )
        whole = sum(map(self._residents.blocks, self.chunks)) * self.arena.block_bytes + self._beside
        raised = f"{exactly(whole)}, which holds all parameters"
        if least < whole:
            raised = f"at least {exactly(least)}; {exactly(whole)} hold all parameters"
        what = f"parameter {self.chunks[chunk].names[0]!r} does not fit on the device{beside}"
        return UserError(
            f"{at_script_line(what, waiting_line())}; keep no views, or raise memory.device from "
            f"{format_bytes(self.arena.nbytes + self._beside)} to {raised}"
        )

    def _is_held(self, chunk: int) -> bool:
        """True if a chunk must stay: in use, on its way, or with a view of its memory somewhere."""
        stay = self._resident[chunk]
        if not stay.ready:
            return stay.coming is not None and not stay.coming.done()
        return self._pins[chunk] > 0 or stay.is_viewed

    # Coming and leaving

    def _prefetch(self) -> None:
        """Begin to bring the chunks that are used next, as far as `moves` finds that it costs no move."""
        self._cut_short = True
        while (decision := self.cache.poll_prefetch(self._is_held)) is not None:
            self._evict(decision)
            self._bringing.begin(self._residents.enter(decision.chunk, decision.place))
        self._cut_short = False

    def _settled(self, chunk: int) -> Stay:
        """Return the stay of a chunk that is resident or on its way, once its values are there."""
        stay = self._resident[chunk]
        self._cut_short = True
        if not stay.ready:
            assert stay.coming is not None
            began = time.perf_counter()
            self._bringing.settle(stay)
            self.home.wait_stepped(chunk)
            stay.coming.result(timeout=0)
            self.waited += time.perf_counter() - began
            self._residents.lay(stay)
            self._moved.count("to_device", stay.each)
        self._cut_short = False
        if chunk in self._void and threading.get_ident() == self._void_by:
            self._refresh(stay)  # this thread's step was cut short, so it is over
        return stay

    def _evict(self, decision: CachePlacement[int]) -> None:
        for eviction in decision.evict:
            self._write_back(eviction.chunk)
            self._residents.let_go(eviction.chunk)

    # Values that change

    def has_edits(self, chunk: int) -> bool:
        """True if the script's writes to a chunk on the device are not written back yet."""
        with self.lock:
            stay = self._resident.get(chunk)
            if stay is None or not stay.ready or chunk in self._void:
                return False
            return stay.written() != stay.versions or stay.is_seal_broken

    def write_back(self) -> None:
        """Copy what the script has written on the device to the home."""
        with self.lock:
            self._mend()
            if self._void_by == threading.get_ident():
                self._refresh_void()
            for chunk in list(self._resident):
                self._write_back(chunk)

    def _write_back(self, chunk: int) -> None:
        stay, each = self._resident[chunk], self.chunks[chunk]
        if not stay.ready or chunk in self._void:
            return
        versions = stay.written()
        if versions == stay.versions and not stay.given_out:
            return
        is_changed = versions != stay.versions or stay.is_seal_broken
        with outside_dispatch_modes(), torch.no_grad():
            if is_changed:
                self.home.written(chunk)
            with self.home.values(each, writes=True) as values:
                stay.return_to(values)
        self.written_back += 1
        self._moved.count("to_host", each)
        stay.seal(anew=True)
        self.home.written_back(each)
        stay.versions = versions  # last: if this is cut short, the chunk is written back again

    def out_of_date(self, chunks: Iterable[int]) -> None:
        """Drop the device's copies of chunks whose values are about to change in host memory.

        A chunk of which somebody holds a view stays, and another thread's use may bring one meanwhile.
        Neither is written back until `refresh` has brought the new values.
        """
        with self.lock:
            self._mend()
            self._cut_short = True
            for chunk in chunks:
                self._void.add(chunk)
                self._void_by = threading.get_ident()
                stay = self._resident.get(chunk)
                if stay is not None:
                    self._bringing.settle(stay)
                    if self._is_held(chunk):
                        continue
                    self._residents.let_go(chunk)
                self.cache.forget(chunk)
            self._cut_short = False

    def refresh(self, chunks: Iterable[int]) -> None:
        """Bring the new values of those of `chunks` that lie on the device."""
        with self.lock:
            self._mend()
            self._void.update(chunks)
            self._refresh_void()

    def _refresh_void(self) -> None:
        for chunk in list(self._void):
            stay = self._resident.get(chunk)
            if stay is None:
                self._void.discard(chunk)
            elif stay.ready:
                self._refresh(stay)
            else:  # on its way, perhaps with values from before the step
                self._cut_short = True
                self._bringing.settle(stay)
                self._residents.let_go(chunk)
                self.cache.forget(chunk)
                self._void.discard(chunk)
                self._cut_short = False

    def _refresh(self, stay: Stay) -> None:
        """Bring a chunk's new values to its place on the device."""
        self._bringing.bring(stay)
        stay.versions = stay.written()
        stay.seal(anew=True)
        self._moved.count("to_device", stay.each)
        self._void.discard(stay.each.chunk.id)

    def handle_step_ended(self) -> StepStatistics:
        """End a step: its order of uses is expected of the next."""
        with self.lock:
            self._mend()
            self._cut_short = True
            ended = self.cache.handle_step_ended()
            self._prefetch()
            return ended

    @uninterrupted
    def value(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of a parameter's present value in ordinary memory of its device; no chunk is
        brought."""
        place = place_of(parameter)
        assert place is not None
        with self.lock:
            self._check_open()
            self._mend()
            if place.chunk in self._resident:
                self._write_back(place.chunk)
            return self.home.value(self.chunks[place.chunk], place.slot)

    @uninterrupted
    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Assign `parameter.data = value`, by copying. Raises UserError for another shape, dtype or
        device."""
        place = place_of(parameter)
        assert place is not None
        each = self.chunks[place.chunk]
        like = each.likes[place.slot]
        for what, wanted, given in (
            ("shape", tuple(like.shape), tuple(value.shape)),
            ("dtype", like.dtype, value.dtype),
            ("device", each.device, value.device),
        ):
            if wanted != given:
                raise UserError(
                    f"parameter {self.name(place)!r} got data of another {what} ({given}, not {wanted}) "
                    "under budgets of memory; change the model before it is prepared, or after the session"
                )
        with self.lock, torch.no_grad():
            self._check_open()
            self._mend()
            if place.chunk in self._resident:
                stay = self._settled(place.chunk)
                if stay.is_slot_viewed(place.slot):  # plain PyTorch leaves such a view as it is
                    self._residents.set_apart(stay, place.slot)
                stay.views[place.slot].copy_(value)
                stay.given_out = True
                self.home.written(place.chunk)
                return
            self.home.written(place.chunk)
            with self.home.values(each, writes=True) as values:
                each.part(values, place.slot).copy_(value)
            self.home.written_back(each)

    # What parameters ask

    def name(self, place: ParameterSlot) -> str:
        """Return a parameter's name."""
        return self.chunks[place.chunk].names[place.slot]

    def version(self, place: ParameterSlot) -> int:
        """Return the number of writes into a parameter."""
        return version(self.chunks[place.chunk].parameters[place.slot])


def parameter_bytes(engine: Engine) -> int:
    """Return the bytes of all parameters in the engine's chunks, as plain ones."""
    return sum(parameter.nbytes for each in engine.chunks.values() for parameter in each.parameters)


def _taken_first(each: TrainedChunk) -> tuple[int, int]:
    """Return a sort key for `Engine.take_over`, in whose order memory never exceeds the budgets.

    Chunks with the most bytes in memory come first, as that memory becomes free. Then come those at the end
    of the file.
    """
    return -resident_bytes(each.parameters), -spilled_to(each.parameters)


def in_order_of_use(engine: Engine, chunks: Iterable[int]) -> list[int]:
    """Sort chunks by when the next step first uses them, as far as that is known."""
    first: dict[int, int] = {}
    order = engine.cache.order
    for position, chunk in enumerate(order.uses if order is not None else ()):
        first.setdefault(chunk, position)
    last = len(first)

    def key(chunk: int) -> tuple[int, int]:
        return first.get(chunk, last), min(slot.parameter for slot in engine.chunks[chunk].chunk.slots)

    return sorted(chunks, key=key)
