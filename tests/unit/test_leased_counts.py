"""What the hub's book counts of a group's leases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.groups import shares
from atoll.hub import book as books
from atoll.hub.book import GLOBAL, Book, GroupsOf
from atoll.hub.records import LeaseRequest, UsageReport
from atoll.store.blocks import Blocks
from atoll.store.leases import Leases
from atoll.store.members import Membership
from atoll.wire.messages import Cut, Fenced, Lease, Leased, Used

KEY, MEMBERS = (7, 20), (0, 2, 3, 5)


class Hub:
    """A book with one group, whose blocks are `blocks`."""

    def __init__(self) -> None:
        leases = Leases()
        self.blocks, self.kept = Blocks(leases), list[LeaseRequest]()
        self.groups = SimpleNamespace(lease=self._lease, changes=0, cuts=0, state=lambda: b"")
        self.book = Book(Membership(8, 10.0, 1), groups=cast(GroupsOf, self.groups), leases=leases)

    def _lease(self, rank: int, lease: Lease) -> Leased:
        leased = self.blocks.handle_lease(KEY, rank, MEMBERS, lease)
        self.groups.changes, self.groups.cuts = self.blocks.changes, self.blocks.cuts
        return leased

    def ask(self, rank: int, block: int, parts: dict[int, int] | None) -> bool:
        """A member asks for a block; returns True if it is the epoch's first lease."""
        cut = None if parts is None else Cut(parts, 1)
        lease = Lease(
            incarnation=1, sampler=0, epoch=0, length=50, count=2, contributor=7, block=block, cut=cut
        )
        asked, before = LeaseRequest(at=0.0, rank=rank, lease=lease), self.book.lease_changes()
        first = self.book.lease(asked)[1]
        if recorded := self.book.recorded(asked, before):
            self.kept.append(recorded)
        return first

    def over(self) -> dict[int, int]:
        """All samples were used; returns those that were leased, by rank."""
        used = [Used(sampler=0, epoch=0, start=0, stop=50)]
        fenced = Fenced(worker=KEY[0], incarnation=KEY[1], iteration=9, used=used, news=True)
        effects = self.book.told(UsageReport(at=0.0, log=GLOBAL, fenced=fenced))
        ((_, dealt),) = effects.epochs
        return dealt


def test_a_block_is_cut_once_to_count_its_members_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[Any] = []

    def counted(*arguments: Any) -> Any:
        cuts.append(arguments)
        return shares.cut_run(*arguments)

    monkeypatch.setattr(books, "cut_run", counted)
    hub, parts = Hub(), {0: 9, 2: 1, 3: 4, 5: 6}  # 50 samples: a block of two batches, and half a batch
    firsts = [hub.ask(rank, block, parts) for block in (1, 2) for rank in (3, 0, 5, 2)]
    assert firsts == [True] + [False] * 7
    assert len(cuts) <= 4  # a whole batch and a rest, of each block, for all members
    hub.ask(0, 3, parts)  # the epoch has no more
    again = Hub()
    for recorded in hub.kept:
        again.book.lease(recorded)
    assert again.book.state().dealt == hub.book.state().dealt
    dealt = hub.over()
    assert list(dealt) == [0, 2, 3, 5]
    assert sum(dealt.values()) == 50
    last = next(iter(shares.cut_run(40, 50, parts, 1)))
    assert dealt == {rank: 2 * parts[rank] + last[rank][1] - last[rank][0] for rank in MEMBERS}


def test_a_member_that_asks_late_for_its_part_of_an_epoch_that_is_over_begins_none() -> None:
    hub, parts = Hub(), {0: 25, 2: 25, 3: 0, 5: 0}
    assert hub.ask(0, 1, parts)
    assert hub.over() == {0: 25, 2: 25, 3: 0, 5: 0}
    assert not hub.ask(3, 1, None)
    assert hub.book.state().dealt == {}
