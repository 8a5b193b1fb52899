"""The commit log: the one place where it is decided what counts, and in which order. Shard 0 keeps it."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from atoll.core.weighing import Usual
from atoll.store.entries import Entry, Fenced, Idle, Joined
from atoll.store.meetings import Meetings, MeetingsState
from atoll.store.outcomes import Draft, Outcome
from atoll.store.ranges import Ranges
from atoll.store.roster import Roster, RosterState
from atoll.store.rounds import Rounds, RoundsState
from atoll.store.stages import Stages, StagesState
from atoll.store.streams import Streams, StreamsState
from atoll.store.waits import Waits
from atoll.wire import messages
from atoll.wire.messages import Count, WorkerStand

CONSISTENCIES = ("bsp", "ssp", "asp")


class LogState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a CommitLog remembers, but for its lines' reasons, and what it has yet to tell the hub."""

    consistency: str
    slack: Count
    first: Count
    entries: list[Entry]
    roster: RosterState
    stages: StagesState
    rule: RoundsState | StreamsState
    meetings: MeetingsState
    idle: list[Count]
    used: dict[tuple[int, int], dict[tuple[int, int], list[tuple[int, int]]]]
    committed: dict[tuple[int, int], Count]
    grouping: Count = 0
    grouped: dict[int, Count] = {}
    usual: list[tuple[float, float, float]] = []


class CommitLog:
    """`entries` are the log's lines, and `reasons` one plain line for each; a sequence number is an index
    into both, less `first`, which `forget` has moved.

    A contribution counts once its Combine (BSP) or Apply (SSP, ASP) is written: that takes its Commit, and a
    Staged from each of `holders`, the shards that hold trainable chunks (all, unless given). Whatever is
    refused has changed nothing.
    """

    def __init__(
        self,
        consistency: str,
        slack: int,
        workers: int,
        shards: int,
        steps: int = 0,
        holders: Collection[int] | None = None,
        limit: int = 2,
        loose: bool = False,
        scaled: str = "weight",
    ) -> None:
        """`loose`, with BSP: iterations do not wait for a worker that waits in a meeting for the others.
        `scaled`, with SSP and ASP: as in Streams."""
        if consistency not in CONSISTENCIES:
            raise ValueError(f"consistency {consistency!r} is none of {', '.join(CONSISTENCIES)}")
        self.consistency = consistency
        self.slack = slack
        self.entries: list[Entry] = []
        self.reasons: list[str] = []
        self.first = 0
        self._roster = Roster(workers)
        self._stages = Stages(range(shards) if holders is None else holders)
        self._usual = Usual()
        self._rule: Rounds | Streams = (
            Rounds(self._roster, self._stages, steps, loose, self._usual)
            if consistency == "bsp"
            else Streams(self._roster, self._stages, steps, limit, scaled, self._usual)
        )
        self._meetings = Meetings(self._roster)
        self._idle: set[int] = set()
        self._grouping = 0  # the latest that a contribution knew of
        self._grouped: dict[int, int] = {}  # live worker -> the latest when it joined, or was told of one
        # (worker, incarnation) -> (sampler, epoch) -> positions; and how many iterations
        self._used: dict[tuple[int, int], dict[tuple[int, int], Ranges]] = {}
        self._committed: dict[tuple[int, int], int] = {}
        # Of both, what the hub has not been told: as ranges, which stay few however long it is gone.
        self._news: dict[tuple[int, int], dict[tuple[int, int], Ranges]] = {}

    # -- a journal's -------------------------------------------------------------------------------------

    def state(self) -> LogState:
        """For a journal; `restored` makes the same log of it."""
        return LogState(
            consistency=self.consistency,
            slack=self.slack,
            first=self.first,
            entries=list(self.entries),
            roster=self._roster.state(),
            stages=self._stages.state(),
            rule=self._rule.state(),
            meetings=self._meetings.state(),
            idle=sorted(self._idle),
            used={
                key: {epoch: list(ranges) for epoch, ranges in used.items()}
                for key, used in self._used.items()
            },
            committed=dict(self._committed),
            grouping=self._grouping,
            grouped=dict(self._grouped),
            usual=self._usual.numbers,
        )

    @classmethod
    def restored(cls, state: LogState) -> CommitLog:
        """The log that `state` is of; the reasons of its lines are forgotten, and `tell_all_used` is due."""
        log = cls(state.consistency, state.slack, state.roster.workers, 0)
        log.first, log.entries = state.first, list(state.entries)
        log.reasons = [""] * len(log.entries)
        log._roster, log._stages = Roster.restored(state.roster), Stages.restored(state.stages)
        log._usual = Usual(state.usual)
        log._rule = (
            Rounds.restored(state.rule, log._roster, log._stages, log._usual)
            if isinstance(state.rule, RoundsState)
            else Streams.restored(state.rule, log._roster, log._stages, log._usual)
        )
        log._meetings = Meetings.restored(state.meetings, log._roster)
        log._idle, log._committed = set(state.idle), dict(state.committed)
        log._grouping, log._grouped = state.grouping, dict(state.grouped)
        log._used = {
            key: {epoch: Ranges(*ranges) for epoch, ranges in used.items()}
            for key, used in state.used.items()
        }
        return log

    # -- workers come and go ------------------------------------------------------------------------------

    def handle_join(self, worker: int, incarnation: int, moves: bool = False) -> Outcome:
        """A worker has come. It takes part when a Joined for it is written: at once, with the first
        iteration when all have come, or (BSP) with the next that begins. `moves`: it takes the place of some
        who are there, and nobody is to make an iteration without it. Said again: changes nothing."""
        refusal = self._roster.refusal(worker, incarnation)
        present = self._roster.incarnation(worker)
        if refusal or present > incarnation:
            return Outcome(refused=refusal or f"worker {worker} lives in a later incarnation, {present}")
        draft = Draft()
        if present == incarnation:
            return draft.outcome()
        if present:
            self._fence(worker, present, f"worker {worker} has come anew, as {incarnation}", draft)
        self._roster.wait(worker, incarnation)
        if moves and isinstance(self._rule, Rounds):
            self._rule.move_in(worker, incarnation, draft)
        return self._advance(draft)

    def handle_fence(self, worker: int, incarnation: int) -> Outcome:
        """The hub gives a worker up, or it has left: nothing of it is taken any more. Said again: changes
        nothing. `fenced` makes the answer to the hub."""
        draft = Draft()
        if not self._roster.refusal(worker, incarnation):
            self._fence(worker, incarnation, f"the hub fences worker {worker}", draft)
        return self._advance(draft)

    def _fence(self, worker: int, incarnation: int, reason: str, draft: Draft) -> None:
        self._roster.fence(worker, incarnation)
        self._idle.discard(worker)
        self._grouped.pop(worker, None)
        draft.write(Fenced(worker=worker, incarnation=incarnation), reason)
        self._stages.forget_worker(worker, incarnation)
        self._rule.leave(worker, incarnation)
        self._meetings.leave(worker, incarnation, draft)

    def fenced(self, worker: int, incarnation: int) -> messages.Fenced:
        """For the hub: how many iterations of this incarnation count, and all positions that they used."""
        return messages.Fenced(
            worker=worker,
            incarnation=incarnation,
            iteration=self._committed.get((worker, incarnation), 0),
            used=_as_used(self._used.get((worker, incarnation), {})),
        )

    def poll_used(self) -> list[messages.Fenced]:
        """For the hub's leases, of workers that live: what has been used since this was asked last, in the
        form of the answer to a Fence."""
        news = [
            messages.Fenced(
                worker=worker,
                incarnation=incarnation,
                iteration=self._committed.get((worker, incarnation), 0),
                used=_as_used(used),
                news=True,
            )
            for (worker, incarnation), used in sorted(self._news.items())
        ]
        self._news.clear()
        return news

    def tell_all_used(self) -> None:
        """Have `poll_used` give everything that live workers have used: it may have got lost."""
        for key in self._roster.live.items():
            if used := self._used.get(key):
                self._news[key] = {epoch: Ranges(*ranges) for epoch, ranges in used.items()}

    # -- contributions ------------------------------------------------------------------------------------

    def handle_staged(self, shard: int, worker: int, incarnation: int, iteration: int) -> Outcome:
        """A shard has all chunks of a contribution. From a fenced worker, or said again: changes nothing."""
        live = self._roster.live.get(worker) == incarnation
        if shard not in self._stages.holders:
            return Outcome(refused=f"shard {shard} holds no trainable chunk, yet has staged some")
        if self._roster.refusal(worker, incarnation) or (live and iteration < self._rule.committed(worker)):
            return Outcome()
        self._stages.add(shard, worker, incarnation, iteration)
        return self._advance(Draft())

    def handle_commit(self, worker: int, commit: messages.Commit) -> Outcome:
        """A worker commits a contribution; Committed is its answer, once it counts."""
        refusal = self._roster.unknown(worker, commit.incarnation)
        if refusal:
            return Outcome(refused=refusal)
        if commit.weight > 0 >= commit.alike or not math.isfinite(commit.alike):
            return Outcome(
                refused=f"worker {worker} commits with weight {commit.weight}, of {commit.alike} workers"
            )
        if not (math.isfinite(commit.weight) and math.isfinite(commit.samples)):
            return Outcome(refused=f"worker {worker} commits with weight {commit.weight}, which is no number")
        draft = Draft()
        self._rule.commit(worker, commit, draft)
        is_new = commit.iteration >= self._rule.committed(worker)
        if self.consistency == "ssp" and worker in self._idle and is_new and not draft.refused:
            self._write_idle(worker, commit.incarnation, False, draft)
        return self._advance(draft)

    def handle_idle(self, worker: int, incarnation: int, idle: bool) -> Outcome:
        """SSP, and loose BSP: a live worker begins, or has ended, to wait for all others in a meeting. Else:
        nothing."""
        draft = Draft()
        if self._roster.live.get(worker) != incarnation or idle == (worker in self._idle):
            return draft.outcome()
        if isinstance(self._rule, Rounds):
            (self._idle.add if idle else self._idle.discard)(worker)
            self._rule.set_idle(worker, idle, draft)
        elif self.consistency == "ssp":
            self._write_idle(worker, incarnation, idle, draft)
        return self._advance(draft)

    def _write_idle(self, worker: int, incarnation: int, idle: bool, draft: Draft) -> None:
        (self._idle.add if idle else self._idle.discard)(worker)
        reason = f"worker {worker} {'waits for the others' if idle else 'goes on'}"
        draft.write(Idle(worker=worker, incarnation=incarnation, idle=idle), reason)

    def handle_step(self, worker: int, step: messages.Step) -> Outcome:
        """BSP: a worker says how to step. Where it lists edited chunks, its own Replace for each must have
        reached its shard before (a Ready answered after them shows it): any member may become the editor."""
        refusal = self._roster.unknown(worker, step.incarnation)
        if refusal:
            return Outcome(refused=refusal)
        draft = Draft()
        self._rule.step(worker, step, draft)
        return self._advance(draft)

    def handle_meet(
        self,
        worker: int,
        incarnation: int,
        number: int,
        what: str,
        payload: int,
        stand: WorkerStand | None = None,
    ) -> Outcome:
        """Handle a worker that comes to a meeting.

        `payload` is the handle under which the runtime keeps the worker's data; `stand` is the worker's place
        in its script. `released` in the result has handles to free: of a refused part, a mismatch, a
        duplicate, or a fenced worker.
        """
        refusal = self._roster.refusal(worker, incarnation)
        if not refusal and self._roster.incarnation(worker) != incarnation:
            refusal = f"worker {worker} of incarnation {incarnation} has not joined"
        if refusal:
            return Outcome(refused=refusal, released=[payload])
        draft = Draft()
        self._meetings.meet(worker, incarnation, number, what, payload, draft, stand)
        return self._advance(draft)

    def handle_end(self, worker: int, incarnation: int, stand: WorkerStand) -> Outcome:
        """Handle a worker whose script has left its session; the answer is Ended.

        There is no answer if others wait for the worker in a call: then the result has a mismatch. The hub
        fences the worker later. A repeated input, or one from a worker that takes no part, changes nothing.
        """
        draft = Draft()
        self._meetings.end(worker, incarnation, stand, draft)
        if not draft.mismatch:
            draft.reply(worker, incarnation, messages.Ended())
        return self._advance(draft)

    def _advance(self, draft: Draft) -> Outcome:
        if draft.refused or draft.mismatch:
            return draft.outcome()
        beginning = not self._roster.begun
        self._rule.advance(draft)
        if beginning:
            for worker, incarnation in self._roster.live.items():
                self._meetings.bind(worker, incarnation)
        self._meetings.advance(draft)
        for entry in draft.entries:
            if isinstance(entry, Joined):
                self._grouped[entry.worker] = self._grouping
        for worker, commit in draft.counted:
            self._count(worker, commit)
            self._see_to_grouping(worker, commit, draft)
        self.entries += draft.entries
        self.reasons += draft.reasons
        return draft.outcome()

    def _count(self, worker: int, commit: messages.Commit) -> None:
        self._usual.take(commit)
        key = (worker, commit.incarnation)
        self._committed[key] = commit.iteration + 1
        ranges, news = self._used.setdefault(key, {}), self._news.setdefault(key, {}) if commit.used else {}
        for used in commit.used:
            for each in (ranges, news):
                each.setdefault((used.sampler, used.epoch), Ranges()).add(used.start, used.stop)

    def _see_to_grouping(self, worker: int, commit: messages.Commit, draft: Draft) -> None:
        """SSP: who is told of a new grouping waits for its new group to come together; so nobody must wait
        for it, or that never does. Where it stays as it is, it goes on with its next contribution."""
        self._grouping = max(self._grouping, commit.grouping)
        if self.consistency == "ssp" and commit.grouping > self._grouped.get(worker, 0):
            self._grouped[worker] = commit.grouping
            self._write_idle(worker, commit.incarnation, True, draft)

    # -- what others ask ----------------------------------------------------------------------------------

    @property
    def next_sequence(self) -> int:
        """The number that the next entry will have."""
        return self.first + len(self.entries)

    def entries_from(self, after: int) -> list[tuple[int, Entry]]:
        """The entries from number `after` on; raises ValueError where they are forgotten."""
        if after < self.first:
            raise ValueError(f"the log has forgotten its lines before {self.first}, {after} among them")
        return list(enumerate(self.entries[after - self.first :], start=after))

    def forget(self, before: int) -> None:
        """Drop the entries below number `before`, which every shard has: the log stays small."""
        count = min(max(before - self.first, 0), len(self.entries))
        del self.entries[:count], self.reasons[:count]
        self.first += count

    @property
    def next_iteration(self) -> int:
        """BSP: the iteration that comes after those that are combined."""
        return self._rule.committed(-1)

    @property
    def is_over(self) -> bool:
        """Whether the run has begun here, and all its workers have left or died."""
        return self._roster.begun and not self._roster.live and not self._roster.waiting

    def comes_late(self, worker: int, incarnation: int) -> bool:
        """Whether the run has begun without this incarnation."""
        return self._roster.begun and self._roster.incarnation(worker) != incarnation

    def handle_entered(self, worker: int, incarnation: int, meeting: int, anew: bool = False) -> None:
        """A live worker that has come late knows the others' state: meetings from that number on wait for
        it. Said again: changes nothing, unless it has been told `anew`."""
        if self._roster.live.get(worker) == incarnation and (
            anew or not self._meetings.is_bound(worker, incarnation)
        ):
            self._meetings.bind(worker, incarnation, meeting)

    def skip_meetings(self, number: int) -> None:
        """The meetings below that number are over elsewhere, if nobody has come to one here."""
        self._meetings.skip_to(number)

    @property
    def next_meeting(self) -> int:
        """The number of the next meeting to take place."""
        return self._meetings.next

    def live(self) -> dict[int, int]:
        """The workers that take part: worker -> incarnation."""
        return dict(self._roster.live)

    def refusal(self, worker: int, incarnation: int) -> str:
        """Why nothing is taken from this incarnation; empty where it may speak."""
        return self._roster.refusal(worker, incarnation)

    def met_by(self) -> list[str]:
        """Who has yet to come to the meeting under way, or to the run before it begins, in words."""
        missing = self._roster.missing()
        return self._meetings.waiting_for() or ([missing] if missing else [])

    def meeting_waits(self) -> Waits:
        """Return the workers needed for the next meeting, and the places of workers that wait in it."""
        return self._meetings.waits()

    @property
    def stand(self) -> WorkerStand | None:
        """Return the place of a worker that has committed the iteration under way (BSP), or None."""
        return self._rule.stand if isinstance(self._rule, Rounds) else None

    def iteration_waits(self) -> Waits:
        """Return the workers needed for the iteration under way, and the places of workers that wait in it
        (BSP).

        Without BSP no worker is needed: workers go on by themselves.
        """
        return self._rule.waits() if isinstance(self._rule, Rounds) else Waits(frozenset(), {})

    def waiting_for(self) -> list[str]:
        """Who is waited for, and on what, in words: for the line of an error when a deadline passes."""
        return self._meetings.waiting_for() or self._rule.waiting_for()


def _as_used(ranges: dict[tuple[int, int], Ranges]) -> list[messages.Used]:
    return [
        messages.Used(sampler=sampler, epoch=epoch, start=start, stop=stop)
        for (sampler, epoch), each in sorted(ranges.items())
        for start, stop in each
    ]
