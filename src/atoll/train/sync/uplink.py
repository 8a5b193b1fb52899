"""The speaker to the shards: a worker for itself, or a group as one; and the way of the answers to all
members.

`leader`: one member, drawn anew for each exchange, sends whole chunks, and broadcasts the answers. `members`:
each member sends and fetches its own share of every chunk, and an all-gather makes the answers whole. All
members hold the contribution, to the bit, so that any can send it again. If the link may lose parts of it,
each member holds back the losses of the part that it sent itself (the residual). The members tell one another
which residuals go along with a contribution that is sent again, so that it does not change. Source:
docs/ps-hra.md.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.core.decoding import from_msgpack
from atoll.core.stands import Stand
from atoll.exchange.feedback import Feedback
from atoll.tensors.binding import BoundChunk
from atoll.train.group.ringbytes import broadcast_bytes, gather_bytes
from atoll.train.group.rounds import Ring
from atoll.train.sync.answers import Answers
from atoll.train.sync.client import Outgoing
from atoll.wire.messages import run_of

Kind = Literal["leader", "members"]
Wanted = Literal["auto", "leader", "members"]


T = TypeVar("T")


@dataclass(frozen=True)
class Role:
    """A member's part in one exchange.

    Attributes:
        leader: the rank, in the ring, of the member that talks to the log.
        leads: True on the leader.
        talks: True if this member sends and asks.
        share: this member's run of each chunk, and the number of runs.
        able: the ranks of the members that have all of the contribution.
    """

    leader: int
    leads: bool
    talks: bool
    share: tuple[int, int]
    able: tuple[int, ...]


_ALONE = Role(0, leads=True, talks=True, share=(0, 1), able=(0,))


class UplinkChoice:
    """How this worker's group talks to the shards. It is chosen as the group forms, for whatever model the
    group trains.

    Attributes:
        kind: how the group talks to the shards.
        reason: the reason for `kind`.
        contributor: the group's number, from which, with the iteration, the leader is drawn.
    """

    def __init__(self, wanted: Wanted, ring: Ring) -> None:
        self._wanted, self._ring = wanted, ring
        self.kind: Kind = "leader" if wanted == "auto" else wanted
        self.reason = "sync.uplink"
        self.contributor = 0

    def join(self, contributor: int, what: str) -> None:
        """Begin in a new group: all members choose `kind` alike, by the machines on which they are. A
        collective of the ring.

        A leader sends and fetches S bytes over one machine's link, and broadcasts S. Of m members on m
        machines each sends and fetches S/m, and all-gathers (m - 1)/m S. So members gain if each has a link
        of its own. On one machine they share the link, and m answers cost the shards more than one
        (docs/notes/ps-hra.md has the figures).
        """
        self.contributor = contributor
        if self._wanted != "auto":
            return

        def act() -> list[bytes]:
            return gather_bytes(self._ring.agreement, self._ring.place.host.encode(), what)

        hosts = self._ring.round(what, act)
        apart = len(set(hosts)) == len(hosts) > 1
        self.kind = "members" if apart else "leader"
        self.reason = "each member has a link of its own" if apart else "members share a machine's link"


class Self:
    """The speaker of a worker that talks for itself."""

    kind: Kind = "leader"
    reason = "it is alone"

    def join(self, contributor: int, what: str) -> None:
        """Do nothing: a worker that talks for itself joins no group."""

    def role(self, *_: object) -> Role:
        """Return the role that includes everything."""
        return _ALONE

    def round(self, _what: str, act: Callable[[], T], *_: object) -> T:
        """Run an exchange once: there is no member with whom it could break."""
        return act()

    def along(self, *_: object) -> None:
        """Return None: no other member has sent a contribution before."""

    def hand_on(
        self, _role: Role, answers: Answers, put: Callable[[BoundChunk, Tensor], None], _what: str
    ) -> dict[int, Tensor]:
        """Return every chunk's values, 1-D, by chunk. Chunks that come one by one are `put` instead, and none
        is returned."""
        if not answers.by_chunk:
            return answers.collect(answers.what)
        answers.begin()
        for bound in answers.in_turn():
            put(bound, answers.next(bound.chunk.id, answers.what))
        return {}

    def tell(self, _role: Role, word: T | None, *_: object) -> T:
        """Return `word`: there is no other member to hear it."""
        assert word is not None
        return word


class Uplink:
    """The speaker of a group, over its ring, for one model."""

    def __init__(
        self, choice: UplinkChoice, ring: Ring, chunks: Sequence[BoundChunk], feedback: Feedback
    ) -> None:
        self._choice, self._ring, self._feedback = choice, ring, feedback
        self._chunks = list(chunks)

    @property
    def kind(self) -> Kind:
        """How the group talks to the shards."""
        return self._choice.kind

    @property
    def reason(self) -> str:
        """The reason for `kind`."""
        return self._choice.reason

    def join(self, contributor: int, what: str) -> None:
        """Begin in a new group (`UplinkChoice.join`)."""
        self._choice.join(contributor, what)

    def role(self, iteration: int, able: Sequence[int] = ()) -> Role:
        """Return this member's role in the exchange of `iteration`, in the present ring.

        `able` has the names of the members that have the contribution. If it is empty, or none of them is
        left, all have it.
        """
        place = self._ring.place
        names = [place.name_of(rank) for rank in range(place.world)]
        ranks = [rank for rank, name in enumerate(names) if name in able] or list(range(place.world))
        leader = random.Random(f"{self._choice.contributor}/{iteration}").choice(ranks)
        talks = place.rank in ranks if self.kind == "members" else place.rank == leader
        share = (ranks.index(place.rank), len(ranks)) if self.kind == "members" and talks else (0, 1)
        return Role(leader, place.rank == leader, talks, share, tuple(ranks))

    def round(
        self,
        what: str,
        act: Callable[[], T],
        iteration: int = -1,
        where: Callable[[], Stand | None] | None = None,
    ) -> T:
        """Run an exchange as a round of the ring."""
        return self._ring.round(what, act, iteration, where)

    def is_again(self, out: Outgoing) -> bool:
        """True if members, also lost ones, may have sent this contribution in a former ring, as far as this
        member knows."""
        generation = self._ring.generation
        out.begun_in = generation if out.begun_in < 0 else out.begun_in
        return out.begun_in != generation or not self._ring.is_settled

    def has_sent(self, out: Outgoing) -> bool:
        """Return True if this member has already sent its part in this ring, and note that it does so now."""
        sent, out.sent_in = out.sent_in == self._ring.generation, self._ring.generation
        return sent

    def along(self, out: Outgoing, what: str) -> dict[int, Tensor] | None:
        """Return the residuals that had gone along with this contribution, if it may have been sent in a
        former ring.

        They are the sums of the living members' parts, by chunk, (extent,), so all members again hold equal
        values, to the bit. Returns None if nobody has sent the contribution before. A collective of the ring.
        """
        if not self._feedback.keeps:
            return None
        channel = self._ring.agreement
        said, work = channel.all_gather(torch.tensor([int(self.is_again(out))]))
        channel.wait(work, what)
        if not any(bool(each) for each in said):
            return None
        own = self._feedback.again(out.iteration)
        parts = gather_bytes(channel, msgspec.msgpack.encode(sorted(own)), what)
        along = {}
        for chunk_id in sorted({each for part in parts for each in msgspec.msgpack.decode(part)}):
            taken, flat = own.get(chunk_id), out.flats[chunk_id]
            assert isinstance(flat, Tensor)  # gradients put together as they leave are never lost
            summed = torch.zeros_like(flat, device="cpu") if taken is None else taken.clone()
            channel.wait(channel.sum(summed), what)
            along[chunk_id] = summed
        return along

    def hand_on(
        self, role: Role, answers: Answers, put: Callable[[BoundChunk, Tensor], None], what: str
    ) -> dict[int, Tensor]:
        """Return the answers to the members that talk, on all members: every chunk's values, 1-D, by chunk.

        Chunks that come one by one are `put` instead, and none is returned: that takes memory for one chunk.
        A collective of the ring.
        """
        if not answers.by_chunk:
            runs = answers.collect(answers.what) if role.talks else None
            return self.spread(role, runs, what)
        if role.talks:
            answers.begin()
        else:
            answers.stop()  # it may have asked in a former ring
        for bound in answers.in_turn():
            run = answers.next(bound.chunk.id, answers.what) if role.talks else None
            put(bound, self.whole(role, bound, run, what))
        return {}

    def whole(self, role: Role, bound: BoundChunk, run: Tensor | None, what: str) -> Tensor:
        """Return one chunk's values, 1-D, from the answers to the members that talk. A collective of the
        ring.

        `run` is this member's answer, in memory that nobody else needs. The call takes memory for one chunk:
        runs are broadcast to their places, since Gloo's gather would hold them twice.
        """
        talk = role.able if self.kind == "members" else (role.leader,)
        extent, channel = bound.chunk.extent, self._ring.agreement
        flat = run if run is not None and len(talk) == 1 else torch.empty(extent, dtype=bound.dtype)
        works = []
        for share, rank in enumerate(talk):
            start, stop = run_of(extent, share, len(talk))
            part = flat[start:stop]
            if run is not None and run is not flat and rank == self._ring.place.rank:
                part.copy_(run)
            if start < stop:  # the last shares of a chunk that has fewer elements are empty
                works.append(channel.broadcast(part.view(torch.uint8), rank))
        for work in works:
            channel.wait(work, what)
        return flat

    def spread(self, role: Role, runs: Mapping[int, Tensor] | None, what: str) -> dict[int, Tensor]:
        """Return every chunk's values, 1-D, in new memory, from the answers to the members that talk. A
        collective of the ring.

        `runs` are the answers to this member; None if it does not talk. `what` names the wait.
        """
        whole: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(bound.flat.dtype for bound in self._chunks):
            chunks = [bound for bound in self._chunks if bound.flat.dtype == dtype]
            if self.kind == "members":
                whole |= self._gathered(role, runs or {}, chunks, dtype, what)
            else:
                whole |= self._broadcast(role, runs, chunks, dtype, what)
        return whole

    def _broadcast(
        self,
        role: Role,
        runs: Mapping[int, Tensor] | None,
        chunks: Sequence[BoundChunk],
        dtype: torch.dtype,
        what: str,
    ) -> dict[int, Tensor]:
        extents = [bound.chunk.extent for bound in chunks]
        if self._ring.world == 1:
            assert runs is not None
            return {bound.chunk.id: runs[bound.chunk.id] for bound in chunks}
        if runs is not None:
            flat = torch.cat([runs[bound.chunk.id] for bound in chunks])
        else:
            flat = torch.empty(sum(extents), dtype=dtype)
        channel = self._ring.agreement
        channel.wait(channel.broadcast(flat.view(torch.uint8), role.leader), what)
        return {bound.chunk.id: part for bound, part in zip(chunks, _cut(flat, extents), strict=True)}

    def _gathered(
        self,
        role: Role,
        runs: Mapping[int, Tensor],
        chunks: Sequence[BoundChunk],
        dtype: torch.dtype,
        what: str,
    ) -> dict[int, Tensor]:
        """Gather each member's runs, padded to one length, since the last run of a chunk may be shorter."""
        shares = len(role.able)
        longest = [run_of(bound.chunk.extent, 0, shares)[1] for bound in chunks]
        own = torch.zeros(sum(longest), dtype=dtype)
        for bound, place in zip(chunks, _cut(own, longest), strict=True):
            if role.talks:
                run = runs[bound.chunk.id]
                place[: run.numel()].copy_(run)
        channel = self._ring.agreement
        parts, work = channel.all_gather(own.view(torch.uint8))
        channel.wait(work, what)
        by_member = [_cut(parts[rank].view(dtype), longest) for rank in role.able]
        return {
            bound.chunk.id: torch.cat([member[place] for member in by_member])[: bound.chunk.extent]
            for place, bound in enumerate(chunks)
        }

    def tell(self, role: Role, word: T | None, kind: type[T], what: str) -> T:
        """Return the leader's `word`, on all members. A collective of the ring."""
        packed = None if word is None else msgspec.msgpack.encode(word)
        told = broadcast_bytes(self._ring.agreement, packed, what, role.leader)
        return from_msgpack(told, kind)


def _cut(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return views of `flat`, 1-D, one after the other, of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]


Speaker: TypeAlias = Self | Uplink  # talks to the shards for a contributor
