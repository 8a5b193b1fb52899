"""What a process has open, told by name."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from support.leaks import still_open

shown = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not show what is open")


@shown
def test_a_file_and_a_socket_are_named_until_they_are_closed(tmp_path: Path) -> None:
    before = still_open()
    with (tmp_path / "kept").open("w"), socket.socket() as link:
        number = link.fileno()
        named = sorted(still_open() - before)
        assert len(named) == 2
        assert any(each.endswith(f": {tmp_path / 'kept'}") for each in named)
        assert any(each.startswith(f"file {number}: socket:[") for each in named)
    assert not still_open() - before


@shown
def test_what_is_closed_meanwhile_hides_nothing() -> None:
    """As many are open as before, and one of them is another."""
    one = socket.socket()
    before = still_open()
    one.close()
    with socket.socket():
        assert len(still_open() - before) == 1
    assert not still_open() - before


def test_a_thread_is_named_while_it_runs() -> None:
    before, end = still_open(), threading.Event()
    thread = threading.Thread(target=end.wait, args=(60,), name="kept")
    thread.start()
    assert [each.split(",")[0] for each in still_open() - before] == ["thread kept"]
    end.set()
    thread.join(60)
    assert not still_open() - before
