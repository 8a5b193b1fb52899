"""Memory budgets of a model: `atoll.Memory`, which is also the table `[memory]`.

Budgets limit a model's parameters, gradients and optimizer state. Activations are not counted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.units import format_bytes, parse_bytes

Sharding = Literal["auto", "symmetric", "asymmetric"]
_DISK = "/scratch:50GiB"


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a memory plan that the user has fixed; None: searched."""

    chunk_bytes: int | None = None  # common size of chunks
    cache_blocks: int | None = None  # blocks of that size in the device's cache
    resident: float | None = None  # share of the parameters' bytes that stays on the device, 0 to 1
    sharding: Literal["symmetric", "asymmetric"] | None = None
    # "device": everything is there; a share above 0: the part of the trained bytes that steps on the device
    steps_on: Literal["device", "host"] | float | None = None


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """The budgets of a model in bytes."""

    device: int
    host: int | None = None  # None: as much as is needed
    disk: int = 0  # 0: no disk
    folder: str = ""  # on the disk
    master: bool = False  # step half-precision parameters in single-precision copies
    pins: Pins = Pins()

    def describe(self) -> str:
        """Return `device 2.0 GiB, host 8.0 GiB, disk 50.0 GiB in /scratch`."""
        parts = [f"device {format_bytes(self.device)}"]
        parts.append("host without a bound" if self.host is None else f"host {format_bytes(self.host)}")
        if self.disk:
            parts.append(f"disk {format_bytes(self.disk)} in {self.folder}")
        return ", ".join(parts)


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of chunked memory since its beginning, for `Fitted.stats()` and summary.json.

    Budgets and peaks are those of the arenas, in bytes. The keys of `moves` and `nbytes` are directions:
    "to_device", "to_host", "to_disk", "from_disk", and with several members "from_members".

    Attributes:
        steps: number of steps.
        moves: number of moves in each direction.
        nbytes: bytes moved in each direction.
        step_moves: moves of the latest step.
        step_nbytes: bytes moved in the latest step.
        written_back: moves off the device that carried changed values.
        optimum: least moves to the device in a step, if every chunk has one block; else None, and
            docs/memory.md bounds the extra moves of the rule of eviction.
        step_blocks: blocks brought to the device for the latest step's uses.
        optimum_blocks: least blocks that any schedule of the recorded order brings in a step; None before the
            order is recorded.
        uses: uses of chunks.
        misses: uses that waited for a move.
        unforeseen: uses that the recorded order does not have.
        waited: seconds of all waits for moves.
        gradient_norm: global norm of the gradients before they were last clipped through `Fitted` or the
            session.
        stepped_early: chunks stepped before the call of `optimizer.step()`.
        rolled_back: chunks stepped early in vain.
    """

    device_budget: int
    device_peak: int = 0
    host_budget: int | None = None
    host_peak: int = 0
    disk_budget: int = 0
    disk_peak: int = 0
    steps: int = 0
    moves: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    step_moves: dict[str, int] = {}
    step_nbytes: dict[str, int] = {}
    written_back: int = 0
    optimum: int | None = None
    step_blocks: int = 0
    optimum_blocks: int | None = None
    uses: int = 0
    misses: int = 0
    unforeseen: int = 0
    waited: float = 0.0
    gradient_norm: float | None = None
    stepped_early: int = 0
    rolled_back: int = 0


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[memory]`: memory budgets, also for `atoll.memory.fit` and `session.prepare`.

    Sizes are texts such as `2GiB` or `500MB`, or plain bytes. Without `device` nothing is moved. The keys
    below `disk` fix values that are otherwise searched.

    Args:
        device: Budget of the device's memory for the model's parameters, gradients and optimizer state, such
            as `"2GiB"` ([memory.md](memory.md)). Empty: nothing is moved. The strategy decides which of them
            are kept where: see [Memory budgets](configuration.md#memory-budgets).
        host: Budget of host memory for them. Empty: as much as is needed.
        disk: A folder and the bytes that may be written there, such as `"/scratch:50GiB"`. Empty: no disk.
        chunk: Fixes the common size of chunks, such as `"16MiB"`. `auto`, here and below: searched for the
            shortest step.
        cache: Fixes the number of blocks of that size in the device's cache.
        resident: Fixes the share of the parameters, 0 to 1, that stays on the device.
        sharding: Fixes how a group's members share chunks: `symmetric` (each is split evenly over all; the
            choice of `auto`) or `asymmetric` (each belongs to one). Without effect for a single member.
        step: Fixes where the optimizer steps: `device` (everything stays there), `host`, or the share of the
            trained bytes that steps on the device, such as `0.3`.
        master: Keep a single-precision copy of trained half-precision parameters in host memory. The
            optimizer steps the copy, with state in single precision, and the parameters are rounded from it.
    """

    device: str = ""
    host: str = ""
    disk: str = ""
    chunk: str = "auto"
    cache: str = "auto"
    resident: str = "auto"
    sharding: Sharding = "auto"
    step: str = "auto"
    master: bool = False

    def budgets(self, prefix: str = "") -> Budgets:
        """Return the budgets as numbers; raises ConfigError, one line that begins with `prefix` and key."""
        self._check_types(prefix)
        if not self.device:
            given = next((key for key in ("host", "disk") if getattr(self, key)), "")
            and_given = f", and {prefix}{given} alone says too little" if given else ""
            raise ConfigError(
                f"{prefix}device: the device's budget is missing{and_given}; write it like 2GiB"
            )
        _check_choice(prefix + "sharding", self.sharding, get_args(Sharding))
        steps_on = self._steps_on(prefix)
        folder, disk = self._disk(prefix)
        return Budgets(
            device=_size(prefix + "device", self.device),
            host=_size(prefix + "host", self.host) if self.host else None,
            disk=disk,
            folder=folder,
            master=self.master,
            pins=Pins(
                chunk_bytes=None if self.chunk == "auto" else _size(prefix + "chunk", self.chunk),
                cache_blocks=self._blocks(prefix),
                resident=self._resident(prefix),
                sharding=None if self.sharding == "auto" else self.sharding,
                steps_on=steps_on,
            ),
        )

    @property
    def is_given(self) -> bool:
        """True if any key was set."""
        return self != Memory()

    def _check_types(self, prefix: str) -> None:
        """Raise ConfigError for values of wrong types, which Python code may give; numbers are allowed."""
        for key in ("device", "host", "disk", "chunk", "cache", "resident", "step"):
            given: object = getattr(self, key)
            if isinstance(given, bool) or not isinstance(given, (str, int, float)):
                raise ConfigError(
                    f"{prefix}{key}: {given!r} is neither a text nor a number; leave it out, or give "
                    f"{'auto' if getattr(Memory(), key) == 'auto' else 'a size like 2GiB'}"
                )
        master: object = self.master
        if not isinstance(master, bool):
            raise ConfigError(f"{prefix}master: {master!r} is neither True nor False")

    def _disk(self, prefix: str) -> tuple[str, int]:
        if not self.disk:
            return "", 0
        folder, colon, size = str(self.disk).rpartition(":")
        if not colon or not folder or not size.strip():
            raise ConfigError(
                f"{prefix}disk: {self.disk!r} has no folder or no size; write both, like {_DISK}"
            )
        return folder, _size(f"{prefix}disk", size)

    def _blocks(self, prefix: str) -> int | None:
        if self.cache == "auto":
            return None
        text = str(self.cache)
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(
                f"{prefix}cache: {self.cache!r} is no number of blocks; write 1 or more, or auto"
            )
        return int(text)

    def _steps_on(self, prefix: str) -> Literal["device", "host"] | float | None:
        if self.step == "auto":
            return None
        share = {"host": 0.0, "device": 1.0}.get(self.step, _share(self.step))
        if share is None:
            raise ConfigError(
                f"{prefix}step: no such choice {self.step!r} (one of: auto, device, host, or the share, 0 to "
                "1, of the trained bytes that steps on the device)"
            )
        if share == 0.0:
            return "host"
        if self.master:
            raise ConfigError(
                f"{prefix}master: masters are stepped in host memory; leave {prefix}step at auto or host"
            )
        for key in ("cache", "resident") if self.step == "device" else ("resident",):
            if getattr(self, key) != "auto":
                stays = "everything" if self.step == "device" else "what steps there"
                raise ConfigError(
                    f"{prefix}step: on the device {stays} stays there; leave out {key}, or leave step at "
                    "auto or host"
                )
        return "device" if self.step == "device" else share

    def _resident(self, prefix: str) -> float | None:
        if self.resident == "auto":
            return None
        share = _share(self.resident)
        if share is None:
            raise ConfigError(
                f"{prefix}resident: {self.resident!r} is neither a share between 0 and 1 nor auto"
            )
        return share


def _share(text: str) -> float | None:
    """Return a number between 0 and 1; None for other texts."""
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0.0 <= share <= 1.0 else None


def check_folder(budgets: Budgets, prefix: str = "") -> None:
    """Raise ConfigError where the disk tier's folder is none that can be written to, or holds too little."""
    if not budgets.disk:
        return
    folder = Path(budgets.folder)
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{prefix}disk: {budgets.folder} {what}; give a folder on the disk, like {_DISK}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{prefix}disk: {budgets.folder} is not writable; give a folder that is")
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if free < budgets.disk:
        raise ConfigError(
            f"{prefix}disk: {budgets.folder} has {format_bytes(free)} free, and the budget is "
            f"{format_bytes(budgets.disk)}; give a smaller budget, or another folder"
        )


def _size(name: str, text: str) -> int:
    try:
        count = parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if count <= 0:
        raise ConfigError(f"{name}: a budget of 0 holds nothing; write it like 2GiB, or leave the key out")
    return count


def _check_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ConfigError(f"{name}: no such choice {given!r} (one of: {', '.join(choices)})")
