"""Scripts that do odd things to their own process: the command's last lines say what came of it."""

from __future__ import annotations

import re

import pytest
from endings import STRATEGIES
from own_events import ALONE, PREAMBLE
from run_command import DEADLINE, Command, cause_of, wait_for


def options(strategy: str, *more: str) -> list[str]:
    """The options that choose one of STRATEGIES, and further settings."""
    given = (*STRATEGIES[strategy], "sync.timeout=60s", *more)
    return [part for each in given for part in ("--set", each)]


CLEARS = """
import os
import atoll
os.environ.clear()
atoll.join()
"""
REMOVES = """
import os
import atoll
for name in list(os.environ):
    if name.startswith("ATOLL_"):
        del os.environ[name]
atoll.join()
"""


@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        pytest.param(script, strategy, id=f"{how}, {strategy}", marks=[] if checked else pytest.mark.soak)
        for how, script, some in (
            ("clears", CLEARS, ("ring", "server", "peers")),
            ("removes", REMOVES, ("hierarchical", "elastic ring", "ps-hra")),
        )
        for strategy in STRATEGIES
        for checked in [strategy in some]
    ],
)
def test_a_script_that_removes_the_run_from_its_environment(
    command: Command, script: str, strategy: str
) -> None:
    """Each worker would train alone, and by default options; the command would say that none has joined."""
    code, out, err = command.run(script, options=options(strategy))
    assert (code, out) == (2, ""), err
    missing = r"the script has removed ATOLL_RUN_DIRECTORY(,| and) ATOLL_CONFIG.* from os\.environ"
    where = r"before atoll\.join \(train\.py:\d+\), and a worker finds its run by them"
    kept = "keep RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and those that begin with ATOLL_"
    assert re.fullmatch(f"atoll: {missing} {where}; {kept}", cause_of(err)), err
    assert "no worker called atoll.join" not in err
    assert "Traceback" not in err


# -- one script for each way; the workers import no torch --------------------------------------------------

RAISES = """
if RANK == 1: raise ValueError("the cause")
wait_for("never")
"""
ODD = {
    "its folder is gone": """
import shutil
os.mkdir(f"own-{RANK}"); os.chdir(f"own-{RANK}"); shutil.rmtree(os.getcwd())
""",
    "all descriptors are closed": "if RANK == 1: os.closerange(3, 1000)\n",
    "its output is closed": "if RANK == 1: os.close(1); os.close(2)\n",
    "its streams are none": "if RANK == 1: sys.stdout = sys.stderr = None\n",
    "its streams fail": """
class Fails:
    def write(self, text): raise RuntimeError("no")
if RANK == 1: sys.stdout = sys.stderr = Fails()
""",
    "its stderr is closed": "if RANK == 1: sys.stderr.close()\n",
    "it may open no more files": """
import resource
if RANK == 1: resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
""",
    "its files may not grow": """
import resource
if RANK == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
""",
    "its file is gone": "if RANK == 1: os.remove('train.py')\n",
}


@pytest.mark.parametrize("way", ODD)
def test_whatever_a_script_does_to_its_process_its_error_is_the_first_cause(
    command: Command, way: str
) -> None:
    code, _, err = command.run(PREAMBLE + "step(1)\n" + ODD[way] + RAISES, options=ALONE)
    assert code == 1, err
    said = r"worker 1 ended with ValueError at train\.py:\d+, after [\w. ]+ s: the cause"
    assert re.match(f"atoll: {said}", cause_of(err)), err
    assert "Traceback (most recent call last)" in err
    assert err.count("ValueError: the cause") == 1, err  # in the traceback
    assert "runpy" not in err


PRINTS_ITS_PATH = """
os.chdir('/')
print(Path(__file__).parent, sys.argv, flush=True)
printed = Path(__file__).with_name("printed")
if RANK == 0: printed.touch()  # the other one's error stops it
else: wait_for(printed)
"""


def test_a_script_has_its_file_s_whole_path_as_under_python(command: Command) -> None:
    """So that it finds what lies beside it, wherever it has gone."""
    script = PREAMBLE + PRINTS_ITS_PATH + RAISES
    _, out, err = command.run(script, options=ALONE)
    assert out == f"{command.directory} ['train.py']\n", err
    assert f'File "{command.directory}/train.py", line' in err


def test_a_hook_of_the_script_for_errors_is_called(command: Command) -> None:
    """As one that reports them, or that shows them in colours."""
    hook = (
        "def hook(kind, error, trace): print('reported', kind.__name__, error, trace is None, flush=True)\n"
    )
    fails = "if RANK == 0: raise ValueError('the cause')\nwait_for('never')\n"
    script = PREAMBLE + hook + "sys.excepthook = hook\nstep(1)\n" + fails
    code, out, err = command.run(script, options=ALONE)
    assert (code, out) == (1, "reported ValueError the cause False\n"), err
    assert re.match(r"atoll: worker 0 ended with ValueError at train\.py:\d+", cause_of(err)), err
    assert err.count("ValueError: the cause") == 1, err


def test_a_thread_that_outlasts_the_script_is_named(command: Command) -> None:
    """Python waits for it; nobody else would say for what."""
    thread = "threading.Thread(target=wait_for, args=('told',), name='feeder').start()"
    script = f"{PREAMBLE}import threading\nif RANK == 1: {thread}\n"
    process = command.start(script + "step(1)\nsay(Finished, iteration=1)\n", options=ALONE)
    journal = command.directory / "run" / "workers" / "1.jsonl"
    wait_for(lambda: journal.exists() and "feeder" in journal.read_text(), "the warning")
    (command.directory / "told").touch()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    said = "worker 1's script has ended, and its process waits for threads of the script's: feeder"
    assert f"atoll: warning: {said}; end them, or start them with daemon=True\n" in err


def test_a_log_that_is_emptied_in_mid_run_is_shown_on(command: Command) -> None:
    script = (
        PREAMBLE + "print('first', flush=True)\nwait_for('emptied')\nprint('next', flush=True)\nstep(1)\n"
    )
    process = command.start(script + "say(Finished, iteration=1)\n", options=ALONE)
    log = command.directory / "run" / "logs" / "worker-0.log"
    wait_for(lambda: log.exists() and log.read_text(), "the first line")
    log.write_text("")
    (command.directory / "emptied").touch()
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert out.endswith("next\n"), (out, err)


# -- processes of a worker's that run its script again -----------------------------------------------------

SPAWNS = """
import torch, atoll
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.ones(40, 4))
with atoll.join() as session:
    session.prepare(model, optimizer)
    sampler = session.sampler(dataset, seed=0)
    spawns = dict(num_workers=1, multiprocessing_context="spawn")
    for (inputs,) in DataLoader(dataset, batch_size=4, sampler=sampler, **spawns):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("strategy", ["ring", "server"])
def test_processes_that_run_the_script_again_join_no_run(command: Command, strategy: str) -> None:
    """Each would take the worker's own place: a `DataLoader` spawns them, and the script has no guard."""
    code, _, err = command.run(SPAWNS, options=options(strategy))
    assert code == 1, err
    first = r"worker [01] ended with \w+Error at train\.py:\d+, after [\w. ]+ s: a process of its DataLoader"
    joined = (
        r"atoll\.join \(train\.py:8\) in a process that the worker has started, after it had joined itself in"
    )
    guard = "keep what such a process is not to run under `if __name__ == '__main__':`"
    assert re.match(rf"atoll: {first} ended with status 2: {joined} process \d+: {guard}", cause_of(err)), err
