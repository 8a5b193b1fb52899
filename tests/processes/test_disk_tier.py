"""The disk tier's scratch file: damage is found and named, a full disk too, and nothing is left behind."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disk import NoDiskError, SmallDisk
from torch import Tensor

from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.memory.arena import Arena
from atoll.memory.disk import PAGE, DiskFile

BLOCK = 4 * PAGE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFile]:
    made = DiskFile(tmp_path / "scratch", 8 * BLOCK, BLOCK)
    yield made
    made.close()


def memory(count: int = 1) -> Tensor:
    """That many blocks of random bytes on a page."""
    block = Arena(count * BLOCK, BLOCK, alignment=PAGE, poison=False).take(count)
    return block.memory.random_(0, 256)


def path_of(disk: DiskFile) -> Path:
    """The way to a file that has no name."""
    return Path(f"/proc/self/fd/{disk._file}")


def written(disk: DiskFile, source: Tensor) -> int:
    block = disk.take()
    disk.write(block, source).wait(60)
    return block


def test_what_is_written_is_read_and_no_name_is_in_the_folder(disk: DiskFile) -> None:
    sources = [memory() for _ in range(8)]
    blocks = [disk.take() for _ in sources]
    assert (disk.used, disk.peak, disk.free_blocks) == (8 * BLOCK, 8 * BLOCK, 0)
    for transfer in [disk.write(*each) for each in zip(blocks, sources, strict=True)]:
        transfer.wait(60)
    targets = [memory() for _ in sources]
    for transfer in [disk.read(*each) for each in zip(blocks, targets, strict=True)]:
        transfer.wait(60)
        assert transfer.done
    assert all(bool((a == b).all()) for a, b in zip(sources, targets, strict=True))
    assert list((disk.folder).iterdir()) == []
    # All of it was promised by the file system before the first write, which may take a block for itself.
    assert path_of(disk).stat().st_size == 8 * BLOCK <= os.fstat(disk._file).st_blocks * 512


def test_a_block_may_be_written_again_with_another_size(disk: DiskFile) -> None:
    block = written(disk, memory())
    source = memory()[:PAGE]
    disk.write(block, source).wait(60)
    target = memory()[:PAGE]
    disk.read(block, target).wait(60)
    assert bool((source == target).all())
    with pytest.raises(
        RunError, match=r"scratch: block 0 of the disk tier holds 4096 bytes, and 16384 bytes"
    ):
        disk.read(block, memory()).wait(60)


def test_a_block_that_was_given_back_or_never_written_holds_nothing(disk: DiskFile) -> None:
    block = written(disk, memory())
    disk.give(block)
    assert disk.take() == block
    with pytest.raises(RunError, match="block 0 of the disk tier holds nothing, and 16384 bytes"):
        disk.read(block, memory()).wait(60)


def test_a_flipped_bit_is_found_and_the_block_named(disk: DiskFile) -> None:
    blocks = [written(disk, memory()) for _ in range(3)]
    with path_of(disk).open("r+b") as file:
        file.seek(2 * BLOCK + 5000)
        byte = file.read(1)[0]
        file.seek(2 * BLOCK + 5000)
        file.write(bytes([byte ^ 4]))
    disk.read(blocks[1], memory()).wait(60)
    with pytest.raises(
        RunError, match=r"scratch: block 2 of the disk tier is damaged: the checksum of its 16384"
    ):
        disk.read(blocks[2], memory()).wait(60)


def test_a_write_that_the_disk_lost_is_found(disk: DiskFile) -> None:
    block = written(disk, memory())
    before = path_of(disk).read_bytes()
    disk.write(block, memory()).wait(60)
    path_of(disk).write_bytes(before)  # as it was: whole, and old
    with pytest.raises(RunError, match="block 0 of the disk tier is damaged"):
        disk.read(block, memory()).wait(60)


def test_a_file_that_was_cut_off(disk: DiskFile) -> None:
    blocks = [written(disk, memory()) for _ in range(2)]
    os.truncate(path_of(disk), BLOCK + PAGE)
    disk.read(blocks[0], memory()).wait(60)
    with pytest.raises(
        RunError, match="block 1 of the disk tier is cut off: 4096 of its 16384 bytes are there"
    ):
        disk.read(blocks[1], memory()).wait(60)


def test_a_write_that_fails_says_so_and_what_it_leaves_is_never_read(disk: DiskFile) -> None:
    block = written(disk, memory())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    os.truncate(path_of(disk), 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, limits[1]))
    try:
        transfer = disk.write(block, memory())
        with pytest.raises(RunError, match="scratch: writing block 0 of the disk tier: File too large"):
            transfer.wait(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(RunError, match="block 0 of the disk tier holds nothing"):
        disk.read(block, memory()).wait(60)


def test_what_comes_after_a_failed_transfer_fails_with_it_and_what_comes_behind_goes_on(
    disk: DiskFile,
) -> None:
    block, other = disk.take(), written(disk, memory())
    failed = disk.read(block, memory())
    with pytest.raises(RunError, match="block 0 of the disk tier holds nothing"):
        disk.read(other, memory(), after=[failed]).wait(60)
    disk.read(other, memory(), behind=[failed]).wait(60)


def test_order_is_kept_where_it_was_asked_for(tmp_path: Path) -> None:
    """A place is written from, then read into, over and over, by more threads than two."""
    disk = DiskFile(tmp_path, 64 * BLOCK, BLOCK, threads=4)
    place, sums = memory(), []
    last = []
    for block in range(32):
        fill = disk.begin("a fill", lambda value=block: place.fill_(value), after=last)  # type: ignore[misc]
        last = [disk.write(block, place, after=[fill])]
    targets = [memory() for _ in range(32)]
    for block, target in enumerate(targets):
        disk.read(block, target, after=last).wait(60)
        sums.append(int(target.max()))
        assert int(target.min()) == sums[-1]
    disk.close()
    assert sums == list(range(32))


def test_a_transfer_has_a_deadline_and_a_name(disk: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: let_go.wait(60) and pwrite(*given))
    transfer = disk.write(disk.take(), memory())
    with pytest.raises(
        DeadlineError, match=r"scratch: writing block 0 of the disk tier has not come to an end in"
    ):
        transfer.wait(0.01)
    with pytest.raises(DeadlineError, match="scratch: transfers of the disk tier have not come to an end in"):
        disk.close(0.01)
    let_go.set()
    transfer.wait(60)


def test_what_a_job_raises_reaches_who_waits(disk: DiskFile) -> None:
    with pytest.raises(RunError, match="a job: ZeroDivisionError: integer division"):
        disk.begin("a job", lambda: 1 // 0).wait(60)
    written(disk, memory())  # the threads go on


def test_memory_that_is_no_whole_pages_is_refused(disk: DiskFile) -> None:
    block = disk.take()
    for wrong in (memory()[: PAGE - 1], memory(2)[64 : PAGE + 64]):
        with pytest.raises(ValueError, match="are not whole pages of 4096"):
            disk.write(block, wrong)
    with pytest.raises(ValueError, match="there are 8 of 16384"):
        disk.write(8, memory())
    with pytest.raises(ValueError, match="20480 bytes, block 0"):
        disk.write(block, memory(2)[: 5 * PAGE])


def test_a_disk_tier_with_no_block_left(disk: DiskFile) -> None:
    for _ in range(8):
        disk.take()
    with pytest.raises(UserError, match=r"all of 128\.0 KiB in .* are in use; raise it to at least 147456 b"):
        disk.take()


def test_a_budget_below_one_block_says_the_least(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"memory\.disk: 10 bytes are .* at least 16384 bytes"):
        DiskFile(tmp_path, 10, BLOCK)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    with pytest.raises(UserError, match=r"memory\.disk: \S+file cannot be used: File exists"):
        DiskFile(place, BLOCK, BLOCK)
    with pytest.raises(UserError, match="inside cannot be used: Not a directory"):
        DiskFile(place / "inside", BLOCK, BLOCK)


def test_a_folder_that_cannot_be_written_to() -> None:
    with pytest.raises(UserError, match=r"^memory\.disk: /proc/atoll cannot be used: "):
        DiskFile("/proc/atoll", BLOCK, BLOCK)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    try:
        made = SmallDisk(tmp_path / "small", 2**20)
    except NoDiskError as error:
        pytest.skip(f"no small disk can be made here: {error}")
    yield made
    made.close()


def test_a_disk_without_the_room_is_found_before_the_first_write(small: SmallDisk) -> None:
    small.fill(leave=4 * BLOCK)
    with pytest.raises(UserError) as raised:
        DiskFile(small.folder, 8 * BLOCK, BLOCK)
    assert str(raised.value) == (
        f"memory.disk: {small.folder} does not take 128.0 KiB: No space left on device, "
        "64.0 KiB are free; lower the budget, or name another folder"
    )
    DiskFile(small.folder, 4 * BLOCK, BLOCK).close()  # and what was tried is not there any more


def test_a_disk_that_is_full_at_a_write(small: SmallDisk) -> None:
    disk = DiskFile(small.folder, 8 * BLOCK, BLOCK)
    block = written(disk, memory())
    os.truncate(path_of(disk), 0)  # a file system that does not keep its promise, as one that copies on write
    small.fill()
    with pytest.raises(
        RunError, match=r"writing block 0 of the disk tier: No space left on device: the file"
    ):
        disk.write(block, memory()).wait(60)
    small.make_room()
    target, source = memory(), memory()
    disk.write(block, source).wait(60)
    disk.read(block, target).wait(60)
    assert bool((source == target).all())
    disk.close()


def test_without_direct_transfers_it_goes_through_the_page_cache_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "fcntl", _refusing(fcntl.fcntl))
    disk = DiskFile(tmp_path, 4 * BLOCK, BLOCK)
    assert not disk.direct
    assert disk.reason == "the file system makes no direct transfers of whole pages: Invalid argument"
    source, target = memory(), memory()
    disk.read(written(disk, source), target).wait(60)
    assert bool((source == target).all())
    disk.close()


def _refusing(real):  # type: ignore[no-untyped-def]
    def set_flags(file: int, command: int, value: int = 0) -> int:
        if value & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return int(real(file, command, value))

    return set_flags


def test_where_a_file_must_have_a_name_it_loses_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    names = []
    unlink = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda path: (names.append((path, path.stat().st_size)), unlink(path))
    )
    disk = DiskFile(tmp_path, BLOCK, BLOCK)
    assert [(re.sub(r"\d+-\w{16}$", "", path.name), size) for path, size in names] == [(".atoll-scratch-", 0)]
    assert list(tmp_path.iterdir()) == []
    written(disk, memory())
    disk.close()


def test_names_that_a_dead_process_left_go_and_nobody_else_s(tmp_path: Path) -> None:
    ours = tmp_path / ".atoll-scratch-123-0011223344556677"
    ours.touch()
    filled = tmp_path / ".atoll-scratch-124-0011223344556677"
    filled.write_text("somebody's")
    folder = tmp_path / ".atoll-scratch-folder"
    folder.mkdir()
    link = tmp_path / ".atoll-scratch-link"
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").touch()
    DiskFile(tmp_path, BLOCK, BLOCK).close()
    assert {path.name for path in tmp_path.iterdir()} == {filled.name, folder.name, link.name, "elsewhere"}


_KILLED = """
import sys
from atoll.memory.arena import Arena
from atoll.memory.disk import DiskFile, PAGE

disk = DiskFile(sys.argv[1], 64 * 2**20, 2**20)
source = Arena(2**20, 2**20, alignment=PAGE).take().memory.fill_(7)
transfers = [disk.write(disk.take(), source) for _ in range(64)]
transfers[5].wait(60)
print("writing", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    def free() -> int:
        found = os.statvfs(tmp_path)
        return found.f_bfree * found.f_frsize

    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert list(tmp_path.iterdir()) == []  # nor while it lives
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    disk = DiskFile(tmp_path, 64 * 2**20, 2**20)  # the next one in this folder holds nothing
    with pytest.raises(RunError, match="holds nothing"):
        disk.read(disk.take(), Arena(2**20, 2**20, alignment=PAGE).take().memory).wait(60)
    disk.close()
