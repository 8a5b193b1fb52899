"""A shard's journal: what was written is read again, up to where it is cut off or damaged."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import CheckpointError, UserError
from atoll.server.journal import Folder, Journal, read_segments
from atoll.store.outcomes import StoreError
from atoll.store.records import PREFIX_BYTES, Begun, Part, Record, Told, encode_record, records

MESSAGE = msgspec.Raw(msgspec.msgpack.encode({"m": "Ready"}))
RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        Told,
        role=st.sampled_from(["worker", "shard", "hub"]),
        index=st.integers(0, 9),
        incarnation=st.integers(0, 2**53 - 1),
        message=st.just(MESSAGE),
    ),
    st.builds(
        Begun, run=st.text(max_size=9), shard=st.integers(0, 9), fresh=st.booleans(), state=st.binary()
    ),
    st.builds(Part, kind=st.sampled_from(["mean", "meeting"]), key=st.integers(0, 2**53 - 1)),
)
ITEMS = st.lists(st.tuples(RECORDS, st.none() | st.binary(max_size=40)), max_size=6)


def bytes_of(record: Record, payload: bytes | None, summed: bool = True) -> bytes:
    return b"".join(bytes(piece) for piece in encode_record(record, payload, summed))


def read(raw: bytes) -> list[tuple[bytes, bytes | None]]:
    return [
        (msgspec.msgpack.encode(record), None if payload is None else bytes(payload))
        for record, payload, _ in records(memoryview(raw))
    ]


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
    whole = bytearray(bytes_of(Part("mean", 1), b"12345678") + raw)
    whole[4:8], whole[8:16] = length.to_bytes(4, "little"), size.to_bytes(8, "little")
    assert read(bytes(whole)) == []


def test_a_whole_record_that_is_none_of_ours_is_told() -> None:
    pieces = encode_record(Part("mean", 1), None)
    header = msgspec.msgpack.encode(["who knows"])
    forged = bytearray(pieces[0][:4] + len(header).to_bytes(4, "little") + pieces[0][8:24])
    forged += zlib.crc32(header, zlib.crc32(bytes(forged))).to_bytes(4, "little") + header
    assert len(forged) == PREFIX_BYTES + len(header)
    with pytest.raises(StoreError, match="no record of a journal"):
        read(bytes(forged))


# -- on disk -----------------------------------------------------------------------------------------------


def written(path: Path, count: int, segments: int = 1) -> None:
    folder = Folder(path, "run", 1)
    journal = Journal(folder, 0)
    for segment in range(segments):
        journal.begin_segment(b"state" if segment else b"", fresh=not segment)
        for index in range(count):
            journal.append(Told("worker", index, 1, MESSAGE), bytes([index]) * index)
    journal.close()
    assert journal.appended == segments * (count + 1)
    folder.close()


def told_in(path: Path, first: int = 0) -> list[tuple[int, bytes]]:
    folder = Folder(path, "run", 1)
    try:
        return [
            (record.index, bytes(payload))
            for record, payload in read_segments(folder, first)
            if isinstance(record, Told) and payload is not None
        ]
    finally:
        folder.close()


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
