"""A hub that is killed and started again: the same run at the same address, and nobody stops."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked_script import ForkedScript
from hub_parts import DEADLINE, WORKER, FakeLog, HubProcess, hub_of, wait_for

from atoll.core.config import HUB_VARIABLE
from atoll.core.errors import UserError
from atoll.hub.journal import FILE, KIND
from atoll.hub.records import UsageReport, decode_record
from atoll.logs.frames import frames
from atoll.net.endpoint import Client
from atoll.net.hubconnection import HubHeartbeats
from atoll.net.requests import RefusedError, ask
from atoll.server.journal import Folder
from atoll.testing import faults
from atoll.testing.faults import Fault
from atoll.train.members.hub_client import HubClient
from atoll.wire.messages import VERSION, Heartbeat, Hello, Shards, WhereAreShards, encode
from atoll.wire.messages import Welcome as WelcomeMessage

POINTS = ("hub.record", "hub.recorded", "hub.answered")


def writes(few: tuple[int, ...], many: tuple[int, ...]) -> pytest.MarkDecorator:
    """At which of its records the hub is killed: at `few` in `make test`, and at `many` in `make soak`."""
    return pytest.mark.parametrize(
        "at", [few, pytest.param(many, marks=pytest.mark.soak)], ids=["few", "many"]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def ring_hub(folder: Path, workers: int, *plan: Fault, patience: float = 10.0) -> HubProcess:
    return HubProcess(folder, workers=workers, shards=0, patience=patience, plan=plan)


def served_hub(folder: Path, workers: int, *plan: Fault, patience: float = 5.0) -> HubProcess:
    return HubProcess(folder, workers=workers, patience=patience, plan=plan)


@contextmanager
def leasing(hub: HubProcess, log: FakeLog, epochs: int, length: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Three workers, of which the first stops after an epoch, with a batch in hand, until it is killed."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, hub.address, seconds, str(epochs), str(length), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for seconds, *more in (("0.02", "dies"), ("0.02",), ("0.01",))
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate(timeout=DEADLINE)
        log.close()


# The number is of a process's writes: the first lives are short, and the later ones longer.
@writes((1, 3), (1, 2, 3, 5, 9, 17))
def test_each_sample_counts_once_while_the_hub_is_killed_at_each_of_its_points(
    folder: Path, at: tuple[int, ...]
) -> None:
    """And a worker is killed just before the hub once more, which so has to find out that it is dead."""
    epochs, length = 3, 302
    plan = [Fault(point, iteration=write) for point in POINTS for write in at]
    with served_hub(folder, 3, *plan) as hub:
        log = FakeLog(hub.address)
        with leasing(hub, log, epochs, length) as workers:
            told = workers[0].stdout.readline()  # type: ignore[union-attr]
            assert told, workers[0].communicate()
            killed, held = map(int, told.split())  # its rank, and the samples of its batch
            workers[0].kill()
            hub.kill()
            for worker in workers[1:]:
                _, said = worker.communicate(timeout=2 * DEADLINE)
                assert worker.returncode == 0, said
            for epoch in range(epochs):
                assert log.counts(epoch) == Counter(range(length))
            (died,) = hub.decisions("worker died")
            assert died.choice.startswith(f"worker {killed},")
            fenced = {each.choice: each.reason for each in hub.decisions("fenced")}
            assert int(fenced[died.choice].split("; ")[1].split()[0]) >= held
            over = [decision.what for decision in hub.decisions() if decision.choice == "over"]
            assert sorted(over) == [f"epoch {epoch} of sampler 0" for epoch in range(epochs)]
        assert not faults.pending(hub.plan)
        assert hub.starts > len(plan)
        assert {each.choice for each in hub.decisions("hub")} >= {f"listens at {hub.address} again"}


def meet(address: str, deadline: float = DEADLINE) -> tuple[HubClient, int]:
    client = HubClient(address, None, timeout=deadline)
    client.join()
    return client, client.gather()


@writes((1, 2), (1, 2, 3))
def test_a_ring_forms_and_its_store_is_kept_while_the_hub_is_killed(
    folder: Path, at: tuple[int, ...]
) -> None:
    from atoll.train.group.rendezvous import HubStore

    plan = [Fault(point, iteration=write, times=len(at) - 1) for point in POINTS for write in at]
    with ring_hub(folder, 2, *plan) as hub, ThreadPoolExecutor(2) as both, ExitStack() as ends:
        met = list(both.map(lambda _: meet(hub.address), range(2)))
        assert {client.welcome.worker for client, _ in met if client.welcome is not None} == {0, 1}
        assert {group for _, group in met} == {1}
        stores = []
        for client, group in met:
            assert client.welcome is not None
            ends.callback(client.close)
            stores.append(HubStore(hub.address, None, client.welcome, group, DEADLINE))
            ends.callback(stores[-1].close)
        one, two = stores
        waiting = both.submit(two.get, "late")
        count, until = 0, time.monotonic() + DEADLINE
        while count < 8 or faults.pending(hub.plan):
            count += 1
            assert one.add("n", 1) == count  # a number that is added to twice is one too many
            assert time.monotonic() < until, faults.pending(hub.plan)
        one.set("late", "here")
        assert waiting.result(DEADLINE) == b"here"
        hub.kill()
        assert (two.get("n"), two.add("n", 0), two.num_keys()) == (b"%d" % count, count, 2)
        assert [each.choice for each in hub.decisions("ring")][:1] == ["ring 1 of 2 workers"]


RING = """
import atoll
from atoll.core.config import Config, Sync
with atoll.join(Config(sync=Sync(timeout="60s"))) as session:
    session.barrier()
    print(session.reduce(1.0, "sum"))
"""


def test_a_ring_that_is_forming_waits_for_a_hub_that_is_away_for_longer_than_its_patience(
    folder: Path,
) -> None:
    """It is killed while its store tells the members where they listen."""
    options: dict[str, Any] = {"workers": 2, "shards": 0, "patience": 2.0}
    # Its beginning, two workers, and their two wishes are five writes: what is written next is of the store.
    with HubProcess(folder, **options, plan=[Fault("hub.recorded", iteration=6)], pause=6.0) as hub:
        script = folder.parent / "ring.py"
        script.write_text(RING)
        place = {**os.environ, HUB_VARIABLE: hub.address}
        workers = [
            ForkedScript(script, folder=folder.parent, environment=place, log=folder.parent / f"{number}.log")
            for number in range(2)
        ]
        try:
            for worker in workers:
                assert worker.wait(2 * DEADLINE) == 0, worker.said
                assert "2.0" in worker.said.splitlines()
        finally:
            for worker in workers:
                worker.kill()
        assert not faults.pending(hub.plan)
        told = [each.choice for each in hub.decisions() if each.what in ("ring", "hub")]
        assert told[1] == "ring 1 of 2 workers"  # before it was killed
        assert told[2:] == [f"listens at {hub.address} again", "goes on with 2 workers, 0 shards"]


def test_those_who_wait_at_the_hub_wait_on_when_it_is_started_again(folder: Path) -> None:
    """For the shards' addresses, and for a rank whose worker has just died; and a goodbye is still heard."""
    with served_hub(folder, 1) as hub, ThreadPoolExecutor(2) as threads, ExitStack() as ends:

        def worker() -> HubClient:
            made = HubClient(hub.address, None, timeout=DEADLINE)
            ends.callback(made.close)
            return made

        first, old, new = worker(), worker(), worker()
        first.join(0)
        asks = threads.submit(first.shards)
        old.join(1)
        old.close()  # as if killed
        parked = threads.submit(new.join, 1)
        wait_for(lambda: len(hub.decisions("worker joined")) == 2, "both")
        hub.kill()
        log = FakeLog(hub.address)
        ends.callback(log.close)
        assert asks.result(DEADLINE) == [log.address]
        assert parked.result(DEADLINE).incarnation > 2
        (died,) = hub.decisions("worker died")
        assert died.choice == "worker 1, incarnation 2"
        hub.kill()
        wait_for(lambda: sum("goes on" in each.choice for each in hub.decisions("hub")) == 2, "its return")
        new.goodbye()  # over a connection that it has to make anew
        new.close()
        wait_for(lambda: log.fenced >= {(1, 2)}, "the fence")
        wait_for(lambda: any(worker == 1 and each > 2 for worker, each in log.fenced), "the goodbye's fence")
        assert len(hub.decisions("worker died")) == 1
        first.check()


def has_been_told(folder: Path) -> bool:
    """Whether a log's word is in the hub's journal."""
    frames_there = frames(memoryview((folder / FILE).read_bytes()), KIND)
    return any(isinstance(decode_record(bytes(each.header)), UsageReport) for each in frames_there)


def test_a_fence_that_the_log_has_not_answered_is_asked_for_again(folder: Path) -> None:
    with served_hub(folder, 1) as hub:
        log = FakeLog(hub.address)
        log.silent = True
        with HubClient(hub.address, None, timeout=DEADLINE) as one:
            one.join()
            one.lease(0, 0, 30, 20)
        wait_for(lambda: hub.decisions("worker left"), "the goodbye")
        hub.kill()
        hellos = len(log.hellos)
        wait_for(lambda: len(log.hellos) > hellos, "the hub to come back to the log")
        assert not log.fenced
        log.silent = False
        hub.kill()
        wait_for(lambda: log.fenced == {(0, 2)}, "the fence")  # the log's own incarnation is 1
        (fenced,) = wait_for(lambda: hub.decisions("fenced"), "its record")
        assert "20 samples" in fenced.reason
        wait_for(lambda: has_been_told(folder), "the journal to have it: it is told of before")
        hub.kill()
        hellos = len(log.hellos)
        wait_for(lambda: len(log.hellos) > hellos, "the hub, once more")
        with HubClient(hub.address, None, timeout=DEADLINE) as two:
            two.join()
            assert (two.lease(0, 0, 30, 30).start, len(hub.decisions("fenced"))) == (0, 1)
        log.close()


def test_what_was_used_while_the_hub_was_gone_is_told_when_it_is_back(folder: Path) -> None:
    with served_hub(folder, 1) as hub, HubClient(hub.address, None, timeout=DEADLINE) as one:
        log = FakeLog(hub.address)
        one.join()
        assert one.lease(0, 0, 30, 30).stop == 30
        with HubClient(hub.address, None, timeout=DEADLINE) as two:
            two.join()
            assert not two.lease(0, 0, 30, 30, wait=0.0).over  # the other one may die
            from atoll.wire.messages import Used

            log.used[0, 2] = [Used(sampler=0, epoch=0, start=0, stop=30)]  # committed, and the news is lost
            hub.kill()
            assert two.lease(0, 0, 30, 30).over
        log.close()


def test_the_journal_stays_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.hub.journal._COMPACT_BYTES", 4000)
    with hub_of(folder, run="r") as service:
        with HubClient(service.address, None, timeout=DEADLINE) as one:
            one.join()
            for epoch in range(300):
                assert one.lease(0, 0, 10**6, 64).start == 64 * epoch
            size = (folder / FILE).stat().st_size
            assert size < 10_000
        address = service.address
    with hub_of(folder, listen=address, run="r") as service:
        assert "goes on with 0 workers, 0 shards" in [each.choice for each in service.decisions("hub")]
        with HubClient(service.address, None, timeout=DEADLINE) as two:
            assert two.join().incarnation == 2
            assert two.lease(0, 0, 10**6, 64).start == 64 * 300


def test_a_hub_killed_between_the_compact_state_and_its_place(folder: Path) -> None:
    """In real life a state is put together after a megabyte; the loop of leases makes as much."""
    with ring_hub(folder, 1, Fault("hub.compacted")) as hub:
        client, group = meet(hub.address)
        from atoll.train.group.rendezvous import HubStore

        assert client.welcome is not None
        store = HubStore(hub.address, None, client.welcome, group, DEADLINE)
        for index in range(6):
            store.set(f"key {index}", bytes([index]) * 300_000)
        assert not faults.pending(hub.plan)
        assert [store.get(f"key {index}")[:1] for index in range(6)] == [bytes([index]) for index in range(6)]
        assert hub.starts == 2
        store.close()
        client.close()


def torn(path: Path, cut: int) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) - cut])


def test_a_torn_tail_is_cut_and_damage_is_said(folder: Path) -> None:
    def go_on() -> Any:
        return hub_of(folder, run="r")

    with go_on() as service:
        clients = [HubClient(service.address, None, timeout=DEADLINE) for _ in range(3)]
        for client in clients:
            client.join()
        wait_for(lambda: len(service.decisions("worker joined")) == 3, "all")
    for client in clients:
        client.close()
    torn(folder / FILE, 3)
    with go_on() as service:
        assert "goes on with 2 workers, 0 shards" in [each.choice for each in service.decisions("hub")]
        (reason,) = [each.reason for each in service.decisions("hub") if "goes on" in each.choice]
        assert "cut off" in reason
    raw = bytearray((folder / FILE).read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    (folder / FILE).write_bytes(raw)
    with pytest.raises(UserError, match="damaged at byte") as found, go_on():
        pass
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run": "red"}, "--run blue and not red"),
        ({"workers": 3}, "--workers 2 and not 3"),
        ({"shards": 2}, "--shards 1 and not 2"),
        ({"listen": "tcp://127.0.0.1:1"}, "--listen tcp://127.0.0.1:0 and not tcp://127.0.0.1:1"),
        ({"sites": {"paris": 1, "berlin": 1}}, "--site none and not paris=1 berlin=1"),
    ],
)
def test_the_directory_of_another_run(folder: Path, options: dict[str, Any], said: str) -> None:
    usual = {"run": "blue", "workers": 2, "shards": 1}
    with hub_of(folder, **usual):
        pass
    with (
        pytest.raises(UserError, match="holds the run 'blue'") as found,
        hub_of(folder, **{**usual, **options}),
    ):
        pass
    assert said in str(found.value)
    assert "\n" not in str(found.value)
    with hub_of(folder, **usual, listen="tcp://127.0.0.1:0"):
        pass


def test_hub_and_shard_do_not_take_each_others_directories(folder: Path) -> None:
    with hub_of(folder, run="blue", workers=2, shards=1):
        pass
    with pytest.raises(UserError, match="holds a hub's journal; give the shard another --directory"):
        Folder(folder, "blue", 0)
    Folder(folder / "shard", "blue", 0).close()
    with (
        pytest.raises(UserError, match="holds a shard of a run; give the hub another --directory"),
        hub_of(folder / "shard", run="blue", workers=2, shards=1),
    ):
        pass


def test_two_hubs_in_one_directory_and_a_run_that_is_over(folder: Path) -> None:
    said = "another hub serves this directory"
    with hub_of(folder, run="r"), pytest.raises(UserError, match=said), hub_of(folder, run="r"):
        pass
    over = folder.parent / "over"
    with hub_of(over, run="r", until_done=True) as service:
        with HubClient(service.address, None, timeout=DEADLINE) as one:
            one.join()
        assert service.ended()
    with pytest.raises(UserError, match="the run 'r' there is over"), hub_of(over, run="r", until_done=True):
        pass


def test_a_disk_that_is_full_stops_nobody_and_the_journal_is_whole_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.core import points

    full = threading.Event()

    def handler(point: str, _iteration: int) -> None:
        if full.is_set() and point in ("hub.record", "hub.compacted"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("atoll.hub.ledger._RETRY_SECONDS", 0.1)
    points.install(handler)
    try:
        with hub_of(folder, run="r") as service:
            full.set()
            one = HubClient(service.address, None, timeout=DEADLINE)
            assert one.join().incarnation == 1
            assert one.lease(0, 0, 100, 10).stop == 10
            (said,) = wait_for(lambda: service.decisions("journal"), "the warning")
            assert "No space left on device" in said.reason
            full.clear()
            wait_for(lambda: len(service.decisions("journal")) == 2, "the journal's return")
    finally:
        points.install(None)
    with hub_of(folder, run="r"):  # where it was; the port is the journal's
        assert one.lease(0, 0, 100, 10).start == 10
        one.goodbye()
    one.close()


# -- time ---------------------------------------------------------------------------------------------------


def test_a_hub_that_was_stopped_counts_nobody_dead(folder: Path) -> None:
    """For longer than any silence is borne."""
    with served_hub(folder, 1, patience=2.0) as hub, HubClient(hub.address, None, timeout=DEADLINE) as one:
        one.join()
        one.lease(0, 0, 100, 1)
        hub.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        hub.send_signal(signal.SIGCONT)
        assert one.lease(0, 0, 100, 1).stop == 2
        gone = HubClient(hub.address, None, timeout=DEADLINE)
        gone.join()
        gone.close()  # its death tells that the hub has looked for some
        (died,) = wait_for(lambda: hub.decisions("worker died"), "the death of the one that is gone")
        assert died.choice == "worker 1, incarnation 2"
        one.check()


def test_how_long_silence_is_borne_is_measured_again_soon_after_a_restart(folder: Path) -> None:
    """With the first heartbeats: what was measured before needs no journal."""
    with served_hub(folder, 2, patience=10.0) as hub, HubClient(hub.address, None, timeout=DEADLINE) as one:
        one.join()
        gone = HubClient(hub.address, None, timeout=DEADLINE)
        gone.join()
        hub.kill()
        wait_for(lambda: any("goes on" in each.choice for each in hub.decisions("hub")), "its return")
        time.sleep(2.0)
        gone.close()
        (died,) = wait_for(lambda: hub.decisions("worker died"), "the death")
        assert died.choice.startswith("worker 1,")
        assert "and 3.5 s are borne" in died.reason
        one.check()


def test_a_wall_clock_that_jumps_does_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jump, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])
    with hub_of(folder, patience=2.0) as service, HubClient(service.address, None, timeout=DEADLINE) as one:
        one.join()
        for count, jump[0] in enumerate((7200.0, -7200.0, 0.0), start=1):
            gone = HubClient(service.address, None, timeout=DEADLINE)
            gone.join()
            gone.close()

            def died(count: int = count) -> bool:
                return len(service.decisions("worker died")) == count

            wait_for(died, "the death of the other")
            assert all("worker 0," not in each.choice for each in service.decisions("worker died"))
            one.check()


# -- shards that come back ----------------------------------------------------------------------------------


class Shard:
    """A shard's connection to the hub; heartbeats are its own to give."""

    def __init__(self, address: str, own: str, pid: int = 1, token: str = "") -> None:
        self._client = Client(address, None, limit=2**20, name="hub")
        hello = Hello(version=VERSION, run="", role="shard", shard=0, address=own, pid=pid, token=token)
        try:
            self.welcome = ask(self._client, hello, WelcomeMessage, DEADLINE, "a welcome")[0]
        except BaseException:
            self._client.close()
            raise
        self.go_on()

    def go_on(self) -> None:
        """Give signs of life, as at first."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        beat = Heartbeat(run=self.welcome.run, incarnation=self.welcome.incarnation)
        while not self._stop.wait(0.05):
            self._client.send(encode(beat))

    def stop(self) -> None:
        """Give no sign of life any more, as under SIGSTOP."""
        self._stop.set()
        self._thread.join(DEADLINE)

    def close(self) -> None:
        self.stop()
        self._client.close()


def addresses_at(hub: str) -> list[str]:
    with Client(hub, None, limit=2**20, name="hub") as link:
        return ask(link, WhereAreShards(), Shards, DEADLINE, "addresses")[0].addresses


def test_a_shard_comes_back_at_another_address(folder: Path) -> None:
    """Long before the hub's patience is over: the old connection is gone."""
    with hub_of(folder, patience=600.0) as service:
        old = Shard(service.address, "tcp://127.0.0.1:1001")
        assert addresses_at(service.address) == ["tcp://127.0.0.1:1001"]
        old.close()
        new = Shard(service.address, "tcp://127.0.0.1:1002", pid=2)
        assert new.welcome.incarnation == 2
        assert addresses_at(service.address) == ["tcp://127.0.0.1:1002"]
        (died,) = service.decisions("shard died")
        assert "another came in its place" in died.reason
        new.close()


def test_a_shard_that_was_started_again_in_its_directory_takes_its_place_at_once(folder: Path) -> None:
    """Its forerunner had the directory's lock: it is dead, whatever its connection looks like."""
    with hub_of(folder, patience=600.0) as service:
        old = Shard(service.address, "tcp://127.0.0.1:1001", token="a")
        old.stop()  # and its connection stays
        new = Shard(service.address, "tcp://127.0.0.1:1002", token="a")
        assert addresses_at(service.address) == ["tcp://127.0.0.1:1002"]
        (died,) = service.decisions("shard died")
        assert "goes on from its directory" in died.reason
        old.close()
        new.close()


@pytest.mark.parametrize("wakes", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_silent_shard_keeps_its_place_for_as_long_as_its_patience(folder: Path, wakes: bool) -> None:
    """A second one comes meanwhile, from another directory."""
    with hub_of(folder, patience=5.0, run="r") as service, ThreadPoolExecutor(1) as threads:
        first = Shard(service.address, "tcp://127.0.0.1:1001", token="a")
        first.stop()
        stopped = time.monotonic()
        second = threads.submit(Shard, service.address, "tcp://127.0.0.1:1002", token="b")
        if wakes:
            time.sleep(1.5)
            assert not second.done()
            first.go_on()
            with pytest.raises(RefusedError, match="shard 0 is there already"):
                second.result(DEADLINE)
            assert addresses_at(service.address) == ["tcp://127.0.0.1:1001"]
            assert not service.decisions("shard died")
        else:
            new = second.result(DEADLINE)
            assert time.monotonic() - stopped > 3.0
            assert addresses_at(service.address) == ["tcp://127.0.0.1:1002"]
            (died,) = service.decisions("shard died")
            assert "are borne" in died.reason
            new.close()
        first.close()


def test_a_second_shard_that_was_killed_while_it_waited_does_not_get_the_place(folder: Path) -> None:
    """It would hold it for as long as its own silence is borne."""
    with hub_of(folder, patience=2.0) as service:
        first = Shard(service.address, "tcp://127.0.0.1:1001", token="a")
        first.stop()  # and its connection stays
        with Client(service.address, None, limit=2**20, name="hub") as second:
            hello = Hello(version=VERSION, run="", role="shard", shard=0, address="tcp://127.0.0.1:1002")
            second.send(encode(hello))
            ask(second, WhereAreShards(), Shards, DEADLINE, "addresses")  # so the hub has its Hello
        wait_for(lambda: service.decisions("shard died"), "the first one's death")
        third = Shard(service.address, "tcp://127.0.0.1:1003")
        assert third.welcome.incarnation == first.welcome.incarnation + 1
        assert len(service.decisions("shard died")) == 1
        third.close()
        first.close()


def test_a_second_shard_beside_one_that_lives_is_refused(folder: Path) -> None:
    with hub_of(folder, patience=60.0, heartbeat=1.5) as service:  # a thread may stand still for a second
        first = Shard(service.address, "tcp://127.0.0.1:1001")
        with pytest.raises(RefusedError, match="shard 0 is there already"):
            Shard(service.address, "tcp://127.0.0.1:1002")
        assert addresses_at(service.address) == ["tcp://127.0.0.1:1001"]
        first.close()


def test_a_shard_comes_back_at_the_same_address(folder: Path) -> None:
    with hub_of(folder) as service:
        first = Shard(service.address, "tcp://127.0.0.1:1001")
        first.close()
        second = Shard(service.address, "tcp://127.0.0.1:1001", pid=2)
        assert second.welcome.incarnation == first.welcome.incarnation
        (back,) = service.decisions("shard came back")
        assert "at the same address" in back.reason
        second.close()


def test_a_shard_that_was_given_up_takes_its_place_again(folder: Path) -> None:
    """After a partition, say: its hub has missed it, and nobody else has come."""
    from atoll.server.links import HubLink

    with hub_of(folder, patience=2.0, run="r") as service:
        link = HubLink(service.address, None, run="r", shard=0, own="tcp://127.0.0.1:1001", timeout=DEADLINE)
        before = link.welcome.incarnation
        link._beats.stop()
        wait_for(lambda: service.decisions("shard died"), "its death")
        link._beats = HubHeartbeats(service.address, None, link._beat, link._note)
        link._beats.start()

        def back() -> bool:
            link.take()
            return link.welcome.incarnation != before

        wait_for(back, "a new welcome")
        assert addresses_at(service.address) == ["tcp://127.0.0.1:1001"]
        link.close()


def test_shards_learn_where_the_others_are_from_a_hub_that_was_started_again(folder: Path) -> None:
    """One has asked before all were there."""
    from atoll.server.links import HubLink

    def link_of(shard: int) -> HubLink:
        own = f"tcp://127.0.0.1:100{shard}"
        return HubLink(hub.address, None, run="r", shard=shard, own=own, timeout=DEADLINE)

    with HubProcess(folder, workers=1, shards=2) as hub:
        zero = link_of(0)
        hub.kill()
        wait_for(lambda: zero.client.losses, "the loss")
        one = link_of(1)

        def known(link: HubLink) -> bool:
            link.take()
            return link.addresses == ["tcp://127.0.0.1:1000", "tcp://127.0.0.1:1001"]

        for link in (zero, one):
            wait_for(lambda link=link: known(link), "the addresses")
            link.close()


def test_a_port_that_is_free_is_not_taken_for_the_hubs(folder: Path) -> None:
    """A hub that is started again listens where it did, or says why not."""
    with hub_of(folder, run="r") as service:
        host, _, port = service.address.removeprefix("tcp://").rpartition(":")
    taken = socket.create_server((host, int(port)))
    with taken, pytest.raises(UserError, match="listens at"), hub_of(folder, run="r"):
        pass
    with hub_of(folder, run="r") as service:
        assert service.address == f"tcp://{host}:{port}"
