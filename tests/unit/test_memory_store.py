"""The store of payloads: what is pinned, in whatever order, holds what was written, within both budgets."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import re
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import atoll.memory
from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.core.memory import Memory
from atoll.memory.arena import Arena
from atoll.memory.disk import PAGE, DiskFile
from atoll.memory.store import Key, PayloadStore
from atoll.moves.cache import Policy
from atoll.moves.search import blocks_at_once

NUMEL = PAGE // 4  # of float32, in one block


@contextmanager
def store_of(
    host: int, disk: int, policy: Policy = "belady", poison: bool = False, seconds: float = 60.0
) -> Iterator[PayloadStore]:
    """A store of so many blocks of one page; no disk tier where `disk` is 0."""
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(host * PAGE, PAGE, poison=poison)
        file = DiskFile(folder, disk * PAGE, PAGE) if disk else None
        store = PayloadStore(arena, file, policy, seconds)
        try:
            yield store
        finally:
            store.close()


def filled(store: PayloadStore, count: int, numel: int = NUMEL) -> list[Key]:
    """That many payloads "values", each filled with its number."""
    keys = [(number, "values") for number in range(count)]
    for number, key in enumerate(keys):
        store.put(key, torch.full((numel,), float(number)))
    return keys


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "overwrite", "put", "get", "drop", "step", "nest"]),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    max_size=50,
)


@pytest.mark.check
@settings(max_examples=120, deadline=None)
@given(
    st.integers(5, 9),
    st.sampled_from(["belady", "lru", "fifo"]),
    st.booleans(),
    st.booleans(),
    CALLS,
    st.integers(1, 3),
)
def test_it_holds_what_was_written_within_both_budgets(
    host: int, policy: Policy, poison: bool, large: bool, calls: list[tuple[str, int, int]], rounds: int
) -> None:
    sizes = [NUMEL, 5, NUMEL - 1, NUMEL, 2 * NUMEL if large else NUMEL, NUMEL, 2 * NUMEL - 3, 1, NUMEL, NUMEL]
    with store_of(host, 12, policy, poison) as store:
        expected = []
        for number, numel in enumerate(sizes):
            store.add((number, "values"), numel, torch.float32)
            expected.append(torch.zeros(numel))
        for what, number, value in [*calls, ("step", 0, 0)] * rounds:
            _call(store, expected, what, number, float(value))
            assert store.host.used <= store.host.peak <= store.host.nbytes
        for number, numbers in enumerate(expected):
            assert torch.equal(store.get((number, "values")), numbers)


def _call(store: PayloadStore, expected: list[torch.Tensor], what: str, number: int, value: float) -> None:
    key = number, "values"
    if what == "read":
        with store.pin(key) as memory:
            assert torch.equal(memory, expected[number])
    elif what == "write":
        with store.pin(key, writes=True) as memory:
            assert torch.equal(memory, expected[number])
            memory.add_(value)
        expected[number] += value
    elif what == "overwrite":
        with store.pin(key, overwrites=True) as memory:
            memory.fill_(value)
        expected[number].fill_(value)
    elif what == "put":
        expected[number] = torch.rand_like(expected[number])
        store.put(key, expected[number])
    elif what == "get":
        copy = store.get(key)
        assert torch.equal(copy, expected[number])
        copy.fill_(-1.0)  # it is a copy
    elif what == "drop":
        store.drop(key)
        expected[number].zero_()
    elif what == "step":
        store.step_ended()
    else:
        with store.pin(key, writes=True) as outer, store.pin(key) as inner:
            assert outer.data_ptr() == inner.data_ptr()
            outer.sub_(1.0)
        expected[number] -= 1.0


@pytest.mark.parametrize("seed", range(4))
def test_transfers_that_come_late_and_out_of_order_change_nothing(seed: int) -> None:
    """Each begins up to 3 ms late, on eight threads: only what waits for what keeps the order."""
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(seed)
        disk = DiskFile(folder, 8 * PAGE, PAGE, threads=8)  # and 4 in the host, for 11
        late = _Late(disk, draw)
        store = PayloadStore(Arena(4 * PAGE, PAGE), disk)
        expected = [torch.zeros(NUMEL) for _ in range(11)]
        for number in range(11):
            store.add((number, "values"), NUMEL, torch.float32)
        what = ["read", "write", "overwrite", "overwrite", "drop"]
        for step in range(200):
            turn = step % 25
            number = turn if turn < 8 else draw.randrange(11)  # the first are foreseen, and read ahead
            _call(store, expected, "read" if turn < 8 else draw.choice(what), number, draw.random())
            if turn == 24:
                store.step_ended()
        for number, numbers in enumerate(expected):
            assert torch.equal(store.get((number, "values")), numbers)
        store.close()
        assert late.count > 100
        assert not late.overlaps


class _Late:
    """Makes a file's transfers late, and notes two at once that share a block, or a place in memory."""

    def __init__(self, disk: DiskFile, draw: random.Random) -> None:
        self._draw, self._lock = draw, threading.Lock()
        self._active: list[object] = []
        self.overlaps: list[object] = []
        self.count = 0
        for name in ("_write", "_read"):
            setattr(disk, name, partial(self._transfer, getattr(disk, name)))

    def _transfer(self, real: Callable[[int, memoryview], None], block: int, memory: memoryview) -> None:
        parts = [block, ctypes.addressof(ctypes.c_char.from_buffer(memory))]
        with self._lock:
            self.count += 1
            self.overlaps += [part for part in parts if part in self._active]
            self._active += parts
        time.sleep(self._draw.choice((0, 0, 0.001, 0.003)))
        try:
            real(block, memory)
        finally:
            with self._lock:
                for part in parts:
                    self._active.remove(part)


def test_what_is_dropped_while_it_is_read_ahead_does_not_come_over_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with store_of(3, 16) as store:
        keys = filled(store, 6)
        let_go, held = threading.Event(), threading.Event()
        preadv = os.preadv

        def late(file: int, parts: list[memoryview], place: int) -> int:
            held.set()
            assert let_go.wait(60)
            return preadv(file, parts, place)

        store.step_ended()
        for turn in range(3):
            for key in keys:
                store.get(key)
            if turn == 2:
                monkeypatch.setattr(os, "preadv", late)
            store.step_ended()
        assert held.wait(10)  # something is on its way to the host
        coming = [key for key in keys if store._payloads[key].is_moving]
        for key in coming:
            store.drop(key)
        news = [(number, "new") for number in range(6)]
        thread = threading.Thread(
            target=lambda: [store.put(key, torch.full((NUMEL,), 50.0 + key[0])) for key in news]
        )
        thread.start()
        thread.join(0.2)  # it may have to wait for the read, and may not
        let_go.set()
        thread.join(60)
        assert [float(store.get(key).mean()) for key in news] == [50, 51, 52, 53, 54, 55]
        assert coming
        assert [float(store.get(key).sum()) for key in coming] == [0.0] * len(coming)


def test_blocks_left_over_by_one_that_leaves_are_filled_only_when_it_has_been_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A payload of four blocks leaves for one of one block. The next that come find its other blocks free,
    with nobody to leave for them, while they are still being written to disk."""
    let_go, held = threading.Event(), threading.Event()
    pwrite = os.pwrite

    def late(file: int, part: memoryview, place: int) -> int:
        held.set()
        assert let_go.wait(60)
        return pwrite(file, part, place)

    with store_of(4, 16) as store:
        large = torch.arange(4.0 * NUMEL)
        store.put((0, "values"), large)
        monkeypatch.setattr(os, "pwrite", late)
        news = [(number, "new") for number in range(1, 5)]
        threads = [
            threading.Thread(target=store.put, args=(key, torch.full((NUMEL,), float(key[0]))))
            for key in news
        ]
        threads[0].start()
        assert held.wait(60)  # it is on its way to disk
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join(0.2)  # each has to wait for the write, and may not
        waited = all(thread.is_alive() for thread in threads)
        let_go.set()
        assert waited
        for thread in threads:
            thread.join(60)
        assert [float(store.get(key).mean()) for key in news] == [1, 2, 3, 4]
        assert torch.equal(store.get((0, "values")), large)


def test_whatever_a_transfer_raises_reaches_who_waits() -> None:
    def fails() -> None:
        raise SystemExit("it ends")

    with store_of(4, 16) as store:
        assert store.disk is not None
        with pytest.raises(RunError, match="a job: SystemExit: it ends"):
            store.disk.begin("a job", fails).wait(60)
        filled(store, 12)  # and the threads go on


def test_what_is_pinned_lies_still_while_all_else_moves() -> None:
    with store_of(4, 16) as store:
        keys = filled(store, 12)
        with store.pin(keys[3]) as memory:
            address = memory.data_ptr()
            for _ in range(3):
                assert [float(store.get(key)[0]) for key in keys] == list(range(12))
            assert (memory.data_ptr(), float(memory.sum())) == (address, 3.0 * NUMEL)


def test_what_has_not_changed_is_not_written_again() -> None:
    with store_of(4, 16) as store:
        keys = filled(store, 12)
        for key in keys:
            store.get(key)
        store.step_ended()
        for key in keys:
            store.get(key)
        step = store.step_ended()
        assert (step.to_disk, step.bytes_to_disk) == (0, 0)
        assert 0 < step.from_disk <= 12
        assert step.bytes_from_disk == step.from_disk * PAGE
        for key in keys:
            with store.pin(key, writes=True):
                pass
        store.step_ended()
        for key in keys:
            store.get(key)
        assert 0 < store.step_ended().to_disk <= 12  # the rest was written in the step before


def test_once_the_order_is_known_the_moves_of_a_step_are_those_of_the_optimum() -> None:
    """One block each, read in turn: of n in a cache of b, n - b + 1 must be read in each round."""
    with store_of(4, 16) as store:
        keys = filled(store, 12)
        read = []
        for _ in range(5):
            for key in keys:
                store.get(key)
            read.append(store.step_ended().from_disk)
        assert sum(read[2:]) <= 3 * (12 - 4 + 1)
        assert store.host.peak == store.host.nbytes


def test_what_is_read_ahead_is_not_missed() -> None:
    with store_of(6, 16) as store:
        keys = filled(store, 12)
        for _ in range(3):
            for key in keys:
                store.get(key)
            step = store.step_ended()
        assert step.uses == 12
        assert step.misses < step.from_disk


def test_what_is_dropped_is_never_written_and_is_zeros_then() -> None:
    with store_of(4, 16) as store:
        keys = filled(store, 3)
        gradient = (0, "gradient")
        store.add(gradient, NUMEL, torch.float32)
        for _ in range(4):
            with store.pin(gradient, overwrites=True) as memory:
                memory.fill_(1.0)
            for key in keys:
                store.get(key)
            store.drop(gradient)
            store.step_ended()
        assert store.statistics.to_disk == 0
        assert not store.get(gradient).any()


def test_dtypes_shapes_and_sizes_come_back_as_they_were() -> None:
    with store_of(4, 16) as store:
        sources = {
            (0, "values"): torch.randn(3, 5, dtype=torch.bfloat16),
            (0, "master"): torch.randn(2 * NUMEL),
            (1, "values"): torch.randn(7, 9).t(),  # not contiguous
            (1, "state.step"): torch.tensor(3),
            (2, "values"): torch.arange(0),
        }
        for key, source in sources.items():
            store.put(key, source)
        filled_later = [(number, "more") for number in range(6)]
        for key in filled_later:
            store.put(key, torch.ones(NUMEL))
        for key, source in sources.items():
            assert torch.equal(store.get(key), source.reshape(-1)), key
            assert store.get(key).dtype == source.dtype
        store.put((1, "values"), torch.ones(63, dtype=torch.float64))  # the payload's dtype stays
        assert store.get((1, "values")).dtype == torch.float32


def test_without_a_disk_it_holds_what_fits_and_says_what_would_do() -> None:
    with store_of(4, 0) as store:
        keys = filled(store, 4)
        assert [float(store.get(key)[0]) for key in keys] == [0, 1, 2, 3]
        store.add((4, "values"), NUMEL, torch.float32)
        store.add((5, "values"), 2 * NUMEL, torch.float32)
        with pytest.raises(UserError) as raised:
            store.pin_now((4, "values"))
        assert str(raised.value) == (
            "memory.host of 16.0 KiB does not hold the values of chunk 4 (4.0 KiB) beside the rest: "
            "raise it to at least 28672 bytes (28.0 KiB), or give memory.disk"
        )
        store.drop(keys[0])
        assert not store.get(keys[0]).any()


def test_what_comes_back_without_a_disk_finds_its_place() -> None:
    """Gradients of several sizes come and go each step in a host arena that all payloads just fill."""
    sizes = [NUMEL, 3 * NUMEL, 2 * NUMEL, 4 * NUMEL]
    with store_of(2 * sum(sizes) // NUMEL, 0) as store:
        for number, numel in enumerate(sizes):
            store.add((number, "gradient"), numel, torch.float32)
            store.add((number, "state"), numel, torch.float32)
        for step in range(3):
            for number in reversed(range(len(sizes))):
                with store.pin((number, "gradient"), overwrites=True) as gradient:
                    gradient.fill_(step + number)
            for number in range(len(sizes)):
                with (
                    store.pin((number, "gradient")) as gradient,
                    store.pin((number, "state"), writes=True) as sum_,
                ):
                    sum_.add_(gradient)
                store.drop((number, "gradient"))
            store.step_ended()
        for number in range(len(sizes)):
            assert store.get((number, "state")).eq(3 + 3 * number).all()
            assert not store.get((number, "gradient")).any()


def test_the_least_host_budget_is_named_and_is_enough() -> None:
    def pin_three(blocks: int) -> None:
        with store_of(blocks, 32) as store, ExitStack() as stack:
            for number in range(3):
                store.put((number, "master"), torch.full((2 * NUMEL,), float(number)))
            for number in range(3):
                memory = stack.enter_context(store.pin((number, "master"), writes=True))
                assert bool((memory == number).all())

    with pytest.raises(UserError, match=r"of 16\.0 KiB does not hold the master of chunk 2") as raised:
        pin_three(4)
    least = int(re.search(r"at least (\d+) bytes", str(raised.value))[1])  # type: ignore[index]
    assert least == 6 * PAGE
    pin_three(least // PAGE)


class _Words(nn.Module):
    """An embedding of four blocks, with layers of one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(128, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 31) for _ in range(6))
        self.out = nn.ModuleList(nn.Linear(31, 32) for _ in range(6))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.words(numbers)
        for layer, out in zip(self.layers, self.out, strict=True):
            x = x + out(torch.relu(layer(x)))
        return x @ self.words.weight.t()


def _trained(host: int, folder: Path) -> list[torch.Tensor]:
    """Parameters after four steps with so much of the host; with all there is, where that is 0."""
    torch.manual_seed(3)
    model = _Words()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memory = Memory(device="32KiB", host=str(host), disk=f"{folder}:4MiB", chunk="4KiB")
    with atoll.memory.fit(model, optimizer, memory=memory) if host else nullcontext():
        for step in range(4):
            optimizer.zero_grad()
            model(torch.arange(step, 8 + step)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_least_host_budget_that_fit_names_is_enough_for_the_steps(tmp_path: Path) -> None:
    """What a chunk's step pins lies where it came, and does not move: its blocks alone are not enough."""
    expected = _trained(0, tmp_path)
    least = 4 * PAGE
    with pytest.raises(UserError, match="host is too small") as raised:
        _trained(least, tmp_path)
    least = int(re.search(r"; (\d+) bytes", str(raised.value))[1])  # type: ignore[index]
    with pytest.raises(UserError, match=f"; {least} bytes"):
        _trained(least - PAGE, tmp_path)
    assert all(map(torch.equal, _trained(least, tmp_path), expected))


@pytest.mark.parametrize("places", [(0, 4, 8), (3, 10, 17)])
def test_what_a_step_pins_fits_wherever_it_lies(places: tuple[int, ...]) -> None:
    """Four payloads of four blocks: three of them lie apart, and the fourth still finds its run."""
    counts = (4, 4, 4, 4)
    blocks = blocks_at_once(counts)
    with store_of(blocks, 64) as store, ExitStack() as stack:
        singles = [(number, "single") for number in range(blocks)]
        for key in singles:
            store.put(key, torch.zeros(NUMEL))
        for number in range(4):
            store.add((number, "values"), counts[number] * NUMEL, torch.float32)
        for number, place in enumerate(places):
            with ExitStack() as others:
                for key in singles:
                    block = store._payloads[key].block
                    if block is not None and not place <= block.first < place + 4:
                        others.enter_context(store.pin(key))
                stack.enter_context(store.pin((number, "values"), overwrites=True))
        stack.enter_context(store.pin((3, "values"), overwrites=True))


def test_who_waits_is_not_counted_as_stuck_once_a_pin_has_ended() -> None:
    """It may have room now, and is only not awake yet; so another waits for it, and is not refused."""
    with store_of(4, 32) as store:
        filled(store, 4)
        store.add((9, "values"), 3 * NUMEL, torch.float32)
        got: list[float] = []

        def steps() -> None:
            with store.pin((1, "values")), store.pin((2, "values")), store.pin((3, "values")):
                waits.set()
                with store.pin((4, "values")) as memory:
                    got.append(float(memory.sum()))

        waits = threading.Event()
        store.add((4, "values"), NUMEL, torch.float32)
        thread = threading.Thread(target=steps)
        store.pin_now((0, "values"))
        thread.start()
        assert waits.wait(60)
        while not store._blocked:
            time.sleep(0.001)
        with store._lock:
            store.unpin((0, "values"))
            store.pin_now((9, "values"))
        thread.join(60)
        assert got == [0.0]


def test_host_and_disk_together_need_little_more_than_all_payloads() -> None:
    """Slots on disk of what lies in the host are given to what leaves."""
    with store_of(4, 9) as store:
        keys = filled(store, 12)
        for _ in range(3):
            for number, key in enumerate(keys):
                with store.pin(key, writes=True) as memory:
                    assert bool((memory == number).all())
            store.step_ended()
        assert store.disk is not None
        assert store.disk.peak <= store.disk.nbytes


def test_a_disk_budget_that_is_too_small_is_named() -> None:
    with store_of(3, 4) as store:
        with pytest.raises(UserError) as raised:
            filled(store, 9)
        assert re.fullmatch(
            r"memory\.disk of 16\.0 KiB in /\S+ has no room for the values of chunk \d \(4\.0 KiB\): "
            r"raise it to at least 32768 bytes \(32\.0 KiB\), which holds all",
            str(raised.value),
        )
        with pytest.raises(UserError) as again:  # and nothing is given out after that
            store.get((0, "values"))
        assert str(again.value) == str(raised.value)


def test_it_says_how_memory_and_disk_are_used() -> None:
    pageable = ("memory.host", "pageable", "there is no accelerator whose runtime registers memory")
    locked = ("memory.host", "page-locked", "it was registered with the accelerator's runtime")
    with store_of(3, 4) as store:
        host, disk = store.choices
        assert host == (locked if torch.cuda.is_available() else pageable)
        assert disk[:2] in (("memory.disk", "direct"), ("memory.disk", "page cache"))
    with store_of(3, 0) as store:
        assert store.choices == [host]


def test_a_forked_process_does_not_get_the_host_s_memory() -> None:
    """Else each page that is written after the fork is held twice."""
    with store_of(3, 0) as store:
        store.put((0, "values"), torch.ones(NUMEL))
        with store.pin((0, "values")) as memory:
            child = os.fork()
            if not child:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                faulthandler.disable()
                ctypes.string_at(memory.data_ptr(), 1)  # which is not there
                os._exit(0)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == -signal.SIGSEGV


def test_mistakes_of_callers() -> None:
    with store_of(3, 4) as store:
        store.add((0, "values"), 1, torch.float32)
        assert store.has((0, "values"))
        assert not store.has((1, "values"))
        with pytest.raises(ValueError, match="is added twice"):
            store.add((0, "values"), 1, torch.float32)
        with pytest.raises(ValueError, match="is not pinned"):
            store.unpin((0, "values"))
        with store.pin((0, "values")), pytest.raises(ValueError, match="is dropped while it is pinned"):
            store.drop((0, "values"))
    arena = Arena(4096, 1000)
    with tempfile.TemporaryDirectory() as folder:
        file = DiskFile(folder, PAGE, PAGE)
        with pytest.raises(ValueError, match="blocks of 1024 bytes in the host and 4096 on disk"):
            PayloadStore(arena, file)
        file.close()


def test_damage_on_disk_is_told_at_each_use_of_what_it_hit_and_nobody_else_s() -> None:
    with store_of(4, 16) as store:
        keys = filled(store, 12)
        assert store.disk is not None
        for key in keys[4:]:
            store.get(key)  # now the first four are on disk alone
        damaged = store._payloads[keys[1]].slots[0]
        with Path(f"/proc/self/fd/{store.disk._file}").open("r+b") as file:
            file.seek(damaged * PAGE + 17)
            file.write(b"\xa5\x5a")
        for _ in range(2):
            with pytest.raises(RunError, match=f"block {damaged} of the disk tier is damaged"):
                store.get(keys[1])
            with (
                pytest.raises(RunError, match=f"block {damaged} of the disk tier is damaged"),
                store.pin(keys[1], writes=True),
            ):
                pytest.fail("never given out")
            assert [float(store.get(key)[0]) for key in keys if key != keys[1]] == [0, *range(2, 12)]
        assert store.host.used <= store.host.nbytes


def test_a_write_back_that_fails_is_told_to_who_uses_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with store_of(2, 16) as store:
        keys = filled(store, 2)
        assert store.disk is not None

        def full(block: int, source: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store.disk, "_write", full)
        store.put((2, "values"), torch.ones(NUMEL))
        monkeypatch.undo()
        with pytest.raises(RunError, match=r"writing block 0 of the disk tier: No space left on device"):
            store.get(keys[0])
        assert float(store.get(keys[1])[0]) == 1.0


def test_who_finds_all_pinned_by_another_thread_waits_until_it_lets_go() -> None:
    with store_of(2, 8) as store:
        keys = filled(store, 4)
        pinned, let_go, got = threading.Event(), threading.Event(), []

        def other() -> None:
            with store.pin(keys[0]), store.pin(keys[1]):
                pinned.set()
                assert let_go.wait(60)

        def third() -> None:
            got.append(float(store.get(keys[2])[0]))

        threads = [threading.Thread(target=other), threading.Thread(target=third)]
        threads[0].start()
        assert pinned.wait(60)
        threads[1].start()
        while not store._blocked:  # until it waits; the test's own deadline ends this
            threads[1].join(0.001)
        assert not got
        let_go.set()
        for thread in threads:
            thread.join(60)
        assert got == [2.0]


def test_such_a_wait_has_a_deadline_and_a_name() -> None:
    with store_of(2, 8, seconds=0.05) as store:
        keys = filled(store, 4)
        held = [store.pin_now(key) for key in keys[:2]]
        errors: list[Exception] = []

        def other() -> None:
            try:
                store.get(keys[2])
            except DeadlineError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        assert [str(error) for error in errors] == [
            "memory.host of 8.0 KiB had no room for the values of chunk 2 (4.0 KiB) in 50.0 ms: "
            "other threads use all of it; raise it"
        ]
        assert len(held) == 2


def test_two_threads_that_wait_for_each_other_are_told_the_least_budget_at_once() -> None:
    with store_of(4, 16) as store:
        keys = filled(store, 8)
        both = threading.Barrier(2)
        said: list[str] = []

        def one(mine: list[Key]) -> None:
            with ExitStack() as stack:
                for key in mine[:2]:
                    stack.enter_context(store.pin(key))
                both.wait(60)
                try:
                    stack.enter_context(store.pin(mine[2]))
                    said.append("served")
                except UserError as error:
                    said.append(str(error))

        threads = [threading.Thread(target=one, args=(keys[at : at + 3],)) for at in (0, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(each[:32] for each in said) == ["memory.host of 16.0 KiB does not", "served"]


@pytest.mark.parametrize("poison", [False, True])
def test_many_threads(poison: bool) -> None:
    """Each adds ones to payloads of its own and reads what nobody changes; nothing is lost or mixed up."""
    with store_of(9, 64, poison=poison) as store:
        keys = filled(store, 24)
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            draw = torch.Generator().manual_seed(seed)
            try:
                for turn in range(60):
                    own = keys[seed * 4 + int(torch.randint(0, 4, (), generator=draw))]
                    with store.pin(own, writes=True) as memory, store.pin(keys[16 + turn % 8]) as fixed:
                        memory.add_(1.0)
                        assert bool((fixed == 16 + turn % 8).all())
                    if seed == 0 and turn % 10 == 9:
                        store.step_ended()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not errors
        added = 0.0
        for number, key in enumerate(keys):
            memory = store.get(key)
            assert bool((memory == memory[0]).all())
            added += float(memory[0]) - number
        assert added == 4 * 60
