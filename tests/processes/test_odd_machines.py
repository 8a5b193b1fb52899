"""`atoll run` on machines that lack something: free ports, processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_command import DEADLINE

RUN = "from atoll.cli.entry import main; main()"
# Holds all ports that the system gives to who asks for any, and then runs the command.
TAKES_ALL = """
import pathlib, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40009")
held = []
for port in range(40000, 40010):
    held.append(socket.create_server(("127.0.0.1", port)))
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""


def may_have_namespaces() -> bool:
    tools = shutil.which("unshare") and shutil.which("ip")
    return bool(tools) and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_have_namespaces(), reason="a network namespace takes root, unshare and ip")
@pytest.mark.parametrize("options", [(), ("--strategy", "server"), ("--strategy", "peers")], ids=str)
def test_a_machine_without_a_free_port(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-c", RUN, "run", "--workers", "2", *options, "train.py"]
    ended = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", TAKES_ALL, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    (line,) = ended.stderr.splitlines()
    ports = "among 40000 to 40009 (net.ipv4.ip_local_port_range)"
    assert line.startswith(
        f"atoll: this machine has no free TCP port {ports}, and the processes of a run "
    ), line
    assert line.endswith("widen the range (Address already in use)"), line
    assert not list(tmp_path.glob("runs/*"))
