"""The memory that a device of a node shares with the CPU side: parameters that come, and gradients that go.

`DeviceParameters` is where a device has its parameters and gradients: on the device (`OnDevice`), or
lent by the CPU side (`Lent`). Source: docs/peers.md, "What a step does".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.exchange.hostmemory import HostMemory
from atoll.memory.lent import LentModel, Turns
from atoll.memory.payloads import Payloads, TensorPayloads
from atoll.memory.untilread import Hiding, UntilRead
from atoll.tensors.binding import BoundChunk, Buffer
from atoll.tensors.changed import ChangedParameters, Looks
from atoll.tensors.sparse import copy_gradient
from atoll.tensors.torch_compat import version_of
from atoll.train.gradients.unread import UnreadGradients
from atoll.train.sync.peersworker import NodeWorker
from atoll.wire.device import Freed, Published, Release, Returned


class DeviceParameters(Protocol):
    """The place of a model's parameters and gradients on a device.

    Attributes:
        waits_for_next: True if gradients of the next iteration come on a thread that cannot wait for the CPU
            side.
    """

    def attach(self, memory: HostMemory, iteration: int) -> None:
        """Exchange through `memory` from `iteration` on."""

    def detach(self) -> None:
        """Let the memory go."""

    def begin(self, iteration: int) -> None:
        """Take gradients of `iteration` from now on."""

    def adopt(self, values: Mapping[int, Tensor], former: Mapping[int, Tensor]) -> None:
        """Give the parameters these values, by chunk, in place of the `former` ones, which nobody reads
        afterwards."""

    def write(self, iteration: int, weighs: bool) -> list[bytes]:
        """Put the gradients of `iteration` into its slot, with zeros for absent ones.

        Returns for each chunk which gradients are present, one byte each. If the contribution does not weigh
        anything, none is.
        """

    def changed(self, copied: Mapping[int, Tensor]) -> list[str]:
        """Return the names of parameters to which the script has written since the values `copied` were
        taken."""

    def stepped(self) -> None:
        """Note that the step is made, and that the next iteration's slot may be written."""

    def begin_hiding(self, until: UntilRead) -> None:
        """Ask `until` before the script uses one of the gradients that are there now."""

    def put_back(self) -> None:
        """Let the script have gradients as they are."""

    def hide(self) -> None:
        """Hide gradients again after `put_back`."""

    def end_hiding(self) -> None:
        """Let nobody have the gradients that are hidden now: the session ends, and with it the way to their
        mean."""

    @property
    def first_sparse(self) -> str:
        """The first parameter with a sparse gradient, which cannot be hidden; "" for none."""

    def first_written(self, unscaled: bool) -> str:
        """Return the first parameter whose hidden gradient was changed through another tensor over its
        memory; "" for none. `unscaled`: a GradScaler has divided the gradients."""

    def become(self, means: Mapping[int, Tensor]) -> None:
        """Overwrite the gradients that `put_back` has shown by `means`, (extent,) of each chunk in host
        memory, but for those that the script has overwritten."""

    waits_for_next: bool


class OnDevice:
    """The place of parameters and gradients that lie on the device."""

    waits_for_next = False

    def __init__(self, chunks: Sequence[BoundChunk], leads: bool) -> None:
        self._chunks, self._leads = chunks, leads
        self._slots: list[dict[int, Buffer]] = []  # by slot and chunk: the memory for gradients
        self._versions, self._looks = self._seen(), Looks()
        self._comparing = [ChangedParameters(bound) for bound in chunks]
        self._unread = UnreadGradients([parameter for bound in chunks for parameter in bound.parameters])

    def attach(self, memory: HostMemory, iteration: int) -> None:
        del iteration
        if not self._leads:
            return
        self._slots = [
            {
                bound.chunk.id: Buffer(bound.chunk, bound.parameters, flats[bound.chunk.id])
                for bound in self._chunks
            }
            for flats in (memory.gradients(slot) for slot in range(memory.plan.slots))
        ]

    def detach(self) -> None:
        self._slots = []

    def begin(self, iteration: int) -> None:
        """Do nothing: the slot is chosen when gradients are written."""

    def adopt(self, values: Mapping[int, Tensor], former: Mapping[int, Tensor]) -> None:
        for bound, comparing in zip(self._chunks, self._comparing, strict=True):
            new = values[bound.chunk.id]
            changed = comparing.between(former.get(bound.chunk.id), new)
            bound.flat[: bound.chunk.extent].copy_(new)
            if changed:
                torch.autograd.graph.increment_version(changed)
        self._versions = self._seen()

    def write(self, iteration: int, weighs: bool) -> list[bytes]:
        buffers = self._slots[iteration % len(self._slots)]
        return [_write(bound, buffers[bound.chunk.id], weighs) for bound in self._chunks]

    def changed(self, copied: Mapping[int, Tensor]) -> list[str]:
        seen = zip(self._versions, self._seen(), strict=True)
        found = [name for (name, before), (_, now) in seen if before != now and self._differs(name, copied)]
        return found if found or not self._looks.compares() else list(self._changed_unseen(copied))

    def _changed_unseen(self, copied: Mapping[int, Tensor]) -> Iterator[str]:
        """Yield the names of parameters whose values the script has changed without a new version."""
        for bound, comparing in zip(self._chunks, self._comparing, strict=True):
            values = copied.get(bound.chunk.id)
            if values is not None:
                yield from comparing.names_between(values, bound.flat[: bound.chunk.extent].cpu())

    def _seen(self) -> list[tuple[str, int]]:
        return [
            (name, version_of(parameter))
            for bound in self._chunks
            for name, parameter in zip(bound.names, bound.parameters, strict=True)
        ]

    def _differs(self, name: str, copied: Mapping[int, Tensor]) -> bool:
        bound = next(bound for bound in self._chunks if name in bound.names)
        values = copied.get(bound.chunk.id)
        return values is not None and not torch.equal(bound.flat[: bound.chunk.extent].cpu(), values)

    def stepped(self) -> None:
        """Do nothing."""

    def begin_hiding(self, until: UntilRead) -> None:
        self._unread.begin(until)

    def hide(self) -> None:
        self._unread.hide()

    def end_hiding(self) -> None:
        """Do nothing: whoever uses one is told so."""

    def put_back(self) -> None:
        self._unread.put_back()

    @property
    def first_sparse(self) -> str:
        gradients = ((name, p.grad) for bound in self._chunks for name, p in _named(bound))
        return next((name for name, gradient in gradients if gradient is not None and gradient.is_sparse), "")

    def first_written(self, unscaled: bool) -> str:
        written = self._unread.first_written(unscaled)
        named = (each for bound in self._chunks for each in _named(bound))
        return "" if written is None else next(name for name, parameter in named if parameter is written)

    def become(self, means: Mapping[int, Tensor]) -> None:
        by_parameter: dict[nn.Parameter, Tensor] = {}
        for bound in self._chunks:
            views = Buffer(bound.chunk, bound.parameters, means[bound.chunk.id]).views
            by_parameter.update(zip(bound.parameters, views, strict=True))
        self._unread.become(by_parameter)


def _named(bound: BoundChunk) -> Iterator[tuple[str, nn.Parameter]]:
    return zip(bound.names, bound.parameters, strict=True)


def _write(bound: BoundChunk, into: Buffer, weighs: bool) -> bytes:
    present = []
    for parameter, view in zip(bound.parameters, into.views, strict=True):
        gradient = parameter.grad if weighs else None
        copy_gradient(view, gradient)
        present.append(gradient is not None)
    return bytes(present)


class Lent:
    """The place of parameters that the CPU side lends until the next ones are taken.

    The leader's gradients lie in their slot from the beginning.

    Attributes:
        fitted: the model under its budgets; None until it lies there.
        payloads: where gradients lie.
        hiding: the gradients that are hidden from the script.
        host_peak: the bytes of the memory shared with the CPU side; on other devices than the leader, of
            their own gradients.
    """

    waits_for_next = True

    def __init__(self, chunks: Sequence[BoundChunk], leads: bool) -> None:
        self._chunks, self._leads = chunks, leads
        self.fitted: LentModel | None = None
        self.payloads: Payloads = TensorPayloads()
        self.host_peak = 0
        self.hiding = Hiding()
        self._memory: HostMemory | None = None
        self._frozen: Mapping[int, Tensor] = {}  # frozen values of a memory from which nothing was taken yet
        self._first: Mapping[int, Tensor] = {}

    def attach(self, memory: HostMemory, iteration: int) -> None:
        self._memory, self._frozen = memory, memory.frozen
        if self._leads:
            self.host_peak = memory.plan.nbytes
        elif self.fitted is None:
            self.payloads = TensorPayloads()
            self.host_peak = sum(run.nbytes for run in memory.plan.trained)
        self.begin(iteration)

    def detach(self) -> None:
        self._memory = None

    def begin(self, iteration: int) -> None:
        if not self._leads or self._memory is None:
            return
        slot = self._memory.gradients(iteration)
        if self.fitted is None:
            self.payloads = Turns(slot)
        elif isinstance(self.payloads, Turns):
            self.payloads.turn(slot)

    def adopt(self, values: Mapping[int, Tensor], former: Mapping[int, Tensor]) -> None:
        del former
        if self._frozen:  # the memory is new: frozen chunks lie there too
            values, self._frozen = {**values, **self._frozen}, {}
        if self.fitted is None:
            self._first = values
        else:
            self.fitted.take(values)

    def lent(self) -> Mapping[int, Tensor]:
        """Return the values with which the model begins; to be called once."""
        values, self._first = self._first, {}
        return values

    def write(self, iteration: int, weighs: bool) -> list[bytes]:
        """Return which gradients are present: they lie in the slot already. Those that the script has kept
        from an earlier iteration are written."""
        del iteration, weighs
        return [self._present(bound.chunk.id) for bound in self._chunks]

    def _present(self, chunk: int) -> bytes:
        gradients = self.model.gradients
        present = bytes(gradients.present(chunk))
        with gradients.whole(chunk):
            return present

    @property
    def model(self) -> LentModel:
        """The model under its budgets."""
        assert self.fitted is not None
        return self.fitted

    def changed(self, copied: Mapping[int, Tensor]) -> list[str]:
        del copied
        return [] if self.fitted is None else self.fitted.changed()

    def stepped(self) -> None:
        self.model.step_ended()

    def begin_hiding(self, until: UntilRead) -> None:
        self.hiding.begin(until)

    def hide(self) -> None:
        self.hiding.hide()

    def end_hiding(self) -> None:
        for bound in self._chunks:
            for parameter in bound.parameters:
                parameter.grad = None  # else it would be this node's own from here on
        self.hiding.put_back()

    def put_back(self) -> None:
        self.hiding.put_back()

    @property
    def first_sparse(self) -> str:
        return ""  # gradients in chunks are dense

    def first_written(self, unscaled: bool) -> str:
        del unscaled
        return ""  # no tensor of the script lies over a gradient in a chunk

    def become(self, means: Mapping[int, Tensor]) -> None:
        for chunk, mean in means.items():
            self.model.show_mean(chunk, mean)


class LocalParameters:
    """A device's copy of the parameters that the node's CPU side has published.

    Attributes:
        taken: the global iteration of the copy.
        through: announced parameters include this node's contributions before this iteration.
        overlaying: the seconds that the CPU side took to write these contributions over the parameters.
        memory: the shared memory; None while detached.
    """

    def __init__(self, place: DeviceParameters, worker: NodeWorker) -> None:
        self._place, self._worker = place, worker
        self.taken, self.through, self.overlaying = 0, 0, 0.0
        self.memory: HostMemory | None = None
        self._is_set_up = False  # True once the CPU side has this memory
        self._newest: Published | None = None  # parameters that are announced and not copied
        self._held: int | None = None  # the buffer that was copied last
        worker.on(Published, self._handle_published)
        worker.on(Returned, self._left_behind)

    def attach(self, memory: HostMemory) -> None:
        """Expect the next parameters in `memory`."""
        self.detach()
        self._is_set_up = False
        self._worker.forget_copied()
        self.memory = memory

    def detach(self) -> None:
        """Let the memory go."""
        self._newest, self._held = None, None
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def set_up(self) -> None:
        """Note that the CPU side has taken the model over, and publishes in this memory from now on."""
        self._is_set_up = True
        self._newest = self._held = None
        self.through = 0

    @property
    def is_newer(self) -> bool:
        """True if parameters were announced and not yet taken."""
        return self._newest is not None

    @property
    def at(self) -> int:
        """The global iteration of the newest parameters that have come."""
        return self.taken if self._newest is None else self._newest.taken

    @torch.no_grad()
    def take_newest(self) -> None:
        """Take the newest parameters that were announced, if there are any."""
        newest, self._newest = self._newest, None
        if newest is None:
            return
        assert self.memory is not None
        self._place.adopt(self.memory.buffer(newest.buffer), self._copied)
        # The buffer that was copied last is kept: `check_unchanged` compares with it.
        if self._held is not None and self._held != newest.buffer:
            self._worker.release(self._held)
        self._held, self.taken = newest.buffer, newest.taken

    @property
    def _copied(self) -> Mapping[int, Tensor]:
        return {} if self.memory is None or self._held is None else self.memory.buffer(self._held)

    def give_time(self, seconds: float, own: int) -> None:
        """Wait for parameters that include this node's contributions before iteration `own`, if the CPU side
        needs at most `seconds`."""
        self._worker.give_time(
            seconds if self.overlaying <= seconds else 0.0,
            lambda: self.through >= own or self._worker.returned is not None,
        )

    def check_unchanged(self) -> None:
        """Raise UserError if the script has written to a parameter: the CPU side would not know.

        A parameter that was changed and changed back, say to evaluate with an average of the weights, is
        unchanged.
        """
        for name in self.changed():
            raise UserError(
                f"parameter {name!r} was changed by the script after session.prepare; under strategy "
                "'peers' the node's CPU side makes the parameters: set run.strategy to ring, change it "
                "before session.prepare, or save and session.load it"
            )

    def changed(self) -> list[str]:
        """Return the names of parameters to which the script has written."""
        return self._place.changed(self._copied)

    def _left_behind(self, _: Returned) -> None:
        """Give announced parameters back: the others went on without this node, so they are of no use."""
        if self._newest is not None:
            self._worker.send(Release(buffers=[self._newest.buffer]))
            self._newest = None

    def _handle_published(self, message: Published) -> None:
        if not self._is_set_up:
            return  # of the last set-up: the CPU side has let go of those buffers
        if self._newest is not None and self._newest.buffer != message.buffer:
            self._worker.send(Release(buffers=[self._newest.buffer]))
        self._newest = message
        if message.through > self.through:
            self.through, self.overlaying = message.through, message.seconds


class Slots:
    """The slots for a node's own gradients. Slots of iterations before `freed` may be written again."""

    def __init__(self, worker: NodeWorker) -> None:
        self._worker, self.freed = worker, 0
        worker.on(Freed, self._handle_freed)

    def await_free(self, iteration: int, slots: int) -> None:
        """Wait until the iteration's slot, one of `slots`, may be written."""
        if self.freed <= iteration - slots:
            self._worker.wait(
                lambda: self.freed > iteration - slots or self._worker.returned is not None,
                f"room for iteration {iteration}, in the slot of iteration {iteration - slots}, which "
                "others have yet to get",
            )

    def _handle_freed(self, message: Freed) -> None:
        self.freed = max(self.freed, message.before)
