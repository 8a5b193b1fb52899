"""What nodes tell one another in meetings, where one is lost between two of them."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from atoll.train.api.place import Place
from atoll.train.members import nodesmeeting as of_nodes
from atoll.train.members.meetings import BytesMeeting
from atoll.train.members.nodesmeeting import NodesMeeting

DEADLINE = 30.0


class LostError(Exception):
    """At the worker that is lost."""


class World:
    """Three workers who gather on threads; worker 0 is lost when it comes to its gathering `dies_at`."""

    def __init__(self, dies_at: int) -> None:
        self.dies_at = dies_at
        self.living = {0, 1, 2}
        self.changed = threading.Condition()
        self.brought: dict[int, dict[int, bytes]] = {}

    def gather(self, rank: int, number: int, payload: bytes) -> list[tuple[int, bytes]]:
        with self.changed:
            if rank == 0 and number == self.dies_at:
                self.living.discard(0)
                self.changed.notify_all()
                raise LostError
            self.brought.setdefault(number, {})[rank] = payload
            self.changed.notify_all()
            whole = self.changed.wait_for(lambda: self.brought[number].keys() >= self.living, DEADLINE)
            assert whole
            return sorted(self.brought[number].items())


class _Gathers:
    """A meeting over a World."""

    late = False

    def __init__(self, rank: int, world: World) -> None:
        self._rank, self._world = rank, world
        self._made, self._live, self.roster = 0, [0, 1, 2], self

    @property
    def place(self) -> Place:
        return Place(rank=self._rank, world=3)

    @property
    def ranks(self) -> list[int]:
        return self._live

    def gather_bytes(self, payload: bytes, _what: str) -> list[bytes]:
        self._made += 1
        found = self._world.gather(self._rank, self._made, payload)
        self._live = [rank for rank, _ in found]
        return [part for _, part in found]


class OfNodes(_Gathers, NodesMeeting):
    pass


class OfOthers(_Gathers, BytesMeeting):
    pass


@pytest.mark.parametrize("kind", [OfNodes, OfOthers])
@pytest.mark.parametrize("dies_at", [1, 2, 3, 4, 99])
def test_where_the_first_is_lost_all_have_the_values_of_one(
    monkeypatch: pytest.MonkeyPatch, kind: type, dies_at: int
) -> None:
    """Before, between, and after the pieces of its two tensors."""
    monkeypatch.setattr(of_nodes, "_PIECE", 4 * 4)
    world = World(dies_at)
    tensors = [[torch.full((6,), float(rank)), torch.full((3,), 10.0 + rank)] for rank in range(3)]

    def take(rank: int) -> None:
        with contextlib.suppress(LostError):
            kind(rank, world).take_from_first(tensors[rank], "the values")

    threads = [threading.Thread(target=take, args=(rank,)) for rank in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(DEADLINE)
        assert not each.is_alive()
    values = [[set(tensor.tolist()) for tensor in tensors[rank]] for rank in (1, 2)]
    assert values[0] == values[1]
    assert all(len(each) == 1 for each in values[0])  # of one worker
