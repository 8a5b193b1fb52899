"""The ways to train one model with others: which reducer takes its gradients, and what makes its steps.

The session chooses a strategy once; `Prepared` lets it build both for each model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import ChunkMap
from atoll.core import points
from atoll.core.config import Config, Sync
from atoll.core.errors import RunError, UserError
from atoll.core.optimizerkind import OptimizerKind
from atoll.exchange.codecs import codec_named
from atoll.exchange.coding import Coding, bytes_of
from atoll.exchange.sentgroups import sent_groups_of_all
from atoll.net.returning import Payload
from atoll.store.balance import balance
from atoll.tensors.bf16 import Float32Optimizer, Float32Steps
from atoll.tensors.binding import BoundChunk, carve
from atoll.tensors.optimizer import ChunkOptimizer, ParameterOptimizer, StepHooks
from atoll.tensors.packing import PACKED, moved, pack, unpack
from atoll.tensors.payload import tensor_of
from atoll.tensors.remoteoptimizer import RemoteOptimizer
from atoll.tensors.remotestate import forget_state
from atoll.tensors.settings import Settings, settings_of, settings_of_all
from atoll.tensors.shardoptimizer import full_name
from atoll.tensors.steppers import Steppers
from atoll.tensors.stepunit import Unit
from atoll.train.gradients.reducer import Calls, Reducer, continue_from
from atoll.train.gradients.ring import Boundary, RingReducer
from atoll.train.gradients.solo import GatheredGradients, SoloReducer, are_quickly_gathered
from atoll.train.gradients.tiersums import Holder
from atoll.train.group.inner import AnyRing
from atoll.train.members.workers import Workers
from atoll.train.sync.connection import Connection, IterationMembers, values_of
from atoll.train.sync.servedmodels import ServedModels
from atoll.train.sync.server import ALL, Server, Turn
from atoll.train.sync.service import Service
from atoll.train.sync.serving import serve_alone, serve_group
from atoll.train.sync.together import Together
from atoll.train.sync.uplink import UplinkChoice
from atoll.wire.messages import (
    AnyMessage,
    PullState,
    Ready,
    SetChunk,
    Setup,
    State,
    StateEnd,
)

Stepper: TypeAlias = ChunkOptimizer | ParameterOptimizer | Steppers

# The states that torch.optim's optimizers keep as zero-dimensional tensors.
_ZERO_DIMENSIONAL = ("step", "mu_product", "eta", "mu")
_MESSAGE_BYTES = 2**20  # below it, a collective's fixed cost outweighs the cost of its bytes


def message_bytes_for(layout: ChunkMap) -> int:
    """Return the least bytes of gradients for one collective of a ring, as far as a model has so many."""
    return min(_MESSAGE_BYTES, layout.chunk_bytes // 4)


class OptimizerSteps(Protocol):
    """One of a model's optimizers (`train/api/stepset.py`: StepSet; see there)."""

    optimizer: torch.optim.Optimizer
    unit: Unit
    hooks: StepHooks
    float32: Float32Steps | None

    @property
    def waits(self) -> bool: ...

    @property
    def follows(self) -> bool: ...


@dataclass(frozen=True)
class Training:
    """One model, its optimizers and its chunks, as a strategy takes them.

    Attributes:
        number: the model's number in the session.
        sets: the optimizers. Strategies that take one only are given one (`axes/needs.py`).
        chunk_map: the layout.
        chunks: the trained chunks.
        frozen: the other chunks.
        calls: the services that the reducer asks for.
        config: the run's configuration.
        former: the reducer of the model as it was prepared before; None: it is new.
    """

    number: int
    sets: Sequence[OptimizerSteps]
    chunk_map: ChunkMap
    chunks: list[BoundChunk]
    frozen: list[BoundChunk]
    calls: Calls
    config: Config
    former: Reducer | None = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each.optimizer for each in self.sets]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only optimizer."""
        return self.sets[0].optimizer

    @property
    def unit(self) -> Unit:
        """The unit in which the only optimizer steps."""
        return self.sets[0].unit

    @property
    def hooks(self) -> StepHooks:
        """The functions around each step of the only optimizer."""
        return self.sets[0].hooks


# Returns a chunk's gradients as a flat tensor, and for each slot whether there is one; None if one is sparse.
FlatGradients: TypeAlias = Callable[[BoundChunk], tuple[Tensor, tuple[bool, ...]] | None]


def steppers_of(training: Training, gradients: FlatGradients | None) -> Stepper:
    """Return what steps the model here: each optimizer steps chunks, or parameters if its unit is the tensor.

    Without `gradients`, and with float32 steps of bfloat16 parameters, all step parameters.
    """
    steppers: list[ChunkOptimizer | ParameterOptimizer] = []
    for each in training.sets:
        if each.float32 is not None:
            steppers.append(Float32Optimizer(each.optimizer, each.hooks, each.float32))
        elif each.unit.by_tensor or gradients is None:
            # Those of torch.optim that take a closure without need call it once, before all else.
            is_own = not type(each.optimizer).__module__.startswith("torch.optim.")
            calls_closure = is_own or each.unit.calls_closure
            steppers.append(ParameterOptimizer(each.optimizer, each.hooks, calls_closure=calls_closure))
        else:
            keys, chunks = each.unit.keys, training.chunks
            steppers.append(ChunkOptimizer(each.optimizer, chunks, keys, each.hooks, gradients))
    return one_stepper(steppers)


def one_stepper(steppers: Sequence[ChunkOptimizer | ParameterOptimizer]) -> Stepper:
    """Return one stepper of all optimizers, of which each has a stepper."""
    return steppers[0] if len(steppers) == 1 else Steppers(steppers)


class Strategy(Protocol):
    """The maker of a model's reducer and stepper.

    Attributes:
        collective: True if every worker makes each step with equal gradients.
        skips_together: True if no worker makes a step that one worker does not accept.
        brings_parameters: True if `build` gives every worker the trained parameters of worker 0.
        brings_frozen: True if `build` also gives a worker that comes late the frozen parameters.
        shares_buffers: True if all workers have the first one's buffers after each iteration.
        trains_as_one: True if all models of a session train as one, since those who step hold one model.
        counts_all: True if each worker knows the samples of all workers in the iterations that count.
    """

    collective: bool
    skips_together: bool
    brings_parameters: bool
    brings_frozen: bool
    shares_buffers: bool
    trains_as_one: bool
    counts_all: bool

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        """Return the model's reducer and stepper."""

    def before_load(self) -> bool:
        """Wait until what this worker has sent counts, before the script loads an optimizer's state.

        Parameters stay as they are. Return True if the script has written to some that are made elsewhere.
        """

    def loaded(self) -> None:
        """Follow the load of a checkpoint, or of an optimizer's state, on every worker."""

    def refresh(self) -> None:
        """Give this worker the newest parameters, if others go on without it."""


class Alone:
    """The strategy of a worker alone: nothing is reduced, so no gradient is copied into a chunk either."""

    collective = skips_together = shares_buffers = counts_all = True
    brings_parameters = brings_frozen = trains_as_one = False

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        chunks = training.chunks
        reducer = SoloReducer(chunks, training.calls)
        # A class of the script's own may look at p.grad of parameters that it holds otherwise.
        are_torchs = all(type(each).__module__.startswith("torch.optim") for each in training.optimizers)
        if not (are_torchs and are_quickly_gathered(chunks)):
            return reducer, steppers_of(training, None)
        return reducer, steppers_of(training, GatheredGradients(chunks).gather)

    def before_load(self) -> bool:
        return False

    def loaded(self) -> None:
        """Do nothing: there is no other worker."""

    def refresh(self) -> None:
        """Do nothing: the worker's own parameters are the newest."""


class OverRing:
    """The strategy over a ring, which reduces gradients; every worker steps all chunks."""

    collective = skips_together = shares_buffers = counts_all = True
    brings_parameters = brings_frozen = trains_as_one = False

    def __init__(self, ring: AnyRing) -> None:
        self._ring = ring
        self._boundary = Boundary()

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        reducer = RingReducer(
            training.chunks,
            self._ring,
            calls=training.calls,
            message_bytes=message_bytes_for(training.chunk_map),
            number=training.number,
            boundary=self._boundary,
            settings=settings_of_all(training.optimizers),
        )
        return reducer, steppers_of(training, reducer.flat_gradients)

    def before_load(self) -> bool:
        return False

    def loaded(self) -> None:
        """Do nothing: every worker has loaded equal state."""

    def refresh(self) -> None:
        """Do nothing: every worker has equal parameters."""


# Makes the exchange of a model over a connection. The holder returns a model that lies in tiers.
MakeExchange: TypeAlias = Callable[[Training, Connection, Holder | None], Server]


class Served:
    """The strategy with a parameter server, whose shards combine gradients and make the steps."""

    brings_parameters = trains_as_one = counts_all = True
    brings_frozen = shares_buffers = False

    def __init__(
        self,
        service: Service,
        workers: Workers,
        config: Config,
        members: IterationMembers,
        models: ServedModels,
        make_exchange: MakeExchange,
        *,
        of_group: bool = False,
    ) -> None:
        """Train at the shards. `of_group`: this worker is a member of a group, which the shards know as
        one."""
        self._service, self._workers, self._members, self._models = service, workers, members, models
        self._make_exchange, self.of_group = make_exchange, of_group
        self.collective = self.skips_together = config.sync.consistency == "bsp"

    @property
    def site(self) -> str:
        """This worker's site, if the run's sites have shards of their own; else empty."""
        return self._service.site

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        exchange, steppers = self.build_model(training, ServedModel, None)
        return exchange, one_stepper(steppers)

    def build_model(
        self, training: Training, kind: Callable[..., ServedModel], held: Holder | None
    ) -> tuple[Server, list[RemoteOptimizer]]:
        """Return the exchange and the steppers of a model of this `kind`. `held` returns a model that lies in
        tiers."""

        def make_exchange(training: Training, connection: Connection) -> Server:
            return self._make_exchange(training, connection, held)

        model = kind(training, self._service, self._workers, self._members, make_exchange)
        if training.former is not None:  # before the shards hear at which iteration the model is
            continue_from(training.former, model.exchange)
            made = self._workers.gather(model.exchange.steps, "the iterations that the workers have made")
            model.exchange.steps = made[0]  # under asp others are at other iterations: all begin at this one
        self._models.put(training.number, model)
        if training.former is None:
            model.set_up()
        else:
            model.set_up_again()
        steppers = [
            RemoteOptimizer(
                each.optimizer,
                each.hooks,
                make=partial(model.make_step, number),
                settings=partial(sent_groups_of_all, training.optimizers),
                fetch=partial(model.fetch_state, number),
                home=f"under strategy {training.config.run.strategy!r} its state lives at the shards",
                keeps_state=each.unit.keeps_state,
                elsewhere={parameter for bound in training.chunks for parameter in bound.parameters},
            )
            for number, each in enumerate(training.sets)
        ]
        return model.exchange, steppers

    def before_load(self) -> bool:
        return self._models.before_load()

    def loaded(self) -> None:
        self._models.set_up()

    def refresh(self) -> None:
        if not self.collective:
            self._models.refresh()


def exchange_alone(site: str) -> MakeExchange:
    """Return the maker of the exchange of a worker that talks for itself: to the shards, or to the shard of
    its `site`."""

    def make(training: Training, connection: Connection, held: Holder | None) -> Server:
        sync = training.config.sync
        # Inside a site the policy is always bsp; `sync.consistency` holds between sites.
        policy = "bsp" if site else sync.consistency
        return serve_alone(
            policy,
            training.chunks,
            connection,
            training.calls,
            held=held,
            lazy=sync.lazy,
            pipeline=sync.pipeline,
            takes_changes=not site,
        )

    return make


def exchange_in_group(together: Together, choice: UplinkChoice) -> MakeExchange:
    """Return the maker of the exchange of a worker in a group, which comes to the shards as one.

    What the group's members have said to one another, and how it talks to the shards, outlives each model.
    """

    def make(training: Training, connection: Connection, held: Holder | None) -> Server:
        sync = training.config.sync
        return serve_group(
            sync.consistency,
            training.chunks,
            connection,
            training.calls,
            together=together,
            choice=choice,
            message_bytes=message_bytes_for(training.chunk_map),
            # A member that waits in a meeting takes part in iterations that its script does not count.
            settings=partial(_settings, training, scheduled=sync.consistency == "bsp"),
            hyperparameters=partial(sent_groups_of_all, training.optimizers),
            held=held,
            pipeline=sync.pipeline,
        )

    return make


def _settings(training: Training, *, scheduled: bool) -> Settings:
    """Return the hyperparameters of all optimizers, as `settings_of` does."""
    return [group for each in training.optimizers for group in settings_of(each, scheduled=scheduled)]


SET_UP, STATE = "set-up", "state"  # resend topics


_DEALING = ("global_batch", "global_tokens", "shares", "least", "memory_cap")
_MOST_SHOWN = 160  # characters


def _dealing_of(sync: Sync) -> dict[str, str]:
    """Return the settings by which data is dealt, for the shards to compare; long ones with a digest."""
    found = {f"sync.{key}": str(getattr(sync, key)) for key in _DEALING}
    for key, value in found.items():
        if len(value) > _MOST_SHOWN:
            found[key] = f"{value[:_MOST_SHOWN]}... ({hashlib.sha256(value.encode()).hexdigest()[:16]})"
    return found


class ServedModel:
    """One model at the shards."""

    def __init__(
        self,
        training: Training,
        service: Service,
        workers: Workers,
        members: IterationMembers,
        make_exchange: Callable[[Training, Connection], Server],
    ) -> None:
        self._training, self._service, self._workers = training, service, workers
        shards = service.shards
        places = balance([bound.chunk.nbytes for bound in training.chunks], len(shards))
        self._shard_of = {bound.chunk.id: place for bound, place in zip(training.chunks, places, strict=True)}
        connection = Connection(
            shards,
            self._shard_of,
            service.used,
            service.measured_staleness,
            members,
            worker=service.welcome.worker,
            coding=Coding(codec_named(training.config.sync.codec)),
            link=shards.options,
        )
        self.exchange = make_exchange(training, connection)
        self._kinds = [
            OptimizerKind(
                full_name(type(each.optimizer)), len(each.optimizer.param_groups), each.unit.by_tensor
            )
            for each in training.sets
        ]
        owners = {
            parameter: number
            for number, optimizer in enumerate(training.optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        first = {bound.chunk.id: bound.parameters[0] for bound in training.chunks}
        self._set_of = {chunk: owners[p] for chunk, p in first.items() if p in owners}
        self._ready: set[int] = set()
        self.set_ups = 0
        self._fetched: dict[int, dict[str, Tensor]] = {}
        self._scalars: dict[int, list[dict[str, Any]]] = {}
        self._ended: set[int] = set()
        shards.on(Ready, self._handle_ready)
        shards.on(State, self._handle_state)
        shards.on(StateEnd, self._handle_state_end)

    # Bringing the model to the shards

    def set_up(self) -> None:
        """Let the first worker describe the model to the shards and bring its values; wait until the shards
        are ready.

        To a site's shard, each worker describes the model.
        """
        self.set_ups += 1
        if self._is_late():
            return
        self._describe()
        self._begin()
        self.exchange.at_shards = True

    def set_up_again(self) -> None:
        """Set up a model that has changed, with the values and states that all workers hold. All begin with
        equal parameters.

        If the worker that brings them is lost before the shards have them, the next one brings them. Raises
        UserError on all workers if the shards refuse the model.
        """
        self.set_ups += 1
        if self._is_late():
            return
        bringer, there = -1, list[int]()
        while bringer not in there:
            bringer = self._workers.ranks[0]
            failure: UserError | None = None
            if self._workers.is_first:
                try:
                    self._describe()
                    self._await_ready()
                except UserError as error:
                    failure = error
            told = self._workers.gather(str(failure or ""), "the changed model, brought to the shards")
            there = self._workers.ranks
            if failure is not None:
                raise failure
            for rank, reason in zip(there, told, strict=True):
                if reason:
                    raise UserError(f"worker {rank}: {reason}")
        self._begin()
        # Under ssp and asp others would step while this worker fetches its parameters:
        self._workers.gather("", "the changed model, on all workers")
        self.exchange.at_shards = True

    def compare(self) -> None:
        """Compare this worker's model with the one at the shards, before the worker enters a run under
        way."""
        self._await_ready()
        self.exchange.at_shards = True

    def _is_late(self) -> bool:
        """Return True if this worker has not entered a run under way: `compare` follows, once its script has
        prepared all models."""
        return self._workers.late and not self._service.site

    def _describe(self) -> None:
        """Describe the model to the shards, and bring its values, if this worker is the one that does."""
        shards, digest = self._service.shards, self._digest()
        if self._workers.is_first or self._service.site:
            for shard in range(len(shards)):
                shards.send(shard, self._setup(shard, digest), until=SET_UP)
        if self._workers.is_first:
            for bound in self._training.chunks:
                self._bring(bound)
            points.reach("setup.sent", self.exchange.steps)

    def _begin(self) -> None:
        """Wait until the shards are ready, and begin with their parameters."""
        self._await_ready()
        points.reach("setup.ready", self.exchange.steps)
        if not self._workers.late:
            self.fetch_parameters()

    def arrive(self, what: str) -> None:
        """Let the shards know that this worker talks for another contributor; return when they do.

        By then the log has taken all that the contributor sent before. This is the contributor's first
        set-up. `what` names the wait.
        """
        self.set_ups = 1
        self._await_ready(what)

    def _await_ready(self, what: str = "worker 0's description of the model") -> None:
        shards = self._service.shards
        self._ready.clear()
        sync = self._training.config.sync
        asked = Ready(digest=self._digest(), number=self._number, codec=sync.codec, dealing=_dealing_of(sync))
        shards.ask(range(len(shards)), asked, SET_UP, self._ready, what)

    def fetch_parameters(self) -> None:
        """Take the parameters with which this worker begins its next iteration."""
        for optimizer in self._training.optimizers:
            forget_state(optimizer, [p for bound in self._training.chunks for p in bound.parameters])
        self.exchange.parameters.forget_changes()
        self.exchange.parameters.pull(self.exchange.steps)
        self.exchange.parameters.publish()
        self.exchange.steps = self.exchange.parameters.clock

    @property
    def _number(self) -> int:
        """The number of this set-up, by which shards recognize one that is sent again.

        At a site all workers describe one set-up, each with a count of its own.
        """
        return self.set_ups

    def _handle_ready(self, shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, Ready)
        if message.number == self._number:
            self._ready.add(shard)

    def _setup(self, shard: int, digest: str) -> Setup:
        training, sync = self._training, self._training.config.sync
        return Setup(
            digest=digest,
            layout=msgspec.Raw(msgspec.msgpack.encode(training.chunk_map)),
            chunks=[chunk_id for chunk_id, place in self._shard_of.items() if place == shard],
            optimizers=self._kinds,
            hyperparameters=sent_groups_of_all(training.optimizers),
            consistency=sync.consistency,
            slack=sync.slack,
            workers=self._service.welcome.workers,
            shards=len(self._service.shards),
            steps=self.exchange.steps,
            first=self._workers.ranks[0],
            number=self._number,
            staleness=sync.staleness,
            compensation=sync.compensation,
            pipeline=sync.pipeline,
            consumed=self.exchange.consumed,
            finite=training.config.sync.nonfinite != "allow",
            codec=sync.codec,
            dealing=_dealing_of(sync),
        )

    def _digest(self) -> str:
        """Return a digest of the settings that must be equal on every worker, for the shards to compare."""
        sync, layout = self._training.config.sync, self._training.chunk_map
        stale = (sync.staleness, sync.compensation, sync.pipeline)
        finite = sync.nonfinite != "allow"
        told = (layout, self._kinds, sync.consistency, sync.slack, *stale, finite, sync.codec)
        return hashlib.sha256(msgspec.msgpack.encode(told)).hexdigest()[:32]

    def _bring(self, bound: BoundChunk) -> None:
        """Send a chunk's values and its optimizer's state, if it has any."""
        shards, shard = self._service.shards, self._shard_of[bound.chunk.id]
        held = [self._state_held(parameter) for parameter in bound.parameters]
        unit = self._unit_of(bound)
        if unit.by_tensor:
            packed, words = pack([dict(state) for state in held])
            shards.send(
                shard,
                SetChunk(chunk=bound.chunk.id, values=words, number=self._number),
                self._sent(partial(self._values_of, bound)),
                until=SET_UP,
            )
            if packed.numel():
                message = SetChunk(chunk=bound.chunk.id, key=PACKED, number=self._number)
                shards.send(shard, message, self._sent(lambda: packed), until=SET_UP)
            return
        elementwise = sorted({key for slot in held for key in slot} & unit.keys)
        scalars = [
            {key: _number(value) for key, value in slot.items() if key not in elementwise}
            | {key: None for key in elementwise if key not in slot}  # None: it has no such state
            for slot in held
        ]
        message = SetChunk(chunk=bound.chunk.id, values=scalars, number=self._number)
        shards.send(shard, message, self._sent(partial(self._values_of, bound)), until=SET_UP)
        for key in elementwise:
            message = SetChunk(chunk=bound.chunk.id, key=key, number=self._number)
            shards.send(shard, message, self._sent(partial(_joined, bound, held, key)), until=SET_UP)

    def _unit_of(self, bound: BoundChunk) -> Unit:
        """Return the unit in which a chunk's optimizer steps."""
        return self._training.sets[self._set_of.get(bound.chunk.id, 0)].unit

    def _state_held(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """Return this worker's part of a parameter's state, which goes to the shards."""
        states = (each.state[parameter] for each in self._training.optimizers if parameter in each.state)
        return next(states, {})

    def _values_of(self, bound: BoundChunk) -> Tensor:
        """Return a copy of a chunk's values, (extent,), on the CPU."""
        return bound.flat[: bound.chunk.extent].detach().cpu().clone()

    def _sent(self, make: Callable[[], Tensor]) -> Payload:
        """Return the tensor that `make` returns as a payload."""
        return bytes_of(make())

    # Stepping

    def make_step(self, number: int, accepted: bool, settings: Settings) -> None:
        """Make the step of the optimizer of this number, or leave it out if it is not `accepted`.

        `settings` are those of all optimizers before the step, as `sent_groups_of_all` gives them.
        """
        sets, turn = self._training.sets, ALL
        if len(sets) > 1:
            others = [each for each in sets if each is not sets[number]]
            turn = Turn(
                number,
                {chunk for chunk, its in self._set_of.items() if its == number},
                follows=sets[number].follows,
                stays=any(each.waits for each in others),
                ends=not any(
                    each.waits and place not in self.exchange.passes
                    for place, each in enumerate(sets)
                    if place != number
                ),
            )
        self.exchange.step(accepted, settings, turn)

    # Bringing the optimizer's state back

    def fetch_state(self, number: int) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the state of each parameter of one optimizer, as plain torch would have it."""
        self.exchange.before_state()
        self._fetched, self._scalars = {}, {}
        self._ask_for_state(PullState(incarnation=self._service.shards.incarnation))
        states = {
            parameter: self._state_of(bound, index)
            for bound in self._training.chunks
            for index, parameter in enumerate(bound.parameters)
        }
        return self._in_order(states, number)

    def _ask_for_state(self, asked: PullState, of: Sequence[int] | None = None) -> None:
        """Ask for state; return when it has come from all shards, or from those in `of`."""
        shards = self._service.shards
        self._ended.clear()
        those = range(len(shards)) if of is None else of
        shards.ask(those, asked, STATE, self._ended, "the optimizer's state")

    def _in_order(
        self, states: Mapping[nn.Parameter, dict[str, Any]], number: int
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return an optimizer's states in torch's order, in which it would have stepped the parameters."""
        groups = self._training.optimizers[number].param_groups
        known = (parameter for group in groups for parameter in group["params"])
        return {parameter: states[parameter] for parameter in known if states.get(parameter)}

    def _state_of(self, bound: BoundChunk, index: int) -> dict[str, Any]:
        """Return one parameter's state. A shard sends None for an element-wise value that it lacks."""
        slot, parameter = bound.chunk.slots[index], bound.parameters[index]
        scalars = self._scalars[bound.chunk.id][index]
        if self._unit_of(bound).by_tensor:
            flat = self._fetched.get(bound.chunk.id, {}).get(PACKED, torch.empty(0, dtype=torch.uint8))
            (state,) = unpack(flat, [scalars])
            there: dict[str, Any] = moved(state, parameter.device)
            return there
        state = numbers_of(scalars)
        for key, flat in self._fetched.get(bound.chunk.id, {}).items():
            if scalars.get(key, 0) is not None:
                state[key] = carve(flat, slot.offset, parameter).to(parameter.device, copy=True)
        return state

    def _handle_state(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, State)
        bound = next((b for b in self._training.chunks if b.chunk.id == message.chunk), None)
        if bound is None or len(message.values) not in (0, len(bound.parameters)):
            raise RunError(f"shard {shard} sent a state of chunk {message.chunk} that is none of this model")
        if message.key == PACKED and self._unit_of(bound).by_tensor:
            self._fetched.setdefault(message.chunk, {})[PACKED] = tensor_of(payload, torch.uint8).clone()
        elif message.key:
            self._fetched.setdefault(message.chunk, {})[message.key] = values_of(
                payload, bound, shard
            ).clone()
        else:
            self._scalars[message.chunk] = message.values

    def _handle_state_end(self, shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, StateEnd)
        self._ended.add(shard)
        self.exchange.counted_at_shards = max(self.exchange.counted_at_shards, message.consumed)


def _joined(bound: BoundChunk, held: Sequence[Mapping[str, Any]], key: str) -> Tensor:
    """Return one element-wise state of a chunk's parameters, (extent,), with zeros for absent ones."""
    flat = torch.zeros(bound.chunk.extent, dtype=bound.dtype)
    for slot, own, parameter in zip(bound.chunk.slots, held, bound.parameters, strict=True):
        if key in own:
            carve(flat, slot.offset, parameter).copy_(own[key])
    return flat


def numbers_of(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that a parameter has as a whole, not by element, in torch's form.

    A shard sends them as numbers; torch keeps some as zero-dimensional tensors.
    """
    return {
        key: torch.tensor(value, dtype=_scalar_dtype()) if key in _ZERO_DIMENSIONAL else value
        for key, value in scalars.items()
        if value is not None
    }


def _scalar_dtype() -> torch.dtype:
    """Return the dtype of the states that torch keeps as zero-dimensional tensors."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
