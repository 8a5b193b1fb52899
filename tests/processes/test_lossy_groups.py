"""A member of a group that is killed in an exchange over a lossy link: those who live are owed nothing, and
nothing of theirs counts twice.

One of three members dies where it speaks for the group, or where it has the answer. What it had given, held
and sent along it tells before; so the books of all three can be closed.
"""

from __future__ import annotations

import os
import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from mortal_groups import settings
from test_lossy_session import SIZES, Books, Layout, Recorded, Way, given_to, held_by, train
from torch import Tensor

from atoll.core import points
from atoll.server import main as server
from atoll.train.api.place import Place
from atoll.train.sync.server import Server
from support.pool import FORKSERVER
from support.served import ServedRun

DEADLINE = 120.0
DYING, DIES_AT, STEPS = 2, 9, 24  # rank; from that step on, once all are in one group
CLOSE = 1e-3  # what is held of a contribution by three goes with one by two: thirds


def live(rank: int, address: str, way: Way, point: str, told: Connection) -> None:
    """A worker's process; the dying one tells before its books, what it holds, and what of that it has
    sent along."""
    torch.set_num_threads(1)
    seen: list[tuple[Server, Books]] = []

    def strike(reached: str, _iteration: int) -> None:
        if rank != DYING or not seen or reached != point:
            return
        exchange, books = seen[0]
        if books.step >= DIES_AT and exchange.group.ring.world == way.workers:
            told.send_bytes(pickle.dumps((books, *held_by(exchange))))
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(exchange: Server, books: Books) -> None:
        assert exchange.group is not None
        seen.append((exchange, books))

    points.install(strike)
    books = train(Place(rank, way.workers), address, way, watch)
    told.send_bytes(pickle.dumps(books))  # tensors by value: this process ends


@pytest.mark.parametrize(
    ("way", "point"),
    [
        (Way(3, "asp", group="leader", steps=STEPS), "group.pushed"),
        (Way(3, "asp", group="members", steps=STEPS, pipeline=1), "group.pushed"),
        pytest.param(Way(3, "asp", group="members", steps=STEPS), "group.pushed", marks=pytest.mark.soak),
        pytest.param(Way(3, "asp", group="leader", steps=STEPS), "group.answered", marks=pytest.mark.soak),
        pytest.param(Way(3, "asp", group="members", steps=STEPS), "group.answered", marks=pytest.mark.soak),
        pytest.param(
            Way(3, "asp", group="leader", steps=STEPS, pipeline=1), "group.pushed", marks=pytest.mark.soak
        ),
    ],
    ids=str,
)
def test_those_who_live_are_owed_nothing(monkeypatch: pytest.MonkeyPatch, way: Way, point: str) -> None:
    recorded = Recorded()
    monkeypatch.setattr(server, "TunnelServer", recorded.server)
    grouping = settings([range(way.workers)], way.consistency)
    with ServedRun(way.workers, way.shards, heartbeat=0.25, grouping=grouping) as served:
        found = results(served.address, way, point)
    assert not served.failures
    dead, held, on_way = found.pop(DYING)
    applied = recorded.applied(Layout(way), None)
    sent_along = 0
    for place, size in enumerate(SIZES):
        given: Any = sum(books.given[place] for books in found.values()) + given_by_the_dead(way, dead, place)
        of_living: Any = sum(books.held[place] for books in found.values())
        rest = given - applied[place] - of_living - held[place]  # 0, or what the dead had sent along
        assert rest.shape == size
        open_ = torch.minimum(rest.abs(), (rest - on_way[place]).abs())
        assert float(open_.max()) < CLOSE, (dead.step, place)
        sent_along += int(on_way[place].count_nonzero())
    assert point != "group.pushed" or sent_along > 20
    assert all(torch.isfinite(value).all() for books in found.values() for value in books.values)


def results(address: str, way: Way, point: str) -> dict[int, Any]:
    """What each worker tells, by rank."""
    ends = [FORKSERVER.Pipe(duplex=False) for _ in range(way.workers)]
    made = [
        FORKSERVER.Process(target=live, args=(rank, address, way, point, told), daemon=True)
        for rank, (_, told) in enumerate(ends)
    ]
    for process in made:
        process.start()
    try:
        found: dict[int, Any] = {}
        for rank, (end, _) in enumerate(ends):
            assert end.poll(DEADLINE), f"worker {rank} said nothing"
            found[rank] = pickle.loads(end.recv_bytes())
        assert isinstance(found[0], Books)
        made[DYING].join(DEADLINE)
        assert made[DYING].exitcode == -signal.SIGKILL
    finally:
        for process in made:
            process.kill()
            process.join(DEADLINE)
    return found


def given_by_the_dead(way: Way, books: Books, place: int) -> Tensor:
    """With the step in whose exchange it died: the others had its gradient by then."""
    last = given_to(way, DYING, books.step)[place]
    return books.given[place] if last is None else books.given[place] + last.double()
