"""What a site's shard trains: it aggregates its own workers, and has the global shards do the rest.

Inside the site it is always bsp. Between the sites it is what the run's `sync.consistency` says: under `bsp`
the site's mean goes up as soon as it is made, and the global mean and the new parameters come down; under
`ssp` and `asp` the site's workers see their site's mean, and what their step makes of it goes up as one
contribution. Each waits for the global shards, chunk by chunk. Source: S4, "The store", levels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.chunks import ChunkMap
from atoll.core.errors import RunError, UserError
from atoll.server.model import Done, Holder, MeanOf, Model
from atoll.server.payloads import payload_of, tensor_of
from atoll.server.upstream import LOG, Upstream
from atoll.store.actions import CombineChunks, StepChunks
from atoll.store.balance import balance
from atoll.wire import messages
from atoll.wire.messages import AnyMessage, Setup, Used


class PassingValues:
    """The values of a site's chunks, as they came last. New ones take the place of the old ones, which may
    still be on their way to a worker."""

    def __init__(self, layout: ChunkMap, held: Sequence[int], hyperparameters: Sequence[Mapping[str, Any]]):
        self.layout, self._held = layout, tuple(held)
        self._values: dict[int, Tensor] = {}
        self._hyperparameters = [dict(group) for group in hyperparameters]

    @property
    def chunks(self) -> tuple[int, ...]:
        return self._held

    @property
    def hyperparameters(self) -> list[dict[str, Any]]:
        return [dict(group) for group in self._hyperparameters]

    def slots(self, chunk: int) -> int:
        return len(self.layout.chunks[chunk].slots)

    def nbytes(self, chunk: int) -> int:
        return self.layout.chunks[chunk].extent * self.dtype(chunk).itemsize

    def dtype(self, chunk: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.layout.chunks[chunk].dtype)
        return dtype

    def values(self, chunk: int) -> Tensor:
        return self._values[chunk]

    def put(self, chunk: int, values: Tensor) -> None:
        self._values[chunk] = values

    def check_hyperparameters(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError for other param groups than the run's; the global shards look closer."""
        own = [sorted(group) for group in self._hyperparameters]
        if [sorted(group) for group in hyperparameters] != own:
            raise UserError(f"hyperparameters of other param groups than the {len(own)} that the run has")

    def set_hyperparameters(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        self.check_hyperparameters(hyperparameters)
        self._hyperparameters = [dict(group) for group in hyperparameters]


class SiteModel(Model):
    """`setup` is a worker's, for the site as a whole; `workers` is how many the site has.

    `used()` gives the samples behind the iteration that goes up, and `alive()` says whether any worker of the
    site is left. Raises UserError where the setup makes no sense.
    """

    optimizer: PassingValues

    def __init__(
        self,
        setup: Setup,
        upstream: Upstream,
        *,
        workers: int,
        used: Callable[[], list[Used]],
        alive: Callable[[], bool],
    ) -> None:
        inside = msgspec.structs.replace(setup, consistency="bsp", slack=0, workers=workers, shards=1)
        super().__init__(inside, 0)
        self._between, self._upstream, self._used, self._alive = setup, upstream, used, alive
        sizes = {chunk.id: chunk.nbytes for chunk in self.optimizer.layout.trainable}
        places = balance(list(sizes.values()), len(upstream))
        self._shard_of = dict(zip(sizes, places, strict=True))
        self._clock = setup.steps  # iterations of the site that count globally
        self._lacking: set[int] = set()  # chunks that are waited for

    def _hold(self, layout: ChunkMap) -> Holder:
        return PassingValues(layout, self.setup.chunks, self.setup.hyperparameters)

    # -- setting up ---------------------------------------------------------------------------------------

    def describe(self) -> None:
        """One of this site's workers brings the values: tell the global shards what they are of."""
        for shard in range(len(self._upstream)):
            setup = msgspec.structs.replace(
                self._between,
                chunks=[chunk for chunk, place in self._shard_of.items() if place == shard],
                workers=len(self._upstream.place.names),
                shards=len(self._upstream),
            )
            self._upstream.send(shard, setup)

    def set_chunk(self, message: messages.SetChunk, payload: memoryview | None) -> str:
        """Pass on a chunk's values or a state of its optimizer."""
        if message.chunk not in self._shard_of:
            return f"there is no chunk {message.chunk} to train"
        self._upstream.send(self._shard_of[message.chunk], message, payload)
        return ""

    def begin(self) -> None:
        """Wait until the global shards are set up, and fetch the values."""
        ready: set[int] = set()
        self._upstream.on(messages.Ready, lambda shard, _message, _payload: ready.add(shard))
        self._upstream.send_all(messages.Ready(digest=self.setup.digest))
        self._upstream.wait(
            lambda: len(ready) == len(self._upstream),
            lambda: [shard for shard in range(len(self._upstream)) if shard not in ready],
            f"the description of the model by worker {self._between.first}",
        )
        self.refresh()
        self.complete = True

    def refresh(self) -> None:
        """Fetch the parameters as the global shards have them now."""
        self._fetch(self._clock, _nothing)

    # -- iterations ---------------------------------------------------------------------------------------

    def _combine(self, action: CombineChunks, done: Done) -> None:
        if self._between.consistency != "bsp":
            super()._combine(action, done)
            return
        for chunk in self.chunks:
            self._push(chunk, *self._mean_of(action, chunk))
        self._commit(action.weight, action.samples, [])
        self._await_mean(action.iteration, done)

    def _await_mean(self, iteration: int, done: Done) -> None:
        self.mean = None
        self._lacking = set(self.chunks)

        def take(shard: int, message: AnyMessage, payload: memoryview | None) -> None:
            assert isinstance(message, messages.Mean)
            if message.iteration != self._clock or message.chunk not in self._lacking:
                return
            if self.mean is None:
                self.mean = MeanOf(iteration, {}, message.weight, message.samples)
            self.mean.chunks[message.chunk] = self._tensor(message.chunk, payload, shard), message.present
            self._lacking.discard(message.chunk)
            done(message.chunk)

        self._upstream.on(messages.Mean, take)
        for shard in self._holders():
            self._upstream.send(
                shard, messages.PullMean(incarnation=self._incarnation, iteration=self._clock)
            )
        self._upstream.wait(lambda: not self._lacking, self._missing, f"the mean of iteration {self._clock}")

    def _step(self, action: StepChunks, _before: Done, done: Done) -> None:
        assert self.mean is not None
        mean, self.mean = self.mean, None
        self._replaced.clear()
        self.iterations = action.iteration + 1
        if action.accepted:
            self.optimizer.set_hyperparameters(action.hyperparameters)
        if not self._alive():
            return  # nobody has said this step, and the hub takes the site out of the run
        if self._between.consistency == "bsp":
            self._say_step(action)
        else:
            self._contribute(action, mean)
        self._clock += 1
        self._fetch(self._clock, done)

    def _say_step(self, action: StepChunks) -> None:
        """bsp: have the global shards step with the mean that all sites have."""
        edits = hashlib.blake2b(digest_size=16)
        for chunk, (handle, present) in sorted(action.edited.items()):
            payload = self._payloads[handle]
            edits.update(present)
            edits.update(payload)
            replace = messages.Replace(
                incarnation=self._incarnation, iteration=self._clock, chunk=chunk, present=present
            )
            self._upstream.send(self._shard_of[chunk], replace, payload)
        self._upstream.send(
            LOG,
            messages.Step(
                incarnation=self._incarnation,
                iteration=self._clock,
                scale=action.scale,
                hyperparameters=action.hyperparameters,
                edited=sorted(action.edited),
                edits=edits.hexdigest() if action.edited else "",
                accepted=action.accepted,
            ),
        )

    def _contribute(self, action: StepChunks, mean: MeanOf) -> None:
        """ssp, asp: what the site's workers have made of their mean is the site's contribution."""
        for chunk, (values, present) in mean.chunks.items():
            if not action.accepted:
                self._push(chunk, torch.zeros_like(values), bytes(len(present)))
            elif chunk in action.edited:
                handle, edited = action.edited[chunk]
                self._push(chunk, self._gradients(chunk, handle), edited)
            else:
                self._push(chunk, values if action.scale == 1 else values * action.scale, present)
        self._commit(mean.weight if action.accepted else 0.0, mean.samples, self.optimizer.hyperparameters)

    def _push(self, chunk: int, values: Tensor, present: bytes) -> None:
        shard = self._shard_of[chunk]
        push = messages.Push(
            incarnation=self._incarnation,
            iteration=self._clock,
            chunk=chunk,
            chunks_in_all=sum(place == shard for place in self._shard_of.values()),
            present=present,
        )
        self._upstream.send(shard, push, payload_of(values))

    def _commit(self, weight: float, samples: float, hyperparameters: list[dict[str, Any]]) -> None:
        self._upstream.on(messages.Committed, _ignored)
        self._upstream.send(
            LOG,
            messages.Commit(
                incarnation=self._incarnation,
                iteration=self._clock,
                weight=weight,
                samples=samples,
                hyperparameters=hyperparameters,
                used=self._used(),
            ),
        )

    def _fetch(self, clock: int, done: Done) -> None:
        """Have the parameters with which a site that has committed `clock` iterations goes on."""
        self._lacking = set(self.chunks)

        def take(shard: int, message: AnyMessage, payload: memoryview | None) -> None:
            assert isinstance(message, messages.Parameters)
            if message.clock < clock or message.chunk not in self._lacking:
                return
            self._clock = message.clock
            self.optimizer.put(message.chunk, self._tensor(message.chunk, payload, shard))
            self._lent.pop(message.chunk, None)
            self.state.note_staleness(message.staleness)
            self._lacking.discard(message.chunk)
            done(message.chunk)

        self._upstream.on(messages.Parameters, take)
        for shard in self._holders():
            self._upstream.send(shard, messages.Pull(incarnation=self._incarnation, clock=clock))
        what = f"the parameters after iteration {clock - 1}" if clock else "the parameters to begin with"
        self._upstream.wait(lambda: not self._lacking, self._missing, what)

    # -- the optimizer's state ----------------------------------------------------------------------------

    def pass_state(self, send: Callable[[AnyMessage, memoryview | None], None]) -> None:
        """Hand the optimizer's state, as the global shards have it, to `send`, message by message."""
        ended: dict[int, int] = {}

        def end(shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
            assert isinstance(message, messages.StateEnd)
            ended[shard] = message.steps

        self._upstream.on(messages.State, lambda _shard, message, payload: send(message, payload))
        self._upstream.on(messages.StateEnd, end)
        self._upstream.send_all(messages.PullState(incarnation=self._incarnation))
        self._upstream.wait(
            lambda: len(ended) == len(self._upstream),
            lambda: [shard for shard in range(len(self._upstream)) if shard not in ended],
            "the optimizer's state",
        )
        send(messages.StateEnd(steps=max(ended.values())), None)

    # -- small things -------------------------------------------------------------------------------------

    @property
    def _incarnation(self) -> int:
        return self._upstream.place.incarnation

    def _holders(self) -> list[int]:
        return sorted(set(self._shard_of.values()))

    def _missing(self) -> list[int]:
        return sorted({self._shard_of[chunk] for chunk in self._lacking})

    def _tensor(self, chunk: int, payload: memoryview | None, shard: int) -> Tensor:
        expected = self.optimizer.nbytes(chunk)
        if payload is None or payload.nbytes != expected:
            got = 0 if payload is None else payload.nbytes
            raise RunError(f"global shard {shard} sent {got} bytes for chunk {chunk}, which has {expected}")
        return tensor_of(payload, self.optimizer.dtype(chunk))


def _nothing(_chunk: int) -> None:
    """Nobody waits for it."""


def _ignored(_shard: int, _message: AnyMessage, _payload: memoryview | None) -> None:
    """What counts is seen by the parameters that come."""
