"""Messages between `atoll link test` and `atoll link serve`, over the authenticated channel: they compare
clocks, open transports, and report each usable transfer with its time.

The measured bytes go elsewhere: over a TCP connection of their own, or as datagrams.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from atoll.wire.base import Count, Message, Text

LINK_ROLE = "link"  # the role in Hello and Welcome, at both ends
TOKEN_BYTES = 16
SECRET_BYTES = 32
MOST_TRANSFER = 2**30  # bytes of one transfer
MOST_PORTS = 8

_Port = Annotated[int, Meta(ge=1, lt=2**16)]
_Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
_Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class ReadClock(Message, frozen=True):
    """A request for the server's time. The prompt answer also gives the round trip."""

    number: Count


class ClockRead(Message, frozen=True):
    """`at`: seconds of the server's monotonic clock."""

    number: Count
    at: float


class OpenTcp(Message, frozen=True):
    """The client wants to send transfers of `size` bytes over a TCP connection."""

    number: Count
    size: Annotated[int, Meta(ge=1, le=MOST_TRANSFER)]


class TcpOpened(Message, frozen=True):
    """The port to connect to, and the token to send first. A transfer is its length, 8 bytes
    little-endian, and its bytes."""

    number: Count
    flow: Count
    port: _Port
    token: _Token


class OpenLtp(Message, frozen=True):
    """The client wants to send transfers of `elements` float32 values as datagrams of `version`."""

    number: Count
    version: Count
    elements: Annotated[int, Meta(ge=1, le=MOST_TRANSFER // 4)]
    datagram_bytes: Count


class LtpOpened(Message, frozen=True):
    """A session that the server waits for: its id, its UDP ports (a stripe each), and the secret from which
    both ends derive its keys. Datagrams are sealed where `sealed` says so."""

    number: Count
    flow: Count
    session: Annotated[int, Meta(ge=0, lt=2**32)]
    ports: Annotated[list[_Port], Meta(min_length=1, max_length=MOST_PORTS)]
    secret: _Secret
    sealed: bool = True


class Taken(Message, frozen=True):
    """The server has a transfer that is of use. `transfer` counts a flow's transfers from 0; `at` is when, by
    the server's clock; `size` how many of its bytes are there. Of datagrams: `how` it was handed on, the
    blocks it has of high and low priority and how many of them are there, what took the lost ones' place, and
    how many blocks forward error correction gave back since the last one.
    """

    flow: Count
    transfer: Count
    at: float
    size: Count
    how: Text = ""
    highs: Count = 0
    highs_there: Count = 0
    lows: Count = 0
    lows_there: Count = 0
    fill: Text = "none"
    repaired: Count = 0


class FlowLost(Message, frozen=True):
    """The server takes no more transfers of this flow, and the reason."""

    flow: Count
    reason: Text
