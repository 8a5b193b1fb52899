"""The queue of chunks that are still to be stepped."""

from __future__ import annotations

import pytest

from atoll.core.errors import DeadlineError
from atoll.memory.stepqueue import StepCall, StepQueue

NOW = 0.001  # seconds


def call() -> StepCall:
    return StepCall({}, [], {}, lambda _call, _chunk: None)


def test_an_optimizer_waits_for_its_own_chunks_alone() -> None:
    queue = StepQueue()
    queue.begin(call(), [0, 1])
    queue.wait_all(NOW, chunks={2, 3})
    with pytest.raises(DeadlineError):
        queue.wait_all(NOW, chunks={1, 2})
    with pytest.raises(DeadlineError):
        queue.wait_all(NOW)
    with queue.condition:
        queue.take()
    with pytest.raises(DeadlineError):  # the chunk under way counts too
        queue.wait_all(NOW, chunks={0})
    queue.ended(0, None)
    queue.wait_all(NOW, chunks={0})


def test_chunks_of_two_calls_are_stepped_each_by_its_own() -> None:
    queue, first, second = StepQueue(), call(), call()
    queue.begin(first, [0, 1])
    queue.begin(second, [2, 3])
    with pytest.raises(DeadlineError):
        queue.wait_stepped(3, NOW)  # it comes next from here on
    order = []
    while queue.has_next:
        with queue.condition:
            step, chunk = queue.take()
        order.append((step is second, chunk))
        queue.ended(chunk, None)
    assert order == [(True, 3), (False, 0), (False, 1), (True, 2)]
    queue.wait_all(NOW)


def test_what_a_chunk_of_one_raises_is_raised_at_the_next_step_of_any() -> None:
    queue = StepQueue()
    queue.begin(call(), [0])
    with queue.condition:
        _, chunk = queue.take()
    queue.ended(chunk, FloatingPointError("broken"))
    with pytest.raises(FloatingPointError, match="broken"):
        queue.wait_all(NOW, chunks={1})
