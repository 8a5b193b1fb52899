"""The answer to a Hello, at the hub."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """The contents of Welcome, or one line for Refused. `reason` is for the record. `waits`: a shard's place
    is taken, by a process that may be dead."""

    worker: int = -1
    incarnation: int = 0
    refused: str = ""
    reason: str = ""
    waits: bool = False
