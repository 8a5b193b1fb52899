"""What a contributor to a parameter server says to its shards: a contribution's chunks, its commit, and the
step that the script makes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from atoll.core.scriptline import waiting_line
from atoll.core.stands import gradients_in
from atoll.exchange.coding import bytes_of
from atoll.exchange.feedback import Feedback
from atoll.exchange.link import LOG
from atoll.net.returning import Made
from atoll.tensors.binding import BoundChunk
from atoll.train.gradients.reducer import Calls
from atoll.train.gradients.samples import Contribution
from atoll.train.sync.connection import CONTRIBUTION, STEP, Connection
from atoll.train.sync.stores import Leaving, Store
from atoll.wire.messages import (
    AnyMessage,
    Commit,
    Committed,
    Hyperparameters,
    Push,
    Replace,
    Step,
    Used,
    WorkerStand,
    run_of,
)


@dataclass
class Outgoing:
    """A contribution, from the step that made it until its answer is there."""

    iteration: int
    own: Contribution  # of a group: all its members'
    flats: Mapping[int, Tensor | Leaving]  # by chunk, as `Store.read` gives its gradients
    present: Mapping[int, Sequence[bool]]
    used: list[Used] = field(default_factory=list)
    able: list[int] = field(default_factory=list)  # the members, by name, who have all of this
    hyperparameters: Hyperparameters = field(default_factory=list)
    behind: int = 0  # exchanges of the contributor's own that were in flight when it was computed
    grouping: int = 0  # the hub's latest that the group knows of
    waits: bool = True  # the script waits for the answer
    begun_in: int = -1  # the ring's generation in which its exchange began; -1: it has not
    sent_in: int = -1  # likewise, in which this member sent its part


class ServerClient:
    """One model's words to the shards."""

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        connection: Connection,
        store: Store,
        calls: Calls,
        feedback: Feedback,
        *,
        heard: Callable[[Committed], None],
        sent: Callable[[int], None],
    ) -> None:
        """Speak to the shards.

        Args:
            heard: takes the log's word on a contribution, as it comes.
            sent: counts the bytes of gradients that leave.
        """
        self._chunks, self._connection, self._store, self._calls = list(chunks), connection, store, calls
        self._feedback, self._heard, self._sent = feedback, heard, sent
        self._held_by = Counter(connection.shard_of.values())  # shard -> chunks
        self._pushed: Counter[int] = Counter()  # of them, of this contribution
        self.counted: Committed | None = None  # of the latest iteration that does
        connection.shards.on(Committed, self._handle_committed)

    def outgoing(self, iteration: int, own: Contribution, turn: int | None, **more: Any) -> Outgoing:
        """A contribution of what the store has; `turn` as `Store.read` has it. One that weighs nothing is
        zeros."""
        flats, present = {}, {}
        for bound in self._chunks:
            flat = self._store.read(bound, turn)
            if isinstance(flat, Tensor) and own.weight <= 0:
                flat = flat.new_zeros(flat.numel())
            flats[bound.chunk.id] = flat
            present[bound.chunk.id] = [here and own.weight > 0 for here in self._store.present(bound)]
        return Outgoing(iteration, own, flats, present, **more)

    # -- a contribution -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Another contribution begins, or this one again."""
        self._pushed.clear()
        self._store.begin_leaving()

    def push_all(self, out: Outgoing, share: tuple[int, int] = (0, 1), **how: Any) -> None:
        """Push this side's share of each chunk; `how` as `push` has it."""
        self.begin()
        for bound in self._chunks:
            flat, present = out.flats[bound.chunk.id], out.present[bound.chunk.id]
            self.push(out.iteration, bound, flat, present, out.own.weight, share, **how)

    def push(
        self,
        iteration: int,
        bound: BoundChunk,
        flat: Tensor | Leaving,
        present: Sequence[bool],
        weight: float,
        share: tuple[int, int] = (0, 1),
        *,
        along: Mapping[int, Tensor] | None = None,
        pull: bool = True,
        until: Hashable = CONTRIBUTION,
    ) -> None:
        """Push a share of one chunk. The last push to a shard asks for what comes of the contribution, unless
        `pull` is false.

        Args:
            flat: (extent,), which must stay as it is until the answer. Where the chunk is put together as it
                leaves, no part of it may be lost, and nothing is asked for yet.
            present: which slots have a gradient.
            weight: the contribution's.
            along: as `Feedback.write` has it, where another member may have sent it before.
            until: the topic.
        """
        chunk_id, shards = bound.chunk.id, self._connection.shards
        shard = self._connection.shard_of[chunk_id]
        self._pushed[shard] += 1
        is_last = self._pushed[shard] == self._held_by[shard]
        message = Push(
            incarnation=shards.incarnation,
            iteration=iteration,
            chunk=chunk_id,
            chunks_in_all=self._held_by[shard],
            present=bytes(present),
            pull=pull and is_last and isinstance(flat, Tensor),
            share=share[0],
            shares=share[1],
            late=self._feedback.holds_back,
        )
        start, stop = run_of(bound.chunk.extent, *share)
        if not isinstance(flat, Tensor):
            shards.send(shard, message, Made(partial(flat, present, start, stop)), until)
            self._sent((stop - start) * bound.dtype.itemsize)
            return
        written = self._feedback.write(
            iteration, chunk_id, flat[start:stop], present, weight, start=start, along=along
        )
        shards.send(shard, message, written.payload, until=until, lossy=written.lossy)
        self._sent(written.payload.nbytes)

    def commit(self, out: Outgoing, until: Hashable = CONTRIBUTION) -> None:
        """Commit a contribution to the log."""
        self._connection.shards.send(
            LOG,
            Commit(
                incarnation=self._connection.shards.incarnation,
                iteration=out.iteration,
                weight=out.own.weight,
                samples=out.own.samples,
                basis=out.own.basis,
                alike=out.own.alike,
                hyperparameters=out.hyperparameters,
                used=out.used,
                grouping=out.grouping,
                behind=out.behind,
                members=out.able,
                stand=self._stand(out.iteration) if out.waits else None,
            ),
            until=until,
        )

    def wait_counted(self, iteration: int) -> Committed:
        """The log's word that the contribution counts: until then it is told again to a log that was lost."""

        def is_counted() -> bool:
            return self.counted is not None and self.counted.iteration == iteration

        self._connection.shards.wait(is_counted, lambda: [LOG], f"word that iteration {iteration} counts")
        assert self.counted is not None
        return self.counted

    def _handle_committed(self, _shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, Committed)
        self.counted = message
        self._heard(message)

    # -- bsp: the step ------------------------------------------------------------------------------------

    def send_edited(self, iteration: int, edited: Sequence[int], *, send: bool = True) -> str:
        """Send what the script made of these chunks' mean; its digest, which is the same on all workers."""
        shards, edits = self._connection.shards, hashlib.blake2b(digest_size=16)
        for chunk_id in edited:
            present, flat, payload = self._store.made_of_mean(chunk_id)
            edits.update(bytes(present) + bytes_of(flat))
            if send:
                replace = Replace(
                    incarnation=shards.incarnation,
                    iteration=iteration,
                    chunk=chunk_id,
                    present=bytes(present),
                )
                shards.send(self._connection.shard_of[chunk_id], replace, payload, until=STEP)
        return edits.hexdigest() if edited else ""

    def say_step(
        self,
        iteration: int,
        scale: float,
        hyperparameters: Hyperparameters,
        edited: list[int],
        edits: str,
        *,
        accepted: bool,
    ) -> None:
        """Let the shards make the step, by the mean times `scale`, or leave it out."""
        shards = self._connection.shards
        shards.send(
            LOG,
            Step(
                incarnation=shards.incarnation,
                iteration=iteration,
                scale=scale,
                hyperparameters=hyperparameters,
                edited=edited,
                edits=edits,
                accepted=accepted,
                stand=self._stand(iteration),
                unscaled=self._calls.unscaled() if accepted else 1.0,
            ),
            until=STEP,
        )

    def _stand(self, iteration: int) -> WorkerStand:
        """This worker's place in its script: at the gradients of this iteration."""
        return WorkerStand(
            self._connection.worker, gradients_in(iteration, waiting_line(), self._calls.epoch())
        )

    def close(self) -> None:
        """Let go of the model."""
        self._chunks.clear()
