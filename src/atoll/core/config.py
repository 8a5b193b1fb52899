"""The configuration: its keys, its defaults, and how a file, `--set` and the environment make one.

Later sources win: defaults, then the file (`atoll.toml`), then each `--set KEY=VALUE` in turn. Every error
names the file or the flag, the key, what was wrong, and what would be right.
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
from atoll.core.errors import ConfigError
from atoll.core.memory import Budgets, Memory
from atoll.core.options import RATE, SIZE, SPAN, SPAN_OR_ZERO, Option, no_such_choice, options_of
from atoll.core.texts import nearest
from atoll.core.toml import parse_toml, read_toml
from atoll.core.units import bytes_per_second, parse_bytes, parse_seconds

CONFIG_VARIABLE = "ATOLL_CONFIG"  # a file's path; `atoll run` points its workers at the configuration as used
DEFAULT_FILE = "atoll.toml"
# How a worker of a parameter server finds its run (docs/several-machines.md):
HUB_VARIABLE = "ATOLL_HUB"  # the hub's address, tcp://HOST:PORT
KEYS_VARIABLE = "ATOLL_KEY_FILE"
# A folder of mode 0700: shards and nodes of a run on one machine listen at Unix sockets in it.
SOCKETS_VARIABLE = "ATOLL_SOCKETS"
# The name of the launcher that passes the heartbeats of its workers on, at a socket in that folder.
LAUNCHER_VARIABLE = "ATOLL_LAUNCHER"
RUN_VARIABLE = "ATOLL_RUN"  # the run's name; hub, shards and workers must have the same
RANK_VARIABLE = "ATOLL_RANK"  # the rank that this worker wishes for
SITE_VARIABLE = "ATOLL_SITE"  # the site that this worker is at, where the run has sites
# What a lab tells its workers (docs/lab.md):
LAB_SITE_VARIABLE = "ATOLL_LAB_SITE"  # the name of its site
SPEED_VARIABLE = "ATOLL_SPEED"  # in (0, 1]: what it computes is stretched as on a slower device
LAB_JOURNALS_VARIABLE = "ATOLL_LAB_JOURNALS"  # a folder: what its links cost stands in the workers' events
LAB_WORKER_VARIABLE = "ATOLL_LAB_WORKER"  # its number in the lab, from 0
# Where `atoll run` starts several launches of several workers: the number of this one's first worker.
FIRST_VARIABLE = "ATOLL_FIRST_WORKER"

# Set by a worker that joins: its process, and its place. What it starts inherits both, and is no worker.
JOINED_VARIABLE = "ATOLL_JOINED"

Strategy = Literal["ring", "server", "hierarchical", "ps-hra", "peers"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
# Strategies of other packages have entry points in this group (docs/own-strategy.md).
SYNCHRONIZERS = "atoll.synchronizers"
SERVED: tuple[Strategy, ...] = ("server", "ps-hra")  # the strategies with a parameter server
GROUPED: tuple[Strategy, ...] = (
    "hierarchical",
    "ps-hra",
)  # those with groups of workers, as many as are best unless told
Consistency = Literal["bsp", "ssp", "asp"]
Readable = Literal["owner", "group", "all"]
Ordering = Literal["measured", "natural"]
NonFinite = Literal["stop", "skip", "allow"]
GroupBy = Literal["auto", "speed", "site", "joint"]
Scaled = Literal["weight", "rate", "none"]
Uplink = Literal["auto", "leader", "members"]
JournalNeed = Literal["optional", "required"]
Transport = Literal["tcp", "ltp"]
Fill = Literal["zero", "last", "rescale"]
Overlay = Literal["all", "own", "none"]
PLAIN_CODEC = "float32"  # writes each dtype as it is
CODECS: tuple[str, ...] = (PLAIN_CODEC, "bfloat16")
# Codecs of other packages have entry points in this group (docs/own-codec.md).
CODEC_GROUP = "atoll.codecs"
MOST_STALE = 1024  # iterations: each keeps a gradient in memory
MOST_STRIPES = 8  # UDP flows of one connection, as its datagrams can number them
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
SpanText = Annotated[str, SPAN]


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[run]`: what starts, and where its records go.

    Args:
        workers: How many workers `atoll run` starts on this machine. Under `torchrun` its own options count.
        strategy: How workers reduce. `ring`: one group, all-reduce of each chunk. `server`: through the
            shards of a parameter server ([server.md](server.md)). `hierarchical`: rings of near workers, and
            between them a ring of their leaders ([hierarchical.md](hierarchical.md)). `ps-hra`: rings of like
            workers, and between them the parameter server ([grouping.md](grouping.md)). `peers`: nodes that
            exchange contributions, and no server ([peers.md](peers.md)). Or the name of a strategy that an
            installed package has ([own-strategy.md](own-strategy.md)).
        shards: Strategies `server` and `ps-hra`: how many shards `atoll run` starts.
        sites: Strategy `server`: how many sites `atoll run` plays on this machine, each with a shard in front
            of the others; workers are split evenly. `0`: no sites ([server.md](server.md), "Levels").
        restarts: Strategies `server`, `ps-hra` and `peers`, or with `run.elastic`: how often `atoll run`
            starts a worker again that was killed by a signal, each (under `peers` a node, with all its
            devices). From the third restart in a row that came to no step within 20 s, the worker waits 1 s,
            2 s, 4 s, up to a minute. A script's own error ends the run as ever, unless the worker was started
            again and has made no step: then it ends alone.
        grace: How long workers have to end after SIGTERM, before they are killed
            ([running.md](running.md#sigterm-saving-before-the-time-is-over)).
        elastic: Strategies `ring`, `hierarchical` and those of other packages: `atoll run` starts a hub, and
            each worker as a launch of its own, so that one may die alone. Under `server`, `ps-hra` and
            `peers` that is always so.
        ring_order: Strategies `ring` and `ps-hra`: in which order the sums of a ring pass its workers, over
            several machines with Gloo. `measured`: by the links between them, whenever the ring is formed,
            where that is faster ([planning.md](planning.md#the-order-of-a-ring)). `natural`: by rank.
        directory: Where records go. Empty: `atoll run` makes a folder under `runs/`; other starts keep no
            records.
        readable: Who may read the records. `owner`: you alone; `group`: your group too; `all`: every user of
            the machine ([security.md](security.md#files)).
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
    """`[chunks]`: how parameters are laid out.

    Args:
        size: The common size of chunks, such as `"4MiB"`; `auto` searches for the size with the least waste.
    """

    size: Annotated[str, SIZE] = "auto"


class Sync(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[sync]`: how workers agree.

    Args:
        timeout: The deadline of every wait for other workers, such as `"90s"`. When it passes, the run ends
            with an error that says who was waited for.
        nonfinite: What NaN or infinity in a reduced gradient does. `stop`: ends the run, naming parameter and
            worker. `skip`: where all workers make one step together (`ring`, `hierarchical`, `bsp`, and
            `peers` with `sync.stale_max = 0`) no worker applies the iteration; elsewhere the bad contribution
            alone is left out, and the others' count. A line says which, for which iteration. `allow`: it is
            applied, as PyTorch does.
        consistency: Strategies `server` and `ps-hra`: how far workers (with sites: sites) may be apart.
            `bsp`: not at all, each step has one contribution of each. `ssp`: by `sync.slack` iterations.
            `asp`: at will. Under `ps-hra` it is `asp` unless it is given.
        slack: Under `ssp`: how many iterations a worker may be ahead of the slowest.
        global_batch: Samples in a step over all workers, for `session.batches`: each worker's batch is its
            part of that, however many workers there are. Strategy `peers`: in proportion to the nodes'
            speeds. 0: not asked for.
        lazy: Strategy `server`: `step()` returns at once, and the next forward waits for the new parameters.
        uplink: Strategy `ps-hra`: who of a group talks to the shards: its `leader`, drawn anew for each
            exchange, or all `members`, each for its own share.
        staleness: Under `ssp` and `asp`: what of a contribution that is more than one global iteration late
            is divided by its staleness ([server.md](server.md#stale-contributions)). `weight`: how much it
            counts in its step's mean. `rate`: its part of that step's learning rate. `none`: nothing.
        compensation: Under `ssp` and `asp`: the factor of delay compensation, lambda; of the order of the
            predictions in a batch. `0`: none. It costs the shards the memory of one set of parameters for
            each worker.
        pipeline: Under `ssp` and `asp`. `1`: `step()` sends its contribution and returns with the parameters
            of the exchange before, so that an exchange goes on while the next step computes; each gradient is
            then one step late. Not together with `sync.lazy`, nor with `run.sites`.
        codec: How gradients are written on their way to shards and other nodes, and values on their way
            between replicas ([codecs.md](codecs.md)). `float32`: each dtype as it is. `bfloat16`: float32 in
            half the bytes; what that drops is added to the next gradient. Or a codec of another package, by
            its name.
        stale_max: Strategy `peers`: how many iterations a node may be ahead of the global one that its
            parameters stand at. `0`: synchronous. Each costs the memory of a gradient.
        overlay: Strategy `peers`: which contributions that are not applied yet local parameters show: `all`,
            this node's `own`, or `none`.
        round_timeout: Strategy `peers`: for how long a synchronisation round waits for answers. `auto`: by
            what was measured.
        backoff: Strategy `peers`: the pause after a round was refused, before jitter. `auto`: by what was
            measured.
    """

    timeout: SpanText = "10min"
    nonfinite: NonFinite = "stop"
    consistency: Consistency = "bsp"
    slack: Annotated[int, msgspec.Meta(ge=0)] = 4
    global_batch: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
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
        optimizer: An optimizer beside torch.optim's element-wise ones that shards may run, as
            `"package.module:Class"`.
        snapshot: How often a shard writes its state to disk.
        journal: What a shard does that cannot write its journal, as on a full disk. `"optional"`: it serves
            on and says so; a kill before its next whole snapshot costs what was trained since the last
            checkpoint. `"required"`: it ends, and goes on from its journal when it is started again with
            room. With `server.replicas = 2`, and at sites, it is always required.
        replicas: 1 or 2; under `atoll run`, with strategy `server` or `ps-hra` and without `run.sites`: how
            many processes hold each shard. `2`: each has a standby, which holds all that was acknowledged and
            takes its place when it dies ([server.md](server.md#a-standby-for-each-shard)). `atoll hub` has
            `--replicas`.
    """

    optimizer: str = ""
    snapshot: SpanText = "1min"
    journal: JournalNeed = "optional"
    replicas: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class Hub(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[hub]`: who says which workers are there.

    Args:
        patience: Under `atoll run`, with strategies `server`, `ps-hra` and `peers`, or `run.elastic`: the
            longest that a worker, a shard or a node may be silent before it counts as dead and its samples go
            to others. Who was heard regularly is given less, as measured, but no less than 3.5 s, or 0.35 of
            a patience of more than 10 s. Each gives a sign of life each quarter second, or ten times in that
            span if that is shorter. Who is on the hub's machine and gets no CPU is waited for, however long
            it is silent; set this higher where overloaded machines are others. `atoll hub` has `--patience`.
    """

    patience: SpanText = "10s"


class Groups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[groups]`: which workers share a ring (strategies hierarchical and ps-hra; peers: `count` alone).

    Args:
        count: Strategies `hierarchical` and `ps-hra`: how many groups there are, at most as many as workers;
            `--groups` of `atoll run`. `0`: as many as are best; under `hierarchical` one for each site, or
            ceil(sqrt(N)) where sites are not told. Strategy `peers`: how many nodes, each of as many devices;
            it must divide the workers. `0`: each worker is a node ([peers.md](peers.md), "Several devices a
            node").
        by: Strategy `ps-hra`: how workers are grouped. `speed`: the probe's queue. `site`: one group for
            each. `joint`: by speeds and links together. `auto`: `speed` where `groups.count` is given, else
            `joint`.
        probe: Strategy `ps-hra`: the batches of a worker's own training whose pace counts at the start.
        patience: Strategy `ps-hra`: for how long a worker's probe is waited for before groups are made
            without it.
        links: Strategy `ps-hra`, where links count (`groups.by` is `joint` or `site`): how long the measuring
            of the links between workers may take, before the training begins. `0`: they are not measured, and
            groups are chosen by what they compute.
        regroup: Strategy `ps-hra`: whether groups are made anew while the run goes, as speeds and members
            change.
    """

    count: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    by: GroupBy = "auto"
    probe: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 4
    patience: SpanText = "1min"
    links: Annotated[str, SPAN_OR_ZERO] = "5s"
    regroup: bool = True


class LinkOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[link]`: how chunks travel between workers, or their groups or sites, and the shards.

    Args:
        transport: Strategies `server` and `ps-hra`: how chunks travel to the shards and back. `tcp`: nothing
            is lost. `ltp`: over UDP; parts of a gradient may be lost, parameters and all else arrive
            ([ltp-training.md](ltp-training.md)). With `run.sites` it is the way from a site's shard to the
            others; within a site it is `tcp`.
        high: The share of a gradient's blocks that may not be lost, 0 to 1: those with the largest mean
            value. `auto`: as few as carry 60 % of it.
        fill: What takes the place of lost blocks above that: `zero`, the `last` values that came, or zero and
            the others rescaled (`rescale`) so that the expected gradient stays.
        fill_above: Up to this share of lost blocks a loss is borne: without `link.feedback` the mean of the
            block is over those who delivered it, with it the block counts as zeros until it comes.
        usable: The share of the other blocks that a gradient must have before it is used; what is missing of
            it is asked for again.
        feedback: What was lost of a gradient is added to the next one of the same chunk. Not with `link.fill`
            `last` or `rescale`.
        target_loss: The rate of loss that the sender aims at until a better one was fitted; at most
            `link.fill_above`.
        stripes: UDP flows of a connection, 1 to 8: some networks cap a flow.
        reliable: `ltp` with nothing lost, gradients neither. Strategy `peers` asks for it with `ltp`.
        rate: The rate of each shard's link, such as `"1Gbit/s"`: the shard then grants each of its peers a
            share, by site. Empty: none. `atoll server` has `--link-rate`.
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
        """Whether parts of gradients may be lost."""
        return self.transport == "ltp" and not self.reliable

    @property
    def holds_back(self) -> bool:
        """Whether what was lost is added to the next gradient."""
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
        """This configuration with other values of some keys: `having(sync={"timeout": "60s"})`."""
        sections = {
            name: msgspec.structs.replace(getattr(self, name), **values) for name, values in keys.items()
        }
        return msgspec.structs.replace(self, **sections)

    @property
    def budgets(self) -> Budgets | None:
        """`[memory]` in bytes; None where it is not given. Raises ConfigError."""
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
    """The configuration from `path` (else $ATOLL_CONFIG, else ./atoll.toml if there is one) and `settings`
    ("sync.timeout=30s"). Raises ConfigError, one line for the first thing that is wrong with a key by itself;
    keys that are wrong together are for `atoll.axes.needs`.
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
        # Groups that wait for one another need no server between them.
        config = config.having(sync={"consistency": "asp"})
    _ = config.budgets
    return config, given


def to_toml(config: Config) -> str:
    """The configuration as a TOML file that `load_config` reads back to an equal one.

    TOML cannot hold the name of a file that is not UTF-8: its bytes are shown as `\\xff`, for people.
    """
    lines: list[str] = []
    for section, values in msgspec.to_builtins(config).items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            text = encoded(value).decode() if isinstance(value, str) else value
            lines.append(f"{key} = {msgspec.json.encode(text).decode()}")
        lines.append("")
    return "\n".join(lines)


@functools.cache
def keys_of_sections() -> dict[str, dict[str, Option]]:
    """The keys of each section, by name."""
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
    """The nearest known name; a key without its section, or under another one, is found too."""
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
    """A TOML value if it is one, else the text itself: `30s` needs no quotes on a command line."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ConfigError:
        return text


def _convert(table: dict[str, Any], where: str) -> Config:
    try:
        config = msgspec.convert(_numbers_as_text(table), Config)
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
    try:
        _ = config.link.high_share
    except ConfigError as error:
        raise ConfigError(f"{where}: link.high: {error}") from None
    try:
        # Keys come in any order: that the device's budget is missing is said when all are there.
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


def _numbers_as_text(table: dict[str, Any]) -> dict[str, Any]:
    """A size or a span may be given as a plain number (`timeout = 30`); the keys themselves are text."""
    known = keys_of_sections()
    return {
        section: {
            key: str(value) if known[section][key].kind is str and type(value) in (int, float) else value
            for key, value in values.items()
        }
        for section, values in table.items()
    }


def _explain(message: str, table: dict[str, Any]) -> str:
    """msgspec's "... - at `$.run.strategy`" as "run.strategy: ...", with the known values of a choice."""
    text, _, place = message.partition(" - at `$.")
    name = place.rstrip("`")
    section, _, key = name.partition(".")
    given = table.get(section, {}).get(key)
    option = keys_of_sections().get(section, {}).get(key)
    if option is not None and option.choices:
        return f"{name}: {no_such_choice(given, option.choices)}"
    wanted = text.partition(", got ")[0].replace("`", "")  # "expected int >= 1", "expected int"
    return f"{name}: {wanted[:1].lower()}{wanted[1:]}, got {given!r}" if name else text
