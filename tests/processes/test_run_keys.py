"""`atoll run`: who gets into a run, and who can read its files. Its own user does, and nobody else."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from run_command import DEADLINE, Command, wait_for

from atoll.core.errors import UserError
from atoll.launch.private import PrivateFolder
from atoll.net.endpoint import Client
from atoll.net.keys import Keys, make_keys, read_keys
from atoll.net.socketfolder import check_socket_folder

SCRIPT = """
import os, sys, time, torch, atoll
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.join() as session:
    session.prepare(model, optimizer)
    deadline = time.monotonic() + 100
    for step in range(100000):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        done = torch.tensor([float(os.path.exists("go") or time.monotonic() > deadline)])
        if session.reduce(done).item() > 0:
            break
        time.sleep(0.01)
open(f"made-by-the-script-{session.rank}", "w").close()
"""

# What another user of the machine may try: run as that user, without Atoll. One line for each try.
STRANGER = """
import encodings.idna, json, os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
key, run, sockets, port = sys.argv[1:5]
tries = {}
def attempt(name, act):
    try:
        tries[name] = repr(act())
    except OSError as error:
        tries[name] = type(error).__name__
attempt("key", lambda: open(key).read())
attempt("run directory", lambda: os.listdir(run))
attempt("metrics", lambda: open(run + "/metrics.jsonl").read(1))
attempt("sockets", lambda: os.listdir(os.path.dirname(sockets.split(",")[0])))
for each in filter(None, sockets.split(",")):
    def connect():
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(5)
            link.connect(each)
    attempt("socket", connect)
def speak():
    # A greeting of ZeroMQ (RFC 23) whose mechanism is NULL. Who takes that says READY after its own greeting,
    # which has 64 bytes; who wants a key hangs up.
    greeting = b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"NULL".ljust(20, b"\\0") + b"\\0" + bytes(31)
    ready = b"\\x04\\x19\\x05READY\\x0bSocket-Type\\x00\\x00\\x00\\x06DEALER"
    said = b""
    with socket.create_connection(("127.0.0.1", int(port)), 10) as link:
        link.settimeout(10)
        link.sendall(greeting + ready)
        try:
            while more := link.recv(4096):
                said += more
        except ConnectionError:
            pass
    return len(said) <= 64
attempt("hub", speak)
print(json.dumps(tries))
"""


@pytest.fixture
def command() -> Iterator[Command]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # others get as far as the run directory; they do not into pytest's
        command = Command(Path(folder))
        yield command
        for process in command.started:
            process.kill()
            process.wait()
        wait_for(lambda: not command.alive(), "the processes of a run that was killed to end", 15)


def sockets_of(command: Command) -> list[str]:
    """The Unix sockets with a path at which the run's processes listen."""
    found = set()
    for process in command.alive():
        with contextlib.suppress(psutil.Error):
            found |= {each.laddr for each in process.net_connections("unix") if each.laddr}
    return sorted(str(each) for each in found if "/atoll-" in str(each))


def ports_of(command: Command) -> set[int]:
    found = set()
    for process in command.alive():
        with contextlib.suppress(psutil.Error):
            found |= {each.laddr.port for each in process.net_connections("inet") if each.status == "LISTEN"}
    return found


@pytest.mark.parametrize("strategy", ["server", "peers"])
def test_another_user_of_the_machine_gets_nowhere(command: Command, strategy: str) -> None:
    run = command.directory / "run"
    process = command.start(SCRIPT, options=["--strategy", strategy])
    wait_for(lambda: command.steps() > 3 or process.poll() is not None, "three steps")
    assert process.poll() is None, process.communicate()

    # The key: in a file of this user's, and nowhere else.
    link = run / "service" / "run.key"
    key_file = link.readlink()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
    keys = read_keys(link)
    secrets = [keys.server_secret, keys.client_secret]
    for each in command.alive():
        with contextlib.suppress(psutil.Error):
            shown = " ".join([*each.cmdline(), *each.environ().values()])
            assert not any(secret in shown for secret in secrets), each.cmdline()
    for path in run.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            assert not any(secret.encode() in content for secret in secrets), path

    # Whoever comes without it, or with another.
    address = (run / "service" / "hub.address").read_text().strip()
    assert "wants a key" in refusal_of(address, None)
    assert "refuses this key" in refusal_of(address, make_keys())

    # Another user.
    sockets = sockets_of(command)
    assert len(sockets) == (2 if strategy == "server" else 3), sockets  # one is for heartbeats
    assert all(stat.S_IMODE(Path(each).stat().st_mode) == 0o600 for each in sockets)
    hub_port = int(address.rpartition(":")[2])
    assert hub_port in ports_of(command)
    if os.geteuid() == 0:  # only root can be another user; what is above holds for everybody
        arguments = [str(key_file), str(run), ",".join(sockets), str(hub_port)]
        shown = subprocess.run(
            [sys.executable, "-I", "-S", "-c", STRANGER, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert shown.returncode == 0, shown.stderr
        tries = json.loads(shown.stdout)
        assert tries.pop("hub") == "True", tries
        assert set(tries.values()) == {"PermissionError"}, tries
        assert len(tries) == 5

    (command.directory / "go").touch()
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert not any(secret in out + err for secret in secrets)
    assert not key_file.parent.exists()
    assert not link.is_symlink()
    told = subprocess.run(
        [sys.executable, "-c", "from atoll.cli.app import main; main()", "report", str(run)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    modes = {str(path.relative_to(run)): stat.S_IMODE(path.stat().st_mode) for path in (run, *run.rglob("*"))}
    assert set(modes.values()) == {0o700, 0o600}, modes
    # The script's own files are as its user wants them.
    made = (command.directory / "made-by-the-script-0").stat().st_mode
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(made) == 0o666 & ~umask


def refusal_of(address: str, keys: Keys | None) -> str:
    """What a client with these keys is told."""
    with Client(address, keys, limit=2**20, name="hub") as client:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                client.check()
            except UserError as error:
                return str(error)
            time.sleep(0.05)
    return "nothing"


def test_what_a_killed_launcher_has_left_is_removed_and_what_others_use_is_not(tmp_path: Path) -> None:
    with mock.patch.object(tempfile, "tempdir", str(tmp_path.parent.parent)):
        first, second = PrivateFolder(tmp_path / "one"), PrivateFolder(tmp_path / "two")
        os.close(first._lock or -1)  # as at the end of its process
        third = PrivateFolder(tmp_path / "three")
        assert not first.path.exists()
        assert read_keys(tmp_path / "two") != read_keys(tmp_path / "three")
        second.close()
        third.close()
        assert not second.path.exists()
        assert not (tmp_path / "two").is_symlink()


@pytest.mark.parametrize("kind", ["missing", "open", "file", "link"])
def test_nodes_use_no_folder_of_sockets_that_others_can_change(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    if kind == "file":
        folder.touch()
    elif kind == "link":
        (tmp_path / "there").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "there")
    elif kind == "open":
        folder.mkdir(mode=0o755)
    with pytest.raises(UserError, match="folder of sockets"):
        check_socket_folder(str(folder))
