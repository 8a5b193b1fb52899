"""What a site holds back of its contributions: over answers that come twice, steps that are left out,
weights, and a journal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.chunks import Chunk
from atoll.chunks.maps import Slot
from atoll.core.config import LinkOptions
from atoll.core.errors import RunError, UserError
from atoll.server.sitelosses import SiteLosses
from atoll.wire.messages import LostBlocks

SIZE, BLOCK = 20, 4
LTP = LinkOptions(transport="ltp")


def chunk_of(dtype: str = "float32") -> Chunk:
    return Chunk(id=3, group=0, dtype=dtype, numel=SIZE, slots=(Slot(0, 0, SIZE),), oversize=False)


def lost(*blocks: int, how: str = "borne") -> LostBlocks:
    mask = np.isin(np.arange(-(-SIZE // BLOCK)), blocks)
    return LostBlocks(BLOCK, np.packbits(mask, bitorder="little").tobytes(), how)


def gradient(number: int) -> Tensor:
    return torch.arange(1.0, SIZE + 1) * 10**number


def missing(*blocks: int) -> Tensor:
    return torch.isin(torch.arange(SIZE) // BLOCK, torch.tensor(blocks))


@pytest.mark.parametrize("how", ["borne", "zero"])
def test_what_was_lost_goes_along_with_the_next(how: str) -> None:
    losses = SiteLosses([chunk_of()], LTP)
    assert torch.equal(losses.outgoing(0, 3, gradient(0), b"\1", 2.0), gradient(0))
    losses.told(0, 3, lost(1, 4, how=how))
    losses.told(0, 3, lost(1, 4, how=how))  # a global shard that came back says it again
    losses.made()
    late = gradient(0) * missing(1, 4)
    for _ in range(2):  # sent up once more by a shard that was started again
        assert torch.equal(losses.outgoing(1, 3, gradient(1), b"\1", 2.0), gradient(1) + late)
    losses.told(0, 3, lost(0))  # of one that is over
    losses.told(1, 3, lost(4))
    losses.made()
    (values, weight) = losses.state()[3]
    assert torch.equal(values, (gradient(1) + late) * missing(4))
    assert weight == 2.0
    assert losses.of([3])[:2] == (3, 0)


def test_a_step_that_is_left_out_leaves_what_was_held() -> None:
    losses = SiteLosses([chunk_of()], LTP)
    losses.outgoing(0, 3, gradient(0), b"\1", 1.0)
    losses.told(0, 3, lost(2))
    losses.made()
    losses.outgoing(1, 3, gradient(1), b"\1", 1.0)
    losses.told(1, 3, lost(0))
    losses.made(accepted=False)
    assert torch.equal(losses.state()[3][0], gradient(0) * missing(2))


def test_a_journals_state_goes_on_as_it_was() -> None:
    one = SiteLosses([chunk_of()], LTP)
    one.outgoing(0, 3, gradient(0), b"\1", 4.0)
    one.told(0, 3, lost(0, 2))
    one.made()
    other = SiteLosses([chunk_of()], LTP)
    other.restore(one.state())
    for weight in (4.0, 8.0, 2.0):
        sent = [each.outgoing(int(weight), 3, gradient(1), b"\1", weight) for each in (one, other)]
        assert torch.equal(*sent)
        for each in (one, other):
            each.told(int(weight), 3, lost(1))
            each.made()
    assert torch.equal(one.state()[3][0], other.state()[3][0])


def test_what_weighs_nothing_and_what_loses_nothing_goes_as_it_is() -> None:
    losses = SiteLosses([chunk_of()], LTP)
    assert losses.outgoing(0, 3, gradient(0), b"\0", 1.0) is not None
    assert losses.how(3, BLOCK) is None
    losses.outgoing(0, 3, gradient(0), b"\1", 0.0)
    assert losses.how(3, BLOCK) is None
    losses.made()
    assert losses.state() == {}
    reliable = SiteLosses([chunk_of("int8")], LinkOptions(transport="ltp", reliable=True))
    assert not reliable.may_lose(b"\1", 1.0)
    unheld = SiteLosses([chunk_of()], LinkOptions(transport="ltp", feedback=False))
    unheld.outgoing(0, 3, gradient(0), b"\1", 1.0)
    unheld.told(0, 3, lost(1))
    unheld.made()
    assert unheld.state() == {}
    assert unheld.of([3]) == (1, 0, 0.0)


def test_the_largest_blocks_must_arrive() -> None:
    losses = SiteLosses([chunk_of()], LinkOptions(transport="ltp", high=0.4))
    losses.outgoing(7, 3, gradient(0), b"\1", 1.0)
    how = losses.how(3, BLOCK)
    assert how is not None
    assert (how.chunk, how.iteration, how.dtype) == (3, 7, "float32")
    assert how.high is not None
    assert how.high.tolist() == [False, False, False, True, True]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="a parameter in chunk 3 is float8_e5m2, and link.transport"):
        SiteLosses([chunk_of("float8_e5m2")], LTP)
    with pytest.raises(UserError, match="is bfloat16, which link.fill 'rescale' cannot multiply"):
        SiteLosses([chunk_of("bfloat16")], LinkOptions(transport="ltp", fill="rescale", feedback=False))
    losses = SiteLosses([chunk_of()], LTP)
    losses.outgoing(0, 3, gradient(0), b"\1", 1.0)
    with pytest.raises(RunError, match="the answer to chunk 3 of iteration 0 makes no sense: 1 bytes"):
        losses.told(0, 3, LostBlocks(1, b"\1", "borne"))
