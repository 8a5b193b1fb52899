"""`atoll link serve` and `atoll link test`, as processes: what they print; and each mistake's one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from atoll.cli.app import main
from atoll.core.errors import PeerLostError, UserError
from atoll.ltp.events import Delivered
from atoll.ltp.order import Extent
from atoll.ltp.settings import LtpSettings
from atoll.net import linkserver, linktester, ltpflows, tcpflows
from atoll.net.keys import make_keys, write_keys
from atoll.net.linkoptions import LinkTestOptions
from atoll.net.linkserver import LinkServer
from atoll.net.linktester import LinkTester
from atoll.net.ltpflows import LtpFlows, LtpTransport
from atoll.net.ltplink import LtpLink
from atoll.net.tcpflows import TcpFlows, TcpSender
from atoll.wire.datagrams import LTP_VERSION
from atoll.wire.messages import FlowLost, LtpOpened, OpenLtp, Taken

DEADLINE = 60.0  # seconds; a process is up in less than one on an idle machine
ANY = "tcp://127.0.0.1:0"


def command(*arguments: str, code: str = "") -> list[str]:
    return [sys.executable, "-c", f"{code}\nfrom atoll.cli.app import main; main()", "link", *arguments]


def run(*arguments: str, code: str = "") -> tuple[int, str, str]:
    """The exit status, stdout and stderr of `atoll link ...`."""
    done = subprocess.run(
        command(*arguments, code=code), capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    return done.returncode, done.stdout, done.stderr


def run_here(*arguments: str) -> tuple[int, str, str]:
    """The same in this process, for a command that ends at once."""
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["atoll", "link", *arguments]),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), err.getvalue()


def mistake(*arguments: str, code: str = "") -> str:
    """The one line of a command that ends with status 2."""
    ended, out, err = run(*arguments, code=code) if code else run_here(*arguments)
    assert (ended, out) == (2, ""), (ended, out, err)
    assert err.startswith("atoll: "), err
    assert err.count("\n") == 1, err
    return err.removeprefix("atoll: ").rstrip("\n")


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < until, f"waited {DEADLINE:g} s for {what}"
        time.sleep(0.02)
    return found


class Served:
    """A process of `atoll link serve`."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            command("serve", "--listen", "127.0.0.1:0", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"tcp://(\S+), ", self.line)
        assert found, (self.line, self.process.communicate(timeout=DEADLINE))
        self.address = found[1]

    def struck_by(self, what: str) -> str:
        """Code by which a test sends this signal to the server when it has three transfers."""
        return f"""
import os, signal
from atoll.net import linktester
take = linktester._Turns.take
def strike(turns):
    take(turns)
    if len(turns.outcome.turns) == 3:
        os.kill({self.process.pid}, signal.{what})
linktester._Turns.take = strike
"""

    def end(self, signum: int = signal.SIGINT) -> tuple[int, str, str]:
        self.process.send_signal(signum)
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, err


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Served]:
    server = Served(*arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate(timeout=DEADLINE)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("keys")
    paths = (folder / "keys", folder / "others")
    for path in paths:
        write_keys(path, make_keys())
    return paths


@pytest.fixture(scope="module")
def server(keys: tuple[Path, Path]) -> Iterator[Served]:
    """One with keys, for the tests that do it no harm."""
    with served("--key-file", str(keys[0])) as each:
        yield each


# -- it measures


def test_a_link_is_measured_and_ctrl_c_ends_the_server(keys: tuple[Path, Path]) -> None:
    with served("--key-file", str(keys[0])) as server:
        assert "with keys" in server.line
        asked = ("test", server.address, "--bytes", "1e6", "--key-file", str(keys[0]))
        status, out, err = run(*asked, "--transport", "tcp,tcp:reno", "--count", "5", "--json")
        assert (status, err) == (0, "")
        made = json.loads(out)
        assert [each["transport"] for each in made["transports"]] == ["tcp", "tcp:reno"]
        for each in made["transports"]:
            assert (each["transfers"], len(each["seconds"]), each["stopped"]) == (5, 5, "")
            assert 0 < each["median"] <= each["p99"] <= each["worst"] < DEADLINE
            assert each["sent"] > 0
        assert 0 < made["round_trip"] < 1
        status, out, err = run(*asked, "--transport", "tcp", "--count", "3", "--warm", "0")
        assert (status, err) == (0, "")
        assert "transfers of 1 MB; until usable:" in out
        assert out.splitlines()[-1].startswith("only tcp was measured")
        ended = server.end()
        assert ended == (0, f"stopped, after {2 * (5 + 2) + 3} transfers\n", "")


def test_several_clients_are_served_at_once(server: Served, keys: tuple[Path, Path]) -> None:
    asked = command(
        "test", server.address, "--key-file", str(keys[0]), "--transport", "tcp", "--bytes", "4e6", "--json"
    )
    started = [
        subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for process in started:
        out, err = process.communicate(timeout=DEADLINE)
        assert (process.returncode, err) == (0, "")
        assert json.loads(out)["transports"][0]["transfers"] == 20


def test_ctrl_c_ends_a_test_and_the_server_goes_on(server: Served, keys: tuple[Path, Path]) -> None:
    asked = ("test", server.address, "--key-file", str(keys[0]), "--transport", "tcp", "--bytes", "1e7")
    process = subprocess.Popen(
        command(*asked, "--count", "10000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: _sockets_of(process.pid) > 1, "the client's second connection")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out, err) == (130, "", "atoll: stopped by Ctrl-C\n")
    assert run(*asked, "--count", "1")[0] == 0


def _sockets_of(pid: int) -> int:
    """How many sockets a process has open: one is the channel's, the next a transport's."""
    found = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(entry.path).startswith("socket:")  # noqa: PTH115
    return found


def test_the_loss_tolerant_transport_is_measured_beside_tcp(server: Served, keys: tuple[Path, Path]) -> None:
    assert re.search(r"transfers come to TCP port \d+ and UDP port \d+$", server.line)
    asked = ("--bytes", "2e6", "--count", "3", "--warm", "1", "--high", "0.25", "--json")
    named = ("--transport", "ltp,ltp:reliable,tcp")
    status, out, err = run("test", server.address, "--key-file", str(keys[0]), *asked, *named)
    assert (status, err) == (0, "")
    ours, reliable, tcp = json.loads(out)["transports"]
    assert [each["transfers"] for each in (ours, reliable, tcp)] == [3, 3, 3]
    assert ours["detail"].startswith("25% high, sealed, one port; ")
    assert reliable["detail"].startswith("all reliable, sealed, one port; ")
    assert ours["blocks"] == reliable["blocks"] > 3 * 2e6 / 1400
    assert ours["sent"] >= ours["blocks"]
    assert tcp["blocks"] == 0
    for each in (ours, reliable):
        assert 0 < each["median"] <= each["worst"] < DEADLINE
        assert (each["borne"] + each["filled"]) / each["blocks"] < 0.03
    assert reliable["borne"] == reliable["filled"] == 0


def test_several_ports_and_no_seal_are_what_the_server_says() -> None:
    with served("--stripes", "2", "--no-seal") as server:
        status, out, _ = run("test", server.address, "--bytes", "1e5", "--count", "1", "--transport", "ltp")
        assert (status, "NOT sealed, 2 ports; " in out) == (0, True), out
    assert mistake("serve", "--stripes", "9") == "--stripes 9: from 1 to 8"


# -- mistakes


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--high", "1.5"], "--high 1.5: a share is between 0 and 1"),
        (["--bytes", "much"], "--bytes: 'much' is not a size; write it like 2GiB"),
        (["--key-file", "/nowhere"], "/nowhere: cannot read the keys"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(arguments: list[str], line: str) -> None:
    assert mistake("test", "127.0.0.1:9", *arguments).startswith(line)


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("10.1.2.3:47710", "is on another machine, so the run's key file is needed"),
        ("somewhere", "'tcp://somewhere' is no address; write"),
    ],
)
def test_an_address_that_cannot_be_measured(address: str, line: str) -> None:
    assert line in mistake("test", address)


def test_nobody_answers_at_an_address(keys: tuple[Path, Path]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        said = mistake("test", address, "--timeout", "500ms", "--key-file", str(keys[0]))
        assert said.startswith(
            f"no link server answered at tcp://{address} within 0.5 s: nothing listens there; is `atoll "
            "link serve` running there"
        )
        holder.listen()  # and says nothing
        said = mistake("test", address, "--timeout", "500ms", "--key-file", str(keys[0]))
        assert f"no link server answered at tcp://{address} within 0.5 s" in said


def test_another_key_is_refused(server: Served, keys: tuple[Path, Path]) -> None:
    said = mistake("test", server.address, "--key-file", str(keys[1]))
    assert said == f"link server at tcp://{server.address} refuses this key"
    assert "wants a key: give the run's key file" in mistake("test", server.address)


def test_another_version_of_the_datagrams_is_refused(server: Served, keys: tuple[Path, Path]) -> None:
    newer = "import atoll.wire.datagrams as datagrams; datagrams.LTP_VERSION += 1"
    said = mistake("test", server.address, "--key-file", str(keys[0]), code=newer)
    assert re.search(
        r"refused: it speaks version (\d+) of the loss-tolerant transport, and this side version (\d+)", said
    )


def test_another_version_of_the_protocol_is_refused(server: Served, keys: tuple[Path, Path]) -> None:
    older = "import atoll.wire.base as base; base.VERSION -= 1"
    said = mistake("test", server.address, "--key-file", str(keys[0]), code=older)
    assert re.search(r"refused: it speaks version (\d+) of the protocol, and this side version (\d+)", said)


def test_a_congestion_control_that_the_kernel_has_not(server: Served, keys: tuple[Path, Path]) -> None:
    said = mistake("test", server.address, "--key-file", str(keys[0]), "--transport", "tcp:bbr7")
    assert "this kernel has no congestion control 'bbr7'; it has" in said
    assert "reno" in said


def test_addresses_that_cannot_be_listened_at(server: Served, keys: tuple[Path, Path]) -> None:
    said = mistake("serve", "--listen", server.address)
    assert said.startswith(f"link server: another process listens at tcp://{server.address} already")
    assert "so a key file is needed" in mistake("serve", "--listen", "0.0.0.0:47710")
    elsewhere = ("serve", "--listen", "192.0.2.1:47710", "--key-file", str(keys[0]))
    assert "no address of this machine" in mistake(*elsewhere)
    assert "is no address; write" in mistake("serve", "--listen", "47710")
    said = mistake("serve", "--listen", "127.0.0.1:65535")
    assert said.endswith("transfers come to the next port, so 65534 is the last")
    said = mistake("serve", "--listen", "127.0.0.1:65533", "--stripes", "8")
    assert said == "UDP ports 65534 to 65541, one for each stripe: 65535 is the last"


def test_the_port_for_transfers_is_taken() -> None:
    with socket.socket() as beside:
        for _ in range(50):
            with contextlib.suppress(OSError, OverflowError), socket.socket() as holder:
                holder.bind(("127.0.0.1", 0))
                port = holder.getsockname()[1]
                beside.bind(("127.0.0.1", port + 1))
                beside.listen()
                break
        said = mistake("serve", "--listen", f"127.0.0.1:{port}")
    assert said == (
        f"link server: another process has TCP port {port + 1} of 127.0.0.1 already, to which transfers come "
        f"(--listen's port and 1): give another port, or stop that one"
    )


@pytest.mark.parametrize("transport", [pytest.param("tcp", marks=pytest.mark.soak), "ltp"])
def test_a_server_that_dies_in_the_middle_is_one_line(keys: tuple[Path, Path], transport: str) -> None:
    with served("--key-file", str(keys[0])) as server:
        asked = (
            "test",
            server.address,
            "--key-file",
            str(keys[0]),
            "--transport",
            transport,
            "--bytes",
            "1e8",
        )
        process = subprocess.Popen(
            command(*asked, "--count", "10000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait_for(lambda: _sockets_of(process.pid) > 1, "the client's second connection")
        server.process.kill()
        out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out, err.count("\n")) == (1, "", 1), err
    assert re.match(r"atoll: .*(is gone: the connection was lost|the connection ended)", err), err


@pytest.mark.parametrize("transport", [pytest.param("tcp", marks=pytest.mark.soak), "ltp"])
def test_a_link_that_is_dead_is_noticed_by_its_silence(transport: str) -> None:
    """A server that stands still keeps its connections: only its silence tells."""
    with served() as server:
        asked = ("test", server.address, "--transport", transport, "--bytes", "1e6", "--timeout", "3s")
        began = time.monotonic()
        status, out, err = run(*asked, "--count", "10000", code=server.struck_by("SIGSTOP"))
        assert time.monotonic() - began < DEADLINE  # and --deadline is two minutes
    assert status == 1
    assert err == (
        f"atoll: link server at tcp://{server.address} is silent: nothing came for 3 s (--timeout), though "
        "it speaks each second\n"
    )
    assert re.search(rf"^{transport} +[\d.]+ m?s", out, re.MULTILINE)


@pytest.mark.parametrize("module", ["typer", "atoll.net.linktester"])
def test_ctrl_c_while_the_command_starts_is_one_line(module: str) -> None:
    code = f"""
import os, signal, sys
class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Early())
from atoll.cli.entry import main
main()
"""
    asked = [sys.executable, "-c", code, "link", "test", "127.0.0.1:9"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "atoll: stopped by Ctrl-C\n")


def test_what_was_measured_before_the_server_died_is_printed() -> None:
    with served() as server:
        asked = ("test", server.address, "--transport", "tcp", "--bytes", "1e4", "--count", "10000")
        status, out, err = run(*asked, "--json", code=server.struck_by("SIGKILL"))
    assert (status, err.count("\n")) == (1, 1), err
    assert re.match(r"atoll: link server at .* is gone: the connection was lost", err), err
    assert 3 <= json.loads(out)["transports"][0]["transfers"] < 10000


def test_a_transfer_that_is_late_stops_its_transport(server: Served, keys: tuple[Path, Path]) -> None:
    asked = ("test", server.address, "--key-file", str(keys[0]), "--transport", "tcp", "--bytes", "1e8")
    status, out, err = run(*asked, "--deadline", "1ms")
    assert (status, err) == (1, "")
    assert "tcp: a transfer was not usable within 0.001 s (--deadline); no more were made" in out
    assert out.splitlines()[-1] == "nothing was measured"


def test_a_slow_transport_makes_its_transfers_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each is slow as soon as it has made one."""
    monkeypatch.setattr(linktester, "_SLOW_SECONDS", -1.0)
    asked = LinkTestOptions(["tcp", "tcp:reno"], 1000, count=3, warm=1, timeout=DEADLINE)
    said: list[str] = []
    with serving() as server, LinkTester(server.address, None, asked) as client:
        report = client.measure(said.append)
    assert [len(each.turns) for each in report.outcomes] == [3, 3]
    assert said[1:] == [f"{n} of 3 transfers of {name}" for name in ("tcp", "tcp:reno") for n in (1, 2, 3)]


def test_a_budget_ends_a_transport_early(server: Served, keys: tuple[Path, Path]) -> None:
    asked = ("test", server.address, "--key-file", str(keys[0]), "--transport", "tcp", "--bytes", "1e7")
    status, out, _ = run(*asked, "--budget", "1ms", "--json")
    (made,) = json.loads(out)["transports"]
    assert (status, made["transfers"]) == (0, 1)
    assert made["stopped"] == "1 of 20 transfers: they took more than 0.001 s (--budget)"


@pytest.mark.parametrize("warm", [0, 5])
def test_transfers_to_warm_up_are_part_of_the_budget(warm: int) -> None:
    asked = LinkTestOptions(["tcp"], 10**6, count=20, warm=warm, timeout=DEADLINE, budget=1e-9)
    with serving() as server, LinkTester(server.address, None, asked) as client:
        (outcome,) = client.measure().outcomes
        assert (len(outcome.turns), outcome.packets.sent > 0) == (1, True)
        assert server.served == 1


def test_a_transport_that_is_lost_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose first transfer is of another chunk than the server knows, and is refused."""
    monkeypatch.setattr(ltpflows, "CHUNK", 77)
    asked = LinkTestOptions(["ltp", "tcp"], 10_000, count=3, warm=0, timeout=DEADLINE)
    with serving() as server, LinkTester(server.address, None, asked) as client:
        assert isinstance(server.ltp, LtpFlows)
        taking = server.ltp._link
        monkeypatch.setattr(taking, "open", _knowing_chunk_0(taking.open))
        report = client.measure()
    ltp, tcp = report.outcomes
    assert (len(ltp.turns), len(tcp.turns)) == (0, 3)
    assert re.search("it refused a transfer: .*; no more transfers were made", ltp.stopped)


def _knowing_chunk_0(opens: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, **named: Any) -> Any:
        return opens(*arguments, **{**named, "extents": {0: Extent(2500, np.dtype(np.float32))}})

    return made


# -- the server's bounds, within this process


@contextlib.contextmanager
def serving(make_ltp: Any = LtpFlows) -> Iterator[LinkServer]:
    over = threading.Event()
    with LinkServer(ANY, None, make_ltp) as server:
        thread = threading.Thread(target=server.serve, args=(over.is_set,))
        thread.start()
        try:
            yield server
        finally:
            over.set()
            thread.join(DEADLINE)
            assert not thread.is_alive()


def wish(size: int = 1000, **others: Any) -> LinkTestOptions:
    return LinkTestOptions(["tcp"], size, count=1, warm=0, timeout=DEADLINE, **others)


def test_clients_are_bounded_and_who_is_gone_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linkserver, "MOST_CLIENTS", 2)
    with serving() as server, LinkTester(server.address, None, wish()) as first:
        second = LinkTester(server.address, None, wish())
        with pytest.raises(UserError, match="it serves 2 clients already; try again later"):
            LinkTester(server.address, None, wish())
        second._client.abandon()  # as a process that was killed

        def there_is_room() -> bool:
            with contextlib.suppress(UserError), LinkTester(server.address, None, wish()) as third:
                return third.measure().outcomes[0].turns[0].there == 1000
            return False

        wait_for(there_is_room, "room for another client")
        assert first.measure().outcomes[0].turns[0].there == 1000


def test_memory_is_bounded_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linkserver, "MOST_MEMORY", 5000)
    with serving() as server:
        with LinkTester(server.address, None, wish(3000)) as first:
            taken = first.open("tcp")
            with (
                LinkTester(server.address, None, wish(3000)) as second,
                pytest.raises(UserError, match=r"transfers of 2.9 KiB: it has 2.0 KiB left of 4.9 KiB"),
            ):
                second.open("tcp")
            taken.close()
            first._client.send(b"\xc0")  # no message: refused, and nothing else happens
            with pytest.raises(UserError, match="refused: that is no message of this protocol"):
                wait_for(first.look, "a refusal")
        with LinkTester(server.address, None, wish(3000)) as third:
            assert third.measure().outcomes[0].turns[0].there == 3000
        wait_for(lambda: not server._clients, "all clients to be forgotten")


def test_a_client_that_is_silent_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linkserver, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(linkserver, "_PING_SECONDS", 0.1)
    with serving() as server, LinkTester(server.address, None, wish()) as client:
        with pytest.raises(UserError, match="refused: nothing was heard for 0 s"):
            wait_for(client.look, "the server's word")
        wait_for(lambda: not server._clients, "the client to be forgotten")


class _Deaf:
    """Has a UDP port at which nothing listens, as behind a firewall."""

    def __init__(self, host: str, _port: int, _told: object) -> None:
        self._holder = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._holder.bind((host, 0))
        self.ports = [self._holder.getsockname()[1]]
        self.dropped: list[int] = []

    def open(self, number: int, elements: int, datagram_bytes: int) -> tuple[int, bytes, bool]:
        return number, bytes(32), True

    def drop(self, number: int) -> None:
        self.dropped.append(number)

    def close(self) -> None:
        self._holder.close()


def test_where_datagrams_do_not_get_through_tcp_is_measured_and_it_is_said() -> None:
    asked = LinkTestOptions(["ltp", "tcp"], 1000, count=2, warm=0, timeout=0.5)
    with serving(_Deaf) as server:
        with LinkTester(server.address, None, asked) as client:
            report = client.measure()
        wait_for(lambda: server.ltp.dropped, "the session to be dropped")  # type: ignore[union-attr]
    ltp, tcp = report.outcomes
    assert len(tcp.turns) == 2
    assert re.fullmatch(
        r"no datagram came back from 127.0.0.1, UDP port \d+ within 0.5 s.*; does a firewall let UDP "
        r"through, both ways\?",
        ltp.stopped,
    )
    assert f"ltp: {ltp.stopped}" in report.lines()


def test_a_server_may_take_no_datagrams() -> None:
    asked = LinkTestOptions(["ltp", "tcp"], 1000, count=1, warm=0, timeout=DEADLINE)
    with (
        serving(None) as server,
        LinkTester(server.address, None, asked) as client,
        pytest.raises(UserError, match="refused: it takes no datagrams: it was started for TCP alone"),
    ):
        client.measure()


def test_a_session_whose_client_is_gone_is_closed() -> None:
    asked = LinkTestOptions(["ltp"], 100_000, count=1, warm=0, timeout=DEADLINE)
    with serving() as server:
        client = LinkTester(server.address, None, asked)
        client.open("ltp")  # and its sender is kept from saying good-bye
        client._client.abandon()
        flows = server.ltp
        assert isinstance(flows, LtpFlows)
        wait_for(lambda: not server._clients and not flows._open, "the client to be forgotten")
        wait_for(lambda: not flows._link._sessions, "its session's end")


def _flow_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("atoll link flow")]


def test_a_session_that_refuses_a_transfer_is_ended_with_its_flow() -> None:
    asked = LinkTestOptions(["ltp"], 4000, count=1, warm=0, timeout=DEADLINE)
    with serving() as server, LinkTester(server.address, None, asked) as client, LtpLink("127.0.0.1") as link:
        flows = server.ltp
        assert isinstance(flows, LtpFlows)
        for number in range(2 * linkserver.MOST_FLOWS):
            wish = OpenLtp(number=number, version=LTP_VERSION, elements=1000, datagram_bytes=1400)
            opened = client._ask(wish, LtpOpened, "a session")
            addresses = [("127.0.0.1", port) for port in opened.ports]
            session = link.open(opened.session, opened.secret, addresses, True)
            session.send(77, 1, np.ones(10, np.float32))  # no chunk of the server's

            def lost(flow: int = opened.flow) -> bool:
                client.look()
                return flow in client._lost

            wait_for(lost, "the flow's end")
            assert "it refused a transfer: " in client._lost[opened.flow]
        wait_for(lambda: not (flows._open or flows._link._sessions or _flow_threads()), "nothing to be left")


def test_threads_of_dropped_flows_have_ended_when_the_server_is_closed() -> None:
    with serving() as server:
        client = LinkTester(
            server.address, None, LinkTestOptions(["ltp"], 4000, count=1, warm=0, timeout=DEADLINE)
        )
        client.open("ltp")
        client._client.abandon()
        wait_for(lambda: not server._clients, "the client to be forgotten")
    assert not _flow_threads()


def test_a_session_takes_no_more_memory_than_it_is_charged_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ltpflows.ELEMENT_BYTES == linkserver._LTP_MEMORY
    monkeypatch.setattr(ltpflows, "ELEMENT_BYTES", 4)  # so that one transfer alone is more
    asked = LinkTestOptions(["ltp"], 4_000_000, count=1, warm=0, timeout=DEADLINE)
    with serving() as server, LinkTester(server.address, None, asked) as client, LtpLink("127.0.0.1") as link:
        wish = OpenLtp(number=1, version=LTP_VERSION, elements=10**6, datagram_bytes=1400)
        opened = client._ask(wish, LtpOpened, "a session")
        addresses = [("127.0.0.1", port) for port in opened.ports]
        session = link.open(opened.session, opened.secret, addresses, True)
        session.send(0, 1, np.ones(10**6, np.float64))

        def lost() -> bool:
            client.look()
            return opened.flow in client._lost

        wait_for(lost, "the flow's end")
        assert re.search(r"it refused a transfer: .* B are the most", client._lost[opened.flow])


def test_nothing_is_taken_at_the_end_that_sends() -> None:
    link = LtpFlows("127.0.0.1", 0, lambda _told: None)
    taken = link._link
    secret = bytes(range(32))
    session = taken.open(7, secret, None, False)
    opened = LtpOpened(number=1, flow=1, session=7, ports=link.ports, secret=secret, sealed=True)
    sender = LtpTransport(
        "127.0.0.1",
        opened,
        np.ones(1000, np.float32),
        high=0.2,
        reliable=False,
        seed=0,
        settings=LtpSettings(),
        seconds=DEADLINE,
        look=no_look,
    )
    number = session.send(0, 0, np.ones(1000, np.float32))
    (delivered,) = wait_for(
        lambda: [each for each in session.events(0.05) if isinstance(each, Delivered)], "the other end's word"
    )
    assert (delivered.transfer, delivered.reason.split(":")[0]) == (number, "refused")
    sender.close()
    link.close()


# -- TCP's end that takes


class Taker:
    """A `TcpFlows`, and what it told."""

    def __init__(self) -> None:
        self.told: list[Taken | FlowLost] = []
        self.flows = TcpFlows("127.0.0.1", 0, self.told.append)
        self.place = ("127.0.0.1", self.flows.port)

    def __enter__(self) -> Taker:
        return self

    def __exit__(self, *_error: object) -> None:
        self.flows.close()


def no_look() -> None:
    return None


def test_transfers_are_told_one_by_one() -> None:
    with Taker() as taker:
        sender = TcpSender(taker.place, taker.flows.open(7, 3_000_000), "", DEADLINE)
        for _ in range(3):
            sender.send(memoryview(bytes(3_000_000)), no_look)
        wait_for(lambda: len(taker.told) == 3, "three transfers")
        sender.close()
    assert [(each.flow, each.transfer) for each in taker.told if isinstance(each, Taken)] == [
        (7, 0),
        (7, 1),
        (7, 2),
    ]
    times = [each.at for each in taker.told if isinstance(each, Taken)]
    assert times == sorted(times)


def test_another_token_and_a_token_said_twice_are_hung_up_on() -> None:
    with Taker() as taker:
        token = taker.flows.open(1, 1000)
        good = TcpSender(taker.place, token, "", DEADLINE)
        good.send(memoryview(bytes(1000)), no_look)
        wait_for(lambda: taker.told, "the transfer")
        for wrong in (token, bytes(16)):
            with socket.create_connection(taker.place, DEADLINE) as link:
                link.sendall(wrong + struct.pack("<Q", 1000) + bytes(1000))
                with contextlib.suppress(ConnectionError):
                    assert link.recv(1) == b""
        good.send(memoryview(bytes(1000)), no_look)
        wait_for(lambda: len(taker.told) == 2, "the next transfer")
        good.close()


def test_who_says_no_token_has_no_room_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpflows, "GREETING_SECONDS", 0.2)
    monkeypatch.setattr(tcpflows, "MOST_STRANGERS", 2)
    with Taker() as taker, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(taker.place, DEADLINE)) for _ in range(3)]
        assert strangers[2].recv(1) == b""  # at once: there were two already
        for each in strangers[:2]:
            assert each.recv(1) == b""  # later


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack("<Q", 2**62), "a transfer of another length than was agreed"),
        (struct.pack("<Q", 1000) + bytes(10), "closed in the middle of a transfer"),
    ],
)
def test_a_sender_that_breaks_off_or_lies_is_told(sent: bytes, reason: str) -> None:
    with Taker() as taker:
        with socket.create_connection(taker.place, DEADLINE) as link:
            link.sendall(taker.flows.open(5, 1000) + sent)
            link.shutdown(socket.SHUT_WR)
            wait_for(lambda: taker.told, "the end")
        (told,) = taker.told
        assert isinstance(told, FlowLost)
        assert (told.flow, reason in told.reason) == (5, True)


def test_a_sender_that_falls_silent_in_the_middle_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpflows, "SILENCE_SECONDS", 0.1)
    with Taker() as taker, socket.create_connection(taker.place, DEADLINE) as link:
        link.sendall(taker.flows.open(5, 1000) + struct.pack("<Q", 1000) + bytes(10))
        wait_for(lambda: taker.told, "the end")
        (told,) = taker.told
        assert isinstance(told, FlowLost)
        assert "nothing came for 0.1 s in the middle of a transfer" in told.reason


def test_a_dropped_flow_ends_its_connection() -> None:
    with Taker() as taker:
        sender = TcpSender(taker.place, taker.flows.open(5, 10**6), "", DEADLINE)
        sender.send(memoryview(bytes(10**6)), no_look)
        wait_for(lambda: taker.told, "the transfer")
        taker.flows.drop(5)
        with pytest.raises(PeerLostError, match="the connection ended"):
            sender.send(memoryview(bytes(10**8)), no_look)  # more than what buffers hold
        sender.close()


class _Busy(dict[bytes, Any]):
    """Flows: while they are walked, another thread opens one."""

    flows: TcpFlows

    def items(self) -> Any:
        for number, each in enumerate(super().items()):
            opener = threading.Thread(target=self.flows.open, args=(1000 + number, 1))
            opener.start()
            opener.join(0.2)  # it may have to wait for us
            yield each


def test_a_flow_may_be_opened_while_another_is_dropped() -> None:
    with Taker() as taker:
        busy = _Busy()
        busy.flows, taker.flows._flows = taker.flows, busy
        for number in (1, 2):
            taker.flows.open(number, 1)
        taker.flows.drop(1)
        wait_for(lambda: len(busy) == 3, "one to be dropped, and two to be opened")
        assert taker.told == []
        assert taker.flows._thread.is_alive()


def test_a_thread_that_fails_tells_all_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: TcpFlows, _now: float) -> None:
        if broken.is_set():
            raise ValueError("broken")

    broken = threading.Event()
    monkeypatch.setattr(TcpFlows, "_end_silent", fail)
    with Taker() as taker:
        sender = TcpSender(taker.place, taker.flows.open(5, 1000), "", DEADLINE)
        taker.flows.open(6, 1000)
        sender.send(memoryview(bytes(1000)), no_look)
        wait_for(lambda: taker.told, "the transfer")
        broken.set()
        wait_for(lambda: len(taker.told) == 3, "the end of both flows")
        lost = [each for each in taker.told if isinstance(each, FlowLost)]
        assert {each.flow for each in lost} == {5, 6}
        assert {each.reason for each in lost} == {"what takes TCP transfers has failed: ValueError: broken"}
        with pytest.raises(UserError, match="what takes TCP transfers has failed"):
            taker.flows.open(7, 1000)
        sender.close()


def test_a_sender_that_waits_can_be_called_off() -> None:
    """A server that stands still: its buffers fill, and the sender looks round while it waits."""

    class CalledOffError(Exception):
        pass

    def look() -> None:
        raise CalledOffError

    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = TcpSender(listener.getsockname(), bytes(16), "", DEADLINE)
        with pytest.raises(CalledOffError):
            sender.send(memoryview(bytes(10**8)), look)
        sender.close()
