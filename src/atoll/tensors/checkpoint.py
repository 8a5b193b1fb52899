"""Checkpoints on disk: folders of tensors and JSON that are whole or are not there.

    model.safetensors       the model's state_dict; opens in plain torch by safetensors.torch
    NAME.safetensors        the tensors of the tree NAME ("optimizer")
    state.json              everything that is not a tensor
    manifest.json           each file's size and checksum; written last

A checkpoint is written beside its place, as `.NAME.writing`, brought to the disk, and renamed. An older one
at that place is first renamed to `.NAME.old`, and removed when the new one stands. Whenever the writer
dies, one of the three folders is whole, and reading finds it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll.core.errors import CheckpointError
from atoll.tensors.tensorfile import (
    as_complex,
    check_tensor,
    checksum_of,
    flush,
    parse_tensors,
    put_tensors,
    read_tensors,
    write_tensors,
)
from atoll.tensors.tensorreader import read_lazily
from atoll.tensors.trees import Encoder, decode

FORMAT = "atoll checkpoint"
VERSION = 1
MODEL = "model"
_EXTRA = "extra"  # the tree of what a state_dict holds beside tensors
_SUFFIX = ".safetensors"
_STATE, _MANIFEST = "state.json", "manifest.json"
_LENGTH = 8  # bytes


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds; all tensors are on the CPU.

    `path` is the folder that was read: the one asked for, unless a writer died in the moment between the
    two renames. `digest` tells whether two are alike: of its manifest, which has the checksum of every file.
    """

    model: dict[str, Any]
    trees: dict[str, Any]
    path: Path
    digest: str


def write_checkpoint(
    path: str | os.PathLike[str], *, model: Mapping[str, Any], trees: Mapping[str, object]
) -> None:
    """Write a checkpoint to the folder `path`, in place of an older one there, at once or not at all.

    `model` is a state_dict. A tied parameter is stored under each of its names, so that plain torch's
    `model.load_state_dict(safetensors.torch.load_file(...))` finds them all. `trees` are nested dicts (keys
    text or int), lists and tuples of numbers, text, bytes, None, tensors and NumPy arrays. Files that
    others put into the folder stay in it.

    Raises CheckpointError, naming the place in the tree, for anything else; and where the disk says no:
    then an older checkpoint is as it was.
    """
    for name in trees:
        if not name.isidentifier() or name in (MODEL, _EXTRA):
            raise CheckpointError(f"a checkpoint's part cannot be called {name!r}; use a plain word")
    place = Path(os.path.realpath(path))  # a link to a folder stays a link
    writing = _beside(place, "writing")
    try:
        _check_replaceable(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        _recover(place)
        writing.mkdir()
        _write_files(writing, model, trees)
        _move_into_place(place)
    except OSError as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(f"{path}: cannot write the checkpoint: {error.strerror or error}") from None
    except CheckpointError:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def is_checkpoint_there(path: str | os.PathLike[str]) -> bool:
    """Whether something is at `path` that `read_checkpoint` would read, or say what is wrong with it: more
    than an empty folder."""
    place = Path(os.path.realpath(path))
    if place.is_dir():
        return any(place.iterdir())
    return place.exists() or any(_is_whole(_beside(place, what)) for what in ("writing", "old"))


def read_checkpoint(path: str | os.PathLike[str], *, lazily: bool = False) -> Checkpoint:
    """The checkpoint in the folder `path`, after its sizes and checksums have been compared.

    `lazily`: its tensors are `LazyTensor`s, each read when it is used, for a model that does not fit. Raises
    CheckpointError, one line that names the file, where there is none, or it is damaged.
    """
    place = Path(os.path.realpath(path))
    if not place.exists():
        # The writer died between its two renames: the new one is whole, and so is the old one.
        for candidate in (_beside(place, "writing"), _beside(place, "old")):
            if _is_whole(candidate):
                place = candidate
                break
        else:
            raise CheckpointError(f"{path}: there is no checkpoint here")
    elif not place.is_dir():
        raise CheckpointError(f"{path}: is a file; a checkpoint is the folder that holds {_MANIFEST}")
    manifest = _verified(place)
    return _read_files(place, manifest, read_lazily if lazily else read_tensors)


def pack(*, model: Mapping[str, Any], trees: Mapping[str, object]) -> bytes:
    """A checkpoint in memory: what `write_checkpoint` writes, as one run of bytes, for another process.

    It is eight bytes of length, that many of JSON, which says the size and CRC-32 of each part, and the
    parts: files of tensors, and last state.json. Raises CheckpointError as `write_checkpoint` does.
    """
    tensors, state = _encoded(model, trees)
    body = io.BytesIO()
    parts = [(name, *put_tensors(body, held)) for name, held in tensors.items()]
    data = _as_json(state, _STATE)
    body.write(data)
    parts.append((_STATE, len(data), zlib.crc32(data)))
    head = json.dumps({"format": FORMAT, "version": VERSION, "parts": parts}).encode()
    return b"".join([len(head).to_bytes(_LENGTH, "little"), head, body.getbuffer()])


def unpack(raw: bytes | bytearray | memoryview, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's state_dict and the trees in `raw`, all tensors on the CPU; nothing in it is unpickled.

    Sizes are held against the bytes that are there before anything is allocated, and so are checksums.
    Raises CheckpointError, one line that begins with `what`, for anything but what `pack` makes.
    """
    view = memoryview(raw)
    size = int.from_bytes(view[:_LENGTH], "little")
    if len(view) < _LENGTH or size > len(view) - _LENGTH:
        raise CheckpointError(f"{what}: {len(view)} bytes, which are no checkpoint")
    begin = _LENGTH + size
    try:
        head = json.loads(bytes(view[_LENGTH:begin]))
        kind, version = head["format"], head["version"]
        parts = [(str(name), int(length), int(checksum)) for name, length, checksum in head["parts"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{what}: its head is damaged") from None
    if kind != FORMAT or version != VERSION:
        raise CheckpointError(f"{what}: format {kind!r} {version!r}; this Atoll reads {FORMAT!r} {VERSION}")
    if (
        min((length for _, length, _ in parts), default=0) < 0
        or sum(p[1] for p in parts) != len(view) - begin
    ):
        raise CheckpointError(f"{what}: its parts are of other sizes than its head says")
    found: dict[str, bytes] = {}
    for name, length, checksum in parts:
        found[name] = bytes(view[begin : begin + length])
        begin += length
        if zlib.crc32(found[name]) != checksum:
            raise CheckpointError(f"{what}: {name} is damaged: its checksum is not that of what was sent")
    if not {MODEL + _SUFFIX, _STATE} <= found.keys():
        raise CheckpointError(f"{what}: holds too few parts")
    tensors = {
        name.removesuffix(_SUFFIX): parse_tensors(part, f"{what}: {name}")
        for name, part in found.items()
        if name.endswith(_SUFFIX)
    }
    return _decoded(found[_STATE], tensors, f"{what}: {_STATE}")


def _write_files(folder: Path, model: Mapping[str, Any], trees: Mapping[str, object]) -> None:
    tensors, state = _encoded(model, trees)
    files = {name: write_tensors(folder / name, held) for name, held in tensors.items()}
    files[_STATE] = _write_json(folder / _STATE, state)
    described = {name: {"bytes": size, "crc32": checksum} for name, (size, checksum) in files.items()}
    _write_json(folder / _MANIFEST, {"format": FORMAT, "version": VERSION, "files": described})
    _sync_folder(folder)


def _encoded(
    model: Mapping[str, Any], trees: Mapping[str, object]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors of each file of tensors, and what state.json holds."""
    tensors, extra = _divided(model)
    files = {MODEL + _SUFFIX: tensors}
    encoded: dict[str, Any] = {}
    for name, tree in {**trees, _EXTRA: extra}.items():
        encoder = Encoder()
        encoded[name] = encoder.encode(tree, MODEL if name == _EXTRA else name)
        if encoder.tensors:
            files[name + _SUFFIX] = encoder.tensors
    return files, {
        "names": list(model),
        "complex": [name for name, tensor in tensors.items() if tensor.is_complex()],
        "trees": encoded,
    }


def _divided(model: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state_dict's tensors, and what in it is no tensor."""
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in model.items():
        if not isinstance(value, Tensor):
            extra[name] = value
            continue
        check_tensor(value, f"{MODEL}.{name}")
        tensors[name] = value
    return tensors, extra


def _write_json(path: Path, value: object) -> tuple[int, int]:
    """Write JSON through to the disk; returns its bytes and CRC-32."""
    data = _as_json(value, path.name)
    with path.open("xb") as file:
        file.write(data)
        flush(file)
    return len(data), zlib.crc32(data)


def _as_json(value: object, what: str) -> bytes:
    try:
        return json.dumps(value, allow_nan=False, indent=1).encode()
    except ValueError as error:  # an integer of more digits than Python prints
        raise CheckpointError(f"{what}: cannot be written as JSON: {error}") from None


def _read_files(
    folder: Path, manifest: Mapping[str, Any], reads: Callable[[Path], Mapping[str, Tensor]]
) -> Checkpoint:
    state_file = folder / _STATE
    tensors = {
        name.removesuffix(_SUFFIX): reads(folder / name)
        for name in manifest["files"]
        if name.endswith(_SUFFIX)
    }
    model, trees = _decoded(state_file.read_bytes(), tensors, str(state_file))
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return Checkpoint(model, trees, folder, digest)


def _decoded(
    raw: bytes, tensors: Mapping[str, Mapping[str, Tensor]], what: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's state_dict and the trees, of state.json's bytes and the tensors of each file."""
    try:
        state = json.loads(raw)
        trees = {name: decode(tree, tensors.get(name, {})) for name, tree in state["trees"].items()}
        held: dict[str, Any] = {**tensors[MODEL], **trees.pop(_EXTRA)}
        for name in state["complex"]:
            held[name] = as_complex(held[name])
        return {name: held[name] for name in state["names"]}, trees
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        # The checksum is right, so this is what was written: by a program that is not this one.
        raise CheckpointError(f"{what}: not the state of a checkpoint: {error!r}") from None


def _verified(folder: Path) -> dict[str, Any]:
    """The folder's manifest, once all that it names is there as written; raises CheckpointError."""
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        kind, version, files = manifest["format"], manifest["version"], manifest["files"]
        expected = {str(name): (int(f["bytes"]), int(f["crc32"])) for name, f in files.items()}
        if not {MODEL + _SUFFIX, _STATE} <= expected.keys():
            raise ValueError("names too few files")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: not a whole checkpoint: there is no {_MANIFEST}, which is written last"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: damaged; take another checkpoint") from None
    if kind != FORMAT or version != VERSION:
        raise CheckpointError(f"{path}: format {kind!r} {version!r}; this Atoll reads {FORMAT!r} {VERSION}")
    for name, (size, checksum) in expected.items():
        _verify(folder, name, size, checksum)
    return {"files": expected}


def _verify(folder: Path, name: str, size: int, checksum: int) -> None:
    path = folder / name
    if Path(name).name != name:
        raise CheckpointError(f"{folder / _MANIFEST}: names {name!r}, which is not a file of this folder")
    try:
        found = path.stat().st_size
        if found != size:
            raise CheckpointError(
                f"{path}: damaged: {found} bytes, and {size} were written; take another checkpoint"
            )
        if checksum_of(path) != checksum:
            raise CheckpointError(
                f"{path}: damaged: its checksum is not that of what was written; take another checkpoint"
            )
    except OSError as error:
        raise CheckpointError(f"{path}: damaged: {error.strerror}; take another checkpoint") from None


def _is_whole(folder: Path) -> bool:
    try:
        _verified(folder)
    except CheckpointError:
        return False
    return True


def _beside(place: Path, what: str) -> Path:
    return place.with_name(f".{place.name}.{what}")


def _check_replaceable(place: Path) -> None:
    """What a new checkpoint takes the place of is a checkpoint, or empty."""
    if place.is_dir() and ((place / _MANIFEST).exists() or not any(place.iterdir())):
        return
    if place.exists():
        raise CheckpointError(f"{place}: exists and is not a checkpoint; name a folder that is new or one")


def _recover(place: Path) -> None:
    """Finish or undo what a writer that died has left beside `place`."""
    writing, old = _beside(place, "writing"), _beside(place, "old")
    if not place.exists():
        if _is_whole(writing):
            writing.rename(place)
        elif old.exists():
            old.rename(place)
    if writing.exists():
        shutil.rmtree(writing)
    if old.exists():
        _retire(place, old)


def _move_into_place(place: Path) -> None:
    old = _beside(place, "old")
    if place.exists():
        place.rename(old)
    _beside(place, "writing").rename(place)
    _sync_folder(place.parent)
    if old.exists():
        _retire(place, old)


def _retire(place: Path, old: Path) -> None:
    """Remove an old checkpoint; what else lay in its folder moves to the new one."""
    ours = {_MANIFEST, _STATE, MODEL + _SUFFIX} | _named_in_manifest(old)
    for entry in old.iterdir():
        if entry.name not in ours and not (place / entry.name).exists():
            entry.rename(place / entry.name)
    shutil.rmtree(old)


def _named_in_manifest(folder: Path) -> set[str]:
    """The files that a folder's manifest speaks of; none where it cannot be read."""
    try:
        return set(json.loads((folder / _MANIFEST).read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
