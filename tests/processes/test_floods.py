"""`atoll run` under floods of output, with readers that are slow, stopped and gone.

The workers are launches of their own and import no torch: what is tested is the command.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, cast

import pytest
from own_events import ALONE, PREAMBLE
from run_command import DEADLINE, Command, wait_for

from atoll.core.outlet import STALLED_SECONDS
from atoll.launch.run import STOP_SECONDS

MOST_MEMORY = 100 << 20
EACH = 12 << 20  # bytes of each kind
FLOOD = f"""
step(1)
if RANK == 0:
    print("the first line", flush=True)
    for block in (
        b"x" * 9 + b"\\n", b"\\n", b"\\r 45%|####      | 123/456 [00:01<00:03, 88it/s]", bytes(range(256)),
        b"\\x1b[31mred\\n", b"x" * (10 << 20) + b"\\n", b"no end",
    ):
        block, left = block * max(1, 65536 // len(block)), {EACH}
        while left: left -= os.write(1, block[:left])
    Path("flooded").touch()
"""
# Output that goes on until the test has read what the launcher says of it. A launcher that comes late to a
# flood leaves most of it out, and writes so little that no reader holds it up.
FLOW = """
if RANK == 0:
    while not Path("told").exists():
        os.write(1, b"\\n" + b"flow " * 800)
        time.sleep(0.002)
"""
FIRST = re.compile(r"the first line\n|atoll: .* are left out here; see ")  # by when the launcher comes to it


def read_until(errors: IO[str], words: str) -> str:
    """What the run says on the standard error, up to the line that has `words`."""
    said = ""
    while words not in said:
        line = errors.readline()
        assert line, said
        said += line
    return said


def memory_of(process: subprocess.Popen[str]) -> int:
    """The most memory that the process has ever held."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) << 10 if found else 0  # it has just ended


def test_a_death_and_ctrl_c_beside_a_terminal_that_stands_still(command: Command) -> None:
    """As after Ctrl-S. The death is known at once, as is Ctrl-C, and the logs have every byte."""
    terminal, its_end = pty.openpty()
    script = (
        PREAMBLE
        + FLOOD
        + "wait_for('flooded')\n"
        + "if RANK == 1:\n"
        + "    Path('died').write_text(str(time.time()))\n    os.kill(os.getpid(), 9)\n"
        + "try:\n    time.sleep(600)\n"
        + "except KeyboardInterrupt:\n    Path(f'stopped-{RANK}').write_text(str(time.time()))\n    raise\n"
    )
    process = command.start(script, options=ALONE, output=its_end, errors=its_end)
    os.close(its_end)
    try:
        wait_for((command.directory / "flooded").exists, "the flood's end")
        assert memory_of(process) < MOST_MEMORY
        journal = command.directory / "run" / "workers" / "1.jsonl"
        wait_for(lambda: journal.exists() and "killed" in journal.read_text(), "word of the death")
        known = next(json.loads(line) for line in journal.read_text().splitlines() if "killed" in line)
        died = float((command.directory / "died").read_text())
        assert known["time"] - died < 1.0 + 4.0 * _load()
        asked = time.time()
        process.send_signal(signal.SIGINT)
        wait_for((command.directory / "stopped-0").exists, "the worker to hear of it")
        assert float((command.directory / "stopped-0").read_text()) - asked < 1.0 + 4.0 * _load()
        assert process.wait(DEADLINE) == 130
    finally:
        os.close(terminal)
    log = command.directory / "run" / "logs" / "worker-0.log"
    assert log.stat().st_size == 7 * EACH + len("the first line\n")
    assert "steps" in command.summary()


def test_a_reader_that_ends_after_the_first_line(command: Command) -> None:
    """As `| head -1`."""
    process = command.start(PREAMBLE + FLOOD + FLOW + "say(Finished, iteration=1)\n", options=ALONE)
    output, errors = cast(IO[str], process.stdout), cast(IO[str], process.stderr)
    first = output.readline()
    assert FIRST.match(first), first
    output.close()
    process.stdout = None
    told = "warning: the standard output cannot be written (its reader has ended); the run goes on, and what"
    said = read_until(errors, told)
    memory = memory_of(process)
    (command.directory / "told").touch()
    said += errors.read()
    assert process.wait(DEADLINE) == 0, said
    assert said.count(told) == 1
    assert said.rstrip().splitlines()[-1].startswith("atoll: see run: summary.json")
    assert any("cannot be written" in str(event) for event in command.summary()["events"])
    assert 0 < memory < MOST_MEMORY


def test_a_reader_that_pauses(command: Command) -> None:
    """As `| (sleep 50; cat)`: the training goes on, and the reader gets the end of it."""
    end = "print('\\nthe last words', flush=True)\nstep(2)\nsay(Finished, iteration=2)\n"
    process = command.start(PREAMBLE + FLOOD + FLOW + end, options=ALONE)
    told = f"the standard output has not been read for {STALLED_SECONDS:g} s; the run goes on"
    said = read_until(cast(IO[str], process.stderr), told)
    (command.directory / "told").touch()
    out, rest = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, rest
    assert FIRST.match(out), out[:200]
    assert out.splitlines()[-1] == "the last words"
    assert "left out here; see run/logs/worker-0.log" in out
    assert (said + rest).count("has not been read for") == 1
    assert json.loads((command.directory / "run" / "summary.json").read_text())["steps"] == 2


ENDLESS = """
def flood(signum=None, frame=None):
    if signum: Path(f"heard-{signum}").write_text(str(time.time()))
signal.signal(signal.SIGINT, flood)
signal.signal(signal.SIGTERM, flood)
print("the first line", flush=True)
if RANK == 1:
    wait_for("die")
    Path("died").write_text(str(time.time()))
    os.kill(os.getpid(), 9)
for block in itertools.cycle((b"x" * 9 + b"\\n", b"\\n", b"\\r 45%|####    |", bytes(range(256)))):
    os.write(1, block * (16384 // len(block)))
    Path("alive").touch()
    time.sleep(0.001)  # some megabytes a second: the log keeps all of it
"""


@pytest.mark.parametrize(
    ("signum", "reads"),
    [
        pytest.param(signal.SIGINT, True, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, False, id="SIGTERM beside a stopped reader"),
        pytest.param(signal.SIGINT, False, id="Ctrl-C beside a stopped reader", marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, True, id="SIGTERM", marks=pytest.mark.soak),
    ],
)
def test_a_death_a_signal_and_a_deadline_while_output_floods(
    command: Command, signum: signal.Signals, reads: bool
) -> None:
    """Each is acted on within a second. The worker takes no notice of the signal, so the deadline for its
    end passes: of Ctrl-C, and run.grace."""
    script = PREAMBLE + "import itertools, signal\n" + ENDLESS
    process = command.start(script, options=[*ALONE, "--set", "run.grace=3s"])
    output = cast(IO[str], process.stdout)
    reader = threading.Thread(target=lambda: all(iter(lambda: output.read(1 << 16), "")), daemon=True)
    folder = command.directory

    def time_in(name: str) -> float:
        wait_for(lambda: (folder / name).exists() and (folder / name).read_text(), name)
        return float((folder / name).read_text())

    try:
        if reads:
            reader.start()
        journal = folder / "run" / "workers" / "1.jsonl"
        log = folder / "run" / "logs" / "worker-0.log"
        wait_for(lambda: log.exists() and log.stat().st_size > 4 << 20, "the flood")
        (folder / "die").touch()
        died = time_in("died")
        wait_for(lambda: "killed" in journal.read_text(), "word of the death")
        known = next(json.loads(line) for line in journal.read_text().splitlines() if "killed" in line)
        assert known["time"] - died < 1.0 + 4.0 * _load()
        asked = time.time()
        process.send_signal(signum)
        assert time_in(f"heard-{int(signum)}") - asked < 1.0 + 4.0 * _load()
        deadline = STOP_SECONDS if signum == signal.SIGINT else 3.0
        if not reads:
            reader.start()  # else the command would wait for it
        assert memory_of(process) < MOST_MEMORY
        assert process.wait(DEADLINE) == 128 + signum
        assert (folder / "alive").stat().st_mtime - asked - deadline < 1.0 + 4.0 * _load()
    finally:
        process.kill()
    said = cast(IO[str], process.stderr).read().splitlines()[-1]
    late = "SIGTERM; worker 0 was killed, for not ending within run.grace"
    assert said == f"atoll: stopped by {'Ctrl-C' if signum == signal.SIGINT else late}"


def _load() -> float:
    """Above 1 where other programs use the cores too."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
