"""Members that the hub does not hear, and whose processes it sees alive: they are waited for."""

from __future__ import annotations

from atoll.core.liveness import AGAIN_SECONDS, Vouching
from atoll.core.units import format_seconds
from atoll.hub.decisions import WAITED_FOR, Decisions
from atoll.store.roll import Member, Roll


class Vouchers:
    """Looks at the processes of silent members of `roll`, where they are on the hub's machine."""

    def __init__(self, roll: Roll, decisions: Decisions, vouching: Vouching | None = None) -> None:
        self._roll, self._decisions = roll, decisions
        self._vouching = vouching or Vouching()
        self._told: dict[int, float] = {}  # incarnation -> when that was heard last of whose silence is told
        self._seen: dict[int, str] = {}  # incarnation -> what was seen of it, in words, by the latest look

    def spares(self, now: float, incarnation: int) -> bool:
        """Return whether a member, silent for longer than is borne, is to be waited for: then it is spared
        until it is to be looked at again."""
        member, silence = self._roll.known.get(incarnation), self._roll.silence_of(now, incarnation)
        if member is None or silence is None:
            return False
        for gone in self._seen.keys() - self._roll.known.keys():
            del self._seen[gone]
            self._told.pop(gone, None)
        judgement = self._vouching.judge(member.origin, silence, self._roll.patience)
        self._seen[incarnation] = judgement.why
        if judgement.alive:
            self._roll.spare(incarnation, now + AGAIN_SECONDS)
            if judgement.why:
                self._tell(member, now - silence, silence)
        return judgement.alive

    def _tell(self, member: Member, heard: float, silence: float) -> None:
        """Say once of each silence that it is borne, and why."""
        if self._told.get(member.incarnation) == round(heard, 3):
            return
        self._told[member.incarnation] = round(heard, 3)
        kind = "shard" if member.kind == "half" else member.kind
        reason = f"silent for {format_seconds(silence)}; {self._seen[member.incarnation]}"
        self._decisions.add(f"{kind} {WAITED_FOR}", _name(member), reason)

    def seen(self, incarnation: int) -> str:
        """Return what the latest look at a member saw, to end a line on its death."""
        why = self._seen.get(incarnation)
        return f"; {why}" if why else ""


def _name(member: Member) -> str:
    if member.kind == "worker":
        return f"worker {member.place}, incarnation {member.incarnation}"
    return f"the shard of site {member.place}" if member.kind == "site" else f"shard {member.place}"
