"""`atoll run` of a script in which worker 0 saves alone: it ends soon, with status 2, and says who stands
where."""

from __future__ import annotations

import re
import time

import pytest
from run_command import Command

SCRIPT = """
import torch, atoll
with atoll.join() as session:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(6):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if session.is_main and step == 3:
            print("saves", flush=True)
            session.save("checkpoint")
"""
# Without a server the other one goes on by up to sync.stale_max steps, and these are its last.
PLACES = {
    "server": r"at the gradients of step 4 \(train\.py:9\)",
    "peers": r"at the end of its session after 6 steps \(train\.py:3\)",
}
ADVICE = r"Every worker calls session\.save: take it out of `if session\.is_main`"


@pytest.mark.parametrize("strategy", ["server", pytest.param("peers", marks=pytest.mark.soak)])
def test_a_worker_that_saves_alone_ends_the_run_for_all(command: Command, strategy: str) -> None:
    began = time.monotonic()
    status, out, err = command.run(SCRIPT, options=["--strategy", strategy, "--set", "sync.timeout=10min"])
    assert time.monotonic() - began < 100  # the deadline is never met
    assert status == 2, err
    assert "saves" in out + err
    line = rf"worker 0 is in session\.save \(train\.py:14\); worker 1 is {PLACES[strategy]}\. {ADVICE}"
    assert re.search(rf"^atoll: {line}$", err, re.MULTILINE), err
