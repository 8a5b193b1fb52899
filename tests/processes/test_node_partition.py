"""A partition between CPU sides, which are real processes, and what is there once it has healed.

Two of five cannot be reached from the other three: these go on, those never do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from fake_nodes import DEADLINE, FakeNode, FakeRun, plain
from parted_nodes import Doors

from atoll.peers.settings import NodeSettings
from atoll.wire import device as d

STALE_MAX = 2


@pytest.fixture
def doors() -> Iterator[Doors]:
    made = Doors(5)
    yield made
    made.close()


def all_advance(run: FakeRun) -> None:
    """Who may begin an iteration makes it."""
    for each in run.nodes:
        each.advance(each.iteration + 1)
    time.sleep(0.001)


def parts_of(nodes: list[FakeNode]) -> dict[int, list[d.AppliedContribution]]:
    """Of whose contributions each iteration was made: of the same at all, and at each but once. Who comes
    back hears of the latest ones that are in the state that it takes over, its own ones among them."""
    found: dict[int, list[d.AppliedContribution]] = {}
    for each in nodes:
        made = [applied.iteration for applied in each.applied]
        begins = sum(later <= earlier for earlier, later in pairwise(made))
        assert begins <= len(each.returned), f"node {each.node} has applied one twice"
        for applied in each.applied:
            assert found.setdefault(applied.iteration, applied.parts) == applied.parts
    return found


@pytest.mark.parametrize(
    ("minority", "breaks"),
    [
        ((0, 1), False),
        pytest.param((0, 1), True, marks=pytest.mark.soak),
        pytest.param((1, 4), False, marks=pytest.mark.soak),
        pytest.param((3, 4), True, marks=pytest.mark.soak),
    ],
)
def test_three_of_five_go_on_alone_and_two_come_back(
    doors: Doors, minority: tuple[int, ...], breaks: bool
) -> None:
    torch.set_num_threads(1)
    with FakeRun(5, stale_max=STALE_MAX, addresses=doors.addresses, set_up=False) as run:
        doors.lead_to({each.node: each.cpu.pid for each in run.nodes})
        for each in run.nodes:
            each.set_up()
        run.until(lambda: all(each.ready for each in run.nodes), "all are ready")
        run.train(6)
        few = [each for each in run.nodes if each.node in minority]
        many = [each for each in run.nodes if each.node not in minority]

        doors.part(minority, breaks=breaks)
        parted, at = time.monotonic(), len(many[0].applied)
        while len(many[0].views[-1].members) == 5 or len(many[0].applied) < at + 4:
            assert time.monotonic() < parted + DEADLINE, [each.told[-3:] for each in many]
            all_advance(run)
        paused = time.monotonic() - parted
        print(f"{paused:.1f} s")
        assert paused < NodeSettings().silence[1], "the majority goes on within the limit for silence"
        assert [each.node for each in many[0].views[-1].members] == [each.node for each in many]

        stand = [len(each.applied) for each in few]
        until = many[0].iteration + 40
        while any(each.iteration < until for each in many):
            assert time.monotonic() < parted + DEADLINE, [each.waiting for each in many]
            all_advance(run)
        assert [len(each.applied) for each in few] == stand, "the minority stands"
        for each in few:
            assert all(len(applied.parts) == 5 for applied in each.applied)
            assert [view.view for view in each.views] == [0]
            assert each.iteration <= each.applied[-1].iteration + 1 + STALE_MAX + 1

        doors.join()
        end = time.monotonic() + DEADLINE
        while not all(each.returned for each in few) or len(run.members()) < 5:
            assert time.monotonic() < end, [each.told[-3:] for each in few]
            all_advance(run)
        run.train(run.furthest + 10)
        run.assert_equal()
        if not breaks:
            assert doors.held, "something was on its way when the sides were parted"

        # What no node has twice, and none lacks: plain PyTorch makes the same of it.
        parts = parts_of(run.nodes)
        who = [[part.node for part in parts[k]] for k in range(len(parts))]
        assert who[-1] == list(range(5))
        assert [each.node for each in many] in who
        for each in few:  # what they made alone counts nowhere
            alone = [part.incarnation for k in parts for part in parts[k] if part.node == each.node]
            assert alone == sorted(alone)
            assert set(alone) == {0, each.incarnation}
        expected = plain(run.nodes[0].model, len(parts), who.__getitem__)
        for chunk, flat in run.nodes[0].parameters.items():
            torch.testing.assert_close(flat, expected[chunk])
        for each in run.nodes:
            assert max(each.computed_at) <= STALE_MAX
