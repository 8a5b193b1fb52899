"""Meetings of workers in groups outside the iterations.

A group's members meet over their ring. Groups meet at the log, to which each group comes as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from atoll.core.decoding import from_msgpack
from atoll.core.errors import MismatchError, UserError
from atoll.core.stands import CALL, Stand, are_consistent, describe_mismatch
from atoll.exchange.link import LOG, ShardLink
from atoll.train.api.place import Place
from atoll.train.group.ringbytes import broadcast_bytes, gather_bytes
from atoll.train.group.rounds import Ring
from atoll.train.members.attendance import Attendance
from atoll.train.members.logmeeting import CalledAwayError, LogMeeting
from atoll.train.members.meetings import BytesMeeting
from atoll.train.members.regrouping import Regrouping
from atoll.train.sync.servedmodels import ServedModels
from atoll.wire.messages import Mismatch, WorkerStand

_Parts = dict[int, bytes]  # each worker's bytes, by its rank in the run


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A member's message to its group: its call's number, the call in words, its bytes, and its place in its
    script."""

    number: int
    what: str
    payload: bytes
    stand: WorkerStand


@dataclass
class OwnCall:
    """The call of all workers that this worker is in.

    Attributes:
        stand: the worker's place in its script; None if it is in no call.
        is_away: True if the worker was called away from the call.
    """

    stand: Stand | None = None
    is_away: bool = False


class GroupJudge:
    """The decision about members of a group that have ended (`train/group/scriptplaces.py`: Judge)."""

    def __init__(self, place: Place, shards: ShardLink, call: OwnCall) -> None:
        """Judge for the worker at `place` in the run. `call` is the call that it is in."""
        self._place, self._shards, self._call = place, shards, call

    def judge_ended(self, ended: Mapping[int, Stand]) -> MismatchError | None:
        """Return the error if this worker is in a call that members of its group will not make, as they have
        ended; else None."""
        stand = self._call.stand
        if not ended or stand is None or stand.kind != CALL or self._call.is_away:
            return None
        return MismatchError(describe_mismatch(dict(sorted({**ended, self._place.rank: stand}.items()))))

    def tell_mismatch(self, mismatch: MismatchError) -> None:
        """Send the mismatch to the log, which passes it on to the other groups."""
        self._shards.send(LOG, Mismatch(line=str(mismatch)))


class GroupMeeting(BytesMeeting):
    """A meeting of groups at the log.

    Every living worker of the run takes part in each call, and each group comes to the `log` as one.
    """

    def __init__(
        self,
        attendance: Attendance,
        log: LogMeeting,
        models: ServedModels,
        ring: Ring,
        moves: Regrouping | None,
        call: OwnCall,
    ) -> None:
        """Meet as a member of the group of `ring`.

        `moves` takes a worker that is alone to another group while it waits in a call. None: it waits on,
        since all workers leave their groups at one iteration.
        """
        self.roster = self._attendance = attendance
        self._log, self._models = log, models
        self._group, self._moves, self._call = ring, moves, call
        self._has_come = False  # True if the whole group has come to this worker's call
        self._last: _Parts = {}  # the bytes that all workers brought to this worker's latest call

    def _leaves(self) -> bool:
        """True if this worker is alone and called to another group, where others may wait for it."""
        return self._group.world == 1 and self._moves is not None and self._moves.is_called()

    def part(self) -> None:
        """Record this member's end in its group's store.

        The log knows only groups, which go on without a member that has ended. The group's other members find
        the record, and decide at their next call whether they may go on.
        """
        if self._group.world == 1:
            self._log.part()
        else:
            self._group.scripts.leave(self.standing_for("the end of the session").stand)

    def gather_group(self) -> None:
        """Wait until the whole group has come.

        The call's first meeting then skips this wait, so that all calls make equally many collectives of the
        ring.
        """
        self._models.gather_members()
        self._has_come = True

    def stand_at(self, stand: Stand | None) -> None:
        self.stand = self._call.stand = stand
        self._log.stand_at(stand)
        self._has_come = self._call.is_away = False

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Return every living worker's bytes, in the order of ranks.

        Raises MismatchError if members of the group are at inconsistent places in their scripts, or have
        ended.
        """
        if self.roster.late:
            return [payload]
        attendance = self._attendance
        number = attendance.meets_in = attendance.begin()
        self._call.is_away = False
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
                    where=lambda: None if self._call.is_away else self.standing_for(what).stand,
                )
                parts = result if met == number else None  # None: others were behind, in an earlier call
            except CalledAwayError:
                self._call.is_away = True  # others may have their answer, and be in their next call
                assert self._moves is not None
                self._moves.answer()
        attendance.meets_in, self._last = -1, parts
        attendance.ranks = sorted(parts)
        return [parts[rank] for rank in attendance.ranks]

    def _gather_all(self, payload: bytes, number: int, what: str) -> tuple[int, _Parts]:
        """Return the number of the call that ends with this, and the bytes that all workers brought to it.

        The group's first member takes the members' bytes to the log's meeting, and gives the members the
        bytes of the other groups.
        """
        channel, place = self._group.session, self._group.place
        assert channel is not None
        own = msgspec.msgpack.encode(_Part(number, what, payload, self.standing_for(what)))
        said = [from_msgpack(part, _Part) for part in gather_bytes(channel, own, what)]
        first = min(part.number for part in said)
        ahead = [rank for rank, part in enumerate(said) if part.number > first]
        if ahead:  # members behind were called away with their part brought
            word = msgspec.msgpack.encode(self._last) if place.rank == ahead[0] else None
        else:
            self._check_same(said)
            word = msgspec.msgpack.encode(self._meet_as_group(said, number, what)) if not place.rank else None
        root = ahead[0] if ahead else 0
        return first, from_msgpack(broadcast_bytes(channel, word, what, root), _Parts)

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
        """Bring the members' parts, `said`, to the log's meeting; return the bytes of all workers."""
        brought = {self._group.place.name_of(rank): part.payload for rank, part in enumerate(said)}
        met: _Parts = {}
        stand, packed = self.standing_for(what), msgspec.msgpack.encode(brought)
        _, groups = self._log.meet(packed, number, what, stand, self._leaves)
        for group in groups:
            met |= from_msgpack(group, _Parts)
        return met
