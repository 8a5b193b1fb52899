"""`atoll link serve`, `atoll link test`: the speed of the link between two machines, by each transport."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from atoll.cli.commands import command
from atoll.core.config import KEYS_VARIABLE
from atoll.core.errors import PeerLostError
from atoll.core.options import Mark
from atoll.core.stopping import told_to_stop
from atoll.net.linkoptions import LinkServerOptions, LinkTestOptions

if TYPE_CHECKING:
    from atoll.net.linkserver import LinkServer


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    link = typer.Typer(help="Measure the link between two machines.", rich_markup_mode=None)
    link.command("serve")(command(serve, LinkServerOptions))
    link.command("test")(command(measure, _Asked, LinkTestOptions))
    app.add_typer(link, name="link")


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The server, the keys and the form of the answer of one measurement; LinkTestOptions has the rest.

    Args:
        address: Where `atoll link serve` listens.
        key_file: Keys that both sides have (atoll keys FILE); without, only this machine can be measured.
        as_json: Print the results as JSON.
    """

    address: Annotated[str, Mark("HOST:PORT", is_argument=True)]
    key_file: Annotated[str, Mark("FILE", variable=KEYS_VARIABLE)] = ""
    as_json: Annotated[bool, Mark(flag="--json")] = False


def serve(options: LinkServerOptions) -> None:
    """Be the other end of `atoll link test`, until it is stopped."""
    from atoll.net.keys import read_keys
    from atoll.net.linkserver import LinkServer
    from atoll.net.ltpflows import LtpFlows

    make_ltp = functools.partial(LtpFlows, stripes=options.stripes, sealed=options.seal)
    keys = read_keys(options.key_file) if options.key_file else None
    with LinkServer(_address(options.listen), keys, make_ltp) as server, told_to_stop() as stop:
        how = "with keys" if keys is not None else "without keys: only this machine can reach it"
        print(f"measures links at {server.address}, {how}; transfers come to {_ports(server)}", flush=True)
        server.serve(stop.is_set)
        print(f"stopped, after {server.served} transfers", flush=True)


def measure(asked: _Asked, wish: LinkTestOptions) -> None:
    """Measure the link to HOST:PORT: for each transport the time until a transfer is usable there.

    Usable is, by TCP, every byte; by the loss-tolerant transport all blocks of high priority and at least
    97 % of the others.
    """
    from atoll.net.keys import read_keys
    from atoll.net.linktester import LinkTester

    keys = read_keys(asked.key_file) if asked.key_file else None
    with (
        told_to_stop(signals=[signal.SIGINT]) as stop,
        LinkTester(_address(asked.address), keys, wish, stop) as tester,
        _progress() as show,
    ):
        report = tester.measure(show)
    print(json.dumps(report.to_json()) if asked.as_json else "\n".join(report.lines()))
    if report.lost:
        raise PeerLostError(report.lost)
    if not any(outcome.turns for outcome in report.outcomes):
        raise typer.Exit(1)


def _address(given: str) -> str:
    """Return `HOST:PORT` with the scheme that an endpoint needs; tcp://HOST:PORT stays as it is."""
    return given if "://" in given else f"tcp://{given}"


def _ports(server: LinkServer) -> str:
    ports = [f"TCP port {server.tcp.port}"]
    if server.ltp is not None:
        ports.append(f"UDP port{'s' * (len(server.ltp.ports) > 1)} {', '.join(map(str, server.ltp.ports))}")
    return " and ".join(ports)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that overwrites one line of the terminal; the line is removed at the end.

    Without a terminal the function does nothing.
    """
    if not sys.stderr.isatty():
        yield lambda _line: None
        return
    try:
        yield lambda line: print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
