"""The weight of a worker's batch in an iteration: from `session.weight`, else the batch's number of samples.

core/weighing.py decides whether numbers of samples are certain enough to weigh by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from torch import Tensor

from atoll.core.weighing import KNOWN, NONE, said, worst
from atoll.train.data.moredata import MoreData


class ContributionWeight(msgspec.Struct, frozen=True, gc=False):
    """The contribution of a worker, or of a group of workers, to an iteration.

    Attributes:
        weight: the weight in a mean by samples.
        samples: the number of samples for the records.
        basis: how certain `weight` is (core/weighing.py).
        alike: the weight if all workers count alike: the number of workers behind the contribution.
        by_optimizer: for each optimizer the weight and the samples of its model, and `again` of these, if
            several models train together; else empty.
        ends: False if a pass of the script's loop goes on with the next iteration, as far as is foreseen.
        again: True if this is the weight of a batch that has weighed in a reduction before: more gradients
            of it come.
        empty: True if no samples were seen that can have gradients, as in an empty slice of a batch.
    """

    weight: float
    samples: float
    basis: str = KNOWN
    alike: float = 1.0
    by_optimizer: tuple[tuple[float, float, bool], ...] = ()
    ends: bool = True
    again: bool = False
    empty: bool = False

    @property
    def weights(self) -> list[float]:
        """For each optimizer the weight of its gradients; empty if none differs from `weight`."""
        weights = [weight for weight, *_ in self.by_optimizer]
        return weights if any(each != self.weight for each in weights) else []

    def of(self, optimizer: int) -> ContributionWeight:
        """Return the contribution to the mean of the gradients that one optimizer steps, by its place."""
        if not self.by_optimizer:
            return self
        weight, samples, again = self.by_optimizer[optimizer]
        return ContributionWeight(weight, samples, self.basis, self.alike, again=again)

    @property
    def counts_alike(self) -> float:
        """The weight if all workers count alike; 0 for a contribution without weight by samples."""
        return self.alike if self.weight > 0 else 0.0

    @property
    def is_certain(self) -> bool:
        return self.basis == KNOWN or self.weight <= 0

    def said(self) -> list[float]:
        """Encode this weight for an agreement (core/weighing.py). The weight itself travels beside it."""
        return said(self.weight, self.counts_alike, self.is_certain)


class CountedBatch(msgspec.Struct, frozen=True, gc=False):
    """The count of a batch that backward has reached.

    Attributes:
        samples: the number of samples for the mean; None: unknown.
        basis: how certain `samples` is (core/weighing.py).
        new: those that a sampler of the session gave and no backward had reached before; None if no sampler
            of the session counts them. A script may call its model several times for one batch.
        seen: the number of samples, also of those that do not count; None: unknown.
        filled: the number of those that surely are a fill, and do not count.
    """

    samples: float | None
    basis: str = KNOWN
    new: float | None = None
    seen: float | None = None
    filled: float = 0.0


class SampleMark(msgspec.Struct, frozen=True, gc=False):
    """The state of a SampleCount; see there."""

    counted: float | None
    given: float | None
    new: float | None
    basis: str
    used: bool
    latest: float
    gives: int
    before: float | None
    seen: float | None
    of_fills: float


class SampleCount:
    """The samples of the iteration under way: counted as backward reaches them, or given by `session.weight`.

    Samples that a reduction has used stay known until others are counted or given. So a second backward over
    the same batch has the weight of the first.

    Attributes:
        latest: the weight of logged values.
        unknown: the number of samples to assume for a batch that shows none, if a schedule goes by samples.
        guessed: True if `unknown` was used.
    """

    def __init__(self, more: MoreData | None = None) -> None:
        """Begin without samples. Batches that `more` says are repeated weigh nothing."""
        self._more = more or MoreData()
        self._counted: float | None = None
        self._given: float | None = None
        self._gives = 0  # calls of `give`
        # Parts of `_given`: given before the batch of the latest backward, and since that backward began:
        self._before: float | None = None
        self._since: float | None = None
        # The weight that was given for the latest backward's batch, and its samples: fills, and all seen.
        self._of_batch, self._in_batch = 0.0, (0.0, 0.0)
        # Parts of `_given` that were given for fills, which do not count: in earlier backwards, and in that:
        self._of_fills = self._of_fills_now = 0.0
        self._forwards = 0  # the forwards that were made by the latest `give`
        self._by_forward: float | None = None  # what was given by the latest of them
        self._anew = False  # True if the next `give` is for a batch that raised
        self._others: float | None = None  # then the part of `_given` that is for other batches
        self._of_forward = False  # True if it was the forward that raised
        self._carried = 0.0  # new samples that count with the next batch
        self._basis = KNOWN  # of the counted samples
        self._new: float | None = None  # as counted by the session's samplers
        self._seen: float | None = None  # also those that do not count, but for those whose gradients are 0
        self._used = False
        self.latest = 1.0
        self.unknown = 0.0
        self.guessed = False

    def count(
        self,
        samples: float,
        basis: str = KNOWN,
        new: float | None = None,
        seen: float | None = None,
        filled: float = 0.0,
        *,
        gives_zeros: bool = False,
    ) -> None:
        """Count a batch, as `CountedBatch` describes it. `gives_zeros`: its gradients are 0."""
        self._forget_used()
        self._counted = samples + (self._counted or 0.0)
        seen = samples if seen is None else seen
        self._seen = (0.0 if gives_zeros else seen) + (self._seen or 0.0)
        self._in_batch = self._in_batch[0] + filled, self._in_batch[1] + seen
        is_fill = self._in_batch[0] == self._in_batch[1] > 0
        self._of_fills_now = self._of_batch if is_fill else 0.0
        if new is not None:
            self._new = new + (self._new or 0.0) + self._carried
            self._carried = 0.0
        if basis != self._basis:
            self._basis = worst([self._basis, basis])
        self._weighs(self._counted if self._given is None else self._given_for_samples(self._given))

    def _given_for_samples(self, given: float) -> float:
        """Return the part of the weight that was `given` for batches that are no fills."""
        return given - self._of_fills - self._of_fills_now

    def mark(self) -> SampleMark:
        """Return a mark of what is counted and given by now, for `back_to` and `since`."""
        return SampleMark(
            counted=self._counted,
            given=self._given,
            new=self._new,
            basis=self._basis,
            used=self._used,
            latest=self.latest,
            gives=self._gives,
            before=self._before,
            seen=self._seen,
            of_fills=self._of_fills + self._of_fills_now,
        )

    def begins(self) -> SampleMark:
        """Return a mark for `take_back`: a backward begins."""
        mark = self.mark()
        if self._since is not None:  # else the weight was given with the batch before
            self._of_fills, self._of_fills_now = mark.of_fills, 0.0
            # A weight that is given once, for batches of several backwards, is not that of the last batch:
            is_for_several = bool(self._counted) and self._given == self._since and not self._used
            self._of_batch, self._in_batch = 0.0 if is_for_several else self._since, (0.0, 0.0)
        self._before, self._since, self._anew = self._given, None, False
        return mark

    def take_back(self, mark: SampleMark, *, is_empty: bool, retried: bool) -> None:
        """Forget the batch of the backward that began at `mark`: it raised.

        A weight given for this batch holds for the one that is computed in its place, unless the script gives
        a weight anew. Samples that a sampler of the session has given count once, with the next batch.

        Args:
            mark: what `begins` returned.
            is_empty: True if no gradients are left: those of earlier backwards are dropped as well.
            retried: True if another backward follows before the step.
        """
        since, is_empty = self._since, is_empty and not mark.used
        ahead = 0.0  # the weight of batches whose forwards are made, for which no backward has begun
        if self._of_forward:
            ahead, self._of_forward = max(0.0, (self._by_forward or 0.0) - (mark.before or 0.0)), False
        if not self._used:
            known = None if mark.used or is_empty else mark.new
            self._carried += (self._new or 0.0) - (known or 0.0)
        self.back_to(mark)
        if since is not None:
            if self._used:
                self.reset()
        elif not retried:
            self._given = None if is_empty else self._before
        if is_empty:
            self._counted, self._basis, self._new, self._seen, self._before = None, KNOWN, None, None, None
            self._of_fills = 0.0
        self._anew, self._others = since is None, (self._before or 0.0) + ahead or None
        if since is not None:
            self._given, self._since = since + (self._others or 0.0), since
            self._weighs(self._given)

    def back_to(self, mark: SampleMark) -> None:
        """Forget what was counted and given since `mark`."""
        self._counted, self._given, self._new = mark.counted, mark.given, mark.new
        self._basis = mark.basis
        self._used, self.latest, self._gives = mark.used, mark.latest, mark.gives
        self._before, self._seen, self._of_forward = mark.before, mark.seen, False
        self._of_fills, self._of_fills_now, self._in_batch = mark.of_fills, 0.0, (0.0, 0.0)

    def since(self, mark: SampleMark) -> float | None:
        """Return the weight that was given since `mark`, else what was counted; None: neither."""
        gives = self._gives > mark.gives
        now, before = (self._given, mark.given) if gives else (self._counted, mark.counted)
        if gives and now is not None:
            now = self._given_for_samples(now) + (0.0 if mark.used else mark.of_fills)
        return None if now is None else now - (0.0 if mark.used else before or 0.0)

    def missed(self) -> None:
        """Note that a backward left gradients without a counted batch."""
        if not self._used:
            self._basis = NONE

    def forward_raised(self, forwards: int) -> bool:
        """Note that a forward has raised, when so many `forwards` have ended; return False if it was not that
        of the batch whose weight was given last."""
        self._of_forward = forwards == self._forwards
        return self._of_forward

    def give(self, weight: float, forwards: int = 0) -> None:
        """Take the weight of a batch, given when the model has made so many `forwards`."""
        self._forget_used()
        self._gives += 1
        if self._anew:
            self._given = self._by_forward = self._others
            self._anew = False
        if forwards != self._forwards:
            self._forwards, self._by_forward = forwards, self._given
        self._given = weight + (self._given or 0.0)
        self._since = weight + (self._since or 0.0)
        self._weighs(self._given)

    def _weighs(self, weight: float) -> None:
        self.latest = 0.0 if self._more.repeats else weight

    @property
    def known(self) -> float | None:
        """The weight that was counted or given; None: neither."""
        return self._counted if self._given is None else self._given_for_samples(self._given)

    @property
    def awaits_backward(self) -> bool:
        """True if a weight is given for a batch that no backward has computed, as far as `begins` knows."""
        return self._since is not None or (self._anew and self._given is not None)

    @property
    def is_used(self) -> bool:
        """True if a reduction has used what is known."""
        return self._used

    def contribution(self, has_gradient: bool) -> ContributionWeight:
        """Return this worker's contribution. Without known samples it weighs 1 if `has_gradient`, else 0.

        Samples that a reduction has used are those of a gradient alone: without one there is no batch.
        """
        if self._more.repeats or (self._used and not has_gradient):
            return ContributionWeight(0.0, 0.0)
        known = (
            self._counted
            if self._given is None
            else self._given - self._of_fills - self._of_fills_now  # as `known` has it; one call less a step
        )
        basis = KNOWN if self._given is not None else NONE if self._counted is None else self._basis
        weight = (1.0 if has_gradient else 0.0) if known is None else known
        samples = 0.0 if self._used else self._samples()
        is_unknown = not samples and self._new is None
        if has_gradient and not self._used and is_unknown and self.unknown:
            samples, self.guessed = self.unknown, True
        again = self._used or (self._given is None and known is not None and not samples)
        return ContributionWeight(weight, samples, basis, again=again, empty=self._seen == 0)

    def _samples(self) -> float:
        """Return the samples for records and schedules: as the session's samplers count them, else a certain
        count, else the script's weight, else a guess."""
        if self._new is not None:
            return self._new
        if self._counted is None or self._basis != KNOWN:
            return self.known or 0.0
        return self._counted

    def use(self, alike: bool = False) -> None:
        """Note that a reduction has used these samples. `alike`: all workers counted alike in the mean."""
        self._used = True
        if alike and self.latest > 0:
            self.latest = 1.0

    def reset(self) -> None:
        """Forget the samples: the iteration has ended."""
        self._counted, self._given, self._basis, self._used = None, None, KNOWN, False
        self._new = self._seen = self._before = self._since = self._by_forward = None
        self._anew = self._of_forward = False
        self._of_batch, self._in_batch, self._of_fills, self._of_fills_now = 0.0, (0.0, 0.0), 0.0, 0.0

    def _forget_used(self) -> None:
        if self._used:
            self.reset()


class SeenSamples(msgspec.Struct, frozen=True, gc=False):
    """The number of samples that a forward's arguments and output show.

    Attributes:
        samples: the first dimension of the first tensor that has a dimension; None without such a tensor.
        confirms: True if the output agrees.
        instead: the first dimensions of the output's tensors, if none of them equals `samples`.
    """

    samples: float | None
    confirms: bool = False
    instead: tuple[float, ...] = ()


def seen_in(inputs: Any, output: Any) -> SeenSamples:
    """Read a forward's number of samples from its arguments and its output.

    An output tensor confirms the number if its first dimension equals it. There is one exception. Where the
    first two dimensions of input and output agree, as in tokens (L, N) and logits (L, N, V), either may be
    the batch. Vectors (N, F) to vectors (N, F), and images (N, C, H, W) to images, have the batch first.
    """
    first = inputs
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    if not isinstance(first, Tensor) or not first.dim():
        first = next((tensor for tensor in tensors_in(inputs) if tensor.dim()), None)
    if first is None:
        return SeenSamples(None)
    samples = first.shape[0]
    if isinstance(output, Tensor):  # nearly always
        outputs = [output] if output.dim() else []
    else:
        outputs = [tensor for tensor in tensors_in(output) if tensor.dim()]
    agrees = confirms = False
    for tensor in outputs:
        if tensor.shape[0] == samples:
            confirms = (confirms or not agrees) and not _is_ambiguous(first, tensor)
            agrees = True
    if not agrees:
        return SeenSamples(float(samples), instead=tuple(float(tensor.shape[0]) for tensor in outputs))
    return SeenSamples(float(samples), confirms)


def _is_ambiguous(first: Tensor, output: Tensor) -> bool:
    """True if either of the first two dimensions may be the batch."""
    both = first.dim() > 1 and output.dim() > 1 and first.shape[1] == output.shape[1] != first.shape[0]
    has_features = first.is_floating_point() and first.dim() == output.dim() and first.dim() in (2, 4)
    return both and not has_features


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested dicts, lists, tuples and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
