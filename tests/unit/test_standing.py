"""Workers that wait tell one another where they stand, through the store in which their ring has met."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from atoll.core.errors import MismatchError
from atoll.core.stands import Stand, call, end, gradients
from atoll.train.group.standing import Standing

SECONDS = 30.0
SHORT = 0.04  # a deadline with which a worker asks after a hundredth of a second
SAVE, REDUCE = call("session.save", "a.py:2"), call("session.reduce", "a.py:3", asks="mean of a number")


def at(step: int) -> Stand:
    return gradients(step, "a.py:1")


class Worker:
    """A worker of rank `rank` of three, which waits where it is told."""

    def __init__(self, store: HashStore, rank: int, world: int = 3) -> None:
        self.store = store
        self.standing = Standing(store, rank, tuple(range(world)), SHORT)

    def wait(self, number: int, stand: Stand | None, until: Callable[[], bool]) -> None:
        """In the collective of this number until `until`; raises what the standing raises."""
        deadline = time.monotonic() + SECONDS
        self.standing.begin(number, lambda: stand)
        try:
            while not until():
                assert time.monotonic() < deadline
                self.standing.look()
                time.sleep(0.001)
        finally:
            self.standing.end()

    def says(self, number: int, stand: Stand) -> None:
        """It has written where it stands, and waits no longer."""
        key = f"at/{self.standing._rank}"
        before = read(self.store, key)
        self.wait(number, stand, lambda: read(self.store, key) != before)


def read(store: HashStore, key: str) -> bytes:
    inside = PrefixStore("stands", store)
    return inside.get(key) if inside.check([key]) else b""


def never() -> bool:
    return False


def line_of(worker: Worker, number: int, stand: Stand | None) -> str:
    with pytest.raises(MismatchError) as raised:
        worker.wait(number, stand, never)
    return str(raised.value)


def test_all_who_wait_in_vain_end_with_one_line() -> None:
    store = HashStore()
    workers = [Worker(store, rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        lines = list(threads.map(line_of, workers, [7, 7, 7], [at(5), SAVE, at(5)]))
    assert (
        lines
        == [
            "workers 0 and 2 are at the gradients of step 5 (a.py:1); worker 1 is in session.save (a.py:2). "
            "Every worker calls session.save: take it out of `if session.is_main`"
        ]
        * 3
    )


def test_a_worker_that_has_not_come_to_the_collective_yet_is_only_slow() -> None:
    """What it wrote last is of a collective before."""
    store = HashStore()
    slow, waits = Worker(store, 0, 2), Worker(store, 1, 2)
    slow.says(6, SAVE)
    looks = iter(range(200))
    waits.wait(7, at(5), lambda: next(looks, None) is None)  # a fifth of a second, several looks at the store
    assert read(store, "at/1")
    slow.says(7, at(5))
    looks = iter(range(200))
    waits.wait(7, at(5), lambda: next(looks, None) is None)
    assert not read(store, "line")


def test_two_that_do_not_go_together_do_not_wait_for_a_third() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        lines = list(threads.map(line_of, [Worker(store, 0), Worker(store, 2)], [1, 1], [REDUCE, at(0)]))
    assert lines[0] == lines[1]
    assert lines[0].startswith(
        "worker 0 is in session.reduce(mean of a number) (a.py:3); worker 2 is at the "
    )


def test_who_comes_later_and_finds_the_others_gone_learns_why() -> None:
    store = HashStore()
    assert Worker(store, 1, 2).standing.known() is None
    PrefixStore("stands", store).set("line", "worker 0 is here; worker 1 is there. Be elsewhere")
    later = Worker(store, 1, 2)
    assert str(later.standing.known()) == "worker 0 is here; worker 1 is there. Be elsewhere"
    assert line_of(later, 3, None).startswith("worker 0 is here")


def test_what_another_worker_wrote_is_judged_only_if_it_can_be_read() -> None:
    store = HashStore()
    for raw in ("no word", "\x93\x07\xc4"):
        PrefixStore("stands", store).set("at/0", raw)
        looks = iter(range(100))
        Worker(store, 1, 2).wait(7, at(5), lambda looks=looks: next(looks, None) is None)  # type: ignore[misc]
    PrefixStore("stands", store).set("line", "\x1b[2Jgone")
    assert line_of(Worker(store, 1, 2), 7, at(5)) == repr("\x1b[2Jgone")


class Stuck(Store):
    """A store that answers nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        del key, value
        self.asked += 1
        self.answers.wait(SECONDS)
        raise dist.DistNetworkError("the store is gone")


def test_a_store_that_does_not_answer_holds_up_nobody_and_is_asked_once() -> None:
    store = Stuck()
    standing = Standing(store, 0, (0, 1), SHORT)
    for number in range(5):
        standing.begin(number, lambda: at(0))
        until = time.monotonic() + 2 * SHORT
        while time.monotonic() < until:
            standing.look()
        standing.end()
    assert store.asked == 1
    store.answers.set()


def test_a_fast_collective_asks_nobody() -> None:
    store = HashStore()
    worker = Standing(store, 0, (0, 1), 60.0)
    for number in range(100):
        worker.begin(number, lambda: at(0))
        worker.look()
        worker.end()
    assert not read(store, "at/0")


def test_who_misses_another_learns_where_its_script_has_ended() -> None:
    store = HashStore()
    here, gone = Worker(store, 0), Worker(store, 1)
    assert here.standing.known() is None
    assert not here.standing.ended
    ended = end(5, "a.py:9")
    gone.standing.leave(ended)
    assert here.standing.known() is None
    assert here.standing.ended == {1: ended}
    PrefixStore("stands", store).set("ended/2", b"no place")
    assert here.standing.known() is None
    assert here.standing.ended == {1: ended}
