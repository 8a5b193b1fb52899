"""One display for the whole run: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from atoll.core.events import AnyEvent, Decided, Saved, Skipped, Warned
from atoll.core.units import format_bytes, format_seconds
from atoll.observe.recorder import Status

LINE_SECONDS = 10.0  # between two plain lines
REFRESHES_PER_SECOND = 4
_WIDEST = 110  # columns; a longer bar tells no more


class Progress(Protocol):
    """What shows a run. All of it is called from one thread."""

    def update(self, status: Status) -> None:
        """Show how the run stands."""

    def line(self, text: str) -> None:
        """Show a line that the script wrote."""

    def event(self, event: AnyEvent) -> None:
        """Show something that a person should know."""

    def close(self) -> None:
        """Leave the terminal as it was, with the last state on it."""


def make_progress(title: str, output: IO[str] | None = None, errors: IO[str] | None = None) -> Progress:
    """The display that fits the terminal: the script's lines go to `output`, all else to `errors`."""
    output, errors = output or sys.stdout, errors or sys.stderr
    console = Console(file=errors, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(title, console, output)
    return PlainProgress(output, errors)


def format_value(value: float | None) -> str:
    """`1.234`, `0.00012`, `nan` for None: a logged value in a line."""
    return "nan" if value is None else f"{value:.4g}"


def format_values(values: dict[str, float | None]) -> str:
    """`loss 1.234 · accuracy 0.91`."""
    return " · ".join(f"{name} {format_value(value)}" for name, value in values.items())


def describe_event(event: AnyEvent) -> str:
    """An event as one line for a person; empty for those that are not shown."""
    if isinstance(event, Decided):
        return f"{event.what}: {event.choice.partition(chr(10))[0]} ({event.reason})"
    if isinstance(event, Skipped):
        if event.left_out:
            return (
                f"iteration {event.iteration}: the contribution of {event.left_out} was left out, and the "
                f"others' count: {event.reason}"
            )
        return f"iteration {event.iteration} was skipped on every worker: {event.reason}"
    if isinstance(event, Saved):
        return f"iteration {event.iteration} is saved in {event.path}"
    if isinstance(event, Warned):
        return f"warning: {event.message}"
    return ""


class PlainProgress:
    """Lines for logs and pipes, one about every `LINE_SECONDS` in which a step was done."""

    def __init__(self, output: IO[str], errors: IO[str]) -> None:
        self._output, self._errors = output, errors
        self._due = 0.0
        self._iteration = 0

    def update(self, status: Status) -> None:
        now = time.monotonic()
        if status.iteration > self._iteration and now >= self._due:
            self._iteration, self._due = status.iteration, now + LINE_SECONDS
            self._say(plain_line(status))

    def line(self, text: str) -> None:
        self._output.write(text + "\n")
        self._output.flush()

    def event(self, event: AnyEvent) -> None:
        if text := describe_event(event):
            self._say(text)

    def close(self) -> None:
        """Nothing to put back."""

    def _say(self, text: str) -> None:
        self._errors.write(f"atoll: {text}\n")
        self._errors.flush()


def plain_line(status: Status) -> str:
    """`step 120 of 3000 · loss 1.23 · 512 samples/s · 3.4 MiB/s sent · 12 % waiting · 2 min 3 s left`."""
    steps = f"step {status.iteration:,}" + (f" of {status.expected:,}" if status.expected else "")
    parts = [steps, format_values(status.last), *_rates(status)]
    parts.append(_left(status))
    return " · ".join(part for part in parts if part)


def _left(status: Status) -> str:
    """`2 min 3 s left`; empty when that is not known, or the end is here."""
    left = status.seconds_left
    return f"{format_seconds(max(1, round(left)))} left" if left else ""


def _rates(status: Status) -> list[str]:
    rates = [f"{status.samples_per_second:,.4g} samples/s"] if status.samples_per_second > 0 else []
    if status.workers > 1:
        rates.append(f"{format_bytes(status.bytes_sent)} sent ({format_bytes(status.bytes_per_second)}/s)")
        rates.append(f"{status.waiting_share:.0%} waiting")
    return rates


class LiveProgress:
    """A few lines at the foot of the terminal, drawn anew a few times a second."""

    def __init__(self, title: str, console: Console, output: IO[str]) -> None:
        self._title, self._console, self._output = title, console, output
        self._began = time.monotonic()
        self._spinner = Spinner("dots", style="cyan")
        self._status: Status | None = None
        self._live = Live(
            get_renderable=self.render,
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def update(self, status: Status) -> None:
        self._status = status

    def line(self, text: str) -> None:
        if self._output.isatty():
            self._console.print(Text.from_ansi(text), soft_wrap=True)
        else:
            self._output.write(text + "\n")
            self._output.flush()

    def event(self, event: AnyEvent) -> None:
        if text := describe_event(event):
            style = "yellow" if isinstance(event, (Skipped, Warned)) else "dim"
            self._console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """The display as it stands now."""
        elapsed = time.monotonic() - self._began
        status = self._status
        if status is None or status.iteration == 0:
            return self._starting(status, elapsed)
        head = self._head(status, Text(_time(status, elapsed), style="dim"))
        facts = [
            Text.assemble((f"{name} ", "dim"), (format_value(v), "bold")) for name, v in status.last.items()
        ]
        facts += [Text(rate) for rate in _rates(status)]
        return Group(head, Text("  ·  ", style="dim", overflow="fold").join(facts))

    def _starting(self, status: Status | None, elapsed: float) -> RenderableType:
        text = f"{self._title}: starting"
        if status is not None and status.started:
            text = f"{self._title}: {status.started} of {status.workers} workers have joined"
            if status.started == status.workers:
                text = f"{self._title}: the first step"
        self._spinner.update(text=Text(f"{text}  {elapsed:.0f} s"))
        return self._spinner

    def _head(self, status: Status, clock: Text) -> Table:
        """One row: what runs, a bar as wide as the rest leaves it, the count, the time."""
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True)
        cells: list[RenderableType] = [Text(self._title, style="bold cyan")]
        if status.expected:
            row.width = min(self._console.width, _WIDEST)
            row.add_column(ratio=1)
            cells.append(ProgressBar(total=status.expected, completed=min(status.iteration, status.expected)))
            cells.append(f"{status.iteration:,}/{status.expected:,}")
        else:
            cells.append(f"step {status.iteration:,}")
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True)
        row.add_row(*cells, clock)
        return row


def _time(status: Status, elapsed: float) -> str:
    return ", ".join(part for part in (format_seconds(elapsed), _left(status)) if part)
