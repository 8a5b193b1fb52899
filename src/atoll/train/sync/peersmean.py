"""The mean of the nodes' gradients in `p.grad`, for a script that uses gradients after backward (`peers`).

A node's own gradient stands in `p.grad`, unread, until the script uses one. Then all nodes meet: each brings
its gradients, and makes the same mean of them, by the rule by which the CPU sides make theirs. What the
script makes of it is what the node contributes in `optimizer.step()`. A node whose script uses no gradient
comes to the meeting from its next call, and a script that uses none on any node costs no meeting. Only where
`sync.stale_max = 0`: else the nodes are at different iterations. Source: docs/peers.md, "What a script finds
in `p.grad`".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from atoll.axes.choices import Choices
from atoll.axes.needs import check, error_of
from atoll.chunks import Chunk
from atoll.core.decoding import from_msgpack
from atoll.core.errors import GivenUpError
from atoll.core.scriptline import at_script_line, waiting_line
from atoll.core.stands import USE, USE_OF
from atoll.core.weighing import KNOWN, are_certain, beyond, weight_of
from atoll.memory.untilread import UntilRead
from atoll.tensors.binding import BoundChunk
from atoll.tensors.finite import is_finite
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.members.meetings import bytes_of
from atoll.train.members.workers import Workers
from atoll.train.sync.peersparameters import DeviceParameters, LocalParameters, Slots
from atoll.train.sync.peersscale import GradientScale
from atoll.train.sync.peersworker import NodeWorker
from atoll.wire.device import Applied, Clip

_STEPPED = ", after its step"  # end of a meeting's purpose


class Brought(msgspec.Struct, frozen=True):
    """A node's description of the gradients that it brings to a mean.

    Attributes:
        iteration: the iteration that they are of.
        reductions: how many backwards of it have ended, without those under no_sync.
        weight: their weight in the mean; samples, basis, alike: as in a contribution.
        scale: the scale of a GradScaler that is in them.
        present: for each trainable chunk one byte a slot: whether it has a gradient.
        uses: True if the node's script uses a gradient; False if it comes from another call.
        stepped: the script has stepped with them.
        is_whole: False if gradients have come since that no reduction has seen, under no_sync.
        line: the script's line.
    """

    iteration: int
    reductions: int = 0
    weight: float = 0.0
    samples: float = 0.0
    basis: str = KNOWN
    alike: float = 1.0
    scale: float = 1.0
    present: tuple[bytes, ...] = ()
    uses: bool = False
    stepped: bool = False
    is_whole: bool = True
    line: str = ""

    def is_of(self, wanted: Brought) -> bool:
        """True if these gradients, where there are any, belong into one mean with those that are wanted."""
        return self.iteration == wanted.iteration and (self.stepped or not wanted.stepped)

    def __str__(self) -> str:
        backwards = f"{self.reductions} backward{'s' if self.reductions != 1 else ''}"
        more = "" if self.is_whole else " and more under no_sync"
        after = "optimizer.step()" if self.stepped else f"{backwards}{more}"
        way = "uses it" if self.uses else "does not use it, and is"
        return at_script_line(f"{way} after {after} of step {self.iteration}", self.line)


class NodesMean:
    """The meetings of all nodes for means of their gradients."""

    def __init__(self, workers: Workers, node: NodeWorker, chunks: Sequence[BoundChunk]) -> None:
        self._workers, self._node, self._chunks = workers, node, chunks
        self.parameters = [parameter for bound in chunks for parameter in bound.parameters]
        self._made: tuple[int, set[int]] = (-1, set())  # the latest applied iteration, and nodes that counted
        node.on(Applied, self._applied)

    def _applied(self, message: Applied) -> None:
        # Where the step is left out, gradients that weigh nothing may be why:
        counted = {
            part.node for part in message.parts if part.weight > 0 or (message.skipped and part.samples)
        }
        self._made = message.iteration, counted

    @property
    def is_away(self) -> bool:
        """True if the others go on without this node, as far as it knows."""
        node = self._node
        return node.late or node.left_out or node.is_out or node.returned is not None

    def take(self) -> None:
        """Hear what has come from the CPU side. A call of all of the node's devices."""
        self._node.take(USE)

    def is_asked(self, own: Brought) -> bool:
        """True if another node's script waits, in the meeting that comes next here, for `own` gradients."""
        asked = self._node.uses.asked
        if asked.number != self._node.next_meeting or not asked.what:
            return False
        what = asked.what.removesuffix(_STEPPED)
        word = what.rpartition(" ")[2]
        iteration = int(word) if word.isdecimal() else -1
        # After the step: this node's script comes by itself, or has gone on (told by the meeting).
        return own.iteration > iteration if what != asked.what else own.iteration == iteration

    def meet(self, own: Brought) -> dict[int, Brought]:
        """Return what nodes bring to the mean that a script wants, by node, without those that are at another
        iteration; nothing if who wanted it was left out. `own` counts where it is said by the leader.

        Raises UserError on all nodes if their gradients are not of one backward.
        """
        said = self._gather(msgspec.msgpack.encode(own), own)
        nodes = {node: from_msgpack(each, Brought) for node, each in said.items()}
        return self._paired(nodes)

    def takes_part(self, nodes: Mapping[int, Brought]) -> bool:
        """True if this node's gradients belong into the mean of what these `nodes` bring."""
        return self._node.node in nodes

    def of(
        self, own: Brought, nodes: Mapping[int, Brought], flats: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return each chunk's mean, (extent,), in host memory; empty if no node's gradients weigh anything.

        Args:
            nodes: what they bring, as `meet` has returned it.
            flats: this node's gradients by chunk, (extent,), with zeros for missing ones; of the leader.

        Raises UserError on all nodes where one lacks gradients that others have.
        """
        excess = beyond(nodes)
        counted = {node: each for node, each in nodes.items() if each.weight > 0 and node not in excess}
        scale = nodes.get(self._node.node, own).scale
        while counted:
            self._check_present(counted)
            certain = are_certain(counted.values())
            weights = {node: weight_of(each, certain) for node, each in counted.items()}
            total = sum(weights.values())
            factors = {
                node: weights[node] / total * (scale / each.scale) for node, each in sorted(counted.items())
            }
            means = self._try(own, factors, flats)
            if not isinstance(means, set):
                return means
            counted = {node: each for node, each in counted.items() if node in means}
        return {}

    def _try(
        self, own: Brought, factors: Mapping[int, float], flats: Mapping[int, Tensor]
    ) -> dict[int, Tensor] | set[int]:
        """Return the sums of gradients times `factors`, in order of node. If a node was left out meanwhile,
        return the nodes that are here."""
        brings = self._node.node in factors and bool(flats)
        sums: dict[int, Tensor] = {}
        for bound in self._chunks:
            chunk = bound.chunk
            parts = self._gather(bytes_of(flats[chunk.id]) if brings else b"", own)
            if not factors.keys() <= parts.keys():
                return set(parts)
            sums[chunk.id] = _sum(chunk, [(factor, parts[node]) for node, factor in factors.items()])
        return sums

    def _gather(self, payload: bytes, own: Brought) -> dict[int, bytes]:
        """Return the bytes of each node's leader, by node, in order."""
        used = f"{USE_OF} {own.iteration}{_STEPPED if own.stepped else ''}"
        what = used if own.uses else f"{USE} on another node"
        found = self._workers.gather_bytes(payload if self._node.leads else b"", what)
        introduction = self._node.introduction
        by_rank = zip(self._workers.ranks, found, strict=True)
        leaders = ((introduction.node_of(rank), rank, part) for rank, part in by_rank)
        return {node: part for node, rank, part in leaders if rank == introduction.workers_of(node)[0]}

    def _paired(self, nodes: Mapping[int, Brought]) -> dict[int, Brought]:
        """Return what belongs into the mean that a script wants.

        Gradients that weigh nothing, as those of a node without a batch, may be of any backward. After a step
        nothing is waited for, so a script that uses a gradient only then does so on every node whose
        gradients counted in that step. One whose gradients did not may be at the next iteration.

        Raises UserError if the nodes' gradients are not of the backward whose mean is wanted.
        """
        users = [node for node, each in nodes.items() if each.uses]
        if not users:
            return {}
        weighing = [node for node, each in nodes.items() if each.weight > 0]
        wanted = nodes[next((node for node in users if node in weighing), users[0])]
        # A user's own gradients weigh nothing if its GradScaler has found an overflow in them.
        like = next((node for node in (*users, *weighing) if node in weighing), users[0])
        for node, each in nodes.items():
            if each.uses and (each.iteration, each.stepped) != (wanted.iteration, wanted.stepped):
                raise self._unlike("unlike", users[0], nodes[users[0]], node, each)
            if wanted.stepped:
                continue
            unlike = (each.iteration, each.reductions) != (wanted.iteration, nodes[like].reductions)
            if not each.is_whole or (unlike and each.weight > 0):
                raise self._unlike("unlike", like, nodes[like], node, each)
        made, counted = self._made
        for node in sorted(counted - set(users)) if wanted.stepped and made == wanted.iteration else ():
            raise self._unlike("alone", users[0], nodes[users[0]], node, nodes.get(node))
        return {node: each for node, each in nodes.items() if each.is_of(wanted)}

    def _unlike(self, how: str, node: int, one: Brought, other: int, its: Brought | None) -> Exception:
        facts = {"node": node, "one": str(one), "other": other, "its": str(its or "is at its end")}
        return error_of("call", Choices({"call": "p.grad", "gradients": how, **facts}))

    def _check_present(self, counted: Mapping[int, Brought]) -> None:
        for place, bound in enumerate(self._chunks):
            for slot, name in enumerate(bound.names):
                having = [node for node, each in counted.items() if each.present[place][slot]]
                lacking = counted.keys() - set(having)
                if having and lacking:
                    step = next(iter(counted.values())).iteration
                    facts = {"call": "p.grad", "gradients": "missing", "name": name}
                    raise error_of("call", Choices({**facts, "step": step, "other": min(lacking)}))


def _sum(chunk: Chunk, parts: Sequence[tuple[float, bytes]]) -> Tensor:
    """Return the sum of gradients of a chunk times their factors."""
    dtype: torch.dtype = getattr(torch, chunk.dtype)
    tensors = [torch.frombuffer(bytearray(part), dtype=dtype) for _, part in parts]
    total = tensors[0] if parts[0][0] == 1.0 else tensors[0].mul_(parts[0][0])
    for (factor, _), tensor in zip(parts[1:], tensors[1:], strict=True):
        total.add_(tensor, alpha=factor)
    return total


class ReadMean:
    """The gradients of a node's device between a backward and the next one, as its script sees them.

    Attributes:
        is_here: True if `p.grad` is the mean of the iteration under way, or what the script has made of it.
    """

    def __init__(
        self,
        nodes: NodesMean,
        place: DeviceParameters,
        parameters: LocalParameters,
        slots: Slots,
        leads: bool,
        scale: GradientScale,
    ) -> None:
        self._scale = scale
        self._nodes, self._place, self._parameters, self._slots = nodes, place, parameters, slots
        self._leads, self.is_here = leads, False
        self._until: UntilRead | None = None
        self._brought = Brought(-1)
        self._passed = (-1, 0)  # an iteration, and the reductions of it whose mean was made without this node
        self._clip: Clip | None = None
        self._is_closed = False

    def begin(self, iteration: int, own: ContributionWeight, *, shows: bool) -> None:
        """Note the gradients of a reduction; `shows`: hide them from the script until it uses one.

        Raises UserError if the others have made the mean of this reduction without this node.
        """
        former = self._brought
        goes_on = former.iteration == iteration and not former.stepped
        if self.is_here or not goes_on:
            self._clip = None
        reductions = former.reductions + 1 if goes_on else 1
        missed, count = self._passed
        if missed == iteration and reductions <= count and own.weight > 0:
            check("call", Choices({"call": "p.grad", "gradients": "late", "step": iteration}))
        self._brought = Brought(iteration, reductions, own.weight, own.samples, own.basis, own.alike)
        self.is_here = False
        if shows:
            self._until = UntilRead(self._become)
            self._place.begin_hiding(self._until)

    def check_unwritten(self) -> None:
        """Raise UserError if the script has changed a hidden gradient, though not through `p.grad`."""
        waits = self._until is not None and self._until.waits
        if waits and not self._brought.stepped and (name := self._place.first_written(self._scale.is_out)):
            check("call", Choices({"call": "p.grad", "gradients": "written", "name": name}))

    def begins_backward(self) -> None:
        """Show plain gradients: others come, and the mean of these cannot be had any more."""
        self._scale.begins_backward(is_first=self._brought.stepped or self._brought.iteration < 0)
        self._place.put_back()
        self._brought = msgspec.structs.replace(self._brought, is_whole=self._brought.stepped)
        self._drop()

    def close(self) -> None:
        """Refuse every later use of the gradients that are hidden now."""
        if self._until is not None and self._until.waits:
            self._place.end_hiding()
        self._drop()
        self._is_closed = True

    def _drop(self) -> None:
        if self._until is not None:
            self._until.forget()
            self._until = None

    def leave(self) -> None:
        """Show this node's own gradients: the others have gone on without it, and there is no mean of
        them."""
        self._place.put_back()
        if self._until is not None:
            self._until.end()
        self._brought = Brought(-1)
        self._scale.restart()

    def restart(self) -> None:
        """Forget this iteration's gradients: another one begins than the next."""
        self._place.put_back()
        self._drop()
        self._brought, self.is_here = Brought(-1), False
        self._scale.restart()

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Show plain gradients within the `with` block."""
        self._place.put_back()
        try:
            yield
        finally:
            self.hide()

    def put_back(self) -> None:
        """Show plain gradients."""
        self._place.put_back()

    def hide(self) -> None:
        """Hide the gradients again, unless they were used."""
        if self._until is not None and self._until.waits:
            self._place.hide()

    def clips(self, clip: Clip) -> None:
        """Note that the script asks to clip this iteration's mean, which is not here yet. It is clipped when
        it comes."""
        self._clip = clip

    def contributed(self, present: Sequence[bytes], *, accepted: bool) -> None:
        """Note that the gradients have gone to the CPU side; those of a step that is not `accepted` weigh
        nothing."""
        weight = self._brought.weight if accepted else 0.0
        self._brought = msgspec.structs.replace(
            self._brought, stepped=True, present=tuple(present), weight=weight, is_whole=True
        )
        self.is_here = False

    def is_asked(self) -> bool:
        """True if another node's script waits for this node's gradients, which have gone to the CPU side."""
        return self._brought.stepped and self._nodes.is_asked(self._brought)

    @torch.no_grad()
    def answer(self, iteration: int) -> bool:
        """Bring this node's gradients to the meeting for another node's script, from a call while this node's
        is at `iteration`; return False if there is no model any more.

        The mean is shown here too: there is no other meeting for it when this node's script uses a gradient.
        """
        if self._is_closed:
            return False
        brought, waits = self._brought, self._until is not None and self._until.waits
        if brought.iteration < iteration:
            brought = Brought(iteration)  # no backward has come yet: it has no part in the mean
        self._share(brought, uses=False, shows=waits and brought is self._brought)
        return True

    @torch.no_grad()
    def _become(self) -> None:
        """Let `p.grad` show the mean: the script is about to use a gradient."""
        if name := self._place.first_sparse:
            check("call", Choices({"call": "p.grad", "gradients": "sparse", "name": name}))
        self._nodes.take()
        if not self._nodes.is_away:
            try:
                self._share(self._brought, uses=True, shows=True)
                return
            except GivenUpError:
                if not self._nodes.is_away:
                    raise
        self.leave()  # the others go on without this node: its step counts nowhere

    def _share(self, brought: Brought, *, uses: bool, shows: bool) -> None:
        """Meet the other nodes, and with `shows` let `p.grad` be the mean, if it is of these gradients."""
        self.check_unwritten()
        self._place.put_back()
        if not brought.stepped and brought.reductions:
            brought = self._written(brought)
        brought = msgspec.structs.replace(brought, uses=uses, line=waiting_line())
        nodes = self._nodes.meet(brought)
        if not nodes:  # whose script wanted the mean was left out
            self.hide()
            return
        takes_part = self._nodes.takes_part(nodes)
        wanted = max(each.reductions for each in nodes.values() if each.uses)
        if takes_part and not brought.stepped and brought.reductions < wanted:
            self._passed = brought.iteration, wanted
        flats = self._slot(brought.iteration) if takes_part and self._leads and brought.weight > 0 else {}
        means = self._nodes.of(brought, nodes, flats)
        if not (shows and takes_part):
            self.hide()
            return
        assert self._until is not None
        self._until.end()
        if means:
            self._place.become(means)
            self.is_here = not brought.stepped
            self._clip_means()

    def _written(self, brought: Brought) -> Brought:
        """Write the gradients into their slot, for the other nodes; return what they are.

        A node whose GradScaler has found an overflow in its gradients makes no step of them: they weigh
        nothing.
        """
        memory = self._parameters.memory
        assert memory is not None
        self._slots.await_free(brought.iteration, memory.plan.slots)
        scale = self._scale.use() if brought.weight > 0 else 1.0
        if not self._leads:
            return msgspec.structs.replace(brought, scale=scale)
        present = tuple(self._place.write(brought.iteration, brought.weight > 0))
        flats = self._slot(brought.iteration).values()
        overflows = self._scale.is_out and not all(map(is_finite, flats))
        weight = 0.0 if overflows else brought.weight
        return msgspec.structs.replace(brought, scale=scale, present=present, weight=weight)

    def _slot(self, iteration: int) -> Mapping[int, Tensor]:
        memory = self._parameters.memory
        assert memory is not None
        return memory.gradients(iteration)

    def _clip_means(self) -> None:
        """Clip the means in `p.grad` if the script has asked for it."""
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._nodes.parameters, self._clip.max_norm, self._clip.norm_type)
