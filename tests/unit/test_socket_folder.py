"""The folder of a run's sockets: its path is counted in bytes, as the system counts a socket's."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

from atoll.net.socketfolder import KEY_FILE, hold_folder, make_socket_folder, remove_left_folders
from atoll.train.api.place import Place
from atoll.train.members.peersintroduction import StoreMeeting


@pytest.mark.parametrize(
    "name", ["t" * 44, "é" * 22, "é" * 40, "漢" * 40], ids=["ascii", "short", "long", "wide"]
)
def test_sockets_fit_into_whatever_tmpdir_there_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Path(tempfile.gettempdir()) / name
    parent.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    folder = make_socket_folder()
    path = folder / ("x" * 40)  # longer than any name of ours
    try:
        assert len(os.fsencode(path)) <= 103
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.fsencode(path))
    finally:
        path.unlink(missing_ok=True)
        folder.rmdir()
        parent.rmdir()


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def bound_in(folder: Path, name: str = "node-0-abcd") -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(os.fsencode(folder / name))
    return bound


@pytest.mark.parametrize("with_key", [False, True])
def test_a_folder_whose_processes_were_killed_is_removed(parent: Path, with_key: bool) -> None:
    folder = make_socket_folder()
    bound_in(folder).close()
    bound_in(folder, "node-1-abcd").close()
    if with_key:
        (folder / KEY_FILE).touch()
    remove_left_folders(parent)
    assert not folder.exists()


@pytest.mark.parametrize(
    "kind", ["empty", "held", "alone", "listens", "a file", "open to others", "another name", "a link"]
)
def test_no_other_folder_is_removed(parent: Path, kind: str) -> None:
    """That of a run that has just begun, or lives, also of an earlier version; or the user's own."""
    folder = make_socket_folder()
    lock, bound = None, None
    if kind == "another name":
        folder = folder.rename(parent / "my-sockets")
    if kind != "empty":
        bound = bound_in(folder)
    if kind in ("held", "alone"):
        lock = hold_folder(folder, alone=kind == "alone")
        assert lock is not None
    if kind == "listens" and bound is not None:
        bound.listen()
    elif bound is not None:
        bound.close()
    if kind == "a file":
        (folder / "notes.txt").touch()
    if kind == "open to others":
        folder.chmod(0o755)
    if kind == "a link":
        there = folder.rename(parent / "elsewhere")
        folder.symlink_to(there)
    remove_left_folders(parent)
    assert folder.is_dir()
    assert (not any(folder.iterdir())) == (kind == "empty")
    if lock is not None:
        os.close(lock)


def test_nodes_that_met_in_a_store_hold_their_folder_while_they_live(parent: Path) -> None:
    """Without a hub nobody but the nodes is there to hold it."""
    store = HashStore()
    nodes = [StoreMeeting(Place(rank, 2, store=store, host="127.0.0.1"), 10.0) for rank in range(2)]
    left = make_socket_folder()
    bound_in(left).close()
    folder = Path(nodes[0].socket_folder())
    assert not left.exists()  # of nodes that were killed before
    assert Path(nodes[1].socket_folder()) == folder
    bound_in(folder).close()
    for node in nodes:
        remove_left_folders(parent)
        assert folder.exists()
        node.close()
    remove_left_folders(parent)
    assert not folder.exists()
