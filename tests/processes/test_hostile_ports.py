"""Ports of a whole run, over real sockets: hub, shard, the shards of sites, and nodes' CPU sides.

Whoever is let in says anything to each; the run goes on, and answers who comes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_nodes import FakeRun

from atoll.hub.decisions import read_decisions
from atoll.net.endpoint import Client
from atoll.wire import messages as m
from atoll.wire import nodes
from atoll.wire.peers import AskJoin, ScriptsDiffer
from atoll.wire.peerviews import Accept, Prepare, ViewDecided
from support.served import RUN, ServedRun

sys.path.insert(0, str(Path(__file__).parents[1] / "property"))
from hostile_messages import Maker, drawing, mutated

DEADLINE = 60.0  # seconds
# By these a worker that is trusted ends a run, and a node becomes a member, which then may.
STEERS = (m.Mismatch, AskJoin)
# By these a node that is a member ends a run, or says who is in it. Who has only greeted says them in vain.
OF_MEMBERS = (ScriptsDiffer, ViewDecided, Prepare, Accept)


def answer(client: Client, message: bytes, what: str, *, decode: Callable[[bytes], Any]) -> Any:
    """What is answered to a message."""
    client.send(message)
    end = time.monotonic() + DEADLINE
    while (got := client.receive(0.2)) is None:
        assert time.monotonic() < end, f"{what} does not answer"
    return decode(got[0])


def hello(role: str, worker: int = -1, incarnation: int = 0, run: str = RUN) -> bytes:
    return m.encode(
        m.Hello(version=m.VERSION, run=run, role=role, worker=worker, incarnation=incarnation, token="liar")
    )


def flood(
    address: str, seed: int, count: int, first: Callable[[Maker], bytes], union: Any, encode: Any
) -> None:
    """`count` messages on a few connections, each of which has said `first`."""
    draw = drawing(seed)
    maker = Maker(draw, (RUN, "worker", "paris"))
    clients = [Client(address, None, limit=2**24, name="a port") for _ in range(4)]
    try:
        for client in clients:
            client.send(first(maker))
        for number in range(count):
            client = clients[number % 4]
            message = maker.message(union)
            while isinstance(message.body if isinstance(message, nodes.Word) else message, STEERS):
                message = maker.message(union)
            if union is nodes.NodeMessage and draw(0, 3) == 0:  # the same, of who is no member
                message = nodes.Word(body=maker.message(maker.one_of(OF_MEMBERS)))
            raw = encode(message)
            client.send(mutated(draw, raw) if draw(0, 3) == 0 else raw, maker.payload())
            while client.receive(0) is not None:
                pass
        time.sleep(0.2)  # what is on its way when a connection is dropped does not arrive
    finally:
        for client in clients:
            client.close()


def test_a_run_of_sites_outlives_what_is_said_at_its_ports(tmp_path: Path) -> None:
    with ServedRun(2, sites={"paris": 1, "berlin": 1}, site_timeout=10.0, folder=tmp_path) as served:
        said = " ".join(each.reason for each in read_decisions(tmp_path))
        ports = {"the hub": served.address, "a shard": said.partition("shard 0 is at ")[2].split()[0]}
        ports["a site"] = said.partition("its shard is at ")[2].split()[0]
        for seed, (name, address) in enumerate(ports.items()):
            flood(
                address,
                seed,
                600,
                lambda maker: hello(maker.one_of(("worker", "shard", "hub", "site")), 0, 1),
                m.AnyMessage,
                m.encode,
            )
            with Client(address, None, limit=2**24, name=name) as client:
                answer(client, hello("guest", run=""), name, decode=m.decode_untrusted)
        assert served.failures == []


@pytest.mark.parametrize("seed", [0, 1])
def test_nodes_outlive_what_is_said_at_their_ports(seed: int) -> None:
    with FakeRun(2, stale_max=1) as run:
        run.train(3)
        flood(
            run.nodes[0].place.address,
            seed,
            800,
            lambda maker: nodes.encode(
                nodes.Greet(
                    version=m.VERSION,
                    run="test",
                    node=maker.one_of((2, 3)),
                    incarnation=1,
                    to=0,
                    address="tcp://127.0.0.1:1",
                    life="liar",
                )
            ),
            nodes.NodeMessage,
            nodes.encode,
        )
        run.train(6)
        run.assert_equal()
