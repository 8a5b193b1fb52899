"""Messages between nodes under strategy `peers`: reports, rounds, requests for missing contributions, and
views.

Every count means "all numbers below": a node that holds a member's iterations up to 7 reports 8. Source:
docs/peers.md.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, Union

import msgspec
from msgspec import Meta

from atoll.wire.base import Count, Message, Name, Text
from atoll.wire.peerviews import (
    NODES,
    Accept,
    Life,
    Prepare,
    Promised,
    Report,
    View,
    ViewDecided,
    ViewMessage,
    flaw_of_report,
    flaw_of_view,
)
from atoll.wire.workerstand import WorkerStand

WITNESS = -1  # the hub's node id, in views of two: it votes and holds nothing

Stream: TypeAlias = Literal["iterations", "meetings"]


class Key(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """A node's contribution: the `number`-th of a stream, which is an iteration's gradients or the node's
    part in a meeting. An incarnation makes one for each number."""

    stream: Stream
    number: Count
    life: Life


class RoundId(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """A synchronisation round. Of two that meet the lower wins: the lesser iteration, then the lower node."""

    iteration: Count
    node: Count
    number: Count  # of the starter's rounds


class ScriptWaits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node's script waits at `stand`: in its `meeting`-th meeting, at iteration `at`, or for global
    iteration `least`.

    See Meet in wire/device.py for `at`.
    """

    stand: WorkerStand
    meeting: Count | None = None
    at: Count = 0
    least: Count | None = None


class NodeReport(Message, frozen=True):
    """A node's progress, sent when an iteration has become whole, and at least each heartbeat.

    Reports ride on all messages, and acknowledge held contributions. A node that takes part in a change of
    the view repeats its former `held`. `finished`: the node's script has ended and makes no further
    iteration. Not `whole`: the node is a newcomer without a state yet. `waits` says for what the script
    waits; None: it computes.
    """

    report: Report
    finished: bool = False
    whole: bool = True
    waits: ScriptWaits | None = None


class ScriptsDiffer(Message, frozen=True):
    """The members' scripts stand at inconsistent places, and the run ends: `line` names the places."""

    report: Report
    line: Text


class AskRound(Message, frozen=True):
    """a3: a request to take part; the report has the starter's iteration and holdings."""

    report: Report
    round: RoundId


class AnswerRound(Message, frozen=True):
    """a4: the sender takes part. Contributions that it holds and the starter lacks are sent separately."""

    report: Report
    round: RoundId


class RefuseRound(Message, frozen=True):
    """a4: a refusal, since the sender takes part in another node's round."""

    report: Report
    round: RoundId


class EndRound(Message, frozen=True):
    """a6: all have answered, and `iteration`, the least among them, is the new global iteration. `reports`
    are the answers, which also acknowledge contributions to every receiver."""

    report: Report
    round: RoundId
    iteration: Count
    reports: Annotated[list[Report], Meta(max_length=NODES)]


class AbortRound(Message, frozen=True):
    """The starter gives its round up."""

    report: Report
    round: RoundId


class FetchParts(Message, frozen=True):
    """A request for missing contributions; the receiver sends those that it holds."""

    report: Report
    keys: Annotated[list[Key], Meta(min_length=1, max_length=NODES)]


class AskJoin(Message, frozen=True):
    """From a node in no view: a request to be in the next. Answered by ViewDecided, once it is in one."""

    node: Count
    token: Name
    address: Name


class JoinOver(Message, frozen=True):
    """To a node that asks to join: it was in a view under this token already, and was removed. It must ask
    again under another token."""

    token: Name


PeerMessage: TypeAlias = Union[
    NodeReport,
    ScriptsDiffer,
    AskRound,
    AnswerRound,
    RefuseRound,
    EndRound,
    AbortRound,
    FetchParts,
    AskJoin,
    JoinOver,
    ViewMessage,
]


def flaw(message: PeerMessage) -> str:
    """Return why a node's message makes no sense in any run; empty if it may.

    Types bound each number; this checks which numbers and lives cannot stand together.
    """
    views: list[View] = []
    if isinstance(message, (Prepare, Accept, ViewDecided)):
        views.append(message.view)
    if isinstance(message, Accept):
        views.append(message.next)
    elif isinstance(message, Promised) and message.accepted is not None:
        views.append(message.accepted[1])
    report: Report | None = getattr(message, "report", None)
    reports = [] if report is None else [report]
    if isinstance(message, EndRound):
        reports += message.reports
    reasons = [*map(flaw_of_view, views), *map(flaw_of_report, reports)]
    if isinstance(message, ScriptsDiffer) and not (message.line.strip() and message.line.isprintable()):
        reasons.append("an empty or unprintable line on where scripts stand")
    return next(filter(None, reasons), "")
