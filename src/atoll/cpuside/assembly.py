"""Contributions on this node: its own, in shared memory, and those of other nodes, assembled from pieces.

Messages from outside are checked against the layout before they are kept. The caller bounds the memory by
`has_room`. Received pieces are kept without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from atoll.chunks import ChunkMap
from atoll.chunks.specs import itemsize
from atoll.exchange.coding import PLAIN, Coding, bytes_of
from atoll.net.endpoint import Buffer
from atoll.wire.base import WireError
from atoll.wire.nodes import About, NodeMessage, Piece
from atoll.wire.peers import Key


@dataclass
class AssembledContribution:
    """A contribution, or the received part of one."""

    about: About | None
    payloads: list[Buffer | None]  # decoded gradients of the trainable chunks, in order
    missing: int  # chunks that have not come yet
    coded: Sequence[Buffer | None] = ()  # this node's own chunks as written by the codec; None: not coded

    @property
    def is_whole(self) -> bool:
        return self.about is not None and not self.missing


class Assembly:
    """The contributions to one model, by key.

    Args:
        layout: the model's chunks.
        groups: number of the optimizer's param groups.
        has_room: returns False for the key of a new contribution that must not be kept.
        coding: the codec of the run's gradients.

    Attributes:
        refused: number of invalid messages.
        no_room: number of contributions for which there was no room.
    """

    def __init__(
        self, layout: ChunkMap, groups: int, has_room: Callable[[Key], bool], coding: Coding = PLAIN
    ) -> None:
        chunks = self._chunks = layout.trainable
        self._coding = coding
        self.sizes = [chunk.extent * itemsize(chunk.dtype) for chunk in chunks]
        self._slots = [len(chunk.slots) for chunk in chunks]
        self._groups, self._has_room = groups, has_room
        self._contributions: dict[Key, AssembledContribution] = {}
        self.refused = 0
        self.no_room = 0

    def __contains__(self, key: Key) -> bool:
        """True if the whole contribution is here."""
        found = self._contributions.get(key)
        return found is not None and found.is_whole

    def has_some(self, key: Key) -> bool:
        """True if a part of the contribution is here, but not the whole."""
        found = self._contributions.get(key)
        return found is not None and not found.is_whole

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys of whole contributions."""
        return (key for key, each in self._contributions.items() if each.is_whole)

    def __getitem__(self, key: Key) -> AssembledContribution:
        return self._contributions[key]

    def keep(self, about: About, payloads: Sequence[Buffer], coded: Sequence[Buffer | None] = ()) -> Key:
        """Keep a whole contribution, whose memory stays unchanged until it is dropped."""
        self._contributions[about.key] = AssembledContribution(about, list(payloads), 0, coded)
        return about.key

    def add(self, message: About | Piece, payload: memoryview | None) -> bool:
        """Add a part of a contribution; returns True if the part completes it."""
        key = message.key
        if self.why_not(message, payload):
            self.refused += 1
            return False
        found = self._contributions.get(key)
        if found is None:
            if not self._has_room(key):
                self.no_room += isinstance(message, About)
                return False
            found = self._contributions[key] = AssembledContribution(
                None, [None] * len(self.sizes), len(self.sizes)
            )
        if found.is_whole:
            return False
        if isinstance(message, About):
            found.about = message
        elif found.payloads[message.chunk] is None:
            try:
                found.payloads[message.chunk] = self._read(message, payload)
            except WireError:
                self.refused += 1
                return False
            found.missing -= 1
        return found.is_whole

    def _read(self, piece: Piece, payload: memoryview | None) -> memoryview | None:
        """Return a chunk's decoded gradients; raises WireError for bytes that the codec never writes."""
        if not piece.coded:
            return payload
        return bytes_of(self._coding.decode(payload, self._chunks[piece.chunk].extent))

    def why_not(self, message: About | Piece, payload: memoryview | None) -> str:
        """Return the reason why a message cannot be part of a contribution to this model, or ""."""
        size = 0 if payload is None else payload.nbytes
        if isinstance(message, Piece):
            if message.chunk >= len(self.sizes):
                return f"chunk {message.chunk}, where there are {len(self.sizes)}"
            chunk, expected = self._chunks[message.chunk], self.sizes[message.chunk]
            if message.coded and not self._coding.writes(chunk.dtype):
                return f"a code of chunk {message.chunk}, which goes as it is"
            if message.coded:
                expected = self._coding.size(chunk.extent, chunk.dtype)
            if size != expected:
                return f"{size} bytes of chunk {message.chunk}, which has {expected}"
            return ""
        if size:
            return "a payload where none belongs"
        if [len(flags) for flags in message.present] != self._slots:
            return "presence of other slots than the layout's"
        if len(message.hyperparameters) != self._groups:
            return f"{len(message.hyperparameters)} groups of hyperparameters, where {self._groups} are right"
        if message.weight > 0 >= message.alike or not math.isfinite(message.alike):
            return "a weight, and is of no worker"
        if not (math.isfinite(message.weight) and math.isfinite(message.samples)):
            return "a weight or a number of samples that is no number"
        return ""

    def send(self, key: Key, send: Callable[[NodeMessage, Buffer | None], None]) -> None:
        """Hand a whole contribution to `send`, message by message."""
        found = self._contributions[key]
        assert found.about is not None
        send(found.about, None)
        for chunk, payload in enumerate(found.payloads):
            code = found.coded[chunk] if found.coded else None
            send(Piece(key=key, chunk=chunk, coded=code is not None), payload if code is None else code)

    def drop(self, key: Key) -> None:
        """Drop a contribution, or the received part of it."""
        self._contributions.pop(key, None)

    def clear(self) -> None:
        """Drop all contributions."""
        self._contributions.clear()
