"""Which chunks lie on the device: brings them before they are used, and takes them away for others.

The device's arena is cut into blocks; a chunk that is resident takes one, or several in a row. Its parameters
are views with storages of their own. Whoever else holds a view (the script, a checkpoint, a custom function)
raises that storage's use count: such a chunk is held, and stays where it is until the view is gone. So no
memory is pulled away from under anybody. Source: S2, parts 5 and 6, and "Traps that are known".
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.core.errors import DeadlineError, UserError
from atoll.core.units import format_bytes
from atoll.memory.arena import Arena
from atoll.memory.gradients import Gradients, TrainedChunk
from atoll.memory.initialising import resident_bytes, take
from atoll.memory.parameters import give_back, place_of, put, take_over, version
from atoll.memory.payloads import VALUES, Payloads
from atoll.memory.saved import ADDRESSES, Packed, Place
from atoll.memory.stays import Stay, stand_ins
from atoll.moves import Cache, Full, StepStatistics
from atoll.moves.cache import Decision

_DEADLINE = 600.0  # seconds for one chunk to come: the slowest disk has read it by then


class Engine:
    """Keeps the chunks of a model in the device's arena, by the decisions of `moves`.

    `chunks[i]` has id i. `payloads` holds the values that count, in host memory, under the kind "values";
    before they are read, `wait_stepped(chunk)` waits for the chunk's optimizer step, and after they were
    written `edited(chunk)` is told. All methods may be called from several threads.
    """

    def __init__(
        self, chunks: Sequence[TrainedChunk], arena: Arena, cache: Cache[int], payloads: Payloads
    ) -> None:
        self.chunks, self.arena, self.cache, self.payloads = list(chunks), arena, cache, payloads
        self.wait_stepped: Callable[[int], None] = lambda _: None
        self.edited: Callable[[int], None] = lambda _: None
        self.gradients: Gradients  # whoever makes the engine makes them too
        self.unpacked: Callable[[Place], None] | None = None  # told of what backward uses
        self.moves, self.nbytes = Counter[str](), Counter[str]()  # by direction
        self.written_back, self.waited = 0, 0.0
        self._lock = threading.RLock()
        self._resident: dict[int, Stay] = {}
        self._stays: dict[tuple[int, int], Stay] = {}  # by chunk and first block
        self._pins = [0] * len(self.chunks)
        self.is_closed = False
        self._absent = [stand_ins(each) for each in self.chunks]
        # One thread: a link has one direction to the device.
        self._bringing = ThreadPoolExecutor(1, thread_name_prefix="atoll-bringing")
        device = arena.device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def take_over(self) -> None:
        """Put all values into the payloads, chunk by chunk, and let the parameters' own memory go."""
        for each in sorted(self.chunks, key=lambda each: -resident_bytes(each.parameters)):
            self.payloads.add((each.chunk.id, VALUES), each.chunk.numel, each.dtype)
            with self._values(each, overwrites=True) as values:
                for slot, parameter in enumerate(each.parameters):
                    take(parameter, each.run(values, slot))
            for slot, parameter in enumerate(each.parameters):
                place = Place(self, each.chunk.id, slot)
                take_over(parameter, place)
                stand_in = self._absent[each.chunk.id][slot]
                put(parameter, stand_in)
                ADDRESSES.add(stand_in.untyped_storage().data_ptr(), place, absent=True)

    def close(self) -> None:
        """Give every parameter memory of its own, with its present value."""
        self.write_back()
        self._bringing.shutdown()
        with self._lock:
            self.is_closed = True
            for each in self.chunks:
                for slot, parameter in enumerate(each.parameters):
                    if place_of(parameter) is not None:
                        give_back(parameter, self._value(each, slot))
                for stand_in in self._absent[each.chunk.id]:
                    ADDRESSES.remove(stand_in.untyped_storage().data_ptr())
            for stay in self._resident.values():
                for address in stay.addresses:
                    ADDRESSES.remove(address)
            self._resident.clear()
            self._stays.clear()

    # Uses

    def pin(self, chunks: Sequence[int], *, gives_out: bool = False) -> None:
        """Make these chunks resident together until `unpin`; raises UserError when the budget cannot."""
        with self._lock:
            pinned_here: list[int] = []
            try:
                for chunk in chunks:
                    self._bring(chunk).given_out |= gives_out
                    self._pins[chunk] += 1
                    pinned_here.append(chunk)
            except BaseException:
                self.unpin(pinned_here)
                raise
            self._prefetch()

    def unpin(self, chunks: Iterable[int]) -> None:
        """End `pin`."""
        with self._lock:
            for chunk in chunks:
                self._pins[chunk] -= 1

    def derive(self, packed: Packed) -> Tensor:
        """The tensor that was packed: a view of the parameter's memory, which holds the chunk as long as it
        lives."""
        place = packed.place
        if self.unpacked is not None:
            self.unpacked(place)
        with self._lock:
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
            return derived

    def _bring(self, chunk: int) -> Stay:
        """The chunk on the device; makes room as `moves` decides."""
        if self.is_closed:
            raise UserError("this graph was made before close() of memory.fit; make its forward again")
        decision = self._decide(chunk)
        self._evict(decision)
        if decision.hit:
            return self._settled(chunk)
        began = time.perf_counter()
        stay = self._enter(chunk, decision.place)
        try:
            self._copy(stay)
        except BaseException:
            self._give_up(stay)
            raise
        self.waited += time.perf_counter() - began
        return self._settle(stay)

    def _decide(self, chunk: int) -> Decision[int]:
        try:
            return self.cache.handle_use(chunk, held=self._is_held)
        except Full:
            gc.collect()  # views may hang on in cycles, such as those of an exception
        try:
            return self.cache.handle_use(chunk, held=self._is_held)
        except Full as full:
            raise self._too_small(chunk, full) from None

    def _too_small(self, chunk: int, full: Full) -> UserError:
        names = [repr(self.chunks[c].names[0]) for c in self._resident if self._is_held(c)]
        least = full.least_blocks * self.arena.block_bytes
        if len(names) > 3:
            names[3:] = [f"{len(names) - 3} more"]
        return UserError(
            f"the device's budget of {format_bytes(self.arena.nbytes)} is too small to use parameter "
            f"{self.chunks[chunk].names[0]!r} together with {', '.join(names)}, which are in use or of which "
            f"views are kept; {format_bytes(least)} ({least} bytes) would do here"
        )

    def _is_held(self, chunk: int) -> bool:
        """Whether a chunk must stay: it is in use, on its way, or somebody has a view of its memory."""
        stay = self._resident[chunk]
        if stay.coming is not None:
            return not stay.coming.done()
        return self._pins[chunk] > 0 or stay.is_viewed

    # Coming and leaving

    def _prefetch(self) -> None:
        """Begin to bring what is used next, as far as `moves` says that it costs no move."""
        while (decision := self.cache.poll_prefetch(self._is_held)) is not None:
            self._evict(decision)
            stay = self._enter(decision.chunk, decision.place)
            if self._stream is not None:
                # What still reads the block's former values has been queued before.
                self._stream.wait_event(torch.accelerator.current_stream().record_event())
            stay.coming = self._bringing.submit(self._copy, stay, self._stream)

    def _enter(self, chunk: int, place: int) -> Stay:
        """A place for the chunk, without its values."""
        block = self.arena.take(self._blocks(chunk), at=place)
        stay = self._stays.get((chunk, place))
        if stay is None:
            # A script may be in inference mode; the parameters are to be trained afterwards.
            with torch.inference_mode(False), torch.no_grad():
                stay = self._stays[chunk, place] = Stay(self.chunks[chunk], block)
        stay.block = block
        self._resident[chunk] = stay
        return stay

    def _blocks(self, chunk: int) -> int:
        each = self.chunks[chunk]
        return self.arena.blocks_for(each.chunk.numel * each.dtype.itemsize)

    def _copy(self, stay: Stay, stream: torch.Stream | None = None) -> None:
        """Bring the values; on a thread of its own, with a stream of its own, where there is one."""
        if stream is not None:
            torch.accelerator.set_stream(stream)
        with torch.inference_mode(False), torch.no_grad(), self._values(stay.each) as values:
            stay.memory.copy_(values)

    def _settled(self, chunk: int) -> Stay:
        """The chunk's stay, once its values are there."""
        stay = self._resident[chunk]
        if stay.coming is None:
            return stay
        began = time.perf_counter()
        try:
            stay.coming.result(timeout=_DEADLINE)
        except BaseException as error:
            self._give_up(stay)
            if isinstance(error, FutureTimeoutError):
                raise DeadlineError(
                    f"waited {_DEADLINE:.0f} s for the chunk of {stay.each.names[0]!r}, which has not come"
                ) from None
            raise
        self.waited += time.perf_counter() - began
        return self._settle(stay)

    def _give_up(self, stay: Stay) -> None:
        """The values have not come: as if the chunk had never been meant to."""
        stay.coming = None
        self._let_go(stay.each.chunk.id)
        self.cache.forget(stay.each.chunk.id)

    def _settle(self, stay: Stay) -> Stay:
        """The values are there: let the parameters lie there."""
        each = stay.each
        with torch.inference_mode(False):
            for parameter, view in zip(each.parameters, stay.views, strict=True):
                put(parameter, view)
        stay.begin(self._versions(each))
        for slot, address in enumerate(stay.addresses):
            ADDRESSES.add(address, Place(self, each.chunk.id, slot))
        self._count("to_device", each)
        return stay

    def _evict(self, decision: Decision[int]) -> None:
        for eviction in decision.evict:
            self._write_back(eviction.chunk)
            self._let_go(eviction.chunk)

    def _let_go(self, chunk: int) -> None:
        """Take a chunk's memory away, whatever is in it."""
        stay = self._resident.pop(chunk)
        if stay.coming is None:
            for address in stay.addresses:
                ADDRESSES.remove(address)
            for parameter, stand_in in zip(stay.each.parameters, self._absent[chunk], strict=True):
                put(parameter, stand_in)
        stay.coming = None
        self.arena.give(stay.block)

    def _count(self, direction: str, each: TrainedChunk) -> None:
        self.moves[direction] += 1
        self.nbytes[direction] += each.chunk.extent * each.dtype.itemsize

    @staticmethod
    def _versions(each: TrainedChunk) -> list[int]:
        return [version(parameter) for parameter in each.parameters]

    @contextmanager
    def _values(
        self, each: TrainedChunk, *, writes: bool = False, overwrites: bool = False
    ) -> Iterator[Tensor]:
        """The chunk's values in host memory, (extent,), as its latest step has left them."""
        self.wait_stepped(each.chunk.id)
        with self.payloads.pin((each.chunk.id, VALUES), writes=writes, overwrites=overwrites) as values:
            yield values[: each.chunk.extent]

    # Values that change

    def write_back(self) -> None:
        """Hand what the script has written on the device to the payloads."""
        with self._lock:
            for chunk in list(self._resident):
                self._write_back(chunk)

    def _write_back(self, chunk: int) -> None:
        stay, each = self._resident[chunk], self.chunks[chunk]
        if stay.coming is not None:
            return
        versions = self._versions(each)
        if versions == stay.versions and not stay.given_out:
            return
        with torch.no_grad(), self._values(each, writes=True) as values:
            values.copy_(stay.memory)
        stay.versions = versions
        self.written_back += 1
        self._count("to_host", each)
        self.edited(chunk)

    def out_of_date(self, chunks: Iterable[int]) -> None:
        """The values of these chunks are about to change in host memory: what lies on the device is dropped.

        A chunk of which somebody holds a view stays, and `refresh` brings its new values there.
        """
        with self._lock:
            for chunk in chunks:
                if chunk in self._resident:
                    self._settled(chunk)
                    if self._is_held(chunk):
                        continue
                    self._let_go(chunk)
                self.cache.forget(chunk)

    def refresh(self, chunks: Iterable[int]) -> None:
        """Bring the new values of those of these chunks that have stayed on the device."""
        with self._lock:
            for chunk in chunks:
                if chunk in self._resident:
                    stay = self._settled(chunk)
                    self._copy(stay)
                    stay.versions = self._versions(stay.each)
                    self._count("to_device", stay.each)

    def handle_step_ended(self) -> StepStatistics:
        """A step is over: its order of use is expected of the next."""
        with self._lock:
            return self.cache.handle_step_ended()

    def next_used(self, chunks: Iterable[int]) -> list[int]:
        """These chunks in the order in which the next step uses them first, as far as that is known."""
        first: dict[int, int] = {}
        order = self.cache.order
        for position, chunk in enumerate(order.uses if order is not None else ()):
            first.setdefault(chunk, position)
        last = len(first)

        def key(chunk: int) -> tuple[int, int]:
            return first.get(chunk, last), min(slot.parameter for slot in self.chunks[chunk].chunk.slots)

        return sorted(chunks, key=key)

    def value(self, parameter: nn.Parameter) -> Tensor:
        """A copy of a parameter's present value in ordinary memory of its device; nothing is brought."""
        place = place_of(parameter)
        assert place is not None
        with self._lock:
            if place.chunk in self._resident:
                self._write_back(place.chunk)
            return self._value(self.chunks[place.chunk], place.slot)

    def _value(self, each: TrainedChunk, slot: int) -> Tensor:
        like = each.likes[slot]
        with torch.inference_mode(False), torch.no_grad():
            copy = torch.empty_strided(like.shape, like.stride(), dtype=each.dtype, device=each.device)
            with self._values(each) as values:
                return copy.copy_(each.part(values, slot))

    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """`parameter.data = value`, by copying; raises UserError for another shape, dtype or device."""
        place = place_of(parameter)
        assert place is not None
        each = self.chunks[place.chunk]
        for what, wanted, given in (
            ("shape", tuple(each.likes[place.slot].shape), tuple(value.shape)),
            ("dtype", each.dtype, value.dtype),
            ("device", each.device, value.device),
        ):
            if wanted != given:
                raise UserError(
                    f"parameter {self.name(place)!r} got data of another {what} ({given}, not {wanted}) "
                    "while it lies in a chunk; change the model before memory.fit or after close()"
                )
        with self._lock, torch.no_grad():
            if place.chunk in self._resident:
                stay = self._settled(place.chunk)
                stay.views[place.slot].copy_(value)
                stay.given_out = True
                return
            with self._values(each, writes=True) as values:
                each.part(values, place.slot).copy_(value)
            self.edited(place.chunk)

    # What parameters ask

    def name(self, place: Place) -> str:
        """The parameter's name."""
        return self.chunks[place.chunk].names[place.slot]

    def like(self, place: Place) -> Tensor:
        """A tensor of the parameter's shape, strides and dtype on the meta device."""
        return self.chunks[place.chunk].likes[place.slot]

    def version(self, place: Place) -> int:
        """How often the parameter was written into."""
        return version(self.chunks[place.chunk].parameters[place.slot])
