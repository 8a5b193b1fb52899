"""What was lost of contributions: the mean over those who delivered, what is told to who sent, and what is
refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.server.payloads import WeightedGradients, weighted_mean
from atoll.store.losses import ChunkLoss, absent, told_of
from atoll.store.shard import Runs, ShardState, StagedContribution
from atoll.wire.lost import Spans, flaw, spans_of
from atoll.wire.messages import LostBlocks, run_of

NONE = np.zeros((0, 2), np.int64)


def lost_of(missing: list[bool], block: int, how: str = "borne") -> LostBlocks:
    return LostBlocks(block, np.packbits(np.array(missing), bitorder="little").tobytes(), how)


def drawn(rng: np.random.Generator, extent: int, block: int, share: float, how: str = "borne") -> LostBlocks:
    """Blocks of a payload that are lost by chance."""
    return lost_of(list(rng.random(-(-extent // block)) < share), block, how)


def elements(spans: Spans, extent: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """By element, whether it lies in one of the spans."""
    mask = np.zeros(extent, np.bool_)
    for start, stop in spans:
        mask[start:stop] = True
    return mask


def contribution(rng: np.random.Generator, extent: int, dtype: torch.dtype, gone: Spans) -> Tensor:
    """Gradients with zeros where they did not come."""
    values = torch.from_numpy(rng.standard_normal(extent)).to(dtype)
    values[torch.from_numpy(elements(gone, extent))] = 0
    return values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@given(
    seed=st.integers(0, 2**32),
    extent=st.integers(1, 200),
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_the_mean_is_over_those_who_delivered(
    dtype: torch.dtype, seed: int, extent: int, weights: list[int], share: float
) -> None:
    """Each with blocks of its own size, as a plain loop in float64 has it; what nobody lost is as without
    losses, to the bit."""
    rng = np.random.default_rng(seed)
    gone = [spans_of(drawn(rng, extent, int(rng.integers(1, 40)), share), extent) for _ in weights]
    parts: list[WeightedGradients] = [
        (float(weight), contribution(rng, extent, dtype, spans), b"\1")
        for weight, spans in zip(weights, gone, strict=True)
    ]
    before = [gradients.clone() for _, gradients, _ in parts]
    mean, present = weighted_mean(parts, gone)
    masks = [elements(spans, extent) for spans in gone]
    assert mean.dtype == dtype
    assert present == bytes([any(weights)])
    for at in range(extent):
        there = [(w, float(g[at])) for (w, g, _), mask in zip(parts, masks, strict=True) if not mask[at]]
        total = sum(weight for weight, _ in there)
        expected = sum(weight * value for weight, value in there) / total if total else 0.0
        bound = 4 * torch.finfo(dtype).eps * sum(abs(value) for _, value in there)
        assert abs(float(mean[at]) - expected) <= bound
    whole = ~torch.from_numpy(np.logical_or.reduce(masks))
    assert torch.equal(mean[whole], weighted_mean(parts)[0][whole])
    assert all(torch.equal(one, other) for one, (_, other, _) in zip(before, parts, strict=True))


def test_without_losses_the_mean_is_what_it_was() -> None:
    rng = np.random.default_rng(1)
    parts: list[WeightedGradients] = [
        (w, contribution(rng, 1000, torch.float32, NONE), b"\1") for w in (1.0, 3.0, 2.0)
    ]
    expected = parts[0][1] * (1 / 6)
    for weight, gradients, _ in parts[1:]:
        expected.add_(gradients, alpha=weight / 6)
    assert torch.equal(weighted_mean(parts)[0], expected)
    assert torch.equal(weighted_mean(parts, [NONE] * 3)[0], expected)


def test_of_one_who_alone_delivered_a_block_the_mean_is_its_own_to_the_bit() -> None:
    rng = np.random.default_rng(2)
    gone = [spans_of(lost_of([True, False], 8), 16), spans_of(lost_of([False, True], 8), 16)]
    parts: list[WeightedGradients] = [
        (w, contribution(rng, 16, torch.float32, spans), b"\1")
        for w, spans in zip((0.3, 0.9), gone, strict=True)
    ]
    mean, _ = weighted_mean(parts, gone)
    assert torch.equal(mean, torch.cat([parts[1][1][:8], parts[0][1][8:]]))


def test_who_has_no_weight_delivers_nothing() -> None:
    gone = spans_of(lost_of([True], 4), 4)
    mean, present = weighted_mean(
        [(0.0, torch.full((4,), 9.0), b"\1"), (2.0, torch.zeros(4), b"\1"), (1.0, torch.ones(4), b"\1")],
        [NONE, gone, NONE],
    )
    assert torch.equal(mean, torch.ones(4))
    assert present == b"\1"
    nobody, _ = weighted_mean([(1.0, torch.zeros(4), b"\1"), (2.0, torch.zeros(4), b"\1")], [gone, gone])
    assert torch.equal(nobody, torch.zeros(4))


@given(
    seed=st.integers(0, 2**32),
    extent=st.integers(0, 120),
    shares=st.integers(1, 5),
    asked=st.integers(1, 5),
)
def test_each_lost_element_is_told_once_however_the_chunk_is_asked_for(
    seed: int, extent: int, shares: int, asked: int
) -> None:
    rng = np.random.default_rng(seed)
    sizes = [stop - start for start, stop in (run_of(extent, share, shares) for share in range(shares))]
    runs = {
        share: drawn(rng, size, int(rng.integers(1, 9)), 0.4, str(rng.choice(["borne", "zero"])))
        for share, size in enumerate(sizes)
        if size and rng.random() < 0.7
    }
    loss = ChunkLoss(shares, runs)
    lost, borne = np.zeros(extent, np.bool_), np.zeros(extent, np.bool_)
    for share, each in runs.items():
        assert not flaw(each, sizes[share])
        mask = elements(spans_of(each, sizes[share], run_of(extent, share, shares)[0]), extent)
        lost |= mask
        borne |= mask & (not each.counts)
    assert np.array_equal(elements(absent(loss, extent), extent), borne)
    cuts = sorted(int(cut) for cut in rng.choice(extent + 1, 4, replace=False)) if extent > 3 else [0] * 4
    places = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
    here = np.isin(np.arange(extent), [at for start, stop in places for at in range(start, stop)])
    assert np.array_equal(elements(absent(loss, extent, places), extent), borne & here)
    told = np.zeros(extent, np.bool_)
    for share in range(asked):
        start, stop = run_of(extent, share, asked)
        answer = told_of(loss, extent, share, asked)
        if answer is not None:
            assert not flaw(answer, stop - start)
            told |= elements(spans_of(answer, stop - start, start), extent)
            if asked == shares:
                assert answer == runs[share]
    assert np.array_equal(told, lost)


def test_what_cannot_be_lost_is_named() -> None:
    assert not flaw(lost_of([True, False, True], 4), 9)
    assert "not 'gone'" in flaw(lost_of([True], 4, "gone"), 4)
    assert flaw(LostBlocks(4, b"\1\0", "borne"), 9) == (
        "2 bytes for what is lost of 9 elements in blocks of 4"
    )
    assert "beyond the 3 that there are" in flaw(LostBlocks(4, b"\x08", "borne"), 9)
    assert flaw(LostBlocks(0, b"", "borne"), 9)


def test_a_state_from_before_there_were_losses_is_read() -> None:
    """As an earlier version has written it."""
    old = {
        "expected": 2,
        "parts": {0: (7, b"\1")},
        "runs": {1: {"shares": 2, "present": b"", "handles": {0: 8}}},
    }
    found = msgspec.convert(
        msgspec.msgpack.decode(msgspec.msgpack.encode(old)), StagedContribution, strict=False
    )
    assert found.losses == {}
    assert found.runs == {1: Runs(2, b"", {0: 8})}
    state = msgspec.structs.asdict(ShardState.begin([0], "bsp", 0))
    del state["losses"]
    restored = msgspec.msgpack.decode(
        msgspec.msgpack.encode({**state, "staged": {}, "members": {}}), type=ShardState
    )
    assert restored.losses == {}
