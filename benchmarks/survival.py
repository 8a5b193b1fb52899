"""(g) A worker is killed every few seconds: Atoll's ring and torchft's DistributedDataParallel, side by side.

    python benchmarks/survival.py [--quick] [--torchft PYTHON]

Three workers on Gloo train the same small model as fast as they can (benchmarks/survival_worker.py). Every
ten seconds one of them, drawn anew, is killed with SIGKILL and started again at once; who ends by itself is
started again too. The systems take turns, in a new random order each time. PYTHON is an interpreter in whose
environment torchft 0.2 is installed beside the same torch; without one, Atoll runs alone.

Measured for each kill: the longest time in which no step was made until the next kill (`stall`), and how long
it took until a step was made with the killed worker's successor in it (`back`), which has its start in it:
Python and torch are imported anew. For each run: the steps that the model has at the end, against what the
speed before the first kill would have made of the time (`lost`). Parameters must be equal on all workers
after each step; what differs is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from atoll.core.errors import DeadlineError
from common import options, output_folder, write_results

WORKERS = 3
KILLS, QUICK_KILLS = 5, 1  # of a run
EVERY = 10.0  # seconds between kills, and before the first
ROUNDS, QUICK_ROUNDS = 4, 1
START_SECONDS = 120.0  # for all workers to be in
HOLD_SECONDS = 10.0  # for a killed process to be gone
LOOK_SECONDS = 0.02
TOGETHER = 1.0  # seconds between what two workers write of one step
WORKER = Path(__file__).with_name("survival_worker.py")
ATOLL = "Atoll, ring"
# name -> system of the worker, milliseconds of silence that the lighthouse bears (5000 is its default)
TORCHFT = {
    "torchft 0.2.0": ("torchft", 5000),
    "torchft 0.2.0, its hook mended": ("torchft-mended", 5000),
    "torchft 0.2.0, mended, silence of 1 s": ("torchft-mended", 1000),
}


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: `time` is in seconds since the run's beginning."""

    time: float
    worker: int
    stall: float  # seconds
    back: float | None  # seconds; None: not before the next kill


@dataclass
class Outcome:
    """One run of one system."""

    system: str
    steps_per_second: float  # before the first kill
    seconds: float  # measured, from the first step of all workers on
    steps: int  # that the model had more at the end than at the beginning
    lost: float  # steps, for each kill
    ended: int  # workers that ended by themselves, and were started again
    unequal: int  # steps after which workers had unlike parameters
    kills: list[Kill]
    made: list[tuple[float, int]] = field(default_factory=list)  # (time, step), for the picture


# -- processes ---------------------------------------------------------------------------------------------


class Workers:
    """Three workers, each started again when it has ended, while entered."""

    def __init__(self, python: str, system: str, environment: dict[str, str], folder: Path) -> None:
        self.log = folder / "steps.jsonl"
        self.ended = 0
        self._command = [python, str(WORKER), system]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Workers:
        for rank in range(WORKERS):
            self._start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(HOLD_SECONDS)

    def _start(self, rank: int) -> None:
        with (self._folder / f"worker-{rank}.log").open("ab") as said:
            self._processes[rank] = subprocess.Popen(
                [*self._command, str(rank), str(self.log)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def kill(self, rank: int) -> tuple[float, int]:
        """SIGKILL, and a successor; gives when, and the process id of the successor."""
        process, now = self._processes[rank], time.monotonic()
        process.kill()
        process.wait(HOLD_SECONDS)
        self._start(rank)
        return now, self._processes[rank].pid

    def watch(self, until: float) -> None:
        """Start who ends again, until this monotonic time."""
        while time.monotonic() < until:
            for rank, process in list(self._processes.items()):
                if process.poll() is not None:
                    self.ended += 1
                    self._start(rank)
            time.sleep(LOOK_SECONDS)

    def events(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        lines = self.log.read_bytes().split(b"\n")[:-1]  # a killed worker may leave a torn line
        return [json.loads(line) for line in lines if line.endswith(b"}")]

    def await_all(self) -> float:
        """Return when a step was made by all workers together; gives when that was."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            self.watch(time.monotonic() + 0.5)
            whole = [e for e in self.events() if e["event"] == "made" and e["world"] == WORKERS]
            if whole:
                return float(whole[0]["time"])
        raise DeadlineError(
            f"no step of all {WORKERS} workers within {START_SECONDS:g} s; see {self._folder}"
        )


@contextlib.contextmanager
def service(command: Sequence[str], said: Path) -> Iterator[None]:
    """A process, while entered."""
    with said.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(HOLD_SECONDS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def atoll_workers(folder: Path) -> Iterator[Workers]:
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "atoll.cli.app", "hub", "--workers", str(WORKERS), "--shards", "0"]
    command += ["--listen", address, "--directory", str(folder / "hub")]
    with (
        service(command, folder / "hub.log"),
        Workers(sys.executable, "atoll", {"ATOLL_HUB": address}, folder) as workers,
    ):
        yield workers


@contextlib.contextmanager
def torchft_workers(python: str, system: str, silence: int, folder: Path) -> Iterator[Workers]:
    port = free_port()
    command = [str(Path(python).parent / "torchft_lighthouse"), "--min_replicas", "1"]
    command += ["--bind", f"127.0.0.1:{port}", "--join_timeout_ms", "10000"]  # as torchft's README has it
    command += ["--heartbeat_timeout_ms", str(silence)]
    environment = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    with (
        service(command, folder / "lighthouse.log"),
        Workers(python, system, environment, folder) as workers,
    ):
        yield workers


# -- a run -------------------------------------------------------------------------------------------------


def measure(name: str, entered: contextlib.AbstractContextManager[Workers], kills: int, seed: int) -> Outcome:
    """One run with `kills` kills, of workers drawn from `seed`."""
    drawn = random.Random(seed)
    struck: list[tuple[float, int, int]] = []  # when, who, the successor's process id
    with entered as workers:
        begin = workers.await_all()
        for number in range(kills):
            workers.watch(begin + EVERY * (number + 1))
            rank = drawn.randrange(WORKERS)
            now, successor = workers.kill(rank)
            struck.append((now, rank, successor))
        end = begin + EVERY * (kills + 1)
        workers.watch(end)
        events, ended = workers.events(), workers.ended
    return outcome(name, [e for e in events if e["time"] <= end], begin, end, struck, ended)


def outcome(
    name: str,
    events: list[dict[str, Any]],
    begin: float,
    end: float,
    struck: list[tuple[float, int, int]],
    ended: int,
) -> Outcome:
    """What the events of a run say."""
    made = sorted((e for e in events if e["event"] == "made" and e["time"] >= begin), key=lambda e: e["time"])
    first = struck[0][0]
    before = [e for e in made if e["time"] < first]
    speed = (before[-1]["step"] - before[0]["step"]) / (before[-1]["time"] - before[0]["time"])
    steps = made[-1]["step"] - made[0]["step"]
    times = [when for when, _, _ in struck]
    kills = [
        _kill(made, begin, when, until, rank, successor)
        for (when, rank, successor), until in zip(struck, [*times[1:], end], strict=True)
    ]
    return Outcome(
        system=name,
        steps_per_second=speed,
        seconds=end - begin,
        steps=steps,
        lost=(speed * (end - begin) - steps) / len(kills),
        ended=ended,
        unequal=_unequal(made),
        kills=kills,
        made=[(round(e["time"] - begin, 3), e["step"]) for e in made[:: max(1, len(made) // 1000)]],
    )


def _unequal(made: list[dict[str, Any]]) -> int:
    """Steps that workers made together, and after which their parameters differ. A step that is made again,
    seconds later, by workers that began anew is another step."""
    latest: dict[int, dict[str, Any]] = {}
    unequal: set[int] = set()
    for event in made:
        before = latest.get(event["step"])
        if before is not None and event["time"] - before["time"] < TOGETHER and before["sum"] != event["sum"]:
            unequal.add(event["step"])
        latest[event["step"]] = event
    return len(unequal)


def _kill(
    made: list[dict[str, Any]], begin: float, when: float, until: float, rank: int, successor: int
) -> Kill:
    after = [e for e in made if when <= e["time"] < until]
    marks = [when, *(e["time"] for e in after), until]
    back = [e["time"] - when for e in after if e["pid"] == successor and e["world"] == WORKERS]
    return Kill(
        time=when - begin,
        worker=rank,
        stall=max(later - sooner for sooner, later in pairwise(marks)),
        back=min(back, default=None),
    )


# -- results -----------------------------------------------------------------------------------------------


def case(name: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """All runs of a system, in numbers."""
    kills = [kill for each in outcomes for kill in each.kills]
    back = [kill.back for kill in kills if kill.back is not None]
    return {
        "name": name,
        "runs": len(outcomes),
        "kills": len(kills),
        "steps_per_second": median(each.steps_per_second for each in outcomes),
        "stall_median": median(kill.stall for kill in kills),
        "stall_most": max(kill.stall for kill in kills),
        "back_median": median(back) if back else None,
        "not_back": len(kills) - len(back),
        "lost_steps_for_each_kill": median(each.lost for each in outcomes),
        "lost_seconds_for_each_kill": median(each.lost / each.steps_per_second for each in outcomes),
        "ended_by_themselves": sum(each.ended for each in outcomes),
        "unequal_steps": sum(each.unequal for each in outcomes),
        "each": [{**asdict(each), "made": None} for each in outcomes],
    }


def line(case: dict[str, Any]) -> str:
    back = f"{case['back_median']:.1f} s" if case["back_median"] is not None else "never"
    return (
        f"{case['name']}: {case['kills']} kills at {case['steps_per_second']:.0f} steps/s: no step for "
        f"{case['stall_median']:.2f} s (at most {case['stall_most']:.2f} s), back after {back} "
        f"({case['not_back']} not), {case['lost_steps_for_each_kill']:.0f} steps lost for each kill "
        f"({case['lost_seconds_for_each_kill']:.2f} s), {case['ended_by_themselves']} workers ended by "
        f"themselves, {case['unequal_steps']} steps with unlike parameters"
    )


def draw(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    """Above, each system's first run: steps over time, and the kills. Below, every kill's stall."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (over_time, stalls) = plt.subplots(
        2, 1, figsize=(9, 7), layout="constrained", height_ratios=(3, 2)
    )
    colours = ["#2b6ca3", "#b5651d", "#5a8f4a", "#8a5a9e"]
    scatter = random.Random(0)
    for row, (name, runs) in enumerate(outcomes.items()):
        colour, first = colours[row % len(colours)], runs[0]
        base = first.made[0][1]
        over_time.plot(
            [at for at, _ in first.made],
            [(step - base) / first.steps_per_second for _, step in first.made],
            color=colour, label=name, linewidth=1.5,
        )  # fmt: skip
        for kill in first.kills:
            over_time.axvline(kill.time, color=colour, linewidth=0.6, linestyle=":")
        all_stalls = [kill.stall for each in runs for kill in each.kills]
        heights = [-row + scatter.uniform(-0.2, 0.2) for _ in all_stalls]
        stalls.scatter(all_stalls, heights, s=14, color=colour, linewidths=0)
    over_time.set_xlabel("seconds; dotted: a worker is killed")
    over_time.set_ylabel("steps, in seconds of\nundisturbed training")
    over_time.legend(frameon=False)
    stalls.set_yticks([-row for row in range(len(outcomes))], list(outcomes))
    stalls.set_xscale("log")
    stalls.set_xlabel("seconds without a step after a kill")
    for axes in (over_time, stalls):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A worker of three is killed every ten seconds")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="an interpreter that has torchft")
    parser.add_argument("--without-atoll", action="store_true", help="torchft alone")
    args = parser.parse_args()
    kills, rounds = (QUICK_KILLS, QUICK_ROUNDS) if args.quick else (KILLS, ROUNDS)
    systems = ([] if args.without_atoll else [ATOLL]) + (list(TORCHFT) if args.torchft else [])
    if not systems:
        parser.error("--without-atoll leaves nothing; give --torchft PYTHON")
    order = random.Random(1)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in systems}
    for turn in range(rounds):
        for name in order.sample(systems, len(systems)):
            with tempfile.TemporaryDirectory() as folder:
                if name == ATOLL:
                    entered = atoll_workers(Path(folder))
                else:
                    system, silence = TORCHFT[name]
                    entered = torchft_workers(args.torchft, system, silence, Path(folder))
                outcomes[name].append(measure(name, entered, kills, seed=turn))
    cases = [case(name, runs) for name, runs in outcomes.items()]
    folder = output_folder(args)
    path = write_results("survival", folder, cases, args.quick)
    draw(outcomes, path.with_suffix(".png"))
    for each in cases:
        print(line(each))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
