"""What a launcher says of a run, in the journals and to who judges the run; and what workers said."""

from __future__ import annotations

import contextlib

from atoll.core.errors import UserError
from atoll.core.events import AnyEvent, Failed, Gone, Started, Warned
from atoll.core.runclock import record_time
from atoll.observe.journal import Journal, JournalReader
from atoll.observe.rundir import RunDirectory


class Words:
    """The words of one launcher about the run in `directory`."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._words: list[AnyEvent] = []

    def warn(self, worker: int, message: str) -> None:
        """Leave word where the command looks for it: in a worker's journal."""
        self._write(Warned(time=record_time(), worker=worker, message=message))

    def fail(self, worker: int, message: str, status: int = 1) -> None:
        """Leave word of what ends the run."""
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
        """Say how a worker's process has ended."""
        self._words.append(Gone(time=at, worker=worker, exit_code=code))

    def take(self) -> list[AnyEvent]:
        """How processes have ended, and what ends the run, since the last call."""
        words, self._words = self._words, []
        return words

    def errors(self, *workers: int) -> list[Failed]:
        """What workers have said of their errors, in all their lives."""
        journals = (JournalReader(self._directory.journal(worker)) for worker in workers)
        return [event for journal in journals for event in journal.read() if isinstance(event, Failed)]

    def failed_itself(self, worker: int) -> bool:
        """True where a worker's last report shows a mistake of the worker or its script, not a lost
        connection.
        """
        failed = self.errors(worker)
        return not failed or bool(failed[-1].traceback) or failed[-1].exit_status == UserError.exit_status

    def has_begun(self) -> bool:
        """Whether the workers have met: each says so in its journal then."""
        journals = (JournalReader(self._directory.journal(worker)) for worker in self._directory.journals())
        return any(isinstance(event, Started) for journal in journals for event in journal.read())

    def _write(self, event: Warned | Failed) -> None:
        with contextlib.suppress(OSError), Journal(self._directory.journal(event.worker)) as journal:
            journal(event)
