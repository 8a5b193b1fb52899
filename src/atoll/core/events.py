"""What happens in a run, as data: plain records that observers subscribe to.

Every record carries `time` (seconds since the epoch) and the `worker` that saw it. Nothing here does I/O: a
journal, a display and a report are subscribers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

import msgspec

from atoll.core.memory import MemoryFigures
from atoll.core.texts import shortened, writable


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, tag_field="event"):
    """What every event has."""

    time: float
    worker: int


class Started(Event, frozen=True):
    """A worker has joined its group."""

    workers: int
    strategy: str
    device: str
    pid: int
    groups: int = 1


class Expected(Event, frozen=True):
    """How many steps the run will take, where the script (`session.expect`) or the sampler knows it."""

    steps: int


class StepDone(Event, frozen=True, omit_defaults=True):
    """A worker has finished an iteration.

    `samples` are the worker's own; `seconds` is the wall time since the step before; `waiting` is the part
    of it that was spent blocked on other workers; `bytes_sent` is what this worker sent for it, by the
    collective algorithm's own count. `phases` are the parts of the waiting, in seconds, where it has some:
    "ring" inside the worker's group, "exchange" between groups. Under strategy peers `exchange` is the part
    of `seconds` that the worker's process gave to handing gradients over and taking parameters, and was no
    waiting, and `staleness` by how much its iteration was past the global one that its parameters stood at.
    """

    iteration: int
    samples: float
    seconds: float
    waiting: float
    bytes_sent: int
    phases: dict[str, float] = {}
    exchange: float = 0.0
    staleness: int = 0


class Logged(Event, frozen=True):
    """Values from `session.log`, to be averaged over workers with `weight`."""

    iteration: int
    weight: float
    values: dict[str, float | None]  # None stands for NaN and the infinities, which JSON lacks


class Decided(Event, frozen=True):
    """A choice that Atoll made, with its reason."""

    what: str
    choice: str
    reason: str


class RoundSeen(Event, frozen=True):
    """A synchronisation round of strategy peers has begun, ended or was refused, or something was fetched: as
    Decided, for the journal alone, since there may be one each iteration."""

    what: str
    choice: str
    reason: str


class Regrouped(Event, frozen=True):
    """After its `iteration` the worker shares a ring with `workers` (ranks, with its own); to the shards they
    are `group` together. `grouping` counts the hub's decisions, from 1; `seconds` is how long the move
    took, and `reason` the decision's.
    """

    iteration: int
    grouping: int
    group: int
    workers: list[int]
    seconds: float = 0.0
    reason: str = ""


class LinkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How this end's loss-tolerant link to `peer` is doing, for one connection, or over all of them.

    Rates are in bytes per second, times in seconds; `loss` is the path's share now, and `target` the one that
    is aimed at. Counts are since the beginning: `sent`, `lost`, `retransmitted` are datagrams of this end,
    `repaired` blocks that the code gave back here, `borne` and `filled` blocks of gradients that did not
    come: for now, or for good. `bytes_in` and `bytes_out` are of messages. `reason` is the rate's.
    """

    peer: str
    site: str = ""
    rate: float = 0.0
    estimate: float = 0.0
    rtt: float = 0.0
    min_rtt: float = 0.0
    loss: float = 0.0
    target: float = 0.0
    sent: int = 0
    lost: int = 0
    retransmitted: int = 0
    repaired: int = 0
    borne: int = 0
    filled: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    reason: str = ""


class LinkSeen(LinkFigures, frozen=True, kw_only=True, tag=str.lower, tag_field="event"):
    """The link from `who` ("worker 0", "site paris") to `peer` ("shard 1"), over all its connections.

    `held` is what is held back now as a share of the latest gradient, both as sums of absolute values. An
    event as the others are: a Struct has fields of one base only.
    """

    time: float
    worker: int
    who: str
    held: float = 0.0


class NodeSeen(Event, frozen=True):
    """What a node's CPU side has counted since it began, under strategy peers; told by the first worker of
    its `devices`. `node` is -1 in journals from before nodes had several: the worker's number.

    `applied` are the iterations that it has put into the global parameters; `rounds` the synchronisation
    rounds that it started, `joined` those that it took part in, `refusals` what it was refused; `waits` how
    often its worker waited for the global iteration, for `waited` seconds in all; `staleness` counts the
    applied contributions by how many iterations past their parameters they were, the last for all above.
    """

    node: int = -1
    devices: int = 1
    applied: int = 0
    rounds: int = 0
    joined: int = 0
    refusals: int = 0
    fetched: int = 0
    waits: int = 0
    waited: float = 0.0
    no_room: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    applying: float = 0.0
    overlaying: float = 0.0
    staleness: list[int] = []


class MemorySeen(Event, frozen=True):
    """How a worker's chunked memory has done since it began."""

    figures: MemoryFigures


class Skipped(Event, frozen=True):
    """An iteration was skipped by the policy on NaN and infinities.

    `left_out` names the workers whose contribution alone was skipped. Empty: no worker applied the iteration.
    """

    iteration: int
    reason: str
    left_out: str = ""


class Saved(Event, frozen=True):
    """A checkpoint is whole on disk."""

    iteration: int
    path: str


class Warned(Event, frozen=True):
    """Something that a person should know and that does not stop the run."""

    message: str


class Lost(Event, frozen=True):
    """Part of a worker's records could not be written since the last such event, because the disk was full.

    `events` is how many; `steps` of them were StepDone, whose sums the other figures are. `printed` is in
    bytes of the worker's log.
    """

    events: int = 0
    steps: int = 0
    samples: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    bytes_sent: int = 0
    exchange: float = 0.0
    printed: int = 0


class Failed(Event, frozen=True):
    """A worker ends with an error; `echo` marks one that another worker's end has caused.

    `line` is the innermost line of the script that the error passed through ("train.py:28"). `by_launcher`
    marks what the launcher says in a worker's journal: the hub or a shard was lost, say. `leaving`: the error
    has not ended the worker yet, which leaves its session.
    """

    error: str
    message: str
    traceback: str
    exit_status: int
    echo: bool = False
    line: str = ""
    by_launcher: bool = False
    leaving: bool = False


class Joining(Event, frozen=True):
    """A worker's script has called `atoll.join`, which waits for the other workers."""

    line: str = ""
    pid: int = 0


NO_WORKER = -1  # the `worker` of an event that is of the run, or of hub and shards


class Ended(Event, frozen=True):
    """A worker's script has ended without an error: at its last line, by `sys.exit`, or by KeyboardInterrupt.

    `call` says how where it was not by its last line ("sys.exit"), `line` from where, and `message` is the
    text that `sys.exit` was given. Of a hub or a shard (NO_WORKER) that ends with an error, `call` is its
    name and `message` the error.
    """

    status: int
    call: str = ""
    message: str = ""
    line: str = ""


class Gone(Event, frozen=True):
    """A worker's process has ended, as its parent saw it: with a status, or minus the signal that killed
    it.
    """

    exit_code: int


class ChildEnded(Event, frozen=True):
    """A process that a worker's script has forked by `multiprocessing`, a DataLoader's say, ends by
    `sys.exit`.

    `message` is the text that it was given, and `line` the script's line.
    """

    pid: int
    status: int
    message: str = ""
    line: str = ""


class Finished(Event, frozen=True):
    """A worker has left the session in good order."""

    iteration: int


AnyEvent = Union[
    Started,
    Expected,
    StepDone,
    Logged,
    Decided,
    RoundSeen,
    Regrouped,
    LinkSeen,
    NodeSeen,
    MemorySeen,
    Skipped,
    Saved,
    Warned,
    Lost,
    Failed,
    Finished,
    Joining,
    Ended,
    Gone,
    ChildEnded,
]
Subscriber = Callable[[AnyEvent], None]


class EventBus:
    """Hands each event to every subscriber, in order, on the thread that emits it."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def emit(self, event: AnyEvent) -> None:
        for subscriber in self._subscribers:
            subscriber(event)


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: AnyEvent) -> bytes:
    """One line of JSON, without its end of line. NaN and infinities become null.

    Never raises for what a script put into the event: lone surrogates become escapes, subclasses of str and
    numbers become what they are subclasses of, and other objects become their text.
    """
    try:
        return _encoder.encode(event)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _encoder.encode(_plain(event))


def _plain(value: Any, depth: int = 0) -> Any:
    """Rebuild `value` of what JSON has."""
    if isinstance(value, msgspec.Struct):
        fields = value.__struct_fields__
        return msgspec.structs.replace(
            value, **{name: _plain(getattr(value, name), depth + 1) for name in fields}
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else float(value) if abs(value) < 2**1000 else None
    if isinstance(value, float):
        return float(value)
    if depth > _DEEPEST:
        return _text_of(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each, depth + 1) for each in value]
    return _text_of(value)


_DEEPEST = 16  # levels of lists and mappings in an event
_MOST_TEXT = 1000  # characters of an object that is no JSON


def _key(key: Any) -> str:
    return writable(key) if isinstance(key, str) else _text_of(key)


def _text_of(value: Any) -> str:
    try:
        return shortened(repr(value), _MOST_TEXT)
    except Exception:  # the object's own code
        return f"<{type(value).__name__}>"


def decode(line: bytes) -> AnyEvent:
    """The event that `encode` wrote; raises msgspec.DecodeError for anything else."""
    return _decoder.decode(line)
