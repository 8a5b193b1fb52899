"""What the model of attempts is run on: cells by name, cells that are refused, and any cell that is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attempt_world import Cell

TWO, THREE = ((0, 1),), ((0, 1, 2),)
PAIRS = ((0, 1), (2, 3))

CELLS = {
    # A server that waits for all contributors.
    "whole": Cell(groups=THREE),
    "whole, shares, codec": Cell(speaker="shares", groups=TWO, codec=True),
    "whole, codec": Cell(groups=THREE, codec=True),
    "whole, clip": Cell(groups=TWO, edits=("clip",), stranger=False),
    "whole, edits": Cell(groups=TWO, edits=("other", "clip")),
    "parts": Cell(store="parts", speaker="shares", groups=THREE),
    "parts, codec": Cell(store="parts", speaker="shares", groups=TWO, codec=True),
    "parts, movers": Cell(store="parts", speaker="shares", groups=THREE, edits=("clip",), movers=True),
    "parts, edits": Cell(store="parts", speaker="shares", groups=THREE, edits=("clip", "clip", "other")),
    "parts, edits, alone": Cell(
        store="parts", speaker="shares", groups=TWO, edits=("other",), stranger=False
    ),
    "backward raises, alone": Cell(groups=((0,),), raises=((0, 1), (0, 2))),
    "backward raises": Cell(store="parts", speaker="shares", groups=TWO, raises=((0, 1), (1, 2))),
    "assists": Cell(groups=THREE, assists=((0, 1),), edits=("clip",)),
    "assists, parts": Cell(
        store="parts", speaker="shares", groups=THREE, assists=((0, 1),), edits=("clip", "other")
    ),
    # Members move, leave and come.
    "swap": Cell(speaker="shares", groups=PAIRS, stranger=False, change=((0, 2), (1, 3))),
    "swap, parts": Cell(
        store="parts",
        speaker="shares",
        groups=PAIRS,
        stranger=False,
        edits=("clip",),
        change=((3, 2, 4), (0, 1)),
    ),
    "leave, parts": Cell(store="parts", speaker="shares", groups=THREE, codec=True, change=((0, 2),)),
    "newcomer, parts": Cell(store="parts", speaker="shares", groups=TWO, change=((0, 1, 2),)),
    "dissolve": Cell(groups=((0, 1), (2,)), stranger=False, change=((), (0, 1, 2))),
    # Open exchanges: a server that does not wait, and local steps.
    "asp": Cell("asp", groups=THREE, edits=("clip", "other")),
    "asp, open": Cell("asp", speaker="shares", groups=TWO, overlap=1),
    "asp, open, codec": Cell("asp", groups=TWO, overlap=1, codec=True),
    "ssp, swap": Cell("asp", groups=PAIRS, stranger=False, slack=0, change=((0, 2), (1, 3))),
    "asp, parts": Cell("asp", "parts", "shares", groups=THREE, edits=("clip", "other")),
    "asp, parts, codec": Cell("asp", "parts", "shares", groups=TWO, codec=True),
    "asp, swap": Cell("asp", groups=PAIRS, stranger=False, overlap=1, change=((0, 2), (1, 3))),
    "asp, newcomer": Cell("asp", groups=TWO, overlap=1, change=((0, 1, 2),)),
    "asp, leave": Cell("asp", groups=THREE, overlap=1, change=((1, 2),)),
    "asp, dissolve": Cell("asp", groups=((0, 1), (2,)), stranger=False, overlap=1, change=((), (0, 1, 2))),
    "local steps": Cell("replicas", groups=TWO, iterations=4),
    "local steps, two open": Cell("replicas", groups=THREE, fragments=2, period=2, overlap=2, iterations=5),
    "local steps, parts": Cell(
        "replicas", "parts", "shares", groups=THREE, fragments=2, period=2, overlap=2, iterations=5
    ),
    "local steps, codec": Cell(
        "replicas", speaker="shares", groups=TWO, fragments=2, period=4, overlap=3, iterations=5, codec=True
    ),
    "local steps, swap": Cell(
        "replicas",
        groups=PAIRS,
        stranger=False,
        fragments=2,
        period=2,
        overlap=2,
        iterations=4,
        change=((0, 2), (1, 3)),
    ),
    "local steps, newcomer": Cell(
        "replicas", groups=TWO, fragments=2, period=2, overlap=2, iterations=4, change=((0, 1, 2),)
    ),
    # A majority of CPU sides.
    "peers": Cell("peers", groups=TWO, stranger=False),
    "peers, once": Cell("peers", groups=TWO, stranger=False, iterations=1),
    "peers, shares, open": Cell("peers", speaker="shares", groups=THREE, stranger=False, overlap=1),
}

REFUSED = {
    "an exchange of a sharded store is open when step() has returned": Cell(
        "asp", "parts", "shares", overlap=1
    ),
    "a fragment leaves again while it is under way": Cell("replicas", period=1, overlap=2, iterations=4),
}


GROUPS = {
    1: [((0,),), ((0, 1),), ((0, 1, 2),)],
    2: [((0, 1), (2, 3)), ((0,), (1, 2)), ((0, 1, 2), (3,))],
}
EDITS: list[tuple[str, ...]] = [
    (),
    ("clip",),
    ("other",),
    ("clip", "other"),
    ("other", "clip"),
    ("clip", "clip", "other"),
]


def draw_cell(choose: Callable[[Sequence[Any]], Any]) -> Cell:
    """Return a cell that is not refused; `choose` returns one of its argument's items."""
    sync = choose(["bsp", "asp", "peers", "replicas"])
    store = choose(["whole", "parts"]) if sync in ("bsp", "asp") else "whole"
    contributors = 1 if sync == "peers" else choose([1, 1, 2])
    groups = choose(GROUPS[contributors])
    everyone = [k for group in groups for k in group]
    codec = contributors == 1 and choose([False, True])
    edits = () if codec or sync == "replicas" else choose(EDITS)
    more: dict[str, Any] = {"iterations": choose([2, 3, 4])}
    if sync == "replicas":
        fragments = choose([1, 2])
        period = choose([1, 2, 3] if fragments == 1 else [2, 4])
        more |= {"fragments": fragments, "period": period, "overlap": choose(range(period + 1))}
    elif sync == "peers" or (sync == "asp" and store == "whole"):
        more["overlap"] = choose([0, 1])
    if sync == "asp" and contributors == 2:
        more["slack"] = choose([None, 0, 1])
    raises = choose([None, *everyone])
    if raises is not None:
        more["raises"] = ((raises, choose(range(more["iterations"]))),)
    assists = choose([None, *everyone]) if sync == "bsp" or not edits else None
    if assists is not None and assists != raises:
        more["assists"] = ((assists, choose(range(more["iterations"]))),)
    if sync != "peers" and (sync, store) != ("asp", "parts") and choose([False, True]):
        # Each goes to a group of the next grouping, or leaves; perhaps somebody comes.
        following: list[list[int]] = [[] for _ in groups]
        for k in [*everyone, *choose([[], [9]])]:
            to = choose([*range(contributors), *range(contributors), None])
            if to is not None:
                following[to].insert(choose([0, len(following[to])]), k)
        if any(following):
            more["change"] = tuple(map(tuple, following))
    return Cell(
        sync,
        store,
        "shares" if store == "parts" else choose(["leader", "shares"]),
        groups,
        stranger=contributors == 1 and sync != "peers" and choose([False, True]),
        codec=codec,
        edits=edits,
        movers=(sync, store) == ("bsp", "parts") and choose([False, True]),
        **more,
    )
