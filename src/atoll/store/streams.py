"""SSP and ASP: each worker's contributions are applied by themselves, in its own order."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.store.entries import Apply, Joined
from atoll.store.outcomes import Draft
from atoll.store.roster import Roster
from atoll.store.stages import Stages
from atoll.wire import messages


@dataclass
class _Stream:
    """One live worker."""

    incarnation: int
    clock: int  # iterations in the log
    seen: int  # contributions of all workers that were in the log at its last own one
    weight: float = -1.0  # of its last contribution; negative before the first
    pending: dict[int, messages.Commit] = field(default_factory=dict)


class Streams:
    """A contribution goes into the log as soon as it is committed and staged on all shards."""

    def __init__(self, roster: Roster, stages: Stages, steps: int, limit: int) -> None:
        self._roster = roster
        self._stages = stages
        self._limit = limit
        self._streams: dict[int, _Stream] = {}
        self._applied = 0
        self._start = steps  # where one begins who joins while nobody lives

    def committed(self, worker: int) -> int:
        """How many iterations are in the log, for a live worker."""
        return self._streams[worker].clock

    def commit(self, worker: int, commit: messages.Commit, draft: Draft) -> None:
        """A live worker commits its contribution; `draft.refused` says if it may not."""
        stream = self._streams[worker]
        if commit.iteration < stream.clock:
            draft.reply(worker, commit.incarnation, messages.Committed(iteration=commit.iteration))
        elif commit.iteration in stream.pending:
            return  # answered when it goes into the log
        elif commit.iteration != stream.clock + len(stream.pending):
            draft.refused = (
                f"worker {worker} commits iteration {commit.iteration}, "
                f"while its next is {stream.clock + len(stream.pending)}"
            )
        elif len(stream.pending) >= self._limit:
            draft.refused = f"worker {worker} has {self._limit} iterations in flight, which is the most"
        else:
            stream.pending[commit.iteration] = commit

    def step(self, worker: int, _step: messages.Step, draft: Draft) -> None:
        """Only synchronous workers step by the log."""
        draft.refused = f"worker {worker} says Step, which asynchronous training has not"

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker is fenced."""
        stream = self._streams.get(worker)
        if stream is not None and stream.incarnation <= incarnation:
            self._start = min(each.clock for each in self._streams.values())
            del self._streams[worker]

    def advance(self, draft: Draft) -> None:
        """Write all that can be written now."""
        if self._roster.is_quorate():
            start = min((stream.clock for stream in self._streams.values()), default=self._start)
            for worker, incarnation in self._roster.enter():
                self._streams[worker] = _Stream(incarnation, start, self._applied)
                draft.write(
                    Joined(worker=worker, incarnation=incarnation, clock=start),
                    f"worker {worker} joins at iteration {start}, where the slowest live worker is",
                )
        for worker in sorted(self._streams):
            while self._try_apply(worker, draft):
                pass

    def _try_apply(self, worker: int, draft: Draft) -> bool:
        stream = self._streams[worker]
        commit = stream.pending.get(stream.clock)
        if commit is None or self._stages.missing(worker, stream.incarnation, stream.clock):
            return False
        others = self._applied - stream.seen
        staleness = max(0.0, others / max(1, len(self._streams) - 1) - 1.0)
        total = commit.weight
        for each in self._streams.values():
            if each is not stream:  # one that has not contributed yet is taken to weigh as much as this one
                total += each.weight if each.weight >= 0 else commit.weight
        share = commit.weight / total if total > 0 else 0.0
        draft.write(
            Apply(
                worker=worker,
                incarnation=stream.incarnation,
                iteration=stream.clock,
                weight=commit.weight,
                samples=commit.samples,
                lr_scale=share / (1.0 + staleness),
                staleness=staleness,
                hyperparameters=commit.hyperparameters,
            ),
            f"iteration {stream.clock} of worker {worker} is whole; "
            f"its share is {share:.3g}, its staleness {staleness:.3g}",
        )
        draft.counted.append((worker, commit))
        draft.reply(worker, stream.incarnation, messages.Committed(iteration=stream.clock))
        self._stages.forget_through(worker, stream.incarnation, stream.clock)
        del stream.pending[stream.clock]
        self._applied += 1
        stream.clock, stream.seen, stream.weight = stream.clock + 1, self._applied, commit.weight
        return True

    def waiting_for(self) -> list[str]:
        """Who is waited for and on what, in words: the slowest, whom SSP waits for, come first."""
        missing = self._roster.missing()
        if missing:
            return [missing]
        lines = []
        for worker, stream in sorted(self._streams.items(), key=lambda item: (item[1].clock, item[0])):
            if not stream.pending:
                lines.append(f"worker {worker}, to commit iteration {stream.clock}")
                continue
            shards = self._stages.missing(worker, stream.incarnation, stream.clock)
            on = ", ".join(map(str, shards))
            lines.append(f"worker {worker}'s chunks of iteration {stream.clock}, on shard {on}")
        return lines
