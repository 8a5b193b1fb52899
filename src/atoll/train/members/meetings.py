"""Meetings of workers outside the iterations: the interface, and meetings by gathered bytes alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from atoll.core.scriptline import waiting_line
from atoll.core.stands import Stand, call
from atoll.train.api.place import WorkerRoster, is_first
from atoll.wire.messages import WorkerStand

Reduction: TypeAlias = Literal["mean", "sum", "min", "max"]
_Result = TypeVar("_Result")

# For meetings outside the session's collective calls: the call in which each happens, by its purpose.
_CALLS = {
    "the other workers' models": "session.prepare",
    "worker 0's parameters": "session.prepare",
    "worker 0's buffers": "session.prepare",
    "node 0's parameters": "session.prepare",
    "worker 0 to look at the run directory": "atoll.join",
}


def called(what: str) -> str:
    """Return the call in which a meeting for `what` happens, or `what` itself."""
    return next((name for start, name in _CALLS.items() if what.startswith(start)), what)


class WorkerMeeting(ABC):
    """The way in which this worker meets the others (`train/members/workers.py`: Workers).

    Every method that sends something to others is a collective: each worker calls it, in the same order.
    `what` names the wait, in words for errors.

    Attributes:
        roster: the workers that take part.
        alone: True if there is no group at all, and so nobody to talk to.
        stand: this worker's place in its script while it is in a call of its session; else None.
    """

    roster: WorkerRoster
    alone: bool = False
    stand: Stand | None = None

    @property
    def seconds_waited(self) -> float:
        """Seconds waited in all calls so far."""
        return 0.0

    @abstractmethod
    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Return each living worker's bytes, in the order of ranks."""

    @abstractmethod
    def combine(self, tensor: Tensor, op: Reduction, what: str) -> Tensor:
        """Replace `tensor` by the sum (for `mean` too), minimum or maximum over workers, and return it."""

    @abstractmethod
    def take_from_first(self, tensors: Iterable[Tensor], what: str) -> None:
        """Overwrite `tensors` by those of the first worker; shapes and dtypes are equal on all workers."""

    def take_from(self, root: int, tensors: Iterable[Tensor], what: str) -> None:  # noqa: B027
        """Overwrite `tensors` by those of the worker of rank `root`. Only over a ring.

        Only there may groups of workers have parts of a model for themselves.
        """

    def round(self, what: str, act: Callable[[], _Result]) -> _Result:  # noqa: ARG002
        """Run `act`, a collective of one call, together with the other workers."""
        return act()

    def stand_at(self, stand: Stand | None) -> None:
        """Note that this worker is in a call of its session, or (None) in no call."""
        self.stand = stand

    def compare(self, stand: Stand) -> None:  # noqa: B027
        """Compare all workers' places as a call begins, if that costs no meeting of its own."""

    def gather_group(self) -> None:  # noqa: B027
        """Wait, inside a call and before it changes anything, until this worker's whole group has come."""

    def part(self) -> None:  # noqa: B027
        """Report that this worker makes no further call, if workers may end one before another.

        Raises MismatchError if another worker waits for this one in a call.
        """


class BytesMeeting(WorkerMeeting):
    """A meeting that needs only `gather_bytes`. A late worker is alone in it."""

    def take_from_first(self, tensors: Iterable[Tensor], what: str) -> None:
        held = [tensor for tensor in tensors if tensor.numel()]
        if not held or self.roster.late:
            return
        first = b""
        while not first:  # empty: the first worker was lost, and the next brought nothing, not knowing
            own = b"".join(bytes_of(tensor) for tensor in held) if is_first(self.roster) else b""
            first = self.gather_bytes(own, what)[0]
        put_bytes(held, memoryview(bytearray(first)))

    def combine(self, tensor: Tensor, op: Reduction, what: str) -> Tensor:
        if not tensor.numel():
            return tensor
        parts = [
            torch.frombuffer(bytearray(part), dtype=tensor.dtype).reshape(tensor.shape)
            for part in self.gather_bytes(bytes_of(tensor), what)
        ]
        together = torch.stack(parts)
        if op == "min":
            return tensor.copy_(together.amin(0))
        if op == "max":
            return tensor.copy_(together.amax(0))
        return tensor.copy_(together.sum(0, dtype=tensor.dtype))

    def standing_for(self, what: str) -> WorkerStand:
        """Return this worker's place in its script, as it comes to a meeting for `what`."""
        return WorkerStand(self.roster.place.rank, self.stand or call(called(what), waiting_line()))


def bytes_of(tensor: Tensor) -> bytes:
    """Return a tensor's values as bytes, contiguous and in memory order."""
    host = tensor.detach().to("cpu").contiguous()
    return bytes(host.reshape(-1).view(torch.uint8).numpy()) if host.numel() else b""


def put_bytes(tensors: Iterable[Tensor], values: memoryview) -> None:
    """Overwrite `tensors`, one after the other, by the bytes that `bytes_of` returned of each."""
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            part = torch.frombuffer(values[offset : offset + size], dtype=tensor.dtype)
            tensor.copy_(part.reshape(tensor.shape))
        offset += size
