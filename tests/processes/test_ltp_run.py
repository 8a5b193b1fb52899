"""`atoll run` over the loss-tolerant transport, as a user starts it: each part gets its way, and the run's
records tell of the links."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_command import Command

TRAIN = """
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Linear(40, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(3, 40)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("sites", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_run_over_ltp_tells_of_each_link(tmp_path: Path, sites: int) -> None:
    command = Command(tmp_path)
    (tmp_path / "atoll.toml").write_text(
        f'[run]\nstrategy = "server"\nsites = {sites}\n[link]\ntransport = "ltp"\nrate = "1Gbit/s"\n'
    )
    status, _, error = command.run(TRAIN)
    assert status == 0, error
    who = ["site site0", "site site1"] if sites else ["worker 0", "worker 1"]
    links = command.summary()["links"]
    assert [(link["who"], link["peer"]) for link in links] == [(each, "shard 0") for each in who]
    assert all(link["bytes_out"] > 5 * 300 * 40 * 4 for link in links)  # at least the gradients
    assert all(link["sent"] > 0 < link["rate"] for link in links)
    assert f"atoll: link: {who[0]} to shard 0: " in error
    assert "atoll: link: ltp: what is lost of a gradient goes with the next one" in error or sites
    assert not command.alive()
