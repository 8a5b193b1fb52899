"""Who says that a part of a run is lost, and so what follows from how a launch has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from atoll.core.config import SERVED
from atoll.core.errors import GivenUpError
from atoll.core.events import Failed
from atoll.launch.processes import signal_name


class Rules(Protocol):
    """The rules of a strategy's runs. `said` is what the workers of the launch said of their errors, `code`
    how its process ended."""

    # Whether the hub says who is lost. Else the run needs no hub once it has begun.
    hub_judges: bool
    # Whether one that was started again cannot go on once the others have finished.
    newcomers_may_be_late: bool
    # Whether one that was started again is the last of the workers, as they count themselves.
    newcomers_are_last: bool

    def how_lost(self, code: int, said: Sequence[Failed], began: float) -> str:
        """How a launch was lost; its life began at `began`, -inf for the first."""

    def is_given_up(self, code: int, said: Sequence[Failed], by_hub: bool) -> bool:
        """Whether a launch has ended because others had given it up (`by_hub`: the hub had)."""

    def excuses(self, failure: Failed, devices: int) -> bool:
        """Whether an error of a worker, of a launch of so many, ends its launch alone."""


class HubRules:
    """The hub says who is lost: with a parameter server, and in rings.

    In a ring nothing but the workers holds the model: one that was started again, and has not come in when
    the others have finished, would wait for them.
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
        """Whether the worker ended for that, and not with an error of its script's."""
        return by_hub and bool(said) and not said[-1].traceback

    def excuses(self, failure: Failed, devices: int) -> bool:  # noqa: ARG002
        """Nothing beside what the launcher has seen itself."""
        return False


class NodeRules:
    """The nodes themselves say who is left out (`peers`); the hub only introduces them.

    Nobody is killed by the hub's judgement, and a hub that is gone for good is missed by nobody. A worker
    that was left out and cannot come back by itself, or has lost a part of its node, ends with a status that
    says so. A node that stands still (SIGSTOP) is left alone, for it may go on and come back; it is killed
    once others have ended.
    """

    hub_judges = newcomers_are_last = False
    newcomers_may_be_late = True

    def how_lost(self, code: int, said: Sequence[Failed], began: float) -> str:
        """By what the node's workers have said of it in this life: where one gives up, torchrun's agent kills
        another that stands still."""
        gave_up = [
            each for each in said if each.exit_status == GivenUpError.exit_status and each.time > began
        ]
        if gave_up:
            return f"cannot go on ({min(gave_up, key=lambda each: each.time).message})"
        return f"was killed by {signal_name(-code)}" if code < 0 else "was left out by the others"

    def is_given_up(self, code: int, said: Sequence[Failed], by_hub: bool) -> bool:  # noqa: ARG002
        """By its status."""
        return code == GivenUpError.exit_status

    def excuses(self, failure: Failed, devices: int) -> bool:
        """That of one that was left out, from when it says so: its process ends a moment later. Of a node
        that has lost a device the others' words are an echo, and how its launch ends says what was lost."""
        if devices > 1 and failure.echo:
            return True
        return failure.exit_status == GivenUpError.exit_status and not failure.traceback


def rules_of(strategy: str) -> Rules:
    """The rules of a strategy. Those of other packages run over a ring."""
    return NodeRules() if strategy == "peers" else HubRules(strategy)
