"""Which blocks of a gradient must arrive, what an answer says was lost of it, what of that a journal has, and
what cannot be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.chunks import Chunk
from atoll.chunks.maps import Slot
from atoll.core.config import LinkOptions
from atoll.core.errors import PrepareError, RunError
from atoll.exchange.feedback import Feedback, Losses
from atoll.ltp.blocks import Mask
from atoll.wire.messages import LostBlocks

LTP = LinkOptions(transport="ltp", high="0.25")
BLOCK = 4


def chunk_of(*sizes: int, dtype: str = "float32", number: int = 0) -> Chunk:
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    slots = tuple(Slot(index, *each) for index, each in enumerate(zip(offsets, sizes, strict=True)))
    return Chunk(id=number, group=0, dtype=dtype, numel=sum(sizes), slots=slots, oversize=False)


def feedback_of(chunk: Chunk, options: LinkOptions = LTP) -> Feedback:
    return Feedback(
        [chunk], {0: 3}, options, named=lambda _: "parameter 'p0'", block_elements=lambda _dtype: BLOCK
    )


def lost(*missing: int, blocks: int = 4, how: str = "borne", block: int = BLOCK) -> LostBlocks:
    bits = np.zeros(blocks, bool)
    bits[list(missing)] = True
    return LostBlocks(block, np.packbits(bits, bitorder="little").tobytes(), how)


def send(
    feedback: Feedback,
    chunk: Chunk,
    exchange: int,
    values: Sequence[float],
    weight: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Mask | None]:
    gradient = torch.tensor(values, dtype=getattr(torch, chunk.dtype))
    written = feedback.write(exchange, 0, gradient, [True] * len(chunk.slots), weight, **options)
    how = written.lossy
    assert how is None or (how.chunk, how.iteration, how.dtype) == (0, exchange, chunk.dtype)
    return written.values, None if how is None else how.high


@pytest.mark.parametrize(
    "options", [LinkOptions(), LinkOptions(transport="ltp", reliable=True)], ids=["tcp", "reliable"]
)
def test_where_nothing_may_be_lost_gradients_pass_as_they_are(options: LinkOptions) -> None:
    chunk = chunk_of(16)
    feedback, gradient = feedback_of(chunk, options), torch.ones(16)
    written = feedback.write(0, 0, gradient, [True], 1.0)
    assert written.values is gradient
    assert written.lossy is None
    feedback.answered(0, 0, None)
    feedback.settle(0)
    assert feedback.losses(3) == Losses()


def test_what_counts_for_nothing_is_sent_so_that_it_arrives() -> None:
    """A shard counts on each push; and what is held back does not go along with one that has no weight."""
    chunk = chunk_of(16)
    feedback = feedback_of(chunk)
    send(feedback, chunk, 0, [1.0] * 16)
    feedback.answered(0, 0, lost(0))
    feedback.settle(0)
    for present, weight in (([False], 1.0), ([True], 0.0)):
        written = feedback.write(1, 0, torch.zeros(16), present, weight)
        assert written.lossy is None
        assert not written.values.any()
        feedback.settle(1)
    assert send(feedback, chunk, 2, [0.0] * 16)[0].tolist() == [1.0] * 4 + [0.0] * 12


def test_the_largest_blocks_must_arrive_and_those_that_are_not_finite() -> None:
    chunk = chunk_of(16)
    feedback = feedback_of(chunk)
    _, high = send(feedback, chunk, 0, [0.0] * 4 + [1.0] * 4 + [3.0] * 4 + [2.0] * 4)
    assert high is not None
    assert high.tolist() == [False, False, True, False]  # a quarter of them
    feedback.answered(0, 0, None)
    _, high = send(feedback, chunk, 1, [torch.nan] + [0.0] * 11 + [0.0, torch.inf, 0.0, 0.0])
    assert high is not None
    assert high.tolist() == [True, False, False, True]


def test_what_is_lost_again_and_again_becomes_large_enough_to_arrive() -> None:
    chunk = chunk_of(16)
    feedback = feedback_of(chunk, LinkOptions(transport="ltp", high="0.25"))
    arrived = []
    for exchange in range(40):
        _, high = send(feedback, chunk, exchange, [4.0] * 4 + [1.0] * 12)
        assert high is not None
        arrived.append(bool(high[3]))
        feedback.answered(exchange, 0, lost(*np.flatnonzero(~high)))
        feedback.settle(exchange)
    assert any(arrived)


def test_without_a_share_as_few_blocks_as_carry_most_must_arrive() -> None:
    chunk = chunk_of(400)
    feedback = feedback_of(chunk, LinkOptions(transport="ltp"))
    _, high = send(feedback, chunk, 0, [100.0] * 40 + [1.0] * 360)
    assert high is not None
    assert int(high[:10].sum()) == int(high.sum()) == 7  # which carry 2800 of 4360, more than 60 %


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_what_an_answer_says_was_lost_goes_with_the_next_gradient(dtype: str) -> None:
    chunk = chunk_of(10, 5, dtype=dtype)
    feedback = feedback_of(chunk)
    extent = chunk.extent
    values = [float(place) for place in range(extent)]
    send(feedback, chunk, 0, values)
    feedback.answered(0, 0, lost(1, blocks=-(-extent // BLOCK)))
    feedback.answered(0, 0, lost(0, blocks=-(-extent // BLOCK)))  # told once more: the first word counts
    assert feedback.losses(3).held == 0.0
    feedback.settle(0)
    told = feedback.losses(3)
    assert (told.borne, told.filled) == (1, 0)
    assert told.held > 0
    sent, _ = send(feedback, chunk, 1, [0.0] * extent)
    assert sent.tolist() == [0.0] * 4 + values[4:8] + [0.0] * (extent - 8)
    assert sent.dtype == getattr(torch, dtype)


def test_of_a_run_what_is_lost_is_counted_from_its_first_element() -> None:
    chunk = chunk_of(16)
    feedback = feedback_of(chunk)
    send(feedback, chunk, 0, [2.0] * 8, start=8)
    feedback.answered(0, 0, lost(1, blocks=2, how="zero"))
    feedback.settle(0)
    assert (feedback.losses(3).borne, feedback.losses(3).filled) == (
        1,
        0,
    )  # it comes later, and is not filled
    assert send(feedback, chunk, 1, [0.0] * 16)[0].tolist() == [0.0] * 12 + [2.0] * 4


def test_blocks_that_were_cut_otherwise_are_counted_as_the_links() -> None:
    """Where a member of a group has died, a shard tells of single elements."""
    chunk = chunk_of(16)
    feedback = feedback_of(chunk)
    send(feedback, chunk, 0, [2.0] * 16)
    feedback.answered(0, 0, lost(2, 3, 4, 5, 6, blocks=16, block=1))
    assert feedback.losses(3).borne == 2


def test_a_step_that_is_left_out_leaves_what_is_held_as_it_was() -> None:
    chunk = chunk_of(16)
    feedback = feedback_of(chunk)
    send(feedback, chunk, 0, [1.0] * 16)
    feedback.answered(0, 0, lost(2))
    feedback.settle(0)
    send(feedback, chunk, 1, [5.0] * 16)
    feedback.answered(1, 0, lost(0, 1, 2, 3))
    feedback.settle(1, counted=False)
    assert send(feedback, chunk, 2, [0.0] * 16)[0].tolist() == [0.0] * 8 + [1.0] * 4 + [0.0] * 4


def test_a_checkpoint_that_is_loaded_is_owed_nothing() -> None:
    chunk = chunk_of(16)
    feedback = feedback_of(chunk)
    send(feedback, chunk, 0, [1.0] * 16)
    feedback.answered(0, 0, lost(2))
    feedback.settle(0)
    feedback.clear()
    gradient = torch.zeros(16)
    assert feedback.write(1, 0, gradient, [True], 1.0).values.data_ptr() == gradient.data_ptr()


def test_without_feedback_what_was_lost_is_counted_and_gone() -> None:
    chunk = chunk_of(16)
    feedback = feedback_of(chunk, LinkOptions(transport="ltp", feedback=False, fill="rescale"))
    send(feedback, chunk, 0, [1.0] * 16)
    feedback.answered(0, 0, lost(1, 2, how="rescaled"))
    feedback.settle(0)
    assert feedback.losses(3) == Losses(borne=0, filled=2, held=0.0)
    assert not send(feedback, chunk, 1, [0.0] * 16)[0].any()


def test_an_answer_that_cannot_be_of_the_contribution_ends_the_run() -> None:
    chunk = chunk_of(16)
    feedback = feedback_of(chunk)
    send(feedback, chunk, 7, [1.0] * 16)
    with pytest.raises(RunError, match="shard 3, of chunk 0 of iteration 7: 1 bytes for what is lost of 16"):
        feedback.answered(7, 0, LostBlocks(1, b"\1", "borne"))


def test_what_no_part_may_be_lost_of_is_refused_by_its_name() -> None:
    eighth = chunk_of(16, dtype="float8_e5m2")
    with pytest.raises(PrepareError, match=r"'p0' is float8_e5m2, and link.transport 'ltp' may lose"):
        feedback_of(eighth)
    feedback_of(eighth, LinkOptions(transport="ltp", reliable=True))
    rescaled = LinkOptions(transport="ltp", feedback=False, fill="rescale")
    with pytest.raises(PrepareError, match=r"'p0' is bfloat16, which link.fill 'rescale' cannot multiply"):
        feedback_of(chunk_of(16, dtype="bfloat16"), rescaled)


def test_a_shard_that_came_back_says_it_again_and_only_its_word_of_this_contribution_counts() -> None:
    """As a site's shard hears it: what its journal has, and what it sends up once more, changes nothing."""
    chunk = chunk_of(16)
    feedback = feedback_of(chunk)
    values = [1.0, 2.0, 3.0, 4.0] * 4
    send(feedback, chunk, 0, values, weight=2.0)
    feedback.answered(0, 0, lost(1, 3))
    assert send(feedback, chunk, 0, values, weight=2.0)[0].tolist() == values
    feedback.answered(0, 0, lost(0))
    feedback.settle(0)
    feedback.answered(0, 0, lost(2))
    late = [0.0] * 4 + values[4:8] + [0.0] * 4 + values[12:]
    for _ in range(2):
        assert send(feedback, chunk, 1, [0.0] * 16, weight=2.0)[0].tolist() == late
    assert feedback.under_way == [1]
    feedback.answered(1, 0, lost(3))
    feedback.settle(1)
    assert feedback.under_way == []
    held, weight = feedback.state()[0]
    assert (held.tolist(), weight) == ([0.0] * 12 + values[12:], 2.0)
    assert feedback.losses(3).borne == 3


def test_what_is_sent_again_by_another_is_not_answered_here() -> None:
    """In a group whose leader was lost: what went along goes along again, from whoever sends it now."""
    chunk = chunk_of(16)
    feedback = feedback_of(chunk)
    send(feedback, chunk, 0, [1.0] * 16)
    feedback.answered(0, 0, lost(1))
    feedback.settle(0)
    send(feedback, chunk, 1, [0.0] * 16)
    (along,) = feedback.again(1).values()
    assert along.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8
    feedback.answered(1, 0, lost(1))  # of what it sent before
    sent, _ = send(feedback, chunk, 1, [0.0] * 8, start=4, along={0: along * 2})
    assert sent.tolist() == [2.0] * 4 + [0.0] * 4
    feedback.answered(1, 0, lost(0, blocks=2))
    feedback.settle(1)
    assert feedback.state()[0][0].tolist() == [0.0] * 4 + [2.0] * 4 + [0.0] * 8


def test_a_journals_state_goes_on_as_it_was() -> None:
    chunk = chunk_of(16)
    one, other = feedback_of(chunk), feedback_of(chunk)
    values = [float(place) for place in range(16)]
    send(one, chunk, 0, values, weight=4.0)
    one.answered(0, 0, lost(0, 2))
    one.settle(0)
    other.restore(one.state())
    for exchange, weight in enumerate((4.0, 8.0, 2.0), 1):
        sent = [send(each, chunk, exchange, values, weight)[0] for each in (one, other)]
        assert torch.equal(*sent)
        for each in (one, other):
            each.answered(exchange, 0, lost(1))
            each.settle(exchange)
    assert torch.equal(one.state()[0][0], other.state()[0][0])


def test_chunks_are_settled_one_by_one_where_their_answers_come_one_by_one() -> None:
    chunks = [chunk_of(8), chunk_of(8, number=1)]
    feedback = Feedback(chunks, {0: 0, 1: 1}, LTP, block_elements=lambda _dtype: BLOCK)
    for chunk in (0, 1):
        feedback.write(5, chunk, torch.ones(8), [True], 1.0)
    feedback.answered(5, 1, lost(0, blocks=2))
    feedback.settle(5, 1)
    assert list(feedback.state()) == [1]
    feedback.answered(5, 0, lost(1, blocks=2))
    feedback.settle(5, 0)
    assert (feedback.losses(0).borne, feedback.losses(1).borne, feedback.under_way) == (1, 1, [])
