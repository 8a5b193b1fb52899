"""The sync points of members that hold one model: how many are past, and one call in which all members meet.

Members count sync points alike. A fetch names the count at which its member stands; a holder that has not
reached that count answers when it has. Source: docs/memory.md, "Members".
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch

from atoll.core.errors import DeadlineError, MismatchError, RunError
from atoll.core.scriptline import waiting_line
from atoll.core.stands import Stand, are_consistent, call, decode_stand, describe_mismatch, encode_stand
from atoll.memory.members import Members

CODES = 2**20  # number of codes of calls and words: sums of their squares over the members are exact
_DEADLINE = 600.0  # seconds until a holder that is behind must have caught up
_STEPS = 2**20  # steps are compared modulo this: their sum over the members is exact
_OF_STEP = re.compile(r"(\bstep(?:\(\))?) \d+")
_ASKS = re.compile(r"([^(]*)\((.*)\)")  # a call and its arguments


class SyncPoints:
    """The sync points that this member has passed.

    Args:
        chunks: the number of the model's chunks.

    Attributes:
        count: sync points that are past.
        steps: optimizer steps that are past.
        most_words: the longest vector that members sum in a call; equal on all members.
    """

    def __init__(self, members: Members, chunks: int) -> None:
        self._members = members
        self.count = 0
        self.steps = 0
        self.most_words = 0
        self._changed = [0] * chunks  # the count at which a chunk's values were stepped last
        self._condition = threading.Condition()
        self._is_closed = False

    def passed(self, changed: Sequence[int], *, stepped: bool) -> None:
        """Count a sync point, at which the values of `changed` chunks were stepped."""
        with self._condition:
            self.count += 1
            self.steps += stepped
            for chunk in changed:
                self._changed[chunk] = self.count
            self._condition.notify_all()

    def wait_until(self, count: int, chunk: int, words: str) -> None:
        """Wait until `count` sync points are past.

        Args:
            words: the chunk, for people.

        Raises RunError if this member has left, or has stepped the chunk since; DeadlineError after ten
        minutes.
        """
        rank = self._members.rank
        with self._condition:
            if not self._condition.wait_for(lambda: self.count >= count or self._is_closed, _DEADLINE):
                raise DeadlineError(
                    f"worker {rank} was asked for {words} at a point of the script that it "
                    f"has not reached in {_DEADLINE:.0f} s; it stands still, or its script differs"
                )
            if self._is_closed:
                raise RunError(f"worker {rank} has gone: it holds its part of the model no more")
            if count < self._changed[chunk]:
                raise RunError(
                    f"worker {rank} was asked for {words} as they were before its latest "
                    "optimizer.step(): a forward or backward of another worker was not over by then; let all "
                    "workers end their backward before optimizer.step()"
                )

    def close(self) -> None:
        """Let `wait_until` raise from now on: this member answers nobody any more."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def agree(
        self, told: Sequence[float], what: str, where: Callable[[], Stand] | None = None
    ) -> list[float]:
        """Sum the numbers in `told` over all members, which must be in one call at one step.

        Args:
            what: the call, in words.
            where: returns this member's place in the script; by default the place is the call.

        Raises MismatchError if members are in different calls, and RunError if they are at different steps.
        """
        where = where or partial(self._in_call, what)
        step, call = self.steps % _STEPS, _call_of(what)
        head = float(step), float(call), float(call**2)
        # The length is the same for all calls: otherwise members in unlike calls would wait for each other.
        vector = torch.zeros(len(head) + max(len(told), self.most_words), dtype=torch.float64)
        vector[: len(head) + len(told)] = torch.tensor([*head, *told], dtype=torch.float64)
        self._members.meet(vector, what, where)
        steps, calls, squares = vector[: len(head)].tolist()
        off = steps / self._members.count - step
        if off or calls**2 != self._members.count * squares:
            self._refuse_mismatch(where(), what, off)
        return vector[len(head) : len(head) + len(told)].tolist()

    def _in_call(self, what: str) -> Stand:
        asked = _ASKS.fullmatch(_OF_STEP.sub(r"\1", what))
        name, asks = (what, "") if asked is None else asked.groups()
        return call(name, waiting_line(), asks=asks, step=self.steps)

    def _refuse_mismatch(self, own: Stand, what: str, off: float) -> NoReturn:
        """Raise the error for members in different calls, naming each member's place."""
        said = self._members.gather(encode_stand(own), "the places of all members")
        stands = {member: decode_stand(raw) for member, raw in enumerate(said)}
        if are_consistent(stands.values()):
            raise RunError(
                f"{what}: the workers are at different steps (this one at {self.steps}, on average "
                f"{self.steps + off:g}); each must call optimizer.step() equally often"
            )
        raise MismatchError(describe_mismatch(stands))


def code_of(word: str) -> int:
    """Return a number that tells words apart.

    Members have one word if the square of the sum of their codes is as many times the sum of the squares as
    there are members. Both sums are exact.
    """
    return zlib.crc32(word.encode()) % CODES


def _call_of(what: str) -> int:
    """Return a number that tells calls apart by their words for people, without the number of the step."""
    return code_of(_OF_STEP.sub(r"\1", what))
