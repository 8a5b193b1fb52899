"""BSP: iterations with a membership that is fixed when they begin."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.core.hyperparameters import GRADIENT_SCALE, Difference, difference_line, first_difference
from atoll.core.stands import are_in_one_epoch, mixed_epochs
from atoll.core.weighing import Usual, are_certain, excess_line, told_unlike, weight_of
from atoll.store.entries import Combine, Joined, Member, Step
from atoll.store.outcomes import Draft
from atoll.store.roster import Roster
from atoll.store.stages import Stages
from atoll.store.waits import Waits, line_of
from atoll.wire import messages
from atoll.wire.messages import Count, WorkerStand


class RoundsState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rounds"):
    """All that Rounds remember, beside roster and stages."""

    loose: bool
    idle: list[Count]
    passed: list[Count]
    iteration: Count
    members: dict[int, Count]
    commits: dict[int, messages.Commit]
    combined: list[Count]
    said: dict[int, messages.Step]
    follow: list[Count] = []
    entering: dict[int, Count]
    told: messages.Committed | None = None


class Rounds:
    """One iteration at a time: it begins, is combined, is stepped.

    It begins with all who are live then, and those who waited when the one before was combined; who takes
    others' place enters it later too. It is combined when every member has committed and is staged on all
    shards; a member fenced before is left out. It is stepped when every live member has said the same Step.

    `loose`: where others have committed, a member that waits in a meeting and has not is left out too. It
    joins anew once its meeting is over.
    """

    def __init__(
        self, roster: Roster, stages: Stages, steps: int, loose: bool = False, usual: Usual | None = None
    ) -> None:
        """`usual` is told by the log what counts."""
        self._usual = Usual() if usual is None else usual
        self._roster = roster
        self._loose = loose
        self._idle: set[int] = set()  # loose: those who wait in a meeting
        self._passed: set[int] = set()  # live, and left out until they join anew
        self._stages = stages
        self._iteration = steps
        self._members: dict[int, int] = {}  # live members: worker -> incarnation
        self._commits: dict[int, messages.Commit] = {}
        self._combined: list[int] = []  # the mean's workers, fenced ones included; empty before
        self._said: dict[int, messages.Step] = {}  # a fenced member's word counts too
        self._follow: set[int] = set()  # whose word is that of the others
        # Who enters with the next iteration, worker -> incarnation: fixed when this one is combined, so that
        # all its members can be told alike.
        self._entering: dict[int, int] = {}
        self._told: messages.Committed | None = None  # the latest: who has lost it is told the same

    def state(self) -> RoundsState:
        """For a journal; `restored` makes the same of it."""
        return RoundsState(
            loose=self._loose,
            idle=sorted(self._idle),
            passed=sorted(self._passed),
            iteration=self._iteration,
            members=dict(self._members),
            commits=dict(self._commits),
            combined=list(self._combined),
            said=dict(self._said),
            follow=sorted(self._follow),
            entering=dict(self._entering),
            told=self._told,
        )

    @classmethod
    def restored(cls, state: RoundsState, roster: Roster, stages: Stages, usual: Usual) -> Rounds:
        rounds = cls(roster, stages, state.iteration, state.loose, usual)
        rounds._idle, rounds._passed = set(state.idle), set(state.passed)
        rounds._members, rounds._commits = dict(state.members), dict(state.commits)
        rounds._combined, rounds._said = list(state.combined), dict(state.said)
        rounds._follow, rounds._entering = set(state.follow), dict(state.entering)
        rounds._told = state.told
        return rounds

    def committed(self, _worker: int) -> int:
        """How many iterations are in the log, for a live worker."""
        return self._iteration + bool(self._combined)

    def commit(self, worker: int, commit: messages.Commit, draft: Draft) -> None:
        """A live worker commits its contribution to the iteration; `draft.refused` says if it may not."""
        if commit.iteration < self.committed(worker):
            draft.reply(worker, commit.incarnation, self._answer(commit.iteration))
        elif commit.iteration != self._iteration or worker not in self._members:
            draft.refused = (
                f"worker {worker} commits iteration {commit.iteration}, while {self._iteration} is under way"
            )
        else:
            self._commits.setdefault(worker, commit)
            stands = [each.stand for each in self._commits.values() if each.stand is not None]
            if not are_in_one_epoch(each.stand for each in stands):
                draft.mismatch = line_of(stands)

    def _answer(self, iteration: int) -> messages.Committed:
        if self._told is not None and self._told.iteration == iteration:
            return self._told
        return messages.Committed(iteration=iteration)

    def step(self, worker: int, step: messages.Step, draft: Draft) -> None:
        """A member says how to step; `draft.refused` says if that cannot be."""
        if step.iteration < self._iteration or (step.iteration == self._iteration and worker in self._said):
            self._check_same(worker, step, draft)
        elif step.iteration != self._iteration or not self._combined:
            draft.refused = f"worker {worker} steps iteration {step.iteration}, which has no mean yet"
        elif step.follows:
            self._follow.add(worker)
        else:
            self._check_same(worker, step, draft)
            if not draft.refused and not draft.mismatch:
                self._said[worker] = step

    def _check_same(self, worker: int, step: messages.Step, draft: Draft) -> None:
        if step.iteration != self._iteration or not self._said or step.follows:
            return  # a late duplicate, or the first to speak, or one who says what the others do
        first = next(iter(self._said))
        difference = _difference(self._said[first], step)
        found = _unlike_settings(self._said[first], step)
        if found is not None and (found.key == GRADIENT_SCALE or not difference):
            if worker < first:
                first, worker, found = worker, first, found.turned()
            draft.mismatch = difference_line(f"worker {first}", f"worker {worker}", step.iteration, found)
        elif difference:
            draft.refused = (
                f"worker {worker} and worker {first} would step iteration {step.iteration} differently: "
                f"{difference}; in synchronous training all workers must say the same"
            )

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker is fenced."""
        if self._members.get(worker, incarnation + 1) <= incarnation:
            del self._members[worker]
            self._commits.pop(worker, None)
        if worker not in self._roster.live:
            self._idle.discard(worker)
            self._passed.discard(worker)

    def move_in(self, worker: int, incarnation: int, draft: Draft) -> None:
        """One that waits takes the place of members, who have made the iteration before, and will not commit
        this one: it is in it at once. Else a newcomer that came meanwhile would make it alone once they are
        fenced."""
        if self._members and not self._combined:
            self._roster.enter({worker: incarnation})
            self._admit(worker, incarnation, draft)

    def set_idle(self, worker: int, idle: bool, draft: Draft) -> None:
        """A live worker begins, or has ended, to wait in a meeting."""
        if not self._loose:
            return
        (self._idle.add if idle else self._idle.discard)(worker)
        if not idle and worker in self._passed and self._members and not self._combined:
            self._admit(worker, self._roster.live[worker], draft)

    def _admit(self, worker: int, incarnation: int, draft: Draft) -> None:
        """Into the iteration that has begun."""
        self._join(worker, incarnation, draft)
        self._members = dict(sorted({**self._members, worker: incarnation}.items()))

    def _join(self, worker: int, incarnation: int, draft: Draft) -> None:
        self._passed.discard(worker)
        draft.write(
            Joined(worker=worker, incarnation=incarnation, clock=self._iteration),
            f"worker {worker} joins at iteration {self._iteration}, which begins now",
        )

    def _pass_over_idle(self) -> None:
        """Where nobody else is waited for, go on without those who wait in a meeting."""
        late = [worker for worker in self._members if worker not in self._commits]
        if self._commits and self._idle.issuperset(late):
            for worker in late:
                del self._members[worker]
            self._passed.update(late)

    def advance(self, draft: Draft) -> None:
        """Write all that can be written now."""
        while (
            self._try_step(draft)
            if self._combined
            else self._try_combine(draft)
            if self._members
            else self._try_begin(draft)
        ):
            pass

    def _try_begin(self, draft: Draft) -> bool:
        if not self._roster.is_quorate():
            return False
        only = self._entering if self._roster.live else None
        back = [(worker, self._roster.live[worker]) for worker in sorted(self._passed - self._idle)]
        for worker, incarnation in (*self._roster.enter(only), *back):
            self._join(worker, incarnation, draft)
        live = sorted(self._roster.live.items())
        self._members = {worker: incarnation for worker, incarnation in live if worker not in self._passed}
        self._commits.clear()
        return bool(self._members)

    def _try_combine(self, draft: Draft) -> bool:
        self._pass_over_idle()
        if any(
            worker not in self._commits or self._stages.missing(worker, incarnation, self._iteration)
            for worker, incarnation in self._members.items()
        ):
            return False
        if self._refuse_excess(draft):
            return False
        members, certain = [], are_certain(self._commits[worker] for worker in self._members)
        for worker, incarnation in self._members.items():
            commit = self._commits[worker]
            members.append(
                Member(
                    worker=worker,
                    incarnation=incarnation,
                    weight=weight_of(commit, certain),
                    samples=commit.samples,
                    counted=-1.0 if certain else commit.weight,
                    basis=commit.basis,
                    alike=commit.alike,
                )
            )
            draft.counted.append((worker, commit))
            self._stages.forget_through(worker, incarnation, self._iteration)
        draft.write(
            Combine(iteration=self._iteration, members=members),
            f"iteration {self._iteration} is whole: {_workers(self._members)} committed, staged everywhere",
        )
        self._combined, self._entering = list(self._members), dict(self._roster.waiting)
        self._told = messages.Committed(
            iteration=self._iteration,
            workers=sorted(self._combined),
            entering=sorted(self._entering),
            grouping=min(self._commits[worker].grouping for worker in self._members),
            alike=not certain,
            counts=told_unlike(
                f"iteration {self._iteration}", {worker: self._commits[worker] for worker in self._members}
            ),
            epochs=self._mixed_epochs(),
        )
        for worker, incarnation in self._members.items():
            draft.reply(worker, incarnation, self._told)
        return True

    def _mixed_epochs(self) -> str:
        """Return the warning where members train batches of different epochs together."""
        stands = (self._commits[worker].stand for worker in self._members)
        return mixed_epochs({each.worker: each.stand for each in stands if each is not None})

    def _refuse_excess(self, draft: Draft) -> bool:
        """Drop, and tell its worker of, each commit that weighs far too much; whether there was one."""
        commits = [self._commits[worker] for worker in self._members]
        found = {worker: self._usual.excess(self._commits[worker], commits) for worker in self._members}
        for worker, excess in found.items():
            if excess:
                reason = excess_line(worker, self._iteration, excess)
                draft.reply(worker, self._members[worker], messages.Refused(reason=reason, request="Commit"))
                del self._commits[worker]
        return any(found.values())

    def _try_step(self, draft: Draft) -> bool:
        if self._silent():
            return False
        speakers = sorted(self._said)
        if speakers:
            said = self._said[speakers[0]]
            reason = f"{_workers(speakers)} said the same step for iteration {self._iteration}"
        else:
            said = messages.Step(
                incarnation=0, iteration=self._iteration, scale=1.0, hyperparameters=[], accepted=False
            )
            reason = f"all who had the mean of iteration {self._iteration} are gone: it is left out"
        draft.write(
            Step(
                iteration=self._iteration,
                scale=said.scale,
                hyperparameters=said.hyperparameters,
                edited=said.edited,
                editor=speakers[0] if said.edited else -1,
                accepted=said.accepted,
                nobody=not speakers,
            ),
            reason,
        )
        self._iteration += 1
        self._combined, self._said, self._members = [], {}, {}
        self._follow.clear()
        return True

    def _silent(self) -> list[int]:
        """The members whose word on the step is waited for."""
        return [worker for worker in self._members if worker not in self._said and worker not in self._follow]

    @property
    def stand(self) -> WorkerStand | None:
        """Return the place of a worker that has committed the iteration under way."""
        return next((each.stand for each in self._commits.values() if each.stand is not None), None)

    def waits(self) -> Waits:
        """Return the workers needed to continue the iteration, and the places of workers that wait in it."""
        said = self._said if self._combined else self._commits
        stands = {worker: said[worker].stand for worker in self._members if worker in said}
        return Waits(
            frozenset(self._members),
            {worker: stand for worker, stand in stands.items() if stand is not None},
        )

    def waiting_for(self) -> list[str]:
        """Who is waited for and on what, in words."""
        if not self._members and not self._combined:
            missing = self._roster.missing()
            return [missing] if missing else []
        if self._combined:
            return [f"worker {worker}, to step iteration {self._iteration}" for worker in self._silent()]
        lines = []
        for worker, incarnation in self._members.items():
            shards = self._stages.missing(worker, incarnation, self._iteration)
            if worker not in self._commits:
                lines.append(f"worker {worker}, to commit iteration {self._iteration}")
            elif shards:
                on = ", ".join(map(str, shards))
                lines.append(f"worker {worker}'s chunks of iteration {self._iteration}, on shard {on}")
        return lines


def _workers(workers: Any) -> str:
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, workers))


def _unlike_settings(first: messages.Step, second: messages.Step) -> Difference | None:
    """Return the first difference between two steps' gradient scales, then between their hyperparameters."""
    if first.accepted and second.accepted and first.unscaled != second.unscaled:
        return Difference(0, GRADIENT_SCALE, first.unscaled, second.unscaled)
    return first_difference(first.hyperparameters, second.hyperparameters)


def _difference(first: messages.Step, second: messages.Step) -> str:
    """Describe a difference between two steps besides hyperparameters; empty where there is none."""
    for name in ("accepted", "scale"):
        one, other = getattr(first, name), getattr(second, name)
        if not _same(one, other):
            return f"{name} is {other} and {one}"
    if first.edits != second.edits and sorted(first.edited) == sorted(second.edited):
        return (
            "they have made different gradients of the same mean (clipping, other changes of p.grad, or "
            "GradScalers of different scales: call session.register(scaler=scaler))"
        )
    if sorted(first.edited) != sorted(second.edited):
        return f"edited chunks are {sorted(second.edited)} and {sorted(first.edited)}"
    return ""


def _same(one: Any, other: Any) -> bool:
    """Equal; NaN equals itself here."""
    return bool(one == other) or msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)
