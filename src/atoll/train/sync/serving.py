"""The choice of a model's exchange with the shards: by policy, by who talks to the shards, and by the model's
place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias, cast

from atoll.exchange.feedback import Feedback
from atoll.tensors.binding import BoundChunk
from atoll.tensors.settings import Settings
from atoll.train.gradients.early import EarlySum
from atoll.train.gradients.reducer import Calls
from atoll.train.gradients.ring import RingBuckets, RingSum
from atoll.train.gradients.sums import AtEnd, GroupSum, MakeSum, OwnAtEnd
from atoll.train.gradients.tiersums import Holder, TierCarrier
from atoll.train.sync.connection import Connection
from atoll.train.sync.server import GroupValuesExchange, MeanExchange, Parts, Server, ValuesExchange
from atoll.train.sync.stores import InTiers, Resident, Store
from atoll.train.sync.together import Together
from atoll.train.sync.uplink import Self, Uplink, UplinkChoice
from atoll.wire.messages import Hyperparameters

Policy: TypeAlias = Literal["bsp", "ssp", "asp"]


def serve_alone(
    policy: Policy,
    chunks: Sequence[BoundChunk],
    connection: Connection,
    calls: Calls,
    *,
    held: Holder | None = None,
    lazy: bool = False,
    pipeline: int = 0,
    takes_changes: bool = False,
) -> Server:
    """Return the exchange of a worker that talks to the shards for itself.

    Args:
        policy: the consistency: that of the configuration, or bsp inside a site.
        chunks: the model's trained chunks.
        connection: the connection to the shards.
        calls: the model's services.
        held: returns the model in its tiers; None if it lies on the device.
        lazy: the configuration's sync.lazy.
        pipeline: the configuration's sync.pipeline.
        takes_changes: True if the shards can be told of the script's own writes to parameters.
    """
    leaves_early = held is None and policy == "bsp"
    make_sum: MakeSum = AtEnd if policy == "bsp" else OwnAtEnd
    if leaves_early:
        make_sum = cast(MakeSum, EarlySum)  # the owner is a MeanExchange

    def make_store(summed: GroupSum) -> Store:
        if held is not None:
            return InTiers(chunks, held)
        early = cast(EarlySum, summed).chunks if leaves_early else None
        return Resident(chunks, early, keeps=True)

    parts = Parts(
        chunks=chunks,
        connection=connection,
        calls=calls,
        make_sum=make_sum,
        make_store=make_store,
        speaker=Self(),
        feedback=feedback_of(chunks, connection),
        lazy=lazy,
        keeps_graphs=policy != "bsp" and not lazy and not pipeline,
        takes_changes=takes_changes and policy == "bsp" and not lazy,
    )
    return MeanExchange(parts) if policy == "bsp" else ValuesExchange(parts, pipeline)


def serve_group(
    policy: Policy,
    chunks: Sequence[BoundChunk],
    connection: Connection,
    calls: Calls,
    *,
    together: Together,
    choice: UplinkChoice,
    message_bytes: int,
    settings: Callable[[], Settings],
    hyperparameters: Callable[[], Hyperparameters],
    held: Holder | None = None,
    pipeline: int = 0,
) -> Server:
    """Return the exchange of a group, whose members first sum over `ring`.

    Args:
        policy: the configuration's sync.consistency.
        chunks: the model's trained chunks.
        connection: the connection to the shards.
        calls: the model's services.
        together: what the group's members report to one another, with their ring.
        choice: how the group talks to the shards.
        message_bytes: the least bytes of a message on the ring.
        settings: returns the hyperparameters that must be equal on all members.
        hyperparameters: returns the optimizer's hyperparameters.
        held: returns the model in its tiers; None if it lies on the device.
        pipeline: the configuration's sync.pipeline.
    """
    ring, feedback = together.ring, feedback_of(chunks, connection)
    whole = calls.whole
    calls = replace(calls, whole=lambda own: together.weighs(whole(own)))
    # Reports on speed: under bsp they go to all groups, by the log; else to this group's members.
    silent = replace(calls, shares=None)
    in_ring, at_log = (silent, calls) if policy == "bsp" else (calls, silent)
    carry = partial(RingBuckets, least=message_bytes)
    over_ring = partial(
        RingSum,
        ring=ring,
        calls=in_ring,
        # bsp: the sum stays beside this member's gradients, to be sent again if a member is lost meanwhile.
        carry=carry if held is None else partial(TierCarrier, held=held, stays=policy == "bsp"),
        settings=settings,
        fills_up=True,  # an iteration of fills alone contributes nothing
        steps_here=False,
        within=together.tell_used,
    )

    def make_store(summed: RingSum) -> Resident | InTiers:
        if held is None:
            return Resident(chunks, summed.carrier.chunks)
        return InTiers(chunks, held, cast(TierCarrier, summed.carrier))

    parts = Parts(
        chunks=chunks,
        connection=connection,
        calls=at_log,
        make_sum=over_ring,
        make_store=make_store,
        speaker=Uplink(choice, ring, chunks, feedback),
        feedback=feedback,
        together=together,
        keeps_graphs=policy != "bsp" and not pipeline,
        takes_changes=policy == "bsp",
    )
    if policy == "bsp":
        return MeanExchange(parts)
    return GroupValuesExchange(parts, together=together, hyperparameters=hyperparameters, pipeline=pipeline)


def feedback_of(chunks: Sequence[BoundChunk], connection: Connection) -> Feedback:
    """Return the error feedback for these chunks' gradients over the connection."""
    names = {bound.chunk.id: bound.names[0] for bound in chunks}
    return Feedback(
        [bound.chunk for bound in chunks],
        connection.shard_of,
        connection.link,
        connection.coding,
        named=lambda chunk: f"parameter {names[chunk.id]!r}",
    )
