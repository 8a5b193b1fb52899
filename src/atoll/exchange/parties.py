"""The two parties of a link, in words for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_NAMED = 4  # shards in one line
_BEHIND = 3  # parties that those shards wait for, in one line


def _as_it_is(line: str) -> str:
    return line


@dataclass(frozen=True)
class Parties:
    """A client and its shards.

    Attributes:
        own: the client: "worker 3", "site 'paris'".
        shard: returns a shard's name by its number: "global shard 1".
        others: the parties for which a shard may wait: "workers".
        deadline: the option that says how long the client waits: "sync.timeout".
        end: what ends with a shard that keeps no journal.
        reads: translates a shard's line into the names that this side uses.
    """

    own: str
    shard: Callable[[int], str]
    others: str
    deadline: str
    end: str
    reads: Callable[[str], str] = _as_it_is

    def lost(self, shard: int, address: str) -> str:
        return f"{self.own} lost {self.shard(shard)} at {address}, and waits for it"

    def lost_for_good(self, shard: int, address: str) -> str:
        return (
            f"{self.own} lost {self.shard(shard)} at {address}: the connection broke off; it keeps no "
            f"journal (--directory), so its end is {self.end}"
        )

    def back(self, shard: int, address: str, seconds: float, what: str = "is back") -> str:
        return f"{self.own}: {self.shard(shard)} at {address} {what}, after {seconds:.1f} s"

    def silent(self, shard: int, address: str, what: str, seconds: float, timeout: float) -> str:
        return (
            f"{self.own} waits for {self.shard(shard)} at {address} on {what}: it has not answered for "
            f"{seconds:.1f} s ({self.deadline} is {timeout:g} s)"
        )

    def late(
        self, who: Sequence[str], behind: Sequence[str], what: str, seconds: float, timeout: float
    ) -> str:
        """Return the line of a wait that has passed its deadline.

        Args:
            who: the shards that are waited for, in words.
            behind: the parties that those shards wait for, in words.
        """
        if behind:
            waits = f"for {what}: {_shards(who)} waits for {_behind(behind)}"
        else:
            waits = f"for {_shards(who)} on {what}"
        return (
            f"{self.own} waited {seconds:.1f} s {waits} (deadline {self.deadline}, {timeout:g} s; set it "
            f"higher if the {self.others} are only slow)"
        )


def under_way(who: Sequence[str], behind: Sequence[str], what: str, seconds: float) -> str:
    """Return a wait that goes on, in words for those who wait for this client."""
    waits = f", which waits for {_behind(behind)}," if behind else ""
    return f"{_shards(who)}{waits} on {what} (for {seconds:.1f} s so far)"


def _shards(who: Sequence[str]) -> str:
    more = f" and {len(who) - _NAMED} more" if len(who) > _NAMED else ""
    return " and ".join(who[:_NAMED]) + more or "a shard"


def _behind(lines: Sequence[str]) -> str:
    return "; ".join(lines[:_BEHIND]) + ("; ..." if len(lines) > _BEHIND else "")
