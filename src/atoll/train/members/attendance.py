"""Who takes part in a run with shards, as one worker knows it, and which call of all workers comes next."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.train.api.place import Place


class Attendance:
    """One worker's: its `place`, the `ranks` of those who live, and the `number` of its next call.

    A worker that has come `late` has yet to enter the run, and knows only itself.
    """

    def __init__(self, place: Place, *, late: bool) -> None:
        self.place, self.late, self.number = place, late, 0
        self.ranks = [place.rank] if late else list(range(place.world))
        self.meets_in = -1  # the call that this worker is in; -1: none

    @property
    def is_first(self) -> bool:
        """Whether this worker writes, and describes, for all."""
        return self.place.rank == self.ranks[0] and not self.late

    @property
    def coming(self) -> int:
        """The number of the call that this worker is in, or else of its next."""
        return self.number if self.meets_in < 0 else self.meets_in

    def enter(self, meeting: int, ranks: Sequence[int]) -> None:
        """This worker takes part from the others' call of that number on."""
        self.late, self.number, self.ranks = False, meeting, list(ranks)

    def lose(self, ranks: Sequence[int]) -> None:
        """These workers are gone."""
        self.ranks = [rank for rank in self.ranks if rank not in ranks] or [self.place.rank]
