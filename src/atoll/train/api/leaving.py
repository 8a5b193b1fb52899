"""The end of a session: workers part, and open connections and files are closed."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from atoll.core.errors import RunError
from atoll.core.runclock import record_time
from atoll.core.scriptline import script_line
from atoll.core.stands import end
from atoll.train.api.collectives import Collectives
from atoll.train.api.compose import Runtime
from atoll.train.api.maskcheck import MaskCheck

_END = (
    "the end of the session, which it reached after {} iterations (every worker must make equally many, and "
    "leave its `with` block)"
)
_LEFT_OPEN = (
    "the script has ended and has not closed its session, so this worker did not wait for the others: write "
    "`with atoll.join() as session:`, or call session.close() at the end of the script"
)


class Leaving:
    """One worker's end of the session. `closes` end the session's own listening to torch.

    In a process that the script has forked nothing happens: the session belongs to its parent.
    """

    def __init__(
        self,
        runtime: Runtime,
        collectives: Collectives,
        masks: MaskCheck,
        closes: Sequence[Callable[[], None]],
    ) -> None:
        self._runtime, self._collectives, self._masks, self._closes = runtime, collectives, masks, closes
        self._state, self._workers, self._records = runtime.state, runtime.workers, runtime.records
        self._process, self._is_over = os.getpid(), False

    def begin(self) -> None:
        """Leave the session at the process's end if the script has not done so by then."""
        if self._records.kept or not self._workers.alone:  # else nothing would be lost
            atexit.register(self._end_with_process)

    @property
    def has_left(self) -> bool:
        """True once the session is over, and in a forked process."""
        return self._is_over or os.getpid() != self._process

    def finish(self) -> None:
        """Write the last records, wait for the other workers to finish too, and let the model go."""
        if self.has_left:
            return
        self._records.finished()
        entrance, stand = self._runtime.entrance, end(self._state.iteration, script_line())
        try:
            if self._runtime.together and entrance is not None:
                entrance.ending()
            with self._workers.standing(stand):
                if self._runtime.together:
                    whole_at = self._end_together(_END.format(self._state.iteration))
                else:
                    whole_at = self._end_alone()
            if not self._runtime.late:
                self._records.counted(self._runtime.counted_samples(), whole_at=whole_at)
            if self._runtime.member is not None:
                self._runtime.member.finish(self._state.iteration)
            self._records.tell_of_node()
        finally:
            self.leave()

    def _end_together(self, where: str) -> float:
        """Apply all contributions, bring state home, and wait for all workers. Return the time after that, by
        which this worker knows all samples that count.

        No worker leaves early: the store goes with the worker that holds it, and worker 0 reads all journals.
        Workers that come now are let in.
        """
        self._runtime.drain(where)
        self._masks.look_at_end()
        self._state.copies.unify(self._workers, where)
        self._give_back()
        self._workers.barrier(where)
        self._collectives.confirm(where)
        return record_time()

    def _end_alone(self) -> float:
        """Bring state home, and with it the count of all workers' samples. Return the time at which the count
        was asked for; 0: no shard has answered.

        Workers end when they have no more data, one before the other.
        """
        for prepared in self._state.prepared:
            prepared.reducer.counted_at_shards = 0.0
        asked_at = record_time()
        with contextlib.suppress(RunError):  # the shards are gone: the training still counts
            self._give_back()
        self._workers.part()
        is_answered = any(prepared.reducer.counted_at_shards for prepared in self._state.prepared)
        return asked_at if is_answered else 0.0

    def _give_back(self) -> None:
        """Bring the state of optimizers that stepped elsewhere to this worker, for the script's use."""
        if not self._runtime.late:
            for prepared in self._state.prepared:
                prepared.give_back()

    def leave(self) -> None:
        """Close everything, after an error or at the end."""
        if self.has_left:
            return
        self._is_over = True
        atexit.unregister(self._end_with_process)
        with contextlib.suppress(RuntimeError):  # a failed device must not hide the first error
            self._records.read_logged()
        with contextlib.ExitStack() as ends:  # in reverse order; all run, even after an error
            ends.callback(self._records.summarise)
            if self._runtime.member is not None:
                ends.callback(self._runtime.member.close)
            ends.callback(self._workers.close)
            for ring in (self._runtime.ring, self._runtime.group_ring):
                if ring is not None:
                    ends.callback(ring.close)
            ends.callback(self._records.close)
            for prepared in self._state.prepared:
                ends.callback(prepared.close)
            for each in self._closes:
                ends.callback(each)

    def _end_with_process(self) -> None:
        """Write the records of a session that the script has left open, and say so.

        The script may have ended by `sys.exit` while the others train on, so this worker waits for nobody.
        Where an error has ended the script, its line is enough.
        """
        if self.has_left:
            return
        if not self._workers.alone and getattr(sys, "last_value", None) is None:
            self._records.warn_together("open session", _LEFT_OPEN)
        with contextlib.suppress(RuntimeError):  # Python 3.12 and later start no thread at a process's end
            self.leave()
