"""The TCP connections of a process group, by their ports: c10d cannot end a collective that waits for a
member that is stopped, and its end waits for the collective. Without its connections it fails at once."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator

_DESCRIPTORS = "/proc/self/fd"


def listening_ports() -> set[int]:
    """The ports at which this process listens; empty where the system does not say."""
    return {own[1] for link, own, _ in _connections() if _listens(link)}


def listening_host(ports: Collection[int]) -> str:
    """The address at which this process listens at one of these ports; empty where the system does not say
    it."""
    for link, own, _ in _connections():
        if own[1] in ports and _listens(link):
            return own[0]
    return ""


def shut(own_ports: Collection[int], peer_ports: Collection[int]) -> int:
    """End this process's connections that came in at one of its own ports, or go to one of the others';
    returns how many there were."""
    count = 0
    for link, own, other in _connections():
        if other is not None and (own[1] in own_ports or other[1] in peer_ports):
            with contextlib.suppress(OSError):  # the other side was faster
                link.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _listens(link: socket.socket) -> bool:
    return bool(link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _connections() -> Iterator[tuple[socket.socket, tuple[str, int], tuple[str, int] | None]]:
    """This process's TCP sockets, with both ends' addresses; each is good until the next is asked for."""
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
