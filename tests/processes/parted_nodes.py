"""What lies between the nodes of a run on one machine, and can be parted: each is reached through a door."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping

import psutil

_LOOK_SECONDS = 0.02  # between looks whether the sides are joined again


class Doors:
    """A port for each of `count` nodes, at `addresses[node]`, which the others are told in place of its own.

    `part` makes two sides. No byte passes from one to the other until they are joined again: then what was
    on its way comes, as TCP would send it again. With `breaks`, connections are hung up instead, and no new
    one is made, on either side. Who comes to a door is found by whose process has the other end.
    """

    def __init__(self, count: int) -> None:
        self._doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.addresses = [f"tcp://127.0.0.1:{door.getsockname()[1]}" for door in self._doors]
        self._processes: dict[int, psutil.Process] = {}
        self._links: list[tuple[socket.socket, frozenset[int]]] = []
        self._side: frozenset[int] = frozenset()
        self._breaks = self._over = False
        self.held = 0  # bytes that came while they could not pass

    def lead_to(self, processes: Mapping[int, int]) -> None:
        """The nodes have these processes, by their ids; each listens at one port."""
        self._processes = {node: psutil.Process(pid) for node, pid in processes.items()}
        for node, process in self._processes.items():
            found = process.net_connections("tcp4")
            (port,) = [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]
            threading.Thread(target=self._accept, args=(node, port), daemon=True).start()

    def part(self, side: Collection[int], *, breaks: bool = False) -> None:
        self._breaks, self._side = breaks, frozenset(side)
        if breaks:
            _hang_up(link for link, ends in self._links if self._is_cut(ends))

    def join(self) -> None:
        self._side = frozenset()

    def close(self) -> None:
        self._over = True
        _hang_up([*self._doors, *(link for link, _ in self._links)])
        for door in self._doors:
            door.close()

    def _is_cut(self, ends: frozenset[int]) -> bool:
        return bool(ends & self._side) and not ends <= self._side and not self._over

    def _accept(self, node: int, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, (_, source) = self._doors[node].accept()
                if self._breaks and self._side:  # each side has its connections
                    near.close()
                    continue
                ends = frozenset({node, self._who_has(source)})
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except ConnectionRefusedError:
                    near.close()
                    continue
                self._links += [(near, ends), (far, ends)]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(*pair, ends), daemon=True).start()

    def _who_has(self, source: int) -> int:
        """The node whose process has a connection from this port; -1 where it is gone again."""
        for node, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(each.laddr.port == source for each in process.net_connections("tcp4")):
                    return node
        return -1

    def _pass(self, source: socket.socket, sink: socket.socket, ends: frozenset[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.held += len(data) * self._is_cut(ends)
                while self._is_cut(ends):
                    time.sleep(_LOOK_SECONDS)
                sink.sendall(data)
        _hang_up([sink])  # who ends here ends there


def _hang_up(links: Iterable[socket.socket]) -> None:
    for link in links:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
