"""Gradients of chunks that the members of a group hold between them.

Each member's gradients of all chunks lie in its own payloads until `SharedGradients.reduce` sums each part,
weighted, to the member that holds it. From then on only that part of a member's payload counts. `p.grad` is
the mean on every member, which fetches the parts that others hold. A script writes gradients alike on all
members, so each member keeps what it wrote to its own part. Members' scripts do not run in step, so until the
next sync point the others still read the part as it was before the write.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

from atoll.core.callstack import caller
from atoll.core.errors import RunError, UserError
from atoll.core.scriptline import script_line, waiting_line
from atoll.core.stands import Stand, call, gradients
from atoll.core.weighing import SAID, Certainty, said
from atoll.memory.gradients import ChunkGradients, GradientSlot, ModelGradients, TrainedChunk
from atoll.memory.interrupts import uninterrupted
from atoll.memory.leaving import Leaving
from atoll.memory.members import told
from atoll.memory.payloads import GRADIENT, Payloads
from atoll.memory.portions import Portion
from atoll.memory.proxies import LostSource
from atoll.memory.sharing import Sharing
from atoll.memory.stepqueue import StepQueue
from atoll.memory.sums import Summing
from atoll.tensors.binding import dtype_as, numbers_in
from atoll.tensors.finite import is_finite
from atoll.tensors.torch_compat import version_of
from atoll.tensors.torch_scaling import reader_of_all_gradients

_UNDER_WAY = 2  # sums at once: while one travels, the next is prepared
_FIRST = 3 + SAID  # values that members sum about a backward as a whole
_ABSENT = -1.0  # stands for a norm if there is no gradient
_PIECE = 2**20  # elements that are summed at once in double precision, which takes a copy of them


class _SharedSlot(GradientSlot):
    """One parameter's gradient in a chunk that several members hold."""

    _chunk: _SharedChunk

    def see(self) -> Tensor:
        # Who reads the proxy of a mean that was set aside is told why it cannot be read.
        return self.show() if self._chunk.earlier[self._index] else super().see()

    @contextmanager
    def lend(self, *, overwrites: bool = False) -> Iterator[Tensor]:
        chunk, index = self._chunk, self._index
        if not overwrites:
            chunk.note_read()
        if index in chunk.kept or chunk.is_own(index):
            with super().lend(overwrites=overwrites) as gradient:
                yield gradient
            return
        like, device = chunk.trained.likes[index], chunk.trained.device
        with torch.inference_mode(False), torch.no_grad():
            lent = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
            if not overwrites:
                chunk.copy_mean(index, lent)
        before = version_of(lent)
        yield lent
        if version_of(lent) != before:
            self.edits += 1
            chunk.write(index, lent)

    def leave(self) -> None:
        if self._chunk.is_readable(self._index):
            super().leave()
            return
        proxy = self.proxy() if self.proxy is not None else None
        if proxy is not None:
            name = self._chunk.trained.names[self._index]
            gone = UserError(f"this gradient of {name!r} is no more; {name}.grad is the present one")
            proxy.source = LostSource(gone)
        self.proxy = None


class _SharedChunk(ChunkGradients):
    """The state of one chunk's gradients on one member.

    At first the gradients are this member's own. After `sum`, the payload has the mean in this member's
    `portion`, and undefined values elsewhere. If gradients come after that, the member sets its part of the
    mean aside, to be added to the next mean. If the script assigns a gradient meanwhile, it replaces both
    what was set aside and what has come: so a member that has set a mean aside and one without new gradients
    do the same.

    Attributes:
        come: for each slot, whether a gradient of this member's own has come since the mean.
        is_mean: True while the payload's portion is the mean.
        earlier: for each slot, whether there is a mean that was set aside.
        originals: by slot that the script has changed since the last sync point, this member's part before
            the change, which other members still read.
        edits: slots whose whole gradient this member's script reads from the payload, since it wrote there
            after the last sync point; other members hold some of each.
        edited: slots that the script has written to since the sum.
    """

    slot_kind = _SharedSlot

    def __init__(self, trained: TrainedChunk, sharing: Sharing, steps: StepQueue, leaving: Leaving) -> None:
        super().__init__(trained, sharing, steps, leaving)
        self._sharing = sharing
        self.portion = Portion(trained, sharing.part(trained.chunk.id))
        self.is_mean = False
        self.come = [False] * len(trained.parameters)
        self.earlier = [False] * len(trained.parameters)
        self._aside: Tensor | None = None  # this member's part of the mean that was set aside
        # A mean that this member has dropped and others may still read: the count of sync points, and this
        # member's part.
        self._former: tuple[int, Tensor] | None = None
        # Stepped since the sum: a holder that drops its part keeps it for others only once somebody has read
        # a gradient after its step.
        self.is_stepped = False
        self.originals: dict[int, Tensor] = {}
        self.edited: set[int] = set()
        self.edits: set[int] = set()
        # Guards the payload between the script's thread and the threads that answer other members.
        self._lock = threading.RLock()

    @contextmanager
    def borrow(self, *, writes: bool) -> Iterator[Tensor]:
        with self._lock, super().borrow(writes=writes) as flat:
            yield flat

    def counted(self, flat: Tensor, slot: int) -> Tensor:
        return self.portion.of(flat, slot) if self.is_mean else super().counted(flat, slot)

    @property
    def has_mean(self) -> bool:
        """True if there is a mean, in the payload or set aside. All members have one, or none has."""
        return self.is_mean or any(self.earlier)

    def is_own(self, slot: int) -> bool:
        """True if a slot has no mean, so that its gradient is this member's own."""
        return not self.is_mean and not self.earlier[slot]

    def take(self, index: int, gradient: Tensor, measures: float | None) -> None:
        """Take a gradient that has come; if the payload holds a mean, set the mean aside first."""
        del measures  # only the mean's norm counts
        if self.is_mean:
            self.wait_stepped()  # the end of the step may drop the mean
            if self.is_mean:
                self._set_aside()
        present, self.present = self.present, self.come
        try:
            super().take(index, gradient, None)
        finally:
            self.present = present
        self.present[index] = True

    def _set_aside(self) -> None:
        """Set the mean aside, as gradients come after it."""
        if self.kept:
            with self.settled():  # takes in what the script has changed in views
                pass
        for index in list(self.kept):
            self.slots[index].leave()
        self.earlier = list(self.present)
        self._keep_for_others()
        if not self.portion.is_empty:
            with self.borrow(writes=False) as flat:
                self._aside = flat[self.portion.begin : self.portion.end].clone()
        self.filled, self.is_mean = False, False
        self.norms.clear()
        self.forget_changes()

    def replace(self, index: int, gradient: Tensor) -> None:
        self.wait_stepped()  # the end of the step may drop the mean
        if not self.has_mean:
            super().replace(index, gradient)
            return
        if self.present[index]:
            self.slots[index].leave()
        self.graphs.pop(index, None)
        if gradient.requires_grad:
            self.graphs[index] = gradient
        self.write(index, gradient)
        self.present[index] = True

    def forget(self, index: int) -> None:
        super().forget(index)
        self.edits.discard(index)
        self.come[index] = self.earlier[index] = False

    def release(self) -> None:
        with self._lock:
            if not any(self.present) and not self.stepping:
                self._keep_for_others()
            super().release()
            if not any(self.present) and not self.stepping:
                self._begin_anew()

    def _begin_anew(self) -> None:
        self.is_mean = self.is_stepped = False
        self._aside = None
        self.edited.clear()
        self.come, self.earlier = [False] * len(self.come), [False] * len(self.come)
        self.forget_changes()

    def forget_changes(self) -> None:
        """Forget what the script has changed, at a sync point: all members may see it from now on."""
        self.originals.clear()
        self.edits.clear()
        # The stepping thread may have the payload pinned: a chunk without elements is stepped, too.
        if self.is_mean and self.portion.is_empty and self.filled and not self.stepping:
            self.filled = False
            self.payloads.drop(self.key)

    def measured(self, norm_type: float) -> dict[int, Tensor]:
        """Return the norm of each present gradient of which this member holds something, by slot.

        If the member holds only a part, it is the part's `partial_norm`, for `combined`.
        """
        here = [slot for slot, present in enumerate(self.present) if present and self.portion.numel(slot)]
        missing = [slot for slot in here if slot not in self.norms or slot in self.kept]
        if missing:
            with self.settled() as flat:
                for slot in missing:
                    if self.portion.is_whole(slot):
                        whole = self.trained.part(flat, slot)
                        self.norms[slot] = torch.linalg.vector_norm(whole, norm_type)
                    else:
                        part = numbers_in(self.portion.of(flat, slot), self.trained.likes[slot])
                        self.norms[slot] = partial_norm(part, norm_type)
        return {slot: self.norms[slot] for slot in here}

    # The sum

    @contextmanager
    def sum(self, agreed: Sequence[bool], scale: float) -> Iterator[Summing]:
        """Sum all members' gradients of the `agreed` slots to their holders. At the block's end the mean is
        there.

        Yields the sum, which is under way.

        Args:
            agreed: for each slot, whether any member of this group has a gradient.
            scale: this member's factor; 0 leaves its gradients out.
        """
        chunk = self.trained.chunk.id
        what = f"the gradient of {self._sharing.words(chunk)} in step {self._sharing.points.steps}"
        if self.is_mean:  # other members have new gradients of the chunk, and this one has none
            self._set_aside()
        with self.settled(writes=True) as flat:
            for index in list(self.kept):
                self.slots[index].leave()
            for slot, come in enumerate(self.come):
                run = self.trained.run(flat, slot)
                if not come or scale <= 0:
                    run.zero_()
                elif scale != 1.0:
                    run.mul_(scale)
            yield self._sharing.sum(chunk, flat, what)
            self._add_earlier(flat)
        self._is_mean(agreed)
        self.release()  # if only another group has gradients of the chunk

    def _add_earlier(self, flat: Tensor) -> None:
        if self._aside is not None:
            for slot, there in enumerate(self.earlier):
                if there and self.portion.numel(slot):
                    first, last = self.portion.bounds(slot)
                    flat[first:last].add_(self._aside[first - self.portion.begin : last - self.portion.begin])

    def _is_mean(self, agreed: Sequence[bool]) -> None:
        self.present = [now or before for now, before in zip(agreed, self.earlier, strict=True)]
        self._begin_anew()
        self._former = None
        self.norms.clear()
        self.is_mean = True
        if self.portion.is_empty:
            self.filled = False
            self.payloads.drop(self.key)

    def drop_come(self) -> None:
        """Drop the gradients that have come, which count for nobody; a mean that was set aside is the mean
        again.

        This member has no weight, or its script has assigned all of these gradients.
        """
        if not any(self.come) and not any(self.earlier):
            return
        for index, come in enumerate(self.come):
            if come:
                self.slots[index].leave()
            if come and not self.earlier[index]:
                self.graphs.pop(index, None)
        with self.settled(writes=True) as flat:
            flat.zero_()
            self._add_earlier(flat)
        self._is_mean([False] * len(self.come))
        self.release()

    # The mean, as scripts see it

    def is_readable(self, index: int) -> bool:
        """True if this member can read the gradient without asking another."""
        if index in self.kept or self.is_own(index):
            return True
        return self.is_mean and (self.portion.is_whole(index) or index in self.edits)

    def note_read(self) -> None:
        """Note that a gradient is read. If it is stepped, means are kept from now on for slower members."""
        if self.is_stepped:
            self._sharing.keeps_stepped = True

    def check_readable(self, index: int) -> None:
        name = self.trained.names[index]
        if self.earlier[index]:
            raise UserError(
                f"{name}.grad: gradients have come after the workers' mean, and are not in it yet; read it "
                "when the backward has ended that is outside of no_sync"
            )

    def copy_mean(self, index: int, into: Tensor) -> None:
        """Copy a slot's mean, wherever it lies, into a tensor of the parameter's shape and device.

        Raises UserError, as `check_readable` does, if the mean cannot be read.
        """
        self.check_readable(index)
        if self.portion.is_whole(index) or index in self.edits:
            with self.settled() as flat:
                into.copy_(self.trained.part(flat, index))
            return
        whole = self._sharing.cache.fetched(self.trained, index, GRADIENT, self.trained.dtype)
        if self.portion.numel(index):
            with self.settled() as flat:
                self.portion.of(whole, index).copy_(self.portion.of(flat, index))
        into.copy_(self.trained.part(whole, index))

    def write(self, index: int, values: Tensor) -> None:
        """Write the script's values to a slot: into the mean, or in place of a mean that was set aside."""
        # `settled` waits for the step and then locks. The step takes the lock too.
        with self.settled(writes=True) as flat:
            if self.is_mean:
                self.note_edit(index)
                self._note_change(flat, index)
            self.trained.part(flat, index).copy_(values)
            if not self.is_mean:
                self._put_aside(flat, index)
            self.norms.pop(index, None)

    def note_edit(self, index: int) -> None:
        """Note that the script has written to a slot of the mean."""
        if self.is_mean:
            self.edited.add(index)

    def _put_aside(self, flat: Tensor, index: int) -> None:
        if self._aside is not None and self.portion.numel(index):
            first, last = self.portion.bounds(index)
            self._aside[first - self.portion.begin : last - self.portion.begin].copy_(flat[first:last])
        self.earlier[index], self.come[index] = True, False

    def take_in(self, flat: Tensor, index: int, kept: Tensor) -> None:
        if self.is_mean:
            self._note_change(flat, index)
        super().take_in(flat, index, kept)

    def _note_change(self, flat: Tensor, index: int) -> None:
        """Keep this member's part of a slot for the other members, before the script changes the slot."""
        if self.present[index] and self.portion.numel(index):
            self.originals.setdefault(index, self.portion.of(flat, index).clone())
        if not self.portion.is_whole(index):
            self.edits.add(index)

    def for_others(self) -> Tensor:
        """Return a copy of this member's part of the mean, as the last sync point has left it.

        Raises UserError if this member has dropped the mean since.
        """
        self.wait_stepped()
        with self._lock:
            if not self.is_mean:
                if self._former is not None and self._former[0] == self._sharing.count:
                    return self._former[1]
                self._sharing.keeps_stepped = True
                raise UserError(
                    f"worker {self._sharing.rank} has let go of the gradient of "
                    f"{self._sharing.words(self.trained.chunk.id)}; read p.grad before optimizer.step(), or "
                    "on all workers"
                )
            self.note_read()
            return self._as_summed()

    def _as_summed(self) -> Tensor:
        with self.borrow(writes=False) as flat:
            copy = flat[self.portion.begin : self.portion.end].clone()
        for index, original in self.originals.items():
            first, last = self.portion.bounds(index)
            copy[first - self.portion.begin : last - self.portion.begin].copy_(original)
        return copy

    def _keep_for_others(self) -> None:
        """Keep a copy of a mean that is dropped, as slower members may still read it: after its step only if
        scripts read it then."""
        wanted = not self.is_stepped or self._sharing.keeps_stepped
        if self.is_mean and not self.portion.is_empty and wanted:
            self._former = self._sharing.count, self._as_summed()


class SharedGradients(ModelGradients):
    """The gradients of all trained chunks, on one of the members that hold them between them."""

    _chunks: Mapping[int, _SharedChunk]

    def __init__(
        self,
        chunks: Sequence[TrainedChunk],
        sharing: Sharing,
        steps: StepQueue,
        arrived: Callable[[TrainedChunk, int], None] = lambda _chunk, _slot: None,
        room: int = 0,
        beside: Mapping[int, nn.Parameter] | None = None,
    ) -> None:
        self._sharing = sharing
        super().__init__(chunks, sharing, steps, arrived, room, beside)
        grouping = sharing.grouping  # the longest vector that members sum is that of `reduce`
        by_slot = (len(each.names) * len(grouping.groups(grouping.kind(each.chunk.id))) for each in chunks)
        by_kind = (2 * len(grouping.groups(kind)) for kind in grouping.kinds)
        sharing.points.most_words = _FIRST + sum(by_kind) + sum(by_slot)
        self._bad = ""

    def _held(
        self, trained: TrainedChunk, payloads: Payloads, steps: StepQueue, leaving: Leaving
    ) -> _SharedChunk:
        del payloads  # `sharing` is the payloads
        return _SharedChunk(trained, self._sharing, steps, leaving)

    def leave(self) -> list[tuple[nn.Parameter, Callable[[], Tensor]]]:
        """Remove the hooks; return what has a gradient (`ModelGradients.leave`).

        It follows a sync point, and no member drops a mean before all have read it.
        """
        for each in self._chunks.values():
            each.is_stepped = False
        return super().leave()

    def for_others(self, chunk: int) -> Tensor:
        """Return a copy of this member's part of a chunk's mean, as the latest sync point has left it."""
        if chunk not in self._chunks:
            raise UserError(f"{self._sharing.words(chunk)} is frozen, and has no gradient")
        return self._chunks[chunk].for_others()

    def grad_of(self, parameter: nn.Parameter) -> Tensor | None:
        if self._sharing.grouping.is_apart and (reader := reader_of_all_gradients(caller())):
            raise UserError(
                f"{reader} sees this group's gradients alone, and some parameters are others in other groups "
                "(atoll.memory.over); clip by clip_grad_norm_ of the session, or of what memory.fit gave, "
                "and train without a GradScaler"
            )
        return super().grad_of(parameter)

    def _give_back(self, each: ChunkGradients, index: int) -> None:
        each.forget(index)  # only its holders have the mean

    def where(self) -> Stand:
        """Return this member's place in its script while gradients are summed."""
        return gradients(self._sharing.points.steps, waiting_line())

    def reduce(
        self, weight: float, samples: float, certain: bool = True, alike: float = 1.0
    ) -> tuple[float, Certainty]:
        """Reduce all members' gradients to their mean at the end of a backward; each holder keeps its part of
        the mean.

        The mean is weighted by `weight` where every member's weight is `certain`, else by `alike`. A
        parameter has a mean where any member has a gradient. A member of weight 0 contributes none.

        Returns the sum of `samples`, and the certainty of the weights. Raises UserError where weights sum to
        0 although there are gradients.
        """
        alike = alike if weight > 0 else 0.0
        chunks, grouping = list(self._chunks.values()), self._sharing.grouping
        kinds = [grouping.kind(each.trained.chunk.id) for each in chunks]
        has_gradient = float(any(any(each.come) for each in chunks))
        told = [samples, weight, has_gradient, *said(weight, alike, certain)]  # _FIRST of them
        for kind in grouping.kinds:
            told += grouping.spread(kind, [weight, alike])
        for kind, each in zip(kinds, chunks, strict=True):
            told += grouping.spread(kind, [float(weight > 0 and here) for here in each.come])
        what = f"the gradients of step {self._sharing.points.steps}"
        heard = iter(self._sharing.points.agree(told, what, self.where))
        samples, total, with_gradients = next(heard), next(heard), next(heard)
        certainty = Certainty(list(islice(heard, SAID)))
        if total <= 0 and with_gradients:
            raise UserError(
                f"step {self._sharing.points.steps}: the workers' weights sum to {total:g}; "
                "session.weight must be above 0 on a worker that has gradients"
            )
        scales = {}
        for kind in grouping.kinds:
            by_weight, in_all = grouping.heard(kind, heard, 2)[grouping.own(kind)]
            own, of_group = (weight, by_weight) if certainty.certain else (alike, in_all)
            scales[kind] = own / of_group if of_group > 0 else 0.0
        there = [
            grouping.heard(kind, heard, len(each.come)) for kind, each in zip(kinds, chunks, strict=True)
        ]
        with torch.no_grad():  # around all sums, as their blocks do not end in the order of their beginning
            self._sum(chunks, there, scales)
        self._sharing.passed()
        return samples, certainty

    def _sum(
        self,
        chunks: Sequence[_SharedChunk],
        there: Sequence[Sequence[Sequence[float]]],
        scales: Mapping[str, float],
    ) -> None:
        """Sum the chunks of which any group has a gradient; all members take part in these sums.

        Args:
            there: for each chunk and each of its groups, how many members have a gradient, by slot.
            scales: this member's factor, by kind of chunk.
        """
        grouping = self._sharing.grouping
        under_way: deque[tuple[ExitStack, Summing]] = deque()

        def end_first() -> None:
            stack, work = under_way[0]
            work.wait()
            under_way.popleft()
            stack.close()

        try:
            for each, groups in zip(chunks, there, strict=True):
                kind = grouping.kind(each.trained.chunk.id)
                agreed = [count > 0 for count in groups[grouping.own(kind)]]
                if any(any(counts) for counts in groups):
                    if under_way:  # its sum between groups overlaps the next sum inside the groups
                        under_way[-1][1].advance()
                    stack = ExitStack()
                    under_way.append((stack, stack.enter_context(each.sum(agreed, scales[kind]))))
                    if len(under_way) == _UNDER_WAY:
                        end_first()
                else:
                    each.drop_come()
            while under_way:
                end_first()
        except BaseException as error:
            for stack, _ in under_way:
                stack.__exit__(type(error), error, error.__traceback__)
            raise

    def check_summed(self) -> None:
        """Raise UserError, naming the parameter, if gradients have come since the last `reduce`, or a mean is
        set aside."""
        for each in self._chunks.values():
            what = "is this worker's own" if any(each.come) else "is set aside for what came after its mean"
            waiting = each.come if any(each.come) else each.earlier
            if any(waiting):
                name = each.trained.names[waiting.index(True)]
                raise UserError(
                    f"the gradient of {name!r} {what}: call Fitted.reduce(weight, samples) on "
                    "all workers when the backward has ended, before clipping and optimizer.step()"
                )

    @property
    def edited(self) -> list[str]:
        """Parameters shared by all members whose mean this member's script has written to, except through
        views."""
        grouping = self._sharing.grouping
        return [
            each.trained.names[slot]
            for each in self._chunks.values()
            if len(grouping.groups(grouping.kind(each.trained.chunk.id))) == 1
            for slot in sorted(each.edited)
            if each.present[slot]
        ]

    def step_made(self, chunks: Iterable[int]) -> None:
        """Note that all members have begun a step of these chunks."""
        for chunk in chunks:
            self._chunks[chunk].is_stepped = self._chunks[chunk].is_mean
        self.synced()

    def synced(self) -> None:
        """Forget what the script has changed, at a sync point: all members may see it from now on."""
        for each in self._chunks.values():
            each.forget_changes()

    @uninterrupted
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip as `ModelGradients.clip_grad_norm_` does. All members call it; the norm has the same bits on
        each."""
        self.check_summed()
        kind = "" if norm_type == 2.0 else f", norm_type={float(norm_type):g}"
        self._sharing.points.agree([], f"clip_grad_norm_({float(max_norm)!r}{kind})")
        norm = super().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        self.synced()
        self._sharing.passed()
        return norm

    def scale(self, factor: Tensor) -> None:
        if float(factor) != 1.0:
            for each in self._chunks.values():
                if any(each.present) and not each.portion.is_empty:
                    each.scale(factor)

    def _norms(self, norm_type: float) -> dict[int, Tensor]:
        self.check_summed()
        own: list[float] = []  # this member's value for each slot: 0 if it holds none of it, as NaN is a norm
        for each in self._chunks.values():
            measured = each.measured(norm_type)
            own += [
                float(measured.get(slot, 0.0)) if here else _ABSENT for slot, here in enumerate(each.present)
            ]
        what = f"the norms of the gradients of step {self._sharing.points.steps}"
        rows = told(self._sharing.members, own, list[float], what)  # doubles hold the values of all dtypes
        if any(len(row) != len(own) for row in rows):
            counts = ", ".join(str(len(row)) for row in rows)
            raise RunError(f"{what}: the workers tell of {counts} gradients; all must build the same model")
        norms: dict[int, Tensor] = {}
        columns = zip(*rows, strict=True)  # for each slot, the members' values
        for each in self._chunks.values():
            for slot, column in zip(range(len(each.present)), columns, strict=False):
                norms.update(self._norms_of(each.trained, slot, column, norm_type))
        return norms

    def _norms_of(
        self, trained: TrainedChunk, slot: int, told: Sequence[float], norm_type: float
    ) -> dict[int, Tensor]:
        """Return a slot's norm in each group that has a gradient of it, by parameter and group.

        Args:
            told: for each member, what `measured` found of its part; `_ABSENT` if the member's group has no
                gradient.
        """
        chunk, place = trained.chunk, trained.chunk.slots[slot]
        groups = self._sharing.grouping.groups(self._sharing.grouping.kind(chunk.id))
        counted = self._sharing.holding.of_replicas[0]  # one replica's parts, so that all round alike
        norms = {}
        for number, group in enumerate(groups):
            # The members of `group` that hold what the members of `own` hold.
            own = group if len(groups) == 1 else counted.members_of(chunk.id)
            names = dict(zip(own, group, strict=True))
            parts = [
                told[names[part.member]]
                for part in counted.parts[chunk.id]
                if part.begin < place.offset + place.numel and place.offset < part.end
            ]
            if told[group[0]] != _ABSENT:
                norm = torch.tensor(combined(parts, norm_type), dtype=torch.float64)
                norms[place.parameter * self._sharing.members.count + number] = norm.to(trained.dtype)
        return norms

    def all_finite(self, parameters: Collection[nn.Parameter] | None = None) -> bool:
        """True if all members' gradients of `parameters` (None: all) are finite after the sum. All members
        call it."""
        self._bad = self._first_nonfinite(parameters)
        told = [float(bool(self._bad))]
        what = f"whether the gradients of step {self._sharing.points.steps} are finite"
        (bad,) = self._sharing.points.agree(told, what, lambda: call("optimizer.step", script_line()))
        return not bad

    def nonfinite(self) -> str:
        """Return the first parameter of whose gradient this member holds a part that `all_finite` found not
        finite; else ""."""
        return self._bad

    def _first_nonfinite(self, parameters: Collection[nn.Parameter] | None) -> str:
        for each in self._chunks.values():
            left_out = parameters is not None and each.trained.parameters[0] not in parameters
            if left_out or each.portion.is_empty or not any(each.present):
                continue
            with each.settled() as flat:
                for slot, here in enumerate(each.present):
                    if here and not is_finite(each.portion.of(flat, slot)):
                        return each.trained.names[slot]
        return ""


def partial_norm(part: Tensor, norm_type: float) -> Tensor:
    """Return a part's contribution to a norm, for `combined`.

    It is the sum of powers, in double precision; for orders inf, -inf and 0 the greatest, the smallest and
    the number of non-zero elements.
    """
    if norm_type == 0 or math.isinf(norm_type):
        most: Tensor = torch.linalg.vector_norm(part, norm_type)
        return most.double()
    total = torch.zeros((), dtype=torch.float64)
    for piece in torch.split(part, _PIECE):
        wide = dtype_as(torch.float64, piece)
        total += torch.linalg.vector_norm(piece, norm_type, dtype=wide) ** norm_type
    return total


def combined(parts: Sequence[float], norm_type: float) -> float:
    """Return a gradient's norm: the one part's if it has only one, else combined from `partial_norm`s."""
    if len(parts) < 2:
        return parts[0] if parts else 0.0
    if norm_type == math.inf:
        return math.nan if any(map(math.isnan, parts)) else max(parts)
    if norm_type == -math.inf:
        return math.nan if any(map(math.isnan, parts)) else min(parts)
    total = math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)
    return float(torch.tensor(total, dtype=torch.float64) ** (1 / norm_type)) if norm_type else total
