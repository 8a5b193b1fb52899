"""A lab's sites: what they reach, what they are told, and that labs do not meet."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab_command import TWO, Labs, wait_for

THREE = """
seed = 1
[[site]]
name = "paris"
[[site]]
name = "berlin"
[[site]]
name = "oslo"
[[link]]
between = ["paris", "berlin"]
rate = "100Mbit/s"
delay = "30ms"
"""

# The first worker answers; the others ask it by TCP and UDP, and look what else they reach.
ECHO = """
import os, pathlib, socket, sys, time
first, worker, token, shared, outside = sys.argv[1:]
shared, workers = pathlib.Path(shared), 2

def meet(name):  # all workers of all labs come here
    (shared / f"{name}-{token}-{worker}").touch()
    until = time.monotonic() + 60
    while len(list(shared.glob(f"{name}-*"))) < int(os.environ["PARTS"]):
        assert time.monotonic() < until, f"waited 60 s for the others at {name}"
        time.sleep(0.01)

stream = socket.socket() if worker != "0" else socket.create_server((first, 7000))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
stream.settimeout(60), datagrams.settimeout(1)
if worker == "0":
    datagrams.bind((first, 7000))
meet("up")
if worker == "0":
    other, _ = stream.accept()
    other.sendall(token.encode())
    data, sender = datagrams.recvfrom(100) if not datagrams.settimeout(60) else None
    datagrams.sendto(data + token.encode(), sender)
else:
    start = time.monotonic()
    stream.connect((first, 7000))
    print("TCP", stream.recv(100).decode(), "after", time.monotonic() - start, flush=True)
    start, answer = time.monotonic(), b""
    for _ in range(60):
        datagrams.sendto(b"to ", (first, 7000))
        try:
            answer = datagrams.recv(100)
            break
        except TimeoutError:
            continue
    print("UDP", answer.decode(), "after", time.monotonic() - start, flush=True)
    for host, port in (("127.0.0.1", outside), ("192.0.2.1", 80), ("10.76.1.1", 80)):
        try:
            socket.create_connection((host, int(port)), timeout=10)
            print("reached", host, flush=True)
        except OSError as error:
            print("not", host, error.strerror, flush=True)
meet("end")
"""


@contextmanager
def listener() -> Iterator[int]:
    """A port of this machine's that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("count", [1, 2], ids=["one lab", "two labs"])
def test_sites_reach_one_another_and_nothing_else(labs: Labs, tmp_path: Path, count: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    started = []
    with listener() as port:
        for index in range(count):
            worker = labs.python(ECHO, "{first}", "{worker}", f"lab{index}", str(shared), str(port))
            topology = TWO.replace('"2ms"', '"30ms"')
            started.append(labs.start(worker, topology, f"lab{index}", PARTS=str(2 * count)))
        for index, process in enumerate(started):
            status, out, err = labs.end(process)
            assert status == 0, out + err
            said = {
                line.split()[2]: line.split() for line in out.splitlines() if line.startswith("[berlin 1]")
            }
            assert said["TCP"][3] == f"lab{index}", "another lab's site answered"
            assert said["UDP"][3:5] == ["to", f"lab{index}"]
            assert float(said["TCP"][-1]) >= 0.06
            assert float(said["UDP"][-1]) >= 0.06
            assert "reached" not in said
            assert out.count("[berlin 1] not ") == 3
    assert labs.left() == []


def test_only_direct_links_carry_packets(labs: Labs) -> None:
    """Oslo has no link: what it sends goes nowhere, and is counted."""
    source = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for _ in range(5): s.sendto(b'x', (sys.argv[1], 9))\n"
    )
    status, out, err = labs.run(
        ["sh", "-c", "[ {site} != oslo ] || $0 $1 {first}", *labs.python(source)], THREE
    )
    assert status == 0, out + err
    record = labs.record()
    assert record["emulator"]["unrouted"] == 5
    assert [link["offered"]["packets"] for link in record["links"]] == [0, 0]
    assert "dropped: 5 packets" in out


# Both ends of a connection say what its congestion control is.
CONTROL = """
import socket, sys, time
first, worker = sys.argv[1:]
if worker == "0":
    with socket.create_server((first, 7000)) as server:
        server.settimeout(60)
        stream, _ = server.accept()
else:
    until = time.monotonic() + 60
    while True:
        try:
            stream = socket.create_connection((first, 7000), timeout=60)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until, "waited 60 s for the other"
            time.sleep(0.05)
name = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
print("control", name.rstrip(b"\\0").decode())
"""


def test_sites_have_the_congestion_control_that_is_asked_for(labs: Labs) -> None:
    there = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    for name in there:
        topology = f'congestion_control = "{name}"\n{TWO}'
        status, out, err = labs.run(labs.python(CONTROL, "{first}", "{worker}"), topology)
        assert (status, out.count(f"control {name}\n")) == (0, 2), out + err
    status, out, err = labs.run(["true"], f'congestion_control = "none-such"\n{TWO}')
    assert status == 2
    assert f"congestion_control: this kernel has no 'none-such'; it has {', '.join(there)}" in err


def test_a_command_is_told_where_it_is(labs: Labs) -> None:
    topology = TWO.replace('name = "berlin"', 'name = "berlin"\nworkers = 2\nspeed = [1.0, 0.25]')
    words = ["{site}", "{index}", "{worker}", "{workers}", "{sites}", "{address}", "{first}", "{other}", "{"]
    show = "echo $@; env; hostname; getent hosts berlin; cat /proc/1/comm"
    status, out, err = labs.run(["sh", "-c", show, "sh", *words], topology, ATOLL_HUB="tcp://nowhere:1")
    assert status == 0, out + err
    lines = out.splitlines()
    assert "[paris 0] paris 0 0 3 2 10.77.1.1 10.77.1.1 {other} {" in lines
    assert "[berlin 2] berlin 1 2 3 2 10.77.2.1 10.77.1.1 {other} {" in lines
    last = [line.removeprefix("[berlin 2] ") for line in lines if line.startswith("[berlin 2]")]
    assert {"ATOLL_LAB_SITE=berlin", "ATOLL_LAB_ADDRESS=10.77.2.1", "ATOLL_LAB_WORKER=2"} <= set(last)
    assert {"ATOLL_SPEED=0.25", "GLOO_SOCKET_IFNAME=wan0", "berlin"} <= set(last)
    assert "10.77.2.1       berlin" in last
    assert not [line for line in lines if "ATOLL_HUB" in line], "another run's hub"
    assert not [line for line in lines if line.startswith("[berlin 1] ATOLL_SPEED")]


def test_output_is_passed_on_as_it_comes_and_kept(labs: Labs, tmp_path: Path) -> None:
    """Each stream to its own, whole lines with a name, of which the log needs none."""
    go = tmp_path / "go"
    script = "printf 'half'; sleep 0; echo ' a line'; echo wrong >&2; "
    script += f"until [ -e {go} ]; do sleep 0.05; done; printf end"
    process = labs.start(["sh", "-c", script])
    assert process.stdout is not None
    # Not by readline: what it has read ahead would be lost to those who read on.
    first: list[bytes] = []
    descriptor = process.stdout.fileno()
    reader = threading.Thread(target=lambda: first.append(os.read(descriptor, 2**16)))
    reader.start()
    wait_for(lambda: first, "a line of a worker that goes on")
    reader.join()
    go.touch()
    status, out, err = labs.end(process)
    assert status == 0
    lines = (first[0].decode() + out).splitlines()
    assert sorted(line for line in lines if line.startswith("[")) == [
        "[berlin 1] end", "[berlin 1] half a line", "[paris 0] end", "[paris 0] half a line",
    ]  # fmt: skip
    assert sorted(err.splitlines()) == ["[berlin 1] wrong", "[paris 0] wrong"]
    kept = (tmp_path / "records-lab-0" / "logs" / "worker-1.log").read_text()
    assert sorted(kept.splitlines()) == ["end", "half a line", "wrong"]
