"""The way of a gradient in a group between groups: reduced over the group's ring, then exchanged with the
shards by the group as one.

Each iteration of a group is two rounds of its ring (`train/rounds.py`). The first sums the members'
gradients; it is made again, from what each has kept, where a member was lost. The second is the exchange. All
members hold then what is exchanged, to the bit, and the shards know it by the group's number and the
iteration: where the member that spoke was lost, the next one sends it again, and it counts once. Source: S1,
"A step"; docs/notes/ps-hra.md.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from atoll.core import points
from atoll.tensors.binding import BoundChunk
from atoll.train.exchange import (
    CONTRIBUTION,
    Connection,
    Exchange,
    MeanSteps,
    chunks_named,
    values_of,
)
from atoll.train.reducer import Calls
from atoll.train.ring import Agreement, RingReducer
from atoll.train.ringbytes import gather_bytes
from atoll.train.rounds import Ring
from atoll.train.samples import Contribution
from atoll.train.shards import LOG, Shards
from atoll.train.uplink import Role, Uplink, Wanted
from atoll.wire.messages import AnyMessage, Commit, Committed, Hyperparameters, Mean, Used


class Answer(msgspec.Struct, frozen=True):
    """What the leader was told of an exchange, beside values."""

    clock: int
    staleness: float
    counted: Committed


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
    hyperparameters: Hyperparameters = field(default_factory=list)
    behind: int = 0  # exchanges of the group's own that were in flight when it was computed
    sent_in: int = -1  # the ring's generation in which this member sent its part; -1: it has not


class GroupReducer(RingReducer, Exchange):
    """What both kinds of groups' exchange have: the ring, the uplink, and the data that all members used."""

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        ring: Ring,
        connection: Connection,
        calls: Calls,
        *,
        uplink: Wanted,
        message_bytes: int,
        grouping: Callable[[], int],
        told: Callable[[int], None],
    ) -> None:
        """`grouping` gives the hub's latest that this worker knows of; `told(grouping)` is called after a
        step that was told to move to that one."""
        super().__init__(chunks, ring, message_bytes=message_bytes, calls=calls)
        self._connect(connection, lazy=False)
        self.uplink = Uplink(uplink, ring, connection, chunks)
        self._grouping, self._move = grouping, told
        self._told = 0  # the grouping to move to
        self._heard = 0  # the latest that this group was told of: every word repeats it
        self.contributors: list[int] = []  # that live, as the log last said: groups, and workers alone
        self._used: list[Used] = []  # by all members, in this iteration
        self._own_used: list[Used] = []
        self._of_group = Contribution(0.0, 0.0)
        self.exchange_seconds = 0.0  # in all

    def before_use(self, *_: object) -> None:
        """What is on its way is published by all members together, in `step`."""

    def reduce(self) -> None:
        self.connection.members.boundary(self.steps)
        self._own_used = self.connection.used()
        super().reduce()

    def _reduce(self, own: Contribution) -> tuple[Agreement, list[int]]:
        """With what all members have used, so that whoever is left can say it of those who are lost."""
        result = super()._reduce(own)
        if self._ring.world == 1:
            self._everyones = self._own_used
        else:
            parts = gather_bytes(
                self._ring.agreement,
                msgspec.msgpack.encode(self._own_used),
                f"the samples that the members used in iteration {self.steps}",
            )
            self._everyones = [
                used for part in parts for used in msgspec.msgpack.decode(part, type=list[Used])
            ]
        return result

    def _ring_is_whole(self, own: Contribution, agreed: Agreement) -> None:
        self.connection.members.over()
        self._used += self._everyones
        self._of_group = Contribution(agreed.weight, agreed.samples)
        self._group_is_whole(own)

    def _group_is_whole(self, own: Contribution) -> None:
        """`p.grad` shows the group's mean."""
        self._done(own, self._of_group.samples)

    def after_step(self) -> None:
        super().after_step()
        told, self._told = self._told, 0
        if told:
            self._move(told)

    def join(self, contributor: int, what: str) -> None:
        """Take part in a new group's iterations, with the parameters that its leader is given for it."""
        self.uplink.contributor = contributor
        self.uplink.choose(what)

        def act() -> tuple[Answer, dict[int, Tensor]]:
            role = self.uplink.role(0)
            runs = None
            if role.talks:
                self.parameters.pull(0, share=role.share)
                runs = self.parameters.collect()
            word = None
            if role.leads:
                answer = Answer(self.parameters.clock, 0.0, Committed(iteration=0))
                word = msgspec.msgpack.encode(answer)
            return self._told_by(role, word, what), self.uplink.spread(role, runs, what)

        answer, values = self._ring.round(what, act)
        self.parameters.adopt(values)
        self.steps, self._counted = answer.clock, None
        # Members may have moved by unlike decisions, and must all do the same after the same words.
        self._heard = 0
        # What was measured alone is not what the others have measured.
        self._order.sort(key=lambda message: message.number)
        self._order_is_measured, self._reference = False, 1.0

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """What is waited for within is the exchange's."""
        waited: list[Ring | Shards] = [self._ring, self.connection.shards]
        before = sum(each.seconds_waited for each in waited)
        yield
        self.exchange_seconds += sum(each.seconds_waited for each in waited) - before

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
                hyperparameters=outgoing.hyperparameters,
                used=outgoing.used,
                grouping=self._grouping(),
                behind=outgoing.behind,
            ),
            until=CONTRIBUTION,
        )

    def _wait_counted(self, iteration: int) -> Committed:
        """The log's word that the group's contribution counts."""
        shards = self.connection.shards

        def is_counted() -> bool:
            return self._counted is not None and self._counted.iteration == iteration

        shards.wait(is_counted, lambda: [LOG], f"word that iteration {iteration} counts")
        assert self._counted is not None
        return self._counted

    def _take_word(self, counted: Committed) -> None:
        """What the log said, as all members were told."""
        self.connection.members.told(counted)
        self.contributors = list(counted.workers) or self.contributors
        if counted.grouping > self._heard:
            self._told = self._heard = counted.grouping

    @property
    def _present(self) -> dict[int, list[bool]]:
        return {
            bound.chunk.id: [parameter.grad is not None for parameter in bound.parameters]
            for bound in self._chunks
        }


class GroupExchange(GroupReducer):
    """ssp and asp: `p.grad` shows the group's mean, and edits act on the group's contribution; all members
    make the same ones.

    With `pipeline`, a step's exchange is in flight while the next iteration computes, and its parameters are
    published at the end of that one's step.
    """

    pipeline = 0
    _in_flight: Outgoing | None = None

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        self._calls.leaving()
        outgoing = self._outgoing(accepted, hyperparameters)
        if not self.pipeline:
            self._finish(outgoing)
            return
        outgoing.behind = int(self._in_flight is not None)
        self.settle()
        self._in_flight = outgoing
        self._begin(outgoing, self.uplink.role(outgoing.iteration))

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

    def refresh(self) -> None:
        self.settle()
        self.parameters.pull(self.steps, newest=True)
        self.parameters.publish()

    def close(self) -> None:
        """What this member has sent is waited for; the others are not, who may have gone."""
        outgoing, self._in_flight = self._in_flight, None
        if outgoing is not None and self.parameters.on_their_way and sys.exc_info()[0] is None:
            self.parameters.collect()
        super().close()

    def _outgoing(self, accepted: bool, hyperparameters: Hyperparameters) -> Outgoing:
        own = self._of_group if accepted else Contribution(0.0, self._of_group.samples)
        flats, present = {}, {}
        for bound in self._chunks:
            flat, here = self.flat_gradients(bound)
            present[bound.chunk.id] = [each and own.weight > 0 for each in here]
            if own.weight == 0:
                flats[bound.chunk.id] = torch.zeros_like(flat)
            else:  # the next backward writes over it
                flats[bound.chunk.id] = flat.clone() if self.pipeline else flat
        used, self._used = self._used, []
        return Outgoing(self.steps, flats, present, own, used, hyperparameters)

    def _begin(self, outgoing: Outgoing, role: Role) -> None:
        """Send this member's part, unless it has done so in this ring, and ask for what comes of it."""
        if not role.talks or outgoing.sent_in == self._ring.generation:
            return
        outgoing.sent_in = self._ring.generation
        self._counted = None
        self.parameters.expect(outgoing.iteration + 1, share=role.share)
        self.uplink.push(role, outgoing.iteration, outgoing.flats, outgoing.present)
        points.reach("group.pushed", outgoing.iteration)
        if role.leads:
            self._send_commit(outgoing)
            points.reach("group.committed", outgoing.iteration)

    def _finish(self, outgoing: Outgoing) -> None:
        """The exchange, up to the parameters that come of it."""
        what = f"the exchange of iteration {outgoing.iteration}"
        with self._timed():
            answer, values = self._ring.round(
                what, lambda: self._exchange(outgoing, what), outgoing.iteration
            )
        self.parameters.adopt(values)
        self.connection.staleness(answer.staleness)
        self._take_word(answer.counted)

    def _exchange(self, outgoing: Outgoing, what: str) -> tuple[Answer, dict[int, Tensor]]:
        role = self.uplink.role(outgoing.iteration)
        self._begin(outgoing, role)
        runs = self.parameters.collect() if role.talks else None
        word = None
        if role.leads:
            counted = self._wait_counted(outgoing.iteration)
            word = msgspec.msgpack.encode(Answer(self.parameters.clock, self.parameters.staleness, counted))
        points.reach("group.answered", outgoing.iteration)
        return self._told_by(role, word, what), self.uplink.spread(role, runs, what)


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
        flats = {chunk_id: chunk.published.flat for chunk_id, chunk in self._gradients.items()}
        used, self._used = self._used, []
        outgoing = Outgoing(self.steps, flats, self._present, self._of_group, used)
        what = f"the mean of iteration {self.steps} over all groups"
        with self._timed():
            answer, values = self._ring.round(what, lambda: self._exchange(outgoing, what), self.steps)
        for chunk_id, flat in values.items():
            chunk = self._gradients[chunk_id]
            chunk.published.flat.copy_(flat)
            chunk.show([bool(byte) for byte in answer.present[chunk_id]])
        self._published = self._gradients_seen()
        self._done(own, answer.samples)
        self._take_word(answer.counted)

    def _exchange(self, outgoing: Outgoing, what: str) -> tuple[MeanAnswer, dict[int, Tensor]]:
        role, shards = self.uplink.role(outgoing.iteration), self.connection.shards
        runs: dict[int, Tensor] | None = None
        word = None
        if role.talks:
            self._means.clear()
            self._mean_runs, self._counted, self._mean_share = {}, None, role.share
            self.uplink.push(role, outgoing.iteration, outgoing.flats, outgoing.present)
            points.reach("group.pushed", outgoing.iteration)
            if role.leads:
                self._send_commit(outgoing)
                points.reach("group.committed", outgoing.iteration)
            shards.wait(
                lambda: len(self._means) == len(self._gradients),
                lambda: sorted(
                    {self.connection.shard_of[c] for c in self._gradients if c not in self._means}
                ),
                self._what,
            )
            runs = self._mean_runs
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
        shards.answered(CONTRIBUTION)
        points.reach("group.answered", outgoing.iteration)
        answer = msgspec.msgpack.decode(self.uplink.tell(role, word, what), type=MeanAnswer)
        return answer, self.uplink.spread(role, runs, what)

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        edited = self._edited() if accepted else []  # what is left out needs no gradients
        self._make_step(accepted, hyperparameters, edited)

    def _step_left_out(self) -> None:
        self._make_step(accepted=False, hyperparameters=[], edited=[])

    def _make_step(self, accepted: bool, hyperparameters: Hyperparameters, edited: list[int]) -> None:
        what = f"the parameters after iteration {self.steps}"

        def act() -> dict[int, Tensor]:
            role = self.uplink.role(self.steps)
            runs = None
            edits = self._send_edited(edited, send=role.leads)
            if role.leads:
                self._say_step(accepted, hyperparameters, edited, edits)
                points.reach("group.stepped", self.steps)
            if role.talks:
                self.parameters.pull(self.steps + 1, share=role.share)
                runs = self.parameters.collect()
            return self.uplink.spread(role, runs, what)

        with self._timed():
            values = self._ring.round(what, act, self.steps)
        self._scale_at_step = 1.0
        self.parameters.adopt(values)

    def _what(self) -> str:
        missing = chunks_named(chunk for chunk in self._gradients if chunk not in self._means)
        return f"the mean of {missing} in iteration {self.steps}"

    def _handle_mean(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Mean)
        chunk = self._gradients.get(message.chunk)
        if message.iteration != self.steps or chunk is None or message.share != self._mean_share[0]:
            return
        # The shard has answered, so what was sent from this memory has been received, and counts.
        if not any(self.connection.shard_of[chunk_id] == shard for chunk_id in self._means):
            shards = self.connection.shards
            rest = self.uplink.pull_mean(self.uplink.role(self.steps), self.steps)
            shards.answered(CONTRIBUTION, shard, instead=rest)
        self._mean_runs[message.chunk] = values_of(payload, chunk.bound, shard, self._mean_share).clone()
        self._means[message.chunk] = message
