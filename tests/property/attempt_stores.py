"""A member's memory in the model of attempts: buffers with tags and holds, values with clocks, residuals."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

CHUNKS = 2
EXTENT = 4  # elements of each chunk
DIGIT = 64  # a gradient of sample s is DIGIT**s in every element: a sum tells what is in it, and how often
FAILED = 90  # the sample number that a gradient of a backward that raised bears
GARBAGE = 91  # ... and what a broken ring writes
EDIT = 60  # an edit in iteration i adds DIGIT**(EDIT + i)
CLIP = 3  # the factor of every clip

Number = tuple[int, int]  # ring generation, pass


class WrongError(AssertionError):
    """What must not happen."""


def digits(total: int) -> dict[int, int]:
    """Return which samples a sum has, and how often."""
    found, place = {}, 0
    while total:
        total, digit = divmod(total, DIGIT)
        if digit:
            found[place] = digit
        place += 1
    return found


def owned(members: Sequence[int], member: int) -> tuple[int, int]:
    """Return the run of each chunk that a member keeps, or speaks for."""
    rank, world = members.index(member), len(members)
    return EXTENT * rank // world, EXTENT * (rank + 1) // world


class Buffer:
    """Memory of one kind: elements by chunk and place. `tag` says what they are."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.data: dict[tuple[int, int], int] = {}
        self.tag: Hashable = None
        self.held = False

    def write(self, tag: Hashable, chunk: int, start: int, values: Sequence[int]) -> None:
        """Write a run. The first run of another tag drops what was there; held memory is never written."""
        if self.held:
            raise WrongError(f"{self.kind} of {self.tag} is held, and {tag} is written there")
        if tag != self.tag:
            self.data, self.tag = {}, tag
        for place, value in enumerate(values, start):
            self.data[chunk, place] = value

    def read(self, tag: Hashable, chunk: int, start: int, stop: int) -> list[int]:
        """Return a run, which must be there."""
        if tag != self.tag:
            raise WrongError(f"{self.kind} has {self.tag}, and {tag} is read")
        missing = [place for place in range(start, stop) if (chunk, place) not in self.data]
        if missing:
            raise WrongError(f"{self.kind} of {tag} lacks {missing} of chunk {chunk}")
        return [self.data[chunk, place] for place in range(start, stop)]

    def drop(self) -> None:
        """Let the memory go."""
        if self.held:
            raise WrongError(f"{self.kind} of {self.tag} is held, and dropped")
        self.data, self.tag = {}, None


class Values:
    """VALUES: each chunk at a clock of its own, since movers write chunk by chunk."""

    def __init__(self) -> None:
        self.data: dict[tuple[int, int], int] = {}
        self.clock = [0] * CHUNKS
        self.in_pass: list[int] | None = None  # the clocks, from the start of forward to the end of backward

    def write(self, chunk: int, clock: int, start: int, values: Sequence[int]) -> None:
        """Write a run of this clock; the first one of a new clock drops the chunk's other runs."""
        if self.in_pass is not None and self.clock[chunk] == self.in_pass[chunk]:
            old = [self.data.get((chunk, place), value) for place, value in enumerate(values, start)]
            if clock != self.clock[chunk] or old != list(values):
                raise WrongError(f"VALUES of chunk {chunk} change between forward and the end of backward")
        if self.clock[chunk] != clock:
            self.data = {key: value for key, value in self.data.items() if key[0] != chunk}
            self.clock[chunk] = clock
        for place, value in enumerate(values, start):
            self.data[chunk, place] = value

    def run(self, chunk: int, start: int, stop: int) -> list[int] | None:
        """Return a run, or None where a part of it is not here."""
        found = [self.data.get((chunk, place)) for place in range(start, stop)]
        return None if None in found else [value for value in found if value is not None]


class Residuals:
    """Error feedback at one member, of a codec that drops every second element.

    `add` changes nothing; `settle` makes the residual what was added and not sent, if this copy counted.
    """

    def __init__(self, *, eager: bool, lend: bool) -> None:
        self.kept: dict[tuple[int, int], int] = {}
        self._eager, self._lend = eager, lend
        self._added: dict[
            Hashable, tuple[Number, dict[tuple[int, int], int], dict[tuple[int, int], int]]
        ] = {}

    def encode(
        self, exchange: Hashable, number: Number, chunk: int, start: int, values: Sequence[int], odd: int
    ) -> list[int]:
        """Return the code of a run: the same for the same number."""
        mine = self._added.get(exchange)
        if mine is None or mine[0] != number:
            mine = self._added[exchange] = (number, {}, {})
        _, rest, lent = mine
        carried = {
            key
            for other, (_, _, taken) in self._added.items()
            if other != exchange and self._lend
            for key in taken
        }
        code = []
        for place, value in enumerate(values, start):
            key = chunk, place
            if key not in rest and key not in carried:
                lent[key] = self.kept.get(key, 0)
            residual = lent.get(key, 0)  # the same number has the same code, whatever was settled meanwhile
            sent = value + residual if (place + odd + chunk) % 2 else 0
            rest[key] = value + residual - sent
            code.append(sent)
            if self._eager:
                self.kept[key] = rest[key]
        return code

    def settle(self, exchange: Hashable, counted: Number | None) -> None:
        """Change the residual once, by which attempt counted."""
        number, rest, lent = self._added.pop(exchange, (None, {}, {}))
        if self._eager or number is None or number != counted:
            return
        for key, value in rest.items():
            before = self.kept.get(key, 0)
            self.kept[key] = (before - lent.get(key, 0) if self._lend else 0) + value

    def settle_all(self, counted: dict[Hashable, Number]) -> None:
        """Settle what a dead member had not: what its copies dropped is lost with it."""
        for exchange in list(self._added):
            self.settle(exchange, counted.get(exchange))
