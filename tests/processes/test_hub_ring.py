"""Rings that meet at a hub: its store as c10d's own, real rings without torchrun, and what is said when one
does not come about or loses a member."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from run_command import wait_for
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

import atoll
from atoll.core.config import HUB_VARIABLE, Chunks, Config, Run, Sync
from atoll.core.errors import ConfigError, DeadlineError, PeerLostError, RunError, UserError
from atoll.hub.decisions import read_decisions
from atoll.net.endpoint import Client, Server
from atoll.net.keys import make_keys, read_keys, write_keys
from atoll.net.requests import RefusedError, ask
from atoll.net.route import own_address
from atoll.train.api.place import Place
from atoll.train.group.rendezvous import HubLostError, HubRing, HubStore
from atoll.train.members.hub_client import HubClient
from atoll.train.sync.service import enter
from atoll.wire.messages import Reform, encode
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

DEADLINE = 30.0
ANY = -1  # rank


def ring_config(timeout: str = "20s", strategy: Any = "ring") -> Config:
    return Config(run=Run(strategy=strategy), chunks=Chunks(size="2KiB"), sync=Sync(timeout=timeout))


@contextlib.contextmanager
def hub_of(workers: int, **options: Any) -> Iterator[ServedRun]:
    """A hub of rings only."""
    with ServedRun(workers, 0, **{"heartbeat": 0.1, **options}) as served:
        yield served
    assert not served.failures


@contextlib.contextmanager
def store_at(address: str, timeout: float = DEADLINE, keys: Path | None = None) -> Iterator[HubStore]:
    """The store of a ring of one worker."""
    secret = read_keys(keys) if keys is not None else None
    with HubClient(address, secret, timeout=DEADLINE) as hub:
        store = HubStore(address, secret, hub.join(), hub.gather(), timeout)
        try:
            yield store
        finally:
            store.close()


# -- the store, against c10d's own --------------------------------------------------------------------------


@pytest.fixture(params=["hash", "tcp", "hub", "hub, sealed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store with a timeout of 0.2 s. As the groups use it, under a prefix, so that calls go through C++."""
    with contextlib.ExitStack() as ends:
        if request.param == "hash":
            made: Store = HashStore()
        elif request.param == "tcp":
            made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        else:
            keys = None
            if "sealed" in request.param:
                keys = tmp_path / "run.key"
                write_keys(keys, make_keys())
            served = ends.enter_context(hub_of(1, keys=keys))
            made = ends.enter_context(store_at(served.address, keys=keys))
        made.set_timeout(timedelta(seconds=0.2))
        yield PrefixStore("tests", made)


def test_values(store: Store) -> None:
    before = store.num_keys()
    store.set("a", "text")
    assert store.get("a") == b"text"
    store.set("a", bytes(range(256)))
    assert store.get("a") == bytes(range(256))
    store.set("empty", "")
    assert store.get("empty") == b""
    assert store.num_keys() == before + 2
    assert store.check(["a", "empty"])
    assert not store.check(["a", "not there"])
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])


def test_numbers(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42


def test_compare_set(store: Store) -> None:
    assert store.compare_set("k", "old", "new") == b"old"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "other", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


def test_the_extended_calls(store: Store) -> None:
    assert store.has_extended_api()
    store.append("log", "one ")
    store.append("log", "two")
    assert store.get("log") == b"one two"
    store.multi_set(["x", "y"], ["1", "2"])
    assert store.multi_get(["y", "x"]) == [b"2", b"1"]


def test_waits(store: Store) -> None:
    store.set("there", "1")
    store.wait(["there"])
    store.wait(["there"], timedelta(seconds=5))
    for wait in (
        lambda: store.wait(["there", "never"]),
        lambda: store.wait(["never"], timedelta(seconds=0.1)),
        lambda: store.get("never"),
    ):
        began = time.monotonic()
        with pytest.raises(dist.DistStoreError):
            wait()
        assert 0.09 < time.monotonic() - began < DEADLINE
    assert store.timeout == timedelta(seconds=0.2)  # type: ignore[attr-defined]


def test_a_wait_ends_when_another_thread_sets_the_key(store: Store) -> None:
    """The one that waits does not hold up the one that sets. TCPStore wants a clone for that: its wait holds
    its lock."""
    store.set_timeout(timedelta(seconds=DEADLINE))
    first, second = store.clone(), store.clone()  # type: ignore[attr-defined]
    got: list[bytes] = []
    waiting = [
        threading.Thread(target=lambda: got.append(first.get("late"))),
        threading.Thread(target=lambda: second.wait(["late", "later"])),
    ]
    for thread in waiting:
        thread.start()
    store.set("late", "came")
    store.set("later", "came")
    for thread in waiting:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert got == [b"came"]


def test_adding_from_many_threads_counts_each_once(store: Store) -> None:
    threads = [threading.Thread(target=lambda: [store.add("n", 1) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert store.add("n", 0) == 100


# -- the store, what is its own -----------------------------------------------------------------------------


def test_a_wait_that_passes_its_deadline_says_who_which_key_and_how_long() -> None:
    with hub_of(1) as served, store_at(served.address, timeout=0.1) as store:
        with pytest.raises(dist.DistStoreError) as caught:
            PrefixStore("ring", store).get("0/1")
        assert str(caught.value) == (
            "timed out: worker 0 waited 0.1 s for 'ring/0/1' in the store of ring 1 at the hub at "
            f"{served.address}"
        )


def test_what_the_hub_refuses_is_one_line() -> None:
    with hub_of(1) as served, store_at(served.address) as store:
        store.set("word", "seven")
        with pytest.raises(RefusedError, match="'word' holds no whole number"):
            PrefixStore("", store).underlying_store.add("word", 1)
        assert store.get("word") == b"seven"  # and the store goes on


def test_who_is_of_a_run_before_changes_no_key() -> None:
    """Its ring had the same number, and its worker the same incarnation."""
    with hub_of(1) as served, store_at(served.address) as store:
        stranger = msgspec.structs.replace(store._welcome, run="before")
        before = HubStore(served.address, None, stranger, 1, DEADLINE)
        with pytest.raises(RefusedError, match="not of run 'before'"):
            before.set("word", "theirs")
        assert not store.check(["word"])
        before.close()


def test_a_hub_that_is_gone_is_given_up_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.train.members.hub_client._FAREWELL_SECONDS", 0.2)  # nobody is there to hear it
    with contextlib.ExitStack() as ends:
        served = ServedRun(1, 0, patience=0.6, heartbeat=0.1)
        with served:
            store = ends.enter_context(store_at(served.address, timeout=1.5))
            store.set("a", "1")
            waiter = threading.Thread(target=served.stop)
            waiter.start()
            began = time.monotonic()
            with pytest.raises(
                HubLostError, match=r"worker 0: the hub at \S+ cannot be reached for \d.\d s: "
            ):
                store.get("never")
            with pytest.raises(dist.DistNetworkError):  # what c10d knows it as
                store.set("a", "2")
            assert 3 < time.monotonic() - began < DEADLINE
            waiter.join(DEADLINE)
    with pytest.raises(HubLostError, match="the session is closed"):
        store.set("a", "2")


def test_who_waits_for_a_hub_that_is_gone_is_freed_when_the_store_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atoll.train.members.hub_client._FAREWELL_SECONDS", 0.2)  # nobody is there to hear it
    with ServedRun(1, 0) as served, store_at(served.address) as store, ThreadPoolExecutor(2) as threads:
        store.set("a", "1")
        waiting = [threads.submit(store.get, "never")]
        served.stop_hub()
        waiting.append(threads.submit(store.set, "a", "2"))
        time.sleep(0.2)
        assert not any(each.done() for each in waiting)
        store.close()
        for each in waiting:
            with pytest.raises(HubLostError, match="the session is closed"):
                each.result(5.0)


class Cutter:
    """Stands between a store and the hub, and cuts the connections when told to."""

    def __init__(self, target: str) -> None:
        import socket

        self._target = ("127.0.0.1", int(target.rpartition(":")[2]))
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        self._pairs: list[tuple[Any, Any]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        import socket

        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(self._target)
                self._pairs.append((near, far))
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: Any, sink: Any) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.close()

    def cut(self) -> None:
        import socket

        pairs, self._pairs = self._pairs, []
        for near, _ in pairs:
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        import socket

        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # frees who waits in accept
        self._door.close()
        self.cut()


def test_a_lost_connection_is_made_again_and_the_call_goes_on() -> None:
    with hub_of(1) as served:
        cutter = Cutter(served.address)
        with HubClient(served.address, None, timeout=DEADLINE) as hub:
            store = HubStore(cutter.address, None, hub.join(), hub.gather(), DEADLINE)
            direct = HubStore(served.address, None, hub.welcome, 1, DEADLINE)  # type: ignore[arg-type]
            store.add("n", 1)
            got: list[bytes] = []
            waiting = threading.Thread(target=lambda: got.append(store.get("late")))
            waiting.start()
            cutter.cut()
            assert store.add("n", 1) == 2
            direct.set("late", "came")
            waiting.join(DEADLINE)
            assert got == [b"came"]
            store.close()
            direct.close()
        cutter.close()


def test_a_call_that_was_sent_twice_has_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other one is no answer to the next call. A connection's end is known a little later than it
    ends: what is sent in between goes out on the next one, where it is asked again."""
    lost = [True]

    def asks(link: Client, message: Any, *rest: Any, **more: Any) -> Any:
        if lost:
            lost.clear()
            link.send(encode(message))
            raise PeerLostError("the hub")
        return ask(link, message, *rest, **more)

    with hub_of(1) as served, store_at(served.address) as store:
        store.set("a", "text")
        monkeypatch.setattr("atoll.train.group.rendezvous.ask", asks)
        assert (store.get("a"), store.add("n", 3), store.num_keys()) == (b"text", 3, 2)


def test_a_wish_for_a_ring_that_was_sent_twice_has_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other one is not taken for the next ring."""

    def asks(link: Client, message: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(message, Reform) and message.group == 1:
            link.send(encode(message))
        return ask(link, message, *rest, **more)

    monkeypatch.setattr("atoll.net.hubconnection.ask", asks)
    with hub_of(1) as served, HubClient(served.address, None, timeout=DEADLINE) as hub:
        hub.join()
        assert hub.gather() == 1
        for group in (1, 2, 3):
            ring = hub.reform(group, 0, round=group, holds=False, admits=False, fresh=False)
            assert ring.group == group + 1


def test_own_address() -> None:
    assert own_address("tcp://127.0.0.1:5") == "127.0.0.1"
    assert own_address("tcp://localhost:5") in ("127.0.0.1", "::1")
    assert own_address("tcp://[::1]:5") == "::1"
    assert own_address("ipc:///tmp/hub") == ""
    assert own_address("tcp://no.such.name.invalid:5") == ""


# -- rings ----------------------------------------------------------------------------------------------


def train(session: atoll.Session, steps: int) -> list[Tensor]:
    """Parameters after a few steps on batches of uneven sizes."""
    torch.manual_seed(session.rank)  # worker 0's values are everyone's
    model = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + session.rank)
        optimizer.zero_grad()
        model(torch.randn(2 + (session.rank + step) % 3, 5, generator=generator)).square().mean().backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
    session.barrier()
    return [p.detach().clone() for p in model.parameters()]


def by_both(place: Place, address: str, keys: Path | None) -> dict[str, Any]:
    """Train through the pool's own store, which is torchrun's kind, and through the hub."""
    with atoll.join(ring_config(), place=place) as session:
        usual = train(session, 4)
    with served_worker(address, place.rank, keys), atoll.join(ring_config()) as session:
        hubs = train(session, 4)
        said = session.gather(f"worker {session.rank}")
        return {"usual": usual, "hub's": hubs, "who": (session.rank, session.world), "said": said}


@pytest.mark.parametrize(("world", "sealed"), [(2, False), (3, False), (2, True)])
def test_a_ring_through_a_hub_trains_to_the_bit_as_one_through_torchruns_store(
    pool: WorkerPool, tmp_path: Path, world: int, sealed: bool
) -> None:
    keys = tmp_path / "run.key" if sealed else None
    if keys is not None:
        write_keys(keys, make_keys())
    with hub_of(world, keys=keys, folder=tmp_path) as served:
        results = pool.run(by_both, served.address, keys, world=world)
        left = [f"worker {rank}, incarnation" for rank in range(world)]
        wait_for(
            lambda: all(any(each in line for line in told(tmp_path, "worker left")) for each in left),
            "every goodbye",
        )
    for rank, result in enumerate(results):
        assert result["who"] == (rank, world)
        assert result["said"] == [f"worker {each}" for each in range(world)]
        for usual, hubs in zip(result["usual"], result["hub's"], strict=True):
            assert torch.equal(usual, hubs)
    assert told(tmp_path, "ring") == [f"ring 1 of {world} workers"]
    assert told(tmp_path, "worker died") == []


def told(folder: Path, what: str) -> list[str]:
    return [decision.choice for decision in read_decisions(folder) if decision.what == what]


def three_sessions(_place: Place, address: str) -> list[tuple[int, float]]:
    """Each joins anew, at once, with no wish for a rank: the hub may hear it before the goodbye of the last.
    The script's own default group stands beside them."""
    found = []
    for _ in range(3):
        with served_worker(address, ANY), atoll.join(ring_config()) as session:
            found.append((session.rank, session.reduce(1.0, "sum")))
    return found


def test_sessions_one_after_another_each_have_a_ring_of_their_own(pool: WorkerPool, tmp_path: Path) -> None:
    with hub_of(2, folder=tmp_path) as served:
        results = pool.run(three_sessions, served.address, world=2)
    for number in range(3):
        assert {result[number][0] for result in results} == {0, 1}
        assert [result[number][1] for result in results] == [2.0, 2.0]
    assert told(tmp_path, "ring") == [f"ring {number} of 2 workers" for number in (1, 2, 3)]


def test_who_came_late_to_a_ring_that_is_over_meets_in_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one of the sessions above, where the hub hears it before the goodbyes of the last."""
    with hub_of(2, folder=tmp_path) as served, ThreadPoolExecutor(3) as threads:
        first, second = (HubClient(served.address, None, timeout=DEADLINE) for _ in range(2))
        for each in (first, second):
            each.join()
        for ring in [threads.submit(each.gather) for each in (first, second)]:
            ring.result(DEADLINE)
        came, over = threading.Event(), threading.Event()
        gather = HubClient.gather

        def late(hub: HubClient) -> int:
            came.set()
            assert over.wait(DEADLINE)
            return gather(hub)

        monkeypatch.setattr(HubClient, "gather", late)
        monkeypatch.setenv(HUB_VARIABLE, served.address)
        entered = threads.submit(enter, ring_config())
        assert came.wait(DEADLINE)
        for each in (first, second):
            each.goodbye()
            each.close()
        wait_for(lambda: len(told(tmp_path, "worker left")) == 2, "the end of the ring")
        over.set()
        with HubClient(served.address, None, timeout=DEADLINE) as other:
            other.join(1)
            gather(other)
            late_one = entered.result(DEADLINE)
            assert isinstance(late_one, HubRing)
            assert (late_one.place.rank, late_one.place.world) == (0, 2)
            late_one.hub.goodbye()
            late_one.hub.close()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("no label"), "its script raised ValueError"),
        (RunError("worker 0 has come anew, as incarnation 9"), "worker 0 has come anew, as incarnation 9"),
    ],
)
def test_the_hub_hears_why_a_session_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    with hub_of(1, folder=tmp_path) as served:
        monkeypatch.setenv(HUB_VARIABLE, served.address)
        with pytest.raises(type(error)), atoll.join(ring_config()):
            raise error
        wait_for(lambda: told(tmp_path, "worker left"), "its leaving")
    left = [decision for decision in read_decisions(tmp_path) if decision.what == "worker left"]
    assert [decision.reason for decision in left] == [why]


def goes_on(_place: Place, address: str, folder: Path) -> list[Tensor]:
    """Wait, once the ring stands, until the hub is gone; then train."""
    with served_worker(address, ANY), atoll.join(ring_config()) as session:
        session.barrier()
        (folder / f"stands-{session.rank}").touch()
        wait_for((folder / "hub is gone").exists, "the hub's end")
        return train(session, 2)


def test_a_ring_that_stands_goes_on_without_its_hub(pool: WorkerPool, tmp_path: Path) -> None:
    with hub_of(2, patience=0.5) as served:
        pool.submit(goes_on, served.address, tmp_path, world=2)
        wait_for(lambda: all((tmp_path / f"stands-{rank}").exists() for rank in range(2)), "the ring")
        served.stop()
        (tmp_path / "hub is gone").touch()
        first, second = pool.collect()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def test_a_ring_of_one_is_alone_and_known_to_the_hub(tmp_path: Path) -> None:
    with hub_of(1, folder=tmp_path) as served:
        with served_worker(served.address, ANY), atoll.join(ring_config()) as session:
            assert (session.rank, session.world) == (0, 1)
            assert session.reduce(3.0, "sum") == 3.0
        wait_for(lambda: told(tmp_path, "worker left"), "the goodbye")


# -- rings that do not come about ---------------------------------------------------------------------------


def test_a_member_that_does_not_come_is_named_within_the_deadline() -> None:
    with hub_of(3) as served, served_worker(served.address, 1):
        with pytest.raises(DeadlineError) as caught:
            atoll.join(ring_config("1s"))
        assert str(caught.value) == (
            "worker 1 waited 1.0 s for worker 0 and worker 2 to join the ring at the hub at "
            f"{served.address} (deadline sync.timeout, 1 s); 1 of 3 workers are there"
        )
        with HubClient(served.address, None, timeout=DEADLINE) as another:
            assert another.join(1).worker == 1  # whoever gave up has left its rank


def test_a_member_that_comes_and_does_not_go_on_ends_a_ring_that_needs_it() -> None:
    """It joins the ring, and is gone before the groups have met."""
    with hub_of(2, at_least=2) as served:
        met = threading.Barrier(2)

        def come_and_go() -> None:
            with HubClient(served.address, None, timeout=DEADLINE) as hub:
                hub.join(1)
                met.wait(DEADLINE)
                hub.gather()

        other = threading.Thread(target=come_and_go)
        other.start()
        met.wait(DEADLINE)
        with (
            served_worker(served.address, 0),
            pytest.raises(
                RunError, match="does not go on: 1 of its workers are left, and at least 2 must be"
            ),
        ):
            atoll.join(ring_config())
        other.join(DEADLINE)


def test_one_worker_too_many_is_told_so() -> None:
    with hub_of(1, patience=0.5) as served, HubClient(served.address, None, timeout=DEADLINE) as first:
        first.join()
        for rank, said in (
            (ANY, "a ring of 1 workers, and all of them are there"),
            (1, "there is no rank 1"),
        ):
            with served_worker(served.address, rank), pytest.raises(UserError, match=said):
                atoll.join(ring_config())


def test_another_key_no_hub_and_no_ring_are_one_line_each(tmp_path: Path) -> None:
    ours, other = tmp_path / "run.key", tmp_path / "other.key"
    for file in (ours, other):
        write_keys(file, make_keys())
    with hub_of(1, keys=ours) as served:
        with served_worker(served.address, ANY, other), pytest.raises(UserError, match="refuses this key"):
            atoll.join(ring_config())
        with served_worker(served.address, ANY), pytest.raises(UserError, match="wants a key"):
            atoll.join(ring_config())
        with (
            served_worker(served.address, ANY, ours),
            pytest.raises(ConfigError, match="needs shards, and the run at tcp://\\S+ has none"),
        ):
            atoll.join(ring_config(strategy="server"))
    with served_worker("tcp://127.0.0.1:1", ANY), pytest.raises(DeadlineError, match="nothing listens there"):
        atoll.join(ring_config("1s"))
    variables = {HUB_VARIABLE: "tcp://127.0.0.1:1", "ATOLL_RANK": "first"}
    with (
        mock.patch.dict(os.environ, variables),
        pytest.raises(ConfigError, match="ATOLL_RANK is 'first'; it"),
    ):
        atoll.join(ring_config("1s"))


def test_the_hub_counts_before_torchruns_place_and_it_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    with (
        hub_of(1) as served,
        served_worker(served.address, ANY),
        mock.patch.dict(os.environ, torchrun),
        atoll.join(ring_config()) as session,
    ):
        assert session.world == 1
    said = capfd.readouterr().err
    assert said == (
        "atoll: ATOLL_HUB is set, so the ring is of the hub's 1 workers, and torchrun's WORLD_SIZE=4 does "
        "not count; unset ATOLL_HUB for torchrun's own\n"
    )


# -- as a user starts it ------------------------------------------------------------------------------------

SCRIPT = """
import sys, pathlib, torch, atoll

torch.set_num_threads(1)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    stop = pathlib.Path(sys.argv[1], "stop")
    while session.iteration < int(sys.argv[2]) and not session.reduce(float(stop.exists()), "max"):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        pathlib.Path(sys.argv[1], str(session.rank)).write_text(str(session.iteration))
"""


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_by_hand_a_hub_and_scripts_and_one_that_is_killed(tmp_path: Path) -> None:
    """`atoll hub --shards 0` with keys, and `python train.py` thrice; the others go on, and say so."""
    keys, folder, script = tmp_path / "run.key", tmp_path / "hub", tmp_path / "train.py"
    write_keys(keys, make_keys())
    script.write_text(SCRIPT)
    command = ["-c", "from atoll.cli.app import main; main()", "hub", "--workers", "3", "--shards", "0"]
    command += ["--key-file", str(keys), "--listen", "tcp://127.0.0.1:0", "--directory", str(folder)]
    started = [start(*command)]
    try:
        wait_for((folder / "hub.address").exists, "the hub")
        place = {"ATOLL_HUB": (folder / "hub.address").read_text().strip(), "ATOLL_KEY_FILE": str(keys)}
        workers = [
            start(str(script), str(tmp_path), "1000000", ATOLL_RANK=str(rank), **place) for rank in range(3)
        ]
        started += workers
        wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), "a few steps")
        workers[2].send_signal(signal.SIGKILL)
        wait_for(lambda: "ring 2 of 2 workers" in told(folder, "ring"), "the next ring")
        steps = int((tmp_path / "0").read_text() or 0)
        wait_for(lambda: int((tmp_path / "0").read_text() or 0) > steps + 5, "more steps")
        (tmp_path / "stop").touch()
        for rank in range(2):
            out, err = workers[rank].communicate(timeout=DEADLINE)
            assert (workers[rank].returncode, out) == (0, ""), err
            assert ("atoll: worker 2 was lost during iteration " in err) == (rank == 0)
            assert err.count("\n") == (rank == 0)
        wait_for(lambda: len(told(folder, "worker left")) == 2, "the goodbyes of those who live")
        assert told(folder, "ring") == ["ring 1 of 3 workers", "ring 2 of 2 workers"]
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=DEADLINE)


def test_a_hub_of_another_kind_is_no_hub(tmp_path: Path) -> None:
    """What listens there is Atoll's, and answers nothing that a ring understands."""
    with (
        Server("tcp://127.0.0.1:0", None, limit=2**20, name="mute") as mute,
        served_worker(mute.address, ANY),
        pytest.raises(DeadlineError, match="on a rank in the run"),
    ):
        atoll.join(ring_config("0.5s"))
