"""What has come of a contribution in part only is let go of when the rest of it is of no use any more."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from atoll.peers.node import Node
from atoll.peers.outputs import Drop, Output
from atoll.peers.settings import NodeSettings
from atoll.wire.peers import Key
from atoll.wire.peerviews import Life, View, ViewDecided, ViewMember

ME, OTHER, LOST = Life(0, 1), Life(1, 1), Life(2, 1)
LAST = {0: 1, 1: 1, 2: 2}  # the incarnations that nodes have had


def key(number: int, life: Life) -> Key:
    return Key("iterations", number, life)


def dropped(outputs: Iterable[Output]) -> list[Key]:
    return [each for output in outputs if isinstance(output, Drop) for each in output.keys]


def test_of_a_node_that_is_left_out_what_is_beyond_its_cut_is_dropped() -> None:
    members = tuple(ViewMember(life) for life in (ME, OTHER, LOST))
    node = Node(ME, View(0, 0, members, last=LAST), NodeSettings(), np.random.default_rng(0), 0.0)
    for number in range(3):
        node.handle_part(0.1, key(number, LOST))
    for partly in (key(3, LOST), key(0, OTHER)):  # it died within its fourth; the other's is on its way
        assert dropped(node.handle_arriving(0.2, partly)) == []
    without = View(0, 1, members[:2], (ViewMember(LOST, held=3),), LAST)
    assert dropped(node.handle_message(1.0, 1, ViewDecided(view=without))) == [key(3, LOST)]


def test_what_counts_of_a_node_that_is_left_out_may_come_in_whole() -> None:
    members = tuple(ViewMember(life) for life in (ME, OTHER, LOST))
    node = Node(ME, View(0, 0, members, last=LAST), NodeSettings(), np.random.default_rng(0), 0.0)
    node.handle_arriving(0.1, key(0, LOST))
    without = View(0, 1, members[:2], (ViewMember(LOST, held=1),), LAST)  # the other one holds it
    assert dropped(node.handle_message(1.0, 1, ViewDecided(view=without))) == []
    assert dropped(node.handle_part(1.1, key(0, LOST))) == []


def test_a_newcomer_drops_what_is_in_the_state_that_it_has_got() -> None:
    node = Node.joining(2, "again", "at 2", [0, 1], NodeSettings(), np.random.default_rng(0), 0.0)
    newcomer = ViewMember(Life(2, 2), first=20, held=20, base=10, token="again")
    node.handle_message(
        0.1, 0, ViewDecided(view=View(0, 1, (ViewMember(ME), ViewMember(OTHER), newcomer), last=LAST))
    )
    for number in (11, 12):
        assert dropped(node.handle_arriving(0.2, key(number, OTHER))) == []
    assert dropped(node.handle_state(0.3, 12)) == [key(11, OTHER)]
