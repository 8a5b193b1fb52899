"""Workers who have no group of their own, and meet: what they tell one another, from a gathering of bytes
alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from atoll.core.scriptline import waiting_line
from atoll.core.stands import call
from atoll.train.members.workers import Reduction, Workers
from atoll.wire.messages import WorkerStand

# The call that a meeting belongs to, by its purpose, for meetings outside the session's collective calls.
_CALLS = {
    "the other workers' models": "session.prepare",
    "worker 0's parameters": "session.prepare",
    "worker 0's buffers": "session.prepare",
    "node 0's parameters": "session.prepare",
    "worker 0 to look at the run directory": "atoll.join",
}


def called(what: str) -> str:
    """Return the call that a meeting belongs to, or `what` itself."""
    return next((name for start, name in _CALLS.items() if what.startswith(start)), what)


class MeetingWorkers(Workers):
    """`Workers` over `gather_bytes`: every live worker takes part in each call. While `late`, this one has
    yet to enter a run under way, and is alone in each."""

    @property
    @abstractmethod
    def late(self) -> bool:
        """Whether this worker has yet to enter."""

    @abstractmethod
    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Each live worker's bytes, in order of rank."""

    @property
    def alone(self) -> bool:
        return False

    @property
    def is_first(self) -> bool:
        return super().is_first and not self.late

    def take_from_first(self, tensors: Iterable[Tensor], what: str) -> None:
        """Overwrite `tensors` by those of the first worker; shapes and dtypes are the same everywhere."""
        held = [tensor for tensor in tensors if tensor.numel()]
        if not held or self.late:
            return
        first = b""
        while not first:  # the first was lost meanwhile: who is that now did not know so, and brought nothing
            own = b"".join(bytes_of(tensor) for tensor in held) if self.is_first else b""
            first = self.gather_bytes(own, what)[0]
        put_bytes(held, memoryview(bytearray(first)))

    def _standing_for(self, what: str) -> WorkerStand:
        """Return this worker's place in its script, as it comes to a meeting for `what`."""
        name = called(what)
        return WorkerStand(self.place.rank, self._stand or call(name, waiting_line()))

    def _check_alike(self, asked: str, what: str) -> None:
        if self._stand is None or self._stand.asks != asked:  # else it goes along with this worker's place
            super()._check_alike(asked, what)

    def _combine(self, tensor: Tensor, op: Reduction, what: str) -> Tensor:
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


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's values, contiguous, as they lie in memory."""
    host = tensor.detach().to("cpu").contiguous()
    return bytes(host.reshape(-1).view(torch.uint8).numpy()) if host.numel() else b""


def put_bytes(tensors: Iterable[Tensor], values: memoryview) -> None:
    """Overwrite `tensors`, one after the other, by what `bytes_of` gave of each."""
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            part = torch.frombuffer(values[offset : offset + size], dtype=tensor.dtype)
            tensor.copy_(part.reshape(tensor.shape))
        offset += size
