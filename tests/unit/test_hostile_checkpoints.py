"""Checkpoint folders that hold anything: one line each, nothing waits, and no foreign file is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.errors import CheckpointError
from atoll.tensors.checkpoint import is_checkpoint_there, read_checkpoint, write_checkpoint

MODEL = {"weight": torch.arange(6.0)}
TREES = {"optimizer": {"m": torch.ones(2)}, "state": {"iteration": 3}}
FILES = ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")
SECONDS = 10
HALVES = "support.optimizers:Halves"  # a class of tensors


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A test that hangs in a read is interrupted: SIGALRM ends the wait of an open, too."""

    def late(*_: object) -> None:
        raise AssertionError(f"it took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def checkpoint(folder: Path) -> Path:
    write_checkpoint(folder, model=MODEL, trees=TREES)
    return folder


def listing(folder: Path) -> dict[str, object]:
    """All that lies in a folder, links not followed."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = path.read_bytes() if path.is_file() else oct(path.stat().st_mode)
    return found


def refused(act: Callable[[], object], where: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        act()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 1000
    assert where in line
    return line


# -- what may stand in the place of a file -----------------------------------------------------------------


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # a socket's path is at most 108 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


OTHERS: dict[str, Callable[[Path], None]] = {
    "pipe": make_pipe,
    "socket": make_socket,
    "folder": make_folder,
    "zeros without end": link_to("/dev/zero"),
    "terminal": link_to("/dev/tty"),
    "nothing": link_to("nowhere"),
    "circle": lambda path: path.symlink_to(path.name),
    "pipe elsewhere": lambda path: (
        make_pipe(path.parent.parent / "elsewhere"),
        path.symlink_to("../elsewhere"),
    )[0],
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("lazily", [False, True], ids=["whole", "lazily"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, other: str, lazily: bool) -> None:
    path = checkpoint(tmp_path / "c") / name
    path.unlink()
    OTHERS[other](path)
    if name != "manifest.json":  # also where the manifest says what `stat` says of it
        manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": path.stat().st_size if path.exists() else 0, "crc32": 0}
        (tmp_path / "c" / "manifest.json").write_text(json.dumps(manifest))
    before = listing(tmp_path)
    refused(lambda: read_checkpoint(tmp_path / "c", lazily=lazily), name)
    assert is_checkpoint_there(tmp_path / "c")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("other", OTHERS)
def test_saving_over_such_a_folder_takes_nothing_foreign_away(tmp_path: Path, name: str, other: str) -> None:
    """It is refused, or saved: then what is gone is the link, and not what it leads to."""
    path = checkpoint(tmp_path / "c") / name
    (tmp_path / "c" / "notes.txt").write_text("mine")
    path.unlink()
    OTHERS[other](path)
    before = listing(tmp_path)
    said = ""
    try:
        checkpoint(tmp_path / "c")
    except CheckpointError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        assert listing(tmp_path) == before
    else:
        assert path.is_file()
        assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
        assert os.path.lexists(tmp_path / "elsewhere") == ("elsewhere" in before)
        assert os.path.lexists("/dev/zero")
    assert not os.path.lexists(tmp_path / ".c.writing")
    assert not os.path.lexists(tmp_path / ".c.old")


def test_files_may_be_links_to_files(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c") / "model.safetensors"
    path.rename(tmp_path / "elsewhere.safetensors")
    path.symlink_to("../elsewhere.safetensors")
    assert torch.equal(read_checkpoint(tmp_path / "c").model["weight"], MODEL["weight"])
    checkpoint(tmp_path / "c")
    assert (tmp_path / "elsewhere.safetensors").is_file()  # the link is replaced, and not what it leads to


# -- manifests ---------------------------------------------------------------------------------------------


def with_size(text: str) -> Callable[[dict[str, Any]], str]:
    """The manifest's text, where the model's size is `text`."""

    def changed(manifest: dict[str, Any]) -> str:
        manifest["files"]["model.safetensors"]["bytes"] = "SIZE"
        return json.dumps(manifest).replace('"SIZE"', text)

    return changed


def with_file(name: str) -> Callable[[dict[str, Any]], str]:
    def changed(manifest: dict[str, Any]) -> str:
        manifest["files"][name] = {"bytes": 4, "crc32": 0}
        return json.dumps(manifest)

    return changed


def with_fields(**fields: Any) -> Callable[[dict[str, Any]], str]:
    return lambda manifest: json.dumps(manifest | fields)


MANIFESTS: dict[str, Callable[[dict[str, Any]], str]] = {
    **{f"a size of {text[:12]}": with_size(text) for text in (
        "Infinity", "-Infinity", "NaN", "1e400", "-1", "1.5", "true", "null", '"12"', "[1]", "{}",
        "9" * 400, "9" * 5000, str(2**63),
    )},
    **{f"a file {name[:12]!r}": with_file(name) for name in (
        "", ".", "..", "/etc/passwd", "../x", "a/b.safetensors", "a\nb.safetensors", "\0.safetensors",
        "\ud800.safetensors", "x" * 300 + ".safetensors", "thesis.tex", ".safetensors",
    )},
    "a format of any length": with_fields(format="x\n" * 10**5),
    "a version of any depth": lambda manifest: json.dumps(manifest | {"version": 0}).replace(
        '"version": 0', '"version": ' + "[" * 900 + "]" * 900
    ),
    "too deep": lambda manifest: "[" * 10**5,
    "files that are a list": with_fields(files=["model.safetensors"]),
    "files that are text": with_fields(files="model.safetensors"),
    "files of numbers": with_fields(files={"model.safetensors": 1, "state.json": 2}),
    "no text": lambda manifest: "\0" * 100,
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_hostile_manifest_is_one_line(tmp_path: Path, case: str) -> None:
    path = checkpoint(tmp_path / "c") / "manifest.json"
    path.write_text(MANIFESTS[case](json.loads(path.read_text())))
    (tmp_path / "c" / "thesis.tex").write_text("mine")
    refused(lambda: read_checkpoint(tmp_path / "c"), "manifest.json")
    if "format" in case:  # it is another program's folder
        refused(lambda: checkpoint(tmp_path / "c"), "exists and is not a checkpoint")
    else:
        checkpoint(tmp_path / "c")
    assert (tmp_path / "c" / "thesis.tex").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_a_manifest_that_is_no_utf8_and_one_of_a_terabyte(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c") / "manifest.json"
    path.write_bytes(b'{"format": "\xff"}')
    refused(lambda: read_checkpoint(tmp_path / "c"), "manifest.json")
    os.truncate(path, 2**40)  # holes
    refused(lambda: read_checkpoint(tmp_path / "c"), "manifest.json")


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "float", "value": 10**400},
        {"$": "float", "value": []},
        {"$": "array", "dtype": "<f4", "shape": [2**80], "data": ""},
        {"$": "array", "dtype": "<f4,", "shape": [1], "data": ""},
        {"$": "array", "dtype": "O", "shape": [1], "data": ""},
        {"$": "array", "dtype": {"names": 3}, "shape": [1], "data": ""},
        {"$": "tensor", "name": ["x"]},
        {"$": "complex", "name": "m"},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": 5},
        {"$": "Counter", "items": [[1]]},
        {"$": "dtype", "name": "save"},
        {"$": "wrapped", "class": "os:system", "parts": {}, "shape": [1], "stride": [1], "context": None},
        {"$": "wrapped", "class": HALVES, "parts": {}, "shape": [1], "stride": [1], "context": None},
        {"$": "wrapped", "class": HALVES, "parts": 3, "shape": [1], "stride": [1], "context": None},
        {"$": "wrapped", "class": 3},
        {"$": []},
        {"$": "\ud800" * 10**5},
    ],
    ids=str,
)
def test_a_hostile_state_is_one_line(tmp_path: Path, tree: Any) -> None:
    folder = checkpoint(tmp_path / "c")
    state = json.loads((folder / "state.json").read_text())
    state["trees"]["state"] = tree
    raw = json.dumps(state).encode()
    (folder / "state.json").write_bytes(raw)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(raw), "crc32": zlib.crc32(raw)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused(lambda: read_checkpoint(folder), "state.json")


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [2**63, 0], [0, 10**30]], ids=str)
def test_a_tensor_of_no_bytes_and_an_impossible_shape(tmp_path: Path, shape: list[int]) -> None:
    folder = checkpoint(tmp_path / "c")
    head = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    raw = len(head).to_bytes(8, "little") + head
    (folder / "model.safetensors").write_bytes(raw)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = {"bytes": len(raw), "crc32": zlib.crc32(raw)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if max(shape) < 2**63:  # torch makes an empty tensor of it
        assert read_checkpoint(folder).model["weight"].numel() == 0
    for lazily in (False, True) if max(shape) >= 2**63 else (True,):
        refused(partial(read_checkpoint, folder, lazily=lazily), "model.safetensors")


# -- places ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["a\0b", "\ud800", "/", "x" * 300, "/dev/null", "/dev/null/c", "/proc/self/status"], ids=repr
)
def test_paths_that_no_folder_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: write_checkpoint(path, model=MODEL, trees={}), "")
    if path != "/":
        refused(lambda: read_checkpoint(path), "")
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("other", ["pipe", "socket", "circle"])
def test_a_place_that_is_no_folder(tmp_path: Path, other: str) -> None:
    OTHERS[other](tmp_path / "c")
    before = listing(tmp_path)
    refused(lambda: checkpoint(tmp_path / "c"), "c")
    refused(lambda: read_checkpoint(tmp_path / "c"), "c")
    assert listing(tmp_path) == before


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path) -> None:
    """Root may look into everything, so a child gives its rights up."""
    folder = tmp_path / "locked"
    checkpoint(folder / "c")
    folder.chmod(0)
    child = os.fork() if os.geteuid() == 0 else 0
    if child:
        assert os.waitpid(child, 0)[1] == 0
        folder.chmod(0o700)
        return
    status = 1
    try:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        refused(lambda: read_checkpoint(folder / "c"), "locked")
        refused(lambda: checkpoint(folder / "c"), "locked")
        assert is_checkpoint_there(folder / "c")
        status = 0
    finally:
        if os.getuid() == 65534:
            os._exit(status)
        folder.chmod(0o700)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opens = checkpoint(tmp_path / "c") / name, os.open

    def denied(which: Any, *rest: Any, **more: Any) -> int:
        if os.fspath(which) == str(path):
            raise PermissionError(13, "Permission denied", str(which))
        return opens(which, *rest, **more)

    monkeypatch.setattr(os, "open", denied)
    assert "Permission denied" in refused(lambda: read_checkpoint(tmp_path / "c"), name)


# -- what lies beside --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["old", "writing"])
@pytest.mark.parametrize("there", [True, False], ids=["over one", "anew"])
@pytest.mark.parametrize(
    "other",
    ["link to foreign files", "link to a checkpoint", "folder", "pipe", "file", "socket", "named alike"],
)
def test_what_lies_in_a_writers_way_is_never_moved(
    tmp_path: Path, what: str, there: bool, other: str
) -> None:
    beside = tmp_path / f".c.{what}"
    if there:
        checkpoint(tmp_path / "c")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    checkpoint(tmp_path / "best")
    (tmp_path / "best" / "thesis.tex").write_text("mine")
    if other == "link to foreign files":
        beside.symlink_to("home")
    elif other == "link to a checkpoint":
        beside.symlink_to("best")
    elif other == "file":
        beside.write_text("mine")
    elif other == "named alike":  # a folder that has the name of a checkpoint's file
        checkpoint(tmp_path / "b").rename(beside)
        (beside / "state.json").unlink()
        make_folder(beside / "state.json")
    else:
        OTHERS[other](beside)
    before = listing(tmp_path)
    line = refused(lambda: checkpoint(tmp_path / "c"), f".c.{what}")
    assert line.endswith(("move it away and save again", "move it away"))
    assert listing(tmp_path) == before
    if other == "pipe":
        beside.unlink()
        checkpoint(tmp_path / "c")


def test_a_foreign_file_that_both_have_stays_in_the_old_one(tmp_path: Path) -> None:
    checkpoint(tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("old")
    (tmp_path / "c").rename(tmp_path / ".c.old")
    checkpoint(tmp_path / "other").rename(tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("new")
    for _ in range(2):
        refused(lambda: checkpoint(tmp_path / "c"), ".c.old: holds 'notes.txt'")
    assert (tmp_path / ".c.old" / "notes.txt").read_text() == "old"
    assert (tmp_path / "c" / "notes.txt").read_text() == "new"
    (tmp_path / "c" / "notes.txt").unlink()
    checkpoint(tmp_path / "c")
    assert (tmp_path / "c" / "notes.txt").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


@pytest.mark.parametrize("manifest", ['{"name": "my extension", "version": 3}', "not JSON", "[]", "7"])
def test_a_folder_with_another_programs_manifest_is_not_replaced(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text(manifest)
    before = listing(tmp_path)
    refused(lambda: checkpoint(tmp_path / "c"), "exists and is not a checkpoint")
    assert listing(tmp_path) == before


def test_a_manifest_that_names_foreign_files_does_not_delete_them(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c") / "manifest.json"
    names = ["thesis.tex", "sub", "../outside.txt"]
    (tmp_path / "c" / "thesis.tex").write_text("mine")
    (tmp_path / "c" / "sub").mkdir()
    (tmp_path / "c" / "sub" / "more.tex").write_text("mine")
    (tmp_path / "outside.txt").write_text("mine")
    manifest = json.loads(path.read_text())
    manifest["files"] |= {name: {"bytes": 4, "crc32": 0} for name in names}
    path.write_text(json.dumps(manifest))
    checkpoint(tmp_path / "c")
    for kept in ("c/thesis.tex", "c/sub/more.tex", "outside.txt"):
        assert (tmp_path / kept).read_text() == "mine"
    assert read_checkpoint(tmp_path / "c").trees["state"] == {"iteration": 3}
