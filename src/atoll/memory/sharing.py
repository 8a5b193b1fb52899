"""A model's payloads over the members of a group: its own lie in a member's store, the others' are fetched.

All that changes payloads of several members at once is a **sync point**: the gradients' sum, clipping, a
step, a load, `sync`. Members count them alike, and who asks for a payload says at which count he stands: an
owner that is not there yet answers when it is. So members may use chunks in any order between two of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from atoll.chunks import Chunk
from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.memory.arena import Arena, Block
from atoll.memory.members import Members
from atoll.memory.payloads import GRADIENT, VALUES, Key
from atoll.memory.store import Store
from atoll.moves.search import STAGES

_DEADLINE = 600.0  # seconds, for an owner that is behind, and for a place in host memory to be free
_STEPS = 2**20  # steps are compared modulo this: their sum over the members is exact


class _Stage:
    """A place in host memory where another member's values arrive, and what it holds: (chunk, count)."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.holds: tuple[int, int] | None = None


class Sharing:
    """What one member knows of the group: `owners[i]` owns chunk i. It is the `Payloads` of all chunks.

    `store` holds what is this member's own, and all gradients until they are summed. Of another member's
    chunk, values alone can be pinned: they arrive in `staging_bytes` of host memory, and what is written to
    them is dropped, since their owner's script writes the same.
    """

    def __init__(
        self,
        members: Members,
        chunks: Sequence[Chunk],
        names: Sequence[str],
        owners: Sequence[int],
        store: Store,
        staging_bytes: int,
    ) -> None:
        self.members, self.store, self.rank = members, store, members.rank
        self._owners, self._names = list(owners), list(names)
        self._sizes: dict[Key, tuple[int, torch.dtype]] = {}  # of what is not in the store
        self.steps = 0
        self.count = 0  # of sync points
        self._changed = [0] * len(chunks)  # the count at which a chunk's values were stepped last
        # Others' chunks that the script has written to since all were last told what scripts have written:
        self._written: set[int] = set()
        self._condition = threading.Condition()
        self._is_closed = False
        self._stages: list[_Stage] = []
        self.staging: Arena | None = None
        if staging_bytes:
            self.staging = Arena(staging_bytes, staging_bytes // STAGES, "cpu", "host", poison=False)
            self.staging.lock_pages()
            self._stages = [_Stage(self.staging.take()) for _ in range(STAGES)]
        # With a disk each payload in use takes room that a step may wait for: one is read at a time.
        self._reading: AbstractContextManager[object] = (
            nullcontext() if store.disk is None else threading.Lock()
        )
        self._latest: tuple[Key, int, Tensor] | None = None  # what was fetched last into memory of its own
        # Set by whoever makes them:
        self.came: Callable[[int], None] = lambda _: None  # told the bytes of what was fetched
        self.wait_stepped: Callable[[int], None] = lambda _: None
        self.gradient: Callable[[int], Tensor]  # a copy of an own chunk's, as the others are to see it
        self.described: Callable[[int], bytes | None] = lambda _: None  # an own chunk's state, in a word

    def is_mine(self, chunk: int) -> bool:
        """Whether this member owns it."""
        return self._owners[chunk] == self.rank

    def owner(self, chunk: int) -> int:
        """The member that does."""
        return self._owners[chunk]

    def words(self, chunk: int) -> str:
        """`chunk 7 ('h.3.mlp.weight')`."""
        return f"chunk {chunk} ({self._names[chunk]!r})"

    # Payloads

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        if self._is_here(key):
            self.store.add(key, numel, dtype)
        else:
            self._sizes[key] = numel, dtype

    def pin(
        self, key: Key, *, writes: bool = False, overwrites: bool = False
    ) -> AbstractContextManager[Tensor]:
        if self._is_here(key):
            return self.store.pin(key, writes=writes, overwrites=overwrites)
        return self._staged(key, arrives=not (writes or overwrites))

    def drop(self, key: Key) -> None:
        if self._is_here(key):
            self.store.drop(key)

    def _is_here(self, key: Key) -> bool:
        return key[1] == GRADIENT or self.is_mine(key[0])

    @contextmanager
    def _staged(self, key: Key, *, arrives: bool) -> Iterator[Tensor]:
        """Another member's values; without `arrives` a place to write to, which nobody reads."""
        chunk, kind = key
        assert kind == VALUES
        numel, dtype = self._sizes[key]
        wanted = chunk, self.count
        stage = self._take_stage(wanted)
        try:
            memory = stage.block.view(numel, dtype)
            if not arrives:
                stage.holds = None
            elif stage.holds != wanted:
                stage.holds = None
                self._fetch(key, memory)
                stage.holds = wanted
            yield memory
        finally:
            with self._condition:
                self._stages.append(stage)
                self._condition.notify_all()

    def _take_stage(self, wanted: tuple[int, int]) -> _Stage:
        with self._condition:
            if not self._condition.wait_for(lambda: self._stages, _DEADLINE):
                raise DeadlineError(
                    f"waited {_DEADLINE:.0f} s for room in which {self.words(wanted[0])} of member "
                    f"{self.owner(wanted[0])} is to arrive"
                )
            stage = next((each for each in self._stages if each.holds == wanted), self._stages[0])
            self._stages.remove(stage)
            return stage

    # What others own

    def fetched(self, key: Key, numel: int, dtype: torch.dtype) -> Tensor:
        """Another member's payload, (numel,), in memory of its own; not to be written to. The latest is kept,
        for whoever goes through a chunk's parameters."""
        latest, count = self._latest, self.count
        if latest is None or latest[:2] != (key, count):
            into = torch.empty(numel, dtype=dtype)
            self._fetch(key, into)
            self._latest = latest = (key, count, into)
        return latest[2]

    def _fetch(self, key: Key, into: Tensor) -> None:
        chunk, kind = key
        what = f"{self.words(chunk)} as of step {self.steps}"
        if kind != VALUES:
            what = f"{kind} of {what}"
        self.members.fetch(self.owner(chunk), key, self.count, into, what)
        self.came(into.nbytes)

    def description(self, chunk: int) -> bytes:
        """What its owner's `described` gives; empty where nothing is kept for it."""
        size = self.fetched((chunk, "described.size"), 1, torch.int64)
        if not int(size):
            return b""
        word = self.fetched((chunk, "described"), int(size), torch.uint8)
        return word.numpy().tobytes()

    # What others ask

    @contextmanager
    def read(self, key: Key, count: int) -> Iterator[Tensor]:
        """A payload of this member's, flat, as it is when `count` sync points are past: on a thread of
        `Members`, which waits for that, and for the chunk's step. Raises UserError for what is not here."""
        chunk, kind = key
        if not 0 <= chunk < len(self._owners) or not self.is_mine(chunk):
            raise UserError(
                f"member {self.rank} was asked for the {kind} of chunk {chunk}, which it does not own"
            )
        self._wait_until(count, chunk)
        if kind == GRADIENT:
            yield self.gradient(chunk)
            return
        self.wait_stepped(chunk)
        if kind in ("described", "described.size"):
            word = self.described(chunk) or b""
            yield torch.tensor([len(word)]) if kind != "described" else _bytes(word)
            return
        if not self.store.has(key):
            raise UserError(f"member {self.rank} was asked for the {kind} of chunk {chunk}, and has none")
        with self._reading, self.store.pin(key) as payload:
            yield payload

    def _wait_until(self, count: int, chunk: int) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: self.count >= count or self._is_closed, _DEADLINE):
                raise DeadlineError(
                    f"member {self.rank} was asked for {self.words(chunk)} as {count} sync points leave it, "
                    f"and was at {self.count} for {_DEADLINE:.0f} s"
                )
            if self._is_closed:
                raise RunError(f"member {self.rank} has gone: it holds its part of the model no more")
            if count < self._changed[chunk]:
                raise RunError(
                    f"member {self.rank} was asked for {self.words(chunk)} as {count} sync points left it, "
                    f"and it was stepped at {self._changed[chunk]}: optimizer.step() came while it was used"
                )

    # Sync points

    def written(self, chunk: int) -> None:
        """The script has written to this chunk's values. What it writes to another's is dropped here."""
        if not self.is_mine(chunk):
            self._written.add(chunk)

    def check_written(self, chunks: Sequence[int]) -> None:
        """Raise UserError where the script has written to another's chunk, the latest or any of `chunks`,
        and the members have not met since: what it would use next may be what was there before."""
        for chunk in (*chunks, *self._written):
            raise UserError(
                f"the script has written to {self.words(chunk)}, which member {self.owner(chunk)} owns, and "
                "trains on before the members have met: after such writes call session.barrier(), or sync() "
                "of what memory.fit gave, on all members"
            )

    def passed(self, changed: Sequence[int] = (), *, stepped: bool = False, published: bool = False) -> None:
        """A sync point is past, at which the values of `changed` chunks were stepped; or where what scripts
        have written was `published`."""
        with self._condition:
            if stepped or published:
                self._written.clear()
            self.count += 1
            self.steps += stepped
            for chunk in changed:
                self._changed[chunk] = self.count
            self._latest = None
            self._condition.notify_all()

    def agree(self, told: Sequence[float], what: str) -> list[float]:
        """The sums of what all members tell, at the same step. Raises RunError where they are not."""
        step = self.steps % _STEPS
        vector = torch.tensor([float(step), *told], dtype=torch.float64)
        self.members.sum(vector, what)
        off = float(vector[0]) / self.members.count - step
        if off:
            raise RunError(
                f"{what}: the members are at different steps (this one at {self.steps}, on average "
                f"{self.steps + off:g}); each must call optimizer.step() equally often"
            )
        return vector[1:].tolist()

    def close(self) -> None:
        """Others are answered no more."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self.members.close()


def _bytes(word: bytes) -> Tensor:
    return torch.frombuffer(bytearray(word), dtype=torch.uint8)
