"""A node's waits, in words."""

from __future__ import annotations

from atoll.peers.contributions import Contributions
from atoll.peers.entrance import Entrance
from atoll.peers.ownscript import OwnScript
from atoll.peers.standing import NodeStanding, name_of
from atoll.peers.suspicion import Suspicion


class NodeWaits:
    """The nodes and events that a node waits for, and whether enough members are left to end the wait."""

    def __init__(
        self,
        standing: NodeStanding,
        contributions: Contributions,
        script: OwnScript,
        suspicion: Suspicion,
        entrance: Entrance,
    ) -> None:
        self._standing, self._contributions, self._script = standing, contributions, script
        self._suspicion, self._entrance = suspicion, entrance

    @property
    def is_meeting(self) -> bool:
        """True if the script has come to a meeting that has not taken place."""
        return self._script.meeting is not None

    def lines(self) -> list[str]:
        """Return whom and what this node waits for, a line each; empty if it waits for nobody."""
        at, contributions = self._standing, self._contributions
        if not at.is_member:
            return ["a view that has this node in it"] if self._entrance.asks else []
        if at.source is not None:
            return [f"the state, of {name_of(at.source)}"]
        lines, number = [], contributions.iterations.ordered
        if self._script.wanted is not None:
            prefix = contributions.iterations.prefix
            lacking = [
                life for life in contributions.iterations.contributors(number) if prefix[life] <= number
            ]
            lines += [f"{name_of(life)}, for its contribution of iteration {number}" for life in lacking]
            if not lacking and number == contributions.applied:
                lines.append(f"a majority of view {at.view.number}, to hold iteration {number}")
            elif not lacking:
                lines.append(f"iteration {contributions.applied}, which is being applied")
        met = contributions.met
        lines += [f"{name_of(life)}, to come to meeting {met}" for life in self._suspicion.absent()]
        if self.is_meeting and not lines:
            lines.append(f"a majority of view {at.view.number}, to hold the parts of meeting {met}")
        lost = self.lost_majority()
        return [lost, *lines] if lost else lines

    def without(self) -> list[int]:
        """Return the suspected nodes without which the view has no majority; empty while a majority is
        left, and in a view of two."""
        nodes = [each.life.node for each in self._standing.view.members]
        gone = [node for node in nodes if node in self._suspicion.wish.remove]
        return [] if len(nodes) == 2 or 2 * (len(nodes) - len(gone)) > len(nodes) else gone

    def lost_majority(self) -> str:
        """Return in words which nodes must answer before anything more can be decided; empty if enough are
        left.

        In a view of two the witness may be the other voter.
        """
        gone, view = self.without(), self._standing.view
        if not gone:
            return ""
        names = " and ".join(f"node {node}" for node in gone)
        return (
            f"a majority of the {len(view.members)} nodes of view {view.number}: there is none without "
            f"{names}; if they are lost, go on from a checkpoint"
        )
