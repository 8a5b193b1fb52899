"""The strategies that use each configuration key, and warnings for keys that a run does not use.

`EFFECTS` has a row for each key. A new key needs a row: tests/unit/test_effects.py compares the table with
the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from atoll.core.config import GROUPED, SERVED, STRATEGIES, Config, Strategy

_RINGS: tuple[Strategy, ...] = ("ring", "hierarchical")


class Effect(NamedTuple):
    """The conditions under which a key has an effect.

    Args:
        strategies: the strategies that use the key.
        elastic: further strategies that use the key with `run.elastic`.
        when: another key that must have one of `values`; empty: no such condition.
        values: see `when`.
        besides: strategies that use the key whatever the other key is, if `sync.shares` is "auto".
    """

    strategies: tuple[Strategy, ...] = STRATEGIES
    elastic: tuple[Strategy, ...] = ()
    when: str = ""
    values: tuple[str, ...] = ()
    besides: tuple[Strategy, ...] = ()


_EVERYWHERE = Effect()
_AT_SHARDS = Effect(SERVED)
_LATE_AT_SHARDS = Effect(SERVED, when="sync.consistency", values=("ssp", "asp"))
_OF_GROUPS = Effect(("ps-hra",))
_OF_PEERS = Effect(("peers",))
_OF_RINGS = Effect(_RINGS)
_DEALT: tuple[Strategy, ...] = (*_RINGS, *SERVED)
_TOGETHER = Effect(_DEALT, when="sync.consistency", values=("bsp",))  # all make each iteration
# In groups at their own pace members share their group's batches by speed, and in no other way:
_PARTS = Effect(_DEALT, when="sync.consistency", values=("bsp",), besides=("ps-hra",))
_BY_SPEED = Effect((*_DEALT, "peers"), when="sync.consistency", values=("bsp",), besides=("ps-hra",))
_LOSSY = Effect(SERVED, when="link.transport", values=("ltp",))

# Under a strategy of another package these keys act as under `server`, all others as under `hierarchical`.
_NOT_FROM_OUTSIDE = ("sync.codec", "sync.shares", "sync.least")

EFFECTS: Mapping[str, Effect] = {
    "run.workers": _EVERYWHERE,
    "run.strategy": _EVERYWHERE,
    "run.shards": _AT_SHARDS,
    "run.sites": Effect(("server",)),
    "run.restarts": Effect((*SERVED, "peers"), elastic=_RINGS),
    "run.grace": _EVERYWHERE,
    "run.elastic": _OF_RINGS,
    "run.ring_order": Effect(("ring", "ps-hra")),
    "run.directory": _EVERYWHERE,
    "run.readable": _EVERYWHERE,
    "chunks.size": _EVERYWHERE,
    "sync.timeout": _EVERYWHERE,
    "sync.nonfinite": _EVERYWHERE,
    "sync.buffers": _EVERYWHERE,
    "sync.consistency": _AT_SHARDS,
    "sync.slack": Effect(SERVED, when="sync.consistency", values=("ssp",)),
    "sync.global_batch": _EVERYWHERE,
    "sync.global_tokens": _TOGETHER,
    "sync.shares": _PARTS,
    "sync.least": _BY_SPEED,
    "sync.memory_cap": _EVERYWHERE,
    "sync.lazy": Effect(("server",)),
    "sync.uplink": _OF_GROUPS,
    "sync.staleness": _LATE_AT_SHARDS,
    "sync.compensation": _LATE_AT_SHARDS,
    "sync.pipeline": _LATE_AT_SHARDS,
    "sync.codec": Effect((*SERVED, "peers")),
    "sync.stale_max": _OF_PEERS,
    "sync.overlay": _OF_PEERS,
    "sync.round_timeout": _OF_PEERS,
    "sync.backoff": _OF_PEERS,
    "server.optimizer": _AT_SHARDS,
    "server.snapshot": _AT_SHARDS,
    "server.journal": _AT_SHARDS,
    "server.replicas": _AT_SHARDS,
    "hub.patience": Effect((*SERVED, "peers"), elastic=_RINGS),
    "groups.count": Effect((*GROUPED, "peers")),
    "groups.by": _OF_GROUPS,
    "groups.probe": _OF_GROUPS,
    "groups.patience": _OF_GROUPS,
    "groups.links": _OF_GROUPS,
    "groups.regroup": _OF_GROUPS,
    "link.transport": Effect((*SERVED, "peers")),
    "link.high": _LOSSY,
    "link.fill": _LOSSY,
    "link.fill_above": _LOSSY,
    "link.usable": _LOSSY,
    "link.feedback": _LOSSY,
    "link.target_loss": _LOSSY,
    "link.stripes": _LOSSY,
    "link.reliable": Effect((*SERVED, "peers"), when="link.transport", values=("ltp",)),
    "link.rate": _AT_SHARDS,
    "memory.device": _EVERYWHERE,
    "memory.host": _EVERYWHERE,
    "memory.disk": Effect((*_RINGS, *SERVED)),
    "memory.chunk": _EVERYWHERE,
    "memory.cache": _EVERYWHERE,
    "memory.resident": _EVERYWHERE,
    "memory.sharding": _OF_RINGS,
    "memory.step": _OF_RINGS,
    "memory.master": _OF_RINGS,
}


def without_effect(config: Config, given: Mapping[str, str]) -> list[str]:
    """Return a warning for each given key that has no effect in a run of this configuration.

    `given` maps each key to its source ("atoll.toml"), as returned by `load_given`. Defaults are not listed
    there.
    """
    lines = []
    for key, where in given.items():
        effect, strategy = EFFECTS[key], config.run.strategy
        if strategy not in STRATEGIES:  # another package's: over a ring, with groups, and values are coded
            strategy = "server" if key in _NOT_FROM_OUTSIDE else "hierarchical"
        named = f"{key} (given by {where}) has no effect"
        if strategy in effect.strategies or (config.run.elastic and strategy in effect.elastic):
            value = _value_of(config, effect.when) if effect.when else None
            by_speed = strategy in effect.besides and config.sync.shares == "auto"
            if effect.when and value not in effect.values and not by_speed:
                wanted = " or ".join(effect.values)
                wanted += ", or sync.shares = 'auto'" if strategy in effect.besides else ""
                lines.append(f"{named} where {effect.when} is {value!r}: it needs {wanted}; leave it out")
            continue
        users = [repr(each) for each in effect.strategies]
        users += [f"{each!r} with run.elastic" for each in effect.elastic]
        verb = "uses" if len(users) == 1 else "use"
        lines.append(
            f"{named} under strategy {config.run.strategy!r}: only {_and(users)} {verb} it; leave it out"
        )
    return lines


def _value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
