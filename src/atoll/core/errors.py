"""The errors that Atoll raises, and their exit statuses.

Each is shown as one line without a stack trace. A `UserError`, for something that the user gave, ends the
process with status 2. A `RunError` (a lost worker, a passed deadline) ends it with status 1; a
`GivenUpError`, after which a new start of the process helps, with status 75.
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
    """The model or the optimizer cannot be trained as given; names the parameter and the remedy."""


class BindingError(UserError):
    """A parameter no longer lies in its chunk (`model.double()`, say), found at the next step."""


class NonFiniteGradientError(UserError):
    """A gradient holds NaN or infinity, and the policy `sync.nonfinite` is `stop`."""


class CheckpointError(UserError):
    """A checkpoint is missing, half-written, damaged, or of another model."""


class MismatchError(UserError):
    """Workers' scripts stand at inconsistent places; the message names each worker's place."""


class RunError(AtollError):
    """The run cannot go on, and no input of the user is at fault."""


class PeerLostError(RunError):
    """Another worker is gone; usually the echo of that worker's own error."""


class DeadlineError(RunError):
    """A wait passed its deadline; names the workers that were missing, the reason, and the time waited."""


class GivenUpError(RunError):
    """The others have given this process up, or a part that it needs is gone, such as its node's CPU side.

    A new start helps: the exit status is EX_TEMPFAIL's (sysexits.h).
    """

    exit_status = 75


def error_named(name: str, line: str) -> AtollError:
    """Return an error of the class called `name`, raised in another process; a RunError for other names."""
    kind = globals().get(name)
    return kind(line) if isinstance(kind, type) and issubclass(kind, AtollError) else RunError(line)
