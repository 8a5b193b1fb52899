"""The command's way out for text: readers that are slow, stopped, gone, or know few characters."""

from __future__ import annotations

import contextlib
import io
import os
import select
import threading
import time
from collections.abc import Iterator
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core import outlet
from atoll.core.characters import encoded
from atoll.core.events import Decided
from atoll.core.outlet import ROOM, Outlet, Screen
from atoll.hub.main import _show

DEADLINE = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, IO[str]]]:
    """What reads, and what writes."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        yield reader, file
    with contextlib.suppress(OSError):  # the test has
        os.close(reader)


def wait_for(condition: object, what: str) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, f"waited {DEADLINE:g} s for {what}"
        time.sleep(0.005)


_TEXTS = st.lists(st.integers(0, 0x10FFFF), max_size=20).map(lambda codes: "".join(map(chr, codes)))


@given(_TEXTS, st.sampled_from(["ascii", "utf-8", "latin-1", "cp1252", "utf-16"]))
def test_no_text_is_refused_by_any_encoding(text: str, encoding: str) -> None:
    encoded(text + "\udcff\ud800", encoding)


def test_a_character_that_the_terminal_lacks() -> None:
    assert encoded("3 steps · loss 1 … ü", "ascii") == b"3 steps - loss 1 ... \\xfc"
    name = os.fsdecode(b"run-\xff/logs")
    assert encoded(f"see {name}") == b"see run-\\xff/logs"


def test_who_writes_never_waits_for_a_reader_that_has_stopped(pipe: tuple[int, IO[str]]) -> None:
    reader, file = pipe
    way = Outlet(file)
    began = time.monotonic()
    for _ in range(200):
        way.write("x" * 65535 + "\n")  # 13 MB in all; a pipe holds 64 KiB
    assert time.monotonic() - began < 5.0
    assert (way.room, way._bytes <= outlet._MOST, way.dropped > 11 << 20) == (0, True, True)
    assert not way.drain(patience=0.05)
    wait_for(lambda: way.stalled > 0.05, "a reader that takes nothing")
    way.close()
    got = 0
    while not way.idle:  # it reads after all; the thread may still have to count what was read
        if select.select([reader], [], [], 0.01)[0]:
            got += len(os.read(reader, 1 << 16))
    assert got + way.dropped <= 200 * 65536
    assert way.room == ROOM


def test_whatever_is_taken_comes_whole_and_in_order(pipe: tuple[int, IO[str]]) -> None:
    reader, file = pipe
    os.set_blocking(file.fileno(), False)  # as another process may have left the terminal
    way, got = Outlet(file), bytearray()

    def read() -> None:
        while data := os.read(reader, 4096):
            got.extend(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    lines = [f"line {number} " + "y" * 500 for number in range(5000)]
    for line in lines:
        wait_for(lambda: way.room, "the reader")
        way.write(line + "\n")
    assert way.drain(patience=DEADLINE)
    file.close()
    thread.join(DEADLINE)
    assert got.decode().splitlines() == lines


def test_a_reader_that_has_ended_is_told_of_once(pipe: tuple[int, IO[str]]) -> None:
    reader, file = pipe
    screen = Screen(file, io.StringIO())
    os.close(reader)
    screen.output.write("into the void\n")
    wait_for(lambda: screen.output.gone, "word that nobody reads")
    assert screen.troubles() == ["the standard output cannot be written (its reader has ended)"]
    screen.output.write("more\n")
    assert screen.troubles() == []
    assert screen.output.room == 0
    began = time.monotonic()
    screen.close(patience=DEADLINE)
    assert time.monotonic() - began < 5.0


def test_a_reader_that_stops_is_told_of_once(
    pipe: tuple[int, IO[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet, "STALLED_SECONDS", 0.02)
    _, file = pipe
    screen = Screen(file, io.StringIO())
    screen.output.write("x" * (1 << 17))
    told: list[str] = []
    wait_for(lambda: told.extend(screen.troubles()) or told, "word that nobody reads")
    assert told == ["the standard output has not been read for 0.02 s"]
    assert screen.troubles() == []


def test_a_hub_whose_terminal_stands_still_goes_on(pipe: tuple[int, IO[str]]) -> None:
    """`atoll hub` in a terminal after Ctrl-S: workers would be thought dead while the hub waits for it."""
    reader, file = pipe
    shown = Outlet(file)
    began = time.monotonic()
    for number in range(20_000):
        choice = f"worker {number}"
        _show(shown, Decided(time=1.0, worker=-1, what="worker joined", choice=choice, reason="new"))
    assert time.monotonic() - began < 5.0
    os.close(reader)
    _show(shown, Decided(time=1.0, worker=-1, what="worker left", choice="worker 1", reason="it ended"))
    shown.close()


def test_one_pipe_for_both_keeps_the_order(pipe: tuple[int, IO[str]]) -> None:
    reader, file = pipe
    with os.fdopen(os.dup(file.fileno()), "w", encoding="utf-8") as errors:
        screen = Screen(file, errors)
        for number in range(100):
            screen.output.write(f"{number}\n")
            screen.say(f"{number}")
        screen.close(patience=DEADLINE)
        got = os.read(reader, 1 << 16).decode().split()
    assert got == [str(number) for number in range(100) for _ in range(2)]


def test_streams_that_were_closed_at_the_start() -> None:
    screen = Screen(None, None)
    screen.output.write("x")
    screen.say("y")
    assert (screen.output.isatty(), screen.output.room) == (False, 0)
    screen.close(patience=DEADLINE)


def test_a_full_disk_behind_the_output(pipe: tuple[int, IO[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = pipe
    way = Outlet(file)

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outlet.os, "write", full)
    way.write("x")
    wait_for(lambda: way.gone, "the disk's word")
    assert way.gone == "No space left on device"
