"""Events of a run, as plain records for subscribers such as a journal, a display and a report.

Every record carries its `time` (seconds since the epoch) and the `worker` that saw it. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union

import msgspec

from atoll.core.memory import MemoryFigures
from atoll.core.texts import shortened, writable

_FromZero = Annotated[float, msgspec.Meta(ge=0)]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, tag_field="event"):
    """The fields of every event."""

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
    """The number of steps that the run will take, from `session.expect` or the sampler."""

    steps: int


class StepDone(Event, frozen=True, omit_defaults=True):
    """A worker has finished an iteration.

    Attributes:
        iteration: number of the iteration.
        samples: samples of this worker.
        seconds: wall time since the previous step.
        waiting: seconds of that spent blocked on other workers.
        bytes_sent: bytes that this worker sent, by the collective algorithm's count.
        phases: seconds of waiting by part, if it has parts: "ring" inside the worker's group, "exchange"
            between groups.
        exchange: strategy peers: seconds of work to hand gradients over and to take parameters.
        staleness: strategy peers: iterations by which the worker was ahead of the global iteration of its
            parameters.
    """

    iteration: int
    samples: float
    seconds: float
    waiting: float
    bytes_sent: int
    phases: dict[str, float] = {}
    exchange: float = 0.0
    staleness: int = 0


class SamplesCounted(Event, frozen=True, omit_defaults=True):
    """The number of samples of all workers in iterations that count, as far as this worker knows.

    Survivors report with this event the samples of a worker that dies before it has reported its last steps.

    Attributes:
        loaded: time of the latest load of a checkpoint, which sets the count back; equal on all workers. 0:
            none was loaded.
        begin: the count up to which this worker has reported before.
        end: the count now.
        whole_at: the time up to which `end` has every iteration that counts; 0: unknown.
        partial: True if this worker cannot know the count after an iteration, so that `end` lacks samples.
        ends: True if this worker has reported all of its own steps.
    """

    loaded: _FromZero = 0.0
    begin: _FromZero = 0.0
    end: _FromZero = 0.0
    whole_at: _FromZero = 0.0
    partial: bool = False
    ends: bool = False


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


class SharesChosen(Decided, frozen=True):
    """A choice of each worker's samples of a global batch, with its speed in samples a second, by worker."""

    parts: dict[int, int]
    speeds: dict[int, float]


class RoundSeen(Event, frozen=True):
    """A synchronisation round of strategy peers began, ended or was refused, or a contribution was fetched.

    For the journal alone, since there may be one each iteration.
    """

    what: str
    choice: str
    reason: str


class Regrouped(Event, frozen=True):
    """A worker has moved to another group.

    Attributes:
        iteration: the last iteration before the move.
        grouping: number of the hub's decision, from 1.
        group: the group's number at the shards.
        workers: ranks of the group's workers, including this one.
        seconds: duration of the move.
        reason: the reason for the decision.
    """

    iteration: int
    grouping: int
    group: int
    workers: list[int]
    seconds: float = 0.0
    reason: str = ""


class LinkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of this end's loss-tolerant link to `peer`, for one connection or the sum of several.

    Counts are since the beginning.

    Attributes:
        peer: the other end.
        site: the site of the other end.
        rate: rate in use, bytes per second.
        estimate: estimated rate of the path, bytes per second.
        rtt: round-trip time, seconds.
        min_rtt: least round-trip time, seconds.
        loss: present share of lost datagrams.
        target: share of lost datagrams that the sender aims at.
        sent: datagrams sent from this end.
        lost: of these, lost ones.
        retransmitted: datagrams sent again.
        repaired: blocks recovered here from parity.
        borne: lost blocks of gradients within `link.fill_above`, which are not replaced.
        filled: lost blocks of gradients beyond it, replaced as `link.fill` says.
        bytes_in: bytes of messages received.
        bytes_out: bytes of messages sent.
        reason: reason for the rate.
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

    `held` is the size of the residuals relative to the latest gradient, both as sums of absolute values. The
    fields of Event are repeated, since a Struct cannot have two bases with fields.
    """

    time: float
    worker: int
    who: str
    held: float = 0.0


class NodeSeen(Event, frozen=True):
    """Figures of a node's CPU side since its beginning, reported by the node's first worker (peers).

    Attributes:
        node: the node's number; -1 in journals of older versions, where it equals the worker's number.
        devices: number of the node's devices.
        applied: iterations applied to the global parameters.
        rounds: synchronisation rounds that the node started.
        joined: rounds that the node took part in.
        refusals: refused rounds.
        fetched: contributions fetched from other nodes.
        waits: waits of the worker for the global iteration.
        waited: seconds of these waits.
        no_room: contributions for which there was no room.
        bytes_in: bytes received from nodes.
        bytes_out: bytes sent to nodes.
        applying: seconds spent on steps.
        overlaying: seconds spent on local parameters.
        staleness: applied contributions by the age of their parameters in iterations; the last entry counts
            all above.
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
    """The figures of a worker's chunked memory since its beginning."""

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
    """A message for the user that does not stop the run."""

    message: str


class Lost(Event, frozen=True):
    """Part of a worker's records could not be written since the last such event, because the disk was full.

    `events` is the number of lost events, and `steps` the number of StepDone among them; `samples` to
    `exchange` are sums over these steps. `printed` is in bytes of the worker's log.
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
    """A worker ends with an error.

    Attributes:
        echo: another worker's end has caused the error.
        line: the innermost line of the script that the error passed through ("train.py:28").
        by_launcher: the launcher has written the event into the worker's journal, for a lost hub or shard.
        leaving: the worker still leaves its session.
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


NO_WORKER = -1  # the `worker` of an event of the run, a hub or a shard


class Ended(Event, frozen=True):
    """A worker's script has ended without an error: at its last line, by `sys.exit`, or by KeyboardInterrupt.

    `call` names the way if it was not the last line ("sys.exit"), `line` is the script's line, and `message`
    the text given to `sys.exit`. For a hub or a shard (NO_WORKER) that ends with an error, `call` is its name
    and `message` the error.
    """

    status: int
    call: str = ""
    message: str = ""
    line: str = ""


class Gone(Event, frozen=True):
    """A worker's process has ended; `exit_code` is its status, or minus the signal that killed it."""

    exit_code: int


class ChildEnded(Event, frozen=True):
    """A process of `multiprocessing`, such as a DataLoader's, that a worker's script has forked calls
    `sys.exit`.

    `message` is the text given to `sys.exit`, and `line` the script's line.
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
    SamplesCounted,
    Logged,
    Decided,
    SharesChosen,
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

    @property
    def is_heard(self) -> bool:
        """True if anybody has subscribed."""
        return bool(self._subscribers)

    def emit(self, event: AnyEvent) -> None:
        for subscriber in self._subscribers:
            subscriber(event)


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: AnyEvent) -> bytes:
    """Return an event as one line of JSON, without its end of line. NaN and infinities become null.

    Never raises for values of a script: lone surrogates become escapes, instances of subclasses of str and
    numbers become plain ones, and other objects become their text.
    """
    try:
        return _encoder.encode(event)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _encoder.encode(_plain(event))


def _plain(value: Any, depth: int = 0) -> Any:
    """Return `value` rebuilt from types that JSON has."""
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
    """Return the event that `encode` wrote; raises msgspec.DecodeError for other lines."""
    return _decoder.decode(line)
