"""Detect workers of a ring whose scripts wait for each other at inconsistent places.

Each worker numbers the ring's collectives for itself. A worker that has waited for half a second writes the
number of its collective and its place in the script (`core/stands.py`) to the store in which the ring has
met. Then it reads the places of the others. Two workers in one collective whose places are inconsistent would
wait for ever. The worker that detects them writes a line with all places to the store, and all workers end
with that line. A slow worker is still at a lower number, so it never matches.

A worker whose script ends while others go on records its place in the store (`leave`).

A thread talks to the store, because a lost store must not hold up a ring that no longer needs it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta
from torch.distributed.distributed_c10d import PrefixStore, Store

from atoll.core.errors import AtollError, MismatchError
from atoll.core.stands import (
    MOST_BYTES,
    Stand,
    StandError,
    are_consistent,
    decode_stand,
    describe_mismatch,
    encode_stand,
)
from atoll.train.api.ending import see_off

_QUIET_SECONDS = 0.5  # of waiting, before a worker writes its place to the store
_LOOK_SECONDS = 0.1  # between looks at the store
_ALL_SECONDS = 0.5  # for all to have written, once two inconsistent places are found
_HEARD_SECONDS = 1.0  # for all to have read the line, before the first of them may end
_LOST_SECONDS = 2.0  # for the store to answer, when another worker is gone
_MOST_LINE = 2**14  # bytes


class _Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The record that a worker writes: the number of its collective, and its encoded Stand."""

    number: Annotated[int, Meta(ge=0, lt=2**53)]
    stand: Annotated[bytes, Meta(max_length=MOST_BYTES)]


_decoder = msgspec.msgpack.Decoder(_Word)


class Standing:
    """One worker's place in its script, compared with the other members of its ring.

    The caller brackets each collective with `begin` and `end`, and calls `look` while the collective waits.

    Args:
        store: the store in which the ring has met.
        rank: this worker's rank in the ring.
        names: the workers' names, by rank.
        timeout: the deadline of a wait, in seconds.
    """

    def __init__(self, store: Store, rank: int, names: tuple[int, ...], timeout: float) -> None:
        self._store, self._rank, self._names = PrefixStore("stands", store), rank, names
        self._quiet = min(_QUIET_SECONDS, timeout / 4)
        self._number, self._since = 0, 0.0
        self._where: Callable[[], Stand | None] | None = None  # None outside a collective
        self._inquiry: _Inquiry | None = None  # the inquiry for the collective under way
        self._last: _Inquiry | None = None
        self.mismatch: MismatchError | None = None  # the error with which this ring has ended
        self.ended: dict[int, Stand] = {}  # places at which scripts had ended, by name, at the last `known`

    def begin(self, number: int, where: Callable[[], Stand | None]) -> None:
        """Begin a collective. The waiting thread calls `where` once the collective has waited for long."""
        self._number, self._where, self._since = number, where, time.monotonic()

    def end(self) -> None:
        """End the collective, finished or failed."""
        self._where = None
        if self._inquiry is not None:
            self._inquiry.stop()
            self._inquiry = None

    def look(self) -> None:
        """Raise MismatchError if this worker waits in vain."""
        if self._where is None:
            return
        if self._inquiry is None:
            if time.monotonic() - self._since < self._quiet:
                return
            if self._last is not None and self._last.is_alive:
                return  # the store does not answer: one thread that waits for it is enough
            self._inquiry = self._last = self._ask(self._number, self._where())
        if self._inquiry.line:
            self.mismatch = MismatchError(self._inquiry.line)
            raise self.mismatch

    def known(self) -> MismatchError | None:
        """Return the mismatch with which the ring ended, if a mismatch ended it; else None.

        Call this after the loss of another worker. Also fills `ended` with the places of workers that have
        ended.
        """
        if self.mismatch is None:
            inquiry = self._ask(0, None)
            inquiry.looked.wait(_LOST_SECONDS)
            inquiry.stop()
            self.ended = inquiry.ended
            if inquiry.line:
                self.mismatch = MismatchError(inquiry.line)
        return self.mismatch

    def leave(self, stand: Stand) -> None:
        """Record that this worker's script ends at `stand`. Others read the record when they miss this
        worker.
        """

        def write() -> None:
            with contextlib.suppress(RuntimeError, AtollError):  # the store is gone: nobody reads there
                self._store.set(f"ended/{self._rank}", encode_stand(stand))  # type: ignore[arg-type]

        thread = threading.Thread(target=write, name="atoll-stands", daemon=True)
        thread.start()
        see_off(thread, 0.0)
        thread.join(_LOST_SECONDS)

    def _ask(self, number: int, stand: Stand | None) -> _Inquiry:
        return _Inquiry(self._store, self._rank, self._names, number, stand)


class _Inquiry:
    """A thread that writes this worker's place to the store and reads the others' places, until `stop`.

    Without a Stand the thread writes nothing, and reads `ended` once. `line` names all places once a mismatch
    is known. `looked` is set after the first reading.
    """

    def __init__(
        self, store: Store, rank: int, names: tuple[int, ...], number: int, stand: Stand | None
    ) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._number, self._stand = number, stand
        self.line = ""
        self.ended: dict[int, Stand] = {}
        self.looked = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atoll-stands", daemon=True)
        self._thread.start()
        see_off(self._thread, 0.0)

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        try:
            self._inquire()
        except (RuntimeError, AtollError):  # the store is gone: the wait's own deadline ends it
            pass
        finally:
            self.looked.set()

    def _inquire(self) -> None:
        if self._stand is not None:
            word = msgspec.msgpack.encode(_Word(self._number, encode_stand(self._stand)))
            self._store.set(f"at/{self._rank}", word)  # type: ignore[arg-type]
        found_at: float | None = None
        while True:
            raw = self._read("line")
            if raw:
                if self._stand is not None:
                    self._wait_for_all()
                line = raw[:_MOST_LINE].decode(errors="replace")
                self.line = line if line.isprintable() else repr(line)
                return
            if self._stand is None and not self.looked.is_set():
                self.ended = self._read_ended()
            self.looked.set()
            if self._stand is not None:
                stands = self._stands(self._stand)
                if not are_consistent(stands.values()):
                    now = time.monotonic()
                    found_at = now if found_at is None else found_at
                    if len(stands) == len(self._names) or now - found_at > _ALL_SECONDS:
                        found = describe_mismatch(dict(sorted(stands.items())))
                        self._store.compare_set("line", "", found)  # one line for all: the first counts
                        continue
            if self._over.wait(_LOOK_SECONDS):
                return

    def _stands(self, own: Stand) -> dict[int, Stand]:
        """Return the places of the workers in this worker's collective, by name."""
        found = {self._names[self._rank]: own}
        for rank, name in enumerate(self._names):
            raw = b"" if rank == self._rank else self._read(f"at/{rank}")
            if not raw:
                continue
            try:
                word = _decoder.decode(raw)
                if word.number == self._number:
                    found[name] = decode_stand(word.stand)
            except (msgspec.DecodeError, StandError):
                continue  # an unreadable record is no evidence
        return found

    def _read_ended(self) -> dict[int, Stand]:
        """Return the places of workers whose scripts have ended, by name."""
        found = {}
        for rank, name in enumerate(self._names):
            raw = b"" if rank == self._rank else self._read(f"ended/{rank}")
            with contextlib.suppress(StandError):
                if raw:
                    found[name] = decode_stand(raw)
        return found

    def _read(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def _wait_for_all(self) -> None:
        """Wait until all workers have read the line: the store may vanish with the worker that holds it."""
        until = time.monotonic() + _HEARD_SECONDS
        heard = self._store.add("heard", 1)
        while heard < len(self._names) and time.monotonic() < until and not self._over.wait(0.02):
            heard = self._store.add("heard", 0)
