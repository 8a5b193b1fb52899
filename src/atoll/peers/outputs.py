"""The actions that a node's decisions hand to its runtime, to be done in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, Union

from atoll.wire.messages import Message
from atoll.wire.peers import Key
from atoll.wire.peerviews import View


@dataclass(frozen=True)
class Send:
    """Send a message to a node, by its id; WITNESS is the hub. A lost message is sent again in time."""

    to: int
    message: Message


@dataclass(frozen=True)
class SendPart:
    """Send the payload under `key` to a node. If it is lost, the node requests it."""

    to: int
    key: Key


@dataclass(frozen=True)
class Apply:
    """Make step `iteration` of the global parameters from these contributions, all of which are here, in
    order of node. Without any, the step only counts. Applies come in order of iteration, each once."""

    iteration: int
    keys: tuple[Key, ...]
    reason: str


@dataclass(frozen=True)
class Meet:
    """Hold meeting `number` with these parts, in order of node."""

    number: int
    keys: tuple[Key, ...]
    reason: str


@dataclass(frozen=True)
class Drop:
    """Free any payloads under these keys: nobody needs them any more, or they do not count."""

    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Grant:
    """Let the devices compute `iteration` on parameters of global iteration `applied` or newer; devices
    with older parameters take those in M_i first."""

    iteration: int
    applied: int
    reason: str


@dataclass(frozen=True)
class FetchState:
    """Fetch a joiner's state from `source`, of global iteration `base` or later, and call `handle_state`, or
    `handle_state_failed`, after which another member is asked. The latest FetchState counts.

    `source` gives its state once its own W is at `base`, it is whole, and its view has this joiner's
    incarnation.
    """

    source: int
    base: int
    reason: str


@dataclass(frozen=True)
class ViewChanged:
    """Install this view, which has this node in it. To a joiner it means that it has joined."""

    view: View
    reason: str


@dataclass(frozen=True)
class Removed:
    """Stop: this node is no longer a member, nothing of it is taken any more, and its state machine has
    ended.

    To come back, use `Node.joining` with a new token; `view`, if it has members, says whom to ask.
    """

    view: View
    reason: str


@dataclass(frozen=True)
class Finished:
    """End: every member has all that this node made, or the deadline for that has passed."""

    reason: str


@dataclass(frozen=True)
class Note:
    """Write to the journal: `what` happened ("round started", "round refused", "suspected" ...), `about`
    which round or node, and why."""

    what: str
    about: str
    reason: str


@dataclass(frozen=True)
class Differ:
    """End the run: the members' scripts wait for each other in vain. `line` names each script's place."""

    line: str


Output: TypeAlias = Union[
    Send, SendPart, Apply, Meet, Drop, Grant, FetchState, ViewChanged, Removed, Finished, Note, Differ
]
