"""Checks whether silent members' processes are alive, so that the hub waits for those that are."""

from __future__ import annotations

from atoll.core.liveness import AGAIN_SECONDS, Vouching
from atoll.core.units import format_seconds
from atoll.hub.decisions import WAITED_FOR, Decisions
from atoll.store.roll import Member, Roll


class Vouchers:
    """Checks processes of silent members of `roll`, if they are on the hub's machine."""

    def __init__(self, roll: Roll, decisions: Decisions, vouching: Vouching | None = None) -> None:
        self._roll, self._decisions = roll, decisions
        self._vouching = vouching or Vouching()
        self._told: dict[int, float] = {}  # incarnation -> when it was last heard, of its reported silence
        self._seen: dict[int, str] = {}  # incarnation -> the latest check's finding, in words

    def spares(self, now: float, incarnation: int) -> bool:
        """True if a member, silent for too long, is to be waited for; it is then spared until the next
        check."""
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
        """Record once for each silence that it is tolerated, and why."""
        if self._told.get(member.incarnation) == round(heard, 3):
            return
        self._told[member.incarnation] = round(heard, 3)
        kind = "shard" if member.kind == "half" else member.kind
        reason = f"silent for {format_seconds(silence)}; {self._seen[member.incarnation]}"
        self._decisions.add(f"{kind} {WAITED_FOR}", _name(member), reason)

    def seen(self, incarnation: int) -> str:
        """Return the latest check's finding, as the end of a line on the member's death."""
        why = self._seen.get(incarnation)
        return f"; {why}" if why else ""


def _name(member: Member) -> str:
    if member.kind == "worker":
        return f"worker {member.place}, incarnation {member.incarnation}"
    return f"the shard of site {member.place}" if member.kind == "site" else f"shard {member.place}"
