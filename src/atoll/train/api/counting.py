"""One worker's report of the samples of all workers in iterations that count (`core/events.py`: Counted)."""

from __future__ import annotations

from typing import Any, Protocol


class Loads(Protocol):
    """The part of a session's state that a load of a checkpoint changes (`train/checkpoint/resume.py`:
    TrainingState).

    Attributes:
        loaded: the time of the latest load; 0: none.
        counted_from: the count of samples then, or when this worker entered the run.
    """

    loaded: float
    counted_from: float


class SampleReport:
    """The count that this worker knows, and the part of it that the worker has reported."""

    def __init__(self, state: Loads) -> None:
        """Report the count of a session; `state` is the session's."""
        self._state = state
        self._known: float | None = None  # None: not known since the latest load
        self._reported = 0.0
        self._loaded: float | None = None  # the load up to which this worker has followed; None: none yet

    def know(self, count: float | None) -> None:
        """Take the count after an iteration; None: this worker does not know it."""
        self._follow()
        self._known = count

    def news(self, *, whole: bool = False, ends: bool = False) -> dict[str, Any] | None:
        """Return the fields of the event that reports what is new; None if nothing is.

        `whole` and `ends` are those of the event. A count that is not known is not whole.
        """
        self._follow()
        known, begin = self._known, self._reported
        end = begin if known is None else max(begin, known)
        whole = whole and known is not None
        if not (end > begin or whole or ends):
            return None
        self._reported = end
        return {"loaded": self._loaded, "begin": begin, "end": end, "whole": whole, "ends": ends}

    def _follow(self) -> None:
        """Begin at the loaded checkpoint's count, if one was loaded."""
        if self._loaded != self._state.loaded:
            self._reported, self._known = self._state.counted_from, None
            self._loaded = self._state.loaded
