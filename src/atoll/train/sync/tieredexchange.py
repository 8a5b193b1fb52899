"""The exchange with the shards of a parameter server, of a worker whose model lies in chunks over tiers.

As `train/sync/exchange.py` has it, but nothing is held twice: a gradient is read from its tier when it
leaves, and once more if a shard dies before it has answered; means and new values are asked for chunk by
chunk, and go into their tiers as they come. Under way at once are `UNDER_WAY` chunks, whatever the model's
size.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from atoll.exchange.coding import bytes_of
from atoll.memory.exchanged import Exchanged
from atoll.net.returning import MOST_UNDER_WAY, Made, Payload
from atoll.tensors.binding import BoundChunk
from atoll.tensors.finite import is_finite
from atoll.train.gradients.reducer import Calls, Clipping
from atoll.train.gradients.samples import Contribution
from atoll.train.gradients.sums import AtEnd
from atoll.train.sync.exchange import (
    CONTRIBUTION,
    AsyncExchange,
    Connection,
    Exchange,
    MeanSteps,
    NewParameters,
    WorkerMean,
    check_mean,
    values_of,
)
from atoll.wire.messages import (
    AnyMessage,
    Hyperparameters,
    Mean,
    Pull,
    PullMean,
)

UNDER_WAY = MOST_UNDER_WAY  # chunks at once, on their way out or in

Holder = Callable[[], Exchanged]


class Asking:
    """Asks shards for chunks, of which at most `UNDER_WAY` are on their way: `ask(chunk)` makes the message,
    which is sent until the chunk `has_come`. Shards take turns, so that all of their links are used."""

    def __init__(self, connection: Connection, kind: str, ask: Callable[[int], Pull | PullMean]) -> None:
        self._connection, self._kind, self._ask = connection, kind, ask
        self._waiting: deque[int] = deque()
        self._asked: set[int] = set()

    def begin(self, chunks: Iterable[int]) -> None:
        """Ask for these, and for nothing that was asked for before."""
        self.stop()
        self._waiting.extend(in_turn(chunks, self._connection.shard_of))
        self._more()

    def stop(self) -> None:
        """Ask for nothing any more."""
        self._waiting.clear()
        for chunk in self._asked:
            self._connection.shards.answered((self._kind, chunk))
        self._asked.clear()

    def next(self, chunk: int, arrived: dict[int, Tensor], what: str | Callable[[], str]) -> Tensor:
        """Wait until a chunk is in `arrived`, and take it from there; another one is asked for."""
        shard = self._connection.shard_of[chunk]
        self._connection.shards.wait(lambda: chunk in arrived, lambda: [shard], what)
        self.has_come(chunk)
        return arrived.pop(chunk)

    def has_come(self, chunk: int) -> None:
        """It is dealt with: ask for another one."""
        self._asked.discard(chunk)
        self._connection.shards.answered((self._kind, chunk))
        self._more()

    def _more(self) -> None:
        while self._waiting and len(self._asked) < UNDER_WAY:
            chunk = self._waiting.popleft()
            self._asked.add(chunk)
            shard = self._connection.shard_of[chunk]
            self._connection.shards.send(shard, self._ask(chunk), until=(self._kind, chunk))


def in_turn(chunks: Iterable[int], shard_of: Mapping[int, int]) -> list[int]:
    """These, in the order in which they are asked for: one of each shard, and again."""
    by_shard: dict[int, list[int]] = {}
    for chunk in chunks:
        by_shard.setdefault(shard_of[chunk], []).append(chunk)
    longest = max(map(len, by_shard.values()), default=0)
    return [held[turn] for turn in range(longest) for held in by_shard.values() if turn < len(held)]


class TieredParameters(NewParameters):
    """New parameters, which go into their tiers as they come: between a backward and the next forward."""

    def __init__(self, chunks: Sequence[BoundChunk], connection: Connection, held: Holder) -> None:
        self._held = held
        self._newest = self._drops = False
        self.steps = False  # what comes is of the script's own step
        self._sums: dict[int, list[int]] = {}  # by chunk, each slot's checksum as it was published
        super().__init__(chunks, connection)
        self._asking = Asking(connection, "parameters", self._pull_of)

    def _pull_of(self, chunk: int) -> Pull:
        assert self._asked is not None
        return Pull(
            incarnation=self._connection.shards.incarnation,
            clock=self._asked,
            newest=self._newest,
            share=self._share[0],
            shares=self._share[1],
            chunks=[chunk],
        )

    def pull(
        self,
        clock: int,
        newest: bool = False,
        contribution: Hashable = CONTRIBUTION,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.expect(clock, contribution, share)
        self._newest = newest

    def expect(
        self, clock: int, contribution: Hashable = CONTRIBUTION, share: tuple[int, int] = (0, 1)
    ) -> None:
        """They are asked for as they are published: nothing comes before there is a place for it."""
        super().expect(clock, contribution, share)
        self._newest = False

    def discard(self) -> None:
        with self.dropping():
            self._asking.begin(self._chunks)
            super().discard()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Within it, what comes is put nowhere: it is what the parameters are."""
        self._drops = True
        try:
            yield
        finally:
            self._drops = False

    def _begin(self) -> None:
        self._held().begin_values()
        self._asking.begin(self._chunks)

    def _end(self) -> None:
        self._held().end_values(stepped=self.steps)

    def _done(self) -> None:
        self._asking.stop()
        super()._done()

    def _put(self, bound: BoundChunk, values: Tensor | None) -> None:
        if values is not None and not self._drops:
            self._held().write_values(bound.chunk, bound.parameters, values)
            self._sums[bound.chunk.id] = _sums(bound, values)

    def _handle(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        chunk = getattr(message, "chunk", -1)
        if not (self._publishing or self._drops) or chunk in self._staged:
            return  # sent again
        super()._handle(shard, message, payload)
        if chunk in self._staged:
            self._staged[chunk] = None  # it is in its tier
            self._asking.has_come(chunk)

    # What the script has changed

    def check_unchanged(self) -> None:
        held = self._held()
        held.write_back()
        if not held.written:
            return
        for bound in self._chunks.values():
            if not held.is_written(bound.parameters) or bound.chunk.id not in self._sums:
                continue
            now = _sums(bound, values_from(held, bound))
            for name, before, after in zip(bound.names, self._sums[bound.chunk.id], now, strict=True):
                if before != after:
                    self._refuse_change(name)
        held.written.clear()

    def forget_changes(self) -> None:
        self._held().write_back()
        self._held().written.clear()
        self._sums.clear()  # of what was published before

    def _seen(self) -> list[tuple[str, int]]:
        return []  # the tiers see it


class _Tiered(Exchange):
    """What both have: a contribution's chunks are read as they leave."""

    _held: Holder
    _nonfinite: list[str]  # of this iteration's own gradients

    def _new_parameters(self, connection: Connection) -> NewParameters:
        return TieredParameters(self._chunks, connection, self._held)

    def _push_all(self, own: Contribution) -> None:
        """Push all chunks of this iteration's contribution; nothing is asked for yet."""
        held, shards = self._held(), self.connection.shards
        self._pushed.clear()
        self._nonfinite = []
        for bound in self._chunks:
            present = [own.weight > 0 and here for here in held.present(bound.parameters)]
            message = self._push_of(bound.chunk.id, present, pull=False)
            payload = Made(partial(self._gradient, bound, present))
            shard = self.connection.shard_of[bound.chunk.id]
            shards.send(shard, message, payload, until=CONTRIBUTION)
            self.bytes_sent += bound.chunk.extent * bound.dtype.itemsize

    def _gradient(self, bound: BoundChunk, present: Sequence[bool]) -> memoryview:
        """This worker's own gradient of a chunk, as it leaves; zeros where there is none."""
        flat = gradient_from(self._held(), bound, present)
        note_nonfinite(bound, flat, self._nonfinite)
        return bytes_of(flat)


class TieredMeanSteps(MeanSteps):
    """bsp: what a script makes of a mean that lies in tiers, where it is told what was changed."""

    _held: Holder
    _bounds: dict[int, BoundChunk]  # by chunk
    _all_edited = False  # clipped after the script had changed some

    def clip(self, by: Clipping) -> Tensor:
        edited = self._edited()
        norm, coefficient = by.clip()
        if edited:
            self._all_edited = True  # `step` sends all of it
        else:
            self._scale_at_step *= coefficient
        return norm

    def _edited(self) -> list[int]:
        held = self._held()
        return [
            chunk_id
            for chunk_id, bound in self._bounds.items()
            if self._all_edited or held.edited(bound.parameters)
        ]

    def _gradients_seen(self) -> list[tuple[Tensor | None, int]]:
        return []  # the tiers see it

    def _has_mean(self) -> bool:
        held = self._held()
        for bound in self._bounds.values():
            present = held.present(bound.parameters)
            if any(present) and bool(gradient_from(held, bound, present).any()):
                return True
        return False

    def _made_of_mean(self, chunk_id: int) -> tuple[Sequence[bool], Tensor]:
        held, bound = self._held(), self._bounds[chunk_id]
        present = held.present(bound.parameters)
        return present, gradient_from(held, bound, present)

    def _edit_of(self, chunk_id: int, _flat: Tensor) -> Payload:
        return Made(lambda: bytes_of(self._made_of_mean(chunk_id)[1]))


class TieredMean(_Tiered, TieredMeanSteps, WorkerMean):
    """bsp: after backward `p.grad` is the mean over workers, in the tiers where this worker's own was."""

    def __init__(
        self, chunks: Sequence[BoundChunk], connection: Connection, calls: Calls, held: Holder
    ) -> None:
        super().__init__(chunks, calls, AtEnd)
        self._held, self._nonfinite = held, []
        self._bounds = {bound.chunk.id: bound for bound in self._chunks}
        self._connect(connection, lazy=False)
        self._asking = Asking(connection, "mean", self._pull_of)

    def _pull_of(self, chunk: int) -> PullMean:
        incarnation = self.connection.shards.incarnation
        return PullMean(incarnation=incarnation, iteration=self.steps, chunks=[chunk])

    @torch.no_grad()
    def reduce(self) -> None:
        """Push, commit, and take the mean chunk by chunk."""
        self.connection.members.boundary(self.steps)
        self._calls.leaving()
        own = self.contribute()
        self._committed, self._all_edited = self.steps, False
        self._means.clear()
        self._push_all(own)
        self._commit(own, [], stand=self._stand())
        self._asking.begin(self._bounds)
        self._await_mean()
        self._mean_is_there(own)

    def _handle_mean(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Mean)
        bound = self._bounds.get(message.chunk)
        if message.iteration != self.steps or bound is None or message.chunk in self._means:
            return
        check_mean(self.connection.shard_of, shard, message, bound)
        # The shard has answered, so what was sent to it counts, and is not read again.
        if not any(self.connection.shard_of[chunk_id] == shard for chunk_id in self._means):
            self.connection.shards.answered(CONTRIBUTION, shard)
        values = values_of(payload, bound, shard)
        present = [bool(byte) for byte in message.present]
        self._held().put_gradients(bound.chunk, bound.parameters, present, values)
        self._means[message.chunk] = message
        self._asking.has_come(message.chunk)

    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        with Stepping(self.parameters):
            super().step(accepted, hyperparameters)

    def own_nonfinite(self) -> list[str]:
        return list(self._nonfinite)


class TieredAsync(_Tiered, AsyncExchange):
    """ssp and asp: this worker's own gradients leave in `step()`, as the script has left them."""

    def __init__(
        self, chunks: Sequence[BoundChunk], connection: Connection, calls: Calls, held: Holder
    ) -> None:
        self._held, self._nonfinite = held, []
        super().__init__(chunks, connection, calls, lazy=False)

    def _contribute_all(self, own: Contribution, pull: bool = True) -> None:
        del pull  # the answer is asked for chunk by chunk
        self._push_all(own)

    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        with Stepping(self.parameters):
            super().step(accepted, hyperparameters)


class Stepping:
    """Within it, what is published is of the script's step."""

    def __init__(self, parameters: NewParameters) -> None:
        assert isinstance(parameters, TieredParameters)
        self._parameters = parameters

    def __enter__(self) -> None:
        self._parameters.steps = True

    def __exit__(self, *_error: object) -> None:
        self._parameters.steps = False


def note_nonfinite(bound: BoundChunk, flat: Tensor, names: list[str]) -> None:
    """Add to `names` the parameters of a chunk whose gradients, in `flat`, (extent,), are not finite."""
    if is_finite(flat):
        return
    for name, slot in zip(bound.names, bound.chunk.slots, strict=True):
        if name not in names and not is_finite(flat[slot.offset : slot.offset + slot.numel]):
            names.append(name)


def gradient_from(held: Exchanged, bound: BoundChunk, present: Sequence[bool]) -> Tensor:
    """A copy of a chunk's gradients, (extent,), zeros where there is none."""
    flat = torch.zeros(bound.chunk.extent, dtype=bound.dtype)
    held.read_gradients(bound.chunk, bound.parameters, present, flat)
    return flat


def values_from(held: Exchanged, bound: BoundChunk) -> Tensor:
    """A copy of a chunk's values, (extent,)."""
    flat = torch.zeros(bound.chunk.extent, dtype=bound.dtype)
    held.read_values(bound.chunk, bound.parameters, flat)
    return flat


def _sums(bound: BoundChunk, flat: Tensor) -> list[int]:
    """A checksum of each slot of `flat`, (extent,)."""
    runs = (flat[slot.offset : slot.offset + slot.numel] for slot in bound.chunk.slots)
    return [zlib.crc32(bytes_of(run)) for run in runs]
