"""A disk that is full for real: what docs/failures.md says of each file happens, and it goes on with room."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hub_parts import HubProcess
from run_command import DEADLINE, wait_for
from small_disk import NoDiskError, SmallDisk
from test_survival_disk import Kept, begin, iterate
from transports import LINK

import atoll
from atoll.core.config import HUB_VARIABLE, Chunks, Config, Run, Sync
from atoll.core.events import StepDone
from atoll.hub.journal import FILE
from atoll.observe.journal import JournalReader
from atoll.server.snapshot import latest
from atoll.train.members.hub_client import HubClient

MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    try:
        made = SmallDisk(tmp_path / "disk", 8 * MIB)
    except NoDiskError as error:
        pytest.skip(f"no small disk can be made here: {error}")
    yield made
    made.close()


@pytest.mark.soak
def test_a_snapshot_is_given_up_and_the_next_one_is_taken_when_there_is_room(disk: SmallDisk) -> None:
    folder = disk.folder / "shard"
    kept = Kept(folder, seconds=0.5)
    worker = begin(kept)
    iterate(worker, 0)
    wait_for(lambda: latest(folder) is not None, "the first snapshot")

    filled_at = None

    def failed() -> bool:
        nonlocal filled_at
        if latest(folder) != filled_at:  # one that was under way has freed what the one before had
            filled_at = latest(folder)
            disk.fill(leave=20 * 2**10)  # for the journal, and not for a snapshot
        return bool(kept.warnings)

    wait_for(failed, "word of the snapshot that failed")
    before = latest(folder)
    iterate(worker, 1)
    assert re.match("no snapshot of shard 0 could be written: .*No space left on device", kept.warnings[0])
    assert latest(folder) == before
    iterate(worker, 2)
    disk.make_room()
    wait_for(lambda: latest(folder) != before, "the next snapshot")
    iterate(worker, 3)
    worker.close()
    kept.close()
    assert not kept.cluster.errors
    again = Kept(folder, seconds=60.0)
    back = type(worker)(again.address, 0, worker.model)
    iterate(back, 4)
    back.close()
    again.close()


# -- a shard's journal -------------------------------------------------------------------------------------


def start_shard(hub: str, folder: Path, log: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "atoll.cli.app", "server", "--hub", hub, "--shard", "0"]
    with log.open("ab") as file:
        return subprocess.Popen(
            [*command, "--directory", str(folder), *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )


CONFIG = Config(
    run=Run(strategy="server"),
    chunks=Chunks(size="64KiB"),
    sync=Sync(timeout=f"{DEADLINE:g}s"),
    link=LINK,
)


def hub_of_one(folder: Path) -> HubProcess:
    return HubProcess(folder, workers=1)


def plain(steps: int) -> torch.nn.Module:
    model, optimizer = make()
    for step in range(steps):
        train(model, optimizer, step)
    return model


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 1000)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(3, 100, generator=torch.Generator().manual_seed(step))
    model(inputs).square().mean().backward()
    optimizer.step()


def test_a_shard_without_room_for_its_journal_ends_and_goes_on_when_there_is_some(
    disk: SmallDisk, tmp_path: Path
) -> None:
    """A process; the worker waits for it. Each iteration takes 400 KB of the journal."""
    log = tmp_path / "log"
    model, optimizer = make()
    done: list[int] = []
    errors: list[BaseException] = []
    with hub_of_one(tmp_path / "hub") as hub:
        shard = start_shard(hub.address, disk.folder / "shard", log, "--journal", "required")
        with mock.patch.dict(os.environ, {HUB_VARIABLE: hub.address}), atoll.join(CONFIG) as session:
            session.prepare(model, optimizer)

            def steps() -> None:
                try:
                    for step in range(8):
                        if step == 3:
                            disk.fill(leave=600 * 2**10)
                        train(model, optimizer, step)
                        done.append(step)
                except BaseException as error:
                    errors.append(error)

            training = threading.Thread(target=steps)
            training.start()
            status = shard.wait(DEADLINE)
            assert status not in (0, -9)
            assert 3 <= len(done) < 8
            last = log.read_text().splitlines()[-1]
            assert re.match(
                r"atoll: shard 0 cannot write its journal \S+/journal-\d+\.bin: No space left on device",
                last,
            )
            assert "Traceback" not in log.read_text()
            disk.make_room()
            shard = start_shard(hub.address, disk.folder / "shard", log)
            training.join(DEADLINE)
            assert not errors
            assert len(done) == 8
        shard.kill()
        shard.wait(DEADLINE)
    for ours, theirs in zip(model.parameters(), plain(8).parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_shard_serves_on_without_its_journal_and_keeps_one_again_when_there_is_room(
    disk: SmallDisk, tmp_path: Path
) -> None:
    """The default. Killed after that, it goes on where it stood."""
    log = tmp_path / "log"
    model, optimizer = make()
    with hub_of_one(tmp_path / "hub") as hub:
        begin = partial(start_shard, hub.address, disk.folder / "shard", log, "--snapshot-seconds", "0.5")
        shard = begin()
        with mock.patch.dict(os.environ, {HUB_VARIABLE: hub.address}), atoll.join(CONFIG) as session:
            session.prepare(model, optimizer)
            steps = itertools.count()
            for _ in range(3):
                train(model, optimizer, next(steps))
            while "cannot write its journal" not in log.read_text():
                disk.fill()  # a segment that is not needed any more may have left room
                train(model, optimizer, next(steps))
            for _ in range(3):
                disk.fill()
                train(model, optimizer, next(steps))
            assert shard.poll() is None
            lines = [line for line in log.read_text().splitlines() if "journal" in line]
            assert re.match(
                r"atoll: warning: shard 0 cannot write its journal \S+/journal-\d+\.bin: No space left on "
                "device; it goes on without one: if it is killed before there is room, the run goes on from",
                lines[0],
            )
            disk.make_room()

            def is_whole() -> bool:
                said = log.read_text()
                return said.count("cannot write its journal") == said.count("its journal is written again")

            # Steps would fill the disk again before the second snapshot.
            wait_for(is_whole, "two snapshots")
            for _ in range(3):
                train(model, optimizer, next(steps))
            shard.kill()
            shard.wait(DEADLINE)
            shard = begin()
            for _ in range(2):
                train(model, optimizer, next(steps))
        shard.kill()
        shard.wait(DEADLINE)
    assert "goes on from" in log.read_text()
    for ours, theirs in zip(model.parameters(), plain(next(steps)).parameters(), strict=True):
        assert torch.equal(ours, theirs)


# -- the hub's journal -------------------------------------------------------------------------------------


def served_hub(disk: SmallDisk, tmp_path: Path) -> HubProcess:
    """What it says goes elsewhere: beside its folder."""
    (disk.folder / "hub").mkdir()
    (tmp_path / "hub").symlink_to(disk.folder / "hub")
    return hub_of_one(tmp_path / "hub")


def fill_up(disk: SmallDisk, hub: HubProcess, one: HubClient) -> int:
    """Lease samples until the hub has said that it writes nothing down; how many."""
    leased = 0
    disk.fill()

    def said() -> bool:
        nonlocal leased
        leased = one.lease(0, 0, 10**6, 10).stop  # the last page of the journal has room for some
        return "is not written (No space left on device" in hub.log()

    wait_for(said, "the hub's word")
    for _ in range(20):
        leased = one.lease(0, 0, 10**6, 10).stop
    return leased


def test_the_hub_serves_on_without_its_journal_and_writes_it_anew(disk: SmallDisk, tmp_path: Path) -> None:
    with served_hub(disk, tmp_path) as hub, HubClient(hub.address, None, timeout=DEADLINE) as one:
        one.join()
        leased = fill_up(disk, hub, one)
        disk.make_room()
        wait_for(lambda: "journal: written again" in hub.log(), "the journal's return")
        hub.kill()
        assert one.lease(0, 0, 10**6, 10).start == leased
        assert hub.starts == 2


@pytest.mark.soak
def test_a_hub_that_dies_without_its_journal_does_not_go_on_from_an_old_state(
    disk: SmallDisk, tmp_path: Path
) -> None:
    with served_hub(disk, tmp_path) as hub, HubClient(hub.address, None, timeout=DEADLINE) as one:
        one.join()
        fill_up(disk, hub, one)
        hub.kill()
        disk.make_room()
        wait_for(lambda: "atoll: " in hub.log(), "its last line")
        last = hub.log().splitlines()[-1]
        assert last.startswith(f"atoll: {hub.folder / FILE}.incomplete: ")
        assert "the disk was full" in last
        assert "from a checkpoint" in last
        assert "Traceback" not in hub.log()


# -- checkpoints and records -------------------------------------------------------------------------------


SAVING = """
import sys
import torch
import atoll
from atoll.core.errors import CheckpointError

torch.manual_seed(0)
model = torch.nn.Linear(100, 1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def step():
    optimizer.zero_grad()
    model(torch.randn(3, 100)).square().mean().backward()
    optimizer.step()


def told(line):
    print(line, flush=True)
    sys.stdin.readline()


with atoll.join() as session:
    session.prepare(model, optimizer)
    step()
    session.save("checkpoint")
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    told("saved")
    step()
    try:
        session.save("checkpoint")
        told("saved")
    except CheckpointError as error:
        told(str(error))
    session.load("checkpoint")
    assert all(map(torch.equal, model.parameters(), saved))
    told("loaded")
    step()
    session.save("checkpoint")
    told("saved")
"""


def test_a_checkpoint_that_cannot_be_saved_leaves_the_one_before(disk: SmallDisk) -> None:
    """It takes 1.2 MB."""
    with subprocess.Popen(
        disk.inside(sys.executable, "-c", f"import os\nos.chdir({str(disk.where)!r})\n{SAVING}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def next_line(*before: Callable[[], None]) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            for act in before:
                act()
                process.stdin.write("\n")
                process.stdin.flush()
            return process.stdout.readline().strip()

        assert next_line() == "saved"
        said = next_line(lambda: disk.fill(leave=300 * 2**10))
        assert said == "checkpoint: cannot write the checkpoint: No space left on device"
        assert next_line(lambda: None) == "loaded"
        assert next_line(disk.make_room) == "saved"
        assert next_line(lambda: None) == ""
        assert process.wait(DEADLINE) == 0
    assert [path.name for path in disk.folder.iterdir()] == ["checkpoint"]


RECORDED = """
import os, pathlib, sys, time
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    while not pathlib.Path("enough").exists():
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        print("step", session.iteration, "x" * 500, flush=True)
        time.sleep(0.005)
        pathlib.Path("steps").write_text(str(session.iteration))
if "fails" in sys.argv:
    raise ValueError("the script's own mistake")
"""


def start_run(disk: SmallDisk, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`atoll run` in the disk's namespace; what it says goes elsewhere."""
    (folder / "train.py").write_text(RECORDED)
    code = f"import os; os.chdir({str(folder)!r})"  # a namespace is entered at its root
    run = ["run", "--workers", "1", "--set", f"run.directory={disk.where / 'run'}", *arguments]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            disk.inside(sys.executable, "-c", f"{code}; from atoll.cli.app import main; main()", *run),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=said,
        )


def steps_in(folder: Path) -> int:
    path = folder / "steps"
    return int((path.read_text() if path.exists() else "") or "0")


def run_without_room(disk: SmallDisk, tmp_path: Path, steps: int, *arguments: str) -> tuple[int, str]:
    """The status of a run that makes so many steps on a full disk, and what it says."""
    process = start_run(disk, tmp_path, *arguments)
    try:
        wait_for(lambda: steps_in(tmp_path) > 5, "a few steps")
        disk.fill()
        full = steps_in(tmp_path)
        wait_for(lambda: steps_in(tmp_path) > full + steps, "steps without records")
        (tmp_path / "enough").touch()
        return process.wait(DEADLINE), (tmp_path / "said").read_text()
    finally:
        process.kill()
        process.wait(DEADLINE)


def test_a_run_on_a_disk_that_stays_full_ends_as_its_script_does(disk: SmallDisk, tmp_path: Path) -> None:
    """Logs, journals, metrics and the picture cannot be written; what failed first is known all the same."""
    status, err = run_without_room(disk, tmp_path, 300, "train.py", "fails")
    assert status == 1, err
    made = steps_in(tmp_path)
    assert 'train.py", line' in err
    assert "ValueError: the script's own mistake" in err
    assert "worker 0 ended with ValueError" in err.splitlines()[-1]
    assert f"{made:,} steps of {3 * made:,} samples" in err
    assert err.count("the run goes on, and events are missing in its records") == 1
    assert err.count("and what worker 0 prints is missing there") == 1
    assert re.search(r"missing in .*: .*\d+ events of worker 0, .* that worker 0 printed", err)
    assert json.loads((disk.folder / "run" / "summary.json").read_text())["steps"] == made


def test_a_served_run_goes_on_without_records_and_without_its_shards_journal(
    disk: SmallDisk, tmp_path: Path
) -> None:
    status, err = run_without_room(disk, tmp_path, 200, "--strategy", "server", "train.py")
    assert status == 0, err
    assert re.search(r"atoll: warning: shard 0 cannot write its journal .*; it goes on without one", err)
    assert err.count("shard 0 cannot write its journal") <= 1 + err.count("its journal is written again")
    assert re.search(r"missing in .*: .*\d+ events of worker 0, .* that worker 0 printed", err)
    made = steps_in(tmp_path)
    assert f"{made:,} steps of {3 * made:,} samples" in err


def test_a_worker_trains_on_without_its_records(disk: SmallDisk, tmp_path: Path) -> None:
    process = start_run(disk, tmp_path, "train.py")

    def steps() -> int:
        return steps_in(tmp_path)

    try:
        wait_for(lambda: steps() > 5, "a few steps")
        disk.fill()
        full = steps()
        wait_for(lambda: steps() > full + 400, "steps without records")
        disk.make_room()
        room = steps()
        wait_for(lambda: steps() > room + 200, "steps with records")
        (tmp_path / "enough").touch()
        process.wait(DEADLINE)
        err = (tmp_path / "said").read_text()
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.wait(DEADLINE)
    assert "Traceback" not in err
    assert re.search(r"0\.jsonl: \d+ events before this one are missing: the disk was full", err)
    logs = [path.read_text() for path in (disk.folder / "run" / "logs").rglob("*") if path.is_file()]
    assert any("events were lost" in log for log in logs)  # the worker's own word, at its end
    events = list(JournalReader(disk.folder / "run" / "workers" / "0.jsonl").read())
    told = [event.iteration for event in events if isinstance(event, StepDone)]
    assert told == sorted(set(told))
    assert len(told) + 300 <= told[-1]
    assert json.loads((disk.folder / "run" / "summary.json").read_text())["steps"] == told[-1]
    assert re.search(r"missing in .*: .*\d+ events of worker 0, .* that worker 0 printed", err)
