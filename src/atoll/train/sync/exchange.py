"""The way of a gradient to the shards of a parameter server, and of new parameters back.

Under `bsp` the contribution is committed when backward ends, and `p.grad` then shows the mean over workers;
`step()` tells the shards to step with it. Under `ssp` and `asp` a contribution is this worker's own until
`step()` commits it. In both, new parameters are staged as they arrive and published at the end of `step()`
(`sync.lazy`: at the next forward; `sync.pipeline`: at the end of the next `step()`), so that none changes
between forward and backward. Source: docs/server.md; Li et al., OSDI 2014.
"""

from __future__ import annotations

import hashlib
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.core.config import LinkOptions
from atoll.core.errors import RunError, UserError
from atoll.core.scriptline import waiting_line
from atoll.core.stands import gradients_in
from atoll.exchange.coding import PLAIN, Coding, bytes_of
from atoll.exchange.feedback import Feedback
from atoll.exchange.link import LOG, Link
from atoll.net.returning import Payload
from atoll.tensors.binding import BoundChunk, Buffer
from atoll.tensors.changed import ChangedParameters
from atoll.tensors.payload import tensor_of
from atoll.tensors.torch_compat import version_of
from atoll.train.gradients.early import EarlySum
from atoll.train.gradients.messages import ChunkGradients, Message
from atoll.train.gradients.reducer import Calls, Clipping, Reducer
from atoll.train.gradients.samples import Contribution
from atoll.wire.messages import (
    AnyMessage,
    Commit,
    Committed,
    Hyperparameters,
    LostBlocks,
    Mean,
    Parameters,
    Pull,
    PullMean,
    Push,
    Replace,
    Step,
    Used,
    WorkerStand,
    run_of,
)

# What messages are sent again until: the mean under bsp, else the parameters; the parameters.
CONTRIBUTION, STEP = "contribution", "step"


class Members(Protocol):
    """Who is told of the members of each iteration, and lets newcomers in between two of them."""

    def boundary(self, iteration: int) -> None:
        """All of `iteration` is done but its exchange, and nothing of that was committed; raises UserError
        where this worker has yet to enter the run."""

    def over(self) -> None:
        """The exchange is over."""

    def told(self, committed: Committed) -> None:
        """An iteration counts, with those in `committed`."""


@dataclass(frozen=True)
class Connection:
    """The shards, which of them holds each chunk (by id), the data that an iteration has used up, this
    worker's number in the run, and how gradients go there and are written."""

    shards: Link
    shard_of: dict[int, int]
    used: Callable[[], list[Used]]
    staleness: Callable[[float], None]  # told what the shards measured of each contribution
    members: Members
    worker: int
    link: LinkOptions = field(default_factory=LinkOptions)
    coding: Coding = PLAIN


class NewParameters:
    """Parameters on their way from the shards: staged as they arrive, and published all at once."""

    def __init__(self, chunks: Sequence[BoundChunk], connection: Connection) -> None:
        self._chunks = {bound.chunk.id: bound for bound in chunks}
        self._connection = connection
        self._staged: dict[int, Tensor | None] = {}  # None: it is in the parameters
        self._published: dict[int, Tensor] = {}  # the values that were put into the parameters
        self._comparing = {bound.chunk.id: ChangedParameters(bound) for bound in chunks}
        self._publishing = False  # the script waits for it in `step`, or before its forward
        self._asked: int | None = None  # the clock of the pull under way
        self._share = (0, 1)  # which run of each chunk it is for, of how many
        self._until: tuple[Hashable, ...] = ()  # what its answer ends the sending again of
        # Told of each answer: the iteration that it is to, the chunk, and what was lost of the contribution.
        self.told_lost: Callable[[int, int, LostBlocks | None], None] = lambda *_: None
        self.clock = 0  # of the latest answer: a worker that joins late begins there
        self.staleness = 0.0  # the same answer's
        self.consumed = 0.0  # the most samples that an answer to the latest question has counted
        # Called with the number of samples of all workers that an answer has counted:
        self.told_consumed: Callable[[float], None] = lambda _: None
        self._versions = self._seen()
        connection.shards.on(Parameters, self._handle)

    @property
    def on_their_way(self) -> bool:
        return self._asked is not None

    @property
    def have_arrived(self) -> bool:
        """Whether all that was asked for is here."""
        return len(self._staged) == len(self._chunks)

    def pull(
        self,
        clock: int,
        newest: bool = False,
        contribution: Hashable = CONTRIBUTION,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Ask for the parameters with which a worker that has committed `clock` iterations goes on; `newest`
        and `share` (the run, of how many): as wire's Pull has them. `contribution` is what the last of them
        was sent until."""
        self.expect(clock, contribution, share)
        shards = self._connection.shards
        for shard in sorted(set(self._connection.shard_of.values())):
            pull = Pull(
                incarnation=shards.incarnation,
                clock=clock,
                newest=newest,
                share=share[0],
                shares=share[1],
            )
            shards.send(shard, pull, until=STEP)

    def expect(
        self, clock: int, contribution: Hashable = CONTRIBUTION, share: tuple[int, int] = (0, 1)
    ) -> None:
        """As `pull`, where the contribution before has asked for them."""
        self._staged.clear()
        self.consumed = 0.0
        self._asked, self._share, self._until = clock, share, (contribution, STEP)

    def arrive(self) -> None:
        """Wait for what was asked for, and leave the parameters as they are."""
        if self._asked is not None:
            self._wait(self._what)

    def publish(self) -> None:
        """Wait for what was asked for and put it into the parameters."""
        if self._asked is None:
            return
        self.check_unchanged()
        self._publishing = True
        try:
            self._begin()
            for chunk_id, values in self._staged.items():
                self._put(self._chunks[chunk_id], values)
            self._staged = dict.fromkeys(self._staged)
            self._wait(self._what)
        finally:
            self._publishing = False
        self._done()
        self._end()

    def _begin(self) -> None:
        """The parameters are about to change."""

    def _end(self) -> None:
        """All of them are there."""
        self._versions = self._seen()

    def collect(self) -> dict[int, Tensor]:
        """Wait for what was asked for; each chunk's run of it, 1-D, by chunk. Nothing is made of it yet."""
        self._wait(self._what)
        values = {chunk_id: values for chunk_id, values in self._staged.items() if values is not None}
        self._done()
        return values

    def adopt(self, values: Mapping[int, Tensor]) -> None:
        """Put these into the parameters: all chunks' values, 1-D, by chunk. What was asked for is not waited
        for any more."""
        self.discarded()
        self.check_unchanged()
        for chunk_id, flat in values.items():
            self._put(self._chunks[chunk_id], flat)
        self._versions = self._seen()

    def discarded(self) -> None:
        """What was asked for is not waited for any more, and is not put anywhere."""
        self._done()

    def discard(self) -> None:
        """Wait for what was asked for, where it is known to be what the parameters are."""
        self._wait("word that a step is left out")
        self._done()

    def _wait(self, what: str | Callable[[], str]) -> None:
        self._connection.shards.wait(lambda: self.have_arrived, self._missing, what)

    def _done(self) -> None:
        """The parameters are there, so all shards have what they were made of."""
        self._staged.clear()
        self._asked = None
        for topic in self._until:
            self._connection.shards.answered(topic)

    def check_unchanged(self) -> None:
        """Raise UserError if the script has written to a parameter: the shards would not know.

        What was changed and changed back (to evaluate with an average of the weights, say) is unchanged.
        """
        for (name, version), (_, now) in zip(self._versions, self._seen(), strict=True):
            if version != now and self._differs(name):
                self._refuse_change(name)

    def _refuse_change(self, name: str) -> None:
        self._asked = None  # nothing is written over it
        raise UserError(
            f"parameter {name!r} was changed by the script after session.prepare; under strategy "
            "'server' parameters live at the shards: change it before session.prepare, or save and "
            "session.load it"
        )

    def forget_changes(self) -> None:
        """What was written so far is known to the shards too."""
        self._versions = self._seen()

    def _seen(self) -> list[tuple[str, int]]:
        return [
            (name, version_of(parameter))
            for bound in self._chunks.values()
            for name, parameter in zip(bound.names, bound.parameters, strict=True)
        ]

    def _differs(self, name: str) -> bool:
        bound = next(bound for bound in self._chunks.values() if name in bound.names)
        values = self._published.get(bound.chunk.id)
        return values is None or not torch.equal(bound.flat[: values.numel()].cpu(), values)

    def _put(self, bound: BoundChunk, values: Tensor | None) -> None:
        if values is not None:
            changed = self._comparing[bound.chunk.id].between(self._published.get(bound.chunk.id), values)
            self._published[bound.chunk.id] = values
            bound.flat[: values.numel()].copy_(values)
            if changed:
                torch.autograd.graph.increment_version(changed)

    def _what(self) -> str:
        """What is waited for, in words."""
        chunks = chunks_named(chunk for chunk in self._chunks if chunk not in self._staged)
        return f"{chunks} of the parameters after iteration {(self._asked or 0) - 1}"

    def _missing(self) -> list[int]:
        shard_of = self._connection.shard_of
        return sorted({shard_of[chunk_id] for chunk_id in self._chunks if chunk_id not in self._staged})

    def _handle(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Parameters)
        bound = self._chunks.get(message.chunk)
        if self._asked is None or message.asked != self._asked or bound is None:
            return  # an answer to a pull that was given up, or to the one before, once more
        if (message.share, message.shares) != self._share:
            return  # what this member asked for before another was lost
        self.clock, self.staleness = message.clock, message.staleness
        self.consumed = max(self.consumed, message.consumed)
        self.told_consumed(self.consumed)
        self.told_lost(message.asked - 1, message.chunk, message.lost)
        check_holder(self._connection.shard_of, shard, message.chunk)
        values = values_of(payload, bound, shard, self._share)
        if self._publishing:  # while the next one is on its way
            self._put(bound, values)
        self._staged[message.chunk] = None if self._publishing else values
        self._connection.staleness(message.staleness)  # the same from every shard


class Exchange(Reducer):
    """What both kinds of exchange have: the connection, the clock, and new parameters."""

    connection: Connection
    parameters: NewParameters

    @property
    def losses(self) -> Feedback | None:
        return self.feedback

    @property
    def acts_before_forward(self) -> bool:  # type: ignore[override]  # where parameters come late
        return self._lazy

    @property
    def acts_before_state_dict(self) -> bool:  # type: ignore[override]
        return self._lazy

    def _connect(self, connection: Connection, lazy: bool) -> None:
        self.connection, self._lazy = connection, lazy
        self.parameters = self._new_parameters(connection)
        self.parameters.told_consumed = self._hear_consumed
        names = {bound.chunk.id: bound.names[0] for bound in self._chunks}
        self.feedback = Feedback(
            [bound.chunk for bound in self._chunks],
            connection.shard_of,
            connection.link,
            connection.coding,
            named=lambda chunk: f"parameter {names[chunk.id]!r}",
        )
        self._held_by = Counter(connection.shard_of.values())  # shard -> chunks
        self._pushed: Counter[int] = Counter()  # of them, in this iteration
        self._counted: Committed | None = None  # of the latest iteration that does
        connection.shards.on(Committed, self._handle_committed)

    def _new_parameters(self, connection: Connection) -> NewParameters:
        return NewParameters(self._chunks, connection)

    def _hear_consumed(self, consumed: float) -> None:
        """Record the number of samples that the shards have counted."""
        self.consumed = max(self.consumed, consumed)

    def before_use(self, *_: object) -> None:
        """With `sync.lazy`: what the last step asked for must be there now."""
        self.parameters.publish()

    def before_state(self) -> None:
        """The optimizer's state is asked for: the step that was made last must be in it."""
        self.before_use()

    def before_step(self) -> None:
        self.before_use()
        self.parameters.check_unchanged()
        super().before_step()

    def refresh(self) -> None:
        """Fetch the parameters as the shards have them now: others may have moved them on."""
        self.before_use()
        self.parameters.pull(self.steps, newest=True)
        self.before_use()

    def catch_up(self, clock: int) -> None:
        """The workers have met, and the next iteration is `clock`: at a site, the others go on without one
        that waits in a meeting. A contribution that is not stepped yet stays where it is."""
        if not self._reduced:
            self.steps = max(self.steps, clock)

    def close(self) -> None:
        """Let the model go, with the parameters that the last step asked for, unless an error ends it."""
        if sys.exc_info()[0] is None:
            self.before_use()
        super().close()

    def _check_forward(self) -> None:
        """Raise UserError if gradients have come from a forward that `before_use` has not seen."""
        if self.parameters.on_their_way:
            raise UserError(
                f"iteration {self.steps}: a backward through the model whose forward was not called, so that "
                "it used the parameters of the iteration before; with sync.lazy call the model itself, not "
                "a method or a part of it, or set sync.lazy to false"
            )

    def _handle_committed(self, _shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, Committed)
        self._counted = message
        self._weighed_by(message)

    def _weighed_by(self, counted: Committed) -> None:
        """Record how contributions weigh, by the log's answer, and pass on a warning about counts."""
        self.count_alike = counted.alike
        if counted.counts:
            self._calls.counts_unlike(counted.counts)
        if counted.epochs:
            self._calls.epochs_mixed(counted.epochs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.feedback.clear()

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        """Which iteration this worker makes next is the shards' to say."""
        self.sum.load_member_state(state)

    @abstractmethod
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        """The script's `optimizer.step()`: let the shards make it, and ask for the new parameters."""

    @property
    def _contribution(self) -> Hashable:
        """What this iteration's contribution is sent until."""
        return CONTRIBUTION

    def _send_chunk(
        self, bound: BoundChunk, flat: Tensor, present: Sequence[bool], weight: float, pull: bool = True
    ) -> None:
        """Push one chunk of this iteration's contribution; `flat` must stay as it is until the answer.

        A shard's last chunk asks for what comes of them all, unless `pull` is false.
        """
        chunk_id, shards = bound.chunk.id, self.connection.shards
        shard = self.connection.shard_of[chunk_id]
        written = self.feedback.write(self.steps, chunk_id, flat, present, weight)
        message = self._push_of(chunk_id, present, pull)
        shards.send(shard, message, written.payload, until=self._contribution, lossy=written.lossy)
        self.bytes_sent += written.payload.nbytes

    def _push_of(self, chunk_id: int, present: Sequence[bool], pull: bool) -> Push:
        """The message with which a chunk of this iteration's contribution goes."""
        shard = self.connection.shard_of[chunk_id]
        self._pushed[shard] += 1
        return Push(
            incarnation=self.connection.shards.incarnation,
            iteration=self.steps,
            chunk=chunk_id,
            chunks_in_all=self._held_by[shard],
            present=bytes(present),
            pull=pull and self._pushed[shard] == self._held_by[shard],
            late=self.feedback.holds_back,
        )

    def _commit(
        self,
        own: Contribution,
        hyperparameters: Hyperparameters,
        behind: int = 0,
        stand: WorkerStand | None = None,
    ) -> None:
        """Commit this iteration's contribution to the log. `stand` is the place where the script waits for
        the others.
        """
        self.connection.shards.send(
            LOG,
            Commit(
                incarnation=self.connection.shards.incarnation,
                iteration=self.steps,
                weight=own.weight,
                samples=own.samples,
                basis=own.basis,
                alike=own.alike,
                hyperparameters=hyperparameters,
                used=self.connection.used(),
                behind=behind,
                stand=stand,
            ),
            until=self._contribution,
        )

    def _stand(self) -> WorkerStand:
        """Return this worker's place in its script: at the gradients of this iteration."""
        return WorkerStand(
            self.connection.worker, gradients_in(self.steps, waiting_line(), self._calls.epoch())
        )


class MeanSteps(Exchange):
    """bsp: what becomes of a mean once it is there: clipping and other edits, and the step."""

    _gradients: dict[int, ChunkGradients]  # by chunk

    def _connect(self, connection: Connection, lazy: bool) -> None:
        super()._connect(connection, lazy)
        self._committed = -1  # the last iteration that was
        self._scale_at_step = 1.0  # of this iteration's means: by clipping
        self._published: list[tuple[Tensor | None, int]] = []

    def drop_kept(self) -> None:
        super().drop_kept()
        if self._reduced and self._committed == self.steps:
            self._leave_out()

    @torch.no_grad()
    def _leave_out(self) -> None:
        """A backward begins, and no step was made with the mean before: the script has skipped it, as a
        GradScaler does. Raises UserError where gradients of it are left, to be added to."""
        if self._has_mean():
            raise UserError(
                f"iteration {self.steps}: a second backward before optimizer.step(); under strategy "
                "'server' with bsp, wrap all but the last in session.no_sync(), or add the losses up; to "
                "skip a step, call optimizer.zero_grad()"
            )
        self._reduced = False
        self._step_left_out()
        self.steps += 1

    def _has_mean(self) -> bool:
        """Whether the latest mean is still there, and not all zeros."""
        views = [(p, view) for c in self._gradients.values() for p, view in c.slots()]
        return any(parameter.grad is view and bool(view.any()) for parameter, view in views)

    @abstractmethod
    def _step_left_out(self) -> None:
        """Let the shards leave this iteration's step out, and wait until they have."""

    def clip(self, by: Clipping) -> Tensor:
        """Clip the mean here; the shards multiply theirs by the same factor in the step."""
        edited = self._edited()
        norm, coefficient = by.clip()
        if not edited:  # else `step` sends the gradients themselves
            self._scale_at_step *= coefficient
            self._published = self._gradients_seen()
        return norm

    def _send_edited(self, edited: Sequence[int], send: bool = True) -> str:
        """Send what the script made of these chunks' mean; its digest, which is the same on all workers."""
        shards, edits = self.connection.shards, hashlib.blake2b(digest_size=16)
        for chunk_id in edited:
            present, flat = self._made_of_mean(chunk_id)
            edits.update(bytes(present) + bytes_of(flat))
            if send:
                replace = Replace(
                    incarnation=shards.incarnation,
                    iteration=self.steps,
                    chunk=chunk_id,
                    present=bytes(present),
                )
                payload = self._edit_of(chunk_id, flat)
                shards.send(self.connection.shard_of[chunk_id], replace, payload, until=STEP)
        return edits.hexdigest() if edited else ""

    def _made_of_mean(self, chunk_id: int) -> tuple[Sequence[bool], Tensor]:
        """What the script has made of a chunk's mean: which slots have a gradient, and these, flat."""
        chunk = self._gradients[chunk_id]
        return chunk.collect(), chunk.published.flat

    def _edit_of(self, _chunk_id: int, flat: Tensor) -> Payload:
        """The same, on its way."""
        return bytes_of(flat)

    def _say_step(
        self, accepted: bool, hyperparameters: Hyperparameters, edited: list[int], edits: str
    ) -> None:
        shards = self.connection.shards
        shards.send(
            LOG,
            Step(
                incarnation=shards.incarnation,
                iteration=self.steps,
                scale=self._scale_at_step,
                hyperparameters=hyperparameters,
                edited=edited,
                edits=edits,
                accepted=accepted,
                stand=self._stand(),
                unscaled=self._calls.unscaled() if accepted else 1.0,
            ),
            until=STEP,
        )

    def _edited(self) -> list[int]:
        """The chunks in which the script has changed or replaced a gradient since it was published."""
        now = iter(zip(self._published, self._gradients_seen(), strict=True))
        found = []
        for chunk_id, chunk in self._gradients.items():
            pairs = [next(now) for _ in chunk.bound.parameters]
            if any(before[0] is not after[0] or before[1] != after[1] for before, after in pairs):
                found.append(chunk_id)
        return found

    def _gradients_seen(self) -> list[tuple[Tensor | None, int]]:
        return [
            (p.grad, -1 if p.grad is None else version_of(p.grad))
            for chunk in self._gradients.values()
            for p in chunk.bound.parameters
        ]


class WorkerMean(MeanSteps):
    """bsp: how a worker that speaks for itself waits for the mean, and steps."""

    def _connect(self, connection: Connection, lazy: bool) -> None:
        super()._connect(connection, lazy)
        self._means: dict[int, Mean] = {}
        connection.shards.on(Mean, self._handle_mean)

    @abstractmethod
    def _handle_mean(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        """A chunk's mean has come."""

    def _await_mean(self) -> None:
        """Return when all of it is here, and the iteration counts."""
        chunks, shard_of = {bound.chunk.id for bound in self._chunks}, self.connection.shard_of
        self.connection.shards.wait(
            lambda: len(self._means) == len(chunks) and self._is_counted(),
            lambda: sorted({shard_of[chunk] for chunk in chunks if chunk not in self._means}),
            self._what,
        )
        self.connection.shards.answered(CONTRIBUTION)
        self.connection.members.over()

    def _is_counted(self) -> bool:
        return self._counted is not None and self._counted.iteration == self.steps

    def _what(self) -> str:
        """What is waited for, in words."""
        chunks = chunks_named(b.chunk.id for b in self._chunks if b.chunk.id not in self._means)
        return f"the mean of {chunks} in iteration {self.steps}"

    def _mean_is_there(self, own: Contribution) -> None:
        """The iteration is whole."""
        samples = next(iter(self._means.values())).samples if self._means else own.samples
        self._done(own, samples)
        assert self._counted is not None
        self.connection.members.told(self._counted)

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        edited = self._edited() if accepted else []  # what is left out needs no gradients
        self.feedback.settle(self.steps, counted=accepted)
        edits = self._send_edited(edited)
        self._say_step(accepted, hyperparameters, edited, edits)
        self._scale_at_step = 1.0
        self.parameters.pull(self.steps + 1)
        if not self._lazy or edited:
            self.parameters.publish()

    def _step_left_out(self) -> None:
        self.feedback.settle(self.steps, counted=False)
        self._say_step(accepted=False, hyperparameters=[], edited=[], edits="")
        self._scale_at_step = 1.0
        self.parameters.pull(self.steps + 1)
        self.parameters.discard()


class MeanExchange(WorkerMean):
    """bsp: after backward `p.grad` is the mean over workers, as the shards made it."""

    sum: EarlySum

    def __init__(
        self, chunks: Sequence[BoundChunk], connection: Connection, calls: Calls, lazy: bool
    ) -> None:
        super().__init__(chunks, calls, partial(EarlySum, leave=self._leave))
        self._gradients = self.sum.chunks
        self._connect(connection, lazy)
        self._first = True  # nothing leaves early: some parameters may get their gradients more than once

    def _leave(self, message: Message) -> None:
        self._calls.leaving()
        message.sent = True
        (chunk,) = message.chunks
        own = self.contribute()
        chunk.settle(1.0)  # the shards weigh
        present = [p.grad is not None and own.weight > 0 for p in chunk.bound.parameters]
        if own.weight == 0:
            chunk.published.flat.zero_()
        self._send_chunk(chunk.bound, chunk.published.flat, present, own.weight)

    @torch.no_grad()
    def reduce(self) -> None:
        """Send what has not left, commit, and wait for the mean."""
        self._check_forward()
        self.connection.members.boundary(self.steps)
        if any(message.dirty for message in self.sum.order):
            raise RunError(
                f"iteration {self.steps}: a gradient changed after its chunk had left for the shards (a "
                "parameter in a reentrant checkpoint, only now and then?); use use_reentrant=False"
            )
        own = self.contribute()
        self._committed = self.steps
        self._means.clear()
        for message in self.sum.rest:
            self._leave(message)
        self._commit(own, [], stand=self._stand())
        self._await_mean()
        for chunk_id, mean in self._means.items():
            self._gradients[chunk_id].publish([bool(byte) for byte in mean.present])
        self._published = self._gradients_seen()
        self.sends_early, self._first = self.sends_early or self._first, False
        self._mean_is_there(own)

    def begin(self) -> None:
        super().begin()
        self._pushed.clear()
        if self._first:
            self.sends_early = False

    def _handle_mean(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Mean)
        chunk = self._gradients.get(message.chunk)
        if message.iteration != self.steps or chunk is None:
            return
        check_mean(self.connection.shard_of, shard, message, chunk.bound)
        # The shard has answered, so what was sent from this memory has been received, and counts.
        if not any(self.connection.shard_of[chunk_id] == shard for chunk_id in self._means):
            shards = self.connection.shards
            rest = PullMean(incarnation=shards.incarnation, iteration=self.steps)
            shards.answered(CONTRIBUTION, shard, instead=rest)
        self.feedback.answered(message.iteration, message.chunk, message.lost)
        chunk.published.flat.copy_(values_of(payload, chunk.bound, shard))
        self._means[message.chunk] = message


class AsyncExchange(Exchange):
    """ssp and asp: gradients are this worker's own, and edits act on its own contribution.

    With `pipeline` 1 an exchange goes on while the next iteration computes: `step` sends this iteration's
    contribution, and publishes what came of the one before.
    """

    sums_samples = False

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        connection: Connection,
        calls: Calls,
        lazy: bool,
        pipeline: int = 0,
    ) -> None:
        super().__init__(chunks, calls)
        self._connect(connection, lazy)
        self.parameters.told_lost = self._handle_lost
        self._pipelined = pipeline > 0
        # By chunk and turn, for gradients that cannot be sent as they are:
        self._outgoing: dict[tuple[int, int], Buffer] = {}
        self._weighed = Contribution(0.0, 0.0)  # this iteration's
        # A backward whose forward was not called is seen by its gradients alone: see `_check_forward`.
        watched = [parameter for bound in chunks if lazy for parameter in bound.parameters]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _: calls.arm())  # type: ignore[no-untyped-call]
            for parameter in watched
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().close()
        self._outgoing.clear()

    def settle(self) -> None:
        """Wait for the exchange in flight; what came of it is published in its time."""
        self.parameters.arrive()

    def before_state(self) -> None:
        if self._pipelined:
            self.settle()
        else:
            super().before_state()

    def before_step(self) -> None:
        if not self._pipelined:
            super().before_step()
            return
        self.parameters.check_unchanged()
        Reducer.before_step(self)  # nothing is published before the contribution has left

    def reduce(self) -> None:
        """A backward has ended: nothing leaves before `step`."""
        if not self._pipelined:
            self._check_forward()
        self.connection.members.boundary(self.steps)
        self.connection.members.over()
        self._weighed = self.contribute()
        super().reduce()

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        self._calls.leaving()
        if self._counted is not None:
            self.connection.members.told(self._counted)
        own = self._weighed if accepted else Contribution(0.0, self._weighed.samples)
        if self._pipelined:
            self._step_ahead(own, hyperparameters)
            return
        self._contribute_all(own)
        self._commit(own, hyperparameters)
        self.parameters.expect(self.steps + 1)
        if not self._lazy:
            self.parameters.publish()

    def _step_ahead(self, own: Contribution, hyperparameters: Hyperparameters) -> None:
        """Send this contribution, and end the exchange of the one before, which may have ended already.

        Only then are this one's parameters asked for: a shard keeps one question of each worker.
        """
        parameters, behind = self.parameters, int(self.parameters.on_their_way)
        self.connection.shards.take()
        if parameters.on_their_way and parameters.have_arrived:
            parameters.publish()
        late = parameters.on_their_way
        self._contribute_all(own, pull=not late)
        self._commit(own, hyperparameters, behind)
        if late:
            parameters.publish()
            parameters.pull(self.steps + 1, contribution=self._contribution)
        else:
            parameters.expect(self.steps + 1, self._contribution)

    @property
    def _contribution(self) -> Hashable:
        return (CONTRIBUTION, self.steps) if self._pipelined else CONTRIBUTION  # two may be under way

    def _contribute_all(self, own: Contribution, pull: bool = True) -> None:
        """Push all chunks; the last of each shard asks for the new parameters if `pull`."""
        stays = not (self._lazy or self._pipelined)  # else the script goes on before the answer
        self._pushed.clear()
        for bound in self._chunks:
            present = [own.weight > 0 and parameter.grad is not None for parameter in bound.parameters]
            flat = gradient_as_it_lies(bound, present) if stays else None
            flat = self._gather(bound, present) if flat is None else flat
            self._send_chunk(bound, flat, present, own.weight, pull)

    def _handle_lost(self, iteration: int, chunk_id: int, lost: LostBlocks | None) -> None:
        self.feedback.answered(iteration, chunk_id, lost)
        self.feedback.settle(iteration, chunk_id)

    def _gather(self, bound: BoundChunk, present: Sequence[bool]) -> Tensor:
        """A copy of a chunk's gradients, zeros where there are none."""
        place = bound.chunk.id, self.steps % 2 if self._pipelined else 0
        outgoing = self._outgoing.get(place)
        if outgoing is None:
            memory = bound.flat.new_zeros(bound.chunk.extent)
            outgoing = self._outgoing[place] = Buffer(bound.chunk, bound.parameters, memory)
        for parameter, view, here in zip(bound.parameters, outgoing.views, present, strict=True):
            view.copy_(parameter.grad) if here else view.zero_()  # type: ignore[arg-type]
        return outgoing.flat


def gradient_as_it_lies(bound: BoundChunk, present: Sequence[bool]) -> Tensor | None:
    """The gradient of a chunk of one parameter, flat and in place, if it lies as the chunk would have it.

    It must not change before the shard's answer; so not where the script goes on at once.
    """
    parameter = bound.parameters[0]
    gradient = parameter.grad
    if len(present) > 1 or not present[0] or gradient is None or gradient.layout != torch.strided:
        return None
    alike = gradient.dtype == bound.flat.dtype and gradient.stride() == parameter.stride()
    if not alike or gradient.numel() != bound.chunk.extent or gradient.device.type != "cpu":
        return None
    return gradient.detach().as_strided((bound.chunk.extent,), (1,))


def chunks_named(chunks: Iterable[int]) -> str:
    """`chunk 3`, `chunks 1 and 3`, `chunks 0, 1, 2 and 5 more`."""
    ids = sorted(chunks)
    if len(ids) == 1:
        return f"chunk {ids[0]}"
    named, more = ids[:3], len(ids) - 3
    last = f"{more} more" if more > 0 else str(named.pop()) if named else "none"
    return f"chunks {', '.join(map(str, named))} and {last}"


def check_holder(shard_of: Mapping[int, int], shard: int, chunk: int) -> None:
    """Raise RunError where `shard` answers for a chunk that another one holds."""
    if shard_of[chunk] != shard:
        raise RunError(f"shard {shard} answered for chunk {chunk}, which shard {shard_of[chunk]} holds")


def check_mean(shard_of: Mapping[int, int], shard: int, mean: Mean, bound: BoundChunk) -> None:
    """Raise RunError where `shard` sends what cannot be the mean of this chunk."""
    check_holder(shard_of, shard, mean.chunk)
    if len(mean.present) != len(bound.parameters):
        raise RunError(
            f"shard {shard} sent a mean of {len(mean.present)} parameters for chunk {mean.chunk}, which has "
            f"{len(bound.parameters)}"
        )


def values_of(
    payload: memoryview | None, bound: BoundChunk, shard: int, share: tuple[int, int] = (0, 1)
) -> Tensor:
    """The values of a chunk, or of a share of it, in `payload`, in place; raises RunError where their number
    is wrong."""
    start, stop = run_of(bound.chunk.extent, *share)
    expected = (stop - start) * bound.dtype.itemsize
    got = 0 if payload is None else len(payload)
    if got != expected:
        raise RunError(f"shard {shard} sent {got} bytes for chunk {bound.chunk.id}, which has {expected}")
    if payload is None or not got:  # the last shares of a chunk that has fewer elements
        return torch.empty(0, dtype=bound.dtype)
    return tensor_of(payload, bound.dtype)
