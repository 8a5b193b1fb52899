"""Nodes whose workers only say what a session would: real CPU sides, in processes of their own.

A fork server imports torch once; each CPU side is a fork of it, so that a case costs no import.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import msgspec
import pytest
import torch
from shard_cluster import Model
from torch import Tensor, nn

from atoll.core import points
from atoll.core.errors import RunError
from atoll.cpuside import main as cpu_side
from atoll.exchange.hostmemory import HostMemory, plan_memory, slots_for
from atoll.tensors.shardoptimizer import full_name
from atoll.train.sync.peersstart import CpuSide
from atoll.wire import device as d

DEADLINE = 60.0  # seconds
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["atoll.cpuside.process", "torch._dynamo"])


def _serve(link: socket.socket, parent: int, kill: Kill | None, prelude: Callable[[], None] | None) -> None:
    if prelude is not None:
        prelude()
    if kill is not None:

        def strike(point: str, iteration: int) -> None:
            if point == kill.point and iteration >= kill.iteration:
                os.kill(os.getpid(), signal.SIGKILL)

        points.install(strike)
    os._exit(cpu_side.serve(link.detach(), parent))


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a CPU side at a point of its code (core/points.py), in this iteration or later."""

    point: str
    iteration: int


class _Forked:
    """A process of the fork server's, as peersstart.Process."""

    def __init__(
        self, link: socket.socket, kill: Kill | None = None, prelude: Callable[[], None] | None = None
    ) -> None:
        given = link, os.getpid(), kill, prelude
        self._process: BaseProcess = _context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("the CPU side", timeout)
        return status

    def kill(self) -> None:
        self._process.kill()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class FakeNode:
    """A node whose worker is driven from the test. `now` goes on with `advance`. Its CPU side calls
    `prelude`, a function of a module, before anything else."""

    def __init__(
        self,
        node: int,
        *,
        stale_max: int = 0,
        incarnation: int = 0,
        kill: Kill | None = None,
        prelude: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        self.node, self.stale_max = node, stale_max
        self.model = Model(sgd, 1)
        self.cpu = CpuSide(node, partial(_Forked, kill=kill, prelude=prelude))
        self.told: list[d.Notice] = []
        self.applied: list[d.Applied] = []
        self.met: dict[int, d.Met] = {}
        self.views: list[d.Members] = []
        self.figures = d.Figures()
        self.waiting = ""
        self.ready: d.Ready | None = None
        self.returned: list[d.Returned] = []
        self.states: list[d.State] = []
        self.left = False
        self.sleeps, self.left_out = False, False  # it does not say that it is awake; the others go on
        self.published: list[d.Published] = []
        self.taken = 0  # the global iteration of `parameters`
        self.parameters: dict[int, Tensor] = {}
        self.freed, self.iteration, self.meeting = 0, 0, 0
        self.computed_at: list[int] = []  # the staleness of each iteration
        self._wanted = -1
        self.capture: list[int] = []
        self.script_size = 0  # bytes of the script's state beyond a few
        self.place = d.NodeAt(node, incarnation, "")
        begin = d.Begin(run="test", node=node, incarnation=incarnation, stale_max=stale_max, **options)
        self.cpu.send(begin)
        message, _ = self.cpu.await_message(DEADLINE, "its address")
        assert isinstance(message, d.Listening)
        self.place = d.NodeAt(node, incarnation, message.address)

    def introduce(self, places: Sequence[d.NodeAt], *, late: bool = False, known_from: str = "") -> None:
        self.cpu.send(d.Introduce(nodes=list(places), late=late, known_from=known_from))

    def set_up(self, *, digest: str = "d", number: int = 1, iteration: int = 0) -> None:
        model = self.model
        plan = plan_memory(model.layout, slots_for(self.stale_max))
        self.memory = HostMemory.create(plan)
        for chunk, flat in self.memory.buffer(0).items():
            flat.copy_(model.flat(chunk))
        setup = d.SetUp(
            number=number,
            digest=digest,
            layout=msgspec.Raw(msgspec.msgpack.encode(model.layout)),
            optimizer=full_name(type(model.plain)),
            hyperparameters=model.hyperparameters(),
            slots=plan.slots,
            buffers=plan.buffers,
            iteration=iteration,
        )
        self.ready, self.freed, self.taken, self._wanted = None, iteration, 0, -1
        self.published.clear()
        self.cpu.send(setup, [self.memory.fd])

    @property
    def incarnation(self) -> int:
        """The one that it is a member as."""
        if self.returned:
            return self.returned[-1].incarnation
        return self.ready.incarnation if self.ready is not None else -1

    # -- iterations ---------------------------------------------------------------------------------------

    def gradient(self, chunk: int, iteration: int) -> Tensor:
        """This node's gradient of a chunk: a function of node and iteration alone."""
        return gradient_of(self.model, self.node, chunk, iteration)

    def pump(self, timeout: float = 0.0) -> None:
        """Take what the CPU side has said."""
        while (got := self.cpu.receive(timeout)) is not None:
            message, descriptors = got
            assert not descriptors
            self._take(message)
            timeout = 0.0

    def _take(self, message: d.DeviceMessage) -> None:
        lists: dict[type, list[Any]] = {
            d.Notice: self.told, d.Applied: self.applied, d.Members: self.views, d.Published: self.published,
            d.Returned: self.returned, d.State: self.states,
        }  # fmt: skip
        if isinstance(message, d.Published):
            self.release(self.published)  # it looks at the newest alone, so the others are free
        if type(message) in lists:
            lists[type(message)].append(message)
        if isinstance(message, d.Ready):
            self.ready, self.iteration, self.meeting = message, message.iteration, message.meeting
        elif isinstance(message, d.Freed):
            self.freed = message.before
        elif isinstance(message, d.Met):
            self.met[message.number] = message
        elif isinstance(message, d.Figures):
            self.figures = message
        elif isinstance(message, d.Waiting):
            self.waiting = message.what
        elif isinstance(message, d.CaptureAt):
            self.capture.append(message.iteration)
        elif isinstance(message, d.Left):
            self.left = True
        elif isinstance(message, d.LeftOut):
            self.left_out = True
            if not self.sleeps:
                self.cpu.send(d.Awake())
        elif isinstance(message, d.Returned):
            self.iteration, self.meeting, self._wanted = message.iteration, message.meeting, -1
            self.release(self.published)
            self.taken = 0
            self.cpu.send(d.Resumed(incarnation=message.incarnation))

    def release(self, published: list[d.Published]) -> None:
        if published:
            self.cpu.send(d.Release(buffers=[each.buffer for each in published]))
            published.clear()

    def take_newest(self) -> None:
        """As a worker at an iteration's start."""
        if self.published:
            newest = self.published[-1]
            self.taken = newest.taken
            self.parameters = {
                chunk: flat.clone() for chunk, flat in self.memory.buffer(newest.buffer).items()
            }
            self.release(self.published)

    def advance(self, until: int) -> bool:
        """Make the next iteration, if it is before `until` and may begin; whether it was made."""
        self.pump()
        if self.ready is None or self.iteration >= until:
            return False
        self.take_newest()
        k = self.iteration
        if not self.parameters or k - self.taken > self.stale_max:
            if self._wanted != k:
                self._wanted = k
                self.cpu.send(d.Want(iteration=k, least=max(0, k - self.stale_max)))
            return False
        if k - self.memory.plan.slots >= self.freed:
            return False
        if k in self.capture:
            self.capture.remove(k)
            script = b"script of %d at %d" % (self.node, k) + bytes(self.script_size)
            self.cpu.send(d.Captured(iteration=k, script=script, meeting=self.meeting))
        self.contribute()
        return True

    def contribute(self) -> None:
        k = self.iteration
        self.computed_at.append(k - self.taken)
        for chunk, flat in self.memory.gradients(k).items():
            flat.copy_(self.gradient(chunk, k))
        self.cpu.send(
            d.Contribute(
                iteration=k,
                taken=self.taken,
                samples=float(self.node + 1),
                weight=float(self.node + 1),
                present=[bytes([1] * self.model.slots(chunk)) for chunk in self.model.chunks],
                hyperparameters=self.model.hyperparameters(),
                note=b"note of %d" % self.node,
            )
        )
        self.iteration += 1

    def meet(self, what: str, payload: bytes) -> int:
        number, self.meeting = self.meeting, self.meeting + 1
        self.cpu.send(d.Meet(number=number, what=what, payload=payload, at=self.iteration))
        return number

    def close(self) -> None:
        self.cpu.close()


def gradient_of(model: Model, node: int, chunk: int, iteration: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + node + 100 * chunk + 10_000 * iteration)
    flat = torch.zeros(model.layout.chunks[chunk].extent)
    for slot in model.layout.chunks[chunk].slots:
        values = torch.randn(slot.numel, generator=generator)
        flat[slot.offset : slot.offset + slot.numel] = values
    return flat


class FakeRun:
    """Nodes 0 to `count` - 1, introduced to one another and set up."""

    def __init__(
        self,
        count: int,
        *,
        stale_max: int = 0,
        set_up: bool = True,
        kills: Mapping[int, Kill] | None = None,
        preludes: Mapping[int, Callable[[], None]] | None = None,
        addresses: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.nodes: list[FakeNode] = []
        try:
            for node in range(count):
                kill = (kills or {}).get(node)
                if addresses:  # where the others are to find it
                    options["address"] = addresses[node]
                prelude = (preludes or {}).get(node)
                self.nodes.append(FakeNode(node, stale_max=stale_max, kill=kill, prelude=prelude, **options))
            for each in self.nodes:
                each.introduce(self.places)
            if set_up:
                for each in self.nodes:
                    each.set_up()
                self.until(lambda: all(each.ready for each in self.nodes), "all are ready")
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> list[d.NodeAt]:
        return [each.place for each in self.nodes]

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for each in self.nodes:
            each.close()

    def introduce_late(self, node: FakeNode) -> None:
        """A node begins to come into the run."""
        self.nodes.append(node)
        node.introduce(self.places, late=True)
        node.set_up()

    def train_until_all_are_in(self) -> None:
        end = time.monotonic() + DEADLINE
        while any(each.ready is None for each in self.nodes):
            assert time.monotonic() < end, [each.told[-3:] for each in self.nodes]
            for each in self.nodes:
                each.advance(each.iteration + 1)
            time.sleep(0.001)

    def train_until_killed(self, who: FakeNode, makers: Sequence[FakeNode] | None = None) -> None:
        """Those of `makers` (all) who may begin make iterations until the CPU side of `who` has died."""
        line = rf"\(process {who.cpu.pid}\) was killed by SIGKILL"
        with pytest.raises(RunError, match=line):
            self._train_on(self.nodes if makers is None else makers)
        who.close()
        self.nodes.remove(who)

    def _train_on(self, makers: Sequence[FakeNode]) -> None:
        end = time.monotonic() + DEADLINE
        while True:
            assert time.monotonic() < end, [(each.iteration, each.waiting) for each in self.nodes]
            for each in self.nodes:
                each.advance(each.iteration + (each in makers))
            time.sleep(0.001)

    def members(self) -> list[FakeNode]:
        """Those who are in the newest view that anyone knows of."""
        newest = max(
            (view for each in self.nodes for view in each.views[-1:]),
            key=lambda view: view.view,
            default=None,
        )
        if newest is None:
            return list(self.nodes)
        lives = {(each.node, each.incarnation) for each in newest.members}
        return [each for each in self.nodes if each.ready and (each.node, each.incarnation) in lives]

    @property
    def furthest(self) -> int:
        """The most iterations that anyone has made."""
        return max(each.iteration for each in self.nodes)

    def assert_equal(self) -> None:
        """All have the same bits."""
        one, *others = self.nodes
        for other in others:
            for chunk, flat in one.parameters.items():
                assert torch.equal(flat, other.parameters[chunk]), (one.node, other.node, chunk)

    def until(self, condition: Callable[[], bool], what: str, who: Sequence[FakeNode] | None = None) -> None:
        """Until the condition holds; `who` (all) are heard meanwhile."""
        who = self.nodes if who is None else who
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, (
                what,
                [(each.iteration, each.taken, each.waiting) for each in who],
            )
            for each in who:
                each.pump()
            time.sleep(0.001)

    def train(self, until: int, who: Sequence[FakeNode] | None = None) -> None:
        """All of `who` make their iterations before `until`, and see them applied."""
        who = self.nodes if who is None else who
        end = time.monotonic() + DEADLINE
        while any(each.iteration < until for each in who):
            made = [each.advance(until) for each in who]
            if not any(made):
                time.sleep(0.001)
            states = [(each.node, each.iteration, each.taken, each.freed, each.waiting) for each in who]
            assert time.monotonic() < end, states
        for each in who:
            each.cpu.send(d.Want(iteration=until, least=until))
        self.until(
            lambda: all(each.published and each.published[-1].taken >= until for each in who),
            "all applied",
            who,
        )
        for each in who:
            each.take_newest()


def plain(
    model: Model, iterations: int, members: Callable[[int], Sequence[int]], first: int = 0
) -> dict[int, Tensor]:
    """What plain PyTorch makes of the nodes' gradients from iteration `first` on: each chunk's parameters
    after those below `iterations`."""
    flats = {chunk: nn.Parameter(model.flat(chunk)) for chunk in model.chunks}
    optimizer = sgd(list(flats.values()))
    for k in range(first, iterations):
        nodes = members(k)
        total = sum(node + 1.0 for node in nodes)
        for chunk, parameter in flats.items():
            shares = [gradient_of(model, node, chunk, k) * ((node + 1.0) / total) for node in nodes]
            parameter.grad = torch.stack(shares).sum(0)
        optimizer.step()
    return {chunk: parameter.detach() for chunk, parameter in flats.items()}
