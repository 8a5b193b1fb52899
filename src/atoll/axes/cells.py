"""The cells of the design: one choice along each axis, and the configuration that chooses it.

Every cell of `CELLS` either trains, or a row of the table of needs says why not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from atoll.axes.choices import NO_FACTS, Choices, choices_of
from atoll.axes.needs import Moment, Need, refusal
from atoll.core.config import PLAIN_CODEC, Config, Run
from atoll.core.memory import Memory

# Place of a model: as a whole on the device; in tiers of memory under budgets; in tiers, shared among the
# members of a ring; in tiers, lent by the node's CPU side.
StoreKind: TypeAlias = Literal["resident", "tiered", "sharded", "lent"]
# First sum of gradients: none; over the workers of a ring.
GroupKind: TypeAlias = Literal["solo", "ring"]
# Exchange between contributors: none; a parameter server by its policy; peers without a server;
# replicas whose values are exchanged as another package's strategy says.
SyncKind: TypeAlias = Literal["local", "bsp", "ssp", "asp", "peers", "replicas"]
# Transport of chunks between contributors: TCP; datagrams that may lose parts; datagrams that may not.
LinkKind: TypeAlias = Literal["tcp", "ltp", "ltp reliable"]

# Encoding of sent gradients: each dtype as it is; float32 as bfloat16. The table treats a codec of
# another package like bfloat16.
CodecKind: TypeAlias = Literal["float32", "bfloat16"]

# A group's exchange with others: none; the shards of a server; peers; another package's strategy.
Others: TypeAlias = Literal["local", "shards", "peers", "replicas"]
OUTSIDE = "own"  # the name of another package's strategy, for a cell's configuration

# A cell's budgets; any will do. The second ones say that a group's members are to share the model.
_TIERS = Memory(device="64KiB")
_SHARED = Memory(device="64KiB", sharding="symmetric")


@dataclass(frozen=True)
class Cell:
    """One choice along each axis."""

    store: StoreKind
    group: GroupKind
    sync: SyncKind
    link: LinkKind
    codec: CodecKind

    @property
    def served(self) -> bool:
        """True where shards of a parameter server step the model."""
        return self.sync in ("bsp", "ssp", "asp")

    @property
    def budgets(self) -> bool:
        """True where the model is under budgets of memory."""
        return self.store != "resident"

    def __str__(self) -> str:
        return f"{self.store} x {self.group} x {self.sync} over {self.link} by {self.codec}"


def cell_of(config: Config, others: Others, group: GroupKind, memory: Memory | None = None) -> Cell:
    """The cell of a worker's run.

    Args:
        config: of the run.
        others: through what this worker's group meets others.
        group: whether the worker is in a ring.
        memory: the model's budgets; None: it has none.
    """
    sync: SyncKind = config.sync.consistency if others == "shards" else others
    link: LinkKind = "tcp"
    if config.link.transport == "ltp":
        link = "ltp reliable" if config.link.reliable else "ltp"
    codec: CodecKind = "float32" if config.sync.codec == PLAIN_CODEC else "bfloat16"
    return Cell(_store(group, sync, memory), group, sync, link, codec)


def _store(group: GroupKind, sync: SyncKind, memory: Memory | None) -> StoreKind:
    if memory is None:
        return "resident"
    if sync == "peers":
        return "lent"
    shares = sync in ("local", "replicas") or memory.sharding != "auto"  # pinned: at shards too
    return "sharded" if shares and group == "ring" else "tiered"


def _cells() -> Iterator[Cell]:
    for sync in get_args(SyncKind):
        for group in get_args(GroupKind):
            # In the order of `StoreKind`, without repetition:
            stores = dict.fromkeys(_store(group, sync, memory) for memory in (None, _TIERS, _SHARED))
            for store in stores:
                for codec, link in itertools.product(get_args(CodecKind), get_args(LinkKind)):
                    yield Cell(store, group, sync, link, codec)


CELLS: tuple[Cell, ...] = tuple(_cells())


def strategy_of(cell: Cell) -> str:
    """Return the value of `run.strategy` that chooses a cell's group and sync."""
    if cell.sync == "replicas":
        return OUTSIDE
    if cell.served:
        return "server" if cell.group == "solo" else "ps-hra"
    return "peers" if cell.sync == "peers" else "ring"


def config_of(cell: Cell) -> Config:
    """Return a configuration that chooses a cell, with values that train any small model."""
    strategy = strategy_of(cell)
    config = Config(run=Run(strategy=strategy))
    if cell.served:
        config = config.having(sync={"consistency": cell.sync})
    if cell.link != "tcp":
        config = config.having(link={"transport": "ltp", "reliable": cell.link == "ltp reliable"})
    config = config.having(sync={"codec": cell.codec})
    if cell.sync == "replicas" and cell.group == "ring":
        config = config.having(groups={"count": 1})
    if cell.budgets:
        shared = cell.store == "sharded" and cell.served
        config = msgspec.structs.replace(config, memory=_SHARED if shared else _TIERS)
    return config


def choices_in(
    cell: Cell, config: Config, facts: Mapping[str, Any] = NO_FACTS, memory: Memory | None = None
) -> Choices:
    """Return the choices of a run in this cell, with the cell's own as facts."""
    kinds = {"store": cell.store, "group": cell.group, "sync": cell.sync, "link": cell.link}
    return choices_of(config, {**kinds, **facts}, memory)


def refusal_of(cell: Cell) -> Need | None:
    """Return the row of the table that refuses a cell; None: the cell trains."""
    moments: tuple[Moment, ...] = ("configuration", "launch", "join", "prepare")
    choices = choices_in(cell, config_of(cell))
    return next((row for moment in moments if (row := refusal(moment, choices)) is not None), None)
