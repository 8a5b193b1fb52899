"""The members of a group as threads of one process, for tests of memory that is shared between them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from atoll.core.errors import DeadlineError, RunError
from atoll.core.stands import Stand
from atoll.memory.members import Read, Waitable
from atoll.memory.payloads import Key
from atoll.moves.owners import Groups

T = TypeVar("T")
SECONDS = 60.0  # for everything that a member waits for
_GONE = re.compile("has gone|was let go of")  # what others say to a member that failed
_SERVING = 2  # threads that answer a member's others


class Group:
    """`count` members of one process. `Member(group, rank)` is one of them, for the thread that calls it."""

    def __init__(self, count: int, seconds: float = SECONDS, replicas: Groups = ()) -> None:
        self.count, self.seconds, self.replicas = count, seconds, replicas
        self.members: list[Member] = []
        self._words: list[object] = [None] * count
        self._whats = [""] * count
        self._barrier = threading.Barrier(count)
        self.members = [Member(self, rank) for rank in range(count)]

    def meet(self, rank: int, word: T, what: str, *, alike: bool = True) -> list[T]:
        """Every member's word. Where all are to be `alike`, they must meet for the same."""
        self._words[rank], self._whats[rank] = word, what
        self._wait(what)
        words = list(self._words)
        whats = set(self._whats)
        self._wait(what)
        if alike and len(whats) > 1:
            raise RunError(f"members are in different places: {sorted(whats)}")
        return words  # type: ignore[return-value]

    def _wait(self, what: str) -> None:
        try:
            self._barrier.wait(self.seconds)
        except threading.BrokenBarrierError:
            raise RunError(f"{what}: a member has gone, or has not come in {self.seconds:g} s") from None

    def end(self) -> None:
        """A member has gone: whoever waits for it is told."""
        self._barrier.abort()


class Member:
    """One of a group's members, as `memory.members.Members` has them."""

    def __init__(self, group: Group, rank: int) -> None:
        self.rank, self.count, self._group = rank, group.count, group
        self.replicas = group.replicas
        self._read: Read | None = None
        self._serving = threading.Event()
        self._service = ThreadPoolExecutor(_SERVING, thread_name_prefix=f"serving-{rank}")
        self.bytes_sent = 0

    def serve(self, read: Read) -> None:
        self._read = read
        self._serving.set()

    def fetch(self, holder: int, key: Key, version: int, into: Tensor, what: str) -> None:
        other = self._group.members[holder]
        try:
            asked = other._service.submit(other.answer, key, version, into, what)
        except RuntimeError:
            raise RunError(f"member {holder}'s {what}: a member has gone") from None
        if not wait([asked], timeout=self._group.seconds).done:
            raise DeadlineError(f"waited {self._group.seconds:g} s for member {holder}'s {what}")
        asked.result(timeout=0)

    def answer(self, key: Key, version: int, into: Tensor, what: str) -> None:
        """On a service thread of this member's."""
        if not self._serving.wait(self._group.seconds):
            raise DeadlineError(f"member {self.rank} does not serve: {what}")
        assert self._read is not None
        with self._read(key, version) as payload, torch.no_grad():
            assert payload.dtype == into.dtype
            into.copy_(payload[: into.numel()])

    def sum(self, tensor: Tensor, what: str) -> None:
        assert tensor.is_contiguous()
        parts = self._group.meet(self.rank, tensor.clone(), what, alike=False)
        assert len({part.shape for part in parts}) == 1, what
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(total)

    def meet(self, tensor: Tensor, what: str, where: Callable[[], Stand]) -> None:
        self.sum(tensor, what)

    def exchange(
        self, tensor: Tensor, sends: Sequence[int], into: Tensor, takes: Sequence[int], what: str
    ) -> Waitable:
        assert tensor.is_contiguous()
        assert tensor.numel() == sum(sends)
        assert into.numel() == sum(takes)
        self.bytes_sent += tensor.nbytes - sends[self.rank] * tensor.itemsize
        all_sends = self._group.meet(self.rank, list(sends), what)
        assert [each[self.rank] for each in all_sends] == list(takes)
        sent = self._group.meet(self.rank, tensor.clone(), what)
        pieces = [torch.split(*each)[self.rank] for each in zip(sent, all_sends, strict=True)]
        into.copy_(torch.cat(pieces))
        if sends[self.rank] or not sum(takes):  # between groups it is what is added to
            tensor.fill_(float("nan"))  # whose parts nobody is to read as they were
        return _Done()

    def gather(self, word: bytes, what: str) -> list[bytes]:
        return self._group.meet(self.rank, word, what, alike=False)

    def close(self) -> None:
        self._service.shutdown(wait=False)


class _Done(Waitable):
    def wait(self) -> None:
        """It has ended."""


def together(
    count: int, body: Callable[[Member], T], seconds: float = 4 * SECONDS, replicas: Groups = ()
) -> list[T]:
    """What `body(member)` gives for each of `count` members, each on a thread of its own; the first error
    that was not the others' is raised. `replicas`: the groups that hold one each."""
    group = Group(count, replicas=replicas)
    found: list[Future[T]] = [Future() for _ in range(count)]

    def run(rank: int) -> None:
        try:
            found[rank].set_result(body(group.members[rank]))
        except BaseException as error:
            found[rank].set_exception(error)
            group.end()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"member-{rank}", daemon=True)
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    if wait(found, timeout=seconds).not_done:
        group.end()
        raise DeadlineError(f"{count} members have not come to an end in {seconds:g} s")
    errors = [error for future in found if (error := future.exception(timeout=0)) is not None]
    own = [error for error in errors if not isinstance(error, RunError) or not _GONE.search(str(error))]
    for error in own or errors:
        raise error
    return [future.result(timeout=0) for future in found]
