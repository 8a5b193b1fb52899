"""Checkpoints on disk: folders of tensors and JSON, replaced atomically.

    model.safetensors       the model's state_dict; opens in plain torch by safetensors.torch
    NAME.safetensors        the tensors of the tree NAME ("optimizer")
    state.json              all that is not a tensor
    manifest.json           each file's size and checksum; written last

A checkpoint NAME is first written as `.NAME.writing`, flushed to the disk, and renamed. An older checkpoint
NAME is renamed to `.NAME.old` before, and removed afterwards. Whenever the writer dies, one of the three
folders is whole, and the reader finds it.

Others may write into these folders too. Only regular files are read. Only files with names that a checkpoint
uses are removed, and only from folders that are checkpoints; anything else is refused.
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
    kind_of,
    open_regular,
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
_EXTRA = "extra"  # the tree of a state_dict's entries that are not tensors
_SUFFIX = ".safetensors"
_STATE, _MANIFEST = "state.json", "manifest.json"
_LENGTH = 8  # bytes of the length at the beginning of a packed checkpoint
_LONGEST_MANIFEST = 2**20  # bytes; a checkpoint has a handful of files
_LONGEST_NAME = 255  # bytes of a file's name: the limit of file systems
_SHOWN = 40  # characters of a file's text that a message quotes


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint, with all tensors on the CPU.

    Attributes:
        model: the model's state_dict.
        trees: the other trees by name ("optimizer").
        path: the folder that was read. It differs from the one asked for if a writer died between its two
            renames.
        digest: SHA-256 of the manifest, and so of every file's size and checksum.
    """

    model: dict[str, Any]
    trees: dict[str, Any]
    path: Path
    digest: str


def write_checkpoint(
    path: str | os.PathLike[str], *, model: Mapping[str, Any], trees: Mapping[str, object]
) -> None:
    """Write a checkpoint to the folder `path`, atomically replacing an older one.

    Files of others in the folder stay there.

    Args:
        path: the folder; missing parents are created.
        model: a state_dict. A tied parameter is stored under each of its names, so that plain torch's
            `model.load_state_dict(safetensors.torch.load_file(...))` finds them all.
        trees: nested dicts (keys are text or int), lists and tuples of numbers, text, bytes, None, tensors
            and NumPy arrays, by name.

    Raises CheckpointError, naming the place in the tree, for other values; also if the disk fails, or if
    something that is not a checkpoint lies at `path` or beside it. An older checkpoint is then unchanged.
    """
    for name in trees:
        if not name.isidentifier() or name in (MODEL, _EXTRA):
            raise CheckpointError(f"a checkpoint's part cannot be called {name!r}; use a plain word")
    place = _place_of(path)
    writing, is_ours = _beside(place, "writing"), False
    try:
        _check_replaceable(place)
        _check_leftovers(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        _recover(place)
        writing.mkdir()
        is_ours = True
        _write_files(writing, model, trees)
        _move_into_place(place)
    except (OSError, CheckpointError) as error:
        if is_ours:
            shutil.rmtree(writing, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot write the checkpoint: {error.strerror or error}") from None


def is_checkpoint_there(path: str | os.PathLike[str]) -> bool:
    """True if there is more at `path` than an empty folder: a checkpoint, perhaps a damaged one."""
    place = _place_of(path)
    try:
        if place.is_dir():
            return any(place.iterdir())
        return place.exists() or any(_is_whole(_beside(place, what)) for what in ("writing", "old"))
    except OSError:  # no permission to look: `read_checkpoint` will say so
        return True


def read_checkpoint(path: str | os.PathLike[str], *, lazily: bool = False) -> Checkpoint:
    """Read the checkpoint in the folder `path`, after a check of all sizes and checksums.

    With `lazily`, its tensors are `LazyTensor`s, each read when used, for a model that does not fit in
    memory. Raises CheckpointError, one line that names the file, if there is none or it is damaged.
    """
    place = _place_of(path)
    try:
        if not place.exists():
            # A writer that died between its two renames has left both the new and the old one whole.
            for candidate in (_beside(place, "writing"), _beside(place, "old")):
                if not candidate.is_symlink() and _is_whole(candidate):
                    place = candidate
                    break
            else:
                raise CheckpointError(f"{path}: there is no checkpoint here")
        elif not place.is_dir():
            kind = kind_of(place.stat().st_mode)
            raise CheckpointError(f"{path}: is {kind}; a checkpoint is the folder that holds {_MANIFEST}")
        manifest = _verified(place)
        return _read_files(place, manifest, read_lazily if lazily else read_tensors)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def pack(*, model: Mapping[str, Any], trees: Mapping[str, object]) -> bytes:
    """Return a checkpoint as bytes, for another process; `model` and `trees` as in `write_checkpoint`.

    The bytes are: eight of length, a JSON header of that length with the size and CRC-32 of each part, and
    the parts, which are files of tensors and last state.json. Raises CheckpointError, naming the place in
    the tree, for a value that a checkpoint cannot hold.
    """
    tensors, state = _encoded(model, trees)
    body = io.BytesIO()
    parts = [(name, *put_tensors(body, part)) for name, part in tensors.items()]
    data = _as_json(state, _STATE)
    body.write(data)
    parts.append((_STATE, len(data), zlib.crc32(data)))
    head = json.dumps({"format": FORMAT, "version": VERSION, "parts": parts}).encode()
    return b"".join([len(head).to_bytes(_LENGTH, "little"), head, body.getbuffer()])


def unpack(raw: bytes | bytearray | memoryview, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's state_dict and the trees of bytes from `pack`, all tensors on the CPU.

    Nothing is unpickled, and sizes are compared with the bytes before memory is allocated. Raises
    CheckpointError, one line that begins with `what`, if the bytes are damaged.
    """
    view = memoryview(raw)
    size = int.from_bytes(view[:_LENGTH], "little")
    if len(view) < _LENGTH or size > len(view) - _LENGTH:
        raise CheckpointError(f"{what}: {len(view)} bytes that are not a checkpoint")
    begin = _LENGTH + size
    try:
        head = json.loads(bytes(view[_LENGTH:begin]))
        kind, version = head["format"], head["version"]
        parts = [(str(name), int(length), int(checksum)) for name, length, checksum in head["parts"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{what}: its header is damaged") from None
    if kind != FORMAT or version != VERSION:
        raise CheckpointError(f"{what}: format {kind!r} {version!r}; this Atoll reads {FORMAT!r} {VERSION}")
    if (
        min((length for _, length, _ in parts), default=0) < 0
        or sum(p[1] for p in parts) != len(view) - begin
    ):
        raise CheckpointError(f"{what}: the sizes of its parts differ from its header")
    found: dict[str, bytes] = {}
    for name, length, checksum in parts:
        found[name] = bytes(view[begin : begin + length])
        begin += length
        if zlib.crc32(found[name]) != checksum:
            raise CheckpointError(f"{what}: {name} is damaged: its checksum differs from the sender's")
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
    files = {name: write_tensors(folder / name, part) for name, part in tensors.items()}
    files[_STATE] = _write_json(folder / _STATE, state)
    described = {name: {"bytes": size, "crc32": checksum} for name, (size, checksum) in files.items()}
    _write_json(folder / _MANIFEST, {"format": FORMAT, "version": VERSION, "files": described})
    _sync_folder(folder)


def _encoded(
    model: Mapping[str, Any], trees: Mapping[str, object]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return the tensors of each safetensors file, by the file's name, and the contents of state.json."""
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
    """Split a state_dict into its tensors and its other values."""
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
    """Write a value as JSON and flush it to the disk; returns the size in bytes and the CRC-32."""
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
    with open_regular(state_file) as file:
        model, trees = _decoded(file.read(), tensors, str(state_file))
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return Checkpoint(model, trees, folder, digest)


def _decoded(
    raw: bytes, tensors: Mapping[str, Mapping[str, Tensor]], what: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's state_dict and the trees, from state.json's bytes and each file's tensors."""
    try:
        state = json.loads(raw)
        trees = {name: decode(tree, tensors.get(name, {})) for name, tree in state["trees"].items()}
        model: dict[str, Any] = {**tensors[MODEL], **trees.pop(_EXTRA)}
        for name in state["complex"]:
            model[name] = as_complex(model[name])
        return {name: model[name] for name in state["names"]}, trees
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from None
    except Exception as error:  # json, NumPy and torch raise many kinds
        # The checksum is right, so another program has written this.
        raise CheckpointError(f"{what}: not the state of a checkpoint: {_short(error)}") from None


def _verified(folder: Path) -> dict[str, Any]:
    """Return the folder's manifest, after a check of every file that it names; raises CheckpointError."""
    path = folder / _MANIFEST
    try:
        manifest = _read_manifest(folder)
        kind, version, files = manifest["format"], manifest["version"], manifest["files"]
        if kind == FORMAT and version == VERSION:
            expected = {name: (_count(f["bytes"]), _count(f["crc32"])) for name, f in files.items()}
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
        raise CheckpointError(
            f"{path}: format {_short(kind)} {_short(version)}; this Atoll reads {FORMAT!r} {VERSION}"
        )
    for name, (size, checksum) in expected.items():
        _verify(folder, name, size, checksum)
    return {"files": expected}


def _read_manifest(folder: Path) -> Any:
    """Return the JSON of the folder's manifest; raises OSError or ValueError."""
    with open_regular(folder / _MANIFEST) as file:
        raw = file.read(_LONGEST_MANIFEST + 1)
    if len(raw) > _LONGEST_MANIFEST:
        raise ValueError("longer than a manifest")
    return json.loads(raw)


def _count(value: object) -> int:
    """Return `value` if it is an int of 63 bits; raises ValueError for 1e400, NaN, true and others."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("not a size")
    return value


def _short(value: object) -> str:
    """Return the beginning of `value` in one line, for a message: a file may hold text of any length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _may_be_ours(name: str) -> bool:
    """True if a checkpoint can have a file of this name."""
    is_tensors = name.endswith(_SUFFIX) and name.removesuffix(_SUFFIX).isidentifier()
    return name in (_MANIFEST, _STATE) or (is_tensors and len(os.fsencode(name)) <= _LONGEST_NAME)


def _verify(folder: Path, name: str, size: int, checksum: int) -> None:
    path = folder / name
    if not _may_be_ours(name):
        raise CheckpointError(f"{folder / _MANIFEST}: names {_short(name)}, which is no file of a checkpoint")
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno()).st_size
        if found != size:
            raise CheckpointError(
                f"{path}: damaged: {found} bytes, and {size} were written; take another checkpoint"
            )
        if checksum_of(path) != checksum:
            raise CheckpointError(
                f"{path}: damaged: its checksum differs from the recorded one; take another checkpoint"
            )
    except OSError as error:
        raise CheckpointError(f"{path}: damaged: {error.strerror}; take another checkpoint") from None


def _is_whole(folder: Path) -> bool:
    try:
        _verified(folder)
    except CheckpointError:
        return False
    return True


def _place_of(path: str | os.PathLike[str]) -> Path:
    """Return the real path of the folder, with links resolved.

    Raises CheckpointError for a path that no folder can have.
    """
    try:
        place = Path(os.path.realpath(os.fsdecode(path)))
        os.fsencode(place)
    except (OSError, ValueError) as error:  # a null byte, a lone surrogate
        raise CheckpointError(f"{_short(path)}: no path of a folder: {error}") from None
    if not place.name:
        raise CheckpointError(
            f"{path}: the root of a file system cannot be a checkpoint; name a folder in it"
        )
    return place


def _beside(place: Path, what: str) -> Path:
    return place.with_name(f".{place.name}.{what}")


def _check_replaceable(place: Path) -> None:
    """Raise CheckpointError if `place` holds something that is neither a checkpoint nor an empty folder."""
    if not place.exists():
        return
    if not place.is_dir() or (any(place.iterdir()) and not _is_checkpoint(place)):
        raise CheckpointError(f"{place}: exists and is not a checkpoint; name a folder that is new or one")
    _check_names(place)


def _check_leftovers(place: Path) -> None:
    """Raise CheckpointError if a writer's working folders exist and hold foreign things."""
    for beside in (_beside(place, "writing"), _beside(place, "old")):
        if not os.path.lexists(beside):
            continue
        kind = kind_of(beside.lstat().st_mode)
        what = "" if kind == "a folder" else f"is {kind}, and no folder of an unfinished checkpoint"
        if not what:
            _check_names(beside)
            # Foreign files in an old checkpoint are fine: they move on to the new one.
            is_old = beside.name.endswith(".old") and _is_checkpoint(beside)
            foreign = [name for name in _names_in(beside) if not _may_be_ours(name)]
            if foreign and not is_old:
                what = f"holds {_short(foreign[0])}, which is no file of a checkpoint"
        if what:
            raise CheckpointError(
                f"{beside}: {what}: Atoll saves {place.name} by way of it; move it away and save again"
            )


def _is_checkpoint(folder: Path) -> bool:
    """True if the manifest is a checkpoint's, or is damaged and a checkpoint's other files lie beside it."""
    try:
        manifest = _read_manifest(folder)
        return bool(manifest["format"] == FORMAT)
    except OSError:
        return False
    except (ValueError, RecursionError):
        return (folder / _STATE).is_file() or (folder / (MODEL + _SUFFIX)).is_file()
    except (KeyError, TypeError):  # another program's manifest
        return False


def _check_names(folder: Path) -> None:
    """Raise CheckpointError if a folder or device, say, has the name of a checkpoint's file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _may_be_ours(entry.name) and not (entry.is_symlink() or entry.is_file()):
                kind = kind_of(entry.stat(follow_symlinks=False).st_mode)
                raise CheckpointError(
                    f"{folder / entry.name}: is {kind}, and no file of a checkpoint; move it away"
                )


def _recover(place: Path) -> None:
    """Finish or undo the unfinished work of a writer that died."""
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


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _retire(place: Path, old: Path) -> None:
    """Remove an old checkpoint; foreign files in its folder move to the new one.

    The manifest goes last: it marks the folder as Atoll's.
    """
    ours = _files_of(old, place)
    for entry in old.iterdir():
        if entry.name not in ours and not os.path.lexists(place / entry.name):
            entry.rename(place / entry.name)
    for name in ours - {_MANIFEST}:
        (old / name).unlink(missing_ok=True)
    for left in _names_in(old) - {_MANIFEST}:
        raise CheckpointError(
            f"{old}: holds {_short(left)}, which is not Atoll's, and {place} has one, too; move one of them "
            "away"
        )
    (old / _MANIFEST).unlink(missing_ok=True)
    old.rmdir()


def _files_of(old: Path, place: Path) -> set[str]:
    """Return the names of the checkpoint's own files in an old checkpoint's folder.

    They are the files that its manifest or the checkpoint in `place` names. If the manifest is damaged, they
    are all files with names that a checkpoint may use.
    """
    there = {name for name in _names_in(old) if _may_be_ours(name)}
    try:
        named = {name for name in _read_manifest(old)["files"] if _may_be_ours(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return there
    return there & ({_MANIFEST, _STATE, MODEL + _SUFFIX} | named | _names_in(place))


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
