"""Claims about PS-HRA's two figures, checked against the closed forms: where each holds, and why.

The figure against latency is drawn for N workers in k groups, and for four times as many workers, once with k
and once with N/k kept. The figure against N keeps k, or N/k, at each latency. Source: docs/planning.md, "The
figures, and what they claim".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, groupby, pairwise
from typing import Annotated

import msgspec

from atoll.core.errors import UserError
from atoll.core.options import Mark
from atoll.plan import cost
from atoll.plan.options import BANDWIDTH, GRADIENTS, LATENCY, NUMBER, WHOLE

SCHEMES = ("parameter_server", "ring", "hierarchical", "ps_hra")
WORDS = {
    "parameter_server": "the parameter server",
    "ring": "the ring",
    "hierarchical": "the hierarchical ring",
    "ps_hra": "PS-HRA",
}
RIVALS = SCHEMES[:3]
_MORE = 4  # factor of workers in the figure against latency
_SPAN = 64  # factor of workers at the end of the figure against N


class Values(msgspec.Struct, frozen=True):
    """Inputs of the figures: N, k, S in bytes, B in bytes/s, C in seconds a byte, and the latencies, in
    seconds, of the figures against N.

    Args:
        nodes: Workers.
        groups: Groups, of N/K workers.
        size: Gradients of a worker: 160e6, 160MB.
        bandwidth: Of a link: 1.25e9 (bytes/s), or in bits: 10Gbit/s.
        compute: Seconds to add up a byte, such as 1e-10.
        latencies: From one worker to another: 1e-3 (seconds), 1ms. May be given several times.
    """

    nodes: Annotated[int, WHOLE, Mark("N")] = 16
    groups: Annotated[int, WHOLE, Mark("K")] = 4
    size: Annotated[float, GRADIENTS, Mark("S", flag="--bytes")] = 160e6
    bandwidth: Annotated[float, BANDWIDTH, Mark("B")] = 1.25e9
    compute: Annotated[float, NUMBER, Mark("C")] = 1e-10
    latencies: Annotated[tuple[float, ...], LATENCY, Mark("A", flag="--latency")] = (1e-3, 50e-3)

    def check(self) -> None:
        """Raise UserError for values from which nothing can be drawn."""
        for latency in self.latencies:
            self.costs(self.nodes, self.groups, latency)
        if self.nodes % self.groups:
            raise UserError(
                f"{self.nodes} nodes in {self.groups} groups: N/k is kept in one figure, so k must divide N"
            )
        if self.nodes > 1024:
            raise UserError(f"{self.nodes} nodes: the figures begin with 1024 at most")
        if len(self.latencies) > 6:
            raise UserError(f"{len(self.latencies)} latencies: a figure has room for 6")
        if not self.size:
            raise UserError("bytes = 0: with nothing to send there is nothing to draw")

    def costs(self, nodes: int, groups: int, latency: float) -> cost.Costs:
        """Return the seconds of each scheme."""
        return cost.compare(
            nodes=nodes,
            groups=groups,
            size=self.size,
            bandwidth=self.bandwidth,
            latency=latency,
            compute=self.compute,
        )

    def said(self) -> str:
        """Describe S, B and C."""
        sent = f"S = {self.size / 1e6:g} MB, B = {self.bandwidth / 1e9:g} GB/s"
        return f"{sent}, C = {self.compute * 1e9:g} ns a byte"


@dataclass(frozen=True)
class Claim:
    """A claim, where it holds, and the terms that show it."""

    figure: str  # "latency" or "nodes"
    setting: str
    claim: str
    holds: str  # "everywhere" in the figure, "in part" or "nowhere"
    where: str
    why: str


@dataclass(frozen=True)
class CheapestRange:
    """Range in which one scheme is the lowest: latencies in seconds, or numbers of workers."""

    scheme: str
    start: float
    end: float


@dataclass(frozen=True)
class Crossing:
    """Point from which `upper`, the dearer of two schemes before, is the cheaper: a latency, or a number
    N."""

    at: float
    seconds: float
    upper: str
    lower: str


class AgainstLatency:
    """Time over the latency, straight lines, for `nodes` workers in `groups` groups."""

    def __init__(self, values: Values, nodes: int, groups: int) -> None:
        self.values, self.nodes, self.groups = values, nodes, groups
        self.setting = f"N = {nodes}, k = {groups}"
        self.still = asdict(values.costs(nodes, groups, 0.0))  # at latency 0
        self.slopes = {
            "parameter_server": 2.0,
            "ring": 2.0 * (nodes - 1),
            "hierarchical": 2 * nodes / groups + 2 * groups - 3,
            "ps_hra": 2 * nodes / groups + 1,
        }

    def seconds(self, scheme: str, latency: float) -> float:
        found: float = self.still[scheme] + self.slopes[scheme] * latency
        return found

    def meeting(self, one: str, other: str) -> float | None:
        """Return the latency above 0 at which two schemes cost the same."""
        steeper = self.slopes[one] - self.slopes[other]
        at = (self.still[other] - self.still[one]) / steeper if steeper else 0.0
        return at if at > 0 else None

    def crossings(self) -> list[Crossing]:
        """Return the crossings of two lines, by latency."""
        found = []
        for one, other in combinations(SCHEMES, 2):
            at = self.meeting(one, other)
            if at is not None:
                upper, lower = (one, other) if self.slopes[one] < self.slopes[other] else (other, one)
                found.append(Crossing(at, self.seconds(one, at), upper, lower))
        return sorted(found, key=lambda crossing: crossing.at)

    def lowest(self) -> list[CheapestRange]:
        """Return the cheapest scheme of each range of latencies, from 0 on."""
        edges = [0.0, *(crossing.at for crossing in self.crossings())]
        edges.append(2 * edges[-1] + 1)
        parts: list[CheapestRange] = []
        for start, end in pairwise(edges):
            best = min(SCHEMES, key=lambda scheme: self.seconds(scheme, (start + end) / 2))
            last = end == edges[-1]
            begin = parts.pop().start if parts and parts[-1].scheme == best else start
            parts.append(CheapestRange(best, begin, float("inf") if last else end))
        return parts

    def claims(self) -> list[Claim]:
        return [self._steepest(), self._flat(), self._lowest(), *(self._lead(rival) for rival in RIVALS)]

    def _claim(self, claim: str, holds: str, where: str, why: str) -> Claim:
        return Claim("latency", self.setting, claim, holds, where, why)

    def _steepest(self) -> Claim:
        steepest = max(SCHEMES, key=lambda scheme: self.slopes[scheme])
        return self._claim(
            "the ring is the steepest",
            "everywhere" if steepest == "ring" else "nowhere",
            "at every latency" if steepest == "ring" else f"nowhere: {WORDS[steepest]} is",
            f"slopes: {', '.join(f'{WORDS[scheme]} {self.slopes[scheme]:g}' for scheme in SCHEMES)}; "
            "2(N - 1) exceeds the others' wherever 1 < k < N and N > 2",
        )

    def _flat(self) -> Claim:
        tenth = 0.1 * self.still["parameter_server"] / 2
        return self._claim(
            "the parameter server is nearly flat",
            "everywhere",
            f"its slope, 2, is the least of all; its time has risen by a tenth at {span(tenth)}",
            "2(a + N S/B) + N S C: the latency counts twice, whatever N is",
        )

    def _lowest(self) -> Claim:
        parts = [part for part in self.lowest() if part.scheme == "ps_hra"]
        others = [
            f"{WORDS[part.scheme]} {_between(part, span)}"
            for part in self.lowest()
            if part.scheme != "ps_hra"
        ]
        where = " and ".join(_between(part, span) for part in parts) or "nowhere"
        return self._claim(
            "PS-HRA is the lowest",
            _extent(parts, others),
            f"{where}; lowest elsewhere: {', '.join(others)}" if others else where,
            "at no latency it pays 3 S/B + S C for the way to the server and the broadcast; for a large one"
            " its slope, 2N/k + 1, exceeds the parameter server's 2",
        )

    def _lead(self, rival: str) -> Claim:
        gain = self.slopes[rival] - self.slopes["ps_hra"]
        at = self.meeting(rival, "ps_hra")
        ahead = self.still[rival] > self.still["ps_hra"]
        if gain > 0:
            where = (
                "at every latency" if ahead or at is None else f"from {span(at)} on; below, PS-HRA costs more"
            )
        elif at is not None and ahead:
            where = (
                f"nowhere: it shrinks by {-gain:g} s for each second of latency, and is gone at {span(at)}"
            )
        elif gain == 0:
            where = (
                f"nowhere: {'it stays as it is' if ahead else 'PS-HRA costs more by the same at any latency'}"
            )
        else:
            where = "nowhere: PS-HRA costs more, and ever more"
        slope = {"parameter_server": "1 - 2N/k", "ring": "2N - 2N/k - 3", "hierarchical": "2k - 4"}[rival]
        return self._claim(
            f"PS-HRA's lead over {WORDS[rival]} grows with the latency",
            "nowhere" if gain <= 0 else "everywhere" if ahead or at is None else "in part",
            where,
            f"the lead's slope is {slope} = {gain:g}",
        )


class AgainstNodes:
    """Time over the number of workers at one latency, with k kept, or N/k (`fixed`: "N/k")."""

    def __init__(self, values: Values, fixed: str, latency: float) -> None:
        self.values, self.fixed, self.latency = values, fixed, latency
        self.per = values.nodes // values.groups  # workers in a group
        self._unit = values.groups if fixed == "k" else self.per
        kept = f"k = {values.groups}" if fixed == "k" else f"N/k = {self.per}"
        self.setting = f"{kept} kept, a = {span(latency)}"
        last = _SPAN * values.nodes
        # All N with groups of one size, or about 2000 of them, evenly spaced.
        count = last // self._unit
        self.nodes = [self._unit * at for at in range(1, count + 1, max(1, count // 2000))]
        self.costs = [asdict(values.costs(n, self.groups(n), latency)) for n in self.nodes]

    def groups(self, nodes: int) -> int:
        return self.values.groups if self.fixed == "k" else nodes // self.per

    def seconds(self, scheme: str) -> list[float]:
        return [costs[scheme] for costs in self.costs]

    def server(self, nodes: int) -> float:
        """Return the seconds that all groups keep the server's link, or its adder, busy.

        PS-HRA's formula supposes that each group finds the server free. Where this time exceeds the
        formula's, groups must wait for one another.
        """
        each = max(self.values.size / self.values.bandwidth, self.values.size * self.values.compute)
        return self.groups(nodes) * each

    def crossings(self) -> list[Crossing]:
        """Return the numbers N from which two schemes have changed places."""
        found = []
        for one, other in combinations(SCHEMES, 2):
            above = [costs[one] > costs[other] for costs in self.costs]
            for at in range(1, len(above)):
                if above[at] != above[at - 1]:
                    upper, lower = (other, one) if above[at] else (one, other)
                    found.append(Crossing(self.nodes[at], self.costs[at][lower], upper, lower))
        return sorted(found, key=lambda crossing: crossing.at)

    def lowest(self) -> list[CheapestRange]:
        """Return the cheapest scheme of each range of N."""
        parts: list[CheapestRange] = []
        for nodes, costs in zip(self.nodes, self.costs, strict=True):
            best = min(SCHEMES, key=lambda scheme: costs[scheme])
            begin = parts.pop().start if parts and parts[-1].scheme == best else nodes
            parts.append(CheapestRange(best, begin, nodes))
        return parts

    def claims(self) -> list[Claim]:
        return [self._flat(), self._lowest(), *(self._rising(rival) for rival in RIVALS), self._premise()]

    def _claim(self, claim: str, holds: str, where: str, why: str) -> Claim:
        return Claim("nodes", self.setting, claim, holds, where, why)

    def _rise(self, scheme: str) -> str:
        first, last = self.costs[0][scheme], self.costs[-1][scheme]
        return f"{span(first)} at N = {self.nodes[0]}, {span(last)} at N = {self.nodes[-1]}"

    def _flat(self) -> Claim:
        if self.fixed == "N/k":
            return self._claim(
                "PS-HRA is nearly flat",
                "everywhere",
                f"at every N: {self._rise('ps_hra')}",
                "of N and k, N/k alone is in its formula; but see the server's premise",
            )
        seconds = self.seconds("ps_hra")
        flat = [n for n, each in zip(self.nodes, seconds, strict=True) if each <= 2 * seconds[0]]
        slope = 2 * self.latency / self.values.groups
        return self._claim(
            "PS-HRA is nearly flat",
            "everywhere" if flat[-1] == self.nodes[-1] else "in part",
            f"up to N = {flat[-1]} it is at most twice what it is at first: {self._rise('ps_hra')}",
            f"the ring inside grows: for large N each worker more costs 2a/k = {span(slope)}, as much as"
            " under the hierarchical ring",
        )

    def _lowest(self) -> Claim:
        lowest = self.lowest()
        parts = [part for part in lowest if part.scheme == "ps_hra"]
        others = [
            f"{WORDS[part.scheme]} {_between(part, _count)}" for part in lowest if part.scheme != "ps_hra"
        ]
        where = " and ".join(_between(part, _count) for part in parts) or "nowhere"
        return self._claim(
            "PS-HRA is the lowest for large N",
            "nowhere" if not parts else "everywhere" if lowest[-1].scheme == "ps_hra" else "in part",
            f"{where}; lowest elsewhere: {', '.join(others)}" if others else where,
            self._limit(),
        )

    def _limit(self) -> str:
        """Return what follows from the formulas for growing N."""
        k, a = self.values.groups, self.latency
        whole = self.values.size / self.values.bandwidth
        added = self.values.size * self.values.compute
        if self.fixed == "N/k":
            return (
                "as N grows all others grow without end, and PS-HRA does not; but see the server's premise"
                if a
                else "without latency the rings end at about 2S/B + SC, below PS-HRA"
            )
        lead = (2 * k - 4) * a - (2 * whole + added) / k
        more = "less" if lead > 0 else "more"
        server = "below" if 2 * a / k < 2 * whole + added else "above"
        return (
            "hierarchical minus PS-HRA is (2k - 4)a - (2S/B + SC)/k at every N: PS-HRA costs"
            f" {span(abs(lead))} {more}; for large N it is {server} the parameter server,"
            f" as 2a/k is {server} 2S/B + SC"
        )

    def _rising(self, rival: str) -> Claim:
        seconds = self.seconds(rival)
        rising = all(one < other for one, other in pairwise(seconds))
        why = {
            "parameter_server": "by 2S/B + SC a worker",
            "ring": "by about 2a a worker; without latency it would end at 2S/B + SC",
            "hierarchical": "by 2a/(N/k) a worker for large N: the ring of leaders grows",
        }[rival]
        if rival == "hierarchical" and self.fixed == "k":
            why = "exactly as PS-HRA does: their difference does not depend on N"
        return self._claim(
            f"{WORDS[rival]} rises with N",
            "everywhere" if rising else "nowhere",
            ("at every N: " if rising else "not at every N: ") + self._rise(rival),
            why,
        )

    def _premise(self) -> Claim:
        """Return the claim that PS-HRA's formula rests on, though the paper does not make it."""
        overloaded = [
            (n, costs["ps_hra"])
            for n, costs in zip(self.nodes, self.costs, strict=True)
            if self.server(n) > costs["ps_hra"]
        ]
        where = "at every N"
        if overloaded:
            (least, _), (most, seconds) = overloaded[0], overloaded[-1]
            where = f"not at N = {most}" if least == most else f"not from N = {least} to N = {most}"
            where += (
                f": its work for k groups takes longer (at N = {most} {span(self.server(most))}, where the"
                f" formula says {span(seconds)}), and groups wait; with no less than that for PS-HRA, it is"
                f" the lowest {self._lowest_at_least()}"
            )
        return self._claim(
            "the server is free when a group comes (what PS-HRA's formula supposes)",
            "everywhere"
            if not overloaded
            else "nowhere"
            if len(overloaded) == len(self.nodes)
            else "in part",
            where,
            "each of k groups keeps the server's link busy for S/B each way, and its adder for S C",
        )

    def _lowest_at_least(self) -> str:
        """Return where PS-HRA is the lowest if it takes at least the server's time."""
        lowest = [
            n
            for n, costs in zip(self.nodes, self.costs, strict=True)
            if max(costs["ps_hra"], self.server(n)) < min(costs[rival] for rival in RIVALS)
        ]
        return _between(CheapestRange("ps_hra", lowest[0], lowest[-1]), _count) if lowest else "nowhere"


@dataclass(frozen=True)
class Findings:
    """All panels, and their claims."""

    latency: list[AgainstLatency]
    nodes: list[AgainstNodes]

    @property
    def panels(self) -> list[AgainstLatency | AgainstNodes]:
        return [*self.latency, *self.nodes]

    @property
    def claims(self) -> list[Claim]:
        return [claim for panel in self.panels for claim in panel.claims()]


def find(values: Values) -> Findings:
    """Compute all panels. Raises UserError for values from which nothing can be drawn."""
    values.check()
    n, k = values.nodes, values.groups
    settings = dict.fromkeys([(n, k), (_MORE * n, k), (_MORE * n, _MORE * k)])
    return Findings(
        [AgainstLatency(values, nodes, groups) for nodes, groups in settings],
        [AgainstNodes(values, fixed, latency) for latency in values.latencies for fixed in ("k", "N/k")],
    )


def span(seconds: float) -> str:
    """Format seconds with three digits and a fitting unit: 0.0173 as `17.3 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"


def _extent(parts: Sequence[CheapestRange], others: Sequence[str]) -> str:
    return "everywhere" if not others else "in part" if parts else "nowhere"


def _count(nodes: float) -> str:
    return f"N = {nodes:g}"


def _between(part: CheapestRange, written: Callable[[float], str]) -> str:
    if part.end == float("inf"):
        return f"from {written(part.start)} on" if part.start else "everywhere"
    if part.start == part.end:
        return f"at {written(part.start)}"
    return f"from {written(part.start)} to {written(part.end)}"


def as_text(values: Values, claims: Sequence[Claim]) -> str:
    """Return the claims as text, by figure and setting."""
    lines = [f"PS-HRA's figures from {values.said()}"]
    for (figure, setting), group in groupby(claims, lambda claim: (claim.figure, claim.setting)):
        axis = "the latency a" if figure == "latency" else "the number of workers N"
        heading = f"Time against {axis}, {setting}"
        lines += ["", heading, "-" * len(heading)]
        for claim in group:
            lines += [
                f"{claim.claim}: holds {claim.holds}",
                f"    where: {claim.where}",
                f"    why:   {claim.why}",
            ]
    return "\n".join(lines) + "\n"
