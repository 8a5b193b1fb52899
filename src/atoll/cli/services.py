"""`atoll keys`, `atoll hub`, `atoll server`: the parts of a run over several machines."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from atoll.core.config import (
    HUB_VARIABLE,
    KEYS_VARIABLE,
    Consistency,
    GroupBy,
    LinkOptions,
    load_config,
)
from atoll.core.errors import UserError
from atoll.core.sharing import files_for
from atoll.core.texts import nearest
from atoll.core.units import parse_rate, parse_seconds
from atoll.wire.messages import VERSION, Hello, Welcome

if TYPE_CHECKING:
    from atoll.hub.planner import GroupingSettings
    from atoll.net.keys import Keys

_DEFAULT_LISTEN = "tcp://127.0.0.1:47700"
_FRAME = 2**21  # bytes of a message of the hub's

_KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        envvar=KEYS_VARIABLE,
        help="The run's keys; without them, only processes of this machine can take part.",
    ),
]


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    app.command("keys")(keys)
    app.command("hub")(hub)
    app.command("server")(server)


def keys(file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write them.")]) -> None:
    """Make new keys for a run: copy FILE to each of its machines, and keep it secret."""
    from atoll.net.keys import make_keys, write_keys

    write_keys(file, make_keys())
    print(f"{file}: new keys, readable only for you; who has them can join the run")


def hub(
    workers: Annotated[int, typer.Option(metavar="N", help="Workers that the run begins with.")],
    shards: Annotated[int, typer.Option(metavar="M", help="Its server shards; 0: a ring.")] = 1,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="tcp://HOST:PORT.")] = _DEFAULT_LISTEN,
    key_file: _KeyFileOption = None,
    run: Annotated[str, typer.Option(metavar="NAME", help="The run's name; else a new one.")] = "",
    directory: Annotated[Path | None, typer.Option(metavar="D", help="Where decisions are kept.")] = None,
    patience: Annotated[
        str, typer.Option(metavar="SPAN", help="How long a worker may be silent before it counts as dead.")
    ] = "10s",
    least_patience: Annotated[
        str,
        typer.Option(
            metavar="SPAN",
            help="Silence that is always borne, however regular a worker was: a link's longest outage.",
        ),
    ] = "3.5s",
    site: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="A site and its workers; one for each, where there are levels."),
    ] = None,
    replicas: Annotated[
        int, typer.Option(metavar="R", help="Processes that hold each shard: 2 for a standby of each.")
    ] = 1,
    groups: Annotated[
        str,
        typer.Option(metavar="K", help="Groups of workers, for strategy ps-hra; auto: as many as are best."),
    ] = "",
    group_by: Annotated[
        str,
        typer.Option(metavar="HOW", help="Form groups by speed, joint (speed and link), site or auto."),
    ] = "auto",
    group_patience: Annotated[
        str, typer.Option(metavar="SPAN", help="How long the groups wait for a worker's probe.")
    ] = "1min",
    group_links: Annotated[
        str,
        typer.Option(metavar="SPAN", help="How long the measuring of links may take at the start; 0: none."),
    ] = "5s",
    regroup: Annotated[
        bool, typer.Option("--regroup/--no-regroup", help="Group anew as speeds and workers change.")
    ] = True,
    consistency: Annotated[
        str, typer.Option(metavar="MODE", help="With --groups: the run's sync.consistency.")
    ] = "asp",
    at_least: Annotated[
        int, typer.Option("--at-least", metavar="M", help="With fewer workers left, a ring ends.")
    ] = 1,
    until_done: Annotated[
        bool, typer.Option("--until-done", help="End, and end the shards, when all workers have left.")
    ] = False,
) -> None:
    """Be the hub of a run: who takes part, where the shards are, which samples are whose, and how a ring
    meets.

    It serves until it is stopped, and prints each decision with its reason.
    """
    from atoll.hub.main import HEARTBEAT, serve

    seconds = parse_seconds(patience)
    if seconds <= 0:
        raise UserError(f"--patience {patience}: must be more than 0")
    sites = _sites(site or [])
    grouping = _grouping(groups, group_by, group_patience, group_links, regroup, consistency)
    with files_for("owner"):  # they hold what is trained
        serve(
            listen,
            key_file,
            run,
            workers,
            shards,
            directory,
            seconds,
            min(HEARTBEAT, seconds / 10),
            sites=sites,
            replicas=replicas,
            until_done=until_done,
            at_least=at_least,
            grouping=grouping,
            least_patience=parse_seconds(least_patience),
        )


def _grouping(
    groups: str, by: str, patience: str, links: str, regroup: bool, consistency: str
) -> GroupingSettings | None:
    """The options on groups; None where workers are not grouped."""
    if not groups:
        return None
    from atoll.cli.scores import score_for
    from atoll.hub.planner import GroupingSettings

    if groups != "auto" and not (groups.isdecimal() and int(groups) >= 1):
        raise UserError(f"--groups {groups}: write a number of groups, from 1; or auto")
    for option, value, kind in (("--group-by", by, GroupBy), ("--consistency", consistency, Consistency)):
        if value not in get_args(kind):
            choices = ", ".join(get_args(kind))
            hint = nearest(value, get_args(kind))
            raise UserError(f"{option} {value}: no such choice{hint} (one of: {choices})")
    seconds = parse_seconds(patience)
    if seconds <= 0:
        raise UserError(f"--group-patience {patience}: must be more than 0")
    return GroupingSettings(
        0 if groups == "auto" else int(groups),
        cast("GroupBy", by),
        seconds,
        regroup,
        cast("Consistency", consistency),
        parse_seconds(links),
        score_for,
    )


def _sites(given: list[str]) -> dict[str, int]:
    """`paris=2` as the workers of each site."""
    sites: dict[str, int] = {}
    for each in given:
        name, _, count = each.partition("=")
        if not name or not count.isdecimal() or int(count) < 1:
            raise UserError(f"--site {each}: write it as NAME=WORKERS, such as paris=2")
        if name in sites:
            raise UserError(f"--site {each}: site {name!r} is given twice")
        sites[name] = int(count)
    return sites


def server(
    hub: Annotated[str, typer.Option(metavar="ADDRESS", envvar=HUB_VARIABLE, help="The hub's address.")],
    shard: Annotated[int | None, typer.Option(metavar="I", help="Which shard, from 0.")] = None,
    site: Annotated[str, typer.Option(metavar="NAME", help="Or: the site whose shard it is.")] = "",
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="tcp://HOST:PORT, as workers reach it; port 0: any free.")
    ] = "tcp://127.0.0.1:0",
    key_file: _KeyFileOption = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="D", help="This shard's own: what it keeps, and goes on from when it is killed."
        ),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(metavar="MODULE:CLASS", help="An optimizer that is not torch.optim's, by its path.")
    ] = "",
    codec: Annotated[
        str, typer.Option(metavar="NAME", help="A codec of another package that gradients may be written by.")
    ] = "",
    snapshot_seconds: Annotated[float, typer.Option(metavar="S", help="Between snapshots.")] = 60.0,
    journal: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="Where it cannot be written, the shard goes on (optional) or ends (required)."
        ),
    ] = "optional",
    sync: Annotated[
        bool, typer.Option("--sync", help="Wait for the disk, so that what is kept survives the machine too.")
    ] = False,
    timeout: Annotated[
        str,
        typer.Option(
            metavar="SPAN", help="How long to wait for the hub; at a site, for the other sites too."
        ),
    ] = "10min",
    link_rate: Annotated[
        str,
        typer.Option(
            metavar="RATE", help="This shard's link, which those with link.transport = ltp share, by site."
        ),
    ] = "",
    config: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="With --site: the configuration whose [link] is its way to the other shards."
        ),
    ] = "",
    udp_port: Annotated[
        int, typer.Option(metavar="P", help="The first UDP port for link.transport = ltp; 0: any free.")
    ] = 0,
) -> None:
    """Be one shard of a run's parameter server, or of one of its sites, until it is stopped.

    A hub with --until-done ends it too. A site's shard ends when all of the site's workers have left. Where
    the hub was started with --replicas 2, the second process of a shard is its standby.
    """
    deadline = parse_seconds(timeout)
    if (shard is None) == (not site):
        raise UserError("give either --shard I, for a shard of the run, or --site NAME, for a site's shard")
    _check_shard(shard or 0, listen, optimizer, snapshot_seconds)
    if journal not in ("optional", "required"):
        raise UserError(f"--journal {journal}: give optional or required")
    rate = _link_rate(link_rate)
    if site and (rate or udp_port):
        raise UserError(
            "--link-rate and --udp-port go with --shard: a site's workers reach their shard over TCP, and it "
            "is the one that reaches the others (--config)"
        )
    if config and not site:
        raise UserError("--config FILE goes with --site; a shard of the run takes links as workers make them")
    link = LinkOptions()
    if config:
        from atoll.axes.needs import check_configuration

        configured = load_config(config)
        check_configuration(configured)
        link = configured.link_options
    if not 0 <= udp_port < 2**16:
        raise UserError(f"--udp-port {udp_port}: ports are from 1 to 65535, and 0 is any free one")
    from atoll.net.endpoint import check_listen
    from atoll.net.keys import read_keys

    secret = read_keys(key_file) if key_file is not None else None
    # Before the hub is waited for, which may take a while.
    check_listen(listen, secret, f"shard {shard}" if shard is not None else f"shard of site {site!r}")
    run = _run_of(hub, secret, deadline)
    from atoll.server.main import serve, serve_site

    if shard is None:
        with files_for("owner"):
            serve_site(
                site,
                hub,
                keys_file=key_file,
                listen=listen,
                run=run,
                folder=directory,
                snapshot_seconds=snapshot_seconds,
                timeout=deadline,
                sync=sync,
                link=link,
                codec=codec,
                goes_on=lambda line: print(line, flush=True),
                ready=lambda address: print(
                    f"the shard of site {site} of {run} listens at {address}, and reaches the others over "
                    f"{link.transport}",
                    flush=True,
                ),
            )
        return
    with files_for("owner"):  # they hold what is trained
        serve(
            shard,
            hub,
            keys_file=key_file,
            listen=listen,
            run=run,
            folder=directory,
            optimizer=optimizer,
            codec=codec,
            snapshot_seconds=snapshot_seconds,
            timeout=deadline,
            sync=sync,
            journal_required=journal == "required",
            link_rate=rate,
            udp_port=udp_port,
            goes_on=lambda line: print(line, flush=True),
            ready=lambda address: print(f"shard {shard} of {run} listens at {address}", flush=True),
        )


def _link_rate(text: str) -> float:
    """Bytes per second; 0 where none is given."""
    if not text:
        return 0.0
    rate = parse_rate(text) / 8
    if not rate > 0:
        raise UserError(f"--link-rate {text}: must be more than 0")
    return rate


def _check_shard(shard: int, listen: str, optimizer: str, snapshot_seconds: float) -> None:
    if shard < 0:
        raise UserError(f"--shard {shard}: shards are numbered from 0")
    if re.match(r"tcp://(\*|0\.0\.0\.0|\[::\]):", listen):
        raise UserError(
            f"--listen {listen}: workers connect to the address that the shard names; give this machine's "
            "own, such as tcp://10.0.0.5:47701"
        )
    if optimizer and not re.fullmatch(r"[\w.]+:\w+", optimizer):
        raise UserError(f"--optimizer {optimizer}: write it as module:Class, such as my.optim:Lion")
    if not snapshot_seconds > 0:
        raise UserError(f"--snapshot-seconds {snapshot_seconds:g}: must be more than 0")


def _run_of(address: str, secret: Keys | None, deadline: float) -> str:
    """The name of the run that the hub at `address` serves."""
    from atoll.net.endpoint import Client
    from atoll.net.requests import ask

    hello = Hello(version=VERSION, run="", role="guest", pid=os.getpid())
    with Client(address, secret, limit=_FRAME, name="hub") as client:
        welcome, _ = ask(client, hello, Welcome, deadline, "the run's name")
    return welcome.run
