"""The names of a run's services on one machine: `hub`, `server-0`, its standby `second-0`, `site-paris`."""

from __future__ import annotations


def part_of(name: str) -> str:
    """A process's part of the run, as the hub's decisions name it: a shard's two processes are one part."""
    kind, _, which = name.partition("-")
    parts = {
        "hub": "the hub",
        "server": f"shard {which}",
        "second": f"shard {which}",
        "site": f"site {which!r}",
    }
    return parts.get(kind, name)


def called(name: str) -> str:
    """A process's name as a person reads it."""
    kind, _, which = name.partition("-")
    names = {
        "hub": "the hub",
        "server": f"shard {which}",
        "second": f"the second process of shard {which}",
        "site": f"the shard of site {which}",
    }
    return names.get(kind, name)
