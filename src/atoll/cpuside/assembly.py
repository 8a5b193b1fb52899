"""Contributions on this node: its own, which lie in the shared memory, and others', put together from pieces.

What comes from outside is checked against the layout before it is kept, and what is kept is bounded: whoever
runs this says which contributions there is room for. A piece that comes is kept as it came, without a copy.
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
class Contribution:
    """What is here of a contribution; `payloads` are its trainable chunks', in order, as they are read.
    `coded` are those of this node's own that its codec has written otherwise, as they leave."""

    about: About | None
    payloads: list[Buffer | None]
    missing: int
    coded: Sequence[Buffer | None] = ()

    @property
    def is_whole(self) -> bool:
        return self.about is not None and not self.missing


class Assembly:
    """The contributions to a model of this layout, with an optimizer of this many param groups.
    `has_room(key)` says whether one that is not here yet may be kept. `coding`: how the run's gradients are
    written."""

    def __init__(
        self, layout: ChunkMap, groups: int, has_room: Callable[[Key], bool], coding: Coding = PLAIN
    ) -> None:
        chunks = self._chunks = layout.trainable
        self._coding = coding
        self.sizes = [chunk.extent * itemsize(chunk.dtype) for chunk in chunks]
        self._slots = [len(chunk.slots) for chunk in chunks]
        self._groups, self._has_room = groups, has_room
        self._held: dict[Key, Contribution] = {}
        self.refused = 0  # messages that were wrong
        self.no_room = 0  # contributions' beginnings that there was no room for

    def __contains__(self, key: Key) -> bool:
        """Whether it is here whole."""
        held = self._held.get(key)
        return held is not None and held.is_whole

    def has_some(self, key: Key) -> bool:
        """Whether it is here in part."""
        held = self._held.get(key)
        return held is not None and not held.is_whole

    def __iter__(self) -> Iterator[Key]:
        """Those that are here whole."""
        return (key for key, held in self._held.items() if held.is_whole)

    def __getitem__(self, key: Key) -> Contribution:
        return self._held[key]

    def keep(self, about: About, payloads: Sequence[Buffer], coded: Sequence[Buffer | None] = ()) -> Key:
        """Keep a whole contribution, whose memory stays unchanged until it is dropped."""
        self._held[about.key] = Contribution(about, list(payloads), 0, coded)
        return about.key

    def add(self, message: About | Piece, payload: memoryview | None) -> bool:
        """Take what came of a contribution; whether that is whole now, and was not before."""
        key = message.key
        if self.why_not(message, payload):
            self.refused += 1
            return False
        held = self._held.get(key)
        if held is None:
            if not self._has_room(key):
                self.no_room += isinstance(message, About)
                return False
            held = self._held[key] = Contribution(None, [None] * len(self.sizes), len(self.sizes))
        if held.is_whole:
            return False
        if isinstance(message, About):
            held.about = message
        elif held.payloads[message.chunk] is None:
            try:
                held.payloads[message.chunk] = self._read(message, payload)
            except WireError:
                self.refused += 1
                return False
            held.missing -= 1
        return held.is_whole

    def _read(self, piece: Piece, payload: memoryview | None) -> memoryview | None:
        """A chunk's values. Raises WireError for what the codec never writes."""
        if not piece.coded:
            return payload
        return bytes_of(self._coding.decode(payload, self._chunks[piece.chunk].extent))

    def why_not(self, message: About | Piece, payload: memoryview | None) -> str:
        """Why a message cannot be part of a contribution to this model; empty where it can."""
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
        held = self._held[key]
        assert held.about is not None
        send(held.about, None)
        for chunk, payload in enumerate(held.payloads):
            code = held.coded[chunk] if held.coded else None
            send(Piece(key=key, chunk=chunk, coded=code is not None), payload if code is None else code)

    def drop(self, key: Key) -> None:
        """Let a contribution go, or what is here of it."""
        self._held.pop(key, None)

    def clear(self) -> None:
        """Let go of all."""
        self._held.clear()
