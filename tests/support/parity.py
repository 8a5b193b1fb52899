"""Train some steps by Atoll's session and by plain PyTorch, and find where the two differ.

`train_plain` is the reference: one process computes each worker's share in turn, takes the mean of the
gradients weighted by samples, and steps a plain optimizer. `train_atoll` is the code of a user. `differences`
compares the two after every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import atoll
from atoll.core.config import Chunks, Config, Groups, LinkOptions, Run, Sync, Transport
from atoll.core.errors import DeadlineError, RunError
from atoll.tensors.torch_compat import uncompiled
from atoll.train.api.place import Place
from support.models import MODELS, TinyModel
from support.served import served_worker

STEPS = 20
ALONE = 4  # steps that workers make before they are in groups: the probe, and one that does not count
MAX_NORM = 0.5  # below the norm of most steps' gradients, above that of some
Array = NDArray[Any]
OptimizerMaker = Callable[[nn.Module], "tuple[Optimizer, LRScheduler | None]"]


def make_sgd(model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), None


def make_adamw(model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    """Matrices decay, the rest does not and learns faster; warm-up, then decline."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.95**step)


OPTIMIZERS: dict[str, OptimizerMaker] = {"sgd": make_sgd, "adamw": make_adamw}


@dataclass(frozen=True)
class Case:
    """One line of the parity table."""

    model: str
    optimizer: str = "sgd"
    workers: int = 1
    accumulation: int = 1  # micro-batches to a step
    clip: bool = False
    dtype: torch.dtype = torch.float64
    chunk_size: str = "auto"
    steps: int = STEPS

    def __str__(self) -> str:
        clip = "clipped" if self.clip else "unclipped"
        dtype = str(self.dtype).removeprefix("torch.")
        run = f"{self.workers}w-x{self.accumulation}-{clip}"
        return f"{self.model}-{self.optimizer}-{dtype}-{run}-{self.chunk_size}"

    @property
    def tiny(self) -> TinyModel:
        return MODELS[self.model]


@dataclass
class Trajectory:
    """What every step left behind. For plain PyTorch, `losses` and `buffers` hold all shares' in turn."""

    losses: list[list[float]] = field(default_factory=list)  # [step][share]
    parameters: list[dict[str, Array]] = field(default_factory=list)  # [step][name]
    buffers: list[list[dict[str, Array]]] = field(default_factory=list)  # [step][share][name]

    def add(self, loss: float, model: nn.Module) -> None:
        """Note a worker's step."""
        self.losses.append([loss])
        self.parameters.append(arrays(model.named_parameters()))
        self.buffers.append([arrays(model.named_buffers())])


def arrays(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Array]:
    """Copies of named tensors."""
    return {name: tensor.detach().clone().numpy() for name, tensor in tensors}


def train_atoll(place: Place, case: Case, groups: int | None = None) -> Trajectory:
    """The case as a user writes it, on one of its workers; with `groups`, under strategy `hierarchical`."""
    config = Config(
        run=Run(strategy="ring" if groups is None else "hierarchical"),
        chunks=Chunks(size=case.chunk_size),
        sync=Sync(timeout="60s"),
        groups=Groups(count=groups or 0),
    )
    with atoll.join(config, place=place) as session:
        return _train(session, place.rank, case)


def train_served(
    place: Place,
    case: Case,
    address: str,
    lazy: bool = False,
    sites: Sequence[str] = (),
    transport: Transport = "tcp",
) -> Trajectory:
    """The same with a parameter server, whose hub is at `address`; `sites` has the site of each rank."""
    config = Config(
        run=Run(strategy="server"),
        chunks=Chunks(size=case.chunk_size),
        sync=Sync(timeout="60s", lazy=lazy),
        link=LinkOptions(transport=transport),
    )
    site = sites[place.rank] if sites else ""
    with served_worker(address, place.rank, site=site), atoll.join(config) as session:
        return _train(session, place.rank, case)


def train_grouped(
    place: Place, case: Case, address: str, uplink: str = "leader", transport: Transport = "tcp"
) -> Trajectory:
    """The same in groups, between which it is `bsp`: after `ALONE` steps the hub has made them."""
    config = Config(
        run=Run(strategy="ps-hra"),
        chunks=Chunks(size=case.chunk_size),
        sync=Sync(timeout="60s", uplink=uplink, consistency="bsp"),  # type: ignore[arg-type]
        groups=Groups(probe=ALONE - 1),
        link=LinkOptions(transport=transport),
    )
    with served_worker(address, place.rank), atoll.join(config) as session:
        seen = _train(session, place.rank, case, await_groups)
        assert session._runtime.regrouping is not None
        if session._runtime.regrouping.contributor == place.rank:
            raise RunError(f"worker {place.rank} has not moved to a group")
        return seen


def train_peers(place: Place, case: Case, stale_max: int = 0, nodes: int = 0) -> Trajectory:
    """The same on nodes without a server, which meet in the place's store: `nodes` of several devices (0: as
    many as there are workers)."""
    config = Config(
        run=Run(strategy="peers"),
        chunks=Chunks(size=case.chunk_size),
        sync=Sync(timeout="60s", stale_max=stale_max),
        groups=Groups(count=nodes),
    )
    with atoll.join(config, place=place) as session:
        return _train(session, place.rank, case)


def await_groups(session: atoll.Session, step: int) -> None:
    """Return when the hub has made groups, where that is due."""
    if step == ALONE:
        until = time.monotonic() + 60
        regrouping = session._runtime.regrouping
        assert regrouping is not None
        while not regrouping.known():
            if time.monotonic() > until:
                raise DeadlineError("waited 60 s for the hub to make groups")
            time.sleep(0.002)


def _train(
    session: atoll.Session,
    rank: int,
    case: Case,
    before: Callable[[atoll.Session, int], None] = lambda _session, _step: None,
) -> Trajectory:
    tiny, seen = case.tiny, Trajectory()
    model = tiny.build(case.dtype)
    optimizer, scheduler = OPTIMIZERS[case.optimizer](model)
    model, optimizer = session.prepare(model, optimizer)
    for step in range(case.steps):
        before(session, step)
        loss = 0.0
        for micro in range(case.accumulation):
            last = micro == case.accumulation - 1
            with nullcontext() if last else session.no_sync():
                batch = tiny.batch(rank, step, micro, dtype=case.dtype)
                if tiny.kind == "tokens":  # the batch may be either dimension of (samples, CONTEXT)
                    session.weight(batch.samples)
                part = tiny.loss(model, batch)
                torch.autograd.backward(part / case.accumulation)
                loss += part.item()
        if case.clip:
            session.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        model.state_dict()  # with sync.lazy, new parameters are there from the first use on
        seen.add(loss, model)
    return seen


def own_buffers(_step: int, share: int) -> int:
    """A `buffers_of` for `train_plain`: each worker keeps its own buffers until the workers meet."""
    return share


def train_plain(
    case: Case,
    *,
    model: nn.Module | None = None,
    set_to_none: bool = True,
    edit: Callable[[nn.Module], None] | None = None,
    buffers_of: Callable[[int, int], int] = lambda _step, _share: 0,
) -> Trajectory:
    """Train the reference by plain PyTorch in this process.

    Args:
        case: the model, optimizer and data.
        model: replaces the case's own model (a compiled one, say).
        set_to_none: how the script zeroes gradients.
        edit: may change the gradients before each step.
        buffers_of: after each step, `share` takes the buffers of share `buffers_of(step, share)`. In a ring
            all take those of share 0.
    """
    tiny, seen = case.tiny, Trajectory()
    model = tiny.build(case.dtype) if model is None else model
    optimizer, scheduler = OPTIMIZERS[case.optimizer](model)
    parameters = list(model.parameters())
    buffers = [_clones(model) for _ in range(case.workers)]
    kept: list[Tensor | None] = [None for _ in parameters]  # what zero_grad leaves for the next step
    for step in range(case.steps):
        losses: list[float] = []
        gradients: list[list[Tensor | None]] = []
        samples: list[int] = []
        for share in range(case.workers):
            _put(model, buffers[share])
            for parameter, zeroed in zip(parameters, kept, strict=True):
                parameter.grad = None if zeroed is None else zeroed.clone()
            loss, count = _backward(case, model, share, step)
            buffers[share] = _clones(model)
            losses.append(loss)
            samples.append(count)
            gradients.append([p.grad for p in parameters])
        buffers = [buffers[buffers_of(step, share)] for share in range(case.workers)]
        for index, parameter in enumerate(parameters):
            parameter.grad = _weighted_mean([g[index] for g in gradients], samples)
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if edit is not None:
            edit(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        kept = [p.grad for p in parameters]
        if scheduler is not None:
            scheduler.step()
        seen.losses.append(losses)
        seen.parameters.append(arrays(uncompiled(model).named_parameters()))
        seen.buffers.append([arrays(held.items()) for held in buffers])
    return seen


def _backward(case: Case, model: nn.Module, share: int, step: int) -> tuple[float, int]:
    """Gradients of one share's step into p.grad; its loss and its samples."""
    loss, samples = 0.0, 0
    for micro in range(case.accumulation):
        batch = case.tiny.batch(share, step, micro, dtype=case.dtype)
        part = case.tiny.loss(model, batch)
        torch.autograd.backward(part / case.accumulation)
        loss += part.item()
        samples += batch.samples
    return loss, samples


def _weighted_mean(gradients: list[Tensor | None], samples: list[int]) -> Tensor | None:
    """The mean by samples, a share without a gradient counting as zero; None if no share has one."""
    if len(gradients) == 1:
        return gradients[0]
    total = sum(samples)
    parts = [g * (n / total) for g, n in zip(gradients, samples, strict=True) if g is not None]
    return torch.stack(parts).sum(0) if parts else None


def _clones(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _put(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def differences(case: Case, plain: Trajectory, workers: list[Trajectory], tolerance: float) -> list[str]:
    """One line for each value of the first step at which the workers and plain PyTorch differ by more
    than `tolerance` (0: in any bit): the case, the step, the worker, the name and the difference.
    """
    for step in range(case.steps):
        found: list[str] = []
        for rank, seen in enumerate(workers):
            pairs: list[tuple[str, Array, Array]] = [
                ("loss", np.array(plain.losses[step][rank]), np.array(seen.losses[step][0]))
            ]
            pairs += _pair(plain.parameters[step], seen.parameters[step])
            pairs += _pair(plain.buffers[step][rank], seen.buffers[step][0])
            for name, expected, got in pairs:
                worst = _difference(expected, got)
                if not worst <= tolerance:  # NaN is a difference too
                    found.append(f"{case}: step {step}, worker {rank}, {name}: differs by {worst:.3g}")
        if found:
            return found
    return []


def _pair(expected: dict[str, Array], got: dict[str, Array]) -> list[tuple[str, Array, Array]]:
    if list(expected) != list(got):
        raise AssertionError(f"names differ: {sorted(set(expected) ^ set(got)) or 'in their order'}")
    return [(name, expected[name], got[name]) for name in expected]


def _difference(expected: Array, got: Array) -> float:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if np.array_equal(expected, got):
        return 0.0
    return float(np.abs(expected.astype(np.float64) - got.astype(np.float64)).max(initial=0.0))
