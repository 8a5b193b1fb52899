"""Write-ahead of each turn's records: the journal before the answers, and its replay after a restart."""

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

_RETRY_SECONDS = 5.0  # seconds before a failed journal is tried again


class Ledger:
    """Writes each turn's records to `journal`, if there is one, and then sends the answers."""

    def __init__(self, journal: HubJournal | None, book: Book, decisions: Decisions, turn: Turn) -> None:
        self._journal, self._book, self._decisions, self._turn = journal, book, decisions, turn
        # By the hub's clock:
        self._fails_until = 0.0  # 0: the journal does not fail
        self._written_since = 0.0
        self._has_told = False  # of the journal's trouble, and not yet of its end

    def replay(self) -> None:
        """Restore the state from the journal. Silences are counted from now on."""
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
        """Write the turn's records, then send its answers."""
        turn, journal = self._turn, self._journal
        written, answers = bool(turn.records), list(turn.answers)
        if journal is not None:
            self._write(journal)
            if not self._fails_until:
                answers += turn.votes
        turn.clear()
        for peer, message in answers:
            if peer:  # sending never waits: a lost answer is requested again
                server.send(peer, encode(message))
        if written and journal is not None:
            reach("hub.answered", journal.commits)

    def _write(self, journal: HubJournal) -> None:
        """Write the turn's records. A full disk does not stop the run: once there is room, the journal is
        rewritten from the full state.

        That it is written again is told once it has lasted: on a full disk the journal that is removed leaves
        room for the start of the next.
        """
        now = self._turn.now()
        if self._fails_until > now:
            return
        try:
            if self._fails_until:
                self._compact(journal)
                self._fails_until, self._written_since = 0.0, now
            elif self._turn.records:
                journal.append(self._turn.records)
                if journal.is_long:
                    self._compact(journal)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                reason = (
                    f"{error.strerror or error}; a hub that is started again would not know what comes now"
                )
                self._decisions.add("journal", f"{journal.path} is not written", reason)
            if not self._fails_until:
                with contextlib.suppress(OSError):
                    journal.forsake()
            self._fails_until = now + _RETRY_SECONDS
            return
        if self._has_told and now >= self._written_since + _RETRY_SECONDS:
            self._has_told = False
            self._decisions.add("journal", "written again", "the disk takes it")

    def _compact(self, journal: HubJournal) -> None:
        if journal.began is not None:
            journal.replace([journal.began, Knows(at=self._turn.now(), state=self._book.state())])
