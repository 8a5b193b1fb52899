"""The model at a site's shard, which aggregates its own workers and leaves the steps to the global shards.

Inside the site training is always bsp; between sites, `sync.consistency` of the run. Under `bsp` the site's
mean goes up as soon as it is ready, and the global mean and the new parameters come down. Under `ssp` and
`asp` the site's workers see their site's mean, and the gradients of their step go up as one contribution.
Each operation waits for the global shards, chunk by chunk. Source: docs/server.md, "Levels".

A restarted site's shard replays its journal without the global shards. At most the last operation was in
progress when it was killed. That one is repeated, and the global shards ignore duplicates. On a lossy link
(`exchange/feedback.py`) the journal has the global shards' reports of lost blocks, from which the residuals
are restored exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from atoll.chunks import ChunkMap
from atoll.core.config import LinkOptions
from atoll.core.errors import RunError, UserError
from atoll.core.points import reach
from atoll.exchange.feedback import Feedback
from atoll.exchange.link import ShardLink
from atoll.exchange.zeros import with_zeros
from atoll.server.model import HELD, Done, Holder, MeanOf, Model, ModelState, Send, SiteState
from atoll.server.payloads import payload_of
from atoll.server.records import StatePayload
from atoll.server.siteplace import SitePlace
from atoll.server.uplink import CONTRIBUTION, SET_UP, STATE, STEP, Edits, Uplink
from atoll.store.actions import CombineChunks, StepChunks
from atoll.store.balance import balance
from atoll.store.pulls import AnyPull
from atoll.tensors.payload import tensor_of
from atoll.wire import messages
from atoll.wire.messages import AnyMessage, Setup, Used, WireError, WorkerStand

Passing: TypeAlias = Callable[[ShardLink], None]  # an operation with the global shards
Gradients: TypeAlias = tuple[Tensor, bytes]  # a chunk's gradients, and their presence by slot


class PassingGroups:
    """The optimizers' param groups, on their way to the global shards."""

    def __init__(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        self._given = [dict(group) for group in hyperparameters]

    @property
    def given(self) -> list[dict[str, Any]]:
        return [dict(group) for group in self._given]

    def check(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError for param groups other than the run's. The global shards check further."""
        own = self._given  # a scheduler adds keys of its own
        if len(hyperparameters) != len(own) or any(
            group.keys() - given.keys() for group, given in zip(own, hyperparameters, strict=True)
        ):
            raise UserError(
                f"the optimizer has other param groups than the {len(own)} with which the run began; add "
                "param groups before session.prepare"
            )

    def set(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        self.check(hyperparameters)
        self._given = [dict(group) for group in hyperparameters]


class PassingValues:
    """Values of a site's chunks, as fetched last. New tensors replace old ones, which may still be on their
    way to a worker."""

    def __init__(self, layout: ChunkMap, held: Sequence[int], hyperparameters: Sequence[Mapping[str, Any]]):
        self.layout, self._held = layout, tuple(held)
        self._values: dict[int, Tensor] = {}
        self.param_groups = PassingGroups(hyperparameters)

    @property
    def chunks(self) -> tuple[int, ...]:
        return self._held

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


class SiteModel(Model):
    """The model at a site.

    `setup` is a worker's `number`-th set-up, sent for the site as a whole. `workers` is the number of workers
    of the site, and `shards` the number of global shards.

    `used()` returns the samples behind the iteration that goes up. `stand()` is the place of one worker's
    script. `alive()` is True if any worker of the site is left or may return, and `met()` the number of
    finished meetings of sites, after which a pull of the newest parameters must fetch again. `settle()` waits
    until all input is in the journal, and `note` writes a global shard's answer there. Without `upstream` a
    journal is replayed, and `go_on` finishes the work in progress. `link` has the options of the way up.
    """

    has_values_at_once = False  # values come from the global shards
    optimizer: PassingValues

    def __init__(
        self,
        setup: Setup,
        upstream: ShardLink | None,
        *,
        number: int,
        place: SitePlace,
        workers: int,
        shards: int,
        used: Callable[[], list[Used]],
        alive: Callable[[], bool],
        met: Callable[[], int] = lambda: 0,
        stand: Callable[[], WorkerStand | None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
        note: Callable[[AnyMessage], None] = lambda _message: None,
        link: LinkOptions | None = None,
        codec: str = "",
    ) -> None:
        inside = msgspec.structs.replace(setup, consistency="bsp", slack=0, workers=workers, shards=1)
        super().__init__(inside, 0, codec=codec)
        self.between, self._place, self._shards, self._number = setup, place, shards, number
        self._above, self._used, self._alive, self._settle, self._note = upstream, used, alive, settle, note
        self._met, self._refreshed = met, 0
        self._due: list[Passing] = []  # while a journal is replayed: operations that may be unfinished
        sizes = {chunk.id: chunk.nbytes for chunk in self.optimizer.layout.trainable}
        places = balance(list(sizes.values()), shards)
        self._shard_of = dict(zip(sizes, places, strict=True))
        self.feedback = Feedback(
            self.optimizer.layout.trainable, self._shard_of, link or LinkOptions(), self.coding
        )
        self._up = Uplink(place.incarnation, self._shard_of, self.feedback, stand)
        self.clock = setup.steps  # iterations of the site that count globally
        self._lacking: set[int] = set()  # chunks whose answers are missing
        self._consumed = setup.consumed  # samples of all sites, as the global shards report

    @property
    def consumed(self) -> float:
        return self._consumed

    def _hold(self, layout: ChunkMap) -> Holder:
        return PassingValues(layout, self.setup.chunks, self.setup.hyperparameters)

    def remembered(self) -> tuple[ModelState, list[tuple[StatePayload, memoryview]]]:
        state, parts = super().remembered()
        held = self.feedback.state()
        # Cloned: the residual changes while the journal still writes it.
        parts += [
            (StatePayload(HELD, chunk), payload_of(values.clone())) for chunk, (values, _) in held.items()
        ]
        site = SiteState(
            between=self.between,
            hyperparameters=self.optimizer.param_groups.given,
            clock=self.clock,
            held={chunk: weight for chunk, (_, weight) in held.items()},
        )
        return msgspec.structs.replace(state, site=site), parts

    def remember(self, state: ModelState, parts: Mapping[str, Mapping[int, memoryview]]) -> None:
        super().remember(state, parts)
        assert state.site is not None
        self.optimizer.param_groups.set(state.site.hyperparameters)
        self.clock = state.site.clock
        self.feedback.restore(
            {
                chunk: (tensor_of(parts[HELD][chunk], self.optimizer.dtype(chunk)), weight)
                for chunk, weight in state.site.held.items()
            }
        )

    # -- with the global shards, and without --------------------------------------------------------------

    def _pass(self, passing: Passing, *, begins: bool = True) -> None:
        """Run an operation with the global shards once the journal has all input before it. While a journal
        is replayed the operation is queued; one with `begins` drops those queued before, which were
        finished."""
        if self._above is not None:
            if begins:
                self._settle()
                reach("site.passes", self.clock)
            passing(self._above)
            return
        if begins:
            self._due.clear()
        self._due.append(passing)

    def go_on(self, upstream: ShardLink) -> None:
        """Finish the work in progress at the end of a replayed journal, and fetch the values."""
        self._above = upstream
        due, self._due = self._due, []
        for passing in due:
            passing(upstream)
        if self.complete:
            self.refresh()

    @property
    def _upstream(self) -> ShardLink:
        assert self._above is not None
        return self._above

    # -- setting up ---------------------------------------------------------------------------------------

    def describe(self) -> None:
        """Describe the model to the global shards; a worker of this site then brings the values."""
        setup = msgspec.structs.replace(self.between, workers=len(self._place.names), number=self._number)
        self._pass(lambda upstream: self._up.describe(upstream, setup, self._shards), begins=False)

    def set_chunk(self, message: messages.SetChunk, payload: memoryview | None) -> str:
        """Send up a chunk's values or one of its optimizer states."""
        shard = self._shard_of.get(message.chunk)
        if shard is None:
            return f"there is no chunk {message.chunk} to train"
        passed = msgspec.structs.replace(message, number=self._number)
        self._pass(lambda upstream: upstream.send(shard, passed, payload, until=SET_UP), begins=False)
        return ""

    def finish(self) -> str:
        """Complete the set-up after all values went up; never refuses."""
        self.begin()
        return ""

    def begin(self) -> None:
        """Wait until the global shards are set up, and fetch the values."""
        self._pass(self._begin, begins=False)
        self.complete = True

    def _begin(self, upstream: ShardLink) -> None:
        ready: set[int] = set()

        def take(shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
            assert isinstance(message, messages.Ready)
            if message.number == self._number:
                ready.add(shard)

        upstream.on(messages.Ready, take)
        told = self.setup
        asked = messages.Ready(
            digest=told.digest, number=self._number, codec=told.codec, dealing=told.dealing
        )
        what = f"the description of the model by worker {self.between.first}"
        upstream.ask(range(self._shards), asked, SET_UP, ready, what)
        self.refresh()

    def freshen(self, pull: AnyPull) -> None:
        if isinstance(pull, messages.Pull) and pull.newest and self._refreshed < self._met():
            self.refresh()

    def refresh(self) -> None:
        """Fetch the global shards' present parameters."""
        self._refreshed = self._met()
        self._fetch(self.clock, _nothing)

    # -- iterations ---------------------------------------------------------------------------------------

    def _combine(self, action: CombineChunks, done: Done) -> None:
        if self.between.consistency != "bsp":
            super()._combine(action, done)
            self._due.clear()
            return
        used = self._used()
        if self._above is not None:
            self._pass(
                lambda _: self._pass_mean(action, lambda chunk: self._mean_of(action, chunk), used, done)
            )
            return
        # Computed now: the gradients are dropped before the operation is repeated, if it is.
        means = {chunk: self._mean_of(action, chunk) for chunk in self.chunks}
        for chunk, (values, present) in means.items():
            self._up.outgoing(chunk, values, present, action.weight, self.clock)
        self._pass(lambda _: self._pass_mean(action, means.__getitem__, used, _nothing))

    def _pass_mean(
        self, action: CombineChunks, mean: Callable[[int], Gradients], used: list[Used], done: Done
    ) -> None:
        """Under bsp: send up the site's mean and wait for the mean over all sites."""
        for chunk in self.chunks:
            sparse = chunk in self.sparse
            values, present = mean(chunk)
            self._up.push(
                self._upstream, chunk, values, present, action.weight, self.clock, CONTRIBUTION, sparse=sparse
            )
        counted = action.weight, action.samples, action.basis, action.alike
        self._up.commit(self._upstream, counted, [], used, self.clock, CONTRIBUTION)
        self._await_mean(action.iteration, done)

    def _await_mean(self, iteration: int, done: Done) -> None:
        self.mean = None
        self._lacking = set(self.chunks)

        def take(shard: int, message: AnyMessage, payload: memoryview | None) -> None:
            assert isinstance(message, messages.Mean)
            if message.iteration != self.clock or message.chunk not in self._lacking:
                return
            self._take_losses(message.iteration, message)
            if self.mean is None:
                self.mean = MeanOf(iteration, {}, message.weight, message.samples)
            values = self._tensor(message.chunk, payload, shard, shortened=message.shortened)
            self.mean.chunks[message.chunk] = values, message.present
            self._lacking.discard(message.chunk)
            reach("site.answered", self.clock)
            done(message.chunk)

        upstream = self._upstream
        upstream.on(messages.Mean, take)
        for shard in self._up.holders:
            pull = messages.PullMean(incarnation=self._place.incarnation, iteration=self.clock)
            upstream.send(shard, pull, until=CONTRIBUTION)
        reach("site.passed", self.clock)
        upstream.wait(lambda: not self._lacking, self._missing, f"the mean of iteration {self.clock}")
        upstream.answered(CONTRIBUTION)

    def _take_losses(self, iteration: int, answer: messages.Mean | messages.Parameters) -> None:
        if answer.lost is not None:
            self._note(answer)
            self.feedback.answered(iteration, answer.chunk, answer.lost)

    def hear_losses(self, answer: messages.Mean | messages.Parameters) -> None:
        """Handle a global shard's report of lost blocks, from the journal."""
        iteration = answer.iteration if isinstance(answer, messages.Mean) else answer.asked - 1
        self.feedback.answered(iteration, answer.chunk, answer.lost)

    def _step(self, action: StepChunks, _before: Done, done: Done) -> None:
        mean, self.mean = self.mean, None
        self._replaced.clear()
        self.iterations = action.iteration + 1
        if action.accepted:
            self.optimizer.param_groups.set(action.hyperparameters)
        if not self._alive():
            return  # no worker made this step, and the hub removes the site from the run
        clock, told = self.clock, done if self._above is not None else _nothing
        edits = {
            chunk: (self._payloads.held[handle], present)
            for chunk, (handle, present) in action.edited.items()
        }
        word: Passing
        if self.between.consistency == "bsp":
            # If no worker here made this step, the other sites decide; as a rule they accept it.
            self._settle_losses(action.accepted or action.nobody)
            word = partial(self._up.say_step, action=action, edits=edits, clock=clock)
        else:
            assert mean is not None
            # Without a step by any worker the samples count nowhere: they are dealt again once the site ends.
            used = self._used()
            settings, used = self.optimizer.param_groups.given, [] if action.nobody else used
            self._settle_losses()  # while a journal is replayed: the earlier contribution is over
            word = partial(
                self._contribute,
                action=action,
                mean=mean,
                edits=edits,
                settings=settings,
                used=used,
                clock=clock,
            )
            if self._above is None and self.feedback.loses:
                for chunk, values, present in self._made_of(action, mean, edits):
                    self._up.outgoing(chunk, values, present, _weight(action, mean), clock)

        def passing(upstream: ShardLink) -> None:
            word(upstream)
            self._fetch(clock + 1, told)
            if self.between.consistency != "bsp":
                self._settle_losses()

        self._pass(passing)
        self.clock = clock + 1

    def _contribute(
        self,
        upstream: ShardLink,
        action: StepChunks,
        mean: MeanOf,
        edits: Edits,
        settings: list[dict[str, Any]],
        used: list[Used],
        clock: int,
    ) -> None:
        """Under ssp and asp: send up the gradients of the site's step as one contribution."""
        weight = _weight(action, mean)
        for chunk, values, present in self._made_of(action, mean, edits):
            sparse = chunk in self.sparse
            self._up.push(upstream, chunk, values, present, weight, clock, STEP, sparse=sparse)
        self._up.commit(upstream, (weight, mean.samples, mean.basis, mean.alike), settings, used, clock, STEP)

    def _made_of(self, action: StepChunks, mean: MeanOf, edits: Edits) -> Iterator[tuple[int, Tensor, bytes]]:
        """Yield the gradients of the site's step: chunk, gradients, presence."""
        for chunk, (values, present) in mean.chunks.items():
            if not action.accepted:
                yield chunk, torch.zeros_like(values), bytes(len(present))
            elif chunk in edits:
                payload, edited = edits[chunk]
                yield chunk, tensor_of(payload, self.optimizer.dtype(chunk)), edited
            else:
                yield chunk, values if action.scale == 1 else values * action.scale, present

    def _settle_losses(self, counted: bool = True) -> None:
        """Settle the residuals of the contribution in progress, if there is one."""
        for clock in self.feedback.under_way:
            self.feedback.settle(clock, counted=counted)

    def _fetch(self, clock: int, done: Done) -> None:
        """Fetch the parameters for a site that has committed `clock` iterations."""
        self._lacking = set(self.chunks)

        def take(shard: int, message: AnyMessage, payload: memoryview | None) -> None:
            assert isinstance(message, messages.Parameters)
            if message.clock < clock or message.chunk not in self._lacking:
                return
            self._take_losses(message.asked - 1, message)
            self.clock = message.clock
            self._consumed = max(self._consumed, message.consumed)
            self.optimizer.put(message.chunk, self._tensor(message.chunk, payload, shard))
            self._lent.pop(message.chunk, None)
            self.state.note_staleness(message.staleness)
            self._lacking.discard(message.chunk)
            reach("site.answered", clock - 1)
            done(message.chunk)

        upstream = self._upstream
        upstream.on(messages.Parameters, take)
        for shard in self._up.holders:
            pull = messages.Pull(incarnation=self._place.incarnation, clock=clock)
            upstream.send(shard, pull, until=STEP)
        reach("site.passed", clock - 1)
        what = f"the parameters after iteration {clock - 1}" if clock else "the parameters to begin with"
        upstream.wait(lambda: not self._lacking, self._missing, what)
        upstream.answered(STEP)

    # -- the optimizer's state ----------------------------------------------------------------------------

    def send_state(self, _asked: messages.PullState, send: Send) -> None:
        """Pass the optimizer's state, as the global shards have it, to `send`, message by message."""
        upstream, ended = self._upstream, dict[int, int]()

        def end(shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
            assert isinstance(message, messages.StateEnd)
            ended[shard] = message.steps
            self._consumed = max(self._consumed, message.consumed)

        upstream.on(messages.State, lambda _shard, message, payload: send(message, payload))
        upstream.on(messages.StateEnd, end)
        asked = messages.PullState(incarnation=self._place.incarnation)
        upstream.ask(range(self._shards), asked, STATE, ended, "the optimizer's state")
        send(messages.StateEnd(steps=max(ended.values()), consumed=self._consumed), None)

    # -- small things -------------------------------------------------------------------------------------

    def _missing(self) -> list[int]:
        return sorted({self._shard_of[chunk] for chunk in self._lacking})

    def _tensor(
        self, chunk: int, payload: memoryview | None, shard: int, *, shortened: bool = False
    ) -> Tensor:
        expected = self.optimizer.nbytes(chunk)
        if shortened:
            try:
                payload = with_zeros(payload, expected)
            except WireError as error:
                raise RunError(f"global shard {shard} sent for chunk {chunk} {error}") from None
        if payload is None or payload.nbytes != expected:
            got = 0 if payload is None else payload.nbytes
            raise RunError(f"global shard {shard} sent {got} bytes for chunk {chunk}, which has {expected}")
        return tensor_of(payload, self.optimizer.dtype(chunk))


def _weight(action: StepChunks, mean: MeanOf) -> float:
    return mean.weight if action.accepted else 0.0


def _nothing(_chunk: int) -> None:
    """Do nothing: no pull waits for the chunk."""
