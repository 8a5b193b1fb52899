"""Which nodes' gradients are in the mean that a script wants."""

from __future__ import annotations

from unittest import mock

import msgspec
import pytest

from atoll.core.errors import UserError
from atoll.train.sync.peersmean import Brought, NodesMean
from atoll.wire.device import Applied, AppliedContribution

OF_ONE = Brought(3, 1, 8.0, 8.0)
OF_TWO = Brought(3, 2, 8.0, 8.0)
STEPPED = Brought(3, 1, 8.0, 8.0, stepped=True)
NEXT = Brought(4, 1, 8.0, 8.0)
NEXT_STEPPED = Brought(4, 1, 8.0, 8.0, stepped=True)


def using(brought: Brought, weight: float = 8.0) -> Brought:
    return msgspec.structs.replace(brought, uses=True, weight=weight)


def met(*nodes: Brought, counted: tuple[int, ...] = (), skipped: str = "") -> set[int]:
    """Return the nodes in the mean, where node 0 meets the others after iteration 3 was made of `counted`."""
    handlers = {}
    node, workers = mock.Mock(node=0, leads=True), mock.Mock(ranks=range(len(nodes)))
    node.on = lambda kind, handler: handlers.update({kind: handler})
    node.introduction.node_of = lambda rank: rank
    node.introduction.workers_of = lambda node: [node]
    workers.gather_bytes = lambda payload, what: [payload, *map(msgspec.msgpack.encode, nodes[1:])]
    mean = NodesMean(workers, node, [])
    parts = [AppliedContribution(each, 0, 8.0, 8.0 * (each in counted)) for each in range(len(nodes))]
    handlers[Applied](Applied(iteration=3, parts=parts, skipped=skipped))
    return set(mean.meet(nodes[0]))


def test_after_a_step_who_did_not_count_in_it_has_no_part_wherever_it_is() -> None:
    for other in (NEXT, NEXT_STEPPED, Brought(4), Brought(3, 0, stepped=True)):  # a newcomer may be the third
        assert met(using(STEPPED), other, NEXT, counted=(0,)) - {1} == {0}
    assert met(using(STEPPED), NEXT, counted=(0,)) == {0}
    assert met(using(STEPPED), using(STEPPED), NEXT, counted=(0, 1)) == {0, 1}
    assert met(NEXT, using(STEPPED), using(STEPPED), counted=(1, 2)) == {1, 2}


def test_after_a_step_who_counted_in_it_uses_the_mean_too() -> None:
    for other in (NEXT, NEXT_STEPPED, STEPPED):
        with pytest.raises(UserError, match="not on every node"):
            met(using(STEPPED), other, counted=(0, 1))


def test_the_gradients_of_a_step_that_was_left_out_are_used_by_all() -> None:
    with pytest.raises(UserError, match="not on every node"):
        met(using(STEPPED), NEXT, counted=(0,), skipped="refused by node 1")


def test_before_a_step_all_that_weigh_are_of_the_same_backwards() -> None:
    assert met(using(OF_ONE), STEPPED) == {0, 1}
    assert met(using(OF_ONE), Brought(3), OF_ONE) == {0, 1, 2}
    assert met(using(OF_ONE), Brought(4)) == {0}
    for users in ((using(OF_ONE), OF_TWO), (using(OF_ONE), NEXT)):
        with pytest.raises(UserError, match="unlike backwards"):
            met(*users)


def test_others_are_compared_where_the_user_s_own_gradients_weigh_nothing() -> None:
    overflown = using(OF_ONE, weight=0.0)
    assert met(overflown, OF_ONE, STEPPED) == {0, 1, 2}
    for others in ((OF_ONE, OF_TWO), (OF_TWO, STEPPED), (NEXT, NEXT)):
        with pytest.raises(UserError, match="unlike backwards"):
            met(overflown, *others)


def test_who_wanted_the_mean_was_left_out() -> None:
    assert met(OF_ONE, OF_ONE) == set()
