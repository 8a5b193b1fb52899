"""Local parameters: the global ones, advanced by uncommitted steps with pending contributions.

For each pending iteration, in order, the optimizer steps with the mean of the contributions received so far.
Once all of an iteration's contributions are there, the result equals the applied step, bit for bit. Steps are
not scaled by the part of the batch that is there: whole steps learn better (docs/notes/peers.md).

Each chunk goes through all steps before the next one. That needs little memory, and while a chunk stays in
the processor's cache, each step reads only gradients from memory.

If one node is far behind, many iterations are pending, and between two writes only the newest change. A twin
of the optimizer then keeps the result of the earlier steps.

A late contribution comes before all later pending steps, and momentum carries it through them. It would move
the parameters at once as far as it would have moved them over many iterations. So it is blended in: 10 % at
once, then 10 % of the rest with each iteration that becomes pending. If nothing is pending, local parameters
equal the global ones.

Source: docs/peers.md, "What a step does".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.exchange.globalparameters import Contribution, GlobalParameters, PreparedStep, Whose
from atoll.tensors.shardoptimizer import Scratch, ShardOptimizer

_WORTH_KEEPING = 4  # least steps to keep in the twin: a copy of values and state costs about two steps
_STAYS = 0.9  # part still hidden after one more iteration: a momentum of 0.9 would show it at that pace
_SHOWN = 160  # iterations until all is shown: 0.9 ** 160 is below single precision's rounding


@dataclass(frozen=True)
class Pending:
    """The received contributions, in order of node, to an iteration that is not applied yet."""

    iteration: int
    contributions: Sequence[Contribution]


class Overlay:
    """Writes local parameters: global `parameters`, advanced by pending contributions.

    Only the thread that applies iterations may use it, since it steps the parameters and undoes the steps.
    """

    def __init__(self, parameters: GlobalParameters) -> None:
        self._parameters = parameters
        self._twin: ShardOptimizer | None = None
        self._since = 0  # global iteration from which the twin began
        self._replaced = 0  # count of the global parameters' replacements at that time
        self._kept: list[tuple[int, Whose]] = []  # iterations that the twin has stepped
        self._hidden: dict[int, Tensor] = {}  # by chunk: effect of late contributions that is not shown yet
        self._newest = 0  # newest pending iteration
        self._late = 0  # newest pending iteration when a contribution last came late

    @torch.no_grad()
    def write(self, into: Mapping[int, Tensor], waiting: Sequence[Pending]) -> None:
        """Write local parameters; the global ones and the optimizer's state are unchanged afterwards.

        Args:
            into: for each trainable chunk, a flat tensor for the result (HostMemory.buffer).
            waiting: the pending iterations in order; if empty, the global parameters are written.
        """
        parameters = self._parameters
        prepared = (parameters.prepare(each.iteration, each.contributions) for each in waiting)
        steps = [step for step in prepared if step is not None]
        have = self._made_of(steps)  # steps that the twin has made
        late = self._made_before(steps) if have == 0 else 0  # steps to make again, with a late contribution
        keep = max(have, late, _settled(steps))  # steps that the twin has made at the end
        begin, twin = have == 0, self._twin
        if keep and twin is None:
            twin = self._twin = parameters.twin()
        self._kept = []  # in case the write fails
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

    def _see_to_hidden(self, steps: Sequence[PreparedStep], late: bool) -> float:
        """Allocate or drop the memory of hidden effects; returns the part of them that stays hidden."""
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

    def _made_before(self, steps: Sequence[PreparedStep]) -> int:
        """Return the number of steps that the twin has made without a contribution that came late.

        0 if that is unknown, or if most contributions to an iteration came late. That happens on a slow
        network, where late nodes have not seen the steps that follow.
        """
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

    def _made_of(self, steps: Sequence[PreparedStep]) -> int:
        """Return the number of first steps that the twin has made from the present global parameters.

        0 if the twin has made other steps.
        """
        now, known = self._parameters.iteration, self._parameters.made
        if self._replaced != self._parameters.replaced:
            return 0
        applied = {iteration: whose for iteration, whose in self._kept if iteration < now}
        for iteration in range(self._since, now):
            if iteration not in known or known[iteration] != applied.get(iteration, ()):
                return 0
        rest = self._kept[len(applied) :]
        return len(rest) if rest == [(step.iteration, step.whose) for step in steps[: len(rest)]] else 0


def _settled(steps: Sequence[PreparedStep]) -> int:
    """Return the number of first steps that will not change soon, for the twin to keep.

    They end where the slowest node has contributed last. Nodes that are far behind do not count, although a
    contribution of one changes all steps.
    """
    last: dict[int, int] = {}
    for number, step in enumerate(steps, start=1):
        last.update({node: number for node, _ in step.whose})
    return min((number for number in last.values() if number >= _WORTH_KEEPING), default=0)
