"""The configuration: its keys and defaults, and its reading from a file, `--set` and the environment.

Later sources win: defaults, then the file (`atoll.toml`), then each `--set KEY=VALUE` in turn. Every error
names the file or flag, the key, the fault and the remedy.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from atoll.core.characters import encoded
from atoll.core.decoding import converted
from atoll.core.errors import ConfigError
from atoll.core.memory import Budgets, Memory
from atoll.core.options import RATE, SIZE, SPAN, SPAN_OR_ZERO, Option, no_such_choice, options_of
from atoll.core.texts import nearest
from atoll.core.toml import parse_toml, read_toml
from atoll.core.units import bytes_per_second, parse_bytes, parse_seconds

CONFIG_VARIABLE = "ATOLL_CONFIG"  # path of the file; `atoll run` gives its workers the configuration as used
DEFAULT_FILE = "atoll.toml"
# Variables by which a worker finds a run with a hub (docs/several-machines.md):
HUB_VARIABLE = "ATOLL_HUB"  # the hub's address, tcp://HOST:PORT
KEYS_VARIABLE = "ATOLL_KEY_FILE"
# A folder of mode 0700: shards and nodes of a run on one machine listen at Unix sockets in it.
SOCKETS_VARIABLE = "ATOLL_SOCKETS"
# The name of the launcher that forwards the heartbeats of its workers, at a socket in that folder.
LAUNCHER_VARIABLE = "ATOLL_LAUNCHER"
RUN_VARIABLE = "ATOLL_RUN"  # the run's name, equal for hub, shards and workers
RANK_VARIABLE = "ATOLL_RANK"  # the rank that this worker asks for
SITE_VARIABLE = "ATOLL_SITE"  # this worker's site, if the run has sites
# Variables from a lab to its workers (docs/lab.md):
LAB_SITE_VARIABLE = "ATOLL_LAB_SITE"  # name of the worker's site
SPEED_VARIABLE = "ATOLL_SPEED"  # in (0, 1]: computing is slowed down to this share
LAB_JOURNALS_VARIABLE = "ATOLL_LAB_JOURNALS"  # a folder for workers' journals with the costs of links
LAB_WORKER_VARIABLE = "ATOLL_LAB_WORKER"  # the worker's number in the lab, from 0
# The number of this launch's first worker, if `atoll run` starts several launches of several workers.
FIRST_VARIABLE = "ATOLL_FIRST_WORKER"

# Set by a worker that joins: its process, and its place. What it starts inherits both, and is no worker.
JOINED_VARIABLE = "ATOLL_JOINED"

Strategy = Literal["ring", "server", "hierarchical", "ps-hra", "peers"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
# Strategies of other packages have entry points in this group (docs/own-strategy.md).
SYNCHRONIZERS = "atoll.synchronizers"
SERVED: tuple[Strategy, ...] = ("server", "ps-hra")  # the strategies with a parameter server
# The strategies with groups of workers, whose number may be chosen automatically.
GROUPED: tuple[Strategy, ...] = ("hierarchical", "ps-hra")
Consistency = Literal["bsp", "ssp", "asp"]
Readable = Literal["owner", "group", "all"]
Ordering = Literal["measured", "natural"]
NonFinite = Literal["stop", "skip", "allow"]
Buffers = Literal["rank 0", "mean", "own"]
GroupBy = Literal["auto", "speed", "site", "joint"]
Scaled = Literal["weight", "rate", "none"]
Uplink = Literal["auto", "leader", "members"]
JournalNeed = Literal["optional", "required"]
Transport = Literal["tcp", "ltp"]
Fill = Literal["zero", "last", "rescale"]
Overlay = Literal["all", "own", "none"]
PLAIN_CODEC = "float32"  # writes each dtype as it is
SHARES = ("even", "auto")
CAPS = ("auto",)
CODECS: tuple[str, ...] = (PLAIN_CODEC, "bfloat16")
# Codecs of other packages have entry points in this group (docs/own-codec.md).
CODEC_GROUP = "atoll.codecs"
MOST_STALE = 1024  # iterations: each keeps a gradient in memory
MOST_STRIPES = 8  # UDP flows of one connection: the range of their number in a datagram
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
SpanText = Annotated[str, SPAN]


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[run]`: the workers, the strategy, and the place of the records.

    Args:
        workers: Number of workers that `atoll run` starts on this machine. Under `torchrun` its own options
            count.
        strategy: The way in which gradients are summed and exchanged. `ring`: all-reduce over all workers.
            `server`: through the shards of a parameter server ([server.md](server.md)). `hierarchical`: rings
            of near workers, and a ring of their leaders ([hierarchical.md](hierarchical.md)). `ps-hra`: rings
            of similar workers, and a parameter server between them ([grouping.md](grouping.md)). `peers`:
            nodes exchange contributions without a server ([peers.md](peers.md)). Or the name of a strategy of
            an installed package ([own-strategy.md](own-strategy.md)).
        shards: Strategies `server` and `ps-hra`: number of shards that `atoll run` starts.
        sites: Strategy `server`: number of sites that `atoll run` simulates on this machine, each with a
            shard of its own; workers are split evenly. `0`: no sites ([server.md](server.md), "Levels").
        restarts: Strategies `server`, `ps-hra` and `peers`, or with `run.elastic`: how often `atoll run`
            restarts each worker that a signal has killed (under `peers` each node, with all its devices).
            After three restarts in a row without a step within 20 s, the worker waits 1 s before the next,
            then 2 s, 4 s, up to a minute. An error of the script ends the run, unless the worker was
            restarted and has made no step: then only that worker ends.
        grace: Time between SIGTERM and SIGKILL for workers
            ([running.md](running.md#sigterm-saving-before-the-time-is-over)).
        elastic: Strategies `ring`, `hierarchical` and those of other packages: start a hub and launch each
            worker by itself, so that the run goes on when a worker dies. Under `server`, `ps-hra` and `peers`
            this is always so.
        ring_order: Strategies `ring` and `ps-hra`: order of the workers in a ring, over several machines with
            Gloo. `measured`: by the links between workers, measured whenever the ring is formed, if that is
            faster ([planning.md](planning.md#the-order-of-a-ring)). `natural`: by rank.
        directory: Folder for the records. Empty: `atoll run` makes a folder under `runs/`; other starts keep
            no records.
        readable: Users who may read the records. `owner`: you alone; `group`: your group too; `all`: every
            user of the machine ([security.md](security.md#files)).
    """

    workers: Annotated[int, msgspec.Meta(ge=1)] = 1
    strategy: str = "ring"
    shards: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    sites: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 0
    grace: SpanText = "30s"
    elastic: bool = False
    ring_order: Ordering = "measured"
    directory: str = ""
    readable: Readable = "owner"


class Chunks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[chunks]`: the layout of parameters.

    Args:
        size: Common size of chunks, such as `"4MiB"`; `auto` searches for the size with the least waste.
    """

    size: Annotated[str, SIZE] = "auto"


class Sync(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[sync]`: agreement and exchange between workers.

    Args:
        timeout: Deadline of every wait for other workers, such as `"90s"`. When it passes, the run ends with
            an error that names the missing workers.
        nonfinite: Treatment of NaN or infinity in a reduced gradient. `stop`: the run ends with the names of
            parameter and worker. `skip`: if all workers step together (`ring`, `hierarchical`, `bsp`, and
            `peers` with `sync.stale_max = 0`) no worker applies the iteration; otherwise only the bad
            contribution is left out. A line names the iteration and what was left out. `allow`: the gradient
            is applied, as in PyTorch.
        buffers: What workers do with a model's buffers, such as BatchNorm's running statistics. `rank 0`: a
            ring takes the first worker's after each iteration that has changed any; others at
            `session.barrier`, `session.save` and the session's end. `mean`: each worker has its own while it
            trains, and at these calls all take the mean of floating-point buffers, and the first worker's of
            others. `own`: each worker's stay its own, and a checkpoint has the first worker's.
        consistency: Strategies `server` and `ps-hra`: how far workers (with sites: sites) may be apart.
            `bsp`: not at all, each step has one contribution from each. `ssp`: by `sync.slack` iterations.
            `asp`: without limit. The default under `ps-hra` is `asp`.
        slack: Under `ssp`: iterations by which a worker may be ahead of the slowest.
        global_batch: Samples of all workers in a step, for `session.batches`, which gives each worker its
            share, however many workers there are. Strategy `peers`: in proportion to the nodes' speeds. 0:
            none.
        global_tokens: In place of `sync.global_batch`: the tokens of all workers in a step, on the average,
            by the numbers that `session.batches(..., cost=lengths)` gets. 0: none.
        shares: Strategies `ring` and `hierarchical`, and with bsp `server` and `ps-hra`: the parts of a
            batch of `session.batches`. `even`: all workers' alike. `auto`: by the workers' speeds, as
            measured, so that all finish at the same time ([shares.md](shares.md)); under `ps-hra` with asp
            and ssp within each group. Or each worker's part, which sum to 1: `{ 0 = 0.6, 1 = 0.4 }`.
        least: With `sync.shares` other than `even` (under `ps-hra` with asp and ssp: with `auto`), and under
            `peers`: the least samples of a worker that gets any. 0: 2 if a prepared model has BatchNorm,
            which raises an error for one sample, or if none is prepared yet when the script calls
            `session.batches`; else 1. Under `ps-hra` with asp and ssp this is found anew whenever a group
            forms.
        memory_cap: The most samples that a worker's memory holds: of its part of a batch of
            `session.batches`, where `sync.shares` acts, and of a piece of `session.pieces`. One number for
            all, or some workers' own, `{ 0 = 96, 3 = 24 }`. 0: no limit. `auto`: with `session.pieces`, a
            batch that does not fit is computed in pieces, and its worker gets no more from then on
            ([shares.md](shares.md#memory)).
        lazy: Strategy `server`: `step()` returns at once, and the next forward waits for the new parameters.
        uplink: Strategy `ps-hra`: the workers of a group that talk to the shards: the `leader`, drawn anew
            for each exchange, or all `members`, each for its own share.
        staleness: Under `ssp` and `asp`: the quantity that is divided by the staleness of a contribution that
            is more than one global iteration late ([server.md](server.md#stale-contributions)). `weight`: the
            contribution's weight in its step's mean. `rate`: its part of that step's learning rate. `none`:
            nothing.
        compensation: Under `ssp` and `asp`: the factor lambda of delay compensation, about the number of
            predictions in a batch. `0`: none. It costs the shards the memory of one set of parameters for
            each worker.
        pipeline: Under `ssp` and `asp`: `1` lets an exchange go on while the next step computes: `step()`
            sends its contribution and returns with the parameters of the exchange before, so each gradient is
            one step late. Excludes `sync.lazy` and `run.sites`.
        codec: Form of gradients on the way to shards and other nodes, and of values between replicas
            ([codecs.md](codecs.md)). `float32`: each dtype unchanged. `bfloat16`: float32 in half the bytes;
            the rounding error is added to the next gradient. Or the name of another package's codec.
        stale_max: Strategy `peers`: iterations by which a node may be ahead of the global iteration of its
            parameters. `0`: synchronous. Each costs the memory of a gradient.
        overlay: Strategy `peers`: the pending contributions that local parameters show: `all`, this node's
            `own`, or `none`.
        round_timeout: Strategy `peers`: time for which a synchronisation round waits for answers. `auto`: by
            measurement.
        backoff: Strategy `peers`: pause after a refused round, before jitter. `auto`: by measurement.
    """

    timeout: SpanText = "10min"
    nonfinite: NonFinite = "stop"
    buffers: Buffers = "rank 0"
    consistency: Consistency = "bsp"
    slack: Annotated[int, msgspec.Meta(ge=0)] = 4
    global_batch: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    global_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    shares: str | dict[str, float] = "even"
    least: Annotated[int, msgspec.Meta(ge=0)] = 0
    memory_cap: int | str | dict[str, int] = 0
    lazy: bool = False
    uplink: Uplink = "auto"
    staleness: Scaled = "weight"
    compensation: Annotated[float, msgspec.Meta(ge=0, lt=1e30)] = 0.0
    pipeline: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    codec: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] = PLAIN_CODEC
    stale_max: Annotated[int, msgspec.Meta(ge=0, le=MOST_STALE)] = 4
    overlay: Overlay = "all"
    round_timeout: SpanText = "auto"
    backoff: SpanText = "auto"


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[server]`: the shards.

    Args:
        optimizer: An optimizer that shards may run in addition to torch.optim's own, as
            `"package.module:Class"`.
        snapshot: Time between two snapshots of a shard's state on disk.
        journal: Reaction of a shard that cannot write its journal, on a full disk, say. `"optional"`: the
            shard warns and serves on; if it is killed before its next whole snapshot, the training since the
            last checkpoint is lost. `"required"`: the shard ends, and continues from its journal when it is
            started again with room. With `server.replicas = 2`, and at sites, always required.
        replicas: Number of processes that hold each shard, 1 or 2, under `atoll run` with strategy `server`
            or `ps-hra` and without `run.sites`. `2`: each shard has a standby with all acknowledged data,
            which takes over when the shard dies ([server.md](server.md#a-standby-for-each-shard)).
            `atoll hub` has `--replicas`.
    """

    optimizer: str = ""
    snapshot: SpanText = "1min"
    journal: JournalNeed = "optional"
    replicas: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class Hub(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[hub]`: the process that knows which workers take part.

    Args:
        patience: Longest silence of a worker, a shard or a node before it counts as dead and its samples go
            to others, under `atoll run` with strategies `server`, `ps-hra` and `peers`, or `run.elastic`.
            Processes that were heard regularly have less time, as measured, but at least 3.5 s, or 0.35 of a
            patience above 10 s. Each sends a heartbeat every quarter second, or ten times in that span if
            that is shorter. A process on the hub's machine that gets no CPU is waited for without limit; set
            a higher value if other machines are overloaded. `atoll hub` has `--patience`.
    """

    patience: SpanText = "10s"


class Groups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[groups]`: the groups of workers that share a ring (hierarchical and ps-hra; peers: `count` alone).

    Args:
        count: Strategies `hierarchical` and `ps-hra`: number of groups, at most as many as workers;
            `--groups` of `atoll run`. `0`: the best number; under `hierarchical` one for each site, or
            ceil(sqrt(N)) if sites are unknown. Strategy `peers`: number of nodes, with equally many devices
            each; must divide the workers. `0`: each worker is a node ([peers.md](peers.md), "Several devices
            a node").
        by: Strategy `ps-hra`: the property by which workers are grouped. `speed`: the probe's queue. `site`:
            one group for each site. `joint`: speeds and links together. `auto`: `speed` if `groups.count` is
            given, else `joint`.
        probe: Strategy `ps-hra`: number of training batches at the start by which a worker's speed is
            measured.
        patience: Strategy `ps-hra`: longest wait for a worker's probe; groups are then made without it.
        links: Strategy `ps-hra` with `groups.by` `joint` or `site`: longest time to measure the links
            between workers, before training begins. `0`: links are not measured, and groups are chosen by
            computing speed.
        regroup: Strategy `ps-hra`: form groups again during the run, as speeds and members change.
    """

    count: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    by: GroupBy = "auto"
    probe: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 4
    patience: SpanText = "1min"
    links: Annotated[str, SPAN_OR_ZERO] = "5s"
    regroup: bool = True


class LinkOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[link]`: transport of chunks between workers, groups or sites, and shards, or between nodes.

    Args:
        transport: Strategies `server` and `ps-hra`: transport of chunks to the shards and back. Strategy
            `peers`: between nodes. `tcp`: nothing is lost. `ltp`: over UDP; parts of a gradient may be lost,
            and everything else arrives ([ltp-training.md](ltp-training.md)). With `run.sites` it is used
            between a site's shard and the others, and `tcp` within a site.
        high: Share of a gradient's blocks that may not be lost, 0 to 1: those with the largest mean value.
            `auto`: as few blocks as carry 60 % of the gradient.
        fill: Replacement of lost blocks beyond `link.fill_above`: `zero`, the `last` values that came, or
            zero with the other blocks rescaled (`rescale`) so that the expected gradient stays.
        fill_above: Share of lost blocks up to which none is replaced: without `link.feedback` the mean of a
            block is over the workers that delivered it, with it a lost block counts as zeros until it comes.
        usable: Share of the other blocks that must arrive before a gradient is used; missing ones are
            requested again until then.
        feedback: Add lost parts of a gradient to the next gradient of the chunk. Not with `link.fill` `last`
            or `rescale`.
        target_loss: Share of losses that the sender aims at until it has fitted a better one; at most
            `link.fill_above`.
        stripes: UDP flows of a connection, 1 to 8: some networks limit a single flow.
        reliable: `ltp` without any losses. Required by strategy `peers` with `ltp`.
        rate: Rate of each shard's link, such as `"1Gbit/s"`, of which the shard grants each peer a share, by
            site. Empty: no limit. `atoll server` has `--link-rate`.
    """

    transport: Transport = "tcp"
    high: str = "auto"
    fill: Fill = "zero"
    fill_above: Share = 0.03
    usable: Share = 0.97
    feedback: bool = True
    target_loss: Share = 0.01
    stripes: Annotated[int, msgspec.Meta(ge=1, le=MOST_STRIPES)] = 1
    reliable: bool = False
    rate: Annotated[str, RATE] = ""

    @property
    def lossy(self) -> bool:
        """True if parts of gradients may be lost."""
        return self.transport == "ltp" and not self.reliable

    @property
    def holds_back(self) -> bool:
        """True if lost parts are added to the next gradient."""
        return self.lossy and self.feedback

    @property
    def high_share(self) -> float | None:
        """`high` as a share of the blocks; None for auto."""
        if self.high == "auto":
            return None
        try:
            share = float(self.high)
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"{self.high!r} is neither a share between 0 and 1 nor auto")
        return share

    @property
    def bytes_per_second(self) -> float:
        """`rate`; 0 for none."""
        return bytes_per_second(self.rate) if self.rate else 0.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration; docs/reference/configuration.md lists each key."""

    run: Run = Run()
    chunks: Chunks = Chunks()
    sync: Sync = Sync()
    server: Server = Server()
    hub: Hub = Hub()
    groups: Groups = Groups()
    link: LinkOptions = LinkOptions()
    memory: Memory = Memory()

    def having(self, **keys: Any) -> Config:
        """Return a copy with other values of some keys: `having(sync={"timeout": "60s"})`."""
        sections = {
            name: msgspec.structs.replace(getattr(self, name), **values) for name, values in keys.items()
        }
        return msgspec.structs.replace(self, **sections)

    @property
    def budgets(self) -> Budgets | None:
        """`[memory]` in bytes; None if the section is not given. Raises ConfigError."""
        return self.memory.budgets("memory.") if self.memory.is_given else None

    @property
    def chunk_bytes(self) -> int | None:
        """`chunks.size` in bytes; None for auto."""
        return None if self.chunks.size == "auto" else parse_bytes(self.chunks.size)

    @property
    def grace_seconds(self) -> float:
        return parse_seconds(self.run.grace)

    @property
    def timeout_seconds(self) -> float:
        return parse_seconds(self.sync.timeout)

    @property
    def round_seconds(self) -> float | None:
        """`sync.round_timeout` in seconds; None for auto."""
        return None if self.sync.round_timeout == "auto" else parse_seconds(self.sync.round_timeout)

    @property
    def backoff_seconds(self) -> float | None:
        """`sync.backoff` in seconds; None for auto."""
        return None if self.sync.backoff == "auto" else parse_seconds(self.sync.backoff)

    @property
    def snapshot_seconds(self) -> float:
        return parse_seconds(self.server.snapshot)

    @property
    def patience_seconds(self) -> float:
        return parse_seconds(self.hub.patience)

    @property
    def probe_seconds(self) -> float:
        return parse_seconds(self.groups.patience)

    @property
    def links_seconds(self) -> float:
        return parse_seconds(self.groups.links)


def load_config(
    path: str | os.PathLike[str] | None = None,
    settings: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Load the configuration from a file and settings.

    Raises ConfigError, one line, for the first wrong key. Combinations of keys are checked by
    `atoll.axes.needs`.

    Args:
        path: the file; by default $ATOLL_CONFIG, else ./atoll.toml if it exists.
        settings: texts such as "sync.timeout=30s", later ones win.
        environment: the environment variables, if not this process's.
    """
    return load_given(path, settings, environment)[0]


def load_given(
    path: str | os.PathLike[str] | None = None,
    settings: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Config, dict[str, str]]:
    """Load a configuration like `load_config`, and return the source of each key that was given.

    A source is a file's path, or the setting: {"sync.timeout": "--set sync.timeout=30s"}. Keys left at their
    defaults have none.
    """
    environment = os.environ if environment is None else environment
    if path is None:
        path = environment.get(CONFIG_VARIABLE) or (DEFAULT_FILE if Path(DEFAULT_FILE).exists() else None)
    table = read_toml(path, "the configuration") if path is not None else {}
    if path is not None:
        _check_keys(table, str(path))
    config = _convert(table, str(path))
    given = {f"{section}.{key}": str(path) for section, values in table.items() for key in values}
    for setting in settings:
        given[_apply(table, setting)] = f"--set {setting}"
        config = _convert(table, f"--set {setting}")
    if config.run.strategy == "ps-hra" and "consistency" not in table.get("sync", {}):
        # `bsp` between groups would make a server needless.
        config = config.having(sync={"consistency": "asp"})
    _ = config.budgets
    return config, given


def to_toml(config: Config) -> str:
    """Return the configuration as TOML that `load_config` reads back to an equal one.

    TOML cannot hold a file name that is not UTF-8: its bytes appear as `\\xff`.
    """
    lines: list[str] = []
    for section, values in msgspec.to_builtins(config).items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            lines.append(f"{key} = {_as_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_as_toml(key)} = {_as_toml(each)}" for key, each in value.items()) + " }"
    return msgspec.json.encode(encoded(value).decode() if isinstance(value, str) else value).decode()


@functools.cache
def keys_of_sections() -> dict[str, dict[str, Option]]:
    """Return the keys of each section, by name."""
    return {section: options_of(kind) for section, kind in get_type_hints(Config).items()}


def _dotted() -> list[str]:
    return [f"{section}.{key}" for section, keys in keys_of_sections().items() for key in keys]


def _check_keys(table: dict[str, Any], where: str) -> None:
    known = keys_of_sections()
    for section, values in table.items():
        if section not in known:
            candidates = [*known, *_dotted()]
            raise ConfigError(f"{where}: no section or key {section!r}{_suggest(section, candidates)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: {section!r} is a section; write [{section}] and its keys below it")
        for key in values:
            if key not in known[section]:
                name = f"{section}.{key}"
                raise ConfigError(f"{where}: no key {name!r}{_suggest(name, _dotted())}")


def _suggest(name: str, known: list[str]) -> str:
    """Suggest the nearest known name, also for a key in the wrong section or without one."""
    same_key = [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    if same_key:
        return f"; did you mean {same_key[0]!r}?"
    return nearest(name, known) or f"; known: {', '.join(known)}"


def _apply(table: dict[str, Any], setting: str) -> str:
    """Put a setting, such as `sync.timeout=30s`, into the table; returns its key."""
    name, equals, text = setting.partition("=")
    name = name.strip()
    where = f"--set {setting}"
    section, dot, key = name.partition(".")
    if not equals or not dot or not key:
        raise ConfigError(f"{where}: write it as SECTION.KEY=VALUE, such as sync.timeout=30s")
    if key not in keys_of_sections().get(section, ()):
        raise ConfigError(f"{where}: no key {name!r}{_suggest(name, _dotted())}")
    table.setdefault(section, {})[key] = _value(text.strip())
    return name


def _value(text: str) -> Any:
    """Return the TOML value of a text, else the text itself: `30s` needs no quotes on a command line."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ConfigError:
        return text


def _convert(table: dict[str, Any], where: str) -> Config:
    try:
        config = converted(_numbers_as_text(table), Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error), table)}") from None
    _check_installed("run.strategy", config.run.strategy, STRATEGIES, SYNCHRONIZERS, where)
    _check_installed("sync.codec", config.sync.codec, CODECS, CODEC_GROUP, where)
    for section, keys in keys_of_sections().items():
        for key, option in keys.items():
            try:
                option.check(getattr(getattr(config, section), key))
            except ConfigError as error:
                raise ConfigError(f"{where}: {section}.{key}: {error}") from None
    if config.sync.global_batch and config.sync.global_tokens:
        raise ConfigError(
            f"{where}: sync.global_batch and sync.global_tokens both say how large a step is: give one"
        )
    try:
        _check_shares(config.sync.shares)
    except ConfigError as error:
        raise ConfigError(f"{where}: sync.shares: {error}") from None
    try:
        _check_caps(config.sync.memory_cap)
    except ConfigError as error:
        raise ConfigError(f"{where}: sync.memory_cap: {error}") from None
    try:
        _ = config.link.high_share
    except ConfigError as error:
        raise ConfigError(f"{where}: link.high: {error}") from None
    try:
        # Settings come in any order: a missing device budget is reported by `load_given`, after the last.
        msgspec.structs.replace(config.memory, device=config.memory.device or "1").budgets("memory.")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def _check_installed(key: str, name: str, own: Sequence[str], group: str, where: str) -> None:
    """Raise ConfigError for a name that is neither one of Atoll's own nor an entry point of the group."""
    if name not in own:
        known = (*own, *sorted({each.name for each in entry_points(group=group)}))
        if name not in known:
            raise ConfigError(f"{where}: {key}: {no_such_choice(name, known)}")


def _check_shares(shares: str | dict[str, float]) -> None:
    """Raise ConfigError, without the key's name, for shares that are none."""
    if isinstance(shares, str):
        if shares not in SHARES:
            raise ConfigError(
                f"{no_such_choice(shares, SHARES)}; or each worker's part, {{ 0 = 0.6, 1 = 0.4 }}"
            )
        return
    for worker, part in shares.items():
        _check_worker(worker)
        if not 0 <= part <= 1:
            raise ConfigError(f"the part of worker {worker} is {part:g}; parts are from 0 to 1")
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ConfigError(f"the workers' parts sum to {sum(shares.values()):g}; they must sum to 1")


def _check_caps(caps: int | str | dict[str, int]) -> None:
    """Raise ConfigError, without the key's name, for caps that are none."""
    if isinstance(caps, str) and caps not in CAPS:
        raise ConfigError(
            f"{no_such_choice(caps, CAPS)}; or a number, or each worker's, {{ 0 = 96, 3 = 24 }}"
        )
    if isinstance(caps, int) and caps < 0:
        raise ConfigError(f"{caps} samples are no cap; give at least 1, or 0 for no limit")
    for worker, cap in caps.items() if isinstance(caps, dict) else ():
        _check_worker(worker)
        if cap < 1:
            raise ConfigError(
                f"the cap of worker {worker} is {cap}; give at least 1, or leave the worker out for no limit"
            )


def _check_worker(worker: str) -> None:
    if not worker.isdecimal():
        raise ConfigError(f"{worker!r} is no worker; workers are numbers from 0")


def _numbers_as_text(table: dict[str, Any]) -> dict[str, Any]:
    """Turn plain numbers of text keys into text: `timeout = 30` is allowed for a span of time."""
    known = keys_of_sections()
    return {
        section: {
            key: str(value) if known[section][key].kind is str and type(value) in (int, float) else value
            for key, value in values.items()
        }
        for section, values in table.items()
    }


def _explain(message: str, table: dict[str, Any]) -> str:
    """Turn msgspec's "... - at `$.run.strategy`" into "run.strategy: ...", with the choices if any."""
    text, _, place = message.partition(" - at `$.")
    name = place.rstrip("`")
    section, _, key = name.partition(".")
    given = table.get(section, {}).get(key)
    option = keys_of_sections().get(section, {}).get(key)
    if option is not None and option.choices:
        return f"{name}: {no_such_choice(given, option.choices)}"
    wanted = text.partition(", got ")[0].replace("`", "")  # "expected int >= 1", "expected int"
    return f"{name}: {wanted[:1].lower()}{wanted[1:]}, got {given!r}" if name else text
