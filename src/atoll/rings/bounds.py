"""How fast the slowest link of a ring can be at most: what tells that a ring which was found is the best."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll.rings.matrices import Matrix, reached

_Links = NDArray[np.bool_]


def bound(weights: Matrix, symmetric: bool) -> float:
    """No ring of three or more members has a slowest link above this; 0: there is no ring.

    Each member needs a link from one neighbour and a link to another; all must be reached from each; and
    whoever is taken out must not cut the others apart.
    """
    most = _degrees(weights)
    if not symmetric:
        most = _greatest(weights, most, _strong)
    return _greatest(np.maximum(weights, weights.T), most, lambda links: not cuts(links))


def _degrees(weights: Matrix) -> float:
    """The least over members of the best pair of a link in and a link out, with different neighbours."""
    n = len(weights)
    least = np.inf
    for member in range(n):
        coming, going = weights[:, member], weights[member]
        sources, targets = np.argsort(-coming, kind="stable")[:2], np.argsort(-going, kind="stable")[:2]
        pairs = (min(coming[s], going[t]) for s in sources for t in targets if s != t)
        least = min(least, max(pairs))
    return float(least)


def _greatest(weights: Matrix, most: float, holds: Callable[[_Links], bool]) -> float:
    """The greatest value up to `most` for which the links of that weight and above have the property."""
    values = np.unique(np.minimum(weights, most)[weights > 0])
    values = values[values > 0]
    low, high = 0, len(values)  # it holds below low, and not from high on
    while low < high:
        middle = (low + high) // 2
        if holds(weights >= values[middle]):
            low = middle + 1
        else:
            high = middle
    return float(values[low - 1]) if low else 0.0


def _strong(links: _Links) -> bool:
    return bool(reached(links, 0).all() and reached(links.T, 0).all())


def cuts(links: _Links) -> list[int]:
    """The members whose loss would cut the others apart, or all of them where they are apart already.

    `links` is symmetric. Source: Hopcroft and Tarjan's low points, of a depth-first search; each member's
    neighbour that was met first is found for all members at once.
    """
    n = len(links)
    order, parent = _depth_first(links)
    if len(order) < n:
        return list(range(n))
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    low = links[np.ix_(order, order)].argmax(axis=1)  # by places
    found = set()
    for at in range(n - 1, 0, -1):
        above = int(place[parent[order[at]]])
        if above and low[at] >= above:
            found.add(order[above])
        low[above] = min(low[above], low[at])
    if sum(parent[member] == order[0] for member in order[1:]) > 1:
        found.add(order[0])
    return sorted(found)


def _depth_first(links: _Links) -> tuple[list[int], list[int]]:
    """The members in the order in which they are met from member 0 on, and from whom each was met first."""
    n = len(links)
    rows = [int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little") for row in links]
    unseen = (1 << n) - 2
    order, parent, path = [0], [0] * n, [0]
    while path:
        ahead = rows[path[-1]] & unseen
        if not ahead:
            path.pop()
            continue
        member = (ahead & -ahead).bit_length() - 1
        unseen ^= 1 << member
        parent[member] = path[-1]
        order.append(member)
        path.append(member)
    return order, parent
