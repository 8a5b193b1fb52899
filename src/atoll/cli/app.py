"""The `atoll` command: `atoll check` and `atoll report`, and the commands of the other modules here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

import atoll
from atoll.cli import lab, link, memory, plan, services
from atoll.cli.commands import command
from atoll.cli.run import RunOptions, run
from atoll.cli.stops import end_at_signals
from atoll.cli.streams import flush_streams, open_streams, say
from atoll.core.config import load_given, to_toml
from atoll.core.errors import AtollError, ConfigError, UserError


@contextlib.contextmanager
def _aborts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Abort from None


class _Commands(typer.core.TyperGroup):
    """The group of all commands; reports Ctrl-C, at which typer itself ends without a message."""

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        with _aborts():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: Any) -> Any:
        with _aborts():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Trains one PyTorch model on the machines that people really have.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# The base of typer's errors for wrong options: from its own copy of click, or from click, by its version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

services.register(app)
lab.register(app)
link.register(app)
memory.register(app)
plan.register(app)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    if version:
        print(f"atoll {atoll.__version__}")
        raise typer.Exit


# Options after SCRIPT are the script's own.
app.command("run", context_settings={"allow_interspersed_args": False})(command(run, RunOptions))


@app.command("check")
def _check(config: Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration file.")]) -> None:
    """Say whether CONFIG is right, and print it with every default."""
    from atoll.axes.needs import check_configuration
    from atoll.core.effects import without_effect
    from atoll.launch.checks import check_run

    chosen, given = load_given(config)
    check_configuration(chosen)
    try:
        check_run(chosen)
    except UserError as error:
        raise ConfigError(f"{config}: {error}") from None
    print(to_toml(chosen).rstrip("\n"))
    for line in without_effect(chosen, given):
        print(f"atoll: warning: {line}", file=sys.stderr)
    print(f"{config}: right", file=sys.stderr)


@app.command("report")
def _report(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="A run's directory, or a lab's folder of records.")
    ],
) -> None:
    """Draw the picture of a run, or of a lab's run, again.

    A run that was killed gets its metrics and summary from the workers' journals first.
    """
    from atoll.core.sharing import files_like
    from atoll.lab import report as lab_report
    from atoll.launch import labpicture
    from atoll.observe import report
    from atoll.observe.rundir import RunDirectory

    if (directory / lab_report.RECORD).exists():
        print(labpicture.redraw(directory))
    else:
        with files_like(directory):
            print(report.redraw(RunDirectory(directory)))


def _end(message: str, status: int) -> NoReturn:
    say(f"atoll: {message}")
    flush_streams()
    sys.exit(status)


def _message(error: Exception) -> str:
    """Return a usage error's text on one line."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoSuchOption" and _is_lab_run(context):
        message += "; if it is one of the command's own, write -- before the command"
    return " ".join(message.split())


def _is_lab_run(context: Any) -> bool:
    return getattr(context, "command_path", "").split()[-2:] == ["lab", "run"]


def main() -> NoReturn:
    """Run the command and exit with 0, 1 (the run failed), 2 (wrong input) or the script's status."""
    end_at_signals(sys.argv[1:])
    open_streams()
    try:
        status = app(standalone_mode=False)
    except AtollError as error:
        _end(str(error), error.exit_status)
    except _UsageError as error:
        _end(_message(error), UserError.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        _end("stopped by Ctrl-C", 130)
    except BrokenPipeError:  # `atoll plan ... | head`
        flush_streams()
        sys.exit(1)
    flush_streams()
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
