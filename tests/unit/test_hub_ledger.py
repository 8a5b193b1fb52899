"""The hub's journal on a full disk: what is told of it, and how often."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from atoll.core.events import AnyEvent, Decided, EventBus
from atoll.hub.decisions import Decisions
from atoll.hub.ledger import Ledger
from atoll.hub.turn import Turn


class FullDisk:
    """Stands for the journal: it can be written `room` times, and removing it makes room for one more."""

    path, began, is_long, commits = Path("hub.bin"), object(), False, 0

    def __init__(self) -> None:
        self.room, self.appended = 0, 0

    def append(self, _records: Any) -> None:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= 1
        self.appended += 1

    replace = append

    def forsake(self) -> None:
        self.room = 1


def test_a_journal_that_breaks_again_and_again_is_told_of_once() -> None:
    journal, now, told = FullDisk(), [0.0], list[str]()

    def hear(event: AnyEvent) -> None:
        assert isinstance(event, Decided)
        told.append(event.choice)

    bus = EventBus()
    bus.subscribe(hear)
    turn = Turn(lambda: now[0])
    book = cast(Any, SimpleNamespace(state=lambda: None))
    ledger = Ledger(cast(Any, journal), book, Decisions(bus=bus), turn)

    def turns(seconds: int) -> None:
        for _ in range(seconds):
            now[0] += 1.0
            turn.keep(cast(Any, object()))
            ledger.commit(cast(Any, None))

    turns(60)
    assert journal.appended > 5  # each time the whole state, and no turn's records after it
    assert told == ["hub.bin is not written"]
    journal.room = 10**6
    turns(10)
    assert told == ["hub.bin is not written", "written again"]
    journal.room = 0
    turns(10)
    assert told == ["hub.bin is not written", "written again", "hub.bin is not written"]
