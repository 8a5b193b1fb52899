"""A sampler for workers of any speed: each leases runs of indices from the hub as needed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import Sampler

from atoll.core.errors import CheckpointError, RunError
from atoll.core.scriptline import script_line
from atoll.store.ranges import Ranges
from atoll.train.data.given import Given, GivenIndices
from atoll.train.data.groupshares import GroupShares, MemberBatches
from atoll.train.data.order import SampleOrder
from atoll.train.data.runs import SampleRange, cut, joined, merged, positions, without
from atoll.wire.messages import Cut, Leased, Used

FIRST_LEASE = 32  # the most samples in a lease until a batch has been seen
BATCHES = 2  # in a lease: one in use, one ahead; with more, others wait longer at the end of an epoch
_MOST_PENDING = 1000  # the most pending epochs in the state that a newcomer is given
EPOCHS_KEPT = 4  # epochs behind the current one whose used positions a checkpoint can still name
GENERATION = 2**20  # added to the sampler's number at each load: the hub then begins the epochs anew

# Fills, of weight 0, are runs whose epoch is below 0 (`_filling`).
Where: TypeAlias = tuple[int, list[int]]  # the epoch of the next samples; earlier epochs that may not be over
ByEpoch: TypeAlias = dict[int, Ranges]  # positions of epochs' whole orders


class Lessor(Protocol):
    """Signature of `Leases.lease`: lease up to `count` positions of an epoch of `length` samples, within
    `wait` seconds. With `cut`, `count` batches in these parts; then `rewinds` says how often the script has
    gone back to an earlier epoch. `returned`: leased positions that are given back first. `idle`: the worker
    is in a loop without steps."""

    def __call__(
        self,
        sampler: int,
        epoch: int,
        length: int,
        count: int,
        wait: float,
        cut: Cut | None = None,
        rewinds: int = 0,
        returned: Sequence[Used] = (),
        *,
        idle: bool = False,
    ) -> Leased: ...


class Taken(Protocol):
    """Signature of `SampledBatches.taken`: return the latest loop over a DataLoader that has this sampler
    (None: none has it), and the number of batches that the loop has handed to the script."""

    def __call__(self, sampler: LeasedSampler, /) -> tuple[object | None, int]: ...


_LATE = (
    "session.sampler: samples of epoch {} come at the beginning of epoch {}, where one batch may have "
    "samples of both: they made no whole batch, or a worker that was lost had them; each sample counts once "
    "an epoch, so leave it as it is"
)
_WAITED = (
    "session.sampler: worker {} waited {:.0f} s{} at the end of epoch {} for samples that other workers were "
    "given and made no step with; if this is an evaluation, put its loop under torch.no_grad(); if some "
    "batches are left out on purpose, leave it as it is"
)
_NONE_LEFT = (
    "session.sampler: none of the {} samples of epoch {} were left for worker {}: the others have leased all "
    "as they needed data; its loop over a loader ends at once, and next(iter(loader)) raises StopIteration; "
    "take dataset[0] for a look at the data"
)


class LeasedSampler(Sampler[int]):
    """One worker's indices of a dataset, leased from the hub. Each epoch has ShardedSampler's order, drawn
    from the seed.

    The hub leases runs of the order. A lease ends with the commit that uses it; positions that a dead worker
    had not used are leased again. So each sample counts once an epoch, and a faster worker takes more. No
    worker knows beforehand how many samples it gets.

    When nothing is left to lease but others hold unused positions, a worker waits up to `wait` seconds, since
    a holder may die. It does not wait for workers that wait too. Nor does it in a loop whose batches it has
    made no step with: in an evaluation nobody commits, and all would wait. Then its iteration ends, and
    positions of that epoch that come back are dealt first in the next one. In `ssp`, and at a site, `wait`
    must be 0: others may wait for this worker to go on.

    An interrupted iteration goes on after the consumed samples; `set_epoch` abandons it.

    Attributes:
        shuffle: True if the order is drawn anew each epoch.
        given: the number of indices given since the iteration started.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        lease: Lessor,
        number: int = 0,
        workers: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        lease_size: int = 0,
        wait: float = 0.0,
        on_index: Callable[[LeasedSampler], None] | None = None,
        mixes: Callable[[str], None] = lambda _line: None,
        empty: Callable[[str], None] = lambda _line: None,
        waited: Callable[[str], None] = lambda _line: None,
        taken: Taken | None = None,
        rank: int = 0,
        shares: GroupShares | None = None,
        in_batches: bool = False,
    ) -> None:
        """Lease the samples of a dataset. Raises UserError for a dataset without a length.

        Args:
            dataset: the dataset, or its length.
            lease: leases positions from the hub.
            number: the sampler's number among the session's.
            workers: the expected number of workers, for `len` and the first lease.
            seed: the seed of the order.
            shuffle: True to draw the order anew each epoch.
            lease_size: samples in a lease; 0: two batches of the largest size seen so far.
            wait: seconds; must exceed the hub's patience, or a death is noticed too late.
            on_index: called with the sampler before each index.
            mixes: called with a warning when samples of an earlier epoch come in the loop of a later one.
            empty: called with a warning when a loop ends without a sample, since others have leased all.
            waited: called with a warning when the worker has waited in vain for samples that others hold.
            taken: returns what the script has taken of a DataLoader; None: loops without steps are told by
                torch.no_grad() alone, as in a group, whose members must decide alike.
            rank: the worker's number, for those warnings.
            shares: the parts in which a group's members take batches; None: there are no batches of a group.
            in_batches: True if LeasedBatches makes batches of the indices.
        """
        self._samples, self._hand = Samples(SampleOrder(dataset, seed, shuffle)), InHand()
        self._workers = max(1, workers)
        self._leasing = Leasing(
            self._samples,
            self._hand,
            lease,
            number,
            lease_size,
            wait,
            shares,
            workers=self._workers,
            in_vain=partial(_tell_of_wait, waited, rank),
            tells_idle=taken is not None,
        )
        self._on_index, self._mixes, self._empty, self._rank = on_index, mixes, empty, rank
        self._taken_of = taken
        self._loop_before: tuple[object | None, int] = (None, 0)  # as this iteration began
        self.shuffle = shuffle
        self.given = 0
        self._batches = None if shares is None else shares.batches
        made = MemberBatches() if self._batches is None and in_batches else self._batches
        self._made = made  # the batches that are made of the indices; None: the script's loader makes them
        self._taken: Given = made or GivenIndices()
        self._reported = 0  # the number of consumed samples that `used` has returned
        self._batch = 0  # the most samples that were consumed at once
        self._epoch = 0
        self._begun = self._whole = False  # this epoch's iteration has begun; has ended

    @property
    def epoch(self) -> int:
        """The epoch under way; between two epochs, the one that has ended."""
        return self._epoch

    @property
    def resumed(self) -> bool:
        """True if samples of the epoch were used before the loaded checkpoint was saved."""
        return self._samples.done(self._epoch) > 0

    @property
    def consumed(self) -> int:
        """The number of samples that this worker has trained on since the iteration started."""
        return self._taken.consumed

    def set_epoch(self, epoch: int, *, left: bool = False) -> None:
        """Let the next iteration be one of `epoch`. An epoch that the workers have used up gives nothing.

        A group's members decide alike, by `left` (see `end_loop`), whatever their loaders have fetched: of
        the epoch whose loop was left nothing but the rest comes if it is set again, and if another one is
        set, the group asks for no earlier epoch any more. If the script goes back to one, its members ask for
        none of the blocks any more that only some of them have asked for.
        """
        in_batches = self._batches is not None
        if epoch == self._epoch and (not self._whole or (in_batches and left)):
            self._begun = self._begun and not in_batches  # a loop under way goes on
            return
        self.end_loop(left=left)
        if not self._whole:
            # The script abandons the epoch, so its leases are of no use here.
            self._leasing.give_back()
            if in_batches:
                self._leasing.pending.clear()
        if in_batches and epoch < self._epoch:
            self._leasing.rewind()
        self._begin(int(epoch))

    def end_loop(self, *, left: bool = False) -> None:
        """Queue again the positions that were given and not consumed. `left`: a DataLoader shows that the
        latest loop was left before its end.

        After a whole iteration only a rest of less than a batch is queued again (of a loader with
        `drop_last`). A larger rest counts as used: the script left it out, or counts samples in another way.
        Otherwise that rest would come back without end.

        Members of a group have batches of unlike sizes, and fetch unlike numbers of them ahead, so neither
        may decide: of a loop that was left the rest comes first in the next one, which then ends where the
        epoch does; of one that came to its end all counts as used.
        """
        hand = self._hand
        hand.seen += self._take_consumed()
        rest, size = joined(hand.runs), positions(hand.runs)
        hand.runs.clear()
        in_batches = self._batches is not None
        if self._whole and (not left if in_batches else size >= max(1, self._batch)):
            hand.seen += [run for run in rest if run[0] >= 0]
        else:
            self._leasing.turn_back(rest)
            if in_batches and self._whole:
                self._whole, self._leasing.closed = False, True
        self.given = self._reported = 0
        self._taken.begin()

    def __iter__(self) -> Iterator[int]:
        self.end_loop()
        if self._whole:
            self._begin(self._epoch + 1)
        return self._give()

    def __len__(self) -> int:
        """Return an even share, rounded up, of the epoch in progress, else of the next. A faster worker gets
        more."""
        return -(-self.left() // self._workers)

    def left(self, *, in_loop: bool = False) -> int:
        """Return the samples of the epoch in progress, else of the next, that were not used before a load.

        A loader that fetches ahead knows early that an epoch ends. The epoch is in progress as long as there
        is a batch in hand, or a DataLoader's loop is under way or was left (`in_loop`).
        """
        # At the end of a whole iteration a rest of less than a batch may stay in hand: see `end_loop`.
        batch = self._batch if self._batches is None else 0
        is_over = self._whole and not in_loop and positions(self._hand.runs) < max(1, batch)
        return self._samples.order.length - self._samples.done(self._epoch + is_over)

    def used(self) -> list[Used]:
        """Return the positions trained on since the last call. Call this once for each commit.

        Samples are consumed in the order in which they were given.
        """
        runs = joined([*self._hand.take_seen(), *self._take_consumed()])
        for run in runs:
            self._samples.note_used(run)
        return self._named(runs)

    def _named(self, runs: Iterable[SampleRange]) -> list[Used]:
        key = self._leasing.key
        return [Used(sampler=key, epoch=epoch, start=start, stop=stop) for epoch, start, stop in runs]

    def count(self, samples: float) -> float:
        """Record that a backward has reached `samples` samples; return how many count in the mean. Fills do
        not count."""
        filled = self._hand.filled_among(self.consumed - self._reported, int(samples))
        self._batch = max(self._batch, int(samples))
        self._taken.count(samples, self.given)
        return samples - filled

    def give_batch(self, size: int) -> None:
        """Record that `size` of the given indices make a batch."""
        if self._made is not None:
            self._made.give(size)

    def next_sizes(self) -> set[float]:
        """Return the possible sizes of the next batch; see DealtSampler."""
        return self._taken.next_sizes(self.given)

    def held(self) -> list[Used]:
        """Return the positions that this worker was given and that `used` has not returned."""
        return self._named(joined([*self._hand.seen, *(run for run in self._hand.runs if run[0] >= 0)]))

    def leave_leased(self) -> None:
        """Drop leased positions that were not given, before a move to another group. Other workers get
        them."""
        self._leasing.clear()
        self._leasing.rewinds = 0

    def where(self) -> Where:
        """Return this worker's place in its data, which goes to `go_to` on all members of its group."""
        begun = set() if self._whole else {self._epoch}
        return self._epoch + self._whole, sorted(begun.union(self._leasing.unfinished()))

    def go_to(self, members: Sequence[Where]) -> None:
        """Go to the epoch of the furthest of a new group's `members`, since all must make equal requests.

        A member in an earlier epoch ends that epoch at once. The rest of that epoch is given with the next
        one. So are positions of earlier epochs that come back: those of a dead member, for example, when its
        old group is fenced.
        """
        target = max(epoch for epoch, _ in members)
        earlier = {epoch for _, epochs in members for epoch in epochs}
        earlier |= set(range(target - EPOCHS_KEPT, target))
        self._leasing.target = target
        self._leasing.pending = sorted(epoch for epoch in earlier if 0 <= epoch < target)

    def committed(self) -> None:
        """Record a whole iteration: `used` reports its samples."""
        if self._batches is not None:
            self._batches.committed()

    # Checkpoints

    def place(self) -> dict[str, Any]:
        """Return this worker's part of a checkpoint, as JSON values; `state_dict` takes every worker's."""
        first = min([self._epoch + self._whole, *self._leasing.unfinished()])
        return {"epoch": first, "used": self._samples.used()}

    def state_dict(self, consumed: int | Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Return the used samples, independent of the number of workers. Samples used by a worker that has
        died since are missing.

        Args:
            consumed: every worker's `place`; None: this worker's alone. It may be a number, as for
                ShardedSampler: the samples of this epoch that all workers have consumed. Then the state is
                approximate: that many of the first positions count as used.
        """
        places: Sequence[Mapping[str, Any]]
        if isinstance(consumed, int):
            offset = min(self._samples.done(self._epoch) + consumed, self._samples.order.length)
            places = [{"epoch": self._epoch, "used": [[self._epoch, 0, offset]] if offset else []}]
        else:
            places = [self.place()] if consumed is None else consumed
        first = min(place["epoch"] for place in places)
        used = merged(
            (epoch, start, stop) for p in places for epoch, start, stop in p["used"] if epoch >= first
        )
        offset = used[0][2] if used and used[0][:2] == (first, 0) else 0
        return {**self._samples.order.facts(first, offset), "used": [list(run) for run in used]}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` is of another dataset or another order than this sampler's."""
        self._samples.order.check(state)
        runs = state.get("used", [])
        self._samples.order.check_runs(runs)
        if any(run[0] < state["epoch"] or run[1] == run[2] for run in runs):
            raise CheckpointError("the checkpoint's sampler names used samples that cannot be: it is damaged")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`: samples used there are not given again.

        The seed is the saved one. A ShardedSampler's state is accepted too. Every worker must load an equal
        state. Raises CheckpointError as `check_state` does.
        """
        self.check_state(state)
        self._epoch = state["epoch"]
        left = [_run(run) for run in state.get("left", [])]  # a ShardedSampler's, unused before the offset
        before = {epoch: self._samples.order.length for epoch, _, _ in left} | {self._epoch: state["offset"]}
        offset = without([(epoch, 0, stop) for epoch, stop in before.items()], left)
        self._samples.load(state, merged(map(_run, [*offset, *state.get("used", [])])))
        self._hand.clear()
        self.given = self._reported = 0
        self._taken.begin()
        self._begun = self._whole = False
        self._leasing.load({epoch for epoch, _, _ in left if epoch != self._epoch})
        while self._samples.order.length and self._samples.done(self._epoch) == self._samples.order.length:
            self._epoch += 1

    def deal_state(self) -> dict[str, Any]:
        """Return the state with which a newcomer leases in this order. Samples used since the load are left
        out.

        `pending` has other epochs of which positions may come back, or are in hand: the newcomer asks for
        them too.
        """
        order, used = self._samples.order, self._samples.used(since_load=False)
        return {
            **order.facts(self._epoch, 0),
            "loads": self._leasing.loads,
            "used": used,
            "pending": [epoch for epoch in self._leasing.unfinished() if epoch != self._epoch],
        }

    def check_deal_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` does not come from `deal_state`, or is of other data."""
        self.check_state({**state, "epoch": min([state["epoch"], *(run[0] for run in state["used"])])})
        if type(state["loads"]) is not int or state["loads"] < 0:
            raise CheckpointError(f"the sampler was loaded {state['loads']!r} times, which cannot be")
        pending = state["pending"]
        is_list = isinstance(pending, list) and len(pending) <= _MOST_PENDING
        if not is_list or not all(type(epoch) is int and epoch >= 0 for epoch in pending):
            raise CheckpointError(f"the sampler's pending epochs are {pending!r:.100}, which cannot be")

    def load_deal_state(self, state: Mapping[str, Any], _rank: int | None = None) -> None:
        """Lease in the order of the worker that gave `state`."""
        self.load_state_dict({**state, "epoch": min([state["epoch"], *(run[0] for run in state["used"])])})
        self._epoch, leasing = state["epoch"], self._leasing
        leasing.loads = state["loads"]
        leasing.pending = sorted({*leasing.pending, *state["pending"]} - {self._epoch})

    # Giving and leasing

    def _give(self) -> Iterator[int]:
        continued, self._begun = self._begun, True
        if self._taken_of is not None:
            self._loop_before = self._taken_of(self)
        while True:
            if not self._leasing.queue and not self._leasing.more(
                self._epoch, self.given, self._batch, self._trains
            ):
                self._whole = True
                if not continued or self.given:
                    if not self.given and self._leasing.refused == self._epoch:
                        self._empty(_NONE_LEFT.format(self._samples.order.length, self._epoch, self._rank))
                    return
                # The interrupted iteration had nothing left: give the next epoch.
                continued = False
                self._begin(self._epoch + 1)
                self._begun = True
                continue
            epoch, place = self._leasing.next()
            self._hand.hold((epoch, place, place + 1))
            self.given += 1
            if 0 <= epoch < self._epoch:
                self._mixes(_LATE.format(epoch, self._epoch))
            if self._on_index is not None:
                self._on_index(self)
            yield 0 if epoch < 0 else int(self._samples.left(epoch)[0][place])

    def _trains(self) -> bool:
        """Return False in a loop that does not train: the script has taken batches, and made no step with
        any. Other workers may be in such a loop too, and then nobody commits what all wait for."""
        if not torch.is_grad_enabled():
            return False
        if self._taken_of is None or self._reported or not self.given:
            return True
        loop, batches = self._taken_of(self)
        if loop is None:  # the script loops over the sampler itself, and has taken all that was given
            return False
        # A loader with processes asks for indices before its loop is known.
        before, count = self._loop_before
        return batches - (count if loop is before else 0) < 2  # it may train on the first one yet

    # Between iterations

    def _begin(self, epoch: int) -> None:
        self._epoch, self._begun, self._whole, self._leasing.closed = epoch, False, False, False
        kept = {epoch, *self._leasing.unfinished()}
        self._samples.keep(min(kept) - EPOCHS_KEPT, kept)

    def _take_consumed(self) -> list[SampleRange]:
        """Remove from the hand the samples consumed since the last call; return their runs without fills."""
        count = self._taken.used(self.given) - self._reported
        self._reported += count
        return self._hand.take(count)


class InHand:
    """Positions given to a worker and not returned by `used`.

    Attributes:
        runs: those of this iteration, in order.
        seen: those of earlier iterations.
    """

    def __init__(self) -> None:
        self.runs: list[SampleRange] = []
        self.seen: list[SampleRange] = []

    def hold(self, run: SampleRange) -> None:
        """Add a run that was given."""
        if self.runs and self.runs[-1][0] == run[0] and self.runs[-1][2] == run[1]:
            run = (run[0], self.runs.pop()[1], run[2])
        self.runs.append(run)

    def clear(self) -> None:
        """Forget all positions."""
        self.runs, self.seen = [], []

    def holds(self, epoch: int) -> bool:
        """True if positions of `epoch`, or fills of its batches, are in hand."""
        return any(run[0] in (epoch, _filling(epoch)) for run in (*self.runs, *self.seen))

    def filled_among(self, first: int, count: int) -> int:
        """Return the number of fills among `count` samples of `runs`, from the sample of index `first` on."""
        among = cut(cut(self.runs, first)[1], count)[0]
        return positions(run for run in among if run[0] < 0)

    def take(self, count: int) -> list[SampleRange]:
        """Remove the first `count` samples; return their runs without fills."""
        taken, self.runs = cut(self.runs, count)
        return [run for run in taken if run[0] >= 0]

    def take_seen(self) -> list[SampleRange]:
        """Remove and return the runs of earlier iterations."""
        seen, self.seen = self.seen, []
        return seen


class Samples:
    """The samples of each epoch that were used: before the loaded checkpoint was saved, and by this worker
    since."""

    def __init__(self, order: SampleOrder) -> None:
        self.order = order
        self._done: ByEpoch = {}  # used before the load
        self._used: ByEpoch = {}  # used by this worker since
        self._left: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def done(self, epoch: int) -> int:
        """Return the number of samples of an epoch that were used before the load."""
        return len(self._done.get(epoch, ()))

    def used(self, *, since_load: bool = True) -> list[list[int]]:
        """Return the runs used before the load, and with `since_load` those used since, as JSON values."""
        both = (self._done, self._used) if since_load else (self._done,)
        return [
            [epoch, start, stop]
            for ranges in both
            for epoch, parts in ranges.items()
            for start, stop in parts
        ]

    def load(self, state: Mapping[str, Any], done: Iterable[SampleRange]) -> None:
        """Load a checkpoint, before which the runs `done` were used."""
        self.order.load(state)
        self._done, self._used = {}, {}
        for epoch, start, stop in done:
            self._done.setdefault(epoch, Ranges()).add(start, stop)
        self._left.clear()

    def keep(self, first: int, epochs: Collection[int]) -> None:
        """Forget runs used before epoch `first`, and the order of all epochs but `epochs`."""
        for ranges in (self._used, self._done):
            for old in [epoch for epoch in ranges if epoch < first]:
                del ranges[old]
        self._left = {epoch: left for epoch, left in self._left.items() if epoch in epochs}

    def left(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the epoch's indices that the hub leases, and their positions in the epoch's whole order.

        Both are int64, (left,); the positions are None if they are all, in order. Samples used before a load
        are left out.
        """
        if epoch not in self._left:
            indices, places = self.order.draw(epoch), None
            if self._done.get(epoch):
                left = torch.ones(self.order.length, dtype=torch.bool)
                for start, stop in self._done[epoch]:
                    left[start:stop] = False
                places = left.nonzero().flatten()
                indices = indices[places]
            self._left[epoch] = indices, places
        return self._left[epoch]

    def note_used(self, run: SampleRange) -> None:
        """Record that a leased run was used."""
        epoch, start, stop = run
        places, used = self.left(epoch)[1], self._used.setdefault(epoch, Ranges())
        if places is None:
            used.add(start, stop)
            return
        for place in places[start:stop].tolist():
            used.add(place, place + 1)


class Leasing:
    """The requests of a sampler to the hub.

    Attributes:
        queue: leased runs that were not given yet.
        loads: the number of times that the sampler was loaded.
        pending: earlier epochs of which positions may come back.
        target: the epoch of the worker's group; earlier epochs end at once.
        rewinds: how often the script has gone back to an earlier epoch, in the worker's present group. In
            between epochs ascend, so the script begins each of them once.
        closed: nothing is leased of this epoch behind what is queued.
        refused: the latest epoch of which the hub had nothing left for this worker; -1: none.
    """

    def __init__(
        self,
        samples: Samples,
        hand: InHand,
        lease: Lessor,
        number: int,
        size: int,
        wait: float,
        shares: GroupShares | None,
        *,
        workers: int,
        in_vain: Callable[[int, float], None],
        tells_idle: bool,
    ) -> None:
        """See LeasedSampler. `in_vain` is called with an epoch, and the seconds for which this worker has
        waited for its samples, none of which came. `tells_idle`: the hub is told of loops without steps."""
        self._workers, self._in_vain, self._tells_idle = workers, in_vain, tells_idle
        self._returned: list[Used] = []  # to give back with the next request
        self._samples, self._hand, self._lease = samples, hand, lease
        self._number, self._size, self._wait, self._shares = number, size, wait, shares
        self.queue: deque[SampleRange] = deque()
        self.loads = self.target = self.rewinds = 0
        self.refused = -1
        self.pending: list[int] = []
        self.closed = False

    @property
    def key(self) -> int:
        """The number under which the hub keeps the sampler's books."""
        return self._number + GENERATION * self.loads

    def load(self, pending: Iterable[int]) -> None:
        """Begin new books at the hub, after a checkpoint is loaded in which positions of these epochs are
        left."""
        self.clear()
        self.pending = sorted(pending)
        self.loads, self.target = self.loads + 1, 0

    def rewind(self) -> None:
        """Record that the script goes back to an earlier epoch, as all members of the group do."""
        self.rewinds += 1
        self.target = 0

    def clear(self) -> None:
        """Forget leased positions."""
        self.queue.clear()
        self.closed = False
        if self._shares is not None:
            self._shares.batches.ahead.clear()

    def give_back(self) -> None:
        """Give leased positions back to the hub, with the next request: the script has left their epoch, and
        other workers may wait for them. What a group has leased stays its own."""
        if self._shares is None:
            self._returned += [
                Used(sampler=self.key, epoch=epoch, start=start, stop=stop)
                for epoch, start, stop in joined(self.queue)
                if epoch >= 0
            ]
        self.clear()

    def turn_back(self, runs: Sequence[SampleRange]) -> None:
        """Queue runs again that were given and not used."""
        self.queue.extendleft(reversed(runs))
        if self._shares is not None:
            self._shares.batches.turn_back()

    def next(self) -> tuple[int, int]:
        """Remove the first leased position; return its epoch and the position."""
        epoch, place, stop = self.queue.popleft()
        if place + 1 < stop:
            self.queue.appendleft((epoch, place + 1, stop))
        return epoch, place

    def unfinished(self) -> list[int]:
        """Return the epochs of which positions may come back, or are queued or in hand."""
        there = (*self.queue, *self._hand.runs, *self._hand.seen)
        return sorted({*self.pending, *(run[0] for run in there if run[0] >= 0)})

    def more(self, epoch: int, given: int, batch: int, trains: Callable[[], bool]) -> bool:
        """Queue newly leased positions, of pending epochs before those of `epoch`; return False at the end of
        this worker's iteration.

        All members of a group make equal requests and get equal answers.

        Args:
            given: the samples that the worker was given in this iteration.
            batch: the samples of its largest batch.
            trains: returns False in a loop without steps: then nobody waits for the others' positions.
        """
        if self.closed or epoch < self.target:
            self.closed = False
            return False
        waits = self._wait > 0 and trains()
        idle = self._tells_idle and self._wait > 0 and not waits
        for earlier in [each for each in self.pending if each != epoch]:
            leased = self._ask(earlier, given, batch, idle=idle)
            if self._take(leased):
                return True
            if leased.over and not self._may_come_back(leased):
                self.pending.remove(earlier)
        leased = self._ask(epoch, given, batch, idle=idle)
        # Two workers may wait for each other's positions: then the hub answers both that the epoch is over.
        held = not leased.over and leased.start >= leased.stop and not leased.length
        if held and waits:
            began = time.monotonic()
            leased = self._ask(epoch, given, batch, self._wait)
            seconds = time.monotonic() - began
            if seconds >= self._wait and leased.start >= leased.stop and not leased.length:
                self._in_vain(epoch, seconds)
        if self._take(leased):
            return True
        if self._samples.left(epoch)[0].numel():
            self.refused = epoch
        kept = [] if leased.over and not self._may_come_back(leased) else [epoch]
        self.pending = [*(each for each in self.pending if each != epoch), *kept]
        return False

    def _may_come_back(self, leased: Leased) -> bool:
        """Return True if positions of an epoch that is over may come back, and so are to be asked for again.

        With positions in hand others may hold positions too. Members of a group that make batches of their
        parts have unlike batches in hand, by what their loaders fetch: for them the hub alone tells.
        """
        return leased.held or (self._shares is None and self._hand.holds(leased.epoch))

    def _ask(self, epoch: int, given: int, batch: int, wait: float = 0.0, *, idle: bool = False) -> Leased:
        """Lease samples of an epoch. Raises RunError for a lease beyond the epoch's end."""
        length = len(self._samples.left(epoch)[0])
        if not length:
            return Leased(sampler=self.key, epoch=epoch, start=0, stop=0, over=True)
        more: dict[str, Any] = {"idle": True} if idle else {}
        if self._shares is None:
            count = self._count(length, given, batch)
            if self._returned:
                more["returned"] = self._returned
            leased = self._lease(self.key, epoch, length, count, wait, **more)
            self._returned = []
        else:
            # Of a short epoch no group takes all at once.
            count = min(BATCHES, max(1, length // self._shares.whole()))
            cut = self._shares.cut()
            leased = self._lease(self.key, epoch, length, count, wait, cut, self.rewinds, **more)
        if leased.stop > length:
            raise RunError(f"the hub leased samples to {leased.stop} of epoch {epoch}, which has {length}")
        return leased

    def _take(self, leased: Leased) -> bool:
        """Queue a lease with its fills; return True if anything is queued."""
        if leased.cut is not None:
            assert self._shares is not None  # or there would be no `cut` in the request
            for start, stop in self._shares.own(leased, leased.cut):
                fills = start > stop
                self.queue.append(
                    (_filling(leased.epoch), 0, -stop) if fills else (leased.epoch, start, stop)
                )
            return bool(self.queue)
        missing = leased.length - (leased.stop - leased.start)
        if leased.start < leased.stop:
            self.queue.append((leased.epoch, leased.start, leased.stop))
        if missing > 0:  # other members of the group got more samples
            self.queue.append((_filling(leased.epoch), 0, missing))
        return bool(self.queue)

    def _count(self, length: int, given: int, batch: int) -> int:
        """Return the number of samples to lease: whole batches, the rest of a batch under way included.

        Before a batch was seen it is at most an even share of the epoch's `length` samples, so that every
        worker has a first batch.
        """
        if self._size:
            return self._size
        if batch:
            return BATCHES * batch - given % batch
        return min(FIRST_LEASE, -(-length // self._workers))


class LeasedBatches(Sampler[list[int]]):
    """Batches of a LeasedSampler, for `DataLoader(batch_sampler=...)`."""

    def __init__(
        self,
        sampler: LeasedSampler,
        size: Callable[[], int],
        shares: GroupShares | None = None,
        was_left: Callable[[object], bool] = lambda _batches: False,
    ) -> None:
        """Make batches of the sampler's indices.

        Args:
            sampler: the sampler.
            size: returns the size of the next batch, unless `shares` knows it.
            shares: the parts in which the members of this worker's group take batches; None: workers are in
                no groups.
            was_left: returns True if the latest loop over these batches was left before its end.
        """
        self.sampler, self._size, self._shares, self._was_left = sampler, size, shares, was_left

    @property
    def epoch(self) -> int:
        """The sampler's epoch."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the sampler's epoch."""
        self.sampler.set_epoch(epoch, left=self._was_left(self))

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader's new loop counts as the latest one once this has returned.
        return self._give(self._was_left(self))

    def _give(self, left: bool) -> Iterator[list[int]]:
        self.sampler.end_loop(left=left)
        indices, batches = iter(self.sampler), None if self._shares is None else self._shares.batches
        for first in indices:  # only with it may more be leased, whose batches have known sizes
            size = batches.ahead.popleft() if batches is not None and batches.ahead else self._size()
            batch = [first, *islice(indices, size - 1)]
            self.sampler.give_batch(len(batch))
            yield batch

    def __len__(self) -> int:
        """Return an estimate of the number of batches: for a group's members, who make equally many, as if
        all groups made equally many too; else the worker's own."""
        if self._shares is not None:
            return -(-self.sampler.left(in_loop=self._was_left(self)) // self._shares.whole())
        return -(-len(self.sampler) // self._size())


def _tell_of_wait(tell: Callable[[str], None], rank: int, epoch: int, seconds: float) -> None:
    at = script_line()
    tell(_WAITED.format(rank, seconds, f" ({at})" * bool(at), epoch))


def _filling(epoch: int) -> int:
    """Return the number below 0 that marks fills of `epoch` in runs."""
    return -1 - epoch


def _run(numbers: Sequence[int]) -> SampleRange:
    epoch, start, stop = numbers
    return epoch, start, stop
