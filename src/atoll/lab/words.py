"""Links of a lab in words, for terminal, picture and reports: "20 ms ± 2 ms (normal)"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from atoll.core.units import format_bytes, format_rate, format_seconds
from atoll.lab.topology import Phase, Site, Topology


@dataclass(frozen=True)
class Way:
    """A link as users see it: both directions together if they are equal, else one."""

    source: Site
    target: Site
    both: bool
    phases: tuple[Phase, ...]

    @property
    def name(self) -> str:
        return f"{self.source.name} {'-' if self.both else '->'} {self.target.name}"


def ways(topology: Topology) -> list[Way]:
    """Return a topology's links in order, with equal directions merged."""
    phases = {(link.source, link.target): link.phases for link in topology.links}
    found: dict[tuple[int, int], Way] = {}
    for source, target in phases:
        both = phases.get((target, source)) == phases[source, target]
        if not both or (target, source) not in found:
            sites = topology.sites[source], topology.sites[target]
            found[source, target] = Way(*sites, both, phases[source, target])
    return list(found.values())


def span(seconds: float) -> str:
    """Format `0.02` as `20 ms`, `90` as `1 min 30 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.4g} ms" if seconds else "0 s"
    return f"{seconds:.4g} s" if seconds < 60 else format_seconds(seconds)


def share(probability: float) -> str:
    """Format `0.03` as `3 %`."""
    return f"{probability * 100:.4g} %"


def qualities(phase: Phase) -> dict[str, str]:
    """Describe a phase by the names of its keys; absent effects are empty texts."""
    jitter = f" ± {span(phase.jitter)} ({phase.distribution})" if phase.jitter else ""
    bursts = f" in bursts of {phase.burst:.4g}" if phase.burst > 1 else ""
    return {
        "rate": format_rate(8 * phase.rate),
        "delay": f"{span(phase.delay)}{jitter}",
        "queue": f"queue {format_bytes(phase.queue)} ({span(phase.queue / phase.rate)})",
        "loss": f"{share(phase.loss)} lost{bursts}" if phase.loss else "",
        "reorder": f"{share(phase.reorder)} overtake by {span(phase.reorder_by)}" if phase.reorder else "",
        "duplicate": f"{share(phase.duplicate)} twice" if phase.duplicate else "",
        "corrupt": f"{share(phase.corrupt)} corrupted" if phase.corrupt else "",
    }


def describe(phase: Phase) -> str:
    """Describe a phase on one line: `1 Gbit/s · 20 ms ± 2 ms (normal) · queue 4.8 MiB (40 ms) · 3 % lost`."""
    texts = [*qualities(phase).values(), "nothing gets through" if phase.down else ""]
    return " · ".join(text for text in texts if text)


def changes(way: Way) -> Iterator[tuple[float, str]]:
    """Yield the times at which a link changes, in seconds, with the differences from then on."""
    nothing = {
        "loss": "no loss",
        "reorder": "none overtakes",
        "duplicate": "none twice",
        "corrupt": "none corrupted",
    }
    for before, after in pairwise(way.phases):
        texts = []
        if before.down != after.down:
            texts.append("nothing gets through" if after.down else "open again")
        old, new = qualities(before), qualities(after)
        if before.queue == after.queue or span(before.queue / before.rate) == span(after.queue / after.rate):
            old["queue"] = new["queue"]  # equal bytes, or an equal wait: the new rate explains the rest
        texts += [new[key] or nothing[key] for key in new if new[key] != old[key]]
        # Two close numbers may print alike.
        yield after.at, " · ".join(texts) or "a little different"


def workers(site: Site) -> str:
    """Describe a site's workers: `2 workers at speeds 1, 0.25`."""
    if not site.workers:
        return "no workers"
    count = "1 worker" if site.workers == 1 else f"{site.workers} workers"
    speeds = [f"{speed:.4g}" for speed in site.speeds]
    if set(speeds) == {"1"}:
        return count
    if len(set(speeds)) == 1:
        return f"{count} at speed {speeds[0]}"
    return f"{count} at speeds {', '.join(speeds)}"


def services(topology: Topology, site: Site) -> str:
    """Describe the services that the lab starts in this site: `hub, 2 shards`, or nothing."""
    hub = topology.hub
    if hub is None or hub.site != site.index - 1:
        return ""
    return "hub" + (f", {hub.shards} shard{'s' * (hub.shards > 1)}" if hub.shards else "")


def title(topology: Topology) -> str:
    """Summarize a topology: `2 sites, 3 workers, 1 link, seed 1`."""
    counts = {
        "site": len(topology.sites),
        "worker": sum(site.workers for site in topology.sites),
        "link": len(ways(topology)),
    }
    texts = [f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items()]
    return ", ".join([*texts, f"seed {topology.seed}"])


def horizon(topology: Topology) -> float:
    """Return the seconds that a timeline shows: a little more than the last change; 0 without changes."""
    return 1.15 * max((link.phases[-1].at for link in topology.links), default=0.0)
