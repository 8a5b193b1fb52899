"""What a newcomer of a ring takes from a living member, and what changes with the members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.train.checkpoint.resume import TrainingState
from atoll.train.members.workers import Workers


class RingState:
    """A session's whole state, which all workers of a ring have alike (`train/group/rounds.py`: State)."""

    def __init__(self, state: TrainingState, workers: Workers) -> None:
        self._state, self._workers = state, workers

    def capture(self) -> bytes:
        return self._state.capture()

    def restore(self, raw: bytes) -> None:
        self._state.restore(raw, self._workers.place.rank)

    def all_places(self, *, entered: bool = False) -> list[Any]:
        """Each member's place in its data; None for one that has `entered`. A collective."""
        own = None if entered else self._state.places()
        return self._workers.gather(own, "the members' places in their data")

    def deal_anew(self, places: Sequence[Any], rank: int, world: int) -> None:
        self._state.deal_anew(places, rank, world)
