"""A model under budgets: all of it on the device, or chunks that come and go."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn

from atoll.chunks import Chunk, ChunkMap
from atoll.core.available import available_bytes
from atoll.core.errors import UserError
from atoll.core.heap import FreedMemory, give_back_freed_memory, keep_freed_memory
from atoll.core.memory import Budgets, MemoryFigures
from atoll.core.units import format_bytes
from atoll.memory import interrupts
from atoll.memory.arena import Arena
from atoll.memory.disk import PAGE, DiskFile
from atoll.memory.engine import Engine, in_order_of_use
from atoll.memory.former import Former
from atoll.memory.gradients import GradientKinds, ModelGradients, TrainedChunk
from atoll.memory.home import Home, HostHome
from atoll.memory.initialising import spilled_bytes, take
from atoll.memory.modelsteps import ModelSteps
from atoll.memory.moved import Moved
from atoll.memory.payloads import GRADIENT
from atoll.memory.plainstate import States
from atoll.memory.saved import leave_gone, watch_modules
from atoll.memory.speculation import AheadFigures, Spares
from atoll.memory.statedicts import StateDicts
from atoll.memory.states import ChunkStates, chunk_states
from atoll.memory.stepping import ChunkStepper, state_dtypes
from atoll.memory.stepqueue import StepQueue
from atoll.memory.store import PayloadStore
from atoll.moves import Cache, StepStatistics, optimum
from atoll.moves.search import MemoryPlan
from atoll.tensors.binding import BoundChunk
from atoll.tensors.clipping import check_max_norm
from atoll.tensors.torch_compat import own_parameters

EARLY = "the plan takes the steps to be longer than a forward, and there is room to make these in backward"
_LEFT = (
    "this optimizer's state is gone: session.prepare was called again for its model, with another optimizer; "
    "prepare the model with this one too, or read the state before"
)
_BEFORE_CHANGE = "this graph was made before session.prepare was called again; make its forward again"
GRADIENTS_UNDER_WAY = 2  # chunks of gradients that may be leaving the device while backward goes on


class Fitted:
    """A model that trains within budgets, until `close`. Use the model and the optimizer as before.

    As a context manager it calls `close` at the end of the block, or `abandon` after an exception.
    """

    def __init__(self, model: nn.Module, budgets: Budgets, plan: MemoryPlan, chunk_map: ChunkMap) -> None:
        self.model, self.budgets, self.plan, self.chunk_map = model, budgets, plan, chunk_map
        self.gradient_norm: Tensor | None = None  # the global norm before the latest clipping

    @property
    def mover(self) -> Engine | None:
        """The engine that moves the chunks; None where everything fits."""
        return None

    @property
    def choices(self) -> list[tuple[str, str, str]]:
        """Decisions that are not in the plan: (subject, choice, reason)."""
        return []

    @property
    def kinds(self) -> GradientKinds:
        """The unusual kinds of gradients that this worker has had."""
        return GradientKinds()

    def stats(self) -> MemoryFigures:
        """Budgets, peaks and moves since the beginning."""
        raise NotImplementedError

    def close(self) -> None:
        """Make the model and the optimizer plain again: all values, gradients and states in ordinary
        memory."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Close after an exception. With several members the exception may be this member's alone."""
        self.close()

    def end(self, *, stays: bool) -> None:
        """End the session: chunks stop moving.

        Args:
            stays: True if a model that is too large to be plain may stay in its tiers.
        """

    def leave(self, optimizers: Sequence[torch.optim.Optimizer]) -> Former | None:
        """End the session for a changed model, which `optimizers` step. Return what the tiers still hold;
        None: all is plain."""
        del optimizers
        self.close()
        return None

    def lacks_room(self, state: int = 0) -> str:  # noqa: ARG002
        """Return why the model does not fit as a plain one. This one is plain already: an empty string.

        Args:
            state: bytes of optimizer state that lie elsewhere, and are to come here with the model.
        """
        return ""

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip as torch.nn.utils.clip_grad_norm_ does, to the bit; return the norm before."""
        check_max_norm(max_norm, norm_type)
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), max_norm, norm_type, error_if_nonfinite
        )
        self.gradient_norm = norm
        return norm

    def _norm_shown(self) -> float | None:
        return None if self.gradient_norm is None else float(self.gradient_norm)

    def __enter__(self) -> Fitted:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()


class Resident(Fitted):
    """A model of which everything fits: parameters lie in an arena on the device; the rest is plain
    PyTorch's."""

    def __init__(self, model: nn.Module, budgets: Budgets, plan: MemoryPlan, chunk_map: ChunkMap) -> None:
        super().__init__(model, budgets, plan, chunk_map)
        chunks = [TrainedChunk(*each) for each in _members(chunk_map, dict(model.named_parameters()))]
        self._there = _Stationary(chunks, chunk_map)

    def stats(self) -> MemoryFigures:
        return MemoryFigures(
            device_budget=self.budgets.device,
            device_peak=self._there.nbytes,
            host_budget=self.budgets.host,
            gradient_norm=self._norm_shown(),
        )

    def close(self) -> None:
        self._there.close()


class _Stationary:
    """Chunks whose values stay in an arena on the device. Their parameters, gradients and optimizer state are
    plain PyTorch ones."""

    def __init__(self, chunks: Sequence[TrainedChunk], chunk_map: ChunkMap) -> None:
        sizes = [chunk_map.blocks_of(each.chunk) for each in chunks]
        nbytes = sum(sizes) * chunk_map.chunk_bytes
        arena = Arena(nbytes, chunk_map.chunk_bytes, chunks[0].device, "device")
        self.nbytes = arena.nbytes
        self._chunks = []
        for each, blocks in zip(chunks, sizes, strict=True):
            memory = arena.take(blocks).view(each.extent, each.dtype)
            for slot, parameter in enumerate(each.parameters):
                take(parameter, each.run(memory, slot))
                parameter.data = each.part(memory, slot)
            bound = BoundChunk(each.chunk, each.names, each.parameters)
            bound.bind(memory)  # the values are there already: this gives each parameter a storage of its own
            self._chunks.append(bound)

    def close(self) -> None:
        """Give each parameter memory of its own."""
        for bound in self._chunks:
            for parameter in bound.parameters:
                parameter.data = parameter.data.clone()
        self._chunks = []


class Moving(Fitted):
    """A model whose chunks come to the device to be used, and are stepped in host memory.

    The chunks of `plan.steps_on_device` are the exception: they stay on the device, and the script's
    optimizers step them themselves. Each of `optimizers` steps chunks of its own; there are none if the model
    is stepped elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        budgets: Budgets,
        plan: MemoryPlan,
        chunk_map: ChunkMap,
    ) -> None:
        super().__init__(model, budgets, plan, chunk_map)
        parameters = dict(model.named_parameters())
        there, chunks = _parted(frozenset(plan.steps_on_device), chunk_map, parameters)
        trained = [each for each in chunks if chunk_map.groups[each.chunk.group].trainable]
        self._owners = _Owners(model)
        self._sizes = {chunk.id: chunk_map.blocks_of(chunk) for chunk in chunk_map.chunks}
        arenas = plan.blocks * plan.chunk_bytes + plan.host_bytes
        self._heap_is_bounded = keep_freed_memory(budget=arenas)
        self._freed = FreedMemory(arenas)
        self._staying = [chunk for chunk in plan.resident if chunk not in set(plan.steps_on_device)]
        self._blocks = plan.cache_blocks + sum(self._sizes[chunk] for chunk in self._staying)
        device = next(iter(parameters.values())).device
        self._arena = Arena(self._blocks * plan.chunk_bytes, plan.chunk_bytes, device, "device")
        names = {each.chunk.id: each.words for each in chunks}
        self._store = _store(budgets, plan, spilled_bytes(parameters.values()), names)
        self._trained, self._moved, self._steps = trained, Moved(), StepQueue(names)
        self._stepping: ModelSteps | None = None
        self._hold(chunks)
        held = {id(parameter) for each in there for parameter in each.parameters}
        beside = {n: p for n, p in enumerate(parameters.values()) if id(p) in held}
        by_optimizer = list(map(self._states_of, optimizers))
        states = {chunk: its for each in by_optimizer for chunk, its in each.items()}
        self.gradients = self._gradients_of(trained, beside)
        self.engine = Engine(
            chunks,
            self._arena,
            Cache(self._blocks, self._sizes),
            self._home_of(states),
            self.gradients,
            self._moved,
            self._aside,
        )
        self._handles = watch_modules(model.modules())
        self._state_dicts = StateDicts(model)
        self._ahead = AheadFigures()
        self.steps = 0
        self._statistics = StepStatistics()
        self._step_blocks = 0
        self._stepped: Sequence[int] = ()
        self._count, self._have_stepped = len(optimizers), set[int]()
        self._there: _Stationary | None = None
        self._keeps_interrupts = interrupts.begin()
        try:
            self.engine.take_over()
            if there:
                self._there = _Stationary(there, chunk_map)
            if self._store.disk is not None:
                self._store.disk.reserve()
            if optimizers:
                steppers = map(self._stepper_of, range(self._count), optimizers, by_optimizer)
                self._stepping = ModelSteps(list(steppers), self._steps)
            self._ready(states)
            for chunk in self._staying:
                self.engine.pin([chunk])
            give_back_freed_memory()
        except BaseException:
            self.abandon()
            raise

    @property
    def kinds(self) -> GradientKinds:
        return self.gradients.kinds

    # Overridden for a group of members (memory/sharded.py), or a model that is stepped elsewhere
    # (memory/lent.py, memory/exchanged.py).

    def _hold(self, chunks: Sequence[TrainedChunk]) -> None:
        """Find which member holds what of the chunks. Here the store holds everything."""

    def _home_of(self, states: Mapping[int, ChunkStates]) -> Home:
        return HostHome(self._store, self._steps, states)

    @property
    def _room(self) -> int:
        """Bytes of gradients that may be on their way off the device while backward goes on."""
        return GRADIENTS_UNDER_WAY * self.plan.chunk_bytes

    def _gradients_of(
        self, trained: Sequence[TrainedChunk], beside: Mapping[int, nn.Parameter]
    ) -> ModelGradients:
        return ModelGradients(trained, self._store, self._steps, self._gradient_came, self._room, beside)

    def _states_of(self, optimizer: torch.optim.Optimizer) -> dict[int, ChunkStates]:
        planned = partial(state_dtypes, optimizer)
        return chunk_states(
            optimizer, self._trained, self._store, master=self.budgets.master, planned=planned
        )

    def _stepper_of(
        self, number: int, optimizer: torch.optim.Optimizer, states: Mapping[int, ChunkStates]
    ) -> ChunkStepper:
        spares = Spares(self.plan.early, self._store.swap, lambda: self.engine.waited, self._ahead)
        return ChunkStepper(
            optimizer,
            states,
            self.gradients,
            self._steps,
            partial(self._before_step, optimizer=number),
            partial(self._after_step, optimizer=number),
            shown=self._shown(optimizer, states),
            spares=spares if self.plan.early else None,
        )

    def _shown(
        self, optimizer: torch.optim.Optimizer, states: Mapping[int, ChunkStates]
    ) -> Mapping[int, States]:
        """Return the states to show for chunks of which other members step a part, by chunk. Here there are
        none."""
        del optimizer, states
        return {}

    def _ready(self, states: Mapping[int, ChunkStates]) -> None:
        """Finish the construction, when all payloads are where they belong."""

    def _end(self) -> None:
        """Release the tiers, when the model and the optimizer are plain again."""
        self._store.close()

    def _end_interrupts(self) -> None:
        if self._keeps_interrupts:
            self._keeps_interrupts = False
            interrupts.end()

    @property
    def mover(self) -> Engine:
        return self.engine

    @property
    def choices(self) -> list[tuple[str, str, str]]:
        heap = "as the C library has it", "it is not glibc, or the user has set glibc's own variables"
        if self._heap_is_bounded:
            heap = (
                "bounded",
                "large tensors come from the system; what is free is given back as it grows",
            )
        there = len(self.plan.steps_on_device)
        where = f"{there} chunks on the device, the others on the host" if there else "on the host"
        found = [*self._store.choices, ("memory.heap", *heap), ("memory.step", where, self.plan.reason)]
        if self.plan.early:
            found.append(("memory.early", f"{len(self.plan.early)} chunks", EARLY))
        return found

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        check_max_norm(max_norm, norm_type)
        own = [p for p in self.model.parameters() if p.grad is not None and not self.gradients.holds(p)]
        if len(own) > sum(p.grad is not None for p in self.gradients.beside.values()):
            # A parameter that was frozen at `fit` has a gradient of autograd's own, in no chunk.
            return super().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        self.gradient_norm = self.gradients.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        return self.gradient_norm

    def _gradient_came(self, each: TrainedChunk, slot: int) -> None:
        self._moved.gradient_came(each, slot)
        if self._stepping is not None:
            self._stepping.gradient_came(each.chunk.id, slot)

    def _before_step(self, chunks: Sequence[int], optimizer: int = 0) -> Sequence[int]:  # noqa: ARG002
        self._owners.check()
        self.engine.write_back()
        self.engine.out_of_date(chunks)
        self._stepped = in_order_of_use(self.engine, chunks)
        return self._stepped

    def _after_step(self, optimizer: int = 0) -> None:
        """Follow a step of one of the optimizers, by its place.

        The order of uses repeats once all of them have stepped, or one of them for the second time.
        """
        self.engine.refresh(self._stepped)
        again = optimizer in self._have_stepped
        self._have_stepped.add(optimizer)
        if again or len(self._have_stepped) >= self._count:
            self._have_stepped.clear()
            self._step_ended()

    def _step_ended(self) -> None:
        """Tell the cache, the store and the counters that a step has ended."""
        self.gradients.drop_graphs()
        ended = self.engine.handle_step_ended()
        self._statistics.add(ended)
        self._step_blocks = ended.blocks_in
        self._store.step_ended()
        # Gradients and copies leave holes in the heap that glibc does not fill: give the free memory back.
        self.gradients.once_arrived(self._freed.step_ended)
        self._moved.step_ended()
        self.steps += 1

    @property
    def _aside(self) -> int:
        """Bytes of the device's budget for the chunks that step there, with their gradients and states."""
        return (self.plan.blocks - self._blocks) * self.plan.chunk_bytes

    def stats(self) -> MemoryFigures:
        engine, disk = self.engine, self._store.statistics
        order = engine.cache.order
        least = None if order is None else optimum(order, self._blocks, self._sizes, steps=2)[1]
        return MemoryFigures(
            device_budget=self.budgets.device,
            device_peak=self._arena.peak + self._aside,
            host_budget=self.budgets.host,
            host_peak=self._store.host.peak,
            disk_budget=self.budgets.disk,
            disk_peak=self._store.disk.peak if self._store.disk is not None else 0,
            steps=self.steps,
            moves={**self._moved.moves, "from_disk": disk.from_disk, "to_disk": disk.to_disk},
            nbytes={**self._moved.nbytes, "from_disk": disk.bytes_from_disk, "to_disk": disk.bytes_to_disk},
            step_moves=self._moved.of_step[0],
            step_nbytes=self._moved.of_step[1],
            written_back=engine.written_back,
            optimum=least if all(blocks == 1 for blocks in self._sizes.values()) else None,
            step_blocks=self._step_blocks,
            optimum_blocks=least,
            uses=self._statistics.uses,
            misses=self._statistics.misses,
            unforeseen=self._statistics.unforeseen,
            waited=engine.waited + self.gradients.waited,
            gradient_norm=self._norm_shown(),
            stepped_early=self._ahead.taken,
            rolled_back=self._ahead.dropped,
        )

    @interrupts.uninterrupted
    def close(self) -> None:
        if self.engine.is_closed:
            return
        for handle in self._handles:
            handle.remove()
        self._state_dicts.close()
        leave_gone()
        stepping, self._stepping = self._stepping, None
        try:
            if stepping is not None:
                stepping.close()
        finally:  # the error of a failed step is raised once the model is plain
            self.engine.close()
            if self._there is not None:
                self._there.close()
            self._end_interrupts()
            try:
                self.gradients.close()
            finally:
                self._end()

    def end(self, *, stays: bool) -> None:
        """End the session. `close` if the budgets hold the plain model and its optimizer's state.

        Otherwise the model stays in its tiers and can be used on (`stays`), or `let_go` drops it, as its
        steps were made elsewhere.
        """
        if self.engine.is_closed:
            return
        self._steps.wait_over()  # the optimizer's state exists once the first step has ended
        why = self.lacks_room()
        if not why:
            self.close()
        elif not stays:
            self.let_go(
                f"this model was trained in chunks by a session that has ended: {why}; read or save its "
                "values before that, inside the block of `with`"
            )

    @interrupts.uninterrupted
    def leave(self, optimizers: Sequence[torch.optim.Optimizer]) -> Former | None:
        """End the session for a changed model. Values, gradients and states stay in the tiers, to be read
        there.

        With members, all of them call it. Raises the error of a step that failed.
        """
        self._steps.wait_all()
        self.engine.write_back()
        for handle in self._handles:
            handle.remove()
        self._state_dicts.close()
        leave_gone()
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.leave(optimizers, _LEFT)
        self.engine.leave(_BEFORE_CHANGE)
        self._end_interrupts()
        gradients = self.gradients.leave()
        if self._there is not None:
            self._there.close()

        def part() -> None:  # after an error: what the tiers held is gone
            self._part()
            self._store.discard()

        return Former(self.engine.home, self.engine.chunks.values(), gradients, self._end_left, part)

    def _end_left(self) -> None:
        """End the tiers, when all that they held was taken."""
        self.gradients.left()
        self._store.discard()

    def lacks_room(self, state: int = 0) -> str:
        """Return why the model does not fit as a plain one; an empty string where it fits.

        Args:
            state: bytes of the optimizer's state that lie elsewhere, and are to come here with the model.
        """
        whole = self._plain_bytes() + state
        room, holds = self._room_for_plain()
        if whole <= room:
            return ""
        what = "the plain model" if self._stepping is None and not state else "model and optimizer state"
        return f"{what} would take {format_bytes(whole)}, and {holds} {format_bytes(room)}"

    def _plain_bytes(self) -> int:
        """Return the bytes of the plain model, and of the optimizer's state where its steps are made here."""
        there = 0 if self._there is None else self._aside - self._there.nbytes  # without gradients
        return self._store.nbytes_without(GRADIENT) + there

    def _room_for_plain(self) -> tuple[int, str]:
        """Return the bytes that a plain model may take, and what limits them, in words.

        On an accelerator the device's budget counts. On a CPU the device's and the host's budgets count
        together; with no host budget, and at most, the machine's free memory counts.
        """
        if self._arena.device.type != "cpu":
            return self.budgets.device, "the device's budget is"
        host, free = self.budgets.host, available_bytes()
        room = sys.maxsize if host is None else self.budgets.device + host
        return (room, "the budgets hold") if room <= free else (free, "this worker's machine has free")

    @interrupts.uninterrupted
    def let_go(self, why: str) -> None:
        """End the threads, and give nothing back: any later use of a parameter raises an error with `why`."""
        if self.engine.is_closed:
            return
        for handle in self._handles:
            handle.remove()
        self._state_dicts.close()
        leave_gone()
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.abandon(why)
        self.engine.abandon(why)
        self._end_interrupts()
        self._part()
        self.gradients.abandon()
        self._store.close()

    def _part(self) -> None:
        """Leave the group, if other members hold parts of the model. Here there is none."""


class _Owners:
    """The modules that own each parameter, kept to detect a parameter that was replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (own_parameters(module), key, f"{prefix}.{key}" if prefix else key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in own_parameters(module).items()
            if parameter is not None
        ]

    def check(self) -> None:
        """Raise UserError, naming the parameter, if one is no longer the object that `fit` saw."""
        for owner, key, name, parameter in self._places:
            if owner.get(key) is not parameter:
                raise UserError(
                    f"parameter {name!r} was replaced after memory.fit; write new values into it with "
                    "copy_(), or change the model before memory.fit or after close()"
                )


def _members(
    chunk_map: ChunkMap, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[Chunk, list[str], list[nn.Parameter]]]:
    """Yield each chunk with its parameters' names and the parameters, in the order of its slots."""
    names = list(parameters)
    for chunk in chunk_map.chunks:
        members = [names[slot.parameter] for slot in chunk.slots]
        yield chunk, members, [parameters[name] for name in members]


def _parted(
    steps_on_device: Collection[int], chunk_map: ChunkMap, parameters: Mapping[str, nn.Parameter]
) -> tuple[list[TrainedChunk], list[TrainedChunk]]:
    """Return two lists: the chunks that stay on the device with gradient and state, and the others."""
    parts: tuple[list[TrainedChunk], list[TrainedChunk]] = [], []
    for each in _members(chunk_map, parameters):
        parts[each[0].id not in steps_on_device].append(TrainedChunk(*each))
    return parts


def _store(budgets: Budgets, plan: MemoryPlan, spilled: int, names: Mapping[int, str]) -> PayloadStore:
    """Build the store that holds all payloads, in host memory and, with a disk budget, on disk.

    Without a disk, payloads are packed closely. With one, they move in whole blocks, and the file stays so
    small at first that the budget also holds the bytes that `init` has spilled.

    Args:
        spilled: bytes on disk that `init` holds until the model is taken over.
        names: what errors call the chunks, by chunk.
    """

    if not plan.disk_bytes:
        arena = Arena(max(plan.host_bytes, PAGE), PAGE, "cpu", "host", alignment=PAGE)
        return PayloadStore(arena, named=names.__getitem__)
    host = Arena(plan.host_bytes, plan.host_block_bytes, "cpu", "host", alignment=PAGE)
    beside = max(budgets.disk - spilled, 0)
    disk = DiskFile(budgets.folder, plan.disk_bytes, plan.host_block_bytes, reserved=beside)
    return PayloadStore(host, disk, named=names.__getitem__)
