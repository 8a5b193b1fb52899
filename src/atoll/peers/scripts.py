"""Where the members' scripts stand, and whether they wait for one another in vain."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from atoll.core.stands import describe_mismatch
from atoll.wire.peers import ScriptWaits
from atoll.wire.peerviews import Life


@dataclass(frozen=True)
class Script:
    """A member's script, as the member said at some time: it waits (`waits`), had contributed all iterations
    below `iteration`, and been in all meetings below `met`. `first` is its first iteration in the run."""

    iteration: int
    met: int
    waits: ScriptWaits
    first: int = 0


def mismatch(scripts: Mapping[Life, Script | None], newcomers: Collection[Life]) -> str:
    """The line that says who stands where, if the members' scripts wait for one another in vain; else empty.

    All members must wait (None: one computes), and among those that are no newcomers one must wait in a
    meeting to which another never comes: that one waits for an iteration which the first makes only after the
    meeting, and had not come to the meeting by then. Both words may be old: neither wait can have ended
    since, for each needs the other. A newcomer's script may be anywhere: it is removed where it holds others
    up.
    """
    if None in scripts.values():
        return ""
    known = {life: each for life, each in scripts.items() if each is not None}
    old = [each for life, each in known.items() if life not in newcomers]
    if not any(_in_vain(one, other) for one in old for other in old):
        return ""
    stands = sorted((each.waits.stand for each in known.values()), key=lambda stand: stand.worker)
    return describe_mismatch({each.worker: each.stand for each in stands})


def _in_vain(one: Script, other: Script) -> bool:
    """Whether `one` waits in a meeting for `other`, which waits for an iteration of `one`'s."""
    meeting, wants = one.waits, other.waits.least
    if meeting.meeting is None or wants is None:
        return False
    is_party = other.first <= meeting.at
    return is_party and other.met <= meeting.meeting and wants > one.iteration
