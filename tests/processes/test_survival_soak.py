"""A hundred faults in ten minutes of a run: all contributions are accounted for, and nothing leaks.

The model counts. It has a parameter for each sample, whose gradient in a batch is 1 for the batch's samples,
and Adam without memory (betas 0) takes exactly 1 off in each step in which a gradient is there. So at the end
a parameter is minus the number of steps in which its sample counted, whatever was weighed how. Under asp a
step has contributions of several workers, who may be in two epochs: so a sample has parameters in turns.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transports import LINK, LINK_TABLE

from atoll.core.errors import DeadlineError, GivenUpError
from support.supervisor import Supervisor, leaks

SHARDS = 2
# A parameter server's, a ring through a hub, two groups with a server between, and two sites with one.
WORKERS = {"asp": 3, "bsp": 3, "ring": 3, "groups": 4, "sites": 4}
MODES = list(WORKERS)
SITES = ("paris", "berlin")  # of worker 0 and every second one, and of the others
SAMPLES, BATCH = 600, 4
TURNS = 3  # parameters of a sample: nobody is so many epochs ahead of another
FAULTS, SECONDS = 100, 600.0
STOPS = (1.0, 3.0)  # seconds: all of it is borne
EPOCHS_AHEAD = 3  # how long before its end the run is told of it: no worker is so far ahead of another
START_SECONDS, BACK_SECONDS, END_SECONDS = 120.0, 60.0, 180.0
TOGETHER_SECONDS = 12.0  # before several are killed at once: by then standbys are in sync, and on disk
# What a promotion adds to a standby's descriptors: a connection to the next standby; one to shard 0, or
# those of the other shards; the workers'; and pyzmq's keeper of what is sent, with the first 64 KiB.
PROMOTION = 4 + 4 + max(WORKERS.values()) + 7
OF_GROUP = 16  # descriptors of a worker in a larger group than before: two more members' connections
# Of all journals and snapshots, with a process for each shard: two segments of each, and one has 10 s of
# contributions of a few kilobytes, and the log's lines.
DISK_BYTES = 64 * 2**20
ATOLL = [sys.executable, "-m", "atoll.cli.app"]
SERVES, TRAINS = "listens at ", "trains from iteration "  # said by hub and shards, and workers, as they begin

SCRIPT = f"""
import itertools, json, os, sys, time
from pathlib import Path
import torch
from torch import nn
import atoll
from atoll.core.config import Config, LinkOptions, Run, Sync

folder, mode, number = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros({TURNS}, {SAMPLES}))

    def forward(self, indices, epochs):
        return self.counts[epochs % {TURNS}, indices] * (epochs >= 0)

def epochs_of(indices, epoch):
    # What a dead worker had leased of an epoch comes with the next one, and may be in one step with the same
    # sample of that one. Below 0: members of a group with fewer samples than others fill their batches up.
    if mode in ("bsp", "ring"):
        return torch.full((len(indices),), epoch)
    held = [each for each, start, stop in sampler._held for _ in range(start, stop)]
    return torch.tensor(held[:len(indices)])

def last_epoch():
    told = folder / "last-epoch"
    return int(told.read_text()) if told.exists() else sys.maxsize

model = Counting()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.0, 0.0), eps=1e-30)
data = torch.arange({SAMPLES})
strategy, consistency = {{
    "ring": ("ring", "bsp"), "groups": ("ps-hra", "asp"), "sites": ("server", "asp")
}}.get(mode, ("server", mode))
link = LinkOptions(transport="tcp" if mode == "ring" else "{LINK.transport}")
config = Config(run=Run(strategy=strategy), sync=Sync(consistency=consistency, timeout="120s"), link=link)
notes = os.open(folder / f"notes-{{number}}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(what, iteration, epoch, indices):
    line = json.dumps([what, os.getpid(), iteration, epoch, indices.tolist()])
    os.write(notes, line.encode() + b"\\n")

with atoll.join(config) as session:
    session.prepare(model, optimizer)
    sampler = session.sampler(data, seed=7)
    session.resume()
    print(f"{TRAINS}{{session.iteration}}, after {{time.process_time():.1f}} s of CPU time", flush=True)
    loader = torch.utils.data.DataLoader(data, batch_size={BATCH}, sampler=sampler)
    for epoch in itertools.count(sampler.epoch):
        if epoch >= last_epoch():
            break
        for indices in loader:
            iteration, epochs = session.iteration, epochs_of(indices, epoch)
            optimizer.zero_grad()
            note("tried", iteration, epoch, indices[epochs >= 0])
            model(indices, epochs).sum().backward()
            optimizer.step()
            note("done", iteration, epoch, indices[epochs >= 0])
            time.sleep(0.01)
    session.save(folder / "end")
"""


# -- the accounts ------------------------------------------------------------------------------------------


@dataclass
class Notes:
    """What the workers wrote: how often each sample was tried, and how often `step()` returned with it."""

    tried: Counter[int] = field(default_factory=Counter)
    done: Counter[int] = field(default_factory=Counter)
    epoch: int = 0  # the latest
    pids: set[int] = field(default_factory=set)


def read_notes(folder: Path) -> Notes:
    notes = Notes()
    for path in folder.glob("notes-*"):
        for line in path.read_bytes().split(b"\n"):
            if not line.endswith(b"]"):
                continue  # a killed worker's last
            what, pid, _, epoch, indices = json.loads(line)
            (notes.tried if what == "tried" else notes.done).update(indices)
            notes.epoch = max(notes.epoch, epoch)
            notes.pids.add(pid)
    return notes


def account(counts: Sequence[float], notes: Notes, epochs: int, every: bool, fills: int = 0) -> list[str]:
    """What is wrong with the final parameters, one line each.

    A contribution whose `step()` returned must be in them, and nothing that was never tried. No sample may
    count twice in an epoch, but for `fills` in all; with `every` each must count once in each of the
    `epochs`.
    """
    wrong = []
    surplus = sum(max(0, round(-value) - epochs) for value in counts)
    if surplus > fills > 0:
        wrong.append(f"{surplus} samples counted twice in an epoch, and at most {fills} fill up epochs")
    for sample, value in enumerate(counts):
        counted = round(-value)
        if abs(counted + value) > 1e-3:
            wrong.append(f"sample {sample}: {value} is no whole number of steps")
        if counted < notes.done[sample]:
            wrong.append(f"sample {sample}: counted {counted} times, acknowledged {notes.done[sample]} times")
        if counted > notes.tried[sample]:
            wrong.append(f"sample {sample}: counted {counted} times, tried {notes.tried[sample]} times")
        if counted > epochs and not fills:
            wrong.append(f"sample {sample}: counted {counted} times in {epochs} epochs")
        if every and counted < epochs:
            wrong.append(f"sample {sample}: counted {counted} times of {epochs} epochs")
    return wrong


def notes_of(tried: dict[int, int], done: dict[int, int]) -> Notes:
    return Notes(Counter(tried), Counter(done))


@pytest.mark.parametrize(
    ("counts", "tried", "done", "every", "said"),
    [
        ([-2.0, -2.0], {0: 3, 1: 2}, {0: 2, 1: 1}, True, None),
        ([-2.0, -1.0], {0: 2, 1: 2}, {0: 2, 1: 1}, False, None),
        ([-2.0, -1.0], {0: 2, 1: 2}, {0: 2, 1: 1}, True, "sample 1: counted 1 times of 2 epochs"),
        ([-1.0, -2.0], {0: 2, 1: 2}, {0: 2, 1: 2}, False, "sample 0: counted 1 times, acknowledged 2 times"),
        ([-3.0, -2.0], {0: 3, 1: 2}, {0: 2, 1: 2}, True, "sample 0: counted 3 times in 2 epochs"),
        ([-2.0, -2.0], {0: 1, 1: 2}, {0: 1, 1: 2}, True, "sample 0: counted 2 times, tried 1 times"),
        ([-1.5, -2.0], {0: 2, 1: 2}, {}, False, "sample 0: -1.5 is no whole number of steps"),
    ],
)
def test_the_accounts_find_what_is_lost_doubled_or_invented(
    counts: list[float], tried: dict[int, int], done: dict[int, int], every: bool, said: str | None
) -> None:
    assert account(counts, notes_of(tried, done), 2, every) == ([said] if said else [])


# -- the run -----------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def shard_names(mode: str, replicas: int) -> dict[str, tuple[str, str]]:
    """The parts that are shards, and which, as `atoll server` has it. Shard 1 has no chunks, and so less
    memory: it is judged apart."""
    seconds, shards = ("", " second")[:replicas], range(0 if mode == "ring" else SHARDS)
    names = {f"shard-{index}{second}": ("--shard", str(index)) for second in seconds for index in shards}
    return names | {f"site {site}": ("--site", site) for site in SITES if mode == "sites"}


def start(parts: Supervisor, folder: Path, mode: str, script: str, replicas: int = 1) -> None:
    """Hub, shards and workers, each at an address that its successor has again."""
    names = shard_names(mode, replicas)
    hub, *shards = (f"tcp://127.0.0.1:{port}" for port in free_ports(1 + len(names)))
    quiet = {"OMP_NUM_THREADS": "1"}
    serving = [
        "hub",
        "--workers",
        str(WORKERS[mode]),
        "--shards",
        str(0 if mode == "ring" else SHARDS),
        "--run",
        "soak",
    ]
    serving += ["--listen", hub, "--directory", str(folder / "hub"), "--until-done"]
    serving += ["--replicas", str(replicas)]
    if mode == "groups":
        serving += ["--groups", "2", "--group-by", "speed"]
    for site in SITES if mode == "sites" else ():
        serving += ["--site", f"{site}={WORKERS[mode] // len(SITES)}"]
    parts.add("hub", [*ATOLL, *serving], quiet, begins=SERVES)
    config = folder / "link.toml"
    config.write_text("[run]\nstrategy = 'server'\n" + LINK_TABLE)
    for (name, which), address in zip(names.items(), shards, strict=True):
        shard = ["server", "--hub", hub, *which, "--listen", address]
        shard += ["--directory", str(folder / name.replace(" ", "-")), "--snapshot-seconds", "10"]
        shard += ["--config", str(config)] if "--site" in which else []
        parts.add(name, [*ATOLL, *shard], quiet, begins=SERVES)
    path = folder / "train.py"
    path.write_text(script)
    for rank in range(WORKERS[mode]):
        worker = [sys.executable, str(path), str(folder), mode, str(rank)]
        place = {"ATOLL_SITE": SITES[rank % len(SITES)]} if mode == "sites" else {}
        parts.add(f"worker {rank}", worker, {**quiet, "ATOLL_HUB": hub, **place}, begins=TRAINS)


class Progress:
    """Whether training goes on: by the bytes of the workers' notes, which only grow."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self.workers = folder, workers

    def of(self, worker: int) -> int:
        path = self._folder / f"notes-{worker}"
        return path.stat().st_size if path.exists() else 0

    def still(self) -> Callable[[], list[str]]:
        """The workers that have written nothing since this was called."""
        before = [self.of(worker) for worker in range(self.workers)]
        return lambda: [f"worker {w}" for w, each in enumerate(before) if self.of(w) <= each]


def strike(parts: Supervisor, progress: Progress, shards: Sequence[str], drawn: random.Random) -> float:
    """One fault, and the wait until every worker goes on; gives the seconds that this took."""
    name = drawn.choice([*(f"worker {rank}" for rank in range(progress.workers)), *shards, "hub"])
    began = time.monotonic()
    if drawn.random() < 0.5:
        parts.kill(name)
        parts.wait_for(lambda: parts.running(name), f"{name} to be started again", BACK_SECONDS)
    else:
        parts.stop(name, drawn.uniform(*STOPS))
        parts.wait_for(lambda: parts.running(name), f"{name} to go on", BACK_SECONDS)
    wait_for_everyone(parts, progress, name)
    return time.monotonic() - began


def strike_together(parts: Supervisor, progress: Progress, names: Sequence[str]) -> float:
    """Kill all of these at once, and wait until every worker goes on; gives the seconds that this took."""
    began = time.monotonic()
    for name in names:
        parts.kill(name)
    wait_for_everyone(parts, progress, " and ".join(names))
    return time.monotonic() - began


def wait_for_everyone(
    parts: Supervisor, progress: Progress, after: str, seconds: float = BACK_SECONDS
) -> None:
    still = progress.still()

    def is_over() -> bool:
        assert not parts.failures, parts.failures  # at once, and not when the time is over
        return not still()

    try:
        parts.wait_for(is_over, f"every worker to go on after {after}", seconds)
    except DeadlineError as error:
        raise DeadlineError(f"{error}: {', '.join(map(parts.state, still()))}") from None


def run(
    folder: Path,
    mode: str,
    faults: int,
    seconds: float,
    script: str = SCRIPT,
    replicas: int = 1,
    together: Sequence[Sequence[str]] = (),
) -> Supervisor:
    """The whole run, and all that is checked; gives the supervisor, for what it has seen. Those of `together`
    are killed at once, one group after the other, before the `faults` that are drawn."""
    drawn, progress = random.Random(f"{mode} {faults}"), Progress(folder, WORKERS[mode])
    shards = list(shard_names(mode, replicas))
    with Supervisor(folder / "logs", again=frozenset({GivenUpError.exit_status})) as parts:
        start(parts, folder, mode, script, replicas)
        wait_for_everyone(parts, progress, "the start", START_SECONDS)
        parts.usage.clear()  # who was there first held less, while the others started
        begin, slowest = time.monotonic(), 0.0
        for names in together:
            parts.pause(TOGETHER_SECONDS)
            slowest = max(slowest, strike_together(parts, progress, names))
        for number in range(faults):
            due = begin + number * seconds / max(1, faults)
            parts.pause(max(0.0, due - time.monotonic()))
            slowest = max(slowest, strike(parts, progress, shards, drawn))
        parts.pause(max(0.0, begin + seconds - time.monotonic()))
        last = read_notes(folder).epoch + EPOCHS_AHEAD
        (folder / "last-epoch.partial").write_text(str(last))
        (folder / "last-epoch.partial").rename(folder / "last-epoch")
        parts.wait_for(
            lambda: len(parts.finished) == 1 + len(shards) + WORKERS[mode],
            "the end of all parts",
            END_SECONDS,
        )
        assert not parts.failures, parts.failures
        assert not parts.left()
    assert len(parts.strikes) == faults + sum(map(len, together))
    assert parts.restarts == sum(not strike.seconds for strike in parts.strikes)
    if faults or not together:  # else there is too little of each life to judge by
        spared = {name.split(" ")[0]: PROMOTION for name in shards if replicas > 1}
        spared |= {"worker": OF_GROUP} if mode == "groups" else {}
        found = leaks(parts.usage, spared=spared)
        assert not found, found
    notes = read_notes(folder)
    (values,) = load_file(folder / "end" / "model.safetensors").values()
    # In step, workers make equally many batches: each deal of an epoch that does not go round is filled up.
    lives = len(notes.pids)  # a worker that is killed leaves, and enters again
    loose = mode in ("asp", "groups", "sites")
    fills = 0 if loose else (WORKERS[mode] - 1) * (1 + 2 * lives) * BATCH
    wrong = account(values.sum(0).tolist(), notes, last, every=loose, fills=fills)
    assert not wrong, "\n".join(wrong[:20])
    held = sum(path.stat().st_size for path in folder.glob("*/**/*") if path.is_file())
    assert held < DISK_BYTES * replicas, f"{held} bytes in {folder}"
    print(f"{mode}: {faults} faults, the slowest was over after {slowest:.1f} s; {last} epochs")
    return parts


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_without_faults(tmp_path: Path, mode: str) -> None:
    """The harness itself: what the one below finds is then of its faults."""
    run(tmp_path, mode, 0, 10.0)


LEAK = """
            import threading
            if number == "1" and iteration % 20 == 0:
                LEAKED
            time.sleep(0.01)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("leaked", "what"),
    [
        ("os.open(os.devnull, os.O_RDONLY)", "descriptors"),
        ("threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()", "threads"),
    ],
)
def test_a_worker_that_leaks_is_found(tmp_path: Path, leaked: str, what: str) -> None:
    """The harness itself: what it does not find is not there."""
    leaking = SCRIPT.replace("\n            time.sleep(0.01)\n", LEAK.replace("LEAKED", leaked))
    assert leaking != SCRIPT
    with pytest.raises(AssertionError, match=rf"worker 1 \(pid [0-9]+\): {what} grew from [0-9]+ to [0-9]+ "):
        run(tmp_path, "asp", 0, 45.0, leaking)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + START_SECONDS + END_SECONDS + 300)
@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_faults(tmp_path: Path, mode: str) -> None:
    run(tmp_path, mode, FAULTS, SECONDS)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + START_SECONDS + END_SECONDS + 300)
@pytest.mark.parametrize("mode", ["asp", "bsp"])
def test_faults_of_a_run_whose_shards_have_standbys(tmp_path: Path, mode: str) -> None:
    run(tmp_path, mode, FAULTS // 2, SECONDS / 2, replicas=2)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["asp", "bsp"])
def test_two_parts_at_once_of_a_run_whose_shards_have_standbys(tmp_path: Path, mode: str) -> None:
    first, second = "shard-0", "shard-0 second"
    together = [
        ("hub", first),
        (first, second),
        (second, "worker 1"),
        ("hub", first, second),
        ("hub", second),
    ]
    run(tmp_path, mode, 0, 0.0, replicas=2, together=together)
