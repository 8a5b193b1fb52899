"""Error feedback over any sequence of losses and fills: nothing is lost, only late."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ltp.blocks import block_count
from atoll.ltp.feedback import Feedback
from atoll.ltp.filling import How, LastValues, apply

DTYPES = (np.float32, np.float64, np.float16)
Values = npt.NDArray[np.floating]


@dataclass
class Receiver:
    """What the other end makes of a chunk's transfers."""

    block: int
    kept: LastValues = field(default_factory=LastValues)

    def receive(self, sent: Values, present: npt.NDArray[np.bool_], how: How) -> Values:
        """What it applies."""
        applied = sent.copy()
        applied[np.repeat(~present, self.block)[: len(sent)]] = 77  # lost: anything may stand there
        apply(how, applied, present, np.zeros(len(present), bool), self.block, self.kept.of(0))
        self.kept.keep(0, sent, present, self.block)
        return applied


def hows(missing: npt.NDArray[np.bool_], seen: bool) -> list[How]:
    """What the receiver may make of these losses."""
    return ["borne", "zero", *(["last"] if seen else [])] if missing.any() else ["none"]


@given(st.data(), st.integers(1, 30), st.integers(1, 7), st.sampled_from(DTYPES))
def test_a_block_is_applied_or_held_to_the_bit(
    data: st.DataObject, extent: int, block: int, dtype: type
) -> None:
    """One transfer after the other, any values: what was sent is applied or held, bit by bit."""
    feedback, receiver = Feedback(extent, block, dtype), Receiver(block)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 6))):
        gradient = (rng.standard_normal(extent) * 10.0 ** rng.integers(-3, 3)).astype(dtype)
        held = feedback.held.copy()
        sent = feedback.outgoing(gradient)
        np.testing.assert_array_equal(sent, gradient + held)
        missing = rng.random(block_count(extent, block)) < rng.choice([0.0, 0.3, 1.0])
        how = data.draw(st.sampled_from([how for how in hows(missing, False) if how != "last"]))
        applied = receiver.receive(sent, ~missing, how)
        feedback.delivered(sent, missing, how)
        assert (sent == applied + feedback.held).all()
        assert ((applied == 0) | (feedback.held == 0)).all()
        assert (feedback.held == np.where(np.repeat(missing, block)[:extent], sent, 0)).all()


@given(st.data(), st.integers(1, 20), st.integers(1, 7), st.sampled_from(DTYPES))
def test_all_that_was_given_is_applied_held_or_on_its_way(
    data: st.DataObject, extent: int, block: int, dtype: type
) -> None:
    """Several transfers at once, every fill: in whole numbers, which add up exactly, nothing is missing."""
    feedback, receiver, mirror = Feedback(extent, block, dtype), Receiver(block), LastValues()
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    given_, applied = np.zeros(extent), np.zeros(extent)
    on_way: list[Values] = []
    for begins in data.draw(st.lists(st.booleans(), min_size=1, max_size=14)):
        if begins or not on_way:
            gradient = rng.integers(-3, 4, extent).astype(dtype)
            given_ += gradient
            on_way.append(feedback.outgoing(gradient))
        else:
            sent = on_way.pop(0)
            missing = rng.random(block_count(extent, block)) < 0.5
            how = data.draw(st.sampled_from(hows(missing, mirror.of(0) is not None)))
            applied += receiver.receive(sent, ~missing, how)
            feedback.delivered(sent, missing, how, mirror.of(0))
            mirror.keep(0, sent, ~missing, block)
        np.testing.assert_array_equal(given_, applied + feedback.held + sum(on_way))
    assert feedback.dropped == 0
    if mirror.of(0) is not None:
        np.testing.assert_array_equal(mirror.of(0), receiver.kept.of(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_comes_in_the_end(dtype: type) -> None:
    """A third of each transfer is lost; the last one comes whole: what was applied is what was given."""
    rng = np.random.default_rng(0)
    feedback, receiver = Feedback(1000, 7, dtype), Receiver(7)
    given_, applied = np.zeros(1000), np.zeros(1000)
    for turn in range(20):
        gradient = rng.integers(-9, 10, 1000).astype(dtype)
        given_ += gradient
        sent = feedback.outgoing(gradient)
        missing = (rng.random(block_count(1000, 7)) < 1 / 3) & (turn < 19)
        applied += receiver.receive(sent, ~missing, "borne")
        feedback.delivered(sent, missing, "borne")
    np.testing.assert_array_equal(given_, applied)
    assert not feedback.held.any()
