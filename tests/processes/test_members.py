"""The members of a group that hold one model together, in processes of their own: what they ask of one
another, and what becomes of it where one is slow, stopped or killed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from member_lives import outcomes
from torch import Tensor

from atoll.core.errors import AtollError, UserError
from atoll.memory.payloads import Key
from atoll.train.api.place import Place
from atoll.train.group.members import WorkerMembers
from support.pool import WorkerPool

SECONDS = 30.0
WHAT = "chunk 7 ('h.3.mlp.weight') as of step 41"


def payload(owner: int, key: Key, version: int, numel: int = 1000) -> Tensor:
    """What an owner holds: something else for each key and version."""
    chunk, kind = key
    generator = torch.Generator().manual_seed(1000 * owner + 100 * chunk + 10 * len(kind) + version)
    return torch.randn(numel, generator=generator)


def serve_payloads(members: WorkerMembers) -> None:
    @contextmanager
    def read(key: Key, version: int) -> Iterator[Tensor]:
        if key[1] == "unknown":
            raise UserError(f"chunk {key[0]} has no 'unknown'")
        held = payload(members.rank, key, version)
        yield held.bfloat16() if key[1] == "half" else held

    members.serve(read)


def fetched(members: WorkerMembers, owner: int, key: Key, version: int) -> bool:
    dtype = torch.bfloat16 if key[1] == "half" else torch.float32
    into = torch.zeros(900, dtype=dtype)  # the rest is padding
    members.fetch(owner, key, version, into, WHAT)
    return torch.equal(into, payload(owner, key, version).to(dtype)[:900])


def asks_everybody(place: Place) -> dict[str, Any]:
    """Several threads fetch, while the script's own makes collectives."""
    members = WorkerMembers(place, SECONDS)
    serve_payloads(members)
    others = [rank for rank in range(members.count) if rank != members.rank]
    right: list[bool] = []

    def ask(thread: int) -> None:
        for version in range(20):
            for owner in others:
                for kind in ("values", "half", "state.exp_avg"):
                    right.append(fetched(members, owner, (thread, kind), version))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    sums, exchanged = [], []
    for turn in range(10):
        tensor = payload(members.rank, (turn, "gradient"), 0)
        members.sum(tensor, "the sum")
        sums.append(tensor)
        works = []
        for owner in range(members.count):  # several under way at once: whole payloads, and unlike parts
            splits = [5000 * (member == owner) for member in range(members.count)]
            if owner == 1:
                splits = [1000 * member for member in range(members.count)]
            part = payload(members.rank, (owner, "part"), turn, numel=sum(splits))
            takes = [splits[members.rank]] * members.count
            into = torch.full((sum(takes),), -1.0)
            works.append((into, members.exchange(part, splits, into, takes, f"chunk {owner}'s gradient")))
        for into, work in works:
            work.wait()
            exchanged.append(into)
    for thread in threads:
        thread.join(SECONDS)
    refusal = ""
    try:
        members.fetch(others[0], (3, "unknown"), 0, torch.zeros(4), WHAT)
    except AtollError as error:
        refusal = f"{type(error).__name__}: {error}"
    words = members.gather(bytes([members.rank]) * members.rank, "the words")
    members.close()
    members.close()
    return {
        "right": right,
        "sums": sums,
        "exchanged": exchanged,
        "refusal": refusal,
        "words": words,
        "waited": members.seconds_waited,
        "fetched": members.fetched,
    }


@pytest.mark.parametrize("world", [2, 4])
def test_members_fetch_sum_and_exchange_at_once(pool: WorkerPool, world: int) -> None:
    told = pool.run(asks_everybody, world=world)
    ranks = range(world)
    for rank, each in enumerate(told):
        assert each["right"] == [True] * (3 * 20 * 3 * (world - 1))
        assert each["fetched"] == len(each["right"]) // 3 * 900 * (4 + 2 + 4)
        owner = 0 if rank else 1
        refusal = (
            f"worker {rank} cannot have worker {owner}'s {WHAT}: worker {owner}: chunk 3 has no 'unknown'"
        )
        assert each["refusal"] == f"RefusedError: {refusal}"
        assert each["words"] == [bytes([word]) * word for word in ranks]
        assert each["waited"] > 0
        for turn, summed in enumerate(each["sums"]):
            assert torch.equal(summed, told[0]["sums"][turn])  # to the bit
            exact = sum(payload(r, (turn, "gradient"), 0).double() for r in ranks)
            torch.testing.assert_close(summed.double(), exact, rtol=0, atol=1e-5)
        for number, into in enumerate(each["exchanged"]):
            turn, owner = divmod(number, world)
            splits = [1000 * r for r in ranks] if owner == 1 else [5000 * (r == owner) for r in ranks]
            sent = [payload(r, (owner, "part"), turn, numel=sum(splits)) for r in ranks]
            assert torch.equal(into, torch.cat([torch.split(part, splits)[rank] for part in sent]))


def is_closed_while_it_fetches(place: Place) -> str:
    """What a thread that brings a chunk ahead meets when its session ends: the owner is not there yet."""
    members, others = WorkerMembers(place, 1000 * SECONDS), WorkerMembers(place, SECONDS, 1)
    asked, over, told = threading.Event(), threading.Event(), ["still waiting"]

    @contextmanager
    def read(_key: Key, _version: int) -> Iterator[Tensor]:
        asked.set()
        over.wait(SECONDS)
        yield torch.zeros(4)

    def ask() -> None:
        try:
            members.fetch(1, (7, "values"), 42, torch.zeros(4), WHAT)
        except AtollError as error:
            told[0] = str(error)

    members.serve(read)
    thread = threading.Thread(target=ask, daemon=True)
    if place.rank == 0:
        thread.start()
    else:
        assert asked.wait(SECONDS)
    others.gather(b"", "the fetch to be asked for")
    if place.rank == 0:
        members.close()
        thread.join(SECONDS)
    others.gather(b"", "the end of it")
    over.set()
    members.close()
    others.close()
    return told[0]


def test_who_fetches_while_the_session_ends_is_told(pool: WorkerPool) -> None:
    told, _ = pool.run(is_closed_while_it_fetches, world=2)
    assert told == "the session is closed: what other members hold cannot be had any more"


def rates(place: Place, nbytes: int) -> tuple[float, float]:
    """The best of some, in bytes a second: a fetch's, and that of gloo's send and recv."""
    members = WorkerMembers(place, SECONDS)
    mine = torch.full((nbytes,), place.rank, dtype=torch.uint8)

    @contextmanager
    def read(_key: Key, _version: int) -> Iterator[Tensor]:
        yield mine

    members.serve(read)
    into, group, seconds = torch.zeros_like(mine), members._channel._group, ([], [])  # type: ignore[var-annotated]
    for _ in range(10):
        members.gather(b"", "the next turn")
        began = time.perf_counter()
        if place.rank == 0:
            members.fetch(1, (0, "values"), 0, into, "the payload")
            seconds[0].append(time.perf_counter() - began)
        members.gather(b"", "the other way")
        began = time.perf_counter()
        if place.rank == 0:
            group.recv([into], 1, 0).wait()
        else:
            group.send([mine], 0, 0).wait()
        seconds[1].append(time.perf_counter() - began)
    assert place.rank or bool((into == 1).all())
    members.close()
    return (nbytes / min(seconds[0]) if seconds[0] else 0.0), nbytes / min(seconds[1])


def test_a_fetch_is_near_gloo_s_own_speed(pool: WorkerPool) -> None:
    """On a busy machine either may be slow, so the best of ten each."""
    fetch, gloo = pool.run(rates, 16 * 2**20, world=2)[0]
    print(f"a fetch of 16 MiB: {fetch / 2**30:.2f} GiB/s; gloo's recv: {gloo / 2**30:.2f} GiB/s")
    assert fetch > gloo / 4


# Where one is slow, stopped or gone


def one_dies_while_it_is_asked(place: Place) -> None:
    """Worker 2, in the middle of the others' fetches."""
    with closing(WorkerMembers(place, SECONDS)) as members:

        @contextmanager
        def read(key: Key, version: int) -> Iterator[Tensor]:
            if members.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield payload(members.rank, key, version)

        members.serve(read)
        if members.rank == 2:
            members.gather(b"", "the end")
        for version in range(1000):
            fetched(members, 2, (7, "values"), version)


def one_dies_while_all_reduce(place: Place) -> None:
    """Worker 2, before a gradient has gone to those who hold it."""
    with closing(WorkerMembers(place, SECONDS)) as members:
        if members.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        splits = [2**20 // 4, 2**20 // 4, 2**20 // 2]
        takes = [2**18] * 3
        members.exchange(
            torch.zeros(2**20), splits, torch.zeros(sum(takes)), takes, "chunk 7's gradient"
        ).wait()
        members.sum(torch.zeros(4), "the agreement")


@pytest.mark.parametrize("part", [one_dies_while_it_is_asked, one_dies_while_all_reduce])
def test_a_member_that_is_killed_ends_the_others_in_a_line(part: Callable[[Place], None]) -> None:
    for rank, (said, seconds) in outcomes(part, 3, silent=2).items():
        assert said.startswith(f"PeerLostError: worker {rank} lost touch with another worker, waiting for ")
        assert "\n" not in said
        assert seconds < SECONDS
        if part is one_dies_while_it_is_asked:
            assert f"waiting for worker 2's {WHAT}: worker 2" in said


def one_is_stopped(place: Place) -> None:
    """Worker 1 lives, and does nothing more."""
    with closing(WorkerMembers(place, 1.0)) as members:
        serve_payloads(members)
        if members.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        fetched(members, 1, (7, "values"), 41)


def test_a_member_that_is_stopped_passes_the_deadline() -> None:
    ((said, seconds),) = outcomes(one_is_stopped, 2, silent=1).values()
    waited = re.escape(f"for worker 1's {WHAT} (deadline sync.timeout, 1 s; ")
    assert re.match(rf"DeadlineError: worker 0 waited \d+\.\d s {waited}", said), said
    assert 1.0 <= seconds < SECONDS
