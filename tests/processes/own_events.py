"""Scripts that write a session's events themselves, so that no worker has to import torch."""

from __future__ import annotations

ALONE = ["--set", "run.elastic=true"]  # a launch for each worker, without torchrun
PREAMBLE = """
import os, sys, time
from pathlib import Path
from atoll.core.events import Finished, Started, StepDone
from atoll.observe.journal import Journal
from atoll.observe.rundir import RunDirectory
RANK = int(os.environ["RANK"])
journal = Journal(RunDirectory.from_environment().journal(RANK))
def say(kind, **fields):
    journal(kind(time=time.time(), worker=RANK, **fields))
    journal.flush()
def step(i):
    say(StepDone, iteration=i, samples=4, seconds=0.01, waiting=0.001, bytes_sent=100)
say(Started, workers=2, strategy="ring", device="cpu", pid=os.getpid())
def wait_for(path):
    while not Path(path).exists(): time.sleep(0.02)
"""
