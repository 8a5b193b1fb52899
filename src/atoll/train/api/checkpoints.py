"""A session's checkpoints: saving, loading, and resuming a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.core import events
from atoll.core.errors import UserError
from atoll.core.runclock import record_time
from atoll.tensors.checkpoint import is_checkpoint_there
from atoll.train.api.collectives import Collectives
from atoll.train.api.compose import Runtime
from atoll.train.api.maskcheck import MaskCheck
from atoll.train.checkpoint.resume import Stateful, check_state


class Checkpoints:
    """One worker's part in saving, loading and resuming."""

    def __init__(
        self,
        runtime: Runtime,
        collectives: Collectives,
        masks: MaskCheck,
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Time spent inside `aside()` does not count as training time."""
        self._runtime, self._collectives, self._masks, self._aside = runtime, collectives, masks, aside
        self._state, self._workers, self._records = runtime.state, runtime.workers, runtime.records
        self._entrance = runtime.entrance

    def register(self, objects: dict[str, Stateful]) -> None:
        """Register objects with a state_dict (`Session.register`). Raises UserError for other objects."""
        for name, stateful in objects.items():
            if not hasattr(stateful, "state_dict") or not hasattr(stateful, "load_state_dict"):
                raise UserError(
                    f"session.register({name}=...): a {type(stateful).__name__} has no state_dict and "
                    "load_state_dict"
                )
            check_state(name, stateful)
        self._state.registered.update(objects)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save a checkpoint (`Session.save`)."""
        with self._collectives.call("session.save"):
            self._collectives.before_saving()
            with self._aside():
                self._state.save(self._workers, path)
        if self._workers.is_first:  # under `ssp` and `asp` each worker is at an iteration of its own
            self._records.emit(events.Saved, iteration=self._state.iteration, path=str(path))

    def resume(self, folder: str | os.PathLike[str] | None) -> int:
        """Enter a run under way, or load a checkpoint if there is one (`Session.resume`)."""
        state, entrance = self._state, self._entrance
        if entrance is not None and entrance.late:
            with self._aside():
                entered = entrance.enter()
            if entered:
                at = f"at iteration {state.iteration}"
                self._records.decided_here(events.Decided, "entered", at, "a living worker gave its state")
                return state.iteration
        with self._collectives.call("session.resume"):
            there = folder is not None and is_checkpoint_there(folder)
            if folder is not None and any(
                self._workers.gather(there, "session.resume (who has a checkpoint)")
            ):
                self.load(folder)
            elif entrance is not None and state.iteration:
                self._records.warn(
                    f"nobody lives who could give its state: parameters and optimizer are those of iteration "
                    f"{state.iteration}, and schedulers, buffers and data begin anew"
                )
            elif folder is not None and self._workers.is_first:
                self._records.warn_once(
                    f"session.resume {folder}",
                    f"session.resume found no checkpoint in {folder}: starting at step {state.iteration}",
                )
            return state.iteration

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint (`Session.load`)."""
        if self._entrance is not None and self._entrance.late:
            raise UserError(
                "session.load: this worker comes late, and the run is under way; call session.resume(folder) "
                "in its place"
            )
        with self._collectives.call("session.load"):
            self._collectives.settle()
            regrouping = self._runtime.regrouping
            grouped = regrouping is not None and regrouping.grouping > 0
            check("call", Choices({"call": "session.load", "grouped": grouped}))
            # Workers that step by themselves do not know of the others' last steps.
            whole_at = record_time() if self._runtime.strategy.collective else 0.0
            self._records.counted(self._runtime.counted_samples(), whole_at=whole_at)
            with self._aside():
                saved = self._state.load(self._workers, path)
                self._runtime.strategy.loaded()
            self._masks.begin()
        self._tell_of_random(saved)

    def _tell_of_random(self, saved: int) -> None:
        """Record what a load at another number of workers than the `saved` one does to random numbers."""
        world = self._state.world
        if saved == world:
            return
        what = "each worker goes on with the state of its rank"
        if saved < world:
            what += f", and those from worker {saved} on derive theirs from worker 0's"
        self._records.decided("random numbers", f"of {saved} saved states, for {world} workers", what)
