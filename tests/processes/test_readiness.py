"""What it costs to be ready for a death, in bytes, is what docs/failures.md says: on disk, and in memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shard_cluster import gradients
from test_survival_disk import Kept, begin, iterate, wait_for
from torch import nn

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.hub import main as hub
from atoll.hub.options import HubOptions
from atoll.server import main as server
from atoll.server.journal import Folder, read_segments
from atoll.server.options import ServerOptions
from atoll.server.records import Begun, HandledMessage
from atoll.train.api.place import Place
from support.pool import FORKSERVER, WorkerPool
from support.served import RUN, served_worker

MIB = 2**20
SECONDS = 60.0
MARGIN = 12 * MIB  # threads, their heaps, and what Python keeps


# -- on disk -----------------------------------------------------------------------------------------------


def bytes_in(folder: Path) -> tuple[int, int]:
    """Of the journal's segments, and of snapshots; what goes meanwhile is not there."""
    journal = snapshots = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size = (Path(inside) / name).stat().st_size
                journal += size if name.endswith(".bin") else 0
                snapshots += size if Path(inside) != folder else 0
    return journal, snapshots


class Watch:
    """The most bytes that a shard's folder has held, of its journal and of its snapshots."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stop = folder, threading.Event()
        self.journal = self.snapshots = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.0005):
            journal, snapshots = bytes_in(self._folder)
            self.journal, self.snapshots = max(self.journal, journal), max(self.snapshots, snapshots)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.soak
def test_a_shards_folder_holds_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments, whole, and two snapshots; that is so after any number of iterations."""
    segment = 60_000  # above eight times the chunks
    monkeypatch.setattr("atoll.server.durability._SMALL_JOURNAL", segment)
    folder = tmp_path / "shard"
    kept = Kept(folder, seconds=SECONDS)
    worker = begin(kept)
    model = worker.model
    held = sum(model.flat(chunk).nbytes for chunk in model.chunks)
    pushed = sum(each.nbytes for each in gradients(0)) + 4096  # of an iteration, with its headers
    assert 8 * held < segment
    watch, seen = Watch(folder), set()
    snapshots = kept.cluster.shards[0].kept.snapshots
    assert snapshots is not None
    for iteration in range(100):
        iterate(worker, iteration)
        wait_for(lambda: snapshots._taking is None, "the snapshot")
        seen |= {path.name for path in folder.glob("*.bin")}
    watch.stop()
    worker.close()
    kept.close()
    assert len([name for name in seen if name.startswith("journal-")]) > 8
    assert "spare.bin" in seen
    assert 2 * segment < watch.journal <= 2 * (segment + 2 * pushed)
    # Values and Adam's two averages of each chunk; a file's heading, and a line for it.
    state = 3 * held + len(model.chunks) * 2048 + 8192
    assert held < watch.snapshots <= 2 * state
    assert len(list(folder.glob("snapshot-*"))) == 1


# -- in memory ---------------------------------------------------------------------------------------------

SIDE, LAYERS, STEPS = 1500, 4, 8
P = 4 * LAYERS * SIDE * SIDE


def status(field: str, pid: int | str = "self") -> int:
    """Of a process's memory, in bytes: VmRSS, or VmHWM, its highest."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def train(place: Place, address: str) -> int:
    """A worker's peak, in bytes above what it held before."""
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    sync = Sync(timeout="60s", consistency="bsp")
    config = Config(run=Run(strategy="server"), chunks=Chunks(size="4MiB"), sync=sync)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    with served_worker(address, place.rank), atoll.join(config) as session:
        session.prepare(model, optimizer)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(1, SIDE)).sum().backward()
            optimizer.step()
        session.barrier()
    return status("VmHWM") - before


@contextlib.contextmanager
def served(folder: Path, kept: bool) -> Iterator[tuple[str, int]]:
    """A hub on a thread, and one shard as a process: the hub's address and the shard's process id."""
    stop, listening, at = threading.Event(), threading.Event(), []

    def ready(address: str) -> None:
        at.append(address)
        listening.set()

    def run_hub() -> None:
        directory = str(folder / "hub")
        options = HubOptions(listen="tcp://127.0.0.1:0", run=RUN, workers=1, directory=directory)
        hub.serve(options, until=stop.is_set, ready=ready)

    thread = threading.Thread(target=run_hub, daemon=True)
    thread.start()
    assert listening.wait(SECONDS)
    options = ServerOptions(
        hub=at[0],
        shard=0,
        run=RUN,
        timeout=SECONDS,
        snapshot_seconds=0.2,
        directory=str(folder / "shard") if kept else "",
    )
    shard = FORKSERVER.Process(target=server.serve, args=(options,), daemon=True)
    shard.start()
    assert shard.pid is not None
    try:
        yield at[0], shard.pid
    finally:
        stop.set()
        thread.join(SECONDS)
        shard.kill()
        shard.join(SECONDS)


def peaks(folder: Path, *, kept: bool) -> tuple[int, int]:
    """Bytes that a shard and a worker have taken at most."""
    with WorkerPool(deadline=SECONDS) as pool, served(folder, kept) as (address, shard):
        (worker,) = pool.run(train, address, world=1)
        taken = status("VmHWM", shard), worker
    assert not kept or list((folder / "shard").glob("snapshot-*"))
    return taken


def test_what_readiness_takes_in_memory_is_what_the_page_says(tmp_path: Path) -> None:
    """A snapshot holds each chunk and its state once, a journal that keeps up a contribution; a worker keeps
    what it has sent where it lies."""
    shard_without, worker_without = peaks(tmp_path / "without", kept=False)
    assert worker_without > 3 * P  # parameters, gradients, what is fetched
    state = P  # the momentum
    for attempt in range(3):  # beside other work the journal may not keep up
        shard_with, worker_with = peaks(tmp_path / f"with {attempt}", kept=True)
        # A snapshot's copies, and a contribution that waits to be written.
        if shard_with - shard_without <= P + state + P + MARGIN:
            break
    assert shard_with - shard_without <= P + state + P + MARGIN
    # It has chunks at hand or not as things come about; a message kept for each step would be eight times P.
    assert worker_with - worker_without <= 2 * P + MARGIN


# -- segments that are written over, and kill -9 -----------------------------------------------------------

WRITER = """
import os, select, sys
from pathlib import Path
import msgspec
from atoll.server.journal import Folder, Journal
from atoll.server.records import HandledMessage

folder = Folder(Path(sys.argv[1]), "run", 0)
number, index = int(sys.argv[2]), int(sys.argv[3])
journal = Journal(folder, number)
journal.begin_segment(b"%d" % index)
message = msgspec.Raw(msgspec.msgpack.encode({}))
while True:
    for size in (7, 300_000, 1_000_000 + index % 5, 70_000):
        journal.append(HandledMessage("worker", index, 1, message), bytes([index % 251]) * size)
        index += 1
        journal.when_written(lambda: os.write(1, b"."))
        journal.release()
    while journal._waiting:
        select.select([journal.fileno], [], [], 30.0)
        journal.release()
    if journal.size > 6_000_000:
        number = journal.begin_segment(b"%d" % index)
        journal.drop_before(number)
"""


def test_segments_written_over_have_all_that_was_told_when_their_writer_is_killed(
    tmp_path: Path,
) -> None:
    """Written over and killed again and again: what was said to be written is there, whole and in order, and
    nothing that was there before."""
    index = 0
    for life in range(5):
        first = max([-1, *(int(path.stem[-6:]) for path in tmp_path.glob("journal-*.bin"))]) + 1
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(first), str(index)]
        told = 0
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            while told < 60 + 7 * life:  # two segments and some more
                told += len(os.read(writer.stdout.fileno(), 64))
            writer.kill()
            told += len(writer.stdout.read())
        folder = Folder(tmp_path, "run", 0)
        found = list(read_segments(folder, min(folder.segments())))
        folder.close()
        messages = [(each, payload) for each, payload in found if isinstance(each, HandledMessage)]
        indices = [each.index for each, _ in messages]
        begun = found[0][0]
        assert isinstance(begun, Begun)
        following = int(begun.state) + len(indices)  # no message may have been written to a segment yet
        assert indices == list(range(int(begun.state), following))
        assert following >= index + told
        for each, payload in messages:
            assert payload is not None
            assert payload.nbytes in (7, 300_000, 70_000) or 10**6 <= payload.nbytes < 10**6 + 5
            assert bytes(payload) == bytes([each.index % 251]) * payload.nbytes
        index = following
    assert (tmp_path / "spare.bin").exists()
