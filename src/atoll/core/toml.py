"""Reading of TOML files, with a one-line ConfigError for every fault."""

from __future__ import annotations

import os
import sys
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.pipes import read_start
from atoll.core.units import format_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST_BYTES = 2**20  # of a file: far more than anyone writes by hand


def read_toml(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Return the table in the file at `path`; errors call the file `what` ("the configuration")."""
    try:
        data = read_start(path, _MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read {what}: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: {what} is too long: more than {format_bytes(_MOST_BYTES)}")
    try:
        return parse_toml(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: {what} is not UTF-8 text") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table in a TOML text."""
    try:
        return dict(tomllib.loads(text))
    except ValueError as error:  # TOMLDecodeError, or the error for a number of 5000 digits
        raise ConfigError(f"not TOML: {error}") from None
    except RecursionError:
        raise ConfigError("not TOML that can be read: its brackets are nested too deeply") from None
