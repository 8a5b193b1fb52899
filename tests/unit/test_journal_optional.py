"""A shard's journal that is not required: it breaks, nothing waits for it, and a new segment mends it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from atoll.server.durability import Durability, DurableShard
from atoll.server.journal import Folder, Journal, JournalError, read_segments
from atoll.server.records import Begun, HandledMessage
from atoll.server.snapshot import Heading, Snapshots

PAYLOAD = bytes(2**19)  # of one record: more than the shard's own thread writes


def told(number: int) -> HandledMessage:
    return HandledMessage("worker", number, 1, msgspec.Raw(b"\x80"), 0)


class Disk:
    """Stands for the disk under the journal: full while `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self._pwritev = os.pwritev
        monkeypatch.setattr(os, "pwritev", self._write)

    def _write(self, file: int, pieces: Any, offset: int) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwritev(file, pieces, offset)


def wait_written(journal: Journal, done: list[str], what: str) -> None:
    until = time.monotonic() + 10.0
    while what not in done:
        assert time.monotonic() < until, what
        journal.release()


@pytest.mark.parametrize("payload", [None, PAYLOAD], ids=["small", "large"])
def test_a_broken_journal_lets_go_and_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: bytes | None
) -> None:
    disk, folder = Disk(monkeypatch), Folder(tmp_path / "shard", "r", 0)
    journal, done = Journal(folder, 0, required=False), list[str]()
    kept = Durability(journal, None, None)
    journal.begin_segment(fresh=True)
    journal.append(told(1), payload)
    journal.when_written(lambda: done.append("first"))
    wait_written(journal, done, "first")
    assert kept.comes_back

    disk.full = True
    for number in (2, 3):
        journal.append(told(number), payload)
        journal.when_written(lambda number=number: done.append(f"lost {number}"))  # type: ignore[misc]
    wait_written(journal, done, "lost 3")
    assert done == ["first", "lost 2", "lost 3"]
    assert journal.is_broken
    assert folder.segments() == {}  # nobody goes on from it
    for _ in range(3):
        kept.release()
    (trouble,) = kept.take_news()
    assert "shard 0 cannot write its journal" in trouble
    assert "it goes on without one" in trouble
    assert kept.take_news() == []
    assert not kept.comes_back
    for _ in range(1000):  # nothing is held meanwhile
        journal.append(told(4), PAYLOAD)
    assert not journal.is_full

    number = journal.begin_segment(b"state")  # still full
    while not journal.is_broken:
        journal.release()
    disk.full = False
    again = journal.begin_segment(b"state")
    assert again > number > 0
    journal.append(told(5), payload)
    journal.when_written(lambda: done.append("whole"))
    wait_written(journal, done, "whole")
    assert not journal.is_broken
    assert list(folder.segments()) == [again]
    journal.close()
    records = [record for record, _ in read_segments(folder, again)]
    assert isinstance(records[0], Begun)
    assert [record.index for record in records if isinstance(record, HandledMessage)] == [5]
    folder.close()


class Taken:
    """Stands for the snapshots: one begins when it is `due`, and is complete when its segment has begun."""

    def __init__(self) -> None:
        self.due = False
        self.may_end = threading.Event()
        self._heading: Heading | None = None

    def poll(self, now: float, own: Any, versions: Any, begin: Callable[[], Heading], wanted: bool) -> Any:
        complete = self._heading if self.may_end.is_set() else None
        if self.due:
            self.due, self._heading = False, begin()
        elif complete is not None:
            self._heading = None
        return complete


class Whole:
    """Stands for a shard, between two of its steps."""

    model = SimpleNamespace(is_whole=True, held_bytes=1, own=None, state=SimpleNamespace(versions={}))
    is_between_lines = True

    def heading(self) -> Heading:
        return Heading(run="r", shard=0, digest="", optimizers=[], hyperparameters=[], sequence=0, steps=0)

    def image(self) -> tuple[Any, list[Any]]:
        return {}, []


def test_a_journal_that_breaks_again_and_again_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the broken journal's segments are removed, and leave room for the next one's start.
    That it is written again is told when it has lasted from one snapshot to the next."""
    monkeypatch.setattr("atoll.server.durability.encode_image", lambda _image: b"state")
    disk, folder = Disk(monkeypatch), Folder(tmp_path / "shard", "r", 0)
    journal, taken, shard = Journal(folder, 0, required=False), Taken(), cast(DurableShard, Whole())
    kept = Durability(journal, None, cast(Snapshots, taken))
    journal.begin_segment(fresh=True)
    told_of: list[str] = []

    def look_until(holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 10.0
        while not holds():
            assert time.monotonic() < until
            kept.release()
            kept.poll_snapshots(shard)
            told_of.extend(kept.take_news())

    for number in range(5):
        disk.full = True
        journal.append(told(number), PAYLOAD)
        look_until(lambda: not kept.comes_back)
        disk.full, taken.due = False, True
        look_until(lambda: kept.comes_back)
    (trouble,) = told_of
    assert "it goes on without one" in trouble
    taken.due = True
    look_until(lambda: len(told_of) > 1)
    assert told_of[1:] == ["shard 0: its journal is written again"]
    disk.full = True  # another trouble
    journal.append(told(5), PAYLOAD)
    look_until(lambda: len(told_of) > 2)
    assert "it goes on without one" in told_of[2]
    journal.close()
    folder.close()


class FailsAtRead(Journal):
    """A journal whose thread fails at the moment of a given read of the error by the shard's thread."""

    reads_before = -1  # negative: it does not fail

    @property
    def _error(self) -> str:
        if self.reads_before < 0 or threading.current_thread() is not threading.main_thread():
            return ""
        self.reads_before -= 1
        return "" if self.reads_before >= 0 else self._fail_now()

    @_error.setter
    def _error(self, _: str) -> None:
        pass

    def _fail_now(self) -> str:
        self.reads_before = 0  # it stays failed
        return "no room"


@pytest.mark.parametrize("reads", range(5))
@pytest.mark.parametrize("required", [False, True])
def test_it_breaks_alike_whenever_the_thread_s_error_comes(
    tmp_path: Path, reads: int, required: bool
) -> None:
    """Once it ended the shard though it was not required: the error had come between two looks."""
    folder = Folder(tmp_path / "shard", "r", 0)
    journal, done = FailsAtRead(folder, 0, required=required), list[str]()
    journal.begin_segment(fresh=True)
    journal.append(told(1))
    journal.reads_before = reads
    try:
        journal.when_written(lambda: done.append("said"))
        for _ in range(reads + 1):
            journal.release()
    except JournalError:
        assert required
    else:
        assert not required
    journal.reads_before = -1
    journal.close()
    folder.close()


def test_one_whose_segments_cannot_be_removed_ends_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that is started again would go on from what lacks what was acknowledged."""
    disk, folder = Disk(monkeypatch), Folder(tmp_path / "shard", "r", 0)
    journal = Journal(folder, 0, required=False)
    journal.begin_segment(fresh=True)

    def fail() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(folder, "clear", fail)
    disk.full = True
    journal.append(told(1), PAYLOAD)
    with pytest.raises(JournalError, match="it ends rather than acknowledge"):
        wait_written(journal, [], "nothing")
    journal.close()
    folder.close()
