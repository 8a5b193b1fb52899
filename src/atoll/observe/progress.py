"""The display of a whole run: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import IO, Protocol, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from atoll.core.events import AnyEvent, Decided, Saved, Skipped, Warned
from atoll.core.outlet import Outlet, Screen
from atoll.core.units import format_bytes, format_seconds
from atoll.observe.recorder import Status

LINE_SECONDS = 10.0  # between two plain lines
_FEW = 4  # workers whose parts a line lists one by one
REFRESHES_PER_SECOND = 4
_WIDEST = 110  # columns; a longer bar tells no more
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class Progress(Protocol):
    """Shows a run. One thread calls all methods, and none waits for the reader of the output."""

    @property
    def lines_to(self) -> Outlet:
        """The outlet of `lines`."""

    def update(self, status: Status) -> None:
        """Show the run's status."""

    def lines(self, texts: Sequence[str]) -> None:
        """Show lines that the script wrote."""

    def event(self, event: AnyEvent) -> None:
        """Show an event that concerns the user."""

    def close(self) -> None:
        """Restore the terminal, with the last status on it."""


def make_progress(title: str, screen: Screen) -> Progress:
    """Return the display that fits the terminal.

    The script's lines go to the screen's output, all else to its errors.
    """
    console = Console(file=cast(IO[str], screen.errors), highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(title, console, screen)
    return PlainProgress(screen)


def format_value(value: float | None) -> str:
    """Format a logged value: `1.234`, `0.00012`, `nan` for None."""
    return "nan" if value is None else f"{value:.4g}"


def format_values(values: dict[str, float | None]) -> str:
    """Format logged values: `loss 1.234 · accuracy 0.91`."""
    return " · ".join(f"{name} {format_value(value)}" for name, value in values.items())


def describe_event(event: AnyEvent) -> str:
    """Return an event as one line for the user; empty for events that are not shown."""
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

    def __init__(self, screen: Screen) -> None:
        self._screen, self.lines_to = screen, screen.output
        self._due = 0.0
        self._iteration = 0

    def update(self, status: Status) -> None:
        now = time.monotonic()
        if status.iteration > self._iteration and now >= self._due:
            self._iteration, self._due = status.iteration, now + LINE_SECONDS
            self._say(plain_line(status))

    def lines(self, texts: Sequence[str]) -> None:
        self.lines_to.write("\n".join([*texts, ""]))

    def event(self, event: AnyEvent) -> None:
        if text := describe_event(event):
            self._say(text)

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""

    def _say(self, text: str) -> None:
        self._screen.say(f"atoll: {text}")


def plain_line(status: Status) -> str:
    """Format a status: `step 120 of 3,000 · loss 1.23 · 512 samples/s · 12% waiting · 2 min 3 s left`."""
    steps = f"step {status.iteration:,}" + (f" of {status.expected:,}" if status.expected else "")
    parts = [steps, format_values(status.last), *_rates(status)]
    parts.append(_left(status))
    return " · ".join(part for part in parts if part)


def _left(status: Status) -> str:
    """Return `2 min 3 s left`; empty if unknown, or at the end."""
    left = status.seconds_left
    return f"{format_seconds(max(1, round(left)))} left" if left else ""


def _rates(status: Status) -> list[str]:
    rates = [f"{status.samples_per_second:,.4g} samples/s"] if status.samples_per_second > 0 else []
    if status.workers > 1:
        rates.append(f"{format_bytes(status.bytes_sent)} sent ({format_bytes(status.bytes_per_second)}/s)")
        rates.append(f"{status.waiting_share:.0%} waiting")
    if status.parts:
        few = len(status.parts) <= _FEW
        said = ", ".join(map(str, status.parts)) if few else f"{min(status.parts)} to {max(status.parts)}"
        rates.append(f"parts {said}")
    return rates


class _Verbatim:
    """Lines that rich prints unchanged, since its layout of a thousand lines takes seconds."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, _options: ConsoleOptions) -> Iterator[Segment]:
        lines = list(self._lines)
        if any("\x1b" in line for line in lines):
            plain = console.no_color or console.color_system is None
            # A colour that the script has left on would colour the display too.
            lines = [
                _COLOUR.sub("", line) if plain else f"{line}\x1b[0m" if "\x1b" in line else line
                for line in lines
            ]
        yield Segment("\n".join([*lines, ""]))


class LiveProgress:
    """A few lines at the foot of the terminal, redrawn a few times a second if the terminal keeps up."""

    def __init__(self, title: str, console: Console, screen: Screen) -> None:
        self._title, self._console, self._screen = title, console, screen
        self.lines_to = screen.errors if screen.output.isatty() else screen.output
        self._began = self._drawn = time.monotonic()
        self._spinner = Spinner("line" if _is_ascii(console) else "dots", style="cyan")
        self._status: Status | None = None
        self._live = Live(
            get_renderable=self.render,
            console=console,
            auto_refresh=False,  # a thread of rich would wait for the terminal while it holds a lock
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def update(self, status: Status) -> None:
        self._status = status
        now = time.monotonic()
        if now - self._drawn >= 1 / REFRESHES_PER_SECOND and self._screen.errors.idle:
            self._drawn = now
            self._live.refresh()

    def lines(self, texts: Sequence[str]) -> None:
        if self.lines_to is self._screen.errors:
            self._console.print(_Verbatim(texts), soft_wrap=True)
        else:
            self.lines_to.write("\n".join([*texts, ""]))

    def event(self, event: AnyEvent) -> None:
        if text := describe_event(event):
            style = "yellow" if isinstance(event, (Skipped, Warned)) else "dim"
            self._console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the display for the present status."""
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
        """Return a row with the title, a bar that fills the free width, the count, and the time."""
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


def _is_ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _time(status: Status, elapsed: float) -> str:
    return ", ".join(part for part in (format_seconds(elapsed), _left(status)) if part)
