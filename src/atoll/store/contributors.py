"""State that both rules of the log share: contributors, their staged chunks, and the usual weight."""

from __future__ import annotations

import msgspec

from atoll.core.weighing import Usual
from atoll.store.roster import Roster
from atoll.store.stages import Stages


class Contributors(msgspec.Struct, forbid_unknown_fields=True):
    """The workers that the log counts with, their staged contributions, and the weights of recent ones."""

    roster: Roster
    stages: Stages
    usual: Usual = msgspec.field(default_factory=Usual)

    def staged_line(self, worker: int, incarnation: int, iteration: int) -> str:
        """Say, in words, which shards lack a contribution; empty where none does."""
        shards = ", ".join(map(str, self.stages.missing(worker, incarnation, iteration)))
        return f"worker {worker}'s chunks of iteration {iteration}, on shard {shards}" if shards else ""
