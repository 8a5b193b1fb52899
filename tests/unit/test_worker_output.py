"""What the command passes on of a worker that floods its log: it takes little time and memory."""

from __future__ import annotations

import io
import os
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from atoll.core.outlet import ROOM, Outlet
from atoll.launch import output
from atoll.launch.output import Output
from atoll.launch.tail import BLOCK, LONGEST
from atoll.launch.worker import END_OF_OUTPUT
from atoll.observe.progress import Progress

KINDS = {
    "short": b"x" * 9 + b"\n",
    "empty": b"\n",
    "line": b"step 12 loss 0.123456 and so on and so on......\n",
    "without an end": b"x" * 64,
    "carriage returns": b"\r 45%|####      | 123/456 [00:01<00:03, 88it/s]",
    "many returns": b"\r",
    "colours": b"\x1b[31mred\x1b[0m\x1b[2K\n",
    "binary": bytes(range(256)),
    "zeros": bytes(64),
    "long": b"x" * (10 << 20) + b"\n",
}
LOOK_SECONDS = 1.0  # 0.05 on an idle machine


class Reader:
    """A display that keeps what it is given until `take`."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal, self.gone = is_terminal, ""
        self.given: list[str] = []
        self.lines_to = cast(Outlet, self)
        self._waits = self.most = 0

    def isatty(self) -> bool:
        return self.is_terminal

    @property
    def room(self) -> int:
        return max(0, ROOM - self._waits)

    def lines(self, texts: Sequence[str]) -> None:
        self._waits += sum(len(text) + 1 for text in texts)
        self.most = max(self.most, self._waits)
        self.given += [text[:200] for text in texts if text.startswith("atoll: ") or len(texts) < 10]

    def take(self) -> None:
        self._waits = 0


def flood(path: Path, unit: bytes, size: int) -> None:
    with path.open("ab") as log:
        block = unit * max(1, (1 << 16) // len(unit))
        while log.tell() < size:
            log.write(block[: size - log.tell()])


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("reads", [False, True], ids=["stopped", "reading"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_look_takes_little_time_and_memory(
    kind: str, reads: bool, is_terminal: bool, tmp_path: Path
) -> None:
    log, reader, told = tmp_path / "log", Reader(is_terminal), list[str]()
    passes_on = Output(0, log, cast(Progress, reader), told.append)
    longest = 0.0
    tracemalloc.start()
    try:
        for size in (2 << 20, 5 << 20):
            flood(log, KINDS[kind], size)
            began = time.monotonic()
            passes_on.look()
            longest = max(longest, time.monotonic() - began)
            if reads:
                reader.take()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert longest < LOOK_SECONDS
    assert peak < 16 << 20
    assert reader.most <= ROOM + 3 * (BLOCK + LONGEST)  # a byte that is no UTF-8 becomes three
    if is_terminal:
        assert any("are left out here; see" in line for line in reader.given)
        assert told == [f"worker 0 prints more than can be shown; all of it is in {log}"]


def test_ten_gigabytes_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "FINISH_SECONDS", 0.1)
    log, reader, told = tmp_path / "log", Reader(is_terminal=False), list[str]()
    with log.open("wb") as file:
        file.truncate(10 << 30)  # which takes nothing of the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe last words")
    passes_on = Output(0, log, cast(Progress, reader), told.append)
    began = time.monotonic()
    passes_on.look()
    assert time.monotonic() - began < LOOK_SECONDS
    passes_on.finish(hurried=lambda: False)
    assert reader.given[-1] == "the last words"
    assert any(line.startswith("atoll: 10.0 GiB are left out here; see") for line in reader.given)
    assert len(told) == 1


def test_all_is_shown_where_the_reader_keeps_up(tmp_path: Path) -> None:
    log, told, paper = tmp_path / "log", list[str](), io.StringIO()
    from atoll.core.outlet import Screen
    from atoll.observe.progress import make_progress

    passes_on = Output(0, log, make_progress("t", Screen(paper, io.StringIO())), told.append)
    flood(log, b"12345678\n", 3 << 20)
    passes_on.finish(hurried=lambda: False)
    assert (paper.getvalue(), told) == (log.read_text() + "\n" * (not log.read_text().endswith("\n")), [])


def test_nothing_is_read_for_a_reader_that_has_gone(tmp_path: Path) -> None:
    log, reader, told = tmp_path / "log", Reader(is_terminal=False), list[str]()
    flood(log, b"x\n", 1 << 20)
    passes_on = Output(0, log, cast(Progress, reader), told.append)
    reader.gone, reader._waits = "its reader has ended", ROOM
    passes_on.look()
    assert reader.given == []
    passes_on.finish(hurried=lambda: False)
    assert told == []  # the screen has told of it


def test_the_next_worker_and_a_life_again(tmp_path: Path) -> None:
    first, second, reader = tmp_path / "0", tmp_path / "1", Reader(is_terminal=False)
    first.write_text(f"one\n{END_OF_OUTPUT}\nTraceback\n")
    second.write_text("before\n")
    passes_on = Output(0, first, cast(Progress, reader), print)
    passes_on.look()
    passes_on.follow(1, second)
    with second.open("a") as log:
        log.write("after\n")
    passes_on.look()
    assert reader.given == ["one", "after"]
