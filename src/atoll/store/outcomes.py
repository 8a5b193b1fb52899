"""The log's answers to an input, as data on which the process around it acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from atoll.core.errors import RunError
from atoll.wire.messages import AnyMessage, Commit, WorkerStand

if TYPE_CHECKING:
    from atoll.store.entries import AnyEntry


Request: TypeAlias = tuple[str, int]  # a message to the log: its type, and its iteration or its meeting


class StoreError(RunError):
    """The store's state contradicts its log: the run cannot go on."""


@dataclass(frozen=True)
class Reply:
    """A message for a worker, if this incarnation of it is still there.

    Attributes:
        request: the worker's message that it answers.
    """

    worker: int
    incarnation: int
    message: AnyMessage
    request: Request


@dataclass(frozen=True)
class Meeting:
    """A complete meeting: each of `workers` gets the parts of all, as wire's Met.

    Attributes:
        handles: the handle of each worker's payload; they are to be freed afterwards.
        stand: the place of one of the workers in its script.
    """

    number: int
    what: str
    workers: list[int]
    incarnations: list[int]
    handles: list[int]
    stand: WorkerStand | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of an input to the log.

    Attributes:
        entries: new entries, which are in the log already.
        refused: why the input changed nothing, in one line.
        released: handles of payloads that no worker will get: free them.
        mismatch: one line for all workers: their scripts are at inconsistent places, or step with different
            hyperparameters.
    """

    entries: list[AnyEntry] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    refused: str = ""
    met: list[Meeting] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    mismatch: str = ""


@dataclass
class Draft:
    """An outcome while it is put together.

    Attributes:
        counted: the commits that count from now on, with their workers.
    """

    entries: list[AnyEntry] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    counted: list[tuple[int, Commit]] = field(default_factory=list)
    refused: str = ""
    met: list[Meeting] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    mismatch: str = ""

    def write(self, entry: AnyEntry) -> None:
        """Add an entry to the log."""
        self.entries.append(entry)

    def reply(self, worker: int, incarnation: int, message: AnyMessage, request: Request) -> None:
        """Add an answer to a worker's `request`."""
        self.replies.append(Reply(worker, incarnation, message, request))

    def outcome(self) -> Outcome:
        """Return the finished outcome."""
        return Outcome(self.entries, self.replies, self.refused, self.met, self.released, self.mismatch)
