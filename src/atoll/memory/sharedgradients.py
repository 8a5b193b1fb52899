"""Gradients of chunks that the members of a group own between them.

Each member's gradients of all chunks lie in its own payloads until `SharedGradients.reduce` sums each chunk's
to its owner, weighted, and the others let go of theirs. Then `p.grad` is the mean on every member: an owner
reads its payload, and who does not own it fetches it. What a script writes there it writes on all members, so
an owner keeps it and the others drop it; whoever still reads sees what was there before, up to the next sync
point, since members' scripts do not run in step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.memory.gradients import ChunkGradients, Gradients, Slot, TrainedChunk
from atoll.memory.interrupts import uninterrupted
from atoll.memory.members import Waitable
from atoll.memory.payloads import Payloads
from atoll.memory.proxies import LostSource
from atoll.memory.sharing import Sharing

_UNDER_WAY = 2  # sums at once: while one travels, the next is made ready


class _SharedSlot(Slot):
    """One parameter's gradient, of a chunk that has an owner."""

    _chunk: _SharedChunk

    @contextmanager
    def lend(self, *, overwrites: bool = False) -> Iterator[Tensor]:
        chunk, index = self._chunk, self._index
        if index in chunk.kept or (not chunk.has_owner and not any(chunk.earlier)):
            with super().lend(overwrites=overwrites) as gradient:
                yield gradient
            return
        like, device = chunk.trained.likes[index], chunk.trained.device
        with torch.inference_mode(False), torch.no_grad():
            lent = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
            if not overwrites:
                chunk.copy_mean(index, lent)
        before = lent._version
        yield lent
        if lent._version != before:
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
    """What is known of one chunk's gradients.

    First they are this member's own: `come` says of which slots. After `sum` the owner's payload is the mean,
    the others hold nothing, and `has_owner` is set. Where more come then, the owner sets the mean aside
    (`earlier` says of which slots) until it is added to the next.
    """

    slot_kind = _SharedSlot

    def __init__(self, trained: TrainedChunk, payloads: Payloads, sharing: Sharing) -> None:
        super().__init__(trained, payloads)
        self._sharing, self.is_mine = sharing, sharing.is_mine(trained.chunk.id)
        self.has_owner = False
        self.come = [False] * len(trained.parameters)
        self.earlier = [False] * len(trained.parameters)
        self._aside: Tensor | None = None
        # The mean as others may still read it, where this member has let go of it since: at which count.
        self._former: tuple[int, Tensor] | None = None
        self.is_stepped = False  # since it was summed: its owner may let go of it at any time
        self.originals: dict[
            int, Tensor
        ] = {}  # by slot, what the script has changed since the last sync point
        self._lock = (
            threading.RLock()
        )  # the payload, between the script's thread and those that answer others

    @contextmanager
    def borrow(self, *, writes: bool) -> Iterator[Tensor]:
        with self._lock, super().borrow(writes=writes) as flat:
            yield flat

    def take(self, index: int, gradient: Tensor, measures: float | None) -> None:
        """Add a gradient that has come here."""
        del measures  # it is the mean's norm that counts
        if self.has_owner:
            self.wait(self.trained.chunk.id)  # at whose end a mean that nobody has any more is let go
            if self.has_owner:
                self._set_aside()
        present, self.present = self.present, self.come
        try:
            super().take(index, gradient, None)
        finally:
            self.present = present
        self.present[index] = True

    def _set_aside(self) -> None:
        """More comes after the mean."""
        for index in list(self.kept):
            self.slots[index].leave()
        self.earlier = list(self.present)
        self._keep_for_others()
        if self.is_mine:
            with self.borrow(writes=False) as flat:
                self._aside = flat.clone()
        self.filled, self.has_owner = False, False
        self.norms.clear()
        self.originals.clear()

    def replace(self, index: int, gradient: Tensor) -> None:
        if not self.has_owner:
            super().replace(index, gradient)
            return
        if self.present[index]:
            self.slots[index].leave()
        self.write(index, gradient)
        self.present[index] = True

    def forget(self, index: int) -> None:
        super().forget(index)
        self.come[index] = self.earlier[index] = False

    def release(self) -> None:
        with self._lock:
            if not any(self.present) and not self.stepping:
                self._keep_for_others()
            super().release()
            if not any(self.present) and not self.stepping:
                self._begin_anew()

    def _begin_anew(self) -> None:
        self.has_owner = self.is_stepped = False
        self._aside = None
        self.come, self.earlier = [False] * len(self.come), [False] * len(self.come)
        self.originals.clear()

    def measure(self, norm_type: float) -> None:
        if self.is_mine:
            super().measure(norm_type)

    # The sum

    @contextmanager
    def sum(self, agreed: Sequence[bool], scale: float) -> Iterator[Waitable]:
        """The sum to the owner, under way, of all members' gradients of the `agreed` slots, this member's
        times `scale`; at the end of the block it has ended, and the mean is what counts."""
        chunk = self.trained.chunk.id
        what = f"the gradient of {self._sharing.words(chunk)} in step {self._sharing.steps}"
        if self.has_owner:  # others have gradients of it since, and this member has none
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
            yield self._sharing.members.reduce(flat, self._sharing.owner(chunk), what)
            self._add_earlier(flat)
        self._is_mean(agreed)

    def _add_earlier(self, flat: Tensor) -> None:
        if self._aside is not None:
            for slot, there in enumerate(self.earlier):
                if there:
                    self.trained.run(flat, slot).add_(self.trained.run(self._aside, slot))

    def _is_mean(self, agreed: Sequence[bool]) -> None:
        self.present = [now or before for now, before in zip(agreed, self.earlier, strict=True)]
        self._begin_anew()
        self._former = None
        self.norms.clear()
        self.has_owner = True
        if not self.is_mine:
            self.filled = False
            self.payloads.drop(self.key)

    def drop_come(self) -> None:
        """What has come here counts for nobody: this member weighs nothing."""
        if not any(self.come):
            return
        for index, come in enumerate(self.come):
            if come:
                self.slots[index].leave()
        with self.settled(writes=True) as flat:
            flat.zero_()
            self._add_earlier(flat)
        self._is_mean([False] * len(self.come))
        self.release()

    # The mean, as scripts see it

    def is_readable(self, index: int) -> bool:
        """Whether this member can read the gradient without asking another."""
        return index in self.kept or (not any(self.earlier) and (self.is_mine or not self.has_owner))

    def check_readable(self, index: int) -> None:
        name = self.trained.names[index]
        if any(self.earlier):
            raise UserError(
                f"{name}.grad: gradients have come after the members' mean, and are not in it yet; read it "
                "when the backward has ended that is outside of no_sync"
            )
        if self.is_stepped and not self.is_mine:
            raise UserError(
                f"{name}.grad lies with member {self._sharing.owner(self.trained.chunk.id)}, which may have "
                "let go of it; read it before optimizer.step()"
            )

    def copy_mean(self, index: int, into: Tensor) -> None:
        """Copy the mean, wherever it is, into a tensor of the parameter's shape and device."""
        self.check_readable(index)
        if self.is_mine:
            with self.settled() as flat:
                into.copy_(self.trained.part(flat, index))
            return
        flat = self._sharing.fetched(self.key, self.trained.extent, self.trained.dtype)
        into.copy_(self.trained.part(flat, index))

    def write(self, index: int, values: Tensor) -> None:
        """The script has changed the mean."""
        if not self.is_mine:
            return
        with self.settled(
            writes=True
        ) as flat:  # which waits for the step, and then locks: the step locks too
            part = self.trained.part(flat, index)
            if self.present[index]:
                self.originals.setdefault(index, part.clone())
            part.copy_(values)
            self.norms.pop(index, None)

    def for_others(self) -> Tensor:
        """A copy of the mean, (extent,), as the last sync point has left it."""
        self.wait(self.trained.chunk.id)
        with self._lock:
            if not self.has_owner:
                if self._former is not None and self._former[0] == self._sharing.count:
                    return self._former[1]
                raise UserError(
                    f"member {self._sharing.rank} has let go of the gradient of "
                    f"{self._sharing.words(self.trained.chunk.id)}; read p.grad before optimizer.step()"
                )
            return self._as_summed()

    def _as_summed(self) -> Tensor:
        with self.borrow(writes=False) as flat:
            copy = flat.clone()
        for index, original in self.originals.items():
            self.trained.part(copy, index).copy_(original)
        return copy

    def _keep_for_others(self) -> None:
        """This member is about to let go of the mean, with no step: others may be behind, and read it yet."""
        if self.has_owner and self.is_mine and not self.is_stepped:
            self._former = self._sharing.count, self._as_summed()


class SharedGradients(Gradients):
    """The gradients of all chunks that are trained, on one of the members that own them between them."""

    _chunks: Mapping[int, _SharedChunk]

    def __init__(
        self,
        chunks: Sequence[TrainedChunk],
        sharing: Sharing,
        arrived: Callable[[int, int], None] = lambda _chunk, _slot: None,
        room: int = 0,
    ) -> None:
        self._sharing = sharing
        super().__init__(chunks, lambda _: sharing, arrived, room)
        sharing.gradient = self._for_others
        self._bad = ""

    def _held(self, trained: TrainedChunk, payloads: Payloads) -> _SharedChunk:
        return _SharedChunk(trained, payloads, self._sharing)

    def _for_others(self, chunk: int) -> Tensor:
        if chunk not in self._chunks:
            raise UserError(f"{self._sharing.words(chunk)} is frozen, and has no gradient")
        return self._chunks[chunk].for_others()

    def close(self) -> None:
        """Let go of all gradients: what is summed is with its owner alone."""
        for handle in self._handles:
            handle.remove()
        untold: BaseException | None = None
        for each, index in self._places.values():
            each.arrive(whatever=True)
            untold = untold or (None if each.told else each.failed)
            each.forget(index)
        self._places.clear()
        self._leaving.close()
        if untold is not None:
            raise untold

    def reduce(self, weight: float, samples: float) -> float:
        """At the end of a backward, on all members: their gradients become the mean by `weight`, each with
        its chunk's owner. A parameter counts where any member has a gradient of it; one of weight 0 has none.

        Gives the sum of `samples`. Raises UserError where weights sum to 0 though there are gradients.
        """
        chunks = list(self._chunks.values())
        come = [weight > 0 and here for each in chunks for here in each.come]
        told = [weight, samples, float(any(any(each.come) for each in chunks)), *map(float, come)]
        what = f"the gradients of step {self._sharing.steps}"
        total, samples, with_gradients, *there = self._sharing.agree(told, what)
        if total <= 0 and with_gradients:
            raise UserError(
                f"step {self._sharing.steps}: the members' weights sum to {total:g}; session.weight must be "
                "above 0 on a worker that has gradients"
            )
        with torch.no_grad():  # around all: sums end in another order than that of their blocks
            self._sum(chunks, [value > 0 for value in there], weight / total if total > 0 else 0.0)
        self._sharing.passed()
        return samples

    def _sum(self, chunks: Sequence[_SharedChunk], there: Sequence[bool], scale: float) -> None:
        under_way: deque[tuple[ExitStack, Waitable]] = deque()

        def end_first() -> None:
            stack, work = under_way[0]
            work.wait()
            under_way.popleft()
            stack.close()

        start = 0
        try:
            for each in chunks:
                agreed = there[start : start + len(each.come)]
                start += len(each.come)
                if any(agreed):
                    stack = ExitStack()
                    under_way.append((stack, stack.enter_context(each.sum(agreed, scale))))
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
        """Raise UserError where gradients have come that no `reduce` has seen."""
        for each in self._chunks.values():
            if any(each.come):
                name = each.trained.names[each.come.index(True)]
                raise UserError(
                    f"the gradient of {name!r} is this member's own: call Fitted.reduce(weight, samples) on "
                    "all members when the backward has ended, before clipping and optimizer.step()"
                )

    def presence(self) -> list[bool]:
        """Of all parameters of all chunks, in order: which have a gradient."""
        return [here for each in self._chunks.values() for here in each.present]

    def name(self, number: int) -> str:
        """The parameter at this place of `presence`."""
        names = [name for each in self._chunks.values() for name in each.trained.names]
        return names[number]

    def step_made(self) -> None:
        """A step was begun on all members."""
        for each in self._chunks.values():
            each.is_stepped = each.has_owner
        self.synced()

    def synced(self) -> None:
        """What the script has changed may be seen by all: a sync point is past."""
        for each in self._chunks.values():
            each.originals.clear()

    @uninterrupted
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As of `Gradients`; called by all members, and the same bits on each."""
        norm = super().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        self.synced()
        self._sharing.passed()
        return norm

    def scale(self, factor: Tensor) -> None:
        if float(factor) != 1.0:
            for each in self._chunks.values():
                if any(each.present) and each.is_mine:
                    each.scale(factor)

    def _norms(self, norm_type: float) -> dict[int, Tensor]:
        self.check_summed()
        own = super()._norms(norm_type)
        dtypes = {
            each.trained.chunk.slots[slot].parameter: each.trained.dtype
            for each in self._chunks.values()
            for slot, here in enumerate(each.present)
            if here
        }
        vector = torch.zeros(
            max(dtypes, default=0) + 1, dtype=torch.float64
        )  # which holds all dtypes' values
        for parameter, norm in own.items():
            vector[parameter] = norm
        self._sharing.members.sum(vector, f"the norms of the gradients of step {self._sharing.steps}")
        return {parameter: vector[parameter].to(dtype) for parameter, dtype in dtypes.items()}

    def all_finite(self) -> bool:
        """Whether all members' gradients are finite, once they are summed; called by all members."""
        self._bad = self._first_nonfinite()
        told = [float(bool(self._bad))]
        (bad,) = self._sharing.agree(told, f"whether the gradients of step {self._sharing.steps} are finite")
        return not bad

    def nonfinite(self) -> str:
        """The first parameter of this member's own whose gradient `all_finite` has found not to be; else
        empty."""
        return self._bad

    def _first_nonfinite(self) -> str:
        for each in self._chunks.values():
            if not each.is_mine or not any(each.present):
                continue
            with each.settled() as flat:
                for slot, here in enumerate(each.present):
                    if here and not bool(torch.isfinite(each.trained.run(flat, slot)).all()):
                        return each.trained.names[slot]
        return ""
