"""Error feedback by example; its invariant over any sequence is tests/property/test_feedback.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.ltp.feedback import Feedback

BLOCK = 2
GRADIENT = np.array([1, 2, 3, 4, 5], np.float32)
LOST = np.array([False, True, True])


def test_what_was_lost_goes_with_the_next_gradient_once() -> None:
    feedback = Feedback(5, BLOCK)
    sent = feedback.outgoing(GRADIENT)
    np.testing.assert_array_equal(sent, GRADIENT)
    feedback.delivered(sent, LOST, "borne")
    assert feedback.held.tolist() == [0, 0, 3, 4, 5]
    assert feedback.outgoing(GRADIENT).tolist() == [1, 2, 6, 8, 10]
    assert not feedback.held.any()
    assert feedback.outgoing(GRADIENT).tolist() == GRADIENT.tolist()


def test_what_was_filled_in_is_not_owed() -> None:
    feedback = Feedback(5, BLOCK)
    sent = feedback.outgoing(GRADIENT)
    feedback.delivered(sent, LOST, "last", np.array([9, 9, 1, 1, 7], np.float32))
    assert feedback.held.tolist() == [0, 0, 2, 3, -2]


def test_the_gradient_itself_may_be_written_to_and_is_else_left_alone() -> None:
    feedback = Feedback(5, BLOCK)
    feedback.delivered(GRADIENT, LOST, "zero")
    gradient = GRADIENT.copy()
    assert feedback.outgoing(gradient, out=gradient) is gradient
    assert gradient.tolist() == [1, 2, 6, 8, 10]
    other = np.empty(5, np.float32)
    feedback.delivered(GRADIENT, LOST, "zero")
    assert feedback.outgoing(GRADIENT, out=other) is other
    assert other.tolist() == [1, 2, 6, 8, 10]
    assert GRADIENT.tolist() == [1, 2, 3, 4, 5]


def test_what_is_not_finite_is_dropped_and_counted() -> None:
    feedback = Feedback(5, BLOCK)
    feedback.delivered(np.array([math.nan, 2, math.inf, 4, math.nan], np.float32), LOST, "borne")
    assert feedback.held.tolist() == [0, 0, 0, 4, 0]
    assert feedback.dropped == 2


def test_held_survives_a_checkpoint() -> None:
    feedback, again = Feedback(5, BLOCK), Feedback(5, BLOCK)
    feedback.delivered(GRADIENT, LOST, "borne")
    again.restore(feedback.held.copy())
    np.testing.assert_array_equal(again.outgoing(GRADIENT), feedback.outgoing(GRADIENT))
    assert not again.held.any()


def test_rescaling_is_refused() -> None:
    with pytest.raises(UserError, match="exclude each other"):
        Feedback(5, BLOCK, fill="rescale")
    feedback = Feedback(5, BLOCK)
    with pytest.raises(UserError, match="exclude each other"):
        feedback.delivered(GRADIENT, LOST, "rescaled")
    assert not feedback.held.any()


def test_wrong_calls_are_refused() -> None:
    feedback = Feedback(5, BLOCK)
    with pytest.raises(ValueError, match="must be given"):
        feedback.delivered(GRADIENT, LOST, "last")
    for wrong in (LOST[:2], LOST.astype(np.uint8)):  # the latter would be taken for places
        with pytest.raises(ValueError, match="each of the 3 blocks"):
            feedback.delivered(GRADIENT, wrong, "zero")
    for wrong in (GRADIENT[:4], GRADIENT.astype(np.float64)):
        with pytest.raises(ValueError, match="where the chunk has 5 of float32"):
            feedback.outgoing(wrong)
    with pytest.raises(TypeError, match="make it float32 first"):
        Feedback(5, BLOCK, np.uint16)


def test_an_empty_chunk_and_one_of_whole_blocks() -> None:
    empty = Feedback(0, BLOCK)
    sent = empty.outgoing(np.empty(0, np.float32))
    empty.delivered(sent, np.empty(0, bool), "borne")
    whole = Feedback(4, BLOCK)
    whole.delivered(GRADIENT[:4], np.array([False, True]), "borne")
    assert whole.outgoing(GRADIENT[:4]).tolist() == [1, 2, 6, 8]
