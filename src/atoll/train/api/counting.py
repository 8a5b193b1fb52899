"""One worker's report of the samples of all workers in iterations that count (`core/events.py`:
SamplesCounted)."""

from __future__ import annotations

from typing import Any, Protocol


class Loads(Protocol):
    """The part of a session's state that changes when a checkpoint is loaded or a worker enters a run
    (`train/checkpoint/resume.py`: TrainingState).

    Attributes:
        loaded: time of the latest load; 0: none.
        counted_from: the count of samples at that load, or when this worker entered the run.
    """

    loaded: float
    counted_from: float


class SampleReport:
    """The count that this worker knows, and the part of it that the worker has reported."""

    def __init__(self, state: Loads) -> None:
        """Report the count of a session; `state` is the session's."""
        self._state = state
        self._known: float | None = None  # None: no count is known since the latest load
        self._reported = 0.0
        self._lacks = self._told_of_lack = False  # an iteration's count cannot be known; it was reported
        self._followed: tuple[float, float] | None = None  # the state's values when they were last read

    def know(self, count: float | None) -> None:
        """Take the count after an iteration; None: this worker cannot know it."""
        self._follow()
        self._known = count
        self._lacks = self._lacks or count is None

    def news(self, *, whole_at: float = 0.0, ends: bool = False) -> dict[str, Any] | None:
        """Return the fields of an event that reports news; None without news.

        `whole_at` and `ends` are fields of the event. An unknown count is whole at no time.
        """
        self._follow()
        begin, whole_at = self._reported, 0.0 if self._known is None else whole_at
        end = begin if self._known is None else max(begin, self._known)
        tells_of_lack = self._lacks and not self._told_of_lack
        if not (end > begin or whole_at or ends or tells_of_lack):
            return None
        self._reported, self._told_of_lack = end, self._lacks
        fields = {"loaded": self._state.loaded, "begin": begin, "end": end, "whole_at": whole_at}
        return {**fields, "partial": self._lacks, "ends": ends}

    def _follow(self) -> None:
        """Begin at the checkpoint's count after a load, and at the given count after an entry."""
        loaded, counted_from = now = self._state.loaded, self._state.counted_from
        if now == self._followed:
            return
        is_load = self._followed is None or self._followed[0] != loaded
        if is_load:
            self._known, self._lacks, self._told_of_lack = None, False, False
        if is_load or self._known is None:
            self._reported = counted_from
        self._followed = now
