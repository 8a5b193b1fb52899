"""Messages between shards: between the log and its followers, and between a primary and its standby."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.wire.base import Count, Hyperparameters, Message, Name


class Follow(Message, frozen=True):
    """A shard asks the log for its entries from `after` on, as they come."""

    shard: Count
    after: Count


class Staged(Message, frozen=True):
    """A shard tells the log that a contribution's chunks are all there."""

    shard: Count
    worker: Count
    incarnation: Count
    iteration: Count


class Entry(Message, frozen=True):
    """A line of the log. `entry` is a store.entries.Entry, as MessagePack."""

    sequence: Count
    entry: msgspec.Raw


class Standing(Message, frozen=True):
    """A standby to its primary: it holds the first `count` messages of `stream` (empty: of none)."""

    stream: Name
    count: Count


class Begin(Message, frozen=True):
    """The first message of a stream. The payload is the primary's state (server/recovery.py: ShardImage),
    whose `parts` follow as Copy, and its chunks as CopyChunk, while messages go on. Without payload the
    primary has not been set up, and all messages that it received follow."""

    stream: Name
    parts: Count = 0
    hyperparameters: Hyperparameters = []


class CopyChunk(Message, frozen=True):
    """A chunk as it is at this place of the stream: the payload is its values (`key` empty), or else one
    tensor of its optimizer. The message with the values comes last, and has the slots' numbers; `present`
    and `open_slots` are of an open step, if there is one."""

    chunk: Count
    key: Name = ""
    slots: list[dict[str, Any]] = []
    is_open: bool = False
    present: list[bool] = []
    open_slots: list[dict[str, Any]] = []


class Copy(Message, frozen=True):
    """A message that the primary received, or a part of its state, with its payload: a record of
    server/records.py, as MessagePack."""

    record: msgspec.Raw


class Probe(Message, frozen=True):
    """A check by a primary that has sent nothing for long that its standby still is one: a message of the
    stream with no other meaning."""
