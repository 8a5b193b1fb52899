"""The collectives of a run's workers outside the iterations: of small values, and of tensors to start from.

Each worker makes every call, in the same order. For a worker alone each call is trivial and uses no socket.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import msgspec
import torch
from torch import Tensor

from atoll.core.decoding import from_json
from atoll.core.errors import UserError
from atoll.core.stands import Stand
from atoll.train.api.place import Place, is_first
from atoll.train.members.meetings import Reduction, WorkerMeeting, bytes_of

Value = TypeVar("Value", float, complex, Tensor)
_OPS = get_args(Reduction)


class Workers:
    """The workers of a run, this one included, which meet by `meeting`."""

    def __init__(self, meeting: WorkerMeeting) -> None:
        self._meeting = meeting
        self._closed = False

    @property
    def place(self) -> Place:
        """The current place of this worker."""
        return self._meeting.roster.place

    @property
    def alone(self) -> bool:
        """True if there is no group at all, and so nobody to talk to."""
        return self._meeting.alone

    @property
    def late(self) -> bool:
        """True for a worker that has yet to enter a run under way."""
        return self._meeting.roster.late

    @property
    def seconds_waited(self) -> float:
        """The seconds that all calls so far have waited."""
        return self._meeting.seconds_waited

    @property
    def ranks(self) -> list[int]:
        """The ranks of the participants in the latest collective, in the order of `gather`."""
        return self._meeting.roster.ranks

    @property
    def is_first(self) -> bool:
        """True if this worker writes, and describes, for all workers."""
        return is_first(self._meeting.roster)

    def gather_group(self) -> None:
        """Wait, inside a call and before it changes anything, until this worker's whole group has come."""
        self._meeting.gather_group()

    def part(self) -> None:
        """Report that this worker makes no further call, if workers may end one before another.

        Raises MismatchError if another worker waits for this one in a call.
        """
        self._meeting.part()

    def check_open(self) -> None:
        """Raise UserError if the session is closed."""
        if self._closed:
            raise UserError("the session is closed; what needs it belongs inside its `with` block")

    def close(self) -> None:
        """Part from the other workers: later calls raise UserError."""
        self._closed = True

    @contextmanager
    def standing(self, stand: Stand) -> Iterator[None]:
        """Mark this worker, inside the context, as in a call of its session that all workers make.

        A call inside another call is part of the outer call. Raises MismatchError if the others are in calls
        that are inconsistent with this one.
        """
        if self._meeting.stand is not None:
            yield
            return
        self.check_open()
        self._meeting.stand_at(stand)
        try:
            self._meeting.compare(stand)
            yield
        finally:
            self._meeting.stand_at(None)

    def barrier(self, what: str = "the barrier") -> None:
        """Return when every worker has come."""
        self.check_open()
        self._meeting.round(what, lambda: self._meeting.combine(torch.zeros(1), "sum", what))

    def reduce(
        self, value: Value, op: Reduction = "mean", weight: float | None = None, what: str = "reduce"
    ) -> Value:
        """Combine `value` over workers: a number gives a float or complex number, a tensor a new tensor of
        its shape and dtype.

        `mean` weighs each worker's value by `weight` (1 by default). Complex values have sums and means only.
        Raises UserError for an unknown `op`, for the extremes of complex values, for a weight with another op
        than `mean`, for the mean of a tensor of integers, for unequal calls, and for weights that sum to 0.
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

        self.check_open()
        result = self._meeting.round(what, act)
        return result if isinstance(value, Tensor) else result.item()

    def _check_alike(self, asked: str, what: str) -> None:
        """Raise UserError unless all workers ask for equal reductions: they would wait for one another in
        vain."""
        stand = self._meeting.stand
        if stand is not None and stand.asks == asked:
            return  # compared already, with this worker's place
        everyone = self.gather(asked, what)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise UserError(f"{what}: worker 0 asks for the {everyone[0]}, worker {rank} for the {other}")

    def _reduce_tensor(self, value: Tensor, op: Reduction, weight: float, what: str) -> Tensor:
        if value.is_complex():  # channels take real tensors only, so reduce the parts
            parts = torch.view_as_real(value.detach().resolve_conj())
            return torch.view_as_complex(self._reduce_tensor(parts, op, weight, what))
        if op == "mean" and not value.is_floating_point():
            raise UserError(
                f"reduce: the mean of a {value.dtype} tensor is not one of its kind; give value.float()"
            )
        result = value.detach().to("cpu", copy=True).contiguous()
        if op == "mean":
            total = float(self._meeting.combine(torch.tensor([weight], dtype=torch.float64), "sum", what)[0])
            if total <= 0:
                raise UserError(f"reduce: the workers' weights sum to {total:g}; they must be above 0")
            result = result.mul_(weight / total) if weight else result.zero_()  # zero times NaN is NaN
        return self._meeting.combine(result, op, what).to(value.device)

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """Return each worker's `value`, in the order of ranks: tensors of any shape and dtype, or values that
        JSON can hold.

        Raises UserError for other values.
        """
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
        """Return each worker's bytes, in the order of ranks."""
        self.check_open()
        return self._meeting.gather_bytes(payload, what)

    def take_from_first(self, tensors: Iterable[Tensor], what: str) -> None:
        """Overwrite `tensors` by the first worker's values; shapes and dtypes are equal on all workers."""
        self.check_open()
        self._meeting.take_from_first(tensors, what)

    def take_from(self, root: int, tensors: Iterable[Tensor], what: str) -> None:
        """Overwrite `tensors` by the values of the worker of rank `root` of a ring."""
        self.check_open()
        self._meeting.take_from(root, tensors, what)


def asked_of_reduce(value: object, op: str) -> str:
    """Describe the result for which a call of `session.reduce` asks: "mean of a float32 tensor of shape
    (3,)"."""
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
    """Describe the values that a call of `session.gather` collects. Tensors' shapes and dtypes may differ."""
    return "a tensor" if isinstance(value, Tensor) else "a value"


class _Header(msgspec.Struct):
    dtype: str
    shape: list[int]


def _pack(tensor: Tensor) -> bytes:
    host = tensor.detach().to("cpu").contiguous()
    header = msgspec.json.encode(_Header(str(host.dtype).removeprefix("torch."), list(host.shape)))
    return len(header).to_bytes(4, "little") + header + bytes_of(host)


def _unpack(payload: bytes, device: torch.device) -> Tensor:
    size = int.from_bytes(payload[:4], "little")
    header = from_json(payload[4 : 4 + size], _Header)
    dtype = getattr(torch, header.dtype)
    body = payload[4 + size :]
    if not body:
        return torch.empty(header.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(body), dtype=dtype).reshape(header.shape).to(device)
