"""`atoll link serve`, `atoll link test`: how fast the link between two machines is, by each transport."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from atoll.core.config import KEYS_VARIABLE
from atoll.core.errors import ConfigError, PeerLostError, UserError
from atoll.core.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from atoll.net.linkserver import LinkServer

_Number = TypeVar("_Number", int, float)
_DEFAULT_LISTEN = "127.0.0.1:47710"

_KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        envvar=KEYS_VARIABLE,
        help="Keys that both sides have (atoll keys FILE); without, only this machine can be measured.",
    ),
]


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    link = typer.Typer(help="Measure the link between two machines.", rich_markup_mode=None)
    link.command("serve")(serve)
    link.command("test")(measure)
    app.add_typer(link, name="link")


def serve(
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Transfers come to PORT + 1, by TCP and UDP; 0: any free."),
    ] = _DEFAULT_LISTEN,
    key_file: _KeyFileOption = None,
    stripes: Annotated[int, typer.Option(metavar="N", help="UDP ports that a session uses.")] = 1,
    seal: Annotated[
        bool, typer.Option("--seal/--no-seal", help="Whether datagrams are encrypted; in doubt, they are.")
    ] = True,
) -> None:
    """Be the other end of `atoll link test`, until it is stopped."""
    from atoll.net.keys import read_keys
    from atoll.net.linkserver import LinkServer
    from atoll.net.ltpflows import LtpFlows
    from atoll.wire.linktest import MOST_PORTS

    if not 1 <= stripes <= MOST_PORTS:
        raise UserError(f"--stripes {stripes}: from 1 to {MOST_PORTS}")
    make_ltp = functools.partial(LtpFlows, stripes=stripes, sealed=seal)
    keys = read_keys(key_file) if key_file is not None else None
    with LinkServer(_address(listen), keys, make_ltp) as server, _told_to_stop() as stop:
        how = "with keys" if keys is not None else "without keys: only this machine can reach it"
        print(f"measures links at {server.address}, {how}; transfers come to {_ports(server)}", flush=True)
        server.serve(stop.is_set)
        print(f"stopped, after {server.served} transfers", flush=True)


def measure(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where `atoll link serve` listens.")],
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Of one transfer.")] = "20e6",
    count: Annotated[int, typer.Option(metavar="N", help="Transfers of each transport.")] = 20,
    transport: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Of ltp, ltp:reliable, tcp, tcp:ALGORITHM (of congestion control)."
        ),
    ] = "ltp,tcp",
    high: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the blocks, of high priority; for ltp.")
    ] = 0.2,
    key_file: _KeyFileOption = None,
    warm: Annotated[int, typer.Option(metavar="N", help="Transfers before those that count.")] = 2,
    timeout: Annotated[
        str, typer.Option(metavar="SPAN", help="For the server to answer, or to be silent.")
    ] = "10s",
    deadline: Annotated[str, typer.Option(metavar="SPAN", help="For one transfer.")] = "2min",
    budget: Annotated[
        str, typer.Option(metavar="SPAN", help="After which a transport makes no more transfers.")
    ] = "5min",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure the link to HOST:PORT: for each transport the time until a transfer is usable there.

    Usable is, by TCP, every byte; by the loss-tolerant transport all blocks of high priority and at least
    97 % of the others.
    """
    from atoll.net.keys import read_keys
    from atoll.net.linktester import LinkTester, Wish

    wish = Wish(
        transports=[name.strip() for name in transport.split(",")],
        size=_option("--bytes", size, parse_bytes),
        count=count,
        warm=warm,
        high=high,
        timeout=_option("--timeout", timeout, parse_seconds),
        deadline=_option("--deadline", deadline, parse_seconds),
        budget=_option("--budget", budget, parse_seconds),
    )
    keys = read_keys(key_file) if key_file is not None else None
    with LinkTester(_address(address), keys, wish) as tester, _progress() as show:
        report = tester.measure(show)
    print(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))
    if report.lost:
        raise PeerLostError(report.lost)
    if not any(outcome.turns for outcome in report.outcomes):
        raise typer.Exit(1)


def _option(name: str, given: str, parse: Callable[[str], _Number]) -> _Number:
    try:
        return parse(given)
    except ConfigError as error:
        raise UserError(f"{name} {error}") from None


def _address(given: str) -> str:
    """`HOST:PORT`, or tcp://HOST:PORT as other commands have it, as an endpoint takes it."""
    return given if "://" in given else f"tcp://{given}"


def _ports(server: LinkServer) -> str:
    ports = [f"TCP port {server.tcp.port}"]
    if server.ltp is not None:
        ports.append(f"UDP port{'s' * (len(server.ltp.ports) > 1)} {', '.join(map(str, server.ltp.ports))}")
    return " and ".join(ports)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on the terminal, where there is one, that is written over and over and removed again."""
    if not sys.stderr.isatty():
        yield lambda _line: None
        return
    try:
        yield lambda line: print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """Have SIGTERM and SIGINT set an event."""
    stop = threading.Event()

    def handle(_signum: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
