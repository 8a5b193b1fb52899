"""The shards that follow shard 0's log: log entries for them, and their messages for a later generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from atoll.server.peers import Peers
from atoll.store.entries import AnyEntry, encode_entry
from atoll.store.log import CommitLog
from atoll.wire import messages
from atoll.wire.messages import Count

GENERATION = 2**32  # sequence numbers of one generation
KEPT = 10_000  # entries that a follower with a lost connection may still request


def sequence_of(generation: int, index: int) -> int:
    """Sequence number of entry `index` of a generation of the log."""
    return generation * GENERATION + index


class Followed(Protocol):
    """State of the log for its followers. `follows` maps each shard to the generation that it follows;
    `ahead` has messages of shards that were set up before this one."""

    generation: Count
    log: CommitLog | None
    follows: dict[int, Count]
    ahead: list[tuple[Count, messages.AnyMessage]]


class Followers:
    """Followers of the log in `state`."""

    def __init__(self, state: Followed, peers: Peers) -> None:
        self._state, self._peers = state, peers

    def greet(self, shard: int) -> None:
        """Reset a shard that has connected, perhaps again. Its Follow says from which entry on; an entry sent
        earlier would overtake those that the shard lacks."""
        self._state.follows.pop(shard, None)

    def take_ahead(self) -> Iterator[tuple[int, messages.AnyMessage]]:
        """Take the messages that were retained for the generation that begins."""
        ahead, self._state.ahead = self._state.ahead, []
        return iter(ahead)

    def follow(self, shard: int, message: messages.Follow) -> str:
        """Send a shard the entries that it asks for; returns why it gets none."""
        generation, after = divmod(message.after, GENERATION)
        if generation > self._state.generation:
            self._hold(shard, message)
            return ""
        self._state.follows[shard] = generation
        return self._send_from(shard, after) if generation == self._state.generation else ""

    def counts(self, shard: int, message: messages.Staged) -> bool:
        """True if a shard's Staged is of this generation. One of the next generation is retained."""
        if any(held == shard for held, _ in self._state.ahead):
            self._hold(shard, message)
            return False
        return self._state.follows.get(shard) == self._state.generation

    def _hold(self, shard: int, message: messages.AnyMessage) -> None:
        if len(self._state.ahead) < KEPT:
            self._state.ahead.append((shard, message))

    def _send_from(self, shard: int, after: int) -> str:
        assert self._state.log is not None
        try:
            lines = self._state.log.lines.after(after)
        except ValueError as error:
            return str(error)
        for index, entry in lines:
            self._send_line(shard, index, entry)
        return ""

    def send(self, index: int, entry: AnyEntry) -> None:
        """Send a new entry to all followers of this generation."""
        for shard, generation in self._state.follows.items():
            if generation == self._state.generation:
                self._send_line(shard, index, entry)

    def _send_line(self, shard: int, index: int, entry: AnyEntry) -> None:
        sequence = sequence_of(self._state.generation, index)
        line = messages.Entry(sequence=sequence, entry=msgspec.Raw(encode_entry(entry)))
        self._peers.send(self._peers.shard(shard), line)
