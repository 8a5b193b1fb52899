"""The commit log: the one place that decides which contributions count, and in which order. Shard 0 keeps
it."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from atoll.store.contributors import Contributors, judged
from atoll.store.entries import Fenced, Idle, Joined
from atoll.store.lines import Lines
from atoll.store.meetings import Meetings
from atoll.store.outcomes import Draft, Outcome
from atoll.store.roster import Roster
from atoll.store.rounds import Rounds
from atoll.store.stages import Stages
from atoll.store.streams import Streams
from atoll.store.used import UsedSamples
from atoll.store.waits import Waits
from atoll.wire import messages
from atoll.wire.messages import Count, WorkerStand

CONSISTENCIES = ("bsp", "ssp", "asp")
_BEFORE_A_MOVE = 1  # contributions that a worker may send after the one whose answer tells it to move


class CommitLog(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The log, as a struct that a journal keeps as it is. `begin` makes a new one.

    A contribution counts once its Combine (BSP) or Apply (SSP, ASP) is written. That takes its Commit, and a
    Staged from each shard that holds trainable chunks. An input that is refused has changed nothing.

    Attributes:
        idle: workers that wait in a meeting, or for their new group (SSP).
        moving: for each of those that wait for their new group, an iteration that it makes only if its group
            stays as it is.
        optimizers: the number of the model's optimizers.
        grouping: the latest grouping that a contribution knew of.
        grouped: for each live worker, the latest grouping when it joined, or that its contribution knew of
            since.
    """

    consistency: str
    slack: Count
    these: Contributors
    rule: Rounds | Streams
    meetings: Meetings = msgspec.field(default_factory=Meetings)
    lines: Lines = msgspec.field(default_factory=Lines)
    used: UsedSamples = msgspec.field(default_factory=UsedSamples)
    idle: set[Count] = set()
    moving: dict[int, Count] = {}
    optimizers: Count = 1
    grouping: Count = 0
    grouped: dict[int, Count] = {}

    @classmethod
    def begin(
        cls,
        consistency: str,
        slack: int,
        workers: int,
        shards: int,
        steps: int = 0,
        holders: Collection[int] | None = None,
        limit: int = 2,
        loose: bool = False,
        scaled: str = "weight",
        optimizers: int = 1,
    ) -> CommitLog:
        """Begin with `workers` workers.

        Args:
            holders: the shards with trainable chunks; None for all.
            loose: with BSP, True if iterations do not wait for a worker that waits for the others in a
                meeting.
            limit: with SSP and ASP, as in `Streams`.
            scaled: with SSP and ASP, as in `Streams`.
            optimizers: the number of the model's optimizers.
        """
        if consistency not in CONSISTENCIES:
            raise ValueError(f"consistency {consistency!r} is none of {', '.join(CONSISTENCIES)}")
        stages = Stages(frozenset(range(shards) if holders is None else holders))
        bsp = consistency == "bsp"
        rule = Rounds(steps, loose) if bsp else Streams(steps, limit, scaled)
        return cls(
            consistency=consistency,
            slack=slack,
            these=Contributors(Roster(workers), stages),
            rule=rule,
            optimizers=optimizers,
        )

    # -- workers come and go ------------------------------------------------------------------------------

    def handle_join(self, worker: int, incarnation: int, moves: bool = False) -> Outcome:
        """Take in a worker, which takes part when a Joined for it is written. A repetition changes nothing.

        Before the run begins, that is when all workers have come. Later it is at once (SSP, ASP), or with the
        next iteration (BSP).

        Args:
            moves: True if the worker takes the place of members that are there, so that no iteration may be
                made without it.
        """
        refusal = self.refusal(worker, incarnation)
        present = self.these.roster.incarnation(worker)
        if refusal or present > incarnation:
            return Outcome(refused=refusal or f"worker {worker} lives in a later incarnation, {present}")
        draft = Draft()
        if present == incarnation:
            return draft.outcome()
        if present:
            self._fence(worker, present, draft)
        self.these.roster.wait(worker, incarnation)
        if moves and isinstance(self.rule, Rounds):
            self.rule.move_in(worker, incarnation, draft, self.these)
        return self._advance(draft)

    def handle_fence(self, worker: int, incarnation: int) -> Outcome:
        """Fence a worker that the hub has given up, or that has left. A repetition changes nothing.

        `used.of` makes the answer to the hub.
        """
        draft = Draft()
        if not self.refusal(worker, incarnation):
            self._fence(worker, incarnation, draft)
        return self._advance(draft)

    def _fence(self, worker: int, incarnation: int, draft: Draft) -> None:
        self.these.roster.fence(worker, incarnation)
        self.idle.discard(worker)
        self.moving.pop(worker, None)
        self.grouped.pop(worker, None)
        draft.write(Fenced(worker=worker, incarnation=incarnation))
        self.these.stages.forget_worker(worker, incarnation)
        self.rule.leave(worker, incarnation, self.these)
        self.meetings.leave(worker, incarnation, draft)

    # -- contributions ------------------------------------------------------------------------------------

    def handle_staged(self, shard: int, worker: int, incarnation: int, iteration: int) -> Outcome:
        """Note that a shard has all chunks of a contribution. From a fenced worker, or as a repetition, it
        changes nothing."""
        live = self.live.get(worker) == incarnation
        if shard not in self.these.stages.holders:
            return Outcome(refused=f"shard {shard} holds no trainable chunk, yet has staged some")
        if self.refusal(worker, incarnation) or (live and iteration < self.rule.committed(worker)):
            return Outcome()
        self.these.stages.add(shard, worker, incarnation, iteration)
        return self._advance(Draft())

    def handle_commit(self, worker: int, commit: messages.Commit, *, meets: bool = False) -> Outcome:
        """Take a worker's commit of a contribution. Committed is the answer, once it counts.

        `meets`: the worker waits in a meeting. It goes on waiting there: the contribution was on its way.
        """
        refusal = self.these.roster.unknown(worker, commit.incarnation)
        if refusal:
            return Outcome(refused=refusal)
        if commit.weight > 0 >= commit.alike or not math.isfinite(commit.alike):
            return Outcome(
                refused=f"worker {worker} commits with weight {commit.weight}, of {commit.alike} workers"
            )
        if not all(map(math.isfinite, (commit.weight, commit.samples, *commit.weights))):
            return Outcome(refused=f"worker {worker} commits with weight {commit.weight}, which is no number")
        is_new = commit.iteration >= self.rule.committed(worker)  # what is sent again may be of a former log
        if is_new and commit.weights and len(commit.weights) != self.optimizers:
            return Outcome(
                refused=f"worker {worker} commits with weights for {len(commit.weights)} optimizers, and the "
                f"model has {self.optimizers}"
            )
        if commit.weight <= 0 < max(commit.weights, default=0.0):
            return Outcome(
                refused=f"worker {worker} commits with weight {commit.weight}, and weights {commit.weights}"
            )
        draft = Draft()
        self.rule.commit(worker, commit, draft, self.these)
        is_new = commit.iteration >= self.rule.committed(worker)
        if is_new and not draft.refused:
            self._see_to_idling(worker, commit, meets, draft)
        return self._advance(draft)

    def handle_idle(self, worker: int, incarnation: int, idle: bool) -> Outcome:
        """Note that a live worker begins, or has ended, to wait for all others in a meeting (SSP, and loose
        BSP)."""
        draft = Draft()
        if self.live.get(worker) != incarnation or idle == (worker in self.idle):
            return draft.outcome()
        if isinstance(self.rule, Rounds):
            (self.idle.add if idle else self.idle.discard)(worker)
            self.rule.set_idle(worker, idle, draft, self.these)
        elif self.consistency == "ssp" and worker not in self.moving:
            self._write_idle(worker, incarnation, idle, draft)
        return self._advance(draft)

    def _write_idle(self, worker: int, incarnation: int, idle: bool, draft: Draft) -> None:
        (self.idle.add if idle else self.idle.discard)(worker)
        draft.write(Idle(worker=worker, incarnation=incarnation, idle=idle))

    def handle_step(self, worker: int, step: messages.Step) -> Outcome:
        """Take a worker's word on how to step (BSP).

        If it lists edited chunks, its own Replace for each must have reached its shard before (a Ready
        answered after them shows it), as any member may become the editor.
        """
        refusal = self.these.roster.unknown(worker, step.incarnation)
        if refusal:
            return Outcome(refused=refusal)
        draft = Draft()
        self.rule.step(worker, step, draft)
        return self._advance(draft)

    def _advance(self, draft: Draft) -> Outcome:
        if draft.refused or draft.mismatch:
            return draft.outcome()
        beginning = not self.these.roster.begun
        self.rule.advance(draft, self.these)
        if beginning:
            for worker, incarnation in self.live.items():
                self.meetings.bind(worker, incarnation)
        self.meetings.advance(draft, self.these.roster)
        for entry in draft.entries:
            if isinstance(entry, Joined):
                self.grouped[entry.worker] = self.grouping
        for worker, commit in draft.counted:
            self.these.usual.take(judged(commit))
            self.used.count(worker, commit)
            self._see_to_grouping(worker, commit, draft)
        self.lines.entries += draft.entries
        return draft.outcome()

    def _see_to_grouping(self, worker: int, commit: messages.Commit, draft: Draft) -> None:
        """Mark a worker as idle when its contribution knows of a new grouping (SSP).

        It now waits for its new group to come together, so nobody may wait for it. If its group stays as it
        is, its second contribution from now on ends this. With a pipeline it may send the first before it
        moves.
        """
        self.grouping = max(self.grouping, commit.grouping)
        if self.consistency == "ssp" and commit.grouping > self.grouped.get(worker, 0):
            self.grouped[worker] = commit.grouping
            self.moving[worker] = commit.iteration + _BEFORE_A_MOVE + 1
            self._write_idle(worker, commit.incarnation, True, draft)

    def _see_to_idling(self, worker: int, commit: messages.Commit, meets: bool, draft: Draft) -> None:
        """Let others wait for a worker again whose new contribution shows that it goes on (SSP)."""
        if commit.iteration >= self.moving.get(worker, 0):
            self.moving.pop(worker, None)
        if worker in self.idle and not meets and worker not in self.moving and self.consistency == "ssp":
            self._write_idle(worker, commit.incarnation, False, draft)

    # -- meetings -----------------------------------------------------------------------------------------

    def handle_meet(
        self,
        worker: int,
        incarnation: int,
        number: int,
        what: str,
        payload: int,
        stand: WorkerStand | None = None,
    ) -> Outcome:
        """Take a worker's part in a meeting.

        Args:
            payload: the handle under which the process keeps the worker's data.
            stand: the worker's place in its script.

        `released` in the result has handles to free: of a refused part, a mismatch, a duplicate, or a fenced
        worker.
        """
        refusal = self.refusal(worker, incarnation)
        if not refusal and self.these.roster.incarnation(worker) != incarnation:
            refusal = f"worker {worker} of incarnation {incarnation} has not joined"
        if refusal:
            return Outcome(refused=refusal, released=[payload])
        draft = Draft()
        self.meetings.meet(worker, incarnation, number, what, payload, draft, stand)
        return self._advance(draft)

    def handle_end(self, worker: int, incarnation: int, stand: WorkerStand) -> Outcome:
        """Note that a worker's script has left its session; the answer is Ended.

        If others wait for the worker in a call, the result has a mismatch instead. The hub fences the worker
        later. A repeated input, or one from a worker that takes no part, changes nothing.
        """
        draft = Draft()
        self.meetings.end(worker, incarnation, stand, draft)
        if not draft.mismatch:
            draft.reply(worker, incarnation, messages.Ended(), ("Ends", 0))
        return self._advance(draft)

    def handle_entered(self, worker: int, incarnation: int, meeting: int, anew: bool = False) -> None:
        """Let meetings from number `meeting` on wait for a late worker, which knows the others' state by now.

        A repetition changes nothing, unless the worker was told the state `anew`.
        """
        if self.live.get(worker) == incarnation and (anew or not self.meetings.is_bound(worker, incarnation)):
            self.meetings.bind(worker, incarnation, meeting)

    # -- what others ask ----------------------------------------------------------------------------------

    @property
    def next_iteration(self) -> int:
        """BSP: the iteration that comes after those that are combined."""
        return self.rule.committed(-1)

    @property
    def is_over(self) -> bool:
        """True if the run has begun here, and all its workers have left or died."""
        roster = self.these.roster
        return roster.begun and not roster.live and not roster.waiting

    def comes_late(self, worker: int, incarnation: int) -> bool:
        """True if the run has begun without this incarnation."""
        roster = self.these.roster
        return roster.begun and roster.incarnation(worker) != incarnation

    @property
    def live(self) -> dict[int, int]:
        """The workers that take part, worker -> incarnation. The mapping changes with the log."""
        return self.these.roster.live

    def refusal(self, worker: int, incarnation: int) -> str:
        """Return why nothing is taken from this incarnation; empty if something is."""
        return self.these.roster.refusal(worker, incarnation)

    def met_by(self) -> list[str]:
        """Return, in words, the workers missing from the current meeting, or from the run before it
        begins."""
        missing = self.these.roster.missing()
        return self.meetings.waiting_for() or ([missing] if missing else [])

    def meeting_waits(self) -> Waits:
        """Return the workers needed for the next meeting, and the places of workers that wait in it."""
        return self.meetings.waits(self.these.roster.begun)

    @property
    def stand(self) -> WorkerStand | None:
        """The place in its script of a worker that has committed the iteration under way (BSP), or None."""
        return self.rule.stand if isinstance(self.rule, Rounds) else None

    def iteration_waits(self) -> Waits:
        """Return the workers needed for the iteration under way, and the places of workers that wait in it
        (BSP).

        Without BSP no worker is needed: workers go on by themselves.
        """
        return self.rule.waits() if isinstance(self.rule, Rounds) else Waits(frozenset(), {})

    def waiting_for(self) -> list[str]:
        """Return, in words, the workers waited for and on what, for the error when a deadline passes."""
        return self.meetings.waiting_for() or self.rule.waiting_for(self.these)
