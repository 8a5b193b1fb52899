"""The mean of the nodes' gradients in `p.grad`, for a script that uses gradients after backward (`peers`).

A node's own gradient stands in `p.grad`, unread, until the script uses one. Then all nodes meet: each brings
its gradients, and makes the same mean of them, by the rule by which the CPU sides make theirs. What the
script makes of it is what the node contributes in `optimizer.step()`, with a digest by which the CPU sides
see that all nodes made the same of it. A script that uses no gradient meets nobody. Only where
`sync.stale_max = 0`: else the nodes are at different iterations. Source: docs/peers.md, "What a step does".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from atoll.axes.choices import Choices
from atoll.axes.needs import error_of
from atoll.chunks import Chunk
from atoll.core.decoding import from_msgpack
from atoll.core.errors import GivenUpError
from atoll.core.stands import USE
from atoll.core.weighing import KNOWN, are_certain, beyond, weight_of
from atoll.memory.untilread import UntilRead
from atoll.tensors.binding import BoundChunk
from atoll.tensors.finite import is_finite
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.members.meetings import bytes_of
from atoll.train.members.workers import Workers
from atoll.train.sync.peersparameters import DeviceParameters, LocalParameters, Slots
from atoll.train.sync.peersworker import NodeWorker
from atoll.wire.device import Clip

_DIGEST_BYTES = 16


class Brought(msgspec.Struct, frozen=True):
    """What a node says of the gradients that it brings.

    Attributes:
        iteration: the iteration that they are of.
        weight: their weight in the mean; samples, basis, alike: as in a contribution.
        present: for each trainable chunk one byte a slot: whether it has a gradient.
    """

    iteration: int
    weight: float
    samples: float
    basis: str = KNOWN
    alike: float = 1.0
    present: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Altered:
    """What a script has made of the mean, for a contribution.

    Attributes:
        digest: tells whether two nodes contribute the same; empty if the gradients are the node's own.
        edited: True if it is not the mean.
    """

    digest: bytes = b""
    edited: bool = False


class NodesMean:
    """The meetings of all nodes for means of their gradients."""

    def __init__(self, workers: Workers, node: NodeWorker, chunks: Sequence[BoundChunk]) -> None:
        self._workers, self._node, self._chunks = workers, node, chunks
        self.parameters = [parameter for bound in chunks for parameter in bound.parameters]

    def asked(self) -> int:
        """Return the iteration of whose gradients another node's script wants the mean, in the meeting that
        comes next here; -1 if there is none."""
        number, what = self._node.asked
        is_next = number == self._node.next_meeting and what.startswith(USE)
        iteration = what.rpartition(" ")[2]
        return int(iteration) if is_next and iteration.isdecimal() else -1

    def of(self, brought: Brought, flats: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return each chunk's mean, (extent,), in host memory; empty if no node's gradients weigh anything.

        Args:
            brought: of this node; only what the leader of its devices says counts.
            flats: this node's gradients by chunk, (extent,), with zeros for missing ones; of the leader.

        Raises UserError on all nodes where one lacks gradients that others have.
        """
        while (means := self._try(brought, flats)) is None:
            pass  # at most once for each node that is left out meanwhile
        return means

    def _try(self, brought: Brought, flats: Mapping[int, Tensor]) -> dict[int, Tensor] | None:
        what = f"{USE} of iteration {brought.iteration}"
        said = self._gather(msgspec.msgpack.encode(brought), what)
        nodes = {node: from_msgpack(each, Brought) for node, each in said.items()}
        excess = beyond(nodes)
        counted = {node: each for node, each in nodes.items() if each.weight > 0 and node not in excess}
        if not counted:
            return {}
        self._check_present(counted)
        certain = are_certain(counted.values())
        weights = {node: weight_of(each, certain) for node, each in counted.items()}
        total = sum(weights.values())
        own = self._node.node in counted
        means: dict[int, Tensor] = {}
        for bound in self._chunks:
            chunk = bound.chunk
            parts = self._gather(bytes_of(flats[chunk.id]) if own and flats else b"", what)
            if not counted.keys() <= parts.keys():
                return None
            means[chunk.id] = _mean(
                chunk, [(weight / total, parts[node]) for node, weight in sorted(weights.items())]
            )
        return means

    def _gather(self, payload: bytes, what: str) -> dict[int, bytes]:
        """Return the bytes of each node's leader, by node, in order."""
        found = self._workers.gather_bytes(payload if self._node.leads else b"", what)
        introduction = self._node.introduction
        by_rank = zip(self._workers.ranks, found, strict=True)
        leaders = ((introduction.node_of(rank), rank, part) for rank, part in by_rank)
        return {node: part for node, rank, part in leaders if rank == introduction.workers_of(node)[0]}

    def _check_present(self, counted: Mapping[int, Brought]) -> None:
        for place, bound in enumerate(self._chunks):
            for slot, name in enumerate(bound.names):
                having = [node for node, each in counted.items() if each.present[place][slot]]
                lacking = counted.keys() - set(having)
                if having and lacking:
                    step = next(iter(counted.values())).iteration
                    facts = {"call": "p.grad", "gradients": "missing", "name": name}
                    raise error_of("call", Choices({**facts, "step": step, "other": min(lacking)}))


def _mean(chunk: Chunk, parts: Sequence[tuple[float, bytes]]) -> Tensor:
    """Return the mean of a chunk's gradients by their shares; of one node, its own."""
    dtype: torch.dtype = getattr(torch, chunk.dtype)
    tensors = [torch.frombuffer(bytearray(part), dtype=dtype) for _, part in parts]
    if len(tensors) == 1:
        return tensors[0]
    mean = tensors[0].mul_(parts[0][0])
    for (share, _), tensor in zip(parts[1:], tensors[1:], strict=True):
        mean.add_(tensor, alpha=share)
    return mean


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
        unscaled: Callable[[], bool],
    ) -> None:
        self._unscaled = unscaled
        self._nodes, self._place, self._parameters, self._slots = nodes, place, parameters, slots
        self._leads, self.is_here = leads, False
        self._until: UntilRead | None = None
        self._brought = self._former = Brought(0, 0.0, 0.0)
        self._is_contributed = False  # the gradients have gone to the CPU side
        self._clip: Clip | None = None
        self._digest = b""  # of the mean, as it was first shown

    def begin(self, iteration: int, own: ContributionWeight) -> None:
        """Hide the gradients of a reduction from the script until it uses one."""
        if self._is_contributed:
            self._former = self._brought
        self._brought = Brought(iteration, own.weight, own.samples, own.basis, own.alike)
        self._is_contributed = self.is_here = False
        self._clip = None
        self._until = UntilRead(self._become)
        self._place.hide(self._until)

    def forget(self) -> None:
        """Show plain gradients: others come, and the mean of these cannot be had any more."""
        self._place.put_back()
        self.close()

    def close(self) -> None:
        """Refuse every later use of the gradients that are hidden now."""
        if self._until is not None:
            self._until.forget()
            self._until = None

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
            self._place.hide(self._until)

    def clips(self, clip: Clip) -> None:
        """Clip the mean if the script uses a gradient later on: it has asked to clip this iteration's."""
        self._clip = clip

    def altered(self, iteration: int, present: Sequence[bytes]) -> Altered:
        """Return what the script has made of the mean. The gradients lie in the slot of `iteration`, and are
        about to be contributed."""
        self._brought = msgspec.structs.replace(self._brought, present=tuple(present))
        if not self.is_here:
            return Altered()
        digest = _digest(present, self._slot(iteration))
        return Altered(digest, digest != self._digest)

    def contributed(self, *, accepted: bool) -> None:
        """Note that the gradients have gone to the CPU side; those of a step that is not `accepted` weigh
        nothing."""
        if not accepted:
            self._brought = msgspec.structs.replace(self._brought, weight=0.0)
        self._is_contributed, self.is_here = True, False

    @property
    def is_asked(self) -> bool:
        """True if another node's script waits for this node's gradients, which have gone to the CPU side."""
        return self._is_contributed and self._asked is not None

    @property
    def _asked(self) -> Brought | None:
        iteration = self._nodes.asked()
        return next((each for each in (self._brought, self._former) if each.iteration == iteration), None)

    @torch.no_grad()
    def answer(self) -> None:
        """Bring this node's gradients to the meeting of another node's script.

        The mean is shown here too: there is no other meeting for it when this node's script uses a gradient.
        """
        brought, until = self._asked, self._until
        if brought is None:
            return
        try:
            means = self._nodes.of(brought, self._slot(brought.iteration) if self._leads else {})
        except GivenUpError:
            return  # the others go on without this node: it hears so next
        if brought is self._brought and until is not None and until.waits:
            until.end()
            if means:
                self._place.become(means)
                self._clip_means()

    def _weigh(self, flats: Mapping[int, Tensor]) -> None:
        """Leave this node out of the mean if a GradScaler has found an overflow in its gradients: then its
        script makes no step, and its contribution weighs nothing."""
        if self._unscaled() and not all(map(is_finite, flats.values())):
            self._brought = msgspec.structs.replace(self._brought, weight=0.0)

    def _slot(self, iteration: int) -> Mapping[int, Tensor]:
        memory = self._parameters.memory
        assert memory is not None
        return memory.gradients(iteration)

    @torch.no_grad()
    def _become(self) -> None:
        """Let `p.grad` show the mean: the script is about to use a gradient."""
        until, memory = self._until, self._parameters.memory
        assert until is not None
        assert memory is not None
        self._place.put_back()
        self._place.check_dense()
        iteration = self._brought.iteration
        if not self._is_contributed:
            self._slots.await_free(iteration, memory.plan.slots)
            if self._leads:
                present = self._place.write(iteration, self._brought.weight > 0)
                self._brought = msgspec.structs.replace(self._brought, present=tuple(present))
                self._weigh(self._slot(iteration))
        means = self._nodes.of(self._brought, self._slot(iteration) if self._leads else {})
        until.end()
        if not means:
            return
        self._place.become(means)
        if not self._is_contributed:
            self.is_here = True
            if self._leads:
                present = self._place.write(iteration, True)
                self._digest = _digest(present, self._slot(iteration))
        self._clip_means()

    def _clip_means(self) -> None:
        """Clip the means in `p.grad` if the script has asked for it."""
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._nodes.parameters, self._clip.max_norm, self._clip.norm_type)


def _digest(present: Sequence[bytes], flats: Mapping[int, Tensor]) -> bytes:
    """Return bytes that are equal where gradients are."""
    digest = hashlib.blake2b(b"".join(present), digest_size=_DIGEST_BYTES)
    for flat in flats.values():
        digest.update(bytes_of(flat))
    return digest.digest()
