"""Confirmations between threads, over real connections; only what c10d does beside them is played."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from atoll.core.errors import AtollError, DeadlineError
from atoll.train.api.place import Place
from atoll.train.group.channel import BrokenRingError
from atoll.train.group.confirmation import Confirmations
from atoll.train.group.memberlinks import MemberLinks

SECONDS = 30.0


class Group:
    """What the members of a group share."""

    def __init__(self, world: int, timeout: float = SECONDS) -> None:
        self.world, self.timeout = world, timeout
        self.meeting = threading.Barrier(world)
        self.given: list[Any] = [None] * world
        self.sums = 0

    def run(self, act: Callable[[Confirmations], Any]) -> list[Any]:
        """What `act` gives, or raises of Atoll's errors, on each member."""

        def member(rank: int) -> Any:
            try:
                confirmations = Confirmations(Played(self, rank))  # type: ignore[arg-type]
            except AtollError as error:
                return error
            try:
                return act(confirmations)
            except AtollError as error:
                return error
            finally:
                confirmations.close()

        with ThreadPoolExecutor(self.world) as threads:
            return list(threads.map(member, range(self.world), timeout=SECONDS))


class Played:
    """A channel whose collectives are meetings of threads."""

    host = "127.0.0.1"

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.timeout, self.seconds_waited, self.looks = group, group.timeout, 0.0, 0
        self.place = Place(rank, group.world, names=tuple(10 + each for each in range(group.world)))

    def all_gather(self, tensor: Tensor) -> tuple[list[Tensor], None]:
        self.group.given[self.place.rank] = tensor.clone()
        self.group.meeting.wait(SECONDS)
        parts: Sequence[Tensor] = list(self.group.given)
        self.group.meeting.wait(SECONDS)
        return list(parts), None

    def sum(self, tensor: Tensor) -> None:
        self.all_gather(tensor)
        self.group.sums += 1

    def wait(self, work: None, what: str) -> None:
        del work, what

    def look_while_waiting(self) -> None:
        self.looks += 1

    look = look_while_waiting

    def explain(self, error: RuntimeError, what: str, waited: float) -> AtollError:
        assert str(error) == "timed out"
        assert waited >= self.timeout
        return DeadlineError(what)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_nobody_passes_before_all_have_come(world: int) -> None:
    group, come = Group(world), [0] * world

    def act(confirmations: Confirmations) -> int:
        rank = confirmations._place.rank
        for number in range(1, 301):  # more than a byte counts
            come[rank] = number
            confirmations.confirm("it")
            assert min(come) >= number
        return len(confirmations.member_links.by_rank)

    links = group.run(act)
    assert links == [world - 1] * world  # up to seven, all are partners
    assert group.sums == 0


def test_who_cannot_listen_makes_all_confirm_by_sums_and_is_named() -> None:
    group = Group(3)
    listen = MemberLinks._listen

    def listens(links: MemberLinks) -> socket.socket | None:
        if links._place.rank == 1:
            links._channel.host = "192.0.2.1"  # type: ignore[misc]  # an address that nobody has
        return listen(links)

    def act(confirmations: Confirmations) -> tuple[list[int], str, int]:
        confirmations.confirm("it")
        return (
            confirmations.member_links.without,
            confirmations.member_links.trouble,
            len(confirmations.member_links.by_rank),
        )

    with mock.patch.object(MemberLinks, "_listen", listens):
        found = group.run(act)
    assert [without for without, _, _ in found] == [[11]] * 3
    assert [bool(trouble) for _, trouble, _ in found] == [False, True, False]
    assert found[1][1].startswith("it cannot listen: ")
    assert [links for _, _, links in found] == [0] * 3
    assert group.sums == 3


def test_who_does_not_know_its_address_does_not_listen_at_all_of_them() -> None:
    with mock.patch.object(Played, "host", ""), mock.patch.object(socket, "create_server") as listens:
        found = Group(2).run(lambda made: (made.member_links.without, made.member_links.trouble))
    assert found == [([10, 11], "it does not know at which address the others reach it")] * 2
    assert not listens.called


def test_who_cannot_be_reached_makes_all_confirm_by_sums() -> None:
    """Worker 12 gives an address at which nobody listens."""
    group = Group(3)
    pack = struct.Struct("<16sH46s").pack

    def elsewhere(channel: Played, tensor: Tensor, gather: Any = Played.all_gather) -> Any:
        if channel.place.rank == 0 and tensor.numel() > 1:
            with socket.create_server(("127.0.0.1", 0)) as gone:
                port = gone.getsockname()[1]
            tensor = torch.frombuffer(bytearray(pack(b"x" * 16, port, b"127.0.0.1")), dtype=torch.uint8)
        return gather(channel, tensor)

    with (
        mock.patch.object(Played, "all_gather", elsewhere),
        mock.patch("atoll.train.group.memberlinks._CONNECT_SECONDS", 0.5),
    ):
        found = group.run(
            lambda confirmations: (confirmations.member_links.without, confirmations.member_links.trouble)
        )
    assert found[0][0] == found[1][0] == found[2][0]
    assert {11, 12} <= set(found[0][0])
    assert "refused" in found[1][1]
    assert found[0][1] == "it cannot connect: nobody came from worker 11 and worker 12"


@pytest.mark.parametrize("place", [b"no address", b"\xff\xfe", b"1.2.3.4.5"])
def test_an_address_that_is_none_is_not_connected_to(place: bytes) -> None:
    group = Group(2)
    pack = struct.Struct("<16sH46s").pack

    def spoilt(channel: Played, tensor: Tensor, gather: Any = Played.all_gather) -> Any:
        if channel.place.rank == 0 and tensor.numel() > 1:
            tensor = torch.frombuffer(bytearray(pack(b"x" * 16, 80, place)), dtype=torch.uint8)
        return gather(channel, tensor)

    with (
        mock.patch.object(Played, "all_gather", spoilt),
        mock.patch("atoll.train.group.memberlinks._CONNECT_SECONDS", 0.2),
    ):
        found = group.run(lambda confirmations: confirmations.member_links.without)
    assert found == [[10, 11]] * 2


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 16 + struct.pack("<I", 1)])
def test_strangers_are_turned_away(greeting: bytes) -> None:
    """One that says nothing, one that says something else, one that does not know the secret."""
    group = Group(2)
    strangers: list[socket.socket] = []
    connect = MemberLinks._connect

    def after_a_stranger(links: MemberLinks, listener: socket.socket, *others: Any) -> None:
        if links._place.rank == 0:
            strangers.append(socket.create_connection(listener.getsockname()))
            strangers[0].sendall(greeting)
        connect(links, listener, *others)

    def act(confirmations: Confirmations) -> list[int]:
        confirmations.confirm("it")
        return confirmations.member_links.without

    with (
        mock.patch.object(MemberLinks, "_connect", after_a_stranger),
        mock.patch("atoll.train.group.memberlinks._GREETING_SECONDS", 0.2),
    ):
        assert group.run(act) == [[], []]
    for stranger in strangers:
        stranger.close()


def test_a_member_that_goes_breaks_the_ring_for_the_others() -> None:
    def act(confirmations: Confirmations) -> None:
        confirmations.confirm("the first")
        if confirmations._place.rank != 2:
            confirmations.confirm("the second")

    lost, also, gone = Group(3).run(act)
    assert gone is None
    for error in (lost, also):
        assert isinstance(error, BrokenRingError)
        assert "lost touch with worker 1" in str(error)


def test_another_byte_breaks_the_ring() -> None:
    def act(confirmations: Confirmations) -> None:
        if confirmations._place.rank == 1:
            confirmations._number = 7
        confirmations.confirm("it")

    found = Group(2).run(act)
    assert str(found[0]) == "worker 10 lost touch with worker 11: it said 8 in place of 1"


def test_who_does_not_come_is_waited_for_until_the_deadline_and_looked_for() -> None:
    looks: list[int] = []
    ended = threading.Event()

    def act(confirmations: Confirmations) -> None:
        if confirmations._place.rank == 1:
            assert ended.wait(SECONDS)
            return
        try:
            confirmations.confirm("chunk 7")
        finally:
            looks.append(confirmations._channel.looks)  # type: ignore[attr-defined]
            ended.set()

    error, _ = Group(2, timeout=0.5).run(act)
    assert isinstance(error, DeadlineError)
    assert str(error) == "the others to hold chunk 7"
    assert looks[0] >= 3
