"""Samples go to whom they went when these orders were recorded: a run that is resumed sees the same data.

A record is a digest of all that a case gave, in order. Change one only if users are told that a resumed run
goes on otherwise. `ATOLL_RECORD=1 pytest tests/property/test_recorded_orders.py` writes them anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dealing_worlds import Change, Nodes, Team, run

from atoll.store.blocks import Blocks
from atoll.store.leases import Leases
from atoll.train.data.leased_sampler import LeasedSampler
from atoll.wire.messages import Lease, Leased

RECORDS = Path(__file__).parent / "recorded_orders.json"
CASES = 12  # of each kind
Case = Callable[[random.Random], Any]


def _changes(rng: random.Random) -> list[Change]:
    return [
        Change(
            rng.randrange(7),
            [rng.randrange(6) for _ in range(rng.randrange(3))],
            rng.randrange(3),
            rng.random() < 0.5,
        )
        for _ in range(rng.randrange(4))
    ]


def dealt_anew(rng: random.Random, *, in_batches: bool) -> Any:
    """Workers in lockstep, who come and go."""
    length, world, ahead = rng.randint(1, 60), rng.randint(1, 5), rng.randrange(4)
    size, batch = (0, rng.randint(1, 12)) if in_batches else (rng.randint(1, 4), 0)
    team = Team(length, world, size, batch, ahead, seed=rng.randrange(100))
    run(team, _changes(rng), 2)
    run(team, [], 1)
    return team.given


def by_speed(rng: random.Random) -> Any:
    """Nodes that deal by themselves, by their speeds; some die."""
    nodes = Nodes(
        rng.randrange(2**32),
        rng.randint(1, 1500),
        rng.randint(1, 24),
        rng.randint(1, 5),
        rng.randrange(6),
        rng.randint(1, 3),
        {rng.randint(1, 4): rng.randrange(60) for _ in range(rng.randrange(3))},
        rng.randrange(32),
        rng.choice([0.0, 0.5]),
    )
    nodes.run(2)
    left = [deal.left() for node, deal in nodes.deals.items() if nodes.alive(node, nodes.iteration)]
    return [[sorted(parts.items()) for parts in nodes.given], left]


def leased(rng: random.Random) -> Any:
    """Workers that lease, each at a speed of its own; one may die, and a checkpoint is loaded."""
    length, count, batch = rng.randint(1, 120), rng.randint(1, 4), rng.randint(1, 6)
    given: list[Any] = []
    state: dict[str, Any] | None = None
    for _ in range(2):
        book = Leases()
        samplers = {
            rank: LeasedSampler(length, lease=partial(_lease, book, rank), seed=5) for rank in range(count)
        }
        if state is not None:
            for sampler in samplers.values():
                sampler.load_state_dict(state)
        speeds = {rank: rng.choice([1, 2, 5]) for rank in samplers}
        loops = {rank: iter(sampler) for rank, sampler in samplers.items()}
        everything: dict[int, list[Any]] = {rank: [] for rank in samplers}
        stops = rng.randint(5, 60)
        for turn in range(200):
            if turn == stops and len(loops) > 1:
                gone = max(loops)
                book.handle_fenced(gone, gone + 1, everything[gone])
                del loops[gone]
            for rank, indices in list(loops.items()):
                if turn % speeds[rank]:
                    continue
                had = [index for index, _ in zip(indices, range(batch), strict=False)]
                given.append([rank, had])
                samplers[rank].count(len(had))
                used = samplers[rank].used()
                everything[rank] += used
                book.handle_used(rank, rank + 1, used)
                if not had:
                    loops[rank] = iter(samplers[rank])
            if max(each.epoch for each in samplers.values()) > 1:
                break
        state = samplers[0].state_dict([sampler.place() for sampler in samplers.values()])
        given.append(state)
    return given


def _lease(
    book: Leases, rank: int, sampler: int, epoch: int, length: int, count: int, _wait: float
) -> Leased:
    request = Lease(incarnation=rank + 1, sampler=sampler, epoch=epoch, length=length, count=count)
    return book.handle_lease(rank, rank + 1, request)


def in_blocks(rng: random.Random) -> Any:
    """Groups that lease for all of their members."""
    blocks, given = Blocks(Leases()), []
    groups = {(group, group + 1): sorted(rng.sample(range(9), rng.randint(1, 4))) for group in range(3)}
    length = rng.randint(1, 200)
    for number in range(1, 9):
        for key, members in groups.items():
            for worker in members:
                request = Lease(
                    incarnation=key[1],
                    sampler=0,
                    epoch=0,
                    length=length,
                    count=rng.randint(1, 7),
                    block=number,
                    patient=False,
                )
                part = blocks.handle_lease(key, worker, members, request)
                given.append([worker, part.start, part.stop, part.over, part.length])
    return given


KINDS: dict[str, Case] = {
    "indices dealt anew": partial(dealt_anew, in_batches=False),
    "batches dealt anew": partial(dealt_anew, in_batches=True),
    "by speed": by_speed,
    "leased": leased,
    "in blocks": in_blocks,
}


def digests(kind: str) -> list[str]:
    return [_digest(KINDS[kind](random.Random(f"{kind} {case}"))) for case in range(CASES)]


def _digest(given: Any) -> str:
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[str]]:
    if os.environ.get("ATOLL_RECORD"):
        RECORDS.write_text(json.dumps({kind: digests(kind) for kind in KINDS}, indent=1) + "\n")
    found: dict[str, list[str]] = json.loads(RECORDS.read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_orders_are_as_recorded(kind: str, recorded: dict[str, list[str]]) -> None:
    assert digests(kind) == recorded[kind]
