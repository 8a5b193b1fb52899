"""The rows of sparse gradients, and their values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.tensors.sparse import check_summable, copy_gradient, pack, rows_in, rows_of, union, values_in


def sparse(rows: list[int], of: int = 40) -> Tensor:
    values = torch.arange(1.0, 2 * len(rows) + 1).reshape(-1, 2)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (of, 2), check_invariants=False)


@pytest.mark.parametrize("of", [32, 40, 41, 10_000])  # of many rows, numbers are told in place of bits
def test_the_union_has_the_rows_of_all(of: int) -> None:
    packed = [
        rows_in(sparse([3, 3, 31], of)),
        rows_in(None),
        rows_in(sparse([0, 31], of)),
        rows_in(sparse([], of)),
    ]
    found = union(packed, of)
    assert found is not None
    assert found.tolist() == [0, 3, 31]


def test_the_union_with_a_dense_gradient_is_dense() -> None:
    assert union([rows_in(sparse([1])), rows_in(torch.zeros(40, 2))], 40) is None


def test_rows_without_any_are_a_sparse_gradient_without_rows() -> None:
    found = union([rows_in(sparse([])), b""], 40)
    assert found is not None
    made = rows_of(torch.ones(40, 2), found)
    assert made.is_sparse
    assert made._nnz() == 0


@pytest.mark.parametrize(
    ("rows", "of"), [([], 10_000), ([9_999, 0], 10_000), ([1, 2], 16), ([*range(99)], 99)]
)
def test_rows_take_the_shorter_of_two_forms(rows: list[int], of: int) -> None:
    told = rows_in(sparse(rows, of))
    assert told is not None
    assert len(told) == 1 + min(8 * len(rows), -(-of // 8))
    found = union([told], of)
    assert found is not None
    assert found.tolist() == sorted(rows)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
def test_rows_are_packed(scale: float) -> None:
    into, rows = torch.full((4, 2), 7.0), torch.tensor([1, 3, 5, 39])
    pack(into, sparse([39, 3, 39]), rows, scale)
    right = sparse([39, 3, 39]).to_dense().index_select(0, rows) * scale
    assert torch.equal(into, right)
    pack(into, None, rows, scale)
    assert not into.any()


def test_values_of_a_row_are_scaled_before_they_are_added() -> None:
    """As where all rows are summed: in float16 the sum of two may be infinite."""
    values = torch.tensor([[40_000.0], [40_000.0]], dtype=torch.float16)
    twice = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), values, (5, 1), check_invariants=False)
    into = torch.zeros(1, 1, dtype=torch.float16)
    pack(into, twice, torch.tensor([2]), 0.25)
    assert into.item() == 20_000.0


def test_a_contribution_without_weight_may_be_nan() -> None:
    into = torch.ones(1, 2)
    pack(into, sparse([3]) * float("nan"), torch.tensor([3]), 0.0)
    assert not into.any()


def test_a_gradient_is_copied_whatever_it_is() -> None:
    view = torch.full((40, 2), 7.0)
    copy_gradient(view, sparse([3, 5, 3]))
    assert torch.equal(view, sparse([3, 5, 3]).to_dense())
    copy_gradient(view, torch.ones(40, 2, requires_grad=True))
    assert torch.equal(view, torch.ones(40, 2))
    assert not view.requires_grad
    copy_gradient(view, None)
    assert not view.any()


def test_values_count_once() -> None:
    assert values_in(sparse([3, 5, 3])).tolist() == [[6.0, 8.0], [3.0, 4.0]]
    assert values_in(torch.ones(2)).tolist() == [1.0, 1.0]


def test_only_rows_can_be_summed() -> None:
    check_summable("w", sparse([1]))
    check_summable("w", torch.zeros(2))
    with pytest.raises(
        UserError, match=r"'w' is sparse in 2 of its dimensions, .*; let its function return grad"
    ):
        check_summable("w", torch.eye(2).to_sparse())
    with pytest.raises(UserError, match=r"'w' is sparse in the layout torch.sparse_csr"):
        check_summable("w", torch.eye(2).to_sparse_csr())
