"""The user's optimizer where its steps are made elsewhere: at shards, or in a node's CPU side."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from atoll.tensors.attributes import WatchedAttributes
from atoll.tensors.chunkstate import State
from atoll.tensors.lazy import read_whole
from atoll.tensors.modes import ShownInModes
from atoll.tensors.optimizer import CHANGE, LOAD, ParameterOptimizer, StepHooks
from atoll.tensors.remotestate import RemoteState
from atoll.tensors.stephooks import Handle
from atoll.tensors.torch_scaling import (
    forget_scaling_left_to,
    infinity_left_to,
    inverse_of,
    leave_scaling_to,
    note_scale,
    scale_left_to,
    unscale,
)


class RemoteOptimizer(ParameterOptimizer):
    """An optimizer whose steps are made elsewhere: its own code steps no parameter.

    A load_state_dict by the script is passed to `hooks`, which bring the loaded state to where the steps are
    made. The session, which brings it itself, loads inside `loading`. A change of `optimizer.state` by the
    script goes the same way, before the next forward or step (`bring_changes`).

    A GradScaler lets a fused optimizer's kernel divide the gradients and skip a step with infinities
    (`optimizer.grad_scale`, `optimizer.found_inf`). No kernel runs here, so both are done before `make`.

    `train()` and `eval()` of a schedule-free optimizer find the state here, and move the parameters here.

    Args:
        optimizer: the script's optimizer.
        hooks: the functions around each step.
        make: makes a step, after the pre-hooks and before `hooks.after`; called with False for a step that
            is not accepted, and with the settings.
        settings: returns the settings of a step before the optimizer's own code runs, which may count steps
            in its param groups.
        fetch: returns the state of each parameter, when the script asks for the optimizer's state_dict.
        home: says where the state lives, for messages.
        keeps_state: warn when the script uses the optimizer after a `close` without `give_back`, since it
            then begins with an empty state.
        counts_skips: have a GradScaler leave division and skip to this optimizer even if it is not fused. A
            skipped step is then still made, as one that is not accepted, since other workers wait for it.
        elsewhere: the parameters that are stepped there; None: all. Others are frozen, and keep their state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hooks: StepHooks,
        *,
        make: Callable[[bool, Any], None],
        settings: Callable[[], Any],
        fetch: Callable[[], dict[nn.Parameter, State]],
        home: str,
        keeps_state: bool = True,
        counts_skips: bool = False,
        elsewhere: Collection[nn.Parameter] | None = None,
    ) -> None:
        super().__init__(optimizer, hooks)
        self._keeps_state, self._make, self._home = keeps_state, make, home
        self._state = RemoteState(optimizer, fetch, elsewhere, home)
        self._settings, self._sent = settings, None
        self._attributes = WatchedAttributes(optimizer)
        self._take_scaling_back = leave_scaling_to(optimizer) if counts_skips else None
        self._accepted, self._is_loading, self._is_back = True, False, False
        self._why_lost = "an error ended the session: go on from a checkpoint (session.save, session.load)"
        self._handles += [
            optimizer.register_state_dict_pre_hook(lambda _: self._show()),
            optimizer.register_state_dict_post_hook(lambda _, found: self._state.hide_from(found)),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._before_load(state_dict)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._after_load()),
            ShownInModes(optimizer, self._show, self._state.hide),
        ]

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Leave load_state_dict inside the `with` block to the session, which brings the state to its
        home."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def _before_load(self, state_dict: State) -> State:
        self.restore()
        return state_dict if self._is_loading else self._hooks.begin_load(lambda: state_dict, LOAD)

    def _after_load(self) -> None:
        self._state.loaded()
        if not self._is_loading:
            self._hooks.end_load(LOAD)
            self._state.forget()

    def bring_changes(self) -> None:
        if self._state.is_due and self._state.has_changes():
            self._state.hold(self._hooks.begin_load(self._state.whole, CHANGE))
            self._hooks.end_load(CHANGE)
            self._state.forget()

    def takes_states(self, take: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Pass each state_dict to `take` before a load; the optimizer loads the dict that `take` returns."""
        self._handles.append(
            self.optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: take(state_dict))
        )

    def give_back(
        self,
        lacks_room: Callable[[int], str] = lambda _nbytes: "",
        read: Callable[[Any], Any] = read_whole,
        *,
        comes_later: bool = False,
    ) -> None:
        """Bring the optimizer's state here, so that the script may go on with a plain optimizer.

        Args:
            lacks_room: returns the reason why this worker has no room for a state of that many bytes, or "".
                Without room the state stays away, and a warning gives the reason when the script uses the
                optimizer.
            read: returns what is kept here of each value of the state, given that value, which may be lazy.
            comes_later: True on a worker that has yet to enter the run, and has no state of it until then.
        """
        if comes_later:
            self._is_back = True
            return
        self.restore()
        why = self._state.give_back(lacks_room, read)
        if why:
            self._why_lost = f"{why}: save it inside the session (session.save), or raise the budgets"
        self._is_back = not why

    def close(self) -> None:
        super().close()
        self._state.close()
        if self._keeps_state and not self._is_back:
            _tell_of_lost_state(self.optimizer, self._home, self._why_lost)
        if self._take_scaling_back is not None:
            self._take_scaling_back()

    def _show(self) -> None:
        self.restore()
        self._state.show()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.restore()
        self.bring_changes()
        args, kwargs = super()._before(optimizer, args, kwargs)
        self._accepted = not self._left_out and not infinity_left_to(self.optimizer)
        if self._accepted:
            self._divide_by_scale()
        forget_scaling_left_to(optimizer)  # both are done; some optimizers' loops refuse them
        self._attributes.check()
        self._sent = self._settings()
        self._leave_out()
        self._state.begin_step()
        return args, kwargs

    def restore(self) -> None:
        super().restore()
        self._state.end_step()

    def _divide_by_scale(self) -> None:
        """Divide gradients whose division a GradScaler has left to the optimizer."""
        scale = scale_left_to(self.optimizer)
        if scale is None:
            return
        by_place: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameters in self._group_parameters:
            for parameter in parameters:
                if parameter.grad is not None:
                    by_place[parameter.grad.device, parameter.grad.dtype].append(parameter.grad)
        inverse = inverse_of(scale)
        note_scale(self.optimizer, inverse)
        with torch.no_grad():
            for (device, _), gradients in by_place.items():
                found = torch.zeros((), device=device)
                unscale(gradients, found, inverse.to(device))

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()
        self._state.forget()
        self._make(self._accepted, self._sent)
        super()._after(optimizer, args, kwargs)
        self._attributes.stepped()


def _tell_of_lost_state(optimizer: torch.optim.Optimizer, home: str, why: str) -> None:
    """Warn once if a script uses an optimizer after its session, without its state and without a load.

    Args:
        optimizer: the script's optimizer.
        home: says where the state lived.
        why: the reason why the state did not come back, with a remedy.
    """
    handles: list[Handle] = []

    def forget() -> None:
        for handle in handles:
            handle.remove()

    def tell(*_: Any) -> None:
        forget()
        if not any(optimizer.state.values()):
            warnings.warn(
                f"{type(optimizer).__name__} is used after its session, and begins anew: {home}, and did not "
                f"come back, since {why}",
                RuntimeWarning,
                stacklevel=4,
            )

    handles += [
        optimizer.register_step_pre_hook(tell),
        optimizer.register_state_dict_pre_hook(tell),
        optimizer.register_load_state_dict_post_hook(lambda _: forget()),
    ]
