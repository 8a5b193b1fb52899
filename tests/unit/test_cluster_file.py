"""A cluster's file: what a right one comes to, the line that each mistake gets; `atoll plan groups`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from atoll.cli.app import main
from atoll.core.errors import ConfigError
from atoll.plan import cluster as module
from atoll.plan.cluster import Pipe, Worker, load_cluster, parse_cluster
from atoll.plan.throughput import Throughput

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "plan"

MODEL = '[model]\nbytes = "4MB"\n'
INSIDE = '[inside]\nbandwidth = "10Gbit/s"\nlatency = "1ms"\n'
SITES = f'{MODEL}{INSIDE}[[site]]\nname = "paris"\n[[site]]\nname = "berlin"\n'
WORKERS = (
    '[[worker]]\nname = "a"\nspeed = 10\nsite = "paris"\n'
    '[[worker]]\nname = "b"\nspeed = 2.5\nsite = "berlin"\n'
)
LINK = '[[link]]\nbetween = ["paris", "berlin"]\nbandwidth = "100Mbit/s"\nlatency = "40ms"\n'
WHOLE = SITES + WORKERS + LINK
NO_LINK = SITES + WORKERS + "[[link]]\n"


def test_the_defaults() -> None:
    cluster = parse_cluster(WHOLE)
    assert cluster.workers == (Worker("a", 10.0, 0, 1.25e9), Worker("b", 2.5, 1, 1.25e9))
    assert [site.name for site in cluster.sites] == ["paris", "berlin"]
    assert cluster.between_sites == {(0, 1): Pipe(1.25e7, 0.04)}
    assert (cluster.bytes, cluster.batch, cluster.compute) == (4_000_000, 1, 0.0)
    assert (cluster.uplink, cluster.pipeline, cluster.work) == ("leader", 0, "equal")
    assert (cluster.server, cluster.server_site) == (Pipe(1.25e9, 1e-3), 0)


def test_every_key() -> None:
    text = (
        '[model]\nbytes = 1000\nbatch = 8\ncompute = 1e-10\n[sync]\nuplink = "members"\npipeline = 1\n'
        'work = "speed"\n[server]\nsite = "berlin"\nbandwidth = "1Gbit/s"\n'
        f'{INSIDE}[[site]]\nname = "paris"\nlatency = 0.25\n'
        '[[site]]\nname = "berlin"\nbandwidth = "8Gbit/s"\n'
        '[[worker]]\nname = "a"\ncount = 2\nspeed = 10\nsite = "paris"\nbandwidth = "80Mbit/s"\n'
        '[[worker]]\nname = "b"\nspeed = 1\nsite = "berlin"\n'
        f'{LINK}[[link]]\nbetween = ["b", "a-1"]\nbandwidth = "16Mbit/s"\nlatency = 0.5\n'
    )
    cluster = parse_cluster(text)
    assert [worker.name for worker in cluster.workers] == ["a-1", "a-2", "b"]
    assert [worker.bandwidth for worker in cluster.workers] == [1e7, 1e7, 1e9]
    assert [site.inside for site in cluster.sites] == [Pipe(1.25e9, 0.25), Pipe(1e9, 1e-3)]
    assert (cluster.bytes, cluster.batch, cluster.compute) == (1000, 8, 1e-10)
    assert (cluster.uplink, cluster.pipeline, cluster.work) == ("members", 1, "speed")
    assert (cluster.server, cluster.server_site) == (Pipe(1.25e8, 1e-3), 1)
    assert cluster.pipe(2, 0) == Pipe(2e6, 0.5)
    assert cluster.pipe(1, 2) == Pipe(1e7, 0.04)
    measured = cluster.measured()
    assert measured.speeds == {0: 10.0, 1: 10.0, 2: 1.0}
    assert measured.links is not None
    assert measured.links.bandwidth[0, 2] == measured.links.bandwidth[2, 0] == 2e6


def test_workers_of_the_only_site_need_not_name_it() -> None:
    text = f'{MODEL}{INSIDE}[[site]]\nname = "lab"\n[[worker]]\nname = "a"\nspeed = 1\n'
    assert parse_cluster(text).workers == (Worker("a", 1.0, 0, 1.25e9),)


def test_a_site_without_workers_needs_no_links() -> None:
    text = WHOLE + '[[site]]\nname = "rome"\n'
    assert len(parse_cluster(text).sites) == 3


def test_the_examples() -> None:
    found = {path.stem: load_cluster(path) for path in EXAMPLES.glob("*.toml")}
    assert set(found) == {"one-straggler", "two-sites"}
    straggler = found["one-straggler"]
    assert [straggler.batch / worker.speed for worker in straggler.workers] == [0.1, 0.1, 0.1, 0.4]
    long = found["two-sites"].path(0, 1)
    assert (long.bandwidth * 8, long.latency) == (1e8, 0.04)


WRONG = [
    ("", "names no site; write [[site]] and below it name ="),
    ("[[site]\n", "not TOML: "),
    ("[[sites]]\n", "no key 'sites'; did you mean 'site'?"),
    (SITES, "names no worker; write [[worker]] and below it name ="),
    (WHOLE.replace(MODEL, ""), 'model: has no bytes; write bytes = "160MB", the size of all gradients'),
    (WHOLE.replace("4MB", "many"), "model: bytes: 'many' is not a size; write it like 2GiB, 500MB or 4096"),
    (WHOLE.replace("4MB", "0MB"), "model: bytes: 0MB is not a model's size; write it like 160MB"),
    (WHOLE.replace("[inside]", "batch = 0\n[inside]"), "model: batch: 0 is not a whole number from 1 to"),
    (WHOLE.replace("[inside]", "compute = -1\n[inside]"), "model: compute: -1 is not a time; write seconds"),
    (WHOLE.replace("[inside]", "speed = 1\n[inside]"), "model: no key 'speed'; known: bytes, batch, compute"),
    ("model = 3\n" + WHOLE.replace(MODEL, ""), "model: 3 stands where a table should"),
    (WHOLE + "[sync]\nuplink = 'member'\n", "sync: uplink: no such choice 'member'; did you mean 'members'?"),
    (WHOLE + "[sync]\npipeline = 2\n", "sync: pipeline: 2 is not a whole number from 0 to 1"),
    (WHOLE + "[sync]\nwork = 'fair'\n", "sync: work: no such choice 'fair' (one of: equal, speed)"),
    (WHOLE + "[server]\nsite = 'pariss'\n", "server: site: no site is named 'pariss'; did you mean 'paris'?"),
    (WHOLE + "[server]\nbandwidth = '1GB/s'\n", "server: bandwidth: '1GB/s' is not a rate; write it like"),
    # Sites
    (MODEL + "[[site]]\n", 'site 1: has no name; write name = "paris"'),
    (
        MODEL + "[[site]]\nname = 'x y'\n",
        "site 1: name: 'x y' is not a name; write letters, digits and signs",
    ),
    (
        MODEL + "[[site]]\nname = 'x'\n",
        'site 1 (x): has no bandwidth; write bandwidth = "10Gbit/s"; [inside] may say it for all sites',
    ),
    (
        MODEL + "[inside]\nbandwidth = '1Gbit/s'\n[[site]]\nname = 'x'\n",
        'site 1 (x): has no latency; write latency = "50us", one way; [inside] may say it for all sites',
    ),
    (
        WHOLE + '[[site]]\nname = "paris"\n',
        "site 3: name: 'paris' is taken; each site and worker needs a name",
    ),
    (WHOLE.replace('"1ms"', "-1"), "inside: latency: -1 is not a span of time; write it like"),
    ("[[site]]\n" * 65, "site: 65 sites are too many; at most 64"),
    # Workers
    (SITES + "[[worker]]\n", 'worker 1: has no name; write name = "a"'),
    (SITES + "[[worker]]\nname = 'paris'\n", "worker 1: name: 'paris' is taken; each site and worker needs"),
    (SITES + "[[worker]]\nname = 'a'\n", "worker 1 (a): has no speed; write speed = 100, the samples per"),
    *(
        (
            SITES + f"[[worker]]\nname = 'a'\nspeed = {speed}\n",
            f"worker 1 (a): speed: {shown} is not a speed; write samples per second, a number above 0",
        )
        for speed, shown in [("0", "0"), ("-3", "-3"), ("nan", "nan"), ("'fast'", "'fast'"), ("inf", "inf")]
    ),
    (
        SITES + "[[worker]]\nname = 'a'\nspeed = 1\n",
        'worker 1 (a): does not say where it is; write site = "paris"',
    ),
    (
        SITES + "[[worker]]\nname = 'a'\nspeed = 1\nsite = 'brelin'\n",
        "worker 1 (a): site: no site is named 'brelin'; did you mean 'berlin'?",
    ),
    (
        SITES + "[[worker]]\nname = 'a'\nspeed = 1\nsite = 'rome'\n",
        "worker 1 (a): site: no site is named 'rome'; the sites are paris, berlin",
    ),
    (
        SITES + "[[worker]]\nname = 'a'\ncount = 0\n",
        "worker 1 (a): count: 0 is not a whole number from 1 to 256",
    ),
    (
        WHOLE + "[[worker]]\nname = 'c'\nspeed = 1\nsite = 'paris'\ncount = 255\n",
        "worker: more than 256 workers, which are the most",
    ),
    (
        WHOLE
        + "[[worker]]\nname = 'c-2'\nspeed = 1\nsite = 'paris'\n"
        + "[[worker]]\nname = 'c'\nspeed = 1\nsite = 'paris'\ncount = 2\n",
        "worker 4 (c): count: 'c-2' is another worker's name; each needs its own",
    ),
    (
        WHOLE + "[[worker]]\nname = 'c'\nspeed = 1\nsite = 'paris'\nbandwidth = '0Mbit/s'\n",
        "worker 3 (c): bandwidth: 0Mbit/s lets nothing through; write more than 0",
    ),
    # Links
    (
        SITES + WORKERS,
        'link: none between ["paris", "berlin"]; write [[link]] with between = ["paris", "berlin"]',
    ),
    (NO_LINK, 'link 1: does not say what it joins; write between = ["paris", "berlin"], two sites or two'),
    (NO_LINK + "between = 'paris'\n", "link 1: between: 'paris' is not two names; write between = "),
    (NO_LINK + "between = ['paris', 3]\n", "link 1: between: ['paris', 3] is not two names; write between ="),
    (
        NO_LINK + "between = ['paris', 'brelin']\n",
        "link 1: between: no site or worker is named 'brelin'; did you mean 'berlin'?",
    ),
    (NO_LINK + "between = ['paris', 'b']\n", "link 1: between: ['paris', 'b'] is a site and a worker; write"),
    (
        NO_LINK + "between = ['a', 'a']\n",
        "link 1 (a - a): between: leads from a to itself; a link joins two different ends",
    ),
    (
        WHOLE + LINK.replace('"paris", "berlin"', '"berlin", "paris"'),
        "link 2 (berlin - paris): between: berlin and paris have a link above already; give each one once",
    ),
    (
        NO_LINK + "between = ['paris', 'berlin']\n",
        'link 1 (paris - berlin): has no bandwidth; write bandwidth = "100Mbit/s"',
    ),
    (
        WHOLE.replace('latency = "40ms"\n', ""),
        'link 1 (paris - berlin): has no latency; write latency = "20ms", one way',
    ),
    (WHOLE.replace("100Mbit/s", "-1Mbit/s"), "link 1 (paris - berlin): bandwidth: '-1Mbit/s' is not a rate"),
    (
        WHOLE.replace("100Mbit/s", "0Mbit/s"),
        "link 1 (paris - berlin): bandwidth: 0Mbit/s lets nothing through",
    ),
    (WHOLE.replace('"40ms"', '"-40ms"'), "link 1 (paris - berlin): latency: '-40ms' is not a span of time"),
    (
        WHOLE.replace('"40ms"', '"2min"'),
        "link 1 (paris - berlin): latency: 2min is too long; at most 1 min 0 s",
    ),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=range(len(WRONG)))
def test_a_mistake_is_one_line_that_says_where(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: {said}")
    assert "\n" not in line
    assert len(line) < 500


def test_every_key_of_a_cluster_and_the_file_there_are_in_the_documentation() -> None:
    text = (ROOT / "docs" / "grouping.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(parse_cluster(example).workers) >= 3
    tables = {
        "model": module._MODEL, "sync": module._SYNC, "server": module._SERVER, "inside": module._INSIDE,
        "site": module._SITE, "worker": module._WORKER, "link": module._LINK,
    }  # fmt: skip
    assert set(tables) == set(module._TOP)
    keys = [f"`{table}.{key}`" for table, keys in tables.items() for key in keys]
    assert [key for key in keys if key not in text] == []


# -- the command --------------------------------------------------------------------------------------------


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", "plan", "groups", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_what_is_shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, str(EXAMPLES / "one-straggler.toml")) == 0
    out, err = capfd.readouterr()
    assert err == ""
    lines = {line[2:].split("  ")[0]: line.split() for line in out.splitlines() if line}
    assert lines["one ring (synchronous)"][4:8] == [
        "320",
        "1.00x",
        lines["one ring (synchronous)"][6],
        "1.00x",
    ]
    assert "3.25x" in lines["each alone"]
    assert "3.25x" in lines["the ceiling"]
    chosen = next(line for line in out.splitlines() if line.startswith("* speed and links (joint)"))
    assert "3.25x" in chosen
    assert "is predicted to give" in out
    assert "site alone" in " ".join(out.split())


def test_the_paper_s_queue_of_two_groups(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(EXAMPLES / "one-straggler.toml")
    assert atoll(monkeypatch, path, "--groups", "2", "--by", "speed", "--json") == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["chosen"]["by"] == "speed"
    assert shown["chosen"]["groups"] == [["fast-1", "fast-2"], ["fast-3", "slow"]]
    assert shown["chosen"]["compute_only"] / shown["synchronous"]["compute_only"] == pytest.approx(2.5)
    rows = {row["by"]: row for row in shown["groupings"]}
    assert list(rows) == ["one ring", "each alone", "speed", "site", "joint"]
    assert rows["joint"]["groups"] == [["fast-1", "fast-2", "fast-3"], ["slow"]]
    assert rows["joint"]["compute_only"] / shown["synchronous"]["compute_only"] == pytest.approx(3.25)
    assert shown["ceiling"] == 1040
    throughput = Throughput(load_cluster(path))
    assert rows["one ring"]["samples_per_second"] == throughput.synchronous().samples_per_second
    assert "2 groups, as asked for" in shown["chosen"]["reason"]
    for row in rows.values():
        assert len(row["iterations"]) == len(row["groups"])


@pytest.mark.parametrize("by", ["speed", "site", "joint"])
def test_two_sites(by: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, str(EXAMPLES / "two-sites.toml"), "--by", by, "--json") == 0
    shown = json.loads(capfd.readouterr().out)
    rate = {row["by"]: row["samples_per_second"] for row in shown["groupings"]}
    assert rate["joint"] >= max(rate["speed"], rate["site"])
    assert shown["chosen"]["samples_per_second"] == rate[by]
    assert shown["server"] == "paris"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--groups", "0"], "0 groups: there must be at least 1"),
        (["--groups", "7"], "7 groups of 6 workers: a group has at least one, so at most 6"),
        (["--groups", "two"], "--groups two: not a number of groups; write a whole number from 1 on"),
        (
            ["--by", "spede"],
            "no such way 'spede' to group; did you mean 'speed'? (one of: joint, speed, site)",
        ),
        (["--by", "site", "--groups", "3"], "3 groups by site cannot be had: there are workers at 2 sites; "),
        (["--jsno"], "No such option: --jsno"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, str(EXAMPLES / "two-sites.toml"), *arguments) == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"atoll: {said}")
    assert err.count("\n") == 1
    assert out == ""


def test_a_wrong_file_ends_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, str(tmp_path / "nope.toml")) == 2
    assert capfd.readouterr().err == (
        f"atoll: {tmp_path}/nope.toml: cannot read the cluster: No such file or directory\n"
    )
