"""Shards that have announced their start and not joined yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.core.liveness import describe
from atoll.core.units import format_seconds
from atoll.store.members import Membership
from atoll.wire.messages import Hello

_MOST = 4096  # starts that are retained; the oldest are dropped


@dataclass(frozen=True)
class _Start:
    hello: Hello
    at: float


class Starting:
    """Tracks announced starts of shards of `members`. `now` returns the hub's time in seconds."""

    def __init__(self, members: Membership, now: Callable[[], float]) -> None:
        self._members, self._now = members, now
        self._starts: dict[str, _Start] = {}  # by the process's place, in order of arrival

    def note(self, hello: Hello) -> None:
        """Note a guest's Hello, if it announces a shard."""
        if (hello.shard < 0 and not hello.site) or not hello.origin.isprintable():
            return
        self._starts[hello.origin] = _Start(hello, self._now())
        if len(self._starts) > _MOST:
            del self._starts[next(iter(self._starts))]

    def missing(self, site: str = "") -> list[str]:
        """Return one line for each missing shard, with its process's state or the command that starts it;
        with `site`, for that site's shard alone."""
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
        """Starts whose processes have not joined; joined ones are forgotten."""
        if self._starts:
            for member in self._members.roll.known.values():
                self._starts.pop(member.origin, None)
        return list(self._starts.values())

    def _doing(self, start: _Start) -> str:
        """Describe a starting process; empty if it has ended."""
        seconds = format_seconds(self._now() - start.at)
        doing = describe(start.hello.origin)
        return f"its process {doing} and is still starting, for {seconds}" if doing else ""
