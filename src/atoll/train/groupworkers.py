"""What workers in groups tell one another outside the iterations: inside each group over its ring, between
groups through the log's meetings, to which a group comes as one."""

from __future__ import annotations

import msgspec

from atoll.train.place import Place
from atoll.train.ringbytes import broadcast_bytes, gather_bytes
from atoll.train.rounds import Ring
from atoll.train.served_workers import ServedWorkers
from atoll.train.shards import Shards

_Parts = dict[int, bytes]  # by rank in the run


class GroupWorkers(ServedWorkers):
    """`ServedWorkers` where some share a ring: every live worker of the run takes part in each call."""

    def __init__(self, place: Place, shards: Shards, ring: Ring) -> None:
        super().__init__(place, shards)
        self._group = ring

    def saw(self, ranks: list[int]) -> None:
        """An iteration's word names groups, and not workers: those of the latest call stand."""

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Each live worker's bytes, in order of rank."""
        self.check_open()
        if self.late:
            return [payload]
        number, self._number = self._number, self._number + 1
        parts = self._group.round(what, lambda: self._gather_all(payload, number, what))
        self._ranks = sorted(parts)
        return [parts[rank] for rank in self._ranks]

    def _gather_all(self, payload: bytes, number: int, what: str) -> _Parts:
        """What the members bring, the group's first member brings to the meeting, and tells them of it."""
        channel = self._group.agreement
        brought = gather_bytes(channel, payload, what)
        word = None
        if self._group.rank == 0:
            names = [self._group.place.name_of(rank) for rank in range(self._group.world)]
            own = msgspec.msgpack.encode(dict(zip(names, brought, strict=True)))
            met: _Parts = {}
            for group in self._meet(own, number, what):
                met |= msgspec.msgpack.decode(group, type=_Parts)
            word = msgspec.msgpack.encode(met)
        return msgspec.msgpack.decode(broadcast_bytes(channel, word, what), type=_Parts)
