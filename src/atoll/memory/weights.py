"""Weights in safetensors files, read and written one tensor at a time. Source: docs/memory.md, "Loading and
saving weights"."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, nn

from atoll.core.errors import CheckpointError
from atoll.tensors.lazy import LazyTensor
from atoll.tensors.tensorfile import check_tensor, flush, put_checked_tensors
from atoll.tensors.tensorreader import TensorEntry, TensorFile

_NAMED = 3  # names of each kind of fault in a message


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's state_dict to the safetensors file `path`.

    The file replaces an older one at once, or not at all. Only one tensor at a time is in memory beside the
    model's own. `model.load_state_dict(safetensors.torch.load_file(path))` loads it in plain torch, as a tied
    parameter is stored under each of its names.

    Raises CheckpointError for an entry that is no tensor, and for a file that cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is a {type(value).__name__}, and a file of weights holds tensors alone; "
                "session.save writes both"
            )
        check_tensor(value, f"{path}: {name!r}")
        tensors[name] = as_lazy(value)
    try:
        with _replaced(Path(os.path.realpath(path))) as file:
            put_checked_tensors(file, tensors)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from None


def load(model: nn.Module, path: str | os.PathLike[str], *, cast: bool = False) -> None:
    """Copy the tensors of safetensors files into the model, one at a time.

    Before the first value is changed, these are checked: the files' length; the checksum, if `save` wrote it;
    names, shapes and dtypes. A tied parameter needs only one of its names.

    Args:
        path: a file, or the index of several files (`model.safetensors.index.json`).
        cast: True if other dtypes are converted.

    Raises CheckpointError, one line that names what is missing, unexpected, or of another shape or dtype.
    """
    with ExitStack() as opened:
        sources: dict[str, TensorFile] = {}
        for file, names in _files(Path(path)):
            held = opened.enter_context(TensorFile(file))
            held.verify()
            sources.update(dict.fromkeys(held.entries if names is None else names, held))
        for name, held in sources.items():
            if name not in held.entries:
                raise CheckpointError(f"{held.path}: holds no {name!r}, of which {path} says that it does")
        wanted = {n: v for n, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
        found = {name: held.entries[name] for name, held in sources.items()}
        stored_as = _stored_as(wanted, found)
        faults = _faults(wanted, found, stored_as, cast)
        if faults:
            raise CheckpointError(f"{path}: {'; '.join(faults)}")
        state = {name: sources[stored].lazy(stored) for name, stored in stored_as.items()}
        model.load_state_dict(state, strict=False)  # entries that are no tensors were left out above


def as_lazy(value: Tensor) -> Tensor:
    """Return `value`, or, for a parameter whose value may lie elsewhere, a tensor that is read when it is
    used."""
    stored: Any = getattr(value, "stored_value", None)
    return value.detach() if stored is None else LazyTensor(stored, value.shape, value.dtype)


def _stored_as(wanted: Mapping[str, Tensor], found: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the name in the file for each of the model's names. Of tied names, the file may have only
    one."""
    tied: dict[int, list[str]] = {}
    for name, value in wanted.items():
        tied.setdefault(id(value), []).append(name)
    stored_as = {}
    for name, value in wanted.items():
        names = [name, *tied[id(value)]]
        there = next((other for other in names if other in found), None)
        if there is not None:
            stored_as[name] = there
    return stored_as


def _faults(
    wanted: Mapping[str, Tensor], found: Mapping[str, TensorEntry], stored_as: Mapping[str, str], cast: bool
) -> list[str]:
    """Return the mismatches, in words; empty if everything fits."""
    missing = [repr(name) for name in wanted if name not in stored_as]
    unexpected = [repr(name) for name in found if name not in wanted]
    shapes, dtypes = [], []
    for name, stored in stored_as.items():
        entry, value = found[stored], wanted[name]
        if entry.shape != tuple(value.shape):
            shapes.append(f"{name!r} is {entry.shape} there and {tuple(value.shape)} in the model")
        elif entry.dtype != value.dtype and not cast:
            dtypes.append(f"{name!r} is {_short(entry)} there and {_short(value)} in the model")
    faults = []
    if missing:
        faults.append(f"holds no {_listed(missing)}, which the model has")
    if unexpected:
        faults.append(f"holds {_listed(unexpected)}, which the model lacks")
    if shapes:
        faults.append(_listed(shapes))
    if dtypes:
        faults.append(f"{_listed(dtypes)} (cast=True converts)")
    return faults


def _short(of: TensorEntry | Tensor) -> str:
    return str(of.dtype).removeprefix("torch.")


def _listed(things: list[str]) -> str:
    more = f" and {len(things) - _NAMED} more" if len(things) > _NAMED else ""
    return ", ".join(things[:_NAMED]) + more


def _files(path: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Yield the files of `path`, each with the names that it must hold; None for all that it has."""
    if path.suffix != ".json":
        yield path, None
        return
    by_file: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(path.read_bytes())["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not a file of this folder")
            by_file.setdefault(file, []).append(name)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index of files of tensors: {error!r}") from None
    for file, names in by_file.items():
        yield path.parent / file, names


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path`, synced to the disk, when the block ends without an error."""
    # A name of its own: if two processes save to one path, the one that ends last is found there.
    writing = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.writing")
    try:
        with writing.open("wb") as file:
            yield file
            flush(file)
        writing.replace(path)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
