"""The optimizers of one model in tiers, and the thread on which they step its chunks.

Source: docs/memory.md, "The step".
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Collection, Sequence

import torch

from atoll.memory.speculation import Speculation
from atoll.memory.stepping import ChunkStepper
from atoll.memory.stepqueue import DEADLINE, StepCall, StepQueue


class ModelSteps:
    """The steps of all optimizers of one model, on one thread: one chunk after another.

    Args:
        steppers: one for each optimizer, in the script's order, with chunks of its own.
        steps: the queue to which the steppers add their chunks.
    """

    def __init__(self, steppers: Sequence[ChunkStepper], steps: StepQueue) -> None:
        self.steppers, self._steps = steppers, steps
        self._speculations = [each.speculation for each in steppers if each.speculation is not None]
        self._thread = threading.Thread(target=self._work, name="atoll-stepping", daemon=True)
        self._thread.start()
        atexit.register(self._end)  # a thread inside torch at the interpreter's end aborts the process

    def gradient_came(self, chunk: int, slot: int) -> None:
        """Note that a gradient has come, or is on its way to its chunk."""
        for each in self.steppers:
            each.gradient_came(chunk, slot)

    def state_bytes(self) -> int:
        """Return the bytes of all optimizers' states as plain ones (`PlainState.nbytes`)."""
        return sum(each.state.nbytes() for each in self.steppers)

    def close(self) -> None:
        """Finish the steps under way, and leave the optimizers to the user as plain ones with their state.

        Raises, at the end, the error of a step that was not raised to the script before.
        """
        if self._steps.is_closed:
            return
        try:
            for each in self.steppers:
                each.restore()
            self._steps.wait_over()
            self._steps.end_telling()
            for each in self.steppers:
                each.state.give_back()
        finally:
            self._leave()
        self._steps.tell_untold()

    def take_over(self) -> None:
        """Take what the script has changed in the optimizers' states, after all steps."""
        for each in self.steppers:
            each.restore()
            each.state.take_over()

    def leave(self, keep: Collection[torch.optim.Optimizer], why: str) -> None:
        """Leave the optimizers, after all steps. Those in `keep` have states that are read where they lie
        (`PlainState.leave`); reading a state of another one raises UserError with `why`."""
        for each in self.steppers:
            each.restore()
        try:
            for each in self.steppers:
                if any(each.optimizer is kept for kept in keep):
                    each.state.leave()
                else:
                    each.state.lose(why)
        finally:
            self._leave()

    def abandon(self, why: str) -> None:
        """Leave the optimizers without their state: reading it raises a UserError with `why`."""
        for each in self.steppers:
            each.restore()
        self._steps.end_telling()
        self._leave()
        for each in self.steppers:
            each.state.lose(why)

    def _leave(self) -> None:
        for each in self.steppers:
            each.leave()
        self._end()
        atexit.unregister(self._end)

    def _end(self) -> None:
        """End the thread, after the chunk that it is stepping."""
        self._steps.close()
        self._thread.join(DEADLINE)

    # On the stepping thread.

    def _work(self) -> None:
        steps = self._steps
        while True:
            taken, aside, ahead = None, None, None
            with steps.condition:
                while not (steps.is_closed or steps.has_next or (aside := self._next_aside())):
                    steps.condition.wait()
                if steps.is_closed:
                    return
                if steps.has_next:
                    taken = steps.take()
                elif aside is not None:
                    ahead = aside.begin()
            if aside is not None and ahead is not None:
                aside.make(ahead)
            if taken is not None:
                self._try_step(*taken)

    def _next_aside(self) -> Speculation | None:
        """Return the speculation that has a chunk to step aside now, if any."""
        return next((each for each in self._speculations if each.has_next), None)

    def _try_step(self, step: StepCall, chunk: int) -> None:
        failed = None
        try:
            step.make(step, chunk)
        except BaseException as error:  # raised on the script's thread
            failed = error
        self._steps.ended(chunk, failed)
