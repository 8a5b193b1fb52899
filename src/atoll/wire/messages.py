"""The messages between workers, hub and shards: a MessagePack header, and for some a payload of raw
little-endian values behind it (a chunk).

Modules hold them by sender: `base`, `hub`, `served`, `shards`, `linktest`, `peers`, `peerviews`. Other
packages import them from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, Union

import msgspec

from atoll.wire import peers
from atoll.wire.base import *
from atoll.wire.hub import *
from atoll.wire.linktest import *
from atoll.wire.lost import LostBlocks as LostBlocks
from atoll.wire.peers import *
from atoll.wire.peerviews import *
from atoll.wire.served import *
from atoll.wire.shards import *
from atoll.wire.tunnel import LinkLost as LinkLost
from atoll.wire.tunnel import LinkOpened as LinkOpened
from atoll.wire.tunnel import OpenLink as OpenLink  # the tunnel has frames of its own besides
from atoll.wire.workerstand import *

AnyMessage: TypeAlias = Union[
    Hello, Welcome, Refused, Heartbeat, Goodbye, Over, WhereAreShards, Shards, Lease, Leased, Fence, Fenced,
    Look, Looked, Ping, Gather, Gathered, Reform, Enter, Reformed, RingNews, JoinGroup, Grouped, InGroup,
    StoreCall, StoreAnswer, LinkPlace, MeasureLink, LinkMeasured, Echo,
    Heartbeats, Heard,
    Setup, SetChunk, Ready, Push, Commit, Committed, Step, Replace, PullMean, Mean, Pull, Parameters,
    PullState, State, StateEnd, Meet, Met, Ends, Ended, Mismatch, Arrive, WantState, GiveState,
    WhoIsMissing, Missing,
    Follow, Staged, Entry,
    Duty, Serves, InSync, LostTouch, Standing, Begin, CopyChunk, Copy, Probe,
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
    """Return the header's bytes."""
    return _encoder.encode(message)


def decode_untrusted(header: bytes | memoryview) -> AnyMessage:
    """Return the message in `header`. Raises WireError, with one line, for anything else."""
    message = decode_with(_decoder, header, "header")
    if isinstance(message, _OF_VIEWS) and (reason := peers.flaw(message)):
        raise WireError(f"no message of this protocol: {reason}")
    return message


def plain_hyperparameters(groups: Sequence[Mapping[str, Any]]) -> Hyperparameters:
    """Return a torch optimizer's param groups in a form to send: without parameters; tensors of one
    element as numbers. Other tensors are left as they are: the optimizer's own process reports that they
    are no numbers."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    try:
        return value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # torch and numpy raise these for several elements
        return value
