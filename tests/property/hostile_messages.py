"""Messages that are well formed and make no sense, mutated bytes, and servers that are fed with them by hand.

`Maker` draws every choice from one function, so that Hypothesis and a plain random generator both drive it.
"""

from __future__ import annotations

import functools
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, get_args

import msgspec
from msgspec import inspect

from atoll.core.errors import AtollError
from atoll.net.endpoint import SOON, Buffer, Client, Offered, Received, Server
from atoll.net.keys import Keys

Draw = Callable[[int, int], int]  # an integer from the first to the second, both included

MOST = 2**53 - 1
COUNTS = (0, 1, 2, 3, 4, 5, 7, 63, 1023, 4095, 4096, 2**31, 2**32, 2**52, MOST)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-320, 1e300, math.inf, -math.inf, math.nan, 3.0)
BYTES = (b"", b"\0", b"\1", b"\1" * 4, b"\xff" * 16, b"x" * 32, b"y" * 64, bytes(1168), b"\xc1", b"\x91" * 50)
DEEPEST = 6
_info = functools.cache(inspect.type_info)


class Maker:
    """Makes values of msgspec types. `words` are texts that mean something here: the run's name, roles."""

    def __init__(self, draw: Draw, words: tuple[str, ...] = ()) -> None:
        self._draw = draw
        self._words = (
            *words,
            "",
            "a",
            "node 1",
            "x" * 256,
            "tcp://127.0.0.1:1",
            "ä\u2028\x1b[2J\n",
            "bsp",
            "w",
        )

    def one_of(self, choices: Any) -> Any:
        return choices[self._draw(0, len(choices) - 1)]

    def message(self, union: Any) -> Any:
        """A message of one of the union's types, or of one type."""
        while True:
            try:
                return self.value(_info(self.one_of(get_args(union) or (union,))), 0)
            except ValueError:  # one that its own type refuses to be
                continue

    def value(self, kind: Any, depth: int) -> Any:
        if isinstance(kind, inspect.Metadata):
            return self.value(kind.type, depth)
        if isinstance(kind, inspect.StructType):
            given = {}
            for each in kind.fields:
                if each.required or self._draw(0, 2):
                    given[each.name] = self.value(each.type, depth + 1)
            return kind.cls(**given)
        if isinstance(kind, inspect.UnionType):
            return self.value(self.one_of(kind.types), depth)
        made = _PLAIN.get(type(kind))
        return self._collection(kind, depth) if made is None else made(self, kind)

    def _collection(self, kind: Any, depth: int) -> Any:
        if isinstance(kind, (inspect.TupleType, inspect.NamedTupleType)):
            types = kind.item_types if isinstance(kind, inspect.TupleType) else [f.type for f in kind.fields]
            parts = [self.value(each, depth + 1) for each in types]
            return tuple(parts) if isinstance(kind, inspect.TupleType) else kind.cls(*parts)
        count = 0 if depth > DEEPEST else self._draw(0, 2)
        least, most = getattr(kind, "min_length", None) or 0, getattr(kind, "max_length", None)
        count = max(count, least) if most is None else min(max(count, least), most)
        if isinstance(kind, inspect.DictType):
            return {
                self.value(kind.key_type, depth + 1): self.value(kind.value_type, depth + 1)
                for _ in range(count)
            }
        parts = [self.value(kind.item_type, depth + 1) for _ in range(count)]
        return tuple(parts) if isinstance(kind, inspect.VarTupleType) else parts

    def integer(self, kind: Any) -> int:
        low = kind.ge if kind.ge is not None else -MOST
        high = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else MOST)
        what = self._draw(0, 7)
        value = self.one_of(COUNTS) if what > 2 else self._draw(0, 20 if what else MOST)
        return min(max(value, low), high)

    def real(self, kind: Any) -> float:
        value = self.one_of(FLOATS)
        if kind.ge is not None and not value >= kind.ge:
            value = kind.ge
        return min(value, kind.le) if kind.le is not None else value

    def text(self, kind: Any) -> str:
        text: str = self.one_of(self._words)
        return text[: kind.max_length]

    def raw(self, kind: Any) -> bytes:
        value: bytes = self.one_of(BYTES)
        value = value[: kind.max_length]
        return value.ljust(kind.min_length or 0, b"z")

    def anything(self, _kind: Any = None) -> Any:
        return self.one_of(
            (None, True, 0, MOST, -1, 0.5, math.nan, "text", b"raw", [], [[1]], {}, {"lr": "x"})
        )

    def payload(self) -> memoryview | None:
        return self.one_of((None, memoryview(b""), memoryview(b"abc"), memoryview(bytes(4096))))


def _made(kind: type, make: Callable[[Maker, Any], Any]) -> tuple[type, Callable[[Maker, Any], Any]]:
    return kind, make


_PLAIN: dict[type, Callable[[Maker, Any], Any]] = dict(
    [
        _made(inspect.IntType, Maker.integer),
        _made(inspect.FloatType, Maker.real),
        _made(inspect.StrType, Maker.text),
        _made(inspect.BytesType, Maker.raw),
        _made(inspect.AnyType, Maker.anything),
        _made(inspect.BoolType, lambda maker, _: bool(maker._draw(0, 1))),
        _made(inspect.NoneType, lambda _maker, _kind: None),
        _made(inspect.LiteralType, lambda maker, kind: maker.one_of(kind.values)),
        _made(inspect.RawType, lambda maker, _: msgspec.Raw(msgspec.msgpack.encode(maker.anything()))),
    ]
)


def mutated(draw: Draw, raw: bytes) -> bytes:
    """`raw` with some bytes changed, cut, doubled, or put in."""
    made = bytearray(raw)
    for _ in range(draw(1, 4)):
        at, what = draw(0, max(0, len(made) - 1)), draw(0, 4)
        if what == 0 and made:
            made[at] = draw(0, 255)
        elif what == 1:
            del made[at:]
        elif what == 2:
            made[at:at] = bytes([draw(0, 255)])
        elif what == 3:
            made += made[at:]
        elif made:
            made[at] ^= 1 << draw(0, 7)
    return bytes(made)


def drawing(seed: int) -> Draw:
    return random.Random(seed).randint


class FedServer(Server):
    """A server that takes what a test feeds it, and keeps the last answers to each peer.

    Its descriptor to wake a poll can always be read from, so that no turn of a loop waits.
    """

    def __init__(self, name: str) -> None:
        super().__init__("tcp://127.0.0.1:0", None, limit=2**24, name=name)
        self.fed: deque[Received] = deque()
        self.answers: dict[bytes, deque[bytes]] = {}
        self.wake, self._waker = os.pipe()
        os.write(self._waker, b"x")

    def feed(self, peer: bytes, header: bytes, payload: memoryview | None = None) -> None:
        self.fed.append(Received(peer, header, payload))

    def receive(self, timeout: float) -> Received | None:
        return self.fed.popleft() if self.fed else None

    def offer(
        self, peer: bytes, header: bytes, payload: Buffer | None = None, *, copy: bool = True
    ) -> Offered:
        self.answers.setdefault(peer, deque(maxlen=50)).append(header)
        if len(self.answers) > 100:
            del self.answers[next(iter(self.answers))]
        return "gone" if peer.startswith(b"gone") else "sent"

    def close(self) -> None:
        if not self._closed:
            os.close(self.wake)
            os.close(self._waker)
        super().close()


class FedClient(Client):
    """A client that is connected to nothing: `liar` hears what it sends, and says what it receives."""

    def __init__(
        self,
        liar: Liar,
        address: str,
        keys: Keys | None,
        *,
        limit: int,
        name: str,
        reconnect: tuple[float, float] = SOON,
    ) -> None:
        self.fed: deque[tuple[bytes, memoryview | None]] = deque()
        self.liar = liar
        super().__init__(address, keys, limit=limit, name=name, reconnect=reconnect)
        self.wake = liar.wake
        liar.clients.append(self)

    def _open(self, keys: Keys | None, limit: int) -> None: ...

    @property
    def connected(self) -> bool:
        return True

    @property
    def losses(self) -> int:
        return 0

    def check(self) -> None: ...

    def send(self, header: bytes, payload: Buffer | None = None) -> None:
        self.liar.hear(self, header)

    def receive(self, timeout: float) -> tuple[bytes, memoryview | None] | None:
        if self.fed:
            return self.fed.popleft()
        if timeout:
            time.sleep(min(timeout, 0.0005))
        return None


class Liar:
    """Whatever clients connect to: it answers each message with up to three, of `likely` types, of any of
    `union`, or bytes that are none. `honest(header)` gives answers that it gives before it begins to lie."""

    def __init__(
        self,
        draw: Draw,
        union: Any,
        likely: tuple[type, ...] = (),
        words: tuple[str, ...] = (),
        encode: Callable[[Any], bytes] = msgspec.msgpack.encode,
        honest: Callable[[bytes], list[Any]] = lambda _header: [],
    ) -> None:
        self.maker, self._draw = Maker(draw, words), draw
        self._union, self._likely, self._encode = union, likely, encode
        self.honest, self.lies = honest, True
        self.clients: list[FedClient] = []
        self.said = 0
        self.wake, self._waker = os.pipe()
        os.write(self._waker, b"x")

    def connect(self, address: str, keys: Keys | None, **options: Any) -> FedClient:
        """What stands in the place of the class Client."""
        options.pop("wish", None)
        return FedClient(self, address, keys, **options)

    def hear(self, client: FedClient, header: bytes) -> None:
        client.fed += [(self._encode(each), None) for each in self.honest(header)]
        self.say(client, self._draw(0, 3) if self.lies else 0)

    def say(self, client: FedClient, count: int) -> None:
        for _ in range(count):
            self.said += 1
            what = self._draw(0, 9)
            if what == 0:
                client.fed.append((bytes(self._draw(0, 255) for _ in range(self._draw(0, 30))), None))
                continue
            kind = self.maker.one_of(self._likely) if self._likely and what < 7 else self._union
            raw = self._encode(self.maker.message(kind))
            client.fed.append((mutated(self._draw, raw) if what == 1 else raw, self.maker.payload()))

    def close(self) -> None:
        for each in self.clients:
            each.abandon()
        os.close(self.wake)
        os.close(self._waker)


def told_in_a_line(error: BaseException) -> bool:
    """Whether an error is Atoll's own, and says in one line that can be printed what is wrong."""
    line = str(error)
    return isinstance(error, AtollError) and bool(line) and line.isprintable() and len(line) < 10_000
