"""Which chunks lie on the device: brings them before they are used, and takes them away for others.

The device's arena is cut into blocks; a chunk that is resident takes one, or several in a row. Each residency
has a storage object of its own, and its parameters are views of it. Whoever else holds a view (the script, a
checkpoint, a custom function) raises that storage's use count: such a chunk is held, and stays where it is
until the view is gone. So no memory is pulled away from under anybody. Source: S2, parts 5 and 6, and
"Traps that are known".
"""

from __future__ import annotations

import bisect
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.units import format_bytes
from atoll.memory.arena import Arena, Block
from atoll.memory.gradients import Gradients, TrainedChunk
from atoll.memory.parameters import (
    give_back,
    own_gradient,
    put,
    set_own_gradient,
    take_over,
    version,
)
from atoll.memory.payloads import VALUES, Payloads, pinned
from atoll.memory.saved import ADDRESSES, Packed, Place
from atoll.moves import Cache, Full
from atoll.tensors.binding import carve


class _Resident:
    """One stay of a chunk on the device. `flat` is 1-D, in the chunk's dtype, with a storage of its own."""

    def __init__(self, block: Block, flat: Tensor) -> None:
        self.block, self.flat = block, flat
        self.storage = flat.untyped_storage()
        self.address = self.storage.data_ptr()
        self.versions: list[int] = []
        self.given_out = False  # may have been written into, and autograd's count would not tell
        self.unheld = 0  # the storage's use count when nobody but the engine and the parameters have it

    def uses(self) -> int:
        return torch._C._storage_Use_Count(self.storage._cdata)  # type: ignore[attr-defined,no-any-return]


class Engine:
    """Keeps the chunks of a model in the device's arena, by the decisions of `moves`.

    `chunks[i]` has id i. `payloads` holds the values that count, in host memory, under the kind "values";
    before they are read, `wait_stepped(chunk)` waits for the chunk's optimizer step, and after they were
    written `edited(chunk)` is told. All methods may be called from several threads.
    """

    def __init__(
        self,
        chunks: Sequence[TrainedChunk],
        arena: Arena,
        cache: Cache,
        payloads: Payloads,
        wait_stepped: Callable[[int], None] = lambda chunk: None,
        edited: Callable[[int], None] = lambda chunk: None,
    ) -> None:
        self.chunks, self.arena, self.cache, self.payloads = list(chunks), arena, cache, payloads
        self.wait_stepped, self.edited = wait_stepped, edited
        self.gradients: Gradients | None = None
        self.is_saving = False  # a state_dict is being made
        self.unpacked: Callable[[Place], None] | None = None  # told of what backward uses
        self.moves, self.nbytes, self.written_back = Counter[str](), Counter[str](), 0
        self._lock = threading.RLock()
        self._resident: dict[int, _Resident] = {}
        self._pins = Counter[int]()
        self._starts = [[slot.offset for slot in each.chunk.slots] for each in self.chunks]
        self._absent = [_stand_ins(each) for each in self.chunks]
        self._trained = {id(p) for each in self.chunks for p in each.parameters if p.requires_grad}

    def take_over(self) -> None:
        """Put all values into the payloads, chunk by chunk, and let the parameters' own memory go."""
        for each in self.chunks:
            with self._values(each, writes=True) as master:
                for slot, parameter in enumerate(each.parameters):
                    each.part(master, slot).copy_(parameter.detach())
            for slot, parameter in enumerate(each.parameters):
                take_over(parameter, Place(self, each.chunk.id, slot))
            self._set_absent(each)
            for slot, (storage, stand_in) in enumerate(zip(*self._absent[each.chunk.id], strict=True)):
                del stand_in
                ADDRESSES.absent[storage.data_ptr()] = Place(self, each.chunk.id, slot)

    def close(self) -> None:
        """Give every parameter memory of its own, with its present value."""
        self.write_back()
        for each in self.chunks:
            for slot, parameter in enumerate(each.parameters):
                value = self._value(each, slot)
                give_back(parameter, value)
        for chunk in list(self._resident):
            self._let_go(chunk)
        for storages, _ in self._absent:
            for storage in storages:
                ADDRESSES.absent.pop(storage.data_ptr(), None)

    # Uses

    def pin(self, chunks: Sequence[int], *, gives_out: bool = False) -> None:
        """Make these chunks resident together until `unpin`; raises UserError when the budget cannot."""
        with self._lock:
            pinned_here: list[int] = []
            try:
                for chunk in chunks:
                    resident = self._bring(chunk)
                    resident.given_out |= gives_out
                    self._pins[chunk] += 1
                    pinned_here.append(chunk)
            except BaseException:
                self.unpin(pinned_here)
                raise

    def unpin(self, chunks: Iterable[int]) -> None:
        """End `pin`."""
        with self._lock:
            for chunk in chunks:
                self._pins[chunk] -= 1

    def derive(self, packed: Packed) -> Tensor:
        """The tensor that was packed: a view of the chunk's memory, which holds it for as long as it lives."""
        place = packed.place
        if self.unpacked is not None:
            self.unpacked(place)
        with self._lock:
            resident = self._bring(place.chunk)
            if packed.whole:
                return self.chunks[place.chunk].part(resident.flat, place.slot)
            plain = torch.empty(0, dtype=packed.dtype, device=resident.flat.device)
            return plain.set_(resident.storage, packed.offset, packed.size, packed.stride)  # type: ignore[call-overload,no-any-return]

    def _bring(self, chunk: int) -> _Resident:
        """The chunk's residency; makes room as `moves` decides."""
        try:
            decision = self.cache.handle_use(chunk, held=self._is_held)
        except Full:
            gc.collect()  # views may hang on in cycles, such as those of an exception
            try:
                decision = self.cache.handle_use(chunk, held=self._is_held)
            except Full as full:
                raise self._too_small(chunk, full) from None
        for eviction in decision.evict:
            self._evict(eviction.chunk)
        if decision.hit:
            return self._resident[chunk]
        return self._load(chunk, decision.place)

    def _too_small(self, chunk: int, full: Full) -> UserError:
        together = [self.name(Place(self, c, 0)) for c in self._resident if self._is_held(c)]
        least = full.least_blocks * self.arena.block_bytes
        name = self.name(Place(self, chunk, 0))
        return UserError(
            f"the device's budget of {format_bytes(self.arena.blocks * self.arena.block_bytes)} is too small to use "
            f"the chunk of parameter {name!r} together with {len(together)} others that are in use or of which "
            f"views are kept ({', '.join(together[:4])}{', ...' if len(together) > 4 else ''}); "
            f"{format_bytes(least)} would do here"
        )

    def _is_held(self, chunk: int) -> bool:
        """Whether a chunk must stay: it is in use, or somebody has a view of its memory."""
        resident = self._resident[chunk]
        return self._pins[chunk] > 0 or resident.uses() > resident.unheld

    def _load(self, chunk: int, place: int) -> _Resident:
        each = self.chunks[chunk]
        self.wait_stepped(chunk)
        block = self.arena.take(self.cache.sizes[chunk], at=place)
        numel = max(each.chunk.extent, 1)  # no elements would be no memory, and no address
        memory = block.memory[: numel * each.dtype.itemsize].view(each.dtype)
        resident = _Resident(block, carve(memory, 0, memory))
        with self._values(each) as master:
            resident.flat[: each.chunk.extent].copy_(master)
        for slot, parameter in enumerate(each.parameters):
            put(parameter, each.part(resident.flat, slot))
        resident.versions = [version(parameter) for parameter in each.parameters]
        resident.unheld = resident.uses()
        self._resident[chunk] = resident
        ADDRESSES.chunks[resident.address] = self, chunk
        self._count("to_device", each)
        return resident

    def _evict(self, chunk: int) -> None:
        self._write_back(chunk)
        self._let_go(chunk)
        self._count("off_device", self.chunks[chunk])

    def _let_go(self, chunk: int) -> None:
        """Take a chunk's memory away, whatever is in it."""
        resident = self._resident.pop(chunk)
        del ADDRESSES.chunks[resident.address]
        self._set_absent(self.chunks[chunk])
        self.arena.give(resident.block)

    def _set_absent(self, each: TrainedChunk) -> None:
        for parameter, stand_in in zip(each.parameters, self._absent[each.chunk.id][1], strict=True):
            if hasattr(parameter, "_atoll"):
                put(parameter, stand_in)

    def _count(self, direction: str, each: TrainedChunk) -> None:
        self.moves[direction] += 1
        self.nbytes[direction] += each.chunk.extent * each.dtype.itemsize

    def _values(self, each: TrainedChunk, *, writes: bool = False):  # type: ignore[no-untyped-def]
        return pinned(self.payloads, each.chunk.id, VALUES, each.dtype, each.chunk.extent, writes=writes)

    # Values that change

    def write_back(self) -> None:
        """Hand what the script has written on the device to the payloads."""
        with self._lock:
            for chunk in list(self._resident):
                self._write_back(chunk)

    def _write_back(self, chunk: int) -> None:
        resident, each = self._resident[chunk], self.chunks[chunk]
        versions = [version(parameter) for parameter in each.parameters]
        if versions == resident.versions and not resident.given_out:
            return
        self.wait_stepped(chunk)
        with self._values(each, writes=True) as master:
            master.copy_(resident.flat[: each.chunk.extent])
        resident.versions = versions
        self.written_back += 1
        self.edited(chunk)

    def out_of_date(self, chunks: Iterable[int]) -> None:
        """The values of these chunks are about to change in host memory: what lies on the device is dropped.

        A chunk of which somebody holds a view stays, and `refresh` brings its new values there.
        """
        with self._lock:
            for chunk in chunks:
                if chunk in self._resident and not self._is_held(chunk):
                    self._let_go(chunk)
                    self.cache.forget(chunk)

    def refresh(self, chunks: Iterable[int]) -> None:
        """Bring the new values of those of these chunks that have stayed on the device."""
        with self._lock:
            for chunk in chunks:
                resident, each = self._resident.get(chunk), self.chunks[chunk]
                if resident is None:
                    continue
                self.wait_stepped(chunk)
                with self._values(each) as master:
                    resident.flat[: each.chunk.extent].copy_(master)
                resident.versions = [version(parameter) for parameter in each.parameters]
                self._count("to_device", each)

    def value(self, parameter: nn.Parameter) -> Tensor:
        """A copy of a parameter's present value in ordinary memory of its device; nothing becomes resident."""
        place = _place(parameter)
        with self._lock:
            if place.chunk in self._resident:
                self._write_back(place.chunk)
            return self._value(self.chunks[place.chunk], place.slot)

    def _value(self, each: TrainedChunk, slot: int) -> Tensor:
        self.wait_stepped(each.chunk.id)
        shape, strides = each.shapes[slot]
        copy = torch.empty_strided(shape, strides, dtype=each.dtype, device=each.device)
        with self._values(each) as master:
            return copy.copy_(each.part(master, slot))

    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """`parameter.data = value`, by copying; raises UserError for another shape, dtype or device."""
        place = _place(parameter)
        each = self.chunks[place.chunk]
        shape = each.shapes[place.slot][0]
        for what, wanted, given in (
            ("shape", shape, tuple(value.shape)),
            ("dtype", each.dtype, value.dtype),
            ("device", each.device, value.device),
        ):
            if wanted != given:
                raise UserError(
                    f"parameter {self.name(place)!r} was given data of another {what} ({given}, not {wanted}) "
                    "while it lies in a chunk; change the model before memory.fit or after close()"
                )
        with self._lock:
            resident = self._resident.get(place.chunk)
            self.wait_stepped(place.chunk)
            if resident is not None:
                with torch.no_grad():
                    each.part(resident.flat, place.slot).copy_(value)
                resident.given_out = True
                return
            with self._values(each, writes=True) as master:
                each.part(master, place.slot).copy_(value)
            self.edited(place.chunk)

    # What parameters ask

    def name(self, place: Place) -> str:
        """The parameter's name."""
        return self.chunks[place.chunk].names[place.slot]

    def layout(self, place: Place) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The parameter's shape and strides."""
        return self.chunks[place.chunk].shapes[place.slot]

    def slot_at(self, chunk: int, offset: int) -> int:
        """The slot that has the element `offset` of the chunk's memory."""
        return max(bisect.bisect_right(self._starts[chunk], offset) - 1, 0)

    def version(self, chunk: int, slot: int) -> int:
        """How often the parameter was written into."""
        return version(self.chunks[chunk].parameters[slot])

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """What `parameter.grad` is."""
        own = own_gradient(parameter)
        if own is not None or self.gradients is None or id(parameter) not in self._trained:
            return own
        return self.gradients.read(parameter)

    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """`parameter.grad = gradient`."""
        if self.gradients is None or id(parameter) not in self._trained:
            set_own_gradient(parameter, gradient)
            return
        set_own_gradient(parameter, None)
        self.gradients.write(parameter, gradient)

    def check_trainable(self, parameter: nn.Parameter, wanted: bool) -> None:
        """Raise UserError where a parameter that was frozen at `fit` is to be trained."""
        if wanted and id(parameter) not in self._trained:
            raise UserError(
                f"parameter {self.name(_place(parameter))!r} was frozen when memory.fit laid the model out, and "
                "has no room for a gradient; set requires_grad before memory.fit, or after close()"
            )


def _place(parameter: nn.Parameter) -> Place:
    place: Place = parameter._atoll  # type: ignore[assignment]
    return place


def _stand_ins(each: TrainedChunk) -> tuple[list[torch.UntypedStorage], list[Tensor]]:
    """For each slot a tensor of the parameter's shape over a single element of all one bits, which is NaN in every
    floating dtype, and its storage: what lies there while the chunk is away."""
    numel, size = len(each.parameters), each.dtype.itemsize
    ones = torch.full((numel * size,), 255, dtype=torch.uint8, device=each.device).view(each.dtype)
    single = [carve(ones, index, ones[0]) for index in range(numel)]
    wide = [one.expand(shape) for one, (shape, _) in zip(single, each.shapes, strict=True)]
    return [one.untyped_storage() for one in single], wide
