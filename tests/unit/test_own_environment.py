"""The environment that a process was started with: `core/environment.py`."""

from __future__ import annotations

import os
import sys

import pytest

import atoll
from atoll.core.config import JOINED_VARIABLE
from atoll.core.environment import removed, started_with, variable
from atoll.core.errors import ConfigError

BEFORE = {"RANK": "0", "ATOLL_HUB": "tcp://h:1", "ATOLL_SITE": ""}


def test_what_a_script_has_removed() -> None:
    assert removed(BEFORE, BEFORE, BEFORE) == []
    assert removed(BEFORE, BEFORE, {}) == ["RANK", "ATOLL_HUB"]
    assert removed(["ATOLL_HUB", "ATOLL_RUN"], BEFORE, {"RANK": "1"}) == ["ATOLL_HUB"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has /proc")
def test_a_variable_outlives_its_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = started_with()["PATH"]
    monkeypatch.setenv("PATH", "/elsewhere")
    assert variable("PATH") == "/elsewhere"
    monkeypatch.delenv("PATH")
    assert variable("PATH") == before
    assert variable("NO_SUCH_VARIABLE") is None


def test_a_process_that_a_worker_has_started_joins_no_run_as_that_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", JOINED_VARIABLE: ""}.items():
        monkeypatch.setenv(name, value)
    atoll.join().close()
    atoll.join().close()  # the worker itself may have several sessions
    process, _, place = os.environ[JOINED_VARIABLE].partition(" ")
    assert process == str(os.getpid())
    monkeypatch.setenv(JOINED_VARIABLE, f"1 {place}")
    with pytest.raises(
        ConfigError, match=r"atoll\.join \(.*\) in a process that the worker has started, .* 1: "
    ):
        atoll.join()
    monkeypatch.setenv("MASTER_PORT", "2")  # it says itself which worker it is
    atoll.join().close()
