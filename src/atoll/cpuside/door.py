"""Where the other devices of a node ask its CPU side themselves: for the optimizer's state, which a script
may want on any one of them, at any time.

It is no call that all devices make, and the leader may be anywhere in its script meanwhile: so each asks over
a connection of its own, to a socket that the CPU side listens at and whose name comes with Ready. The name is
in no directory, so nothing of it stays where a process is killed; processes of other users are not let in.
Source: docs/peers.md, "Several devices a node".
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from atoll.net.post import Post, PostClosedError
from atoll.wire.base import WireError
from atoll.wire.device import DeviceMessage, WantState

_BACKLOG = 64  # devices that knock at once
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: process, user, group


class Asked(NamedTuple):
    """Whoever wants the optimizer's state in the file `file` once the global iteration is `least`, as scripts
    count; `answer` says something to it, if it is there yet."""

    least: int
    file: int
    answer: Callable[[DeviceMessage], None]


class Door:
    """At the CPU side. `fileno` can be read from when somebody knocks, or asks."""

    def __init__(self) -> None:
        self.name = f"atoll-{os.getpid()}-{secrets.token_hex(8)}"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(f"\0{self.name}")
        self._listening.listen(_BACKLOG)
        self._listening.setblocking(False)
        self._posts: list[Post] = []
        self._epoll = select.epoll()
        self._epoll.register(self._listening, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def take(self) -> list[Asked]:
        """Let in who knocks; what is asked. Who is gone is forgotten, as who says anything else."""
        self._admit()
        asked: list[Asked] = []
        for post in list(self._posts):
            try:
                post.flush()
                while (got := post.receive()) is not None:
                    message, descriptors = got
                    if not isinstance(message, WantState) or len(descriptors) != 1:
                        for each in descriptors:
                            os.close(each)
                        raise PostClosedError
                    asked.append(Asked(message.least, descriptors[0], self._answering(post)))
            except (PostClosedError, WireError):
                self._forget(post)
        return asked

    def _admit(self) -> None:
        while True:
            try:
                link, _ = self._listening.accept()
            except BlockingIOError:
                return
            given = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(given)[1] != os.getuid():
                link.close()
                continue
            self._epoll.register(link, select.EPOLLIN)
            self._posts.append(Post(link))

    def _answering(self, post: Post) -> Callable[[DeviceMessage], None]:
        def answer(message: DeviceMessage) -> None:
            if post in self._posts:
                try:
                    post.send(message)
                except PostClosedError:
                    self._forget(post)

        return answer

    def _forget(self, post: Post) -> None:
        self._posts.remove(post)
        post.close()

    def close(self) -> None:
        for post in self._posts:
            post.close()
        self._posts = []
        self._epoll.close()
        self._listening.close()
