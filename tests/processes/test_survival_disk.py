"""A disk that is full: a snapshot that cannot be written, a journal that cannot be."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_cluster import Cluster, Model, Worker, gradients

from atoll.server.journal import Folder, Journal, JournalError
from atoll.server.recovery import find
from atoll.server.snapshot import Snapshots, latest
from atoll.wire import messages as m

DEADLINE = 30.0
RUN = "test"


def wait_for(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Kept:
    """A shard in a thread that keeps journal and snapshots in `folder`, and goes on from what is there."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.warnings: list[str] = []
        self.folder = Folder(folder, RUN, 0)
        found = find(self.folder)
        snapshots = Snapshots(folder, run=RUN, shard=0, seconds=seconds, failed=self.warnings.append)
        journal = Journal(self.folder, found.next_segment if found is not None else 0)

        def prepare(shard: Any) -> None:
            if found is not None:
                shard.revival.recover(found)
            journal.begin_segment(fresh=found is None)

        self.cluster = Cluster(1, 1, prepare=prepare, snapshots=snapshots, journal=journal)
        self.address = self.cluster.addresses

    def close(self) -> None:
        self.cluster.close()
        self.folder.close()


def iterate(worker: Worker, iteration: int) -> None:
    worker.push(iteration, gradients(iteration))
    worker.commit(iteration)
    worker.means(iteration)
    worker.say_step(iteration)
    worker.model.step_plain(gradients(iteration))
    worker.ask(iteration + 1)
    worker.assert_has(worker.parameters(iteration + 1))


def begin(kept: Kept) -> Worker:
    worker = Worker(kept.address, 0, Model(lambda p: torch.optim.AdamW(p, lr=0.01), 1))
    worker.set_up(1)
    worker.ready()
    return worker


def test_a_snapshot_that_cannot_be_written_is_told_and_the_shard_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_tensors(path: Path, tensors: Any) -> tuple[int, int]:
        path.write_bytes(b"half of it")
        raise full

    kept = Kept(tmp_path / "shard", seconds=0.02)
    worker = begin(kept)
    iterate(worker, 0)
    wait_for(lambda: latest(tmp_path / "shard") is not None, "the first snapshot")
    with monkeypatch.context() as patched:
        patched.setattr("atoll.server.snapshot.write_tensors", write_tensors)
        iterate(worker, 1)
        wait_for(lambda: bool(kept.warnings), "word of the snapshot that failed")
        iterate(worker, 2)
    assert "no snapshot of shard 0 could be written" in kept.warnings[0]
    assert "No space left on device" in kept.warnings[0]
    worker.close()
    kept.close()
    assert not list((tmp_path / "shard").glob("*.partial"))

    again = Kept(tmp_path / "shard", seconds=60.0)  # from the snapshot before, and the journal since
    back = Worker(again.address, 0, worker.model)
    back.ask(3)
    back.assert_has(back.parameters(3))
    iterate(back, 3)
    back.close()
    again.close()


def test_a_journal_that_cannot_be_written_ends_the_shard_before_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 10_000_000
    pwritev = os.pwritev

    def little_room(file: int, pieces: list[Any], offset: int) -> int:
        nonlocal room
        size = sum(memoryview(piece).nbytes for piece in pieces)
        if room >= size:
            room -= size
            return pwritev(file, pieces, offset)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part, room = room, 0
        whole = b"".join(map(bytes, pieces))
        return pwritev(file, [whole[:part]], offset)  # what a full disk does

    kept = Kept(tmp_path / "shard", seconds=60.0)
    worker = begin(kept)
    iterate(worker, 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", little_room)
        room = 100
        worker.push(1, gradients(1), pull=True)
        worker.commit(1)
        wait_for(lambda: bool(kept.cluster.errors), "the shard's end")
    (error,) = kept.cluster.errors
    assert isinstance(error, JournalError)
    line = str(error)
    assert "\n" not in line
    for part in (
        "shard 0 cannot write its journal",
        "journal-000000.bin: No space left on device",
        "--directory",
    ):
        assert part in line
    assert not worker.come[0][m.Mean]
    assert worker.silent(0, m.Mean)
    worker.close()
    kept.close()

    again = Kept(tmp_path / "shard", seconds=60.0)  # there is room again
    back = Worker(again.address, 0, worker.model)
    iterate(back, 1)
    iterate(back, 2)
    back.close()
    again.close()
