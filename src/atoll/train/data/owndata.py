"""Epochs over data that each worker has for itself, such as its part of an iterable data set.

The workers' numbers of batches may differ. A worker whose data has ended gives its script the last batch
again, with weight 0, until no worker has a batch left. So all make equally many iterations, and each batch
counts once. Each iteration tells whether any worker has a batch left (`train/data/moredata.py`). Where no
iteration has told, all workers make a call for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from atoll.core.errors import UserError
from atoll.train.data.moredata import MoreData

_END: Any = object()  # stands for the batch after the last one


class OwnData:
    """The loops of a session over this worker's own data.

    Args:
        more: this worker's report, and all workers' answer.
        ask: returns True if any worker gives True; a call that all workers make.
        unsent: returns True if gradients have come that no reduction has seen.
        check: raises UserError if the run cannot end an epoch of own data.
        together: True if all workers make each iteration together; else each ends by itself.
    """

    def __init__(
        self,
        more: MoreData,
        *,
        ask: Callable[[bool], bool],
        unsent: Callable[[], bool],
        check: Callable[[], None],
        together: bool,
    ) -> None:
        self._more, self._ask, self._unsent = more, ask, unsent
        self._check, self._together = check, together

    def epoch(self, data: Iterable[Any]) -> Iterator[Any]:
        """Return the batches of one pass over `data`, and repeated ones while other workers have more."""
        self._check()
        return self._loop(iter(data)) if self._together else iter(data)

    def _loop(self, batches: Iterator[Any]) -> Iterator[Any]:
        more, batch = self._more, _END
        try:
            following = next(batches, _END)
            more.has_more, more.answer = following is not _END, None
            while self._goes_on():
                if following is _END:
                    if not more.repeats:
                        self._check_accumulation()
                    if batch is _END:
                        raise UserError(
                            "session.epoch_of: this worker's data gave no batch, and other workers have "
                            "some; give every worker at least one batch in an epoch"
                        )
                    more.repeats = True
                else:
                    batch, following = following, next(batches, _END)
                    more.has_more = following is not _END
                yield batch
            if more.repeats:
                self._check_accumulation()
        finally:
            more.has_more = more.repeats = False

    def _goes_on(self) -> bool:
        """Return True if any worker has a batch to give."""
        answer, self._more.answer = self._more.answer, None
        return self._ask(self._more.has_more) if answer is None else answer

    def _check_accumulation(self) -> None:
        """Raise UserError if a repeated batch would be added to gradients of another."""
        if self._unsent():
            raise UserError(
                "session.epoch_of: this worker's data ended between two backwards of one optimizer.step(), "
                "and other workers have batches left; give each worker a multiple of the batches of a step"
            )
