"""A restarted shard's starting point: its latest snapshot, and the journal's records after that.

A site's shard has no snapshots, since the parameters are fetched from the global shards. It starts from the
latest state in its journal and the records after that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from atoll.core.decoding import decoded
from atoll.core.errors import CheckpointError
from atoll.server.journal import Folder, Payload, read_segments
from atoll.server.logkeeper import LAST_MEETING, MEETING, KeeperState
from atoll.server.model import CONTRIBUTION, HELD, MEAN, ModelState
from atoll.server.records import Begun, HandledMessage, Record, StatePayload
from atoll.server.snapshot import Heading, whole_snapshots

ImageParts: TypeAlias = list[tuple[StatePayload, Payload]]
KeptParts: TypeAlias = dict[str, dict[int, memoryview]]  # payloads by kind and key


class ShardImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The full state of a shard between two messages, except for the contents of a snapshot and payloads."""

    generation: int
    next_entry: int
    setter: tuple[int, int]
    bases: dict[tuple[int, int], int]
    readies: dict[tuple[int, int], int]
    model: ModelState
    log: KeeperState | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ShardImage)


def encode_image(image: ShardImage) -> bytes:
    return _encoder.encode(image)


def decode_image(raw: bytes | memoryview) -> ShardImage:
    """Decode an image; raises CheckpointError if it is invalid."""
    return decoded(_decoder, raw, CheckpointError, "not a shard's state")


def no_parts() -> KeptParts:
    """Return an empty mapping for the payloads of a state."""
    return {kind: {} for kind in (CONTRIBUTION, MEAN, MEETING, LAST_MEETING, HELD)}


@dataclass(frozen=True)
class FolderContents:
    """Contents of a shard's folder: the latest snapshot with its image, or neither (a site's: the image
    alone), and the messages recorded since. `next_segment` is the number of the journal's next segment."""

    snapshot: Path | None
    image: ShardImage | None
    parts: KeptParts
    told: Iterator[tuple[HandledMessage, memoryview | None]]
    next_segment: int


def first_segment(folder: Folder) -> int:
    """Number of a new journal's first segment, above those that old snapshots refer to."""
    return max([-1, *(heading.journal for _, heading in whole_snapshots(folder.path))]) + 1


def find(folder: Folder) -> FolderContents | None:
    """Find a shard's saved state in its folder; None if there is none. Raises CheckpointError if the state is
    incomplete."""
    segments = folder.segments()
    snapshots = whole_snapshots(folder.path)
    if not segments:
        return None
    chosen = [each for each in snapshots if each[1].journal in segments]
    snapshot, heading = chosen[-1] if chosen else (None, None)
    start = heading.journal if heading is not None else min(segments)
    numbers = [*segments, *(heading.journal for _, heading in snapshots)]
    records = read_segments(folder, start)
    first = next(records, None)
    if first is None and heading is None and len(segments) == 1:
        return None  # a shard that died at its start
    image, parts = _begin(folder, first, heading, records)
    return FolderContents(snapshot, image, parts, _told(records), max(numbers) + 1)


def _begin(
    folder: Folder,
    first: tuple[Record, Payload] | None,
    heading: Heading | None,
    records: Iterator[tuple[Record, Payload]],
) -> tuple[ShardImage | None, KeptParts]:
    """Return the image at the start and its payloads by kind and key."""
    begun = first[0] if first is not None else None
    if not isinstance(begun, Begun) or not (begun.fresh or heading is not None):
        raise CheckpointError(
            f"{folder.path}: holds a part of a shard's journal, and no snapshot that goes with it; the shard "
            "cannot go on from it"
        )
    if heading is None:
        return None, no_parts()
    if not begun.state:
        raise CheckpointError(
            f"{folder.segment(heading.journal)}: lacks the state that its snapshot goes with"
        )
    parts = _parts_of(begun, records)
    if parts is None:
        raise CheckpointError(f"{folder.segment(heading.journal)}: lacks a part of its state")
    return _image(folder, begun, heading.journal), parts


def find_site(folder: Folder) -> FolderContents | None:
    """Find the saved state of a site's shard in its folder; None if there is none.

    Raises CheckpointError if the state is incomplete.
    """
    segments = folder.segments()
    for start in sorted(segments, reverse=True):
        records = read_segments(folder, start)
        first = next(records, None)
        begun = first[0] if first is not None else None
        if not isinstance(begun, Begun):
            continue  # the shard was killed as it began this segment
        parts = no_parts() if begun.fresh else _parts_of(begun, records) if begun.state else None
        if parts is not None:
            image = None if begun.fresh else _image(folder, begun, start)
            return FolderContents(None, image, parts, _told(records), max(segments) + 1)
    if len(segments) < 2:
        return None  # a shard that died at its start
    raise CheckpointError(
        f"{folder.path}: holds a part of a site's journal, and no state that it goes on from; the site's "
        "shard cannot go on from it"
    )


def _parts_of(begun: Begun, records: Iterator[tuple[Record, Payload]]) -> KeptParts | None:
    """Return the payloads of a state; None if some were never written."""
    parts = no_parts()
    for _ in range(begun.parts):
        part, payload = next(records, (None, None))
        if not isinstance(part, StatePayload) or payload is None or part.kind not in parts:
            return None
        parts[part.kind][part.key] = payload
    return parts


def _image(folder: Folder, begun: Begun, segment: int) -> ShardImage:
    try:
        return decode_image(begun.state)
    except CheckpointError as error:
        raise CheckpointError(f"{folder.segment(segment)}: {error}") from None


def _told(records: Iterator[tuple[Record, Payload]]) -> Iterator[tuple[HandledMessage, memoryview | None]]:
    """Yield the handled messages. State records are skipped, since earlier messages lead to that state."""
    for record, payload in records:
        if isinstance(record, HandledMessage):
            yield record, payload
