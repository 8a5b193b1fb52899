"""Sessions over the loss-tolerant transport whose links lose blocks of the gradients: nothing is lost, only
late. Gradients are whole numbers, so that sums are exact and every difference is an error.

Hub and shards run in this process, on threads; workers in the pool's processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from losing import LosingServer, anew, filled_anew, lost_by_content
from mortal_groups import settings
from mortal_shards import OF_STANDBYS, POINTS_OF_SHARDS, Kill, MortalRun, kills_at
from torch import Tensor, nn

import atoll
from atoll.core.config import Chunks, Config, Consistency, Groups, LinkOptions, Run, Sync, Uplink
from atoll.net.endpoint import Received
from atoll.server import main as server
from atoll.tensors.payload import tensor_of
from atoll.train.api.place import Place
from atoll.train.sync.server import Server
from atoll.wire import messages as m
from atoll.wire.messages import LostBlocks, decode_untrusted
from support.parity import await_groups
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

STEPS = 9
SKIPPED = 7  # the step at which rank 0 has a gradient that is not finite
SIZES = ((40, 30), (700,), (9,))


@dataclass(frozen=True)
class Way:
    """How a run's workers agree, and over what link; `group`: they share a ring."""

    workers: int
    consistency: Consistency
    pipeline: int = 0
    lazy: bool = False
    group: Uplink | None = None
    fill_above: float = 0.03
    shards: int = 2
    steps: int = STEPS

    def skips(self, rank: int, step: int) -> bool:
        """Whether the step counts for nothing, since rank 0 has a gradient that is not finite. Members of a
        group under asp have made unequally many steps alone: there each would have to know which."""
        if step != SKIPPED:
            return False
        return self.consistency == "bsp" or (rank == 0 and self.group is None)

    @property
    def config(self) -> Config:
        strategy: Literal["server", "ps-hra"] = "server" if self.group is None else "ps-hra"
        return Config(
            run=Run(strategy=strategy),
            chunks=Chunks(size="2KiB"),
            sync=Sync(
                timeout="60s",
                consistency=self.consistency,
                pipeline=self.pipeline,
                lazy=self.lazy,
                nonfinite="skip",
                uplink=self.group or "auto",
            ),
            groups=Groups(probe=2),
            link=LinkOptions(transport="ltp", fill_above=self.fill_above, target_loss=0.0),
        )


class Net(nn.Module):
    """Its gradients are what its forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])

    def forward(self, given: list[Tensor | None]) -> Tensor:
        pairs = zip(self.weights, given, strict=True)
        return torch.stack([(weight * each).sum() for weight, each in pairs if each is not None]).sum()


def given_to(way: Way, rank: int, step: int) -> list[Tensor | None]:
    """Whole numbers; the last parameter has a gradient now and then, and one step is not finite."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    given: list[Tensor | None] = [torch.randint(-4, 5, size, generator=generator).float() for size in SIZES]
    if (rank + step) % 3 == 0:
        given[2] = None
    if rank == 0 and way.skips(rank, step):
        assert given[1] is not None
        given[1][600:] = torch.nan
    return given


@dataclass
class Books:
    """A worker's: what it gave, what it holds back times its weight, by parameter, and what it trained."""

    given: list[Tensor] = field(default_factory=lambda: [torch.zeros(size).double() for size in SIZES])
    held: list[Tensor] = field(default_factory=lambda: [torch.zeros(size).double() for size in SIZES])
    values: list[Tensor] = field(default_factory=list)
    dropped: int = 0
    borne: int = 0
    filled: int = 0
    step: int = 0  # that is made, or was the last


def train(
    place: Place, address: str, way: Way, watch: Callable[[Server, Books], None] = lambda *_: None
) -> Books:
    """`watch` is shown the exchange and the books before the first step."""
    books = Books()
    with served_worker(address, place.rank), atoll.join(way.config) as session:
        model = Net()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        exchange = session._state.prepared[0].reducer
        assert isinstance(exchange, Server)
        watch(exchange, books)
        for step in range(way.steps):
            books.step = step
            if way.group is not None:
                await_groups(session, step)
            given = given_to(way, place.rank, step)
            optimizer.zero_grad()
            session.weight(1.0)
            model(given).backward()
            optimizer.step()
            if not way.skips(place.rank, step):
                for total, each in zip(books.given, given, strict=True):
                    total += 0 if each is None else each.double()
        session.barrier()
        books.values = [weight.detach().clone() for weight in model.weights]
        books.dropped = exchange.feedback.dropped
        books.held = held_by(exchange)[0]
        for shard in range(way.shards):
            losses = exchange.feedback.losses(shard)
            books.borne, books.filled = books.borne + losses.borne, books.filled + losses.filled
    return books


def held_by(exchange: Server) -> tuple[list[Tensor], list[Tensor]]:
    """What a worker holds back, and what of that went along with contributions that are on their way: times
    the weights, by parameter."""
    held, on_way = ([torch.zeros(size).double() for size in SIZES] for _ in range(2))
    for bound in exchange._chunks:
        chunk = bound.chunk.id
        parts = [(held, *state) for state in [exchange.feedback.state().get(chunk)] if state is not None]
        for sent in (each[chunk] for each in exchange.feedback._flights.values() if chunk in each):
            if sent.claim is not None:
                parts.append((on_way, sent.claim.of(0, bound.chunk.extent), sent.weight))
        for totals, flat, weight in parts:
            for slot in bound.chunk.slots:
                part = flat[slot.offset : slot.offset + slot.numel].double() * weight
                totals[slot.parameter] += part.reshape(SIZES[slot.parameter])
    return held, on_way


class Recorded:
    """What has come to the shards, by contribution and run of a chunk, and each contribution's weight."""

    def __init__(self) -> None:
        # By incarnation, iteration and chunk: into how many runs it is cut, and those that count, by share.
        self.pushes: dict[tuple[int, int, int], tuple[int, dict[int, tuple[m.Push, Tensor]]]] = {}
        self.weights: dict[tuple[int, int], float] = {}
        self.layout: Any = None

    def server(self, *args: Any, **options: Any) -> Recording:
        return Recording(self, *args, **options)

    def push(self, push: m.Push, values: Tensor) -> None:
        """Of a chunk that is there, nothing more counts; fewer runs begin it anew."""
        key = push.incarnation, push.iteration, push.chunk
        shares, runs = self.pushes.get(key, (push.shares, {}))
        if len(runs) == shares or push.shares > shares:
            return
        if push.shares < shares:
            shares, runs = push.shares, {}
        runs.setdefault(push.share, (push, values))
        self.pushes[key] = shares, runs

    def applied(self, model: Any, but: int | None) -> list[Tensor]:
        """Times their weights, by parameter; without the iteration `but`."""
        totals = [torch.zeros(size).double() for size in SIZES]
        for push, values in (run for _, runs in self.pushes.values() for run in runs.values()):
            if push.iteration == but:
                continue
            if not any(push.present):
                assert not values.numel()  # nothing to apply, and nothing was sent
                continue
            chunk = model.layout.chunks[push.chunk]
            start, stop = m.run_of(chunk.extent, push.share, push.shares)
            flat = torch.zeros(chunk.extent).double()
            flat[start:stop] = values.double() * self.weights[push.incarnation, push.iteration]
            for slot in chunk.slots:
                part = flat[slot.offset : slot.offset + slot.numel]
                totals[slot.parameter] += part.reshape(SIZES[slot.parameter])
        return totals


class Recording(LosingServer):
    """A server that loses, and tells what it has then."""

    def __init__(self, told: Recorded, *args: Any, **options: Any) -> None:
        super().__init__(self.loses, *args, **options)
        self._told = told

    @staticmethod
    def loses(push: m.Push, payload: memoryview) -> LostBlocks | None:
        return lost_by_content(push, payload) if any(push.present) else None

    def receive(self, timeout: float) -> Received | None:
        received = super().receive(timeout)
        message = None if received is None else decode_untrusted(received.header)
        if isinstance(message, m.Commit):
            self._told.weights[message.incarnation, message.iteration] = message.weight
        elif isinstance(message, m.Push):
            assert received is not None
            values = (
                torch.zeros(0) if received.payload is None else tensor_of(received.payload, torch.float32)
            )
            self._told.push(message, values.clone())
        return received


class Layout:
    """The chunks as all workers lay them out."""

    def __init__(self, way: Way) -> None:
        from atoll.chunks import lay_out
        from atoll.tensors.binding import specs_of

        model = Net()
        of_groups = dict.fromkeys(model.parameters(), "0")
        self.layout = lay_out(
            specs_of(dict(model.named_parameters()), of_groups), chunk_bytes=way.config.chunk_bytes
        )


WAYS = [
    Way(1, "bsp", fill_above=0.9),
    Way(2, "bsp"),
    Way(2, "asp"),
    Way(2, "ssp", lazy=True),
    Way(2, "asp", pipeline=1),
    Way(2, "asp", group="leader"),
    Way(2, "asp", group="members", pipeline=1),
    Way(2, "bsp", group="members"),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_was_given_is_applied_or_held(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    recorded = Recorded()
    monkeypatch.setattr(server, "TunnelServer", recorded.server)
    grouping = settings([range(way.workers)], way.consistency) if way.group is not None else None
    with ServedRun(way.workers, way.shards, grouping=grouping) as served:
        found: list[Books] = pool.run(train, served.address, way, world=way.workers)
    assert not served.failures
    applied = recorded.applied(Layout(way), SKIPPED if way.consistency == "bsp" else None)
    lost = 0
    for place, there in enumerate(applied):
        given: Any = sum(books.given[place] for books in found)
        held: Any = sum(books.held[place] for books in found)
        assert torch.equal(given, there + held), place
        lost += int(held.count_nonzero())
    assert lost > 50  # else nothing was put to the test
    assert sum(books.borne + books.filled for books in found) > 20
    assert sum(books.dropped for books in found) == 0
    assert all(torch.isfinite(value).all() for books in found for value in books.values)
    if way.workers == 1:
        for value, there in zip(found[0].values, applied, strict=True):
            assert torch.equal(-value.double(), there)


# -- shards that are killed --------------------------------------------------------------------------------

ANY_POINT = [
    Kill(0, "shard.journalled", 1),
    Kill(1, "shard.answered", 2),
    Kill(0, "shard.stepped", 4),
    Kill(1, "shard.staged", 6),
]
# Means of filled blocks are sums of what came, whoever else's has come; one worker's are sums in any case.
KILLED = [(Way(2, "bsp"), filled_anew, ANY_POINT), (Way(1, "asp", pipeline=1), anew, ANY_POINT)] + [
    pytest.param(way, loses, kills_at(point), marks=pytest.mark.soak)
    for way, loses in ((Way(2, "bsp"), filled_anew), (Way(1, "asp", pipeline=1), anew))
    for point in POINTS_OF_SHARDS
    if point not in OF_STANDBYS and not (way.consistency == "asp" and point == "shard.combined")
]


@pytest.mark.parametrize(("way", "loses", "kills"), KILLED)
def test_the_books_are_exact_whatever_point_a_shard_is_killed_at(
    pool: WorkerPool, tmp_path: Path, way: Way, loses: Any, kills: list[Kill]
) -> None:
    with MortalRun(tmp_path, way.workers, way.shards, kills, loses=loses, snapshot_seconds=0.1) as run:
        found: list[Books] = pool.run(train, run.address, way, world=way.workers)
        assert len(run.fired) == len(kills)
    assert not run.failures
    lost = 0
    for place in range(len(SIZES)):
        given: Any = sum(books.given[place] for books in found)
        held: Any = sum(books.held[place] for books in found)
        for books in found:  # a step of 1 times the mean, for each iteration
            assert torch.equal(given, held - way.workers * books.values[place].double()), place
        lost += int(held.count_nonzero())
    assert lost > 50
