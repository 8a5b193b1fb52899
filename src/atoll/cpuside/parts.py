"""The nodes' parts of meetings, collected until a meeting can be assembled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atoll.core.errors import MismatchError
from atoll.core.stands import USE, are_consistent, describe_mismatch
from atoll.wire.device import Met
from atoll.wire.nodes import MeetingPart
from atoll.wire.peers import Key
from atoll.wire.workerstand import WorkerStand


class _Part(NamedTuple):
    what: str
    payload: bytes
    since: int
    stand: WorkerStand | None


class MeetingParts:
    """Parts of meetings by key; `since` is the number of the first meeting that this node takes part in."""

    def __init__(self) -> None:
        self.since = 0
        self._parts: dict[Key, _Part] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._parts

    def keep(self, key: Key, what: str, payload: bytes, since: int, stand: WorkerStand | None = None) -> None:
        """Keep a node's part of a meeting; `stand` is the place of the node's script."""
        self._parts[key] = _Part(what, payload, since, stand)

    def message(self, key: Key) -> tuple[MeetingPart, bytes]:
        """Return the message that sends a part to another node, and its payload."""
        part = self._parts[key]
        message = MeetingPart(key=key, what=part.what, since=part.since, stand=part.stand)
        return message, part.payload

    def meet(self, number: int, keys: Sequence[Key]) -> Met:
        """Assemble meeting `number` from the parts `keys`, in order of node.

        Raises MismatchError if the nodes' scripts make different calls, and none uses the gradients' mean.
        """
        nodes = [key.life.node for key in keys]
        uses = [key.life.node for key in keys if self._parts[key].what.startswith(USE)]
        if not uses:
            self._check_alike(number, keys)
        return Met(number=number, nodes=nodes, payloads=[self._parts[key].payload for key in keys], uses=uses)

    def _check_alike(self, number: int, keys: Sequence[Key]) -> None:
        stands = [part.stand for key in keys if (part := self._parts[key]).stand is not None]
        if not are_consistent(each.stand for each in stands):
            raise MismatchError(describe_mismatch({each.worker: each.stand for each in stands}))
        whats = [(self._parts[key].what, key.life.node) for key in keys]
        unlike = [(what, node) for what, node in whats if what != whats[0][0]]
        if unlike:
            raise MismatchError(
                f"meeting {number}: node {whats[0][1]} meets on {whats[0][0]}, and node {unlike[0][1]} on "
                f"{unlike[0][0]}: every node's script must make the same calls in the same order"
            )

    def drop(self, key: Key) -> None:
        self._parts.pop(key, None)

    def clear(self) -> None:
        self._parts.clear()
