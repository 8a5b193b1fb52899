"""What people see of a run: the display, the picture, TensorBoard, and the words at the end."""

from __future__ import annotations

import builtins
import contextlib
import io
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atoll.core.errors import UserError
from atoll.core.events import Finished, Logged, Saved, Skipped, Started, StepDone, Warned
from atoll.core.outlet import Screen
from atoll.launch.run import closing_lines
from atoll.observe import progress
from atoll.observe.journal import Journal
from atoll.observe.metrics import Line
from atoll.observe.progress import LiveProgress, PlainProgress, make_progress, plain_line
from atoll.observe.recorder import Recorder, Status
from atoll.observe.report import draw, redraw
from atoll.observe.rundir import RunDirectory
from atoll.observe.summary import read_summary
from atoll.observe.tensorboard import TensorBoard

STATUS = Status(
    workers=2,
    started=2,
    strategy="ring",
    iteration=1200,
    expected=3000,
    samples=76800,
    bytes_sent=3 * 2**30,
    samples_per_second=512.0,
    steps_per_second=8.0,
    bytes_per_second=2**21,
    waiting_share=0.12,
    last={"loss": 1.2345678, "bad": None},
)


def write_run(run: RunDirectory, workers: int, steps: int) -> None:
    """The journals of a run of `steps` steps of 10 ms."""
    for worker in range(workers):
        with Journal(run.journal(worker)) as journal:
            journal(Started(time=0.0, worker=worker, workers=workers, strategy="ring", device="cpu", pid=1))
            for i in range(1, steps + 1):
                journal(
                    StepDone(
                        time=i / 100,
                        worker=worker,
                        iteration=i,
                        samples=4,
                        seconds=0.01,
                        waiting=0.002,
                        bytes_sent=9,
                    )
                )
                journal(Logged(time=i / 100, worker=worker, iteration=i, weight=1.0, values={"loss": 1 / i}))
            journal(Finished(time=steps / 100, worker=worker, iteration=steps))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def test_a_plain_line_has_everything() -> None:
    assert plain_line(STATUS) == (
        "step 1,200 of 3,000 · loss 1.235 · bad nan · 512 samples/s · 3.0 GiB sent (2.0 MiB/s) · "
        "12% waiting · 3 min 45 s left"
    )


@pytest.mark.parametrize(
    ("parts", "words"),
    [([79, 79, 79, 19], "parts 79, 79, 79, 19"), ([9, 4, 40, 8, 8], "parts 4 to 40")],
)
def test_a_plain_line_has_the_workers_parts_of_a_batch(parts: list[int], words: str) -> None:
    assert f"12% waiting · {words} · 3 min" in plain_line(replace(STATUS, parts=parts))


def test_alone_and_without_an_end_in_sight() -> None:
    assert plain_line(Status(workers=1, iteration=7, samples_per_second=3.0)) == "step 7 · 3 samples/s"


def test_plain_lines_come_now_and_then_and_only_for_new_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    output, errors = io.StringIO(), io.StringIO()
    display = make_progress("gpt.py", Screen(output, errors))
    assert isinstance(display, PlainProgress)
    for moment, iteration in ((100, 0), (101, 1), (102, 2), (110, 3), (112, 4), (130, 4), (131, 5)):
        now[0] = float(moment)
        display.update(Status(workers=1, iteration=iteration))
    display.lines(["from the script"])
    display.event(Saved(time=0.0, worker=0, iteration=4, path="here"))
    display.close()
    said = errors.getvalue().splitlines()
    assert said == ["atoll: step 1", "atoll: step 4", "atoll: step 5", "atoll: iteration 4 is saved in here"]
    assert output.getvalue() == "from the script\n"


def live(width: int = 100) -> tuple[LiveProgress, Console, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, highlight=False, color_system=None)
    return LiveProgress("gpt.py · ring · 2 workers", console, Screen(screen, screen)), console, screen


def text_of(display: LiveProgress, console: Console) -> str:
    paper = Console(file=io.StringIO(), width=console.width, highlight=False)  # no live display
    with paper.capture() as captured:
        paper.print(display.render())
    return captured.get()


def test_live_display() -> None:
    display, console, screen = live()
    try:
        assert "starting" in text_of(display, console)
        display.update(Status(workers=2, started=1))
        assert "1 of 2 workers have joined" in text_of(display, console)
        display.update(STATUS)
        shown = text_of(display, console)
        assert all(
            part in shown
            for part in ("1,200/3,000", "loss 1.235", "512 samples/s", "12% waiting", "3 min 45 s")
        )
        display.update(Status(workers=1, iteration=5, last={"[red]odd[/] name": 1.0}))
        assert "[red]odd[/] name 1" in text_of(display, console)
        display.event(Skipped(time=0.0, worker=0, iteration=3, reason="NaN in 'a.weight'"))
        display.event(Warned(time=0.0, worker=0, message="[bold]no markup"))
    finally:
        display.close()
    assert "iteration 3 was skipped on every worker: NaN in 'a.weight'" in screen.getvalue()
    assert "warning: [bold]no markup" in screen.getvalue()


def test_live_display_fits_a_narrow_terminal() -> None:
    display, console, _ = live(width=40)
    try:
        display.update(STATUS)
        assert all(len(line) <= 40 for line in text_of(display, console).splitlines())
    finally:
        display.close()


@pytest.mark.parametrize(("workers", "steps"), [(1, 1), (2, 300), (12, 40)])
def test_picture(run: RunDirectory, workers: int, steps: int) -> None:
    write_run(run, workers, steps)
    Recorder(run, workers, "ring").close()
    assert draw(run).read_bytes().startswith(b"\x89PNG")


def test_picture_of_a_run_without_a_step(run: RunDirectory) -> None:
    Recorder(run, 1, "ring").close()
    assert draw(run).stat().st_size > 0


def test_a_killed_run_is_put_together_from_its_journals(run: RunDirectory) -> None:
    write_run(run, 2, 20)
    torn = run.journal(1)
    torn.write_bytes(torn.read_bytes()[:-30])
    assert redraw(run) == run.picture
    assert read_summary(run.summary).steps == 20


def test_no_run_no_picture(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        redraw(RunDirectory(tmp_path))


def test_without_the_extra_the_report_says_what_to_install(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    Recorder(run, 1, "ring").close()
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] in ("matplotlib", "tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'atoll\[report\]'"):
        redraw(run)
    with pytest.raises(ModuleNotFoundError):
        TensorBoard(run.tensorboard)


def test_tensorboard_reads_what_is_written(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    writer = TensorBoard(run.tensorboard)
    writer.write(Line(7, 1000.0, 8.0, 0.5, 0.1, 100, {"loss": 2.5, "bad": None}))
    writer.close()
    (file,) = run.tensorboard.iterdir()
    found = {
        value.tag: (event.step, value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value)
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found["loss"] == (7, 2.5)
    assert found["run/samples per second"] == (7, 16.0)
    assert "bad" not in found


def test_a_tensorboard_folder_that_goes_shows_no_stack_trace(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    writer = TensorBoard(run.tensorboard)
    shutil.rmtree(run.tensorboard)
    until, raised = time.monotonic() + 20, False
    while not raised and time.monotonic() < until:
        try:
            writer.write(Line(7, 1000.0, 8.0, 0.5, 0.1, 100, {"loss": 2.5}))
        except FileNotFoundError:
            raised = True
        time.sleep(0.01)
    assert raised
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    assert [args.thread for args in shown] == [other]
    with contextlib.suppress(OSError):
        writer.close()
    assert threading.excepthook == shown.append


def test_closing_lines(run: RunDirectory) -> None:
    write_run(run, 2, 100)
    summary = Recorder(run, 2, "ring").close()
    first, last, where = closing_lines(summary, run, drawn=True)
    assert first == (
        "atoll: 2 workers (ring): 100 steps of 800 samples in 1.0 s · 800 samples/s · "
        "20% of the time waiting · 1.8 KiB sent"
    )
    assert last == "atoll: last: loss 0.01"
    assert where.endswith("summary.json, metrics.jsonl, report.png, logs")
    lost = "lost for good: worker 1 at 5.0 s"
    assert closing_lines(summary, run, drawn=True, losses=[lost]) == [first, f"atoll: {lost}", last, where]


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys, atoll.cli.app, atoll.launch.run, atoll.launch.worker; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
