"""The memory of this machine that is still free for a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of the machine's memory that this worker may still take.

    These are the bytes that the kernel calls available, or fewer if a control group's limit leaves fewer,
    divided by the launch's number of workers on this machine (`LOCAL_WORLD_SIZE`). Returns `sys.maxsize` if
    the system does not say.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    found = [number for number in (_of_system(root), *_left_by_groups(root)) if number is not None]
    return max(0, min(found)) // _workers_here() if found else sys.maxsize


def _workers_here() -> int:
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() and int(count) else 1


def _of_system(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        key, _, value = line.partition(":")
        if key == "MemAvailable" and value.split()[:1] and value.split()[0].isdecimal():
            return int(value.split()[0]) * 1024
    return None


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes under the memory limit of each control group, without counting its cache."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            mount, limit, used, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            folder = root / mount / group
            most, taken = _number(folder / limit), _number(folder / used)
            if most is not None and taken is not None:
                yield most - taken + _statistic(folder / "memory.stat", cache)


def _number(path: Path) -> int | None:
    """Return the number in a file; None for a missing file, or for no limit ("max")."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, key: str) -> int:
    words = (line.split() for line in _lines(path))
    return next((int(each[1]) for each in words if len(each) == 2 and each[0] == key), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
