"""Strategy `peers` under memory budgets: a node's devices train on values that its CPU side lends them.

The CPU side holds values and optimizer state in host memory, and makes the steps. A device reads its chunks
from the memory in which the CPU side publishes, and its gradients go straight into the iteration's slot. So a
device under a budget has only an arena of its own: no tier of host memory, no second copy. Source:
docs/memory.md, "Lent values".
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import Chunk, ChunkMap, itemsize, lay_out
from atoll.core.config import Config
from atoll.core.decoding import from_msgpack
from atoll.core.errors import AtollError, UserError
from atoll.core.hyperparameters import GRADIENT_SCALE
from atoll.core.memory import Memory
from atoll.core.units import format_bytes
from atoll.exchange.hostmemory import BUFFERS, HostMemory, host_bytes, plan_memory, slots_for
from atoll.memory.agreeing import BatchEpochs
from atoll.memory.fit import borrow, plan
from atoll.memory.planning import settings_of
from atoll.memory.stepping import state_dtypes
from atoll.peers.settings import NodeSettings
from atoll.tensors.binding import BoundChunk, carve, specs_of
from atoll.tensors.optimizer import StepHooks
from atoll.tensors.packing import PACKED
from atoll.tensors.remoteoptimizer import RemoteOptimizer
from atoll.tensors.stepunit import state_bytes, unit_of
from atoll.train.gradients.agreement import Ballot
from atoll.train.gradients.alike import Treatments
from atoll.train.gradients.memory import Tiers
from atoll.train.gradients.reducer import Calls, Reducer
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.scaling import Scaling
from atoll.train.gradients.sums import AtEnd, SummedReducer
from atoll.train.group.rounds import Ring
from atoll.train.members.workers import Workers
from atoll.train.sync.peers import PeerModel, Peers
from atoll.train.sync.peersexchange import NodeParts, PeerExchange
from atoll.train.sync.peersparameters import Lent
from atoll.train.sync.peersring import DevicesExchange
from atoll.train.sync.peersworker import NodeWorker
from atoll.train.sync.strategies import Stepper, Strategy, Training


class LentTiers(Tiers):
    """The budgets of the one model of strategy `peers`."""

    _steps_here = False

    def __init__(
        self, memory: Memory, config: Config, peers: Peers, node: NodeWorker, workers: Workers
    ) -> None:
        super().__init__(memory, None)
        self._config, self._peers, self._node, self._workers = config, peers, node, workers
        self._model: LentPeerModel | None = None

    def strategy(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Strategy | None:
        """Return the strategy of a lent model; None if parameters and gradients fit on each worker's device.

        Raises UserError on all workers if a worker's budgets are too small.
        """
        word, found = _Word(), None
        try:
            self._check_host(model, optimizers)
            found = plan(model, optimizers, self._memory, lent=self._node.devices.count)
            word.fits = found.fits
        except AtollError as error:
            word.error = str(error)
        what = "what fits on the workers' devices"
        told = [from_msgpack(each, _Word) for each in self._tell(msgspec.msgpack.encode(word), what)]
        for worker, each in enumerate(told):
            if each.error:
                raise UserError(f"worker {worker}: {each.error}" if len(told) > 1 else each.error)
        assert found is not None
        self._plan = found
        if all(each.fits for each in told):
            return None
        if found.fits:  # it does not fit on another worker's device: all must lend
            held = msgspec.structs.replace(self._memory, step="host")
            self._plan = plan(model, optimizers, held, lent=self._node.devices.count)
        return LentPeers(self._peers, self._make_model)

    def _tell(self, word: bytes, what: str) -> list[bytes]:
        """Return each worker's `word` as the model is prepared; if this node comes late, those of its own
        devices."""
        if self._node.late:
            return self._node.devices.gather(word, what)
        return self._workers.gather_bytes(word, what)

    def _make_model(self, training: Training) -> LentPeerModel:
        place = Lent(training.chunks, self._node.leads)
        self._model = LentPeerModel(training, self._workers, self._peers.parts(training, place), place)
        return self._model

    def fit(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], epochs: BatchEpochs) -> None:
        del optimizers, epochs  # the CPU side makes the steps, and compares epochs
        assert self._plan is not None
        assert self._model is not None
        place = self._model.place
        fitted = borrow(
            model,
            memory=self._memory,
            plan=self._plan,
            chunk_map=self._model.chunk_map,
            values=place.lent(),
            gradients=place.payloads,
            peak=place.host_peak,
            hiding=place.hiding,
        )
        place.fitted = self.fitted = fitted

    def _check_host(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise UserError if a node needs more host memory than its budget."""
        budget = self._memory.budgets().host
        if budget is None:
            return
        layout = lay_out(
            specs_of(dict(model.named_parameters()), settings_of(optimizers)),
            chunk_bytes=self._config.chunk_bytes,
        )
        stale_max, devices = self._config.sync.stale_max, self._node.devices.count
        least = least_host_bytes(layout, optimizers[0], stale_max, self._node.world, devices)
        if least > budget:
            raise UserError(
                f"the budget of the host is too small: a node of strategy 'peers' keeps up to {least} bytes "
                f"({format_bytes(least)}) there, with contributions that others may still lack, for "
                f"sync.stale_max = {stale_max} and {self._node.world} nodes; give that, a smaller "
                "sync.stale_max, or no budget of the host"
            )


class LentPeers:
    """Strategy `peers` for a model that is trained in tiers; `make` makes the model."""

    brings_parameters = brings_frozen = True
    trains_as_one = False  # a session has one model
    counts_all = True
    collective = shares_buffers = False

    def __init__(self, peers: Peers, make: Callable[[Training], LentPeerModel]) -> None:
        self._peers, self._make = peers, make
        self.skips_together = peers.skips_together

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        return self._peers.build_model(self._make(training))

    def before_load(self) -> bool:
        return self._peers.before_load()

    def loaded(self) -> None:
        self._peers.loaded()

    def refresh(self) -> None:
        self._peers.refresh()


class _Word(msgspec.Struct):
    """A worker's report before its model is prepared: whether the model fits on its device, or its error."""

    fits: bool = False
    error: str = ""


def least_host_bytes(
    layout: ChunkMap, optimizer: torch.optim.Optimizer, stale_max: int, nodes: int, devices: int
) -> int:
    """Return the bytes of host memory that a node needs at most, for a model in this layout.

    It is the formula of docs/peers.md, plus, for each device but the leader, the gradients that the device
    holds for its node's ring.
    """
    memory = plan_memory(layout, slots_for(stale_max), BUFFERS)
    states = _StateBytes(layout, optimizer).of
    trained = state = 0
    largest = {"": 0}  # scratch bytes: of means and values (""), and of each kind of state
    for chunk in layout.trainable:
        values = chunk.extent * itemsize(chunk.dtype)
        largest[""] = max(largest[""], 2 * values)
        if not layout.groups[chunk.group].settings:  # no optimizer steps this chunk
            continue
        trained += values
        for key, nbytes in states(chunk).items():
            state += nbytes
            largest[key] = max(largest.get(key, 0), nbytes)
    threads = max(1, int(os.environ.get("OMP_NUM_THREADS", "1")))
    parts = {
        "parameters": sum(chunk.nbytes for chunk in layout.chunks),
        "optimizer": state,
        "twin": 2 * trained + state,
        "scratch": sum(largest.values()) * threads,
    }
    held = NodeSettings(stale_max=stale_max).most_held(nodes)
    own = (devices - 1) * sum(run.nbytes for run in memory.trained)
    return host_bytes(memory, parts, held).total + own


class _StateBytes:
    """The bytes of an optimizer's state of each chunk, before the first step."""

    def __init__(self, layout: ChunkMap, optimizer: torch.optim.Optimizer) -> None:
        self._layout, self._optimizer = layout, optimizer
        self._by_tensor = unit_of(optimizer).by_tensor
        self._dtypes = functools.cache(partial(state_dtypes, optimizer))
        self._bytes = functools.cache(self._of_shape)

    def of(self, chunk: Chunk) -> dict[str, int]:
        """Return the bytes of each kind of state of a chunk."""
        dtype: torch.dtype = getattr(torch, chunk.dtype)
        if not self._by_tensor:
            return {key: chunk.extent * kept.itemsize for key, kept in self._dtypes(dtype).items()}
        group = int(self._layout.groups[chunk.group].settings)
        shapes = [self._layout.specs[slot.parameter].shape for slot in chunk.slots]
        return {PACKED: sum(self._bytes(group, tuple(shape), dtype) for shape in shapes)}

    def _of_shape(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return state_bytes(self._optimizer, self._optimizer.param_groups[group], shape, dtype)


class HostedOptimizer(RemoteOptimizer):
    """An optimizer whose steps are made elsewhere, and whose state may be more than the device holds.

    A loaded state stays where it lies and is read from there. Torch would move it to the parameters' device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, hooks: StepHooks, **calls: Any) -> None:
        super().__init__(optimizer, hooks, **calls)
        self._given: dict[str, Any] = {}
        self._handles += [
            optimizer.register_load_state_dict_pre_hook(lambda _, given: self._keep(given)),
            # Before the session's own hook, which brings the state to the CPU side:
            optimizer.register_load_state_dict_post_hook(lambda _: self._put(), prepend=True),
        ]

    def _keep(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._given = state_dict
        return {**state_dict, "state": {}}

    def _put(self) -> None:
        given, self._given = self._given, {}
        ids = [each for group in given["param_groups"] for each in group["params"]]
        known = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(ids, known, strict=True):
            if number in given["state"]:
                state = given["state"][number]
                self.optimizer.state[parameter] = {key: _kept(key, state[key], parameter) for key in state}


def _kept(key: str, value: Any, parameter: nn.Parameter) -> Any:
    """Return a loaded value in the dtype that torch's `load_state_dict` would give it."""
    casts = isinstance(value, Tensor) and key != "step" and parameter.is_floating_point()
    return value.to(parameter.dtype) if casts and value.dtype != parameter.dtype else value


class LentPeerModel(PeerModel):
    """One model at the node's CPU side, whose parameters lie wherever its devices have them."""

    reads_lazily = True
    optimizer_kind = HostedOptimizer

    def __init__(self, training: Training, workers: Workers, parts: NodeParts, place: Lent) -> None:
        self.place = place
        super().__init__(training, workers, parts)

    def _make_exchange(self, parts: NodeParts) -> PeerExchange:
        training, ring = self.training, self._worker.devices.ring
        if ring is None:
            return PeerExchange(training.chunks, training.calls, parts)
        make_sum = partial(LentSum, ring=ring, calls=training.calls, lent=self.place)
        return DevicesExchange(training.chunks, training.calls, parts, make_sum, ring, keeps_own=False)

    @property
    def chunk_map(self) -> ChunkMap:
        """The layout, which is also the CPU side's."""
        return self.training.chunk_map

    @torch.no_grad()
    def _take_from_first(self) -> None:
        """Receive the first worker's parameters, one chunk at a time: memory may not hold all at once."""
        for bound in self.training.chunks:
            self._workers.take_from_first(bound.parameters, "node 0's parameters")

    def _copy_values(self, bound: BoundChunk, into: Tensor) -> None:
        with torch.no_grad():
            for slot, parameter in zip(bound.chunk.slots, bound.parameters, strict=True):
                stored = getattr(parameter, "stored_value", parameter.detach)()
                carve(into, slot.offset, parameter).copy_(stored)

    def _take_frozen(self, memory: HostMemory) -> None:
        """Do nothing: frozen parameters are read from the shared memory."""


class LentSum(AtEnd):
    """The sum over a node's devices, each of which has gradients of its own in host memory.

    When a backward has ended the gradients become the node's mean, chunk by chunk, on the devices' ring. The
    leader's gradients lie in the slot.
    """

    def __init__(
        self, owner: SummedReducer, chunks: Sequence[BoundChunk], *, ring: Ring, calls: Calls, lent: Lent
    ) -> None:
        super().__init__(owner, chunks)
        self._ring, self._lent = ring, lent
        # Compare only the scale of the last mean: the leader's clipping counts, and no device steps.
        self._treatments = Treatments(lambda: [{GRADIENT_SCALE: calls.unscaled()}])
        self._ballot = Ballot(ring, owner, calls, self._treatments)
        self._scaling = Scaling(owner)

    def before_step(self, follows: bool = False) -> None:
        del follows  # the model has one optimizer
        self._treatments.steps()

    def stepped(self, step: int) -> None:
        self._treatments.stepped(step)

    def made_apart(self) -> None:
        self._treatments.latest = None

    def reduce(self, own: ContributionWeight) -> ContributionWeight:
        ballot, scaling = self._ballot, self._scaling
        scaling.as_before(own, self._ring.world)
        with torch.no_grad():
            agreed = ballot.agreed(own, ballot.sum(ballot.said(own, self._chunks)), self._chunks)
            self._treatments.latest = None  # all devices know it
            if scaling.is_wrong(agreed):
                scaling.take(agreed)
            scale = scaling.of(own)
            then = scaling.after(agreed) if agreed.weight > 0 else 1.0
            for bound, present in zip(self._chunks, agreed.present, strict=True):
                self._sum(bound, present, scale, then)
            ballot.tell_beside(own, agreed)
        ballot.take_over(agreed)
        return agreed.contribution

    def _sum(self, bound: BoundChunk, present: list[bool], scale: float, then: float) -> None:
        """Reduce a chunk's gradients to their mean over the devices, in place.

        The gradients are scaled before and after the sum, so that the result equals a ring's to the bit.
        """
        gradients = self._lent.model.gradients
        if not any(present):
            for parameter in bound.parameters:
                parameter.grad = None
            return
        with gradients.whole(bound.chunk.id) as flat:
            if scale <= 0:
                flat.zero_()
            elif scale != 1.0:
                flat.mul_(scale)
            self._over_ring(flat, f"chunk {bound.chunk.id} in iteration {self._owner.steps}")
            if then != 1.0:
                flat.mul_(then)
            gradients.come_as(bound.chunk.id, present)

    def _over_ring(self, tensor: Tensor, what: str) -> None:
        channel = self._ring.agreement
        channel.wait(channel.sum(tensor), what)
        self._owner.bytes_sent += channel.sends(tensor.nbytes)

    def state_dict(self) -> dict[str, Any]:
        return self._scaling.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaling.load_state_dict(state)
