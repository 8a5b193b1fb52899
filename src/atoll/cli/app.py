"""`atoll run`, `atoll check`, `atoll report`; the rest is in the modules beside this one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

import atoll
from atoll.axes.needs import check_configuration
from atoll.cli import lab, link, memory, plan, services
from atoll.cli.stops import end_at_signals
from atoll.cli.streams import flush_streams, open_streams, say
from atoll.core.config import Config, load_given, to_toml
from atoll.core.effects import without_effect
from atoll.core.errors import AtollError, ConfigError, UserError
from atoll.core.sharing import files_like
from atoll.observe.rundir import RunDirectory


@contextlib.contextmanager
def _aborts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Abort from None


class _Commands(typer.core.TyperGroup):
    """All of them. By itself typer ends without a word at Ctrl-C."""

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

# What typer raises for a wrong option, by its own copy of click or by click itself, as its version has it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_ConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="The configuration; ./atoll.toml if there is one."),
]
_SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, such as sync.timeout=30s."),
]


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
@app.command("run", context_settings={"allow_interspersed_args": False})
def _run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The training script; with -m a module's name.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")] = None,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as of python -m: atoll run -m package.train.")
    ] = False,
    workers: Annotated[str | None, typer.Option(metavar="N", help="Workers on this machine.")] = None,
    strategy: Annotated[str | None, typer.Option(metavar="NAME", help="How workers synchronise.")] = None,
    shards: Annotated[
        str | None, typer.Option(metavar="M", help="Shards, for strategies server and ps-hra.")
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="R", help="Processes that hold each shard, with --shards: 2 for a standby of each."
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="K",
            help="Groups of workers, for ps-hra and hierarchical; auto: as many as are best. Peers: nodes.",
        ),
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="Form groups by speed, joint (speed and link), site or auto."),
    ] = None,
    sites: Annotated[str | None, typer.Option(metavar="K", help="Sites, each with a shard in front.")] = None,
    config: _ConfigOption = None,
    settings: _SetOption = None,
    summary: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the summary here too.")] = None,
) -> None:
    """Train SCRIPT on several workers of this machine."""
    from atoll.launch.run import run

    options = {
        "--workers": ("run.workers", workers),
        "--strategy": ("run.strategy", strategy),
        "--shards": ("run.shards", shards),
        "--replicas": ("server.replicas", replicas),
        "--groups": ("groups.count", _group_count(groups)),
        "--group-by": ("groups.by", group_by),
        "--sites": ("run.sites", sites),
    }
    chosen, unused = _load(config, settings, options)
    status = run(
        script,
        arguments or [],
        chosen,
        summary,
        is_module=module,
        hub_module="atoll.cli.hub",
        warnings=unused,
    )
    raise typer.Exit(status)


@app.command("check")
def _check(config: Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration file.")]) -> None:
    """Say whether CONFIG is right, and print it with every default."""
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
    from atoll.lab import report as lab_report
    from atoll.launch import labpicture
    from atoll.observe import report

    if (directory / lab_report.RECORD).exists():
        print(labpicture.redraw(directory))
    else:
        with files_like(directory):
            print(report.redraw(RunDirectory(directory)))


def _load(
    config: str | None, settings: list[str] | None, options: Mapping[str, tuple[str, str | None]]
) -> tuple[Config, list[str]]:
    """Load the configuration; returns the configuration and a warning for each given key without effect.

    `options` are command-line options that stand for settings. They pass the same checks, and messages name
    the option.
    """
    names = {f"--set {key}={value}": f"{option} {value}" for option, (key, value) in options.items()}
    given = [*(settings or []), *(f"{key}={value}" for key, value in options.values() if value is not None)]
    try:
        chosen, places = load_given(config, given)
        check_configuration(chosen)
        return chosen, without_effect(chosen, {key: names.get(at, at) for key, at in places.items()})
    except ConfigError as error:
        said = str(error)
        for option, (key, value) in options.items():
            said = said.replace(f"--set {key}={value}: {key}: ", f"{option} {value}: ")
        raise ConfigError(said) from None


def _group_count(given: str | None) -> str | None:
    """`--groups` as groups.count has it, where 0 is auto: who writes 0 has made a mistake."""
    if given is None or given == "auto":
        return None if given is None else "0"
    if given.lstrip("-").isdecimal() and int(given) < 1:
        raise ConfigError(f"--groups {given}: at least 1 group; or auto, for as many as are best")
    return given


def _end(message: str, status: int) -> NoReturn:
    say(f"atoll: {message}")
    flush_streams()
    sys.exit(status)


def _message(error: Exception) -> str:
    """A usage error's text, on one line."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoSuchOption" and _is_lab_run(context):
        message += "; if it is one of the command's own, write -- before the command"
    return " ".join(message.split())


def _is_lab_run(context: Any) -> bool:
    return getattr(context, "command_path", "").split()[-2:] == ["lab", "run"]


def main() -> NoReturn:
    """The entry point. Ends with 0, 1 (the run failed), 2 (the input is wrong) or the script's status."""
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
    except BrokenPipeError:  # as of `atoll plan ... | head`
        flush_streams()
        sys.exit(1)
    flush_streams()
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
