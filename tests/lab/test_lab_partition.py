"""A link that is cut for a while between two sites that train: they go on as if it had only been slow."""

from __future__ import annotations

import pytest
from lab_command import TWO, Labs

STEPS = 400  # 24 s and more, from some seconds after the start: the link is cut meanwhile
TRAIN = f"""
import time, torch, atoll
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    for _ in range({STEPS}):
        time.sleep(0.06)
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
    session.barrier()
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    print(f"ended with {{total!r}} of {{session.world}} after {{session.iteration}}", flush=True)
"""
# One second: what is sent meanwhile is sent again by TCP after up to two, and a silence of 3.5 s is borne.
CUT = TWO + '[[link.outage]]\nat = "15s"\nfor = "1s"\n[hub]\nsite = "paris"\nshards = {shards}\n'


@pytest.mark.soak
@pytest.mark.parametrize("shards", [0, 1], ids=["ring", "bsp"])
def test_a_partition_that_heals(labs: Labs, shards: int) -> None:
    python, script = labs.python(TRAIN)
    status, out, err = labs.end(labs.start([python, script], CUT.format(shards=shards)), 120.0)
    assert status == 0, out + err
    ended = [line.partition("ended with ")[2] for line in out.splitlines() if "ended with " in line]
    assert len(ended) == 2
    assert ended[0] == ended[1]
    assert ended[0].endswith(f" of 2 after {STEPS}"), "nobody was left out"
    record = labs.record()
    assert all(link["lost"]["outage"] for link in record["links"]), "the link was cut while they trained"
    assert labs.left() == []
