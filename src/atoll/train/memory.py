"""A prepared model that lies in chunks over tiers of memory (`memory/fit.py`), for a worker that is alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from atoll.chunks import ChunkMap, ParameterSpec, lay_out
from atoll.core.config import Config
from atoll.core.errors import UserError
from atoll.core.memory import Memory
from atoll.core.units import format_bytes
from atoll.memory.fit import Fitted
from atoll.tensors.binding import BoundChunk
from atoll.tensors.optimizer import ParameterOptimizer
from atoll.train.reducer import Reducer
from atoll.train.strategies import Alone, Stepper, Strategy, Training


def memory_for(config: Config, given: Memory | None, strategy: Strategy, world: int) -> Memory | None:
    """What a model may take: as `given`, else as `[memory]` says; None: there are no budgets.

    Raises UserError where the worker is not alone: chunks are not sharded over members yet.
    """
    if given is None and not config.memory.is_given:
        return None
    if not isinstance(strategy, Alone) or world > 1:
        what = "the table [memory]" if given is None else "session.prepare(..., memory=...)"
        raise UserError(
            f"{what} is for a worker that is alone, and this one is of {world} by strategy "
            f"{config.run.strategy!r}: start the script by itself (python train.py), or leave the budgets out"
        )
    if given is not None:
        given.budgets()
        return given
    config.memory.budgets("memory.")
    return config.memory


class AloneInTiers(Alone):
    """The strategy of such a worker: nothing is reduced, and the optimizer's steps are `fit`'s to make."""

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        reducer = Reducer(training.chunks, training.calls)
        return reducer, _TieredOptimizer(training.optimizer, training.hooks)


class HeldChunk(BoundChunk):
    """Parameters that lie wherever `fit` has them, which looks after them itself."""

    def check(self) -> None:
        """There is no one place where they must be."""

    @property
    def has_moved(self) -> bool:
        return False


class _TieredOptimizer(ParameterOptimizer):
    """A step that is not accepted finds no gradients: `fit` steps by those, not by the param groups."""

    def _leave_out(self) -> None:
        for group in self._group_parameters:
            for parameter in group:
                parameter.grad = None


def held_chunks(
    specs: Sequence[ParameterSpec], parameters: Mapping[str, nn.Parameter]
) -> tuple[ChunkMap, list[BoundChunk]]:
    """The parameters in chunks as anywhere else, for whoever goes through them; their memory is as it was."""
    chunk_map, names = lay_out(specs), list(parameters)
    chunks: list[BoundChunk] = []
    for chunk in chunk_map.chunks:
        members = [names[slot.parameter] for slot in chunk.slots]
        chunks.append(HeldChunk(chunk, members, [parameters[name] for name in members]))
    return chunk_map, chunks


def describe(fitted: Fitted) -> tuple[str, str, str]:
    """What was decided ("memory"), as `device 1.0 MiB: 16 blocks of 64.0 KiB, everything fits`, and why."""
    plan = fitted.plan
    how = "everything fits" if plan.fits else f"{plan.cache_blocks} of them a cache"
    choice = f"{fitted.budgets.describe()}: {plan.blocks} blocks of {format_bytes(plan.chunk_bytes)}, {how}"
    return "memory", choice, plan.reason
