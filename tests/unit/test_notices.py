"""Where a worker's lines for people go: to its journals, and to standard error where nobody reads these."""

from __future__ import annotations

import pytest

from atoll.core.events import AnyEvent, Warned
from atoll.observe.notices import Notices
from atoll.observe.rundir import DIRECTORY_VARIABLE


@pytest.mark.parametrize("by_command", [True, False])
@pytest.mark.parametrize("heard", [True, False])
def test_a_line_is_shown_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_command: bool, heard: bool
) -> None:
    """`atoll run` shows what is in a worker's journal, and before there is one what it prints."""
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    if by_command:
        monkeypatch.setenv(DIRECTORY_VARIABLE, "runs/one")
    notices, events = Notices(), list[AnyEvent]()
    if heard:
        notices.bus.subscribe(events.append)
    notices.worker = 3
    notices.warn("the hub is away")
    printed = capsys.readouterr().err
    assert printed == ("" if by_command and heard else "atoll: the hub is away\n")
    found = [(each.worker, each.message) for each in events if isinstance(each, Warned)]
    assert found == ([(3, "the hub is away")] if heard else [])
