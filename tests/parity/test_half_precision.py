"""Half precision: gradients are added up in their own dtype, no sum leaves its range where the mean does not,
and steps that are made away from the script are those of torch's loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import atoll
from support.pool import WorkerPool
from support.runs import KINDS, run_at

pytestmark = pytest.mark.sampled

LARGE = 4000.0  # 32 times that is beyond float16's largest number, 65504
RATE = 2.0**-20
SIZES = ((32, 32), (1, 2), (32, 32))  # samples of the two workers, by step
OWN = ("asp", "peers tiers")  # kinds in which p.grad is this worker's own


def train(
    session: atoll.Session, dtype: torch.dtype, values: tuple[float, float], fused: bool | None
) -> tuple[list[float], list[float]]:
    """Steps in which every element of this worker's gradient is its value. Returns an element of `p.grad` in
    each step, and one of each parameter in the end."""
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(30))).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, fused=fused)
    session.prepare(net, optimizer)
    assert bool(session._state.tiers) == session.config.memory.is_given
    found = []
    for sizes in SIZES:
        nothing = net(torch.zeros(sizes[session.rank], 32, dtype=dtype)).sum() * 0  # it counts the samples
        (nothing + sum(p.sum() for p in net.parameters()) * values[session.rank]).backward()
        gradient = net[0].weight.grad
        assert gradient is not None
        assert gradient.dtype == dtype
        found.append(float(gradient.float().flatten()[0]))
        optimizer.step()
        optimizer.zero_grad()
    session.barrier()
    with torch.no_grad():
        net(torch.zeros(1, 32, dtype=dtype))  # newest parameters are there from the next forward on
    ends = [p.detach().clone().float().flatten() for p in net.parameters()]
    assert all(float(end.min()) == float(end.max()) for end in ends)
    return found, [float(end[0]) for end in ends]


@pytest.mark.parametrize("kind", KINDS)
def test_no_sum_overflows_where_the_mean_does_not(pool: WorkerPool, kind: str) -> None:
    seen = run_at(pool, kind, train, torch.float16, (LARGE, LARGE), None)
    for gradients, ends in seen:
        assert gradients == pytest.approx([LARGE] * len(SIZES), rel=2**-9)
        assert ends == pytest.approx([-len(SIZES) * LARGE * RATE] * len(ends), rel=2**-8)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["ring", "server", "peers", "tiers"])
def test_sums_are_of_the_gradients_own_dtype(pool: WorkerPool, kind: str) -> None:
    """bfloat16 has 8 bits: all workers have the same mean, which is right but for its rounding."""
    seen = run_at(pool, kind, train, torch.bfloat16, (256.0, 1.0), None)
    for step, sizes in enumerate(SIZES):
        right = (256.0 * sizes[0] + sizes[1]) / sum(sizes)
        for rank, (gradients, _) in enumerate(seen):
            assert gradients[step] == pytest.approx((256.0, 1.0)[rank] if kind in OWN else right, rel=2**-7)
    assert seen[0][1] == seen[1][1]
    whole = sum((256.0 * one + other) / (one + other) for one, other in SIZES)
    assert seen[0][1] == pytest.approx([-RATE * whole] * len(seen[0][1]), rel=2**-6)


@pytest.mark.parametrize("kind", ["server", "peers"])
def test_a_script_s_fused_steps_are_made_by_the_loop_elsewhere(pool: WorkerPool, kind: str) -> None:
    """torch's fused SGD for CPUs leaves nearly all of a half parameter as it was."""
    for _, ends in run_at(pool, kind, train, torch.bfloat16, (LARGE, LARGE), True):
        assert ends == pytest.approx([-len(SIZES) * LARGE * RATE] * len(ends), rel=2**-6)
