"""The global parameters at a node's CPU side, and the optimizer that steps them.

An iteration's contributions make one step. It uses their mean by weight, in order of node, clipped by its
global norm if the scripts ask for it, with hyperparameters that depend on the contributions only. Every node
makes the same operations in one order, each of them on one thread (torch's reductions depend on the number of
threads), so all nodes have the same bits. Source: docs/peers.md, "What a step does".
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy
import torch
from torch import Tensor

from atoll.chunks import ChunkMap
from atoll.core.errors import RunError, UserError
from atoll.core.hyperparameters import Difference, first_difference
from atoll.core.optimizerkind import OptimizerKind
from atoll.core.weighing import KNOWN, are_certain, beyond, weight_of
from atoll.tensors.paramgroups import GroupSettings
from atoll.tensors.shardoptimizer import Scratch, ShardOptimizer, SlotValues
from atoll.wire.device import Clip
from atoll.wire.messages import Hyperparameters

_COLUMNS = 1024  # columns of 8 bytes in which a chunk's bits are summed
_MADE = 64  # latest iterations whose contributors are kept

Whose: TypeAlias = tuple[tuple[int, int], ...]  # contributions to an iteration: node and incarnation of each


@dataclass(frozen=True)
class Contribution:
    """A node's contribution to an iteration. The gradients are read-only.

    Attributes:
        gradients: (chunk.extent,) of every trainable chunk, by id; missing gradients are zeros.
        present: one byte a slot for every trainable chunk: whether the slot has a gradient.
        weight: the weight in the mean; 0 leaves the contribution out (NaN, under "skip").
        refused: True if no node makes a step of the iteration, whatever others contribute.
        basis: how certain `weight` is (core/weighing.py).
        alike: the weight if all devices count alike.
        mean: True if the gradients are what the script has made of the nodes' mean.
        clipped: True if the gradients are clipped by `clip` already.
    """

    node: int
    incarnation: int
    samples: float
    weight: float
    gradients: Mapping[int, Tensor]
    present: Mapping[int, bytes]
    hyperparameters: Hyperparameters
    clip: Clip | None = None
    refused: bool = False
    basis: str = KNOWN
    alike: float = 1.0
    mean: bool = False
    clipped: bool = False


@dataclass(frozen=True)
class IterationOutcome:
    """The outcome of an iteration.

    Attributes:
        stepped: False if all contributions were left out, or one was refused.
        norm: the norm of the mean before clipping, if a script asked to clip.
        unlike: for each node with other hyperparameters, or another wish to clip, the difference in words.
        digest: the digest of the parameters after the iteration.
        first: the node whose hyperparameters counted; -1 for none.
        wrong: for each node whose contribution was left out as invalid, the reason.
        parted: for each node of `unlike` with other hyperparameters, the first difference.
    """

    iteration: int
    stepped: bool
    norm: float | None
    unlike: Mapping[int, str]
    digest: bytes
    first: int = -1
    wrong: Mapping[int, str] = field(default_factory=dict)
    parted: Mapping[int, Difference] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedStep:
    """An iteration's step, ready to be made chunk by chunk.

    Attributes:
        whose: the contributions that were taken.
        counted: those of them that count.
        shares: the share of the weight of each that counts.
        norm: the norm of the mean, if it is clipped.
        coefficient: the factor of the mean; None for 1.
    """

    iteration: int
    whose: Whose
    counted: Sequence[Contribution]
    shares: Sequence[float]
    settings: Sequence[GroupSettings]
    norm: Tensor | None
    coefficient: Tensor | None


class GlobalParameters:
    """The global parameters of `layout`. To be used by one thread.

    Args:
        optimizer: the class's full name.
        hyperparameters: the param groups, as plain_hyperparameters makes them.
        configured: as in ShardOptimizer.
        fused: as in ShardOptimizer.
        by_tensor: as in ShardOptimizer.
        threads: chunks to work on at once.

    Attributes:
        iteration: the number of iterations that have been applied.
        made: the contributors of the latest iterations.
        replaced: how often values or state came from elsewhere than a step.

    Raises UserError for an optimizer that cannot be run here.
    """

    def __init__(
        self,
        layout: ChunkMap,
        optimizer: str,
        hyperparameters: Hyperparameters,
        *,
        configured: str = "",
        fused: bool = True,
        by_tensor: bool = False,
        threads: int = 1,
    ) -> None:
        self.layout, self.optimizer_name = layout, optimizer
        self._configured, self._fused, self._by_tensor = configured, fused, by_tensor
        self.optimizer = self._make([chunk.id for chunk in layout.chunks], hyperparameters)
        self.chunks = tuple(chunk.id for chunk in layout.trainable)  # the chunks of contributions
        self.iteration = 0
        self._sums: dict[int, bytes] = {}  # the sum of each chunk's bits, once it is known
        self._norms: dict[int, _Norm] = {}  # norms of iterations that are not applied yet
        self._crew = _Crew(threads)
        self.made: dict[int, Whose] = {}
        self.replaced = 0

    def _make(self, chunks: Sequence[int], hyperparameters: Hyperparameters) -> ShardOptimizer:
        with one_thread():
            return ShardOptimizer(
                self.layout,
                chunks,
                [OptimizerKind(self.optimizer_name, len(hyperparameters), self._by_tensor)],
                hyperparameters,
                configured=self._configured,
                fused=self._fused,
            )

    def twin(self) -> ShardOptimizer:
        """Return another optimizer of the trained chunks, which steps as this one does. It takes as much
        memory as the chunks and their state."""
        trained = [chunk for chunk in self.chunks if self.optimizer.trains(chunk)]
        return self._make(trained, self.optimizer.param_groups.given)

    def values(self, chunk: int) -> Tensor:
        """Return a chunk's global parameters, (extent,), where they lie: the next step changes them."""
        return self.optimizer.values(chunk)

    def set_values(self, chunk: int, values: Tensor) -> None:
        """Replace a chunk's values."""
        self.optimizer.set_values(chunk, values)
        self._sums.pop(chunk, None)
        self.replaced += 1

    def set_state(self, chunk: int, states: Mapping[str, Tensor], slots: SlotValues) -> None:
        """Replace the optimizer's state of a chunk."""
        self.optimizer.set_state(chunk, states, slots)
        self.replaced += 1

    @property
    def digest(self) -> bytes:
        """8 bytes that tell whether two nodes have the same parameters at one iteration.

        They are a hash of the iteration and of the bits of each trainable chunk (see `sum_of_bits`).
        """
        for chunk in self.chunks:
            if chunk not in self._sums:
                self._sum(chunk)
        return digest_of(self.iteration, (self._sums[chunk] for chunk in self.chunks))

    def check(self, contribution: Contribution) -> None:
        """Raise UserError, naming the node, for a contribution from outside that `apply` would not take."""
        who = f"node {contribution.node}'s contribution"
        numbers = contribution.weight, contribution.samples, contribution.alike
        if not all(map(math.isfinite, numbers)) or (contribution.weight > 0 >= contribution.alike):
            raise UserError(
                f"{who} has weight {contribution.weight} (as workers, {contribution.alike}) and "
                f"{contribution.samples} samples"
            )
        if contribution.gradients.keys() != set(self.chunks) or contribution.present.keys() != set(
            self.chunks
        ):
            raise UserError(f"{who} is not of the {len(self.chunks)} trainable chunks")
        for chunk in self.chunks:
            gradients, values = contribution.gradients[chunk], self.values(chunk)
            slots = self.optimizer.slots(chunk)
            if gradients.shape != values.shape or gradients.dtype != values.dtype:
                raise UserError(f"{who}: chunk {chunk} is not {len(values)} values of {values.dtype}")
            if len(contribution.present[chunk]) != slots:
                raise UserError(f"{who}: chunk {chunk} has {slots} parameters")
        try:
            self.optimizer.param_groups.check(contribution.hyperparameters)
        except UserError as error:
            raise UserError(f"{who}: {error}") from None

    @torch.no_grad()
    def apply(self, iteration: int, contributions: Sequence[Contribution]) -> IterationOutcome:
        """Make the step of the next iteration, with all its contributions in order of node.

        The hyperparameters, and the wish to clip, of the first contribution with weight count. Invalid
        contributions are left out, alike on every node, as that depends only on the contributions and the
        steps before. If all are left out no step is made, but the iteration counts.

        Raises RunError for another iteration than the next.
        """
        if iteration != self.iteration or not contributions:
            raise RunError(
                f"iteration {iteration} cannot be applied to the global parameters, which are at "
                f"{self.iteration}"
            )
        wrong = self._wrong(contributions)
        taken = [each for each in contributions if each.node not in wrong]
        step = self.prepare(iteration, taken)
        if step is not None:
            self.for_each_chunk(lambda chunk, scratch: self._advance(chunk, step, scratch))
        first = -1
        if taken:
            counts = _first(taken)
            first = counts.node
            self.optimizer.param_groups.set(counts.hyperparameters)
        self.made[iteration] = () if step is None else step.whose
        self.made.pop(iteration - _MADE, None)
        self.iteration += 1
        self._norms = {t: norm for t, norm in self._norms.items() if t >= self.iteration}
        norm = None if step is None or step.norm is None else float(step.norm)
        unlike, parted = _unlike(taken), _parted(taken)
        return IterationOutcome(iteration, step is not None, norm, unlike, self.digest, first, wrong, parted)

    def _wrong(self, contributions: Sequence[Contribution]) -> dict[int, str]:
        """Return the reason for each node whose weight or hyperparameters no step would take.

        The rest of a contribution was compared with the layout before it was kept.
        """
        excess = beyond({each.node: each for each in contributions})
        wrong = {
            node: f"node {node}'s contribution has {what} (look at session.weight and at its batches)"
            for node, what in excess.items()
        }
        for each in contributions:
            if each.clip is not None and (math.isnan(each.clip.max_norm) or math.isnan(each.clip.norm_type)):
                wrong[each.node] = f"node {each.node}'s contribution asks to clip by {each.clip.max_norm}"
            try:
                self.optimizer.param_groups.check(each.hyperparameters)
            except UserError as error:
                wrong[each.node] = f"node {each.node}'s contribution: {error}"
        return wrong

    @torch.no_grad()
    def prepare(self, iteration: int, contributions: Sequence[Contribution]) -> PreparedStep | None:
        """Prepare the step of an iteration from its contributions, in order of node.

        Returns None if no contribution counts, or one is refused. The norm of one set of contributions is
        computed once.
        """
        wrong = self._wrong(contributions)
        contributions = [each for each in contributions if each.node not in wrong]
        counted = [each for each in contributions if each.weight > 0]
        if not counted or any(each.refused for each in contributions):
            return None
        # If scripts have used the mean, the step is of what they made of it: own gradients are in that mean.
        counted = [each for each in counted if each.mean] or counted
        first, certain = _first(contributions), are_certain(counted)
        weights = [weight_of(each, certain) for each in counted]
        total = sum(weights)
        settings = self.optimizer.param_groups.settings_of(first.hyperparameters)
        whose = tuple((each.node, each.incarnation) for each in contributions)
        shares = [weight / total for weight in weights]
        step = PreparedStep(iteration, whose, counted, shares, settings, None, None)
        if first.clip is None or all(each.clipped for each in counted):
            return step
        known = self._norms.get(iteration)
        if known is None or known.whose != whose:
            norm = self._norm(step, first.clip)
            known = self._norms[iteration] = _Norm(whose, norm, _coefficient(norm, first.clip))
        return replace(step, norm=known.norm, coefficient=known.coefficient)

    def step_chunk(
        self, chunk: int, step: PreparedStep, scratch: Scratch, optimizer: ShardOptimizer | None = None
    ) -> None:
        """Make a step on one chunk's values and state, by this optimizer or a twin, if it trains the
        chunk."""
        optimizer = optimizer or self.optimizer
        if optimizer.trains(chunk):
            mean = self._mean(chunk, step, scratch)
            if step.coefficient is not None:
                out = scratch.part("mean", mean.numel(), mean.dtype)
                mean = torch.mul(mean, step.coefficient, out=out)
            optimizer.step(chunk, mean, _present(chunk, step.counted), settings=step.settings)

    def for_each_chunk(self, work: Callable[[int, Scratch], None]) -> None:
        """Call `work` for every trainable chunk, each time with scratch memory of its own."""
        self._crew.do(work, self.chunks)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the "parameters", of the "optimizer"'s state, of a "twin" with the values that
        an Overlay does not show yet, and of "scratch" memory at most."""
        state, trained, largest = 0, 0, {"values": 0}  # `largest`: scratch memory of each kind
        for id_ in self.chunks:
            values = self.optimizer.nbytes(id_)
            trained += values if self.optimizer.trains(id_) else 0
            largest["values"] = max(largest["values"], 2 * values)  # the mean, and the values before a step
            for key, nbytes in self.optimizer.state_bytes(id_).items():
                state += nbytes
                largest[key] = max(largest.get(key, 0), nbytes)
        parameters = sum(chunk.nbytes for chunk in self.layout.chunks)
        scratch = sum(largest.values()) * self._crew.size
        twin = 2 * trained + state
        return {"parameters": parameters, "optimizer": state, "twin": twin, "scratch": scratch}

    def _advance(self, chunk: int, step: PreparedStep, scratch: Scratch) -> None:
        self.step_chunk(chunk, step, scratch)
        self._sum(chunk)

    def _mean(self, chunk: int, step: PreparedStep, scratch: Scratch) -> Tensor:
        """Return a chunk's mean by weight; of one contribution, its own gradients."""
        first = step.counted[0].gradients[chunk]
        if len(step.counted) == 1:
            return first
        mean = torch.mul(first, step.shares[0], out=scratch.part("mean", first.numel(), first.dtype))
        for each, share in zip(step.counted[1:], step.shares[1:], strict=True):
            mean.add_(each.gradients[chunk], alpha=share)
        return mean

    def _norm(self, step: PreparedStep, clip: Clip) -> Tensor:
        """Return the mean's global norm, as torch.nn.utils.get_total_norm computes it of single
        parameters."""
        norms: dict[tuple[int, int], Tensor] = {}

        def find(chunk: int, scratch: Scratch) -> None:
            mean, present = self._mean(chunk, step, scratch), _present(chunk, step.counted)
            for place, slot in enumerate(self.layout.chunks[chunk].slots):
                if present[place] and (slot.numel or clip.norm_type != math.inf):
                    part = mean[slot.offset : slot.offset + slot.numel]
                    norms[chunk, place] = torch.linalg.vector_norm(part, clip.norm_type)

        self.for_each_chunk(find)
        found = [norms[place] for place in self.layout.places if place in norms]  # in order of registration
        with one_thread():
            return torch.linalg.vector_norm(torch.stack(found), clip.norm_type) if found else torch.zeros(())

    def _sum(self, chunk: int) -> None:
        self._sums[chunk] = sum_of_bits(self.values(chunk))


@dataclass(frozen=True)
class _Norm:
    """The norm of a mean.

    Attributes:
        whose: the contributions of the mean.
        coefficient: the factor by which clipping multiplies; None for 1.
    """

    whose: Whose
    norm: Tensor
    coefficient: Tensor | None


def _first(contributions: Sequence[Contribution]) -> Contribution:
    """Return the contribution whose hyperparameters and wish to clip count: the first with weight, or the
    first if none has.

    A script that has no batch has no weight, and only calls `step()`.
    """
    return next((each for each in contributions if each.weight > 0), contributions[0])


def _unlike(contributions: Sequence[Contribution]) -> dict[int, str]:
    """Return, for each node that asks for something else than the counting contribution, what differs, in
    words.

    A contribution without weight need not ask to clip.
    """
    found: dict[int, str] = {}
    if not contributions:
        return found
    first = _first(contributions)
    for each in contributions:
        others = ["other hyperparameters"] if each.hyperparameters != first.hyperparameters else []
        if each.clip != first.clip and each.weight > 0:
            others.append("another wish to clip")
        if others:
            found[each.node] = " and ".join(others)
    return found


def _parted(contributions: Sequence[Contribution]) -> dict[int, Difference]:
    """Return, for each node whose hyperparameters differ from the counting node's, the first difference."""
    if not contributions:
        return {}
    first = _first(contributions).hyperparameters
    found = {each.node: first_difference(first, each.hyperparameters) for each in contributions}
    return {node: difference for node, difference in found.items() if difference is not None}


def _coefficient(norm: Tensor, clip: Clip) -> Tensor | None:
    """Return the factor of torch.nn.utils.clip_grads_with_norm_; None for 1, which changes nothing."""
    coefficient = torch.clamp(clip.max_norm / (norm + 1e-6), max=1.0)
    return None if float(coefficient) == 1.0 else coefficient


def _present(chunk: int, counted: Sequence[Contribution]) -> bytes:
    """Return one byte for each slot of a chunk: whether any contribution has a gradient."""
    flags = {each.present[chunk] for each in counted}
    return flags.pop() if len(flags) == 1 else bytes(map(any, zip(*flags, strict=True)))


def sum_of_bits(flat: Tensor) -> bytes:
    """Return 8 bytes that tell whether two tensors (1-D, contiguous) have the same bits, nearly always.

    Values are summed in columns as integers of 8 bytes, modulo 2^64, and the sums are hashed. So a single
    value that differs is always seen. So are two values that have changed places, unless they are a multiple
    of 8 KiB apart. Unrelated differences go unseen with a probability of 2^-64.
    """
    raw = flat.view(torch.uint8).numpy()
    whole = len(raw) // (8 * _COLUMNS) * 8 * _COLUMNS
    columns = raw[:whole].view(numpy.uint64).reshape(-1, _COLUMNS).sum(axis=0, dtype=numpy.uint64)
    return _hash([columns.tobytes(), raw[whole:].tobytes()])


def digest_of(iteration: int, sums: Iterable[bytes]) -> bytes:
    """Return the digest of global parameters at `iteration`, from the chunks' sums of bits, in order."""
    return _hash([b"%d" % iteration, *sums])


def _hash(parts: Iterable[bytes]) -> bytes:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return found.digest()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on the calling thread only, within the block: the same bits on machines of any
    size."""
    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


def _stay_alone() -> None:
    """Let torch compute on this thread alone from now on."""
    torch.get_num_threads()  # a thread's first call takes over a number that another thread has set
    torch.set_num_threads(1)


class _Crew:
    """Threads that work on several chunks at once; with `size` 1, the calling thread."""

    def __init__(self, size: int) -> None:
        self.size = max(1, size)
        self._scratch = deque(Scratch() for _ in range(self.size))  # scratch memory that no thread uses
        self._threads: ThreadPoolExecutor | None = None
        if self.size > 1:
            self._threads = ThreadPoolExecutor(self.size, "atoll-chunks", initializer=_stay_alone)

    def do(self, work: Callable[[int, Scratch], None], chunks: Sequence[int]) -> None:
        """Call `work` for each chunk, and return when all calls have ended. Raises the first error."""

        def one(chunk: int) -> None:
            scratch = self._scratch.pop()
            try:
                with torch.no_grad():
                    work(chunk, scratch)
            finally:
                self._scratch.append(scratch)

        if self._threads is not None:
            list(self._threads.map(one, chunks))
            return
        with one_thread():
            for chunk in chunks:
                one(chunk)
