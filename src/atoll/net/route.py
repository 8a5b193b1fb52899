"""The address of this machine on the way to another one."""

from __future__ import annotations

import socket

from atoll.net.endpoint import host_and_port


def own_address(address: str) -> str:
    """Return this machine's own IP address on the way to `address` ("tcp://HOST:PORT"), at which others on
    that way reach it. Empty if that is not known, and for a path. Nothing is sent."""
    place = host_and_port(address)
    if place is None:
        return ""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # of a datagram socket: it only chooses the route
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""
