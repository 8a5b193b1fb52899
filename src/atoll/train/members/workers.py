"""What the workers of a group tell one another outside the iterations: small values, and tensors to start
from.

Every call is a collective: each worker makes it, in the same order. Alone, each is trivial and touches no
socket.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from atoll.core.errors import MismatchError, RunError, UserError
from atoll.core.stands import (
    Stand,
    StandError,
    are_consistent,
    decode_stand,
    describe_mismatch,
    encode_stand,
)
from atoll.train.api.place import Place
from atoll.train.group.channel import Channel
from atoll.train.group.rounds import Ring

Reduction = Literal["mean", "sum", "min", "max"]
Value = TypeVar("Value", float, complex, Tensor)
_Result = TypeVar("_Result")
_OPS: dict[str, dist.ReduceOp.RedOpType] = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Workers:
    """The workers of `place`, or of `ring` where there is one; there is none exactly when alone."""

    def __init__(self, place: Place, ring: Ring | None) -> None:
        self._place, self._ring = place, ring
        self._closed = False
        self._stand: Stand | None = None  # while this worker is in a call of its session

    @property
    def place(self) -> Place:
        """This worker's place, as it is now."""
        return self._place if self._ring is None else self._ring.place

    @property
    def alone(self) -> bool:
        """Whether there is no group at all, and so nobody to talk to."""
        return self._ring is None

    @property
    def seconds_waited(self) -> float:
        """The time that all calls so far have waited."""
        return 0.0 if self._ring is None else self._ring.seconds_waited

    @property
    def ranks(self) -> list[int]:
        """The ranks of those who took part in the latest collective, in the order of `gather`."""
        return list(range(self.place.world))

    @property
    def is_first(self) -> bool:
        """Whether this worker writes, and describes, for all."""
        return self.place.rank == self.ranks[0] and not (self._ring is not None and self._ring.outside)

    @property
    def channel(self) -> Channel | None:
        """The channel to the other workers (Gloo, CPU tensors); None when alone. Raises UserError once
        closed."""
        self.check_open()
        return None if self._ring is None else self._ring.session

    def gather_group(self) -> None:
        """Wait, inside a call and before it changes anything, until this worker's whole group has come."""

    def part(self) -> None:
        """Tell the others that this worker makes no further call, where workers may end one before another.

        Raises MismatchError if another worker waits for this one in a call.
        """

    def check_open(self) -> None:
        """Raise UserError once closed."""
        if self._closed:
            raise UserError("the session is closed; what needs it belongs inside its `with` block")

    def close(self) -> None:
        """Part from the other workers: calls from now on raise."""
        self._closed = True

    def _round(self, what: str, act: Callable[[], _Result]) -> _Result:
        """Do what one call is, together with the other workers (`train/group/rounds.py`: Ring.round)."""
        self.check_open()
        return act() if self._ring is None else self._ring.round(what, act)

    @contextmanager
    def standing(self, stand: Stand) -> Iterator[None]:
        """Mark this worker, inside the context, as in a call of its session that all workers make.

        A call inside another call is part of the outer call. Raises MismatchError where the others are in
        calls that are inconsistent with this one.
        """
        if self._stand is not None:
            yield
            return
        self.check_open()
        self._stand_at(stand)
        try:
            self._compare(stand)
            yield
        finally:
            self._stand_at(None)

    def _stand_at(self, stand: Stand | None) -> None:
        self._stand = stand
        if self._ring is not None:
            self._ring.scripts.stand = stand

    def _compare(self, stand: Stand) -> None:
        """Compare all workers' places at the beginning of a call. The message has one size whatever the call
        is.
        """
        if self._ring is None:
            return
        said = self._round(str(stand), lambda: self._gather_stands(stand))
        if not are_consistent(said.values()):
            raise MismatchError(describe_mismatch(said))

    def _gather_stands(self, stand: Stand) -> dict[int, Stand]:
        """Return all workers' places by name; empty where all places are equal."""
        channel, what = self.channel, str(stand)
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

    def barrier(self, what: str = "the barrier") -> None:
        """Return when every worker has come."""
        self._round(what, lambda: self._combine(torch.zeros(1), "sum", what))

    def reduce(
        self, value: Value, op: Reduction = "mean", weight: float | None = None, what: str = "reduce"
    ) -> Value:
        """Combine `value` over workers: a number gives a float, a tensor a new tensor of its shape and dtype.

        `mean` weighs each worker's value by `weight` (1 by default). Complex values have sums and means only.
        Raises UserError for an unknown `op`, for the extremes of complex values, for a weight with another op
        than `mean`, and for weights that sum to 0.
        """
        if op not in _OPS:
            raise UserError(f"reduce: no op {op!r}; it is one of {', '.join(_OPS)}")
        if weight is not None and op != "mean":
            raise UserError(f"reduce: weight goes with op='mean', not with {op!r}")
        is_complex = value.is_complex() if isinstance(value, Tensor) else _is_complex(value)
        if is_complex and op in ("min", "max"):
            raise UserError(
                f"reduce: complex values have no order, so they have no {op}; reduce value.abs(), or "
                "value.real and value.imag by themselves"
            )
        asked = asked_of_reduce(value, op)
        own = 1.0 if weight is None else float(weight)
        tensor = value if isinstance(value, Tensor) else _tensor_of(value)

        def act() -> Tensor:
            self._check_alike(asked, what)
            return self._reduce_tensor(tensor, op, own, what)

        result = self._round(what, act)
        return result if isinstance(value, Tensor) else result.item()

    def _check_alike(self, asked: str, what: str) -> None:
        """Raise UserError unless all workers ask for the same: they would wait for one another in vain."""
        if self._ring is not None and self._stand is not None and self._stand.asks == asked:
            return  # they have been compared as the call began
        everyone = self.gather(asked, what)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise UserError(f"{what}: worker 0 asks for the {everyone[0]}, worker {rank} for the {other}")

    def _reduce_tensor(self, value: Tensor, op: Reduction, weight: float, what: str) -> Tensor:
        if value.is_complex():  # real and imaginary parts by themselves, which no channel is asked to know
            parts = torch.view_as_real(value.detach().resolve_conj())
            return torch.view_as_complex(self._reduce_tensor(parts, op, weight, what))
        if op == "mean" and not value.is_floating_point():
            raise UserError(
                f"reduce: the mean of a {value.dtype} tensor is not one of its kind; give value.float()"
            )
        result = value.detach().to("cpu", copy=True).contiguous()
        if op == "mean":
            total = float(self._combine(torch.tensor([weight], dtype=torch.float64), "sum", what)[0])
            if total <= 0:
                raise UserError(f"reduce: the workers' weights sum to {total:g}; they must be above 0")
            result = result.mul_(weight / total) if weight else result.zero_()  # zero times NaN is NaN
        return self._combine(result, op, what).to(value.device)

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """Each worker's `value`, in order of rank: tensors of any shape and dtype, or values that JSON can
        hold."""
        if isinstance(value, Tensor):
            return [_unpack(part, value.device) for part in self.gather_bytes(_pack(value), what)]
        try:
            payload = json.dumps(value).encode()  # unlike msgspec's, it keeps NaN and the infinities
        except (TypeError, ValueError) as error:
            raise UserError(
                f"gather: {error}; give a tensor, or numbers, strings, and lists and dicts of them"
            ) from None
        return [json.loads(part) for part in self.gather_bytes(payload, what)]

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Each worker's bytes, in order of rank."""
        return self._round(what, lambda: self._gather_bytes(payload, what))

    def _gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        channel = self.channel
        return [payload] if channel is None else channel.gather(payload, what)

    def take_from_first(self, tensors: Iterable[Tensor], what: str) -> None:
        """Overwrite `tensors` by worker 0's values; shapes and dtypes are the same everywhere."""
        self.take_from(0, tensors, what)

    def take_from(self, root: int, tensors: Iterable[Tensor], what: str) -> None:
        """The same by the values of the worker of rank `root` of a ring."""
        held = list(tensors)
        if self.channel is not None:
            self._round(what, lambda: self._take_from(root, held, what))

    def _take_from(self, root: int, tensors: Sequence[Tensor], what: str) -> None:
        channel = self.channel
        if channel is None:
            return
        first = self.place.rank == root
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            # A copy: a broadcast that is given up may go on writing into what it was given.
            host = tensor.detach().to("cpu", copy=not first).contiguous()
            channel.wait(channel.broadcast(_sendable(host), root), what)
            if not first:
                tensor.copy_(host)

    def _combine(self, tensor: Tensor, op: Reduction, what: str) -> Tensor:
        """`tensor`, in place: the sum (for `mean` too), minimum or maximum over workers."""
        channel = self.channel
        if channel is not None:
            channel.wait(channel.reduce(tensor, _OPS[op]), what)
        return tensor


def asked_of_reduce(value: object, op: str) -> str:
    """Describe what a call of `session.reduce` asks for: "mean of a float32 tensor of shape (3,)"."""
    if not isinstance(value, Tensor):
        return f"{op} of a {'complex number' if _is_complex(value) else 'number'}"
    return f"{op} of a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"


def _is_complex(number: object) -> bool:
    return isinstance(number, numbers.Complex) and not isinstance(number, numbers.Real)


def _tensor_of(number: float | complex) -> Tensor:
    if _is_complex(number):
        return torch.tensor(complex(number), dtype=torch.complex128)
    return torch.tensor(float(number), dtype=torch.float64)  # type: ignore[arg-type]


def asked_of_gather(value: object) -> str:
    """Describe what a call of `session.gather` asks for. Shapes and dtypes of tensors may differ between
    workers.
    """
    return "a tensor" if isinstance(value, Tensor) else "a value"


def _sendable(tensor: Tensor) -> Tensor:
    """The same memory as bytes: Gloo has no broadcast for every dtype (bool, for one)."""
    return tensor.reshape(-1).view(torch.uint8)


class _Header(msgspec.Struct):
    dtype: str
    shape: list[int]


def _pack(tensor: Tensor) -> bytes:
    host = tensor.detach().to("cpu").contiguous()
    header = msgspec.json.encode(_Header(str(host.dtype).removeprefix("torch."), list(host.shape)))
    body = bytes(_sendable(host).numpy()) if host.numel() else b""
    return len(header).to_bytes(4, "little") + header + body


def _unpack(payload: bytes, device: torch.device) -> Tensor:
    size = int.from_bytes(payload[:4], "little")
    header = msgspec.json.decode(payload[4 : 4 + size], type=_Header)
    dtype = getattr(torch, header.dtype)
    body = payload[4 + size :]
    if not body:
        return torch.empty(header.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(body), dtype=dtype).reshape(header.shape).to(device)
