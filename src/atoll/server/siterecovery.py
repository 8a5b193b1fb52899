"""How a site's shard that is started again goes on: from the latest state in its journal, and what came
after it.

It has no snapshots: the parameters are the global shards', and are fetched from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from atoll.core.errors import CheckpointError
from atoll.server.journal import Folder, Payload, read_segments
from atoll.server.recovery import CONTRIBUTION, LAST_MEETING, MEAN, MEETING, ShardImage
from atoll.store.records import Begun, Part, Record, Told
from atoll.wire.messages import Count, Hyperparameters, Setup

HELD = "held back"  # what a Part's payload is of; its key is a chunk


class SiteImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a site's shard remembers between two iterations, but for payloads. `between` is the Setup as
    the site's workers gave it, `clock` how many iterations of the site count, `met` how many meetings of
    sites are over. `held`: by chunk, the weight of what is held back of it, which is a part."""

    shard: ShardImage
    between: Setup
    hyperparameters: Hyperparameters
    clock: Count
    met: Count
    held: dict[int, float] = {}


@dataclass(frozen=True)
class FoundSite:
    """What lies in a site's folder: the latest state, where there is one, its payloads by kind and key, and
    the records since then. `next_segment` is where the journal goes on."""

    image: SiteImage | None
    parts: dict[str, dict[int, memoryview]]
    told: Iterator[tuple[Told, memoryview | None]]
    next_segment: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SiteImage)


def encode_site_image(image: SiteImage) -> bytes:
    return _encoder.encode(image)


def find_site(folder: Folder) -> FoundSite | None:
    """What a site's shard left in this folder; None where there is nothing.

    Raises CheckpointError where what is left does not suffice.
    """
    segments = folder.segments()
    if not segments:
        return None
    for start in sorted(segments, reverse=True):
        records = read_segments(folder, start)
        first = next(records, None)
        begun = first[0] if first is not None else None
        if not isinstance(begun, Begun):
            continue  # it was killed as it began this one
        if begun.fresh:
            return FoundSite(None, _no_parts(), _told(records), max(segments) + 1)
        parts = _parts_of(begun, records) if begun.state else None
        if parts is not None:
            return FoundSite(_image(folder, begun, start), parts, _told(records), max(segments) + 1)
    if len(segments) == 1:
        return None  # a shard that died as it began
    raise CheckpointError(
        f"{folder.path}: holds a part of a site's journal, and no state that it goes on from; the site's "
        "shard cannot go on from it"
    )


def _no_parts() -> dict[str, dict[int, memoryview]]:
    return {kind: {} for kind in (CONTRIBUTION, MEAN, MEETING, LAST_MEETING, HELD)}


def _parts_of(
    begun: Begun, records: Iterator[tuple[Record, Payload]]
) -> dict[str, dict[int, memoryview]] | None:
    """The payloads of a state; None where it was killed before all were written."""
    parts = _no_parts()
    for _ in range(begun.parts):
        part, payload = next(records, (None, None))
        if not isinstance(part, Part) or payload is None or part.kind not in parts:
            return None
        parts[part.kind][part.key] = payload
    return parts


def _image(folder: Folder, begun: Begun, start: int) -> SiteImage:
    try:
        return _decoder.decode(begun.state)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{folder.segment(start)}: not the state of a site's shard: {error}") from None


def _told(records: Iterator[tuple[Record, Payload]]) -> Iterator[tuple[Told, memoryview | None]]:
    """The messages among the records."""
    for record, payload in records:
        if isinstance(record, Told):
            yield record, payload
