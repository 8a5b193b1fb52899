"""`session.sampler` under strategy `peers`, when a node is killed, stays away for epochs, and comes back."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from run_command import DEADLINE, wait_for
from torch.utils.data import DataLoader

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.observe.rundir import DIRECTORY_VARIABLE
from support.cpu_sides import fork_cpu_sides
from support.pool import FORKSERVER
from support.served import ServedRun, served_worker

LENGTH = 60


def live(rank: int, life: int, address: str, folder: Path, workers: int) -> None:
    """A node's life. Node 2's first ends in iteration 3. The others train until it has been away for two
    whole epochs, and then for two with it."""
    torch.set_num_threads(1)
    fork_cpu_sides()
    os.environ[DIRECTORY_VARIABLE] = str(
        folder / "run"
    )  # where a node that is started again finds the others
    config = Config(run=Run(strategy="peers"), sync=Sync(timeout="100s", stale_max=1))
    with served_worker(address, rank), atoll.join(config) as session:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        session.prepare(model, optimizer)
        data = torch.arange(float(LENGTH))[:, None]
        sampler = session.sampler(range(LENGTH), seed=0)
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)  # type: ignore[arg-type, var-annotated]
        session.resume()
        alone = back = 0
        while back < 2:
            seen: list[int] = []
            for x in loader:
                if (rank, life, session.iteration) == (2, 0, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                model(x / LENGTH).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += map(int, x)
                time.sleep(0.01)
            count = len(sampler.members)
            alone += count == 2
            back += count == 3 and sampler.epoch > 0
            with (folder / f"seen-{rank}").open("a") as file:
                file.write(f"{sampler.epoch} {count} {int(sampler.takes_part)} {' '.join(map(str, seen))}\n")
            if alone == 2:
                (folder / "come").touch()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_what_a_killed_nodes_part_was_is_dealt_to_the_others_until_it_is_back(
    tmp_path: Path, workers: int
) -> None:
    with ServedRun(3, shards=0) as served:

        def begin(rank: int, life: int) -> BaseProcess:
            process = FORKSERVER.Process(target=live, args=(rank, life, served.address, tmp_path, workers))
            process.start()
            return process

        nodes = [begin(rank, 0) for rank in range(3)]
        try:
            wait_for((tmp_path / "come").exists, "two epochs without node 2")
            assert nodes[2].exitcode == -signal.SIGKILL
            nodes[2] = begin(2, 1)
            for node in nodes:
                node.join(DEADLINE)
            assert [node.exitcode for node in nodes] == [0, 0, 0]
        finally:
            for node in nodes:
                node.kill()
    members: dict[int, int] = {}
    seen: dict[int, list[int]] = defaultdict(list)
    for rank in range(3):
        for line in (tmp_path / f"seen-{rank}").read_text().splitlines():
            epoch, count, takes_part, *indices = map(int, line.split())
            members[epoch] = count
            if takes_part:
                seen[epoch] += indices
    assert members[0] == 3
    assert list(members.values()).count(2) >= 2
    assert members[max(members)] == 3
    assert set(seen[0]) < set(range(LENGTH))
    for epoch in range(1, max(members) + 1):
        assert sorted(seen[epoch]) == list(range(LENGTH)), f"epoch {epoch}, dealt to {members[epoch]}"
