"""The configuration: where its values come from, and what is said of each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from atoll.axes.needs import check_configuration
from atoll.cli import services
from atoll.core.config import MOST_STRIPES, Config, Fill, LinkOptions, load_config, to_toml
from atoll.core.errors import ConfigError, UserError
from atoll.core.memory import Budgets, Memory, Pins, check_folder
from atoll.core.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from atoll.ltp import settings as settings_module
from atoll.ltp.settings import LtpSettings
from atoll.server.options import ServerOptions
from atoll.wire import datagrams


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def load_checked(settings: list[str]) -> Config:
    """Load a configuration as `atoll run` and `atoll.join` do."""
    config = load_config(settings=settings, environment={})
    check_configuration(config)
    return config


def test_defaults_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(environment={}) == Config()


def test_later_sources_win(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", '[run]\nworkers = 3\n[sync]\ntimeout = "5s"\n')
    config = load_config(path, ["sync.timeout=2min", "sync.timeout=1h", "sync.nonfinite=skip"])
    assert config.run.workers == 3
    assert config.timeout_seconds == 3600
    assert config.sync.nonfinite == "skip"


def test_groups_that_meet_at_shards_are_asynchronous_unless_it_is_said(tmp_path: Path) -> None:
    assert load_config(None, ["run.strategy=server"], {}).sync.consistency == "bsp"
    grouped = load_config(None, ["run.strategy=ps-hra"], {})
    assert grouped.sync.consistency == "asp"
    path = write(tmp_path / "as-used.toml", to_toml(grouped))
    assert load_config(path, environment={}).sync.consistency == "asp"
    said = load_config(None, ["sync.consistency=bsp", "run.strategy=ps-hra"], {})
    assert said.sync.consistency == "bsp"


def test_file_here_counts_and_the_variable_counts_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "atoll.toml", "[run]\nworkers = 2\n")
    other = write(tmp_path / "other.toml", "[run]\nworkers = 5\n")
    assert load_config(environment={}).run.workers == 2
    assert load_config(environment={"ATOLL_CONFIG": str(other)}).run.workers == 5
    assert load_config(tmp_path / "atoll.toml", environment={"ATOLL_CONFIG": str(other)}).run.workers == 2


@pytest.mark.parametrize(
    ("setting", "seconds"),
    [("sync.timeout=30", 30.0), ("sync.timeout=1.5", 1.5), ('sync.timeout="2m"', 120.0)],
)
def test_a_span_may_be_a_plain_number(setting: str, seconds: float) -> None:
    assert load_config(settings=[setting], environment={}).timeout_seconds == seconds


def test_how_long_links_are_measured() -> None:
    assert load_config(environment={}).links_seconds == 5.0
    assert load_config(settings=["groups.links=0"], environment={}).links_seconds == 0.0


def test_the_hubs_patience() -> None:
    assert load_config(environment={}).patience_seconds == 10.0
    assert load_config(settings=["hub.patience=1.5min"], environment={}).patience_seconds == 90.0


def test_chunk_size() -> None:
    assert load_config(settings=["chunks.size=4MiB"], environment={}).chunk_bytes == 4 * 2**20
    assert load_config(settings=["chunks.size=4096"], environment={}).chunk_bytes == 4096
    assert load_config(environment={}).chunk_bytes is None


def test_toml_comes_back_equal(tmp_path: Path) -> None:
    given = ['run.directory=a "quoted" \\ path', "run.workers=7", "chunks.size=1KiB", "sync.nonfinite=allow"]
    given += ["sync.memory_cap={0=96, 3=24}"]
    config = load_config(settings=given, environment={})
    assert load_config(write(tmp_path / "used.toml", to_toml(config))) == config


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("sync.timeot=3s", "--set sync.timeot=3s: no key 'sync.timeot'; did you mean 'sync.timeout'?"),
        ("timeout=3s", "--set timeout=3s: write it as SECTION.KEY=VALUE, such as sync.timeout=30s"),
        ("run.timeout=3s", "--set run.timeout=3s: no key 'run.timeout'; did you mean 'sync.timeout'?"),
        ("run.strategy", "--set run.strategy: write it as SECTION.KEY=VALUE, such as sync.timeout=30s"),
        ("run.workers=two", "--set run.workers=two: run.workers: expected int, got 'two'"),
        ("run.workers=0", "--set run.workers=0: run.workers: expected int >= 1, got 0"),
        ("run.workers=2.5", "--set run.workers=2.5: run.workers: expected int, got 2.5"),
        ("run.directory=true", "--set run.directory=true: run.directory: expected str, got True"),
        ("sync.timeout=0", "--set sync.timeout=0: sync.timeout: must be more than 0"),
        ("groups.links=-1", "--set groups.links=-1: groups.links: '-1' is not a span of time"),
        ("groups.links=soon", "--set groups.links=soon: groups.links: 'soon' is not a span of time"),
        ("hub.patience=0s", "--set hub.patience=0s: hub.patience: must be more than 0"),
        ("hub.patience=soon", "--set hub.patience=soon: hub.patience: 'soon' is not a span of time"),
        ("sync.compensation=-1", "--set sync.compensation=-1: sync.compensation: expected float"),
        ("sync.pipeline=2", "--set sync.pipeline=2: sync.pipeline: expected int <= 1, got 2"),
        ("sync.staleness=wieght", "--set sync.staleness=wieght: sync.staleness: no such choice 'wieght'"),
        ("sync.stale_max=-1", "--set sync.stale_max=-1: sync.stale_max: expected int >= 0, got -1"),
        ("sync.stale_max=few", "--set sync.stale_max=few: sync.stale_max: expected int, got 'few'"),
        ("sync.overlay=al", "--set sync.overlay=al: sync.overlay: no such choice 'al'; did you mean 'all'?"),
        ("sync.round_timeout=0", "--set sync.round_timeout=0: sync.round_timeout: must be more than 0"),
        ("sync.backoff=soon", "--set sync.backoff=soon: sync.backoff: 'soon' is not a span of time"),
        ("sync.memory_cap=-1", "--set sync.memory_cap=-1: sync.memory_cap: -1 samples are no cap"),
        ("sync.memory_cap=atuo", "--set sync.memory_cap=atuo: sync.memory_cap: no such choice 'atuo'; did"),
        ("sync.memory_cap={2=0}", "--set sync.memory_cap={2=0}: sync.memory_cap: the cap of worker 2 is 0"),
        ("sync.memory_cap={a=2}", "--set sync.memory_cap={a=2}: sync.memory_cap: 'a' is no worker"),
        ("sync.memory_cap={0=2.5}", "--set sync.memory_cap={0=2.5}: sync.memory_cap"),
        ("sync.nonfinite=Skip", "--set sync.nonfinite=Skip: sync.nonfinite: no such choice 'Skip'"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings=[setting], environment={})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["sync.pipeline=1"], "sync.pipeline = 1 has a step begin before the one before it is"),
        (["sync.pipeline=1", "sync.consistency=asp", "sync.lazy=true"], "sync.pipeline = 1 and sync.lazy"),
        (["sync.pipeline=1", "sync.consistency=ssp", "run.sites=2"], "sync.pipeline = 1 is not for run"),
        (["sync.stale_max=2"], "sync.stale_max is of strategy 'peers', and run.strategy is 'ring'"),
        (["run.strategy=peers", "sync.consistency=asp"], "sync.consistency is for workers of a parameter"),
        (["run.strategy=peers", "sync.lazy=true"], "sync.lazy is for workers of a parameter server"),
        (["run.strategy=peers", "link.transport=ltp"], "strategy 'peers' keeps nodes equal to the bit"),
        (["sync.compensation=0.1"], "sync.compensation makes up for delay, of which sync.consistency bsp"),
    ],
)
def test_keys_that_are_wrong_together_are_one_line(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_checked(settings)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_budgets_of_memory_in_any_order() -> None:
    given = ["memory.disk=/scratch:50GiB", "memory.host=8GiB", "memory.device=2GiB", "memory.chunk=16MiB"]
    for order in (1, -1):
        budgets = load_config(settings=given[::order], environment={}).budgets
        assert budgets == Budgets(
            device=2**31, host=2**33, disk=50 * 2**30, folder="/scratch", pins=Pins(chunk_bytes=2**24)
        )
    assert load_config(environment={}).budgets is None
    assert load_config(settings=["memory.device=4096"], environment={}).budgets == Budgets(device=4096)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("memory.device=2GiBs", "memory.device: '2GiBs' is not a size; write it like 2GiB"),
        ("memory.device=-2GiB", "memory.device: '-2GiB' is not a size"),
        ("memory.device=-2", "memory.device: '-2' is not a size"),
        ("memory.device=0", "memory.device: a budget of 0 holds nothing"),
        ("memory.host=0B", "memory.host: a budget of 0 holds nothing"),
        ("memory.host=much", "memory.host: 'much' is not a size"),
        ("memory.disk=/scratch", "memory.disk: '/scratch' has no folder or no size"),
        ("memory.disk=50GiB", "memory.disk: '50GiB' has no folder or no size"),
        ("memory.disk=:50GiB", "memory.disk: ':50GiB' has no folder or no size"),
        ("memory.disk=/scratch:", "memory.disk: '/scratch:' has no folder or no size"),
        ("memory.disk=/scratch:0", "memory.disk: a budget of 0 holds nothing"),
        ("memory.disk=/scratch:all", "memory.disk: 'all' is not a size"),
        ("memory.chunk=4MB/s", "memory.chunk: '4MB/s' is not a size"),
        ("memory.cache=0", "memory.cache: '0' is no number of blocks"),
        ("memory.cache=some", "memory.cache: 'some' is no number of blocks"),
        ("memory.resident=1.5", "memory.resident: '1.5' is neither a share between 0 and 1"),
        ("memory.resident=nan", "memory.resident: 'nan' is neither a share between 0 and 1"),
        ("memory.sharding=asymetric", "memory.sharding: no such choice 'asymetric'; did you mean"),
        ("memory.step=cpu", "memory.step: no such choice 'cpu' (one of: auto, device, host, or the share"),
        ("memory.step=1.5", "memory.step: no such choice '1.5'"),
        ("memory.step=nan", "memory.step: no such choice 'nan'"),
        ("memory.devise=2GiB", "no key 'memory.devise'; did you mean 'memory.device'?"),
    ],
)
def test_a_wrong_budget_is_one_line_that_names_its_key(setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings=[setting], environment={})
    assert str(caught.value).startswith(f"--set {setting}: {said}")
    assert "\n" not in str(caught.value)


def test_budgets_without_the_devices() -> None:
    with pytest.raises(ConfigError, match=r"^memory\.device: .*missing.* memory\.host alone says too little"):
        load_config(settings=["memory.host=8GiB"], environment={})
    with pytest.raises(ConfigError, match=r"^device: the device's budget is missing; write it like 2GiB$"):
        Memory().budgets()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resident": None}, "resident: None is neither a text nor a number; leave it out, or give auto"),
        ({"host": ["1GiB"]}, "host: ['1GiB'] is neither a text nor a number"),
        ({"chunk": True}, "chunk: True is neither a text nor a number"),
        ({"master": "yes"}, "master: 'yes' is neither True nor False"),
        (
            {"step": "device", "cache": "3"},
            "step: on the device everything stays there; leave out cache, or leave step at auto or host",
        ),
        (
            {"step": "device", "resident": "0.5"},
            "step: on the device everything stays there; leave out resident",
        ),
        (
            {"step": 0.3, "resident": "0.5"},
            "step: on the device what steps there stays there; leave out resid",
        ),
        ({"step": "0.3", "master": True}, "master: masters are stepped in host memory"),
        ({"step": True}, "step: True is neither a text nor a number; leave it out, or give auto"),
    ],
)
def test_budgets_of_wrong_types_and_pins_that_exclude_each_other(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Memory(**{"device": "1GiB"} | given).budgets("memory.")
    assert str(caught.value).startswith(f"memory.{said}")


def test_budgets_may_be_numbers() -> None:
    given: Any = {"device": 2**30, "resident": 0.5, "cache": 3, "chunk": 4096}
    pins = Memory(**given).budgets().pins
    assert (pins.resident, pins.cache_blocks, pins.chunk_bytes) == (0.5, 3, 4096)


def test_the_folder_of_the_disk_tier(tmp_path: Path) -> None:
    def check(folder: Path, size: str = "1KiB") -> None:
        check_folder(Memory(device="1GiB", disk=f"{folder}:{size}").budgets(), "memory.")

    check(tmp_path)
    with pytest.raises(ConfigError, match=r"^memory\.disk: .*none does not exist; give a folder"):
        check(tmp_path / "none")
    write(tmp_path / "file", "")
    with pytest.raises(ConfigError, match=r"^memory\.disk: .*file is no folder"):
        check(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"^memory\.disk: .* has .* free, and the budget is"):
        check(tmp_path, "1000TiB")
    with pytest.raises(ConfigError, match=r"^memory\.disk: /proc is not writable|/proc has 0 B free"):
        check(Path("/proc"))


def test_keys_of_peers_in_any_order() -> None:
    for order in (1, -1):
        given = ["sync.stale_max=0", "run.strategy=peers", "sync.overlay=own", "link.transport=ltp"]
        given = [*given, "link.reliable=true", "sync.round_timeout=2", "sync.backoff=100ms"]
        config = load_checked(given[::order])
        assert (config.sync.stale_max, config.round_seconds, config.backoff_seconds) == (0, 2.0, 0.1)
    assert load_config(settings=["run.strategy=peers"], environment={}).round_seconds is None


def test_keys_that_are_right_together_in_any_order() -> None:
    for order in (1, -1):
        given = ["sync.pipeline=1", "sync.compensation=3", "sync.consistency=asp", "sync.staleness=rate"]
        sync = load_checked(given[::order]).sync
        assert (sync.pipeline, sync.compensation, sync.staleness) == (1, 3.0, "rate")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[runn]\nworkers = 2\n", "no section or key 'runn'; did you mean 'run'?"),
        ("workers = 2\n", "no section or key 'workers'; did you mean 'run.workers'?"),
        ("run = 2\n", "'run' is a section; write [run] and its keys below it"),
        ("[run]\nworker = 2\n", "no key 'run.worker'; did you mean 'run.workers'?"),
        ("[run]\nworkers = 'two'\n", "run.workers: expected int, got 'two'"),
        ("[run]\nstrategy = 'rign'\n", "run.strategy: no such choice 'rign'; did you mean 'ring'?"),
        ("[sync]\ntimeout = 'soon'\n", "sync.timeout: 'soon' is not a span of time; write it like 90s"),
        ("[chunks]\nsize = '4 parsecs'\n", "chunks.size: '4 parsecs' is not a size; write it like 2GiB"),
        ("[run\n", "not TOML: "),
        ("[run]\nworkers = 1\nworkers = 2\n", "not TOML: "),
    ],
)
def test_a_wrong_file_is_one_line_that_names_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "wrong.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: {said}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nope\.toml: cannot read the configuration: No such file"):
        load_config(tmp_path / "nope.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8 text"):
        load_config(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("2GiB", 2**31), ("500 MB", 500_000_000), ("1.5kib", 1536), ("1e3", 1000)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("200ms", 0.2), ("5min", 300.0), ("2h", 7200.0), ("1.5", 1.5)]
)
def test_spans(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "five", "1 2", "0x10", "3 s s", "1GiBs"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)
    with pytest.raises(ConfigError):
        parse_seconds(text)


def test_quantities_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert [format_seconds(s) for s in (0.0123, 12.34, 192.4, 7260)] == [
        "12.3 ms",
        "12.3 s",
        "3 min 12 s",
        "2 h 1 min",
    ]


# -- [link] -----------------------------------------------------------------------------------------------

SERVED_LTP = ["run.strategy=server", "link.transport=ltp"]


def test_the_link_is_resolved() -> None:
    assert load_config(environment={}).link == LinkOptions()
    given = ["link.high=0.25", "link.rate=1Gbit/s", "link.stripes=2", "link.feedback=false", "link.fill=last"]
    options = load_config(settings=[*SERVED_LTP, *given], environment={}).link
    assert (options.high_share, options.bytes_per_second) == (0.25, 1.25e8)
    assert options.lossy
    assert not options.holds_back
    reliable = load_config(settings=[*SERVED_LTP, "link.reliable=true"], environment={}).link
    assert not reliable.lossy
    assert not reliable.holds_back


def test_the_links_defaults_are_the_transports() -> None:
    """Who sets nothing should get the transport that is documented."""
    own, settings = LinkOptions(), LtpSettings()
    for name in ("fill", "fill_above", "usable", "target_loss"):
        assert getattr(own, name) == getattr(settings, name), name
    assert MOST_STRIPES == datagrams.MOST_STRIPES
    assert get_args(Fill) == get_args(settings_module.Fill)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["link.transport=udp"], "link.transport: no such choice 'udp' (one of: tcp, ltp)"),
        (["link.transport=ltcp"], "link.transport: no such choice 'ltcp'; did you mean"),
        (["link.high=1.5"], "link.high: '1.5' is neither a share between 0 and 1 nor auto"),
        (["link.high=most"], "link.high: 'most' is neither a share between 0 and 1 nor auto"),
        (["link.usable=2"], "link.usable: expected `float` <= 1"),
        (["link.stripes=0"], "link.stripes: expected"),
        (["link.stripes=9"], "link.stripes: expected"),
        (["link.rate=fast"], "link.rate: 'fast' is not a rate; write it like 1Gbit/s"),
        (["link.rate=0Mbit/s"], "link.rate: must be more than 0"),
        (["link.fil=zero"], "no key 'link.fil'; did you mean 'link.fill'?"),
        ([*SERVED_LTP, "link.fill=rescale"], "link.fill 'rescale' makes up for what was lost, and so does "),
        ([*SERVED_LTP, "link.fill=last"], "link.fill 'last' puts an old value where one is lost, and "),
        ([*SERVED_LTP, "link.target_loss=0.2"], "link.target_loss = 0.2 is above link.fill_above = 0.03"),
        (["link.transport=ltp"], "link.transport 'ltp' is the way to the shards of a parameter server"),
        (["link.transport=ltp", "run.strategy=hierarchical"], "strategy 'hierarchical' has not: set run."),
    ],
)
def test_a_link_that_makes_no_sense_is_refused_in_one_line(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_checked(given)
    assert said.replace("`", "") in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"site": "paris", "link_rate": 1.25e8}, "--link-rate and --udp-port go with --shard"),
        ({"site": "paris", "udp_port": 47800}, "--link-rate and --udp-port go with --shard"),
        ({"shard": 0, "config": "atoll.toml"}, "--config FILE goes with --site"),
        ({"site": "paris", "config": "nowhere.toml"}, "nowhere.toml: cannot read the configuration"),
    ],
)
def test_what_a_shard_cannot_do_with_a_link_is_said_before_it_looks_for_the_hub(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        services.server(ServerOptions(hub="tcp://127.0.0.1:1", **options))
