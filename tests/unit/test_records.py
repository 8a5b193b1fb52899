"""A worker's records: whoever tells of its steps, from whichever thread, none is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from atoll.core.config import Config
from atoll.core.events import AnyEvent, StepDone
from atoll.observe.journal import JournalReader
from atoll.observe.notices import Notices
from atoll.observe.rundir import DIRECTORY_VARIABLE
from atoll.train.api.meter import Taken
from atoll.train.api.place import Place
from atoll.train.api.records import Records

SECONDS = 20.0


class Worker:
    """Worker 0 of one, as `Records` sees it: its place, its state, and the workers that it meets."""

    def __init__(self) -> None:
        self.place = Place(rank=0, world=1)
        self.ranks, self.late = [0], False
        self.iteration = 0
        self.loaded = self.counted_from = 0.0

    def gather(self, value: Any, _what: str) -> list[Any]:
        return [value]


def test_a_step_that_a_thread_is_telling_of_is_in_the_journal_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held between taking the step and writing it; the script ends meanwhile."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    worker: Any = Worker()
    notices, held, goes_on = Notices(0), threading.Event(), threading.Event()

    def hold(event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            held.set()
            assert goes_on.wait(SECONDS)

    notices.bus.subscribe(hold)
    records = Records(Config(), worker, worker, notices=notices)
    records.open(worker)
    worker.iteration = 1
    records.stepped(Taken(at=0.0, seconds=0.1, waiting=0.0, bytes_sent=0, phases={}), 8.0, {})
    warns = threading.Thread(target=records.warn, args=("a line of another thread",))
    ends = threading.Thread(target=records.close)
    warns.start()
    assert held.wait(SECONDS)
    ends.start()
    ends.join(0.2)  # a close that does not wait is over by then
    goes_on.set()
    for thread in (warns, ends):
        thread.join(SECONDS)
        assert not thread.is_alive()
    events = list(JournalReader(tmp_path / "workers" / "0.jsonl").read())
    assert [event.iteration for event in events if isinstance(event, StepDone)] == [1]
