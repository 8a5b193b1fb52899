"""Workers in processes of their own, of which one may be stopped or killed: what the others say to that."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from atoll.core.errors import AtollError
from atoll.train.api.place import Place
from support.pool import FORKSERVER, LOOPBACK

SECONDS = 60.0  # more than any of them takes


def outcomes(part: Callable[[Place], None], world: int, silent: int) -> dict[int, tuple[str, float]]:
    """The line that `part` ended with on each worker but `silent` ("": without an error), and after how many
    seconds. `part` is a function of a module."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = FORKSERVER.Pipe()
        process = FORKSERVER.Process(target=_live, args=(theirs, store.port, rank, world, part), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    told = {}
    try:
        for rank in range(world):
            if rank != silent:
                assert pipes[rank].poll(SECONDS), f"worker {rank} says nothing"
                told[rank] = pipes[rank].recv()
    finally:
        for process in processes:
            process.kill()
            process.join(SECONDS)
    return told


def _live(connection: Connection, port: int, rank: int, world: int, part: Callable[[Place], None]) -> None:
    torch.set_num_threads(1)
    store = TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=SECONDS))
    began = time.monotonic()
    said = ""
    try:
        part(Place(rank, world, rank, PrefixStore("lives", store)))
    except AtollError as error:
        said = f"{type(error).__name__}: {error}"
    connection.send((said, time.monotonic() - began))
