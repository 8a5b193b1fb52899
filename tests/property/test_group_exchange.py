"""A group's exchange over a link that loses parts of it, with the members' own code: for any order of deaths,
and of what each had got or sent when another died, all who live come to the same end, no collective meets
another one, and each contribution counts once, whole but for what is held back. See `ring_world.py`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import ring_world
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_world import ITERATIONS, MOST, Fault, Member, Schedule, World, WrongError, doubles
from torch import Tensor

from atoll.core.config import LinkOptions
from atoll.exchange.feedback import Feedback
from atoll.net.tunnel import Lossy
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.group.channel import BrokenRingError
from atoll.train.sync.client import Outgoing, ServerClient
from atoll.train.sync.connection import Connection
from atoll.train.sync.server import GroupValuesExchange
from atoll.train.sync.together import Together
from atoll.train.sync.uplink import Kind, Uplink, UplinkChoice
from atoll.wire.messages import AnyMessage, Commit, Committed, LostBlocks, Push, run_of

CHUNKS = (0, 1, 2)
LOST = 0.3  # of the elements, each of which is a block

KINDS = ["dies", "dies", "tears", "hub restarts", "given up"]
FAULTS = st.builds(Fault, st.sampled_from(KINDS), st.just("any"), st.integers(0, 60), st.integers(0, 3))
SCHEDULES = st.builds(
    Schedule, st.integers(2, 4), st.lists(FAULTS, max_size=4).map(tuple), st.binary(max_size=250)
)


class Shard:
    """What counts of each iteration, as shards and their log have it. What a member sends is there at once,
    or at its next turn, and then not at all where it dies before."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._runs: dict[tuple[int, int], tuple[int, dict[int, tuple[Tensor, Tensor]]]] = {}
        self._committed: set[int] = set()
        self.on_its_way: dict[int, list[Callable[[], None]]] = {}  # by the sender's incarnation

    def send(self, member: Member, message: AnyMessage, values: Tensor | None) -> None:
        there = self.on_its_way.setdefault(member.incarnation, [])
        there.append(lambda: self._take(message, values))
        if self._rng.random() < 0.5:
            self.deliver(member)

    def deliver(self, member: Member) -> None:
        for take in self.on_its_way.pop(member.incarnation, []):
            take()

    def _take(self, message: AnyMessage, values: Tensor | None) -> None:
        if isinstance(message, Commit):
            self._committed.add(message.iteration)
            return
        assert isinstance(message, Push)
        assert values is not None
        key = message.iteration, message.chunk
        shares, runs = self._runs.get(key, (message.shares, {}))
        if len(runs) == shares or message.shares > shares:
            return
        if message.shares < shares:
            shares, runs = message.shares, {}
        lost = torch.tensor([self._rng.random() < LOST for _ in range(values.numel())])
        runs.setdefault(message.share, (values, lost))
        self._runs[key] = shares, runs

    def has(self, iteration: int) -> bool:
        """Whether all of it is there."""
        whole = (self._runs.get((iteration, chunk)) for chunk in CHUNKS)
        return iteration in self._committed and all(each and each[0] == len(each[1]) for each in whole)

    def applied(self, iteration: int, chunk: int) -> tuple[Tensor, Tensor]:
        """The values that came, zeros where they were lost, and where that is, (extent,) each."""
        _, runs = self._runs[iteration, chunk]
        values, lost = (torch.cat(parts) for parts in zip(*(runs[i] for i in sorted(runs)), strict=True))
        return values.masked_fill(lost, 0), lost


class Grouped(Member):
    """After each iteration its group's exchange, whose contribution is what the iteration came to."""

    kind: Kind = "leader"
    pipeline = 0
    shard: Shard

    def _prepare(self) -> None:
        super()._prepare()
        options = LinkOptions(transport="ltp")
        self.feedback = Feedback(
            [bound.chunk for bound in self.reducer._chunks],
            dict.fromkeys(CHUNKS, 0),
            options,
            block_elements=lambda _dtype: 1,
        )
        connection: Any = Connection(
            self,  # type: ignore[arg-type]
            dict.fromkeys(CHUNKS, 0),
            used=list,
            staleness=lambda _: None,
            members=SimpleNamespace(told=lambda _: None),  # type: ignore[arg-type]
            worker=self.ring.place.name,
            link=options,
        )
        exchange: Any = GroupValuesExchange.__new__(GroupValuesExchange)
        chunks, store = self.reducer._chunks, SimpleNamespace(window=None, begin_leaving=lambda: None)
        calls: Any = SimpleNamespace(leaving=lambda: None, epoch=lambda: -1)
        exchange.connection, exchange.feedback, exchange._store = connection, self.feedback, store
        exchange.uplink = Uplink(UplinkChoice(self.kind, self.ring), self.ring, chunks, self.feedback)
        exchange.parameters, exchange._calls = self, calls
        exchange._client = ServerClient(
            chunks,
            connection,
            store,  # type: ignore[arg-type]
            calls,
            self.feedback,
            heard=lambda _: None,
            sent=lambda _: None,
        )
        together = Together(self.ring, list, grouping=lambda: 0, move=lambda _: None)
        exchange.group = exchange._together = together
        exchange._pipeline, exchange._in_flight, exchange._shares = self.pipeline, None, None
        exchange.consumed, exchange.exchange_seconds = 0, 0.0
        exchange._outgoing = lambda *_: self.outgoing
        self.exchange, self._exchanges = exchange, itertools.count()

    def _iterate(self) -> None:
        iteration = self.state.iteration
        super()._iterate()
        values = torch.zeros(MOST)
        values[self.state.results[-1]] = float(iteration + 1)
        place = self.ring.place
        able = [place.name_of(rank) for rank in range(place.world)]
        flats = {chunk: values * (chunk + 1) for chunk in CHUNKS}
        present = {chunk: [True] for chunk in CHUNKS}
        self.outgoing = Outgoing(iteration, ContributionWeight(1.0, 1.0), flats, present, [], able)
        self.exchange.steps = iteration
        self.exchange.step(True, [])
        if iteration == ITERATIONS - 1:
            self.exchange.settle()

    # What the exchange knows of shards, and of parameters

    seconds_waited = staleness = consumed = 0.0
    by_chunk = False

    def on(self, *_: object) -> None:
        pass

    def stepping(self, _of: object) -> AbstractContextManager[None]:
        return nullcontext()

    def what(self) -> str:
        return "parameters"

    def become(self, *_: object) -> None:
        pass

    def send(
        self,
        _shard: int,
        message: AnyMessage,
        payload: memoryview | None = None,
        until: object = None,
        lossy: Lossy | None = None,
    ) -> None:
        values = None if payload is None else torch.frombuffer(bytearray(payload), dtype=torch.float32)
        assert values is None or lossy is not None
        self.shard.send(self, message, values)

    def wait(self, _done: object, _missing: object, what: str) -> None:
        self._await(what)
        self.exchange._client.counted = Committed(iteration=self._asked)

    def answered(self, *_: object) -> None:
        pass

    def expect(self, clock: int, *, share: tuple[int, int]) -> None:
        self._asked, self._share = clock - 1, share

    def collect(self, what: Callable[[], str]) -> dict[int, Tensor]:
        self._await(what())
        found = {}
        for chunk in CHUNKS:
            values, lost = self.shard.applied(self._asked, chunk)
            start, stop = run_of(MOST, *self._share)
            missing = np.packbits(lost[start:stop].numpy(), bitorder="little").tobytes()
            told = LostBlocks(block=1, missing=missing, how="zero") if lost[start:stop].any() else None
            self.feedback.answered(self._asked, chunk, told)
            found[chunk] = values[start:stop].clone()
        return found

    @property
    def clock(self) -> int:
        return self._asked + 1

    def adopt(self, values: dict[int, Tensor]) -> None:
        said = {chunk: each.tolist() for chunk, each in values.items()}
        self.world.agree(("parameters", next(self._exchanges)), said)

    def _await(self, what: str) -> None:
        """Until all is counted, or the ring is known to have broken."""

        def breaks() -> None:
            raise BrokenRingError(why)

        self.shard.deliver(self)
        while True:
            why = ""

            def options() -> list[Callable[[], Any]]:
                nonlocal why
                why = self.world.why_broken(self, self.group)
                there = [lambda: True] if self.shard.has(self._asked) else []
                return [*there, *([breaks] if why else [])]

            if self.switch("any", options, what):
                return


def run(schedule: Schedule, kind: Kind, pipeline: int, seed: int) -> World:
    member = type("Grouped", (Grouped,), {"kind": kind, "pipeline": pipeline, "shard": Shard(seed)})
    with doubles(), patch.object(ring_world, "Member", member):
        world = World(schedule)
        world.run()
    return world


def judge(world: World) -> None:
    """Of what was given all is applied or held, element by element, but for what those who are gone had sent
    along, or had been told was lost, of an exchange that was not over."""
    finished: list[Any] = [member for member in world.members.values() if member.finished]
    began = [member for member in world.members.values() if hasattr(member, "feedback")]
    gone: list[Any] = [member for member in began if not member.finished]
    for chunk in CHUNKS if finished else ():
        rest, open_ = torch.zeros(MOST), torch.zeros(MOST, dtype=torch.bool)
        for iteration, who in enumerate(finished[0].state.results):
            rest[who] += (iteration + 1) * (chunk + 1)
            rest -= finished[0].shard.applied(iteration, chunk)[0]
        for member in [*finished, *gone]:
            if chunk in member.feedback.state():
                rest -= member.feedback.state()[chunk][0]
        for sent in (each[chunk] for member in gone for each in member.feedback._flights.values()):
            open_ |= torch.zeros(MOST, dtype=torch.bool) if sent.claim is None else sent.claim.values != 0
            if sent.lost is not None:
                open_[sent.lost.start + sent.lost.which] = True
        assert bool((rest[~open_].abs() < 1e-4).all()), (chunk, rest, open_)


WAYS = [("leader", 0), ("members", 0), ("leader", 1), ("members", 1)]


@pytest.mark.check
@pytest.mark.parametrize(("kind", "pipeline"), WAYS)
@settings(max_examples=25)
@given(SCHEDULES, st.integers(0, 99))
def test_all_who_live_come_to_the_end_of_each_exchange(
    kind: Kind, pipeline: int, schedule: Schedule, seed: int
) -> None:
    judge(run(schedule, kind, pipeline, seed))


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "pipeline"), WAYS)
def test_many_more_schedules(kind: Kind, pipeline: int) -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        faults = [
            Fault(rng.choice(KINDS), "any", rng.randrange(80), rng.randrange(4))  # type: ignore[arg-type]
            for _ in range(rng.randrange(5))
        ]
        schedule = Schedule(rng.choice([2, 3, 3, 4]), tuple(faults), rng.randbytes(rng.choice([0, 100, 300])))
        try:
            judge(run(schedule, kind, pipeline, seed))
        except Exception as error:
            raise WrongError(f"{kind}, pipeline {pipeline}, seed {seed}: {schedule}") from error
