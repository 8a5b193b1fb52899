"""A worker that is started again and fails while it enters ends alone: the others go on to the end."""

from __future__ import annotations

import os
import signal

import pytest
from run_command import DEADLINE, Command, wait_for

# The state can be given when it is registered; when worker 1 comes back it cannot, or cannot be taken. The
# other goes on until worker 1 has failed, and to iteration 80.
SCRIPT = """
import os, pathlib, sys, time, torch, atoll
how, second = sys.argv[1], pathlib.Path("killed").exists() and os.environ["ATOLL_RANK"] == "1"
class Odd:
    state = 1
    def state_dict(self):
        if how == "raises" and session.iteration > 20:
            raise OSError("no such file")
        return {"what": {1, 2} if how == "set" and session.iteration > 20 else self.state}
    def load_state_dict(self, state):
        if how == "refuses":
            raise ValueError("not this one")
def has_failed():
    said = "".join(each.read_text() for each in pathlib.Path("run/workers").iterdir())
    return "could not enter" in said or "GivenUpError" in said
with atoll.join() as session:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    session.register(odd=Odd())
    if how == "schedulers":
        from torch.optim.lr_scheduler import StepLR
        kept = [StepLR(optimizer, 9) for _ in range(1 if second else 2)]
    session.resume()
    assert not (second and how == "script"), "a mistake of the script's"
    while session.iteration < 80 or not has_failed():
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        pathlib.Path(f"at-{session.iteration}").touch()
        time.sleep(0.01)
    print("end", flush=True)
"""


SAID = {
    "set": "registered 'odd': state['what']: a set cannot be saved; a checkpoint holds",
    "raises": "registered 'odd': its state_dict() raised OSError",
    "refuses": "ValueError: not this one",
    "script": "AssertionError: a mistake of the script's",
    "schedulers": "holds the states of 2 schedulers of class StepLR, and 1 drives the optimizer",
}
CASES = [
    ("ring", "set"),
    *(
        pytest.param(*each, marks=pytest.mark.soak)
        for each in (
            *(("ring", how) for how in ("raises", "refuses", "script", "schedulers")),
            *(
                (strategy, how)
                for strategy in ("server", "asp", "ps-hra", "peers")
                for how in ("set", "refuses")
            ),
        )
    ),
]


@pytest.mark.parametrize(("strategy", "how"), CASES)
def test_only_the_newcomer_ends(command: Command, strategy: str, how: str) -> None:
    given = {
        "ring": ["run.elastic=true"],
        "server": ["run.strategy=server"],
        "asp": ["run.strategy=server", "sync.consistency=asp"],
        "ps-hra": ["run.strategy=ps-hra", "groups.links=0"],
        "peers": ["run.strategy=peers"],
    }[strategy]
    options = [part for each in (*given, "run.restarts=1", "hub.patience=5s") for part in ("--set", each)]
    process = command.start(SCRIPT, how, options=options)
    wait_for(
        lambda: (command.directory / "at-25").exists() or process.poll() is not None, "the first iterations"
    )
    (command.directory / "killed").touch()
    os.kill(command.worker_pid(1), signal.SIGKILL)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "end" in out.splitlines(), err
    if strategy != "peers" or how in ("refuses", "script", "schedulers"):
        assert "worker 1 could not enter, and the others go on without it: " in err, err
        assert SAID[how] in err, err
    assert "Traceback" not in err
