"""Frozen values that the protocols of this layer pass around.

A number fences: what carries a lower number than the newest is void. All elements are counted within one
chunk, from its first element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Neighbouring elements of one chunk, from `start` up to `stop`; `stop` is not among them."""

    chunk: int
    start: int
    stop: int


@dataclass(frozen=True, order=True)
class Number:
    """The number of one try of an exchange: the ring's generation, then the tries within that ring.

    Numbers are ordered. Whoever has seen a number refuses whatever comes with a lower one.
    """

    generation: int
    passes: int


@dataclass(frozen=True)
class ExchangeId:
    """One contribution, from its sum to its commit: a set of parameters that one optimizer steps, the
    iteration, and the fragment of the parameters where an iteration exchanges a part of them."""

    step_set: int
    iteration: int
    fragment: int = 0


@dataclass(frozen=True)
class Members:
    """The members of a group in one ring. A new ring is a new value.

    Args:
        generation: of the ring; it rises with each change of members.
        rank: this worker's, from 0, among `names`.
        names: the workers' names in the run, by rank.
        contributor: the name under which the group contributes to a server's log.
    """

    generation: int
    rank: int
    names: tuple[int, ...]
    contributor: int


@dataclass(frozen=True)
class Wait:
    """A wait with a name and an end.

    Args:
        name: what is waited for, as in "the mean of iteration 3".
        deadline: on the monotonic clock, in seconds. A wait that passes it raises DeadlineError.
        whom: names those who are missing, for the error.
    """

    name: str
    deadline: float
    whom: Callable[[], list[str]]


@dataclass(frozen=True)
class Attempt:
    """One try of a round of a group.

    Args:
        number: fences whatever an earlier try has sent.
        members: those of this try.
        settled: True where this ring has confirmed a round already, so that no earlier try is open.
        wait: the deadline of every wait of the try.
    """

    number: Number
    members: Members
    settled: bool
    wait: Wait
