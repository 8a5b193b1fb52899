"""Strategy ps-hra in a lab of two sites: grouped by speed, by site, and jointly, by measured links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lab_command import Labs

FILE = Path(__file__).parents[2] / "examples" / "lab" / "two-by-three.toml"
TRAIN = """
import time, torch, atoll
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 500), nn.Tanh(), nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
data = torch.utils.data.TensorDataset(torch.randn(4000, 16), torch.randn(4000, 1))
with atoll.join() as session:
    session.prepare(model, optimizer)
    for inputs, wanted in torch.utils.data.DataLoader(data, 8, sampler=session.sampler(data)):
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"ended after {session.iteration}", flush=True)
"""
DEADLINE = 240.0  # six imports of torch, on two cores; and rings over a long link


def grouped(labs: Labs, groups: str, by: str) -> tuple[list[str], str]:
    """A run to its end: the hub's decisions on groups, and on links."""
    topology = FILE.read_text().replace('groups = "auto"', f"groups = {groups}").replace('"joint"', f'"{by}"')
    (labs.directory / "atoll.toml").write_text('[run]\nstrategy = "ps-hra"\n')
    started = labs.start(
        labs.python(TRAIN, name="train"), topology, ATOLL_CONFIG=str(labs.directory / "atoll.toml")
    )
    status, out, err = labs.end(started, DEADLINE)
    assert status == 0, out + err
    assert out.count("ended after ") == 6
    assert labs.left() == []
    log = (labs.directory / f"records-lab-{len(labs.started) - 1}" / "logs" / "hub.log").read_text()
    decided = re.findall(r"^\S+ groups: (.*)$", log, flags=re.MULTILINE)
    links = re.findall(r"^\S+ links: (.*)$", log, flags=re.MULTILINE)
    assert decided, log
    return decided, " ".join(links)


@pytest.mark.soak
def test_groups_by_speed_by_site_and_by_links(labs: Labs) -> None:
    by_speed, links = grouped(labs, "3", "speed")
    assert sorted(each.partition(" (")[0] for each in by_speed)[0].startswith("workers ")
    assert not links
    by_site, _ = grouped(labs, '"auto"', "site")
    assert by_site[0].startswith("workers 0 1 2 | 3 4 5 (by site, as asked for: ")
    jointly, links = grouped(labs, '"auto"', "joint")
    assert links.startswith("3 of 3 links measured (6 workers on 2 machines) (between machines ")
    found = re.search(r"between machines ([\d.]+) Mbit/s and ([\d.]+) ms", links)
    assert found is not None
    rate, latency = map(float, found.groups())
    assert 15 < rate < 100
    assert 39 < latency < 60
    # The reason: what was measured, what is predicted, and what speed alone and site alone would give.
    assert "3 of 3 links measured" in jointly[0]
    assert "is predicted to give" in jointly[0]
    assert "speed alone" in jointly[0]
    assert "site alone" in jointly[0]
    whole = jointly[0].partition(" (")[0]
    assert not any({"0", "1", "2"} & set(group.split()) and {"3", "4", "5"} & set(group.split())
                   for group in whole.removeprefix("workers ").split(" | "))  # fmt: skip
