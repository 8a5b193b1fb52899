"""`atoll run`: the options that stand for keys of the configuration, and the run's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from atoll.core.config import Config, load_given
from atoll.core.errors import ConfigError
from atoll.core.options import Mark, options_of


def _group_count(given: str) -> str:
    """Return groups.count for `--groups`: 0 for auto; raises ConfigError for a number below 1."""
    if given == "auto":
        return "0"
    if given.lstrip("-").isdecimal() and int(given) < 1:
        raise ConfigError(f"--groups {given}: at least 1 group; or auto, for as many as are best")
    return given


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `atoll run`. Options for keys of the configuration are texts, as after `--set`.

    Args:
        script: The training script; with -m a module's name.
        arguments: Its arguments.
        module: SCRIPT is a module, as in python -m: atoll run -m package.train.
        config: The configuration; ./atoll.toml if there is one.
        settings: Set one key, such as sync.timeout=30s.
        summary: Write the summary here too.
    """

    script: Annotated[str, Mark("SCRIPT", is_argument=True)]
    arguments: Annotated[list[str], Mark("ARGS", is_argument=True)] = []
    module: Annotated[bool, Mark(flag="-m")] = False
    workers: Annotated[str, Mark("N", key="run.workers")] = ""
    strategy: Annotated[str, Mark("NAME", key="run.strategy")] = ""
    shards: Annotated[str, Mark("M", key="run.shards")] = ""
    replicas: Annotated[str, Mark("R", key="server.replicas")] = ""
    groups: Annotated[str, Mark("K", key="groups.count", parse=_group_count)] = ""
    group_by: Annotated[str, Mark("HOW", key="groups.by")] = ""
    sites: Annotated[str, Mark("K", key="run.sites")] = ""
    config: Annotated[str, Mark("FILE")] = ""
    settings: Annotated[list[str], Mark("KEY=VALUE", flag="--set")] = []
    summary: Annotated[str, Mark("FILE")] = ""


def run(options: RunOptions) -> None:
    """Train SCRIPT on several workers of this machine."""
    from atoll.launch.run import run

    config, unused = _load(options)
    status = run(
        options.script,
        options.arguments,
        config,
        Path(options.summary) if options.summary else None,
        is_module=options.module,
        hub_module="atoll.cli.hub",
        warnings=unused,
    )
    raise typer.Exit(status)


def _load(options: RunOptions) -> tuple[Config, list[str]]:
    """Load the configuration; returns the configuration and a warning for each given key without effect.

    Options that stand for keys pass the checks of `--set`, and messages name the option.
    """
    from atoll.axes.needs import check_configuration
    from atoll.core.effects import without_effect

    chosen = {
        f"{option.mark.key}={getattr(options, name)}": option
        for name, option in options_of(RunOptions).items()
        if option.mark.key and getattr(options, name)
    }
    names = {
        f"--set {setting}": f"{option.flag} {setting.partition('=')[2]}" for setting, option in chosen.items()
    }
    try:
        config, places = load_given(options.config or None, [*options.settings, *chosen])
        check_configuration(config)
        return config, without_effect(config, {key: names.get(at, at) for key, at in places.items()})
    except ConfigError as error:
        message = str(error)
        for setting, option in chosen.items():
            message = message.replace(
                f"--set {setting}: {option.mark.key}: ", f"{names[f'--set {setting}']}: "
            )
        raise ConfigError(message) from None
