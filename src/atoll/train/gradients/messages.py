"""A chunk's gradients, and the messages in which they travel. One message is what one collective carries.

Every all-reduce costs a fixed time besides the time of its bytes (docs/notes/gradients.md). So neighbouring
small chunks share a message. Each message has room for the workers' agreement on the iteration, which travels
at the end of the last message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from atoll.core.weighing import SAID as SAID_OF_WEIGHT
from atoll.tensors.binding import BoundChunk, Buffer, carve
from atoll.tensors.graphs import with_graph
from atoll.tensors.sparse import check_summable, of_rows, pack, rows_of, write
from atoll.tensors.torch_compat import copy_all
from atoll.train.gradients.alike import SAID
from atoll.train.group.channel import Pending

# By chunk id and slot: the rows that a sparse gradient has.
Rows: TypeAlias = dict[int, dict[int, Tensor]]
_NO_ROWS: Mapping[int, Tensor] = {}
SPARSE = 2.0**-12  # in a sum over fewer workers than 4,096 it stays below 1, and a float32 holds the sum
_ALIGNMENT = 64  # bytes: a cache line, at which the kernels of torch's fused optimizers begin


class BucketChunk:
    """The gradients of one chunk, and the progress of the backward under way.

    Until `publish`, `p.grad` is this worker's own gradient, as autograd made it. Afterwards `kept` holds it
    until the step. `published` is the buffer in which gradients are reduced, in the memory of the chunk's
    message.
    """

    def __init__(self, bound: BoundChunk, flat: Tensor) -> None:
        self.bound = bound
        self.published = Buffer(bound.chunk, bound.parameters, flat)
        self.kept: list[Tensor | None] = []
        self._summed: dict[int, Tensor] = {}  # by slot, the sums of the rows that any worker has
        self.fired = [False] * len(bound.parameters)
        self.missing = len(bound.parameters)
        self.taken = 0  # number of this backward's gradients that are in the published buffer, scaled
        self.late = False  # True: wait for the end of backward, since gradients come more than once
        self._odd = False  # a gradient of the iteration is sparse, or carries a graph
        self.shows_sparse = False  # `collect` has found a sparse gradient
        self.had_sparse = False  # a gradient of this iteration or of an earlier one is sparse
        self._with_graph: list[int] = []  # slots whose shown mean carries a graph

    def begin(self) -> None:
        self._odd = False
        self._summed = {}
        if self.missing < len(self.fired):
            self.fired = [False] * len(self.fired)
            self.missing = len(self.fired)
        self.taken = 0

    def check(self, index: int, gradient: Tensor | None) -> None:
        """Raise an error for a gradient that the published buffer cannot take, and notice one that it takes
        otherwise than most. `index` is the parameter's slot."""
        view = self.published.views[index]
        if gradient is not None and gradient is not view:
            if gradient.dtype != view.dtype:
                self.bound.check()
            if gradient.requires_grad or gradient.layout != torch.strided:
                check_summable(self.bound.names[index], gradient)
                self._odd = True
                self.had_sparse = self.had_sparse or gradient.is_sparse

    def move(self, flat: Tensor) -> None:
        """Reduce in other memory from now on. This worker's own gradients stay where they are, and are taken
        anew."""
        self._summed = {}
        before, self.published = self.published, Buffer(self.bound.chunk, self.bound.parameters, flat)
        for parameter, view in zip(self.bound.parameters, before.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()
        self.taken = 0

    def take(self, index: int, gradient: Tensor | None, scale: float) -> None:
        """Put this worker's gradient, scaled, into the published buffer: one pass, while the cache holds
        it."""
        view = self.published.views[index]
        if gradient is None or scale == 0:  # zero times NaN would be NaN
            view.zero_()
            return
        if gradient is view:  # autograd has added to the mean of the last reduction
            gradient = self.bound.parameters[index].grad = gradient.clone()
        if self._odd:
            gradient = gradient.detach()
            if gradient.is_sparse:
                write(view, gradient, scale)
                return
        torch.mul(gradient, scale, out=view)

    def settle(self, scale: float) -> None:
        """Make the published buffer complete.

        Take gradients that did not come in this backward, or came more than once, and write zeros for absent
        ones.
        """
        if self.taken == len(self.fired):
            return
        views, gradients = self.published.views, [parameter.grad for parameter in self.bound.parameters]
        own = []
        for index, gradient in enumerate(gradients):
            self.check(index, gradient)
            if gradient is not None and gradient is not views[index]:
                own.append(gradient)
        if len(own) == len(views) and scale != 0 and not self._odd:  # two calls for all slots
            copy_all(views, own)
            if scale != 1.0:
                self.published.flat.mul_(scale)
            return
        for index, gradient in enumerate(gradients):
            self.take(index, gradient, scale)

    def check_own(self) -> None:
        """Raise an error for a gradient of this worker's that cannot be summed."""
        for index, parameter in enumerate(self.bound.parameters):
            self.check(index, parameter.grad)

    def elements(self, rows: Mapping[int, Tensor]) -> int:
        """Return how many elements these rows of the parameters have; `rows` are by slot."""
        parameters = self.bound.parameters
        return sum(len(here) * parameters[index].shape[1:].numel() for index, here in rows.items())

    def pack(self, rows: Mapping[int, Tensor], flat: Tensor, scale: float) -> int:
        """Put the rows of this worker's gradients, scaled, into `flat`, where they are summed and published.
        Return the number of elements that they take.

        `rows` has, by slot, the rows that any worker has; a slot without rows has no gradient anywhere.
        """
        end = 0
        for index, here in rows.items():
            row = self.bound.parameters[index].shape[1:]
            begin, end = end, end + len(here) * row.numel()
            self._summed[index] = flat[begin:end].view(len(here), *row)
            pack(self._summed[index], self.own()[index], here.to(flat.device), scale)
        return end

    def again(self) -> None:
        """Take the gradients anew, and at the end of backward from now on: one changed after the chunk had
        left."""
        self.late, self.taken = True, 0

    def publish(self, present: Sequence[bool], rows: Mapping[int, Tensor] = _NO_ROWS) -> None:
        """Let `p.grad` show the published values for each slot that is `present`, and keep this worker's own
        gradients.

        `rows` has the slots whose `p.grad` becomes sparse, and its rows.
        """
        self.kept = [parameter.grad for parameter in self.bound.parameters]
        self.show(present)
        for index, here in rows.items():
            view, summed = self.published.views[index], self._summed.get(index)
            self.bound.parameters[index].grad = (
                rows_of(view, here) if summed is None else of_rows(here.to(view.device), summed, view.shape)
            )

    def drop_graphs(self) -> None:
        """Let `p.grad` show plain values again, where `publish` has given it a graph."""
        with_graph, self._with_graph = self._with_graph, []
        for index in with_graph:
            parameter, view = self.bound.parameters[index], self.published.views[index]
            if parameter.grad is not None and parameter.grad.requires_grad:
                view.copy_(parameter.grad.detach())
                parameter.grad = view

    def show(self, present: Sequence[bool]) -> None:
        """Let `p.grad` show the published values for each slot that is `present`, and None for the others.

        This worker's own gradients must have been kept. One that carries a graph keeps its graph, with the
        published values.
        """
        for parameter, view, here in zip(self.bound.parameters, self.published.views, present, strict=True):
            parameter.grad = view if here else None
        self._with_graph = []
        for index, own in enumerate(self.kept) if self._odd else ():
            if present[index] and own is not None and own.requires_grad and not own.is_sparse:
                self.bound.parameters[index].grad = with_graph(self.published.views[index], own)
                self._with_graph.append(index)

    def has_sparse(self) -> bool:
        """True if one of this worker's own gradients is sparse."""
        if self.taken == len(self.fired) and not self._odd:  # all were checked
            return False
        return any(each is not None and each.is_sparse for each in self.own())

    def slots(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return pairs of each parameter and its view in the published buffer."""
        return zip(self.bound.parameters, self.published.views, strict=True)

    def bring_home(self) -> None:
        """Let each view lie in the published buffer again: the script may have set `p.grad.data` to another
        tensor."""
        flat = self.published.flat
        start, size = flat.data_ptr(), flat.element_size()
        for index, slot in enumerate(self.bound.chunk.slots):
            view, parameter = self.published.views[index], self.bound.parameters[index]
            if view.numel() and view.data_ptr() != start + slot.offset * size:
                home = self.published.views[index] = carve(flat, slot.offset, parameter)
                if parameter.grad is view:
                    home.copy_(view)
                    parameter.grad = home

    def own(self) -> list[Tensor | None]:
        """Return this worker's own gradients of the iteration; None for an absent one."""
        return self.kept or [parameter.grad for parameter in self.bound.parameters]

    def collect(self) -> tuple[bool, ...]:
        """Bring gradients that the script has replaced back into the published buffer; return which slots
        have one. Sparse ones stay as they are."""
        self.shows_sparse = False
        self.bring_home()
        for parameter, view in zip(self.bound.parameters, self.published.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()  # an earlier iteration may have left values there
            elif gradient is view:
                continue
            elif gradient.is_sparse:
                write(view, gradient)
                self.shows_sparse = True
            else:
                view.copy_(gradient.detach())
                parameter.grad = view
        return tuple(parameter.grad is not None for parameter in self.bound.parameters)


class Bucket:
    """Chunks that are reduced together: one allocation with their gradients, then `room` spare elements."""

    def __init__(self, bounds: Sequence[BoundChunk], room: int) -> None:
        self.number = 0  # its place in the order in which messages were laid out
        first = bounds[0].flat
        self._starts: list[int] = []
        end = 0
        for bound in bounds:
            self._starts.append(end)
            end += _aligned(bound.chunk.extent, first.element_size())
        self.memory = first.new_zeros(end + room)
        self.gradients = self.memory[:end]
        self.chunks = [
            BucketChunk(bound, self.memory[start : start + bound.chunk.extent])
            for bound, start in zip(bounds, self._starts, strict=True)
        ]
        self.dirty = False  # a gradient came after the message had left
        self.waits = False  # its hooks do nothing: the message leaves when backward has ended
        self.sent = False
        self.waits_for_rows = False  # until the workers know which rows its sparse gradients have
        self.summed: Tensor | None = None  # the sums of these rows, 1-D; None: `gradients` has the sums
        self.work: Pending | None = None
        ids = [chunk.bound.chunk.id for chunk in self.chunks]
        which = f"chunk {ids[0]}" if len(ids) == 1 else f"chunks {', '.join(map(str, ids))}"
        self._name = f"{which} (with {self.chunks[0].bound.names[0]!r})"
        self._flat, self._more = self.gradients, 0

    @property
    def ready(self) -> bool:
        """True if all of its gradients have come, each once."""
        return not any(chunk.missing or chunk.late for chunk in self.chunks)

    def says(self) -> float:
        """Return what this worker reports of the message: 1 if a gradient changed after it had left, and
        SPARSE more if a gradient is sparse."""
        is_sparse = any(chunk.has_sparse() for chunk in self.chunks)
        return float(self.dirty) + SPARSE * is_sparse

    @property
    def id(self) -> int:
        """The id of the message's first chunk."""
        return self.chunks[0].bound.chunk.id

    def begin(self) -> None:
        """Be a message that has not left."""
        self.dirty = self.sent = False
        self.work = self.summed = None

    def move(self, room: int = 0) -> None:
        """Take other memory, with as many spare elements as before, or `room` if that is more.

        A collective begun in the old memory may still write there.
        """
        gradients = self.gradients.numel()
        self.memory = self.memory.new_zeros(max(self.memory.numel(), gradients + room))
        self.gradients = self.memory[:gradients]
        self._flat, self._more = self.gradients, 0
        for chunk, start in zip(self.chunks, self._starts, strict=True):
            chunk.move(self.memory[start : start + chunk.bound.chunk.extent])
        self.work = self.summed = None

    def make_room(self, room: int) -> None:
        """Have at least `room` spare elements. The message has not left."""
        if self.memory.numel() - self.gradients.numel() < room:
            self.move(room)

    def take_anew(self) -> None:
        """Mark the message's gradients as not taken: they have changed, or another factor scales them."""
        self.dirty = False
        for chunk in self.chunks:
            chunk.taken = 0

    def flat(self, more: int) -> Tensor:
        """Return the gradients and `more` values of the spare room, 1-D."""
        if more != self._more:
            self._flat, self._more = self.memory[: self.gradients.numel() + more], more
        return self._flat

    def __str__(self) -> str:
        return self._name


class Tail:
    """The spare room of a message on the CPU, in which the members' reports on an iteration travel.

    The first value changes with each iteration, the others seldom. Unchanged values are neither packed nor
    unpacked again: `write` then takes, and `heard` returns, the list of the call before with a new first
    value.
    """

    def __init__(self, message: Bucket) -> None:
        self.memory = message.memory
        room: Any = message.memory[message.gradients.numel() :].numpy()
        self._room: Any = memoryview(room)  # items are of the message's dtype
        self._code: Literal["f", "d"] = "f" if message.memory.dtype == torch.float32 else "d"
        self._said: list[float] = []
        self._packed = array(self._code, self._said)
        self._heard: list[float] = []
        self._raw = b""

    def write(self, said: list[float]) -> None:
        """Write a report. In a list that was given before only the first value may have changed."""
        if said is self._said:
            self._packed[0] = said[0]
        else:
            self._said, self._packed = said, array(self._code, said)
        self._room[: len(said)] = memoryview(self._packed)

    def heard(self, count: int) -> list[float]:
        """Return the first `count` values, summed over the members.

        The list of the call before is returned, with a new first value, if no other value has changed.
        """
        raw = self._room[1:count].tobytes()
        if raw == self._raw:
            self._heard[0] = self._room[0]
        else:
            self._raw, self._heard = raw, self._room[:count].tolist()
        return self._heard


def lay_messages(chunks: Iterable[BoundChunk], at_least: int, more: int = 0) -> list[Bucket]:
    """Group neighbouring chunks of one dtype into messages of `at_least` bytes where possible. Chunks whose
    gradients are announced as sparse, and others, are not in one message.

    Each message has spare room for an agreement: HEAD values, one for each message and each parameter, and
    `more`.
    """
    groups: list[list[BoundChunk]] = []
    for bound in chunks:
        small = groups and sum(member.chunk.nbytes for member in groups[-1]) < at_least
        kind = bound.flat.dtype, bound.is_sparse
        if small and kind == (groups[-1][0].flat.dtype, groups[-1][0].is_sparse):
            groups[-1].append(bound)
        else:
            groups.append([bound])
    parameters = sum(len(bound.parameters) for group in groups for bound in group)
    messages = [Bucket(group, room=parameters + len(groups) + HEAD + more) for group in groups]
    for number, message in enumerate(messages):
        message.number = number
    return messages


# Number of an agreement's values, without those for each message, each parameter and each buffer:
HEAD = 6 + SAID + SAID_OF_WEIGHT


def _aligned(elements: int, size: int) -> int:
    """Return a number of elements, of `size` bytes each, rounded up to whole cache lines."""
    unit = max(1, _ALIGNMENT // size)
    return -(-elements // unit) * unit
