"""c10d process groups with deadlines that say who was waited for.

A `Channel` is made from a store alone and can be made again; it does not touch torch.distributed's default
group, which stays the script's. Every wait goes through `Channel.wait`, which names what it waits for.
"""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from atoll.core.errors import AtollError, DeadlineError, PeerLostError
from atoll.train.place import Place

_POLL_SECONDS = 50e-6
_EXPLAIN_SECONDS = 2.0  # how long a late worker waits to learn who else is late


class Channel:
    """One process group over the workers of `place`, which must have a store to meet in.

    `purpose` names it in the store and in errors; `timeout` is in seconds. Tensors given to its collectives
    are on `device`: the CPU (Gloo) or a CUDA device (NCCL).
    """

    def __init__(self, place: Place, purpose: str, timeout: float, device: torch.device) -> None:
        assert place.store is not None
        self.place, self.purpose, self.timeout = place, purpose, timeout
        self._store = PrefixStore(purpose, place.store)
        self._lates = 0
        self.seconds_waited = 0.0  # in all
        self._on_cuda = device.type == "cuda"
        deadline = timedelta(seconds=timeout)
        with self._explained("the other workers to connect"):
            if self._on_cuda:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = deadline
                self._group: Any = dist.ProcessGroupNCCL(self._store, place.rank, place.world, options)
            else:
                self._group = _gloo(self._store, place, deadline)

    def sum(self, tensor: Tensor) -> Work:
        """Begin to replace `tensor`, on every worker, by the sum over workers."""
        return cast(Work, self._group.allreduce([tensor], dist.AllreduceOptions()))

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        """Begin to replace `tensor`, on every worker, by its sum, minimum or maximum over workers."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        return cast(Work, self._group.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor) -> Work:
        """Begin to replace `tensor` by worker 0's."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return cast(Work, self._group.broadcast([tensor], options))

    def all_gather(self, tensor: Tensor) -> tuple[list[Tensor], Work]:
        """Begin to collect each worker's `tensor`, all of one shape and dtype, in order of rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.place.world)]
        return parts, self._group.allgather([parts], [tensor])

    def wait(self, work: Work, what: str) -> float:
        """Wait for `work`; returns the seconds that it took.

        Raises DeadlineError with the workers that did not come, or PeerLostError when one is gone. `what`
        ends the sentence "waited for ...".
        """
        start = time.perf_counter()
        with self._explained(what):
            if self._on_cuda:
                self._poll(work)
            work.wait()
        waited = time.perf_counter() - start
        self.seconds_waited += waited
        return waited

    def _poll(self, work: Work) -> None:
        """NCCL's `wait` only orders streams; this waits for the work itself, up to the deadline."""
        until = time.monotonic() + self.timeout
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError("timed out")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End the process group; what it was doing is given up."""
        if self._on_cuda:
            self._group.shutdown()
        self._group = None

    def _explained(self, what: str) -> _Explained:
        return _Explained(self, what)

    def explain(self, error: RuntimeError, what: str, waited: float) -> AtollError:
        """The error to raise in place of c10d's."""
        if isinstance(error, AtollError):
            return error
        first_line = _essence(str(error)) or type(error).__name__
        if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
            who = " or ".join(f"worker {rank}" for rank in self._who_is_gone()) or "another worker"
            return PeerLostError(
                f"worker {self.place.rank} lost touch with {who}, waiting for {what}: {first_line}"
            )
        missing = self._who_is_missing()
        who = " and ".join(f"worker {rank}" for rank in missing) or "another worker"
        return DeadlineError(
            f"worker {self.place.rank} waited {waited:.1f} s for {who} on {what} "
            f"(deadline sync.timeout, {self.timeout:g} s; set it higher if the workers are only slow)"
        )

    def _who_is_gone(self) -> list[int]:
        """Whoever is most likely dead, where one is. Who started the workers says so where nobody else
        can."""
        if self.place.silent is None:
            return []
        missing = self._who_is_missing(gone=1)
        if len(missing) < 2:
            return missing
        # Some of them may live, and wait for what another one sends.
        silent = self.place.silent()
        return [rank for rank in missing if rank in silent] or missing

    def _who_is_missing(self, gone: int = 0) -> list[int]:
        """Ask the store which workers are late, or lost someone, too; those that are not, are the ones waited
        for. At least `gone` are known to be: when so few are left, nobody else is waited for."""
        self._lates += 1
        others = [rank for rank in range(self.place.world) if rank != self.place.rank]
        try:
            self._store.set(f"late/{self._lates}/{self.place.rank}", "1")
            until = time.monotonic() + _EXPLAIN_SECONDS
            missing = others
            while len(missing) > gone and time.monotonic() < until:
                missing = [rank for rank in missing if not self._store.check([f"late/{self._lates}/{rank}"])]
                time.sleep(0.05)
            return missing
        except (RuntimeError, AtollError):  # the store went with the worker that held it: nobody can be asked
            return []


def _gloo(store: Store, place: Place, deadline: timedelta) -> ProcessGroupGloo:
    """A group that listens at `place.host`, unless $GLOO_SOCKET_IFNAME or nothing says where."""
    if not place.host or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo(store, place.rank, place.world, deadline)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = deadline
    options._devices = [ProcessGroupGloo.create_device(hostname=place.host)]
    return ProcessGroupGloo(store, place.rank, place.world, options)


def _essence(message: str) -> str:
    """c10d's message without its source position and its advice."""
    first_line = message.splitlines()[0] if message else ""
    return re.sub(r"^\[[^]]*\]\s*", "", first_line).split(". ")[0]


class _Explained:
    """Turns c10d's RuntimeErrors within a `with` into Atoll's."""

    def __init__(self, channel: Channel, what: str) -> None:
        self._channel, self._what = channel, what

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise self._channel.explain(error, self._what, time.perf_counter() - self._start) from error
