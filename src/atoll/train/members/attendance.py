"""One worker's view of the workers in a run with shards, and the number of its next call."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.train.api.place import Place


class Attendance:
    """One worker's view of the run.

    Attributes:
        place: this worker's place in the run.
        late: True for a worker that came late and has yet to enter; it knows only itself.
        number: the number of this worker's next call.
        ranks: the ranks of the living workers.
        contributor: the contributor to which this worker belongs: itself at first.
        meets_in: the number of the call that this worker is in; -1 for none.
    """

    def __init__(self, place: Place, *, late: bool, grouped: bool = False) -> None:
        """Begin with all workers of the run. `grouped`: the shards know groups of workers, but not their
        members."""
        self.place, self.late, self.number = place, late, 0
        self._grouped = grouped
        self.ranks = [place.rank] if late else list(range(place.world))
        self.contributor = place.rank
        self.meets_in = -1

    @property
    def coming(self) -> int:
        """The number of the call that this worker is in, or else of its next call."""
        return self.number if self.meets_in < 0 else self.meets_in

    def enter(self, meeting: int, ranks: Sequence[int]) -> None:
        """Take part in the others' calls from number `meeting` on, with these `ranks`."""
        self.late, self.number, self.ranks = False, meeting, list(ranks)

    def begin(self) -> int:
        """Begin this worker's next call; return the call's number."""
        self.number += 1
        return self.number - 1

    def saw(self, ranks: Sequence[int]) -> None:
        """Take the living `ranks` from the answer to an iteration, between two calls; the first of them is
        the first worker now.

        An answer for groups names no workers: then the ranks of the latest call stay.
        """
        if not self._grouped:
            self.ranks = list(ranks)

    def lose(self, ranks: Sequence[int]) -> None:
        """Remove workers that were lost or have left."""
        self.ranks = [rank for rank in self.ranks if rank not in ranks] or [self.place.rank]
