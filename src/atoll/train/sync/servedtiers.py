"""Strategies with shards for a model that lies in tiers: the worker holds values and gradients there, the
shards the optimizer's state.

The model is cut into chunks for the shards as without budgets, so workers with different budgets have one
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.exchange.coding import bytes_of
from atoll.memory.exchanged import Exchanged
from atoll.net.returning import Made, Payload
from atoll.tensors.binding import BoundChunk, carve, dtype_as
from atoll.tensors.lazy import LazyTensor
from atoll.tensors.packing import PACKED, unpack_lazily
from atoll.tensors.settings import Settings
from atoll.train.gradients.reducer import Reducer
from atoll.train.gradients.tiersums import values_from
from atoll.train.sync.stores import UNDER_WAY
from atoll.train.sync.strategies import Served, ServedModel, Stepper, Training, numbers_of, one_stepper
from atoll.wire.messages import AnyMessage, PullState, State


class Fits(Protocol):
    """The budgets that hold the model in tiers."""

    def fit_now(self) -> None:
        """Move the model into tiers."""

    def held(self) -> Exchanged:
        """Return the model in its tiers."""


def staging_bytes(chunks: list[int], *, of_group: bool) -> int:
    """Return the bytes of host memory, besides the arena, in which chunks of so many bytes each go out and
    come in.

    A member of a group hands one chunk on while others come.
    """
    return (UNDER_WAY + of_group) * max(chunks, default=0)


class ServedInTiers:
    """The strategy `Served` for a model in tiers."""

    brings_parameters = trains_as_one = counts_all = True
    brings_frozen = shares_buffers = False

    def __init__(self, served: Served, tiers: Fits) -> None:
        self._served, self._tiers = served, tiers
        self.collective, self.skips_together = served.collective, served.skips_together

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        made: list[TieredModel] = []

        def make(*args: Any) -> TieredModel:
            made.append(TieredModel(self._tiers, *args))
            self._tiers.fit_now()
            return made[0]

        exchange, steppers = self._served.build_model(training, make, self._tiers.held)
        for number, stepper in enumerate(steppers):
            stepper.takes_states(partial(made[0].take_states, number))
        return exchange, one_stepper(steppers)

    def before_load(self) -> bool:
        return self._served.before_load()

    def loaded(self) -> None:
        self._served.loaded()

    def refresh(self) -> None:
        self._served.refresh()


class TieredModel(ServedModel):
    """One model at the shards that lies in tiers on this worker: none of it is in memory as a whole."""

    def __init__(self, tiers: Fits, training: Training, *args: Any) -> None:
        super().__init__(training, *args)
        self._tiers = tiers
        self._kept: dict[int, dict[str, str]] = {}  # by chunk: the dtype of each element-wise state
        self._given: dict[nn.Parameter, Mapping[str, Any]] = {}  # states that a checkpoint has brought

    def _describe(self) -> None:
        self._tiers.held().write_back()
        super()._describe()

    def fetch_parameters(self) -> None:
        self._given = {}
        self._fetched.clear()
        super().fetch_parameters()

    def make_step(self, number: int, accepted: bool, settings: Settings) -> None:
        self._fetched.clear()
        super().make_step(number, accepted, settings)

    # State for the shards

    def take_states(self, number: int, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep the states of one optimizer, which may be lazy, for the shards, and return the rest of its
        state_dict.

        This runs before the optimizer's load_state_dict.
        """
        groups = self._training.optimizers[number].param_groups
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        if [len(each) for each in saved] != [len(group["params"]) for group in groups]:
            return state_dict  # torch raises the error
        self._given |= {
            parameter: state_dict["state"].get(index, {})
            for indices, group in zip(saved, groups, strict=True)
            for index, parameter in zip(indices, group["params"], strict=True)
        }
        return {**state_dict, "state": {}}

    def _state_held(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        return self._given.get(parameter) or super()._state_held(parameter)

    def _values_of(self, bound: BoundChunk) -> Tensor:
        return values_from(self._tiers.held(), bound)

    def _sent(self, make: Callable[[], Tensor]) -> Payload:
        return Made(lambda: bytes_of(make()))

    # The optimizer's state

    def fetch_state(self, number: int) -> dict[nn.Parameter, dict[str, Any]]:
        """Return each parameter's state, as plain torch would have it.

        Tensors are fetched from their shard when they are read, one chunk at a time.
        """
        self.exchange.before_state()
        self._fetched, self._scalars, self._kept = {}, {}, {}
        self._ask_for_state(PullState(incarnation=self._service.shards.incarnation, words=True))
        states = {
            parameter: self._lazy_state(bound, index)
            for bound in self._training.chunks
            for index, parameter in enumerate(bound.parameters)
        }
        return self._in_order(states, number)

    def _lazy_state(self, bound: BoundChunk, index: int) -> dict[str, Any]:
        scalars, parameter = self._scalars[bound.chunk.id][index], bound.parameters[index]
        if self._unit_of(bound).by_tensor:
            whole = partial(self._payload, bound, index, PACKED)
            return unpack_lazily(whole, [scalars], parameter.device)[0]
        state = numbers_of(scalars)
        for key, dtype in self._kept[bound.chunk.id].items():
            if scalars.get(key, 0) is not None:
                state[key] = LazyTensor(
                    partial(self._read, bound, index, key),
                    parameter.shape,
                    dtype_as(getattr(torch, dtype), parameter),
                    parameter.device,
                    parameter.stride(),
                )
        return state

    def _payload(self, bound: BoundChunk, index: int, key: str) -> Tensor:
        """Fetch a chunk's state from its shard, unless it is here, and return the payload `key` of it."""
        chunk = bound.chunk.id
        if chunk not in self._fetched:
            self._fetched.clear()
            if not len(self._service.shards):
                what = "the optimizer's state" if key == PACKED else repr(key)
                raise UserError(
                    f"{what} of {bound.names[index]!r} lies at the shards, and the session has ended; read "
                    "the optimizer's state, or copy.deepcopy() its state_dict, inside the session"
                )
            asked = PullState(incarnation=self._service.shards.incarnation, chunk=chunk)
            self._ask_for_state(asked, [self._shard_of[chunk]])
        return self._fetched[chunk][key]

    def _read(self, bound: BoundChunk, index: int, key: str) -> Tensor:
        flat, parameter = self._payload(bound, index, key), bound.parameters[index]
        offset = bound.chunk.slots[index].offset
        return carve(flat, offset, parameter).to(parameter.device, copy=True)

    def _handle_state(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, State)
        if not message.key:
            self._kept[message.chunk] = dict(message.kept)
        super()._handle_state(shard, message, payload)
