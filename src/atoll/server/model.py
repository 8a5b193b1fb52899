"""The model that a shard trains between two Setups: its chunks, their optimizer and contributions in
flight."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor

from atoll.chunks import ChunkMap
from atoll.core.decoding import decoded
from atoll.core.errors import RunError, UserError
from atoll.core.points import reach
from atoll.core.weighing import KNOWN
from atoll.exchange.codecs import codec_named
from atoll.exchange.coding import Coding, bytes_of
from atoll.exchange.zeros import with_zeros, without_zeros
from atoll.server.checks import Checks, wrong_size
from atoll.server.heard import NOT_SET_UP
from atoll.server.inflight import InFlight
from atoll.server.logkeeper import IN_FLIGHT
from atoll.server.payloads import Lent, payload_of, weighted_mean
from atoll.server.records import StatePayload
from atoll.server.snapshot import Heading
from atoll.store.actions import Action, ApplyChunks, CombineChunks, GradientHandles, Release, StepChunks
from atoll.store.balance import balance
from atoll.store.log import CONSISTENCIES
from atoll.store.losses import absent
from atoll.store.pulls import AnyPull, Pulls
from atoll.store.shard import ShardState
from atoll.store.streams import SCALED
from atoll.tensors.compensation import Origins, compensated
from atoll.tensors.packing import PACKED
from atoll.tensors.payload import tensor_of
from atoll.tensors.shardoptimizer import ShardOptimizer
from atoll.tensors.wholechunk import OpenRecord, WholeChunk, dtype_of
from atoll.wire.messages import (
    AnyMessage,
    Count,
    Hyperparameters,
    LostBlocks,
    Pull,
    PullMean,
    PullState,
    Push,
    Replace,
    SetChunk,
    Setup,
    State,
    StateEnd,
    WireError,
    run_of,
)

Done: TypeAlias = Callable[[int], None]  # called with each finished chunk
Send: TypeAlias = Callable[[AnyMessage, memoryview | None], None]
_MOST_SHARDS = 4096
# Kinds of an image's parts; the key is a handle or a chunk.
CONTRIBUTION, MEAN, HELD = "contribution", "mean", "held back"

_MOST_SHORTENED = 16  # runs of a chunk of a mean that are kept without their zeros

_layouts: msgspec.msgpack.Decoder[ChunkMap] = msgspec.msgpack.Decoder(ChunkMap)


@dataclass(frozen=True)
class MeanOf:
    """A combined mean: values and presence of each chunk, and the sums of weights and samples. `shortened`
    has runs of chunks without their zeros, by chunk, begin and end in bytes; None: it would be no
    shorter."""

    iteration: int
    chunks: dict[int, tuple[Tensor, bytes]]
    weight: float
    samples: float
    basis: str = KNOWN  # how certain the least certain weight is
    alike: float = 1.0  # number of workers with weight
    shortened: dict[tuple[int, int, int], memoryview | None] = field(default_factory=dict)

    def payload(self, chunk: int, run: slice, *, sparse: bool) -> tuple[memoryview, bool]:
        """Return a run of a chunk as a payload, and True if that is without its zeros. `run` is in bytes.
        `sparse`: the chunk has sparse gradients."""
        whole, key = payload_of(self.chunks[chunk][0])[run], (chunk, run.start, run.stop)
        if not sparse:
            return whole, False
        if key in self.shortened:
            short = self.shortened[key]
        else:
            short = without_zeros(whole)
            if sum(kept == chunk for kept, _, _ in self.shortened) < _MOST_SHORTENED:  # clients name the runs
                self.shortened[key] = short
        return (whole, False) if short is None else (short, True)


class MeanState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A MeanOf without its values; `present` by chunk."""

    iteration: Count
    present: dict[int, bytes]
    weight: float
    samples: float
    basis: str = KNOWN
    alike: float = 1.0


class SiteState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Additional state of a site's model: the Setup as the site's workers sent it, the number of the site's
    iterations that count, and for each chunk the weight of its residual, whose values are a part of the
    image."""

    between: Setup
    hyperparameters: Hyperparameters
    clock: Count
    held: dict[int, float] = {}


class ModelState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The full state of a Model, except for the contents of a snapshot and the payloads, whose handles are in
    `payloads`."""

    setup: Setup
    iterations: Count
    held: ShardState
    mean: MeanState | None
    replaced: list[tuple[Count, Count, Count]]
    written: list[tuple[Count, Count, Count]] = []
    payloads: list[Count]
    handles: Count
    site: SiteState | None = None

    @property
    def given(self) -> Setup:
        """The Setup as workers sent it."""
        return self.setup if self.site is None else self.site.between


class HeldGroups(Protocol):
    """The optimizers' param groups: those with which chunks are stepped here, or those that a site passes
    on."""

    @property
    def given(self) -> list[dict[str, Any]]:
        """The groups as given last."""

    def check(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError for groups that do not fit the run's."""

    def set(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """Use these groups from now on; raises UserError if they do not fit."""


class Holder(Protocol):
    """Owner of the chunks' values: a `ShardOptimizer`, which also steps them, or a site's fetched values."""

    @property
    def chunks(self) -> tuple[int, ...]: ...

    @property
    def param_groups(self) -> HeldGroups: ...

    def slots(self, chunk: int) -> int: ...

    def nbytes(self, chunk: int) -> int: ...

    def dtype(self, chunk: int) -> torch.dtype: ...

    def values(self, chunk: int) -> Tensor: ...


class Model:
    """A model under training, as one Setup describes it. Raises UserError for a contradictory Setup, or one
    that cannot run here."""

    has_values_at_once = True  # parameters may be pulled before the Setup is complete

    def __init__(
        self, setup: Setup, shard: int, *, configured: str = "", fused: bool = False, codec: str = ""
    ) -> None:
        self.setup, self._configured, self._fused = setup, configured, fused
        self.coding = Coding(codec_named(setup.codec, allowed=codec))
        layout = self._layout = _layout_untrusted(setup)
        placed = _check(setup, layout, shard)
        self.holders = sorted(set(placed))
        self.optimizer = self._hold(layout)
        self.state = ShardState.begin(
            setup.chunks, setup.consistency, setup.slack, IN_FLIGHT, setup.steps, setup.consumed
        )
        self.pulls = Pulls(self.state)
        self.mean: MeanOf | None = None
        self.complete = False
        self.awaited: set[int] = set()  # at a standby: chunks that the primary has yet to send
        self._valued: set[int] = set()  # chunks whose values have arrived
        self._given: dict[int, dict[str, Tensor]] = {}  # received optimizer state: chunk -> key -> values
        self._numbers: dict[int, list[dict[str, Any]]] = {}
        self._payloads = InFlight()
        self.checks = Checks(setup, layout, self.optimizer)
        self._lent: dict[int, Lent] = {}  # chunks whose values are or were being sent to workers
        self._replaced: set[tuple[int, int, int]] = set()  # worker, iteration, chunk
        self._written: set[tuple[int, int, int]] = set()  # of chunks whose values the worker has written
        self.sparse: set[int] = set()  # chunks of which a worker has sent gradients without their zeros
        self.iterations = setup.steps

    @property
    def consumed(self) -> float:
        """Samples of all workers of the run that the log has counted."""
        return self.state.consumed

    def _hold(self, layout: ChunkMap) -> Holder:
        """Allocate the chunks."""
        setup = self.setup
        optimizer = ShardOptimizer(
            layout,
            setup.chunks,
            setup.optimizers,
            setup.hyperparameters,
            configured=self._configured,
            fused=self._fused,
        )
        if setup.compensation > 0 and setup.consistency != "bsp":
            optimizer.origins = Origins(kept=1 + setup.pipeline)
        return optimizer

    @property
    def own(self) -> ShardOptimizer:
        """The optimizer that steps the chunks here; a site's shard has none."""
        assert isinstance(self.optimizer, ShardOptimizer)
        return self.optimizer

    @property
    def chunks(self) -> tuple[int, ...]:
        return self.optimizer.chunks

    @property
    def is_whole(self) -> bool:
        """True if all values are here."""
        return self.complete and not self.awaited

    def freshen(self, pull: AnyPull) -> None:
        """Fetch the parameters that `pull` asks for, if the shard does not own them; a no-op except at a
        site."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the chunks' values."""
        return sum(self.optimizer.nbytes(chunk) for chunk in self.chunks)

    def heading(self, run: str, shard: int, sequence: int) -> Heading:
        """Return the heading of a snapshot taken now."""
        return Heading(
            run=run,
            shard=shard,
            digest=self.setup.digest,
            optimizers=self.setup.optimizers,
            hyperparameters=self.optimizer.param_groups.given,
            sequence=sequence,
            steps=self.iterations,
        )

    # -- state for a journal ------------------------------------------------------------------------------

    def remembered(self) -> tuple[ModelState, list[tuple[StatePayload, memoryview]]]:
        """Return the state, except for the chunks and their optimizer, with the payloads that belong to
        it."""
        mean = self.mean
        state = ModelState(
            setup=self.setup,
            iterations=self.iterations,
            held=self.state,
            mean=None
            if mean is None
            else MeanState(
                iteration=mean.iteration,
                present={chunk: present for chunk, (_, present) in mean.chunks.items()},
                weight=mean.weight,
                samples=mean.samples,
                basis=mean.basis,
                alike=mean.alike,
            ),
            replaced=sorted(self._replaced),
            written=sorted(self._written),
            payloads=list(self._payloads.held),
            handles=self._payloads.handles,
        )
        parts = [
            (StatePayload(CONTRIBUTION, handle), payload) for handle, payload in self._payloads.held.items()
        ]
        values = {} if mean is None else mean.chunks
        return state, parts + [
            (StatePayload(MEAN, chunk), payload_of(flat)) for chunk, (flat, _) in values.items()
        ]

    def remember(self, state: ModelState, parts: Mapping[str, Mapping[int, memoryview]]) -> None:
        """Take over a state returned by `remembered`; chunks and optimizer must already be as they were then.
        `parts` has payloads by kind and key."""
        self.state = state.held
        self.pulls = Pulls(self.state)
        self.iterations = state.iterations
        self._replaced, self._written = set(state.replaced), set(state.written)
        held = {handle: parts[CONTRIBUTION][handle] for handle in state.payloads}
        self._payloads = InFlight(state.handles, held)
        self.complete = True
        if state.mean is not None:
            chunks = {
                chunk: (tensor_of(parts[MEAN][chunk], self.optimizer.dtype(chunk)), present)
                for chunk, present in state.mean.present.items()
            }
            mean_of = state.mean
            self.mean = MeanOf(
                mean_of.iteration, chunks, mean_of.weight, mean_of.samples, mean_of.basis, mean_of.alike
            )

    # -- filling it ---------------------------------------------------------------------------------------

    def set_chunk(self, message: SetChunk, payload: memoryview | None) -> str:
        """Set a chunk's values or one of its optimizer states; returns why the message is refused."""
        chunk = message.chunk
        if chunk not in self.chunks:
            return f"this shard does not hold chunk {chunk}"
        if self.complete:
            return f"chunk {chunk} comes after the worker said that all had come"
        if message.values and len(message.values) != self.optimizer.slots(chunk):
            return f"chunk {chunk} has {self.optimizer.slots(chunk)} parameters, not {len(message.values)}"
        dtype = self.optimizer.dtype(chunk)
        if message.key:
            try:
                dtype = self.own.state_dtype(chunk, message.key)
            except UserError as error:
                return str(error)
        expected = self.optimizer.values(chunk).numel() * dtype.itemsize
        has_any_size = message.key == PACKED and payload is not None
        if payload is None or (payload.nbytes != expected and not has_any_size):
            return wrong_size(chunk, payload, expected)
        if message.key:
            self._given.setdefault(chunk, {})[message.key] = tensor_of(payload, dtype)
        else:
            self.own.set_values(chunk, tensor_of(payload, dtype))
            self._valued.add(chunk)
        if message.values:
            self._numbers[chunk] = message.values
        return ""

    def finish(self) -> str:
        """Complete the Setup after the last SetChunk; returns what is missing or wrong."""
        missing = sorted(set(self.chunks) - self._valued)
        if missing:
            return f"the values of chunks {', '.join(map(str, missing[:8]))} have not come"
        try:
            for chunk in self.chunks:
                if chunk in self._given or any(self._numbers.get(chunk, ())):
                    self.own.set_state(chunk, self._given.get(chunk, {}), self._numbers.get(chunk, []))
        except Exception as error:  # numbers that torch cannot hold, say
            return f"the optimizer's state cannot be taken: {error}".splitlines()[0]
        self._given.clear()
        self._numbers.clear()
        self.complete = True
        return ""

    def lend(self, chunk: int) -> memoryview:
        """Return a chunk's values as a payload, not copied. Later steps leave the payload unchanged."""
        lent = self._lent.get(chunk)
        if lent is None:
            lent = self._lent[chunk] = Lent(self.optimizer.values(chunk))
        return lent.payload()

    def receive(
        self,
        chunk: int,
        tensors: Mapping[str, memoryview],
        slots: list[dict[str, Any]],
        open_: OpenRecord | None,
    ) -> None:
        """Set a chunk as the primary has it now. `tensors` has the values under "", optimizer states, inputs
        of an open step under "open.", and the values that contributors continued from under "then.". Raises
        RunError for data that do not fit."""
        values = tensors.get("")
        if chunk not in self.awaited or values is None or values.nbytes != self.optimizer.nbytes(chunk):
            raise RunError(f"the primary sent a chunk {chunk} that is none of those that are awaited")
        own = self.own
        found = {key: tensor_of(each, dtype_of(own, chunk, key)) for key, each in tensors.items()}
        own_values = found.pop("")
        WholeChunk(found, slots, open_).put_into(own, chunk, own_values)
        self.awaited.discard(chunk)

    def send_state(self, asked: PullState, send: Send) -> None:
        """Pass the optimizer's state, of all chunks or of one, to `send`, message by message."""
        for chunk in self.chunks:
            if asked.chunk not in (-1, chunk):
                continue
            elements, slots = self.own.state(chunk)
            kept = {key: str(flat.dtype).removeprefix("torch.") for key, flat in elements.items()}
            send(State(chunk=chunk, key="", values=slots, kept=kept), None)
            for key, flat in elements.items() if not asked.words else ():
                send(State(chunk=chunk, key=key), payload_of(flat))
        send(StateEnd(steps=self.iterations, consumed=self.consumed), None)

    # -- contributions ------------------------------------------------------------------------------------

    def decoded(
        self, push: Push, payload: memoryview | None, *, recorded: bool = False
    ) -> tuple[Push, memoryview | None]:
        """Put back the zeros that a payload goes without, undo the run's codec, and describe the link's
        losses by element. A `recorded` payload is decoded already, but for its zeros. Raises WireError for an
        invalid payload."""
        if push.chunk not in self.chunks or push.share >= push.shares:
            return push, payload
        if not any(push.present):
            if push.shortened:
                raise WireError("it has no gradient, and goes without its zeros")
            return push, payload
        writes = not recorded and self.coding.writes(self._layout.chunks[push.chunk].dtype)
        if not writes and not push.shortened:
            return push, payload
        start, stop = run_of(self.checks.extent(push.chunk), push.share, push.shares)
        if push.shortened:
            if push.lost is not None:
                raise WireError("a part of it was lost, and it goes without its zeros")
            run = self.checks.run_bytes(push.chunk, push.share, push.shares)
            size = self.coding.codec.size(stop - start) if writes else run.stop - run.start
            payload = with_zeros(payload, size)
            push = msgspec.structs.replace(push, shortened=False)
            self.sparse.add(push.chunk)
        if not writes:
            return push, payload
        if push.lost is None:
            return push, bytes_of(self.coding.decode(payload, stop - start))
        values, lost = self.coding.decode_lossy(payload, stop - start, push.lost)
        return msgspec.structs.replace(push, lost=lost), bytes_of(values)

    def push(self, worker: int, push: Push, payload: memoryview | None) -> tuple[str, bool]:
        """Stage a chunk of a contribution; returns why it is refused, and True if the contribution is now
        whole."""
        refusal = self.checks.gradient(push, payload) if self.complete else NOT_SET_UP
        refusal = refusal or self.checks.finite(worker, push, payload)
        if not refusal and push.chunks_in_all != len(self.chunks):
            refusal = f"{push.chunks_in_all} chunks announced, where this shard holds {len(self.chunks)}"
        if refusal:
            return refusal, False
        outcome = self.state.handle_push(worker, push, self._payloads.next)
        if outcome.keep:
            self._payloads.keep(payload)
        self._payloads.release(outcome.freed)
        if outcome.joins:
            self._payloads.join(outcome.joins)
        return outcome.refused, outcome.staged

    def pull_with(self, push: Push) -> AnyPull:
        """Return the pull that a Push includes: of the mean under bsp, else of the parameters."""
        if self.setup.consistency == "bsp":
            return PullMean(
                incarnation=push.incarnation,
                iteration=push.iteration,
                share=push.share,
                shares=push.shares,
            )
        return Pull(
            incarnation=push.incarnation, clock=push.iteration + 1, share=push.share, shares=push.shares
        )

    def lost_of(self, worker: int, pull: AnyPull, chunk: int) -> LostBlocks | None:
        """Return the blocks lost of the asker's own contribution, which the answer to `pull` reports."""
        if isinstance(pull, PullMean):
            iteration = pull.iteration
        elif self.setup.consistency == "bsp":
            return None  # reported with the mean
        else:
            iteration = pull.clock - 1
        return self.state.lost_of(worker, pull, iteration, chunk, self.checks.extent(chunk))

    def replace(self, worker: int, replace: Replace, payload: memoryview | None) -> str:
        """Store a worker's edited mean or values of a chunk; returns why it is refused."""
        refusal = self.checks.gradient(replace, payload) if self.complete else NOT_SET_UP
        if refusal:
            return refusal
        outcome = self.state.handle_replace(worker, replace, self._payloads.next)
        if outcome.keep:
            self._payloads.keep(payload)
            kept = self._written if replace.values else self._replaced
            kept.add((worker, replace.iteration, replace.chunk))
        return outcome.refused

    def lacks(self, worker: int, iteration: int, edited: Iterable[int], written: Iterable[int]) -> bool:
        """True if some of the chunks whose mean a worker has edited, or into which it has written, of those
        held here, have not arrived yet."""
        awaited = [
            *((chunk, self._replaced) for chunk in edited),
            *((chunk, self._written) for chunk in written),
        ]
        return any(
            chunk in self.state.versions and (worker, iteration, chunk) not in arrived
            for chunk, arrived in awaited
        )

    # -- the log's actions --------------------------------------------------------------------------------

    def act(self, action: Action, before: Done, done: Done) -> None:
        """Carry out an action, chunk by chunk. `before(chunk)` is called before the chunk's values change,
        `done(chunk)` when its new values or its mean are ready."""
        if isinstance(action, CombineChunks):
            self._combine(action, done)
        elif isinstance(action, StepChunks):
            self._step(action, before, done)
        elif isinstance(action, ApplyChunks):
            self._apply(action, before, done)
        elif isinstance(action, Release):
            self._payloads.release(action.handles)

    def _combine(self, action: CombineChunks, done: Done) -> None:
        self.mean = MeanOf(action.iteration, {}, action.weight, action.samples, action.basis, action.alike)
        for chunk in self.chunks:
            self.mean.chunks[chunk] = self._mean_of(action, chunk)
            reach("shard.combined", action.iteration)
            done(chunk)

    def _mean_of(self, action: CombineChunks, chunk: int) -> tuple[Tensor, bytes]:
        parts = []
        for place, (weight, contribution) in enumerate(action.contributions):
            if action.weights:
                weight = self.own.weight_of(chunk, action.weights[place], weight)
            handle, present = contribution[chunk]
            parts.append(
                (
                    weight,
                    self._payloads.gradients(handle, self.optimizer.dtype(chunk), self.checks.extent(chunk)),
                    present,
                )
            )
        if not action.losses:
            return weighted_mean(parts)
        gaps = [
            absent(each.get(chunk), self.checks.extent(chunk), self.checks.places(chunk, present))
            for each, (_, _, present) in zip(action.losses, parts, strict=True)
        ]
        return weighted_mean(parts, gaps)

    def _step(self, action: StepChunks, before: Done, done: Done) -> None:
        assert self.mean is not None
        mean = self.mean
        self.mean = mean if action.stays else None
        self._replaced.clear()
        self._written.clear()
        self.iterations = action.iteration + 1
        for chunk, (handle, _) in action.written.items():
            if chunk not in self.awaited:
                self._make_way(chunk, before)
                values = self._payloads.gradients(
                    handle, self.optimizer.dtype(chunk), self.checks.extent(chunk)
                )
                self.own.set_values(chunk, values)
        if not action.accepted:
            return
        self.optimizer.param_groups.set(action.hyperparameters)
        for chunk in self.chunks:
            if not self.own.trains(chunk, action.optimizer):
                done(chunk)
                continue
            gradients, present = mean.chunks[chunk] if action.stays else mean.chunks.pop(chunk)
            if chunk in action.edited:
                handle, present = action.edited[chunk]
                gradients = self._payloads.gradients(
                    handle, self.optimizer.dtype(chunk), self.checks.extent(chunk)
                )
            elif action.scale != 1:
                gradients = (
                    gradients * action.scale
                )  # not in place: the mean may still be on its way to a worker
            if chunk not in self.awaited and any(present):
                self._make_way(chunk, before)
                with _told_of(chunk):
                    self.own.step(chunk, gradients, present)
            reach("shard.stepped", action.iteration)
            done(chunk)

    def _make_way(self, chunk: int, before: Done) -> None:
        """Prepare a chunk for a change: `before` runs, and values being sent stay unchanged in their old
        memory."""
        before(chunk)
        lent = self._lent.pop(chunk, None)
        if lent is not None and lent.is_held:
            self.own.move(chunk)

    def _apply(self, action: ApplyChunks, before: Done, done: Done) -> None:
        self.iterations = max(self.iterations, action.iteration + 1)
        self.optimizer.param_groups.set(action.hyperparameters)
        for chunk, (handle, present) in _in_order(action.chunks):
            if chunk not in self.awaited and self.own.trains(chunk, action.optimizer):
                self._make_way(chunk, before)
                gradients = self._payloads.gradients(
                    handle, self.optimizer.dtype(chunk), self.checks.extent(chunk)
                )
                with _told_of(chunk):
                    self.own.contribute(
                        chunk,
                        self._compensated(action, chunk, gradients),
                        present,
                        action.part,
                        opens=action.opens,
                        closes=action.closes,
                    )
            if chunk not in self.awaited and self.own.trains(chunk):
                self._goes_on(action, chunk)
            reach("shard.stepped", action.iteration)
            done(chunk)

    def _compensated(self, action: ApplyChunks, chunk: int, gradients: Tensor) -> Tensor:
        """Compensate a contribution's gradients for the steps between its parameters and those of its
        step."""
        origins, factor = self.own.origins, self.setup.compensation
        who, clock = (action.worker, action.incarnation), action.iteration - action.behind
        then = origins.find(chunk, who, clock) if origins is not None else None
        if then is None:
            return gradients
        return compensated(gradients, self.own.base(chunk, action.opens), then, factor)

    def _goes_on(self, action: ApplyChunks, chunk: int) -> None:
        """Retain the chunk's present values, from which the contributor's next iteration begins."""
        origins = self.own.origins
        if origins is None:
            return
        origins.forget(chunk, {who for who in origins.contributors(chunk) if self.state.refusal(*who)})
        who = action.worker, action.incarnation
        origins.note(chunk, who, action.iteration + 1, self.own.values(chunk))


@contextlib.contextmanager
def _told_of(chunk: int) -> Iterator[None]:
    """Turn any exception of the optimizer into a RunError that names the chunk."""
    try:
        yield
    except Exception as error:  # an optimizer of the operator's may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunError(f"the optimizer failed on chunk {chunk}: {reason}") from error


def _in_order(parts: GradientHandles) -> list[tuple[int, tuple[int, bytes]]]:
    return sorted(parts.items())


def _layout_untrusted(setup: Setup) -> ChunkMap:
    """Decode the layout in a Setup; raises UserError if it is invalid."""
    layout = decoded(_layouts, setup.layout, UserError, "the layout cannot be read")
    for index, chunk in enumerate(layout.chunks):
        where = f"the layout's chunk {index}"
        if chunk.id != index or not 0 <= chunk.group < len(layout.groups) or not chunk.slots:
            raise UserError(f"{where} is out of place")
        if not isinstance(getattr(torch, chunk.dtype, None), torch.dtype):
            raise UserError(f"{where} has a dtype that torch lacks: {chunk.dtype[:40]!r}")
        end = 0
        for slot in sorted(chunk.slots, key=lambda slot: slot.offset):
            if slot.numel < 0 or slot.offset < end or slot.offset + slot.numel > chunk.numel:
                raise UserError(f"{where} has slots outside of it, or over one another")
            end = slot.offset + slot.numel
    return layout


def _check(setup: Setup, layout: ChunkMap, shard: int) -> Sequence[int]:
    """Check that a Setup is consistent; returns each trainable chunk's shard. Raises UserError."""
    if setup.consistency not in CONSISTENCIES:
        raise UserError(f"no such consistency: {setup.consistency!r} ({', '.join(CONSISTENCIES)})")
    if setup.staleness not in SCALED:
        raise UserError(f"no such scaling of what is stale: {setup.staleness!r} ({', '.join(SCALED)})")
    if not math.isfinite(setup.compensation) or setup.pipeline >= IN_FLIGHT:
        raise UserError(f"compensation {setup.compensation} or pipeline {setup.pipeline} is out of range")
    if not shard < setup.shards <= _MOST_SHARDS or setup.workers < 1:
        raise UserError(f"shard {shard} of a run of {setup.shards} shards and {setup.workers} workers")
    placed = balance([chunk.nbytes for chunk in layout.trainable], setup.shards)
    own = [chunk.id for chunk, home in zip(layout.trainable, placed, strict=True) if home == shard]
    if sorted(setup.chunks) != own:
        raise UserError(
            f"shard {shard} is to hold chunks {setup.chunks[:8]}, and balancing gives it {own[:8]}"
        )
    return placed
