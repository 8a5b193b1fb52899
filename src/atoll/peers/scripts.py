"""Detect members of `peers` whose scripts wait for each other in vain."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from atoll.core.stands import USE, describe_mismatch
from atoll.wire.peers import NodeReport, ScriptWaits
from atoll.wire.peerviews import Life


@dataclass(frozen=True)
class Script:
    """The state of a member's script, as last reported.

    The script waits (`waits`). It has contributed all iterations below `iteration` and attended all meetings
    below `met`. `first` is its first iteration in the run.
    """

    iteration: int
    met: int
    waits: ScriptWaits
    first: int = 0


def mismatch(scripts: Mapping[Life, Script | None], newcomers: Collection[Life]) -> str:
    """Return the line that names each script's place if the scripts wait in vain, else an empty string.

    Scripts wait in vain if every member waits (None: a member computes) and two members block each other. One
    of the two waits in a meeting to which the other has not come. The other waits for an iteration that the
    first makes only after the meeting. Neither wait can end without the other, so old reports are safe to
    compare.

    A newcomer never counts as one of the two: its script may be anywhere, and a newcomer that holds others up
    is removed.
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
    """True if `one` waits in a meeting for `other`, and `other` waits for an iteration of `one`."""
    meeting, wants = one.waits, other.waits.least
    if meeting.meeting is None or wants is None:
        return False
    if meeting.stand.stand.name.startswith(USE):
        return False  # a worker that waits for an iteration comes to the meeting
    is_party = other.first <= meeting.at
    return is_party and other.met <= meeting.meeting and wants > one.iteration


class Scripts:
    """The other members' scripts, as last reported; None: the script computes."""

    def __init__(self) -> None:
        self._scripts: dict[Life, Script | None] = {}

    def keep(self, others: Collection[Life]) -> None:
        """Forget all but these members."""
        self._scripts = {life: script for life, script in self._scripts.items() if life in others}

    def note(self, life: Life, message: NodeReport, first: int) -> bool:
        """Store a member's report; return whether its script has begun or ceased to wait. `first` is the
        member's first iteration."""
        before, script = self._scripts.get(life), _script_of(message, first)
        self._scripts[life] = script
        return (before is None) != (script is None)

    def in_meetings(self) -> set[Life]:
        """Return the members whose scripts wait in a meeting."""
        return {life for life, script in self._scripts.items() if script and script.waits.meeting is not None}

    def mismatch(
        self, others: Collection[Life], own: NodeReport, first: int, newcomers: Collection[Life]
    ) -> str:
        """Return `mismatch` of all `others` and this node, whose report is `own`."""
        scripts = {life: self._scripts.get(life) for life in others}
        scripts[own.report.life] = _script_of(own, first)
        return mismatch(scripts, newcomers)


def _script_of(message: NodeReport, first: int) -> Script | None:
    report, waits = message.report, message.waits
    return None if waits is None else Script(report.iteration, report.met, waits, first)
