"""Which blocks of a gradient must arrive, what an answer says was lost of it, and what cannot be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.chunks import lay_out
from atoll.core.config import LinkOptions
from atoll.core.errors import PrepareError, RunError
from atoll.ltp.blocks import Mask
from atoll.tensors.binding import BoundChunk, bind_model, specs_of
from atoll.train.lossy import Losses, LossyPushes
from atoll.wire.messages import LostBlocks

LTP = LinkOptions(transport="ltp", high=0.25)
BLOCK = 4


def chunk(*sizes: int, dtype: torch.dtype = torch.float32) -> BoundChunk:
    named = {f"p{index}": nn.Parameter(torch.zeros(size, dtype=dtype)) for index, size in enumerate(sizes)}
    (bound,) = bind_model(lay_out(specs_of(named, {}), chunk_bytes=2**20), named)
    return bound


def pushes(bound: BoundChunk, options: LinkOptions = LTP) -> LossyPushes:
    return LossyPushes([bound], {bound.chunk.id: 3}, options, lambda _dtype: BLOCK)


def lost(*missing: int, blocks: int = 4, how: str = "borne", block: int = BLOCK) -> LostBlocks:
    bits = np.zeros(blocks, bool)
    bits[list(missing)] = True
    return LostBlocks(block, np.packbits(bits, bitorder="little").tobytes(), how)


def send(
    lossy: LossyPushes, bound: BoundChunk, exchange: int, values: Sequence[float], **options: Any
) -> tuple[Tensor, Mask | None]:
    gradient = torch.tensor(values, dtype=bound.flat.dtype)
    sent, how = lossy.outgoing(exchange, bound, gradient, [True] * len(bound.parameters), 1.0, **options)
    return sent, None if how is None else how.high


@pytest.mark.parametrize(
    "options", [LinkOptions(), LinkOptions(transport="ltp", reliable=True)], ids=["tcp", "reliable"]
)
def test_where_nothing_may_be_lost_gradients_pass_as_they_are(options: LinkOptions) -> None:
    bound = chunk(16)
    lossy, gradient = pushes(bound, options), torch.ones(16)
    sent, how = lossy.outgoing(0, bound, gradient, [True], 1.0)
    assert sent is gradient
    assert how is None
    lossy.answered(0, bound.chunk.id, None)
    lossy.made(0)
    assert lossy.losses(3) == Losses()


def test_what_counts_for_nothing_is_sent_so_that_it_arrives() -> None:
    """A shard counts on each push; and what is held back does not go along with one that has no weight."""
    bound = chunk(16)
    lossy = pushes(bound)
    send(lossy, bound, 0, [1.0] * 16)
    lossy.answered(0, 0, lost(0))
    lossy.made(0)
    for present, weight in (([False], 1.0), ([True], 0.0)):
        sent, how = lossy.outgoing(1, bound, torch.zeros(16), present, weight)
        assert how is None
        assert not sent.any()
        lossy.made(1)
    assert send(lossy, bound, 2, [0.0] * 16)[0].tolist() == [1.0] * 4 + [0.0] * 12


def test_the_largest_blocks_must_arrive_and_those_that_are_not_finite() -> None:
    bound = chunk(16)
    lossy = pushes(bound)
    _, high = send(lossy, bound, 0, [0.0] * 4 + [1.0] * 4 + [3.0] * 4 + [2.0] * 4)
    assert high is not None
    assert high.tolist() == [False, False, True, False]  # a quarter of them
    lossy.answered(0, 0, None)
    _, high = send(lossy, bound, 1, [torch.nan] + [0.0] * 11 + [0.0, torch.inf, 0.0, 0.0])
    assert high is not None
    assert high.tolist() == [True, False, False, True]


def test_what_is_lost_again_and_again_becomes_large_enough_to_arrive() -> None:
    bound = chunk(16)
    lossy = pushes(bound, LinkOptions(transport="ltp", high=0.25))
    arrived = []
    for exchange in range(40):
        _, high = send(lossy, bound, exchange, [4.0] * 4 + [1.0] * 12)
        assert high is not None
        arrived.append(bool(high[3]))
        lossy.answered(exchange, 0, lost(*np.flatnonzero(~high)))
        lossy.made(exchange)
    assert any(arrived)


def test_without_a_share_as_few_blocks_as_carry_most_must_arrive() -> None:
    bound = chunk(400)
    lossy = pushes(bound, LinkOptions(transport="ltp"))
    _, high = send(lossy, bound, 0, [100.0] * 40 + [1.0] * 360)
    assert high is not None
    assert int(high[:10].sum()) == int(high.sum()) == 7  # which carry 2800 of 4360, more than 60 %


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_an_answer_says_was_lost_goes_with_the_next_gradient(dtype: torch.dtype) -> None:
    bound = chunk(10, 5, dtype=dtype)
    lossy = pushes(bound)
    extent = bound.chunk.extent
    values = [float(place) for place in range(extent)]
    send(lossy, bound, 0, values)
    lossy.answered(0, 0, lost(1, blocks=-(-extent // BLOCK)))
    lossy.answered(0, 0, lost(0, blocks=-(-extent // BLOCK)))  # told once more: the first word counts
    assert lossy.losses(3).held == 0.0
    lossy.made(0)
    told = lossy.losses(3)
    assert (told.borne, told.filled) == (1, 0)
    assert told.held > 0
    sent, _ = send(lossy, bound, 1, [0.0] * extent)
    assert sent.tolist() == [0.0] * 4 + values[4:8] + [0.0] * (extent - 8)
    assert sent.dtype == dtype


def test_of_a_run_what_is_lost_is_counted_from_its_first_element() -> None:
    bound = chunk(16)
    lossy = pushes(bound)
    send(lossy, bound, 0, [2.0] * 8, start=8)
    lossy.answered(0, 0, lost(1, blocks=2, how="zero"))
    lossy.made(0)
    assert (lossy.losses(3).borne, lossy.losses(3).filled) == (1, 0)  # it comes later, and is not filled
    assert send(lossy, bound, 1, [0.0] * 16)[0].tolist() == [0.0] * 12 + [2.0] * 4


def test_blocks_that_were_cut_otherwise_are_counted_as_the_links() -> None:
    """Where a member of a group has died, a shard tells of single elements."""
    bound = chunk(16)
    lossy = pushes(bound)
    send(lossy, bound, 0, [2.0] * 16)
    lossy.answered(0, 0, lost(2, 3, 4, 5, 6, blocks=16, block=1))
    assert lossy.losses(3).borne == 2


def test_a_step_that_is_left_out_leaves_what_is_held_as_it_was() -> None:
    bound = chunk(16)
    lossy = pushes(bound)
    send(lossy, bound, 0, [1.0] * 16)
    lossy.answered(0, 0, lost(2))
    lossy.made(0)
    send(lossy, bound, 1, [5.0] * 16)
    lossy.answered(1, 0, lost(0, 1, 2, 3))
    lossy.made(1, accepted=False)
    assert send(lossy, bound, 2, [0.0] * 16)[0].tolist() == [0.0] * 8 + [1.0] * 4 + [0.0] * 4


def test_a_checkpoint_that_is_loaded_is_owed_nothing() -> None:
    bound = chunk(16)
    lossy = pushes(bound)
    send(lossy, bound, 0, [1.0] * 16)
    lossy.answered(0, 0, lost(2))
    lossy.made(0)
    lossy.clear()
    gradient = torch.zeros(16)
    assert lossy.outgoing(1, bound, gradient, [True], 1.0)[0].data_ptr() == gradient.data_ptr()


def test_without_feedback_what_was_lost_is_counted_and_gone() -> None:
    bound = chunk(16)
    lossy = pushes(bound, LinkOptions(transport="ltp", feedback=False, fill="rescale"))
    send(lossy, bound, 0, [1.0] * 16)
    lossy.answered(0, 0, lost(1, 2, how="rescaled"))
    lossy.made(0)
    assert lossy.losses(3) == Losses(borne=0, filled=2, held=0.0)
    assert not send(lossy, bound, 1, [0.0] * 16)[0].any()


def test_an_answer_that_cannot_be_of_the_contribution_ends_the_run() -> None:
    bound = chunk(16)
    lossy = pushes(bound)
    send(lossy, bound, 7, [1.0] * 16)
    with pytest.raises(RunError, match="shard 3, of chunk 0 of iteration 7: 1 bytes for what is lost of 16"):
        lossy.answered(7, 0, LostBlocks(1, b"\1", "borne"))


def test_what_no_part_may_be_lost_of_is_refused_by_its_name() -> None:
    eighth = chunk(16, dtype=torch.float8_e5m2)
    with pytest.raises(PrepareError, match=r"'p0' is float8_e5m2, and link.transport 'ltp' may lose"):
        pushes(eighth)
    pushes(eighth, LinkOptions(transport="ltp", reliable=True))
    rescaled = LinkOptions(transport="ltp", feedback=False, fill="rescale")
    with pytest.raises(PrepareError, match=r"'p0' is bfloat16, which link.fill 'rescale' cannot multiply"):
        pushes(chunk(16, dtype=torch.bfloat16), rescaled)
