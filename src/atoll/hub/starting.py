"""Shards that have not come yet, and what their processes do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.core.liveness import describe
from atoll.core.units import format_seconds
from atoll.store.members import Membership
from atoll.wire.messages import Hello

_MOST = 4096  # that are kept; of more, the oldest are forgotten


@dataclass(frozen=True)
class _Start:
    hello: Hello
    at: float


class Starting:
    """Knows which shards of `members` are being started: their processes say so first of all. `now` gives the
    hub's seconds."""

    def __init__(self, members: Membership, now: Callable[[], float]) -> None:
        self._members, self._now = members, now
        self._starts: dict[str, _Start] = {}  # by where the process is, in the order in which they came

    def note(self, hello: Hello) -> None:
        """Somebody has asked which run this is; a shard's process says which shard it will be."""
        if (hello.shard < 0 and not hello.site) or not hello.origin.isprintable():
            return
        self._starts[hello.origin] = _Start(hello, self._now())
        if len(self._starts) > _MOST:
            del self._starts[next(iter(self._starts))]

    def missing(self, site: str = "") -> list[str]:
        """Return for each of the run's shards that is not there a line on what is known of it, or on what is
        to be done; for workers of a `site`, on its shard."""
        starts = self._open()
        if site:
            doing = next((self._doing(each) for each in starts if each.hello.site == site), "")
            name = f"the shard of site {site!r}"
            how = doing or f"start `atoll server --site {site}`"
            return [f"{name} {'has not come yet' if doing else 'is not there'}: {how}"]
        return self._members.shards.missing(
            {each.hello.shard: doing for each in starts if (doing := self._doing(each))}
        )

    def _open(self) -> list[_Start]:
        """Those that have not come; the others are forgotten."""
        if self._starts:
            for member in self._members.roll.known.values():
                self._starts.pop(member.origin, None)
        return list(self._starts.values())

    def _doing(self, start: _Start) -> str:
        """What a process does that is being started; empty where it has ended."""
        seconds = format_seconds(self._now() - start.at)
        doing = describe(start.hello.origin)
        return f"its process {doing} and is still starting, for {seconds}" if doing else ""
