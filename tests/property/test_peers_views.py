"""Properties of views over random schedules: whoever crashes, comes back, is cut off or wrongly suspected, one
view of each number is decided, each iteration has one content everywhere, and things go on."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from views_world import FAULTS_END, Fault, World

KINDS = ("crash", "restart", "restart", "part", "part", "heal", "suspect", "witness dies", "witness restarts")
FAULTS = st.lists(
    st.builds(
        Fault,
        st.floats(0.3, FAULTS_END - 0.1),
        st.sampled_from(KINDS),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    max_size=8,
)


def check(nodes: int, faults: list[Fault], loss: float, seed: int) -> World:
    """What must hold at each step is checked by the world. A view that loses its majority while it is being
    decided is not one that can go on, whatever was there before."""
    world = World(nodes, faults, loss, seed)
    world.run()
    if world.has_majority() and not world.goes_on():
        views = {node: peer.view.number if peer.view else 0 for node, peer in world.peers.items() if peer.up}
        assert not world.has_majority(), f"stuck at {len(world.contributors)} iterations, views {views}"
    return world


@settings(max_examples=60)
@given(st.integers(1, 5), FAULTS, st.sampled_from((0.0, 0.05, 0.3)), st.integers(0, 2**32 - 1))
def test_views(nodes: int, faults: list[Fault], loss: float, seed: int) -> None:
    check(nodes, faults, loss, seed)
