"""A launcher's reports on a run, in the journals and for the verdict; and the workers' own reports."""

from __future__ import annotations

import contextlib

from atoll.core.errors import UserError
from atoll.core.events import AnyEvent, Failed, Gone, Started, Warned
from atoll.core.runclock import record_time
from atoll.observe.journal import Journal, JournalReader
from atoll.observe.rundir import RunDirectory


class Words:
    """The reports of one launcher about the run in `directory`."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._words: list[AnyEvent] = []

    def warn(self, worker: int, message: str) -> None:
        """Write a warning to a worker's journal, where the command looks for it."""
        self._write(Warned(time=record_time(), worker=worker, message=message))

    def fail(self, worker: int, message: str, status: int = 1) -> None:
        """Report what ends the run."""
        failed = Failed(
            time=record_time(),
            worker=worker,
            error="RunError",
            message=message,
            traceback="",
            exit_status=status,
            by_launcher=True,
        )
        self._words.append(failed)  # the disk may be full
        self._write(failed)

    def gone(self, worker: int, code: int, at: float) -> None:
        """Report how a worker's process has ended."""
        self._words.append(Gone(time=at, worker=worker, exit_code=code))

    def take(self) -> list[AnyEvent]:
        """Return the ends of processes and the errors that end the run, since the last call."""
        words, self._words = self._words, []
        return words

    def errors(self, *workers: int) -> list[Failed]:
        """Return the errors that workers have reported, in all their lives."""
        journals = (JournalReader(self._directory.journal(worker)) for worker in workers)
        return [event for journal in journals for event in journal.read() if isinstance(event, Failed)]

    def failed_itself(self, worker: int) -> bool:
        """True if a worker's last report shows a mistake of the worker or its script, not a lost
        connection."""
        failed = self.errors(worker)
        return not failed or bool(failed[-1].traceback) or failed[-1].exit_status == UserError.exit_status

    def has_begun(self) -> bool:
        """True once the workers have met: each then says so in its journal."""
        journals = (JournalReader(self._directory.journal(worker)) for worker in self._directory.journals())
        return any(isinstance(event, Started) for journal in journals for event in journal.read())

    def _write(self, event: Warned | Failed) -> None:
        with contextlib.suppress(OSError), Journal(self._directory.journal(event.worker)) as journal:
            journal(event)
