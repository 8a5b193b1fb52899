"""The pulls that wait at a shard, and the decision when each may be answered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, Union

import msgspec

from atoll.store.shard import ShardState
from atoll.wire import messages

AnyPull: TypeAlias = Union[messages.Pull, messages.PullMean]


@dataclass(frozen=True)
class PullRequest:
    """A pull and its asker.

    Attributes:
        member: tells the members of a group apart.
    """

    worker: int
    pull: AnyPull
    member: int = 0

    @property
    def at(self) -> int:
        """The iteration whose mean is asked for, or the number of iterations that the parameters are to
        have."""
        return self.pull.clock if isinstance(self.pull, messages.Pull) else self.pull.iteration


class Pulls:
    """The pulls that wait for `state`: the latest of each kind of each asker.

    They are no part of the state: after a restart they are asked again.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._waiting: dict[tuple[type, int, int, int], PullRequest] = {}

    def ask(self, asked: PullRequest) -> bool:
        """True if a pull may be answered now; if not, `take_ready` returns it later.

        If it never can be, it is not kept, and `ShardState.refusal` says why. A worker that has just joined
        asks with clock 0, and is answered when it takes part; `clock_of` is then the iteration that it begins
        with. A late duplicate of an earlier pull displaces nothing.
        """
        pull = asked.pull
        key = (type(pull), asked.worker, pull.incarnation, asked.member)
        waiting = self._waiting.get(key)
        newest = waiting is None or waiting.at <= asked.at
        if self._is_ready(asked):
            if newest:
                self._waiting.pop(key, None)
            return True
        if newest and self._may_come(asked):
            same = waiting is not None and waiting.at == asked.at
            self._waiting[key] = _both(waiting, asked) if waiting is not None and same else asked
        return False

    def _may_come(self, asked: PullRequest) -> bool:
        """True if the requested data may become available later."""
        state, pull = self._state, asked.pull
        if isinstance(pull, messages.PullMean) and not state.awaits_mean(pull.iteration):
            return False
        return not state.refusal(asked.worker, pull.incarnation)

    def _is_ready(self, asked: PullRequest) -> bool:
        state, pull = self._state, asked.pull
        if not self._takes_part(asked):
            return False
        member = state.members[asked.worker]
        if isinstance(pull, messages.PullMean):
            return asked.worker in state.mean_of and pull.iteration == state.combined
        if state.consistency == "bsp":
            return state.steps >= pull.clock
        if member.clock < pull.clock:
            return False
        # Compared by the worker's own clock, which the answer has; a late duplicate's is behind it.
        return state.consistency == "asp" or all(
            each.idle or each.clock >= member.clock - state.slack for each in state.members.values()
        )

    def take_ready(self) -> list[PullRequest]:
        """Return the pulls that may be answered now: call it after each entry. Drops those of fenced
        workers."""
        for key in [key for key in self._waiting if self._state.refusal(*key[1:3])]:
            del self._waiting[key]
        return [asked for asked in list(self._waiting.values()) if self.ask(asked)]

    def waiting(self) -> list[PullRequest]:
        """Return the pulls that are not answered yet."""
        return list(self._waiting.values())

    def of_newcomers(self) -> list[PullRequest]:
        """Return the pulls that are not answered yet since their workers have yet to enter."""
        return [asked for asked in self._waiting.values() if not self._takes_part(asked)]

    def _takes_part(self, asked: PullRequest) -> bool:
        member = self._state.members.get(asked.worker)
        return member is not None and member.incarnation == asked.pull.incarnation


def _both(waiting: PullRequest, asked: PullRequest) -> PullRequest:
    """Return the newer pull, with the chunks of both if they ask for equal shares.

    An empty list of chunks, in either, means all of them.
    """
    one, other = waiting.pull, asked.pull
    if (one.share, one.shares) != (other.share, other.shares):
        return asked
    named = [*dict.fromkeys([*one.chunks, *other.chunks])]
    return replace(
        asked, pull=msgspec.structs.replace(other, chunks=named if one.chunks and other.chunks else [])
    )
