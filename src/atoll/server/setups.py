"""Which set-up each worker is at, and who waits for one to be complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from atoll.server.loglines import LogLines
from atoll.server.model import Model
from atoll.server.peers import Peers
from atoll.wire.messages import Ready

Life: TypeAlias = tuple[int, int]  # a worker, and its incarnation


class SetUps:
    """All workers make the same sequence of set-ups; each begins a generation of the log's `lines`.

    `refuse(connection, reason, request)` tells a worker that it is not to have what it asked for."""

    def __init__(self, lines: LogLines, peers: Peers, refuse: Callable[[bytes, str, str], None]) -> None:
        self._lines, self._peers, self._refuse = lines, peers, refuse
        self.setter: Life = (-1, 0)  # who brought the Setup
        self.setter_member = 0  # which of its members did, the latest that has
        self.bases: dict[Life, int] = {}  # the generation that a worker's set-up 0 would be
        self.readies: dict[Life, int] = {}  # the generation that a worker's latest Ready is for
        # By worker, incarnation and member, with the generation that it is for.
        self._waiting: dict[tuple[int, int, int], tuple[int, Ready]] = {}

    def next_of(self, who: Life, number: int = 0) -> int:
        """The generation that a worker's Setup and Ready of this number are for (0: its next): who comes late
        begins with the one under way."""
        latest = max(self._lines.generation, 1)
        if number:
            return self.bases.setdefault(who, latest - number) + number
        return self.readies.get(who, latest - 1) + 1

    def wait(self, who: Life, member: int, ready: Ready) -> None:
        """A worker, by one of its members, asks to be told when its set-up is complete."""
        generation = self.readies[who] = self.next_of(who, ready.number)
        self._waiting[who[0], who[1], member] = generation, ready

    def answer(self, model: Model | None) -> None:
        """Answer all who wait for what `model` is of, or for a set-up before it, once it is complete."""
        if model is None or not model.complete:
            return
        for who, (generation, ready) in list(self._waiting.items()):
            if generation > self._lines.generation:
                continue
            del self._waiting[who]
            peer = self._peers.member(*who)
            if ready.digest == model.setup.digest:
                self._peers.send(peer, ready)
            elif peer is not None:
                self._refuse(peer, self._differs(who[0], ready, model), "Ready")

    def _differs(self, worker: int, ready: Ready, model: Model) -> str:
        if ready.codec != model.setup.codec:
            return unlike_codecs(worker, ready.codec, self.setter[0], model.setup.codec)
        return (
            f"worker {worker} has another model, layout or optimizer than worker {self.setter[0]} has "
            "described; start the same script with the same settings everywhere"
        )


def unlike_codecs(worker: int, own: str, other: int, others: str) -> str:
    """The line for two workers that write gradients by unlike codecs."""
    return (
        f"worker {worker} has sync.codec {own!r}, and worker {other} has {others!r}: a run's gradients are "
        "written by one codec; set sync.codec to the same on all"
    )
