"""session.reduce of complex values: sums and means keep the imaginary part, and there is no greatest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import atoll
from atoll.core.errors import UserError
from support.pool import WorkerPool
from support.runs import KINDS, alone, run_at

QUICK = ("ring", "asp")
WEIGHTS = (1.0, 3.0)


def reduce(session: atoll.Session) -> dict[str, Any]:
    value = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128) * (session.rank + 1)
    found: dict[str, Any] = {
        "sum": session.reduce(value, "sum"),
        "mean": session.reduce(value),
        "weighted": session.reduce(value, weight=WEIGHTS[session.rank]),
        "conjugated": session.reduce(value.conj().to(torch.complex64), "sum"),
        "number": session.reduce(complex(session.rank, 1), "sum"),
        "whole": session.reduce(session.rank + 1, "sum"),
    }
    for op in ("max", "min"):
        with pytest.raises(UserError) as caught:
            session.reduce(value, op)  # type: ignore[arg-type]
        found[op] = str(caught.value)
    return found


def check(found: dict[str, Any], world: int) -> None:
    value = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    total, weighted = (3.0, 1.75) if world == 2 else (1.0, 1.0)
    assert torch.allclose(found["sum"], value * total)
    assert torch.allclose(found["mean"], value * total / world)
    assert torch.allclose(found["weighted"], value * weighted)
    assert found["conjugated"].dtype == torch.complex64
    assert torch.allclose(found["conjugated"], (value.conj() * total).to(torch.complex64))
    assert found["number"] == (1 + 2j if world == 2 else 1j)
    assert found["whole"] == total
    assert type(found["whole"]) is float
    for op in ("max", "min"):
        assert found[op] == (
            f"reduce: complex values have no order, so they have no {op}; reduce value.abs(), or value.real"
            " and value.imag by themselves"
        )


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.soak)
        for kind in KINDS
        if not kind.endswith("tiers")  # of which it makes no difference
    ],
)
def test_sums_and_means_of_complex_values(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, reduce, world=2):
        check(found, 2)


def test_alone() -> None:
    check(alone(reduce), 1)
