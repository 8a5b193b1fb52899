"""The watch on one model's forwards, and on the backwards that reach their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from atoll.tensors.binding import BoundChunk
from atoll.tensors.torch_compat import backward_under_way
from atoll.train.api.parametercheck import ParameterCheck
from atoll.train.api.scriptmodel import ScriptModel
from atoll.train.gradients.backward import BackwardEnd
from atoll.train.gradients.forwards import BesideCompiled, ForwardHooks, SeenForward
from atoll.train.gradients.reducer import Reducer
from atoll.train.sync.strategies import Stepper


class ForwardWatch:
    """The watch on one of the script's models.

    Before a forward it checks that the model has its parameters, and that they lie where they train, and a
    change of `optimizer.state` goes to where the steps are made. When a
    backward that leaves gradients reaches the forward's output, it counts the batch's samples, and asks for
    the reduction at that backward's end.

    Args:
        model: the script's model.
        chunks: the trained chunks of the prepared model that it is, or of which it is a part.
        check: the check of that model's parameters.
        reducer: the reducer of that model's gradients.
        stepper: the stepper of that model.
        backward: the end of the session's backwards.
        among: True if the model trains as one with others.
        steps_elsewhere: True if another process makes the optimizer's steps.
    """

    def __init__(
        self,
        model: ScriptModel,
        chunks: Sequence[BoundChunk],
        check: ParameterCheck,
        reducer: Reducer,
        stepper: Stepper,
        backward: BackwardEnd,
        *,
        among: bool,
        steps_elsewhere: bool,
    ) -> None:
        self._model, self._chunks, self._check = model, chunks, check
        self._reducer, self._stepper, self._backward = reducer, stepper, backward
        self._steps_elsewhere = steps_elsewhere
        accumulates, own = reducer.sum.accumulates, None
        if among:
            accumulates, parameters = model.accumulates, set(model.parameters.values())
            own = {bound.chunk.id for bound in chunks if bound.parameters[0] in parameters}
            model.watch({p for bound in chunks for p in bound.parameters})
        given, use = model.given.model, BesideCompiled(partial(reducer.before_use, own))
        self._before_use: list[Any] = []
        if reducer.acts_before_forward:
            self._before_use.append(given.register_forward_pre_hook(use))
        if reducer.acts_before_state_dict:
            self._before_use.append(model.module.register_state_dict_pre_hook(use))  # type: ignore[no-untyped-call]
        self._hooks = ForwardHooks(
            given, before=self._before, accumulates=accumulates, reached=self._reached, tells=model
        )

    def close(self) -> None:
        """Take the hooks off the model."""
        self._hooks.close()
        for handle in self._before_use:
            handle.remove()

    def _before(self) -> None:
        self._stepper.restore()
        for bound in self._chunks:
            if bound.has_moved:  # before a step it may be elsewhere: averaged weights, say, for an evaluation
                bound.check_kinds()
        self._check.before_forward()
        self._backward.before_forward()
        if self._steps_elsewhere:
            self._stepper.bring_changes()
        self._model.given.batches.forward()

    def _reached(self, forward: SeenForward) -> None:
        model, acts_after = self._model, self._reducer.acts_after_backward
        backward = backward_under_way()
        if acts_after:
            model.reached_in = model.begins()
        else:
            is_new = self._backward.begins_alone(model, backward)
            self._reducer.reached(backward)  # counts the backward before
            if is_new:
                model.begins_as(self._backward.number)
        if not forward.is_counted:  # asked here, after a backward that raised is given up
            forward.is_counted = True
            model.counted.append(forward)
            batch = model.given.batches.count(forward.seen)
            if batch.samples is not None:
                # Nothing of a fill may be added to gradients that count, under accumulation say.
                # Zeros would go on to another model, whose samples they are not.
                fills = batch.filled and batch.filled == batch.seen and not forward.is_differentiated
                forward.gives_zeros = bool(fills) and backward != -1 and self._backward.has_one_model
                model.samples.count(
                    batch.samples,
                    batch.basis,
                    batch.new,
                    batch.seen,
                    batch.filled,
                    gives_zeros=forward.gives_zeros,
                )
        if backward != -1 and acts_after:
            self._backward.arm()
