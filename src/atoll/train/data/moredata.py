"""The workers' word to one another on whether data that each has for itself goes on."""

from __future__ import annotations


class MoreData:
    """This worker's report on its own data, which goes with each iteration, and the answer of all workers.

    Args:
        heard: True if an iteration's answer is that of all workers; else answers are ignored.

    Attributes:
        has_more: True if this worker has a batch after the present one.
        repeats: True if the present batch is repeated: it has weight 0, since others have batches left.
        answer: True if any worker has a batch after the present one; None if no iteration has told.
    """

    def __init__(self, *, heard: bool = True) -> None:
        self._heard = heard
        self.has_more = self.repeats = False
        self.answer: bool | None = None

    def hear(self, answer: bool) -> None:
        """Take the answer that came with an iteration."""
        if self._heard:
            self.answer = answer
