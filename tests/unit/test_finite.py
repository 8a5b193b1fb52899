"""NaN and infinity are found wherever they are, and nothing else is taken for them."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.tensors.finite import is_finite

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_element_is_found_at_each_place(dtype: torch.dtype, bad: float) -> None:
    values = torch.randn(37, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert is_finite(values)
    for place in range(len(values)):
        spoilt = values.clone()
        spoilt[place] = bad
        assert not is_finite(spoilt)


def test_both_infinities_do_not_make_up_for_one_another() -> None:
    assert not is_finite(torch.tensor([math.inf, -math.inf, 0.0]))


def test_the_largest_numbers_are_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        most = torch.finfo(dtype).max
        assert is_finite(torch.tensor([most, most, -most, -most], dtype=dtype))


def test_what_has_no_elements_or_no_fractions_is_finite() -> None:
    assert is_finite(torch.empty(0))
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.zeros(()))


def test_any_strides_and_any_parameter() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 6))
    assert is_finite(matrix.t()[::2])
    with torch.no_grad():
        matrix[3, 1] = math.nan
    assert is_finite(matrix[:, ::2])
    assert not is_finite(matrix.t()[1])
