"""`atoll` given something wrong: one clear line on stderr, exit status 2, and nothing started or made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll.cli.app import main

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with a script in it, and no configuration of the environment's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_CONFIG", raising=False)
    (tmp_path / "train.py").write_text("raise SystemExit('must not be run')\n")
    return tmp_path


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nope.py"], "nope.py: no such script"),
        (["run", "."], ".: is a directory; give the training script in it"),
        (
            ["run", "--strategy", "rign", "train.py"],
            "--strategy rign: no such choice 'rign'; did you mean 'ring'?",
        ),
        (["run", "--workers", "two", "train.py"], "--workers two: expected int, got 'two'"),
        (["run", "--workers", "0", "train.py"], "--workers 0: expected int >= 1, got 0"),
        (
            ["run", "--set", "sync.timeot=3s", "train.py"],
            "--set sync.timeot=3s: no key 'sync.timeot'; did you mean",
        ),
        (["run", "--set", "sync.timeout", "train.py"], "--set sync.timeout: write it as SECTION.KEY=VALUE"),
        (["run", "--config", "nope.toml", "train.py"], "nope.toml: cannot read the configuration"),
        (
            ["run", "--summary", "no/where.json", "train.py"],
            "--summary no/where.json: give a file in a directory",
        ),
        (["run", "--set", "run.directory=train.py", "train.py"], "train.py: cannot make the run directory"),
        (["run", "--wrokers", "2", "train.py"], "No such option: --wrokers"),
        (["run"], "Missing argument"),
        (["rnu", "train.py"], "No such command 'rnu'"),
        (["check", "nope.toml"], "nope.toml: cannot read the configuration"),
        (["report", "."], ".: holds no run"),
        (
            ["run", "--strategy", "server", "--workers", "2", "--sites", "3", "train.py"],
            "run.sites: 3 sites for 2 workers: each has at least one",
        ),
        (["run", "--sites", "2", "train.py"], "run.sites: 2 sites go with run.strategy 'server', not 'ring'"),
        (["run", "--groups", "0", "train.py"], "--groups 0: at least 1 group; or auto"),
        (["run", "--groups", "-1", "train.py"], "--groups -1: at least 1 group; or auto"),
        (["run", "--groups", "many", "train.py"], "--groups many: expected int, got 'many'"),
        (["run", "--group-by", "sped", "train.py"], "--group-by sped: no such choice 'sped'; did you mean"),
        (
            ["run", "--strategy", "ps-hra", "--workers", "2", "--groups", "3", "train.py"],
            "groups.count (--groups): 3 groups for 2 workers: each has at least one, so give 1 to 2",
        ),
        (
            ["run", "--groups", "2", "--workers", "2", "train.py"],
            "groups.count (--groups): 2 groups go with run.strategy 'hierarchical', 'ps-hra' or 'peers', not",
        ),
        (
            ["run", "--strategy", "peers", "--groups", "2", "--workers", "3", "train.py"],
            "groups.count (--groups): 3 workers cannot be 2 nodes with as many devices each: under",
        ),
        (
            ["run", "--strategy", "ps-hra", "--sites", "1", "train.py"],
            "run.sites: 1 sites go with run.strategy 'server', not 'ps-hra'",
        ),
        (["hub", "--workers", "3", "--groups", "0"], "--groups 0: write a number of groups, from 1; or auto"),
        (
            ["hub", "--workers", "3", "--groups", "4"],
            "--groups 4: from 1 to 3, the number of workers; or auto",
        ),
        (["hub", "--workers", "3", "--groups", "2", "--group-by", "link"], "--group-by link: no such choice"),
        (
            ["hub", "--workers", "3", "--groups", "2", "--group-links", "far"],
            "--group-links: 'far' is not a span of time",
        ),
        (
            ["run", "--replicas", "2", "train.py"],
            "server.replicas (--replicas): 2 processes for each shard go with run.strategy 'server'",
        ),
        (
            ["run", "--strategy", "hierarchical", "--workers", "4", "--groups", "5", "train.py"],
            "groups.count (--groups): 5 groups for 4 workers: each has at least one, so give 1 to 4",
        ),
        (
            ["hub", "--workers", "3", "--site", "paris=1", "--site", "berlin=1"],
            "a run of 3 workers, and the sites have 2: 1 at 'paris' + 1 at 'berlin'",
        ),
        (
            ["hub", "--workers", "2", "--site", "paris"],
            "--site paris: write it as NAME=WORKERS, such as paris=2",
        ),
        (["hub", "--workers", "2", "--site", "a=1", "--site", "a=1"], "--site a=1: site 'a' is given twice"),
        (
            ["server", "--hub", "tcp://127.0.0.1:1"],
            "give either --shard I, for a shard of the run, or --site",
        ),
        (
            ["server", "--hub", "tcp://127.0.0.1:1", "--shard", "0", "--listen", "here"],
            "shard 0: 'here' is no address; write tcp://HOST:PORT",
        ),
        (
            ["server", "--hub", "tcp://127.0.0.1:1", "--site", "paris", "--listen", "tcp://10.0.0.5:47701"],
            "shard of site 'paris': other machines can reach tcp://10.0.0.5:47701, so a key file is needed",
        ),
    ],
)
def test_one_line_and_status_2(
    arguments: list[str],
    said: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert atoll(monkeypatch, *arguments) == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"atoll: {said}")
    assert err.count("\n") == 1
    assert out == ""
    assert [path.name for path in here.iterdir()] == ["train.py"]


def test_a_directory_that_holds_a_run_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "old").mkdir()
    (here / "old" / "summary.json").write_text("{}")
    assert atoll(monkeypatch, "run", "--set", "run.directory=old", "train.py") == 2
    assert (
        capfd.readouterr().err
        == "atoll: old: holds a run already; remove it, or give another run.directory\n"
    )


def test_check_prints_the_whole_configuration(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "good.toml").write_text("[run]\nworkers = 3\n")
    assert atoll(monkeypatch, "check", "good.toml") == 0
    out, err = capfd.readouterr()
    assert "workers = 3" in out
    assert 'nonfinite = "stop"' in out
    assert err == "good.toml: right\n"
    (here / "good.toml").write_text("[run]\nworkers = 3\nrestarts = 2\n")  # what only a run could refuse
    assert atoll(monkeypatch, "check", "good.toml") == 2
    assert capfd.readouterr().err.startswith("atoll: good.toml: run.restarts: 2 restarts of a worker go with")
    (here / "good.toml").write_text("[groups]\nprobe = 3\n")
    assert atoll(monkeypatch, "check", "good.toml") == 0
    assert capfd.readouterr().err == (
        "atoll: warning: groups.probe (given by good.toml) has no effect under strategy 'ring': only "
        "'ps-hra' uses it; leave it out\ngood.toml: right\n"
    )
    (here / "good.toml").write_text("[run]\nworker = 3\n")
    assert atoll(monkeypatch, "check", "good.toml") == 2
    assert capfd.readouterr().err == "atoll: good.toml: no key 'run.worker'; did you mean 'run.workers'?\n"


def test_check_knows_that_groups_at_a_server_are_asynchronous(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = '[run]\nstrategy = "ps-hra"\n[sync]\npipeline = 1\n'
    (here / "grouped.toml").write_text(given)
    assert atoll(monkeypatch, "check", "grouped.toml") == 0
    out, err = capfd.readouterr()
    assert 'consistency = "asp"' in out
    assert err == "grouped.toml: right\n"
    (here / "grouped.toml").write_text(given + 'consistency = "bsp"\n')
    assert atoll(monkeypatch, "check", "grouped.toml") == 2
    _, err = capfd.readouterr()
    assert err.startswith("atoll: sync.pipeline = 1 has a step begin before the one before it is made, which")
    assert err.count("\n") == 1


def test_version_and_help(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "--version") == 0
    assert capfd.readouterr().out.startswith("atoll 0.")
    assert atoll(monkeypatch, "run", "--help") == 0
    assert "--strategy" in capfd.readouterr().out
