"""A shard's decisions: it stages contributions, does what the log says, and knows its workers' clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from atoll.core.weighing import worst
from atoll.store.actions import (
    Action,
    ApplyChunks,
    CombineChunks,
    GradientHandles,
    PushOutcome,
    Release,
    StepChunks,
)
from atoll.store.entries import AnyEntry, Apply, Combine, Fenced, Idle, Joined, StepWithMean
from atoll.store.losses import ChunkLoss, told_of
from atoll.store.outcomes import StoreError
from atoll.store.roster import fenced_out
from atoll.wire import messages
from atoll.wire.messages import Count, LostBlocks

Key: TypeAlias = tuple[int, int]  # worker, incarnation


class Runs(msgspec.Struct, forbid_unknown_fields=True):
    """A chunk that comes in several runs.

    Attributes:
        shares: the number of runs.
        present: one byte a slot: whether it has a gradient.
        handles: the handles of the runs that are here, by share.
        lost: the lost blocks of the runs that lost some, by share.
    """

    shares: Count
    present: bytes
    handles: dict[int, Count]
    lost: dict[int, LostBlocks] = {}


class StagedContribution(msgspec.Struct, forbid_unknown_fields=True):
    """One worker's contribution to an iteration, as far as it has come.

    Attributes:
        expected: the number of its chunks.
        parts: the whole chunks.
        runs: chunks that are here in part, by chunk.
        losses: the losses of whole chunks that lost something, by chunk.
    """

    expected: Count
    parts: GradientHandles = {}
    runs: dict[int, Runs] = {}
    losses: dict[int, ChunkLoss] = {}

    def is_whole(self) -> bool:
        return len(self.parts) == self.expected

    def handles(self) -> list[int]:
        """Return the handles of everything that is here."""
        runs = [handle for each in self.runs.values() for handle in each.handles.values()]
        return [handle for handle, _ in self.parts.values()] + runs


class WorkerProgress(msgspec.Struct, forbid_unknown_fields=True):
    """A worker that takes part.

    Attributes:
        clock: its iterations that are applied here.
        staleness: of its latest contribution, in global iterations.
        idle: True while it waits for all others in a meeting.
    """

    incarnation: Count
    clock: Count
    staleness: float = 0.0
    idle: bool = False


class ShardState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The state of a shard, which a journal keeps as it is. A shard without chunks only follows the log.

    Attributes:
        versions: the versions of its trainable chunks.
        limit: iterations that a worker may have staged and not applied.
        steps: iterations stepped here (BSP).
        consumed: samples that the log has counted.
        applied: entries of the log that are applied.
        staged: (worker, incarnation) -> iteration -> contribution.
        combined: the iteration whose mean is here and not yet stepped; -1 for none.
        mean_of: the workers of that mean.
        stays: True if the mean has been stepped, and stays for other optimizers: they step it as iteration
            `steps`.
        replaced: the chunks by which each of them would replace the mean's.
        written: the chunks' values that each of them has written.
        losses: the losses of the latest `limit` contributions that count, by iteration and chunk.
    """

    versions: dict[int, Count]
    consistency: str
    slack: Count
    limit: Count = 2
    steps: Count = 0
    consumed: float = 0.0
    applied: Count = 0
    members: dict[int, WorkerProgress] = {}
    fenced: dict[int, Count] = {}
    staged: dict[Key, dict[int, StagedContribution]] = {}
    combined: int = -1
    mean_of: frozenset[Count] = frozenset()
    stays: bool = False
    replaced: dict[int, GradientHandles] = {}
    written: dict[int, GradientHandles] = {}
    losses: dict[Key, dict[int, dict[int, ChunkLoss]]] = {}

    @classmethod
    def begin(
        cls,
        chunks: Sequence[int],
        consistency: str,
        slack: int,
        limit: int = 2,
        steps: int = 0,
        consumed: float = 0.0,
    ) -> ShardState:
        """Begin with these trainable chunks; `steps` as in wire's Setup."""
        return cls(
            versions=dict.fromkeys(chunks, 0),
            consistency=consistency,
            slack=slack,
            limit=limit,
            steps=steps,
            consumed=consumed,
        )

    def refusal(self, worker: int, incarnation: int) -> str:
        """Return why nothing is taken from this incarnation; empty if something is."""
        return fenced_out(self.fenced, worker, incarnation)

    def awaits_mean(self, iteration: int) -> bool:
        """True if the mean of this iteration is still to come."""
        return iteration >= self.steps and iteration > self.combined

    # -- what workers send --------------------------------------------------------------------------------

    def handle_push(self, worker: int, push: messages.Push, handle: int) -> PushOutcome:
        """Take a chunk of a contribution, or a run of one. Its worker's Joined may still be on its way."""
        if push.chunk not in self.versions:
            return PushOutcome(refused=f"this shard does not hold chunk {push.chunk}")
        refusal = self.refusal(worker, push.incarnation)
        if refusal:
            return PushOutcome(refused=refusal)
        clock = self._next_iteration(worker, push.incarnation)
        if clock is not None and push.iteration < clock:
            return PushOutcome()
        staged = self.staged.get((worker, push.incarnation), {})
        contribution = staged.get(push.iteration)
        if contribution is None:
            too_far = clock is not None and push.iteration >= clock + self.limit
            if too_far or len(staged) >= self.limit:
                return PushOutcome(refused=f"worker {worker} has more than {self.limit} iterations in flight")
            if not 0 < push.chunks_in_all <= len(self.versions):
                return PushOutcome(
                    refused=f"{push.chunks_in_all} chunks announced, of {len(self.versions)} that are here"
                )
            contribution = StagedContribution(push.chunks_in_all)
        if push.chunk in contribution.parts:
            return PushOutcome()
        if push.chunks_in_all != contribution.expected or contribution.is_whole():
            return PushOutcome(
                refused=f"worker {worker} announced {contribution.expected} chunks of iteration "
                f"{push.iteration}, and now {push.chunks_in_all}, or sends more"
            )
        outcome = _add(contribution, worker, push, handle)
        if outcome.keep:
            self.staged.setdefault((worker, push.incarnation), {})[push.iteration] = contribution
        return outcome

    def _next_iteration(self, worker: int, incarnation: int) -> int | None:
        """Return a worker's first iteration that is not in the log here; None while its Joined is on its
        way."""
        member = self.members.get(worker)
        return member.clock if member is not None and member.incarnation == incarnation else None

    def handle_replace(self, worker: int, replace: messages.Replace, handle: int) -> PushOutcome:
        """Take a member's replacement for a chunk of the mean (BSP). Of repetitions the first counts."""
        refusal = self.refusal(worker, replace.incarnation)
        if refusal:
            return PushOutcome(refused=refusal)
        if replace.chunk not in self.versions:
            return PushOutcome(refused=f"this shard does not hold chunk {replace.chunk}")
        if replace.iteration < self.steps:
            return PushOutcome()
        if replace.iteration != self._may_step or worker not in self.mean_of:
            return PushOutcome(refused=f"worker {worker} has no mean of iteration {replace.iteration} here")
        parts = (self.written if replace.values else self.replaced).setdefault(worker, {})
        if replace.chunk in parts:
            return PushOutcome()
        parts[replace.chunk] = (handle, replace.present)
        return PushOutcome(keep=True)

    @property
    def _may_step(self) -> int:
        """The iteration that the mean here may be stepped as; -1 if there is none."""
        return self.steps if self.stays else self.combined

    # -- what the log says --------------------------------------------------------------------------------

    def handle_entry(self, entry: AnyEntry) -> list[Action]:
        """Return the actions for an entry, in order. Raises StoreError if the log contradicts this state."""
        self.applied += 1
        if isinstance(entry, Joined):
            self.members[entry.worker] = WorkerProgress(entry.incarnation, entry.clock)
            if self.consistency == "bsp":
                self.steps = entry.clock
            return []
        if isinstance(entry, Combine):
            return self._combine(entry)
        if isinstance(entry, StepWithMean):
            return self._step(entry)
        if isinstance(entry, Apply):
            return self._apply(entry)
        if isinstance(entry, Idle):
            self.members[entry.worker].idle = entry.idle
            return []
        return self._fence(entry)

    def _take(self, worker: int, incarnation: int, iteration: int) -> StagedContribution:
        """Remove and return a contribution that the log counts. The actions then use and release its
        chunks."""
        member = self.members.get(worker)
        if member is None or member.incarnation != incarnation or member.clock != iteration:
            raise StoreError(
                f"the log counts iteration {iteration} of worker {worker}, which is not its next"
            )
        member.clock = iteration + 1
        if not self.versions:
            return StagedContribution(0)
        contribution = self.staged.get((worker, incarnation), {}).pop(iteration, None)
        if contribution is None or not contribution.is_whole():
            raise StoreError(
                f"the log counts iteration {iteration} of worker {worker}, whose chunks are not staged here"
            )
        self._note_losses((worker, incarnation), iteration, contribution.losses)
        return contribution

    def _note_losses(self, key: Key, iteration: int, losses: dict[int, ChunkLoss]) -> None:
        """Keep a contribution's losses for as long as they may be asked for."""
        held = {at: each for at, each in self.losses.pop(key, {}).items() if at > iteration - self.limit}
        if losses:
            held[iteration] = losses
        if held:
            self.losses[key] = held

    def _combine(self, entry: Combine) -> list[Action]:
        members = [self._take(member.worker, member.incarnation, entry.iteration) for member in entry.members]
        taken = [(each.weight, found.parts) for each, found in zip(entry.members, members, strict=True)]
        losses = [found.losses for found in members] if any(found.losses for found in members) else []
        self.combined, self.stays = entry.iteration, False
        self.mean_of = frozenset(member.worker for member in entry.members)
        weight = sum(each.weight if each.counted < 0 else each.counted for each in entry.members)
        samples = sum(member.samples for member in entry.members)
        self.consumed += samples
        basis = worst([member.basis for member in entry.members if member.weight > 0])
        alike = sum(member.alike for member in entry.members if member.weight > 0)
        weights = [each.weights for each in entry.members] if any(e.weights for e in entry.members) else []
        combine = CombineChunks(entry.iteration, taken, weight, samples, losses, basis, alike, weights)
        return [combine, *_release(*(parts for _, parts in taken))]

    def _step(self, entry: StepWithMean) -> list[Action]:
        if entry.iteration != self._may_step:
            raise StoreError(f"the log steps iteration {entry.iteration}, of which no mean is here")
        edited = self._sent(entry.editor, entry.edited if entry.accepted else [], self.replaced)
        written = self._sent(entry.editor, entry.written, self.written)
        for chunk in self.versions if entry.accepted else written:
            self.versions[chunk] += 1
        for worker in self.mean_of if self.stays else ():  # nobody has committed this iteration
            if worker in self.members:
                self.members[worker].clock = entry.iteration + 1
        actions: list[Action] = [
            StepChunks(
                entry.iteration,
                entry.scale,
                entry.hyperparameters,
                edited,
                entry.accepted,
                entry.nobody,
                entry.optimizer,
                entry.stays,
                written,
            )
        ]
        actions += _release(*self.replaced.values(), *self.written.values())
        self.steps, self.combined, self.stays = entry.iteration + 1, -1, entry.stays
        self.mean_of = self.mean_of if entry.stays else frozenset()
        self.replaced, self.written = {}, {}
        return actions

    def _sent(self, editor: int, chunks: list[int], by: dict[int, GradientHandles]) -> GradientHandles:
        """Return what the editor has sent of those of the `chunks` that are here."""
        sent: GradientHandles = {}
        for chunk in chunks:
            if chunk in self.versions and chunk not in by.get(editor, {}):
                raise StoreError(f"worker {editor} has not sent what it made of chunk {chunk}")
            if chunk in self.versions:
                sent[chunk] = by[editor][chunk]
        return sent

    def _apply(self, entry: Apply) -> list[Action]:
        parts = self._take(entry.worker, entry.incarnation, entry.iteration).parts
        self.members[entry.worker].staleness = entry.staleness
        self.consumed += entry.samples
        for chunk in parts:
            self.versions[chunk] += 1
        apply = ApplyChunks(
            worker=entry.worker,
            incarnation=entry.incarnation,
            iteration=entry.iteration,
            chunks=parts,
            part=entry.part,
            opens=entry.opens,
            closes=entry.closes,
            hyperparameters=entry.hyperparameters,
            staleness=entry.staleness,
            behind=entry.behind,
            optimizer=entry.optimizer,
        )
        return [apply, *_release(parts)]

    def _fence(self, entry: Fenced) -> list[Action]:
        """Drop what a fenced worker has staged.

        Its replacements of the mean's chunks stay, as its word on the step may be the one that counts.
        """
        self.fenced[entry.worker] = max(entry.incarnation, self.fenced.get(entry.worker, 0))
        member = self.members.get(entry.worker)
        if member is not None and member.incarnation <= entry.incarnation:
            del self.members[entry.worker]
        for key in [key for key in self.losses if self.refusal(*key)]:
            del self.losses[key]
        gone: list[int] = []
        for key in [key for key in self.staged if self.refusal(*key)]:
            for contribution in self.staged.pop(key).values():
                gone += contribution.handles()
        return [Release(gone)] if gone else []

    # -- what others ask ----------------------------------------------------------------------------------

    def clock_of(self, worker: int) -> int:
        """Return the iteration that a live worker is to begin, after what is applied here: for wire's
        Parameters."""
        member = self.members[worker]
        return self.steps if self.consistency == "bsp" else member.clock

    def note_staleness(self, staleness: float) -> None:
        """Note, at a site, the staleness that the global shards have measured for the site as one
        contributor."""
        for member in self.members.values():
            member.staleness = staleness

    def staleness_of(self, worker: int) -> float:
        """Return the staleness of a live worker's latest contribution, in global iterations."""
        return self.members[worker].staleness

    def lost_of(
        self, worker: int, asked: messages.Pull | messages.PullMean, iteration: int, chunk: int, extent: int
    ) -> LostBlocks | None:
        """Return what was lost of the asker's own contribution to an iteration, in the run that it asks for.

        None if nothing was lost, or if the contribution is none of the latest `limit` that count.

        Args:
            extent: the elements of the chunk.
        """
        loss = self.losses.get((worker, asked.incarnation), {}).get(iteration, {}).get(chunk)
        return told_of(loss, extent, asked.share, asked.shares) if loss is not None else None

    def whole(self) -> list[tuple[int, int, int]]:
        """Return (worker, incarnation, iteration) of all contributions that are whole here and not yet in the
        log."""
        return [
            (worker, incarnation, iteration)
            for (worker, incarnation), staged in self.staged.items()
            for iteration, contribution in staged.items()
            if contribution.is_whole()
        ]


def _add(contribution: StagedContribution, worker: int, push: messages.Push, handle: int) -> PushOutcome:
    """Put a chunk that is not there yet, or a run of it, into a contribution.

    A group's ring only gets smaller, when a member dies. The members that are left cut the chunk into fewer
    runs and send all of them. So a run of fewer begins the chunk anew, and a run of more was sent before
    that, and is ignored.
    """
    runs = contribution.runs.get(push.chunk)
    freed: tuple[int, ...] = ()
    if runs is not None and push.shares < runs.shares:
        freed = tuple(runs.handles.values())
        runs = None
    if runs is None:
        runs = Runs(push.shares, push.present, {})
    elif push.shares > runs.shares or push.share in runs.handles:
        return PushOutcome()
    elif push.present != runs.present:
        return PushOutcome(
            refused=f"share {push.share} of chunk {push.chunk} of worker {worker}'s iteration "
            f"{push.iteration} has gradients for other parameters than the shares before it"
        )
    runs.handles[push.share] = handle
    if push.lost is not None:
        runs.lost[push.share] = push.lost
    if len(runs.handles) < runs.shares:
        contribution.runs[push.chunk] = runs
        return PushOutcome(keep=True, freed=freed)
    contribution.runs.pop(push.chunk, None)
    contribution.parts[push.chunk] = (handle, push.present)
    if runs.lost:
        contribution.losses[push.chunk] = ChunkLoss(runs.shares, runs.lost)
    joins = tuple(runs.handles[share] for share in range(runs.shares)) if runs.shares > 1 else ()
    return PushOutcome(keep=True, staged=contribution.is_whole(), joins=joins, freed=freed)


def _release(*parts: GradientHandles) -> list[Action]:
    handles = [handle for each in parts for handle, _ in each.values()]
    return [Release(handles)] if handles else []
