"""The calls of a session that all workers make together. Afterwards copies are equal on all workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from atoll.core.scriptline import script_line
from atoll.core.stands import call
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.members.meetings import Reduction
from atoll.train.members.workers import Value, Workers, asked_of_gather, asked_of_reduce
from atoll.train.sync.strategies import Strategy


class Collectives:
    """One worker's part in the calls that all workers make.

    `follow()` makes the schedules' steps that are due by the samples of other workers.
    """

    def __init__(
        self, workers: Workers, state: TrainingState, strategy: Strategy, follow: Callable[[], None]
    ) -> None:
        self._workers, self._state, self._strategy, self._follow = workers, state, strategy, follow

    def call(self, name: str, asks: str = "") -> AbstractContextManager[None]:
        """Mark this worker as inside a call that all workers make; see `Workers.standing`."""
        return self._workers.standing(call(name, script_line(), asks=asks, step=self._state.iteration))

    def settle(self) -> None:
        """Wait until the gradients that this worker has sent by itself count. Exchanges may go on while it
        computes."""
        self._workers.gather_group()
        for prepared in self._state.prepared:
            prepared.reducer.settle()

    def before_load(self) -> bool:
        """Wait as `settle` does, before the script loads an optimizer's state (see
        `Strategy.before_load`)."""
        self._workers.gather_group()
        return self._strategy.before_load()

    def take_newest(self) -> None:
        """Take the newest parameters. All workers are in a call, so nobody steps any more."""
        self._strategy.refresh()
        for prepared in self._state.prepared:
            prepared.reducer.before_use()

    def confirm(self, what: str) -> None:
        """Raise UserError if workers that step copies of their own treated a mean differently. A collective
        of these.

        `what` names the moment, for messages.
        """
        for prepared in self._state.prepared:
            prepared.reducer.confirm(what)

    def unify(self, what: str, *, registered: bool = False) -> None:
        """Let each worker see the values that all have written into models which they share, and make equal
        the state of which each has a copy; `registered` as in `WorkerCopies.unify`."""
        for tiers in self._state.tiers:
            tiers.sync(what)
        self._state.copies.unify(self._workers, what, registered=registered)
        self._follow()

    def barrier(self) -> None:
        """Wait for all workers (`Session.barrier`)."""
        name = "session.barrier"
        with self.call(name):
            self.settle()
            self._workers.barrier()
            self.confirm(name)
            self._strategy.refresh()
            self.unify(name)

    def refresh(self, name: str) -> None:
        """Wait for all workers inside the call `name`, and take the newest parameters: nobody steps any
        more. A worker that has yet to enter a run under way gets them as it enters."""
        if not self._strategy.collective and not self._workers.late:
            self.settle()
            self._workers.barrier(name)
            self._strategy.refresh()

    def before_saving(self) -> None:
        """Bring the state that a checkpoint holds to this worker, inside `session.save`."""
        name = "session.save"
        self.refresh(name)
        self.confirm(name)
        self.unify(name, registered=True)

    def any_of(self, name: str, own: bool) -> bool:
        """Return True if `own` is True on any worker. `name` is the call in the script.

        A worker that has yet to enter a run under way knows its own alone.
        """
        if self._workers.late:
            return own
        with self.call(name):
            return b"1" in self._workers.gather_bytes(b"1" if own else b"0", name)

    def are_alike(self, name: str, own: str) -> bool:
        """Return True if all workers give the call `name` an equal word. A worker that has yet to enter a run
        under way knows its own alone."""
        if self._workers.late:
            return True
        with self.call(name):
            return len(set(self._workers.gather(own, name))) == 1

    def reduce(self, value: Value, op: Reduction, weight: float | None) -> Value:
        """Reduce a value over the workers (`Session.reduce`)."""
        with self.call("session.reduce", asked_of_reduce(value, op)):
            reduced = self._workers.reduce(value, op, weight)
        self._follow()
        return reduced

    def gather(self, value: Any) -> list[Any]:
        """Gather one value from each worker (`Session.gather`)."""
        with self.call("session.gather", asked_of_gather(value)):
            gathered = self._workers.gather(value)
        self._follow()
        return gathered
