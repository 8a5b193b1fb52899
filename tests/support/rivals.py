"""Scripts of tests/scripts under other ways to train on several workers, for the table's last columns.

A script is run as it is, with a session that does what the script's user would write for the rival:

| column | `session.prepare(model, optimizer)` |
| --- | --- |
| DDP | `model = DistributedDataParallel(model)` |
| FSDP2 | `fully_shard(model)`; the optimizer gets the sharded parameters, as if it had been made afterwards |
| Accelerate | `model, optimizer = accelerator.prepare(model, optimizer)` |
| DeepSpeed ZeRO-3 | `engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=...)` |

DeepSpeed's engine also makes the backward and the step. Where a rival returns a wrapper, the script's
`model(...)` calls the wrapper, and all else of the model is what the user writes as `model.module`. A model
without a forward of its own (`nn.ModuleList`) is wrapped part by part, but for DeepSpeed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import MethodType
from typing import Any, ClassVar, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from atoll.launch.ports import free_port
from atoll.train.api.place import Place

_TIMEOUT = timedelta(seconds=30)


class Way(Protocol):
    """How one rival takes a model and its optimizers."""

    def wrap(self, model: nn.Module, optimizers: Sequence[Any]) -> None: ...

    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """Within it workers may have unequal numbers of batches, where the rival can do that."""

    def whole(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Within it every worker can read all values of the model's parameters."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Leave torch as it was."""

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip the gradients of the step that comes; return their norm."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class Ddp(Way):
    """DistributedDataParallel, with the options that its errors ask for."""

    def __init__(self, options: dict[str, bool]) -> None:
        self._options = options
        self._wrappers: list[DistributedDataParallel] = []

    def wrap(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        options: Any = self._options
        for part in callable_parts(model):
            self._wrappers = [each for each in self._wrappers if each.module is not part]  # prepared again
            self._wrappers.append(DistributedDataParallel(part, **options))
            call_through(part, self._wrappers[-1])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._wrappers:
                stack.enter_context(each.no_sync())
            yield

    def joined(self) -> contextlib.AbstractContextManager[None]:
        (wrapper,) = self._wrappers
        return wrapper.join(divide_by_initial_world_size=False)  # type: ignore[no-any-return]


class Fsdp2(Way):
    """`fully_shard` on the whole model, which it changes in place."""

    def __init__(self, options: dict[str, bool]) -> None:
        self._models: list[Any] = []

    def wrap(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        from torch.distributed.fsdp import fully_shard

        before = {id(p): name for name, p in model.named_parameters()}
        for part in callable_parts(model):
            fully_shard(part)
            self._models.append(part)
        after = dict(model.named_parameters())
        for group in (group for each in optimizers for group in each.param_groups):
            group["params"][:] = [after[before[id(p)]] if id(p) in before else p for p in group["params"]]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        for model in self._models:
            model.set_requires_gradient_sync(False)
        yield
        for model in self._models:
            model.set_requires_gradient_sync(True)

    def joined(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError("FSDP2 has no such context")


class Accelerate(Way):
    """Accelerate's Accelerator on a CPU, where it wraps models in DistributedDataParallel."""

    def __init__(self, options: dict[str, bool]) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self._accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        self._wrappers: list[nn.Module] = []

    def wrap(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        for part in callable_parts(model):
            self._wrappers.append(self._accelerator.prepare(part))
            call_through(part, self._wrappers[-1])
        for each in optimizers:
            self._accelerator.prepare(each)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._accelerator.no_sync(*self._wrappers)  # type: ignore[no-any-return]

    def joined(self) -> contextlib.AbstractContextManager[None]:
        return self._accelerator.join_uneven_inputs(self._wrappers)  # type: ignore[no-any-return]


class DeepSpeed(Way):
    """DeepSpeed's engine with ZeRO stage 3: parameters, gradients and states are sharded."""

    _CONFIG: ClassVar = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # its default is a norm of 1
    }

    def __init__(self, options: dict[str, bool]) -> None:
        import deepspeed
        from deepspeed.comm import comm
        from deepspeed.utils import groups

        comm.cdb = groups._WORLD_GROUP = None  # those of the script before
        groups._ALL_TO_ALL_GROUP.clear()
        self._deepspeed = deepspeed
        self._engines: list[Any] = []
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        self._stack.close()

    def wrap(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        if len(optimizers) > 1:
            raise ValueError("deepspeed.initialize takes one optimizer for a model")  # so says its signature
        is_half = any(p.dtype is torch.bfloat16 for p in model.parameters())
        engine, *_ = self._deepspeed.initialize(
            model=model,
            optimizer=optimizers[0],
            config={**self._CONFIG, "bf16": {"enabled": is_half}},
            dist_init_required=False,
        )
        self._engines.append(engine)
        if callable_parts(model) == [model]:  # else scripts call its parts, which have its hooks
            call_through(model, engine)
        step_through(optimizers[0], engine)
        if len(self._engines) == 1:
            self._stack.enter_context(backward_through(engine))
        else:  # which of them a loss is of is not known here, and torch's backward does as well
            self._stack.close()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._engines:
                stack.enter_context(each.no_sync())
            yield

    def joined(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError("DeepSpeed has no such context")

    def whole(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        parameters = [p for p in model.parameters() if hasattr(p, "ds_id")]
        return self._deepspeed.zero.GatheredParameters(parameters)  # type: ignore[no-any-return]

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        for engine in self._engines:
            engine.optimizer.clip_grad = max_norm  # as "gradient_clipping" in its configuration sets it
        return torch.tensor(torch.nan)  # `engine.step` finds the norm


_WAYS: dict[str, type[Ddp] | type[Fsdp2] | type[Accelerate] | type[DeepSpeed]] = {
    "DDP": Ddp,
    "FSDP2": Fsdp2,
    "Accelerate": Accelerate,
    "DeepSpeed ZeRO-3": DeepSpeed,
}
RIVALS = tuple(_WAYS)
PACKAGES = {"DDP": "torch", "FSDP2": "torch", "Accelerate": "accelerate", "DeepSpeed ZeRO-3": "deepspeed"}
JOINED = ("DDP", "Accelerate")  # which have a context for workers with unequal numbers of batches
# ZeRO steps a float32 copy of parameters of any dtype, and Adam makes much of small differences of gradients
# near zero: how far from plain torch's end such a rival may end, as a share of plain torch's way.
SHARES = {"DeepSpeed ZeRO-3": 0.03}
# Files of these raise a rival's own refusals.
SOURCES = ("torch/distributed/", "torch/nn/parallel/", "accelerate/", "deepspeed/")


def version(rival: str) -> str:
    """Return the version of the package that a rival is in."""
    return importlib.metadata.version(PACKAGES[rival])


def callable_parts(model: nn.Module) -> list[nn.Module]:
    """Return the model, or its parts where it has no forward of its own and scripts call the parts."""
    if type(model).forward is not nn.Module.forward:
        return [model]
    return [part for child in model.children() for part in callable_parts(child)]


def call_through(model: nn.Module, wrapper: nn.Module) -> None:
    """Have `model(...)` call the wrapper, which calls the model. Copies and exports are plain."""
    own: Any = getattr(type(model), "plain", type(model))
    inside = False

    class Called(own):  # type: ignore[misc]
        plain = own

        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            nonlocal inside
            if inside or self is not model or torch.compiler.is_exporting():
                return super().__call__(*arguments, **keywords)
            inside = True
            try:
                return wrapper(*arguments, **keywords)
            finally:
                inside = False

        def __reduce_ex__(self, protocol: Any) -> Any:
            _, _, *rest = super().__reduce_ex__(protocol)
            return (object.__new__, (own,), *rest)

    Called.__name__, Called.__qualname__, Called.__module__ = own.__name__, own.__qualname__, own.__module__
    object.__setattr__(model, "__class__", Called)


def step_through(optimizer: Any, engine: Any) -> None:
    """Have `optimizer.step()` call the engine's, which calls the optimizer's."""
    own, inside = optimizer.step, False

    def step(_: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal inside
        if inside:
            return own(*arguments, **keywords)
        inside = True
        try:
            return engine.step()
        finally:
            inside = False

    optimizer.step = MethodType(step, optimizer)  # schedulers look for a method


@contextlib.contextmanager
def backward_through(engine: Any) -> Iterator[None]:
    """Have `loss.backward()` call the engine's, which calls torch's, within the `with` block."""
    own, inside = Tensor.backward, False

    def backward(loss: Tensor, *arguments: Any, **keywords: Any) -> None:
        nonlocal inside
        if inside or loss.dim() or arguments or keywords.keys() - {"retain_graph"}:
            own(loss, *arguments, **keywords)  # type: ignore[no-untyped-call]
            return
        inside = True
        try:
            engine.backward(loss, retain_graph=bool(keywords.get("retain_graph")))
        finally:
            inside = False

    with patch.object(Tensor, "backward", backward):
        yield


class Rival:
    """A session of a rival: what scripts call of Atoll's session."""

    device = torch.device("cpu")

    def __init__(self, kind: str, place: Place, options: Sequence[str] = ()) -> None:
        """Make a worker's session; `options` are those of DistributedDataParallel that are switched on."""
        self.rank, self.world, self.is_main = place.rank, place.world, place.rank == 0
        self._kind, self._place, self._options = kind, place, dict.fromkeys(options, True)
        self._models: list[nn.Module] = []
        self._samplers: list[DistributedSampler[Any]] = []
        self._stack = contextlib.ExitStack()

    def prepare(self, model: nn.Module, optimizer: Any, **_: Any) -> tuple[nn.Module, Any]:
        self._way.wrap(model, optimizer if isinstance(optimizer, Sequence) else [optimizer])
        self._models.append(model)
        return model, optimizer

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._way.no_sync()

    def joined(self) -> contextlib.AbstractContextManager[None]:
        return self._way.joined()

    def whole(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return self._way.whole(model)

    def clip_grad_norm_(self, max_norm: float, model: nn.Module | None = None) -> Tensor:
        return self._way.clip(model or self._models[0], max_norm)

    def weight(self, samples: float, model: nn.Module | None = None) -> None:
        pass  # all workers count alike

    def register(self, **objects: Any) -> None:
        pass

    def barrier(self) -> None:
        dist.barrier()

    def reduce(self, value: Any, op: str = "mean", weight: float | None = None) -> Any:
        found = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value))
        dist.all_reduce(found)
        found = found / self.world if op == "mean" else found
        return found if isinstance(value, Tensor) else float(found)

    def sampler(self, dataset: Any, seed: int = 0) -> DistributedSampler[Any]:
        self._samplers.append(DistributedSampler(dataset, self.world, self.rank, seed=seed))
        return self._samplers[-1]

    def epoch_of(self, loader: Any) -> Iterator[Any]:
        yield from loader
        for sampler in self._samplers:
            sampler.set_epoch(sampler.epoch + 1)

    def __enter__(self) -> Rival:
        place = self._place
        launched = {"RANK": place.rank, "LOCAL_RANK": place.rank, "WORLD_SIZE": place.world}
        launched |= {"LOCAL_WORLD_SIZE": place.world, "MASTER_PORT": free_port()}
        variables = {name: str(value) for name, value in launched.items()} | {"MASTER_ADDR": "127.0.0.1"}
        self._stack.enter_context(patch.dict(os.environ, variables))
        dist.init_process_group(
            "gloo", store=place.store, rank=place.rank, world_size=place.world, timeout=_TIMEOUT
        )
        self._stack.callback(dist.destroy_process_group)
        for name in ("init_process_group", "destroy_process_group"):  # a script's own: the group is there
            self._stack.enter_context(patch.object(dist, name, lambda *_, **__: None))
        self._way: Way = _WAYS[self._kind](self._options)
        self._stack.callback(self._way.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
