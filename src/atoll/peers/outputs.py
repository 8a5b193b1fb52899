"""What a node's decisions hand to its runtime, to be done in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, Union

from atoll.wire.messages import Message
from atoll.wire.peers import Key
from atoll.wire.peerviews import View


@dataclass(frozen=True)
class Send:
    """Send this to a node, by its id; WITNESS is the hub. It may be lost: then it is said again in time."""

    to: int
    message: Message


@dataclass(frozen=True)
class SendPart:
    """Send the payload under `key` to a node. It may be lost: then the node asks for it."""

    to: int
    key: Key


@dataclass(frozen=True)
class Apply:
    """Make the global parameters' step `iteration` of these contributions, which are all here, in order of
    node; without any, it only counts. Calls come in order of iteration, each once."""

    iteration: int
    keys: tuple[Key, ...]
    reason: str


@dataclass(frozen=True)
class Meet:
    """Meeting `number` takes place, of these parts, in order of node."""

    number: int
    keys: tuple[Key, ...]
    reason: str


@dataclass(frozen=True)
class Drop:
    """Free what is held under these keys, if anything is: nobody needs it any more, or it does not count."""

    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Grant:
    """The devices may compute `iteration` on parameters of global iteration `applied` or a newer one: where
    theirs are older, they take those in M_i first."""

    iteration: int
    applied: int
    reason: str


@dataclass(frozen=True)
class FetchState:
    """A joiner: take the state from `source`, of global iteration `base` or later; then `handle_state`, or
    `handle_state_failed`, after which another is asked; the latest one counts. Who is asked gives its state
    once its own W is at `base`, it is whole, and its view has this joiner, by its incarnation."""

    source: int
    base: int
    reason: str


@dataclass(frozen=True)
class ViewChanged:
    """This view holds from now on; this node is in it. To a joiner it is the word that it has joined."""

    view: View
    reason: str


@dataclass(frozen=True)
class Removed:
    """This node is no longer a member: nothing of it is taken any more, and this state machine is at its end.
    To come back: `Node.joining`, with a new token; `view` says whom to ask, where it has members."""

    view: View
    reason: str


@dataclass(frozen=True)
class Finished:
    """Every member has all that this node held, or the deadline for that has passed: it may end."""

    reason: str


@dataclass(frozen=True)
class Note:
    """For the journal: `what` ("round started", "round refused", "suspected" ...), in which round or of which
    node, and why."""

    what: str
    about: str
    reason: str


@dataclass(frozen=True)
class Differ:
    """The members' scripts wait for each other in vain and the run ends. `line` names each script's place."""

    line: str


Output: TypeAlias = Union[
    Send, SendPart, Apply, Meet, Drop, Grant, FetchState, ViewChanged, Removed, Finished, Note, Differ
]
