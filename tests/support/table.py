"""The table of scripts: each one of tests/scripts trains with plain torch, and at every strategy and store.

    table = Table(pool)
    outcome = table.try_out("sgd", "server")    # "pass", "refused", "wrong", "crash" or "hang"

A script is run twice: by one process with plain torch, and by two workers under the column's configuration.
Both must show the same losses and end with the same parameters.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import importlib
import importlib.util
import io
import os
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

import atoll
from atoll.core import errors
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.core.memory import Memory
from atoll.launch.ports import free_port
from atoll.memory import planning
from atoll.train.api.place import Place
from support.pool import LOOPBACK, JobFailedError, WorkerPool
from support.rivals import JOINED, PACKAGES, RIVALS, SHARES, SOURCES, Rival, version
from support.served import ServedRun, served_worker
from support.tight import rates
from support.ways import Way

SCRIPTS = Path(__file__).parents[1] / "scripts"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "any-script.md"
RECORD = PAGE.with_suffix(".json")
TOLERANCE = 1e-9  # between losses and parameters of plain torch and of Atoll, unless a script says another
OWN_PACE = 0.8  # of plain torch's way: how far workers at their own pace may end from plain torch's end
DEADLINE = 150.0  # seconds; a script takes about one on a machine that does nothing else
_TIMEOUT = "60s"
_BUDGET = Memory(device="24KiB", chunk="4096", step="host")  # most scripts' models take more

_FOLLOWED = 5  # refusals in a row whose way out is followed

# The column of Atoll that does most nearly what a rival does.
_BESIDE = {"DDP": "ring", "Accelerate": "ring", "FSDP2": "ring, tiers", "DeepSpeed ZeRO-3": "ring, tiers"}

# What errors of DistributedDataParallel ask for, and how they begin where its C++ raises them.
_OPTIONS = {"find_unused_parameters": "find_unused_parameters=True", "static_graph": "_set_static_graph()"}
_REFUSALS = ("Expected to mark a variable ready only once", "Expected to have finished reduction")
_LATE = re.compile(r"[Tt]imed out|[Tt]imeout")
_ECHO = re.compile(r"gloo.*(?:[Tt]imed out|[Tt]imeout|[Cc]onnection|reset by peer)|\[Rank \d+\]", re.DOTALL)

Kind = Literal["pass", "refused", "wrong", "crash", "hang", "not installed"]


@dataclass(frozen=True)
class Column:
    """A strategy and a store: the configuration of the workers, and how many shards their hub has."""

    config: Config
    shards: int | None = None  # None: without a hub
    world: int = 2
    exact: bool = True  # whether all workers make each step of one mean, as one process does


def _column(
    strategy: str,
    shards: int | None = None,
    world: int = 2,
    exact: bool = True,
    tiers: bool = False,
    **given: Any,
) -> Column:
    sync = Sync(timeout=_TIMEOUT, **given.pop("sync", {}))
    run = Run(strategy=strategy, elastic=given.pop("elastic", False))
    config = Config(run=run, sync=sync, memory=_BUDGET if tiers else Memory(), **given)
    return Column(config, shards, world, exact)


def _columns() -> Iterator[tuple[str, Column]]:
    for tiers in (False, True):
        name = ", tiers" if tiers else ""
        column = partial(_column, tiers=tiers)
        yield f"alone{name}", column("ring", world=1)
        yield f"ring{name}", column("ring")
        yield f"hierarchical{name}", column("hierarchical", groups=Groups(count=1))
        for pace in ("bsp", "ssp", "asp"):
            yield f"server {pace}{name}", column("server", 1, exact=pace == "bsp", sync={"consistency": pace})
        yield f"ps-hra{name}", column("ps-hra", 1, sync={"consistency": "bsp"})
        yield f"peers{name}", column("peers", sync={"stale_max": 0})
        if not tiers:
            yield "ring, elastic", column("ring", 0, elastic=True)
            yield "ps-hra asp", column("ps-hra", 1, exact=False, sync={"consistency": "asp"})


COLUMNS: dict[str, Column] = dict(_columns())


@dataclass(frozen=True)
class Script:
    """A script, and what its head says of it."""

    name: str
    path: Path
    title: str  # the first line of its docstring
    tolerance: float = TOLERANCE
    sources: tuple[str, ...] = ()  # where users met the case, as owner/repository#number
    needs: tuple[str, ...] = ()  # modules of packages that the tests do not bring
    own_pace: float = OWN_PACE

    @property
    def missing(self) -> str:
        """The first module that it needs and this environment lacks; empty if it has them all."""
        return next((each for each in self.needs if importlib.util.find_spec(each) is None), "")


@dataclass(frozen=True)
class Shown:
    """What one worker's script has shown, or how it ended."""

    losses: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    starts: dict[str, Tensor] = field(default_factory=dict)  # of plain torch: values before training


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """A cell of the table: what came, and for all but a pass the line that says why.

    `budget` is the memory.device with which the script ran in the end, since a refusal asked for more;
    `options` are those of DistributedDataParallel, and the shards' `server.optimizer`, likewise. `way` is
    what the line of a refusal asks for beyond that, and `then` is what came when it was done.
    """

    kind: Kind
    line: str = ""
    budget: str = ""
    options: tuple[str, ...] = ()
    way: str = ""
    then: Kind | None = None


def scripts() -> dict[str, Script]:
    """Return the scripts of tests/scripts by name."""
    return {path.stem: _script(path) for path in sorted(SCRIPTS.glob("*.py")) if path.stem != "trial"}


def _script(path: Path) -> Script:
    text = path.read_text(encoding="utf-8")
    title = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    tolerance = re.search(r"^# tolerance: (\S+)", text, re.MULTILINE)
    own_pace = re.search(r"^# own pace: (\S+)", text, re.MULTILINE)
    return Script(
        path.stem,
        path,
        " ".join(title.split()),
        float(tolerance[1]) if tolerance else TOLERANCE,
        tuple(re.findall(r"^# source: (\S+#\d+)", text, re.MULTILINE)),
        tuple(re.findall(r"^# needs: (\S+)", text, re.MULTILINE)),
        float(own_pace[1]) if own_pace else OWN_PACE,
    )


class Table:
    """Tries scripts out, and keeps what plain torch gave for each."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._plain: dict[str, Shown] = {}

    def try_out(self, name: str, column: str) -> Outcome:
        """Run a script under a column's strategy and store, and compare it with plain torch."""
        script = scripts()[name]
        if script.missing:
            return Outcome("not installed", f"the package {script.missing} is not installed")
        try:
            if name not in self._plain:
                (self._plain[name],) = self._pool.run(_run_plain, script.path, world=1, deadline=DEADLINE)
        except (JobFailedError, DeadlineError, RunError) as error:
            raise AssertionError(f"{name} does not train with plain torch: {error}") from None
        if column in RIVALS:
            options: tuple[str, ...] = ()
            found = self._outcome(script, column)
            while (option := _option_named_in(found, options)) and found.kind == "refused":
                options += (option,)
                again = self._outcome(script, column, options=options)
                found = msgspec.structs.replace(again, options=options)
            return found
        return self._followed(script, column)

    def _followed(self, script: Script, column: str) -> Outcome:
        """Run a script under a column of Atoll's, and again by the way out of each refusal."""
        way = Way()
        first = found = self._outcome(script, column)
        for _ in range(_FOLLOWED):
            asked = None
            if found.kind == "refused":
                asked = way.after(found.line, script.path, COLUMNS[column].config.run)
            if asked is None:
                break
            way, found = asked, self._outcome(script, column, asked)
            if way.stays:
                options = ("server.optimizer",) * bool(way.optimizer)
                first = msgspec.structs.replace(found, budget=way.budget, options=options)
        return first if way.stays else msgspec.structs.replace(first, way=way.words, then=found.kind)

    def _outcome(
        self, script: Script, column: str, way: Way | None = None, options: tuple[str, ...] = ()
    ) -> Outcome:
        way = way or Way()
        try:
            found = self._run(script, column, way, options)
        except JobFailedError as error:
            return outcome_of(error) if column not in RIVALS else outcome_of_rival(error)
        except DeadlineError as error:
            return Outcome("hang", _one_line(str(error)))
        except RunError as error:  # a process is gone
            return Outcome("crash", _one_line(str(error)))
        plain = self._plain[script.name]
        if column in RIVALS:
            share = SHARES.get(column)
            return (
                compare(plain, found, script.tolerance)
                if share is None
                else compare_nearly(plain, found, share)
            )
        if COLUMNS[column].exact or way.pace or way.strategy:
            return compare(plain, found, script.tolerance)
        return compare_nearly(plain, found, script.own_pace)

    def _run(self, script: Script, column: str, way: Way, options: tuple[str, ...]) -> list[Shown]:
        if column in RIVALS:
            return self._pool.run(_run_rival, column, options, script.path, world=2, deadline=DEADLINE)
        where = COLUMNS[column]
        arguments: tuple[Any, ...] = (way.config(where.config), way.path(script.path))
        master = str(
            free_port()
        )  # for a process group of the script's own, as torchrun and `atoll run` give it
        if where.shards is None or way.strategy:
            return self._pool.run(_run_ring, master, *arguments, world=where.world, deadline=DEADLINE)
        quiet = contextlib.redirect_stdout(io.StringIO())  # of what hub and shards say
        with quiet, ServedRun(where.world, where.shards, optimizer=way.optimizer) as served:
            arguments = (served.address, *arguments)
            return self._pool.run(_run_served, master, *arguments, world=where.world, deadline=DEADLINE)


def _option_named_in(found: Outcome, given: tuple[str, ...]) -> str:
    """Return the option of DistributedDataParallel that an error asks for; empty if it names no new one."""
    named = [option for option, words in _OPTIONS.items() if words in found.line and option not in given]
    return named[0] if named else ""


def compare(plain: Shown, found: list[Shown], tolerance: float) -> Outcome:
    """Compare what workers have shown with plain torch: the mean losses, and every worker's values."""
    losses, right = _mean_losses(found), torch.tensor(plain.losses, dtype=torch.float64)
    if losses.numel() != len(plain.losses):
        return Outcome("wrong", f"{losses.numel()} losses, where plain torch has {len(plain.losses)}")
    if fault := _fault(plain, found, losses):
        return Outcome("wrong", fault)
    for worker, each in enumerate(found):
        for name, value in plain.values.items():
            off = float((each.values[name] - value).abs().max()) if value.numel() else 0.0
            if not off <= tolerance:
                return Outcome("wrong", f"worker {worker}: {name} is off by {off:.1e}")
    off = float((losses - right).abs().max()) if len(right) else 0.0
    return Outcome("pass") if off <= tolerance else Outcome("wrong", f"losses are off by {off:.1e}")


def compare_nearly(plain: Shown, found: list[Shown], share: float) -> Outcome:
    """Compare where workers have gone with where plain torch has, which made other steps or rounds otherwise.

    The distance between the ends, over all values that plain torch has trained, must be at most `share` of
    the distance that plain torch has gone. Values that stay where they began are at 1, twice the rate near 1,
    the wrong direction near 2.
    """
    losses, counts = _mean_losses(found), {len(each.losses) for each in found}
    # With leased data one worker may have trained on nearly all.
    if losses.numel() != len(plain.losses) and (len(counts) == 1 or not losses.numel()):
        return Outcome("wrong", f"{losses.numel()} losses, where plain torch has {len(plain.losses)}")
    if fault := _fault(plain, found, losses):
        return Outcome("wrong", fault)
    gone = _distance(plain.values, plain.starts, plain.starts)
    for worker, each in enumerate(found):
        off = _distance(each.values, plain.values, plain.starts)
        if not off <= share * gone:
            return Outcome("wrong", f"worker {worker} ends {off:.1e} off; plain torch has gone {gone:.1e}")
    return Outcome("pass")


def _distance(ends: dict[str, Tensor], others: dict[str, Tensor], names: Iterable[str]) -> float:
    squares = [float((ends[name] - others[name]).abs().double().square().sum()) for name in names]
    return float(sum(squares) ** 0.5)


def _mean_losses(found: list[Shown]) -> Tensor:
    """Return the workers' mean losses; where one has made more steps than another, all of their losses."""
    if len({len(each.losses) for each in found}) > 1:
        return torch.tensor([loss for each in found for loss in each.losses], dtype=torch.float64)
    return torch.tensor([each.losses for each in found], dtype=torch.float64).mean(0)


def _fault(plain: Shown, found: list[Shown], losses: Tensor) -> str:
    """Return what is wrong whatever the numbers should be; empty if nothing is."""
    for worker, each in enumerate(found):
        for name, value in plain.values.items():
            other = each.values.get(name)
            if other is None:
                return f"worker {worker} has no {name}"
            if other.shape != value.shape:
                return f"worker {worker}: {name} is {tuple(other.shape)}, not {tuple(value.shape)}"
    if not all(bool(value.isfinite().all()) for each in found for value in [losses, *each.values.values()]):
        return "a loss or a parameter is not finite"
    return ""


def outcome_of(error: JobFailedError) -> Outcome:
    """Classify the failures of a job: the first cause is a refusal, unless a worker failed otherwise.

    Workers end in a chain: one refuses or crashes, and others lose touch with it.
    """
    echoes = ("PeerLostError", "DeadlineError", "RunError", "GivenUpError", "RefusedError")
    failures = sorted(error.failures.values(), key=lambda each: each.kind in echoes)
    first = failures[0]
    kind = getattr(errors, first.kind, None)
    line = _one_line(first.message)
    if kind is not None and issubclass(kind, UserError):
        return Outcome("refused", line)
    if first.kind == "DeadlineError":
        return Outcome("hang", line)
    return Outcome("crash", line if kind is not None else f"{first.kind}: {line}")


def outcome_of_rival(error: JobFailedError) -> Outcome:
    """Classify the failures of a rival's job: what its own code raises on purpose is a refusal.

    Where one worker fails, or waits in vain, the other's connection is closed, or its time is up.
    """
    late = [each for each in error.failures.values() if _LATE.search(each.message)]
    causes = [each for each in error.failures.values() if not _ECHO.search(each.message)]
    if not causes:
        return Outcome(
            "hang" if late else "crash", _one_line((late or [*error.failures.values()])[0].message)
        )
    first = causes[0]
    places = re.findall(r'^ *File "([^"]+)", line \d+.*\n *(.*)', first.traceback, re.MULTILINE)
    path, statement = places[-1] if places else ("", "")
    raised = statement.startswith(("raise ", "assert ")) and any(each in path for each in SOURCES)
    refused = raised or first.message.startswith(_REFUSALS)
    return Outcome("refused" if refused else "crash", f"{first.kind}: {_one_line(first.message)}")


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""


# -- the record and the page ---------------------------------------------------------------------------------


class Record(msgspec.Struct):
    """What has been found so far: an outcome for each script and column, and other libraries' versions."""

    torch: str
    cells: dict[str, dict[str, Outcome]]
    rivals: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def read(cls) -> Record:
        if not RECORD.exists():
            return cls(str(torch.__version__), {})
        return msgspec.json.decode(RECORD.read_bytes(), type=cls)

    def cell(self, script: str, column: str) -> Outcome | None:
        return self.cells.get(script, {}).get(column)

    def put(self, script: str, column: str, outcome: Outcome) -> None:
        self.torch = str(torch.__version__)
        if column in RIVALS:
            self.rivals[column] = version(column)
        self.cells.setdefault(script, {})[column] = outcome

    def write(self) -> None:
        columns = (*COLUMNS, *RIVALS)
        rows = {name: self.cells[name] for name in scripts() if name in self.cells}
        ordered = {name: {each: row[each] for each in columns if each in row} for name, row in rows.items()}
        found = Record(self.torch, ordered, self.rivals)
        beside = RECORD.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        beside.replace(RECORD)

    @classmethod
    def note(cls, script: str, column: str, outcome: Outcome) -> None:
        """Put one outcome into the record. Several runs may do so at once."""
        with PAGE.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = cls.read()
            record.put(script, column, outcome)
            record.write()

    def page(self) -> str:
        """Return the page as text."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _HEADING.replace("SHARE", f"{100 * SHARES['DeepSpeed ZeRO-3']:.0f}").splitlines()
        yield ""
        others = "".join(f"; {name}: {PACKAGES[name]} {found}" for name, found in self.rivals.items())
        yield f"Found with torch {self.torch}{others}."
        yield ""
        yield "| | tried | " + " | ".join(get_args(Kind)) + " | refused, then pass |"
        yield "| --- " * (3 + len(get_args(Kind))) + "|"
        groups = {
            "The model on the device": [each for each in COLUMNS if not each.endswith("tiers")],
            "The model in tiers of memory": [each for each in COLUMNS if each.endswith("tiers")],
            "Other libraries": list(RIVALS),
        }
        for title, columns in groups.items():
            found = [row[each] for row in self.cells.values() for each in columns if each in row]
            kinds = [each.kind for each in found]
            counts = " | ".join(str(kinds.count(kind)) for kind in get_args(Kind))
            followed = sum(each.then == "pass" for each in found)
            yield f"| {title.lower()} | {len(kinds)} | {counts} | {followed} |"
        lines: dict[str, int] = {}
        for title, columns in groups.items():
            yield from ["", f"## {title}", "", "| script | " + " | ".join(columns) + " |"]
            yield "| --- " * (1 + len(columns)) + "|"
            for name in scripts():
                row = self.cells.get(name, {})
                cells = " | ".join(_cell(row.get(each), lines) for each in columns)
                yield f"| [{name}](../../tests/scripts/{name}.py) | {cells} |"
        yield from ["", "## Beside other libraries", ""]
        for rival, ours in _BESIDE.items():
            yield from self._beside(rival, ours)
        yield from [
            "",
            "## What each script does",
            "",
            "| script | | met by users in |",
            "| --- | --- | --- |",
        ]
        for name, script in scripts().items():
            yield f"| {name} | {script.title} | {', '.join(script.sources)} |"
        yield from ["", "## What was said", ""]
        for line, number in lines.items():
            yield f"{number}. {_plain(line)}"

    def _beside(self, rival: str, ours: str) -> Iterator[str]:
        """Name the scripts that pass in one of two columns and not in the other, of those tried in both."""
        tried = [name for name, row in self.cells.items() if rival in row and ours in row]
        passed = {
            each: {name for name in tried if self.cells[name][each].kind == "pass"} for each in (rival, ours)
        }
        yield f"- **{rival}** and Atoll's `{ours}`: {len(tried)} scripts tried in both."
        for here, there in ((rival, ours), (ours, rival)):
            names = ", ".join(sorted(passed[here] - passed[there])) or "none"
            yield f"  - passes under {here} alone: {names}"


def _cell(outcome: Outcome | None, lines: dict[str, int]) -> str:
    if outcome is None:
        return ""
    if outcome.kind == "pass":
        given = ", ".join([outcome.budget, *outcome.options]).strip(", ")
        return f"pass with {given}" if given else "pass"
    then = f", then {outcome.then}" if outcome.then is not None else ""
    return f"{outcome.kind} {lines.setdefault(_general(outcome.line), len(lines) + 1)}{then}"


def _general(line: str) -> str:
    """Leave out what differs from run to run and from worker to worker."""
    line = re.sub(r"\(train\.py:\d+\)|/\S+/(?=\w+\.py)", "", line)
    line = re.sub(r"\bworker \d\b", "worker N", line)
    return re.sub(r"off by \S+", "off", line)


def _plain(line: str) -> str:
    return line.replace("|", "\\|").replace("<", "&lt;")


_HEADING = """# Any script: what trains as in plain torch

This page is written by `make scripts`. Each row is a script of `tests/scripts/`, as its user would write it.
Each column is a strategy of Atoll and where the model lies: on the device, or in tiers of memory of
which the device has 24 KiB. Two workers train on the halves of the batches on which one process trains with
plain torch.

Workers under `ssp` and `asp` make steps of their own, at their own pace: there a script passes if the
distance of its end from plain torch's end is at most 0.8 of the distance that plain torch has gone,
or another part of it that the script gives with its reason.

| cell | meaning |
| --- | --- |
| pass | losses and parameters equal plain torch's within 1e-9, or the tolerance that the script names |
| pass with a budget | 24 KiB were refused; the script passes with the budget that the last line asked for |
| pass with server.optimizer | the shards were told that they may import the script's own optimizer class |
| refused | the script ends with one line, which the list below has under the number |
| refused, then pass | what the line asks for was done, and the script passes |
| wrong | the script ends well with other numbers |
| crash | the script ends with something other than a line of Atoll's |
| hang | the script waits until a deadline |
| not installed | the script needs a package that was not there |

An empty cell has not been tried.

Scripts run under other libraries as their users would write them: the model is wrapped in
DistributedDataParallel, by `fully_shard`, by `accelerator.prepare` or by `deepspeed.initialize`, and the
optimizer steps what that gives back. An error that the library itself raises on purpose counts as refused;
where its line asks for `find_unused_parameters` or `static_graph`, the script runs again with that.
ZeRO steps a float32 copy of the parameters: there the end may be off by SHARE % of plain torch's way.
Everything here runs on CPUs, with Gloo."""


# -- in the workers' processes -------------------------------------------------------------------------------


def _trial() -> Any:
    """Return the scripts' own module, of which mypy knows nothing."""
    return importlib.import_module("trial")


def _run_plain(_place: Place, path: Path) -> Shown:
    return _run(path, _trial().Plain)


def _run_rival(place: Place, kind: str, options: tuple[str, ...], path: Path) -> Shown:
    joined = path.parent / "joined" / path.name  # as a user of such a rival writes it
    path = joined if kind in JOINED and joined.exists() else path
    return _run(path, partial(Rival, kind, place, options))


def _run_ring(place: Place, master: str, config: Config, path: Path) -> Shown:
    return _run_atoll(master, config, place, path)


def _run_served(place: Place, master: str, address: str, config: Config, path: Path) -> Shown:
    with served_worker(address, place.rank):
        return _run_atoll(master, config, None, path)


def _run_atoll(master: str, config: Config, place: Place | None, path: Path) -> Shown:
    with ExitStack() as stack:
        if config.memory.is_given:  # bandwidths are not measured anew
            known = rates()
            stack.enter_context(patch.object(planning, "measure", lambda *_: known))
        launched = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": master}
        stack.enter_context(patch.dict(os.environ, launched))
        return _run(path, partial(atoll.join, config, place=place))


def _run(path: Path, joins: Any) -> Shown:
    trial = _trial()
    with _own_folder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial.start(joins)
        try:
            runpy.run_path(str(path), run_name="__main__")
            return Shown(list(trial.losses), dict(trial.values), dict(trial.starts))
        finally:
            trial.start(None)
            torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Within it the working directory is a new folder, and the scripts' own parts can be imported."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
