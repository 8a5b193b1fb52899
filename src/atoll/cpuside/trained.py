"""The model on a node's CPU side: shared memory, contributions, global parameters, and published local ones.

Methods that compute run on the calculating thread (calculating.py), in order; all others on the thread that
exchanges messages. Iterations are in the decisions' count; the script's count is higher by `shift`.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from atoll.chunks import ChunkMap
from atoll.core.config import PLAIN_CODEC, LinkOptions
from atoll.core.decoding import from_msgpack
from atoll.core.errors import UserError
from atoll.cpuside.assembly import Assembly
from atoll.cpuside.overlay import Overlay, Pending
from atoll.exchange import globalparameters as steps
from atoll.exchange.codecs import codec_named
from atoll.exchange.coding import Coding
from atoll.exchange.feedback import Feedback
from atoll.exchange.globalstate import unpack_globals
from atoll.exchange.hostmemory import Buffers, HostMemory, map_bytes, plan_memory
from atoll.net.endpoint import Buffer
from atoll.tensors.payload import tensor_of
from atoll.wire.device import Contribute, SetUp
from atoll.wire.nodes import About
from atoll.wire.peers import Key
from atoll.wire.peerviews import Life


class Trained:
    """The model of one set-up.

    Raises UserError for an optimizer, a state or a codec that this process cannot run.

    Args:
        setup: the worker's message.
        descriptors: the files that came with the message; closed here, or owned by `memory`.
        iteration: the global iteration at which the model begins.
        wanted: returns False for the key of a contribution that must not be kept.
        codec: name of the codec that writes gradients for other nodes.
    """

    def __init__(
        self,
        setup: SetUp,
        descriptors: Sequence[int],
        iteration: int,
        wanted: Callable[[Key], bool],
        codec: str = PLAIN_CODEC,
    ) -> None:
        self.setup, self.shift = setup, setup.iteration - iteration
        layout = from_msgpack(setup.layout, ChunkMap)
        self.chunks = [chunk.id for chunk in layout.trainable]
        self._dtypes = [getattr(torch, chunk.dtype) for chunk in layout.trainable]
        try:
            self.memory = HostMemory(plan_memory(layout, setup.slots, setup.buffers), descriptors[0])
            sys.path += [place for place in setup.path if place not in sys.path]
            self.coding = Coding(codec_named(codec))
            self.globals = steps.GlobalParameters(
                layout,
                setup.optimizer,
                setup.hyperparameters,
                configured=setup.own_optimizer,
                by_tensor=setup.by_tensor,
                threads=max(1, setup.threads),
            )
            for chunk, values in [*self.memory.buffer(0).items(), *self.memory.frozen.items()]:
                self.globals.set_values(chunk, values)
            self.globals.iteration = iteration
            if setup.packed:
                packed = map_bytes(descriptors[1], setup.packed).numpy()
                unpack_globals(packed.data, self.globals)
        finally:
            for each in descriptors[1:]:
                os.close(each)
        self.overlay = Overlay(self.globals)
        self.buffers = Buffers(setup.buffers)
        self.assembly = Assembly(layout, len(setup.hyperparameters), wanted, self.coding)
        # Error feedback: the next own contribution carries the part that the codec has dropped.
        self.feedback = Feedback(layout.trainable, dict.fromkeys(self.chunks, 0), LinkOptions(), self.coding)
        # Iterations of own contributions in slots, with the arrays that may still read each slot.
        self._slots: dict[int, list[weakref.ref[numpy.ndarray[Any, Any]]]] = {}
        self._in_slots: dict[int, Key] = {}
        self._freed = iteration
        self.seconds_applying = self.seconds_overlaying = 0.0

    # -- this node's contributions ------------------------------------------------------------------------

    def keep_own(self, life: Life, given: Contribute) -> Key:
        """Keep this node's own contribution, which lies in a slot of the shared memory.

        Raises UserError for a contribution that does not fit the model.
        """
        iteration = given.iteration - self.shift
        arrays = [_bytes_of(flat) for flat in self.memory.gradients(given.iteration).values()]
        self._slots[iteration] = [weakref.ref(array) for array in arrays]
        about = About(
            key=Key("iterations", iteration, life),
            taken=max(0, given.taken - self.shift),
            samples=given.samples,
            weight=given.weight,
            basis=given.basis,
            alike=given.alike,
            present=given.present,
            hyperparameters=given.hyperparameters,
            clip=given.clip,
            note=given.note,
            refused=given.refused,
            mean=given.mean,
            clipped=given.clipped,
        )
        if reason := self.assembly.why_not(about, None):
            raise UserError(f"the worker's contribution to iteration {given.iteration} has {reason}")
        self._in_slots[iteration] = about.key
        coded = [self._code(iteration, given, place) for place in range(len(self.chunks))]
        key = self.assembly.keep(about, [array.data for array in arrays], coded)
        self.globals.check(self._contribution(key))
        return key

    def _code(self, iteration: int, given: Contribute, place: int) -> Buffer | None:
        """Encode a chunk of this node's own contribution, and put the decoded values into its slot.

        Returns None if the codec does not write chunks of this dtype.
        """
        chunk, dtype = self.chunks[place], self._dtypes[place]
        if not self.coding.writes(str(dtype).removeprefix("torch.")):
            return None
        flat = self.memory.gradients(given.iteration)[chunk]
        written = self.feedback.write(iteration, chunk, flat, given.present[place], given.weight)
        flat.copy_(written.values)
        return written.payload

    def settle_own(self, iteration: int, *, counted: bool) -> None:
        """Settle error feedback for an applied iteration; `counted`: this node's contribution took part."""
        self.feedback.settle(iteration, counted=counted)

    def forget(self) -> None:
        """Drop all contributions; those of this node no longer take part in any step."""
        self.assembly.clear()
        for iteration in self.feedback.under_way:
            self.feedback.settle(iteration, counted=False)

    def freed(self, next_iteration: int) -> int | None:
        """Return the iteration (the script's count) below which all slots are free, or None if unchanged.

        A contribution that still occupies the slot of the node's next iteration is copied elsewhere.
        """
        for iteration in sorted(self._slots):
            key = self._in_slots.get(iteration)
            if key is not None and key not in self.assembly:
                del self._in_slots[iteration]
            elif key is not None and iteration + self.setup.slots <= next_iteration:
                own = self.assembly[key]
                assert own.about is not None
                self.assembly.keep(own.about, [_copy_of(payload) for payload in own.payloads], own.coded)
                own = None  # type: ignore[assignment]  # the last reference to the slot here
                del self._in_slots[iteration]
            if iteration in self._in_slots or any(each() is not None for each in self._slots[iteration]):
                break
            del self._slots[iteration]
        before = min(self._slots, default=next_iteration)
        if before <= self._freed:
            return None
        self._freed = before
        return before + self.shift

    # -- computing ----------------------------------------------------------------------------------------

    def contributions(self, keys: Iterable[Key]) -> list[steps.Contribution]:
        """Return whole contributions in the optimizer's form."""
        return [self._contribution(key) for key in keys]

    def _contribution(self, key: Key) -> steps.Contribution:
        found = self.assembly[key]
        about = found.about
        assert about is not None
        tensors = (
            tensor_of(payload, dtype) for payload, dtype in zip(found.payloads, self._dtypes, strict=True)
        )
        return steps.Contribution(
            node=key.life.node,
            incarnation=key.life.incarnation,
            samples=about.samples,
            weight=about.weight,
            basis=about.basis,
            alike=about.alike,
            gradients=dict(zip(self.chunks, tensors, strict=True)),
            present=dict(zip(self.chunks, about.present, strict=True)),
            hyperparameters=about.hyperparameters,
            clip=about.clip,
            refused=about.refused,
            mean=about.mean,
            clipped=about.clipped,
        )

    def apply(self, iteration: int, contributions: Sequence[steps.Contribution]) -> steps.IterationOutcome:
        """Make an iteration's step; runs on the calculating thread."""
        began = time.perf_counter()
        if contributions:
            outcome = self.globals.apply(iteration, contributions)
        else:  # all contributors are gone
            self.globals.iteration = iteration + 1
            outcome = steps.IterationOutcome(iteration, False, None, {}, self.globals.digest)
        self.seconds_applying += time.perf_counter() - began
        return outcome

    def pending(self, iteration: int, keys: Sequence[Key]) -> Pending:
        """Return the contributions `keys` of an iteration in the overlay's form."""
        return Pending(iteration, self.contributions(keys))

    def publish(self, buffer: int, waiting: Sequence[Pending]) -> None:
        """Write local parameters to a buffer; runs on the calculating thread."""
        began = time.perf_counter()
        self.overlay.write(self.memory.buffer(buffer), waiting)
        self.seconds_overlaying += time.perf_counter() - began

    def take_over(self, raw: memoryview) -> None:
        """Replace the state by another node's; runs on the calculating thread."""
        unpack_globals(raw, self.globals)
        for chunk, values in self.memory.frozen.items():
            values.copy_(self.globals.values(chunk))
        self._freed = -1  # report free slots to the worker again

    def close(self) -> None:
        self.assembly.clear()
        self.memory.close()


def _bytes_of(flat: Tensor) -> numpy.ndarray[Any, Any]:
    array: numpy.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return array


def _copy_of(payload: Buffer) -> memoryview:
    return memoryview(bytearray(payload))
