"""What a worker, a shard, a site or the hub does with the lies of those whom it has connected to.

Whoever answers says anything, in any order. A client of theirs may end by it, for the server is the run's
own: but with an error of Atoll's, in one line that can be printed, within its deadline, and by no other one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hostile_messages import FedServer, Liar, drawing, told_in_a_line
from torch import nn

from atoll.chunks import lay_out
from atoll.core.errors import AtollError
from atoll.cpuside.witnesslink import WitnessLink
from atoll.exchange.link import ShardLink
from atoll.net import hubconnection
from atoll.server.links import HubLink, LogLink
from atoll.server.mirror import Mirror
from atoll.server.siteplace import SitePlace
from atoll.tensors.binding import bind_model, specs_of
from atoll.train.gradients.reducer import Calls
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.members import hub_client
from atoll.train.members.hub_client import HubClient
from atoll.train.sync.connection import Connection
from atoll.train.sync.service import parties_of
from atoll.train.sync.serving import serve_alone
from atoll.wire import messages as m

RUN = "test"
WORDS = (RUN, "worker", "shard", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "paris")
SEEDS = range(12)


@pytest.fixture(autouse=True)
def threads_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is raised on a thread is nobody's to catch."""
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    yield
    assert raised == []


@contextlib.contextmanager
def lying(
    monkeypatch: pytest.MonkeyPatch, module: str, seed: int, likely: tuple[type, ...], **options: Any
) -> Iterator[Liar]:
    liar = Liar(drawing(seed), m.AnyMessage, likely, WORDS, encode=m.encode, **options)
    monkeypatch.setattr(f"{module}.Client", liar.connect)
    monkeypatch.setattr("atoll.exchange.link._EXPLAIN_SECONDS", 0.01)
    try:
        yield liar
    finally:
        liar.close()


def tried(*acts: Callable[[], Any]) -> int:
    """Do these; how many of them were done. What they raise is told in a line."""
    done = 0
    for act in acts:
        raised: AtollError | None = None
        try:
            act()
        except AtollError as error:
            raised = error
        assert raised is None or told_in_a_line(raised), repr(raised)
        done += raised is None
    return done


def hello_only(*answers: m.AnyMessage) -> Callable[[bytes], list[Any]]:
    """Answer a Hello so, and nothing else."""

    def honest(header: bytes) -> list[Any]:
        return list(answers) if isinstance(m.decode_untrusted(header), m.Hello) else []

    return honest


WELCOME = m.Welcome(run=RUN, worker=0, incarnation=1, workers=2, shards=2, heartbeat=0.01, patience=0.01)


@pytest.mark.check
def test_a_worker_bears_a_hub_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(hubconnection, "_LISTEN_SECONDS", 0.001)
    likely = (m.Welcome, m.Shards, m.Gathered, m.Reformed, m.Leased, m.Grouped, m.RingNews, m.MeasureLink)
    done = 0
    for seed in SEEDS:
        with lying(monkeypatch, "atoll.net.hubconnection", seed, likely) as liar:
            client = HubClient("tcp://127.0.0.1:1", None, timeout=0.005)
            done += tried(client.join, client.check)
            liar.honest = hello_only(WELCOME)
            if client.welcome is None:
                tried(client.join)
            done += tried(
                client.shards,
                client.where_shards_are,
                client.gather,
                lambda: client.reform(1, 0, 0, holds=True, admits=False, fresh=False),  # noqa: B023
                client.enter,
                lambda: client.lease(0, 0, 100, 10),  # noqa: B023
                lambda: client.lease(0, 0, 100, 10, wait=0.0, contributor=1, block=1),  # noqa: B023
                lambda: client.join_group(1, 1),  # noqa: B023
                client.wait_for_links,
                client.check,
                client.goodbye,
            )
            client.close()
    assert done > len(SEEDS), "nothing but errors"


def test_a_worker_uses_no_samples_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for start, stop in ((5, 2), (0, 101), (100, 200), (2**52, 2**52 + 1), (0, 11)):
        answer = m.Leased(sampler=0, epoch=0, start=start, stop=stop, number=1)

        def honest(header: bytes, answer: m.Leased = answer) -> list[Any]:
            return [answer] if isinstance(m.decode_untrusted(header), m.Lease) else [WELCOME]

        with lying(monkeypatch, "atoll.net.hubconnection", 0, (), honest=honest) as liar:
            liar.lies = False
            client = HubClient("tcp://127.0.0.1:1", None, timeout=0.05)
            client.join()
            with pytest.raises(AtollError, match=r"^hub at tcp://127\.0\.0\.1:1 leased samples") as raised:
                client.lease(0, 0, 100, 10)
            assert told_in_a_line(raised.value)
            client.close()


ADDRESSES = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]


def greeted(timeout: float) -> ShardLink:
    """A worker's link to two shards that have welcomed it."""
    hello = m.Hello(version=m.VERSION, run=RUN, role="worker", worker=0, incarnation=1)
    link = ShardLink(ADDRESSES, None, hello=hello, parties=parties_of(0), timeout=timeout, limit=2**20)
    link.greet()
    return link


class Model:
    """Two chunks at two shards, and an exchange of one of the kinds."""

    def __init__(self, shards: ShardLink, kind: str) -> None:
        weights = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(12))
        self.weights = weights
        named = dict(zip("ab", weights, strict=True))
        bound = bind_model(lay_out(specs_of(named, dict.fromkeys(weights, "0")), chunk_bytes=64), named)
        members = SimpleNamespace(
            boundary=lambda _iteration, *, begins: None, over=lambda: None, told=lambda _committed: None
        )
        shard_of = {chunk.chunk.id: at for at, chunk in enumerate(bound)}
        connection = Connection(shards, shard_of, list, lambda _staleness: None, cast(Any, members), 0)
        calls = Calls(
            lambda: None, lambda _: ContributionWeight(2.0, 2.0), lambda _own, _samples: None, lambda: None
        )
        policy: Any = "bsp" if kind == "bsp" else "asp"
        self.exchange = serve_alone(policy, bound, connection, calls, pipeline=int(kind == "pipeline"))
        self.groups = m.plain_hyperparameters(torch.optim.SGD(weights, lr=0.1).param_groups)

    def iterate(self) -> None:
        for weight in self.weights:
            weight.grad = torch.ones_like(weight)
        self.exchange.begin()
        self.exchange.phase.unsent = True
        self.exchange.reduce()
        self.exchange.before_step()
        self.exchange.step(True, self.groups)


@pytest.mark.parametrize("kind", ["bsp", "asp", "pipeline"])
def test_a_worker_bears_shards_that_lie(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    likely = (m.Parameters, m.Mean, m.Committed, m.Welcome, m.Missing, m.Met, m.Parameters, m.Mean)
    for seed in SEEDS:
        with lying(monkeypatch, "atoll.net.returning", seed, likely) as liar:
            liar.honest = hello_only(m.Welcome(run=RUN, shard=-1))
            liar.lies = False
            shards = greeted(0.01)
            model = Model(shards, kind)
            liar.lies = True
            tried(model.iterate, model.iterate, shards.take, model.exchange.refresh)
            assert all(bool(weight.isfinite().all()) for weight in model.weights)
            shards.close()


def test_a_chunk_comes_from_the_shard_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shard's word would be a wrong number in silence."""
    for kind in ("bsp", "asp"):
        with lying(monkeypatch, "atoll.net.returning", 0, ()) as liar:
            liar.honest, liar.lies = hello_only(m.Welcome(run=RUN, shard=-1)), False
            shards = greeted(0.05)
            model = Model(shards, kind)
            values = memoryview(torch.full((16,), 7.0).numpy()).cast("B")
            lie: m.AnyMessage = m.Parameters(clock=1, chunk=0, version=1, asked=1)
            if kind == "bsp":
                lie = m.Mean(iteration=0, chunk=0, present=b"\1", weight=1.0, samples=1.0)
            liar.clients[1].fed.append((m.encode(lie), values))
            with pytest.raises(AtollError, match=r"shard 1 .*chunk 0, which shard 0 holds"):
                model.iterate()
            assert not model.weights[0].any()
            shards.close()


@pytest.mark.parametrize(
    "lie", [b"", b"\1", b"\xff" * 4, b"\1\0\0\0" * 3, b"\1\0\0\0\0\0\0\0\2\0\0\0", bytes(64), bytes(200)]
)
def test_a_mean_without_its_zeros_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch, lie: bytes) -> None:
    """Where its runs are none of the chunk's."""
    with lying(monkeypatch, "atoll.net.returning", 0, ()) as liar:
        liar.honest, liar.lies = hello_only(m.Welcome(run=RUN, shard=-1)), False
        shards = greeted(0.05)
        model = Model(shards, "bsp")
        mean = m.Mean(iteration=0, chunk=0, present=b"\1", weight=1.0, samples=1.0, shortened=True)
        liar.clients[0].fed.append((m.encode(mean), memoryview(lie)))
        with pytest.raises(
            AtollError, match=r"shard 0 sent for chunk 0 .* payload without its zeros"
        ) as raised:
            model.iterate()
        assert told_in_a_line(raised.value)
        assert not model.weights[0].any()
        shards.close()


@pytest.mark.parametrize("shard", [0, 1])
def test_the_log_alone_says_that_scripts_differ(monkeypatch: pytest.MonkeyPatch, shard: int) -> None:
    with lying(monkeypatch, "atoll.net.returning", 0, ()) as liar:
        liar.honest, liar.lies = hello_only(m.Welcome(run=RUN, shard=-1)), False
        shards = greeted(0.05)
        line = "worker 0 is here\x1b[2J\nand worker 1 is there"
        liar.clients[shard].fed.append((m.encode(m.Mismatch(line=line)), None))
        with pytest.raises(AtollError) as raised:
            shards.take()
        assert told_in_a_line(raised.value)
        assert ("worker 1 is there" in str(raised.value)) == (shard == 0)
        shards.close()


def test_a_shard_bears_a_hub_and_a_log_that_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    likely = (m.Welcome, m.Shards, m.Duty, m.Entry, m.Over, m.Refused)
    for seed in SEEDS:
        with lying(monkeypatch, "atoll.server.links", seed, likely) as liar:
            monkeypatch.setattr(hubconnection, "Client", liar.connect)
            links: list[HubLink] = []

            def join(links: list[HubLink] = links) -> None:
                links.append(HubLink("tcp://127.0.0.1:1", None, run=RUN, shard=1, own="a", timeout=0.01))

            tried(join)
            liar.honest = hello_only(WELCOME)
            tried(join)
            for link in links:
                tried(link.take, link.ask_where, link.take, lambda: link.say(m.Ping()), link.take)  # noqa: B023
                assert link.duty is None or link.duty.term >= 0
                link.close()
            taken: list[m.Entry] = []
            log = LogLink(
                "tcp://127.0.0.1:1",
                None,
                run=RUN,
                shard=1,
                apply=lambda entry, _: taken.append(entry),  # noqa: B023
            )
            tried(log.take, lambda: log.follow(0), log.take, lambda: log.staged(0, 1, 0), log.take)  # noqa: B023
            log.close()


def test_a_primary_bears_a_standby_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    duty = m.Duty(term=3, primary=True, partner=2, address="tcp://127.0.0.1:1")
    hub = SimpleNamespace(duty=duty, welcome=WELCOME, say=lambda _message: None)
    source = SimpleNamespace(model=None, is_between_lines=True)
    for seed in SEEDS:
        with lying(monkeypatch, "atoll.server.mirror", seed, (m.Standing, m.Hello, m.Refused)) as liar:
            mirror = Mirror(0, RUN, None, cast(Any, hub), None)
            left: list[int] = []
            for number in range(20):
                mirror.poll(cast(Any, source))
                mirror.when_kept(lambda number=number: left.append(number))  # type: ignore[misc]  # noqa: B023
                for client in liar.clients:
                    liar.say(client, 2)
            assert left == sorted(left)
            mirror.close()


def test_a_site_bears_global_shards_that_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    likely = (m.Welcome, m.Met, m.Committed, m.Parameters, m.Missing, m.State, m.StateEnd)
    for seed in SEEDS:
        with (
            lying(monkeypatch, "atoll.net.returning", seed, likely) as liar,
            contextlib.closing(FedServer("site")) as door,
        ):
            liar.honest = hello_only(m.Welcome(run=RUN, shard=-1))
            place = SitePlace(0, ["paris", "berlin"], 1)
            up = ShardLink(
                ADDRESSES,
                None,
                hello=place.hello(RUN),
                parties=place.parties,
                timeout=0.01,
                beside=lambda: [cast(Any, door)],
                asks_every=1.0,
            )
            heard: list[Any] = []
            up.on(m.Met, lambda _shard, message, _payload: heard.append(message))  # noqa: B023
            up.send(0, m.WhoIsMissing(), until="it")
            tried(up.take, lambda: up.wait(lambda: False, lambda: [0, 1], "what never comes"), up.take)  # noqa: B023
            up.close()


def test_a_node_bears_a_witness_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        with lying(
            monkeypatch,
            "atoll.net.hubconnection",
            seed,
            (m.Promised, m.Accepted, m.ViewDecided, m.Refused),
        ) as liar:
            link = WitnessLink("tcp://127.0.0.1:1", None, run=RUN, node=0, incarnation=1, token="t")
            for _ in range(5):
                for client in liar.clients:
                    liar.say(client, 3)
                for message in link.take():
                    assert not isinstance(message, m.Refused)
            assert link.refusal == "" or link.refusal.isprintable()
            link.close()
