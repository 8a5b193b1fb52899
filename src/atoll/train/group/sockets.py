"""The TCP connections of a process group, found by their ports.

c10d cannot end a collective that waits for a stopped member, and the end of a process group waits for the
collective. Once its connections are shut, the collective fails at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator

_DESCRIPTORS = "/proc/self/fd"


def listening_ports() -> set[int]:
    """Return the ports at which this process listens; empty if the system does not list them."""
    return {own[1] for link, own, _ in _connections() if _listens(link)}


def listening_host(ports: Collection[int]) -> str:
    """Return the address at which this process listens at one of `ports`; empty if the system does not list
    it."""
    for link, own, _ in _connections():
        if own[1] in ports and _listens(link):
            return own[0]
    return ""


def shut(own_ports: Collection[int], peer_ports: Collection[int]) -> int:
    """Shut this process's connections that came in at one of `own_ports` or go to one of `peer_ports`; return
    their number."""
    count = 0
    for link, own, other in _connections():
        if other is not None and (own[1] in own_ports or other[1] in peer_ports):
            with contextlib.suppress(OSError):  # the other side has closed it already
                link.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _listens(link: socket.socket) -> bool:
    return bool(link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _connections() -> Iterator[tuple[socket.socket, tuple[str, int], tuple[str, int] | None]]:
    """Yield this process's TCP sockets, with the addresses of both ends. Each socket is valid until the next
    is taken."""
    try:
        descriptors = [int(name) for name in os.listdir(_DESCRIPTORS)]  # noqa: PTH208
    except OSError:
        return
    for descriptor in descriptors:
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            link = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # closed meanwhile
            continue
        with link:
            if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
                continue
            try:
                own = link.getsockname()
            except OSError:
                continue
            try:
                other = link.getpeername()
            except OSError:
                other = None
            yield link, own, other
