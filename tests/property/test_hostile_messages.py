"""Whatever comes to a port of a hub, a shard, a node or `atoll link`: it is answered or dropped, and nothing
raises past the parser or the dispatcher.

Peers say Hello as anybody, and then any message of the protocol with any contents, or bytes that are none.
What they say may be a lie, and may cost the one whose name they take; the loops go on, and answer who comes.
The million is a soak test; a part of it runs with the others.
"""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union, cast

import msgspec
import pytest
import torch
from hostile_messages import Draw, FedServer, Maker, drawing, mutated, told_in_a_line
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.chunks import lay_out
from atoll.core.errors import AtollError
from atoll.core.optimizerkind import OptimizerKind
from atoll.cpuside.network import Network
from atoll.hub.decisions import Decisions
from atoll.hub.journal import HubJournal
from atoll.hub.planner import GroupingSettings
from atoll.hub.records import Began
from atoll.hub.service import Hub
from atoll.net.linkserver import LinkServer
from atoll.net.tunnelorder import Inbox, Outbox, TunnelMessage
from atoll.server.records import HandledMessage, Record, encode_header
from atoll.server.shard import Shard
from atoll.server.standby import Standby
from atoll.store.balance import balance
from atoll.store.entries import AnyEntry, decode_entry_untrusted, encode_entry
from atoll.store.members import Membership
from atoll.store.outcomes import StoreError
from atoll.tensors.binding import specs_of
from atoll.tensors.shardoptimizer import full_name
from atoll.wire import messages as m
from atoll.wire import nodes
from atoll.wire.base import WireError
from atoll.wire.device import Begin
from atoll.wire.linkcontrol import AnyControl
from atoll.wire.linkcontrol import decode_untrusted as control_untrusted
from atoll.wire.linkcontrol import encode as encode_control
from atoll.wire.tunnel import Batch, decode_batch_untrusted, encode_batch

RUN = "test"
WORDS = (RUN, "worker", "shard", "hub", "primary", "node", "guest", "site", "paris", "token", "", "")
MOST_KEPT = 2**17  # bytes of 400 messages
PEERS = [b"peer %d" % each for each in range(6)] + [b"gone"]


class Host:
    """Something that serves a port: `turn` is one turn of its loop, and `lives` asks it something."""

    union: Any = m.AnyMessage
    encode: Callable[[Any], bytes] = staticmethod(m.encode)

    def __init__(self, server: FedServer, stack: contextlib.ExitStack) -> None:
        self.server = server
        stack.callback(server.close)

    def turn(self) -> None:
        raise NotImplementedError

    def question(self) -> list[Any]:
        raise NotImplementedError

    def lives(self) -> None:
        peer = b"an honest one"
        self.server.answers.pop(peer, None)
        for each in self.question():
            self.server.feed(peer, self.encode(each))
        self.drain()
        assert self.server.answers.get(peer), "it does not answer"

    def drain(self) -> None:
        for _ in range(10_000):
            self.turn()
            if not self.server.fed:
                return
        raise AssertionError("it does not take what comes")

    def hello(self, maker: Maker) -> list[Any]:
        """What gets a peer past the door, as somebody."""
        role = maker.one_of(("worker", "worker", "shard", "hub", "site", "node", "guest"))
        worker, shard = maker.one_of((0, 1, 2)), maker.one_of((0, 1))
        given: dict[str, Any] = {"role": role, "worker": worker, "shard": shard, "site": "", "address": "a"}
        given |= {"incarnation": maker.one_of((0, 1, 2, 3, 4)), "token": maker.one_of(("", "t", "u"))}
        return [m.Hello(version=m.VERSION, run=RUN, **given)]


class HubHost(Host):
    def __init__(self, stack: contextlib.ExitStack, kind: str, folder: Path | None) -> None:
        super().__init__(FedServer("hub"), stack)
        options: dict[str, Any] = {"ring": {"shards": 0}, "twice": {"shards": 2, "replicas": 2}}.get(
            kind, {"shards": 2}
        )
        sites = {"paris": 1, "berlin": 2} if kind == "sites" else None
        members = Membership(3, 10.0, options["shards"], sites, 0.25, options.get("replicas", 1))
        groups = GroupingSettings(2, "speed", 60.0, True, "asp", 0.0) if kind == "groups" else None
        journal = None
        if folder is not None:
            journal = HubJournal(folder)
            stack.callback(journal.close)
            journal.begin(
                Began(at=0.0, run=RUN, listen="l", address="a", workers=3, shards=options["shards"])
            )
        self.hub = Hub(self.server, members, Decisions(), run=RUN, journal=journal, grouping=groups)
        stack.callback(self.hub.close)

    def turn(self) -> None:
        self.hub.turn(0.0)

    def question(self) -> list[Any]:
        return [m.Hello(version=m.VERSION, run="", role="guest")]


class ShardHost(Host):
    """A shard that is set up by worker 0, and has parameters."""

    def __init__(
        self, stack: contextlib.ExitStack, kind: str, index: int = 0, codec: str = "float32"
    ) -> None:
        super().__init__(FedServer(f"shard {index}"), stack)
        self.shard = Shard(
            index, self.server, run=RUN, workers=2, log_address="tcp://127.0.0.1:1" if index else ""
        )
        stack.callback(self.shard.close)
        parameters = {f"p{each}": nn.Parameter(torch.zeros(each + 200)) for each in range(4)}
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        layout = lay_out(specs_of(parameters, dict.fromkeys(parameters.values(), "0")), chunk_bytes=1024)
        places = balance([each.nbytes for each in layout.chunks], index + 1)
        held = [each for each, place in zip(layout.chunks, places, strict=True) if place == index]
        self.server.feed(b"first", m.encode(self._hello(0, 1)))
        setup = m.Setup(
            digest="d",
            layout=msgspec.Raw(msgspec.msgpack.encode(layout)),
            chunks=[each.id for each in held],
            optimizers=[OptimizerKind(full_name(type(optimizer)), len(optimizer.param_groups))],
            hyperparameters=m.plain_hyperparameters(optimizer.param_groups),
            consistency=kind,
            slack=2,
            workers=2,
            shards=index + 1,
            codec=codec,
        )
        self.server.feed(b"first", m.encode(setup))
        for each in held:
            self.server.feed(
                b"first", m.encode(m.SetChunk(chunk=each.id)), memoryview(bytes(4 * each.extent))
            )
        self.server.feed(b"first", m.encode(m.Ready(digest="d", codec=codec)))
        self.drain()
        assert self.shard.model is not None
        assert self.shard.model.complete

    def _hello(self, worker: int, incarnation: int) -> m.Hello:
        return m.Hello(version=m.VERSION, run=RUN, role="worker", worker=worker, incarnation=incarnation)

    def turn(self) -> None:
        self.shard._turn()

    def question(self) -> list[Any]:
        return [m.Hello(version=m.VERSION, run=RUN, role="worker", worker=1000, incarnation=1)]


class NodeHost(Host):
    """A node's connections to others: what passes them is the node's own to judge (test_hostile_nodes.py)."""

    union = nodes.NodeMessage
    encode = staticmethod(nodes.encode)

    def __init__(self, stack: contextlib.ExitStack) -> None:
        server = FedServer("node 0")
        super().__init__(server, stack)
        self.told: list[Any] = []
        begin = Begin(run=RUN, node=0, incarnation=1, stale_max=1, nodes=4)
        self.network = Network(begin, lambda *line: self.told.append(line))
        stack.callback(self.network.close)
        self.network._server.close()
        self.network._server = server

    def turn(self) -> None:
        self.network.wait(0.0, -1)
        list(self.network.take())

    def _greet(self, node: int, address: str, way: int = 0) -> nodes.Greet:
        return nodes.Greet(
            version=m.VERSION, run=RUN, node=node, incarnation=1, to=0, address=address, life="x", way=way
        )

    def hello(self, maker: Maker) -> list[Any]:
        return [self._greet(maker.one_of((1, 2, 3)), "tcp://127.0.0.1:1", maker.one_of((0, 1)))]

    def question(self) -> list[Any]:
        return [self._greet(0, "tcp://127.0.0.1:1")]  # refused: it is this node's own name


class StandbyHost(Host):
    """A standby, which hears its primary alone; `primary` is one connection of its."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        super().__init__(FedServer("standby"), stack)
        duty = m.Duty(term=1, primary=False, partner=1, address="tcp://127.0.0.1:1")
        welcome = m.Welcome(run=RUN, incarnation=2, replicas=2)
        hub = SimpleNamespace(client=self.server, duty=duty, welcome=welcome, steps=0)
        hub.take = hub.say = lambda *_: None

        def make(meanwhile: Callable[[], object]) -> Shard:
            del meanwhile  # nobody waits here
            return Shard(0, self.server, run=RUN, workers=2)

        self.standby = Standby(0, RUN, self.server, cast(Any, hub), make)
        stack.callback(self.standby.close)

    def turn(self) -> None:
        self.standby._turn()

    def question(self) -> list[Any]:
        return [m.Hello(version=m.VERSION, run=RUN, role="primary", shard=0, incarnation=1)]


class LinkHost(Host):
    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.link = stack.enter_context(LinkServer("tcp://127.0.0.1:0", None))
        self.link._server.close()
        server = FedServer("link server")
        super().__init__(server, stack)
        self.link._server = server

    def turn(self) -> None:
        turns = iter((False, True))
        self.link.serve(lambda: next(turns))

    def question(self) -> list[Any]:
        return [m.Hello(version=m.VERSION, run="", role="link"), m.ReadClock(number=1)]

    def hello(self, maker: Maker) -> list[Any]:
        return self.question()[:1]


HOSTS: dict[str, Callable[[contextlib.ExitStack], Host]] = {
    "hub of a ring": lambda stack: HubHost(stack, "ring", None),
    "hub of shards": lambda stack: HubHost(stack, "served", None),
    "hub of shards held twice": lambda stack: HubHost(stack, "twice", None),
    "hub of groups": lambda stack: HubHost(stack, "groups", None),
    "hub of sites": lambda stack: HubHost(stack, "sites", None),
    "shard, bsp": lambda stack: ShardHost(stack, "bsp"),
    "shard, ssp": lambda stack: ShardHost(stack, "ssp"),
    "shard, asp": lambda stack: ShardHost(stack, "asp"),
    "shard, bfloat16": lambda stack: ShardHost(stack, "asp", codec="bfloat16"),
    "shard without a log": lambda stack: ShardHost(stack, "asp", 1),
    "standby": StandbyHost,
    "node": NodeHost,
    "link server": LinkHost,
}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def attack(host: Host, draw: Draw, count: int) -> None:
    """So many messages of peers that come as anybody, then a question by an honest one."""
    maker = Maker(draw, WORDS)
    for _ in range(count):
        peer = PEERS[draw(0, len(PEERS) - 1)]
        what = draw(0, 11)
        if what == 0:
            for each in host.hello(maker):
                host.server.feed(peer, host.encode(each))
        elif what == 1:
            host.server.feed(peer, bytes(draw(0, 255) for _ in range(draw(0, 40))))
        else:
            raw = host.encode(maker.message(host.union))
            host.server.feed(peer, mutated(draw, raw) if what < 4 else raw, maker.payload())
        if len(host.server.fed) > 100:
            host.drain()
    host.drain()


@pytest.mark.parametrize("name", list(HOSTS))
def test_a_flood_of_lies_ends_nothing(name: str, stack: contextlib.ExitStack) -> None:
    host = HOSTS[name](stack)
    host.lives()
    for seed in range(3):
        attack(host, drawing(seed), 250)
        host.lives()


@pytest.mark.check
@pytest.mark.parametrize("name", list(HOSTS))
def test_lies_are_not_kept(name: str, stack: contextlib.ExitStack) -> None:
    """What it has taken of them is bounded: the second half leaves as much as the first has, and no more."""
    host, kept = HOSTS[name](stack), list[int]()
    tracemalloc.start()
    try:
        for seed in range(4):
            attack(host, drawing(seed), 200)
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept[3] - kept[1] < MOST_KEPT, kept


@pytest.mark.soak
@pytest.mark.parametrize("name", list(HOSTS))
def test_a_million_lies_end_nothing(name: str, stack: contextlib.ExitStack) -> None:
    for seed in range(100):
        with contextlib.ExitStack() as inner:
            host = HOSTS[name](inner)
            attack(host, drawing(1000 + seed), 1_000_000 // len(HOSTS) // 100 + 1)
            host.lives()


@pytest.mark.parametrize("name", list(HOSTS))
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_few_lies_end_nothing(name: str, data: st.DataObject) -> None:
    with contextlib.ExitStack() as inner:
        host = HOSTS[name](inner)
        attack(host, lambda low, high: data.draw(st.integers(low, high)), 12)
        host.lives()


STREAM = (m.Begin, m.Copy, m.CopyChunk, m.Probe)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_primary_that_lies_ends_its_standby_by_one_line_or_not_at_all(
    count: int, stack: contextlib.ExitStack
) -> None:
    ended = 0
    for seed in range(count):
        with contextlib.ExitStack() as inner:
            host, draw = StandbyHost(inner), drawing(seed)
            host.lives()
            maker, peer = Maker(draw, WORDS), b"an honest one"
            host.server.feed(peer, m.encode(m.Begin(stream="s")))
            raised: AtollError | None = None
            try:
                for _ in range(20):
                    message = maker.message(Union[STREAM])
                    if isinstance(message, m.Copy) and draw(0, 3):
                        record = maker.message(Record)
                        if isinstance(record, HandledMessage):
                            told = msgspec.Raw(m.encode(maker.message(m.AnyMessage)))
                            record = msgspec.structs.replace(record, message=told, role="worker")
                        message = m.Copy(record=msgspec.Raw(encode_header(record)))
                    host.server.feed(peer, m.encode(message), maker.payload())
                host.drain()
                for _ in range(40):
                    host.turn()
            except AtollError as error:
                raised = error
            assert raised is None or told_in_a_line(raised), repr(raised)
            ended += raised is not None
    assert ended > 0


def decoded(draw: Draw, raw: bytes, decode: Callable[[bytes], Any]) -> Any:
    """What a parser makes of bytes; None where it refuses them, in a line."""
    made = None
    line = ""
    try:
        made = decode(raw)
    except (WireError, StoreError) as error:
        line = str(error)
    assert len(line.splitlines()) < 2
    assert len(line) < 1000
    return made


PARSERS: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "messages": (m.AnyMessage, m.encode, m.decode_untrusted),
    "nodes": (nodes.NodeMessage, nodes.encode, nodes.decode_untrusted),
    "link control": (AnyControl, encode_control, control_untrusted),
    "the log's lines": (AnyEntry, encode_entry, decode_entry_untrusted),
    "a tunnel's batches": (Union[Batch, None], encode_batch, decode_batch_untrusted),
}


@pytest.mark.parametrize("name", list(PARSERS))
def test_parsers_refuse_in_a_line_or_give_a_message(name: str) -> None:
    union, encode, decode = PARSERS[name]
    draw = drawing(1)
    maker = Maker(draw, WORDS)
    whole = 0
    for _ in range(1500):
        made = maker.message(union)
        raw = encode(made) if made is not None else b""
        whole += decoded(draw, raw, decode) is not None
        decoded(draw, mutated(draw, raw), decode)
        decoded(draw, bytes(draw(0, 255) for _ in range(draw(0, 60))), decode)
    assert whole > 100, "nothing that was made is a message"


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=200))
def test_parsers_take_any_bytes(raw: bytes) -> None:
    for _, _, decode in PARSERS.values():
        decoded(drawing(0), raw, decode)


def test_batches_of_a_tunnel_that_make_no_sense_end_the_session_in_a_line() -> None:
    draw = drawing(0)
    maker = Maker(draw, WORDS)
    lines = []
    for _ in range(100):
        inbox, outbox, kind = Inbox(2**20), Outbox(), msgspec.inspect.type_info(Batch)
        outbox.put(TunnelMessage(b"header", None))
        outbox.take(1)
        with contextlib.suppress(WireError):
            for _ in range(20):
                batch = decoded(draw, encode_batch(maker.value(kind, 0)), decode_batch_untrusted)
                try:
                    if batch is not None:
                        outbox.handle_taken(batch.taken)
                        inbox.handle_batch(batch)
                    number, payload = maker.one_of((0, 1, 2, 7, 2**31)), maker.payload() or memoryview(b"")
                    inbox.handle_payload(number, payload, None)
                    for each in inbox.in_order():
                        inbox.handle_taken(each)
                except WireError as error:
                    lines.append(str(error))
                    raise
    assert lines
    assert all(len(each.splitlines()) == 1 for each in lines)
