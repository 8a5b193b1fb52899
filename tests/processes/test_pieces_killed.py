"""A worker that is killed amid the pieces of a batch: its samples are dealt again, and each counts once."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from run_command import Command

# Worker 1's memory holds two samples. It is killed in the second piece of its second batch.
TRAINS = """
import os, signal
import torch
from torch.utils.data import DataLoader, TensorDataset
import atoll

torch.manual_seed(0)
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.arange(60), torch.randn(60, 4, generator=generator, dtype=torch.float64))
with atoll.join() as session:
    session.prepare(model, optimizer)
    loader = DataLoader(data, batch_sampler=session.batches(data, seed=0))
    mine = session.rank
    for epoch in range(2):
        for batch in loader:
            for number, piece in enumerate(session.pieces(batch)):
                with piece as (_, inputs):
                    if mine == 1 and len(inputs) > 2:
                        raise torch.OutOfMemoryError("CUDA out of memory: a test says so")
                    if (mine, session.iteration, number) == (1, 1, 1):
                        os.kill(os.getpid(), signal.SIGKILL)
                    model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with open(f"trained-{mine}.txt", "a") as file:
                file.write(f"{epoch} {batch[0].tolist()}\\n")
    everyone = session.gather(torch.cat([each.detach().flatten() for each in model.parameters()]))
    if session.is_main:
        print("apart by", max(float((each - everyone[0]).abs().max()) for each in everyone))
"""


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [
        ("ring", 0),
        ("ps-hra", 2),
        pytest.param("hierarchical", 2, marks=pytest.mark.soak),
        pytest.param("server", 0, marks=pytest.mark.soak),
    ],
)
def test_a_worker_is_killed_amid_the_pieces_of_a_batch(command: Command, strategy: str, groups: int) -> None:
    """Each sample is in one step of an epoch, and who is left has equal parameters."""
    (command.directory / "atoll.toml").write_text(
        f"[run]\nstrategy = '{strategy}'\nelastic = true\n"
        f"[hub]\npatience = '5s'\n[groups]\ncount = {groups}\n"
        "[sync]\nglobal_batch = 12\nmemory_cap = 'auto'\nconsistency = 'bsp'\n"
    )
    workers = 4 if groups else 3
    code, out, err = command.run(TRAINS, workers=workers)
    assert code == 0, err
    assert "apart by 0.0" in out
    assert "worker 1 ran out of memory for" in err
    trained: Counter[tuple[int, int]] = Counter()
    for path in command.directory.glob("trained-*.txt"):
        for line in path.read_text().splitlines():
            epoch, _, numbers = line.partition(" ")
            trained.update((int(epoch), number) for number in json.loads(numbers))
    assert trained == Counter((epoch, number) for epoch in range(2) for number in range(60))
    assert (command.directory / "trained-1.txt").read_text().count("\n") == 1
    assert command.summary()["steps"] >= 10
