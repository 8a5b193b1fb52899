"""A link that is cut for a while between two sites that train: they go on as if it had only been slow; nodes
without a server go on where most of them are, if it is cut for longer."""

from __future__ import annotations

import json
from itertools import pairwise

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


# Each node notes the time of each iteration (the same clock for all), and what it holds at the end.
NODE = """
import hashlib, json, time, torch, atoll
from torch import nn

torch.set_num_threads(1)
with atoll.join() as session:
    torch.manual_seed(0)
    model = nn.Linear(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.prepare(model, optimizer)
    times = {}
    while session.iteration < STEPS:
        time.sleep(0.05)
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        times[session.iteration] = time.monotonic()
    session.barrier()
    held = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print("ended with", json.dumps([session.rank, session.iteration, held, times]), flush=True)
"""
OUTAGE = 20.0  # seconds; a silence of 3.5 s, or more on a busy machine, is a member's end
NODES = 1800  # iterations, 90 s and more: enough to see them parted and together again


@pytest.mark.soak
def test_most_nodes_go_on_without_those_behind_a_cut_link(labs: Labs) -> None:
    """Three in Paris, with the hub, and two in Berlin."""
    topology = TWO.replace('"paris"\n[', '"paris"\nworkers = 3\n[').replace(
        '"berlin"\n[', '"berlin"\nworkers = 2\n['
    )
    topology += f'[[link.outage]]\nat = "50s"\nfor = "{OUTAGE:g}s"\n[hub]\nsite = "paris"\nshards = 0\n'
    config = labs.directory / "atoll.toml"
    config.write_text('[run]\nstrategy = "peers"\n[sync]\ntimeout = "100s"\n')
    script = labs.python(NODE.replace("STEPS", str(NODES)))
    status, out, err = labs.end(labs.start(script, topology, ATOLL_CONFIG=str(config)), 280.0)
    assert status == 0, out + err
    ended = [
        json.loads(line.partition("ended with ")[2]) for line in out.splitlines() if "ended with" in line
    ]
    assert sorted(rank for rank, *_ in ended) == list(range(5))
    assert {iteration for _, iteration, *_ in ended} == {NODES}
    assert len({held for _, _, held, _ in ended}) == 1, "all have the same bits"
    made = {rank: {int(k): at for k, at in times.items()} for rank, _, _, times in ended}
    for rank in (3, 4):  # it stands, and takes up where the others are by then
        until, since = max(
            ((later, earlier) for earlier, later in pairwise(made[rank].values())),
            key=lambda pause: pause[0] - pause[1],
        )
        assert until - since > OUTAGE / 2
        for other in (0, 1, 2):
            meanwhile = [k for k, at in made[other].items() if since < at < until]
            assert len(meanwhile) > 50, "most of them went on"
        assert max(after - before for before, after in pairwise(sorted(made[rank]))) > 50
    for rank in (0, 1, 2):
        assert sorted(made[rank]) == list(range(1, NODES + 1)), "who went on has made each iteration"
    assert all(link["lost"]["outage"] for link in labs.record()["links"])
    assert labs.left() == []
