"""A model that the members of a group hold together: each chunk lies in parts with all of them (symmetric
sharding), or whole with one (asymmetric).

Values that other members hold are fetched when they are used. Gradients are summed to the holders at the end
of a backward. Each member steps what it holds. Source: docs/memory.md, "Members".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import ChunkMap
from atoll.core.callstack import caller
from atoll.core.memory import Budgets, MemoryFigures
from atoll.memory import interrupts
from atoll.memory.agreeing import NO_EPOCHS, BatchEpochs, StepAgreement
from atoll.memory.answers import Answers
from atoll.memory.engine import in_order_of_use
from atoll.memory.fitted import Moving
from atoll.memory.foreign import SharedStates
from atoll.memory.former import Former
from atoll.memory.gradients import ModelGradients, TrainedChunk
from atoll.memory.grouping import ChunkGroups
from atoll.memory.home import Home, HostHome
from atoll.memory.members import Members
from atoll.memory.othergroups import Held, groups_of, held_by_groups
from atoll.memory.plainstate import States
from atoll.memory.sharedgradients import SharedGradients
from atoll.memory.sharing import Sharing
from atoll.memory.states import ChunkStates, chunk_states, group_numbers
from atoll.memory.stepping import state_dtypes
from atoll.moves.search import MemoryPlan
from atoll.tensors.clipping import check_max_norm
from atoll.tensors.modulehooks import LeftBehind
from atoll.tensors.torch_compat import is_loaded_itself

_LEFT = "the workers held this model between them, and this one has left them"
_ALL_HAVE_IT = "close(): all members to have the whole model"
_BEFORE = "read or save its values before that, inside the block of `with`"


class Sharded(Moving):
    """The model that `fit(..., members=...)` returns: on each member, its part of one model.

    Sync points are `reduce`, `clip_grad_norm_`, `all_finite`, `sync`, `close`, `optimizer.step()`, and
    `load_state_dict` of the model and the optimizer. All members make these calls, in the same order.
    Forwards, backwards and reads may differ. A script must write to parameters and gradients alike on all
    members; other members see what it wrote from the next sync point on.
    """

    gradients: SharedGradients

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        budgets: Budgets,
        plan: MemoryPlan,
        chunk_map: ChunkMap,
        members: Members,
        epochs: BatchEpochs = NO_EPOCHS,
    ) -> None:
        self._members = members
        super().__init__(model, optimizers, budgets, plan, chunk_map)
        self._own = [_stepped_by(each, self._trained) for each in optimizers]  # each optimizer's chunks
        self._agreements = [
            StepAgreement(
                self.sharing,
                self.gradients,
                own,
                optimizer,
                "optimizer" if len(optimizers) == 1 else f"optimizers[{number}]",
                epochs,
            )
            for number, (optimizer, own) in enumerate(zip(optimizers, self._own, strict=True))
        ]
        self._foreign = [chunk for chunk in self.engine.chunks if not self.sharing.holds_all(chunk)]
        self._handles.append(model.register_forward_pre_hook(LeftBehind(self._before_forward)))
        before, after = LeftBehind(self._before_load), LeftBehind(self._after_load)
        for module in model.modules():
            self._handles.append(module.register_load_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
            self._handles.append(module.register_load_state_dict_post_hook(after))  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            self._handles.append(
                optimizer.register_load_state_dict_pre_hook(
                    lambda *_: self.sync("optimizer.load_state_dict()")
                )
            )
            self._handles.append(
                optimizer.register_load_state_dict_post_hook(
                    lambda _: self.sync("optimizer.load_state_dict()")
                )
            )

    def _hold(self, chunks: Sequence[TrainedChunk]) -> None:
        assert self.plan.holding is not None
        grouping, groups = None, self.chunk_map.groups
        if self.plan.share is not None:
            features = [groups[each.chunk.group].feature for each in chunks]
            grouping = ChunkGroups(self.plan.share, features)
        self.sharing = Sharing(
            self._members,
            [each.chunk for each in chunks],
            [each.words for each in chunks],
            self.plan.holding,
            self._store,
            self.plan.staging_bytes,
            self._moved,
            grouping,
        )

    def _gradients_of(
        self, trained: Sequence[TrainedChunk], beside: Mapping[int, nn.Parameter]
    ) -> ModelGradients:
        sharing, came = self.sharing, self._gradient_came
        return SharedGradients(trained, sharing, self._steps, came, self._room, beside)

    def _home_of(self, states: Mapping[int, ChunkStates]) -> Home:
        return HostHome(self.sharing, self._steps, states, self.sharing)

    def _states_of(self, optimizer: torch.optim.Optimizer) -> dict[int, ChunkStates]:
        own = [each for each in self._trained if self.sharing.holds_any(each.chunk.id)]
        parts = {each.chunk.id: self.sharing.part(each.chunk.id) for each in own}
        planned = partial(state_dtypes, optimizer)
        return chunk_states(
            optimizer, own, self.sharing.own, master=self.budgets.master, parts=parts, planned=planned
        )

    def _shown(
        self, optimizer: torch.optim.Optimizer, states: Mapping[int, ChunkStates]
    ) -> dict[int, States]:
        groups, sharing = group_numbers(optimizer), self.sharing
        return {
            each.chunk.id: SharedStates(
                each, sharing, sharing.cache, groups[id(each.parameters[0])], states.get(each.chunk.id)
            )
            for each in _stepped_by(optimizer, self._trained)
            if not sharing.holds_all(each.chunk.id)
        }

    def _ready(self, states: Mapping[int, ChunkStates]) -> None:
        self._members.serve(Answers(self.sharing, self._steps, self.gradients, states).read)
        self.sharing.passed()  # members that have asked before are answered now

    # Sync points

    def reduce(self, weight: float = 1.0, samples: float = 0.0) -> float:
        """Reduce gradients to the members' mean by `weight`, after a backward; return the sum of `samples`.

        See `SharedGradients.reduce`.
        """
        return self.gradients.reduce(weight, samples)[0]

    def all_finite(self, parameters: Collection[nn.Parameter] | None = None) -> bool:
        """True if all reduced gradients of `parameters` are finite; None: of all parameters."""
        return self.gradients.all_finite(parameters)

    def nonfinite(self) -> str:
        """Return a parameter whose gradient this member found not finite in `all_finite`; else ""."""
        return self.gradients.nonfinite()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        check_max_norm(max_norm, norm_type)
        self.gradients.check_summed()
        return super().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        """The groups of each parameter that groups own (`atoll.memory.over`), by name."""
        return groups_of(self.sharing, list(self.engine.chunks.values()))

    @property
    def choices(self) -> list[tuple[str, str, str]]:
        found: dict[str, list[str]] = {}
        for name, groups in self.groups.items():
            found.setdefault(str(groups), []).append(name)
        said = "atoll.memory.over was given {} parameters, {!r} among them"
        mine = [("memory.over", groups, said.format(len(names), names[0])) for groups, names in found.items()]
        return [*super().choices, *mine]

    def held_by_groups(self) -> Held:
        """Return the other groups' values and states, read when they are used, until the next sync point."""
        stepped = set() if self._stepping is None else {each.chunk.id for each in self._trained}
        return held_by_groups(self.sharing, list(self.engine.chunks.values()), stepped)

    def sync(self, what: str) -> None:
        """Meet all members. From here on each sees what the others' scripts have written before."""
        self.engine.write_back()
        self.engine.out_of_date(self._foreign)
        self.sharing.points.agree([], what)
        self.gradients.synced()
        self.sharing.passed(published=True)
        self.engine.refresh(self._foreign)

    def _before_step(self, chunks: Sequence[int], optimizer: int = 0) -> Sequence[int]:
        own = self._own[optimizer]
        self._owners.check()
        self.gradients.check_summed()
        self.engine.write_back()
        stepped = [each.chunk.id for each in own if any(self.gradients.present(each.chunk.id))]
        self.engine.out_of_date(stepped)
        self._stepped = stepped
        # After this agreement no member reads the values before this step, so they may be stepped.
        self._agreements[optimizer].agree()
        self._count_writes(own)
        return in_order_of_use(self.engine, chunks)

    def _count_writes(self, stepped: Sequence[TrainedChunk]) -> None:
        """Count, for autograd, a write into each parameter of these chunks that only other members step."""
        torch.autograd.graph.increment_version(
            [
                parameter
                for each in stepped
                if not self.sharing.holds_any(each.chunk.id)
                for parameter, here in zip(
                    each.parameters, self.gradients.present(each.chunk.id), strict=True
                )
                if here
            ]
        )

    def _after_step(self, optimizer: int = 0) -> None:
        # First, as others may read these gradients once this member has passed the step.
        self.gradients.step_made([each.chunk.id for each in self._own[optimizer]])
        self.sharing.passed(self._stepped, stepped=True)
        super()._after_step(optimizer)

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        if self.sharing.is_written or any(map(self.engine.has_edits, self.engine.chunks)):
            self.sync("a forward after the script wrote to parameters")

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        if is_loaded_itself(module, caller()):
            self.sync("load_state_dict()")
            self.sharing.keeps_originals = False  # all members write the whole model now, and none reads it

    def _after_load(self, module: nn.Module, _keys: Any) -> None:
        if is_loaded_itself(module, caller()):
            self.sharing.keeps_originals = True
            self.sync("load_state_dict()")

    def stats(self) -> MemoryFigures:
        figures = super().stats()
        staging = self.sharing.stages.arena
        return msgspec.structs.replace(
            figures,
            host_peak=figures.host_peak + (0 if staging is None else staging.peak),
        )

    # The end

    @interrupts.uninterrupted
    def close(self) -> None:
        """Give every member the whole model and its optimizer's whole state, as plain ones. Gradients are
        dropped.

        All members call it. A member that ends by itself calls `abandon`.
        """
        if self.engine.is_closed:
            return
        self.sync("close()")
        super().close()

    @interrupts.uninterrupted
    def give_back(self) -> None:
        """End the session: `close` if this member has room for the whole model and its optimizer's state,
        else drop both.

        All members call it, whatever each has room for.
        """
        if self.engine.is_closed:
            return
        self._steps.wait_over()  # the optimizer's state exists once the first step has ended
        self.sync("the end of the session")
        why = self.lacks_room()
        if not why:
            super().close()
            return
        self.sharing.points.agree([], _ALL_HAVE_IT)
        self.let_go(f"{_LEFT} without the whole of it: {why}; {_BEFORE}")

    @interrupts.uninterrupted
    def leave(self, optimizers: Sequence[torch.optim.Optimizer]) -> Former | None:
        self._steps.wait_all()
        if self._stepping is not None:
            self._stepping.take_over()  # before any member reads what another one's states are
        self.sync("session.prepare")
        return super().leave(optimizers)

    def _end_left(self) -> None:
        self.gradients.left()
        try:
            self.sharing.points.agree([], "session.prepare: all members to have the changed model")
        finally:
            self.sharing.close()
            super()._end_left()

    def _plain_bytes(self) -> int:
        there = 0 if self._there is None else self._aside - self._there.nbytes  # without gradients
        values = sum(each.chunk.extent * each.dtype.itemsize for each in self.engine.chunks.values())
        return values + there + (0 if self._stepping is None else self._stepping.state_bytes())

    def _end(self) -> None:
        try:
            self.sharing.points.agree([], _ALL_HAVE_IT)
        finally:
            self.sharing.close()
            super()._end()

    def abandon(self) -> None:
        """End this member's threads and its part in the group, alone, after an error or if nobody wants the
        whole model.

        Its parameters cannot be used any more.
        """
        self.let_go(f"{_LEFT}; {_BEFORE}")

    def _part(self) -> None:
        self.sharing.close()


def _stepped_by(optimizer: torch.optim.Optimizer, trained: Sequence[TrainedChunk]) -> list[TrainedChunk]:
    """Return those of the trained chunks that an optimizer steps."""
    groups = group_numbers(optimizer)
    return [each for each in trained if id(each.parameters[0]) in groups]
