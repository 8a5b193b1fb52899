"""The members of a group that hold one model together, as an interface: memory is given an object that
connects them.

Each chunk's elements are held by one member, or in parts by several (moves/owners.py). The holder of an
element holds its value and its optimizer state, and steps it. A member that uses a chunk fetches the values
that others hold, and gradients are summed to the holders. Source: docs/memory.md, "Members".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
from torch import Tensor

from atoll.core.decoding import from_msgpack
from atoll.core.errors import RunError
from atoll.core.stands import Stand
from atoll.memory.payloads import Key
from atoll.moves.owners import Groups

T = TypeVar("T")
# read((chunk, kind), version): lends the flat payload in host memory, as `version` sync points have left it
# (see memory/sharing.py). Waits for the sync points and for the chunk's step. Raises UserError for a payload
# that is not here, DeadlineError for one that does not come.
Read: TypeAlias = Callable[[Key, int], AbstractContextManager[Tensor]]


class Waitable(Protocol):
    """A collective that is under way."""

    def wait(self) -> None:
        """Wait until it has ended for this member. Raises DeadlineError, or the error that ended the
        group."""


class Members(Protocol):
    """A group, as one of its members sees it.

    The argument `what` says, for people, what a call waits for. Each method raises DeadlineError if it waits
    too long, and RunError, one line that names the member, if a member has gone.

    Attributes:
        rank: this member's number.
        count: the number of members.
        replicas: groups that each hold a replica of the model between them; empty if all members hold one.
    """

    rank: int
    count: int
    replicas: Groups

    def serve(self, read: Read) -> None:
        """Answer the other members' `fetch` from now on with `read`, which is called on service threads."""

    def fetch(self, holder: int, key: Key, version: int, into: Tensor, what: str) -> None:
        """Fill `into`, a flat contiguous tensor in host memory, with the first bytes of the holder's payload.

        It may be called from any thread. Fetches of several threads run side by side.

        Args:
            version: the count of sync points that the payload is to be of.
        """

    def sum(self, tensor: Tensor, what: str) -> None:
        """Sum a contiguous tensor in host memory over all members, in place; every member gets equal bits.

        `sum`, `meet`, `exchange` and `gather` are collectives. All members call them in one order, on the
        script's thread or at the end of the script's backward.
        """

    def meet(self, tensor: Tensor, what: str, where: Callable[[], Stand]) -> None:
        """Sum like `sum`, at the beginning of a call of the script in which all members report something.

        Args:
            where: returns this member's place in the script.

        Raises MismatchError if another member is at a place from which it cannot reach this call.
        """

    def exchange(
        self, tensor: Tensor, sends: Sequence[int], into: Tensor, takes: Sequence[int], what: str
    ) -> Waitable:
        """Begin to exchange pieces of tensors in host memory with all members.

        Args:
            tensor: contiguous; it is sent in pieces of `sends` elements, the r-th to member r.
            sends: the number of elements for each member, by rank.
            into: takes the pieces that members, itself included, send to this one, by rank.
            takes: the number of elements from each member, by rank.
        """

    def gather(self, word: bytes, what: str) -> list[bytes]:
        """Return every member's word, by rank."""

    def close(self) -> None:
        """End the service and leave the group. It is no collective."""


def told(members: Members, word: T, kind: Any, what: str) -> list[T]:
    """Return every member's word, by rank, each of the type `kind`: a collective that gathers encoded words.

    Raises RunError, naming the member, for a word of another type.
    """
    words: list[T] = []
    for member, raw in enumerate(members.gather(msgspec.msgpack.encode(word), what)):
        try:
            words.append(from_msgpack(raw, kind))
        except msgspec.MsgspecError as error:
            raise RunError(f"worker {member}'s word on {what}: {error}") from None
    return words
