"""A node that stands still at the end of its epoch, where all meet: it comes back in place, within the epoch
where the others are by then."""

from __future__ import annotations

import json
import signal

import psutil
import pytest
from run_command import Command, wait_for
from test_peers_run import is_back, is_warned, steps

# Epochs of 20 iterations, after each of which all meet. Node 2 stands still before iteration 20 + `at`, with
# all its processes; from the next epoch on the others take their time until it is back.
SCRIPT = """
import json, os, sys, time
import psutil, torch
import atoll

how, at = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)


def stand_still():
    this = psutil.Process()
    for child in this.children(recursive=True):
        child.suspend()
    with open("stands", "w") as file:
        file.write(f"{this.pid}.")
    this.suspend()


with atoll.join() as session:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    data = torch.randn(120, 8)
    batches = session.batches(data)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches, num_workers=2, prefetch_factor=4)
    session.resume()
    ends = []
    while True:
        for x in session.epoch_of(loader) if how == "epoch_of" else loader:
            if session.rank == 2 and session.iteration == 20 + at and not os.path.exists("stands"):
                stand_still()
            until = time.monotonic() + 3.0
            while batches.epoch > 1 and not os.path.exists("back") and time.monotonic() < until:
                time.sleep(0.05)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([batches.epoch, session.iteration])
        if session.reduce(float(os.path.exists("back")), "max") and batches.epoch >= 3:
            break
    with open(f"ends-{session.rank}", "a") as file:
        file.write(json.dumps(ends))
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("how", "at"), [("loader", 15), ("epoch_of", 19)])
def test_a_node_that_stood_still_at_an_epochs_end_comes_back_in_place(
    command: Command, how: str, at: int
) -> None:
    """With more than `stale_max` + 1 batches in hand, of a loader that was told of the end; and in the last
    iteration."""
    config = command.directory / "peers.toml"
    config.write_text(
        '[run]\nstrategy = "peers"\nrestarts = 1\n[sync]\ntimeout = "100s"\nstale_max = 1\nglobal_batch = 6\n'
    )
    launched = command.start(SCRIPT, how, str(at), workers=3, environment={"ATOLL_CONFIG": str(config)})
    stands = command.directory / "stands"
    wait_for(lambda: stands.exists() and stands.read_text().endswith("."), "node 2 to stand still")
    worker = psutil.Process(int(stands.read_text()[:-1]))
    wait_for(lambda: worker.status() == psutil.STATUS_STOPPED, "all of node 2 to stand still")
    wait_for(lambda: is_warned(command, 0, "node 2 was left out: "), "the others to leave node 2 out")
    wait_for(lambda: steps(command, 0) > 41, "the others to be in the next epoch")
    for process in [worker, *worker.children(recursive=True)]:
        process.send_signal(signal.SIGCONT)
    wait_for(lambda: is_back(command, 2), "node 2 to come back")
    (command.directory / "back").touch()
    _, err = launched.communicate(timeout=200)
    assert launched.returncode == 0, err
    first, _, third = (json.loads((command.directory / f"ends-{node}").read_text()) for node in range(3))
    assert "is started again" not in err, err
    assert [epoch for epoch, _ in first] == [0, 1, 2, 3]
    assert first[1] == [1, 40]
    assert third == [first[0], *first[2:]]
