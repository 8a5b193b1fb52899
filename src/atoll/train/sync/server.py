"""The way of a gradient to the shards of a parameter server, and of new parameters back.

Under `bsp` the contribution is committed when backward ends, and `p.grad` then shows the mean over
contributors; `step()` tells the shards to step with it (`MeanExchange`). Under `ssp` and `asp` a contribution
is the contributor's own until `step()` commits it (`ValuesExchange`, `GroupValuesExchange`). In both, new
parameters are staged as they arrive and published at the end of `step()` (`sync.lazy`: at the next forward;
`sync.pipeline`: at the end of the next `step()`), so that none changes between forward and backward.

Where gradients and values lie is the exchange's `Store`; who speaks is its `Speaker`: a worker for itself, or
a group as one. Each iteration of a group is two rounds of its ring (`train/group/rounds.py`). The first sums
the members' gradients; it is made again, from what each has kept, where a member was lost. The second is the
exchange. All members hold then what is exchanged, to the bit, and the shards know it by the group's number
and the iteration: where the member that spoke was lost, the next one sends it again, and it counts once.
Source: docs/server.md; docs/ps-hra.md; Li et al., OSDI 2014.
"""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.core import points
from atoll.core.errors import UserError
from atoll.exchange.feedback import Feedback
from atoll.exchange.link import Link
from atoll.tensors.binding import BoundChunk
from atoll.train.gradients.messages import Message
from atoll.train.gradients.reducer import Calls, Clipping, Reducer
from atoll.train.gradients.ring import RingSum
from atoll.train.gradients.samples import Contribution
from atoll.train.gradients.sums import MakeSum
from atoll.train.group.rounds import Ring
from atoll.train.sync.answers import Means, NewParameters
from atoll.train.sync.client import Outgoing, ServerClient
from atoll.train.sync.connection import COMMIT, CONTRIBUTION, Connection
from atoll.train.sync.stores import Store
from atoll.train.sync.together import Together
from atoll.train.sync.uplink import Role, Speaker, Uplink
from atoll.wire.messages import Committed, Hyperparameters, LostBlocks


class Answer(msgspec.Struct, frozen=True):
    """What the leader was told of an exchange, beside values."""

    clock: int
    staleness: float
    counted: Committed
    consumed: float = 0.0


class MeanAnswer(msgspec.Struct, frozen=True):
    """bsp: the same of a mean. `present` by chunk: where any contributor has a gradient."""

    present: dict[int, bytes]
    weight: float
    samples: float
    counted: Committed


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an exchange is composed of.

    Args:
        chunks: the model's trained ones.
        connection: to the shards.
        calls: the model's.
        make_sum: makes the sum over the contributor's workers.
        make_store: makes the place of gradients and values, given that sum.
        speaker: speaks to the shards.
        feedback: keeps what the link and the codec drop.
        together: what members of a group tell one another; None: this worker is a contributor by itself.
        lazy: new parameters are published before the next forward.
    """

    chunks: Sequence[BoundChunk]
    connection: Connection
    calls: Calls
    make_sum: MakeSum
    make_store: Callable[[Any], Store]
    speaker: Speaker
    feedback: Feedback
    together: Together | None = None
    lazy: bool = False


class Server(Reducer):
    """One model's exchange with the shards: what its kinds have in common."""

    def __init__(self, parts: Parts) -> None:
        chunks, connection, calls = parts.chunks, parts.connection, parts.calls
        super().__init__(chunks, calls, parts.make_sum)
        self.connection, self._lazy = connection, parts.lazy
        self.acts_before_forward = self.acts_before_state_dict = parts.lazy  # where parameters come late
        self.losses = self.feedback = parts.feedback
        self.uplink, self.group = parts.speaker, parts.together
        self._store = parts.make_store(self.sum)
        of_group = self.group is not None
        self._client = ServerClient(
            chunks,
            connection,
            self._store,
            calls,
            self.feedback,
            heard=self._hear_alone,
            sent=self._count_sent,
        )
        self.parameters = NewParameters(
            chunks,
            connection,
            self._store,
            of_group=of_group,
            lost=self._hear_lost,
            consumed=self._hear_consumed_alone,
        )
        self.exchange_seconds = 0.0  # in all

    def close(self) -> None:
        """Let the model go, with the parameters that the last step asked for, unless an error ends it."""
        if sys.exc_info()[0] is None:
            self.before_use()
        super().close()
        self._client.close()
        self._store.close()

    # -- an iteration --------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self) -> None:
        self._check_forward()
        self.connection.members.boundary(self.steps)
        if self.group is not None:
            self.group.begin()
        super().reduce()

    def before_use(self, *_: object) -> None:
        """With `sync.lazy`: what the last step asked for must be there now. What is on its way to a group is
        published by all members together, in `step`."""
        if self.group is None:
            self.parameters.publish()

    def before_state(self) -> None:
        """The optimizer's state is asked for: the step that was made last must be in it."""
        self.before_use()

    def before_step(self) -> None:
        self.before_use()
        self.parameters.check_unchanged()
        super().before_step()

    @abstractmethod
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        """The script's `optimizer.step()`: let the shards make it, and ask for the new parameters."""

    def after_step(self) -> None:
        super().after_step()
        if self.group is not None:
            self.group.after_step()

    def _check_forward(self) -> None:
        """Raise UserError if gradients have come from a forward that `before_use` has not seen."""
        if self._lazy and self.parameters.on_their_way:
            raise UserError(
                f"iteration {self.steps}: a backward through the model whose forward was not called, so that "
                "it used the parameters of the iteration before; with sync.lazy call the model itself, not "
                "a method or a part of it, or set sync.lazy to false"
            )

    # -- where this worker is in the run -------------------------------------------------------------------

    @torch.no_grad()
    def refresh(self) -> None:
        """Fetch the parameters as the shards have them now: others may have moved them on."""
        if self.group is not None:
            self._take_parameters(self.steps, "the newest parameters", newest=True)
            return
        self.before_use()
        self.parameters.pull(self.steps, newest=True)
        self.before_use()

    def catch_up(self, clock: int) -> None:
        """The workers have met, and the next iteration is `clock`: at a site, the others go on without one
        that waits in a meeting. A contribution that is not stepped yet stays where it is."""
        if not self.reduced:
            self.steps = max(self.steps, clock)

    def gather_members(self) -> None:
        """Return when all members of the group have come to a meeting; under bsp they come together."""

    @property
    def contributors(self) -> list[int]:
        """Those that live, as the log last said: groups, and workers alone."""
        return [] if self.group is None else self.group.contributors

    def join(self, contributor: int, what: str) -> None:
        """Take part in a new group's iterations, with the parameters that its leader is given for it."""
        assert self.group is not None
        self.uplink.join(contributor, what)
        self.steps = self._take_parameters(0, what).clock
        self._client.counted = None
        self.group.joined()
        self.sum.begin_in_group()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.feedback.clear()

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        """Which iteration this worker makes next is the shards' to say."""
        self.sum.load_member_state(state)

    # -- what the shards say -------------------------------------------------------------------------------

    def _hear_lost(self, iteration: int, chunk: int, lost: LostBlocks | None) -> None:
        self.feedback.answered(iteration, chunk, lost)

    def _hear_consumed(self, consumed: float) -> None:
        """Record the number of samples that the shards have counted."""
        self.consumed = max(self.consumed, consumed)

    def _hear_consumed_alone(self, consumed: float) -> None:
        if self.group is None:  # else all members hear it at once
            self._hear_consumed(consumed)

    def _hear_alone(self, counted: Committed) -> None:
        """Record how contributions weigh, by the log's answer. The ring weighs within a group, all of whose
        members hear the answer at once."""
        if self.group is None:
            self.count_alike = counted.alike
            self._warn(counted)

    def _warn(self, counted: Committed) -> None:
        if counted.counts:
            self._calls.counts_unlike(counted.counts)
        if counted.epochs:
            self._calls.epochs_mixed(counted.epochs)

    def _take_word(self, counted: Committed) -> None:
        """What the log said, as all members were told; who spoke to it and was not the last to, needs not
        again."""
        if self.group is not None:
            self.connection.shards.answered(COMMIT)
        self.connection.members.told(counted)
        if self.group is not None:
            self._warn(counted)
            self.group.hear(counted)

    # -- the exchange -------------------------------------------------------------------------------------

    def _count_sent(self, sent: int) -> None:
        self.bytes_sent += sent

    def _contribution(self, own: Contribution, turn: int | None, **more: Any) -> Outgoing:
        """Return the contribution of what is in the store; see `ServerClient.outgoing`."""
        if self.group is None:
            return self._client.outgoing(self.steps, own, turn, used=self.connection.used(), **more)
        used, able = self.group.take_used(), list(self.group.able)
        return self._client.outgoing(self.steps, own, turn, used=used, able=able, **more)

    def _send(self, out: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        """Send this side's part of a contribution, and commit it where it speaks to the log."""
        if self._store.window is not None:
            self.connection.shards.answered(CONTRIBUTION)  # of a ring before this one
        self._push(out, role, along)
        points.reach("group.pushed", out.iteration)
        if role.leads:
            out.grouping = 0 if self.group is None else self.group.grouping()
            self._client.commit(out, CONTRIBUTION if self.group is None else COMMIT)
            points.reach("group.committed", out.iteration)

    def _push(self, out: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        """The chunks of it."""
        self._client.push_all(out, role.share, along=along)

    def _fetch(self, role: Role, clock: int, what: str, *, newest: bool = False) -> dict[int, Tensor]:
        """Parameters as `NewParameters.pull` asks for them, for `adopt`. A collective of the ring."""
        if role.talks:
            self.parameters.pull(clock, newest=newest, share=role.share)
        return self.uplink.hand_on(role, self.parameters, self.parameters.become, what)

    def _take_parameters(self, clock: int, what: str, *, newest: bool = False) -> Answer:
        """Take parameters on all members, asked for as in `NewParameters.pull`. `what` describes the wait."""

        def act() -> tuple[Answer, dict[int, Tensor]]:
            role = self.uplink.role(clock)
            values = self._fetch(role, clock, what, newest=newest)
            told, word = self.parameters, None
            if role.leads:
                word = Answer(told.clock, 0.0, Committed(iteration=0), told.consumed)
            return self.uplink.tell(role, word, Answer, what), values

        answer, values = self.uplink.round(what, act)
        self.parameters.adopt(values)
        self._hear_consumed(answer.consumed)
        return answer

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """What is waited for within is a group's exchange."""
        if self.group is None:
            yield
            return
        waited: list[Ring | Link] = [self.group.ring, self.connection.shards]
        before = sum(each.seconds_waited for each in waited)
        yield
        self.exchange_seconds += sum(each.seconds_waited for each in waited) - before


class MeanExchange(Server):
    """bsp: after backward `p.grad` is the mean over all contributors, as the shards made it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        of_group = self.group is not None
        self._means = Means(parts.chunks, parts.connection, self._store, self.feedback, of_group=of_group)
        self._committed = -1  # the last iteration that was
        self._scale_at_step = 1.0  # of this iteration's means: by clipping

    # -- the mean -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        super().begin()
        self._client.begin()

    def leave(self, message: Message) -> None:
        """Push a chunk while backward goes on."""
        self._calls.leaving()
        message.sent = True
        (chunk,) = message.chunks
        own = self.contribute()
        chunk.settle(1.0)  # the shards weigh
        present = [p.grad is not None and own.weight > 0 for p in chunk.bound.parameters]
        if own.weight == 0:
            chunk.published.flat.zero_()
        self._client.push(self.steps, chunk.bound, chunk.published.flat, present, own.weight)

    def _is_whole(self, own: Contribution, of_group: Contribution) -> None:
        if self.group is not None:
            self.group.whole()
        self._committed = self.steps
        if self.sum.has_sent:
            out = Outgoing(self.steps, own, {}, {}, used=self.connection.used())
        else:
            out = self._contribution(of_group, None)
        what = f"the mean of iteration {self.steps} over all groups"
        with self._timed():
            answer, values = self.uplink.round(what, lambda: self._exchange(out, what), self.steps)
        self._means.over()
        # Until the mean is there, all may wait for a newcomer, and that one for this worker's state.
        self.connection.members.over()
        for bound in () if self._means.by_chunk else self._chunks:
            present = [bool(byte) for byte in answer.present[bound.chunk.id]]
            self._store.put_mean(bound, values[bound.chunk.id], present)
        self._store.end_mean()
        self._done(own, answer.samples)
        self._take_word(answer.counted)

    def _push(self, out: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        if not self.sum.has_sent:
            self._calls.leaving()
            super()._push(out, role, along)

    def _exchange(self, out: Outgoing, what: str) -> tuple[MeanAnswer, dict[int, Tensor]]:
        role = self.uplink.role(out.iteration)
        along = self.uplink.along(out, what)
        if role.talks:
            self._means.expect(out.iteration, role.share)
            self._client.counted = None
            self._send(out, role, along)

        def put(bound: BoundChunk, values: Tensor) -> None:
            known = self._means.words[bound.chunk.id].present if role.leads else None
            present = [bool(byte) for byte in self.uplink.tell(role, known, bytes, what)]
            self._store.put_mean(bound, values, present)
            points.reach("group.handed", out.iteration)

        values = self.uplink.hand_on(role, self._means, put, what)
        word, means = None, self._means.words
        if role.leads:
            counted, first = self._client.wait_counted(out.iteration), next(iter(means.values()), None)
            word = MeanAnswer(
                present={chunk_id: mean.present for chunk_id, mean in means.items()},
                weight=out.own.weight if first is None else first.weight,
                samples=out.own.samples if first is None else first.samples,
                counted=counted,
            )
        points.reach("group.answered", out.iteration)
        return self.uplink.tell(role, word, MeanAnswer, what), values

    def own_nonfinite(self) -> list[str]:
        found = self._store.own_nonfinite()
        return super().own_nonfinite() if found is None else found

    # -- the step -----------------------------------------------------------------------------------------

    def drop_kept(self) -> None:
        super().drop_kept()
        if self.reduced and self._committed == self.steps:
            self._leave_out()

    @torch.no_grad()
    def _leave_out(self) -> None:
        """A backward begins, and no step was made with the mean before: the script has skipped it, as a
        GradScaler does. Raises UserError where gradients of it are left, to be added to. The parameters are
        what they were: within backward, nothing may be written to them."""
        if self._store.has_mean():
            raise UserError(
                f"iteration {self.steps}: a second backward before optimizer.step(); under strategy "
                "'server' with bsp, wrap all but the last in session.no_sync(), or add the losses up; to "
                "skip a step, call optimizer.zero_grad()"
            )
        self.reduced = False
        with self.parameters.dropping():
            self._make_step(accepted=False, hyperparameters=[], edited=[])
            self.parameters.discard() if self.group is None else self.parameters.discarded()
        self.steps += 1

    def clip(self, by: Clipping) -> Tensor:
        """Clip the mean here; the shards multiply theirs by the same factor in the step."""
        norm, factor = self._store.clip(by)
        self._scale_at_step *= factor
        return norm

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        edited = self._store.edited() if accepted else []  # what is left out needs no gradients
        with self.parameters.stepping():
            values = self._make_step(accepted, hyperparameters, edited)
            if self.group is not None:
                self.parameters.adopt(values)
            elif not self._lazy or edited:
                self.parameters.publish()

    def _make_step(
        self, accepted: bool, hyperparameters: Hyperparameters, edited: list[int]
    ) -> dict[int, Tensor]:
        """Let the shards make the step; to a group, the parameters that come of it, by chunk."""
        what = f"the parameters after iteration {self.steps}"

        def act() -> dict[int, Tensor]:
            role = self.uplink.role(self.steps)
            edits = self._client.send_edited(self.steps, edited, send=role.leads)
            if role.leads:
                self._client.say_step(
                    self.steps, self._scale_at_step, hyperparameters, edited, edits, accepted=accepted
                )
                points.reach("group.stepped", self.steps)
            if self.group is not None:
                return self._fetch(role, self.steps + 1, what)
            self.parameters.pull(self.steps + 1)
            return {}

        with self._timed():
            values = self.uplink.round(what, act, self.steps, self.sum.where)
        self.feedback.settle(self.steps, counted=accepted)
        self._scale_at_step = 1.0
        return values


class ValuesExchange(Server):
    """ssp and asp, of a worker that speaks for itself: gradients are its own, and edits act on its own
    contribution.

    With `pipeline` 1 an exchange goes on while the next iteration computes: `step` sends this iteration's
    contribution, and publishes what came of the one before.
    """

    sums_samples = False

    def __init__(self, parts: Parts, pipeline: int = 0) -> None:
        super().__init__(parts)
        self._pipelined = pipeline > 0
        self._weighed = Contribution(0.0, 0.0)  # this iteration's
        # A backward whose forward was not called is seen by its gradients alone: see `_check_forward`.
        watched = [parameter for bound in parts.chunks if parts.lazy for parameter in bound.parameters]
        arm = parts.calls.arm
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _: arm())  # type: ignore[no-untyped-call]
            for parameter in watched
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().close()

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

    def _check_forward(self) -> None:
        if not self._pipelined:
            super()._check_forward()

    def _is_whole(self, own: Contribution, of_group: Contribution) -> None:
        """Nothing leaves before `step`."""
        self.connection.members.over()
        self._weighed = own
        super()._is_whole(own, of_group)

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        self._calls.leaving()
        if self._client.counted is not None:
            self.connection.members.told(self._client.counted)
        own = self._weighed if accepted else Contribution(0.0, self._weighed.samples)
        with self.parameters.stepping():
            if self._pipelined:
                self._step_ahead(own, hyperparameters)
                return
            self._contribute_all(own, hyperparameters)
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
        self._contribute_all(own, hyperparameters, behind, pull=not late)
        if late:
            parameters.publish()
            parameters.pull(self.steps + 1, contribution=self._topic)
        else:
            parameters.expect(self.steps + 1, self._topic)

    @property
    def _topic(self) -> Hashable:
        """What this iteration's contribution is sent until."""
        return (CONTRIBUTION, self.steps) if self._pipelined else CONTRIBUTION  # two may be under way

    def _contribute_all(
        self, own: Contribution, hyperparameters: Hyperparameters, behind: int = 0, *, pull: bool = True
    ) -> None:
        """Push all chunks, and commit; the last of each shard asks for the new parameters if `pull`."""
        stays = not (self._lazy or self._pipelined)  # else the script goes on before the answer
        turn = None if stays else self.steps % 2 if self._pipelined else 0
        out = self._contribution(own, turn, hyperparameters=hyperparameters, behind=behind, waits=False)
        self._client.push_all(out, pull=pull, until=self._topic)
        self._client.commit(out, self._topic)

    def _hear_lost(self, iteration: int, chunk: int, lost: LostBlocks | None) -> None:
        super()._hear_lost(iteration, chunk, lost)
        self.feedback.settle(iteration, chunk)


class GroupValuesExchange(Server):
    """ssp and asp, of a group: `p.grad` shows the group's mean, and edits act on the group's contribution;
    all members make the same ones.

    With a pipeline, a step's exchange is in flight while the next iteration computes, and its parameters are
    published at the end of that one's step.
    """

    sums_samples = False
    sum: RingSum
    uplink: Uplink

    def __init__(
        self,
        parts: Parts,
        *,
        together: Together,
        hyperparameters: Callable[[], Hyperparameters],
        pipeline: int = 0,
    ) -> None:
        """`hyperparameters` returns the optimizer's; `together` is that of `parts`."""
        super().__init__(parts)
        self._together, self._hyperparameters, self._pipeline = together, hyperparameters, pipeline
        self._in_flight: Outgoing | None = None
        self._of_group = Contribution(0.0, 0.0)

    def _is_whole(self, own: Contribution, of_group: Contribution) -> None:
        self._together.whole()
        self._of_group = of_group
        self.connection.members.over()
        super()._is_whole(own, of_group)

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        with self._together.stepping(self.steps), self.parameters.stepping():
            self._step(accepted, hyperparameters)

    def _step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        self._calls.leaving()
        out = self._outgoing(accepted, hyperparameters)
        if not self._pipeline:
            self._finish(out)
            return
        out.behind = int(self._in_flight is not None)
        self.settle()
        self._in_flight = out
        if not self.uplink.is_again(out):  # else the members have to agree first on what goes along
            self._begin(out, self.uplink.role(out.iteration, out.able), None)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the exchange that is in flight, if one is, and publish what came of it. All members do."""
        out, self._in_flight = self._in_flight, None
        if out is not None:
            self._finish(out)

    def after_step(self) -> None:
        if self._together.told:  # nobody leaves a group with an exchange in flight
            self.settle()
        super().after_step()

    def refresh(self) -> None:
        self.settle()
        super().refresh()

    @torch.no_grad()
    def close(self) -> None:
        """Publish what comes of the exchange in flight, each member for itself: others may be gone."""
        out, self._in_flight = self._in_flight, None
        if out is not None and sys.exc_info()[0] is None:
            self.parameters.arrive()
            self.parameters.pull(self.steps)
            self.parameters.publish()
        super().close()

    # -- meetings -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_members(self) -> None:
        """Return when all members of the group have come to a meeting; until then, take part in iterations
        that the others still make, with nothing.

        Members that made iterations alone have made unequally many, and come to the same line of their script
        at different ones of the group's. Within an iteration, between backward and step, all have come.
        """
        ring = self._together.ring
        while ring.world > 1 and not self.reduced:
            ring.scripts.check_ended()
            if not self._help():
                return

    def _help(self) -> bool:
        """One iteration of the others; False where nobody makes one, since all have come."""
        put_back = self._store.put_away()
        with self._together.waiting():
            of_group = self.sum.assist(lambda: bool(self._together.able))
            if of_group is not None:
                self._of_group = of_group
                self._together.whole()
        self.begin()
        if of_group is not None:
            out = self._outgoing(accepted=True, hyperparameters=self._hyperparameters())
            self.settle()
            if self._pipeline:
                self._in_flight = out
            else:
                self._finish(out)
        put_back()
        if of_group is not None:
            self.after_step()
            self.sum.made_apart()
        return of_group is not None

    # -- the exchange -------------------------------------------------------------------------------------

    def _outgoing(self, accepted: bool, hyperparameters: Hyperparameters) -> Outgoing:
        own = self._of_group if accepted else Contribution(0.0, self._of_group.samples)
        turn = 1 if self._pipeline else None  # the next backward writes over it
        return self._contribution(own, turn, hyperparameters=hyperparameters)

    def _begin(self, out: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        """Send this member's part, unless it has done so in this ring, and ask for what comes of it."""
        if not role.talks or self.uplink.has_sent(out):
            return
        self._client.counted = None
        self.parameters.expect(out.iteration + 1, share=role.share)
        self._send(out, role, along)

    def _finish(self, out: Outgoing) -> None:
        """The exchange, up to the parameters that come of it."""
        what = f"the exchange of iteration {out.iteration}"
        with self._timed():
            answer, values = self.uplink.round(what, lambda: self._exchange(out, what), out.iteration)
        self.feedback.settle(out.iteration)
        self.parameters.adopt(values)
        self.connection.staleness(answer.staleness)
        self._hear_consumed(answer.consumed)
        self._take_word(answer.counted)

    def _exchange(self, out: Outgoing, what: str) -> tuple[Answer, dict[int, Tensor]]:
        role = self.uplink.role(out.iteration, out.able)
        self._begin(out, role, self.uplink.along(out, what))
        told, word = self.parameters, None
        values = self.uplink.hand_on(role, told, told.become, what)
        if role.leads:
            counted = self._client.wait_counted(out.iteration)
            word = Answer(told.clock, told.staleness, counted, told.consumed)
        points.reach("group.answered", out.iteration)
        return self.uplink.tell(role, word, Answer, what), values
