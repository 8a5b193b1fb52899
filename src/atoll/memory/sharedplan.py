"""The agreement of a group's members on how they hold a model: each by its own budgets, in chunks of one
size."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence

import msgspec
import torch
from torch import nn

from atoll.axes.choices import Choices
from atoll.axes.needs import check, error_of
from atoll.core.errors import AtollError, ConfigError, PrepareError, UserError
from atoll.core.memory import Budgets
from atoll.memory import planning
from atoll.memory.bandwidth import step_seconds
from atoll.memory.members import Members, told
from atoll.memory.over import share_among
from atoll.moves.owners import Holding
from atoll.moves.search import MemoryPlan
from atoll.tensors.stepunit import unit_of

_EXCHANGED = 2**18  # elements, of 4 bytes, in the exchange that is timed
_TRIALS = 3  # the shortest counts; the first makes the connections


class _Word(msgspec.Struct, frozen=True):
    """One member's report of the plan that it has found.

    Attributes:
        model: a checksum of what must be equal on all members.
        error: why there is no plan; empty if there is one.
        chunk_bytes: the size of chunks.
        fits: True if everything fits on this member's device.
        sharding: how chunks are divided.
        holding: a checksum of which member holds what.
    """

    model: int
    error: str = ""
    chunk_bytes: int = 0
    fits: bool = False
    sharding: str = ""
    holding: int = 0


def agree(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], budgets: Budgets, members: Members
) -> MemoryPlan:
    """Return this member's plan, which fits the other members' plans: a collective.

    Everything stays on the devices only if it fits on each of them. Otherwise chunks have the size that
    member 0 has found. Raises UserError, ConfigError or PrepareError, naming the member, on all members:
    UserError also where one member's budgets are too small for that size.
    """
    share = share_among(model, members)
    if share.apart:  # on the device, gradients would be summed over all members, not over the groups
        facts = {"store": "sharded", "over": True, "memory.step": budgets.pins.steps_on}
        check("prepare", Choices(facts))
        pins = msgspec.structs.replace(budgets.pins, steps_on="host")
        budgets = msgspec.structs.replace(budgets, pins=pins)
    network, between = _network(members)
    seconds = _step_seconds(model, optimizers, members)
    alike = zlib.crc32(repr((planning.specs_for(model, optimizers), budgets.master)).encode())

    def found(given: Budgets) -> tuple[MemoryPlan | None, _Word]:
        if isinstance(budgets.pins.steps_on, float):
            facts = {"store": "sharded", "step share": True}
            return None, _Word(alike, str(error_of("prepare", Choices(facts))))
        try:
            plan = planning.choose(
                model,
                optimizers,
                given,
                share=share,
                network=network,
                between=between,
                step_seconds=seconds,
            )
        except AtollError as error:
            return None, _Word(alike, str(error))
        held = _checksum(plan.holding, members.count)
        return plan, _Word(alike, "", plan.chunk_bytes, plan.fits, plan.sharding, held)

    plan, word = found(budgets)
    words = _told(word, members, "the plans of all members")
    if not all(each.fits for each in words):
        size = words[0].chunk_bytes
        if words[0].error:
            raise UserError(f"worker 0: {words[0].error}")
        if plan is None or plan.fits or plan.chunk_bytes != size:
            pins = msgspec.structs.replace(budgets.pins, chunk_bytes=size, steps_on="host")
            plan, word = found(msgspec.structs.replace(budgets, pins=pins))
        words = _told(word, members, f"the plans of all members, with chunks of {size} bytes")
        for member, each in enumerate(words):
            if each.error:
                raise UserError(f"worker {member}: {each.error} (with chunks of {size} bytes)")
            if each.sharding != words[0].sharding:
                raise ConfigError(
                    f"memory.sharding: worker {member} asks for {each.sharding}, and worker 0 for "
                    f"{words[0].sharding}; write the same on all"
                )
            if each.holding != words[0].holding:
                raise PrepareError(
                    f"worker {member} finds another division of the model than worker 0; give all workers "
                    "the same version of Atoll and the same [memory]"
                )
    assert plan is not None
    return msgspec.structs.replace(plan, share=share)


def _checksum(holding: Holding | None, count: int) -> int:
    """Return a checksum of the part of a holding that all members find alike; 0 for none."""
    if holding is None:
        return 0
    if holding.replicas:
        return zlib.crc32(msgspec.msgpack.encode(holding.replicas))
    shared = [
        parts if len(group) == count else len(parts)
        for group, parts in zip(holding.groups, holding.parts, strict=True)
    ]
    return zlib.crc32(msgspec.msgpack.encode(shared))


def _step_seconds(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], members: Members
) -> tuple[float, ...]:
    """Return how long member 0's step of each parameter takes, where whole tensors are stepped; else nothing.

    It is a collective. Owners of chunks are balanced by these seconds.
    """
    units = [] if members.count == 1 else list(map(unit_of, optimizers))
    by_tensor = any(unit.facts.get("unit") == "tensor" for unit in units)
    if not by_tensor or any("closure" in unit.facts for unit in units):
        return ()
    parameters = list(model.parameters())
    of_each = [step_seconds(optimizer, parameters) for optimizer in optimizers]
    own = list(map(sum, zip(*of_each, strict=True)))  # of all but its own optimizer, 0
    return tuple(told(members, own, list[float], "how long their steps take")[0])


def _network(members: Members) -> tuple[float, float]:
    """Return the bytes/s between the members of a group, and between groups (0 if there is one group)."""
    everybody = range(members.count)
    if not members.replicas:
        return _measured(members, everybody), 0.0
    own = next(group for group in members.replicas if members.rank in group)
    return _measured(members, own), _measured(members, [rank for rank in everybody if rank not in own])


def _measured(members: Members, others: Sequence[int]) -> float:
    """Return the bytes/s, each way, between a member and `others`, by a timed exchange: the least that any
    member finds.

    It is a collective. 0 if there is no other member.
    """
    if members.count == 1:
        return 0.0
    splits = [_EXCHANGED // members.count if rank in others else 0 for rank in range(members.count)]
    sent, into = torch.zeros(sum(splits)), torch.empty(sum(splits))
    seconds = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        what = "what goes between the members, measured"
        members.exchange(sent, splits, into, splits, what).wait()
        seconds.append(time.perf_counter() - began)
    nbytes = sent.itemsize * (sum(splits) - splits[members.rank])
    own = nbytes / max(min(seconds), 1e-9) if nbytes else math.inf
    least = min(told(members, own, float, "what they have measured"))
    return least if math.isfinite(least) else 0.0


def _told(word: _Word, members: Members, what: str) -> list[_Word]:
    words = told(members, word, _Word, what)
    for member, each in enumerate(words):
        if each.model != words[0].model:
            raise PrepareError(
                f"worker {member} has other parameters, param groups or memory.master than worker 0; all "
                "workers must build the same model"
            )
    return words
