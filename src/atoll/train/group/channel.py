"""c10d process groups with deadlines whose errors name the workers that did not come.

A `Channel` is made from a store alone, and can be made again. It leaves torch.distributed's default group to
the script. Every wait goes through `Channel.wait`, whose errors name the awaited collective.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Work

from atoll.core.errors import AtollError, DeadlineError, PeerLostError, RunError
from atoll.core.scriptline import is_atoll
from atoll.tensors.torch_compat import gloo_options, nccl_options
from atoll.train.api.ending import see_off
from atoll.train.api.place import Place
from atoll.train.group.sockets import listening_host, listening_ports, shut

_POLL_SECONDS = 50e-6
_SLICE = timedelta(seconds=0.1)  # slice of a wait; after each one the wait looks at the hub's latest news
_MAKING_SECONDS = 0.05  # length of a slice of the wait for a group to connect
_EXPLAIN_SECONDS = 2.0  # how long a late worker waits to learn which others are late
_END_SECONDS = 2.0  # how long to wait for the end of an idle group
_SUM = dist.AllreduceOptions()


class Pending(Protocol):
    """A collective under way: c10d's Work, or an object that stands for several of them."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta = ...) -> bool:
        """Wait for the collective. Raises RuntimeError if it has failed or does not end in time."""


class Sums(Protocol):
    """Sums of tensors over a group's members: by a Channel, or by two rings at once."""

    def sum(self, tensor: Tensor) -> Pending:
        """Begin to replace `tensor`, contiguous, on every member by the sum over the members."""

    def sends(self, size: int) -> int:
        """Return the bytes that this member sends in a sum of `size` bytes."""

    def wait(self, work: Pending, what: str) -> float:
        """Wait for `work`; return the seconds waited. `what` names it for errors."""


class BrokenRingError(RunError):
    """The ring must be formed again: a member is lost, or the hub reports one lost."""


class Channel:
    """One process group over the workers of `place`, which must have a store to meet in.

    Tensors given to its collectives lie on `device`: the CPU (Gloo) or a CUDA device (NCCL).

    If the place has a `watch`, every failure except a deadline raises BrokenRingError, and every wait also
    ends with the errors that `watch` raises. After such an error only `abandon` may be called. A collective
    that was under way may still write into its tensors for a while.

    Args:
        place: this worker's place among the members.
        purpose: the channel's name in the store and in errors.
        timeout: the deadline of each wait, in seconds.
        device: where the tensors lie.
        order: the ranks in the order in which Gloo's sum passes the members, each sending to the next; by
            default 0, 1, 2 and so on. The order changes neither ranks nor results, except for the order of
            additions.
    """

    def __init__(
        self,
        place: Place,
        purpose: str,
        timeout: float,
        device: torch.device,
        order: Sequence[int] | None = None,
    ) -> None:
        assert place.store is not None
        self.place, self.purpose, self.timeout = place, purpose, timeout
        order = range(place.world) if order is None else order
        # c10d's rank of each member in this group, by rank:
        self._seats = [order.index(rank) for rank in range(place.world)]
        self._store = PrefixStore(purpose, place.store)
        self._lates = 0
        self.seconds_waited = 0.0  # by all waits so far
        self._on_cuda = device.type == "cuda"
        self._group: Any = None
        self._ports: set[int] = set()  # ports at which this channel listens
        self._peers: set[int] = set()  # ports at which the other members listen
        start = time.perf_counter()
        try:
            try:
                if self._on_cuda and place.watch is None:
                    self._group = self._make()
                else:
                    self._make_in_time()
                self._meet_ports()
            except RuntimeError as error:
                self._raise_explained(error, self._connecting(), time.perf_counter() - start)
                raise
        except BrokenRingError:
            self.abandon()
            raise

    def _make(self) -> Any:
        place, deadline = self.place, timedelta(seconds=self.timeout)
        seat = self._seats[place.rank]
        if self._on_cuda:
            return dist.ProcessGroupNCCL(self._store, seat, place.world, nccl_options(deadline))
        before = listening_ports()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        if place.watch is None and (interface or not place.host):
            group = ProcessGroupGloo(self._store, seat, place.world, deadline)
            self._ports = listening_ports() - before
            return group
        where = {"interface": interface} if interface else {"hostname": place.host}
        gloo = gloo_options(deadline, **where)
        self._ports = listening_ports() - before
        return ProcessGroupGloo(self._store, seat, place.world, gloo)

    def _connecting(self) -> str:
        """Describe the wait for the group to connect, with the address at which this worker listens."""
        host = self.host
        return f"the other workers to connect{f' (this one listens at {host})' if host else ''}"

    def _make_in_time(self) -> None:
        """Connect on a thread, within one deadline.

        c10d waits for one member after another to connect, each for the whole deadline.
        """
        made: list[Any] = []

        def make() -> None:
            try:
                made.append(self._make())
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=make, name="atoll-connect", daemon=True)
        thread.start()
        until = time.monotonic() + self.timeout
        while thread.is_alive():
            thread.join(_MAKING_SECONDS)
            if thread.is_alive():
                self.look()
                if time.monotonic() > until:
                    raise RuntimeError("timed out")
        (group,) = made
        if isinstance(group, BaseException):
            raise group
        self._group = group

    def _meet_ports(self) -> None:
        """Learn the ports at which the others listen, so that `abandon` finds the connections to them."""
        if self._on_cuda:
            return
        port = torch.tensor([min(self._ports, default=0)], dtype=torch.int64)
        parts, work = self.all_gather(port)
        self._watch(work, time.monotonic() + self.timeout)
        self._peers = {int(part) for rank, part in enumerate(parts) if rank != self.place.rank}

    @property
    def host(self) -> str:
        """The address at which the others have reached this worker, if it listens; else the place's host."""
        return listening_host(self._ports) or self.place.host

    def look(self) -> None:
        """Raise the error of the place's `watch` if the group is known to be broken."""
        if self.place.watch is not None:
            self.place.watch()

    def look_while_waiting(self) -> None:
        """Raise the errors of `look`, and MismatchError if the workers' scripts wait for each other in vain.

        Only the thread inside a collective may call this.
        """
        self.look()
        if self.place.standing is not None:
            self.place.standing.look()

    def sum(self, tensor: Tensor) -> Pending:
        """Begin to replace `tensor` on every worker by the sum over workers."""
        return self._begin("allreduce", [tensor], _SUM)

    def sends(self, size: int) -> int:
        """Return the bytes that this worker sends in a sum of `size` bytes over n workers: 2 (n - 1) / n
        times `size`."""
        return 2 * (self.place.world - 1) * size // self.place.world

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        """Begin to replace `tensor` on every worker by its sum, minimum or maximum over workers."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        return self._begin("allreduce", [tensor], options)

    def exchange(self, tensor: Tensor, sends: Sequence[int], into: Tensor, takes: Sequence[int]) -> Work:
        """Begin to send each worker a piece of `tensor`, and to take a piece from each.

        The channel must have the order of ranks.

        Args:
            tensor: the pieces to send, one after another, by rank; 1-D.
            sends: the number of elements for each worker, by rank.
            into: takes the pieces from the workers, by rank; 1-D.
            takes: the number of elements from each worker, by rank.
        """
        assert self._seats == list(range(self.place.world))
        return self._begin("alltoall_base", into, tensor, list(takes), list(sends), dist.AllToAllOptions())

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """Begin to replace `tensor` on every worker by that of the worker of rank `root`."""
        options = dist.BroadcastOptions()
        options.rootRank = self._seats[root]
        options.rootTensor = 0
        return self._begin("broadcast", [tensor], options)

    def all_gather(self, tensor: Tensor) -> tuple[list[Tensor], Work]:
        """Begin to collect each worker's `tensor`, all of one shape and dtype, in the order of ranks."""
        parts = [torch.empty_like(tensor) for _ in range(self.place.world)]
        work = self._begin("allgather", [parts], [tensor])
        return [parts[seat] for seat in self._seats], work

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        """Return each worker's bytes, in the order of ranks. Only on the CPU. Raises the errors of `wait`."""
        sizes, work = self.all_gather(torch.tensor([len(payload)], dtype=torch.int64))
        self.wait(work, what)
        padded = torch.zeros(max(1, *(int(size) for size in sizes)), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else 0
        parts, work = self.all_gather(padded)
        self.wait(work, what)
        return [bytes(part[: int(size)].numpy()) for part, size in zip(parts, sizes, strict=True)]

    def _begin(self, collective: str, *arguments: Any) -> Work:
        try:
            work: Work = getattr(self._group, collective)(*arguments)
        except RuntimeError as error:
            self._raise_explained(error, f"its {collective} to begin", 0.0)
            raise
        return work

    def wait(self, work: Pending, what: str) -> float:
        """Wait for `work`; return the seconds waited.

        Raises DeadlineError with the workers that did not come, PeerLostError (BrokenRingError if the place
        has a `watch`) when one is gone, and MismatchError if the workers' scripts are at inconsistent places.
        `what` completes the sentence "waited for ...".
        """
        start = time.perf_counter()
        try:
            if self._on_cuda:
                self._poll(work)
            if self._on_cuda and self.place.watch is None:
                work.wait()
            else:
                self._watch(work, time.monotonic() + self.timeout)
        except RuntimeError as error:
            self._raise_explained(error, what, time.perf_counter() - start)
            raise
        waited = time.perf_counter() - start
        self.seconds_waited += waited
        return waited

    def _watch(self, work: Pending, until: float) -> None:
        """Wait in slices, until the time `until`. A wait that runs out of time leaves Gloo's work alive."""
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it has finished meanwhile, or raises its failure
                    return
            self.look_while_waiting()
            if time.monotonic() > until:
                raise RuntimeError("timed out")

    def _poll(self, work: Pending) -> None:
        """Wait for the work itself, until the time `until`. NCCL's `wait` only orders streams."""
        until = time.monotonic() + self.timeout
        while not work.is_completed():
            self.look_while_waiting()
            if time.monotonic() > until:
                raise RuntimeError("timed out")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End the process group, and give up a collective that is under way."""
        if self.is_stuck:
            self.abandon()
            return
        if self._on_cuda:
            self._group.shutdown()
        self._let_go(_END_SECONDS)

    @property
    def is_stuck(self) -> bool:
        """True if the workers wait for each other in vain, so that closing the group would wait for them
        too."""
        return self.place.standing is not None and self.place.standing.mismatch is not None

    def abandon(self) -> None:
        """Let a broken group go, whatever it is doing: its connections end, so a collective under way fails
        here and at the other members."""
        if self._on_cuda and self._group is not None:
            self._group.abort()
        shut(self._ports, self._peers)
        self._let_go(0.0)

    def _let_go(self, seconds: float) -> None:
        """Drop the group, and wait up to `seconds` for its end, on a thread if the end may wait for others.

        The end of a group waits for a collective under way. It needs the store, to which C++ holds no
        reference.
        """
        held, self._group = [self._group, self.place], None
        if held[0] is not None and (self.place.watch is not None or self.is_stuck):
            thread = threading.Thread(target=held.clear, name="atoll-end-of-ring", daemon=True)
            thread.start()
            see_off(thread, seconds)

    def _raise_explained(self, error: RuntimeError, what: str, waited: float) -> None:
        """Raise the error that replaces c10d's `error`; return if neither c10d nor Atoll raised `error`."""
        if _is_raised_here(error):
            raise self.explain(error, what, waited) from error

    def explain(self, error: RuntimeError, what: str, waited: float) -> AtollError:
        """Return the error to raise in place of c10d's `error`, after `waited` seconds for `what`."""
        if isinstance(error, AtollError) and (self.place.watch is None or waited >= self.timeout):
            return error
        first_line = _essence(str(error)) or type(error).__name__
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        if not timed_out and self.place.standing is not None:
            known = self.place.standing.known()
            if known is not None:
                return known
        if self.place.watch is not None and waited < self.timeout:
            return BrokenRingError(f"worker {self.place.name} lost touch with another worker: {first_line}")
        if not timed_out:
            return PeerLostError(
                f"worker {self.place.name} lost touch with another worker, waiting for {what}: {first_line}"
            )
        missing = self._who_is_missing()
        who = " and ".join(f"worker {self.place.name_of(rank)}" for rank in missing) or "another worker"
        return DeadlineError(
            f"worker {self.place.name} waited {waited:.1f} s for {who} on {what} "
            f"(deadline sync.timeout, {self.timeout:g} s; set it higher if the workers are only slow)"
        )

    def _who_is_missing(self) -> list[int]:
        """Return the ranks that are not late too: those that the late workers wait for. The late ones meet in
        the store."""
        self._lates += 1
        others = [rank for rank in range(self.place.world) if rank != self.place.rank]
        self._store.set_timeout(timedelta(seconds=_EXPLAIN_SECONDS))  # the store itself may be gone
        try:
            self._store.set(f"late/{self._lates}/{self.place.rank}", "1")
            until = time.monotonic() + _EXPLAIN_SECONDS
            missing = others
            while missing and time.monotonic() < until:
                missing = [rank for rank in missing if not self._store.check([f"late/{self._lates}/{rank}"])]
                time.sleep(0.05)
            return missing
        except (RuntimeError, AtollError):  # the store is gone with the worker that held it
            return []


def _essence(message: str) -> str:
    """Return c10d's message without its source position and its advice."""
    first_line = message.splitlines()[0] if message else ""
    return re.sub(r"^\[[^]]*\]\s*", "", first_line).split(". ")[0]


def _is_raised_here(error: RuntimeError) -> bool:
    """True for an error that c10d raises in this package's frames, and for Atoll's own errors.

    A signal handler may run in the middle of a wait and raise an error of its own. Torch's handler, for
    example, reports a DataLoader's process that was killed.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or is_atoll(trace.tb_frame.f_code.co_filename)
