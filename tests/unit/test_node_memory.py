"""The memory that a node's two processes share: what lies where, for any layout; one file, seen from both
sides; no trace of it when they are gone."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peer_model import PeerModel

from atoll.chunks import ChunkMap, ParameterSpec, lay_out
from atoll.core.errors import RunError
from atoll.cpuside.overlay import Overlay, Pending
from atoll.exchange.globalparameters import GlobalParameters
from atoll.exchange.hostmemory import (
    ALIGNMENT,
    PAGE,
    Buffers,
    ChunkPlace,
    HostMemory,
    host_bytes,
    plan_memory,
    slots_for,
)
from support.leaks import still_open

SPECS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), max_size=2).map(tuple),
        st.sampled_from(["float32", "float64", "bfloat16"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def layout_of(specs: list[tuple[tuple[int, ...], str, bool]]) -> ChunkMap:
    made = [
        ParameterSpec(f"p{index}", shape, dtype, trainable, "0" if trainable else "")
        for index, (shape, dtype, trainable) in enumerate(specs)
    ]
    return lay_out(made, chunk_bytes=1024)


@given(SPECS, st.integers(0, 5))
def test_everything_has_its_place(specs: list[tuple[tuple[int, ...], str, bool]], stale_max: int) -> None:
    layout = layout_of(specs)
    plan = plan_memory(layout, slots_for(stale_max))
    assert (plan.slots, plan.buffers) == (stale_max + 2, 3)
    assert [run.chunk for run in plan.trained] == [chunk.id for chunk in layout.trainable]
    assert sorted(run.chunk for run in (*plan.trained, *plan.frozen)) == [c.id for c in layout.chunks]
    taken: list[tuple[int, int]] = []

    def take(begin: int, runs: tuple[ChunkPlace, ...]) -> None:
        for run in runs:
            assert run.numel == layout.chunks[run.chunk].extent
            assert (begin + run.offset) % ALIGNMENT == 0
            taken.append((begin + run.offset, begin + run.offset + run.nbytes))

    for begin in [plan.slot(t) for t in range(plan.slots)] + [plan.buffer(i) for i in range(plan.buffers)]:
        assert begin % PAGE == 0
        take(begin, plan.trained)
    take(plan.nbytes - plan.frozen_bytes, plan.frozen)
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    assert all(begin >= 0 and end <= plan.nbytes for begin, end in taken)
    # Nothing but what alignment takes is unused.
    slack = len(taken) * ALIGNMENT + (plan.slots + plan.buffers + 1) * PAGE
    assert plan.nbytes <= sum(end - begin for begin, end in taken) + slack
    assert plan.slot(plan.slots + 1) == plan.slot(1)


def test_both_sides_see_one_memory() -> None:
    model = PeerModel(torch.optim.AdamW, [{"lr": 0.1}])
    plan = plan_memory(model.layout, slots_for(1))
    worker = HostMemory.create(plan)
    cpu_side = HostMemory(plan, os.dup(worker.fd))
    places = [
        *((lambda side, t=t: side.gradients(t)) for t in range(plan.slots)),
        *((lambda side, i=i: side.buffer(i)) for i in range(plan.buffers)),
        lambda side: side.frozen,
    ]
    for number, place in enumerate(places):
        for chunk, flat in place(worker).items():
            assert not flat.any()
            assert flat.data_ptr() % ALIGNMENT == 0
            flat.fill_(100 * number + chunk)
    for number, place in enumerate(places):
        seen = place(cpu_side)
        assert set(seen) == set(place(worker))
        for chunk, flat in seen.items():
            assert flat.shape == (model.layout.chunks[chunk].extent,)
            assert (flat == 100 * number + chunk).all()
    assert set(cpu_side.frozen) | set(cpu_side.buffer(0)) == {chunk.id for chunk in model.layout.chunks}
    kept = cpu_side.gradients(plan.slots)  # the first slot again
    assert kept is cpu_side.gradients(0)
    worker.close()
    cpu_side.close()
    chunk = min(kept)
    kept[chunk].add_(1)  # a tensor that is still there keeps the memory
    assert (kept[chunk] == chunk + 1).all()


def test_another_process_shares_it_and_a_kill_leaves_nothing() -> None:
    """A child writes through its own mapping, and dies by SIGKILL with it open."""
    model = PeerModel(torch.optim.SGD, [{"lr": 0.1}])
    plan = plan_memory(model.layout, slots_for(0))
    memory = HostMemory.create(plan)
    named = Path(f"/proc/self/fd/{memory.fd}").readlink()
    assert not named.with_name(named.name.removesuffix(" (deleted)")).exists()
    at = plan.buffer(1) + plan.trained[0].offset
    code = (
        "import mmap, os, struct, signal\n"
        f"held = mmap.mmap({memory.fd}, {plan.nbytes})\n"
        f"held[{at}:{at + 4}] = struct.pack('=f', 2.5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], pass_fds=[memory.fd], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert memory.buffer(1)[plan.trained[0].chunk][0] == 2.5
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.fd)


def test_memory_of_another_layout_is_refused() -> None:
    small = plan_memory(layout_of([((8,), "float32", True)]), 2)
    large = plan_memory(layout_of([((8,), "float32", True)]), 3)
    memory = HostMemory.create(small)
    with pytest.raises(RunError, match=rf"of {small.nbytes} bytes, where .* needs {large.nbytes}"):
        HostMemory(large, memory.fd)
    memory.close()


def test_a_machine_without_room_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is reserved: a later write would be a SIGBUS."""

    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = still_open()
    plan = plan_memory(layout_of([((3000,), "float32", True)]), 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RunError, match="no 60.0 KiB of memory for the memory that .* No space left"):
            HostMemory.create(plan)
    assert not still_open() - before


def test_a_buffer_is_written_only_while_the_worker_does_not_look_at_it() -> None:
    buffers = Buffers(3)
    for index in range(3):
        assert buffers.free() == index
        buffers.announce(index)
    assert buffers.free() is None
    buffers.release(1)
    assert buffers.free() == 1


def test_the_formula_is_what_is_there() -> None:
    """A node's host memory, by the bytes of what is in fact allocated."""
    model = PeerModel(torch.optim.AdamW, [{"lr": 0.1}])
    plan = plan_memory(model.layout, slots_for(1))
    parameters: GlobalParameters = model.globals()
    found = host_bytes(plan, parameters.nbytes(), most=6)
    memory = HostMemory.create(plan)
    assert os.fstat(memory.fd).st_size == found.shared
    memory.close()
    given = [[model.contribution(t, node) for node in range(3)] for t in range(6)]
    parameters.apply(0, given[0])
    overlay = Overlay(parameters)
    for pending in (2, 5):
        waiting = [Pending(t, given[t][: 3 if t == 5 else 2]) for t in range(1, 1 + pending)]
        overlay.write({c: torch.empty_like(parameters.values(c)) for c in parameters.chunks}, waiting)
        assert (overlay._twin is not None) is (pending == 5)
    late = [Pending(t, given[t][: 3 if t in (1, 5) else 2]) for t in range(1, 6)]  # one that is far behind
    overlay.write({c: torch.empty_like(parameters.values(c)) for c in parameters.chunks}, late)
    assert overlay._hidden.keys() == set(overlay._twin.chunks if overlay._twin is not None else ())
    used: list[int] = []
    parameters.for_each_chunk(lambda _chunk, scratch: used.append(scratch.nbytes))
    assert found.scratch == used[-1]
    states = [parameters.optimizer.state(chunk)[0] for chunk in parameters.chunks]
    assert found.optimizer == sum(flat.nbytes for elements in states for flat in elements.values())
    assert found.parameters == sum(chunk.nbytes for chunk in model.layout.chunks)
    assert overlay._twin is not None
    twins = [(overlay._twin.values(c), *overlay._twin.state(c)[0].values()) for c in overlay._twin.chunks]
    kept = [flat for flats in (*twins, overlay._hidden.values()) for flat in flats]
    assert found.twin == sum(flat.nbytes for flat in kept)
    one = model.contribution(0, 0).gradients
    assert found.contributions == 6 * sum(flat.nbytes for flat in one.values())
    assert found.total == (
        found.shared + (found.parameters + found.optimizer + found.twin + found.scratch) + found.contributions
    )
