"""The iterations that a node has applied: their contributions, for its worker and newcomers, and digests of
the global parameters, which nodes compare. Source: docs/peers.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from atoll.core.errors import RunError
from atoll.core.hyperparameters import SCHEDULED, difference_line
from atoll.core.weighing import told_unlike
from atoll.exchange.globalparameters import IterationOutcome
from atoll.wire import device as d
from atoll.wire import nodes as n

_DIGESTS = 64  # latest iterations whose digests are kept
_APPLIED = 64  # latest iterations, at least, whose contributions a newcomer is told


class History:
    """Records of the latest applied iterations.

    Args:
        send: sends the worker a message on an applied iteration.
        tell: reports a decision to the worker; called with its subject, the choice and the reason.
        stale_max: iterations by which a newcomer's script may be behind.

    Attributes:
        latest: the messages on the latest applied iterations.
        consumed: samples of all iterations so far.
    """

    def __init__(
        self, send: Callable[[d.Applied], None], tell: Callable[[str, str, str], None], stale_max: int
    ) -> None:
        self._send, self._tell, self._stale_max = send, tell, stale_max
        self.latest: deque[d.Applied] = deque(maxlen=max(_APPLIED, stale_max + 2))
        self._digests: dict[int, bytes] = {}  # by iteration
        self._counts_reported = False  # the warning on inconsistent sample counts
        self._unlike: set[tuple[int, str]] = set()  # (node, hyperparameter) whose difference was reported
        self._wrong: set[int] = set()  # nodes whose unusable contributions were reported
        self.consumed = 0.0

    def clear(self) -> None:
        """Forget all iterations, since the life is over or the script may count anew."""
        self.latest.clear()
        self._digests.clear()

    def take_over(self, applied: d.Applied) -> None:
        """Record an iteration and report it to the worker; another node may have applied it."""
        self.latest.append(applied)
        self.consumed = applied.consumed
        self._send(applied)

    def note(self, iteration: int, shift: int, outcome: IterationOutcome, abouts: Sequence[n.About]) -> None:
        """Record an applied iteration, report it, and warn once of each kind of fault.

        Args:
            iteration: the iteration, in the decisions' count.
            shift: the worker's count minus the decisions'.
            outcome: the result of the step.
            abouts: descriptions of the contributions.
        """
        parts = [
            d.AppliedContribution(
                each.key.life.node, each.key.life.incarnation, each.samples, each.weight, each.note
            )
            for each in abouts
        ]
        refused = [str(each.key.life.node) for each in abouts if each.refused]
        skipped = f"refused by node {' and '.join(refused)}" if refused else "no contribution was to be used"
        skipped = "" if outcome.stepped else skipped
        digest = outcome.digest.hex()
        self.take_over(
            d.Applied(
                iteration=iteration + shift,
                parts=parts,
                digest=digest,
                skipped=skipped,
                unlike=self._parted(iteration + shift, outcome),
                consumed=self.consumed + sum(part.samples for part in parts),
            )
        )
        counts = told_unlike(
            f"iteration {iteration + shift}", {each.key.life.node: each for each in abouts}, "node"
        )
        if counts and not self._counts_reported:
            self._counts_reported = True
            self._tell("weights", "", counts)
        for node, wrong in outcome.wrong.items():
            if node not in self._wrong:
                self._wrong.add(node)
                self._tell("refused", "", f"iteration {iteration + shift}: {wrong}: it counts for nothing")
        for node, other in outcome.unlike.items():
            if (node, other) not in self._unlike:  # every iteration may differ so
                self._unlike.add((node, other))
                self._tell(
                    "hyperparameters",
                    "",
                    f"iteration {iteration + shift}: node {node} gave {other} than node {outcome.first}, "
                    "whose counted: set them by the iteration alone",
                )
        self._digests[iteration] = outcome.digest
        self._digests.pop(iteration - _DIGESTS, None)

    def _parted(self, iteration: int, outcome: IterationOutcome) -> str:
        """Return a line on the first hyperparameter that must be equal on all nodes but differs, or "".

        With stale_max above 0, nodes may be at different iterations, and hyperparameters that a scheduler
        sets may differ.
        """
        for node, found in outcome.parted.items():
            if self._stale_max == 0 or found.key not in SCHEDULED:
                return difference_line(f"node {outcome.first}", f"node {node}", iteration, found)
        return ""

    def compare(self, iteration: int, shift: int, digest: bytes, *, node: int, own: int) -> None:
        """Raise RunError if node `node` has another digest of the parameters after `iteration`."""
        known = self._digests.get(iteration)
        if known is not None and known != digest:
            raise RunError(
                f"after iteration {iteration + shift} the parameters of node {node} and of node {own} "
                f"differ ({digest.hex()} and {known.hex()}): their processors or their PyTorch do not "
                "compute alike; give all nodes one build of torch and one instruction set "
                "(ATEN_CPU_CAPABILITY sets a lower one), or use strategy 'server'"
            )
