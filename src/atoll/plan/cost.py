"""Costs of one synchronisation: four schemes in closed form, and adding up gradients within a machine.

Every argument is a keyword, every result is in seconds. The four schemes share their arguments:

- `nodes`: N, a whole number from 1 on; `groups`: k, a whole number from 1 to N;
- `size`: S, bytes of gradients, equal on each node;
- `bandwidth`: B, bytes per second, each way between two nodes;
- `latency`: a, seconds from one node to another;
- `compute`: C, seconds for each byte that is added up or applied.

Groups have N/k members. If k does not divide N, the formulas take the fraction, the mean size; the time lies
between those of the two actual sizes (the first N mod k groups have one member more, and a step waits for
these wherever it waits for all).

An impossible value (k above N, a negative size, NaN) raises UserError. Source: docs/planning.md, "Costs in
closed form".
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Real

from atoll.core.errors import UserError


def parameter_server(*, nodes: float, size: float, bandwidth: float, latency: float, compute: float) -> float:
    """One server for all nodes: 2(a + N S/B) + N S C seconds. Arguments: the module's."""
    n = _nodes(nodes)
    s, b, a, c = _quantities(size, bandwidth, latency, compute)
    return 2 * (a + n * s / b) + n * s * c


def ring(*, nodes: float, size: float, bandwidth: float, latency: float, compute: float) -> float:
    """One ring of all nodes: 2(N - 1)(a + S/(N B)) + (N - 1)(S/N) C seconds. Arguments: the module's."""
    n = _nodes(nodes)
    s, b, a, c = _quantities(size, bandwidth, latency, compute)
    return 2 * (n - 1) * (a + s / (n * b)) + (n - 1) * (s / n) * c


def hierarchical(
    *, nodes: float, groups: float, size: float, bandwidth: float, latency: float, compute: float
) -> float:
    """A ring in each group, a ring of the k leaders, and a broadcast in each group. Arguments: the module's.

    2(N/k - 1)(a + k S/(N B)) + 2(k - 1)(a + S/(k B)) + (N/k - 1)(k S/N) C + (k - 1)(S/k) C + a + S/B seconds.
    """
    n, k = _grouped(nodes, groups)
    s, b, a, c = _quantities(size, bandwidth, latency, compute)
    inside = 2 * (n / k - 1) * (a + k * s / (n * b)) + (n / k - 1) * (k * s / n) * c
    between = 2 * (k - 1) * (a + s / (k * b)) + (k - 1) * (s / k) * c
    broadcast = a + s / b
    return inside + between + broadcast


def ps_hra(
    *, nodes: float, groups: float, size: float, bandwidth: float, latency: float, compute: float
) -> float:
    """A ring in each group, and one member of each at an asynchronous server. Arguments: the module's.

    2(N/k - 1)(a + k S/(N B)) + (N/k - 1)(k S/N) C + 3(a + S/B) + S C seconds: reduce-scatter and all-gather
    in the group; to the server and back, 2(a + S/B) + S C; and the broadcast, a + S/B. The server's part
    supposes that groups never meet at the server.
    """
    n, k = _grouped(nodes, groups)
    s, b, a, c = _quantities(size, bandwidth, latency, compute)
    inside = 2 * (n / k - 1) * (a + k * s / (n * b)) + (n / k - 1) * (k * s / n) * c
    server = 2 * (a + s / b) + s * c
    broadcast = a + s / b
    return inside + server + broadcast


@dataclass(frozen=True)
class Costs:
    """Seconds of one synchronisation under each scheme."""

    parameter_server: float
    ring: float
    hierarchical: float
    ps_hra: float

    @property
    def best(self) -> str:
        """Name of the cheapest scheme; of equal ones, the first in the table."""
        seconds: dict[str, float] = asdict(self)
        return min(seconds, key=lambda name: seconds[name])


def compare(
    *, nodes: float, groups: float, size: float, bandwidth: float, latency: float, compute: float
) -> Costs:
    """Return the costs of all four schemes; parameter server and ring ignore `groups`."""
    one = {"nodes": nodes, "size": size, "bandwidth": bandwidth, "latency": latency, "compute": compute}
    return Costs(
        parameter_server(**one), ring(**one), hierarchical(groups=groups, **one), ps_hra(groups=groups, **one)
    )


def one_device(*, devices: float, size: float, bandwidth: float) -> float:
    """All gradients are added up on one of the devices: 2(n - 1) S/B seconds.

    The others' gradients come in one after another, and the sum goes out one after another. Small transfers
    do not fill a link: real machines take longer than this.

    Args:
        devices: n, a whole number from 1 on.
        size: S, bytes of gradients on each device.
        bandwidth: B, bytes per second of a device's link, each way.
    """
    n, s, b = _devices(devices, size, bandwidth)
    return 2 * (n - 1) * s / b


def on_cpu(*, devices: float, size: float, bandwidth: float) -> float:
    """All gradients are added up in the host's memory: 2 n S/B seconds. Arguments: those of `one_device`."""
    n, s, b = _devices(devices, size, bandwidth)
    return 2 * n * s / b


def spread(*, devices: float, size: float, bandwidth: float) -> float:
    """Each device adds up one n-th of the gradients, all links busy at once: 2(n - 1)/n S/B seconds.

    Arguments: those of `one_device`. Only for element-wise optimizers.
    """
    n, s, b = _devices(devices, size, bandwidth)
    return 2 * (n - 1) * (s / n) / b


def ring_of(*, devices: float, size: float, bandwidth: float, links: float = 1, exact: bool = False) -> float:
    """The devices' gradients go round in rings: 2 S/(links B) seconds, whatever the number of devices.

    Args:
        devices, size: those of `one_device`.
        bandwidth: B, bytes per second of one link, each way.
            links: links over which each device sends at once, over all rings together (three for the eight
            V100s: two on one ring, one on the other).
            exact: include the factor (n - 1)/n, which the rule of thumb leaves out: a share of the data never
            leaves its device.
    """
    n, s, b = _devices(devices, size, bandwidth)
    wide = b * _number("links", links, above=True)
    return 2 * s / wide * ((n - 1) / n if exact else 1)


def _nodes(nodes: float) -> int:
    return _whole("nodes", nodes)


def _grouped(nodes: float, groups: float) -> tuple[int, int]:
    n, k = _whole("nodes", nodes), _whole("groups", groups)
    if k > n:
        raise UserError(f"groups = {k}: more than the {n} nodes; a group has at least one")
    return n, k


def _devices(devices: float, size: float, bandwidth: float) -> tuple[int, float, float]:
    return _whole("devices", devices), _number("size", size), _number("bandwidth", bandwidth, above=True)


def _quantities(
    size: float, bandwidth: float, latency: float, compute: float
) -> tuple[float, float, float, float]:
    return (
        _number("size", size),
        _number("bandwidth", bandwidth, above=True),
        _number("latency", latency),
        _number("compute", compute),
    )


def _whole(name: str, value: float) -> int:
    if not isinstance(value, Real) or not math.isfinite(value) or value < 1 or value != math.floor(value):
        raise UserError(f"{name} = {_written(value)}: must be a whole number, 1 or more")
    return int(value)


def _number(name: str, value: float, above: bool = False) -> float:
    """Return `value` if it is finite and not negative, nor 0 with `above`; else raise UserError."""
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0 or (above and value == 0):
        raise UserError(
            f"{name} = {_written(value)}: must be a number {'above 0' if above else 'that is 0 or more'}"
        )
    return float(value)


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
