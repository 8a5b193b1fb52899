"""The script's own `optimizer.load_state_dict`, where the optimizer's state lies elsewhere: at shards, or at
a node's CPU side.

It is a call that all workers make, between two iterations. They compare what they load; then the state goes
to its place as at `session.load`, with the parameters that the workers have. A change of `optimizer.state`
goes the same way, at the next forward or step. Source: docs/server.md; docs/peers.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from atoll.axes.needs import check
from atoll.core.config import Config
from atoll.core.errors import UserError
from atoll.tensors.chunkstate import State
from atoll.tensors.lazy import LazyTensor
from atoll.tensors.optimizer import CHANGE, LOAD
from atoll.tensors.packing import pack
from atoll.tensors.remotestate import settle_state
from atoll.tensors.torch_compat import tree_map_only
from atoll.train.api.collectives import Collectives
from atoll.train.api.compose import Runtime
from atoll.train.api.prepared import Prepared
from atoll.train.api.stepset import StepSet
from atoll.train.members.meetings import bytes_of

_OR = "or go on from a checkpoint (session.load, session.resume)"
_UNLIKE = {
    LOAD: f"worker {{}} loads other {{}} than worker {{}}; load the same state_dict on every worker, {_OR}",
    CHANGE: "worker {} has another {} than worker {}; make equal changes on every worker, at one step (under "
    "ssp and asp after session.barrier()), or give each the same state with optimizer.load_state_dict",
}


class StateLoads:
    """One worker's part in loads of an optimizer's state by the script."""

    def __init__(self, runtime: Runtime, collectives: Collectives, config: Config) -> None:
        self._runtime, self._collectives, self._config = runtime, collectives, config

    def begin(self, prepared: Prepared, of: StepSet, give: Callable[[], State], call: str) -> State:
        """Meet the other workers, before the optimizer takes the state_dict that `give` returns; return what
        it is to take. `call` is LOAD, or CHANGE for a state that the script has changed in its place.

        Raises UserError, before anything is changed, if workers load different states or hold different
        parameters, for a state that does not fit the optimizer, and between a backward and its step.
        A worker that has yet to enter a run under way loads by itself: the run's state comes as it enters.
        """
        if self._runtime.late:
            return give()
        self._check(call, waits=_waits(prepared))
        with self._call(prepared, of, call):
            reducer = prepared.reducer
            if reducer.phase.awaits_step:  # the script has left the step out
                reducer.drop_kept()
                reducer.phase.reduced = False
            wrote = self._collectives.before_load()
            if call == CHANGE:  # what the script has left as it was is fetched, once nobody steps any more
                self._runtime.workers.gather("", f"{call} (the other workers)")
            found, failure = State(), ""
            try:
                found = _without_none(tree_map_only(LazyTensor, _to_host, dict(give())), of.unit.keys)
                digests = _digests(found, of)
            except UserError as error:
                failure, digests = f"{call}: {error}", ["", ""]
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                failure = f"{call}: it is no state of an optimizer ({type(error).__name__}: {error})"
                digests = ["", ""]
            self._compare(call, failure, digests, wrote=wrote)
            self._bring_others(prepared, of, call)
        return found

    def _bring_others(self, prepared: Prepared, of: StepSet, call: str) -> None:
        """Have the model's other optimizers hold their state, which goes back with that of the one that is
        loaded.

        Raises UserError if the script has changed it on workers unlike.
        """
        others = [each for each in prepared.sets if each is not of]
        if not others:
            return
        digest = hashlib.sha256()
        for other in others:  # on every worker: the first one, which sets up anew, may be lost
            settle_state(other.optimizer)
            for parameter, state in list(other.optimizer.state.items()):
                other.optimizer.state[parameter] = tree_map_only(LazyTensor, _to_host, state)
                if parameter in other.parameters:
                    digest.update(_packed(state))
        told = self._runtime.workers.gather(digest.hexdigest(), f"{call} (the other optimizers' states)")
        for rank, its in zip(self._runtime.workers.ranks, told, strict=True):
            if its != told[0]:
                unlike = _UNLIKE[CHANGE].format(rank, "state", self._runtime.workers.ranks[0])
                raise UserError(f"{CHANGE} of another optimizer: {unlike}")

    def end(self, prepared: Prepared, of: StepSet, call: str) -> None:
        """Bring the state that the optimizer has taken to its place. All workers go on at one iteration."""
        if self._runtime.late:
            return
        with self._call(prepared, of, call):
            told = self._runtime.workers.gather(
                [prepared.reducer.steps, self._is_grouped], f"{call} (the workers' iterations)"
            )
            self._check(call, grouped=any(each[1] for each in told))  # a worker may move in a meeting
            prepared.reducer.steps = told[0][0]  # under asp workers have made unequally many
            for each in self._runtime.state.prepared:
                if each.reducer.losses is not None:  # of the steps before
                    each.reducer.losses.clear()
            self._runtime.strategy.loaded()

    def _call(self, prepared: Prepared, of: StepSet, call: str) -> AbstractContextManager[None]:
        which = "" if len(prepared.sets) == 1 else f"optimizer {prepared.sets.index(of)}"
        return self._collectives.call(call, which)

    @property
    def _is_grouped(self) -> bool:
        """True if this worker has moved to a group at the shards."""
        regrouping = self._runtime.regrouping
        return regrouping is not None and regrouping.grouping > 0

    def _check(self, call: str, **facts: Any) -> None:
        check("call", self._runtime.choices(self._config, None, call=call, steps="home", **facts))

    def _compare(self, call: str, failure: str, digests: list[str], *, wrote: bool) -> None:
        """Return once all workers have brought equal states, and hold equal parameters.

        Values that the script has written count, if all have written equal ones. Else all take the newest.
        """
        workers, own = self._runtime.workers, [failure, digests, wrote, self._is_grouped]
        told = workers.gather(own, f"{call} (the other workers' states)")
        ranks = workers.ranks
        self._check(call, grouped=any(each[3] for each in told))
        for rank, (said, its, _, _) in zip(ranks, told, strict=True):
            if said:
                raise UserError(failure or f"worker {rank}: {said}")
            if its != told[0][1]:
                part = "param_groups" if its[0] != told[0][1][0] else "state"
                raise UserError(f"{call}: {_UNLIKE[call].format(rank, part, ranks[0])}")
        if not any(each[2] for each in told):
            self._collectives.take_newest()
        values = workers.gather(_digest_of_values(self._runtime), f"{call} (the workers' parameters)")
        ranks = workers.ranks  # one may have been lost meanwhile
        for rank, its in zip(ranks, values, strict=True):
            if its != values[0]:
                raise UserError(
                    f"{call}: the script has written other values into parameters on worker {rank} than on "
                    f"worker {ranks[0]}, and they go along with the state; write equal values on every "
                    f"worker, after session.barrier() if not into all parameters, {_OR}"
                )


def _waits(prepared: Prepared) -> bool:
    """True between a backward and the last optimizer's step."""
    return prepared.reducer.phase.has_unstepped() or any(each.has_gradients_left for each in prepared.sets)


def _without_none(state_dict: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """Return an optimizer's state without the entries of these keys that are None: missing ones, in older
    versions of torch's SGD."""
    states = state_dict.get("state")
    if not isinstance(states, Mapping):
        return state_dict  # torch raises the error
    kept = {
        number: {key: value for key, value in state.items() if value is not None or key not in keys}
        for number, state in states.items()
    }
    return {**state_dict, "state": kept}


def _to_host(lazy: Tensor) -> Tensor:
    assert isinstance(lazy, LazyTensor)
    return lazy.source().cpu()  # it may lie where the loaded state is about to go


def _digests(state_dict: Mapping[str, Any], of: StepSet) -> list[str]:
    """Return digests of the param groups and of the state. Raises UserError for a state that does not fit."""
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        return ["", ""]  # torch raises the error, on every worker
    of_groups, of_state = hashlib.sha256(), hashlib.sha256()
    for group in groups:
        for key, value in sorted(group.items()):
            of_groups.update(repr(key).encode())
            of_groups.update(_packed({"value": value}) if _can_be_packed(value) else b"another object")
    ids = [each for group in groups for each in group["params"]]
    known = [parameter for group in of.optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(ids, known, strict=False):
        state = states.get(number, {})
        if not of.unit.by_tensor:
            _check_fits(state, number, parameter, of.unit.keys)
        of_state.update(_packed(state))
    return [of_groups.hexdigest(), of_state.hexdigest()]


def _can_be_packed(value: Any) -> bool:
    try:
        pack([{"value": value}])
    except UserError:
        return False
    return True


def _packed(state: dict[str, Any]) -> bytes:
    flat, words = pack([state])
    return repr(words).encode() + bytes_of(flat)


def _check_fits(state: Mapping[str, Any], number: int, parameter: nn.Parameter, keys: set[str]) -> None:
    """Raise UserError unless a parameter's state has elements as the parameter, or numbers."""
    for key, value in state.items():
        if value is None:  # as older versions of torch's SGD keep it
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        if key in keys and (not isinstance(value, Tensor) or shape != tuple(parameter.shape)):
            raise UserError(
                f"{key!r} of the optimizer's parameter {number} is {shape}, and the parameter is "
                f"{tuple(parameter.shape)}"
            )
        is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))
        if key not in keys and not is_number:
            raise UserError(
                f"{key!r} of the optimizer's parameter {number} is no state that the optimizer had when "
                "session.prepare saw it; make the optimizer with the settings of the one that was saved"
            )


def _digest_of_values(runtime: Runtime) -> str:
    """Return a digest of the parameters that go along with the optimizers' state."""
    found = hashlib.sha256()
    for prepared in runtime.state.prepared:
        for name in sorted(prepared.brought):
            parameter = prepared.parameters[name]
            found.update(bytes_of(getattr(parameter, "stored_value", parameter.detach)()))
    return found.hexdigest()
