"""Position of a node in its run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.wire.peerviews import Life, View

NOBODY = View(0, 0, ())


@dataclass
class NodeStanding:
    """A node's position in its run, shared by all of its parts.

    Attributes:
        life: its own; of a joiner incarnation 0, until it is in a view.
        view: the newest that it has learned; empty for a joiner.
        iteration: k, that it makes next.
        is_member: False for a joiner that is in no view yet, and for a node that was removed.
        source: the member whose state a joiner waits for; None: it has a state, or is no joiner.
        is_over: nothing comes after this: it has finished, was removed, or scripts differ.
    """

    life: Life
    view: View = NOBODY
    iteration: int = 0
    is_member: bool = False
    source: Life | None = None
    is_over: bool = False

    @property
    def is_whole(self) -> bool:
        """True for a member that has its state; a joiner has none at first."""
        return self.is_member and self.source is None

    @property
    def newcomers(self) -> set[Life]:
        """The members that joined while the run was under way."""
        return {member.life for member in self.view.members if member.token}


@dataclass
class Due:
    """Checks that a node makes before their time, since something has changed."""

    report: bool = True  # the others need a report
    missing: bool = True  # others may hold contributions that the node lacks
    change: bool = True  # the node holds more than when the change of the view was last polled
    suspects_at: float = -math.inf  # when a member may be suspected; minus infinity: now


def name_of(life: Life) -> str:
    """ "node 2 (1)": the node and its incarnation."""
    return f"node {life.node} ({life.incarnation})"
