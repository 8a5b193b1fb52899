"""What a lab is made of: its sites, the links between them, and how those change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """A place with workers of its own, reached only over links."""

    name: str
    index: int  # from 1, in the file's order
    workers: int
    speeds: tuple[float, ...]
    address: str


@dataclass(frozen=True)
class Phase:
    """How one direction of a link behaves from `at` on, until its next phase."""

    at: float
    rate: float
    delay: float
    jitter: float
    distribution: str
    queue: int
    loss: float
    burst: float
    reorder: float
    reorder_by: float
    duplicate: float
    corrupt: float
    down: bool


@dataclass(frozen=True)
class Link:
    """One direction of a link."""

    source: int
    target: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class HubPlace:
    """Where the lab starts a hub, and how many shards beside it."""

    site: int
    shards: int


@dataclass(frozen=True)
class Topology:
    """A whole lab, as a file describes it."""

    seed: int
    sites: tuple[Site, ...]
    links: tuple[Link, ...]
    hub: HubPlace | None = None
