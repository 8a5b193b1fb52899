"""The way of a gradient to the shards of a parameter server, and of new parameters back.

Under `bsp` the contribution is committed when backward ends, and `p.grad` then shows the mean over
contributors; `step()` lets the shards step with it (`MeanExchange`). Under `ssp` and `asp` a contribution is
the contributor's own until `step()` commits it (`ValuesExchange`, `GroupValuesExchange`). In all of them new
parameters are staged as they arrive, and published at the end of `step()`, so that none changes between
forward and backward. With `sync.lazy` they are published at the next forward, with `sync.pipeline` at the end
of the next `step()`.

The exchange's `Store` is the place of gradients and values. Its `Speaker` talks to the shards: a worker for
itself, or a group as one. Each iteration of a group is two rounds of its ring (`train/group/rounds.py`). The
first round sums the members' gradients; if a member is lost, it is made again from the gradients that each
has kept. The second round is the exchange. By then all members hold the contribution, to the bit, and the
shards know it by the group's number and the iteration. If the member that talks is lost, the next one sends
the contribution again, and it counts once. Source: docs/server.md; docs/ps-hra.md; Li et al., OSDI 2014.
"""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.core import points
from atoll.core.errors import UserError
from atoll.exchange.feedback import Feedback
from atoll.exchange.link import ShardLink
from atoll.tensors.binding import BoundChunk
from atoll.train.gradients.messages import Bucket
from atoll.train.gradients.reducer import Calls, Clipping, Reducer
from atoll.train.gradients.ring import RingSum
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.sums import MakeSum
from atoll.train.group.rounds import Ring
from atoll.train.sync.answers import Means, NewParameters
from atoll.train.sync.client import Outgoing, ServerClient
from atoll.train.sync.connection import COMMIT, CONTRIBUTION, Connection
from atoll.train.sync.stores import Store
from atoll.train.sync.together import Together
from atoll.train.sync.uplink import Role, Speaker, Uplink
from atoll.wire.messages import Committed, Hyperparameters, LostBlocks, Speeds


class Answer(msgspec.Struct, frozen=True):
    """The shards' answer to a leader in an exchange, without values.

    Attributes:
        clock: the number of committed iterations.
        staleness: the contribution's staleness, in iterations.
        counted: the log's answer.
        consumed: the samples of all workers that the answer has counted.
    """

    clock: int
    staleness: float
    counted: Committed
    consumed: float = 0.0


class MeanAnswer(msgspec.Struct, frozen=True):
    """The shards' answer to a leader with a bsp mean, without values.

    Attributes:
        present: for each chunk and slot, 1 if any contributor has a gradient.
        weight: the weight of all contributions.
        samples: the samples of all contributions.
        counted: the log's answer.
    """

    present: dict[int, bytes]
    weight: float
    samples: float
    counted: Committed


@dataclass(frozen=True)
class Turn:
    """The step of one of a model's optimizers.

    Attributes:
        optimizer: its place among the model's optimizers.
        chunks: the chunks that it steps; None: all.
        follows: True if another optimizer has stepped these gradients before.
        stays: True if other optimizers may step these gradients.
        ends: True if other optimizers will not step these gradients, as far as the script has shown.
    """

    optimizer: int = 0
    chunks: Collection[int] | None = None
    follows: bool = False
    stays: bool = False
    ends: bool = True


ALL = Turn()  # the step of a model's only optimizer


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of an exchange.

    Args:
        chunks: the model's trained chunks.
        connection: the connection to the shards.
        calls: the model's services.
        make_sum: makes the sum over the contributor's workers.
        make_store: makes the place of gradients and values, given that sum.
        speaker: talks to the shards.
        feedback: keeps the parts of gradients that the link and the codec drop.
        together: what a group's members report to one another; None: this worker is a contributor by itself.
        lazy: True to publish new parameters before the next forward.
        keeps_graphs: True to leave parameters without a gradient alone until the next forward of the model:
            other workers may have changed them meanwhile.
        takes_changes: True to tell the shards of the script's own writes to parameters.
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
    keeps_graphs: bool = False
    takes_changes: bool = False


class Server(Reducer):
    """One model's exchange with the shards: the part that all kinds of exchanges share.

    Attributes:
        at_shards: True from the model's set-up at the shards on, until the exchange is closed. Only then may
            the group change, or make an iteration for members that are not in a call yet.
    """

    def __init__(self, parts: Parts) -> None:
        chunks, connection, calls = parts.chunks, parts.connection, parts.calls
        super().__init__(chunks, calls, parts.make_sum)
        self.connection, self._lazy = connection, parts.lazy
        self.acts_before_state_dict = parts.lazy  # then parameters come late
        self.acts_before_forward = parts.lazy or parts.keeps_graphs
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
            keeps_graphs=parts.keeps_graphs,
            takes_changes=parts.takes_changes,
            lost=self._hear_lost,
            consumed=self._hear_consumed_alone,
        )
        self.exchange_seconds = 0.0
        self._shares = calls.shares
        self._speed: Speeds = {}  # this worker's report on its speed in this iteration, if there is one
        self._ends = True  # False: the latest step was one of several of its gradients
        self.at_shards = False

    def close(self) -> None:
        """Let the model go, with the parameters that the last step requested, unless an error ends it."""
        if sys.exc_info()[0] is None:
            self.before_use()
        super().close()
        self._client.close()
        self._store.close()
        self.at_shards = False

    # -- an iteration --------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self) -> None:
        self._check_forward()
        report = [] if self._shares is None else self._shares.report()
        self._speed = {self.connection.worker: report} if report else {}
        self.connection.members.boundary(self.steps, begins=self._calls.begins())
        if self.group is not None:
            self.group.begin(self._speed)
        super().reduce()

    def before_use(self, of: Collection[int] | None = None, *_: object) -> None:
        """Show parameters that come late: those that the last step requested, under `sync.lazy`, and those
        that had no gradient in that step.

        A group's members publish theirs together, in `step`.
        """
        if self.group is None:
            self.parameters.publish()
        self.parameters.show_rest(of)

    def before_state(self) -> None:
        """Publish parameters before the optimizer's state is asked for, so that it includes the last step."""
        self.before_use()

    def before_step(self, follows: bool = False) -> None:
        if self.group is None:
            self.parameters.publish()
        self.parameters.check_unchanged()
        super().before_step(follows)

    @abstractmethod
    def step(self, accepted: bool, hyperparameters: Hyperparameters, turn: Turn = ALL) -> None:
        """Make the script's `optimizer.step()`: let the shards step, and ask for the new parameters."""

    def _stepped(self, turn: Turn) -> None:
        """Note that a step is made. One that follows is an iteration of its own at the shards."""
        self._ends = turn.ends
        if turn.follows:
            self.steps += 1
            if self.group is not None and turn.ends:
                self.group.after_step()

    def after_step(self) -> None:
        super().after_step()
        if self.group is not None and self._ends:  # only then may the group be left
            self.group.after_step()

    def _check_forward(self) -> None:
        """Raise UserError if gradients have come from a forward that `before_use` has not seen."""
        if self._lazy and self.parameters.on_their_way:
            raise UserError(
                f"iteration {self.steps}: a backward through the model whose forward was not called, so that "
                "it used the parameters of the iteration before; with sync.lazy call the model itself, not "
                "a method or a part of it, or set sync.lazy to false"
            )

    # -- this worker's place in the run --------------------------------------------------------------------

    @torch.no_grad()
    def refresh(self) -> None:
        """Fetch the shards' present parameters, which other workers may have changed."""
        if self.group is not None:
            self._take_parameters(self.steps, "the newest parameters", newest=True)
            return
        self.before_use()
        self.parameters.pull(self.steps, newest=True)
        self.before_use()

    def catch_up(self, clock: int) -> None:
        """Go on at iteration `clock`, after a meeting: at a site, the others go on without a worker that
        waits in a meeting.

        A contribution that is not stepped yet keeps its iteration.
        """
        if not self.phase.reduced:
            self.steps = max(self.steps, clock)

    def gather_members(self) -> None:
        """Return when all members of the group have come to a meeting. Here: at once, since bsp members come
        together."""

    @property
    def contributors(self) -> list[int]:
        """The living contributors, groups and workers alone, by the log's latest answer."""
        return [] if self.group is None else self.group.contributors

    def join(self, contributor: int, what: str) -> None:
        """Take part in a new group's iterations, with the parameters that its leader fetches for it. `what`
        names the wait."""
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
        """Take another member's state, except the iteration: the shards decide which one this worker makes
        next."""
        self.passes = set(state["passes"])
        self.sum.load_member_state(state)

    # -- the shards' answers -------------------------------------------------------------------------------

    def _hear_lost(self, iteration: int, chunk: int, lost: LostBlocks | None) -> None:
        self.feedback.answered(iteration, chunk, lost)

    def _hear_consumed(self, consumed: float) -> None:
        """Record the number of samples that the shards have counted."""
        self.consumed = max(self.consumed, consumed)

    def _hear_consumed_alone(self, consumed: float) -> None:
        if self.group is None:  # a group's members all take it with the answer
            self._hear_consumed(consumed)

    def _hear_alone(self, counted: Committed) -> None:
        """Record how contributions weigh, by the log's answer, on a worker alone.

        A group's ring weighs within the group, and all of its members take the answer together.
        """
        if self.group is None:
            self.count_alike = counted.alike
            self._warn(counted)

    def _warn(self, counted: Committed) -> None:
        if counted.counts:
            self._calls.counts_unlike(counted.counts)
        if counted.epochs:
            self._calls.epochs_mixed(counted.epochs)

    def _take_word(self, counted: Committed) -> None:
        """Take the log's answer, which all members have. A member that committed, and was not the last to,
        need not do so again."""
        if self.group is not None:
            self.connection.shards.answered(COMMIT)
        if self._shares is not None:
            self._shares.heard_each(counted.speeds, self.connection.worker)
        self.connection.members.told(counted)
        if self.group is not None:
            self._warn(counted)
            self.group.hear(counted)

    # -- the exchange -------------------------------------------------------------------------------------

    def _count_sent(self, sent: int) -> None:
        self.bytes_sent += sent

    def _contribution(self, own: ContributionWeight, turn: int | None, **more: Any) -> Outgoing:
        """Return the contribution of the gradients in the store (see `ServerClient.outgoing`)."""
        group = self.group
        if group is None:
            used, able, speeds = self.connection.used(), [], self._speed
        else:
            used, able, speeds = group.take_used(), list(group.able), group.speeds
        return self._client.outgoing(self.steps, own, turn, used=used, able=able, speeds=speeds, **more)

    def _send(self, out: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        """Send this side's part of a contribution, and commit the contribution if this side talks to the
        log."""
        if self._store.window is not None:
            self.connection.shards.answered(CONTRIBUTION)  # end what a former ring has sent
        self._push(out, role, along)
        points.reach("group.pushed", out.iteration)
        if role.leads:
            out.grouping = 0 if self.group is None else self.group.grouping()
            self._client.commit(out, CONTRIBUTION if self.group is None else COMMIT)
            points.reach("group.committed", out.iteration)

    def _push(self, out: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        """Push this side's share of the contribution's chunks."""
        self._client.push_all(out, role.share, along=along)

    def _fetch(self, role: Role, clock: int, what: str, *, newest: bool = False) -> dict[int, Tensor]:
        """Return parameters for `adopt`, requested as in `NewParameters.pull`. A collective of the ring."""
        if role.talks:
            self.parameters.pull(clock, newest=newest, share=role.share)
        return self.uplink.hand_on(role, self.parameters, self.parameters.become, what)

    def _take_parameters(self, clock: int, what: str, *, newest: bool = False) -> Answer:
        """Take parameters on all members, requested as in `NewParameters.pull`. `what` names the wait."""

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
        """Return a context whose waits are counted as a group's exchange."""
        if self.group is None:
            yield
            return
        waited: list[Ring | ShardLink] = [self.group.ring, self.connection.shards]
        before = sum(each.seconds_waited for each in waited)
        yield
        self.exchange_seconds += sum(each.seconds_waited for each in waited) - before


class MeanExchange(Server):
    """The exchange under bsp: after backward `p.grad` is the mean over all contributors, which the shards
    have made."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        of_group = self.group is not None
        self._means = Means(parts.chunks, parts.connection, self._store, self.feedback, of_group=of_group)
        self._committed = -1  # the last committed iteration
        self._scale_at_step = 1.0  # the factor by which clipping has scaled this iteration's means

    # -- the mean -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        super().begin()
        self._client.begin()

    def leave(self, message: Bucket) -> None:
        """Push a chunk while backward goes on."""
        self._calls.leaving()
        message.sent = True
        (chunk,) = message.chunks
        own = self.contribute()
        chunk.settle(1.0)  # the shards weigh
        present = [p.grad is not None and own.weight > 0 for p in chunk.bound.parameters]
        if own.weight == 0:
            chunk.published.flat.zero_()
        flat, sparse = chunk.published.flat, chunk.had_sparse
        self._client.push(self.steps, chunk.bound, flat, present, own.weight, sparse=sparse)

    def _is_whole(self, own: ContributionWeight, of_group: ContributionWeight) -> None:
        if self.group is not None:
            self.group.whole()
        self._committed, own_data = self.steps, self._calls.more
        more = own_data.has_more if self.group is None else bool(own_data.answer)
        weights = own.weights if self.group is None else self.group.weights_of(of_group)
        told: dict[str, Any] = {"more": more, "weights": weights, "ends": own.ends}
        if self.sum.has_sent:
            out = Outgoing(self.steps, own, {}, {}, used=self.connection.used(), speeds=self._speed, **told)
        else:
            out = self._contribution(of_group, None, **told)
        what = f"the mean of iteration {self.steps} over all groups"
        with self._timed():
            answer, values = self.uplink.round(what, lambda: self._exchange(out, what), self.steps)
        self._means.over()
        self._scale_at_step = 1.0
        # Until the mean is there, all may wait for a newcomer, and the newcomer for this worker's state.
        self.connection.members.over()
        for bound in () if self._means.by_chunk else self._chunks:
            present = [bool(byte) for byte in answer.present[bound.chunk.id]]
            self._store.put_mean(bound, values[bound.chunk.id], present)
        self._store.end_mean()
        self._done(own, answer.samples)
        self._calls.more.hear(answer.counted.more)
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
        if self.phase.reduced and self._committed == self.steps:
            self._leave_out()

    @torch.no_grad()
    def _leave_out(self) -> None:
        """Leave a step out: a backward begins after a mean without a step, as when a GradScaler skips one.

        If gradients of that mean are left, the backward adds to them, and they count with the next mean.
        The parameters stay unchanged: within backward, nothing may be written to them.
        """
        has_mean = self._store.has_mean()
        if not has_mean:
            self._calls.left_out()
        self.phase.reduced = False
        with self.parameters.dropping():
            self._make_step(accepted=False, hyperparameters=[], edited=[], turn=ALL, counted=has_mean)
            self.parameters.discard() if self.group is None else self.parameters.discarded()
        self.steps += 1

    def clip(self, by: Clipping) -> Tensor:
        """Clip the mean on this worker. The shards multiply their copy by the same factor in the step."""
        norm, factor = self._store.clip(by)
        self._scale_at_step *= factor
        return norm

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters, turn: Turn = ALL) -> None:
        edited = self._store.edited(turn.chunks) if accepted else []  # a step left out needs no gradients
        written = self.parameters.take_changes()
        with self.parameters.stepping(turn.chunks):
            values = self._make_step(accepted, hyperparameters, edited, turn, written)
            if self.group is not None:
                self.parameters.adopt(values)
            elif not self._lazy or edited or written:
                self.parameters.publish()
        self._stepped(turn)

    def _make_step(
        self,
        accepted: bool,
        hyperparameters: Hyperparameters,
        edited: list[int],
        turn: Turn,
        written: Sequence[int] = (),
        counted: bool = False,
    ) -> dict[int, Tensor]:
        """Let the shards make the step; return the new parameters by chunk in a group, else nothing."""
        what = f"the parameters after iteration {self.steps}"

        def act() -> dict[int, Tensor]:
            role = self.uplink.role(self.steps)
            edits = self._client.send_edited(self.steps, edited, send=role.leads)
            writes = self._client.send_written(self.steps, written, send=role.leads)
            if role.leads:
                self._client.say_step(
                    self.steps,
                    self._scale_at_step,
                    hyperparameters,
                    edited,
                    edits,
                    accepted=accepted,
                    optimizer=turn.optimizer,
                    stays=turn.stays,
                    written=written,
                    writes=writes,
                )
                points.reach("group.stepped", self.steps)
            if self.group is not None:
                return self._fetch(role, self.steps + 1, what)
            self.parameters.pull(self.steps + 1)
            return {}

        with self._timed():
            values = self.uplink.round(what, act, self.steps, self.sum.where)
        self.feedback.settle(self.steps, counted=accepted or counted)
        return values


class ValuesExchange(Server):
    """The exchange under ssp and asp of a worker that talks for itself: `p.grad` is its own gradient, and
    edits act on it.

    With `pipeline` 1 an exchange goes on while the next iteration computes: `step` sends this iteration's
    contribution, and publishes the parameters that follow from the one before.
    """

    sums_samples = False
    leaves_at_step = True

    def __init__(self, parts: Parts, pipeline: int = 0) -> None:
        super().__init__(parts)
        self._pipelined = pipeline > 0

    def settle(self) -> None:
        """Wait for the exchange in flight. Its parameters are published later."""
        self.parameters.arrive()

    def before_state(self) -> None:
        if self._pipelined:
            self.settle()
        else:
            super().before_state()

    def before_step(self, follows: bool = False) -> None:
        if not self._pipelined:
            super().before_step(follows)
            return
        self.parameters.check_unchanged()
        Reducer.before_step(self, follows)  # nothing is published before the contribution has left

    def _check_forward(self) -> None:
        if not self._pipelined:
            super()._check_forward()

    def _is_whole(self, own: ContributionWeight, of_group: ContributionWeight) -> None:
        """Keep the contribution: nothing leaves before `step`."""
        self.connection.members.over()
        self.since_step.add(own, adds=self.phase.unsent and not own.again)
        super()._is_whole(own, of_group)

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters, turn: Turn = ALL) -> None:
        self._calls.leaving()
        if self._client.counted is not None:
            self.connection.members.told(self._client.counted)
        own = self.since_step.take(turn.optimizer, accepted=accepted, follows=turn.follows)
        how = {"hyperparameters": hyperparameters, "optimizer": turn.optimizer, "of": turn.chunks}
        with self.parameters.stepping(turn.chunks):
            if self._pipelined:
                self._step_ahead(own, how)
            else:
                self._contribute_all(own, how)
                self.parameters.expect(self.steps + 1)
                if not self._lazy:
                    self.parameters.publish()
        self._stepped(turn)

    def _step_ahead(self, own: ContributionWeight, how: Mapping[str, Any]) -> None:
        """Send this contribution, and end the exchange of the one before, which may have ended already.

        This contribution's parameters are requested only then: a shard keeps one question of each worker.
        """
        parameters, behind = self.parameters, int(self.parameters.on_their_way)
        self.connection.shards.take()
        if parameters.on_their_way and parameters.have_arrived:
            parameters.publish()
        late = parameters.on_their_way
        self._contribute_all(own, how, behind, pull=not late)
        if late:
            parameters.publish()
            parameters.pull(self.steps + 1, contribution=self._topic)
        else:
            parameters.expect(self.steps + 1, self._topic)

    @property
    def _topic(self) -> Hashable:
        """The resend topic of this iteration's contribution."""
        return (CONTRIBUTION, self.steps) if self._pipelined else CONTRIBUTION  # two may be under way

    def _contribute_all(
        self, own: ContributionWeight, how: Mapping[str, Any], behind: int = 0, *, pull: bool = True
    ) -> None:
        """Push all chunks, and commit. With `pull` the last push to each shard asks for the new
        parameters."""
        stays = not (self._lazy or self._pipelined)  # False: the script goes on before the answer
        turn = None if stays else self.steps % 2 if self._pipelined else 0
        out = self._contribution(own, turn, behind=behind, waits=False, **how)
        self._client.push_all(out, pull=pull, until=self._topic)
        self._client.commit(out, self._topic)

    def _hear_lost(self, iteration: int, chunk: int, lost: LostBlocks | None) -> None:
        super()._hear_lost(iteration, chunk, lost)
        self.feedback.settle(iteration, chunk)


class GroupValuesExchange(Server):
    """The exchange under ssp and asp of a group.

    `p.grad` shows the group's mean, and edits act on the group's contribution; all members must make equal
    edits. With a pipeline, a step's exchange is in flight while the next iteration computes. Its parameters
    are published at the end of that iteration's step.
    """

    sums_samples = False
    leaves_at_step = True
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
        """Exchange for a group. `hyperparameters` returns the optimizer's; `together` is that of `parts`."""
        super().__init__(parts)
        self._together, self._hyperparameters, self._pipeline = together, hyperparameters, pipeline
        self._in_flight: Outgoing | None = None

    def _is_whole(self, own: ContributionWeight, of_group: ContributionWeight) -> None:
        self._together.whole()
        self.since_step.add(msgspec.structs.replace(of_group, again=own.again))
        self.connection.members.over()
        super()._is_whole(own, of_group)

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters, turn: Turn = ALL) -> None:
        with self._together.stepping(self.steps), self.parameters.stepping(turn.chunks):
            self._step(accepted, hyperparameters)
        self._stepped(turn)

    def _step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        self._calls.leaving()
        out = self._outgoing(accepted, hyperparameters)
        if not self._pipeline:
            self._finish(out)
            return
        out.behind = int(self._in_flight is not None)
        self.settle()
        self._in_flight = out
        if not self.uplink.is_again(out):  # otherwise members must first agree on the residuals sent along
            self._begin(out, self.uplink.role(out.iteration, out.able), None)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the exchange in flight, if there is one, and publish its parameters. All members make this
        call."""
        out, self._in_flight = self._in_flight, None
        if out is not None:
            self._finish(out)

    def after_step(self) -> None:
        if self._together.told:  # no member leaves a group with an exchange in flight
            self.settle()
        super().after_step()

    def refresh(self) -> None:
        self.settle()
        super().refresh()

    @torch.no_grad()
    def close(self) -> None:
        """Publish the parameters of the exchange in flight, each member for itself: others may be gone."""
        out, self._in_flight = self._in_flight, None
        if out is not None and sys.exc_info()[0] is None:
            self.parameters.arrive()
            self.parameters.pull(self.steps)
            self.parameters.publish()
        super().close()

    # -- meetings -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_members(self) -> None:
        """Return when all members of the group have come to a meeting.

        Until then, take part with weight 0 in iterations that the others still make. Members that made
        iterations alone have made unequal numbers of them, so they come to one line of their script in
        different iterations of the group. Within an iteration, between backward and step, all have come. So
        they have once a changed model is to take this one's place.
        """
        ring = self._together.ring
        while ring.world > 1 and self.at_shards and not self.phase.reduced:
            ring.scripts.check_ended()
            if not self._help():
                return

    def _help(self) -> bool:
        """Take part in one iteration of the others; return False if none is made, since all have come."""
        put_back = self._store.put_away()
        with self._together.waiting():
            of_group = self.sum.assist(lambda: bool(self._together.able))
            if of_group is not None:
                self.since_step.add(of_group)
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
            self.sum.all_stepped()
            self.sum.made_apart()
        return of_group is not None

    # -- the exchange -------------------------------------------------------------------------------------

    def _outgoing(self, accepted: bool, hyperparameters: Hyperparameters) -> Outgoing:
        own = self.since_step.take(accepted=accepted)
        turn = 1 if self._pipeline else None  # the next backward overwrites the gradients
        return self._contribution(own, turn, hyperparameters=hyperparameters)

    def _begin(self, out: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        """Send this member's part, unless it has done so in this ring, and ask for the new parameters."""
        if not role.talks or self.uplink.has_sent(out):
            return
        self._client.counted = None
        self.parameters.expect(out.iteration + 1, share=role.share)
        self._send(out, role, along)

    def _finish(self, out: Outgoing) -> None:
        """Make the exchange, and publish its parameters."""
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
