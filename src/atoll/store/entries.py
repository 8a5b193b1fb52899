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


class WeightedContribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's or group's contribution to a mean, with its weight.

    Attributes:
        counted: the weight by samples; -1 if it equals `weight`.
        basis: how certain the weight by samples is (core/weighing.py).
        alike: the number of workers behind the contribution.
        weights: for each optimizer the weight of its gradients, in place of `weight`; empty: none differs.
    """

    worker: Count
    incarnation: Count
    weight: float
    samples: float
    counted: float = -1.0
    basis: str = KNOWN
    alike: float = 1.0
    weights: list[float] = []


class Combine(LogEntry, frozen=True):
    """BSP: the mean of these contributions, in order of worker, is the gradient of `iteration`."""

    iteration: Count
    members: list[WeightedContribution]


class StepWithMean(LogEntry, frozen=True, tag="step"):
    """BSP: step the optimizer with an iteration's mean.

    Attributes:
        scale: the factor of the mean.
        edited: chunks of which `editor`'s version replaces the mean's.
        editor: the worker; -1 if no chunk is edited or written.
        accepted: False for no step.
        nobody: True if all workers that had the mean were gone before one said how to step.
        optimizer: the optimizer that steps, of the model's.
        stays: True if the mean stays for steps of the model's other optimizers.
        written: chunks that have the values which `editor` has written, before the step.
    """

    iteration: Count
    scale: float
    hyperparameters: Hyperparameters
    edited: list[Count]
    editor: int
    accepted: bool
    nobody: bool = False
    optimizer: Count = 0
    stays: bool = False
    written: list[Count] = []


class Apply(LogEntry, frozen=True):
    """SSP, ASP: one worker's contribution to the open step.

    A step is made with the mean of several contributions: it is made with the first, and made again with each
    later one.

    Attributes:
        part: this contribution's share of the weight so far.
        opens: True for the first contribution to the step.
        closes: True for the last one.
        staleness: in global iterations.
        behind: the worker's own iterations in flight, which the parameters that it computed with lacked.
        optimizer: the optimizer that steps, of the model's; each has an open step of its own.
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
    optimizer: Count = 0


class Fenced(LogEntry, frozen=True):
    """Nothing of this worker's incarnation, or of an earlier one, is taken any more."""

    worker: Count
    incarnation: Count


class Idle(LogEntry, frozen=True):
    """SSP: a worker begins, or ends, to wait for others in a meeting or for its new group.

    While it is idle the others must not wait for it.
    """

    worker: Count
    incarnation: Count
    idle: bool


AnyEntry: TypeAlias = Union[Joined, Combine, StepWithMean, Apply, Fenced, Idle]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def encode_entry(entry: AnyEntry) -> bytes:
    """Return the entry as MessagePack, for wire's Entry."""
    return _encoder.encode(entry)


def decode_entry_untrusted(raw: bytes | memoryview | msgspec.Raw) -> AnyEntry:
    """Return the entry in `raw`. Raises StoreError, with one line, for any other bytes."""
    return decoded(_decoder, raw, StoreError, "no line of a log")
