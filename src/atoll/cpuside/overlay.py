"""Local parameters: the global ones, and over them what the contributions that are pending would make of
them, uncommitted.

For each pending iteration in order comes the optimizer's step with the mean of the contributions that are
there. When all of an iteration's are there, the result is what applying will give, bit for bit.

Each step could be multiplied by its contributions' part of a full batch. A mean over those who are there
stands for the mean over all, though, and whole steps learn better (docs/notes/peers.md).

Chunks are done one by one, each through all the steps: so little memory is needed, and of a chunk that fits
into the processor's cache it is only the gradients that each step reads from memory.

Where a node is far behind the others, many iterations are pending, and from one writing to the next only the
newest change. A twin of the optimizer keeps what the steps before those have made then.

What such a node contributes lies under all the steps that follow, and an optimizer with momentum carries it
through them: at once it would move the parameters as far as in its turn by and by. So it is shown by and by:
of what late contributions have made and what is not shown yet, a tenth at once, and a tenth of the rest with
each iteration that becomes pending. Where nothing is pending, local parameters are the global ones, which
know nothing of this.

Source: docs/peers.md, "What a step does".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.exchange.globalparameters import Contribution, GlobalParameters, Step, Whose
from atoll.tensors.shardoptimizer import Scratch, ShardOptimizer

_WORTH_KEEPING = 4  # steps: to copy values and state costs about two
_STAYS = 0.9  # of what is not shown, with each iteration more: so a momentum of 0.9 would show it in its turn
_SHOWN = 160  # iterations after which nothing is left of it: 0.9 ** 160 is below single precision's rounding


@dataclass(frozen=True)
class Pending:
    """The contributions that are there of an iteration that is not applied yet, in order of node."""

    iteration: int
    contributions: Sequence[Contribution]


class Overlay:
    """Writes local parameters: `parameters`, and over them what is pending. To be used by the thread that
    applies, for it may step them and take that back."""

    def __init__(self, parameters: GlobalParameters) -> None:
        self._parameters = parameters
        self._twin: ShardOptimizer | None = None
        self._since = self._replaced = 0  # the global iteration that the twin began with
        self._kept: list[tuple[int, Whose]] = []  # iterations that it has stepped from there
        self._hidden: dict[int, Tensor] = {}  # by chunk: what late contributions have made, and is not shown
        self._newest = self._late = 0  # iterations: the newest pending one, and that when one last came late

    @torch.no_grad()
    def write(self, into: Mapping[int, Tensor], waiting: Sequence[Pending]) -> None:
        """Write every trainable chunk's local parameters into `into` (see HostMemory.buffer). `waiting`: the
        pending iterations in order; with none, what is written are the global parameters. Those, and the
        optimizer's state, are afterwards what they were."""
        parameters = self._parameters
        prepared = (parameters.prepare(each.iteration, each.contributions) for each in waiting)
        steps = [step for step in prepared if step is not None]
        have = self._made_of(steps)  # steps that the twin has made
        late = self._made_before(steps) if have == 0 else 0  # and those that are to be made again
        keep = max(have, late, _settled(steps))  # and those that it is to have
        begin, twin = have == 0, self._twin
        if keep and twin is None:
            twin = self._twin = parameters.twin()
        self._kept = []  # nothing is known of it if this fails
        stays = self._see_to_hidden(steps, late > 0)

        def write(chunk: int, scratch: Scratch) -> None:
            optimizer = parameters.optimizer
            if not steps or not optimizer.trains(chunk):
                into[chunk].copy_(parameters.values(chunk))
                return
            hidden = self._hidden.get(chunk)
            if hidden is not None:
                hidden.mul_(stays)
            if keep and twin is not None:
                made, optimizer = twin.values(chunk), twin
                if hidden is not None and late:
                    old = scratch.part("values", made.numel(), made.dtype).copy_(made)
                if begin:
                    twin.copy(chunk, parameters.optimizer)
                for number, step in enumerate(steps[have:keep], start=have + 1):
                    parameters.step_chunk(chunk, step, scratch, twin)
                    if hidden is not None and number == late:
                        hidden.add_(torch.sub(made, old, out=old), alpha=_STAYS)
            if keep == len(steps):
                into[chunk].copy_(optimizer.values(chunk))
            else:
                with optimizer.undone(chunk, scratch):
                    for step in steps[keep:]:
                        parameters.step_chunk(chunk, step, scratch, optimizer)
                    into[chunk].copy_(optimizer.values(chunk))
            if hidden is not None:
                into[chunk].sub_(hidden)

        parameters.for_each_chunk(write)
        self._since, self._replaced = parameters.iteration, parameters.replaced
        self._kept = [(step.iteration, step.whose) for step in steps[:keep]]

    def _see_to_hidden(self, steps: Sequence[Step], late: bool) -> float:
        """Have memory for what is not shown, while there is any of it; which part of it stays so."""
        before, self._newest = self._newest, steps[-1].iteration if steps else self._parameters.iteration
        if late:
            self._late = self._newest
            for chunk in self._parameters.chunks:
                if self._parameters.optimizer.trains(chunk) and chunk not in self._hidden:
                    self._hidden[chunk] = torch.zeros_like(self._parameters.values(chunk))
        replaced = self._replaced != self._parameters.replaced
        if not steps or replaced or self._newest >= self._late + _SHOWN:
            self._hidden.clear()
        return _STAYS ** max(0, self._newest - before)

    def _made_before(self, steps: Sequence[Step]) -> int:
        """How many of these steps lead to where the twin has made them without what came late since; 0 where
        that is not known, or where most of an iteration's contributions came since: so it is on a slow
        network, where those who are late have not seen what they come under."""
        if not self._kept or self._replaced != self._parameters.replaced:
            return 0
        here = self._parameters.made | {step.iteration: step.whose for step in steps}
        for iteration, whose in self._kept:
            if here.get(iteration, ()) != whose:
                if 2 * len(whose) <= len(here.get(iteration, ())):
                    return 0
                break
        last, _ = self._kept[-1]
        return next((number for number, step in enumerate(steps, 1) if step.iteration == last), 0)

    def _made_of(self, steps: Sequence[Step]) -> int:
        """How many of these steps, from the first on, the twin has made of the global parameters as they are;
        0 where it has made anything else."""
        now, known = self._parameters.iteration, self._parameters.made
        if self._replaced != self._parameters.replaced:
            return 0
        applied = {iteration: whose for iteration, whose in self._kept if iteration < now}
        for iteration in range(self._since, now):
            if iteration not in known or known[iteration] != applied.get(iteration, ()):
                return 0
        rest = self._kept[len(applied) :]
        return len(rest) if rest == [(step.iteration, step.whose) for step in steps[: len(rest)]] else 0


def _settled(steps: Sequence[Step]) -> int:
    """How many of these steps, from the first on, will be the same for a while: up to where each node has
    contributed that is not far behind. (When one that is contributes, all are made again.)"""
    last: dict[int, int] = {}
    for number, step in enumerate(steps, start=1):
        last.update({node: number for node, _ in step.whose})
    return min((number for number in last.values() if number >= _WORTH_KEEPING), default=0)
