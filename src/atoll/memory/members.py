"""The members of a group that hold one model together: what memory asks of whoever connects them.

Each chunk's elements are held by one member, or in parts by several (moves/owners.py): who holds an element
holds its value and what the optimizer keeps for it, and steps it. A member that uses a chunk fetches what
others hold of its values; gradients are summed to the holders. Source: docs/memory.md,
"Members".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
from torch import Tensor

from atoll.core.errors import RunError
from atoll.core.stands import Stand
from atoll.memory.payloads import Key
from atoll.moves.owners import Groups

T = TypeVar("T")
# read((chunk, kind), version): the flat payload in host memory, as `version` sync points have left it (see
# memory/sharing.py). Waits for them, and for the chunk's step. Raises UserError for what is not here,
# DeadlineError where it does not come.
Read: TypeAlias = Callable[[Key, int], AbstractContextManager[Tensor]]


class Waitable(Protocol):
    """A collective that is under way."""

    def wait(self) -> None:
        """Until it has ended for this member. Raises DeadlineError, or what has ended the group."""


class Members(Protocol):
    """A group, as one of its members sees it: `rank` of `count`.

    `what` says for people what is waited for. Each method raises DeadlineError where it waits too long, and
    RunError, one line that names the member, where one has gone.
    """

    rank: int
    count: int
    replicas: Groups  # the groups that each hold a replica of the model between them; empty: all hold one

    def serve(self, read: Read) -> None:
        """Answer the others' `fetch` from now on with `read`, which is called on service threads."""

    def fetch(self, holder: int, key: Key, version: int, into: Tensor, what: str) -> None:
        """Fill `into`, a flat contiguous tensor in host memory, with the first bytes of the holder's payload.
        From any thread; fetches of several threads run side by side."""

    def sum(self, tensor: Tensor, what: str) -> None:
        """Sum a contiguous tensor in host memory over all members, in place; every member gets equal bits.

        This method and the next three are collectives. All members call them in the same order, on the
        script's thread or at the end of the script's backward.
        """

    def meet(self, tensor: Tensor, what: str, where: Callable[[], Stand]) -> None:
        """Sum like `sum`, at the beginning of a call of the script in which all members report something.

        `where` returns this member's place in the script. Raises MismatchError where another member stands at
        a place from which it cannot reach this call.
        """

    def exchange(
        self, tensor: Tensor, sends: Sequence[int], into: Tensor, takes: Sequence[int], what: str
    ) -> Waitable:
        """Begin to send `tensor`, as above, in pieces of `sends` elements, the r-th to member r. `into` takes
        what members send to this one, itself included, by rank: `takes` elements of each."""

    def gather(self, word: bytes, what: str) -> list[bytes]:
        """Every member's word, by rank."""

    def close(self) -> None:
        """End the service and let go of the group: not collective."""


def told(members: Members, word: T, kind: Any, what: str) -> list[T]:
    """Every member's word, by rank, each of the type `kind`: a collective, as `Members.gather`.

    Raises RunError, naming the member, for a word that is none.
    """
    words: list[T] = []
    for member, raw in enumerate(members.gather(msgspec.msgpack.encode(word), what)):
        try:
            words.append(msgspec.msgpack.decode(raw, type=kind))
        except msgspec.MsgspecError as error:
            raise RunError(f"worker {member}'s word on {what}: {error}") from None
    return words
