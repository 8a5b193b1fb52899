"""Deaths of a DataLoader's processes: what they did to their parent, and that they interrupt nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from atoll.core import childsignals
from atoll.core.childsignals import child_deaths_ignored, death_behind


@contextmanager
def child(code: str) -> Iterator[int]:
    """A process that nobody has waited for."""
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        yield process.pid
    finally:
        process.wait(30)


def error_of(kind: type[BaseException], module: str) -> BaseException:
    """An error that has passed through a frame of a module of this name."""
    names = {"__name__": module, "kind": kind}
    exec("def fails(): raise kind(104, 'Connection reset by peer')", names)
    try:
        names["fails"]()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError


LOADER = "torch.utils.data.dataloader"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os._exit(5)", "exited unexpectedly with exit code 5."),
        ("import os; os.kill(os.getpid(), 9)", "is killed by signal: Killed."),
    ],
)
@pytest.mark.parametrize("kind", [ConnectionResetError, FileNotFoundError, EOFError])
def test_a_broken_connection_is_told_by_the_death_behind_it(
    kind: type[BaseException], code: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(childsignals, "_DEATH_SECONDS", 30.0)
    with child(code) as pid:
        assert pid in childsignals._children()
        monkeypatch.setattr(childsignals, "_children", lambda: [pid])  # other tests may have left some
        assert death_behind(error_of(kind, LOADER)) == f"DataLoader worker (pid {pid}) {how}"


@pytest.mark.parametrize(("kind", "module"), [(ConnectionResetError, "train"), (ValueError, LOADER)])
def test_another_error_has_another_cause(kind: type[BaseException], module: str) -> None:
    with child("import os; os._exit(5)"):
        assert death_behind(error_of(kind, module)) == ""


def test_a_connection_that_breaks_while_all_live_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(childsignals, "_DEATH_SECONDS", 0.05)
    with child("pass") as pid:  # one that ends well is none of it
        monkeypatch.setattr(childsignals, "_children", lambda: [pid])
        assert death_behind(error_of(ConnectionResetError, LOADER)) == ""


def test_deaths_interrupt_nothing_while_they_are_ignored() -> None:
    heard: list[int] = []

    def raises(signum: int, _frame: FrameType | None) -> None:
        heard.append(signum)
        raise RuntimeError("DataLoader worker")

    before = signal.signal(signal.SIGCHLD, raises)
    try:
        with child_deaths_ignored():
            with child("pass"):
                pass
            time.sleep(0)
            assert heard == []
        assert signal.getsignal(signal.SIGCHLD) is raises
    finally:
        signal.signal(signal.SIGCHLD, before)
