"""The answer to a Hello, at the hub."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """The contents of a Welcome, or one line for Refused.

    Attributes:
        worker: a worker's rank, or the index of a site; -1 for a shard.
        incarnation: the incarnation that the member gets.
        refused: why it may not come in; empty if it may.
        reason: what was decided, for the record.
        waits: True if a shard's place is taken by a process that may be dead: the asker waits.
    """

    worker: int = -1
    incarnation: int = 0
    refused: str = ""
    reason: str = ""
    waits: bool = False
