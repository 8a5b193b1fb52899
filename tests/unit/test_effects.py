"""The table of which strategies use which key: complete, true, and told to whoever gives a key in vain."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

import atoll
from atoll.axes.needs import check_configuration
from atoll.core.config import STRATEGIES, Config, Strategy, load_given
from atoll.core.effects import EFFECTS, without_effect
from atoll.core.errors import ConfigError, UserError
from atoll.launch.checks import check_run

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
KEYS = [f"{section}.{key}" for section, keys in msgspec.to_builtins(Config()).items() for key in keys]
# A value of each key that is not its default; none for the strategy itself.
OTHER = {
    "run.workers": "4", "run.shards": "2", "run.sites": "2", "run.restarts": "1", "run.grace": "5s",
    "run.elastic": "true", "run.directory": "records", "run.readable": "all", "run.ring_order": "natural",
    "chunks.size": "1MiB", "sync.timeout": "1min",
    "sync.nonfinite": "skip", "sync.buffers": "mean", "sync.consistency": "ssp", "sync.slack": "2",
    "sync.global_batch": "32", "sync.global_tokens": "4096",
    "sync.shares": "auto", "sync.least": "1", "sync.memory_cap": "64",
    "sync.lazy": "true", "sync.uplink": "leader", "sync.staleness": "rate", "sync.compensation": "0.1",
    "sync.pipeline": "1", "sync.codec": "bfloat16", "sync.stale_max": "2", "sync.overlay": "own",
    "sync.round_timeout": "1s", "sync.backoff": "1s", "server.optimizer": "my.optim:Lion",
    "server.snapshot": "5min", "server.journal": "required", "server.replicas": "2", "hub.patience": "20s",
    "groups.count": "2",
    "groups.by": "site", "groups.probe": "8", "groups.patience": "2min", "groups.links": "0",
    "groups.regroup": "false",
    "link.transport": "ltp", "link.high": "0.2", "link.fill": "zero", "link.fill_above": "0.05",
    "link.usable": "0.9", "link.feedback": "false", "link.target_loss": "0.02", "link.stripes": "2",
    "link.reliable": "true", "link.rate": "1Gbit/s", "memory.device": "1MiB", "memory.host": "1GiB",
    "memory.disk": "/scratch:50GiB", "memory.chunk": "1MiB", "memory.cache": "8", "memory.resident": "0.5",
    "memory.sharding": "symmetric", "memory.step": "host", "memory.master": "true",
}  # fmt: skip
BESIDE = {"memory": ["memory.device=1MiB"], "link": ["link.transport=ltp"]}  # without which they mean nothing


def given(*settings: str) -> list[str]:
    """What is said of these settings."""
    config, places = load_given(settings=settings, environment={})
    return without_effect(config, places)


def test_every_key_is_in_the_table() -> None:
    assert list(EFFECTS) == KEYS
    assert [key for key in KEYS if key not in OTHER] == ["run.strategy"]


@pytest.mark.parametrize("key", OTHER)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_key_is_named_where_nothing_uses_it_and_refused_or_taken_where_something_does(
    strategy: Strategy, key: str
) -> None:
    """A refusal is louder than a warning: no strategy that uses a key refuses it."""
    section = key.partition(".")[0]
    settings = [f"run.strategy={strategy}", "run.workers=4", *BESIDE.get(section, []), f"{key}={OTHER[key]}"]
    is_used = strategy in EFFECTS[key].strategies
    if is_used and EFFECTS[key].when:
        settings.insert(0, f"{EFFECTS[key].when}={EFFECTS[key].values[0]}")
    try:
        config, places = load_given(settings=settings, environment={})
        check_configuration(config)
        check_run(config)
    except (ConfigError, UserError):
        assert not is_used or (strategy, section) == ("peers", "link")  # which wants link.reliable too
        return
    lines = [line for line in without_effect(config, places) if line.startswith(f"{key} ")]
    assert bool(lines) == (not is_used), lines
    for line in lines:
        assert f"{key} (given by --set {key}={OTHER[key]}) has no effect under strategy {strategy!r}" in line
        assert all(repr(each) in line for each in EFFECTS[key].strategies)


def test_the_page_names_the_strategies_of_the_table() -> None:
    seen = 0
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| `([a-z]+\.[a-z_]+)` \|[^|]*\|[^|]*\| (?:Strategy|Strategies) ([^:.]*)", line)
        if row is not None and row[1] != "groups.count":
            seen += 1
            named = set(re.findall(r"`([a-z-]+)`", row[2]))
            effect = EFFECTS[row[1]]
            assert named <= {*effect.strategies, *effect.elastic}, row[1]
            assert set(effect.strategies) <= named | {"peers"}, row[1]
    assert seen > 15


def test_where_a_key_was_given_is_said(tmp_path: Path) -> None:
    path = tmp_path / "atoll.toml"
    path.write_text('[sync]\nconsistency = "asp"\nslack = 4\n[groups]\nprobe = 4\n', encoding="utf-8")
    config, places = load_given(path, ["groups.probe=5"], {})
    assert without_effect(config, places) == [
        f"sync.consistency (given by {path}) has no effect under strategy 'ring': only 'server' and "
        "'ps-hra' use it; leave it out",
        f"sync.slack (given by {path}) has no effect under strategy 'ring': only 'server' and "
        "'ps-hra' use it; leave it out",
        "groups.probe (given by --set groups.probe=5) has no effect under strategy 'ring': only 'ps-hra' "
        "uses it; leave it out",
    ]


def test_what_another_key_rules_out_is_said_and_defaults_are_not() -> None:
    assert given("run.strategy=server", "sync.slack=8") == [
        "sync.slack (given by --set sync.slack=8) has no effect where sync.consistency is 'bsp': it needs "
        "ssp; leave it out"
    ]
    assert given("run.strategy=server", "sync.slack=8", "sync.consistency=ssp") == []
    assert given("hub.patience=5s", "run.elastic=true") == []
    assert given("hub.patience=5s")[0].endswith(
        "only 'server', 'ps-hra', 'peers', 'ring' with run.elastic and 'hierarchical' with run.elastic use "
        "it; leave it out"
    )
    in_groups = (
        "run.strategy=ps-hra",
        "sync.consistency=asp",
    )
    assert given(*in_groups, "sync.shares=auto", "sync.least=2") == []
    for setting in ("sync.shares={0=0.5, 1=0.5}", "sync.shares=even", "sync.least=2"):
        (line,) = given(*in_groups, setting)
        assert line.endswith(
            " has no effect where sync.consistency is 'asp': it needs bsp, or sync.shares = 'auto'; leave it "
            "out"
        )
    assert len(given(*in_groups, "sync.shares={0=0.5, 1=0.5}", "sync.least=2")) == 2
    (line,) = given(*in_groups, "sync.global_tokens=64")
    assert line.endswith(" has no effect where sync.consistency is 'asp': it needs bsp; leave it out")
    (line,) = given("run.strategy=server", "sync.consistency=asp", "sync.shares=auto")
    assert "has no effect where sync.consistency is 'asp': it needs bsp" in line
    assert given("run.strategy=ps-hra") == given() == []  # whose default of sync.consistency is its own


def test_a_script_that_is_started_without_the_command_is_told_by_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "atoll.toml"
    path.write_text('[sync]\nconsistency = "asp"\n', encoding="utf-8")
    monkeypatch.delenv("ATOLL_CONFIG", raising=False)
    atoll.join(path).close()
    said = capfd.readouterr().err
    assert said.count(f"sync.consistency (given by {path}) has no effect under strategy 'ring'") == 1
    monkeypatch.setenv("ATOLL_RUN_DIRECTORY", str(tmp_path / "run"))  # as under `atoll run`, which said it
    atoll.join(path).close()
    assert "has no effect" not in capfd.readouterr().err
