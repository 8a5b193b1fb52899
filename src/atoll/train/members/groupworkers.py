"""What workers in groups tell one another outside the iterations: inside each group over its ring, between
groups through the log's meetings, to which a group comes as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from atoll.core.errors import MismatchError, UserError
from atoll.core.stands import CALL, Stand, are_consistent, describe_mismatch
from atoll.exchange.link import LOG, Link
from atoll.train.group.ringbytes import broadcast_bytes, gather_bytes
from atoll.train.group.rounds import Ring
from atoll.train.members.attendance import Attendance
from atoll.train.members.regrouping import Regrouping
from atoll.train.members.served_workers import CalledAwayError, ServedWorkers
from atoll.train.sync.servedmodels import ServedModels
from atoll.wire.messages import Mismatch, WorkerStand

_Parts = dict[int, bytes]  # by rank in the run


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A member's message to its group: the number of its call, the call in words, and the member's place in
    its script.
    """

    number: int
    what: str
    payload: bytes
    stand: WorkerStand


class GroupWorkers(ServedWorkers):
    """`ServedWorkers` where some share a ring: every live worker of the run takes part in each call."""

    def __init__(
        self,
        attendance: Attendance,
        shards: Link,
        models: ServedModels,
        ring: Ring,
        moves: Regrouping | None,
    ) -> None:
        """`moves` takes a worker that is alone to another group while it waits in a call; None: it waits on,
        since all leave their groups at one iteration."""
        super().__init__(attendance, shards, models)
        self._group, self._moves = ring, moves
        self._has_come = False  # the whole group, to the call that this worker is in
        self._was_called_away = False  # from that call
        self._last: _Parts = {}  # what all brought to the latest one that it was in
        ring.scripts.judge = self

    def _leaves(self) -> bool:
        """A worker alone also moves while it waits for others: they may wait for it in its next group."""
        return self._group.world == 1 and self._moves is not None and self._moves.is_called()

    def part(self) -> None:
        """Record this member's end in its group's store.

        The log knows only groups, which go on without a member that has ended. The group's other members find
        the record, and decide at their next call whether they may go on.
        """
        if self._group.world == 1:
            super().part()
        else:
            self._group.scripts.leave(self._standing_for("the end of the session").stand)

    def saw(self, ranks: list[int]) -> None:
        """An iteration's word names groups, and not workers: those of the latest call stand."""

    def gather_group(self) -> None:
        """Wait, inside a call and before it changes anything, until the whole group has come.

        The call's first meeting then skips this wait, so that all calls take part in equally many collectives
        of the ring.
        """
        self._models.gather_members()
        self._has_come = True

    def _stand_at(self, stand: Stand | None) -> None:
        super()._stand_at(stand)
        self._has_come = self._was_called_away = False

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Gather each live worker's bytes, in order of rank.

        Raises MismatchError where members of the group stand at other places, or have ended.
        """
        self.check_open()
        if self.late:
            return [payload]
        attendance = self.attendance
        number = attendance.meets_in = attendance.number
        attendance.number, self._was_called_away = number + 1, False
        parts: _Parts | None = None
        while parts is None:
            if not self._has_come:
                self._models.gather_members()
            self._has_come = False
            self._group.scripts.check_ended()
            try:
                met, result = self._group.round(
                    what,
                    lambda: self._gather_all(payload, number, what),
                    where=lambda: None if self._was_called_away else self._standing_for(what).stand,
                )
                parts = result if met == number else None  # else it was a call that others were behind in
            except CalledAwayError:
                self._was_called_away = True  # others may have been answered, and be in their next call
                assert self._moves is not None
                self._moves.answer()
        attendance.meets_in, self._last = -1, parts
        attendance.ranks = sorted(parts)
        return [parts[rank] for rank in attendance.ranks]

    def _gather_all(self, payload: bytes, number: int, what: str) -> tuple[int, _Parts]:
        """The number of a call that is over with this, and what all brought to it. The group's first member
        takes the members' parts to the log's meeting, and tells them of the others'."""
        channel, place = self._group.session, self._group.place
        assert channel is not None
        own = msgspec.msgpack.encode(_Part(number, what, payload, self._standing_for(what)))
        said = [msgspec.msgpack.decode(part, type=_Part) for part in gather_bytes(channel, own, what)]
        first = min(part.number for part in said)
        ahead = [rank for rank, part in enumerate(said) if part.number > first]
        if ahead:  # who is behind was called away when it had brought its part, and others were answered
            word = msgspec.msgpack.encode(self._last) if place.rank == ahead[0] else None
        else:
            self._check_same(said)
            word = msgspec.msgpack.encode(self._meet_as_group(said, number, what)) if not place.rank else None
        root = ahead[0] if ahead else 0
        return first, msgspec.msgpack.decode(broadcast_bytes(channel, word, what, root), type=_Parts)

    def judge_ended(self, ended: Mapping[int, Stand]) -> MismatchError | None:
        """Return the error for a call of this worker that misses members of its group that have ended; else
        None.
        """
        stand = self._stand
        if not ended or stand is None or stand.kind != CALL or self._was_called_away:
            return None
        return MismatchError(describe_mismatch(dict(sorted({**ended, self.place.rank: stand}.items()))))

    def tell_mismatch(self, mismatch: MismatchError) -> None:
        """Send the mismatch to the log, which tells the other groups."""
        self._shards.send(LOG, Mismatch(line=str(mismatch)))

    def _check_same(self, said: Sequence[_Part]) -> None:
        place = self._group.place
        if not are_consistent(part.stand.stand for part in said):
            raise MismatchError(describe_mismatch({part.stand.worker: part.stand.stand for part in said}))
        what = said[place.rank].what
        for rank, part in enumerate(said):
            if part.what != what:
                raise UserError(
                    f"worker {place.name} is in {what}, and worker {place.name_of(rank)}, of its group, in "
                    f"{part.what}: all workers make the same calls in the same order"
                )

    def _meet_as_group(self, said: Sequence[_Part], number: int, what: str) -> _Parts:
        """What all workers bring, where this group brings what its members have `said`."""
        brought = {self._group.place.name_of(rank): part.payload for rank, part in enumerate(said)}
        met: _Parts = {}
        for group in self._meet(msgspec.msgpack.encode(brought), number, what):
            met |= msgspec.msgpack.decode(group, type=_Parts)
        return met
