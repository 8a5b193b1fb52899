"""A worker's place in its script, as sent beside other data of the worker."""

from __future__ import annotations

import msgspec

from atoll.core.stands import Stand
from atoll.wire.base import Count


class WorkerStand(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place `stand` of worker `worker` (its rank in the run) in its script."""

    worker: Count
    stand: Stand


def unreadable(told: WorkerStand | None) -> str:
    """Return the reason why a received place must not be put into a message; empty where it may be."""
    if told is None:
        return ""
    for text in (told.stand.name, told.stand.asks, told.stand.line):
        if not text.isprintable():
            return f"a place in the script with the unprintable text {text[:40]!r}"
    return ""
