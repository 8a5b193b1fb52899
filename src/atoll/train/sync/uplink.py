"""How a group talks to the shards as one: who of its members sends and asks, and how all get the answer.

`leader`: one member, drawn anew for each exchange, sends whole chunks, and broadcasts what it is answered.
`members`: each sends and fetches its own share of every chunk, and an all-gather makes the answers whole.
All members hold what is contributed, to the bit, so that any may send it again. Where the link may lose parts
of it, each member holds back what was lost of what it sent itself. What of that goes along with a
contribution that is sent again they tell one another, so that it stays the same. Source: docs/ps-hra.md.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from atoll.exchange.feedback import Feedback
from atoll.net.returning import Made
from atoll.tensors.binding import BoundChunk
from atoll.train.group.ringbytes import broadcast_bytes, gather_bytes
from atoll.train.group.rounds import Ring
from atoll.train.sync.exchange import CONTRIBUTION, Connection
from atoll.wire.messages import PullMean, Push, run_of

Kind = Literal["leader", "members"]
Wanted = Literal["auto", "leader", "members"]


@dataclass(frozen=True)
class Role:
    """A member's part in one exchange: `leader` is who speaks to the log, by rank in the ring; `talks` says
    whether this member sends and asks, and `share` for which run of each chunk, of how many. `able` are the
    ranks of those who could."""

    leader: int
    leads: bool
    talks: bool
    share: tuple[int, int]
    able: tuple[int, ...]


class Uplink:
    """One model's. `wanted` is sync.uplink; `kind` is what it comes to in this group; `bytes_sent` counts
    what this member has sent to shards."""

    def __init__(
        self,
        wanted: Wanted,
        ring: Ring,
        connection: Connection,
        chunks: Sequence[BoundChunk],
        feedback: Feedback,
    ) -> None:
        self._wanted, self._ring, self._connection, self._feedback = wanted, ring, connection, feedback
        self.kind: Kind = "leader" if wanted == "auto" else wanted
        self.reason = "sync.uplink"
        self._chunks = list(chunks)
        self.contributor = 0  # what the leader's lot is drawn with, beside the iteration
        self.bytes_sent = 0

    def choose(self, what: str) -> None:
        """A new group: all members decide alike, by where each of them is. A collective of the ring.

        A leader sends and fetches S bytes over one machine's link, and broadcasts S; m members on m machines
        S/m each, and all-gather (m - 1)/m S. So these gain where each has a link of its own; on one machine
        they share it, and m answers cost the shards more than one (docs/notes/ps-hra.md has the figures).
        """
        if self._wanted != "auto":
            return

        def act() -> list[bytes]:
            return gather_bytes(self._ring.agreement, self._ring.place.host.encode(), what)

        hosts = self._ring.round(what, act)
        apart = len(set(hosts)) == len(hosts) > 1
        self.kind = "members" if apart else "leader"
        self.reason = "each member has a link of its own" if apart else "members share a machine's link"

    def role(self, iteration: int, able: Sequence[int] = ()) -> Role:
        """This member's in the exchange of `iteration`, in the ring as it stands. `able` are the members, by
        name, who have what is to be sent (empty, or none of them left: all have)."""
        place = self._ring.place
        names = [place.name_of(rank) for rank in range(place.world)]
        ranks = [rank for rank, name in enumerate(names) if name in able] or list(range(place.world))
        leader = random.Random(f"{self.contributor}/{iteration}").choice(ranks)
        talks = place.rank in ranks if self.kind == "members" else place.rank == leader
        share = (ranks.index(place.rank), len(ranks)) if self.kind == "members" and talks else (0, 1)
        return Role(leader, place.rank == leader, talks, share, tuple(ranks))

    def push(
        self,
        role: Role,
        iteration: int,
        flats: Mapping[int, Tensor],
        present: Mapping[int, Sequence[bool]],
        weight: float,
        along: Mapping[int, Tensor] | None,
    ) -> None:
        """Send this member's share of each chunk (`flats`: 1-D, by chunk), and ask for the same of what comes
        of them; `flats` must stay as they are until the answer. `weight` is the group's contribution's;
        `along` as `Feedback.add` has it, where another member may have sent it before."""
        shards, shard_of = self._connection.shards, self._connection.shard_of
        for bound, start, stop, message in self._pushes(role, iteration, present, pull=True):
            chunk_id = bound.chunk.id
            flat, here = flats[chunk_id][start:stop], present[chunk_id]
            run = self._feedback.write(iteration, chunk_id, flat, here, weight, start=start, along=along)
            shards.send(shard_of[chunk_id], message, run.payload, until=CONTRIBUTION, lossy=run.lossy)
            self.bytes_sent += run.payload.nbytes

    def push_made(
        self,
        role: Role,
        iteration: int,
        present: Mapping[int, Sequence[bool]],
        make: Callable[[BoundChunk, int, int], memoryview],
    ) -> None:
        """The same of chunks that are put together as they leave: `make(bound, start, stop)` gives a run of
        one, as `Made` has it. Nothing is asked for yet, and no part of it may be lost."""
        shards, shard_of = self._connection.shards, self._connection.shard_of
        for bound, start, stop, message in self._pushes(role, iteration, present, pull=False):
            payload = Made(partial(make, bound, start, stop))
            shards.send(shard_of[bound.chunk.id], message, payload, until=CONTRIBUTION)
            self.bytes_sent += (stop - start) * bound.dtype.itemsize

    def _pushes(
        self, role: Role, iteration: int, present: Mapping[int, Sequence[bool]], *, pull: bool
    ) -> Iterator[tuple[BoundChunk, int, int, Push]]:
        """Each chunk, from where to where this member's share of it lies, and the message that it goes with;
        `pull`: a shard's last one asks for what comes of them."""
        shards, shard_of = self._connection.shards, self._connection.shard_of
        left = {shard: sum(place == shard for place in shard_of.values()) for shard in shard_of.values()}
        for bound in self._chunks:
            chunk_id = bound.chunk.id
            shard = shard_of[chunk_id]
            in_all = sum(place == shard for place in shard_of.values())
            left[shard] -= 1
            start, stop = run_of(bound.chunk.extent, *role.share)
            message = Push(
                incarnation=shards.incarnation,
                iteration=iteration,
                chunk=chunk_id,
                chunks_in_all=in_all,
                present=bytes(present[chunk_id]),
                pull=pull and not left[shard],
                share=role.share[0],
                shares=role.share[1],
                late=self._feedback.holds_back,
            )
            yield bound, start, stop, message

    def pull_mean(self, share: tuple[int, int], iteration: int, chunks: Sequence[int] = ()) -> PullMean:
        """The message that asks for a member's share of a mean; `chunks` as wire's PullMean has them."""
        return PullMean(
            incarnation=self._connection.shards.incarnation,
            iteration=iteration,
            share=share[0],
            shares=share[1],
            chunks=list(chunks),
        )

    def whole(self, role: Role, bound: BoundChunk, run: Tensor | None, what: str) -> Tensor:
        """One chunk's values, 1-D, from what those who talk were answered: `run` is this member's, in memory
        that nobody else needs. A collective of the ring, which takes memory for one chunk; so runs are
        broadcast to their places, and not gathered, for which Gloo has them twice."""
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
        """Every chunk's values whole, 1-D, in new memory, from what those who talk were answered (`runs`). A
        collective of the ring; `what` is waited for."""
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
        """Each member's runs, padded to one length: the last ones of a chunk may be shorter."""
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

    def tell(self, role: Role, word: bytes | None, what: str) -> bytes:
        """The leader's word, to all. A collective of the ring."""
        return broadcast_bytes(self._ring.agreement, word, what, role.leader)


def _cut(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of `flat`, 1-D, one after the other, of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]
