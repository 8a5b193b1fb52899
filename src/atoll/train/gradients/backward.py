"""The end of each backward, for all of a session's models together.

Workers must run their collectives in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.scriptline import waiting_line
from atoll.core.stands import Stand, gradients
from atoll.tensors.torch_compat import at_end_of_backward, backward_under_way
from atoll.train.api.speed import Stretch
from atoll.train.gradients.latesteps import LateSteps
from atoll.train.gradients.reducer import Reducer
from atoll.train.group.rounds import Ring


class BackwardEnd:
    """The point at which a backward ends and the session's reducers run.

    One model's messages may leave while backward goes on. With several models, a gradient that one worker
    lacks would change the order in which messages leave. So they leave at the end, model by model, for each
    model of which any worker has new gradients.
    """

    def __init__(self, ring: Ring | None, stretch: Stretch | None = None) -> None:
        self._ring, self._stretch = ring, stretch
        self._reducers: list[Reducer] = []
        self._late: list[LateSteps] = []  # by model
        self._armed = False
        self._late_in = -1  # the backward within which a step was called
        self.number = 0  # the backward that is under way, or the next one
        self.in_piece = False  # True inside a piece of a batch (`train/api/pieces.py`)
        self.ends = 0  # the backwards that have ended and have begun to reduce gradients

    def add(self, reducer: Reducer, late: LateSteps) -> None:
        self._reducers.append(reducer)
        self._late.append(late)
        for each in self._reducers:
            each.sends_early = len(self._reducers) == 1

    def remove(self, reducer: Reducer) -> None:
        """Forget the reducer of a model that is prepared again."""
        del self._late[self._reducers.index(reducer)]
        self._reducers.remove(reducer)

    def arm(self) -> None:
        """Ask for `_end` to run when the backward that is now running ends."""
        if not self._armed:
            self._armed = True
            for reducer in self._reducers:
                reducer.drop_kept()
                reducer.watch.look_for_edits()
            at_end_of_backward(self._end)

    def step_waits(self) -> bool:
        """Have a step that is called within a backward wait for its end; return False inside a piece of a
        batch, when gradients of other pieces are missing."""
        if self.in_piece:
            return False
        if self._late_in != backward_under_way():
            self._late_in = backward_under_way()
            for late in self._late:
                late.forget()  # those of a backward that raised
            at_end_of_backward(self._make_late_steps)
        return True

    def _make_late_steps(self) -> None:
        """Make the steps that wait, if the gradients are reduced or none have come."""
        if not self._armed:
            for late in self._late:
                late.make()

    def settle(self) -> None:
        """Wait out a slowed worker's extra time before gradients leave (`train/api/speed.py`)."""
        if self._stretch is not None:
            self._stretch.settle()

    def before_forward(self) -> None:
        """Give up a backward that raised before its end. Raises RunError if messages had already left."""
        if self._stretch is not None:
            self._stretch.begin()
        if self._armed:
            self._armed = False
            self.number += 1
            for reducer in self._reducers:
                reducer.abandon()

    def repeat(self) -> None:
        """Forget a backward that may have raised: its batch is computed again, in backwards that do not
        reduce. `finish` then does."""
        if self._armed:
            self._armed = False
            self.number += 1
        for reducer in self._reducers:
            reducer.sum.gradients.repeat()
            reducer.begin()

    def finish(self) -> None:
        """Reduce gradients that were put together outside of a backward, as at the end of one."""
        self._end()

    def _end(self) -> None:
        self._armed = False
        self.number += 1
        for late in self._late:
            late.check()
        self.settle()
        waiting = [reducer for reducer in self._reducers if reducer.synchronous]
        self.ends += bool(waiting)
        for reducer in self._reducers:
            if reducer.unsent:
                reducer.watch.look()
            if not reducer.synchronous:
                reducer.watch.note_edits()
                reducer.begin()
        if self._ring is None or len(waiting) < 2:
            due = [reducer for reducer in waiting if reducer.unsent or len(self._reducers) == 1]
        else:
            due = self._due(self._ring, waiting)
        for reducer in due:
            reducer.reduce()
        self._make_late_steps()

    def reduce_before_step(self, reducer: Reducer) -> None:
        """Reduce gradients that no backward has reduced before `reducer`'s step, as on a worker without a
        batch.

        With several models, the other workers ask at the end of their backward which models have new
        gradients. This worker joins that collective.
        """
        due = [reducer]
        if self._ring is not None and len(self._reducers) > 1:
            due = self._due(self._ring, self._reducers, also=reducer)
        for each in due:
            each.reduce()

    def _due(self, ring: Ring, reducers: Sequence[Reducer], also: Reducer | None = None) -> list[Reducer]:
        """Return the reducers for which any worker has new gradients, and `also`. A collective."""
        due = self._ask(ring, reducers, also)
        if any(reducer.sum.admit() for reducer in due):
            due = self._ask(ring, reducers, also)  # newcomers have not reported their gradients
        return due

    @staticmethod
    def _ask(ring: Ring, reducers: Sequence[Reducer], also: Reducer | None) -> list[Reducer]:
        """Return the reducers for which any worker reports new gradients, or names the reducer as `also`."""

        def where() -> Stand:
            return gradients(reducers[0].steps, waiting_line())

        own = [float(each.unsent or each is also) for each in reducers]
        news = ring.sum(own, "which models have new gradients", where)
        return [each for each, count in zip(reducers, news, strict=True) if count]
