"""The errors that Atoll raises, and the exit status that each one means.

A `UserError` is shown as one line with no stack trace, and ends the process with status 2. A `RunError` is
nobody's typing mistake (a worker was lost, a wait passed its deadline): it also shows one line, and ends
with status 1; with status 75 where the process need only be started again (`GivenUpError`).
"""

from __future__ import annotations


class AtollError(Exception):
    """Any error that Atoll raises on purpose; `str(error)` is the one line to show."""

    exit_status = 1


class UserError(AtollError):
    """Something that the user gave is wrong: a file, a key, a model, a call."""

    exit_status = 2


class ConfigError(UserError):
    """A configuration file, a `--set`, or an environment variable is wrong."""


class PrepareError(UserError):
    """The model or the optimizer cannot be trained as given; names the parameter and the way out."""


class BindingError(UserError):
    """A parameter no longer lies in its chunk (`model.double()`, say), found at the next step."""


class NonFiniteGradientError(UserError):
    """A gradient holds NaN or infinity, and the policy `sync.nonfinite` is `stop`."""


class CheckpointError(UserError):
    """A checkpoint is missing, half-written, damaged, or of another model."""


class MismatchError(UserError):
    """Workers' scripts stand at inconsistent places; the message names each worker's place."""


class RunError(AtollError):
    """The run cannot go on, through no fault of what the user gave."""


class PeerLostError(RunError):
    """Another worker is gone; usually the echo of that worker's own error."""


class DeadlineError(RunError):
    """A wait passed its deadline; names who was waited for, on what, when, and how long."""


class GivenUpError(RunError):
    """The others have given this process up, or what it needs beside itself is gone: a part of its node, say.
    Started again it is of use: the status is EX_TEMPFAIL's (sysexits.h)."""

    exit_status = 75


def error_named(name: str, line: str) -> AtollError:
    """An error that another process has raised, by its class's name; a RunError where there is no such."""
    kind = globals().get(name)
    return kind(line) if isinstance(kind, type) and issubclass(kind, AtollError) else RunError(line)
