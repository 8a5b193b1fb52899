"""`atoll keys`, `atoll hub`, `atoll server`: the parts of a run over several machines."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from atoll.cli.commands import command
from atoll.core.config import load_config
from atoll.core.errors import UserError
from atoll.core.heap import keep_freed_memory
from atoll.core.sharing import files_for
from atoll.hub.options import HubOptions
from atoll.server.options import ServerOptions


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    app.command("keys")(keys)
    app.command("hub")(command(hub, HubOptions))
    app.command("server")(command(server, ServerOptions))


def keys(file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write them.")]) -> None:
    """Make new keys for a run: copy FILE to each of its machines, and keep it secret."""
    from atoll.net.keys import make_keys, write_keys

    write_keys(file, make_keys())
    print(f"{file}: new keys, readable only for you; anyone who has them can join the run")


def hub(options: HubOptions) -> None:
    """Run the hub, which knows workers and shards, deals out samples, and brings rings together.

    The hub serves until it is stopped, and prints each decision with its reason.
    """
    from atoll.cli.scores import score_for
    from atoll.hub.main import grouping_of, serve

    with files_for("owner"):  # the files hold the model
        serve(options, grouping_of(options, score_for))


def server(options: ServerOptions) -> None:
    """Run one shard of a run's parameter server, or a site's shard, until it is stopped.

    A hub with --until-done ends its shards too. A site's shard ends when all of the site's workers have left.
    If the hub was started with --replicas 2, the second process of a shard is its standby.
    """
    shard, site = options.shard, options.site
    _check(options)
    keep_freed_memory(messages=True)  # before ZeroMQ and torch start threads, which get heaps of their own
    if options.config:
        from atoll.axes.needs import check_configuration

        configured = load_config(options.config)
        check_configuration(configured)
        options = replace(options, link=configured.link)
    from atoll.net.endpoint import check_listen
    from atoll.net.keys import read_keys
    from atoll.server.coming import ask_run

    secret = read_keys(options.key_file) if options.key_file else None
    # Before the wait for the hub, which may take a while.
    check_listen(options.listen, secret, f"shard of site {site!r}" if site else f"shard {shard}")
    options = replace(options, run=ask_run(options, secret))
    from atoll.server.main import serve, serve_site

    def ready(address: str) -> None:
        line = f"shard {shard} of {options.run} listens at {address}"
        if site:
            line = f"the shard of site {site} of {options.run} listens at {address}"
            line += f", and reaches the others over {options.link.transport}"
        print(line, flush=True)

    with files_for("owner"):  # the files hold the model
        (serve_site if site else serve)(options, ready=ready, goes_on=partial(print, flush=True))


def _check(options: ServerOptions) -> None:
    """Raise UserError for wrong options, or for options that exclude each other."""
    shard, site, listen = options.shard, options.site, options.listen
    if (shard is None) == (not site):
        raise UserError("give either --shard I, for a shard of the run, or --site NAME, for a site's shard")
    if (shard or 0) < 0:
        raise UserError(f"--shard {shard}: shards are numbered from 0")
    if re.match(r"tcp://(\*|0\.0\.0\.0|\[::\]):", listen):
        raise UserError(
            f"--listen {listen}: workers connect to the address that the shard names; give this machine's "
            "own, such as tcp://10.0.0.5:47701"
        )
    if options.optimizer and not re.fullmatch(r"[\w.]+:\w+", options.optimizer):
        raise UserError(f"--optimizer {options.optimizer}: write it as module:Class, such as my.optim:Lion")
    if not options.snapshot_seconds > 0:
        raise UserError(f"--snapshot-seconds {options.snapshot_seconds:g}: must be more than 0")
    if site and (options.link_rate or options.udp_port):
        raise UserError(
            "--link-rate and --udp-port go with --shard: a site's workers reach their shard over TCP, and it "
            "is the one that reaches the others (--config)"
        )
    if options.config and not site:
        raise UserError("--config FILE goes with --site; a shard of the run takes links as workers make them")
    if not 0 <= options.udp_port < 2**16:
        raise UserError(f"--udp-port {options.udp_port}: ports are from 1 to 65535, and 0 is any free one")
