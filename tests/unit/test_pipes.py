"""A named pipe or a device in place of a file costs at most some seconds, and one line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from atoll.core import pipes
from atoll.core.config import load_config
from atoll.core.errors import ConfigError, UserError
from atoll.core.pipes import read_start, write_through
from atoll.observe.summary import Summary, read_summary, write_summary


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def a_summary() -> Summary:
    return Summary("ring", 1, 1, 0, 0.0, 0.0, 0, 0.0, {}, [], [])


def test_a_configuration_comes_through_a_pipe(pipe: Path) -> None:
    writer = threading.Thread(target=pipe.write_text, args=("[run]\nworkers = 3\n",))
    writer.start()
    assert load_config(pipe).run.workers == 3
    writer.join()


def test_nobody_writes_the_configuration(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_start, "__defaults__", (0.1,))
    with pytest.raises(ConfigError, match="nobody has written to this pipe") as raised:
        load_config(pipe)
    assert str(pipe) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_writer_of_the_configuration_stands_still(pipe: Path) -> None:
    held = os.open(pipe, os.O_RDWR)
    os.write(held, b"[run]")
    with pytest.raises(OSError, match="nobody has written"):
        read_start(pipe, 100, 0.1)
    os.close(held)


def test_a_summary_goes_through_a_pipe(pipe: Path, tmp_path: Path) -> None:
    taken: list[bytes] = []
    reader = threading.Thread(target=lambda: taken.append(pipe.read_bytes()))
    reader.start()
    write_summary(a_summary(), pipe)
    reader.join()
    (tmp_path / "summary.json").write_bytes(taken[0])
    assert read_summary(tmp_path / "summary.json").strategy == "ring"
    assert pipe.is_fifo()


def test_nobody_reads_the_summary(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_through, "__defaults__", (0.1,))
    with pytest.raises(UserError, match="cannot write the summary: nobody has read from this pipe"):
        write_summary(a_summary(), pipe)


def test_a_reader_of_the_summary_stands_still(pipe: Path) -> None:
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="nobody has read"):
        write_through(pipe, bytes(2**20), 0.1)
    os.close(held)


def test_files_and_devices_are_read_and_written_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    assert read_start(file, 4) == b"0123"
    assert read_start(file, 100) == b"0123456789"
    assert read_start("/dev/null", 100) == b""
    assert len(read_start("/dev/zero", 100)) == 100
    write_summary(a_summary(), Path("/dev/null"))
    with pytest.raises(IsADirectoryError):
        read_start(tmp_path, 100)
    assert pipes.PIPE_SECONDS > 1
