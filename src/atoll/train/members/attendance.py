"""The workers that take part in a run with shards, as one worker knows them, and the number of its next
call.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.train.api.place import Place


class Attendance:
    """One worker's view of the run: its `place`, the `ranks` that live, and the `number` of its next call.

    A worker that has come `late` has yet to enter the run, and knows only itself. `contributor` is the
    contributor to which it belongs: itself at first.
    """

    def __init__(self, place: Place, *, late: bool, grouped: bool = False) -> None:
        """`grouped`: the shards know groups of workers, and not their members."""
        self.place, self.late, self.number = place, late, 0
        self._grouped = grouped
        self.ranks = [place.rank] if late else list(range(place.world))
        self.contributor = place.rank
        self.meets_in = -1  # the call that this worker is in; -1: none

    @property
    def coming(self) -> int:
        """Number of the call that this worker is in, or else of its next."""
        return self.number if self.meets_in < 0 else self.meets_in

    def enter(self, meeting: int, ranks: Sequence[int]) -> None:
        """Take part in the others' calls from number `meeting` on, with these `ranks`."""
        self.late, self.number, self.ranks = False, meeting, list(ranks)

    def begin(self) -> int:
        """Begin this worker's next call; returns the call's number."""
        self.number += 1
        return self.number - 1

    def saw(self, ranks: Sequence[int]) -> None:
        """Take the living `ranks` from the answer to an iteration, between two calls: the first of them is
        the first now. An answer for groups names no workers: the ranks of the latest call stand."""
        if not self._grouped:
            self.ranks = list(ranks)

    def lose(self, ranks: Sequence[int]) -> None:
        """Remove workers that are gone."""
        self.ranks = [rank for rank in self.ranks if rank not in ranks] or [self.place.rank]
