"""A peer that stands still: whoever waits for it says who, on which chunk, in which iteration, for how long.

One test for each kind of wait that no other test provokes; those of a ring are in test_ring.py and
test_hub_ring.py, of leases in test_hub.py, of sites in test_levels.py.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from mortal_shards import MortalRun
from torch import nn

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.core.errors import AtollError, DeadlineError, PeerLostError
from atoll.exchange.link import ShardLink
from atoll.net.endpoint import Server
from atoll.server.siteplace import SitePlace
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from atoll.train.sync.service import parties_of
from atoll.wire.messages import VERSION, Ended, Goodbye, Hello, Welcome, decode_untrusted, encode
from support.notices import lines_of
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

DEADLINE = 60.0
HELLO = Hello(version=VERSION, run="test", role="worker", worker=3, incarnation=1)


def config(consistency: str) -> Config:
    return Config(
        run=Run(strategy="server"),
        chunks=Chunks(size="2KiB"),
        sync=Sync(timeout=f"{DEADLINE:g}s", consistency=consistency),  # type: ignore[arg-type]
    )


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 33), nn.Linear(33, 33), nn.Linear(33, 7))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


# -- shards ------------------------------------------------------------------------------------------------


@contextmanager
def one_worker(folder: Path, consistency: str) -> Iterator[tuple[Session, MortalRun]]:
    """A session in this process; two shards are others."""
    with MortalRun(folder, 1, 2) as run:
        with served_worker(run.address, 0):
            session = atoll.join(config(consistency))
        try:
            yield session, run
        finally:
            session._leaving.leave()  # as after an error: its heartbeats would go on with this process
        assert not run.failures


def stuck(call: Callable[[], object]) -> str:
    with pytest.raises(DeadlineError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_shard_that_stands_still_is_named_with_chunks_and_iteration(
    tmp_path: Path, consistency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is waited for, and in the error of the deadline."""
    monkeypatch.setattr("atoll.exchange.silence._ASK_AFTER", 0.1)
    monkeypatch.setattr("atoll.exchange.silence._UNANSWERED", 0.4)
    with one_worker(tmp_path, consistency) as (session, run):
        model, optimizer = make()
        session.prepare(model, optimizer)

        def step() -> None:
            model(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()

        step()
        optimizer.zero_grad()
        service = session._runtime.member
        assert service is not None
        service.shards.timeout = 1.0
        told = lines_of(service.hub.notices)
        os.kill(run.pid(1), signal.SIGSTOP)
        said = stuck(step)
        os.kill(run.pid(1), signal.SIGCONT)
        mine = re.escape(service.shards.addresses[1])
        (warned,) = told
    chunks = r"chunks? \d+(, \d+)*( and \d+( more)?)?"
    # The log may or may not be able to say whom it waits for.
    of = rf"{chunks} of the parameters after iteration 1"
    what = rf"the mean of {chunks} in iteration 1" if consistency == "bsp" else of
    who = rf"(shard 0 at \S+ and )?shard 1 at {mine}"
    line = rf"worker 0 waited \d+\.\d s (for {who} on {what}|for {what}: {who} waits for .*) "
    assert re.fullmatch(line + r"\(deadline sync\.timeout, 1 s; set it higher .*\)", said), said
    line = rf"worker 0 waits for shard 1 at {mine} on {what}: it has not answered for \d+\.\d s "
    assert re.fullmatch(line + r"\(sync\.timeout is 1 s\)", warned), warned


def test_a_shard_that_does_not_even_greet() -> None:
    with Server("tcp://127.0.0.1:0", None, limit=2**20, name="shard 0") as server:
        said = stuck(
            ShardLink(
                [server.address], None, hello=HELLO, parties=parties_of(3), timeout=0.5, limit=2**20
            ).greet
        )
    assert re.match(
        rf"worker 3 waited \d\.\d s for shard 0 at {server.address} on their welcome "
        r"\(deadline sync\.timeout, 0\.5 s",
        said,
    )


def test_a_shard_that_stood_still_and_was_replaced_was_away_since_it_fell_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not since the hub has named the other one, whose connection stands at once."""
    monkeypatch.setattr("atoll.exchange.silence._ASK_AFTER", 0.1)
    monkeypatch.setattr("atoll.net.returning._ASK_ANYWAY", 0.1)
    told: list[str] = []

    def where() -> list[str]:
        return [second.address if shards._silence.lasted(0) >= 0.5 else first.address]

    with FakeShard() as first, FakeShard() as second:
        shards = ShardLink(
            [first.address],
            None,
            hello=HELLO,
            parties=parties_of(3),
            timeout=DEADLINE,
            limit=2**20,
            where=lambda: where() if first.stands_still.is_set() else [first.address],
            tell=told.append,
        )
        shards.greet()
        first.stands_still.set()
        shards.wait(lambda: len(told) == 2, lambda: [0], "a word of the other one")
        shards.close()
    found = re.fullmatch(rf"worker 3: shard 0 at {second.address} is back, after (\S+) s", told[1])
    assert found is not None, told
    assert float(found[1]) >= 0.5


def test_a_site_tells_of_a_global_shard_that_stands_still_as_a_worker_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atoll.exchange.silence._ASK_AFTER", 0.1)
    monkeypatch.setattr("atoll.exchange.silence._UNANSWERED", 0.4)
    told: list[str] = []
    with FakeShard() as shard:
        link = site_link(shard, told)
        link.greet()
        shard.stands_still.set()
        link.wait(lambda: bool(told), lambda: [0], "the mean of iteration 3")
        link.close()
    line = (
        rf"site 'paris' waits for global shard 0 at {shard.address} on the mean of iteration 3: it has not "
        rf"answered for \d+\.\d s \(--timeout is {DEADLINE:g} s\)"
    )
    assert re.fullmatch(line, told[0]), told


def test_the_last_answer_of_a_shard_that_has_ended_counts() -> None:
    """It keeps no journal, so its end is the run's; but what was waited for is here."""
    ended: list[int] = []
    with FakeShard(comes_back=False) as shard:
        link = site_link(shard, [])
        link.greet()
        link.on(Ended, lambda number, _message, _payload: ended.append(number))
        link.send(0, Goodbye(incarnation=1))
        shard.has_ended.wait(DEADLINE)
        link.wait(lambda: bool(ended), lambda: [0], "its last word")
        with pytest.raises(PeerLostError, match=r"^site 'paris' lost global shard 0 at \S+: the connection"):
            link.wait(lambda: False, lambda: [0], "nothing any more")
        link.close()
    assert ended == [0]


def site_link(shard: FakeShard, told: list[str]) -> ShardLink:
    place = SitePlace(0, ["paris", "berlin"], 1)
    return ShardLink(
        [shard.address],
        None,
        hello=place.hello("test"),
        parties=place.parties,
        timeout=DEADLINE,
        where=lambda: [shard.address],
        tell=told.append,
        asks_every=1.0,
    )


class FakeShard:
    """Welcomes whoever says Hello, until it stands still; who says goodbye is answered, and then the
    shard itself `has_ended`."""

    def __init__(self, comes_back: bool = True) -> None:
        self._comes_back, self.has_ended = comes_back, threading.Event()
        self._server = Server("tcp://127.0.0.1:0", None, limit=2**20, name="shard 0")
        self.address = self._server.address
        self.stands_still, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        with self._server:
            while not self.stands_still.is_set():
                received = self._server.receive(0.05)
                message = None if received is None else decode_untrusted(received.header)
                if received is not None and isinstance(message, Hello):
                    welcome = Welcome(run="test", shard=0, comes_back=self._comes_back)
                    self._server.send(received.peer, encode(welcome))
                elif received is not None and isinstance(message, Goodbye):
                    self._server.send(received.peer, encode(Ended()))
                    break
            else:
                self._ended.wait(DEADLINE)
        self.has_ended.set()

    def __enter__(self) -> FakeShard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stands_still.set()
        self._ended.set()
        self._thread.join(DEADLINE)


# -- other workers -----------------------------------------------------------------------------------------


def stays_away(place: Place, address: str, where: str) -> tuple[str, list[str]]:
    """Worker 1 does not come to the meeting, or worker 0 does not bring the model, before the other has given
    up: which gives its error, and what it said before."""
    assert place.store is not None
    told: list[str] = []
    late = 1 if where == "barrier" else 0
    model, optimizer = make()
    try:
        with served_worker(address, place.rank), atoll.join(config("bsp")) as session:
            service = session._runtime.member
            assert service is not None
            if where == "barrier":
                session.prepare(model, optimizer)
            if place.rank == late:
                place.store.wait(["given up"])
            else:
                service.shards.timeout = 1.0
                told = lines_of(service.hub.notices)
            with (
                mock.patch("atoll.exchange.silence._ASK_AFTER", 0.1),
                mock.patch("atoll.exchange.silence._UNANSWERED", 0.5),
            ):
                if where == "barrier":
                    session.barrier()
                else:
                    session.prepare(model, optimizer)
    except AtollError as error:
        place.store.set("given up", "1")
        return str(error), told
    return "", []


@pytest.mark.parametrize(
    ("where", "what"),
    [("barrier", "every worker's part in the barrier"), ("prepare", "every worker's part in .*")],
)
def test_a_worker_that_does_not_come_to_a_meeting_is_named(pool: WorkerPool, where: str, what: str) -> None:
    with ServedRun(2) as served:
        found = pool.run(stays_away, served.address, where, world=2)
    late, waits = (1, 0) if where == "barrier" else (0, 1)
    said, told = found[waits]
    who = rf"shard 0 at \S+ waits for worker {late}, to come to ['\"].*['\"]"
    line = rf"worker {waits} waited \d\.\d s for {what}: {who} \(deadline sync\.timeout, 1 s"
    assert re.match(line, said), said
    assert told == []  # the shard is alive: it is the worker who does not come
