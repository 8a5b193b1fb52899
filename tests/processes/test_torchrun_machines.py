"""torchrun on two machines, without `atoll run`: each one's last words name the first cause that it knows.

Both agents are on this machine, with a process of a ring each.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from run_command import DEADLINE, wait_for

SCRIPT = """
import os, sys, time
import torch, atoll
from pathlib import Path
rank = os.environ["RANK"]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    for i in range(3 if "ends" in sys.argv else 2000):
        if i == 2: Path(f"trains-{rank}").touch()
        if i == 2 and rank == "1" and "fails" in sys.argv: raise ValueError("the first cause")
        if i == 2 and rank == "1" and "exits" in sys.argv: sys.exit(3)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
print("end", rank, flush=True)
"""


def start(folder: Path, port: int, machine: int, *arguments: str) -> subprocess.Popen[str]:
    place = ["--nnodes=2", f"--node-rank={machine}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node=1", "train.py", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", ["ends", "fails", "exits", "stopped"])
def test_what_each_machine_says_at_the_end(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    machines = [start(tmp_path, port, machine, how) for machine in range(2)]
    try:
        if how == "stopped":
            wait_for(lambda: all((tmp_path / f"trains-{rank}").exists() for rank in range(2)), "two steps")
            machines[1].send_signal(signal.SIGTERM)
        ended = [machine.communicate(timeout=DEADLINE) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    if how == "ends":
        assert [(machine.returncode, out) for machine, (out, _) in zip(machines, ended, strict=True)] == [
            (0, "end 0\n"),
            (0, "end 1\n"),
        ], ended
        return
    assert all(machine.returncode for machine in machines), ended
    last = [err.rpartition("Root Cause")[2] for _, err in ended]
    assert "worker 0 lost touch with another worker" in last[0], ended[0][1]
    if how == "fails":
        assert 'train.py", line' in last[1], ended[1][1]
        assert "ValueError: the first cause" in last[1], ended[1][1]
    elif how == "exits":
        assert "exitcode  : 3" in last[1], ended[1][1]
    else:
        assert ended[1][1].strip().endswith("got signal: 15"), ended[1][1]
