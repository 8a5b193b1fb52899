"""The batches on which a session's models train: their numbers of samples, and their epochs."""

from __future__ import annotations

from atoll.core.stands import SAMPLER, UNKNOWN, Epoch
from atoll.core.weighing import GUESSED, KNOWN, NONE
from atoll.train.checkpoint.resume import AnySampler, TrainingState
from atoll.train.data.leased_sampler import LeasedSampler
from atoll.train.data.passes import Passes
from atoll.train.data.sharereports import ShareReports
from atoll.train.gradients.samples import CountedBatch, SeenSamples


class SampledBatches:
    """The batches of a session's first model, counted by the session's samplers if it has any.

    A leased sample counts as used once any of the session's models has trained on it (`use`).

    Without a sampler of the session the epoch is the one that the script's loop shows
    (`train/data/passes.py`). If each worker leases its own data the epoch is unknown.
    """

    def __init__(self, state: TrainingState, passes: Passes, shares: ShareReports | None) -> None:
        self.shares = shares
        self._state, self._passes = state, passes
        self._sampling: AnySampler | None = None  # the sampler that gave the latest index
        self._trains_on: AnySampler | None = None  # the first sampler on whose batches the model trained
        self._leased: dict[LeasedSampler, None] = {}  # those that have given indices
        self._others = False  # True if the session has further models
        self._piece = 0.0  # the samples of the present piece of a batch whose size is certain
        self._seen = self._new = 0.0  # samples of the present piece, and those of them that are new
        self._repeated = self._renewed = 0.0  # the same of pieces that are computed again

    def given_by(self, sampler: AnySampler) -> None:
        """Note that `sampler` is about to give an index: the next forward's samples are from it."""
        if sampler is not self._sampling:
            self._sampling = sampler
            if isinstance(sampler, LeasedSampler):
                self._leased[sampler] = None
        if sampler.resumed:
            # A DataLoader draws a random number when it starts; an uninterrupted run drew it long ago.
            self._state.restore_random_once()

    def taken(self, sampler: LeasedSampler, /) -> tuple[object | None, int]:
        """Return the latest loop over a DataLoader that has this sampler (None: none has it), and the number
        of batches that the loop has handed to the script."""
        latest = self._passes.over(sampler)
        return latest, 0 if latest is None else latest.given

    def expected(self) -> set[float]:
        """Return the possible sizes of the next batch, as far as its sampler knows."""
        return self._sampling.next_sizes() if self._sampling is not None else set()

    def begin_piece(self, samples: float) -> None:
        """Note that the script is given a piece of a batch. 0 `samples`: its size is not certain."""
        self._piece, self._seen, self._new = samples, 0.0, 0.0

    def end_piece(self, *, again: bool) -> None:
        """Note the piece's end. `again`: it is computed again, and what it has counted counts once."""
        if again:
            self._repeated += self._seen
            self._renewed += self._new
        self._piece = 0.0

    def forward(self) -> None:
        self._passes.forward()

    def another(self) -> OtherBatches:
        """Return the batches of a further model of the session."""
        self._others = True
        return OtherBatches(self._passes, self)

    def use(self, samples: float) -> None:
        """Count leased samples that no model has trained on, when a backward of a further model reaches a
        forward of `samples` samples.

        A lease ends with the commit that uses it. Any model's step is a commit, and the script may step the
        first model seldom, or with data of its own.
        """
        sampler = self._sampling
        if not isinstance(sampler, LeasedSampler):
            return
        self._trains_on = self._trains_on or sampler
        samples -= self._use_of(sampler, samples)
        self._use_beside(sampler, samples)

    def _use_of(self, sampler: LeasedSampler, samples: float) -> float:
        """Count up to `samples` samples that this sampler gave to the script and no backward has reached;
        return how many these are."""
        taken = self._passes.over(sampler)
        if taken is None:  # the script loops over the sampler itself
            fresh = max(0.0, min(samples, float(sampler.given - sampler.consumed)))
        else:
            fresh = taken.use(samples, sampler.next_sizes(), by_first=False)
        if fresh:
            sampler.count(fresh)
        return fresh

    def _use_beside(self, sampler: AnySampler, samples: float) -> None:
        """Count samples that are no new ones of `sampler` at other samplers: the script may loop over several
        loaders at once."""
        for other in self._leased:
            if other is not sampler and samples > 0:
                samples -= self._use_of(other, samples)

    def count(self, seen: SeenSamples) -> CountedBatch:
        samples, certain, sampler = seen.samples, seen.confirms, self._sampling
        new: float | None = None
        filled = 0.0
        self._passes.trains()
        if samples is None:
            return CountedBatch(None, NONE)
        if sampler is not None:
            self._trains_on = self._trains_on or sampler
            sizes, taken = sampler.next_sizes(), self._passes.over(sampler)
            unused = sizes
            if taken is not None and taken.is_shared:
                sizes = taken.next_sizes(sizes)
            possible = sizes | {self._piece} if self._piece else sizes
            if samples not in possible:
                samples = next((each for each in seen.instead if each in possible), samples)
            certain = certain or samples in possible
            self._seen += samples
            whole, is_whole, fresh = samples, samples in sizes, 0.0
            if self._repeated:
                fresh = whole
                self._repeated = max(0.0, self._repeated - samples)
                if taken is not None:
                    new = min(samples, self._renewed) * taken.share
                    self._renewed -= new
                    samples *= taken.share
            elif taken is None:
                if isinstance(sampler, LeasedSampler) and (self._others or len(self._leased) > 1):
                    fresh = self._use_of(sampler, samples)
                else:
                    samples = sampler.count(samples)
            elif reached := taken.reach(samples, sizes):
                fresh = taken.use(samples, unused, by_first=True) if taken.is_shared else reached
                new = reached - fresh + (sampler.count(fresh) if fresh else 0.0)
                taken.share = new / reached
                samples *= taken.share
            else:  # the batch is used already
                new, is_whole = 0.0, samples == taken.size
                certain = certain or is_whole
                if not self._passes.is_after(taken):
                    samples *= taken.share
            if len(self._leased) > 1:
                self._use_beside(sampler, whole - fresh)
            if samples < whole and is_whole and taken is not None and self._passes.is_surely(taken):
                filled = whole - samples
            self._new += new or 0.0
        return CountedBatch(samples, KNOWN if certain else GUESSED, new, seen.samples, filled)

    def epoch(self) -> Epoch:
        sampler = self._trains_on
        if isinstance(sampler, LeasedSampler):
            return UNKNOWN
        return self._passes.epoch() if sampler is None else Epoch(sampler.epoch, SAMPLER)

    def whole(self) -> None:
        if self._sampling is not None:
            self._sampling.committed()


class OtherBatches:
    """The batches of one of a session's further models. No sampler of the session tells their weight, but
    leased samples count as used by them too."""

    shares = None

    def __init__(self, passes: Passes, first: SampledBatches | None = None) -> None:
        """Take the session's passes, and the batches of its `first` model."""
        self._passes, self._first = passes, first

    def forward(self) -> None:
        self._passes.forward()

    def count(self, seen: SeenSamples) -> CountedBatch:
        if seen.samples is None:
            return CountedBatch(None, NONE)
        if self._first is not None:
            self._first.use(seen.samples)
        return CountedBatch(seen.samples, KNOWN if seen.confirms else GUESSED)

    def epoch(self) -> Epoch:
        return UNKNOWN

    def whole(self) -> None:
        """Do nothing: an iteration counts with the first model's gradients."""
