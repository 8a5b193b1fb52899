"""The way of a gradient in a group between groups: reduced over the group's ring, then exchanged with the
shards by the group as one.

Each iteration of a group is two rounds of its ring (`train/group/rounds.py`). The first sums the members'
gradients; it is made again, from what each has kept, where a member was lost. The second is the exchange. All
members hold then what is exchanged, to the bit, and the shards know it by the group's number and the
iteration: where the member that spoke was lost, the next one sends it again, and it counts once. Source:
docs/ps-hra.md; docs/notes/ps-hra.md.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch
from torch import Tensor

from atoll.core import points
from atoll.core.scriptline import waiting_line
from atoll.core.stands import gradients, gradients_in
from atoll.exchange.link import LOG, Link
from atoll.tensors.binding import BoundChunk
from atoll.tensors.settings import Settings
from atoll.train.gradients.messages import ChunkGradients
from atoll.train.gradients.reducer import Calls
from atoll.train.gradients.ring import MakeCarrier, RingSum
from atoll.train.gradients.samples import Contribution
from atoll.train.group.ringbytes import gather_bytes
from atoll.train.group.rounds import Ring
from atoll.train.sync.exchange import (
    CONTRIBUTION,
    Connection,
    Exchange,
    MeanSteps,
    check_mean,
    chunks_named,
    values_of,
)
from atoll.train.sync.uplink import Role, Uplink, Wanted
from atoll.wire.messages import (
    AnyMessage,
    Commit,
    Committed,
    Hyperparameters,
    Mean,
    Used,
    WorkerStand,
)

COMMIT = "commit"  # what a group's Commit is sent again until


class Answer(msgspec.Struct, frozen=True):
    """What the leader was told of an exchange, beside values."""

    clock: int
    staleness: float
    counted: Committed
    consumed: float = 0.0


class MeanAnswer(msgspec.Struct, frozen=True):
    """bsp: the same of a mean. `present` by chunk: where any group has a gradient."""

    present: dict[int, bytes]
    weight: float
    samples: float
    counted: Committed


@dataclass
class Outgoing:
    """A group's contribution, from the step that made it until its answer is there."""

    iteration: int
    flats: dict[int, Tensor]  # by chunk: the group's mean gradient, 1-D
    present: dict[int, list[bool]]
    own: Contribution  # the group's
    used: list[Used]
    able: list[int]  # the members, by name, who have all of this: the others waited in a meeting
    hyperparameters: Hyperparameters = field(default_factory=list)
    behind: int = 0  # exchanges of the group's own that were in flight when it was computed
    begun_in: int = -1  # the ring's generation in which its exchange began; -1: it has not
    sent_in: int = -1  # likewise, in which this member sent its part


class GroupReducer(Exchange):
    """What both kinds of groups' exchange have: the ring, the uplink, and the data that all members used."""

    sum: RingSum
    _gradients: dict[int, ChunkGradients]  # by chunk, in the device's memory

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        ring: Ring,
        connection: Connection,
        calls: Calls,
        *,
        uplink: Wanted,
        carry: MakeCarrier,
        hyperparameters: Callable[[], Hyperparameters],
        grouping: Callable[[], int],
        told: Callable[[int], None],
        settings: Callable[[], Settings],
        pipeline: int = 0,
    ) -> None:
        """Connect a group's exchange.

        Args:
            carry: makes what carries gradients over the ring.
            grouping: returns the hub's latest grouping that this worker knows.
            told: called with a grouping after a step that was told to move to it.
            uplink: the configuration's sync.uplink.
            pipeline: the configuration's sync.pipeline.
            hyperparameters: returns the optimizer's hyperparameters.
            settings: returns the hyperparameters that must be equal on all members.
        """
        over_ring = partial(
            RingSum,
            ring=ring,
            calls=calls,
            carry=carry,
            settings=settings,
            fills_up=True,  # where batches were only filled up, nothing is contributed
            steps_here=False,
            within=self._tell_used,
        )
        super().__init__(chunks, calls, over_ring)
        self._ring, self._gradients = ring, self.sum.carrier.chunks
        self._bounds = {bound.chunk.id: bound for bound in chunks}
        self._connect(connection, lazy=False)
        self.parameters.told_lost = self.feedback.answered
        self.parameters.told_consumed = lambda _: None  # all members hear it at once
        self.uplink = Uplink(uplink, ring, connection, chunks, self.feedback)
        self._grouping, self._move, self._hyperparameters = grouping, told, hyperparameters
        self._pipeline = pipeline
        self._in_flight: Outgoing | None = None
        self._told = 0  # the grouping to move to
        self._heard = 0  # the latest that this group was told of: every word repeats it
        self.contributors: list[int] = []  # that live, as the log last said: groups, and workers alone
        self._used: list[Used] = []  # by all members, in this iteration
        self._everyones: list[Used] = []
        self._own_used: list[Used] = []
        self._waits = False  # this member waits in a meeting for others of its group
        self._able: list[int] = []  # the members, by name, who did not, in the latest iteration
        self._of_group = Contribution(0.0, 0.0)
        self.exchange_seconds = 0.0  # in all

    def gather_members(self) -> None:
        """Return when all members of the group have come to a meeting; under bsp they come together."""

    def before_use(self, *_: object) -> None:
        """What is on its way is published by all members together, in `step`."""

    def reduce(self) -> None:
        self.connection.members.boundary(self.steps)
        self._own_used = self.connection.used()
        super().reduce()

    def _tell_used(self) -> None:
        """Hear what all members have used, so that whoever is left can say it of those who are lost; and who
        of them only waits. A part of the round in which they sum."""
        parts = gather_bytes(
            self._ring.agreement,
            msgspec.msgpack.encode((self._own_used, self._waits)),
            f"the samples that the members used in iteration {self.steps}",
        )
        said = [msgspec.msgpack.decode(part, type=tuple[list[Used], bool]) for part in parts]
        self._everyones = [used for each, _ in said for used in each]
        place = self._ring.place
        self._able = [place.name_of(rank) for rank, (_, waits) in enumerate(said) if not waits]

    def _is_whole(self, own: Contribution, of_group: Contribution) -> None:
        self._used += self._everyones
        self._of_group = of_group
        self._group_is_whole(own)

    def _group_is_whole(self, own: Contribution) -> None:
        """`p.grad` shows the group's mean."""
        self.connection.members.over()
        self._done(own, self._of_group.samples)

    def after_step(self) -> None:
        super().after_step()
        told, self._told = self._told, 0
        if told:
            self._move(told)

    def _weighed_by(self, counted: Committed) -> None:
        """Ignore the log's answer: only one member hears it, and `_take_word` tells all. The ring weighs
        within the group.
        """

    def join(self, contributor: int, what: str) -> None:
        """Take part in a new group's iterations, with the parameters that its leader is given for it."""
        self.uplink.contributor = contributor
        self.uplink.choose(what)

        self._joined(self._take_parameters(0, what).clock)

    def _take_parameters(self, clock: int, what: str, *, newest: bool = False) -> Answer:
        """Take parameters on all members, asked for as in `NewParameters.pull`. `what` describes the wait."""

        def act() -> tuple[Answer, dict[int, Tensor]]:
            role = self.uplink.role(clock)
            values = self._fetch(role, clock, what, newest=newest)
            word = None
            if role.leads:
                told = self.parameters
                answer = Answer(told.clock, 0.0, Committed(iteration=0), told.consumed)
                word = msgspec.msgpack.encode(answer)
            return self._told_by(role, word, what), values

        answer, values = self._ring.round(what, act)
        self.parameters.adopt(values)
        self._hear_consumed(answer.consumed)
        return answer

    def _joined(self, clock: int) -> None:
        """The new group's next iteration is `clock`, and all members have its parameters."""
        self.steps, self._counted = clock, None
        # Members may have moved by unlike decisions, and must all do the same after the same words.
        self._told = self._heard = 0
        self.sum.begin_in_group()

    def _is_again(self, outgoing: Outgoing) -> bool:
        """Whether members, who may be gone by now, may have sent this contribution in a ring before this one,
        as far as this member knows."""
        generation = self._ring.generation
        outgoing.begun_in = generation if outgoing.begun_in < 0 else outgoing.begun_in
        return outgoing.begun_in != generation or not self._ring.is_settled

    def _along(self, outgoing: Outgoing, what: str) -> dict[int, Tensor] | None:
        """Where members may have sent this contribution in a ring before this one: what had gone along with
        it of what those who live hold back, by chunk, (extent,), summed up. So all hold again what is sent,
        to the bit. None where nobody has. A collective of the ring.
        """
        if not self.feedback.keeps:
            return None
        channel = self._ring.agreement
        said, work = channel.all_gather(torch.tensor([int(self._is_again(outgoing))]))
        channel.wait(work, what)
        if not any(bool(each) for each in said):
            return None
        own = self.feedback.again(outgoing.iteration)
        parts = gather_bytes(channel, msgspec.msgpack.encode(sorted(own)), what)
        along = {}
        for chunk_id in sorted({each for part in parts for each in msgspec.msgpack.decode(part)}):
            taken = own.get(chunk_id)
            flat = outgoing.flats[chunk_id]
            summed = torch.zeros_like(flat, device="cpu") if taken is None else taken.clone()
            channel.wait(channel.sum(summed), what)
            along[chunk_id] = summed
        return along

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """What is waited for within is the exchange's."""
        waited: list[Ring | Link] = [self._ring, self.connection.shards]
        before = sum(each.seconds_waited for each in waited)
        yield
        self.exchange_seconds += sum(each.seconds_waited for each in waited) - before
        self.bytes_sent, self.uplink.bytes_sent = self.bytes_sent + self.uplink.bytes_sent, 0

    # What goes to the shards, and what they answer

    def _send_part(self, outgoing: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        """Send this member's part of a contribution, and commit it where it speaks to the log; `along` as
        `Uplink.push` has it."""
        outgoing.sent_in = self._ring.generation
        self._push(outgoing, role, along)
        points.reach("group.pushed", outgoing.iteration)
        if role.leads:
            self._send_commit(outgoing)
            points.reach("group.committed", outgoing.iteration)

    def _push(self, outgoing: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        """The chunks of it."""
        self.uplink.push(
            role, outgoing.iteration, outgoing.flats, outgoing.present, outgoing.own.weight, along
        )

    def _fetch(self, role: Role, clock: int, what: str, *, newest: bool = False) -> dict[int, Tensor]:
        """Parameters as `NewParameters.pull` asks for them, for `adopt`. A collective of the ring."""
        if role.talks:
            self.parameters.pull(clock, newest=newest, share=role.share)
        return self._spread(role, self._collect(role, what), what)

    def _collect(self, role: Role, what: str) -> dict[int, Tensor] | None:
        """This member's runs of the parameters that were asked for, where it talks; where these go on at once
        to all members, `what` is waited for."""
        del what
        return self.parameters.collect() if role.talks else None

    def _spread(self, role: Role, runs: Mapping[int, Tensor] | None, what: str) -> dict[int, Tensor]:
        """What came of that, on all members: see `Uplink.spread`."""
        return self.uplink.spread(role, runs, what)

    def _told_by(self, role: Role, word: bytes | None, what: str) -> Answer:
        return msgspec.msgpack.decode(self.uplink.tell(role, word, what), type=Answer)

    def _send_commit(self, outgoing: Outgoing) -> None:
        self.connection.shards.send(
            LOG,
            Commit(
                incarnation=self.connection.shards.incarnation,
                iteration=outgoing.iteration,
                weight=outgoing.own.weight,
                samples=outgoing.own.samples,
                basis=outgoing.own.basis,
                alike=outgoing.own.alike,
                hyperparameters=outgoing.hyperparameters,
                used=outgoing.used,
                grouping=self._grouping(),
                behind=outgoing.behind,
                stand=WorkerStand(
                    self.connection.worker,
                    gradients_in(outgoing.iteration, waiting_line(), self._calls.epoch()),
                ),
            ),
            until=COMMIT,
        )

    def _wait_counted(self, iteration: int) -> Committed:
        """The log's word that the group's contribution counts: until then it is told again to a log that was
        lost."""
        shards = self.connection.shards

        def is_counted() -> bool:
            return self._counted is not None and self._counted.iteration == iteration

        shards.wait(is_counted, lambda: [LOG], f"word that iteration {iteration} counts")
        shards.answered(COMMIT)
        assert self._counted is not None
        return self._counted

    def _take_word(self, counted: Committed) -> None:
        """What the log said, as all members were told; who spoke to it and was not the last to, needs not
        again."""
        self.connection.shards.answered(COMMIT)
        self.connection.members.told(counted)
        if counted.counts:
            self._calls.counts_unlike(counted.counts)
        if counted.epochs:
            self._calls.epochs_mixed(counted.epochs)
        self.contributors = list(counted.workers) or self.contributors
        if counted.grouping > self._heard:
            self._told = self._heard = counted.grouping

    @property
    def _flats(self) -> dict[int, Tensor]:
        """The group's mean, by chunk, 1-D."""
        return {chunk_id: chunk.published.flat for chunk_id, chunk in self._gradients.items()}

    @property
    def _present(self) -> dict[int, list[bool]]:
        """Where it has a gradient."""
        return {
            bound.chunk.id: [parameter.grad is not None for parameter in bound.parameters]
            for bound in self._chunks
        }


class GroupExchange(GroupReducer):
    """ssp and asp: `p.grad` shows the group's mean, and edits act on the group's contribution; all members
    make the same ones.

    With a pipeline, a step's exchange is in flight while the next iteration computes, and its parameters are
    published at the end of that one's step.
    """

    sums_samples = False

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        self._ring.stand = gradients(self.steps, waiting_line())
        try:
            self._step(accepted, hyperparameters)
        finally:
            self._ring.stand = None

    def _step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        self._calls.leaving()
        outgoing = self._outgoing(accepted, hyperparameters)
        if not self._pipeline:
            self._finish(outgoing)
            return
        outgoing.behind = int(self._in_flight is not None)
        self.settle()
        self._in_flight = outgoing
        if not self._is_again(outgoing):  # else the members have to agree first on what goes along
            self._begin(outgoing, self._role(outgoing), None)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the exchange that is in flight, if one is, and publish what came of it. All members do."""
        outgoing, self._in_flight = self._in_flight, None
        if outgoing is not None:
            self._finish(outgoing)

    def after_step(self) -> None:
        if self._told:  # nobody leaves a group with an exchange in flight
            self.settle()
        super().after_step()

    @torch.no_grad()
    def refresh(self) -> None:
        self.settle()
        self._take_parameters(self.steps, "the newest parameters", newest=True)

    @torch.no_grad()
    def close(self) -> None:
        """Publish what comes of the exchange in flight, each member for itself: others may be gone."""
        outgoing, self._in_flight = self._in_flight, None
        if outgoing is not None and sys.exc_info()[0] is None:
            if self.parameters.on_their_way:
                self.parameters.collect()
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
        while self._ring.world > 1 and not self._reduced:
            self._ring.check_ended()
            if not self._help():
                return

    def _help(self) -> bool:
        """One iteration of the others; False where nobody makes one, since all have come."""
        shown = [(parameter.grad, view) for c in self._gradients.values() for parameter, view in c.slots()]
        gradients = [None if gradient is view else gradient for gradient, view in shown]  # to be written over
        self._set_gradients([None] * len(gradients))
        self._waits, self._own_used = True, []
        try:
            of_group = self.sum.assist(lambda: bool(self._able))
            if of_group is not None:
                self._of_group = of_group
                self._used += self._everyones
        finally:
            self._waits = False
        self.begin()
        if self._able:
            outgoing = self._outgoing(accepted=True, hyperparameters=self._hyperparameters())
            self.settle()
            if self._pipeline:
                self._in_flight = outgoing
            else:
                self._finish(outgoing)
        self._set_gradients(gradients)
        if self._able:
            self.after_step()
            self.sum.made_apart()
        return bool(self._able)

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        parameters = (parameter for c in self._gradients.values() for parameter, _ in c.slots())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    # -- the exchange -------------------------------------------------------------------------------------

    def _outgoing(self, accepted: bool, hyperparameters: Hyperparameters) -> Outgoing:
        own = self._of_group if accepted else Contribution(0.0, self._of_group.samples)
        flats, present = {}, {}
        for bound in self._chunks:
            flat, here = self.sum.carrier.flat_gradients(bound)
            present[bound.chunk.id] = [each and own.weight > 0 for each in here]
            if own.weight == 0:
                flats[bound.chunk.id] = torch.zeros_like(flat)
            else:  # the next backward writes over it
                flats[bound.chunk.id] = flat.clone() if self._pipeline else flat
        used, self._used = self._used, []
        return Outgoing(self.steps, flats, present, own, used, list(self._able), hyperparameters)

    def _role(self, outgoing: Outgoing) -> Role:
        return self.uplink.role(outgoing.iteration, outgoing.able)

    def _begin(self, outgoing: Outgoing, role: Role, along: Mapping[int, Tensor] | None) -> None:
        """Send this member's part, unless it has done so in this ring, and ask for what comes of it."""
        if not role.talks or outgoing.sent_in == self._ring.generation:
            return
        self._counted = None
        self.parameters.expect(outgoing.iteration + 1, share=role.share)
        self._send_part(outgoing, role, along)

    def _finish(self, outgoing: Outgoing) -> None:
        """The exchange, up to the parameters that come of it."""
        what = f"the exchange of iteration {outgoing.iteration}"
        with self._timed():
            answer, values = self._ring.round(
                what, lambda: self._exchange(outgoing, what), outgoing.iteration
            )
        self.feedback.settle(outgoing.iteration)
        self.parameters.adopt(values)
        self.connection.staleness(answer.staleness)
        self._hear_consumed(answer.consumed)
        self._take_word(answer.counted)

    def _exchange(self, outgoing: Outgoing, what: str) -> tuple[Answer, dict[int, Tensor]]:
        role = self._role(outgoing)
        self._begin(outgoing, role, self._along(outgoing, what))
        runs = self._collect(role, what)
        word = None
        if role.leads:
            counted = self._wait_counted(outgoing.iteration)
            told = self.parameters
            word = msgspec.msgpack.encode(Answer(told.clock, told.staleness, counted, told.consumed))
        points.reach("group.answered", outgoing.iteration)
        return self._told_by(role, word, what), self._spread(role, runs, what)


class GroupMeanExchange(GroupReducer, MeanSteps):
    """bsp: after backward `p.grad` is the mean over all groups, as the shards made it."""

    def _connect(self, connection: Connection, lazy: bool) -> None:
        super()._connect(connection, lazy)
        self._means: dict[int, Mean] = {}
        self._mean_runs: dict[int, Tensor] = {}
        self._mean_share = (0, 1)
        connection.shards.on(Mean, self._handle_mean)

    def _group_is_whole(self, own: Contribution) -> None:
        self._committed = self.steps
        used, self._used = self._used, []
        outgoing = Outgoing(self.steps, self._flats, self._present, self._of_group, used, self._able)
        what = f"the mean of iteration {self.steps} over all groups"
        with self._timed():
            answer, values = self._ring.round(what, lambda: self._exchange(outgoing, what), self.steps)
        # Until the mean is there, all may wait for a newcomer, and that one for this worker's state.
        self.connection.members.over()
        for chunk_id, flat in values.items():
            chunk = self._gradients[chunk_id]
            chunk.published.flat.copy_(flat)
            chunk.show([bool(byte) for byte in answer.present[chunk_id]])
        self._published = self._gradients_seen()
        self._done(own, answer.samples)
        self._take_word(answer.counted)

    def _exchange(self, outgoing: Outgoing, what: str) -> tuple[MeanAnswer, dict[int, Tensor]]:
        role = self.uplink.role(outgoing.iteration)
        along = self._along(outgoing, what)
        if role.talks:
            self._means.clear()
            self._mean_runs, self._counted, self._mean_share = {}, None, role.share
            self._send_part(outgoing, role, along)
        runs = self._collect_mean(role, what)
        word = None
        if role.leads:
            first = next(iter(self._means.values()))
            word = msgspec.msgpack.encode(
                MeanAnswer(
                    present={chunk_id: mean.present for chunk_id, mean in self._means.items()},
                    weight=first.weight,
                    samples=first.samples,
                    counted=self._wait_counted(outgoing.iteration),
                )
            )
        self.connection.shards.answered(CONTRIBUTION)
        points.reach("group.answered", outgoing.iteration)
        answer = msgspec.msgpack.decode(self.uplink.tell(role, word, what), type=MeanAnswer)
        return answer, self._spread(role, runs, what)

    def _collect_mean(self, role: Role, what: str) -> dict[int, Tensor] | None:
        """As `_collect`, of the mean."""
        del what
        if not role.talks:
            return None
        shard_of = self.connection.shard_of
        self.connection.shards.wait(
            lambda: len(self._means) == len(self._bounds),
            lambda: sorted({shard_of[chunk] for chunk in self._bounds if chunk not in self._means}),
            self._what,
        )
        return self._mean_runs

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        edited = self._edited() if accepted else []  # what is left out needs no gradients
        self.parameters.adopt(self._make_step(accepted, hyperparameters, edited))

    def _step_left_out(self) -> None:
        """The parameters are what they were: within backward, nothing may be written to them."""
        self._make_step(accepted=False, hyperparameters=[], edited=[])
        self.parameters.discarded()

    def _make_step(
        self, accepted: bool, hyperparameters: Hyperparameters, edited: list[int]
    ) -> dict[int, Tensor]:
        """Let the shards make the step; the parameters that come of it, by chunk."""
        what = f"the parameters after iteration {self.steps}"

        def act() -> dict[int, Tensor]:
            role = self.uplink.role(self.steps)
            edits = self._send_edited(edited, send=role.leads)
            if role.leads:
                self._say_step(accepted, hyperparameters, edited, edits)
                points.reach("group.stepped", self.steps)
            return self._fetch(role, self.steps + 1, what)

        with self._timed():
            values = self._ring.round(what, act, self.steps, self.sum.where)
        self.feedback.settle(self.steps, counted=accepted)
        self._scale_at_step = 1.0
        return values

    def _what(self) -> str:
        missing = chunks_named(chunk for chunk in self._bounds if chunk not in self._means)
        return f"the mean of {missing} in iteration {self.steps}"

    def _handle_mean(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Mean)
        bound = self._bounds.get(message.chunk)
        if message.iteration != self.steps or bound is None:
            return
        if (message.share, message.shares) != self._mean_share:
            return  # what this member asked for before another was lost
        check_mean(self.connection.shard_of, shard, message, bound)
        if not any(self.connection.shard_of[chunk_id] == shard for chunk_id in self._means):
            self._shard_answers(shard)
        self.feedback.answered(message.iteration, message.chunk, message.lost)
        self._mean_runs[message.chunk] = values_of(payload, bound, shard, self._mean_share).clone()
        self._means[message.chunk] = message

    def _shard_answers(self, shard: int) -> None:
        """So what was sent to it from the gradients' memory has been received, and counts."""
        rest = self.uplink.pull_mean(self._mean_share, self.steps)
        self.connection.shards.answered(CONTRIBUTION, shard, instead=rest)
