"""The hub's knowledge of its run: a deterministic function of its records, built from the machines of
`store`.

The same methods take the same records in the same order, live and after a restart, so a restarted hub has the
same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from atoll.groups.shares import cut_run
from atoll.hub.records import (
    AnyRecord,
    Began,
    BookState,
    Came,
    Decided,
    Died,
    InGroups,
    InRing,
    Knows,
    LeaseRequest,
    Left,
    Linked,
    Over,
    Paced,
    Paired,
    Promoted,
    TimePassed,
    UsageReport,
    Voted,
)
from atoll.peers.witness import Answer, Witness
from atoll.store.admission import Admission
from atoll.store.leases import Key, Leases
from atoll.store.members import Membership
from atoll.wire.messages import AnyMessage, Lease, Leased, Used

GLOBAL = ""  # the name of shard 0's log; a site's log has the site's name
Fences: TypeAlias = dict[str, set[Key]]  # unanswered, by the name of their log


class GroupsOf(Protocol):
    """The interface of the hub's groups (`hub/groups.py`) for the book."""

    def joined(self, rank: int, incarnation: int, site: str) -> None:
        """Handle a worker that joined, at `site` if it named one."""

    def left(self, now: float, rank: int, *, finished: bool = False) -> None:
        """Handle a worker that left or died; contributors to be fenced are added to the book's fences."""

    def replay(self, record: Paced | Linked | Decided | InGroups | TimePassed) -> None:
        """Apply a record again after a restart."""

    def lease(self, rank: int, lease: Lease) -> Leased:
        """Handle a worker's request for samples."""

    def fenced(self, key: Key) -> None:
        """Note a log's answer to a fence."""

    @property
    def changes(self) -> int:
        """Counter of lease answers that a journal has to record."""

    @property
    def cuts(self) -> int:
        """Counter of sample blocks that were cut."""

    def state(self) -> bytes:
        """Encode the state of groups."""

    def restore(self, now: float, state: bytes) -> None:
        """Restore an encoded state."""


class RingsOf(Protocol):
    """The interface of the hub's rings (`hub/rings.py`) for the book."""

    def replay(self, now: float, message: AnyMessage) -> None:
        """Apply a worker's message again, without answering."""

    def left(self, incarnation: int, *, said_goodbye: bool = False, finished: bool = False) -> None:
        """Handle a worker that left or died."""

    def state(self) -> bytes:
        """Encode the state of rings."""

    def restore(self, now: float, state: bytes) -> None:
        """Restore an encoded state."""


@dataclass(frozen=True)
class Gone:
    """A member that left or died: a worker by rank, a shard by index, or a site's shard."""

    worker: int | None = None
    shard: int | None = None
    site: str = ""


@dataclass(frozen=True)
class LogEffects:
    """Effects of a log's message: the number of samples that are free again (None: the hub had not asked),
    and the epochs finished by it, each with the number of samples leased by each rank."""

    returned: int | None = None
    epochs: list[tuple[tuple[int, int], dict[int, int]]] = field(default_factory=list)


def no_fences(members: Membership) -> Fences:
    """Return an empty set of fences for each log."""
    return {GLOBAL: set(), **{site: set() for site in members.sites.workers}}


class Book:
    """Members, leases, sites, and unanswered fences. `leases` and `fences` are those that `groups` has too;
    None: the run has no groups."""

    def __init__(
        self,
        members: Membership,
        rings: RingsOf | None = None,
        groups: GroupsOf | None = None,
        leases: Leases | None = None,
        fences: Fences | None = None,
    ) -> None:
        self.members, self.rings, self.groups = members, rings, groups
        self.leases = Leases() if leases is None else leases
        self.fences = no_fences(members) if fences is None else fences
        self.over = False
        self.witness = Witness()
        self._site_of: dict[Key, str] = {}  # of every worker that ever joined
        self._site_by_incarnation: dict[int, str] = {}
        self._dealt: dict[tuple[int, int], Counter[int]] = {}  # (sampler, epoch) under way -> rank -> samples

    def apply(self, record: AnyRecord) -> None:
        """Apply a record that was written before."""
        if isinstance(record, Came):
            self.come(record)
        elif isinstance(record, Left):
            self.leave(record)
        elif isinstance(record, Died):
            self.die(record)
        elif isinstance(record, LeaseRequest):
            self.lease(record)
        elif isinstance(record, UsageReport):
            self.told(record)
        elif isinstance(record, InRing):
            assert self.rings is not None
            self.rings.replay(record.at, record.message)
        elif isinstance(record, (Paced, Linked, Decided, InGroups, TimePassed)):
            assert self.groups is not None
            self.groups.replay(record)
        elif isinstance(record, Paired):
            self.pair(record)
        elif isinstance(record, Promoted):
            self.members.shards.pairs[record.shard].promote()
        elif isinstance(record, Voted):
            self.vote(record)
        elif isinstance(record, Over):
            self.over = True
        elif isinstance(record, Knows):
            self.restore(record.at, record.state)
        else:
            assert isinstance(record, Began)

    # -- members ------------------------------------------------------------------------------------------

    def come(self, record: Came) -> Admission:
        """Handle a Hello; a refusal changes nothing."""
        admission = self._come(record)
        if member := self.members.roll.known.get(admission.incarnation):
            member.origin = record.origin or member.origin
        return admission

    def _come(self, record: Came) -> Admission:
        if record.role == "shard" and self.members.shards.pairs:
            return self.members.shards.admit_half(
                record.at,
                record.shard,
                record.address,
                record.token,
                record.life,
                record.since,
                record.before,
            )
        admission = self.members.handle_hello(
            record.at,
            record.role,
            record.wish,
            record.shard,
            record.address,
            record.site,
            record.token,
            record.before,
            record.launcher,
        )
        if not admission.refused:
            if record.role == "worker" and self.groups is not None:
                self.groups.joined(admission.worker, admission.incarnation, record.site)
            if record.role == "worker" and self.members.sites.workers:
                self._site_of[admission.worker, admission.incarnation] = record.site
                self._site_by_incarnation[admission.incarnation] = record.site
            members = self.members
            members.begun = members.begun or len(members.workers.members) >= members.workers.count
        return admission

    def pair(self, record: Paired) -> bool:
        """Handle a primary's report on itself and its standby; True if it is news."""
        pair = self.members.shards.pairs[record.shard]
        return pair.sync(record.primary, record.standby) if record.standby else pair.serve(record.primary)

    def leave(self, record: Left | Died) -> Gone | None:
        """Remove a member; None if no member has this incarnation."""
        site = self.members.sites.leave(record.incarnation)
        if site:
            self._fence_site(site, record.incarnation)
            return Gone(site=site)
        shard = self.members.shards.leave(record.incarnation)
        if shard is not None:
            return Gone(shard=shard)
        rank = self.members.workers.leave(record.incarnation)
        if rank is None:
            return None
        self._fence(rank, record)
        return Gone(worker=rank)

    def die(self, record: Died) -> Gone | None:
        """Remove a dead member. With a site's shard its log is lost, and the fences waiting there with it."""
        gone = self.leave(record)
        if gone is not None and gone.site:
            self.fences.pop(gone.site, None)
        return gone

    def site_of(self, incarnation: int) -> str:
        """The site of a worker that ever joined; empty for any other incarnation."""
        return self._site_by_incarnation.get(incarnation, "")

    def _fence(self, rank: int, record: Left | Died) -> None:
        """Fence a worker at its log, which then takes nothing from it."""
        incarnation, said_goodbye = record.incarnation, isinstance(record, Left)
        if self.rings is not None:
            finished = isinstance(record, Left) and record.finished
            self.rings.left(incarnation, said_goodbye=said_goodbye, finished=finished)
        if self.groups is not None:  # its contributor is fenced with its last member
            self.groups.left(record.at, rank, finished=isinstance(record, Left) and record.finished)
            return
        if self.members.sites.workers:
            fences = self.fences.get(self._site_of.get((rank, incarnation), GLOBAL))
        else:
            fences = self.fences[GLOBAL] if self.members.shards.count else None
        if fences is not None:
            fences.add((rank, incarnation))

    def _fence_site(self, site: str, incarnation: int) -> None:
        """Fence a site at the global log, to which it is one worker."""
        self.fences[GLOBAL].add((list(self.members.sites.workers).index(site), incarnation))

    def vote(self, record: Voted) -> Answer | None:
        """Handle a node's request for the witness's vote; None if the node may not ask."""
        return self.witness.handle(record.node, record.message)

    # -- samples ------------------------------------------------------------------------------------------

    def lease(self, record: LeaseRequest) -> tuple[Leased, bool]:
        """Handle a worker's request for samples; returns the answer, and True if it is the epoch's first.
        Raises UserError, and changes nothing, if `Leases.handle_lease` refuses."""
        before = self.lease_changes()
        if self.groups is not None:
            leased = self.groups.lease(record.rank, record.lease)
        else:
            leased = self.leases.handle_lease(record.rank, record.lease.incarnation, record.lease)
        changes = self.lease_changes()
        # A block that is cut counts for all its members with the request that decides the cut.
        is_counted = changes == before or (leased.cut is not None and changes[1] == before[1])
        if leased.start >= leased.stop or is_counted:
            return leased, False
        key = (leased.sampler, leased.epoch)
        first = key not in self._dealt
        self._dealt.setdefault(key, Counter()).update(_samples_of(record.rank, leased))
        return leased, first

    def lease_changes(self) -> tuple[int, int]:
        """Return the number of lease answers so far that a journal has to record, and of blocks that were
        cut."""
        groups = self.groups
        of_groups, cuts = (0, 0) if groups is None else (groups.changes, groups.cuts)
        return self.leases.changes + of_groups, cuts

    def recorded(self, asked: LeaseRequest, before: tuple[int, int]) -> LeaseRequest | None:
        """Return the request that has been handled as a journal has to record it; None if it does not have
        to. `before`: the changes before it. A cut is recorded with the request that decides it alone."""
        changes, cuts = self.lease_changes()
        if changes == before[0]:
            return None
        if asked.lease.cut is None or cuts != before[1]:
            return asked
        return msgspec.structs.replace(asked, lease=msgspec.structs.replace(asked.lease, cut=None))

    def told(self, record: UsageReport) -> LogEffects:
        """Handle a log's report of used samples: an answer to a fence, or news."""
        fenced, fences = record.fenced, self.fences.get(record.log)
        key = (fenced.worker, fenced.incarnation)
        asked = not fenced.news and fences is not None and key in fences
        if asked and fences is not None:
            fences.discard(key)
            if self.groups is not None:
                self.groups.fenced(key)
        if record.log != GLOBAL:  # the global log has not counted it yet
            if not asked:
                return LogEffects()
            return LogEffects(self.leases.handle_fenced(*key, fenced.used, final=False))
        if not self.members.sites.workers:
            workers = [key]
        elif fenced.worker < len(self.members.sites.workers):
            site = list(self.members.sites.workers)[fenced.worker]
            workers = [known for known, where in self._site_of.items() if where == site]
        else:
            return LogEffects()  # names no site of this run
        returned = 0
        for worker, incarnation in workers:
            if asked:
                returned += self.leases.handle_fenced(worker, incarnation, fenced.used)
            else:
                self.leases.handle_used(worker, incarnation, fenced.used)
        return LogEffects(returned if asked else None, self._over(fenced.used))

    def _over(self, used: Sequence[Used]) -> list[tuple[tuple[int, int], dict[int, int]]]:
        """Return the finished epochs among those in `used`, each with the number of samples leased by each
        rank."""
        found = []
        for key in sorted({(part.sampler, part.epoch) for part in used} & self._dealt.keys()):
            progress = self.leases.progress(*key)
            if not progress.free and not progress.leased:
                found.append((key, dict(sorted(self._dealt.pop(key).items()))))
        return found

    # -- as plain data ------------------------------------------------------------------------------------

    def state(self) -> BookState:
        """Return the state for `restore`. It shares live objects: encode it at once."""
        return BookState(
            self.members.state(),
            self.leases.state,
            dict(self._site_of),
            {log: sorted(fences) for log, fences in self.fences.items()},
            {key: dict(dealt) for key, dealt in self._dealt.items()},
            self.members.begun,
            self.over,
            self.rings.state() if self.rings is not None else b"",
            self.groups.state() if self.groups is not None else b"",
            self.witness.state,
        )

    def restore(self, now: float, state: BookState) -> None:
        """Take over a state."""
        self.members.restore(now, state.members)
        self.leases.state = state.leases
        self._site_of = dict(state.site_of)
        self._site_by_incarnation = {known: site for (_, known), site in self._site_of.items()}
        self.fences.clear()
        self.fences.update({log: set(map(tuple, fences)) for log, fences in state.fences.items()})  # type: ignore[arg-type]
        self._dealt = {key: Counter(dealt) for key, dealt in state.dealt.items()}
        self.members.begun, self.over = state.begun, state.over
        self.witness = Witness(state.witness)
        if self.rings is not None:
            self.rings.restore(now, state.rings)
        if self.groups is not None and state.groups:
            self.groups.restore(now, state.groups)


def _samples_of(rank: int, leased: Leased) -> dict[int, int]:
    """Return the number of samples that each worker gets of a lease to `rank`: of a block that is cut, each
    of the group's members."""
    size = leased.stop - leased.start
    if leased.cut is None:
        return {rank: size}
    parts, least = leased.cut.parts, leased.cut.least
    whole = sum(parts.values()) or len(parts)
    found = dict.fromkeys(parts, 0)
    for times, samples in ((size // whole, whole), (1, size % whole)):  # whole batches are alike
        for batch in cut_run(0, samples if times else 0, parts, least):
            for member, (start, stop) in batch.items():
                found[member] += times * (stop - start)
    return found
