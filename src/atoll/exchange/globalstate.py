"""Parameters and an optimizer's state as one run of bytes: for a node that comes late, and for checkpoints.

    8 bytes      the head's length, little-endian
    8 bytes      the sum (exchange/globalparameters.py: sum_of_bits) of all that follows
    head         MessagePack: `Head`
    payloads     in the order of the head's parts, each at a multiple of 64 bytes from the beginning

It goes between nodes, and between a worker and its CPU side. Nothing in it is unpickled, and every size is
held against the layout before anything is copied. A byte that is not as it was packed is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import Chunk, itemsize
from atoll.core.decoding import decoded
from atoll.core.errors import PrepareError, UserError
from atoll.exchange.globalparameters import GlobalParameters, sum_of_bits
from atoll.exchange.hostmemory import ALIGNMENT, aligned, map_bytes, resize
from atoll.exchange.sentgroups import sent_groups
from atoll.tensors.binding import BoundChunk, carve, dtype_as
from atoll.tensors.lazy import LazyTensor
from atoll.tensors.packing import PACKED, moved, pack, unpack_lazily
from atoll.tensors.packing import unpack as states_of
from atoll.tensors.payload import bytes_in
from atoll.tensors.stepunit import Unit
from atoll.wire.base import HEADER_BYTES, Count, Hyperparameters, Name

_LENGTH, _BEGIN = 8, 16  # bytes: of the length, and up to the head


class PackedChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The packed state of a chunk: its payloads are its values, if `values`, and then its `states`.

    Attributes:
        values: True if the values are packed.
        states: dtypes of the element-wise states, by key.
        numbers: dtypes of those of the `slots`' values that are tensors, by key.
        slots: for each parameter, its states as a whole ("step"). None under the key of an element-wise state
            means that this parameter does not have it. Where whole tensors are stepped, their words
            (tensors/packing.py).
        packed: bytes of the state "packed", which has the tensors of these words.
    """

    chunk: Count
    values: bool
    states: dict[Name, Name]
    numbers: dict[Name, Name]
    slots: list[dict[str, Any]]
    packed: Count = 0


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The head of packed state.

    Attributes:
        digest: the digest of the global parameters; empty for the state of a worker's own optimizer.
        optimizer: the class's full name.
    """

    iteration: Count
    digest: bytes
    optimizer: Name
    hyperparameters: Hyperparameters
    parts: list[PackedChunk]


class Packed(NamedTuple):
    """Packed state as it was read. Its tensors lie in the packed bytes.

    Attributes:
        payloads: for each part, the values, or None, and the states by key.
    """

    head: Head
    payloads: list[tuple[Tensor | None, dict[str, Tensor]]]


_decoder: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)


def pack_globals(parameters: GlobalParameters) -> memoryview:
    """Return a packed copy of all global state: values, the optimizer's state, iteration and digest."""
    return _pack(*_parts_of(parameters, values=True), fd=-1)


def pack_globals_into(parameters: GlobalParameters, fd: int) -> int:
    """Pack the optimizer's state into the file `fd`, which gets the length needed; return the bytes."""
    return _pack(*_parts_of(parameters, values=False), fd=fd).nbytes


def _parts_of(parameters: GlobalParameters, values: bool) -> tuple[Head, list[Tensor]]:
    optimizer = parameters.optimizer
    parts: list[PackedChunk] = []
    payloads: list[Tensor] = []
    for chunk in optimizer.chunks:
        if not values and not optimizer.trains(chunk):
            continue
        states, slots = optimizer.state(chunk)
        parts.append(
            PackedChunk(
                chunk=chunk,
                values=values,
                states={key: _name(flat.dtype) for key, flat in states.items()},
                numbers={key: _name(dtype) for key, dtype in optimizer.number_dtypes(chunk).items()},
                slots=slots,
                packed=states[PACKED].numel() if PACKED in states else 0,
            )
        )
        payloads += [parameters.values(chunk)] if values else []
        payloads += states.values()
    head = Head(
        iteration=parameters.iteration,
        digest=parameters.digest,
        optimizer=parameters.optimizer_name,
        hyperparameters=optimizer.param_groups.given,
        parts=parts,
    )
    return head, payloads


def most_bytes(parameters: GlobalParameters) -> int:
    """Return an upper limit of the bytes of `pack_globals` for this layout and optimizer, for bytes that come
    from outside."""
    optimizer = parameters.optimizer
    room = 0
    for chunk in optimizer.chunks:
        payloads = 1 + len(optimizer.state_dtypes(chunk))
        room += optimizer.nbytes(chunk) + optimizer.most_state_bytes(chunk) + payloads * ALIGNMENT
    return _BEGIN + HEADER_BYTES + room


def unpack_globals(raw: memoryview, parameters: GlobalParameters) -> Head:
    """Take over what `pack_globals` has packed, of the same layout and optimizer; without values, the
    optimizer's state only.

    Raises UserError, one line, for anything else; nothing has changed then.
    """
    packed = unpack(raw, {chunk.id: chunk for chunk in parameters.layout.chunks})
    _check(packed, parameters)
    optimizer = parameters.optimizer
    for part, (values, states) in zip(packed.head.parts, packed.payloads, strict=True):
        if values is not None:
            parameters.set_values(part.chunk, values)
        parameters.set_state(part.chunk, states, part.slots)
    optimizer.param_groups.set(packed.head.hyperparameters)
    if any(part.values for part in packed.head.parts):
        parameters.iteration = packed.head.iteration
    return packed.head


def _check(packed: Packed, parameters: GlobalParameters) -> None:
    """Raise UserError if `packed` is of other parameters or another optimizer."""
    head, optimizer = packed.head, parameters.optimizer
    if head.optimizer != parameters.optimizer_name:
        raise UserError(f"the state given is of {head.optimizer}, and here is {parameters.optimizer_name}")
    optimizer.param_groups.check(head.hyperparameters)
    whole = any(part.values for part in head.parts)
    expected = [chunk for chunk in optimizer.chunks if whole or optimizer.trains(chunk)]
    if [part.chunk for part in head.parts] != expected or any(p.values != whole for p in head.parts):
        raise UserError(f"the state given is not of the {len(expected)} chunks that are held here")
    for part in head.parts:
        kept = {key: _name(dtype) for key, dtype in optimizer.state_dtypes(part.chunk).items()}
        if any(kept.get(key) != dtype for key, dtype in part.states.items()):
            raise UserError(f"the state given of chunk {part.chunk} has {part.states}, where {kept} is kept")
    for part, (_, states) in zip(head.parts, packed.payloads, strict=True):
        if PACKED in states:
            states_of(states[PACKED], part.slots)  # raises for words that do not fit


def unpack(raw: memoryview, chunks: Mapping[int, Chunk]) -> Packed:
    """Read packed state of these chunks. Tensors lie in `raw` if its address allows it.

    Args:
        chunks: the chunks by id.

    Raises UserError, one line, for anything else, and for damaged bytes.
    """
    length = int.from_bytes(raw[:_LENGTH], "little")
    if not 0 < length <= min(HEADER_BYTES, raw.nbytes - _BEGIN):
        raise UserError(f"the state given has {raw.nbytes} bytes, which are no packed state")
    memory = bytes_in(raw)
    if sum_of_bits(memory[_BEGIN:]) != raw[_LENGTH:_BEGIN]:
        raise UserError(f"the state given, {raw.nbytes} bytes, is not as it was packed: damaged or cut short")
    head = decoded(_decoder, raw[_BEGIN : _BEGIN + length], UserError, "the state given is no packed state")
    end = _BEGIN + length
    payloads: list[tuple[Tensor | None, dict[str, Tensor]]] = []
    for part in head.parts:
        chunk = _chunk_of(part, chunks)
        held = []
        for dtype, nbytes in _kinds(part, chunk):
            start = _round_up(end)
            end = start + nbytes
            if end > raw.nbytes:
                raise UserError(f"the state given ends within chunk {chunk.id}, after {raw.nbytes} bytes")
            held.append(_view(memory[start:end], dtype))
        values = held.pop(0) if part.values else None
        payloads.append((values, dict(zip(part.states, held, strict=True))))
    if end != raw.nbytes:
        raise UserError(f"the state given has {raw.nbytes} bytes, and its head speaks of {end}")
    return Packed(head, payloads)


def _chunk_of(part: PackedChunk, chunks: Mapping[int, Chunk]) -> Chunk:
    """Return the chunk of a part. Raises UserError for a part that does not fit it."""
    if part.chunk not in chunks:
        raise UserError(f"the state given has a chunk {part.chunk}, which this model has not")
    chunk = chunks[part.chunk]
    if len(part.slots) != len(chunk.slots):
        raise UserError(
            f"the state given has {len(part.slots)} parameters in chunk {chunk.id}, which has "
            f"{len(chunk.slots)}"
        )
    if PACKED in part.states:
        return chunk
    numbers = (value for slot in part.slots for value in slot.values())
    if any(value is not None and not isinstance(value, (int, float)) for value in numbers):
        raise UserError(f"the state given of chunk {chunk.id} has what is no number")
    return chunk


def _kinds(part: PackedChunk, chunk: Chunk) -> Iterator[tuple[str, int]]:
    """Yield the dtype and the bytes of each of a part's payloads, in order."""
    if part.values:
        yield chunk.dtype, chunk.extent * itemsize(chunk.dtype)
    for key, dtype in part.states.items():
        try:
            size = itemsize(dtype)
        except PrepareError:
            raise UserError(f"the state given of chunk {chunk.id} is of dtype {dtype!r}") from None
        yield dtype, part.packed * size if key == PACKED else chunk.extent * size


def pack_optimizer(
    optimizer: torch.optim.Optimizer,
    chunks: Sequence[BoundChunk],
    unit: Unit,
    iteration: int,
) -> memoryview:
    """Pack the state that a worker's own optimizer has for each parameter, as after load_state_dict.

    Args:
        chunks: the worker's chunks; those that no optimizer trains are left out.
        unit: the unit in which the optimizer steps.
    """
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    parts: list[PackedChunk] = []
    payloads: list[Tensor] = []
    for bound in sorted(chunks, key=lambda bound: bound.chunk.id):
        if bound.parameters[0] not in trained:
            continue
        held = [optimizer.state.get(parameter, {}) for parameter in bound.parameters]
        if unit.by_tensor:
            flat, words = pack(held)
            kept = {PACKED: "uint8"} if flat.numel() else {}
            part = PackedChunk(bound.chunk.id, False, kept, {}, words, flat.numel())
            parts.append(part)
            payloads += [flat] if flat.numel() else []
            continue
        states = {
            key: torch.zeros(bound.chunk.extent, dtype=slot[key].dtype.to_real())
            for slot in held
            for key in sorted(unit.keys & slot.keys())
        }
        for slot, own, parameter in zip(bound.chunk.slots, held, bound.parameters, strict=True):
            for key in states.keys() & own.keys():
                carve(states[key], slot.offset, parameter).copy_(own[key])
        slots = [
            {key: _number(value) for key, value in own.items() if key not in states}
            | {key: None for key in states if key not in own}
            for own in held
        ]
        kept = {key: _name(flat.dtype) for key, flat in states.items()}
        parts.append(PackedChunk(chunk=bound.chunk.id, values=False, states=kept, numbers={}, slots=slots))
        payloads += states.values()
    head = Head(
        iteration=iteration,
        digest=b"",
        optimizer=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        hyperparameters=sent_groups(optimizer),
        parts=parts,
    )
    return _pack(head, payloads, fd=-1)


def unpack_optimizer(
    raw: memoryview,
    optimizer: torch.optim.Optimizer,
    chunks: Sequence[BoundChunk],
    *,
    lazily: bool = False,
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return copies of each parameter's state in plain torch's form, from what `pack_globals_into` has
    packed.

    They are on the parameters' devices, in the optimizer's order of parameters.

    Args:
        lazily: True if states stay in `raw`, and are copied when they are read.

    Raises UserError as `unpack` does.
    """
    bound_as = {bound.chunk.id: bound for bound in chunks}
    packed = unpack(raw, {bound.chunk.id: bound.chunk for bound in chunks})
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for part, (_, states) in zip(packed.head.parts, packed.payloads, strict=True):
        bound = bound_as[part.chunk]
        if PACKED in states:
            device = bound.parameters[0].device
            if lazily:
                read = partial(_itself, states[PACKED])
                whole = unpack_lazily(read, part.slots, device)
            else:
                whole = [moved(own, device) for own in states_of(states[PACKED], part.slots)]
            found.update({p: own for p, own in zip(bound.parameters, whole, strict=True) if own})
            continue
        for slot, parameter, numbers in zip(bound.chunk.slots, bound.parameters, part.slots, strict=True):
            kept = {
                key: partial(_copy_of, carve(flat, slot.offset, parameter), parameter.device)
                for key, flat in states.items()
                if numbers.get(key, 0) is not None
            }
            state: dict[str, Any] = {
                key: LazyTensor(
                    read, parameter.shape, dtype_as(states[key].dtype, parameter), parameter.device
                )
                if lazily
                else read()
                for key, read in kept.items()
            }
            for key, value in numbers.items():
                if value is not None:
                    dtype = part.numbers.get(key)
                    state[key] = torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value
            if state:
                found[parameter] = state
    known = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {parameter: found[parameter] for parameter in known if parameter in found}


def _itself(value: Tensor) -> Tensor:
    return value


def _copy_of(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device, copy=True)


def _pack(head: Head, payloads: Sequence[Tensor], fd: int) -> memoryview:
    encoded = msgspec.msgpack.encode(head)
    end = begin = _BEGIN + len(encoded)
    for payload in payloads:
        end = _round_up(end) + payload.nbytes
    if fd >= 0:
        resize(fd, end, "the optimizer's state")
    memory = map_bytes(fd, end) if fd >= 0 else aligned(end)
    raw: memoryview = memory.numpy().data
    raw[:_LENGTH] = len(encoded).to_bytes(_LENGTH, "little")
    raw[_BEGIN:begin] = encoded
    for payload in payloads:
        start = _round_up(begin)
        memory[begin:start].zero_()
        begin = start + payload.nbytes
        memory[start:begin].copy_(payload.view(torch.uint8))
    raw[_LENGTH:_BEGIN] = sum_of_bits(memory[_BEGIN:])
    return raw


def _view(raw: Tensor, dtype: str) -> Tensor:
    kind = getattr(torch, dtype)
    return (raw if raw.data_ptr() % kind.itemsize == 0 else raw.clone()).view(kind)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _round_up(offset: int) -> int:
    return math.ceil(offset / ALIGNMENT) * ALIGNMENT
