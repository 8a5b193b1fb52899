"""Rules on lost parts of a run: the authority that declares a loss, and the consequences of a launch's
end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from atoll.core.config import SERVED
from atoll.core.errors import GivenUpError
from atoll.core.events import Failed
from atoll.launch.processes import signal_name


class Rules(Protocol):
    """The rules of a strategy's runs. `said` are the errors reported by the launch's workers, `code` the
    end of its process."""

    # True if the hub declares losses. Otherwise the run needs no hub once it has begun.
    hub_judges: bool
    # True if a restarted worker cannot go on once the others have finished.
    newcomers_may_be_late: bool
    # True if a restarted worker becomes the last in the workers' own order.
    newcomers_are_last: bool

    def how_lost(self, code: int, said: Sequence[Failed], began: float) -> str:
        """Return in words how a launch was lost; its life began at `began`, -inf for the first."""

    def is_given_up(self, code: int, said: Sequence[Failed], by_hub: bool) -> bool:
        """True if a launch has ended because others had given it up (`by_hub`: the hub had)."""

    def excuses(self, failure: Failed, devices: int) -> bool:
        """True if an error of a worker, of a launch of so many, ends its launch alone."""


class HubRules:
    """The hub declares losses: with a parameter server, and in rings.

    In a ring only the workers hold the model: a restarted worker that has not come in when the others have
    finished would wait for them.
    """

    hub_judges = True

    def __init__(self, strategy: str) -> None:
        self.newcomers_may_be_late = strategy not in SERVED
        self.newcomers_are_last = strategy not in (*SERVED, "hierarchical")

    def how_lost(self, code: int, said: Sequence[Failed], began: float) -> str:  # noqa: ARG002
        """Describe how a worker was lost: killed by a signal, or given up by the hub."""
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        lost = "was given up by the hub"
        return f"{lost}, and ended: {said[-1].message}" if said else lost

    def is_given_up(self, code: int, said: Sequence[Failed], by_hub: bool) -> bool:  # noqa: ARG002
        """True if the hub gave the worker up and its script made no error of its own."""
        return by_hub and bool(said) and not said[-1].traceback

    def excuses(self, failure: Failed, devices: int) -> bool:  # noqa: ARG002
        """False: only the launcher's own observations excuse errors."""
        return False


class NodeRules:
    """The nodes themselves decide on removals (`peers`); the hub only introduces them.

    The hub's judgement kills no process, and a hub that is gone for good is not needed. A worker that was
    left out and cannot come back by itself, or has lost a part of its node, ends with a status that says so.
    A node that stands still (SIGSTOP) is left alone, for it may go on and come back; it is killed once others
    have ended.
    """

    hub_judges = newcomers_are_last = False
    newcomers_may_be_late = True

    def how_lost(self, code: int, said: Sequence[Failed], began: float) -> str:
        """Return the first reason that the node's workers gave in this life; else the signal or removal.
        When one worker gives up, torchrun's agent kills another that stands still."""
        gave_up = [
            each for each in said if each.exit_status == GivenUpError.exit_status and each.time > began
        ]
        if gave_up:
            return f"cannot go on ({min(gave_up, key=lambda each: each.time).message})"
        return f"was killed by {signal_name(-code)}" if code < 0 else "was left out by the others"

    def is_given_up(self, code: int, said: Sequence[Failed], by_hub: bool) -> bool:  # noqa: ARG002
        """True for the exit status of a node that was given up."""
        return code == GivenUpError.exit_status

    def excuses(self, failure: Failed, devices: int) -> bool:
        """True for the error of a node that was left out: its process ends a moment after the report. Of a
        node that has lost a device the other workers' errors are echoes, and the end of its launch says
        what was lost."""
        if devices > 1 and failure.echo:
            return True
        return failure.exit_status == GivenUpError.exit_status and not failure.traceback


def rules_of(strategy: str) -> Rules:
    """Return the rules of a strategy. Strategies of other packages run over a ring."""
    return NodeRules() if strategy == "peers" else HubRules(strategy)
