"""Sums of short tensors between threads, over real connections."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.train.api.place import Place
from atoll.train.group.shortsums import ShortSums

SECONDS = timedelta(seconds=30)
SLICE = timedelta(seconds=0.05)


class Rings:
    """Stands for the sums of longer tensors: it counts them."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def sum(self, tensor: Tensor) -> Any:
        self.asked.append(tensor.numel())

    def sends(self, size: int) -> int:
        return -size

    def wait(self, work: Any, what: str) -> float:
        del what
        work.wait(SECONDS)
        return 0.0


@contextmanager
def group(world: int) -> Iterator[tuple[list[ShortSums], list[dict[int, socket.socket]]]]:
    """The sums of each member, and its connections by rank."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for one, other in combinations(range(world), 2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            links[one][other] = socket.create_connection(server.getsockname())
            links[other][one], _ = server.accept()
    made = []
    for rank in range(world):
        channel: Any = SimpleNamespace(place=Place(rank, world))
        members: Any = SimpleNamespace(by_rank=links[rank])
        made.append(ShortSums(Rings(), channel, members))
    try:
        yield made, links
    finally:
        for each in links:
            for link in each.values():
                link.close()


def on_each(sums: list[ShortSums], act: Callable[[int, ShortSums], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(sums)) as threads:
        return list(threads.map(act, range(len(sums)), sums, timeout=SECONDS.total_seconds()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_all_have_the_sum_in_the_order_of_ranks(world: int, dtype: torch.dtype) -> None:
    given = [(100 * torch.randn(2, 50, generator=torch.manual_seed(rank))).to(dtype) for rank in range(world)]
    total = given[0].clone()
    for each in given[1:]:
        total += each

    def act(rank: int, sums: ShortSums) -> Tensor:
        tensor = given[rank].clone()
        sums.wait(sums.sum(tensor), "it")
        return tensor

    with group(world) as (members, _):
        assert all(torch.equal(each, total) for each in on_each(members, act))


@pytest.mark.parametrize("world", [2, 4])
def test_sums_that_are_under_way_at_once_end_in_any_order(world: int) -> None:
    sizes = [1, 0, 7, 1000, 3, 2**15 // (world - 1)]

    def act(rank: int, sums: ShortSums) -> list[Tensor]:
        rows = []
        for turn in range(20):
            tensors = [torch.full((size,), float(rank + turn)) for size in sizes]
            works = [sums.sum(tensor) for tensor in tensors]
            for work in works if (rank + turn) % 2 else reversed(works):
                sums.wait(work, "it")
                assert work.is_completed()
            rows += tensors
        return rows

    with group(world) as (members, _):
        for rows in on_each(members, act):
            for number, row in enumerate(rows):
                turn = number // len(sizes)
                assert row.tolist() == [float(sum(range(world)) + world * turn)] * sizes[number % len(sizes)]


def test_what_the_system_does_not_take_at_once_leaves_while_others_are_waited_for() -> None:
    """Member 1 begins to read when member 0 has given the system all that it takes."""
    begun = threading.Event()

    def act(rank: int, sums: ShortSums) -> float:
        if rank:
            assert begun.wait(SECONDS.total_seconds())
        tensors = [torch.ones(2**15) for _ in range(200)]
        works = [sums.sum(each) for each in tensors]
        begun.set()
        for work in works:
            sums.wait(work, "it")
        return min(float(each.min()) for each in tensors)

    with group(2) as (members, _):
        assert on_each(members, act) == [2.0, 2.0]


def test_longer_tensors_go_over_the_ring_and_the_bytes_are_told() -> None:
    with group(3) as (members, _):
        ring: Any = members[0]._ring
        members[0].sum(torch.zeros(2**14 + 1))
        assert ring.asked == [2**14 + 1]
        assert members[0].sends(2**16) == 2**17
        assert members[0].sends(2**16 + 1) == -(2**16 + 1)


def test_a_wait_ends_in_time_and_goes_on_where_it_was() -> None:
    with group(2) as (members, links):
        tensor = torch.ones(3)
        work = members[0].sum(tensor)
        with pytest.raises(RuntimeError, match="^timed out$"):
            work.wait(SLICE)
        assert not work.is_completed()
        part = struct.pack("<II", 0, 12) + struct.pack("<3f", 1.0, 2.0, 3.0)
        links[1][0].setblocking(True)
        links[1][0].sendall(part[:11])
        with pytest.raises(RuntimeError, match="^timed out$"):
            work.wait(SLICE)
        assert tensor.tolist() == [1.0, 1.0, 1.0]
        links[1][0].sendall(part[11:])
        work.wait(SECONDS)
        assert tensor.tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "worker 1 closed the connection"),
        (struct.pack("<II", 0, 12) + b"1234", "worker 1 closed the connection"),
        (struct.pack("<II", 0, 16), "worker 1 sent 16 bytes of its sum 0 in place of 12 of sum 0"),
        (struct.pack("<II", 7, 12), "worker 1 sent 12 bytes of its sum 7 in place of 12 of sum 0"),
        (struct.pack("<II", 0, 2**24), "worker 1 sent 16777216 bytes of its sum 0 in place of 12 of sum 0"),
    ],
)  # fmt: skip
def test_a_broken_connection_fails_this_sum_and_all_after_it(said: bytes, why: str) -> None:
    with group(2) as (members, links):
        tensor = torch.ones(3)
        work = members[0].sum(tensor)
        links[1][0].setblocking(True)
        links[1][0].sendall(said)
        links[1][0].shutdown(socket.SHUT_WR)
        for _ in range(2):
            with pytest.raises(RuntimeError) as told:
                work.wait(SECONDS)
            assert str(told.value) == why
        assert work.is_completed()
        later = members[0].sum(torch.ones(1))
        with pytest.raises(RuntimeError) as told:
            later.wait(SECONDS)
        assert str(told.value) == why
        assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_a_connection_that_breaks_as_a_sum_is_sent_fails_it() -> None:
    with group(2) as (members, links):
        links[0][1].shutdown(socket.SHUT_RDWR)
        work = members[0].sum(torch.ones(3))
        with pytest.raises(RuntimeError, match="Broken pipe"):
            work.wait(SECONDS)


def test_a_sum_that_was_there_stays_when_a_member_goes_afterwards() -> None:
    with group(2) as (members, links):
        mine, theirs = torch.ones(3), torch.ones(3)
        works = [members[0].sum(mine), members[1].sum(theirs)]
        members[0].wait(works[0], "it")
        for link in links[0].values():
            link.close()
        members[1].wait(works[1], "it")
        assert theirs.tolist() == [2.0, 2.0, 2.0]
