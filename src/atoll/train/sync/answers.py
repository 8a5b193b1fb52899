"""The answers of shards, chunk by chunk: means, and new parameters, which are published all at once.

All chunks are asked for at once; or a few at a time, if they go into tiers of memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from atoll.core.errors import UserError
from atoll.exchange.feedback import Feedback
from atoll.tensors.binding import BoundChunk
from atoll.train.sync.connection import (
    CONTRIBUTION,
    STEP,
    Connection,
    check_holder,
    check_mean,
    chunks_named,
    values_of,
)
from atoll.train.sync.stores import Store
from atoll.wire.messages import AnyMessage, LostBlocks, Mean, Parameters, Pull, PullMean

Share = tuple[int, int]  # a share of each chunk: the index of its run, and the number of runs


class Asking:
    """Questions to shards for chunks, of which at most `window` are on their way.

    `ask(chunk)` makes the question, which is sent again until the chunk `has_come`. Shards take turns, so
    that all of their links are used.
    """

    def __init__(
        self, connection: Connection, kind: str, ask: Callable[[int], Pull | PullMean], window: int
    ) -> None:
        self._connection, self._kind, self._ask, self._window = connection, kind, ask, window
        self._waiting: deque[int] = deque()
        self._asked: set[int] = set()

    def begin(self, chunks: Iterable[int]) -> None:
        """Ask for these chunks, and no longer for others."""
        self.stop()
        self._waiting.extend(in_turn(chunks, self._connection.shard_of))
        self._more()

    def stop(self) -> None:
        """Ask for no chunk any more."""
        self._waiting.clear()
        for chunk in self._asked:
            self._connection.shards.answered((self._kind, chunk))
        self._asked.clear()

    def is_asked(self, chunk: int) -> bool:
        """True if a chunk is on its way, or has come and is not yet processed."""
        return chunk in self._asked

    def has_come(self, chunk: int) -> None:
        """Mark a chunk as processed, and ask for another one."""
        self._asked.discard(chunk)
        self._connection.shards.answered((self._kind, chunk))
        self._more()

    def _more(self) -> None:
        while self._waiting and len(self._asked) < self._window:
            chunk = self._waiting.popleft()
            self._asked.add(chunk)
            shard = self._connection.shard_of[chunk]
            self._connection.shards.send(shard, self._ask(chunk), until=(self._kind, chunk))


def in_turn(chunks: Iterable[int], shard_of: Mapping[int, int]) -> list[int]:
    """Return the chunks in the order in which they are asked for: one of each shard, and again."""
    by_shard: dict[int, list[int]] = {}
    for chunk in chunks:
        by_shard.setdefault(shard_of[chunk], []).append(chunk)
    longest = max(map(len, by_shard.values()), default=0)
    return [held[turn] for turn in range(longest) for held in by_shard.values() if turn < len(held)]


class Answers:
    """Each chunk's answer to the latest question: this side's run of the values, 1-D, until it is taken."""

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        connection: Connection,
        kind: str,
        ask: Callable[[int], Pull | PullMean],
        window: int | None,
    ) -> None:
        """Take answers of one kind.

        Args:
            chunks: the chunks.
            connection: the connection to the shards.
            kind: names the resend topics of the questions.
            ask: makes the question for one chunk.
            window: the most chunks on their way at once, as the store allows; None: all are asked for at
                once.
        """
        self._chunks = {bound.chunk.id: bound for bound in chunks}
        self._connection = connection
        self._asking = None if window is None else Asking(connection, kind, ask, window)
        self._staged: dict[int, Tensor | None] = {}  # None: the answer was taken
        self._share: Share = (0, 1)

    @property
    def have_arrived(self) -> bool:
        """True once every chunk has an answer."""
        return len(self._staged) == len(self._chunks)

    @property
    def by_chunk(self) -> bool:
        """True if chunks are asked for, and taken, one by one."""
        return self._asking is not None

    def in_turn(self, of: Collection[int] | None = None) -> list[BoundChunk]:
        """Return the chunks `of` (None: all) in the order in which they are asked for, which is equal on all
        members of a group."""
        chunks = self._chunks if of is None else [each for each in self._chunks if each in of]
        return [self._chunks[each] for each in in_turn(chunks, self._connection.shard_of)]

    @abstractmethod
    def what(self) -> str:
        """Return the awaited answers, in words."""

    def begin(self, of: Collection[int] | None = None) -> None:
        """Ask for the first of the chunks `of` (None: of all), if they are asked for one by one."""
        if self._asking is not None:
            self._asking.begin(bound.chunk.id for bound in self.in_turn(of))

    def stop(self) -> None:
        """Ask for no chunk any more."""
        if self._asking is not None:
            self._asking.stop()

    def next(self, chunk: int, what: str | Callable[[], str]) -> Tensor:
        """Wait for this side's run of a chunk, and return it."""
        shard = self._connection.shard_of[chunk]
        self._connection.shards.wait(lambda: chunk in self._staged, lambda: [shard], what)
        values, self._staged[chunk] = self._staged[chunk], None
        assert values is not None
        assert self._asking is not None
        self._asking.has_come(chunk)
        return values

    def collect(self, what: str | Callable[[], str]) -> dict[int, Tensor]:
        """Wait for all answers; return the runs that were not taken before, by chunk."""
        self._connection.shards.wait(lambda: self.have_arrived, self._missing, what)
        return {chunk: values for chunk, values in self._staged.items() if values is not None}

    def _is_wanted(self, chunk: int, share: int, shares: int) -> bool:
        """True if an answer is to the latest question.

        Others may be to a question from before a member was lost, or may have come a second time.
        """
        asked = self._asking is None or self._asking.is_asked(chunk)
        return chunk in self._chunks and (share, shares) == self._share and asked

    def _named_missing(self) -> str:
        return chunks_named(chunk for chunk in self._chunks if chunk not in self._staged)

    def _missing(self) -> list[int]:
        shard_of = self._connection.shard_of
        return sorted({shard_of[chunk] for chunk in self._chunks if chunk not in self._staged})


class Means(Answers):
    """The answers with a bsp iteration's mean."""

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        connection: Connection,
        store: Store,
        feedback: Feedback,
        *,
        of_group: bool,
    ) -> None:
        """Take means. `of_group`: other members take the answers too; else the store keeps them as they
        come."""
        super().__init__(chunks, connection, "mean", self._pull_of, store.window)
        self._store, self._feedback, self._of_group = store, feedback, of_group
        self._iteration = -1
        self.words: dict[int, Mean] = {}  # the shards' messages, by chunk
        connection.shards.on(Mean, self._handle)

    def expect(self, iteration: int, share: Share) -> None:
        """Expect the mean of `iteration`, for which the last push to each shard has asked, or `begin`
        asks."""
        self._staged.clear()
        self.words.clear()
        self._iteration, self._share = iteration, share

    def over(self) -> None:
        """End the exchange: all members have the mean. Answers that still come are repeats."""
        self.stop()
        self._staged.clear()
        self._iteration = -1
        self._connection.shards.answered(CONTRIBUTION)

    def what(self) -> str:
        return f"the mean of {self._named_missing()} in iteration {self._iteration}"

    def _pull(self, chunks: Sequence[int]) -> PullMean:
        return PullMean(
            incarnation=self._connection.shards.incarnation,
            iteration=self._iteration,
            share=self._share[0],
            shares=self._share[1],
            chunks=list(chunks),
        )

    def _pull_of(self, chunk: int) -> PullMean:
        return self._pull([chunk])

    def _handle(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Mean)
        if message.iteration != self._iteration:
            return
        if not self._is_wanted(message.chunk, message.share, message.shares):
            return
        bound = self._chunks[message.chunk]
        check_mean(self._connection.shard_of, shard, message, bound)
        if not any(self._connection.shard_of[chunk] == shard for chunk in self.words):
            self._answers(shard)
        self._feedback.answered(message.iteration, message.chunk, message.lost)
        values = values_of(payload, bound, shard, self._share, shortened=message.shortened)
        self._staged[message.chunk] = values.clone() if self._of_group else self._store.keep(bound, values)
        self.words[message.chunk] = message

    def _answers(self, shard: int) -> None:
        """Note that a shard answers, and so has the contribution, which counts. Only the rest of its answer
        is asked for again.

        A group's sums in tiers stay unchanged until the exchange is over.
        """
        if not self.by_chunk:
            self._connection.shards.answered(CONTRIBUTION, shard, instead=self._pull([]))
        elif not self._of_group:
            self._connection.shards.answered(CONTRIBUTION, shard)


class NewParameters(Answers):
    """The answers with parameters from the shards: staged as they arrive, and published all at once.

    Attributes:
        steps: True while the parameters to come follow from the script's own step.
        clock: the clock of the latest answer, with which a worker that joins late begins.
        staleness: the staleness in the latest answer.
        consumed: the largest number of samples that an answer to the latest question has counted.
    """

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        connection: Connection,
        store: Store,
        *,
        of_group: bool = False,
        keeps_graphs: bool = False,
        takes_changes: bool = False,
        lost: Callable[[int, int, LostBlocks | None], None] = lambda *_: None,
        consumed: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Take parameters into `store`.

        Args:
            chunks: the chunks.
            connection: the connection to the shards.
            store: takes the parameters.
            of_group: True if other members take the answers too, in memory of their own.
            keeps_graphs: True to leave a parameter without a gradient alone in the script's own step, until
                `show_rest`: a graph may be alive that has saved its value.
            takes_changes: True if the shards are told of the script's own writes to parameters.
            lost: called for each answer with the iteration of the contribution, the chunk, and the lost part
                of the contribution.
            consumed: called with the number of samples of all workers that an answer has counted.
        """
        super().__init__(chunks, connection, "parameters", self._pull_of, store.window)
        self._store, self._of_group, self._told_lost, self._told_consumed = store, of_group, lost, consumed
        self._keeps_graphs, self.takes_changes = keeps_graphs, takes_changes
        self._of: Collection[int] | None = None  # the chunks that the script's own step is of; None: all
        self._stale: set[int] = set()  # chunks that were left alone, if they are taken one by one
        self._latest = 0  # the clock of the latest pull
        self._publishing = False  # True while the script waits for the parameters
        self._begun = False  # True while some values are written, and not all
        self._drops = False  # True while answers equal the present parameters
        self._newest = False
        self.steps = False
        self._asked: int | None = None  # the clock of the pull under way
        self._until: tuple[Hashable, ...] = ()  # resend topics that its answer ends
        self.clock = 0
        self.staleness = 0.0
        self.consumed = 0.0
        connection.shards.on(Parameters, self._handle)

    @property
    def on_their_way(self) -> bool:
        return self._asked is not None

    def pull(
        self,
        clock: int,
        newest: bool = False,
        contribution: Hashable = CONTRIBUTION,
        share: Share = (0, 1),
    ) -> None:
        """Ask for the parameters with which a worker that has committed `clock` iterations goes on.

        If chunks are taken one by one, each is asked for as it is published.

        Args:
            clock: the number of committed iterations.
            newest: see wire/served.py: Pull.
            contribution: the resend topic of the last contribution, which the answer ends too.
            share: the run of each chunk to ask for, and the number of runs.
        """
        self.expect(clock, contribution, share)
        self._newest = newest
        if self.by_chunk:
            return
        for shard in sorted(set(self._connection.shard_of.values())):
            self._connection.shards.send(shard, self._pull([]), until=STEP)

    def expect(self, clock: int, contribution: Hashable = CONTRIBUTION, share: Share = (0, 1)) -> None:
        """Expect parameters that the last contribution has already requested; the arguments are those of
        `pull`."""
        self._staged.clear()
        self.consumed, self._newest = 0.0, False
        self._asked, self._share, self._until = clock, share, (contribution, STEP)
        self._latest = clock

    def _pull(self, chunks: Sequence[int]) -> Pull:
        assert self._asked is not None
        return Pull(
            incarnation=self._connection.shards.incarnation,
            clock=self._asked,
            newest=self._newest,
            share=self._share[0],
            shares=self._share[1],
            chunks=list(chunks),
        )

    def _pull_of(self, chunk: int) -> Pull:
        return self._pull([chunk])

    # -- publishing -----------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Wait for the requested parameters, and leave the present ones unchanged."""
        if self._asked is not None:
            self.collect(self.what)

    def publish(self) -> None:
        """Wait for the requested parameters, and write them over the present ones."""
        if self._asked is None:
            return
        self._begin_values()
        if self.by_chunk:
            of = self._of if self._keeps_graphs and self.steps else None
            self._publish_in_turn(of)
            self._stale = set() if of is None else (self._stale | set(self._chunks)).difference(of)
        else:
            self._publish_as_they_come()
        self.discarded()
        self._end_values()

    def _publish_in_turn(self, of: Collection[int] | None) -> None:
        """Take the chunks `of` (None: all), one by one, and leave the others alone."""
        self.begin(of)
        for bound in self.in_turn(of):
            self.become(bound, self.next(bound.chunk.id, self.what))

    def _publish_as_they_come(self) -> None:
        self._publishing = True
        try:
            for chunk_id, values in self._staged.items():
                if values is not None:
                    self.become(self._chunks[chunk_id], values)
            self._staged = dict.fromkeys(self._staged)
            self.collect(self.what)
        finally:
            self._publishing = False

    def become(self, bound: BoundChunk, values: Tensor) -> None:
        """Give a chunk's parameters these values. `adopt` or `publish` marks the end of all chunks."""
        if self._drops:
            return
        if not self._begun:
            self._begin_values()
        present = self._store.present(bound) if self._keeps_graphs and self.steps else None
        if present is not None and self._of is not None and bound.chunk.id not in self._of:
            present = [False] * len(present)
        self._store.write_values(bound, values, present)

    def show_rest(self, of: Collection[int] | None = None) -> None:
        """Show the latest values of parameters that had no gradient in the latest step, in the chunks `of`;
        None: in all."""
        due = self._stale if of is None else self._stale.intersection(of)
        if due:
            self.expect(self._latest)
            self._begin_values()
            self._publish_in_turn(due)
            self._stale = self._stale.difference(due)
            self.discarded()
            self._end_values()
        self._store.write_rest(of)

    def adopt(self, values: Mapping[int, Tensor]) -> None:
        """Write `values`, 1-D, by chunk, of all chunks that were not written yet, and end the wait for the
        requested parameters."""
        self._connection.shards.answered(CONTRIBUTION)  # another member may have talked to the shards
        self.discarded()
        for chunk_id, flat in values.items():
            self.become(self._chunks[chunk_id], flat)
        if self._begun:
            self._end_values()

    def discarded(self) -> None:
        """End the wait for the requested parameters: all shards have the contribution from which they
        follow."""
        self.stop()
        self._staged.clear()
        self._asked = None
        for topic in self._until:
            self._connection.shards.answered(topic)

    def discard(self) -> None:
        """Wait for the requested parameters, which are known to equal the present ones, and drop them."""
        what = "word that a step is left out"
        self.begin()
        for bound in self.in_turn() if self.by_chunk else ():
            self.next(bound.chunk.id, what)
        self.collect(what)
        self.discarded()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Return a context in which answers are dropped: they equal the present parameters."""
        self._drops = True
        try:
            yield
        finally:
            self._drops = False

    @contextmanager
    def stepping(self, of: Collection[int] | None) -> Iterator[None]:
        """Return a context in which published parameters follow from the script's own step of the chunks
        `of`; None: of all."""
        self.steps, self._of = True, of
        try:
            yield
        finally:
            self.steps, self._of = False, None

    def _begin_values(self) -> None:
        self.check_unchanged()
        self._store.begin_values()
        self._begun = True

    def _end_values(self) -> None:
        self._begun = False
        self._store.end_values(stepped=self.steps)

    # -- changes by the script ------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """Raise UserError if the script has written to a parameter and the shards would not know."""
        name = "" if self.takes_changes else self.changed()
        if name:
            self._asked = None  # the script's change is not overwritten
            raise UserError(
                f"parameter {name!r} was changed by the script after session.prepare, and lives at the "
                "shards, which take changes where all workers make each step together: set sync.consistency "
                "to bsp and leave out sync.lazy and sites, change it before session.prepare, or save and "
                "session.load it"
            )

    def changed(self) -> str:
        """Return the first parameter to which the script has written; empty if there is none."""
        return self._store.changed()

    def take_changes(self) -> list[int]:
        """Return the chunks to which the script has written, for the shards, and forget that it has."""
        return self._store.take_changes() if self.takes_changes else []

    def forget_changes(self) -> None:
        """Forget the script's changes so far: the shards know them too."""
        self._store.forget_changes()

    # -- answers ------------------------------------------------------------------------------------------

    def what(self) -> str:
        return f"{self._named_missing()} of the parameters after iteration {(self._asked or 0) - 1}"

    def _handle(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Parameters)
        if self._asked is None or message.asked != self._asked:
            return  # an answer to a pull that was given up, or a repeat
        if not self._is_wanted(message.chunk, message.share, message.shares):
            return
        self.clock, self.staleness = message.clock, message.staleness
        self.consumed = max(self.consumed, message.consumed)
        self._told_consumed(self.consumed)
        self._told_lost(message.asked - 1, message.chunk, message.lost)
        check_holder(self._connection.shard_of, shard, message.chunk)
        bound = self._chunks[message.chunk]
        values = values_of(payload, bound, shard, self._share)
        if self._publishing:  # while the next chunk is on its way
            self.become(bound, values)
        elif self._of_group and self.by_chunk:
            values = values.clone()
        self._staged[message.chunk] = None if self._publishing else values
        self._connection.staleness(message.staleness)  # equal from every shard
