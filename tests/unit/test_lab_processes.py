"""Parts of a lab's processes that need no lab: output, commands, folders, and what a machine may lack."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.lab import namespaces, runner
from atoll.lab.output import Output
from atoll.lab.spec import command_of, workers_of
from atoll.lab.topology import parse_topology

DEADLINE = 30.0
TOPOLOGY = parse_topology('[[site]]\nname = "a"\n[[site]]\nname = "b"\nworkers = 2\nspeed = [1, 0.5]\n')


def passed_on(tmp_path: Path, data: bytes, keep_open: bool = False) -> bytes:
    """What becomes of a worker's output."""
    read, write = os.pipe()
    ours, theirs = os.pipe()
    output = Output()
    output.start()
    output.add("a 0", [read], tmp_path / "log", [theirs])
    os.write(write, data)
    if not keep_open:
        os.close(write)
    output.close(30.0)
    if keep_open:
        os.close(write)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        return file.read()


def test_lines_get_a_name(tmp_path: Path) -> None:
    assert passed_on(tmp_path, b"one\n\ntwo") == b"[a 0] one\n[a 0] \n[a 0] two\n"
    assert (tmp_path / "log").read_bytes() == b"one\n\ntwo\n"


def test_of_a_line_that_was_rewritten_the_last_state_is_shown(tmp_path: Path) -> None:
    assert passed_on(tmp_path, b" 10 %\r 50 %\r100 %\r\ndone\n") == b"[a 0] 100 %\n[a 0] done\n"


def test_a_pipe_that_a_workers_child_holds_holds_up_nobody(tmp_path: Path) -> None:
    assert passed_on(tmp_path, b"last", keep_open=True) == b"[a 0] last\n"


def test_a_reader_that_has_gone_holds_up_nobody(tmp_path: Path) -> None:
    read, write = os.pipe()
    ours, theirs = os.pipe()
    os.close(ours)
    output = Output()
    output.start()
    output.add("a 0", [read], tmp_path / "log", [theirs])
    for _ in range(3):
        os.write(write, b"line\n" * 1000)
    os.close(write)
    output.close(30.0)
    assert (tmp_path / "log").read_bytes() == b"line\n" * 3000
    os.close(theirs)


def test_a_reader_that_stands_still_holds_up_no_worker(tmp_path: Path) -> None:
    read, write = os.pipe()
    ours, theirs = os.pipe()
    output = Output()
    output.start()
    output.add("a 0", [read], tmp_path / "log", [theirs])
    block = b"line\n" * 10_000
    for _ in range(60):
        data = block
        while data:
            ready = select.select([], [write], [], DEADLINE)[1]
            assert ready, "the worker waits for the reader"
            data = data[os.write(write, data[:4096]) :]
    os.close(write)
    got = bytearray()

    def read_all() -> None:
        while data := os.read(ours, 1 << 16):
            got.extend(data)

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    output.close(DEADLINE)
    os.close(theirs)
    reader.join(DEADLINE)
    assert (tmp_path / "log").read_bytes() == block * 60
    lines = got.decode().splitlines()
    assert lines[0] == "[a 0] line"
    assert any(line.endswith(f"left out here; see {tmp_path / 'log'}") for line in lines)
    assert len(got) < 2 << 20


def test_words_of_a_command() -> None:
    words = ["{site}-{worker}/{workers}", "{index}", "{sites}", "{address}", "{first}", "${x}", "{}", "{site"]
    workers = workers_of(TOPOLOGY)
    assert [worker.name for worker in workers] == ["a 0", "b 1", "b 2"]
    assert [worker.speed for worker in workers] == [1.0, 1.0, 0.5]
    assert command_of(workers[2], words, TOPOLOGY) == [
        "b-2/3", "1", "2", "10.77.2.1", "10.77.1.1", "${x}", "{}", "{site",
    ]  # fmt: skip


@pytest.fixture
def all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_check_tun", lambda: None)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")


@pytest.mark.parametrize(("missing", "package"), [("unshare", "util-linux"), ("ip", "iproute2")])
@pytest.mark.usefixtures("all_is_there")
def test_a_missing_command_is_named_with_its_package(
    missing: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"unshare", "ip"} - {missing}
    monkeypatch.setattr(namespaces.shutil, "which", lambda name, path=None: name if name in found else None)
    with pytest.raises(
        UserError, match=f"a lab needs the command '{missing}': install the package {package}$"
    ):
        namespaces.find_way()


def test_a_missing_tun_device_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(namespaces, "_TUN", str(tmp_path / "tun"))
    with pytest.raises(UserError, match="tun: No such file or directory: as root: modprobe tun"):
        namespaces._check_tun()


@pytest.mark.usefixtures("all_is_there")
@pytest.mark.parametrize(("user", "tries"), [(0, 2), (1000, 1)])
def test_root_tries_a_user_namespace_too(user: int, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, root may be allowed no other."""
    tried: list[list[str]] = []

    def run(command: list[str], name: str) -> subprocess.CompletedProcess[bytes]:
        tried.append(command)
        works = "--user" in command and works_at_all
        return subprocess.CompletedProcess(command, 0 if works else 1, b"", b"unshare: not permitted\n")

    monkeypatch.setattr(namespaces, "_run", run)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: user)
    works_at_all = True
    assert "--user" in namespaces.find_way()
    assert len(tried) == tries
    works_at_all = False
    with pytest.raises(UserError, match=r"run it as root, or .*sysctl.*\(unshare: not permitted\)$"):
        namespaces.find_way()


def test_the_folder_of_labs_must_be_this_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runner.labs_folder()
    assert folder == tmp_path / "atoll-lab"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(UserError, match="other users may write there"):
        runner.labs_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="other users may write"):
        runner.labs_folder()
