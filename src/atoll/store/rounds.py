"""BSP: iterations with a membership that is fixed when they begin."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.core.hyperparameters import GRADIENT_SCALE, Difference, difference_line, first_difference
from atoll.core.stands import are_in_one_epoch, mixed_epochs
from atoll.core.weighing import are_certain, excess_line, told_unlike, weight_of
from atoll.store.contributors import Contributors, judged
from atoll.store.entries import Combine, Joined, StepWithMean, WeightedContribution
from atoll.store.outcomes import Draft
from atoll.store.waits import Waits, line_of
from atoll.wire import messages
from atoll.wire.messages import Count, WorkerStand


class Rounds(msgspec.Struct, forbid_unknown_fields=True, tag="rounds"):
    """One iteration at a time: it begins, is combined, and is stepped.

    An iteration begins with all workers that are live then, and those that waited when the one before was
    combined. A worker that takes others' places may enter it later. It is combined when every member has
    committed and is staged on all shards; a member fenced before that is left out. It is stepped when every
    live member has sent an equal Step.

    Attributes:
        loose: True if a member that waits in a meeting and has not committed is left out once the others
            have. It joins anew when its meeting is over.
        idle: with `loose`, workers that wait in a meeting.
        passed: live workers that are left out until they join anew.
        combined: the workers of the mean, fenced ones included; empty before there is one.
        stays: True if one of the model's optimizers has stepped the mean, and others may: a Step of this
            iteration does so, and a commit begins the iteration as another one.
        said: the members' Step; a fenced member's counts too.
        follow: members that step as the others say.
        fresh: workers that joined in this iteration. They lack what the others' scripts have written into
            parameters since the step before.
        entering: workers that enter with the next iteration. They are fixed when this one is combined, so
            that all its members are told the same. If its step is left out, they wait on.
        told: the latest answer, which a worker that lost it is given again.
    """

    iteration: Count = 0
    loose: bool = False
    idle: set[Count] = set()
    passed: set[Count] = set()
    members: dict[int, Count] = {}
    commits: dict[int, messages.Commit] = {}
    combined: list[Count] = []
    stays: bool = False
    said: dict[int, messages.Step] = {}
    follow: set[Count] = set()
    fresh: set[Count] = set()
    entering: dict[int, Count] = {}
    told: messages.Committed | None = None

    def committed(self, _worker: int) -> int:
        """Return the number of iterations in the log; for every live worker it is the same."""
        return self.iteration + (bool(self.combined) and not self.stays)

    def commit(self, worker: int, commit: messages.Commit, draft: Draft, these: Contributors) -> None:
        """Take a live worker's commit. `draft.refused` says why it may not commit."""
        if commit.iteration < self.committed(worker):
            answer = self._answer(commit.iteration)
            draft.reply(worker, commit.incarnation, answer, ("Commit", commit.iteration))
            return
        if self.stays and commit.iteration == self.iteration and worker in self.members:
            if self.said:
                draft.refused = (
                    f"worker {worker} commits iteration {commit.iteration}, and worker {min(self.said)} "
                    "steps the mean before with one more optimizer: in synchronous training all workers step "
                    "the same ones"
                )
                return
            self._end_stay()
            self._try_begin(draft, these)
        if commit.iteration != self.iteration or worker not in self.members:
            draft.refused = (
                f"worker {worker} commits iteration {commit.iteration}, while {self.iteration} is under way"
            )
        else:
            self.commits.setdefault(worker, commit)
            stands = [each.stand for each in self.commits.values() if each.stand is not None]
            if not are_in_one_epoch(each.stand for each in stands):
                draft.mismatch = line_of(stands)

    def _end_stay(self) -> None:
        """Begin the iteration as another one: no more of the model's optimizers step the mean."""
        self.combined, self.stays, self.members = [], False, {}

    def _answer(self, iteration: int) -> messages.Committed:
        if self.told is not None and self.told.iteration == iteration:
            return self.told
        return messages.Committed(iteration=iteration)

    def step(self, worker: int, step: messages.Step, draft: Draft) -> None:
        """Take a member's word on how to step. `draft.refused` says why that cannot be.

        Who has just joined never decides how the others step: if it differs, it alone is refused, whoever
        speaks first.
        """
        if step.iteration < self.iteration or (step.iteration == self.iteration and worker in self.said):
            self._check_same(worker, step, draft)
        elif step.iteration != self.iteration or not self.combined:
            draft.refused = f"worker {worker} steps iteration {step.iteration}, which has no mean yet"
        elif step.follows:
            self.follow.add(worker)
        else:
            self._check_same(worker, step, draft)
            if not draft.refused and not draft.mismatch:
                self._refuse_newcomers(worker, step, draft)
                self.said[worker] = step

    def _check_same(self, worker: int, step: messages.Step, draft: Draft) -> None:
        """Compare a word with one that counts as much: with a newcomer's only if the speaker is one too."""
        speakers = sorted(self.said, key=self.fresh.__contains__)  # stable: then who spoke first
        if step.iteration != self.iteration or not speakers or step.follows:
            return  # a late duplicate, the first word, or a member that follows the others
        first = speakers[0]
        if first in self.fresh and worker not in self.fresh:
            return
        reason, mismatch = self._unlike(first, self.said[first], worker, step)
        if worker in self.fresh and first not in self.fresh:
            reason, mismatch = reason or mismatch, ""
        draft.refused, draft.mismatch = reason, mismatch

    def _refuse_newcomers(self, worker: int, step: messages.Step, draft: Draft) -> None:
        """Drop the words of newcomers that differ from a settled member's, and tell them."""
        for other in [each for each in self.said if each in self.fresh and worker not in self.fresh]:
            reason = "".join(self._unlike(worker, step, other, self.said[other]))
            if reason:
                del self.said[other]
                if other in self.members:
                    refused = messages.Refused(reason=reason, request="Step")
                    draft.reply(other, self.members[other], refused, ("Step", step.iteration))

    def _unlike(self, first: int, said: messages.Step, worker: int, step: messages.Step) -> tuple[str, str]:
        """Return, in words, how `worker` would step otherwise than `first` has said: why `worker` is refused,
        or the line that tells all of different settings. Both are empty for equal steps."""
        writes = self._settled.issuperset((first, worker))
        difference = _difference(f"worker {worker}", step, f"worker {first}", said, writes=writes)
        found = _unlike_settings(said, step)
        if found is not None and (found.key == GRADIENT_SCALE or not difference):
            if worker < first:
                first, worker, found = worker, first, found.turned()
            return "", difference_line(f"worker {first}", f"worker {worker}", step.iteration, found)
        if not difference:
            return "", ""
        return (
            f"worker {worker} and worker {first} would step iteration {step.iteration} differently: "
            f"{difference}; in synchronous training all workers must say the same"
        ), ""

    @property
    def _settled(self) -> set[int]:
        """The members that have made the iteration before; if there is none, all members."""
        return self.members.keys() - self.fresh or set(self.members)

    def leave(self, worker: int, incarnation: int, these: Contributors) -> None:
        """Leave out a worker that is fenced."""
        if self.members.get(worker, incarnation + 1) <= incarnation:
            del self.members[worker]
            self.commits.pop(worker, None)
        if worker not in these.roster.live:
            self.idle.discard(worker)
            self.passed.discard(worker)

    def move_in(self, worker: int, incarnation: int, draft: Draft, these: Contributors) -> None:
        """Put a waiting worker into the iteration that has begun, as it takes the place of members.

        Those members made the iteration before, and will not commit this one. Once they are fenced, a
        newcomer that came meanwhile would otherwise make it alone.
        """
        if self.members and not self.combined:
            these.roster.enter({worker: incarnation})
            self._admit(worker, incarnation, draft)

    def set_idle(self, worker: int, idle: bool, draft: Draft, these: Contributors) -> None:
        """Note that a live worker begins, or has ended, to wait in a meeting."""
        if not self.loose:
            return
        (self.idle.add if idle else self.idle.discard)(worker)
        if not idle and worker in self.passed and self.members and not self.combined:
            self._admit(worker, these.roster.live[worker], draft)

    def _admit(self, worker: int, incarnation: int, draft: Draft) -> None:
        """Put a worker into the iteration that has begun."""
        self._join(worker, incarnation, draft)
        self.members = dict(sorted({**self.members, worker: incarnation}.items()))

    def _join(self, worker: int, incarnation: int, draft: Draft) -> None:
        self.passed.discard(worker)
        self.fresh.add(worker)
        draft.write(Joined(worker=worker, incarnation=incarnation, clock=self.iteration))

    def _pass_over_idle(self) -> None:
        """Leave out workers that wait in a meeting, if only they are missing."""
        late = [worker for worker in self.members if worker not in self.commits]
        if self.commits and self.idle.issuperset(late):
            for worker in late:
                del self.members[worker]
            self.passed.update(late)

    def advance(self, draft: Draft, these: Contributors) -> None:
        """Write everything that can be written now."""
        if self.stays and not self.members:
            self._end_stay()
        while (
            self._try_step(draft)
            if self.combined
            else self._try_combine(draft, these)
            if self.members
            else self._try_begin(draft, these)
        ):
            pass

    def _try_begin(self, draft: Draft, these: Contributors) -> bool:
        if not these.roster.is_quorate():
            return False
        only = self.entering if these.roster.live else None
        back = [(worker, these.roster.live[worker]) for worker in sorted(self.passed - self.idle)]
        for worker, incarnation in (*these.roster.enter(only), *back):
            self._join(worker, incarnation, draft)
        live = sorted(these.roster.live.items())
        self.members = {worker: incarnation for worker, incarnation in live if worker not in self.passed}
        self.commits.clear()
        return bool(self.members)

    def _try_combine(self, draft: Draft, these: Contributors) -> bool:
        self._pass_over_idle()
        if any(
            worker not in self.commits or these.stages.missing(worker, incarnation, self.iteration)
            for worker, incarnation in self.members.items()
        ):
            return False
        if self._refuse_excess(draft, these):
            return False
        members, certain = [], are_certain(self.commits[worker] for worker in self.members)
        for worker, incarnation in self.members.items():
            commit = self.commits[worker]
            members.append(
                WeightedContribution(
                    worker=worker,
                    incarnation=incarnation,
                    weight=weight_of(commit, certain),
                    samples=commit.samples,
                    counted=-1.0 if certain else commit.weight,
                    basis=commit.basis,
                    alike=commit.alike,
                    weights=[
                        each if certain or each <= 0 or commit.weight <= 0 else commit.alike
                        for each in commit.weights
                    ],
                )
            )
            draft.counted.append((worker, commit))
            these.stages.forget_through(worker, incarnation, self.iteration)
        draft.write(Combine(iteration=self.iteration, members=members))
        opens = any(self.commits[worker].ends for worker in self.members)
        self.combined, self.entering = list(self.members), dict(these.roster.waiting) if opens else {}
        self.told = messages.Committed(
            iteration=self.iteration,
            workers=sorted(self.combined),
            members=self._in_groups(),
            entering=sorted(self.entering),
            grouping=min(self.commits[worker].grouping for worker in self.members),
            alike=not certain,
            counts=told_unlike(
                f"iteration {self.iteration}", {worker: self.commits[worker] for worker in self.members}
            ),
            epochs=self._mixed_epochs(),
            more=any(self.commits[worker].more for worker in self.members),
            speeds={
                each: report
                for worker in self.members
                for each, report in self.commits[worker].speeds.items()
            },
        )
        for worker, incarnation in self.members.items():
            draft.reply(worker, incarnation, self.told, ("Commit", self.iteration))
        return True

    def _in_groups(self) -> list[int]:
        """Return the workers whose gradients the mean has; none if each contributes by itself."""
        members = {worker: self.commits[worker].members for worker in self.members}
        if not any(members.values()):
            return []
        return sorted({each for worker, inside in members.items() for each in inside or [worker]})

    def _mixed_epochs(self) -> str:
        """Return the warning for members that train on batches of different epochs together; empty for
        none."""
        stands = (self.commits[worker].stand for worker in self.members)
        return mixed_epochs({each.worker: each.stand for each in stands if each is not None})

    def _refuse_excess(self, draft: Draft, these: Contributors) -> bool:
        """Drop each commit whose weight is far too large, and tell its worker. True if there was one."""
        commits = {worker: judged(self.commits[worker]) for worker in self.members}
        found = {worker: these.usual.excess(each, commits.values()) for worker, each in commits.items()}
        for worker, excess in found.items():
            if excess:
                reason = excess_line(worker, self.iteration, excess)
                refused = messages.Refused(reason=reason, request="Commit")
                draft.reply(worker, self.members[worker], refused, ("Commit", self.iteration))
                del self.commits[worker]
        return any(found.values())

    def _try_step(self, draft: Draft) -> bool:
        if self._silent():
            return False
        speakers = sorted(self.said, key=lambda worker: (worker in self.fresh, worker))
        nothing = messages.Step(
            incarnation=0, iteration=self.iteration, scale=1.0, hyperparameters=[], accepted=False
        )
        said = self.said[speakers[0]] if speakers else nothing
        draft.write(
            StepWithMean(
                iteration=self.iteration,
                scale=said.scale,
                hyperparameters=said.hyperparameters,
                edited=said.edited,
                editor=speakers[0] if said.edited or said.written else -1,
                accepted=said.accepted,
                nobody=not speakers,
                optimizer=said.optimizer,
                stays=said.stays,
                written=said.written,
            )
        )
        self.iteration += 1
        if speakers and not said.accepted:
            self.entering = {}  # the gradients may be left, and added to: newcomers would lack them
        self.stays, self.said = said.stays, {}
        if not self.stays:
            self.combined, self.members = [], {}
        self.follow.clear()
        self.fresh.clear()
        return True

    def _silent(self) -> list[int]:
        """Return the members whose word on the step is waited for."""
        return [worker for worker in self.members if worker not in self.said and worker not in self.follow]

    @property
    def stand(self) -> WorkerStand | None:
        """The place in its script of a worker that has committed the iteration under way, or None."""
        return next((each.stand for each in self.commits.values() if each.stand is not None), None)

    def waits(self) -> Waits:
        """Return the workers needed to continue the iteration, and the places of workers that wait in it."""
        said = self.said if self.combined else self.commits
        stands = {worker: said[worker].stand for worker in self.members if worker in said}
        return Waits(
            frozenset(self.members),
            {worker: stand for worker, stand in stands.items() if stand is not None},
        )

    def waiting_for(self, these: Contributors) -> list[str]:
        """Return, in words, the workers waited for and what each has to do."""
        if not self.members and not self.combined:
            missing = these.roster.missing()
            return [missing] if missing else []
        if self.combined:
            return [f"worker {worker}, to step iteration {self.iteration}" for worker in self._silent()]
        lines = []
        for worker, incarnation in self.members.items():
            if worker not in self.commits:
                lines.append(f"worker {worker}, to commit iteration {self.iteration}")
            elif line := these.staged_line(worker, incarnation, self.iteration):
                lines.append(line)
        return lines


def _workers(workers: Any) -> str:
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, workers))


def _unlike_settings(first: messages.Step, second: messages.Step) -> Difference | None:
    """Return the first difference between two steps' gradient scales, then between their hyperparameters."""
    if first.accepted and second.accepted and first.unscaled != second.unscaled:
        return Difference(0, GRADIENT_SCALE, first.unscaled, second.unscaled)
    return first_difference(first.hyperparameters, second.hyperparameters)


def _difference(one: str, step: messages.Step, other: str, said: messages.Step, *, writes: bool) -> str:
    """Return, in words, how `one`'s step differs from the one that `other` has said, besides hyperparameters;
    empty if it does not.

    With `writes`, what the scripts have written into parameters is compared too.
    """
    if step.accepted != said.accepted:
        steps, leaves = (one, other) if step.accepted else (other, one)
        return (
            f"{steps} makes the step, and {leaves} leaves it out (a backward comes before its "
            "optimizer.step(), or its GradScaler skips the step): give every worker equally many backwards "
            "before each step, or put all but the last one into session.no_sync()"
        )
    if not _same(step.scale, said.scale):
        return (
            f"{one} multiplies the gradients by {step.scale:g}, and {other} by {said.scale:g}: clip by "
            "session.clip_grad_norm_ with equal arguments on every worker"
        )
    if step.optimizer != said.optimizer:
        return (
            f"{one} makes the step of optimizer {step.optimizer} of session.prepare's list, and {other} of "
            f"optimizer {said.optimizer}: call them in one order on every worker"
        )
    if step.stays != said.stays:
        return "the optimizers that follow with the same gradients differ: step the same ones on every worker"
    if step.edits != said.edits and sorted(step.edited) == sorted(said.edited):
        return (
            "they have made different gradients of the same mean (clipping, other changes of p.grad, or "
            "GradScalers of different scales: call session.register(scaler=scaler))"
        )
    if writes and (step.writes, sorted(step.written)) != (said.writes, sorted(said.written)):
        return (
            "they have written different values into parameters, or one of them has written none: write "
            "equal values on every worker, between the same two steps"
        )
    if sorted(step.edited) != sorted(said.edited):
        return (
            "their scripts have changed the gradients (p.grad) of different parameters: change the same ones "
            "on every worker"
        )
    return ""


def _same(one: Any, other: Any) -> bool:
    """True if two values are equal. NaN equals NaN here."""
    return bool(one == other) or msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)
