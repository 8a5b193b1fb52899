"""Strategy `peers` for one model: the model goes to the node's CPU side, and its optimizer's state comes
back."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from atoll.core.errors import CheckpointError, GivenUpError, MismatchError, PrepareError, UserError
from atoll.core.liveness import own_origin
from atoll.core.stands import Stand, are_in_one_epoch, describe_mismatch, mixed_epochs
from atoll.exchange.codecs import OWN, codec_named
from atoll.exchange.coding import Coding
from atoll.exchange.fingerprint import fingerprint
from atoll.exchange.globalstate import pack_optimizer, unpack_optimizer
from atoll.exchange.hostmemory import BUFFERS, HostMemory, make_file, map_bytes, plan_memory, slots_for
from atoll.exchange.sentgroups import sent_groups
from atoll.tensors.binding import BoundChunk
from atoll.tensors.remoteoptimizer import RemoteOptimizer
from atoll.tensors.remotestate import forget_state
from atoll.tensors.settings import Settings, settings_of
from atoll.tensors.shardoptimizer import full_name, own_path
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.data.peerssampler import PeerBatches, PeerSampler
from atoll.train.gradients.reducer import Reducer
from atoll.train.gradients.ring import over_ring
from atoll.train.members.workers import Workers
from atoll.train.sync.peersdoor import ask_at
from atoll.train.sync.peersexchange import NodeParts, PeerExchange, said_in
from atoll.train.sync.peersmean import NodesMean
from atoll.train.sync.peersparameters import DeviceParameters, OnDevice
from atoll.train.sync.peersring import DevicesExchange
from atoll.train.sync.peersscale import GradientScale
from atoll.train.sync.peersworker import NodeWorker
from atoll.train.sync.strategies import Stepper, Training, message_bytes_for
from atoll.wire.device import NO_STATE, Applied, Ready, SetUp, State, WantState

_FACTS = 256  # the least number of applied iterations to keep, for a deal that comes later


class Peers:
    """The strategy whose nodes exchange gradients, and compute equal global parameters from them.

    `pace()` returns the seconds in which the session computes a sample; 0: not known yet. `tell(line)` prints
    a line for people.
    """

    collective = False  # nodes step with gradients of their own
    brings_parameters = brings_frozen = True
    trains_as_one = False  # a session has one model
    counts_all = True
    shares_buffers = False  # only a node's devices share them

    def __init__(
        self,
        worker: NodeWorker,
        workers: Workers,
        state: TrainingState,
        pace: Callable[[], float],
        stale_max: int,
        tell: Callable[[str], None],
    ) -> None:
        self._worker, self._workers, self._state, self._pace = worker, workers, state, pace
        self._tell = tell
        self._stale_max = stale_max
        self.skips_together = stale_max == 0
        self._batches: list[PeerBatches] = []
        facts = max(_FACTS, stale_max + 2)
        self._facts: deque[tuple[int, dict[int, float]]] = deque(maxlen=facts)
        worker.on(Applied, self._applied)
        self._model: PeerModel | None = None

    @property
    def exchange(self) -> PeerExchange | None:
        """The model's exchange; None until the model is prepared."""
        return None if self._model is None else self._model.exchange

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        """Return the model's reducer and stepper."""
        place = OnDevice(training.chunks, self._worker.leads)
        return self.build_model(PeerModel(training, self._workers, self.parts(training, place)))

    def build_model(self, model: PeerModel) -> tuple[Reducer, Stepper]:
        """Return the reducer and the stepper of `model`."""
        self._model, training = model, model.training
        model.begin()
        return model.exchange, model.optimizer_kind(
            training.optimizer,
            training.hooks,
            make=model.make_step,
            settings=partial(sent_groups, training.optimizer),
            fetch=model.fetch_state,
            home="under strategy 'peers' its state lives at the node's CPU side",
            keeps_state=training.unit.keeps_state,
            counts_skips=True,
        )

    def parts(self, training: Training, place: DeviceParameters) -> NodeParts:
        """Return the parts of the exchange of a model whose values lie in `place`."""
        sync = training.config.sync
        return NodeParts(
            self._worker,
            Coding(codec_named(sync.codec)),
            place,
            sync.stale_max,
            sync.stale_max > 0 and sync.overlay != "none",
            self._capture,
            self._returned,
            self._pace,
            self._tell,
            GradientScale(training.optimizer),
            NodesMean(self._workers, self._worker, training.chunks),
        )

    def batches(self, dataset: Sized, least: int, **options: Any) -> PeerBatches:
        """Return this node's part of batches that all nodes share, of at least `least` samples for each of a
        node's devices; `options` are those of PeerBatches."""
        introduction = self._worker.introduction
        batches = PeerBatches(
            dataset,
            node=self._worker.node,
            nodes=[each.node for each in introduction.nodes],
            least=least * max(introduction.devices),
            device=self._worker.devices.rank,
            devices=self._worker.devices.count,
            stale_max=self._stale_max,
            iteration=lambda: 0 if self.exchange is None else self.exchange.steps,
            asked=lambda: None if self.exchange is None else self.exchange.between(),
            **options,
        )
        self._batches.append(batches)
        return batches

    def sampler(self, dataset: Sized, **options: Any) -> PeerSampler:
        """Return this worker's sampler of a dataset that all nodes share; `options` are those of
        DealtSampler.
        """
        introduction = self._worker.introduction
        everyone = range(sum(introduction.devices))
        return PeerSampler(
            dataset,
            worker=self._workers.place.rank,
            met=lambda: everyone if self.late else self._workers.ranks,
            present=self._present,
            **options,
        )

    def _present(self) -> list[int]:
        """Return the ranks of workers that take part in the iteration under way; empty if that is unknown.

        Nodes notice a loss at different times, but must agree here. So the answer is the contributors to the
        latest iteration that all nodes have applied by now: iteration n - 1 - `stale_max` in iteration n.
        """
        known = -1 if self.exchange is None else self.exchange.steps - self._stale_max - 1
        nodes: Iterable[int] = next((paces for iteration, paces in self._facts if iteration == known), ())
        return [rank for node in sorted(nodes) for rank in self._worker.introduction.workers_of(node)]

    def check_alike(self, call: str, dataset: Sized, **arguments: Any) -> None:
        """Raise UserError on all workers unless all make this `call` with equal arguments and equally many
        samples.

        Otherwise each worker would deal data in its own way. A worker that comes late takes the others' deal,
        and checks it then.
        """
        own = {"len(dataset)": len(dataset), **arguments}
        found = self._workers.gather({name: str(value) for name, value in own.items()}, call)
        first, ranks = found[0], self._workers.ranks
        for name in own:
            for rank, other in zip(ranks, found, strict=True):
                if other[name] != first[name]:
                    raise UserError(
                        f"{call}: worker {ranks[0]} gives {name}={first[name]}, and worker {rank} "
                        f"{name}={other[name]}; all workers call it alike"
                    )

    def _applied(self, message: Applied) -> None:
        if message.unlike:
            raise UserError(message.unlike)
        if self.exchange is not None:
            self.exchange.consumed = max(self.exchange.consumed, message.consumed)
        said = {part.node: said_in(part.note) for part in message.parts}
        paces = {node: each.pace for node, each in said.items()}
        self._check_epochs({node: each.stand for node, each in said.items() if each.stand is not None})
        self._facts.append((message.iteration, paces))
        for each in self._batches:
            each.applied(message.iteration, paces)

    def _check_epochs(self, stands: Mapping[int, Stand]) -> None:
        """Raise MismatchError if contributions to one iteration come from batches of different epochs.

        Warn if the scripts' own loops are in different epochs. All nodes see equal contributions.
        """
        workers_of = self._worker.introduction.workers_of
        by_worker = {workers_of(node)[0]: each for node, each in stands.items()}
        if not are_in_one_epoch(stands.values()):
            raise MismatchError(describe_mismatch(by_worker))
        line = mixed_epochs(by_worker)
        if line and self._model is not None:
            self._model.training.calls.epochs_mixed(line)

    def before_load(self) -> bool:
        """Wait until all contributions of this node are applied; return True if the script has written to
        parameters."""
        if self.exchange is None:
            return False
        self.exchange.settle(takes=False)
        return bool(self.exchange.parameters.changed())

    def loaded(self) -> None:
        """Bring the model to the CPU side again: every node has loaded a checkpoint, or an optimizer's
        state."""
        self._facts.clear()
        if self._model is not None:
            self._model.set_up()

    def refresh(self) -> None:
        """Take parameters in which all contributions of this node are applied."""
        if self.exchange is not None:
            self.exchange.settle()

    def catch_up(self) -> None:
        """Bring this node to the others' iteration, between two iterations."""
        if self.exchange is not None:
            self.exchange.catch_up()

    def drain(self, where: str) -> None:
        """Return when all contributions of this node are applied, as the session ends at `where`.

        Nodes that come in now are let in first.
        """
        if self.exchange is not None:
            self.exchange.end(where)

    def figures(self) -> dict[str, Any]:
        """Return fields of the latest step's StepDone."""
        exchange = self.exchange
        return {} if exchange is None else {"exchange": exchange.seconds, "staleness": exchange.staleness}

    # Entering a run under way

    @property
    def late(self) -> bool:
        """True if this node came late and has not entered."""
        return self._worker.late

    def begin(self) -> None:
        """Do nothing: the nodes met when they were introduced."""

    def ending(self) -> None:
        """Do nothing: the session's end lets in nodes that come now."""

    def enter(self) -> bool:
        """Enter with the script's state of a member. The model's state has come already."""
        if self.exchange is None:
            raise UserError("session.resume needs a model; call session.prepare(model, optimizer) first")
        self._returned(self._worker.script)
        self._worker.late, self._worker.script = False, b""
        return True

    def _capture(self) -> bytes:
        try:
            return self._state.capture(fixed=True)
        except CheckpointError as error:  # the newcomer raises it; this node goes on
            self._tell(f"{NO_STATE}: {error}")
            return b""

    def _returned(self, script: bytes) -> None:
        if not script:
            raise GivenUpError(  # the other nodes go on
                f"node {self._worker.node} cannot come in: the others could not give it the script's state "
                "(samplers, buffers, what is registered), and their logs say why; go on from a checkpoint"
            )
        self._state.restore(script, self._workers.place.rank, fixed=True)
        for batches in self._batches:  # facts that this node knows and the member did not
            for fact in self._facts:
                batches.applied(*fact)


class PeerModel:
    """One model at the node's CPU side."""

    reads_lazily = False  # True if the optimizer's state may be more than the device holds
    optimizer_kind: type[RemoteOptimizer] = RemoteOptimizer

    def __init__(
        self,
        training: Training,
        workers: Workers,
        parts: NodeParts,
    ) -> None:
        self.training, self._worker, self._workers = training, parts.worker, workers
        self._plan = plan_memory(training.chunk_map, slots_for(parts.stale_max), BUFFERS)
        self.exchange = self._make_exchange(parts)
        self._returned = parts.returned
        kind = type(training.optimizer)
        self._optimizer, self._own_optimizer = full_name(kind), own_path(kind, "peers")
        # True if the CPU side must import code of other packages:
        self._imports = bool(self._own_optimizer) or parts.coding.name not in OWN
        hyperparameters = sent_groups(training.optimizer)
        self._fingerprint = fingerprint(
            self._optimizer,
            hyperparameters,
            configured=self._own_optimizer,
            by_tensor=training.unit.by_tensor,
            dtypes=sorted({chunk.dtype for chunk in training.chunk_map.trainable}),
        )
        self._ready: Ready | None = None
        self._number = 0  # number of set-ups so far
        parts.worker.on(Ready, self._handle_ready)

    def _make_exchange(self, parts: NodeParts) -> PeerExchange:
        """Return the exchange of a node with one device, or with several."""
        training, ring = self.training, self._worker.devices.ring
        if ring is None:
            return PeerExchange(training.chunks, training.calls, parts)
        # A node on which no device has samples weighs nothing:
        options = {
            "fills_up": True,
            "steps_here": False,
            "settings": partial(settings_of, training.optimizer),
        }
        make_sum = over_ring(ring, training.calls, message_bytes_for(training.chunk_map), **options)
        return DevicesExchange(training.chunks, training.calls, parts, make_sum, ring, keeps_own=True)

    def begin(self) -> None:
        """Begin with the first node's values, on all nodes. A node that comes late takes a member's
        values."""
        self._check_alike()
        self._take_from_first()
        self.set_up()

    def _take_from_first(self) -> None:
        flats = [bound.flat[: bound.chunk.extent] for bound in self.training.chunks]
        self._workers.take_from_first(flats, "node 0's parameters")

    def _check_alike(self) -> None:
        """Raise PrepareError unless all nodes compute the same bits, as far as that can be told."""
        found = self._workers.gather(self._fingerprint, "the nodes' processors")
        nodes = [self._worker.introduction.node_of(rank) for rank in self._workers.ranks]
        for node, other in zip(nodes, found, strict=True):
            if other != found[0]:
                raise PrepareError(
                    f"the nodes do not compute the same bits: node {nodes[0]} has {found[0]}, and node "
                    f"{node} {other}; strategy 'peers' needs one build of torch and one instruction set on "
                    "all nodes (ATEN_CPU_CAPABILITY sets a lower one), or use strategy 'server'"
                )

    def set_up(self) -> None:
        """Bring the model's present values and the optimizer's state to the CPU side.

        The leader of the node's devices does, and all devices share its memory.
        """
        training, worker = self.training, self._worker
        self._number += 1
        self._ready = None
        memory, origins = self._share_memory()
        self.exchange.attach(memory, self.exchange.steps)
        if worker.leads:
            self._bring(memory, origins)
        worker.wait(
            lambda: self._ready is not None, "its CPU side to be set up, and to be let in by the others"
        )
        assert self._ready is not None
        # A node that was left out before it was ready comes in like a late one. session.resume puts the
        # script's state back. A node that was loading a checkpoint is past that call: it is put back here.
        came_in = worker.late or self._ready.incarnation != worker.incarnation
        worker.late = came_in and (worker.late or self._number == 1)
        worker.entered(self._ready)
        if came_in:
            self._take_frozen(memory)
        self.exchange.begin_at(self._ready.iteration)
        if came_in and not worker.late:
            self._returned(self._ready.script)
        forget_state(training.optimizer, [p for bound in training.chunks for p in bound.parameters])

    def _share_memory(self) -> tuple[HostMemory, list[str]]:
        """Return the memory that the leader makes for its CPU side, with the model's values in it.

        And the places of the processes of the node's devices, in order.
        """
        training, made = self.training, []

        def make() -> bytes:
            memory = HostMemory.create(self._plan)
            made.append(memory)
            for bound in training.chunks:
                self._copy_values(bound, memory.buffer(0)[bound.chunk.id])
            for bound in training.frozen:
                self._copy_values(bound, memory.frozen[bound.chunk.id])
            return memory.path.encode()

        path = self._worker.devices.led(make, "the node's shared memory").decode()
        memory = made[0] if made else HostMemory.opened(self._plan, path)
        found = self._worker.devices.gather(own_origin().encode(), "the look into the node's shared memory")
        return memory, [each.decode() for each in found]

    def _copy_values(self, bound: BoundChunk, into: Tensor) -> None:
        """Copy a chunk's values into `into`, (extent,)."""
        into.copy_(bound.flat[: bound.chunk.extent].detach())

    def _take_frozen(self, memory: HostMemory) -> None:
        for bound in self.training.frozen:
            bound.flat[: bound.chunk.extent].copy_(memory.frozen[bound.chunk.id])

    def _bring(self, memory: HostMemory, origins: list[str]) -> None:
        training = self.training
        packed, file = self._packed()
        descriptors = [memory.fd] if file < 0 else [memory.fd, file]
        self._worker.send(
            SetUp(
                number=self._number,
                digest=self._digest(),
                layout=msgspec.Raw(msgspec.msgpack.encode(training.chunk_map)),
                optimizer=self._optimizer,
                hyperparameters=sent_groups(training.optimizer),
                slots=self._plan.slots,
                buffers=self._plan.buffers,
                iteration=self.exchange.steps,
                packed=packed,
                threads=max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))),
                consumed=self.exchange.consumed,
                devices=origins,
                own_optimizer=self._own_optimizer,
                path=[str(Path(place).absolute()) for place in sys.path] if self._imports else [],
                by_tensor=training.unit.by_tensor,
            ),
            descriptors,
        )
        if file >= 0:
            os.close(file)

    def make_step(self, accepted: bool, settings: Settings) -> None:
        self.exchange.step(accepted, settings)

    def fetch_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Return each parameter's state, as plain torch would have it, with all contributions of this node
        applied.

        A node's device may make this call alone. The other devices have no part in it, so parameters stay
        unchanged if there are several.
        """
        if self._worker.devices.count == 1:
            self.exchange.settle()
        file = make_file(0, "the optimizer's state")
        try:
            state = self._ask_for_state(WantState(least=self.exchange.steps), file)
            raw = map_bytes(file, state.packed)
        finally:
            os.close(file)
        training = self.training
        return unpack_optimizer(
            raw.numpy().data, training.optimizer, training.chunks, lazily=self.reads_lazily
        )

    def _ask_for_state(self, question: WantState, file: int) -> State:
        worker, what = self._worker, f"the optimizer's state after {question.least} iterations"
        if not worker.leads:
            who, timeout = f"worker {self._workers.place.rank}", self.training.config.timeout_seconds
            return ask_at(worker.door, question, file, timeout, who, what)
        state = worker.ask(question, [file], State, what)
        assert isinstance(state, State)
        return state

    def _packed(self) -> tuple[int, int]:
        """Write the optimizer's state into a file; return its number of bytes and its descriptor, or (0, -1)
        without state."""
        optimizer = self.training.optimizer
        if not any(optimizer.state.values()):
            return 0, -1
        raw = pack_optimizer(optimizer, self.training.chunks, self.training.unit, self.exchange.steps)
        file = make_file(len(raw), "the optimizer's state")
        map_bytes(file, len(raw)).copy_(torch.frombuffer(raw, dtype=torch.uint8))
        return len(raw), file

    def _digest(self) -> str:
        """Return a digest of the settings that must be equal on every node, to check a node that comes
        late."""
        training = self.training
        sections = (training.config.chunks, training.config.sync, training.config.link)
        kind = type(training.optimizer).__qualname__, training.unit.by_tensor
        told = (training.chunk_map, *kind, *sections, self._fingerprint)
        return hashlib.sha256(msgspec.msgpack.encode(told)).hexdigest()[:32]

    def _handle_ready(self, message: Ready) -> None:
        self._ready = message
        self.exchange.parameters.set_up()
