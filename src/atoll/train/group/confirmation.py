"""The barrier at the end of each round of a ring: members confirm that they hold the round's result.

c10d's barrier wakes two threads in each process for each of its steps, which took longer than everything else
(docs/notes/survival.md). Here the worker's own thread writes and reads single bytes, on connections of its
own. In each step it notifies up to three members, and hears from as many (`steps`). So four members need one
step, and sixteen two. If any member cannot connect, all members confirm by an all-reduce.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from atoll.train.group.channel import BrokenRingError, Channel
from atoll.train.group.memberlinks import MemberLinks

_RADIX = 4


class BarrierStep(NamedTuple):
    """One step of a barrier: the ranks that a member notifies (`told`), and those that it hears from
    (`heard`)."""

    told: list[int]
    heard: list[int]


def steps(rank: int, world: int) -> list[BarrierStep]:
    """Return the steps of member `rank` in a barrier of `world` members. A step ends when the member has
    heard all of its ranks.

    This is a dissemination barrier: a member that begins step s (from 0) has heard, directly or through
    others, of the 4 ** s - 1 members before it. In the whole barrier a member notifies another at most once.

    Source: D. Hensgen, R. Finkel, U. Manber, "Two Algorithms for Barrier Synchronization", International
    Journal of Parallel Programming 17(1), 1988. There each step has one partner; here up to three.
    """
    made, distance = [], 1
    while distance < world:
        away = [distance * count for count in range(1, _RADIX) if distance * count < world]
        made.append(
            BarrierStep([(rank + far) % world for far in away], [(rank - far) % world for far in away])
        )
        distance *= _RADIX
    return made


class Confirmations:
    """The confirmations of the ring over `channel`, on the CPU. The channel's place must have a `watch`.

    The constructor is a collective, and so is `confirm`. Both raise the errors of the channel's waits.

    Attributes:
        member_links: the connections to the members that this one notifies or hears from. If a worker cannot
            connect, there are none, and confirmations are all-reduces.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._place = channel, channel.place
        self._number = 0  # the number of the latest confirmation, modulo 256
        self._steps = steps(self._place.rank, self._place.world)
        partners = {rank for step in self._steps for rank in (*step.told, *step.heard)}
        self.member_links = MemberLinks(channel, partners, "to confirm to one another")

    def confirm(self, what: str) -> None:
        """Return when all members have called this. `what` names the result that they hold by then."""
        if self.member_links.without:
            self._channel.wait(self._channel.sum(torch.zeros(1)), f"the others to hold {what}")
            return
        began = time.perf_counter()
        self._number = (self._number + 1) % 256
        word = bytes((self._number,))
        for step in self._steps:
            for rank in step.told:
                self._tell(rank, word)
            for rank in step.heard:
                self._hear(rank, word, f"the others to hold {what}", began)
        self._channel.seconds_waited += time.perf_counter() - began

    def close(self) -> None:
        """End the connections."""
        self.member_links.close()

    def _tell(self, rank: int, word: bytes) -> None:
        try:
            self.member_links.by_rank[rank].send(word)
        except OSError as error:
            raise self._lost(rank, str(error)) from error

    def _hear(self, rank: int, word: bytes, what: str, began: float) -> None:
        link = self.member_links.by_rank[rank]
        while True:
            try:
                heard = link.recv(1)
            except TimeoutError as error:
                self._channel.look_while_waiting()
                waited = time.perf_counter() - began
                if waited > self._channel.timeout:
                    raise self._channel.explain(RuntimeError("timed out"), what, waited) from error
                continue
            except OSError as error:
                raise self._lost(rank, str(error)) from error
            if heard != word:
                how = f"it said {heard[0]} in place of {word[0]}" if heard else "it closed the connection"
                raise self._lost(rank, how)
            return

    def _lost(self, rank: int, how: str) -> BrokenRingError:
        name = self._place.name_of(rank)
        return BrokenRingError(f"worker {self._place.name} lost touch with worker {name}: {how}")
