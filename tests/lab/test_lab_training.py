"""Training across a lab's sites: by a ring over Gloo, and through a hub and a shard with keys."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest
from lab_command import TWO, Labs, wait_for

from atoll.lab import report, traffic
from atoll.launch import labpicture

TRAIN = """
import torch, atoll
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    torch.manual_seed(session.rank)
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    print(f"ended with {total!r} of {session.world}", flush=True)
"""
SLOW = TWO.replace('name = "berlin"', 'name = "berlin"\nspeed = 0.5').replace('"2ms"', '"10ms"')
HUB = SLOW + '[hub]\nsite = "paris"\nshards = 1\n'
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "{workers}", "--node-rank", "{worker}"]
TORCHRUN += ["--nproc-per-node", "1", "--master-addr", "{first}", "--master-port", "29500"]
DEADLINE = 150.0  # four imports of torch, on two cores


def train(labs: Labs, topology: str, launcher: list[str]) -> str:
    """Run the script in both sites; returns what the lab printed."""
    python, script = labs.python(TRAIN, name="train")
    status, out, err = labs.end(labs.start([python, *launcher, script], topology), DEADLINE)
    assert status == 0, out + err
    ended = [line.partition("ended with ")[2] for line in out.splitlines() if "ended with " in line]
    assert len(ended) == 2
    assert ended[0] == ended[1], "both workers have the same parameters, to the bit"
    assert ended[0].endswith("of 2")
    assert labs.left() == []
    return out


def check_cost(labs: Labs, out: str) -> None:
    """The report says what each worker waited, and that its traffic went over the links."""
    record = labs.record()
    assert [(worker["name"], worker["speed"], worker["steps"]) for worker in record["workers"]] == [
        ("paris 0", 1.0, 12),
        ("berlin 1", 0.5, 12),
    ]
    for worker in record["workers"]:
        assert 0 <= worker["waiting_for_slower"] < worker["waiting"] < worker["seconds"]
    assert "worker berlin 1 at speed 0.5 made 12 iterations of " in out
    assert "link paris -> berlin carried " in out
    check_traffic(labs)
    assert all(link["delivered"]["bytes"] > 12 * 2000 for link in record["links"])
    assert all(sum(link["lost"].values()) == 0 for link in record["links"])


def check_traffic(labs: Labs) -> None:
    """What the links did over time adds up to what they did; the loss is on the same axis."""
    folder, record = labs.directory / "records-lab-0", labs.record()
    moments = traffic.read(folder / "links.jsonl")
    assert len(moments) >= 2
    assert [row.delivered_bytes for row in moments[-1].rows] == [
        link["delivered"]["bytes"] for link in record["links"]
    ]
    assert record["seconds"] <= moments[-1].at + 0.1
    told = report.read_journals(folder / "journals", 2)
    loss, took = labpicture.over_time(told, record["began"])
    assert (loss.name, len(loss.points), len(took.points)) == ("loss", 12, 12)
    assert all(0 < at < moments[-1].at for at, _ in loss.points)
    assert (folder / "lab.png").exists() == bool(importlib.util.find_spec("matplotlib"))


@pytest.mark.soak
def test_a_ring_of_two_torchrun_launches(labs: Labs) -> None:
    out = train(labs, SLOW, TORCHRUN)
    check_cost(labs, out)
    waited = [worker["waiting"] for worker in labs.record()["workers"]]
    assert min(waited) >= 11 * 0.01, "no iteration but the first is whole without a link's delay"


def test_a_parameter_server_with_keys(labs: Labs) -> None:
    check_cost(labs, train(labs, HUB, []))
    logs = labs.directory / "records-lab-0" / "logs"
    assert "with keys" in (logs / "hub.log").read_text()
    assert "listens at tcp://10.77.1.1:47701" in (logs / "shard-0.log").read_text()


@pytest.mark.soak
def test_a_ring_that_meets_at_the_hub(labs: Labs) -> None:
    """Without shards the hub's workers are a ring."""
    check_cost(labs, train(labs, HUB.replace("shards = 1", "shards = 0"), []))
    log = (labs.directory / "records-lab-0" / "logs" / "hub.log").read_text()
    assert "no shards, with keys" in log


@pytest.mark.soak
def test_a_parameter_server_under_two_torchrun_launches(labs: Labs) -> None:
    check_cost(labs, train(labs, HUB, TORCHRUN))


def test_ctrl_c_while_hub_and_shard_start(labs: Labs) -> None:
    process = labs.start(["true"], HUB)
    log = labs.directory / "records-lab-0" / "logs" / "hub.log"
    wait_for(log.exists, "the hub's start")
    process.send_signal(signal.SIGINT)
    status, _, err = labs.end(process)
    assert status == 130
    assert err.splitlines()[-1] == "atoll: stopped by Ctrl-C"
    assert labs.left() == []


def test_a_hub_that_ends_ends_the_lab(labs: Labs) -> None:
    topology = HUB.replace("shards = 1", "shards = 0")
    process = labs.start(["sleep", "1000"], topology)
    wait_for(lambda: [each.name() for each in labs.find("sleep 1000")].count("sleep") == 2, "both workers")
    (hub,) = labs.find("main()", " hub --workers 2")
    hub.send_signal(signal.SIGKILL)
    status, _, err = labs.end(process)
    log = labs.directory / "records-lab-0" / "logs" / "hub.log"
    assert (status, err) == (
        1,
        f"atoll: the hub was killed by signal 9, and the run cannot go on; its log is {log}\n",
    )
    assert labs.left() == []


def test_workers_are_told_of_the_hub(labs: Labs) -> None:
    """Each has the rank of its number, and keys that it may read and others not."""
    show = "env; stat -c 'keys %a' $ATOLL_KEY_FILE"
    status, out, err = labs.run(["sh", "-c", show], HUB.replace("shards = 1", "shards = 0"))
    assert status == 0, out + err
    for name, rank in (("paris 0", 0), ("berlin 1", 1)):
        said = {line.removeprefix(f"[{name}] ") for line in out.splitlines() if line.startswith(f"[{name}]")}
        assert {"ATOLL_HUB=tcp://10.77.1.1:47700", f"ATOLL_RANK={rank}", "keys 600"} <= said
        assert any(line.startswith("ATOLL_RUN=lab-") for line in said)
    assert not list(Path(labs.directory).rglob("run.key")), "the keys went with the lab"
