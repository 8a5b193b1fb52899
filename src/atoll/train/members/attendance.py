"""Who takes part in a run with shards, as one worker knows it, and which call of all workers comes next."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.train.api.place import Place


class Attendance:
    """One worker's: its `place`, the `ranks` of those who live, and the `number` of its next call.

    A worker that has come `late` has yet to enter the run, and knows only itself. `contributor` is the one as
    part of which it contributes: itself at first.
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
        """The number of the call that this worker is in, or else of its next."""
        return self.number if self.meets_in < 0 else self.meets_in

    def enter(self, meeting: int, ranks: Sequence[int]) -> None:
        """This worker takes part from the others' call of that number on."""
        self.late, self.number, self.ranks = False, meeting, list(ranks)

    def begin(self) -> int:
        """This worker comes to its next call; returns that one's number."""
        self.number += 1
        return self.number - 1

    def saw(self, ranks: Sequence[int]) -> None:
        """These live, as an iteration's word says, between two calls: the first of them is the first now. Of
        groups it names no workers: those of the latest call stand."""
        if not self._grouped:
            self.ranks = list(ranks)

    def lose(self, ranks: Sequence[int]) -> None:
        """These workers are gone."""
        self.ranks = [rank for rank in self.ranks if rank not in ranks] or [self.place.rank]
