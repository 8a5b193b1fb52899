"""Which chunks lie on the device: brings them before they are used, and takes them away for others.

The device's arena is cut into blocks; a chunk that is resident takes one, or several in a row. Each residency
has a storage object of its own, and its parameters are views of it. Whoever else holds a view (the script, a
checkpoint, a custom function) raises that storage's use count: such a chunk is held, and stays where it is
until the view is gone. So no memory is pulled away from under anybody. Source: S2, parts 5 and 6, and
"Traps that are known".
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.units import format_bytes
from atoll.memory.arena import Arena, Block
from atoll.memory.gradients import Gradients, TrainedChunk
from atoll.memory.parameters import give_back, put, take_over, version
from atoll.memory.payloads import VALUES, Payloads
from atoll.memory.saved import ADDRESSES, Packed, Place
from atoll.moves.cache import Cache, Full
from atoll.tensors.binding import carve


class _Stay:
    """A chunk at a place on the device: `memory` is its values, 1-D; `views[i]` lies there for slot i and has a
    storage of its own. Made once for each place that a chunk comes to, and used again."""

    def __init__(self, each: TrainedChunk, block: Block) -> None:
        extent = each.chunk.extent
        self.block = block
        self.memory = block.memory[: extent * each.dtype.itemsize].view(each.dtype)
        parts = [each.part(self.memory, slot) for slot in range(len(each.parameters))]
        self.views = [carve(part, 0, part) for part in parts]
        self.storages = [view.untyped_storage() for view in self.views]
        self.addresses = [storage.data_ptr() for storage in self.storages]
        self._ids = [storage._cdata for storage in self.storages]
        self.versions: list[int] = []  # the parameters', when the values here were those in host memory
        self.given_out = False  # may have been written into, and autograd's count would not tell
        self._unheld = 0  # uses of all storages by the engine and the parameters alone

    def begin(self, block: Block) -> None:
        """A new stay, the parameters lie here."""
        self.block, self.given_out = block, False
        self._unheld = self._uses()

    @property
    def is_viewed(self) -> bool:
        """Whether anybody but the engine and the parameters has a view."""
        return self._uses() > self._unheld

    def _uses(self) -> int:
        # The count tells what no public function does: whether memory may be taken away.
        return sum(map(torch._C._storage_Use_Count, self._ids))  # type: ignore[attr-defined]


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
        self.gradients: Gradients  # whoever makes the engine makes them too
        self.is_saving = False  # a state_dict is being made
        self.unpacked: Callable[[Place], None] | None = None  # told of what backward uses
        self.moves, self.nbytes, self.written_back = Counter[str](), Counter[str](), 0
        self._lock = threading.RLock()
        self._resident: dict[int, _Stay] = {}
        self._stays: dict[tuple[int, int], _Stay] = {}  # by chunk and first block
        self._pins = [0] * len(self.chunks)
        self._closed = False
        self._absent = [_stand_ins(each) for each in self.chunks]
        self._trained = {id(p) for each in self.chunks for p in each.parameters if p.requires_grad}

    def take_over(self) -> None:
        """Put all values into the payloads, chunk by chunk, and let the parameters' own memory go."""
        for each in self.chunks:
            self.payloads.add((each.chunk.id, VALUES), each.chunk.numel, each.dtype)
            with self._values(each, overwrites=True) as values:
                for slot, parameter in enumerate(each.parameters):
                    each.part(values, slot).copy_(parameter.detach())
            for slot, parameter in enumerate(each.parameters):
                take_over(parameter, Place(self, each.chunk.id, slot))
            self._set_absent(each)
            for slot, stand_in in enumerate(self._absent[each.chunk.id]):
                address = stand_in.untyped_storage().data_ptr()
                ADDRESSES.add(address, Place(self, each.chunk.id, slot), absent=True)

    def close(self) -> None:
        """Give every parameter memory of its own, with its present value."""
        self.write_back()
        with self._lock:
            self._closed = True
            for each in self.chunks:
                for slot, parameter in enumerate(each.parameters):
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

    def unpin(self, chunks: Iterable[int]) -> None:
        """End `pin`."""
        with self._lock:
            for chunk in chunks:
                self._pins[chunk] -= 1

    def derive(self, packed: Packed) -> Tensor:
        """The tensor that was packed: a view of the parameter's memory, which holds the chunk while it lives."""
        place = packed.place
        if self.unpacked is not None:
            self.unpacked(place)
        with self._lock:
            stay = self._bring(place.chunk)
            view = stay.views[place.slot]
            if packed.whole:
                return view.detach()
            if packed.dtype == view.dtype:
                return view.as_strided(packed.size, packed.stride, packed.offset)
            other = torch.empty(0, dtype=packed.dtype, device=view.device)
            return other.set_(stay.storages[place.slot], packed.offset, packed.size, packed.stride)  # type: ignore[call-overload,no-any-return]

    def _bring(self, chunk: int) -> _Stay:
        """The chunk's stay on the device; makes room as `moves` decides."""
        if self._closed:
            raise UserError("a backward of a graph that was made before close(); make its forward again")
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
        return self._pins[chunk] > 0 or self._resident[chunk].is_viewed

    def _load(self, chunk: int, place: int) -> _Stay:
        each = self.chunks[chunk]
        block = self.arena.take(self.cache.sizes[chunk], at=place)
        # A script may be in inference mode; the parameters are to be trained afterwards.
        with torch.inference_mode(False), torch.no_grad():
            stay = self._stays.get((chunk, block.first))
            if stay is None:
                stay = self._stays[chunk, block.first] = _Stay(each, block)
            with self._values(each) as values:
                stay.memory.copy_(values)
            for parameter, view in zip(each.parameters, stay.views, strict=True):
                put(parameter, view)
        stay.versions = self._versions(each)
        stay.begin(block)
        self._resident[chunk] = stay
        for slot, address in enumerate(stay.addresses):
            ADDRESSES.add(address, Place(self, chunk, slot))
        self._count("to_device", each)
        return stay

    def _versions(self, each: TrainedChunk) -> list[int]:
        return [version(parameter) for parameter in each.parameters]

    def _evict(self, chunk: int) -> None:
        self._write_back(chunk)
        self._let_go(chunk)
        self._count("off_device", self.chunks[chunk])

    def _let_go(self, chunk: int) -> None:
        """Take a chunk's memory away, whatever is in it."""
        stay = self._resident.pop(chunk)
        for address in stay.addresses:
            ADDRESSES.remove(address)
        self._set_absent(self.chunks[chunk])
        self.arena.give(stay.block)

    def _set_absent(self, each: TrainedChunk) -> None:
        for parameter, stand_in in zip(each.parameters, self._absent[each.chunk.id], strict=True):
            put(parameter, stand_in)

    def _count(self, direction: str, each: TrainedChunk) -> None:
        self.moves[direction] += 1
        self.nbytes[direction] += each.chunk.extent * each.dtype.itemsize

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
        versions = self._versions(each)
        if versions == stay.versions and not stay.given_out:
            return
        with self._values(each, writes=True) as values:
            values.copy_(stay.memory)
        stay.versions = versions
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
                stay, each = self._resident.get(chunk), self.chunks[chunk]
                if stay is None:
                    continue
                with self._values(each) as values:
                    stay.memory.copy_(values)
                stay.versions = self._versions(each)
                self._count("to_device", each)

    def value(self, parameter: nn.Parameter) -> Tensor:
        """A copy of a parameter's present value in ordinary memory of its device; nothing becomes resident."""
        place = _place(parameter)
        with self._lock:
            if place.chunk in self._resident:
                self._write_back(place.chunk)
            return self._value(self.chunks[place.chunk], place.slot)

    def _value(self, each: TrainedChunk, slot: int) -> Tensor:
        like = each.likes[slot]
        copy = torch.empty_strided(like.shape, like.stride(), dtype=each.dtype, device=each.device)
        with self._values(each) as values:
            return copy.copy_(each.part(values, slot))

    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """`parameter.data = value`, by copying; raises UserError for another shape, dtype or device."""
        place = _place(parameter)
        each = self.chunks[place.chunk]
        shape = tuple(each.likes[place.slot].shape)
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
            stay = self._resident.get(place.chunk)
            if stay is not None:
                with torch.no_grad():
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


def _stand_ins(each: TrainedChunk) -> list[Tensor]:
    """For each slot a tensor of the parameter's shape over a single element of all one bits, which is NaN in every
    floating dtype: what lies there while the chunk is away."""
    numel, size = len(each.parameters), each.dtype.itemsize
    ones = torch.full((numel * size,), 255, dtype=torch.uint8, device=each.device).view(each.dtype)
    return [carve(ones, index, ones[0]).expand(like.shape) for index, like in enumerate(each.likes)]
