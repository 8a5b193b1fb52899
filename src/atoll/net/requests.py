"""Requests with a deadline, whose error names the awaited side, the subject and the reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from atoll.core.errors import AtollError, DeadlineError, PeerLostError, RunError, UserError
from atoll.core.texts import one_line
from atoll.net.endpoint import Buffer, Client
from atoll.wire.messages import (
    AnyMessage,
    Message,
    Missing,
    Refused,
    WhoIsMissing,
    WireError,
    decode_untrusted,
    encode,
)

MOST_REASON = 4096  # characters of a refusal that are shown
_EXPLAIN_SECONDS = 2.0  # for the hub to name the missing shards
_LOOK_SECONDS = 0.1  # between looks at the connection's state while waiting

Answer = TypeVar("Answer", bound=Message)


class RefusedError(UserError):
    """The other side refused; the line is its reason."""


def ask(
    client: Client,
    message: AnyMessage,
    expected: type[Answer] | tuple[type[Answer], ...],
    deadline: float,
    what: str,
    payload: Buffer | None = None,
    aside: Callable[[AnyMessage, memoryview | None], None] | None = None,
    number: int | None = None,
) -> tuple[Answer, memoryview | None]:
    """Send `message` and return the first answer of an `expected` type, and its payload.

    `deadline` is in seconds from now; `what` ends "waited 3 s for NAME at ADDRESS on ...". Messages of other
    types go to `aside`, or are dropped; with `number`, so are answers and refusals with another one: they are
    to an earlier message, which was sent twice. Raises RefusedError when the other side refuses, UserError
    when it does not let us in, DeadlineError, and PeerLostError when the connection is lost: the other side
    may then have the message or not.
    """
    client.check()
    losses = client.losses
    client.send(encode(message), payload)
    return wait_for(client, expected, deadline, what, losses, aside, number, type(message).__name__)


def wait_for(
    client: Client,
    expected: type[Answer] | tuple[type[Answer], ...],
    deadline: float,
    what: str,
    losses: int,
    aside: Callable[[AnyMessage, memoryview | None], None] | None = None,
    number: int | None = None,
    request: str = "",
) -> tuple[Answer, memoryview | None]:
    """Wait for the answer to an earlier request: `request` is its name, and `losses` was `client.losses`
    at the time. Otherwise like `ask`."""
    start = time.monotonic()
    while True:
        left = start + deadline - time.monotonic()
        received = client.receive(max(0.0, min(left, _LOOK_SECONDS)))
        if received is None:
            client.check()
            if client.losses != losses and (received := client.receive(0)) is None:
                raise PeerLostError(
                    f"the connection to {client.name} at {client.address} was lost while waiting for {what}"
                )
        if received is not None:
            answer = decode_from(client, received[0])
            if isinstance(answer, Refused):
                if (
                    not answer.number
                    or number is None
                    or (answer.request, answer.number) == (request, number)
                ):
                    raise RefusedError(
                        f"{client.name} at {client.address} refused: {one_line(answer.reason, MOST_REASON)}"
                    )
            elif isinstance(answer, expected):
                if number is None or getattr(answer, "number", number) == number:
                    return answer, received[1]
            elif aside is not None:
                aside(answer, received[1])
        if left <= 0:
            raise DeadlineError(late(client, deadline, what))


def who_is_missing(client: Client) -> str:
    """Ask the hub, once a deadline on the run's shards has passed, which shards have not come; return an
    empty string if it does not answer."""
    try:
        missing, _ = ask(client, WhoIsMissing(), Missing, _EXPLAIN_SECONDS, "whom it waits for")
    except AtollError:
        return ""
    return "; ".join(one_line(line, MOST_REASON) for line in missing.lines)


def late(client: Client, deadline: float, what: str) -> str:
    """Return the line of a DeadlineError."""
    trouble = f"; {client.trouble}" if client.trouble else ""
    return (
        f"waited {deadline:.1f} s for {client.name} at {client.address} on {what} "
        f"(deadline sync.timeout, {deadline:g} s{trouble})"
    )


def decode_from(client: Client, header: bytes) -> Any:
    """Return a server's message. Raises RunError, with the server's name, for anything else."""
    try:
        return decode_untrusted(header)
    except WireError as error:
        raise RunError(f"{client.name} at {client.address} sent {error}") from None
