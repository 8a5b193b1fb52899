"""Agreement of a ring's members on each iteration: their summed reports, and the decisions that follow from
the sums."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor

from atoll.core.decoding import from_msgpack
from atoll.core.epochs import ComparedEpochs
from atoll.core.errors import MismatchError, UserError
from atoll.core.scriptline import waiting_line
from atoll.core.stands import Stand, decode_stand, describe_mismatch, encode_stand, gradients, gradients_in
from atoll.core.weighing import GUESSED, KNOWN, Certainty, beyond, counted, counts_unlike, excess_line
from atoll.core.weighing import SAID as SAID_OF_WEIGHT
from atoll.tensors.binding import BoundChunk
from atoll.tensors.sparse import rows_in, union
from atoll.train.checkpoint.buffers import ModelBuffers
from atoll.train.gradients.alike import SAID, TreatmentReport, Treatments, are_alike, refuse_unlike
from atoll.train.gradients.messages import HEAD, Bucket, Rows
from atoll.train.gradients.reducer import Calls
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.sums import SummedReducer
from atoll.train.group.inner import AnyRing
from atoll.train.group.ringbytes import gather_bytes

_STEPS = 4096  # steps are compared by their remainder, which a float32 holds for any number of workers


class Ballot:
    """One member's report on each iteration, and the reading of the sum of all members' reports.

    Members are refused if their gradients are of different steps or dealt epochs, or if they treated the last
    mean differently. A weight far beyond the others' is refused too.
    """

    def __init__(self, ring: AnyRing, owner: SummedReducer, calls: Calls, treatments: Treatments) -> None:
        self._ring, self._owner, self._calls = ring, owner, calls
        self._buffers, self._treatments, self._shares = calls.buffers, treatments, calls.shares
        self._more = calls.more
        self._epochs = ComparedEpochs(calls.epochs_mixed)
        self._counts_told = False  # True once the warning on counts was given; equal on all members
        self._says: tuple[object, ...] = ()  # the values from which `_said` was made
        self._said: list[float] = []
        self._of_shares = 0  # values of `_said` that are this member's report on its share
        self._heard: tuple[list[float], Agreement] | None = None  # the latest sum, and its Agreement

    def said(
        self,
        own: ContributionWeight,
        bounds: Sequence[BoundChunk],
        dirty: Sequence[float] = (),
        *,
        awaited: bool = False,
    ) -> list[float]:
        """Return this member's report; the sum of all members' reports is an Agreement.

        If nothing but the report's first value, the number of steps, has changed since the last call, the
        list of that call is returned.

        Args:
            own: this member's contribution.
            bounds: the chunks; the report says which of their gradients are present here.
            dirty: for each message, what this member reports of it (`Bucket.says`).
            awaited: True if this member knows of newcomers.
        """
        here = tuple([p.grad is not None for bound in bounds for p in bound.parameters])
        epoch = self._epochs.compared(self._calls.epoch())
        buffers = () if self._buffers is None else tuple(self._buffers.said())
        shares = () if self._shares is None else self._shares.said(self._ring.rank, self._ring.world)
        more = self._more.has_more
        says = (own, here, epoch, self._treatments.told, awaited, more, *dirty, *shares, *buffers)
        if says != self._says:
            head = [0.0, own.weight, own.samples, float(any(here)), float(awaited), float(more)]
            present = map(float, here) if own.weight > 0 else [0.0] * len(here)
            treated = self._treatments.said(epoch, iteration=False)  # the number of steps is compared too
            self._says = says
            self._said = [*head, *own.said(), *treated, *dirty, *present, *shares, *buffers]
            self._of_shares = len(shares)
        self._said[0] = float(self._owner.steps % _STEPS)
        return self._said

    def sum(self, said: Sequence[float]) -> list[float]:
        """Return the sum of all members' reports. A collective."""
        channel, vector = self._ring.agreement, torch.tensor(said, dtype=torch.float64)
        channel.wait(channel.sum(vector), f"the agreement on iteration {self._owner.steps}")
        self._owner.bytes_sent += channel.sends(vector.numel() * 8)
        summed: list[float] = vector.tolist()
        return summed

    def agreed(
        self, own: ContributionWeight, summed: list[float], bounds: Sequence[BoundChunk], messages: int = 0
    ) -> Agreement:
        """Return the Agreement that the sum of all members' reports gives. An iteration is whole once all
        have reported.

        Raises MismatchError if members are at different steps or dealt epochs, and UserError if they treated
        the last mean differently or a weight is far beyond the others'.

        Args:
            own: this member's contribution.
            summed: the sum of the reports. Pass the list of the call before if nothing but its first value
                has changed.
            bounds: the chunks, as given to `said`.
            messages: the number of messages.
        """
        if self._heard is None or summed is not self._heard[0]:
            slots = [len(bound.parameters) for bound in bounds]
            self._heard = summed, Agreement(summed, messages, slots, self._of_shares)
        agreed, steps = self._heard[1], self._owner.steps
        agreed.steps = summed[0]
        if agreed.steps / self._ring.world - steps % _STEPS:
            self._refuse_other_steps()
        if not agreed.alike:
            stand = gradients_in(steps, waiting_line(), self._calls.epoch())
            what = f"what the workers made of the mean before iteration {steps}"
            self._epochs.looked(self.refuse_unlike(what, stand))
        refuse_beyond(self._ring, own, agreed.certainty, steps)
        return agreed

    def where(self, model: str = "") -> Stand:
        """Return this worker's place in its script while it reduces; `model` names one of several models."""
        return gradients(self._owner.steps, waiting_line(), model=model)

    def _refuse_other_steps(self) -> NoReturn:
        """Raise the error for workers whose gradients are of different steps, with each worker's place."""
        ring = self._ring
        said = gather_bytes(ring.agreement, encode_stand(self.where()), "the places of all workers")
        stands = {ring.place.name_of(rank): decode_stand(raw) for rank, raw in enumerate(said)}
        raise MismatchError(describe_mismatch(stands))

    def refuse_unlike(self, what: str, stand: Stand | None = None) -> str:
        """Raise UserError or MismatchError if members treated the last mean differently; see the function
        `refuse_unlike`. A collective.

        Returns the warning of `mixed_epochs`; "" for none.

        Args:
            what: what the members compare, for the message of a deadline.
            stand: this worker's place in its script, if places are compared too.
        """
        own, ring = TreatmentReport(self._treatments.latest, stand), self._ring
        said = gather_bytes(ring.agreement, msgspec.msgpack.encode(own), what)
        names = [ring.place.name_of(rank) for rank in range(ring.world)]
        return refuse_unlike([from_msgpack(one, TreatmentReport) for one in said], names)

    def share_rows(self, own: ContributionWeight, agreed: Agreement, messages: Sequence[Bucket]) -> None:
        """Exchange the rows of sparse gradients, of which the reports have only that there are some. A
        collective."""
        chunks = [
            c for m, here in zip(messages, agreed.sparse_messages, strict=True) if here for c in m.chunks
        ]
        slots = [(c, index) for c in chunks for index in range(len(c.bound.parameters))]
        mine = [rows_in(c.own()[index]) if own.weight > 0 else b"" for c, index in slots]
        what = f"the rows of sparse gradients in iteration {self._owner.steps}"
        said = gather_bytes(self._ring.agreement, msgspec.msgpack.encode(mine), what)
        everyone = [from_msgpack(each, list[bytes | None]) for each in said]
        agreed.rows = {}
        for (chunk, index), packed in zip(slots, zip(*everyone, strict=True), strict=True):
            parameter = chunk.bound.parameters[index]
            rows = union(packed, len(parameter)) if any(packed) and parameter.dim() else None
            if rows is not None:
                agreed.rows.setdefault(chunk.bound.chunk.id, {})[index] = rows

    def tell_beside(self, own: ContributionWeight, agreed: Agreement) -> None:
        """Exchange the data that has no room in an agreement (see the function `tell_beside`). A
        collective."""
        agreed.beside = tell_beside(
            self._ring,
            own,
            agreed.certainty,
            self._buffers,
            agreed.buffers,
            steps=self._owner.steps,
            tells=not self._counts_told,
        )

    def take_over(self, agreed: Agreement) -> None:
        """Apply the data that came with the iteration besides its gradients."""
        self._owner.count_alike = not agreed.certainty.certain
        self._more.hear(agreed.more)
        told = take_beside(agreed.beside, self._buffers, self._owner.steps, self._calls.counts_unlike)
        self._counts_told = self._counts_told or told
        if self._shares is not None:
            self._shares.heard(agreed.shares, self._ring.rank)

    def begin_in_group(self) -> None:
        """Forget the former group's agreements: this member has entered another group."""
        self._owner.count_alike = self._counts_told = False
        self._treatments.latest = None

    def member_state(self) -> dict[str, Any]:
        """Return whether the warning on counts was given (`counts_told`), and how many more times epochs are
        compared (`looks`)."""
        return {"counts_told": self._counts_told, "looks": self._epochs.looks}

    @staticmethod
    def check_member_state(state: Mapping[str, Any]) -> None:
        """Raise ValueError or KeyError if `load_member_state` could not take `state`."""
        if type(state["counts_told"]) is not bool:
            raise ValueError(f"whether people were told of counts is {state['counts_told']!r}")
        if type(state["looks"]) is not int:
            raise ValueError(f"how often epochs are still compared is {state['looks']!r}")

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        """Take another member's `member_state`."""
        self._counts_told, self._epochs.looks = state["counts_told"], state["looks"]


@dataclass(frozen=True)
class Beside:
    """Optional data that comes with an iteration besides its gradients.

    Attributes:
        counted: each worker's count of samples in words, by the worker's name, if counts differ and are not
            certain.
        buffers: the indices of the buffers to take over, and their bytes, 1-D; None for none.
    """

    counted: dict[int, str]
    buffers: tuple[list[int], Tensor] | None = None


_NOTHING = Beside({})


def tell_beside(
    ring: AnyRing,
    own: ContributionWeight,
    certainty: Certainty,
    buffers: ModelBuffers | None,
    summed: Sequence[float],
    *,
    steps: int,
    tells: bool,
) -> Beside:
    """Exchange data that has no room in an agreement, and return it.

    The buffers are those of the first worker with a batch. A collective: all members decide alike which data
    it carries.

    Args:
        ring: the ring of members.
        own: this worker's contribution.
        certainty: how certain the members' weights are.
        buffers: the model's buffers, or None.
        summed: the sums of what members report of their buffers (`ModelBuffers.said`).
        steps: the number of the iteration.
        tells: True if a warning on counts is still to be given.
    """
    channel = ring.agreement
    words: dict[int, str] = {}
    if tells and not certainty.certain and not certainty.equal:
        word = counted(own.weight, own.basis) if own.weight > 0 else ""
        said = gather_bytes(channel, word.encode(), f"what the workers counted in iteration {steps}")
        words = {ring.place.name_of(rank): each.decode() for rank, each in enumerate(said) if each}
    changed = ModelBuffers.to_take(summed)
    if buffers is None or not changed or ring.world == 1:
        return Beside(words) if words else _NOTHING
    root = 0
    if 0 < certainty.workers < ring.world:
        having = torch.zeros(ring.world)
        having[ring.rank] = float(own.weight > 0)
        channel.wait(channel.sum(having), f"who has a batch in iteration {steps}")
        root = having.gt(0).tolist().index(True)
    packed = buffers.packed(changed)
    channel.wait(channel.broadcast(packed, root), f"the buffers of worker {ring.place.name_of(root)}")
    return Beside(words, (changed, packed))


def refuse_beyond(ring: AnyRing, own: ContributionWeight, certainty: Certainty, steps: int) -> None:
    """Raise UserError on every worker if one worker's weight is far beyond the others'.

    The workers compare each weight, in a collective, only if the sums in `certainty` give reason to.
    """
    if ring.world == 1 or not certainty.may_be_beyond:
        return
    mine = struct.pack("<3d", own.weight, own.samples, own.alike)
    said = gather_bytes(ring.agreement, mine, f"the workers' weights in iteration {steps}")
    weighed = {
        ring.place.name_of(rank): ContributionWeight(weight, samples, KNOWN, alike)
        for rank, (weight, samples, alike) in enumerate(struct.unpack("<3d", each) for each in said)
    }
    for worker, excess in beyond(weighed).items():
        raise UserError(excess_line(worker, steps, excess))


def take_beside(
    beside: Beside, buffers: ModelBuffers | None, steps: int, counts_unlike_told: Callable[[str], None]
) -> bool:
    """Apply the data of `tell_beside`; return True if a warning on counts was given.

    Args:
        beside: the data.
        buffers: the model's buffers, or None.
        steps: the number of the iteration, for the warning.
        counts_unlike_told: called with the warning.
    """
    if beside.counted:
        counts_unlike_told(counts_unlike(f"iteration {steps}", beside.counted))
    if buffers is not None:
        if beside.buffers is not None:
            buffers.take(*beside.buffers)
        buffers.settle()
    return bool(beside.counted)


class Agreement:
    """The sums of the workers' reports on one iteration (`Ballot.said`).

    Attributes:
        steps: the sum of the workers' numbers of steps, each modulo 4096.
        weight: the sum of weights by samples.
        samples: the number of samples.
        with_gradients: the number of workers that have gradients.
        certainty: how certain the weights are.
        alike: True if all workers treated the last mean alike.
        newcomers: True if a worker knows of newcomers.
        more: True if a worker has a further batch of its own data.
        dirty_messages: for each message, True if a gradient changed after the message had left on some
            worker.
        dirty: True if any message is dirty.
        sparse_messages: for each message, True if a gradient is sparse on some worker.
        rows: by chunk and slot, the rows that any worker has, for parameters whose gradient is sparse on all
            workers that have one.
        present: for each chunk and each of its parameters, True if any worker has a gradient.
        shares: all workers' reports on their shares of a batch.
        buffers: the sums of the reports on buffers.
        beside: the data that travelled besides the agreement.
    """

    def __init__(self, summed: list[float], messages: int, slots: list[int], shares: int = 0) -> None:
        self.steps, self.weight, self.samples, self.with_gradients, newcomers, more = summed[:6]
        self.certainty = Certainty(summed[6 : 6 + SAID_OF_WEIGHT])
        self.alike = are_alike(summed[HEAD - SAID : HEAD])
        self.beside = _NOTHING
        self.newcomers, self.more = newcomers > 0, more > 0
        said = summed[HEAD : HEAD + messages]
        self.dirty_messages = [count >= 1 for count in said]
        self.dirty = any(self.dirty_messages)
        self.sparse_messages = [bool(count % 1) for count in said]
        self.rows: Rows = {}
        self.present: list[list[bool]] = []
        start = HEAD + messages
        for count in slots:
            self.present.append([value > 0 for value in summed[start : start + count]])
            start += count
        self.shares, self.buffers = summed[start : start + shares], summed[start + shares :]

    @property
    def total(self) -> float:
        """The divisor of the mean: the sum of weights, or the number of workers where they count alike."""
        return self.workers_or_weight(not self.certainty.certain)

    def workers_or_weight(self, alike: bool) -> float:
        return self.certainty.workers if alike else self.weight

    @property
    def contribution(self) -> ContributionWeight:
        """The joint contribution of all workers of the ring."""
        basis = KNOWN if self.certainty.certain else GUESSED
        return ContributionWeight(self.weight, self.samples, basis, self.certainty.workers)
