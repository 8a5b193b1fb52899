"""The iterations that a node has applied: what its worker and newcomers are told that they were made of, and
the digests of the global parameters after them, which nodes hold against one another's. Source:
docs/peers.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from atoll.core.errors import RunError
from atoll.core.hyperparameters import SCHEDULED, difference_line
from atoll.core.weighing import told_unlike
from atoll.exchange.globalparameters import Outcome
from atoll.wire import device as d
from atoll.wire import nodes as n

_DIGESTS = 64  # of the latest iterations, that others' are held against
_APPLIED = 64  # of the latest iterations, at least, of which a newcomer hears what they were made of


class History:
    """What became of the latest iterations. `send` is for the worker's messages, `tell` for its log (what,
    choice, reason); `stale_max` is how far a newcomer's script may be behind."""

    def __init__(
        self, send: Callable[[d.Applied], None], tell: Callable[[str, str, str], None], stale_max: int
    ) -> None:
        self._send, self._tell, self._stale_max = send, tell, stale_max
        self.latest: deque[d.Applied] = deque(maxlen=max(_APPLIED, stale_max + 2))  # that the worker was told
        self._digests: dict[int, bytes] = {}
        self._counts_told = False  # that all count alike though their counts differ
        self._unlike: set[tuple[int, str]] = set()  # who was told to have given what others had not
        self._wrong: set[int] = set()  # and who what no step takes
        self.consumed = 0.0  # the samples of all iterations so far

    def clear(self) -> None:
        """Forget the iterations: they are of a life that is over, or the script may count anew."""
        self.latest.clear()
        self._digests.clear()

    def take_over(self, applied: d.Applied) -> None:
        """An iteration that another node has told of, whose state is taken over."""
        self.latest.append(applied)
        self.consumed = applied.consumed
        self._send(applied)

    def note(self, iteration: int, shift: int, outcome: Outcome, abouts: Sequence[n.About]) -> None:
        """`iteration` was applied, of contributions that are `abouts`; the worker counts `shift` more."""
        parts = [
            d.Part(each.key.life.node, each.key.life.incarnation, each.samples, each.weight, each.note)
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
        if counts and not self._counts_told:
            self._counts_told = True
            self._tell("weights", "", counts)
        for node, wrong in outcome.wrong.items():
            if node not in self._wrong:  # told once as well
                self._wrong.add(node)
                self._tell("refused", "", f"iteration {iteration + shift}: {wrong}: it counts for nothing")
        for node, other in outcome.unlike.items():
            if (node, other) not in self._unlike:  # told once: it may be so each time
                self._unlike.add((node, other))
                self._tell(
                    "hyperparameters",
                    "",
                    f"iteration {iteration + shift}: node {node} gave {other} than node {outcome.first}, "
                    "whose counted: set them by the iteration alone",
                )
        self._digests[iteration] = outcome.digest
        self._digests.pop(iteration - _DIGESTS, None)

    def _parted(self, iteration: int, outcome: Outcome) -> str:
        """Name the first hyperparameter that must be equal but differs between two nodes, in one line; empty:
        none.

        Where nodes may be at different iterations, hyperparameters that a scheduler sets may differ.
        """
        for node, found in outcome.parted.items():
            if self._stale_max == 0 or found.key not in SCHEDULED:
                return difference_line(f"node {outcome.first}", f"node {node}", iteration, found)
        return ""

    def compare(self, iteration: int, shift: int, digest: bytes, *, node: int, own: int) -> None:
        """Raise RunError where the parameters after `iteration` have another digest than that of `node`."""
        known = self._digests.get(iteration)
        if known is not None and known != digest:
            raise RunError(
                f"after iteration {iteration + shift} the global parameters of node {node} and of "
                f"node {own} differ ({digest.hex()} and {known.hex()}): their processors or "
                "their PyTorch do not compute alike"
            )
