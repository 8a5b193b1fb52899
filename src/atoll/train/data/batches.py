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

    Without a sampler of the session the epoch is the one that the script's loop shows
    (`train/data/passes.py`). If each worker leases its own data the epoch is unknown.
    """

    def __init__(self, state: TrainingState, passes: Passes, shares: ShareReports | None) -> None:
        self.shares = shares
        self._state, self._passes = state, passes
        self._sampling: AnySampler | None = None  # the sampler that gave the latest index
        self._trains_on: AnySampler | None = None  # the first sampler on whose batches the model trained
        self._piece = 0.0  # the samples of the present piece of a batch whose size is certain
        self._seen = self._new = 0.0  # samples of the present piece, and those of them that are new
        self._repeated = self._renewed = 0.0  # the same of pieces that are computed again

    def given_by(self, sampler: AnySampler) -> None:
        """Note that `sampler` is about to give an index: the next forward's samples are from it."""
        self._sampling = sampler
        if sampler.resumed:
            # A DataLoader draws a random number when it starts; an uninterrupted run drew it long ago.
            self._state.restore_random_once()

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

    def count(self, seen: SeenSamples) -> CountedBatch:
        samples, certain, sampler = seen.samples, seen.confirms, self._sampling
        new: float | None = None
        filled = 0.0
        self._passes.trains()
        if samples is None:
            return CountedBatch(None, NONE)
        if sampler is not None:
            self._trains_on = self._trains_on or sampler
            sizes = sampler.next_sizes()
            possible = sizes | {self._piece} if self._piece else sizes
            if samples not in possible:
                samples = next((each for each in seen.instead if each in possible), samples)
            certain = certain or samples in possible
            self._seen += samples
            whole, taken = samples, self._passes.over(sampler)
            is_whole = whole in sizes
            if self._repeated:
                self._repeated = max(0.0, self._repeated - samples)
                if taken is not None:
                    new = min(samples, self._renewed) * taken.share
                    self._renewed -= new
                    samples *= taken.share
            elif taken is None:
                samples = sampler.count(samples)
            elif reached := taken.reach(samples, sizes):
                new = sampler.count(reached)
                taken.share = new / reached
                samples *= taken.share
            else:  # the batch is used already
                new, is_whole = 0.0, samples == taken.size
                certain = certain or is_whole
                if not self._passes.is_after(taken):
                    samples *= taken.share
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
    """The batches of a session's further models, which no sampler of the session counts."""

    shares = None

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def forward(self) -> None:
        self._passes.forward()

    def count(self, seen: SeenSamples) -> CountedBatch:
        if seen.samples is None:
            return CountedBatch(None, NONE)
        return CountedBatch(seen.samples, KNOWN if seen.confirms else GUESSED)

    def epoch(self) -> Epoch:
        return UNKNOWN

    def whole(self) -> None:
        """Do nothing: the first model's iterations use up the samplers' data."""
