"""A message that a shard received, and the handler that takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from atoll.wire.messages import Hello

NOT_SET_UP = "this shard is not set up yet"
Life: TypeAlias = tuple[int, int]  # a worker, and its incarnation


@dataclass(frozen=True)
class Heard:
    """A message received on the connection `peer`, with the `hello` that the peer sent before."""

    peer: bytes
    hello: Hello
    message: Any
    payload: memoryview | None = None

    @property
    def worker(self) -> int:
        """The worker's rank."""
        return self.hello.worker

    @property
    def life(self) -> Life:
        """The worker's rank and incarnation."""
        return self.hello.worker, self.hello.incarnation


@dataclass(frozen=True)
class Handler:
    """A message handler for peers in `role` ("": any). `handle` returns why a message is refused, or an empty
    string. Peers in other roles are refused with `wrong`."""

    handle: Callable[[Heard], str]
    wrong: str = NOT_SET_UP
    role: str = "worker"

    def __call__(self, heard: Heard) -> str:
        return self.handle(heard) if self.role in ("", heard.hello.role) else self.wrong
