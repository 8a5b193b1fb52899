"""The order of a ring over two sites: workers whose ranks alternate between them cross the long link twice as
often as they must, until the ring's order is chosen."""

from __future__ import annotations

import json
from statistics import median

from lab_command import Labs

DEADLINE = 240.0  # five imports of torch, on two cores

TOPOLOGY = """
[[site]]
name = "paris"
workers = 3
[[site]]
name = "tokyo"
workers = 2
[[link]]
between = ["paris", "tokyo"]
rate = "30Mbit/s"
delay = "5ms"
queue = "256KiB"
[hub]
site = "paris"
shards = 0
"""

# Worker 0 dies in the second session: those who are left, tokyo, paris, tokyo, paris, choose anew.
TRAIN = """
import os, signal, statistics, time
number = int(os.environ["ATOLL_LAB_WORKER"])
os.environ["ATOLL_RANK"] = str([0, 2, 4, 1, 3][number])
import torch, atoll
from torch import nn
from atoll.core.config import load_config

torch.set_num_threads(1)

def train(order, dies):
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = load_config(settings=[f"run.ring_order={order}", "sync.timeout=60s", "run.directory=" + order])
    with atoll.join(config) as session:
        session.prepare(model, optimizer)
        torch.manual_seed(session.rank)
        seconds = []
        for step in range(8 if dies else 5):
            if dies and session.rank == 0 and session.world == 5 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(torch.randn(8, 512)).square().mean()
            begin = time.perf_counter()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
        total = float(model.weight.detach().double().sum())
        print(f"ended {session.world} {total!r} {statistics.median(seconds[1:5])}", flush=True)

train("natural", False)
train("measured", True)
"""


def test_a_ring_whose_order_is_measured_crosses_the_long_link_as_seldom_as_it_can(labs: Labs) -> None:
    status, out, err = labs.end(labs.start(labs.python(TRAIN), TOPOLOGY), DEADLINE)
    said = out + err
    assert "worker paris 0 was killed by signal 9" in said
    ended = [line.partition("ended ")[2].split() for line in out.splitlines() if "ended " in line]
    natural, chosen = ([float(seconds) for world, _, seconds in ended if world == each] for each in "54")
    assert (len(natural), len(chosen)) == (5, 4), said
    for world in "54":
        assert len({total for each, total, _ in ended if each == world}) == 1, "the same values, to the bit"

    journals = [path for path in labs.directory.rglob("*.jsonl") if "measured" in path.parts]
    events = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
    orders = [event for event in events if event.get("what") == "ring order"]
    orders.sort(key=lambda event: event["time"])
    assert [event["choice"] for event in orders] == ["0-2-4-1-3", "1-3-2-4"], said
    for event in orders:
        assert "crosses paris - tokyo 2 times instead of 4; " in event["reason"]
    assert median(natural) > 1.5 * median(chosen), (natural, chosen, orders)
    assert ["trial before" in event["reason"] for event in orders] == [False, True]
    assert status == 137
    assert labs.left() == []
