"""A worker's log of any bytes, however it grows: what is shown of it, and that little is held of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.launch import tail
from atoll.launch.tail import Tail, last_lines, shown
from atoll.launch.worker import END_OF_OUTPUT

_BYTES = [b"\n", b"\r", b"a", b"b", b"\xff", "ü".encode(), b"\x1b[31m", b"\x1b[2K", b"\x07", b"\x08", b"\t"]
PIECES = st.lists(
    st.lists(st.one_of(st.sampled_from(_BYTES), st.binary(max_size=9)), max_size=20).map(b"".join),
    max_size=9,
)


@given(PIECES, st.sampled_from([1, 3, 64]), st.sampled_from([2, 5, 1000]), st.booleans())
def test_lines_are_the_same_however_the_log_grows_and_is_read(
    pieces: list[bytes], block: int, longest: int, often: bool
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(tail, "BLOCK", block),
        mock.patch.object(tail, "LONGEST", longest),
    ):
        path = Path(folder) / "log"
        follows, lines = Tail(path), []
        with path.open("wb", buffering=0) as log:
            for piece in pieces:
                log.write(piece)
                if often:
                    lines += follows.read()
        while follows.behind:
            lines += follows.read(last=True)
        lines += follows.read(last=True)
        *whole, rest = b"".join(pieces).split(b"\n")
        assert lines == [shown(line) for line in [*whole, *([rest] if rest else [])]]


@given(PIECES, st.integers(0, 40))
def test_what_is_left_out_is_counted(pieces: list[bytes], keep: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, data = Path(folder) / "log", b"".join(pieces)
        path.write_bytes(data)
        follows = Tail(path)
        left_out = follows.skip(keep)
        rest = data[left_out:]
        assert len(rest) <= max(keep, 0) or left_out == 0
        lines = follows.read(last=True)
        assert lines == [shown(line) for line in rest.split(b"\n")[: len(lines)]]
        if left_out and b"\n" in data[len(data) - keep :][:-1]:
            assert data[left_out - 1 : left_out] == b"\n"


@given(st.binary(max_size=40), st.integers(0, 200))
def test_an_end_within_the_gap_is_found(before: bytes, keep: int) -> None:
    """What follows it is shown by the command, and not twice."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(before + f"\n{END_OF_OUTPUT}\n".encode() + b"Traceback\n" * 20)
        follows = Tail(path)
        follows.skip(keep)
        assert not any("Traceback" in line for line in follows.read(last=True))


@given(PIECES, st.integers(1, 5))
def test_last_lines_of_any_log(pieces: list[bytes], count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, data = Path(folder) / "log", b"".join(pieces)
        path.write_bytes(data)
        whole = [shown(line) for line in data.split(b"\n") if line.strip()]
        assert last_lines(path, count) == whole[-count:]
        with mock.patch.object(tail, "BLOCK", 16):
            assert len(last_lines(path, count)) <= count


def test_a_log_that_is_emptied_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\nhalf a li")
    follows = Tail(path)
    assert follows.read() == ["first"]
    path.write_bytes(b"")
    assert follows.read() == []
    path.write_bytes(b"next\n")
    assert follows.read() == ["next"]


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo, lambda path: None], ids=["folder", "pipe", "nothing"])
def test_something_else_in_the_place_of_a_log_has_no_lines(
    tmp_path: Path, put: Callable[[Path], object]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\n")
    follows = Tail(path)
    assert follows.read() == ["first"]
    path.unlink()
    put(path)
    assert (follows.behind, follows.read(last=True), last_lines(path, 9)) == (0, [], [])
    assert follows.skip(1) == 0
