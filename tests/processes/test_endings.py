"""However a worker ends, under whatever strategy, the command's last lines say who failed first, and how.

The whole table is `soak`; each family of endings meets each strategy in `make check`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from endings import ENDINGS, SCRIPT, STRATEGIES, TOGETHER
from forked_runs import forked_run
from small_disk import NoDiskError, SmallDisk

DEADLINE = 240.0  # of a run; torchrun gives a worker that stands still 30 s
SLOW = ("stopped",)  # until others go on without it, or a deadline passes
FOLLOWED = r"atoll: then worker [01] (lost touch with it|was stopped|ended with \w+.*)"


def _checked() -> set[tuple[str, str]]:
    """The part of the table that `make check` runs: each family with each strategy, by other endings each."""
    found = set()
    for offset, family in enumerate(("error", "exit", "signal")):
        names = [name for name, ending in ENDINGS.items() if ending.family == family and name not in SLOW]
        for place, strategy in enumerate(STRATEGIES):
            found.add((names[(3 * place + offset) % len(names)], strategy))
    return found | {
        ("logged key", "server"),
        ("save path", "ring"),
        ("loader exit", "ring"),
        ("slow", "ring"),
    }


CHECKED = _checked()
CELLS = [
    pytest.param(ending, strategy, marks=[] if (ending, strategy) in CHECKED else pytest.mark.soak)
    for ending in ENDINGS
    for strategy in STRATEGIES
]


def run(
    folder: Path, strategy: str, directory: str, arguments: list[str], timeout: str = "60s"
) -> tuple[int | None, str, list[str]]:
    """The exit status of a run, its stderr, and the lines of it."""
    (folder / "train.py").write_text(SCRIPT)
    given = (*STRATEGIES[strategy], "run.workers=2", f"run.directory={directory}", f"sync.timeout={timeout}")
    options = [
        part for each in (*given, "hub.patience=4s", "server.journal=required") for part in ("--set", each)
    ]
    code, _, err = forked_run(folder, [*options, "train.py", *arguments], DEADLINE)
    return code, err, [line for line in err.splitlines() if line]


@pytest.mark.parametrize(("name", "strategy"), CELLS)
def test_the_last_lines_say_who_failed_first(tmp_path: Path, name: str, strategy: str) -> None:
    ending = ENDINGS[name]
    timeout = "10s" if name == "stopped" else "60s"
    code, err, lines = run(tmp_path, strategy, "run", [name], timeout)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["workers"] == 2
    if not ending.says or (ending.alone and strategy not in TOGETHER):
        assert code == 0, err
        assert "Traceback" not in err
        if ending.alone:
            warning = re.compile(f"atoll: warning: {ending.alone}")
            assert [line for line in lines if warning.fullmatch(line)], err
        assert not any(line.startswith("atoll: then ") for line in lines)
        return
    assert code == ending.status, err
    cause = lines[-2] if lines[-1].startswith("atoll: then ") else lines[-1]
    assert re.fullmatch(f"atoll: {ending.says}", cause), err
    assert cause == lines[-1] or re.fullmatch(FOLLOWED, lines[-1]), err
    assert "lost touch with another worker" not in cause
    has_traceback = re.search(r"ended with [A-Z]\w+ at", cause) is not None
    assert ("Traceback (most recent call last)" in err) == has_traceback, err
    assert len(err) < 50_000  # 4 MB of an exception's text are in the log, and not here


@pytest.mark.parametrize(
    ("name", "strategy", "says"),
    [
        ("raise", "ring", "worker 1 ended with ValueError at train.py:"),
        ("text", "elastic ring", "worker 1 ended with status 1 (sys.exit at train.py:"),
        # The run has gone on without the worker, and then its shard cannot write.
        ("killed", "server", "shard 0 cannot write its journal "),
    ],
)
def test_a_full_disk_hides_no_cause(tmp_path: Path, name: str, strategy: str, says: str) -> None:
    try:
        disk = SmallDisk(tmp_path / "disk", 2**23)
    except NoDiskError as error:
        pytest.skip(str(error))
    try:
        code, err, lines = run(tmp_path, strategy, f"{disk.folder}/run", [name, "full"])
    finally:
        disk.close()
    assert code == 1, err
    assert lines[-2].startswith(f"atoll: {says}"), err
    assert re.fullmatch(FOLLOWED, lines[-1]), err
    assert "No space left on device" in err
