"""One model and its optimizer, prepared: laid out in chunks, hooked to the ring, stepped chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.chunks import ChunkMap, lay_out
from atoll.core.config import Config
from atoll.core.errors import NonFiniteGradientError, PrepareError
from atoll.tensors.binding import BoundChunk, bind_model, check_bindable, specs_of
from atoll.tensors.optimizer import ChunkOptimizer
from atoll.train.agreement import check_same, describe
from atoll.train.reducer import Contribution, Reducer, Ring
from atoll.train.workers import Workers


class SampleCount:
    """The samples of the iteration under way: counted in forwards, or given by `session.weight`."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._given: float | None = None
        self.latest = 1.0  # the weight that logged values get

    def count(self, samples: float) -> None:
        self._counted += samples
        self.latest = self.contribution().weight

    def give(self, weight: float) -> None:
        self._given = weight + (self._given or 0.0)
        self.latest = self._given

    def contribution(self) -> Contribution:
        """A worker whose forwards showed no samples counts as one: then all weigh the same."""
        weight = (self._counted or 1.0) if self._given is None else self._given
        return Contribution(weight=weight, samples=self._counted)

    def reset(self) -> None:
        self._counted, self._given = 0.0, None


class Prepared:
    """What `session.prepare` makes of one (model, optimizer) pair.

    `stepped(own, group_samples)` is called after each optimizer step, `skipped(reason)` when the policy on
    NaN and infinities left one out; `forward(samples)` at each forward that autograd records.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        config: Config,
        device: torch.device,
        workers: Workers,
        ring: Ring | None,
        counted: Callable[[float], None],
        stepped: Callable[[Prepared], None],
        skipped: Callable[[str], None],
    ) -> None:
        self.config, self._workers, self.optimizer = config, workers, optimizer
        self._counted, self._stepped, self._skipped = counted, stepped, skipped
        self.module: nn.Module = getattr(model, "_orig_mod", model)  # inside torch.compile's wrapper
        self.samples = SampleCount()
        self.own_samples = self.group_samples = 0.0  # of the iterations since the last step
        _refuse_wrapped(self.module)
        _refuse_sparse(self.module)
        self.parameters = dict(self.module.named_parameters())
        check_bindable(self.parameters)
        _to_device(self.module, self.parameters, device)
        settings = _settings(optimizer, self.parameters)
        specs = specs_of(self.parameters, settings)
        check_same(workers, describe(specs, self.module, optimizer, config))
        self.chunk_map: ChunkMap = lay_out(specs, chunk_bytes=config.chunk_bytes)
        self.chunks: list[BoundChunk] = bind_model(self.chunk_map, self.parameters)
        self._frozen = [name for name, parameter in self.parameters.items() if not parameter.requires_grad]
        workers.take_from_first([chunk.flat for chunk in self.chunks], "worker 0's parameters")
        workers.take_from_first(self.module.buffers(), "worker 0's buffers")
        trained = [chunk for chunk in self.chunks if chunk.parameters[0].requires_grad]
        self.reducer = Reducer(
            trained, ring, contribution=self.samples.contribution, committed=self._committed
        )
        self.chunk_optimizer = ChunkOptimizer(
            optimizer,
            trained,
            before_step=self._before_step,
            gradients=self.reducer.flat_gradients,
            accept=self._accept,
            after_step=self._after_step,
        )
        self._hooks = _hook_forward(
            model, self._before_forward, self.reducer.arm if ring is not None else None
        )

    def close(self) -> None:
        """Take the hooks off the model; its parameters and gradients stay where they are."""
        self.reducer.close()
        self.chunk_optimizer.close()
        for handle in self._hooks:
            handle.remove()

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.chunk_optimizer.restore()
        self.reducer.before_forward()
        samples = leading_dimension((args, kwargs))
        if samples is not None:
            self.samples.count(samples)
            self._counted(samples)

    def _committed(self, own: Contribution, _weight: float, group_samples: float) -> None:
        self.own_samples += own.samples
        self.group_samples += group_samples
        self.samples.reset()

    def _before_step(self) -> None:
        for name in self._frozen:
            if self.parameters[name].requires_grad:
                raise PrepareError(
                    f"parameter {name!r} was frozen when session.prepare saw it and is trainable now; "
                    "leave it trainable until after session.prepare, then freeze it until it is wanted"
                )
        self.reducer.before_step()

    def _accept(self, gradients: Sequence[Tensor]) -> bool:
        """Apply the policy `sync.nonfinite`; the reduced gradients are the same everywhere, so all
        decide alike."""
        if self.config.sync.nonfinite == "allow" or getattr(self.optimizer, "found_inf", None) is not None:
            return True
        if _all_finite(gradients):
            return True
        reason = self._blame()
        if self.config.sync.nonfinite == "skip":
            self._skipped(f"{reason}; skipped on every worker")
            return False
        raise NonFiniteGradientError(
            f"iteration {self.reducer.steps}: {reason}; set sync.nonfinite to 'skip' to leave such "
            "iterations out, "
            "or to 'allow' to apply them"
        )

    def _blame(self) -> str:
        own = self.reducer.own_nonfinite()
        found = self._workers.gather(own[:1], "the workers' gradients that are not finite")
        named = [f"{names[0]!r} on worker {rank}" for rank, names in enumerate(found) if names]
        where = named[0] if named else "a parameter, once it was summed"
        return f"the gradient of {where} holds NaN or infinity"

    def _after_step(self) -> None:
        self.reducer.after_step()
        self._stepped(self)
        self.own_samples = self.group_samples = 0.0


def leading_dimension(value: Any) -> float | None:
    """The first dimension of the first tensor in nested arguments; None where there is none."""
    if isinstance(value, Tensor):
        return float(value.shape[0]) if value.dim() else None
    parts = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    )
    for part in parts:
        found = leading_dimension(part)
        if found is not None:
            return found
    return None


def _all_finite(gradients: Sequence[Tensor]) -> bool:
    """One pass and one number; only a sum that overflowed needs the closer look."""
    if not gradients:
        return True
    # A sum in the gradient's own precision is five times as fast as a widening one; half precision
    # would overflow.
    sums = [g.sum(dtype=torch.float32 if g.element_size() < 4 else g.dtype).float() for g in gradients]
    if math.isfinite(torch.stack(sums).sum()):
        return True
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _hook_forward(
    model: nn.Module,
    before: Callable[[tuple[Any, ...], dict[str, Any]], None],
    arm: Callable[[], None] | None,
) -> list[Any]:
    """Call `before` at each forward that autograd records, and `arm` when the backward of its outputs begins.

    Recomputations inside a backward are passed over. Dynamo leaves these functions alone: they run in Python
    beside a compiled forward.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def on_forward(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            before(args, kwargs)

    handles: list[Any] = [model.register_forward_pre_hook(on_forward, with_kwargs=True)]
    if arm is not None:
        begin = arm

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def on_output(_module: nn.Module, _args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                for tensor in _tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda _gradient: begin())  # type: ignore[no-untyped-call]

        handles.append(model.register_forward_hook(on_output))
    return handles


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    )
    return [tensor for part in parts for tensor in _tensors(part)]


def _settings(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[nn.Parameter, str]:
    """Which param group steps each parameter, as the layout's settings key."""
    known = set(parameters.values())
    settings: dict[nn.Parameter, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise PrepareError(
                    f"parameter {position} of the optimizer's param group {index}, of shape "
                    f"{tuple(parameter.shape)}, "
                    "is not in the model; put every module that it steps into one nn.ModuleList and "
                    "prepare that"
                )
            settings[parameter] = str(index)
    return settings


def _to_device(module: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Move the model where its worker trains; the Parameter objects stay the same."""
    if any(tensor.device != device for tensor in (*parameters.values(), *module.buffers())):
        module.to(device)
    for name, parameter in module.named_parameters():
        if parameter is not parameters[name]:
            raise PrepareError(
                f"parameter {name!r} became another object when it moved to {device}; "
                "call model.to(session.device) before making the optimizer"
            )


def _refuse_wrapped(module: nn.Module) -> None:
    name = type(module).__name__
    if name in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise PrepareError(
            f"the model is wrapped in {name}; give session.prepare the module inside (model.module)"
        )


def _refuse_sparse(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            parameter = f"{name}.weight" if name else "weight"
            raise PrepareError(
                f"parameter {parameter!r} gets sparse gradients, which chunks cannot hold; build "
                f"{name or 'it'!r} with sparse=False"
            )
