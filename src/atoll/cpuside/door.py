"""A socket at which each device of a node can ask the CPU side for the optimizer's state.

A script may want the state on one device alone, while the leader is anywhere in its script. So each device
asks over a connection of its own. The socket's name comes with Ready. It is an abstract name, so a killed
process leaves no file behind; processes of other users are not let in.
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

_BACKLOG = 64  # connections that wait to be accepted
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: process, user, group


class StateRequest(NamedTuple):
    """A request for the optimizer's state.

    Attributes:
        least: the global iteration, in the script's count, from which on the state is wanted.
        file: descriptor of the file for the state.
        answer: sends a message to the device, if it is still connected.
    """

    least: int
    file: int
    answer: Callable[[DeviceMessage], None]


class Door:
    """The CPU side's end; `fileno` becomes readable when a device connects or asks."""

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

    def take(self) -> list[StateRequest]:
        """Accept connections and return requests; drops devices that are gone or send something else."""
        self._admit()
        asked: list[StateRequest] = []
        for post in list(self._posts):
            try:
                post.flush()
                while (got := post.receive()) is not None:
                    message, descriptors = got
                    if not isinstance(message, WantState) or len(descriptors) != 1:
                        for each in descriptors:
                            os.close(each)
                        raise PostClosedError
                    asked.append(StateRequest(message.least, descriptors[0], self._answering(post)))
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
