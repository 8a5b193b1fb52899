"""The way of data between members whose links are uneven: one ring, several at once, or a tree.

Pure: from matrices of bandwidths, latencies and numbers of links; costs are passed in as a score. Source:
docs/planning.md, "Rings from the links at hand".
"""

from atoll.rings.choice import Choice, Shape, choose
from atoll.rings.disjoint import Rings, Share, disjoint
from atoll.rings.order import NoRingError, Ring, order
from atoll.rings.trees import Tree, tree

__all__ = [
    "Choice",
    "NoRingError",
    "Ring",
    "Rings",
    "Shape",
    "Share",
    "Tree",
    "choose",
    "disjoint",
    "order",
    "tree",
]
