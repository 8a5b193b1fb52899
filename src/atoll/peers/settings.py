"""What a node's decisions go by."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.errors import UserError


@dataclass(frozen=True)
class Settings:
    """A node's; the same at all nodes, but for the limits. Raises UserError for what is out of its range.

    `stale_max`: the most iterations that a node's own may be ahead of the global one whose parameters it
    computes on. `room`: how many iterations from the global one on are taken from each sender. The rest are
    bounds, in seconds, of limits that follow what was measured (peers/pace.py).
    """

    stale_max: int = 4
    room: int = 0  # 0: stale_max + 2
    heartbeat: float = 0.5  # the longest that a node says nothing
    silence: tuple[float, float] = (3.5, 15.0)  # of a member, until it counts as gone
    progress: tuple[float, float] = (10.0, 300.0)  # without an iteration of one that the others wait for
    round: tuple[float, float] = (0.05, 10.0)  # for the answers to a round
    backoff: tuple[float, float] = (0.01, 2.0)  # T, after a refusal, before jitter
    rest: tuple[float, float] = (0.2, 30.0)  # for W to rise, before a round and between two
    fetch: tuple[float, float] = (0.05, 10.0)  # until what others hold is asked for (again)
    linger: float = 30.0  # at the end, for those who have not got everything

    def __post_init__(self) -> None:
        if self.stale_max < 0:
            raise UserError(f"stale_max = {self.stale_max}: it is 0 (synchronous) or more")
        if self.room < 0:
            raise UserError(f"room = {self.room}: it is 1 or more, or 0 for stale_max + 2")
        for name in ("silence", "progress", "round", "backoff", "rest", "fetch"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise UserError(f"{name} = ({low:g}, {high:g}): two bounds above 0, in seconds, in order")
        for name in ("heartbeat", "linger"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} = {getattr(self, name):g}: seconds above 0")

    @property
    def slots(self) -> int:
        """Iterations from the global one on that are taken from each sender."""
        return self.room or self.stale_max + 2

    def most_held(self, contributors: int) -> int:
        """The most iterations' contributions that a node holds, own ones too, of so many contributors: those
        from its W on for which there is room, and those below it that the slowest member may still lack; as
        long as a newcomer has no state, those since it was let in."""
        return contributors * (self.slots + 4 * self.stale_max + 4)
