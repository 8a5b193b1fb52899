"""The protocol of a group: the workers that sum their gradients before anything leaves the group.

A round is done by all members or by none. A member's death breaks the ring; the members that are left form
the next ring and do the round once more, with a higher number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar

from atoll.axes.store import Lease
from atoll.axes.values import Attempt, ExchangeId, Members, Run, Wait

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Role: TypeAlias = Literal["leader", "share", "silent"]  # who of a group speaks to the servers


@dataclass(frozen=True)
class Ballot:
    """The numbers and words that members exchange beside a sum.

    Args:
        sums: by section, numbers that are added up over the members.
        words: by section, each member's own word; in the result, by rank.
    """

    sums: Mapping[str, tuple[float, ...]]
    words: Mapping[str, tuple[bytes, ...]]


@dataclass(frozen=True)
class Change:
    """Members that came, and members that were lost or have moved, between two iterations.

    Args:
        members: those from now on.
        lost: by name.
        came: by name.
    """

    members: Members
    lost: tuple[int, ...] = ()
    came: tuple[int, ...] = ()


class Pending(Protocol):
    """A collective that is under way."""

    def wait(self) -> None:
        """Return when the collective is done. Raises Broken within `Group.round`, if a member was lost."""


class Enterable(Protocol):
    """A state that a member gives to one that enters."""

    def capture(self) -> bytes:
        """The state, as between two iterations."""

    def enter(self, state: bytes) -> None:
        """Take the state of another member."""


class Group(Protocol):
    """Workers that sum their gradients in each step: one alone (Solo), or several in a ring.

    `Broken` never leaves `round`. Every wait ends at the attempt's deadline with a DeadlineError, which names
    who is missing.
    """

    members: Members
    final: bool  # True where a sum counts as soon as it is there: a worker alone

    def begin_sum(self, run: Lease, parts: Sequence[Sequence[Run]]) -> Pending:
        """Sum a run over the members; rank r gets the sum of `parts[r]`. All members begin their sums in one
        order."""

    def round(self, name: str, act: Callable[[Attempt], T]) -> T:
        """Call `act` until all members have done one round. `act` may run more than once, and writes no kind
        that is held. Raises RunError where too few members are left."""

    def ballot(self, attempt: Attempt, own: Ballot) -> Ballot:
        """Within a round: the sums and words of all; the same on all members."""

    def tell(self, attempt: Attempt, word: bytes | None, root: int) -> bytes:
        """Within a round: the word of the member of rank `root`, who alone gives one."""

    def spread(self, attempt: Attempt, run: Lease, root: int) -> Pending:
        """Within a round: copy a run of the member of rank `root` to all others."""

    def elect(self, id: ExchangeId, able: Collection[int]) -> Role:
        """This member's part in speaking for the group, where the ranks in `able` could."""

    def fetch(self, rank: int, kind: str, run: Run, clock: int, into: Tensor, wait: Wait) -> None:
        """Fill `into` from the member of `rank`, once that has reached `clock`. Raises Gone where the member
        is lost: its values are then the synchronizer's source to give."""

    def boundary(self, state: Enterable) -> Change | None:
        """Between two iterations, with no lease taken: let members in and go; None: all is as before."""
