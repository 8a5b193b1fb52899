"""The loop of a node's CPU side: it handles messages of worker and nodes, and carries out the decisions.

A second thread computes. The decisions (`peers.node`) know contributions by their keys; payloads, sockets and
the clock are here. The worker's count of iterations includes those before a loaded checkpoint, and the
decisions' count does not.
Source: docs/peers.md.
"""

from __future__ import annotations

import select

from atoll.core.errors import RunError
from atoll.cpuside.calculating import Work
from atoll.cpuside.service import Service
from atoll.net.post import Post, PostClosedError
from atoll.wire import device as d

_LONGEST_WAIT = 0.25  # seconds, for the worker's first message
_ENDED = "the worker has closed its socket"


class CpuSideProcess:
    """Serves the worker at the other end of `post` until it closes (PostClosedError).

    Args:
        post: the connection to the worker.
        watch: a descriptor that becomes readable when the worker's process ends; -1 for none.

    Attributes:
        service: the CPU side's parts; None before the worker's Begin.
    """

    def __init__(self, post: Post, watch: int) -> None:
        self._post, self._watch = post, watch
        self._epoll = select.epoll()
        self._work = Work()
        for each in (post.fileno(), self._work.fileno(), watch):
            if each >= 0:
                self._epoll.register(each, select.EPOLLIN)
        self._post_full = False
        self.service: Service | None = None

    def __enter__(self) -> CpuSideProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.service is not None:
            self.service.close()
        else:
            self._work.close()

    def run(self) -> None:
        """Serve until an error ends the run; PostClosedError means that the worker is gone."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for events, and handle them."""
        self._wait()
        if self._watch >= 0 and select.select([self._watch], [], [], 0)[0]:
            raise PostClosedError(_ENDED)
        self._post.flush()
        while (got := self._post.receive()) is not None:
            self._handle(*got)
        if self.service is not None:
            self.service.go_on()

    def _wait(self) -> None:
        if self._post.is_full != self._post_full:
            self._post_full = self._post.is_full
            events = select.EPOLLIN | (select.EPOLLOUT if self._post_full else 0)
            self._epoll.modify(self._post.fileno(), events)
        if self.service is not None:
            self.service.idle(self._epoll.fileno())
        else:
            select.select([self._epoll], [], [], _LONGEST_WAIT)

    def _handle(self, message: d.DeviceMessage, descriptors: list[int]) -> None:
        if isinstance(message, d.Begin):
            self.service = Service(message, self._post, self._work, self._epoll)
        elif self.service is None:
            raise RunError("the worker says Begin before anything else")
        else:
            self.service.desk.handle(message, descriptors)
