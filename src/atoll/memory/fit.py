"""`fit`: a model and its optimizer under budgets of memory, with no change to either."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from atoll.chunks import ChunkMap, lay_out_memory
from atoll.core.errors import PrepareError, UserError
from atoll.core.memory import Budgets, Memory, MemoryFigures
from atoll.memory import observing, planning
from atoll.memory.arena import Arena
from atoll.memory.engine import Engine
from atoll.memory.gradients import Gradients, TrainedChunk
from atoll.memory.payloads import Payloads, TensorPayloads
from atoll.memory.saved import watch_modules
from atoll.memory.stepping import StepCalls, Stepper
from atoll.moves.cache import Cache
from atoll.moves.search import MemoryPlan
from atoll.tensors.binding import BoundChunk, check_bindable


class Fitted:
    """A model that trains within budgets, until `close`. Use the model and the optimizer as before.

    A context manager: `close` at its end.
    """

    def __init__(self, model: nn.Module, budgets: Budgets, plan: MemoryPlan, chunk_map: ChunkMap) -> None:
        self.model, self.budgets, self.plan, self.chunk_map = model, budgets, plan, chunk_map

    @property
    def mover(self) -> Engine | None:
        """What moves the chunks; None where everything fits."""
        return None

    def stats(self) -> MemoryFigures:
        """Budgets, peaks and moves since the beginning."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the model and the optimizer back as plain ones, their values in ordinary memory."""
        raise NotImplementedError

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ of all gradients, to the bit; returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), max_norm, norm_type, error_if_nonfinite
        )

    def __enter__(self) -> Fitted:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Resident(Fitted):
    """Everything fits: the parameters lie in the device's arena for good, and all else is plain PyTorch's."""

    def __init__(self, model: nn.Module, budgets: Budgets, plan: MemoryPlan, chunk_map: ChunkMap) -> None:
        super().__init__(model, budgets, plan, chunk_map)
        parameters = dict(model.named_parameters())
        self._arena = _device_arena(plan, parameters)
        self._chunks = []
        for chunk, names, held in _chunks(chunk_map, parameters):
            block = self._arena.take(chunk_map.blocks_of(chunk))
            bound = BoundChunk(chunk, names, held)
            bound.bind(block.memory[: chunk.nbytes].view(held[0].dtype))
            self._chunks.append(bound)

    def stats(self) -> MemoryFigures:
        return MemoryFigures(device_budget=self.budgets.device, device_peak=self._arena.peak)

    def close(self) -> None:
        for bound in self._chunks:
            for parameter in bound.parameters:
                parameter.data = parameter.data.clone()
        self._chunks = []


class _Moving(Fitted):
    """Chunks come to the device for their use, and are stepped in host memory."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        budgets: Budgets,
        plan: MemoryPlan,
        chunk_map: ChunkMap,
    ) -> None:
        super().__init__(model, budgets, plan, chunk_map)
        parameters = dict(model.named_parameters())
        chunks = [TrainedChunk(*each) for each in _chunks(chunk_map, parameters)]
        self._owners = _Owners(model)
        self._payloads: Payloads = TensorPayloads()
        self._arena = _device_arena(plan, parameters)
        cache = Cache(plan.blocks, {chunk.id: chunk_map.blocks_of(chunk) for chunk in chunk_map.chunks})
        self.engine = Engine(chunks, self._arena, cache, self._payloads)
        trained = [each for each in chunks if chunk_map.groups[each.chunk.group].trainable]
        self.gradients = Gradients(trained, lambda chunk: self._payloads)
        self.engine.gradients = self.gradients
        self.engine.take_over()
        self._handles = watch_modules(model.modules())
        self.steps = 0
        self._stepped: Sequence[int] = ()
        self._stepper: Stepper | None = None
        if optimizer is not None:
            calls = StepCalls(self._before_step, lambda chunk: None, self._after_step)
            self._stepper = Stepper(optimizer, trained, self.gradients, lambda chunk: self._payloads, calls)
            self.engine.wait_stepped = self._stepper.wait_stepped
            self.engine.edited = self._stepper.values_edited

    @property
    def mover(self) -> Engine:
        return self.engine

    def _before_step(self, chunks: Sequence[int]) -> Sequence[int]:
        self._owners.check()
        self.engine.write_back()
        self.engine.out_of_date(chunks)
        self._stepped = tuple(chunks)
        return self._stepped

    def _after_step(self) -> None:
        self.engine.refresh(self._stepped)
        self.engine.cache.handle_step_ended()
        self.steps += 1

    def stats(self) -> MemoryFigures:
        return MemoryFigures(
            device_budget=self.budgets.device,
            device_peak=self._arena.peak,
            steps=self.steps,
            moves=dict(self.engine.moves),
            nbytes=dict(self.engine.nbytes),
            written_back=self.engine.written_back,
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._stepper is not None:
            self._stepper.close()
        self.engine.close()
        self.gradients.close()


class _Owners:
    """Which module has which parameter, to see whether one was replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module._parameters, key, f"{prefix}.{key}" if prefix else key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def check(self) -> None:
        """Raise UserError, naming it, if a parameter is no longer the one that `fit` saw."""
        for owner, key, name, parameter in self._places:
            if owner.get(key) is not parameter:
                raise UserError(
                    f"parameter {name!r} was replaced after memory.fit; write new values into it with copy_(), or "
                    "change the model before memory.fit or after close()"
                )


def fit(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, memory: Memory) -> Fitted:
    """Train `model` with `optimizer` within the budgets of `memory`; use both as before, until `close()`.

    Results are those of the plain model, to the bit. Raises ConfigError for budgets that cannot be read,
    PrepareError for a model or an optimizer that cannot be held in chunks, UserError where the budgets are too
    small, with the least that would do. Source: S2.
    """
    budgets = memory.budgets()
    parameters = dict(model.named_parameters())
    _check(model, parameters)
    plan = planning.choose(model, optimizer, budgets)
    chunk_map = lay_out_memory(planning.specs_for(model, optimizer), chunk_bytes=plan.chunk_bytes)
    fitted: Fitted
    if plan.fits:
        fitted = _Resident(model, budgets, plan, chunk_map)
    else:
        fitted = _Moving(model, optimizer, budgets, plan, chunk_map)
    observing.tell_fitted(fitted, optimizer)
    return fitted


def _check(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise PrepareError("memory.fit was given a model without parameters")
    check_bindable(parameters)
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise PrepareError(
                f"module {name or type(module).__name__!r} is compiled: torch.compile bakes in where its parameters lie; "
                "give memory.fit the model without torch.compile"
            )
    devices = {parameter.device for parameter in parameters.values()}
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            raise PrepareError(
                f"parameter {name!r} is a {type(parameter).__name__}; memory.fit takes plain nn.Parameters"
            )
    if len(devices) > 1:
        first, other = itertools.islice(sorted(map(str, devices)), 2)
        raise PrepareError(f"the model's parameters are on {first} and on {other}; move them to one device")


def _chunks(chunk_map: ChunkMap, parameters: Mapping[str, nn.Parameter]):  # type: ignore[no-untyped-def]
    names = list(parameters)
    for chunk in chunk_map.chunks:
        members = [names[slot.parameter] for slot in chunk.slots]
        yield chunk, members, [parameters[name] for name in members]


def _device_arena(plan: MemoryPlan, parameters: Mapping[str, nn.Parameter]) -> Arena:
    device = next(iter(parameters.values())).device
    return Arena(plan.blocks * plan.chunk_bytes, plan.chunk_bytes, device, "device")
