"""Messages that carry a site's contributions to the global shards, to which the site is one worker."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from torch import Tensor

from atoll.exchange.feedback import Feedback, Written
from atoll.exchange.link import LOG, ShardLink
from atoll.store.actions import StepChunks
from atoll.wire import messages
from atoll.wire.messages import Setup, Used, WorkerStand

# Milestones until which messages are resent to a global shard that comes back.
SET_UP, CONTRIBUTION, STEP, STATE = "set-up", "contribution", "step", "state"

Edits: TypeAlias = dict[int, tuple[memoryview, bytes]]  # by chunk


class Uplink:
    """Sends a site's contributions over the `link` of each call. `shard_of` maps each chunk to its shard;
    `stand()` is the place of one worker's script."""

    def __init__(
        self,
        incarnation: int,
        shard_of: Mapping[int, int],
        feedback: Feedback,
        stand: Callable[[], WorkerStand | None],
    ) -> None:
        self._incarnation, self._shard_of, self._feedback = incarnation, shard_of, feedback
        self._stand = stand

    @property
    def holders(self) -> list[int]:
        """The shards that hold trainable chunks."""
        return sorted(set(self._shard_of.values()))

    def describe(self, link: ShardLink, setup: Setup, shards: int) -> None:
        """Send each global shard its part of the Setup."""
        for shard in range(shards):
            chunks = [chunk for chunk, place in self._shard_of.items() if place == shard]
            own = msgspec.structs.replace(setup, chunks=chunks, shards=shards)
            link.send(shard, own, until=SET_UP)

    def outgoing(
        self, chunk: int, values: Tensor, present: bytes, weight: float, clock: int, *, sparse: bool = False
    ) -> Written:
        """Encode a chunk's gradients, (extent,), with the residual added; `sparse` as in
        `Feedback.write`."""
        return self._feedback.write(clock, chunk, values, present, weight, sparse=sparse)

    def push(
        self,
        link: ShardLink,
        chunk: int,
        values: Tensor,
        present: bytes,
        weight: float,
        clock: int,
        until: str,
        *,
        sparse: bool,
    ) -> None:
        """Send a chunk of the site's contribution to iteration `clock`; `sparse` as in `Feedback.write`."""
        shard = self._shard_of[chunk]
        written = self.outgoing(chunk, values, present, weight, clock, sparse=sparse)
        push = messages.Push(
            incarnation=self._incarnation,
            iteration=clock,
            chunk=chunk,
            chunks_in_all=sum(place == shard for place in self._shard_of.values()),
            present=present,
            late=self._feedback.holds_back,
            shortened=written.shortened,
        )
        link.send(shard, push, written.payload, until, written.lossy)

    def commit(
        self,
        link: ShardLink,
        counted: tuple[float, float, str, float],
        hyperparameters: list[dict[str, Any]],
        used: list[Used],
        clock: int,
        until: str,
    ) -> None:
        """Commit the contribution. `counted` has its weight, samples, basis of the weight, and number of
        workers (the weight if all workers count equally)."""
        weight, samples, basis, alike = counted
        commit = messages.Commit(
            incarnation=self._incarnation,
            iteration=clock,
            weight=weight,
            samples=samples,
            basis=basis,
            alike=alike,
            hyperparameters=hyperparameters,
            used=used,
            stand=self._stand(),
        )
        link.send(LOG, commit, until=until)

    def say_step(self, link: ShardLink, action: StepChunks, edits: Edits, clock: int) -> None:
        """Under bsp: send edited means, and make the global shards step with the mean of all sites."""
        digest = hashlib.blake2b(digest_size=16)
        for chunk, (payload, present) in sorted(edits.items()):
            digest.update(present)
            digest.update(payload)
            replace = messages.Replace(
                incarnation=self._incarnation, iteration=clock, chunk=chunk, present=present
            )
            link.send(self._shard_of[chunk], replace, payload, until=STEP)
        step = messages.Step(
            incarnation=self._incarnation,
            iteration=clock,
            scale=action.scale,
            hyperparameters=action.hyperparameters,
            edited=sorted(edits),
            edits=digest.hexdigest() if edits else "",
            accepted=action.accepted,
            follows=action.nobody,
        )
        link.send(LOG, step, until=STEP)
