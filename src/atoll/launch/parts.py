"""The names of a run's services on one machine: `hub`, `server-0`, its standby `second-0`, `site-paris`."""

from __future__ import annotations


def part_of(name: str) -> str:
    """Return a process's part of the run, by its name in the hub's decisions: a shard's two processes are
    one part."""
    kind, _, which = name.partition("-")
    parts = {
        "hub": "the hub",
        "server": f"shard {which}",
        "second": f"shard {which}",
        "site": f"site {which!r}",
    }
    return parts.get(kind, name)


def called(name: str) -> str:
    """Return a process's name for people."""
    kind, _, which = name.partition("-")
    names = {
        "hub": "the hub",
        "server": f"shard {which}",
        "second": f"the second process of shard {which}",
        "site": f"the shard of site {which}",
    }
    return names.get(kind, name)
