"""The hub, served for real: who comes, who goes, who dies, and whose the samples are then."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_parts import (
    DEADLINE,
    HEARTBEAT,
    PATIENCE,
    WORKER,
    FakeLog,
    Forwarder,
    Service,
    asked,
    client,
    hub_of,
    raw,
    wait_for,
)

from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.core.liveness import own_origin, read_process
from atoll.hub.main import ADDRESS_FILE
from atoll.hub.service import Clock
from atoll.net.hubconnection import HubHeartbeats
from atoll.net.keys import make_keys, write_keys
from atoll.net.requests import RefusedError
from atoll.observe.notices import Notices
from atoll.train.members import hub_client as hub_client_module
from atoll.train.members.hub_client import HubClient
from atoll.wire.messages import (
    VERSION,
    Fenced,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Leased,
    Shards,
    Step,
    Used,
    Welcome,
    encode,
)
from support.notices import lines_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_workers_get_ranks_and_incarnations_and_the_shards_addresses(folder: Path) -> None:
    with hub_of(folder, workers=2, shards=1, run="blue") as service:
        with client(service) as one, client(service) as two:
            first, second = one.join(), two.join()
            assert (first.worker, first.incarnation, first.workers, first.run) == (0, 1, 2, "blue")
            assert (second.worker, second.incarnation) == (1, 2)
            assert (first.heartbeat, first.patience) == (HEARTBEAT, PATIENCE)
            log = FakeLog(service.address, "blue")
            assert one.shards() == two.shards() == [log.address]
            wait_for(lambda: [h.role for h in log.hellos] == ["hub"], "the hub to come to the log")
        wait_for(lambda: log.fenced == {(0, 1), (1, 2)}, "fences of those who left")
        wait_for(lambda: len(service.decisions("fenced")) == 2, "the fences' record")
        with client(service) as third:
            assert (third.join().worker, third.welcome.incarnation) == (0, 4)  # type: ignore[union-attr]
        log.close()
        made = [decision.what for decision in service.decisions()]
        assert made[:4] == ["hub", "worker joined", "worker joined", "shard joined"]
        assert made.count("worker left") >= 2
        assert all(decision.reason for decision in service.decisions())
        assert (folder / ADDRESS_FILE).read_text().strip() == service.address


def test_a_run_without_a_name_gets_one_and_tells_it(folder: Path, tmp_path: Path) -> None:
    names = []
    for where in (folder, tmp_path / "other"):
        with hub_of(where) as service, client(service) as one:
            names.append(one.join().run)
            guest = Hello(version=VERSION, run="", role="guest")
            with raw(service) as link:
                assert asked(link, guest, Welcome).run == names[-1]
    assert names[0] != names[1]


def test_a_deadline_on_the_shards_says_what_their_processes_do(folder: Path) -> None:
    with hub_of(folder, workers=1, shards=2) as service, client(service) as one:
        one.join()
        one._hub.timeout = 0.5  # joining may take longer
        ends = "; shard 1 is not there: start `atoll server --shard 1`"
        absent, starting = (
            "is not there: start `atoll server --shard 0`",
            "has not come yet: its process runs ",
        )
        with subprocess.Popen(["sleep", "600"]) as process:
            reading = wait_for(lambda: read_process(process.pid), "the process")
            origin = f"{own_origin().split(':')[0]}:{process.pid}:{reading.started}"
            for say, expected in (
                (None, absent),
                ("elsewhere:1:1", f"{starting}on another machine and is still starting, for "),
                (origin, f"{starting}(it got 0.0 s of CPU) and is still starting, for "),
            ):
                if say is not None:
                    with raw(service) as link:
                        guest = Hello(version=VERSION, run="", role="guest", shard=0, origin=say)
                        asked(link, guest, Welcome)
                with pytest.raises(DeadlineError) as caught:
                    one.shards()
                line = str(caught.value)
                assert line.startswith("worker 0 waited 0.5 s for the shards to come to the hub at "), line
                assert f"(deadline sync.timeout, 0.5 s): shard 0 {expected}" in line, line
                assert line.endswith(ends), line
            process.kill()


def test_until_done_the_hub_ends_its_shards_and_itself_when_all_who_began_have_left(folder: Path) -> None:
    with hub_of(folder, workers=2, until_done=True) as service:
        log = FakeLog(service.address)
        with client(service) as early:
            early.join()
        wait_for(lambda: service.decisions("fenced"), "its goodbye")
        assert not log.told_over  # the run has not begun
        one, two = client(service), client(service)
        one.join()
        two.join()
        one.goodbye()
        two.close()  # as if killed
        wait_for(lambda: log.told_over, "the end")
        assert log.told_over[:1] == [{(0, 2), (0, 3), (1, 4)}]  # what their commits used is known before
        assert service.ended()
        assert [each.choice for each in service.decisions("run")] == ["over"]
        one.close()
        log.close()


def test_without_until_done_the_hub_serves_on(folder: Path) -> None:
    with hub_of(folder) as service:
        log = FakeLog(service.address)
        for _ in range(2):
            with client(service) as one:
                one.join()
        wait_for(lambda: len(service.decisions("fenced")) == 2, "both goodbyes")
        assert not log.told_over
        assert not service.ended(0)
        log.close()


def test_a_silent_worker_is_fenced_and_its_samples_come_back(folder: Path) -> None:
    with hub_of(folder, workers=2) as service:
        log = FakeLog(service.address)
        dying, other = client(service), client(service)
        dying.join()
        dying.lease(0, 1, 30, 1)
        assert dying.workers == 2  # before all are there, too
        other.join()
        assert (dying.lease(0, 0, 30, 20).stop, other.lease(0, 0, 30, 20).start) == (20, 20)
        assert (dying.workers, other.workers) == (2, 2)
        log.used[0, dying.welcome.incarnation] = [Used(sampler=0, epoch=0, start=0, stop=5)]  # type: ignore[union-attr]
        empty = other.lease(0, 0, 30, 20, wait=0.05)
        assert (empty.start, empty.stop, empty.over) == (0, 0, False)
        dying.close()  # no goodbye: as if killed
        leased = other.lease(0, 0, 30, 20)
        assert (leased.start, leased.stop) == (5, 20)
        assert other.lease(0, 0, 30, 20).over
        assert other.workers == 1
        died = service.decisions("worker died")[0]
        assert "silent for" in died.reason
        assert "16 samples" in service.decisions("fenced")[0].reason
        other.goodbye()
        other.close()
        log.close()


def test_a_fence_reaches_a_log_that_comes_later(folder: Path) -> None:
    with hub_of(folder) as service:
        with client(service) as one:
            one.join()
            one.lease(0, 0, 30, 20)
        wait_for(lambda: service.decisions("worker left"), "the goodbye")
        log = FakeLog(service.address)
        wait_for(lambda: log.fenced == {(0, 1)}, "the fence")
        assert "20 samples" in wait_for(lambda: service.decisions("fenced"), "its record")[0].reason
        log.close()


def test_a_shard_that_comes_again_elsewhere_is_fenced_anew(folder: Path) -> None:
    with hub_of(folder) as service:
        first = FakeLog(service.address)
        wait_for(lambda: first.hellos, "the hub")
        first.silent = True
        with client(service) as one:
            one.join()
        wait_for(lambda: service.decisions("worker left"), "the goodbye")
        with pytest.raises(RefusedError, match="there already"):
            FakeLog(service.address)
        first.close()
        wait_for(lambda: service.decisions("shard died"), "the shard's death")
        second = FakeLog(service.address)
        wait_for(lambda: len(second.fenced) == 1, "the fence")
        second.close()


def test_who_is_of_a_run_before_keeps_nobody_alive(folder: Path, tmp_path: Path) -> None:
    """It tries its hub's port, which is another hub's by now, and its incarnation is another member's."""
    with hub_of(tmp_path / "before") as service:
        before = FakeLog(service.address)
    with hub_of(folder, listen=service.address, patience=1.0) as service:
        wait_for(lambda: before.refused, "its first heartbeat here")
        log = FakeLog(service.address)
        assert log.welcome.incarnation == before.welcome.incarnation
        log.close()
        wait_for(lambda: service.decisions("shard died"), "the shard's death")
        assert f"and not of run {before.welcome.run!r}" in before.refused[-1]
    before.close()


def test_a_worker_that_computes_for_long_lives(folder: Path) -> None:
    with hub_of(folder) as service, client(service) as one:
        one.join()
        one.iteration = 7
        silent = client(service)
        silent.join()
        silent.close()  # without a goodbye: its death tells that the hub's patience has passed for both
        (died,) = wait_for(lambda: service.decisions("worker died"), "the death of the one that is silent")
        assert died.choice.startswith("worker 1,")
        one.check()
        assert one.lease(0, 0, 10, 4).stop == 4


def test_a_rank_is_given_again_after_its_workers_death(folder: Path) -> None:
    with hub_of(folder) as service:
        old = client(service)
        assert old.join(3).worker == 3
        old.close()
        with client(service) as new:
            welcome = new.join(3)
            assert (welcome.worker, welcome.incarnation) == (3, 2)


def test_a_rank_that_lives_is_refused(folder: Path) -> None:
    with hub_of(folder) as service, client(service) as one, client(service) as two:
        one.join(0)
        with pytest.raises(RefusedError, match="rank 0 is taken"):
            two.join(0)
        one.check()


def test_a_worker_that_was_given_up_is_told(folder: Path) -> None:
    with hub_of(folder) as service:
        stopped = client(service)
        stopped.join()
        stopped._stop_beating()  # as SIGSTOP would
        wait_for(lambda: service.decisions("worker died"), "its death")
        with pytest.raises(UserError, match="knows no incarnation 1"):
            stopped.lease(0, 0, 10, 2)
        stopped._beats = HubHeartbeats(service.address, None, stopped._beat, stopped._note)
        stopped._beats.start()
        wait_for(lambda: stopped._hub.refusal, "the hub's refusal")
        with pytest.raises(RunError, match="knows no incarnation 1"):
            stopped.check()
        stopped.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": VERSION + 1}, "install the same version of Atoll everywhere"),
        ({"run": "red"}, "of run 'blue', and not of run 'red'"),
        ({"role": "cook"}, "no role 'cook'"),
        ({"worker": 10**9}, "beyond"),
        ({"role": "shard", "shard": 5, "address": "tcp://127.0.0.1:9"}, "there is no shard 5"),
        ({"role": "shard", "shard": 0}, "does not say where it is"),
        ({"incarnation": 99}, "knows no incarnation 99"),
    ],
)
def test_the_door(folder: Path, change: dict[str, Any], said: str) -> None:
    with hub_of(folder, run="blue") as service, raw(service) as link:
        fields = {"version": VERSION, "run": "", "role": "worker", **change}
        with pytest.raises(RefusedError, match=said):
            asked(link, Hello(**fields), Welcome)
        with client(service) as good:
            assert good.join().incarnation == 1


def test_messages_of_others_and_nonsense_disturb_nothing(folder: Path) -> None:
    """Valid messages in a stranger's name, random bytes, and messages that are for shards."""
    with hub_of(folder, patience=5.0) as service, client(service) as good:
        good.join()
        assert good.lease(0, 0, 1000, 10).stop == 10
        chance = random.Random(1)
        with raw(service) as stranger:
            for bad in (
                Goodbye(incarnation=1),
                Lease(incarnation=1, sampler=0, epoch=0, length=1000, count=1000),
                Lease(incarnation=9, sampler=0, epoch=0, length=1000, count=1000),
                Step(incarnation=1, iteration=0, scale=1.0, hyperparameters=[]),
                Heartbeat(run=good.welcome.run, incarnation=12345),  # type: ignore[union-attr]
                Heartbeat(run="another", incarnation=1),
                Fenced(worker=0, incarnation=1, iteration=0, used=[]),
            ):
                with pytest.raises(RefusedError):
                    asked(stranger, bad, Welcome)
            for _ in range(500):
                stranger.send(chance.randbytes(chance.randint(0, 300)), chance.randbytes(10))
            cut = encode(Hello(version=VERSION, run="", role="worker"))
            for length in range(len(cut)):
                stranger.send(cut[:length])
            huge = Lease(incarnation=1, sampler=0, epoch=0, length=2**52, count=2**52)
            stranger.send(encode(huge))
        leased = good.lease(0, 0, 1000, 10)
        assert (leased.start, leased.stop) == (10, 20)
        with pytest.raises(RefusedError, match="1000"):
            good.lease(0, 0, 999, 10)  # another data set
        good.check()
        assert service.decisions("worker joined")[1:] == []


def test_a_lost_connection_is_made_again_and_known(folder: Path) -> None:
    """Through a forwarder that hangs up: the worker says on the new connection who it is."""
    with hub_of(folder, patience=10.0) as service:
        door = Forwarder(service.address)
        with HubClient(door.address, None, timeout=DEADLINE) as one:
            one.join()
            assert one.lease(0, 0, 100, 10).stop == 10
            door.hang_up()
            assert one.lease(0, 0, 100, 10).start in (10, 20)  # the first answer may be lost
        wait_for(lambda: service.decisions("worker left"), "the goodbye")
        door.close()


def test_what_was_asked_as_the_connection_was_lost_does_no_harm(folder: Path) -> None:
    """It goes out on the new connection, before the hub hears there who asks."""
    with hub_of(folder, patience=600.0, heartbeat=0.1) as service:
        door = Forwarder(service.address)
        with client(service, address=door.address) as one:
            one.join()
            door.stand_still()
            door.hang_up()
            wait_for(lambda: one._hub.client.losses, "word of it")
            stale = Lease(incarnation=one._incarnation, sampler=0, epoch=0, length=100, count=10)
            one._hub.client.send(encode(stale))
            door.go_on()
            assert one.lease(0, 0, 100, 10).start == 0
            one.check()
        door.close()


def test_why_a_worker_left_is_told(folder: Path) -> None:
    """Of one whose place another has taken, say: "it said goodbye" would hide that."""
    with hub_of(folder) as service:
        for finished, why in (
            (False, "worker 0 has come anew\x1b[31m,\nas 7"),
            (True, "of no matter"),
            (False, ""),
        ):
            with client(service) as one:
                one.join()
                one.leaves_because(why)
                one.goodbye(finished)
        wait_for(lambda: len(service.decisions("worker left")) == 3, "their leaving")
        reasons = [decision.reason for decision in service.decisions("worker left")]
        assert reasons == ["worker 0 has come anew\\x1b[31m, as 7", "it said goodbye", "it said goodbye"]


def test_a_worker_that_was_given_up_is_told_on_a_new_connection_too(folder: Path) -> None:
    with hub_of(folder, patience=600.0, heartbeat=0.1) as service:
        door = Forwarder(service.address)
        one = client(service, address=door.address)
        one.join()
        one._stop_beating()
        one._hub.client.send(encode(Goodbye(incarnation=one._incarnation)))
        wait_for(lambda: service.decisions("worker left"), "its leaving")
        door.hang_up()
        with pytest.raises(RefusedError, match="knows no incarnation 1"):
            one.lease(0, 0, 100, 10)
        one.close()
        door.close()


@pytest.mark.parametrize("gone", [True, False])
def test_a_hub_that_falls_silent_is_told_at_once_and_when_it_is_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Its connection is lost, and no other is let in; or it stands still with the connection open."""
    monkeypatch.setattr(hub_client_module, "SILENCE", 0.3)
    notices = Notices()
    told = lines_of(notices)
    with hub_of(folder, patience=600.0, heartbeat=0.1) as service:
        door = Forwarder(service.address)
        with client(service, address=door.address, notices=notices, without=lambda _welcome: "on") as one:
            one.join()
            assert one.lease(0, 0, 100, 10).stop == 10
            silence = one.silence
            assert silence is not None
            wait_for(lambda: silence.since is None, "the hub's answers")  # may take longer
            told.clear()
            door.stand_still()
            if gone:
                door.hang_up()
            found: list[Leased] = []
            asking = threading.Thread(target=lambda: found.append(one.lease(0, 0, 100, 10)), daemon=True)
            asking.start()
            wait_for(lambda: told, "word of it")
            assert re.fullmatch(
                rf"worker 0: the hub at {door.address} has not answered for \d+\.\d s( \(.*\))?; on", told[0]
            )
            assert asking.is_alive()
            door.go_on()
            asking.join(DEADLINE)
            assert found[0].start in (10, 20)  # the first answer may be lost
            wait_for(lambda: len(told) > 1, "word that it is back")
        door.close()
    assert told[1:] == [f"worker 0: the hub at {door.address} answers again"]


def test_a_hub_that_does_not_come_back_is_named_with_what_was_wanted(folder: Path) -> None:
    with hub_of(folder) as service:
        one = client(service)
        one.join()
        one.lease(0, 3, 30, 20)
    wait_for(lambda: not one._hub.client.connected, "the end of the connection")
    one._hub.timeout = 1.0
    with pytest.raises(DeadlineError) as caught:
        one.lease(0, 3, 30, 20)
    assert re.fullmatch(
        rf"waited 1\.0 s for hub at {service.address} on samples of epoch 3 "
        r"\(deadline sync\.timeout, 1 s; (the connection was lost|nothing listens there)\)",
        str(caught.value),
    )
    one.close()


def test_a_hub_that_is_not_there(folder: Path) -> None:
    # Nobody is given port 1; that of a hub that has ended may be another process's by now.
    with HubClient("tcp://127.0.0.1:1", None, timeout=0.5) as nobody:
        wait_for(lambda: nobody._hub.client.trouble == "nothing listens there", "the port's answer")
        with pytest.raises(DeadlineError, match="nothing listens"):
            nobody.join()


def test_a_hub_that_stood_still_buries_nobody() -> None:
    seconds = [100.0]
    clock = Clock(0.5, lambda: seconds[0])
    start = clock.now()
    seconds[0] += 0.2
    assert clock.now() == pytest.approx(start + 0.2)
    seconds[0] += 3600
    assert clock.now() == pytest.approx(start + 0.7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "0 workers"),
        ({"shards": -1}, "-1 shards"),
        ({"patience": 0.1}, "more than two heartbeats"),
        ({"listen": "somewhere"}, "no address"),
        ({"listen": "tcp://0.0.0.0:0"}, "a key file is needed"),
        ({"key_file": "/no/such/file"}, "cannot read the keys"),
    ],
)
def test_a_hub_that_cannot_be(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Service(folder, **options)
    assert not folder.exists()


# -- the commands -------------------------------------------------------------------------------------------

COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from atoll.cli import app, services
if not any(command.name == "hub" for command in app.app.registered_commands):
    services.register(app.app)
app.main()
"""


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
        **options,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    return process.returncode, out, err


@contextlib.contextmanager
def hub_command(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = start("hub", "--workers", "1", "--directory", str(folder), *arguments)
    try:
        where = folder / ADDRESS_FILE
        wait_for(lambda: where.exists() or process.poll() is not None, "the hub")
        assert process.poll() is None, process.communicate()
        yield process, where.read_text().strip()
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


def test_two_hubs_on_one_port(folder: Path, tmp_path: Path) -> None:
    with hub_command(folder, "--listen", "tcp://127.0.0.1:0") as (_, address):
        status, _, said = ended(start("hub", "--workers", "1", "--listen", address))
        assert status == 2
        assert said.strip().splitlines() == [
            f"atoll: hub: another process listens at {address} already; give another port, or stop that one"
        ]
        with HubClient(address, None, timeout=DEADLINE) as one:
            assert one.join().worker == 0


def test_a_hub_is_stopped_by_ctrl_c(folder: Path) -> None:
    with hub_command(folder, "--listen", "tcp://127.0.0.1:0") as (process, address):
        process.send_signal(signal.SIGINT)
        status, out, err = ended(process)
    assert status == 130
    assert "Traceback" not in err
    assert f"listens at {address}" in out


def test_a_hub_that_was_told_to_end_by_itself(folder: Path) -> None:
    with hub_command(folder, "--listen", "tcp://127.0.0.1:0", "--until-done") as (process, address):
        with HubClient(address, None, timeout=DEADLINE) as one:
            one.join()
        status, out, err = ended(process)
    assert (status, err) == (0, "")
    assert "run: over" in out


def test_keys_and_a_hub_that_wants_them(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.key"
    status, _, err = ended(start("keys", str(file)))
    assert (status, err) == (0, "")
    assert file.stat().st_mode & 0o077 == 0
    status, _, err = ended(start("keys", str(file)))
    assert status == 2
    assert "there is a file already" in err
    other = tmp_path / "other.key"
    write_keys(other, make_keys())
    with hub_command(folder, "--listen", "tcp://127.0.0.1:0", "--key-file", str(file)) as (_, address):
        for options, what in ((["--key-file", str(other)], "refuses this key"), ([], "wants a key")):
            status, _, err = ended(start("server", "--hub", address, "--shard", "0", *options))
            assert status == 2, err
            assert err.strip().splitlines() == [err.strip()]
            assert what in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hub"], "--workers"),
        (["hub", "--workers", "0"], "0 workers"),
        (["hub", "--workers", "1", "--patience", "soon"], "soon"),
        (["server", "--shard", "0"], "--hub"),
        (["server", "--shard", "-1", "--hub", "tcp://127.0.0.1:9"], "numbered from 0"),
        (["server", "--shard", "0", "--hub", "x"], "no address"),
        (["server", "--shard", "0", "--hub", "tcp://127.0.0.1:9", "--listen", "tcp://0.0.0.0:1"], "own"),
        (["server", "--shard", "0", "--hub", "tcp://127.0.0.1:9", "--optimizer", "Lion"], "module:Class"),
        (["server", "--shard", "0", "--hub", "tcp://127.0.0.1:9", "--link-rate", "fast"], "a rate"),
        (["server", "--shard", "0", "--hub", "tcp://127.0.0.1:9", "--link-rate", "0bit/s"], "more than 0"),
        (["server", "--shard", "0", "--hub", "tcp://127.0.0.1:9", "--udp-port", "65536"], "from 1 to 65535"),
        (["server", "--shard", "0", "--hub", "tcp://127.0.0.1:9", "--timeout", "3s"], "nothing listens"),
    ],
)
def test_commands_that_are_wrong_end_with_one_line(arguments: list[str], said: str) -> None:
    status, out, err = ended(start(*arguments))
    assert status == (1 if said == "nothing listens" else 2)
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


# -- data ---------------------------------------------------------------------------------------------------


def test_each_sample_counts_once_with_speeds_of_1_1_4_and_one_killed(folder: Path) -> None:
    epochs, length = 3, 302
    with hub_of(folder, workers=3, patience=5.0) as service:
        log = FakeLog(service.address)
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, service.address, seconds, str(epochs), str(length), *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for seconds, *more in (("0.04", "dies"), ("0.04",), ("0.01",))
        ]
        try:
            told = workers[0].stdout.readline()  # type: ignore[union-attr]
            assert told, workers[0].communicate()
            killed, held = map(int, told.split())  # its rank, and the samples of its batch
            workers[0].kill()
            for worker in workers[1:]:
                _, said = worker.communicate(timeout=2 * DEADLINE)
                assert worker.returncode == 0, said
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate(timeout=DEADLINE)
        for epoch in range(epochs):
            assert log.counts(epoch) == Counter(range(length))
        (died,) = service.decisions("worker died")
        (fenced,) = [each for each in service.decisions("fenced") if each.choice == died.choice]
        assert int(fenced.reason.split("; ")[1].split()[0]) >= held
        assert log.by(killed)[1] == log.by(killed)[2] == 0
        over = [decision for decision in service.decisions() if decision.choice == "over"]
        assert [decision.what for decision in over] == [f"epoch {e} of sampler 0" for e in range(epochs)]
        log.close()


def test_leases_are_quick(folder: Path) -> None:
    """Many batches a second ask for leases: one takes far less than a step."""
    with hub_of(folder) as service, client(service) as one:
        one.join()
        times = []
        for _ in range(200):
            begun = time.monotonic()
            one.lease(0, 0, 10**6, 64)
            times.append(time.monotonic() - begun)
        usual = sorted(times)[len(times) // 2]  # other work on the machine delays some of them
        assert usual < 0.05, f"{usual * 1000:.2f} ms"


def test_shards_message_of_the_most_shards_fits() -> None:
    from atoll.hub.main import SHARDS
    from atoll.hub.service import LIMIT

    assert len(encode(Shards(addresses=["x" * 256] * SHARDS))) < LIMIT
