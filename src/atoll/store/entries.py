"""The lines of the log: what all shards do, in the same order."""

from __future__ import annotations

from typing import Annotated, TypeAlias, Union

import msgspec
from msgspec import Meta

from atoll.core.decoding import decoded
from atoll.core.weighing import KNOWN
from atoll.store.outcomes import StoreError
from atoll.wire.messages import Hyperparameters

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]


class LogEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="e", tag=str.lower
):
    """Base of all lines of the log."""


class Joined(LogEntry, frozen=True):
    """A worker takes part from iteration `clock` on."""

    worker: Count
    incarnation: Count
    clock: Count


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's or group's contribution to a mean, with its weight.

    `counted` is the weight by samples (-1: equal to `weight`), and `basis` says how certain that weight is.
    `alike` is the number of workers behind the contribution. Without these fields only `weight` counts.
    """

    worker: Count
    incarnation: Count
    weight: float
    samples: float
    counted: float = -1.0
    basis: str = KNOWN
    alike: float = 1.0


class Combine(LogEntry, frozen=True):
    """BSP: the mean of these contributions, in order of worker, is the gradient of `iteration`."""

    iteration: Count
    members: list[Member]


class Step(LogEntry, frozen=True):
    """BSP: step the optimizer with `iteration`'s mean times `scale`; for the chunks in `edited`, with what
    worker `editor` has put in the mean's place (-1 where none is edited). Not `accepted`: no step. `nobody`:
    all who had the mean were gone before they said a word."""

    iteration: Count
    scale: float
    hyperparameters: Hyperparameters
    edited: list[Count]
    editor: int
    accepted: bool
    nobody: bool = False


class Apply(LogEntry, frozen=True):
    """SSP, ASP: one worker's contribution, to the step that is open.

    A step is made with the mean of several: the first `opens` it, the last `closes` it, and with each it is
    made anew. `part` is this one's share of the weight so far. `staleness` is in global iterations, and
    `behind` as in wire's Commit.
    """

    worker: Count
    incarnation: Count
    iteration: Count
    weight: float
    samples: float
    part: float
    opens: bool
    closes: bool
    staleness: float
    hyperparameters: Hyperparameters
    behind: Count = 0


class Fenced(LogEntry, frozen=True):
    """Nothing of this worker's incarnation, or of an earlier one, is taken any more."""

    worker: Count
    incarnation: Count


class Idle(LogEntry, frozen=True):
    """SSP: whether this worker waits for others, in a meeting or for its new group, so that they must not
    wait for it."""

    worker: Count
    incarnation: Count
    idle: bool


Entry: TypeAlias = Union[Joined, Combine, Step, Apply, Fenced, Idle]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    """The entry as MessagePack, for wire's Entry."""
    return _encoder.encode(entry)


def decode_entry_untrusted(raw: bytes | memoryview | msgspec.Raw) -> Entry:
    """The entry in `raw`; raises StoreError, with one line, for anything that is none."""
    return decoded(_decoder, raw, StoreError, "no line of a log")
