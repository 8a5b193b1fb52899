"""The end of each backward, for all of a session's models together.

Workers must run their collectives in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from threading import get_ident
from typing import Protocol
from weakref import ref

from torch import nn

from atoll.core.errors import RunError
from atoll.core.scriptline import waiting_line
from atoll.core.stands import Stand, gradients
from atoll.tensors.backwardgraph import BackwardGraph
from atoll.tensors.torch_compat import at_end_of_backward, is_within_backward
from atoll.tensors.torch_patches import watch_backwards
from atoll.train.api.speed import Stretch
from atoll.train.gradients.latesteps import LateSteps
from atoll.train.gradients.reducer import Reducer
from atoll.train.group.rounds import Ring


class CountedModel(Protocol):
    """A model whose samples a backward counts.

    Attributes:
        awaits_backward: True if the script has given a weight for a batch that no backward has computed, as
            far as backwards have reached the model.
        has_counted: True if samples are counted or given that no reduction has used.
        parameters: its parameters, by their names.
        thread: the thread of the latest forward; None before the first.
        weighed_in: the thread of the latest weight; None before the first.
    """

    parameters: dict[str, nn.Parameter]
    thread: int | None
    weighed_in: int | None

    @property
    def awaits_backward(self) -> bool: ...

    @property
    def has_counted(self) -> bool: ...

    def trains_in(self, thread: int) -> bool:
        """True if the latest forward or the latest weight was in this thread; before the first, always."""

    def has_gradients(self) -> bool:
        """True if a parameter has a gradient."""

    def begins(self) -> int:
        """Call `BackwardEnd.begins`, and remember what is counted by then; return the backward's number."""

    def give_up(self, *, retried: bool) -> None:
        """Forget what the backward under way has counted: it raised. `retried`: another one follows before
        the step."""


def _no_end() -> None:
    return None


class BackwardEnd:
    """The point at which a backward ends and the session's reducers run.

    One model's messages may leave while backward goes on. With several models, a gradient that one worker
    lacks would change the order in which messages leave. So they leave at the end, model by model, for each
    model of which any worker has new gradients.
    """

    def __init__(self, ring: Ring | None, stretch: Stretch | None = None) -> None:
        self._ring, self._stretch = ring, stretch
        self._unwatch = watch_backwards(self)
        self._reducers: list[Reducer] = []
        self._models: dict[Reducer, Sequence[CountedModel]] = {}
        self._counted: list[CountedModel] = []  # all of them
        self.has_one_model = False  # True if the session trains a single model
        self._late: dict[Reducer, LateSteps] = {}  # of models whose steps may wait
        self._armed = False
        # The models that the backward under way has reached; alone, where threads may each have one, with
        # autograd's number of it:
        self._reached: dict[CountedModel, int] = {}
        self._is_alone = False  # True if nothing waits for the ends of backwards
        self._raised_in: dict[int, list[CountedModel]] = {}  # alone, by the thread: models to give up
        self._any_returned = False  # True if a backward has ended since the script gave a weight
        # What backwards call at their ends: the armed one, and one in which steps wait. Autograd alone holds
        # it, and drops it if the backward raises:
        self._armed_end: Callable[[], partial[None] | None] = _no_end
        self._late_end: Callable[[], partial[None] | None] = _no_end
        self.number = 0  # the backward that is under way, or the next one
        self.in_piece = False  # True inside a piece of a batch (`train/api/pieces.py`)
        self.aside: Collection[nn.Parameter] = ()  # those whose earlier gradients come back after the pieces
        self.ends = 0  # the backwards that have ended and have begun to reduce gradients

    def close(self) -> None:
        """Let go of autograd."""
        self._unwatch()

    def add(self, reducer: Reducer, late: LateSteps, models: Sequence[CountedModel]) -> None:
        """Take the reducer of `models`, which train as one, and the steps that wait for its gradients."""
        self._reducers.append(reducer)
        self._models[reducer] = models
        self._counted.extend(models)
        self.has_one_model = len(self._counted) == 1
        self._is_alone = not reducer.acts_after_backward
        if late.may_wait:
            self._late[reducer] = late
        for each in self._reducers:
            each.sends_early = len(self._reducers) == 1

    def remove(self, reducer: Reducer) -> None:
        """Forget the reducer of a model that is prepared again."""
        self._late.pop(reducer, None)
        for model in self._models.pop(reducer):
            self._counted.remove(model)
            self._reached.pop(model, None)
            for models in self._raised_in.values():
                if model in models:
                    models.remove(model)
        self._reducers.remove(reducer)
        self.has_one_model = len(self._counted) == 1

    def begins_alone(self, model: CountedModel, backward: int) -> bool:
        """Act as `begins`, on a worker alone, where nothing waits for a backward's end. Return True if this
        backward has not reached `model` before; `number` is a new one then.

        `backward` is autograd's number of it; -1: a forward counts its batch, outside of any.
        """
        if self._raised_in:
            self._give_up_alone(model)
        reached = self._reached
        if reached:
            if model in reached and backward in (-1, reached[model]):
                return False
            for other, its in list(reached.items()):
                # It was of a backward that has ended, called past `watch_backwards`:
                if backward not in (-1, its) and other.thread == model.thread:
                    reached.pop(other, None)
        reached[model] = backward
        self.number += 1
        return True

    def returned(self) -> None:
        """Note that a backward has ended, of whichever model."""
        thread, trains = get_ident(), False
        for model in self._counted:
            if model.thread == thread or model.trains_in(thread):
                trains = True
                if not self._armed:
                    self._reached.pop(model, None)
        if trains:
            self._any_returned = True
            if self._raised_in:  # it followed one that raised
                self._give_up_alone()

    def raised(self, graph: BackwardGraph) -> None:
        """Note that a backward of `graph` has raised, perhaps before it has reached a model.

        It is given up before the next act of the script that shows what the script does with it. Errors of
        graphs that cannot hold a model are not heeded, nor are those of threads in which no model trains.
        """
        thread = get_ident()
        models = [each for each in self._counted if each.trains_in(thread)]
        found = [model for model in models if graph.has_any(model.parameters.values())]
        if graph.may_hide(found=bool(found)):
            found = models
        if found or (models and self._armed and self._armed_end is not _no_end):
            self._raised(found)

    def forward_raised(self, model: CountedModel) -> None:
        """Note that a forward of `model` has raised."""
        self._raised([model])

    def _raised(self, found: Sequence[CountedModel]) -> None:
        """Note an error in a backward or a forward of the models `found`, of the batches whose weights were
        given last."""
        if self._is_alone:
            self._raised_alone(found)
            return
        if self._armed and self._armed_end() is not None:
            return  # it is another thread's
        if self._armed and self._armed_end is _no_end:
            try:
                self._give_up()
            except RunError:
                return  # the script's own error comes first; its next act raises this one
        armed, self._armed = self._armed, False
        if not armed and not self._reached:
            self.number += 1
        self._begin_in(found)
        if armed or self._reached:
            self._armed, self._armed_end = True, _no_end
            for reducer in self._reducers:
                reducer.raised()

    def _raised_alone(self, found: Sequence[CountedModel]) -> None:
        """Act as `_raised`, on a worker alone. Backwards of other threads go on."""
        thread = get_ident()
        self._give_up_alone()
        self.number += 1
        self._begin_in(found)
        raised = [each for each in list(self._reached) if each in found or each.trains_in(thread)]
        for model in raised:
            self._reached.pop(model, None)
            self._reducer_of(model).raised()
        if raised:
            self._raised_in[thread] = raised

    def _begin_in(self, found: Sequence[CountedModel]) -> None:
        """Note that the backward that raised was one of the models `found`, whom it may not have reached."""
        for model in found:
            if model not in self._reached and (model.awaits_backward or model.has_counted):
                self._reducer_of(model).count_before()
                model.begins()

    def _reducer_of(self, model: CountedModel) -> Reducer:
        return next(reducer for reducer, models in self._models.items() if model in models)

    def gives_weight(self, model: CountedModel) -> None:
        """Note that the script is about to give the weight of a batch of `model`.

        A backward that raised is given up first. Raises RunError if messages had already left.
        """
        if is_within_backward():
            return
        model.weighed_in = get_ident()
        if self._armed and self._armed_end() is None:
            self._give_up()
        elif self._raised_in and self._give_up_alone(model):
            pass
        elif self._any_returned and model.awaits_backward and model.has_gradients():
            # A backward of the model in parts, on a worker alone, where no hook sees it:
            self.number += 1
            model.begins()
            self._reached.pop(model, None)
            self.number += 1
        self._any_returned = False
        self._reducer_of(model).count_before()

    def begins(self, model: CountedModel) -> int:
        """Return the number of the backward under way, which reaches `model`, or leaves a gradient in it.

        A backward that raised before is given up first. Raises RunError if messages had already left.
        """
        if self._armed and self._armed_end() is None:
            self._give_up()
        self._reached[model] = -1
        return self.number

    def arm(self) -> None:
        """Ask for `_end` to run when the backward that is now running ends."""
        if self._armed and self._armed_end() is None:
            self._give_up()
        if not self._armed:
            self._armed = True
            for reducer in self._reducers:
                reducer.begins_backward()
                reducer.watch.look_for_edits()
            end = partial(self._end)
            self._armed_end = ref(end)
            at_end_of_backward(end)

    def step_waits(self) -> bool:
        """Have a step that is called within a backward wait for its end; return False inside a piece of a
        batch, when gradients of other pieces are missing.

        A backward within this one, as of a checkpoint, leaves the steps to the end of this one.
        """
        if self.in_piece:
            return False
        if self._late_end() is None:
            self._forget_late_steps()  # those of a backward that raised
            end = partial(self._make_late_steps)
            self._late_end = ref(end)
            at_end_of_backward(end)
        return True

    def _make_late_steps(self) -> None:
        """Make the steps that wait, if this backward's gradients are reduced already, or will not be."""
        self._late_end = _no_end
        if not self._armed:
            self._check_late_steps()
            for late in self._late.values():
                late.make()

    def _check_late_steps(self) -> None:
        try:
            for reducer, late in self._late.items():
                late.check(reducer.synchronous)
        except BaseException:
            self._forget_late_steps()
            raise

    def _forget_late_steps(self) -> None:
        self._late_end = _no_end
        for late in self._late.values():
            late.forget()

    def settle(self) -> None:
        """Wait out a slowed worker's extra time before gradients leave (`train/api/speed.py`)."""
        if self._stretch is not None:
            self._stretch.settle()

    def before_forward(self) -> None:
        """Give up a backward that raised before its end. Raises RunError if messages had already left."""
        if self._stretch is not None:
            self._stretch.begin()
        if self._late_end is not _no_end:  # it raised
            self._forget_late_steps()
        if self._armed:
            self._give_up()
        elif self._raised_in:
            self._give_up_alone()

    def _give_up(self, *, retried: bool = True) -> None:
        """Forget a backward that raised, and the samples that it has counted. Its gradients stay where it has
        left them, as in plain PyTorch."""
        for reducer in self._reducers:
            reducer.sum.gradients.abandon()
        self._armed = False
        reached, self._reached = self._reached, {}
        self._forget(self._reducers, reached, retried=retried)

    def _give_up_alone(self, model: CountedModel | None = None, *, retried: bool = True) -> bool:
        """Act as `_give_up`, on a worker alone, if a backward of this thread, or one of `model`, raised;
        return False if none did."""
        here = get_ident()
        threads = [each for each, models in list(self._raised_in.items()) if each == here or model in models]
        for thread in threads:
            raised = self._raised_in.pop(thread, [])
            reducers = [self._reducer_of(each) for each in raised]
            for reducer in reducers:
                reducer.sum.gradients.abandon()
            self._forget(reducers, raised, retried=retried)
        return bool(threads)

    def _forget(self, reducers: Sequence[Reducer], models: Iterable[CountedModel], *, retried: bool) -> None:
        self.number += 1
        for reducer in reducers:
            reducer.begin()
            if not is_within_backward():  # else gradients of the next backward come already
                reducer.phase.unsent = reducer.phase.unsent and reducer.watch.has_values()
        for model in models:
            model.give_up(retried=retried)

    def repeat(self) -> None:
        """Forget a backward that may have raised: its batch is computed again, in backwards that do not
        reduce. `finish` then does."""
        self._forget_late_steps()
        self._reached.clear()
        if self._raised_in.pop(get_ident(), None) or self._armed:
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
        self._reached.clear()
        self.number += 1
        if self._late:
            self._check_late_steps()
        self.settle()
        waiting = [reducer for reducer in self._reducers if reducer.synchronous]
        self.ends += bool(waiting)
        for reducer in self._reducers:
            if reducer.phase.unsent:
                reducer.watch.look()
            if not reducer.synchronous:
                reducer.watch.note_edits()
                reducer.begin()
        if self._ring is None or len(waiting) < 2:
            due = [reducer for reducer in waiting if reducer.phase.unsent or len(self._reducers) == 1]
        else:
            due = self._due(self._ring, waiting)
        for reducer in due:
            reducer.reduce()
        for late in self._late.values():
            late.make()

    def reduce_before_step(self, reducer: Reducer) -> None:
        """Reduce gradients that no backward has reduced before `reducer`'s step, as on a worker without a
        batch.

        With several models, the other workers ask at the end of their backward which models have new
        gradients. This worker joins that collective.

        A backward that raised, and that no other has followed, is given up. Raises RunError if messages had
        already left.
        """
        if self._armed and self._armed_end() is None:
            self._give_up(retried=False)
        elif self._raised_in:
            self._give_up_alone(self._models[reducer][0], retried=False)
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

        own = [float(each.phase.unsent or each is also) for each in reducers]
        news = ring.sum(own, "which models have new gradients", where)
        return [each for each, count in zip(reducers, news, strict=True) if count]
