"""A site's place among those of a run. To the global shards, a site is one worker."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from atoll.exchange.parties import Parties
from atoll.wire.messages import VERSION, Hello


@dataclass(frozen=True)
class SitePlace:
    """Position of a site among the run's `names`, and the incarnation of its shard."""

    index: int
    names: list[str]
    incarnation: int

    @property
    def name(self) -> str:
        return self.names[self.index]

    def hello(self, run: str) -> Hello:
        """Return the site's shard's first message to the global shards."""
        return Hello(
            version=VERSION,
            run=run,
            role="worker",
            worker=self.index,
            incarnation=self.incarnation,
            pid=os.getpid(),
        )

    @property
    def parties(self) -> Parties:
        return Parties(
            own=f"site {self.name!r}",
            shard=lambda shard: f"global shard {shard}",
            others="sites",
            deadline="--timeout",
            end="the run's",
            reads=partial(in_sites, names=self.names),
        )


def in_sites(line: str, names: Sequence[str]) -> str:
    """Replace "worker N" by the site's name in a global shard's line, since its workers are sites."""

    def name(found: re.Match[str]) -> str:
        index = int(found[1])
        return f"site {names[index]!r}" if index < len(names) else found[0]

    return re.sub(r"\bworker (\d+)\b", name, line).replace(" workers are there", " sites are there")
