"""The settings of a node's decisions."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.errors import UserError


@dataclass(frozen=True)
class NodeSettings:
    """Settings of a node; equal at all nodes, but for the limits. Raises UserError for values out of range.

    `stale_max`: the most iterations that a node may compute ahead of the global iteration of its parameters.
    `room`: number of iterations, from the global one on, that are taken from each sender. The rest are
    seconds: bounds of limits that follow measurements (peers/pace.py), but for heartbeat and linger.
    """

    stale_max: int = 4
    room: int = 0  # 0: stale_max + 2
    heartbeat: float = 0.5  # between a node's reports, at most
    silence: tuple[float, float] = (3.5, 15.0)  # of a member, until it counts as gone
    progress: tuple[float, float] = (10.0, 300.0)  # without an iteration of a member that others wait for
    round: tuple[float, float] = (0.05, 10.0)  # for the answers to a round
    backoff: tuple[float, float] = (0.01, 2.0)  # T, after a refusal, before jitter
    rest: tuple[float, float] = (0.2, 30.0)  # for W to rise, before a round and between two
    fetch: tuple[float, float] = (0.25, 10.0)  # until contributions that others hold are requested (again)
    linger: float = 30.0  # at the end, for members that lack contributions

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
        """Number of iterations, from the global one on, that are taken from each sender."""
        return self.room or self.stale_max + 2

    def most_held(self, contributors: int) -> int:
        """Return the most contributions to iterations that a node holds, own ones included.

        From its W on these are all for which there is room; below W, those that the slowest member may still
        lack. While a newcomer has no state, they are those since it was let in.
        """
        return contributors * (self.slots + 4 * self.stale_max + 4)
