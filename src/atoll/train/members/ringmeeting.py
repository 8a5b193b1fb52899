"""Meetings of the workers of one ring, by collectives over its channel. A worker alone uses no socket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.core.errors import MismatchError, RunError
from atoll.core.stands import (
    Stand,
    StandError,
    are_consistent,
    decode_stand,
    describe_mismatch,
    encode_stand,
)
from atoll.train.api.place import Seat
from atoll.train.group.channel import Channel
from atoll.train.group.rounds import Ring
from atoll.train.members.meetings import Reduction, WorkerMeeting

_Result = TypeVar("_Result")
_OPS: dict[str, dist.ReduceOp.RedOpType] = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class RingMeeting(WorkerMeeting):
    """A meeting over `ring`, in which this worker has `seat`. A worker is alone exactly if `ring` is None."""

    def __init__(self, seat: Seat, ring: Ring | None) -> None:
        self.roster, self._ring = seat, ring
        self.alone = ring is None

    @property
    def seconds_waited(self) -> float:
        return 0.0 if self._ring is None else self._ring.seconds_waited

    @property
    def _channel(self) -> Channel | None:
        """The channel to the other workers (Gloo, CPU tensors); None if there is no other worker to talk
        to."""
        return None if self._ring is None else self._ring.session

    def round(self, what: str, act: Callable[[], _Result]) -> _Result:
        return act() if self._ring is None else self._ring.round(what, act)

    def stand_at(self, stand: Stand | None) -> None:
        self.stand = stand
        if self._ring is not None:
            self._ring.scripts.stand = stand

    def compare(self, stand: Stand) -> None:
        """Compare all workers' places. The first message has one size for every call.

        Raises MismatchError if they are inconsistent.
        """
        if self._ring is None:
            return
        said = self.round(str(stand), lambda: self._gather_stands(stand))
        if not are_consistent(said.values()):
            raise MismatchError(describe_mismatch(said))

    def _gather_stands(self, stand: Stand) -> dict[int, Stand]:
        """Return all workers' places by name; empty if all places are equal."""
        channel, what = self._channel, str(stand)
        if channel is None:
            return {}
        digests, work = channel.all_gather(torch.frombuffer(bytearray(stand.digest()), dtype=torch.uint8))
        channel.wait(work, what)
        if all(torch.equal(digest, digests[0]) for digest in digests):
            return {}
        place = channel.place
        try:
            return {
                place.name_of(rank): decode_stand(raw)
                for rank, raw in enumerate(channel.gather(encode_stand(stand), what))
            }
        except StandError as error:
            raise RunError(f"worker {place.name} cannot read where another worker stands: {error}") from None

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        return self.round(what, lambda: self._gather_bytes(payload, what))

    def _gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        channel = self._channel
        return [payload] if channel is None else channel.gather(payload, what)

    def take_from_first(self, tensors: Iterable[Tensor], what: str) -> None:
        self.take_from(0, tensors, what)

    def take_from(self, root: int, tensors: Iterable[Tensor], what: str) -> None:
        held = list(tensors)
        if self._channel is not None:
            self.round(what, lambda: self._take_from(root, held, what))

    def _take_from(self, root: int, tensors: Sequence[Tensor], what: str) -> None:
        channel = self._channel
        if channel is None:
            return
        first = self.roster.place.rank == root
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            # A copy: a broadcast that is given up may go on writing into its tensor.
            host = tensor.detach().to("cpu", copy=not first).contiguous()
            # As bytes: Gloo has no broadcast for every dtype (bool, for one).
            channel.wait(channel.broadcast(host.reshape(-1).view(torch.uint8), root), what)
            if not first:
                tensor.copy_(host)

    def combine(self, tensor: Tensor, op: Reduction, what: str) -> Tensor:
        channel = self._channel
        if channel is not None:
            channel.wait(channel.reduce(tensor, _OPS[op]), what)
        return tensor
