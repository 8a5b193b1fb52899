"""Writes checkpoints in forked processes that are killed (SIGKILL), and reads what each one leaves.

Started by test_checkpoint_files.py as a process of its own, with one thread, so that forking is safe.
Prints one line per kind of kill. A checkpoint that is not a whole one of the last two ends it with an error.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from atoll.core.errors import CheckpointError
from atoll.tensors.checkpoint import read_checkpoint, write_checkpoint

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def write(path: Path, generation: int, elements: int) -> None:
    """A checkpoint in which every value tells its generation."""
    full = torch.full((elements,), float(generation))
    write_checkpoint(
        path, model={"weight": full, "bias": full[:3].clone()}, trees={"optimizer": {"m": full + 0}}
    )


def generation_of(path: Path) -> int:
    checkpoint = read_checkpoint(path)
    values = {*checkpoint.model["weight"].unique().tolist(), *checkpoint.model["bias"].unique().tolist()}
    values |= set(checkpoint.trees["optimizer"]["m"].unique().tolist())
    assert len(values) == 1, f"a mixture of generations: {values}"
    return int(values.pop())


def die_at(event_number: int) -> None:
    """Kill this process before its n-th operation on files."""
    left = event_number

    def hook(event: str, _arguments: object) -> None:
        nonlocal left
        if event in FILE_EVENTS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def forked(path: Path, generation: int, elements: int, event_number: int | None) -> int:
    """The id of a process that writes once, dying at an operation, or, with None, until it is killed."""
    child = os.fork()
    if child:
        return child
    try:
        if event_number is not None:
            die_at(event_number)
            write(path, generation, elements)
            os._exit(0)
        while True:
            write(path, generation, elements)
            generation += 1
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(1)
    return 0


def kill_at_every_operation(folder: Path) -> None:
    """Each generation replaces the one before; its writer dies before operation 0, then 1, to the last."""
    path = folder / "checkpoint"
    write(path, 0, 1000)
    deaths, generation, old, new = 0, 0, 0, 0
    while True:
        before = generation_of(path)
        generation = before + 1
        _, status = os.waitpid(forked(path, generation, 1000, deaths), 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        deaths += 1
        after = generation_of(path)
        assert after in (before, generation), (
            f"after death {deaths}: {after} is neither {before} nor {generation}"
        )
        old, new = old + (after == before), new + (after == generation)
    assert generation_of(path) == generation
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint"]
    print(f"operations {deaths} old {old} new {new}", flush=True)


def kill_the_first(folder: Path) -> None:
    """Where there was no checkpoint, there is none or the new one; and the next writer does not mind."""
    for number in range(1000):
        path = folder / f"first{number}" / "checkpoint"
        _, status = os.waitpid(forked(path, 1, 1000, number), 0)
        try:
            found = generation_of(path)
        except CheckpointError as error:
            found = 0 if "there is no checkpoint" in str(error) else -1
        assert found == 1 or (found == 0 and os.WIFSIGNALED(status))
        write(path, 2, 1000)
        assert generation_of(path) == 2
        if os.WIFEXITED(status):
            print(f"first {number}", flush=True)
            return


def kill_at_random(folder: Path, seed: int, rounds: int) -> None:
    """Some megabytes a checkpoint, so that most deaths fall into the writing of a file."""
    path = folder / "random"
    source = random.Random(seed)
    write(path, 0, 300_000)
    begun = time.monotonic()
    write(path, 0, 300_000)
    longest = 3 * (time.monotonic() - begun)  # on a slow disk a writer needs longer to get through
    for _ in range(rounds):
        before = generation_of(path)
        child = forked(path, before + 1, 300_000, None)
        time.sleep(source.uniform(0.0, longest))  # the moment of death; nothing is waited for
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        assert generation_of(path) >= before
    assert generation_of(path) > 0, "no writer ever got through"
    print(f"random {rounds}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_at_every_operation(Path(sys.argv[1]) / "every")
    kill_the_first(Path(sys.argv[1]))
    kill_at_random(Path(sys.argv[1]), seed=int(sys.argv[2]), rounds=40)
