"""The connections between nodes' CPU sides, over loopback: real sockets, all in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from atoll.core.errors import UserError
from atoll.cpuside.network import Arrived, Met, Network
from atoll.net.endpoint import Client
from atoll.net.keys import Keys, make_keys
from atoll.wire import nodes as w
from atoll.wire.base import VERSION
from atoll.wire.device import Begin, NodeAt
from atoll.wire.peers import AskJoin, Key
from atoll.wire.peerviews import Life

DEADLINE = 20.0  # seconds


def keys_of(keys: Keys) -> list[str]:
    return [keys.server_public, keys.server_secret, keys.client_public, keys.client_secret]


class Some:
    """Several nodes' networks, that are polled together."""

    def __init__(self) -> None:
        self.networks: list[Network] = []
        self.got: list[list[Arrived]] = []
        self.met: list[list[Met]] = []
        self.told: list[list[tuple[str, str, str]]] = []

    def add(self, node: int, incarnation: int = 0, **options: Any) -> Network:
        told: list[tuple[str, str, str]] = []
        begin = Begin(run=options.pop("run", "r"), node=node, incarnation=incarnation, stale_max=0, **options)
        self.networks.append(Network(begin, lambda *line: told.append(line)))
        self.got.append([])
        self.met.append([])
        self.told.append(told)
        return self.networks[-1]

    def introduce(self) -> None:
        places = [NodeAt(each.node, each.incarnation, each.address) for each in self.networks]
        for network in self.networks:
            for place in places:
                network.link_to(place)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, (what, self.told)
            for network, got, met in zip(self.networks, self.got, self.met, strict=True):
                network.wait(0.005, -1)
                for one in network.take():
                    (met if isinstance(one, Met) else got).append(one)  # type: ignore[arg-type]

    def all_up(self) -> bool:
        pairs = [(one, other) for one in self.networks for other in self.networks if one is not other]
        return all(one.is_up(other.node) for one, other in pairs)

    def refusal(self, index: int, text: str) -> None:
        self.until(lambda: any(text in line for line in self.networks[index].refusals()), text)
        (line,) = [line for line in self.networks[index].refusals() if text in line]
        assert "\n" not in line


@pytest.fixture
def some() -> Iterator[Some]:
    made = Some()
    yield made
    for network in made.networks:
        network.close()


@pytest.mark.parametrize("secured", [False, True])
def test_words_and_chunks_reach_all_others(some: Some, secured: bool) -> None:
    keys = keys_of(make_keys()) if secured else []
    for node in range(3):
        some.add(node, keys=keys)
    some.introduce()
    some.until(some.all_up, "connections")
    chunk = memoryview(bytes(range(256)) * 4096)
    for network in some.networks:
        for other in {0, 1, 2} - {network.node}:
            network.say(other, AskJoin(node=network.node, token="t", address=""))
            piece = w.Piece(key=Key("iterations", 4, Life(network.node, 0)), chunk=2)
            network.send_chunk(other, piece, chunk)
    some.until(lambda: all(len(got) == 4 for got in some.got), "four messages each")
    for node, got in enumerate(some.got):
        words = [each for each in got if isinstance(each.message, w.Word)]
        assert sorted(each.node for each in words) == sorted({0, 1, 2} - {node})
        for each in words:
            assert isinstance(each.message, w.Word)
            assert each.message.body == AskJoin(node=each.node, token="t", address="")
        for each in got:
            if isinstance(each.message, w.Piece):
                assert each.payload == chunk
                assert each.message.key.life.node == each.node
    assert not any(network.refusals() for network in some.networks)
    assert all(network.counts.bytes_in >= 2 * len(chunk) for network in some.networks)


def test_a_connection_that_broke_comes_up_again(some: Some) -> None:
    one, other = some.add(0), some.add(1)
    some.introduce()
    some.until(some.all_up, "connections")
    before = len([each for each in some.met[0] if each.up])
    address = other.address
    other.close()
    some.networks.pop(), some.got.pop(), some.met.pop(), some.told.pop()
    some.until(lambda: not one.is_up(1), "the loss is noticed")
    some.add(1, 1, listen=address)  # the node comes back, as another incarnation, where it was
    some.networks[1].link_to(NodeAt(0, 0, one.address))
    some.until(lambda: one.is_up(1) and some.networks[1].is_up(0), "connections")
    assert [each.node.incarnation for each in some.met[0] if not each.up] == [0, 1]
    assert len([each for each in some.met[0] if each.up]) > before
    assert one.nodes == [NodeAt(1, 1, some.networks[1].address)]


def test_a_connection_that_is_made_again_takes_the_earlier_one_s_place(some: Some) -> None:
    """What is known of who has greeted stays as much, however often connections break."""
    one, other = some.add(0), some.add(1)
    some.introduce()
    some.until(some.all_up, "connections")
    known = len(one._guests)
    for _ in range(5):
        other.drop_unsent(0)  # the connection for chunks is another one
        assert not other.is_up(0)
        some.until(some.all_up, "connections")
    assert len(one._guests) == known == 2
    other.send_chunk(0, w.Piece(key=Key("iterations", 0, Life(1, 0)), chunk=0), b"x")
    other.say(0, AskJoin(node=1, token="t", address=""))
    some.until(lambda: len(some.got[0]) == 2, "both ways are heard")


def test_who_comes_back_elsewhere_is_found_there(some: Some) -> None:
    one, other = some.add(0), some.add(1)
    some.introduce()
    some.until(some.all_up, "connections")
    anew = some.add(1, 1)
    anew.link_to(NodeAt(0, 0, one.address))
    some.until(lambda: one.is_up(1) and anew.is_up(0), "connections")
    assert one.nodes == [NodeAt(1, 1, anew.address)]
    one.say(1, AskJoin(node=0, token="one", address=""))
    other.say(0, AskJoin(node=1, token="other", address=""))  # of a life that is over
    anew.say(0, AskJoin(node=1, token="anew", address=""))
    some.until(lambda: bool(some.got[0]) and bool(some.got[2]), "words")
    assert [each.message.body.token for each in some.got[0]] == ["anew"]  # type: ignore[union-attr]


def test_another_run_is_refused(some: Some) -> None:
    one = some.add(0)
    some.add(1, run="another").link_to(NodeAt(0, 0, one.address))
    some.refusal(1, f"node 0 at {one.address} refused: this is run 'r', not 'another'")


def test_two_nodes_with_one_name_are_refused(some: Some) -> None:
    one = some.add(0)
    some.add(1).link_to(NodeAt(0, 0, one.address))
    some.until(lambda: some.networks[1].is_up(0), "connections")
    some.add(1).link_to(NodeAt(0, 0, one.address))
    some.refusal(2, "refused: two nodes with the name 1: the other one is at")
    assert some.networks[1].is_up(0)
    assert not some.networks[1].refusals()


def test_another_model_is_refused(some: Some) -> None:
    one, other = some.add(0), some.add(1)
    one.set_up("x", 1)
    other.set_up("y", 1)
    other.link_to(NodeAt(0, 0, one.address))
    some.refusal(1, "it trains another model")


def test_who_is_set_up_later_is_known_to_train_another(some: Some) -> None:
    one, other = some.add(0), some.add(1)
    some.introduce()
    some.until(some.all_up, "connections")
    one.set_up("x", 1)
    other.set_up("y", 1)
    some.until(lambda: one.trains(1) == ("y", 1) and other.trains(0) == ("x", 1), "what they train")


def test_what_a_node_trains_is_known_to_who_greets_late(some: Some) -> None:
    """It is set up while nobody has answered its Greet yet."""
    one, other = some.add(0), some.add(1)
    other.link_to(NodeAt(0, 0, one.address))
    end = time.monotonic() + DEADLINE
    while not one.nodes:  # it alone is polled: it greets back, and is not answered
        assert time.monotonic() < end
        one.wait(0.005, -1)
        list(one.take())
    one.set_up("x", 1)
    some.until(lambda: other.trains(0) == ("x", 1), "what it trains")


def test_a_wrong_key_is_refused(some: Some) -> None:
    one = some.add(0, keys=keys_of(make_keys()))
    some.add(1, keys=keys_of(make_keys())).link_to(NodeAt(0, 0, one.address))
    some.refusal(1, f"node 0 at {one.address} refuses this key")
    some.add(2).link_to(NodeAt(0, 0, one.address))
    some.refusal(2, f"node 0 at {one.address} wants a key")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"\xc1", "no message of this protocol"),
        (w.encode(w.Word(body=AskJoin(node=1, token="", address=""))), "say Greet first"),
        (
            w.encode(w.Greet(version=VERSION + 1, run="r", node=1, incarnation=0, to=0, address="", life="")),
            f"protocol version {VERSION + 1}, and this is version {VERSION}",
        ),
        (
            w.encode(w.Greet(version=VERSION, run="r", node=1, incarnation=0, to=3, address="", life="")),
            "this is node 0, not node 3",
        ),
        (
            w.encode(w.Greet(version=VERSION, run="r", node=0, incarnation=0, to=0, address="", life="")),
            "two nodes with the name 0",
        ),
    ],
)
def test_strangers_are_refused_with_a_line(some: Some, header: bytes, reason: str) -> None:
    one = some.add(0)
    answers: list[bytes] = []
    with Client(one.address, None, limit=2**20, name="node 0") as stranger:
        stranger.send(header)

        def answered() -> bool:
            got = stranger.receive(0)
            answers.extend([got[0]] if got is not None else [])
            return bool(answers)

        some.until(answered, "an answer")
    refused = w.decode_untrusted(answers[0])
    assert isinstance(refused, w.Refused)
    assert refused.reason.startswith(reason)
    assert one.counts.refused == 1
    assert not some.got[0]


def test_an_address_in_use_is_named(some: Some) -> None:
    one = some.add(0)
    with pytest.raises(UserError, match="another process listens at"):
        some.add(1, listen=one.address)


NO_ADDRESSES = {
    "rubbish": "no address",
    "": "no address",
    "tcp://": "no address",
    "tcp://127.0.0.1": "no address",
    "tcp://127.0.0.1:99999": "no address",
    "tcp://127.0.0.1:0": "no port",
    "tcp://127.0.0.1:*": "no port",
    "tcp://127.0.0.1:80;tcp://127.0.0.1:81": "no address",
    "tcp://127.0.0.1\n:80": "no address",
    "tcp://10.1.2.3:80": "another machine",
    "tcp://node.example:80": "another machine",
    "ipc:///run/somebody.sock": "no path beside",
    "inproc://zeromq.zap.01": "no address",
    "udp://127.0.0.1:80": "no address",
    "pgm://127.0.0.1;239.0.0.1:80": "no address",
    "x" * 256: "no address",
}


def a_greeting(**changes: Any) -> bytes:
    usual: dict[str, Any] = {"run": "r", "node": 1, "incarnation": 9, "to": 0, "life": "x"}
    place = {"address": "tcp://127.0.0.1:9"}
    return w.encode(w.Greet(version=VERSION, **{**usual, **place, **changes}))


def heard(some: Some, client: Client) -> w.NodeMessage:
    """The answer to a greeting."""
    answers: list[w.NodeMessage] = []

    def hear() -> bool:
        if (got := client.receive(0)) is not None:
            answers.append(w.decode_untrusted(got[0]))
        return bool(answers)

    some.until(hear, "no answer came")
    return answers[0]


def test_a_greeting_with_an_address_where_no_node_can_be_is_refused_in_a_line(some: Some) -> None:
    network = some.add(0, nodes=4)
    with Client(network.address, None, limit=2**20, name="node 0") as client:
        for address, reason in NO_ADDRESSES.items():
            client.send(a_greeting(address=address))
            answer = heard(some, client)
            assert isinstance(answer, w.Refused), address
            assert reason in answer.reason, address
            assert "\n" not in answer.reason
        for changes in ({"node": 4}, {"node": 2**53 - 1}, {"way": 2}, {"way": 2**53 - 1}):
            client.send(a_greeting(**changes))
            assert isinstance(heard(some, client), w.Refused), changes
        assert network.nodes == []
        client.send(a_greeting())
        assert isinstance(heard(some, client), w.Greeted)
        assert [each.node for each in network.nodes] == [1]


def test_a_view_that_names_no_address_makes_no_connection_and_says_so_once(some: Some) -> None:
    network = some.add(0, nodes=4)
    for address, reason in NO_ADDRESSES.items():
        network.link_to(NodeAt(1, 1, address))
        assert not network.is_up(1)
        assert not network.is_deaf(1)
        assert reason in network.trouble(1)
        network.drop_unsent(1)
        network.send(1, w.Trains(digest="d", number=1))
        list(network.take())
        (line,) = [refusal for refusal in network.refusals() if reason in refusal]
        assert "\n" not in line
    network.link_to(NodeAt(7, 1, "tcp://127.0.0.1:9"))
    assert "no node 7" in network.trouble(7)
    other = some.add(1, nodes=4)
    some.introduce()  # by its right address it is reached
    some.until(lambda: network.is_up(1) and other.is_up(0), "the nodes do not reach each other")


def test_an_incarnation_that_nobody_has_given_takes_no_place(some: Some) -> None:
    one, other = some.add(0), some.add(1)
    some.introduce()
    some.until(some.all_up, "connections")
    thief = some.add(1, incarnation=2**53 - 1)
    thief.link_to(NodeAt(0, 0, one.address))
    some.refusal(2, "node 1 says that it is incarnation 9007199254740991, and 0 is here: they are counted")
    assert one.is_up(1)
    assert [each.address for each in one.nodes] == [other.address]
