"""What a turn has changed is written down before anybody hears of it, and known again after a restart."""

from __future__ import annotations

import contextlib

from atoll.core.points import reach
from atoll.hub.book import Book
from atoll.hub.decisions import Decisions
from atoll.hub.journal import HubJournal
from atoll.hub.records import Knows
from atoll.hub.turn import Turn
from atoll.net.endpoint import Server
from atoll.wire.messages import encode

_RETRY_SECONDS = 5.0  # before a journal that could not be written is tried again


class Ledger:
    """Writes the records of turns to `journal`, where there is one, and then sends the answers."""

    def __init__(self, journal: HubJournal | None, book: Book, decisions: Decisions, turn: Turn) -> None:
        self._journal, self._book, self._decisions, self._turn = journal, book, decisions, turn
        self._fails_until = 0.0  # by the hub's clock; 0: the journal does not fail

    def replay(self) -> None:
        """Know again what the hub knew that wrote the journal. Silence is counted from now on."""
        if self._journal is None:
            return
        self._decisions.muted = True
        for record in self._journal.records:
            self._book.apply(record)
        self._decisions.muted = False
        self._journal.records.clear()
        self._turn.clear()
        self._book.members.roll.hear_all(self._turn.now())

    def commit(self, server: Server) -> None:
        """Write down what this turn has changed, and then tell it."""
        turn, journal = self._turn, self._journal
        written, answers = bool(turn.records), list(turn.answers)
        if journal is not None:
            self._write(journal)
            if not self._fails_until:
                answers += turn.votes
        turn.clear()
        for peer, message in answers:
            if peer:  # who is gone, or reads nothing, asks again or is given up by its silence
                server.send(peer, encode(message))
        if written and journal is not None:
            reach("hub.answered", journal.commits)

    def _write(self, journal: HubJournal) -> None:
        """A disk that takes no more does not stop the run: the journal is written anew once it does."""
        now = self._turn.now()
        if self._fails_until > now:
            return
        try:
            if self._fails_until:
                self._compact(journal)
                self._fails_until = 0.0
                self._decisions.add("journal", "written again", "the disk takes it")
            elif self._turn.records:
                journal.append(self._turn.records)
                if journal.is_long:
                    self._compact(journal)
        except OSError as error:
            if not self._fails_until:
                reason = (
                    f"{error.strerror or error}; a hub that is started again would not know what comes now"
                )
                self._decisions.add("journal", f"{journal.path} is not written", reason)
                with contextlib.suppress(OSError):
                    journal.forsake()
            self._fails_until = now + _RETRY_SECONDS

    def _compact(self, journal: HubJournal) -> None:
        if journal.began is not None:
            journal.replace([journal.began, Knows(at=self._turn.now(), state=self._book.state())])
