"""The messages between workers, hub and shards: a header, MessagePack by msgspec, and for some a payload of
raw little-endian values behind it (a chunk).

They are in modules by who speaks: `base`, `hub`, `served`, `shards`, `linktest`, `peers`, `peerviews`.
Everybody else imports them from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, Union

import msgspec

from atoll.wire.base import (
    HEADER_BYTES,
    VERSION,
    Count,
    Hello,
    Hyperparameters,
    Message,
    Name,
    Ping,
    Refused,
    Seconds,
    Text,
    Used,
    Weight,
    Welcome,
    WireError,
    decode_with,
)
from atoll.wire.hub import (
    MOST_BEATS,
    Beat,
    Duty,
    Echo,
    Enter,
    Fence,
    Fenced,
    Gather,
    Gathered,
    Goodbye,
    Grouped,
    Heard,
    Heartbeat,
    Heartbeats,
    InGroup,
    InSync,
    JoinGroup,
    Lease,
    Leased,
    LinkMeasured,
    LinkPlace,
    Look,
    Looked,
    LostTouch,
    MeasureLink,
    Over,
    Reform,
    Reformed,
    RingNews,
    Serves,
    Shards,
    StoreAnswer,
    StoreCall,
    ToLauncher,
    WhereAreShards,
)
from atoll.wire.linktest import (
    ClockRead,
    FlowLost,
    LtpOpened,
    OpenLtp,
    OpenTcp,
    ReadClock,
    Taken,
    TcpOpened,
)
from atoll.wire.lost import LostBlocks
from atoll.wire.peers import (
    AbortRound,
    AnswerRound,
    AskJoin,
    AskRound,
    EndRound,
    FetchParts,
    JoinOver,
    NodeReport,
    RefuseRound,
    ScriptsDiffer,
    flaw,
)
from atoll.wire.peerviews import Accept, Accepted, Outbid, Prepare, Promised, ViewDecided
from atoll.wire.served import (
    Arrive,
    Commit,
    Committed,
    Ended,
    Ends,
    GiveState,
    Mean,
    Meet,
    Met,
    Mismatch,
    Missing,
    Parameters,
    Pull,
    PullMean,
    PullState,
    Push,
    Ready,
    Replace,
    SetChunk,
    Setup,
    State,
    StateEnd,
    Step,
    WantState,
    WhoIsMissing,
    run_of,
)
from atoll.wire.shards import (
    Begin,
    Copy,
    CopyChunk,
    CopyPart,
    Entry,
    Follow,
    Probe,
    Staged,
    Standing,
)
from atoll.wire.tunnel import LinkLost, LinkOpened, OpenLink
from atoll.wire.workerstand import WorkerStand, unreadable

__all__ = [
    "HEADER_BYTES",
    "MOST_BEATS",
    "VERSION",
    "AbortRound",
    "Accept",
    "Accepted",
    "AnswerRound",
    "AnyMessage",
    "Arrive",
    "AskJoin",
    "AskRound",
    "Beat",
    "Begin",
    "ClockRead",
    "Commit",
    "Committed",
    "Copy",
    "CopyChunk",
    "CopyPart",
    "Count",
    "Duty",
    "Echo",
    "EndRound",
    "Ended",
    "Ends",
    "Enter",
    "Entry",
    "Fence",
    "Fenced",
    "FetchParts",
    "FlowLost",
    "Follow",
    "Gather",
    "Gathered",
    "GiveState",
    "Goodbye",
    "Grouped",
    "Heard",
    "Heartbeat",
    "Heartbeats",
    "Hello",
    "Hyperparameters",
    "InGroup",
    "InSync",
    "JoinGroup",
    "JoinOver",
    "Lease",
    "Leased",
    "LinkLost",
    "LinkMeasured",
    "LinkOpened",
    "LinkPlace",
    "Look",
    "Looked",
    "LostBlocks",
    "LostTouch",
    "LtpOpened",
    "Mean",
    "MeasureLink",
    "Meet",
    "Message",
    "Met",
    "Mismatch",
    "Missing",
    "Name",
    "NodeReport",
    "OpenLink",
    "OpenLtp",
    "OpenTcp",
    "Outbid",
    "Over",
    "Parameters",
    "Ping",
    "Prepare",
    "Probe",
    "Promised",
    "Pull",
    "PullMean",
    "PullState",
    "Push",
    "ReadClock",
    "Ready",
    "Reform",
    "Reformed",
    "RefuseRound",
    "Refused",
    "Replace",
    "RingNews",
    "ScriptsDiffer",
    "Seconds",
    "Serves",
    "SetChunk",
    "Setup",
    "Shards",
    "Staged",
    "Standing",
    "State",
    "StateEnd",
    "Step",
    "StoreAnswer",
    "StoreCall",
    "Taken",
    "TcpOpened",
    "Text",
    "ToLauncher",
    "Used",
    "ViewDecided",
    "WantState",
    "Weight",
    "Welcome",
    "WhereAreShards",
    "WhoIsMissing",
    "WireError",
    "WorkerStand",
    "decode_untrusted",
    "encode",
    "plain_hyperparameters",
    "run_of",
    "unreadable",
]

AnyMessage: TypeAlias = Union[
    Hello, Welcome, Refused, Heartbeat, Goodbye, Over, WhereAreShards, Shards, Lease, Leased, Fence, Fenced,
    Look, Looked, Ping, Gather, Gathered, Reform, Enter, Reformed, RingNews, JoinGroup, Grouped, InGroup,
    StoreCall, StoreAnswer, LinkPlace, MeasureLink, LinkMeasured, Echo,
    Heartbeats, Heard,
    Setup, SetChunk, Ready, Push, Commit, Committed, Step, Replace, PullMean, Mean, Pull, Parameters,
    PullState, State, StateEnd, Meet, Met, Ends, Ended, Mismatch, Arrive, WantState, GiveState,
    WhoIsMissing, Missing,
    Follow, Staged, Entry,
    Duty, Serves, InSync, LostTouch, Standing, Begin, CopyPart, CopyChunk, Copy, Probe,
    ReadClock, ClockRead, OpenTcp, TcpOpened, OpenLtp, LtpOpened, Taken, FlowLost,
    OpenLink, LinkOpened, LinkLost,
    NodeReport, ScriptsDiffer, AskRound, AnswerRound, RefuseRound, EndRound, AbortRound, FetchParts,
    AskJoin, JoinOver,
    Prepare, Promised, Accept, Accepted, Outbid, ViewDecided,
]  # fmt: skip

_OF_VIEWS = (Prepare, Promised, Accept, Accepted, Outbid, ViewDecided)  # what the hub votes on
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The header's bytes."""
    return _encoder.encode(message)


def decode_untrusted(header: bytes | memoryview) -> AnyMessage:
    """The message in `header`; raises WireError, with one line, for anything that is none."""
    message = decode_with(_decoder, header, "header")
    if isinstance(message, _OF_VIEWS) and (reason := flaw(message)):
        raise WireError(f"no message of this protocol: {reason}")
    return message


def plain_hyperparameters(groups: Sequence[Mapping[str, Any]]) -> Hyperparameters:
    """A torch optimizer's param groups as they can be sent: without parameters; tensors of one element as
    numbers. Other tensors stay what they are: whoever runs the optimizer says that they are no number."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    try:
        return value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # torch's and numpy's word for many elements
        return value
