"""The folder of a run's sockets: its path is counted in bytes, as the system counts a socket's."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from atoll.net.socketfolder import make_socket_folder


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
