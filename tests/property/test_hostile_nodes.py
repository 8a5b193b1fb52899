"""What a node makes of what other nodes say: of any type, in any order, with anything inside.

Who has greeted and is no member ends nothing. A member may end the run, by the few words that are for that,
and then with one line; it makes no node raise anything else, and no node's memory grow.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec
import pytest
import torch
from hostile_messages import Draw, FedServer, Liar, Maker, drawing, mutated, told_in_a_line
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.chunks import lay_out
from atoll.core.errors import AtollError
from atoll.cpuside.process import CpuSideProcess
from atoll.exchange.hostmemory import HostMemory, plan_memory, slots_for
from atoll.net.post import Post
from atoll.tensors.binding import specs_of
from atoll.tensors.shardoptimizer import full_name
from atoll.wire import device as d
from atoll.wire import nodes as n
from atoll.wire import peers as p
from atoll.wire import peerviews as v
from atoll.wire.base import VERSION
from atoll.wire.messages import plain_hyperparameters

RUN, DIGEST, STALE, CODEC = "test", "d", 1, "bfloat16"
MEMBERS, STRANGER = 3, 3  # nodes 0 to 2 are members, and node 3 is none
WORDS = (RUN, DIGEST, "session.save", "tcp://127.0.0.1:1")
# What has a member's node, life and view in it, so that it is more than noise.
LIKELY = (p.NodeReport, p.AskRound, p.AnswerRound, p.EndRound, p.FetchParts, v.Prepare, v.Promised, v.Accept)


class HostileNode:
    """Node 0's CPU side, set up, one of three members; a fourth may greet it, and is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draw: Draw, count: int = MEMBERS) -> None:
        self.draw = draw
        self.maker = Maker(draw, WORDS)
        self.liar = Liar(draw, n.NodeMessage, (n.Greeted, n.Trains, n.Refused), WORDS, encode=n.encode)
        self.liar.lies = False
        monkeypatch.setattr("atoll.cpuside.network.Client", self.liar.connect)
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker, self.heard = Post(there), list[d.DeviceMessage]()
        self.process = CpuSideProcess(Post(here), -1)
        self.server = FedServer("node 0")
        begin = d.Begin(run=RUN, node=0, incarnation=0, stale_max=STALE, nodes=STRANGER + 1, timeout=60.0)
        begin = msgspec.structs.replace(begin, codec=CODEC)
        self.say(begin)
        assert self.process.service is not None
        self.service = self.process.service
        network = self.network = self.service.others.network
        network._server.close()
        network._server = self.server
        places = [d.NodeAt(node, 0, f"tcp://127.0.0.1:{node + 1}") for node in range(count)]
        self.say(d.Introduce(nodes=places))
        for node in range(1, STRANGER + 1):
            self.greet(node)
        self._set_up()
        self.until(lambda: any(isinstance(each, d.Ready) for each in self.heard))

    def greet(self, node: int) -> None:
        greet = n.Greet(
            version=VERSION, run=RUN, node=node, incarnation=0, to=0, address=f"tcp://127.0.0.1:{node + 1}",
            life=str(node), digest=DIGEST if node < STRANGER else "", number=1, codec=CODEC,
        )  # fmt: skip
        self.server.feed(b"node %d" % node, n.encode(greet))

    def _set_up(self) -> None:
        torch.manual_seed(0)
        parameters = {f"p{each}": nn.Parameter(torch.zeros(each + 40)) for each in range(3)}
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
        self.layout = lay_out(specs_of(parameters, dict.fromkeys(parameters.values(), "0")), chunk_bytes=256)
        plan = plan_memory(self.layout, slots_for(STALE))
        self.memory = HostMemory.create(plan)
        self.groups = plain_hyperparameters(optimizer.param_groups)
        setup = d.SetUp(
            number=1, digest=DIGEST, layout=msgspec.Raw(msgspec.msgpack.encode(self.layout)),
            optimizer=full_name(type(optimizer)), hyperparameters=self.groups,
            slots=plan.slots, buffers=plan.buffers, iteration=0,
        )  # fmt: skip
        self.say(setup, [self.memory.fd])

    def say(self, message: d.DeviceMessage, descriptors: Sequence[int] = ()) -> None:
        """The worker says this."""
        self.worker.send(message, descriptors)
        self.turn()

    def turn(self) -> None:
        self.process.turn()
        while (got := self.worker.receive()) is not None:
            self._take(got[0])

    def _take(self, message: d.DeviceMessage) -> None:
        self.heard.append(message)
        del self.heard[:-50]
        if isinstance(message, d.Published):
            self.worker.send(d.Release(buffers=[message.buffer]))
        elif isinstance(message, d.LeftOut):
            self.worker.send(d.Awake())
        elif isinstance(message, d.Returned):
            self.worker.send(d.Resumed(incarnation=message.incarnation))

    def until(self, condition: Any) -> None:
        end = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < end, self.heard[-5:]
            self.turn()

    # -- lies ---------------------------------------------------------------------------------------------

    def lie(self, nodes: Sequence[int], count: int) -> None:
        """So many messages of these nodes."""
        for _ in range(count):
            node = self.maker.one_of(nodes)
            self.server.feed(b"node %d" % node, *self._lie(node))
            if len(self.server.fed) > 60:
                self.drain()
        self.drain()

    def _lie(self, node: int) -> tuple[bytes, memoryview | None]:
        message: Any = self.maker.message(n.NodeMessage)
        while isinstance(message, n.Greet):  # who says who it is: test_hostile_messages.py
            message = self.maker.message(n.NodeMessage)
        what = self.draw(0, 9)
        if what < 5:
            kind = self.maker.one_of(LIKELY if what < 3 else get_args(p.PeerMessage))
            message = n.Word(body=self._plausible(self.maker.message(kind), node))
        raw = n.encode(message)
        return (mutated(self.draw, raw) if what == 9 else raw), self.maker.payload()

    def _plausible(self, message: Any, node: int) -> Any:
        """The same, as the node in its life would say it of the view that there is."""
        view = self.service.stage.view
        number = view.number if view is not None else 0
        changes: dict[str, Any] = {}
        if getattr(message, "report", None) is not None:
            small = [self.draw(0, 3) for _ in range(3)] if self.draw(0, 2) else [2**40, 1, 2**51]
            held = tuple(v.Held(v.Life(each, 0), self.draw(0, 3), self.draw(0, 2)) for each in range(MEMBERS))
            own = held if self.draw(0, 2) else message.report.held
            changes["report"] = v.Report(v.Life(node, 0), number, *small, own)
        if isinstance(message, (v.Prepare, v.Accept)) and view is not None:
            changes["view"] = view
            changes["ballot"] = v.Ballot(self.draw(0, 9), node)
        if isinstance(message, v.Accept) and view is not None and self.draw(0, 1):
            changes["next"] = msgspec.structs.replace(view, number=number + 1)
        if isinstance(message, (v.Promised, v.Accepted, v.Outbid)):
            changes |= {"founding": 0, "view": number}
        return msgspec.structs.replace(message, **changes)

    def drain(self) -> None:
        for _ in range(10_000):
            self.turn()
            if not self.server.fed:
                return
        raise AssertionError("it does not take what comes")

    def lives(self) -> None:
        self.server.answers.pop(b"an honest one", None)
        self.server.feed(b"an honest one", n.encode(n.Trains(digest="", number=0)))
        self.drain()
        assert self.server.answers.get(b"an honest one"), "it does not answer"

    def close(self) -> None:
        self.process.__exit__(None, None, None)
        self.worker.close()
        self.memory.close()
        self.server.close()
        self.liar.close()


@contextlib.contextmanager
def node(monkeypatch: pytest.MonkeyPatch, draw: Draw, count: int = MEMBERS) -> Iterator[HostileNode]:
    with contextlib.closing(HostileNode(monkeypatch, draw, count)) as made:
        yield made


def test_who_is_no_member_ends_nothing_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with node(monkeypatch, drawing(0)) as hostile:
        hostile.lie([STRANGER], 400)
        hostile.lives()
        assert hostile.service.stage.introduced.is_member


@pytest.mark.parametrize("runs", [4, pytest.param(40, marks=pytest.mark.soak)])
def test_members_end_a_run_by_one_line_or_not_at_all(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    ended = 0
    for seed in range(runs):
        with node(monkeypatch, drawing(100 + seed)) as hostile:
            try:
                hostile.lie([1, 2, STRANGER], 60)
                hostile.lives()
            except AtollError as error:
                raised = error
            else:
                continue
            ended += 1
            assert told_in_a_line(raised), repr(raised)
    assert ended < runs, "nothing else was looked at"


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_few_words_of_members(data: st.DataObject) -> None:
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch, node(patch, draw) as hostile:
        raised: AtollError | None = None
        try:
            hostile.lie([1, 2], 8)
        except AtollError as error:
            raised = error
        assert raised is None or told_in_a_line(raised)
