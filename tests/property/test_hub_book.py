"""Properties of what the hub writes down: whatever happens, and wherever it is cut off and read again, with a
compact state or without, the hub knows and answers what it would have without the restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.hub.book import GLOBAL, Book
from atoll.hub.decisions import Decisions
from atoll.hub.journal import KIND, HubJournal
from atoll.hub.records import (
    AnyRecord,
    Began,
    Came,
    Died,
    Knows,
    LeaseRequest,
    Left,
    UsageReport,
    Voted,
    decode_record,
    encode_record,
)
from atoll.hub.rings import Rings
from atoll.hub.turn import Turn
from atoll.logs.frames import encode_frame
from atoll.store.members import Membership
from atoll.wire.messages import Accept, Fenced, Gather, Lease, Prepare, StoreCall, Used
from atoll.wire.peerviews import Ballot, Life, View, ViewMember

SITES = {"paris": 1, "berlin": 1}
KINDS = (
    "worker",
    "shard",
    "site",
    "left",
    "died",
    "lease",
    "news",
    "fenced",
    "gather",
    "key",
    "beat",
    "vote",
)

# Two workers with samples, in a ring where the run is one.
BEGIN = [("worker", 1, 0, 1), ("worker", 2, 0, 2), ("gather", 0, 0, 0), ("gather", 0, 1, 0)]

EVENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 9), st.integers(0, 2)), max_size=40
)


def unnumbered(message: Any) -> Any:
    return msgspec.structs.replace(message, number=0)


class Hub:
    """A book and its rings; `answers` is all that was answered, and `records` all that was written."""

    def __init__(self, shards: int, sites: bool) -> None:
        self.now, self.number = 0.0, 0
        self.answers: list[Any] = []
        self.turn = Turn(lambda: self.now)
        members = Membership(2, 10.0, shards, SITES if sites else None)
        self.rings = Rings(members, Decisions(), self.turn)
        self.book = Book(members, self.rings)

    @property
    def records(self) -> list[AnyRecord]:
        return self.turn.records

    def restarted(self, compact: bool) -> Hub:
        """Another one, that has read what this one wrote."""
        other = Hub(self.book.members.shards.count, bool(self.book.members.sites.workers))
        other.now, other.number = self.now, self.number
        other.records[:] = (
            [decode_record(encode_record(Knows(at=self.now, state=self.book.state())))]
            if compact
            else list(self.records)
        )
        for record in map(encode_record, list(other.records)):
            other.book.apply(decode_record(record))
        other.turn.answers.clear()
        other.answers = list(self.answers)  # what is gone through again answers nobody
        return other

    def happen(self, kind: str, who: int, what: int, small: int) -> None:
        """One input, of those that such a run can have; time passes."""
        self.now += 1.0
        self.number += 1
        self.act(kind, who, what, small)
        # Who waited before a restart is nobody's connection after it, and asks again by a number.
        self.answers += [unnumbered(message) for _, message in self.turn.answers]
        self.turn.answers.clear()

    def act(self, kind: str, who: int, what: int, small: int) -> None:
        if kind in ("worker", "shard", "site"):
            self.come(kind, who, small)
        elif kind == "beat":
            self.book.members.roll.hear(self.now, what)
        elif kind in ("left", "died"):
            there = sorted(set(self.book.members.roll.known))
            incarnation = there[what % len(there)] if there else 1 + what
            record = Left(at=self.now, incarnation=incarnation)
            gone = self.book.leave(record) if kind == "left" else self.book.die(self.died(incarnation))
            if gone is not None:
                self.records.append(record if kind == "left" else self.died(incarnation))
            self.answers.append(gone)
        elif kind == "lease":
            self.lease(who, what, small)
        elif kind == "vote":
            self.vote(who % 2, what, small)
        elif kind in ("news", "fenced"):
            self.told(kind == "news", who, what, small)
        else:
            self.ring(kind, what, small)

    def died(self, incarnation: int) -> Died:
        return Died(at=self.now, incarnation=incarnation)

    def come(self, role: str, who: int, small: int) -> None:
        site = ["", *SITES][small] if self.book.members.sites.workers else ""
        came = Came(
            at=self.now, role=role, wish=who - 1, shard=small, address=f"at {who}", site=site, token=f"{who}"
        )
        admission = self.book.come(came)
        if not admission.refused:
            self.records.append(came)
        self.answers.append((admission.worker, admission.incarnation, admission.refused))

    def lease(self, who: int, what: int, small: int) -> None:
        live = (
            sorted(self.book.members.workers.live().items()) if what else []
        )  # else perhaps of one who is gone
        rank, incarnation = live[what % len(live)] if live else (who, 1 + small)
        lease = Lease(
            incarnation=incarnation, sampler=0, epoch=small, length=20, count=4, number=self.number - what % 2
        )
        asked, before = LeaseRequest(at=self.now, rank=rank, lease=lease), self.book.leases.changes
        try:
            self.answers.append(self.book.lease(asked))
        except UserError as error:
            self.answers.append(str(error))
        if self.book.leases.changes != before:
            self.records.append(asked)

    def told(self, news: bool, who: int, what: int, small: int) -> None:
        used = [Used(sampler=0, epoch=small, start=2 * what, stop=2 * what + 3)]
        logs = sorted(self.book.fences) if self.book.members.sites.workers else [GLOBAL]
        log = logs[small % len(logs)]
        known = sorted(self.book.members.workers.live().items()) if news else sorted(self.book.fences[log])
        worker, incarnation = known[what % len(known)] if known else (who, 1 + what)
        fenced = Fenced(worker=worker, incarnation=incarnation, iteration=1, used=used, news=news)
        told = UsageReport(at=self.now, log=log, fenced=fenced)
        self.answers.append(self.book.told(told))
        self.records.append(told)

    def vote(self, node: int, what: int, small: int) -> None:
        """Of two nodes, in one of two views; small: whether it asks for a promise or for more."""
        members = tuple(ViewMember(Life(each, 0)) for each in range(2))
        view, ballot = View(1, 1 + what // 5, members), Ballot(what % 5, node)
        following = View(1, view.number + 1, (members[node],))
        accept = Accept(view=view, ballot=ballot, next=following)
        voted = Voted(at=self.now, node=node, message=accept if small else Prepare(view=view, ballot=ballot))
        before = self.book.witness.state
        self.answers.append(self.book.vote(voted))
        if self.book.witness.state != before:
            self.records.append(voted)

    def ring(self, kind: str, what: int, small: int) -> None:
        live = sorted(self.book.members.workers.live().values())
        incarnation = live[what % len(live)] if live else 1 + what
        if kind == "gather":
            self.rings.handle(b"x", Gather(incarnation=incarnation, number=1 + small, seconds=5.0))
            return
        number = self.number - small  # some are sent twice
        call = StoreCall(
            run="r", incarnation=incarnation, group=1, number=number, operation="add", keys=["n"], amount=1
        )
        self.rings.handle(b"x", call)

    def poll(self) -> None:
        """All that time alone brings about, much later."""
        self.now += 1000.0
        self.rings.poll()


@pytest.mark.check
@settings(max_examples=300)
@given(EVENTS, EVENTS, st.booleans(), st.sampled_from([(0, False), (2, False), (1, True)]))
def test_a_hub_that_read_its_records_answers_as_the_one_that_wrote_them(
    before: list[Any], after: list[Any], compact: bool, kind: tuple[int, bool]
) -> None:
    one = Hub(*kind)
    for event in [*BEGIN, *before]:
        one.happen(*event)
    other = one.restarted(compact)
    assert other.book.state() == one.book.state()
    for event in after:
        one.happen(*event)
        other.happen(*event)
    assert other.answers == one.answers
    assert other.book.state() == one.book.state()
    # And read once more, from a compact state and what came after it.
    assert other.restarted(False).book.state() == one.book.state()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[AnyRecord]]:
    """A journal's bytes, and its records."""
    folder = tmp_path_factory.mktemp("written")
    journal = HubJournal(folder)
    journal.begin(Began(at=0.0, run="r", listen="l", address="a", workers=2, shards=1, sites=[]))
    hub = Hub(1, False)
    for count in range(8):
        hub.happen("worker" if count % 2 else "lease", count % 4, count, 0)
    journal.append(hub.records)
    journal.close()
    assert journal.began is not None
    return journal.path.read_bytes(), [journal.began, *hub.records]


@given(st.data())
def test_a_journal_that_is_cut_off_anywhere_has_the_records_before(
    written: tuple[bytes, list[AnyRecord]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw, records = written
    size = data.draw(st.integers(0, len(raw)))
    folder: Path = tmp_path_factory.mktemp("cut")
    (folder / "hub.journal").write_bytes(raw[:size])
    journal = HubJournal(folder)
    found = list(journal.records)
    journal.append(records[:1])  # what comes now stands behind what was whole
    journal.close()
    assert found == records[: len(found)]
    again = HubJournal(folder)
    assert again.records == [*found, records[0]]
    assert again.cut == 0
    again.close()
    whole = size == len(raw)
    assert (len(found) == len(records)) == whole


@given(st.data())
def test_a_journal_that_is_damaged_before_its_end_is_refused_and_left(
    written: tuple[bytes, list[AnyRecord]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw, records = written
    last = len(b"".join(encode_frame(KIND, 0, encode_record(records[-1]), summed=False)))
    damaged = bytearray(raw)
    damaged[data.draw(st.integers(0, len(raw) - last - 1))] ^= data.draw(st.integers(1, 255))
    folder: Path = tmp_path_factory.mktemp("damaged")
    (folder / "hub.journal").write_bytes(damaged)
    with pytest.raises(UserError, match=r"hub.journal: .*damaged at byte \d+; give another --directory"):
        HubJournal(folder)
    assert (folder / "hub.journal").read_bytes() == damaged


@pytest.mark.parametrize("other", [b"ATJ2" + bytes(100), b"\x10\0\0\0abcd" + bytes(100), b"{}"])
def test_a_journal_of_another_format_is_refused_in_one_line(tmp_path: Path, other: bytes) -> None:
    (tmp_path / "hub.journal").write_bytes(other)
    with pytest.raises(UserError, match="no hub's journal that this version of Atoll can read") as found:
        HubJournal(tmp_path)
    assert "\n" not in str(found.value)
    assert (tmp_path / "hub.journal").read_bytes() == other
