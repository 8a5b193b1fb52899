"""What a shard hears: a message, from whom, and who takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from atoll.wire.messages import Hello

NOT_SET_UP = "this shard is not set up yet"
Life: TypeAlias = tuple[int, int]  # a worker, and its incarnation


@dataclass(frozen=True)
class Heard:
    """A message on the connection `peer`, of whom `hello` says who it is."""

    peer: bytes
    hello: Hello
    message: Any
    payload: memoryview | None = None

    @property
    def worker(self) -> int:
        """The worker's number."""
        return self.hello.worker

    @property
    def life(self) -> Life:
        """The worker, and its incarnation."""
        return self.hello.worker, self.hello.incarnation


@dataclass(frozen=True)
class Handler:
    """`handle` returns why a message of a peer in `role` ("": any) is refused, or nothing; other peers are
    told `wrong`."""

    handle: Callable[[Heard], str]
    wrong: str = NOT_SET_UP
    role: str = "worker"

    def __call__(self, heard: Heard) -> str:
        return self.handle(heard) if self.role in ("", heard.hello.role) else self.wrong
