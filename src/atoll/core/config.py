"""The configuration: its keys, its defaults, and how a file, `--set` and the environment make one.

Later sources win: defaults, then the file (`atoll.toml`), then each `--set KEY=VALUE` in turn. Every error
names the file or the flag, the key, what was wrong, and what would be right.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from atoll.core.characters import encoded
from atoll.core.errors import ConfigError
from atoll.core.memory import Budgets, Memory, Sharding
from atoll.core.toml import parse_toml, read_toml
from atoll.core.units import parse_bytes, parse_rate, parse_seconds

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

Strategy = Literal["ring", "server", "hierarchical", "ps-hra", "peers"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
SERVED: tuple[Strategy, ...] = ("server", "ps-hra")  # the strategies with a parameter server
GROUPED: tuple[Strategy, ...] = (
    "hierarchical",
    "ps-hra",
)  # those with groups of workers, as many as are best unless told
Consistency = Literal["bsp", "ssp", "asp"]
Readable = Literal["owner", "group", "all"]
NonFinite = Literal["stop", "skip", "allow"]
GroupBy = Literal["auto", "speed", "site", "joint"]
Scaled = Literal["weight", "rate", "none"]
Uplink = Literal["auto", "leader", "members"]
JournalNeed = Literal["optional", "required"]
Transport = Literal["tcp", "ltp"]
Fill = Literal["zero", "last", "rescale"]
Overlay = Literal["all", "own", "none"]
MOST_STALE = 1024  # iterations: each keeps a gradient in memory
MOST_STRIPES = 8  # UDP flows of one connection, as its datagrams can number them
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Run(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=False):
    """`[run]`: what starts, and where its records go."""

    workers: Annotated[int, msgspec.Meta(ge=1)] = 1
    strategy: Strategy = "ring"
    shards: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1  # of the parameter server
    sites: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0  # whose workers aggregate first; 0: no sites
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 0  # of each worker that is killed by a signal
    grace: str = "30s"  # how long workers have after SIGTERM, before they are killed
    elastic: bool = False  # of a ring: a hub, and each worker a launch of its own, which may die alone
    directory: str = ""  # empty: `atoll run` makes one under runs/, other starts keep no records
    readable: Readable = "owner"  # who may read what is in that directory


class Chunks(msgspec.Struct, forbid_unknown_fields=True):
    """`[chunks]`: how parameters are laid out."""

    size: str = "auto"  # bytes ("4MiB"), or auto: the size with the least waste


class Sync(msgspec.Struct, forbid_unknown_fields=True):
    """`[sync]`: how workers agree."""

    timeout: str = "10min"  # the deadline of a wait for other workers
    nonfinite: NonFinite = "stop"  # what NaN or infinity in a gradient does
    consistency: Consistency = "bsp"  # how far workers may be apart, where shards are; asp for ps-hra
    slack: Annotated[int, msgspec.Meta(ge=0)] = 4  # ssp: iterations that a worker may be ahead
    # Samples in a step over all workers, for session.batches; 0: not asked for
    global_batch: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    lazy: bool = False  # strategy server: a step returns at once; the next forward waits for parameters
    uplink: Uplink = "auto"  # strategy ps-hra: who of a group talks to the shards
    # ssp, asp: what of a stale contribution is divided by its staleness; of its delay, how much is made up
    staleness: Scaled = "weight"
    compensation: Annotated[float, msgspec.Meta(ge=0, lt=1e30)] = 0.0
    pipeline: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0  # 1: exchanges go on while the next step computes
    # Strategy peers: how many global iterations a node may be ahead of what its parameters stand at; what of
    # the contributions that are not applied yet its parameters show; the limits of a synchronisation round,
    # and of the pause after one was refused, or auto: by what was measured
    stale_max: Annotated[int, msgspec.Meta(ge=0, le=MOST_STALE)] = 4
    overlay: Overlay = "all"
    round_timeout: str = "auto"
    backoff: str = "auto"


class Server(msgspec.Struct, forbid_unknown_fields=True):
    """`[server]`: the shards."""

    optimizer: str = ""  # an optimizer beside torch.optim's that shards may run: "package.module:Class"
    snapshot: str = "1min"  # how often a shard writes its state to disk
    journal: JournalNeed = "optional"  # required: a shard that cannot write its journal ends
    replicas: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1  # processes that hold each shard; 2: a standby


class Hub(msgspec.Struct, forbid_unknown_fields=True):
    """`[hub]`: who says which workers are there."""

    patience: str = "10s"  # for how long a worker or a shard may be silent before it counts as dead


class Groups(msgspec.Struct, forbid_unknown_fields=True):
    """`[groups]`: which workers share a ring (strategies hierarchical and ps-hra; peers: `count` alone)."""

    count: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0  # 0: as many as are best; peers: one worker each
    by: GroupBy = "auto"  # auto: speed where count is given, else joint
    probe: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 4  # batches whose pace counts at the start
    patience: str = "1min"  # for a worker's probe
    links: str = "5s"  # for measuring the links between workers at the start; 0: they are not measured
    regroup: bool = True  # while the run goes, as speeds and members change


class Link(msgspec.Struct, forbid_unknown_fields=True):
    """`[link]`: how chunks travel between workers, or their groups or sites, and the shards."""

    transport: Transport = "tcp"  # ltp: parts of gradients may be lost
    high: str = "auto"  # the share of a gradient's blocks that must not be lost, or auto: derived
    fill: Fill = "zero"  # what takes the place of lost blocks, where they are too many to be borne
    fill_above: Share = 0.03  # the share of lost blocks up to which they are borne
    usable: Share = 0.97  # the share of the other blocks with which a gradient is of use
    feedback: bool = True  # what was lost is added to the next gradient
    target_loss: Share = 0.01  # the rate of loss that is aimed at, until a better one was fitted
    stripes: Annotated[int, msgspec.Meta(ge=1, le=MOST_STRIPES)] = 1  # UDP flows of a connection
    reliable: bool = False  # nothing may be lost, gradients neither
    rate: str = ""  # of each shard's link ("1Gbit/s"), which its peers then share; empty: not shared out


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`[link]`, resolved: what a worker's and a site's connections to shards are made with. `high` is a share
    of the blocks, or None for a derived one; `rate` is in bytes per second, 0 for none."""

    transport: Transport = "tcp"
    high: Share | None = None
    fill: Fill = "zero"
    fill_above: Share = 0.03
    usable: Share = 0.97
    feedback: bool = True
    target_loss: Share = 0.01
    stripes: Annotated[int, msgspec.Meta(ge=1, le=MOST_STRIPES)] = 1
    reliable: bool = False
    rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def lossy(self) -> bool:
        """Whether parts of gradients may be lost."""
        return self.transport == "ltp" and not self.reliable

    @property
    def holds_back(self) -> bool:
        """Whether what was lost is added to the next gradient."""
        return self.lossy and self.feedback


class Config(msgspec.Struct, forbid_unknown_fields=True):
    """The whole configuration; docs/configuration.md explains each key."""

    run: Run = msgspec.field(default_factory=Run)
    chunks: Chunks = msgspec.field(default_factory=Chunks)
    sync: Sync = msgspec.field(default_factory=Sync)
    server: Server = msgspec.field(default_factory=Server)
    hub: Hub = msgspec.field(default_factory=Hub)
    groups: Groups = msgspec.field(default_factory=Groups)
    link: Link = msgspec.field(default_factory=Link)
    memory: Memory = msgspec.field(default_factory=Memory)

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

    @property
    def link_options(self) -> LinkOptions:
        """`[link]`, resolved."""
        plain = msgspec.structs.asdict(self.link)
        return LinkOptions(**{**plain, "high": self._high, "rate": self._link_rate or 0.0})

    @property
    def _high(self) -> float | None:
        """`link.high` as a share; None for auto."""
        given = self.link.high
        if given == "auto":
            return None
        try:
            share = float(given)
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"{given!r} is neither a share between 0 and 1 nor auto")
        return share

    @property
    def _link_rate(self) -> float | None:
        """`link.rate` in bytes per second; None where it is not given."""
        return parse_rate(self.link.rate) / 8 if self.link.rate else None


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
        config.sync.consistency = "asp"  # groups that wait for one another need no server between them
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


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` for the known word most like this one, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _known() -> dict[str, list[str]]:
    hints = get_type_hints(Config)
    return {section: list(hints[section].__struct_fields__) for section in Config.__struct_fields__}


def _dotted(known: dict[str, list[str]]) -> Iterator[str]:
    for section, keys in known.items():
        yield from (f"{section}.{key}" for key in keys)


def _check_keys(table: dict[str, Any], where: str) -> None:
    known = _known()
    for section, values in table.items():
        if section not in known:
            candidates = [*known, *_dotted(known)]
            raise ConfigError(f"{where}: no section or key {section!r}{_suggest(section, candidates)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: {section!r} is a section; write [{section}] and its keys below it")
        for key in values:
            if key not in known[section]:
                name = f"{section}.{key}"
                raise ConfigError(f"{where}: no key {name!r}{_suggest(name, list(_dotted(known)))}")


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
    known = _known()
    if key not in known.get(section, ()):
        raise ConfigError(f"{where}: no key {name!r}{_suggest(name, list(_dotted(known)))}")
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
    for name, parse in (
        ("run.grace", lambda: config.grace_seconds),
        ("chunks.size", lambda: config.chunk_bytes),
        ("sync.timeout", lambda: config.timeout_seconds),
        ("sync.round_timeout", lambda: config.round_seconds),
        ("sync.backoff", lambda: config.backoff_seconds),
        ("server.snapshot", lambda: config.snapshot_seconds),
        ("hub.patience", lambda: config.patience_seconds),
        ("groups.patience", lambda: config.probe_seconds),
        ("groups.links", lambda: config.links_seconds),
        ("link.rate", lambda: config._link_rate),
    ):
        try:
            value = parse()
        except ConfigError as error:
            raise ConfigError(f"{where}: {name}: {error}") from None
        if value is not None and value <= 0 and name != "groups.links":  # which may be 0: not at all
            raise ConfigError(f"{where}: {name}: must be more than 0")
    try:
        _ = config._high
    except ConfigError as error:
        raise ConfigError(f"{where}: link.high: {error}") from None
    try:
        # Keys come in any order: that the device's budget is missing is said when all are there.
        msgspec.structs.replace(config.memory, device=config.memory.device or "1").budgets("memory.")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def _numbers_as_text(table: dict[str, Any]) -> dict[str, Any]:
    """A size or a span may be given as a plain number (`timeout = 30`); the keys themselves are text."""
    defaults = msgspec.to_builtins(Config())
    return {
        section: {
            key: str(value)
            if isinstance(defaults[section].get(key), str) and type(value) in (int, float)
            else value
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
    choices = _choices(section, key)
    if choices:
        suggestion = nearest(str(given), choices)
        return f"{name}: no such choice {given!r}{suggestion} (one of: {', '.join(choices)})"
    wanted = text.partition(", got ")[0].replace("`", "")  # "expected int >= 1", "expected int"
    return f"{name}: {wanted[:1].lower()}{wanted[1:]}, got {given!r}" if name else text


def _choices(section: str, key: str) -> list[str]:
    kinds = {
        "run.strategy": Strategy,
        "sync.nonfinite": NonFinite,
        "sync.consistency": Consistency,
        "run.readable": Readable,
        "sync.uplink": Uplink,
        "sync.staleness": Scaled,
        "sync.overlay": Overlay,
        "groups.by": GroupBy,
        "link.transport": Transport,
        "link.fill": Fill,
        "memory.sharding": Sharding,
    }
    kind: Any = kinds.get(f"{section}.{key}")
    return list(kind.__args__) if kind is not None else []
