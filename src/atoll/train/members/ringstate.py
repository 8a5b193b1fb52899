"""The state that a newcomer of a ring takes from a living member, and the places in the data."""

from __future__ import annotations

import json
from collections.abc import Sequence

from atoll.train.checkpoint.resume import TrainingState


class RingState:
    """A session's whole state, equal on all workers of a ring (`train/group/rounds.py`: State)."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def capture(self) -> bytes:
        return self._state.capture()

    def restore(self, raw: bytes, rank: int) -> None:
        self._state.restore(raw, rank)

    def places(self, *, entered: bool = False) -> bytes:
        return json.dumps(None if entered else self._state.places()).encode()

    def deal_anew(self, places: Sequence[bytes], rank: int, world: int) -> None:
        self._state.deal_anew([json.loads(place) for place in places], rank, world)
