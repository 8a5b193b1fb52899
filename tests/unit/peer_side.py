"""A node's CPU side inside a test: it has the memory that the worker shares, and says what the test says.

By itself it answers what belongs to the beginning (Ready, the first parameters), to meetings of one, and to
the end, where it has no optimizer's state; all else is the test's to say.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

import atoll
from atoll.chunks import ChunkMap
from atoll.core.config import Config
from atoll.core.errors import GivenUpError
from atoll.exchange.globalstate import pack_optimizer
from atoll.exchange.hostmemory import HostMemory, plan_memory
from atoll.tensors.stepunit import Unit
from atoll.train.members.peersintroduction import Introduction
from atoll.train.sync.peersdevices import Devices
from atoll.train.sync.peersstart import CpuSide
from atoll.train.sync.peersworker import NodeWorker
from atoll.wire.device import (
    DeviceMessage,
    Leave,
    Left,
    Meet,
    Met,
    NodeAt,
    Published,
    Ready,
    Release,
    SetUp,
    State,
    Waiting,
    Want,
    WantState,
)


class FakeSide:
    """What a NodeWorker takes for its CPU side; `heard` is what it was told."""

    def __init__(self) -> None:
        self.heard: list[DeviceMessage] = []
        self._to_say: deque[DeviceMessage] = deque()
        self.memory: HostMemory | None = None
        self.layout: ChunkMap | None = None
        self.free: list[int] = []  # buffers
        self.first, self.script, self.incarnation = 0, b"", 1  # of Ready
        self.frozen: float | None = None  # what a late node's frozen parameters are
        self.later: list[DeviceMessage] = []  # what is said to who waits, one after the other
        self.holds_up = ""  # what keeps the global iteration where it is
        self.meets = True  # it answers what is brought to meetings
        self.met = [0]  # the nodes that take part in them, all with the same
        self.ends_at: type | None = None  # it is killed before it hears one of these
        self.is_gone = False
        self.closed = False

    # As CpuSide

    def send(self, message: DeviceMessage, descriptors: Sequence[int] = ()) -> None:
        self.is_gone = self.is_gone or (self.ends_at is not None and isinstance(message, self.ends_at))
        self._see()
        self.heard.append(message)
        if isinstance(message, SetUp):
            self._set_up(message, descriptors[0])
        elif isinstance(message, Release):
            assert not set(message.buffers) & set(self.free), "a buffer was released twice"
            self.free += message.buffers
        elif isinstance(message, Meet) and self.meets:
            payloads = [message.payload for _ in self.met]
            self.say(Met(number=message.number, nodes=self.met, payloads=payloads))
        elif isinstance(message, Want) and self.holds_up:
            self.say(Waiting(what=self.holds_up))
        elif isinstance(message, WantState):
            self._say_state(message, descriptors[0])
        elif isinstance(message, Leave):
            self.say(Left())

    def receive(self, timeout: float = 0.0) -> tuple[DeviceMessage, list[int]] | None:
        self._see()
        if not self._to_say and timeout and self.later:
            return self.later.pop(0), []
        if not self._to_say:
            time.sleep(min(timeout, 0.001))
            return None
        return self._to_say.popleft(), []

    def close(self) -> None:
        self.closed = True

    def _see(self) -> None:
        if self.is_gone:
            raise GivenUpError("it was killed")

    # What a test says

    def say(self, *messages: DeviceMessage) -> None:
        self._to_say += messages

    def publish(self, taken: int, through: int, values: float | None = None, seconds: float = 0.0) -> None:
        """Announce parameters, all of them `values` (None: as they were brought)."""
        assert self.memory is not None
        buffer = self.free.pop(0)
        for flat in self.memory.buffer(buffer).values():
            if values is not None:
                flat.fill_(values)
        self.say(Published(buffer=buffer, taken=taken, through=through, seconds=seconds))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def slot(self, iteration: int) -> Tensor:
        """The gradients that were handed over, one chunk after the other."""
        assert self.memory is not None
        return torch.cat([flat.clone() for flat in self.memory.gradients(iteration).values()])

    def _say_state(self, message: WantState, descriptor: int) -> None:
        """An optimizer that keeps none."""
        optimizer = torch.optim.SGD([torch.zeros(1)])
        raw = pack_optimizer(optimizer, [], Unit(set()), message.least)
        os.pwrite(descriptor, raw, 0)
        self.say(State(iteration=message.least, packed=raw.nbytes))

    def _set_up(self, message: SetUp, descriptor: int) -> None:
        self.layout = msgspec.msgpack.decode(message.layout, type=ChunkMap)
        plan = plan_memory(self.layout, message.slots, message.buffers)
        self.memory = HostMemory(plan, os.dup(descriptor))
        self.free = list(range(1, message.buffers))
        for flat in self.memory.frozen.values():
            if self.frozen is not None:
                flat.fill_(self.frozen)
        self.say(
            Ready(
                iteration=self.first or message.iteration, incarnation=self.incarnation, script=self.script
            ),
            Published(buffer=0, taken=self.first or message.iteration, through=message.iteration),
        )


def fake_session(
    config: Config, late: bool = False, devices: Devices | None = None
) -> tuple[atoll.Session, FakeSide]:
    """A session of node 0 of three, with a CPU side that says what the test says; with `devices`, on one of
    the node's, whose CPU side is the leader's."""
    side, devices = FakeSide(), devices or Devices()
    nodes = [NodeAt(node=node, incarnation=1, address=f"tcp://127.0.0.1:{node + 1}") for node in range(3)]
    meeting = SimpleNamespace(
        run="test",
        node=0,
        late=late,
        incarnation=1,
        hub="",
        founding=0,
        devices=[devices.count, 1, 1],
        close=lambda: None,
    )
    introduction = Introduction(cast(Any, meeting), nodes, None, devices.rank)
    its = cast(CpuSide, side) if devices.rank == 0 else None
    worker = NodeWorker(introduction, its, config.timeout_seconds, devices)
    return atoll.Session(config, introduction.place, worker), side
