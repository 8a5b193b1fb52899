"""All threads of a shard's process share one heap.

glibc keeps at most 64 MB of a thread's own heap. With such a heap each step of 100 MB takes a third longer
when ZeroMQ's thread happens to use it (docs/notes/server.md).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from run_command import DEADLINE, Command, wait_for

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another C library than glibc: nothing is set"
)

_PYTHON = [sys.executable, "-c", "from atoll.cli.app import main; main()"]
_HEAP = 64 * 2**20  # bytes: each heap of a thread's own lies at a multiple of this
# A worker trains two steps, then waits until standard input ends.
SCRIPT = """
import sys
import torch
import atoll
session = atoll.join()
model = torch.nn.Linear(512, 512)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
print("trained", flush=True)
if len(sys.argv) > 1:
    open(sys.argv[1]).read()
session.close()
"""
# The second thread allocates.
_TWO_THREADS = """
import threading
thread = threading.Thread(target=lambda: [bytearray(600) for _ in range(9)])
thread.start()
thread.join()
print(flush=True)
input()
"""


def heaps_of_threads(process: int) -> int:
    """Return how many heaps the process has beside the main one: memory in use at a multiple of 64 MiB, with
    the rest of the 64 MiB reserved."""
    spans = []
    for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+) (....) 00000000 00:00 0 *", line)
        if match is not None:
            spans.append((int(match[1], 16), int(match[2], 16), match[3]))
    return sum(
        used == "rw-p" and rest == "---p" and start % _HEAP == 0 and end == after and last == start + _HEAP
        for (start, end, used), (after, last, rest) in pairwise(spans)
    )


@pytest.fixture(autouse=True)
def glibc_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what whoever runs the tests has set: Atoll would leave that alone."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)


def test_a_heap_of_a_thread_is_seen() -> None:
    command = [sys.executable, "-c", _TWO_THREADS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert heaps_of_threads(process.pid) > 0
        process.communicate(b"\n", timeout=DEADLINE)


def test_of_a_run_on_one_machine(command: Command) -> None:
    waits = command.directory / "waits"
    os.mkfifo(waits)
    run = command.start(SCRIPT, str(waits), options=["--set", "run.strategy=server"])
    shards: list[psutil.Process] = []

    def shard_runs() -> bool:
        shards[:] = [process for process in command.alive() if "server-0" in process.cmdline()]
        return bool(shards) and command.steps() == 2

    wait_for(lambda: shard_runs() or run.poll() is not None, "two steps at the shard")
    assert [heaps_of_threads(shard.pid) for shard in shards] == [0]
    for _ in range(2):
        waits.write_text("")
    assert run.wait(DEADLINE) == 0


def test_of_a_run_on_several_machines(tmp_path: Path) -> None:
    address = tmp_path / "hub.address"
    hub = ["hub", "--workers", "1", "--shards", "1", "--run", "r", "--listen", "tcp://127.0.0.1:0"]
    started = [subprocess.Popen([*_PYTHON, *hub, "--directory", str(tmp_path)], stdout=subprocess.DEVNULL)]
    try:
        wait_for(address.exists, "the hub's address")
        own = ["server", "--shard", "0", "--hub", address.read_text().strip()]
        started.append(subprocess.Popen([*_PYTHON, *own], stdout=subprocess.PIPE, text=True))
        assert started[1].stdout is not None
        assert "listens at" in started[1].stdout.readline()
        assert heaps_of_threads(started[1].pid) == 0
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.communicate(timeout=DEADLINE)
