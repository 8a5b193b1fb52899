"""The hub's decisions in a run's directory, a line of JSON for each: what `hub.decisions` writes."""

from __future__ import annotations

import msgspec

from atoll.core.events import AnyEvent, Decided

FILE = "decisions.jsonl"  # in the hub's directory
HUB = -1  # the hub's number where an event names a worker


class Decision(msgspec.Struct, frozen=True):
    """A line of the file. `time` is in seconds since the epoch."""

    time: float
    what: str
    choice: str
    reason: str


_decoder = msgspec.json.Decoder(Decision)


def decode_decision(line: bytes) -> AnyEvent:
    """The event that a line tells of; raises msgspec.DecodeError for what is no such line."""
    it = _decoder.decode(line)
    return Decided(time=it.time, worker=HUB, what=it.what, choice=it.choice, reason=it.reason)
