"""Options of a hub, for the command, `atoll run` and tests."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from atoll.core.config import KEYS_VARIABLE, Consistency, GroupBy
from atoll.core.errors import UserError
from atoll.core.options import SPAN, SPAN_OR_ZERO, Mark
from atoll.store.silence import least_patience

DEFAULT_LISTEN = "tcp://127.0.0.1:47700"
HEARTBEAT = 0.25  # seconds; the longest: a stop of 3 s must stay below the 3.5 s that are borne at least


def _groups(text: str) -> int:
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise UserError(f"--groups {text}: write a number of groups, from 1; or auto")
    return 0 if text == "auto" else int(text)


def _sites(given: list[str]) -> dict[str, int]:
    """Parse `paris=2` and the like to each site's number of workers."""
    sites: dict[str, int] = {}
    for each in given:
        name, _, count = each.partition("=")
        if not name or not count.isdecimal() or int(count) < 1:
            raise UserError(f"--site {each}: write it as NAME=WORKERS, such as paris=2")
        if name in sites:
            raise UserError(f"--site {each}: site {name!r} is given twice")
        sites[name] = int(count)
    return sites


class HubOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a hub.

    Args:
        workers: Workers that the run begins with. A run without shards has no fewer and no more.
        shards: Its server shards; 0: a ring.
        listen: tcp://HOST:PORT; port 0: any free.
        key_file: The run's keys; without them, only processes of this machine can take part.
        run: The run's name; else a new one.
        directory: Where decisions, the address and the journal are kept. A hub that is started again with
            the directory goes on with the run, at the same address.
        patience: How long a worker may be silent before it counts as dead.
        least_patience: Silence that is always borne, however regular a worker was: a link's longest outage.
            0: 3.5 s, and with a patience of more than 10 s as much more.
        heartbeat: How often members are to be heard, in seconds; 0: a tenth of the patience, and at least
            each quarter second.
        sites: A site and its workers; one for each, where there are levels.
        replicas: Processes that hold each shard: 2 for a standby of each.
        groups: Groups of workers, for strategy ps-hra; auto: as many as are best.
        group_by: Form groups by speed, joint (speed and link), site or auto.
        group_patience: How long the groups wait for a worker's probe.
        group_links: How long the measuring of links may take at the start; 0: none.
        regroup: Group anew as speeds and workers change.
        consistency: With --groups: the run's sync.consistency.
        shares: With --groups: auto if the run's sync.shares is auto; else even.
        at_least: With fewer workers left, a ring ends.
        until_done: End, and end the shards, when all workers have left.
    """

    workers: Annotated[int, Mark("N")]
    shards: Annotated[int, Mark("M")] = 1
    listen: Annotated[str, Mark("ADDRESS")] = DEFAULT_LISTEN
    key_file: Annotated[str, Mark("FILE", variable=KEYS_VARIABLE)] = ""
    run: Annotated[str, Mark("NAME")] = ""
    directory: Annotated[str, Mark("D")] = ""
    patience: Annotated[float, SPAN] = 10.0
    least_patience: Annotated[float, SPAN_OR_ZERO] = 0.0
    heartbeat: Annotated[float, Mark(is_hidden=True)] = 0.0
    sites: Annotated[dict[str, int], Mark("NAME=N", flag="--site", parse=_sites)] = {}
    replicas: Annotated[int, Mark("R")] = 1
    groups: Annotated[int | None, Mark("K", parse=_groups)] = None
    group_by: Annotated[GroupBy, Mark("HOW")] = "auto"
    group_patience: Annotated[float, SPAN] = 60.0
    group_links: Annotated[float, SPAN_OR_ZERO] = 5.0
    regroup: bool = True
    consistency: Annotated[Consistency, Mark("MODE")] = "asp"
    shares: Annotated[Literal["even", "auto"], Mark("HOW")] = "even"
    at_least: Annotated[int, Mark("M")] = 1
    until_done: bool = False

    @property
    def least_seconds(self) -> float:
        """Seconds of silence that are always tolerated."""
        return self.least_patience or least_patience(self.patience)

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between a member's heartbeats."""
        return self.heartbeat or min(HEARTBEAT, self.patience / 10)
