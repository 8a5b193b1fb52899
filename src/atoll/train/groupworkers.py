"""What workers in groups tell one another outside the iterations: inside each group over its ring, between
groups through the log's meetings, to which a group comes as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from atoll.core.errors import UserError
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
        self.gather_members: Callable[[], None] = lambda: None  # returns when the whole group has come

    def saw(self, ranks: list[int]) -> None:
        """An iteration's word names groups, and not workers: those of the latest call stand."""

    def lose(self, ranks: Sequence[int]) -> None:
        """These workers of the group are gone."""
        self._ranks = [rank for rank in self._ranks if rank not in ranks] or [self.place.rank]

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Each live worker's bytes, in order of rank. Raises UserError where the members of the group are in
        other calls than this one."""
        self.check_open()
        if self.late:
            return [payload]
        number, self._number = self._number, self._number + 1
        self.gather_members()
        parts = self._group.round(what, lambda: self._gather_all(payload, number, what))
        self._ranks = sorted(parts)
        return [parts[rank] for rank in self._ranks]

    def _gather_all(self, payload: bytes, number: int, what: str) -> _Parts:
        """What the members bring, the group's first member brings to the meeting, and tells them of it."""
        channel = self._group.session
        assert channel is not None
        place, own = self._group.place, msgspec.msgpack.encode((what, payload))
        said = [
            msgspec.msgpack.decode(part, type=tuple[str, bytes]) for part in gather_bytes(channel, own, what)
        ]
        for rank, (theirs, _) in enumerate(said):
            if theirs != what:
                raise UserError(
                    f"worker {place.name} is in {what}, and worker {place.name_of(rank)}, of its group, in "
                    f"{theirs}: all workers make the same calls in the same order"
                )
        word = None
        if place.rank == 0:
            brought = {place.name_of(rank): part for rank, (_, part) in enumerate(said)}
            met: _Parts = {}
            for group in self._meet(msgspec.msgpack.encode(brought), number, what):
                met |= msgspec.msgpack.decode(group, type=_Parts)
            word = msgspec.msgpack.encode(met)
        return msgspec.msgpack.decode(broadcast_bytes(channel, word, what), type=_Parts)
