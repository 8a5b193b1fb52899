"""The state that both rules of the log share: contributors, their staged chunks, and the usual weight."""

from __future__ import annotations

import msgspec

from atoll.core.weighing import Usual
from atoll.store.roster import Roster
from atoll.store.stages import Stages
from atoll.wire.messages import Commit


class Contributors(msgspec.Struct, forbid_unknown_fields=True):
    """The workers and groups that the log counts with.

    Attributes:
        stages: the contributions that shards have staged.
        usual: the weights of recent contributions, each as `judged`.
    """

    roster: Roster
    stages: Stages
    usual: Usual = msgspec.field(default_factory=Usual)

    def staged_line(self, worker: int, incarnation: int, iteration: int) -> str:
        """Return, in words, which shards lack a contribution; empty if none does."""
        shards = ", ".join(map(str, self.stages.missing(worker, incarnation, iteration)))
        return f"worker {worker}'s chunks of iteration {iteration}, on shard {shards}" if shards else ""


def judged(commit: Commit) -> Commit:
    """Return a commit to judge a contribution by: with the largest weight that one of its models has."""
    if not commit.weights:
        return commit
    return msgspec.structs.replace(commit, weight=max(commit.weight, *commit.weights))
