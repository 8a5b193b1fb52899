"""A shard's journal: what was written is read again, up to where it is cut off or damaged."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import CheckpointError, UserError
from atoll.logs.frames import encode_frame
from atoll.logs.logfile import DamagedLogError
from atoll.server.journal import Folder, Journal, read_segments
from atoll.server.records import (
    SHARD,
    Begun,
    HandledMessage,
    Record,
    StatePayload,
    encode_record,
    records,
    stamp_of,
)
from atoll.store.outcomes import StoreError

MESSAGE = msgspec.Raw(msgspec.msgpack.encode({"m": "Ready"}))
RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        HandledMessage,
        role=st.sampled_from(["worker", "shard", "hub"]),
        index=st.integers(0, 9),
        incarnation=st.integers(0, 2**53 - 1),
        message=st.just(MESSAGE),
    ),
    st.builds(
        Begun, run=st.text(max_size=9), shard=st.integers(0, 9), fresh=st.booleans(), state=st.binary()
    ),
    st.builds(StatePayload, kind=st.sampled_from(["mean", "meeting"]), key=st.integers(0, 2**53 - 1)),
)
ITEMS = st.lists(st.tuples(RECORDS, st.none() | st.binary(max_size=40)), max_size=6)


def bytes_of(record: Record, payload: bytes | None, summed: bool = True, stamp: int = 0) -> bytes:
    return b"".join(bytes(piece) for piece in encode_record(record, payload, summed, stamp))


def read(raw: bytes, segment: int | None = None) -> list[tuple[bytes, bytes | None]]:
    found = []
    with contextlib.suppress(DamagedLogError):
        for record, payload, _ in records(memoryview(raw), segment):
            found.append((msgspec.msgpack.encode(record), None if payload is None else bytes(payload)))
    return found


def is_damaged(raw: bytes | bytearray, segment: int) -> bool:
    try:
        deque(records(memoryview(raw), segment), maxlen=0)
    except DamagedLogError:
        return True
    return False


def as_read(items: list[tuple[Record, bytes | None]]) -> list[tuple[bytes, bytes | None]]:
    return [(msgspec.msgpack.encode(record), payload) for record, payload in items]


@pytest.mark.check
@given(items=ITEMS)
def test_what_is_cut_off_anywhere_is_a_beginning_of_what_was_written(
    items: list[tuple[Record, bytes | None]],
) -> None:
    each = [bytes_of(*item, summed=index % 2 == 0) for index, item in enumerate(items)]
    raw, ends = b"".join(each), list(itertools.accumulate(map(len, each)))
    expected = [(msgspec.msgpack.encode(record), payload) for record, payload in items]
    assert [end for _, _, end in records(memoryview(raw))] == ends
    for cut in range(len(raw) + 1):
        assert read(raw[:cut]) == expected[: sum(end <= cut for end in ends)]


@given(items=ITEMS.filter(bool), data=st.data())
def test_what_is_damaged_ends_the_journal(
    items: list[tuple[Record, bytes | None]], data: st.DataObject
) -> None:
    each = [bytes_of(*item) for item in items]
    raw = bytearray(b"".join(each))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[place]))
    ends = list(itertools.accumulate(map(len, each)))
    expected = [(msgspec.msgpack.encode(record), payload) for record, payload in items]
    assert read(bytes(raw)) == expected[: sum(end <= place for end in ends)]


@settings(max_examples=300)
@given(raw=st.binary(max_size=300), size=st.integers(0, 2**64 - 1), length=st.integers(0, 2**32 - 1))
def test_nothing_is_allocated_for_what_a_length_says(raw: bytes, size: int, length: int) -> None:
    assert read(raw) == []
    whole = bytearray(bytes_of(StatePayload("mean", 1), b"12345678") + raw)
    whole[4:8], whole[8:16] = length.to_bytes(4, "little"), size.to_bytes(8, "little")
    assert read(bytes(whole)) == []


def test_a_whole_record_that_is_none_of_ours_is_told() -> None:
    forged = b"".join(encode_frame(SHARD, 0, msgspec.msgpack.encode(["who knows"])))
    with pytest.raises(StoreError, match="no record of a journal"):
        read(forged)


# A segment's number, the random half of its stamp, and what was written.
USES = st.tuples(st.integers(0, 3), st.integers(0, 3), ITEMS)


@settings(max_examples=200)
@given(earlier=st.lists(USES, max_size=3), now=USES, data=st.data())
def test_what_an_earlier_use_of_a_file_left_is_never_taken_for_new(
    earlier: list[tuple[int, int, list[tuple[Record, bytes | None]]]],
    now: tuple[int, int, list[tuple[Record, bytes | None]]],
    data: st.DataObject,
) -> None:
    """Files written over, each time up to any byte: only what was written last, and wholly, is read. That is
    so without sums, which a shard that survives `kill -9` alone does not make."""
    stale = b""
    for number, drawn, items in earlier:
        raw = b"".join(bytes_of(*item, False, stamp_of(number, drawn)) for item in items)
        cut = data.draw(st.integers(0, len(raw)))
        stale = raw[:cut] + stale[cut:]
    number, drawn, items = now[0] + 4, now[1], now[2]  # a file is another segment each time
    each = [bytes_of(*item, False, stamp_of(number, drawn)) for item in items]
    raw, ends = b"".join(each), list(itertools.accumulate(map(len, each)))
    for cut in {*ends, *(end - 1 for end in ends), *(end - 9 for end in ends), len(raw) // 2, 0}:
        mixed = raw[:cut] + stale[cut:]
        there = [end for end in ends if mixed[:end] == raw[:end]]  # perhaps by what was there before
        assert len(there) - sum(end <= cut for end in ends) in (0, 1)
        assert read(mixed, number) == as_read(items[: len(there)])
        assert not is_damaged(mixed, number)


@given(items=ITEMS, data=st.data())
def test_a_cut_is_told_from_damage(items: list[tuple[Record, bytes | None]], data: st.DataObject) -> None:
    stamp = stamp_of(5, 77)
    each = [bytes_of(*item, False, stamp) for item in [*items, (StatePayload("mean", 1), b"12345678")]]
    raw = bytearray(b"".join(each))
    cut = data.draw(st.integers(0, len(raw)))
    assert not is_damaged(raw[:cut], 5)
    place = data.draw(st.integers(0, len(raw) - len(each[-1]) - 1)) if items else -1
    if place >= 0:
        raw[place] ^= 1 + data.draw(st.integers(0, 254))
        # In a payload without a sum nothing shows.
        assert is_damaged(raw, 5) or len(read(bytes(raw), 5)) == len(each)


# -- on disk -----------------------------------------------------------------------------------------------


def written(path: Path, count: int, segments: int = 1) -> None:
    """So many messages in each segment, the n-th with n bytes."""
    folder = Folder(path, "run", 1)
    journal = Journal(folder, 0)
    for segment in range(segments):
        journal.begin_segment(b"state" if segment else b"", fresh=not segment)
        for index in range(count):
            journal.append(HandledMessage("worker", index, 1, MESSAGE), bytes([index]) * index)
    journal.close()
    assert journal.appended == segments * (count + 1)
    folder.close()


def told_in(path: Path, first: int = 0) -> list[tuple[int, bytes]]:
    folder = Folder(path, "run", 1)
    try:
        return [
            (record.index, bytes(payload))
            for record, payload in read_segments(folder, first)
            if isinstance(record, HandledMessage) and payload is not None
        ]
    finally:
        folder.close()


def told_in_file(path: Path) -> list[tuple[int, bytes]]:
    """What is in segment 0 while a shard is at work."""
    raw = memoryview((path / "journal-000000.bin").read_bytes())
    return [
        (record.index, bytes(payload))
        for record, payload, _ in records(raw, 0)
        if isinstance(record, HandledMessage) and payload is not None
    ]


def wait_for_release(journal: Journal, done: Callable[[], bool]) -> None:
    """What a shard's loop does: wait for the journal's word, and release."""
    while not done():
        assert select.select([journal.fileno], [], [], 30.0)[0], "the journal is silent"
        journal.release()


@contextlib.contextmanager
def blocked(journal: Journal, job: bool = False) -> Iterator[None]:
    """The journal's thread stands still; with `job`, it has something to do."""
    go, stands = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        assert go.wait(30.0)

    if job:
        journal._give(stand)
    else:
        journal._items.put((journal._mended, stand))
    assert stands.wait(30.0)
    try:
        yield
    finally:
        go.set()


def test_a_torn_tail_is_cut_off_and_the_journal_goes_on(tmp_path: Path) -> None:
    written(tmp_path, 5)
    segment = tmp_path / "journal-000000.bin"
    whole = segment.read_bytes()
    everything = [(index, bytes([index]) * index) for index in range(5)]
    assert told_in(tmp_path) == everything
    segment.write_bytes(whole[:-1])
    assert told_in(tmp_path) == everything[:4]
    assert len(segment.read_bytes()) < len(whole) - 1
    assert told_in(tmp_path) == everything[:4]


def test_segments_follow_one_another_and_old_ones_go(tmp_path: Path) -> None:
    written(tmp_path, 3, segments=3)
    three = [(index, bytes([index]) * index) for index in range(3)]
    assert told_in(tmp_path) == 3 * three
    assert told_in(tmp_path, 2) == three
    damaged = tmp_path / "journal-000001.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"journal-000001.bin: damaged at byte"):
        told_in(tmp_path)
    damaged.unlink()
    with pytest.raises(CheckpointError, match="has gaps"):
        told_in(tmp_path)
    assert told_in(tmp_path, 2) == three


def test_damage_before_the_end_is_named_and_nothing_is_cut_off(tmp_path: Path) -> None:
    written(tmp_path, 5)
    segment = tmp_path / "journal-000000.bin"
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 1
    segment.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"journal-000000.bin: damaged at byte \d+; the shard cannot"):
        told_in(tmp_path)
    assert segment.read_bytes() == raw


def test_a_segment_of_another_format_is_refused_and_left(tmp_path: Path) -> None:
    written(tmp_path, 2)
    segment = tmp_path / "journal-000000.bin"
    old = b"ATJ1" + segment.read_bytes()[4:]
    segment.write_bytes(old)
    with pytest.raises(CheckpointError, match="no segment of a journal that this version of Atoll can read"):
        told_in(tmp_path)
    assert segment.read_bytes() == old


def filled(journal: Journal, label: int, count: int, nbytes: int) -> None:
    for index in range(count):
        journal.append(HandledMessage("worker", label, 1, MESSAGE), bytes([index]) * nbytes)


@pytest.mark.parametrize("sync", [False, True])
def test_a_segment_that_is_not_needed_is_written_over_in_place(tmp_path: Path, sync: bool) -> None:
    folder = Folder(tmp_path, "run", 1)
    journal = Journal(folder, 0, sync=sync)
    journal.begin_segment(fresh=True)
    begun: list[bool] = []
    journal.when_written(lambda: begun.append(True))
    wait_for_release(journal, lambda: bool(begun))
    inode = (tmp_path / "journal-000000.bin").stat().st_ino
    for number in range(1, 6):
        filled(journal, number, 20, 5000 if number == 1 else 3000)
        journal.begin_segment(b"state")
        journal.drop_before(number)
    filled(journal, 9, 2, 10)
    journal.close()
    names = sorted(path.name for path in tmp_path.glob("*.bin"))
    assert names == ["journal-000005.bin", "spare.bin"]
    assert inode in {path.stat().st_ino for path in tmp_path.glob("*.bin")}
    folder.close()
    assert [(index, len(payload)) for index, payload in told_in(tmp_path, 5)] == [(9, 10), (9, 10)]


def test_what_an_earlier_life_left_is_not_written_over_while_it_is_still_in_use(tmp_path: Path) -> None:
    """Payloads that were read again lie in their segment: a contribution may be in flight for long."""
    folder = Folder(tmp_path, "run", 1)
    first = Journal(folder, 0)
    first.begin_segment(fresh=True)
    filled(first, 1, 4, 2**20)
    first.close()
    payloads = [payload for _, payload in read_segments(folder, 0) if payload is not None]
    before = [bytes(payload) for payload in payloads]
    second = Journal(folder, 1)
    for _ in range(3):
        second.drop_before(second.begin_segment())
        second.append(HandledMessage("worker", 2, 1, MESSAGE), b"\xff" * 2**23)
    second.close()
    assert len(before) == 4
    assert [bytes(payload) for payload in payloads] == before
    folder.close()


def test_a_segment_that_was_another_before_and_is_not_written_yet_is_empty(tmp_path: Path) -> None:
    written(tmp_path, 3)
    first = tmp_path / "journal-000000.bin"
    (tmp_path / "journal-000001.bin").write_bytes(
        first.read_bytes()
    )  # renamed, and then the shard was killed
    assert told_in(tmp_path) == [(index, bytes([index]) * index) for index in range(3)]
    assert (tmp_path / "journal-000001.bin").stat().st_size == 0
    assert told_in(tmp_path, 1) == []


def test_a_run_that_is_over_leaves_nothing_to_write_over(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "run", 1)
    (tmp_path / "spare.bin").write_bytes(b"of an earlier run")
    folder.remember(over=True)
    folder.close()
    Folder(tmp_path, "run", 1).close()
    assert not (tmp_path / "spare.bin").exists()


# -- who writes --------------------------------------------------------------------------------------------


def test_small_records_are_written_without_waking_the_thread(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "run", 1)
    journal = Journal(folder, 0)
    journal.begin_segment(fresh=True)
    told: list[str] = []
    journal.when_written(lambda: told.append("begun"))
    wait_for_release(journal, lambda: bool(told))
    with blocked(journal):
        for index in range(3):
            journal.append(HandledMessage("worker", index, 1, MESSAGE), bytes(100))
        journal.when_written(lambda: told.append("small"))
        assert told == ["begun", "small"]
        assert [index for index, _ in told_in_file(tmp_path)] == [0, 1, 2]
    journal.close()
    folder.close()


def test_small_records_wait_for_what_the_thread_still_writes(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "run", 1)
    journal = Journal(folder, 0)
    journal.begin_segment(fresh=True)
    told: list[str] = []
    with blocked(journal, job=True):
        journal.append(HandledMessage("worker", 0, 1, MESSAGE), bytes(2**20))
        journal.when_written(lambda: told.append("chunk"))
        journal.append(HandledMessage("worker", 1, 1, MESSAGE), bytes(10))
        journal.when_written(lambda: told.append("small"))
        assert told == []
    wait_for_release(journal, lambda: len(told) == 2)
    assert told == ["chunk", "small"]
    journal.close()
    folder.close()
    assert [(index, len(payload)) for index, payload in told_in(tmp_path)] == [(0, 2**20), (1, 10)]


def test_a_thousand_small_records_go_in_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, "run", 1)
    journal = Journal(folder, 0)
    journal.begin_segment(fresh=True)
    begun: list[bool] = []
    journal.when_written(lambda: begun.append(True))
    wait_for_release(journal, lambda: bool(begun))
    calls, pwritev = [], os.pwritev

    def counted(file: int, pieces: list[memoryview], offset: int) -> int:
        calls.append(len(pieces))
        return pwritev(file, pieces, offset)

    monkeypatch.setattr(os, "pwritev", counted)
    for index in range(1000):
        journal.append(HandledMessage("worker", index, 1, MESSAGE))
    journal.when_written(lambda: None)
    assert len(calls) == 2
    assert max(calls) <= 1024
    journal.close()
    folder.close()


def test_a_folder_is_one_shards(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "run", 1)
    folder.remember(incarnation=7)
    with pytest.raises(UserError, match="another shard is at work there"):
        Folder(tmp_path, "run", 1)
    folder.close()
    with pytest.raises(UserError, match="holds shard 1 of run 'run'; this is shard 0 of run 'run'"):
        Folder(tmp_path, "run", 0)
    again = Folder(tmp_path, "run", 1)
    assert again.identity.incarnation == 7
    again.remember(over=True)
    again.close()
    written(tmp_path, 2)  # of a run that is over, nothing is gone on from
    assert len(told_in(tmp_path)) == 2
