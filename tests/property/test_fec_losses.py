"""Forward error correction: any losses up to the number of parity datagrams, in any order, are restored."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.ltp import fec, gf

KERNELS = [
    pytest.param(
        kernel,
        marks=pytest.mark.skipif(
            kernel not in gf.KERNELS,
            reason=f"{kernel} does not run here: {gf.MISSING or 'another processor'}",
        ),
    )
    for kernel in ("avx2", "ssse3", "plain", "numpy")
]


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=100)
@given(st.data(), st.integers(1, 40), st.integers(0, 20), st.integers(0, 300))
def test_losses_up_to_the_parity_are_restored(
    kernel: str, data: st.DataObject, count: int, parity: int, length: int
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = rng.integers(0, 256, (count, length), dtype=np.uint8)
    lost = data.draw(st.integers(0, parity))
    with patch.object(gf, "KERNEL", kernel):
        whole = np.vstack([values, fec.encode(values, parity)])
        places = rng.permutation(count + parity)[: count + parity - lost]
        restored = fec.restore(whole[places], places, count)
    np.testing.assert_array_equal(restored, values[fec.lost_places(places, count)])
    back = values.copy()
    back[fec.lost_places(places, count)] = restored
    np.testing.assert_array_equal(back, values)


@given(st.integers(0, 5000), st.floats(0, 1), st.floats(1, 100), st.floats(1, 10))
def test_any_plan_is_whole(highs: int, loss: float, burst: float, apart: float) -> None:
    groups = fec.plan_groups(highs, loss, burst, apart=apart)
    assert 0 <= groups.parity <= min(fec.MOST_PARITY, groups.data + 1)
    assert groups.data <= fec.MOST_DATA
    assert groups.data_of(np.arange(groups.count)).sum() == highs
    assert groups.reason
    chances = fec.restore_chances(max(groups.data, 1), loss, burst, groups.count * apart)
    assert ((chances >= -1e-12) & (chances <= 1 + 1e-12)).all()
