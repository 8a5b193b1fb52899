"""The messages of a contributor to the shards of a parameter server: a contribution's chunks, its commit, and
the step."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.core.scriptline import waiting_line
from atoll.core.stands import gradients_in
from atoll.exchange.coding import bytes_of
from atoll.exchange.feedback import Feedback
from atoll.exchange.link import LOG
from atoll.net.returning import Made
from atoll.tensors.binding import BoundChunk
from atoll.train.gradients.reducer import Calls
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.sync.connection import CONTRIBUTION, STEP, Connection
from atoll.train.sync.stores import Leaving, Store
from atoll.wire.messages import (
    AnyMessage,
    Commit,
    Committed,
    Hyperparameters,
    Push,
    Replace,
    Speeds,
    Step,
    Used,
    WorkerStand,
    run_of,
)


@dataclass
class Outgoing:
    """A contribution, from the step that made it until its answer has come.

    Attributes:
        iteration: the contributor's iteration.
        own: its weight and samples; of a group, those of all members.
        flats: the gradients by chunk, as `Store.read` returns them.
        present: for each chunk and each slot, True if there is a gradient.
        used: the data that the iteration used up.
        able: the names of the members that have all of the contribution.
        speeds: reports on the speed of the workers whose gradients it has.
        hyperparameters: the optimizers'.
        optimizer: the optimizer that steps, by its place among the model's; under bsp, a Step says it.
        behind: the number of the contributor's own exchanges that were in flight when it was computed.
        grouping: the hub's latest grouping that the group knows.
        waits: True if the script waits for the answer.
        more: True if one of the contributor's workers has a further batch of its own data.
        begun_in: the ring's generation in which the exchange began; -1: it has not begun.
        sent_in: the ring's generation in which this member sent its part; -1: in none.
        weights: for each optimizer the weight of its gradients; empty if none differs from that of `own`.
        ends: under bsp, True if newcomers may enter with the next iteration.
        sparse: the chunks with sparse gradients.
    """

    iteration: int
    own: ContributionWeight
    flats: Mapping[int, Tensor | Leaving]
    present: Mapping[int, Sequence[bool]]
    used: list[Used] = field(default_factory=list)
    able: list[int] = field(default_factory=list)
    speeds: Speeds = field(default_factory=dict)
    hyperparameters: Hyperparameters = field(default_factory=list)
    optimizer: int = 0
    behind: int = 0
    grouping: int = 0
    waits: bool = True
    more: bool = False
    begun_in: int = -1
    sent_in: int = -1
    weights: list[float] = field(default_factory=list)
    ends: bool = True
    sparse: Collection[int] = ()


class ServerClient:
    """One model's messages to the shards."""

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
        """Talk to the shards.

        Args:
            chunks: the model's trained chunks.
            connection: the connection to the shards.
            store: where gradients, means and values lie.
            calls: the model's services.
            feedback: keeps the parts of gradients that the link and the codec drop.
            heard: called with the log's answer to a contribution, as it comes.
            sent: called with the bytes of gradients that leave.
        """
        self._chunks, self._connection, self._store, self._calls = list(chunks), connection, store, calls
        self._feedback, self._heard, self._sent = feedback, heard, sent
        self._held_by = Counter(connection.shard_of.values())  # shard -> number of its chunks
        self._pushed: Counter[int] = Counter()  # shard -> number of its chunks pushed in this contribution
        self.counted: Committed | None = None  # the log's answer to the latest contribution
        connection.shards.on(Committed, self._handle_committed)

    def outgoing(
        self,
        iteration: int,
        own: ContributionWeight,
        turn: int | None,
        of: Collection[int] | None = None,
        **more: Any,
    ) -> Outgoing:
        """Return a contribution of the gradients in the store; `turn` as in `Store.read`. One of weight 0 has
        none.

        `of` are the chunks whose gradients it has; None: all.
        """
        flats, present = {}, {}
        for bound in self._chunks:
            counts = own.weight > 0 and (of is None or bound.chunk.id in of)
            reads = counts or self._store.window is not None
            nothing = torch.zeros(1, dtype=bound.dtype).expand(bound.chunk.extent)
            flats[bound.chunk.id] = self._store.read(bound, turn) if reads else nothing
            present[bound.chunk.id] = [here and counts for here in self._store.present(bound)]
        return Outgoing(iteration, own, flats, present, sparse=self._store.sparse_chunks(), **more)

    # -- a contribution -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin another contribution, or the present one again."""
        self._pushed.clear()
        self._store.begin_leaving()

    def push_all(self, out: Outgoing, share: tuple[int, int] = (0, 1), **how: Any) -> None:
        """Push this side's share of each chunk; `how` are options of `push`."""
        self.begin()
        for bound in self._chunks:
            flat, present = out.flats[bound.chunk.id], out.present[bound.chunk.id]
            sparse = bound.chunk.id in out.sparse
            self.push(out.iteration, bound, flat, present, out.own.weight, share, sparse=sparse, **how)

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
        sparse: bool = False,
        pull: bool = True,
        until: Hashable = CONTRIBUTION,
    ) -> None:
        """Push a share of one chunk. Unless `pull` is False, the last push to a shard asks for the result
        too. A chunk without gradients goes without a payload.

        Args:
            iteration: the contributor's iteration.
            bound: the chunk.
            flat: the chunk's gradients, (extent,), which must stay unchanged until the answer; or a function
                that puts a run of them together as it leaves. Of the latter no part may be lost, and its push
                asks for nothing.
            present: for each slot, True if there is a gradient.
            weight: the contribution's weight.
            share: the run of the chunk to push, and the number of runs.
            along: see `Feedback.write`; given if another member may have sent the contribution before.
            sparse: see `Feedback.write`. Gradients that are put together as they leave go with their zeros.
            pull: False to ask for nothing.
            until: the resend topic.
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
        if not any(present):
            shards.send(shard, message, until=until)
            return
        if not isinstance(flat, Tensor):
            shards.send(shard, message, Made(partial(flat, present, start, stop)), until)
            self._sent((stop - start) * bound.dtype.itemsize)
            return
        written = self._feedback.write(
            iteration, chunk_id, flat[start:stop], present, weight, start=start, along=along, sparse=sparse
        )
        if written.shortened:
            message = msgspec.structs.replace(message, shortened=True)
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
                more=out.more,
                speeds=out.speeds,
                optimizer=out.optimizer,
                weights=out.weights,
                ends=out.ends,
                stand=self._stand(out.iteration) if out.waits else None,
            ),
            until=until,
        )

    def wait_counted(self, iteration: int) -> Committed:
        """Wait for the log's answer that the contribution counts, and return it.

        Until then the commit is sent again if the log was lost.
        """

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
        """Send the mean of these chunks as the script has edited it; return its digest, which is equal on all
        workers.

        Without `send`, only return the digest; "" if nothing was edited.
        """
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

    def send_written(self, iteration: int, written: Sequence[int], *, send: bool = True) -> str:
        """Send the values that the script has written into these chunks; return their digest, as
        `send_edited` does."""
        shards, writes = self._connection.shards, hashlib.blake2b(digest_size=16)
        slots = {bound.chunk.id: len(bound.parameters) for bound in self._chunks}
        for chunk_id in written:
            values, payload = self._store.made_of_values(chunk_id)
            writes.update(bytes_of(values))
            if send:
                replace = Replace(
                    incarnation=shards.incarnation,
                    iteration=iteration,
                    chunk=chunk_id,
                    present=bytes([1] * slots[chunk_id]),
                    values=True,
                )
                shards.send(self._connection.shard_of[chunk_id], replace, payload, until=STEP)
        return writes.hexdigest() if written else ""

    def say_step(
        self,
        iteration: int,
        scale: float,
        hyperparameters: Hyperparameters,
        edited: list[int],
        edits: str,
        *,
        accepted: bool,
        optimizer: int = 0,
        stays: bool = False,
        written: Sequence[int] = (),
        writes: str = "",
    ) -> None:
        """Let the shards step with the mean times `scale`, or leave the step out if it is not `accepted`.

        Args:
            iteration: the iteration.
            scale: the factor for the shards' mean.
            hyperparameters: the optimizers'.
            edited: the chunks that the script has edited.
            edits: the digest that `send_edited` returned.
            accepted: False to leave the step out.
            optimizer: the optimizer that steps, by its place among the model's.
            stays: True if others of the model's optimizers may step the same mean.
            written: the chunks whose values the script has written.
            writes: the digest that `send_written` returned.
        """
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
                optimizer=optimizer,
                stays=stays,
                written=list(written),
                writes=writes,
            ),
            until=STEP,
        )

    def _stand(self, iteration: int) -> WorkerStand:
        """Return this worker's place in its script: at the gradients of this iteration."""
        return WorkerStand(
            self._connection.worker, gradients_in(iteration, waiting_line(), self._calls.epoch())
        )

    def close(self) -> None:
        """Let go of the model."""
        self._chunks.clear()
