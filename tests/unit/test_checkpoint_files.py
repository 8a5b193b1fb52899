"""Checkpoints on disk: what goes in comes out, in plain torch too, and a half-written one is never loaded."""

from __future__ import annotations

import collections
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from atoll.core.errors import CheckpointError
from atoll.tensors.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from atoll.tensors.trees import Encoder, check_encodable, decode
from support.optimizers import Halves

MODEL = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3)}


def round_trip(folder: Path, tree: object) -> Any:
    write_checkpoint(folder / "c", model={}, trees={"state": tree})
    return read_checkpoint(folder / "c").trees["state"]


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return (
        bool(left == right) and math.copysign(1, left) == math.copysign(1, right)
        if left == 0
        else left == right
    )


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [True, False, 0, 1, -7, 2**70, "text", "Umlaut ä \udc80", b"\x00\xff", ""],
        [0.1, 1.0, -0.0, 1e-320, math.inf, -math.inf, math.nan, 1e308],
        (1, (2, [3, ()]), {}),
        {0: "int key", "0": "text key", -5: {"deep": {7: (1,)}}},
        {"$": "a key that looks like ours", "plain": 1},
        {"$": "tensor", "name": "x"},
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.Counter({30: 1, 80: 2}),
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.zeros((0, 3), dtype=np.float16),
        [np.float64(0.5), np.int8(-3), np.bool_(True), np.array(["a", "bc"])],
    ],
    ids=[
        "none",
        "plain",
        "floats",
        "tuples",
        "int keys",
        "dollar",
        "like ours",
        "ordered",
        "counter",
        "array",
        "empty array",
        "scalars",
    ],
)
def test_trees_come_back_exactly(tmp_path: Path, tree: object) -> None:
    assert same(round_trip(tmp_path, tree), tree)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
        torch.complex64, torch.complex128,
    ],
    ids=str,
)  # fmt: skip
def test_tensors_of_every_dtype_and_shape_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = [
        torch.arange(n, dtype=torch.float32).reshape(s).to(dtype)
        for n, s in ((6, (2, 3)), (1, ()), (0, (0, 4)))
    ]
    odd = torch.zeros(3, dtype=torch.uint8)  # moves the others off their natural places
    tree = {"tensors": tensors, "odd": odd}
    back = round_trip(tmp_path, tree)["tensors"]
    write_checkpoint(
        tmp_path / "m", model={str(i): t for i, t in enumerate(tensors)} | {"odd": odd}, trees={}
    )
    model = read_checkpoint(tmp_path / "m").model
    for index, tensor in enumerate(tensors):
        for found in (back[index], model[str(index)]):
            assert found.dtype == dtype
            assert found.shape == tensor.shape
            assert torch.equal(
                found.view(torch.uint8) if found.dim() else found,
                tensor.view(torch.uint8) if tensor.dim() else tensor,
            )


def test_views_strides_and_parameters_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    tree = {
        "transposed": base.transpose(0, 2),
        "slice": base[:, 1:2],
        "expanded": torch.ones(1).expand(5),
        "parameter": nn.Parameter(base.clone()),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    back = round_trip(tmp_path, tree)
    for name, tensor in tree.items():
        assert torch.equal(back[name], tensor.detach()), name
    assert (
        tmp_path / "c" / "state.safetensors"
    ).stat().st_size < 1024  # the slice has not taken its base along


def test_a_tensor_that_occurs_twice_is_stored_once(tmp_path: Path) -> None:
    shared = torch.rand(1000)
    back = round_trip(tmp_path, {"a": shared, "b": [shared, shared[:]]})
    assert (tmp_path / "c" / "state.safetensors").stat().st_size < 2 * 4000
    assert torch.equal(back["a"], shared)
    assert back["b"][0] is back["a"]


def test_places_that_look_alike_keep_their_own_tensors(tmp_path: Path) -> None:
    back = round_trip(
        tmp_path, {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2), 1: torch.ones(1), "1": torch.zeros(1)}
    )
    assert back["a"]["b"].tolist() == [0, 0]
    assert back["a.b"].tolist() == [1, 1]
    assert (back[1].item(), back["1"].item()) == (1, 0)


def test_an_optimizer_and_a_scheduler_come_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 5])
    for _ in range(3):
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    trees = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    write_checkpoint(tmp_path / "c", model=model.state_dict(), trees=trees)
    back = read_checkpoint(tmp_path / "c")
    assert same(back.trees["optimizer"], trees["optimizer"])
    assert same(back.trees["scheduler"], trees["scheduler"])
    optimizer.load_state_dict(back.trees["optimizer"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def get_extra_state(self) -> Any:
        return {"calls": 3, "scale": torch.tensor(2.0)}

    def set_extra_state(self, state: Any) -> None:
        assert state["scale"].item() == 2.0


def test_tied_parameters_and_extra_state_come_back(tmp_path: Path) -> None:
    model = Tied()
    write_checkpoint(tmp_path / "c", model=model.state_dict(), trees={})
    back = read_checkpoint(tmp_path / "c").model
    assert list(back) == list(model.state_dict())
    assert torch.equal(back["head.weight"], model.embedding.weight)
    assert back["_extra_state"]["calls"] == 3
    Tied().load_state_dict(back)


def test_the_model_opens_in_plain_torch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", model=MODEL, trees={})
    plain = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert plain.keys() == MODEL.keys()
    assert all(torch.equal(plain[name], MODEL[name]) for name in MODEL)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embedding.weight

    tied, fresh = Plain(), Plain()
    write_checkpoint(tmp_path / "tied", model=tied.state_dict(), trees={})
    fresh.load_state_dict(safetensors.torch.load_file(tmp_path / "tied" / "model.safetensors"))
    assert torch.equal(fresh.head.weight, tied.head.weight)


def test_the_library_reads_the_file_exactly(tmp_path: Path) -> None:
    """The library checks that offsets have no holes and that the header is what it says it is."""
    model = {
        f"t{i}": torch.rand(i, 3).to(d) for i, d in enumerate([torch.float32, torch.bfloat16, torch.float64])
    }
    write_checkpoint(tmp_path / "c", model=model | {"b": torch.tensor([True])}, trees={})
    with safetensors.safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {*model, "b"}


@pytest.mark.parametrize("values", [torch.rand(3, 2), torch.ones(3, 2, dtype=torch.complex64)])
def test_tensors_of_indices_and_values_come_back(tmp_path: Path, values: torch.Tensor) -> None:
    """As SGD's momentum of sparse gradients; rows that come twice are added."""
    rows = torch.tensor([[5, 1, 5]])
    tensor = torch.sparse_coo_tensor(rows, values, (7, 2), check_invariants=True)
    back = round_trip(tmp_path, {"momentum": tensor, "a": 1})["momentum"]
    assert back.is_sparse
    assert back.is_coalesced()
    assert back.indices().tolist() == [[1, 5]]
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_tensors_that_are_made_of_others_come_back(tmp_path: Path) -> None:
    """As the states of torchao's optimizers; a class that another process has not imported is named."""
    tensor = Halves(torch.rand(3, 2), torch.rand(3, 2).double())
    back = round_trip(tmp_path, {"momentum": tensor, "a": 1})["momentum"]
    assert type(back) is Halves
    assert torch.equal(back.whole(), tensor.whole())
    encoded = Encoder().encode(tensor, "s")
    parts = dict.fromkeys(encoded["parts"])
    with pytest.raises(
        CheckpointError, match=r"'gone:Halves', which is no class of tensors that is imported here"
    ):
        decode({**encoded, "class": "gone:Halves", "parts": parts}, {})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_other_layouts_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^s: a checkpoint .* dense tensors only, .* sparse_csr$"):
        check_encodable(torch.eye(2).to_sparse_csr(), "s")


@pytest.mark.parametrize("rows", [[[0, 7]], [[0, -1]], [[0, 1, 2]]])
def test_indices_that_fit_no_tensor_are_refused(tmp_path: Path, rows: list[list[int]]) -> None:
    value = {"$": "sparse", "shape": [7, 2], "indices": {"$": "tensor", "name": "i"}}
    tensors = {"i": torch.tensor(rows), "v": torch.ones(2, 2)}
    with pytest.raises(RuntimeError):
        decode({**value, "values": {"$": "tensor", "name": "v"}}, tensors)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"schedulers": [{"fn": lambda x: x}]},
            r"state\.schedulers\.0\.fn: the function or class <lambda> cannot be saved",
        ),
        ({"a": object()}, r"state\.a: an object cannot be saved; a checkpoint holds numbers"),
        ({(1, 2): 3}, r"state: the key \(1, 2\) is a tuple; keys are text or whole numbers"),
        ([{1, 2}], r"state\.0: a set cannot be saved"),
        ({"m": torch.empty(2, device="meta")}, r"state\.m: the tensor is on the meta device"),
        ({"o": np.array([object()])}, r"state\.o: a NumPy array of dtype object"),
    ],
    ids=["function", "object", "tuple key", "set", "meta", "object array"],
)
def test_what_cannot_be_saved_is_named_and_leaves_the_old_checkpoint(
    tmp_path: Path, tree: Any, message: str
) -> None:
    write_checkpoint(tmp_path / "c", model=MODEL, trees={"state": 1})
    with pytest.raises(CheckpointError, match=message) as caught:
        write_checkpoint(tmp_path / "c", model=MODEL, trees={"state": tree})
    assert "\n" not in str(caught.value)
    assert read_checkpoint(tmp_path / "c").trees == {"state": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_model_with_a_tensor_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.lazy: .* meta"):
        write_checkpoint(tmp_path / "c", model={"lazy": torch.empty(1, device="meta")}, trees={})
    with pytest.raises(CheckpointError, match=r"part cannot be called '\.\./x'"):
        write_checkpoint(tmp_path / "c", model={}, trees={"../x": 1})


def test_replacing_keeps_what_others_put_into_the_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", model=MODEL, trees={"optimizer": {"m": torch.ones(1)}})
    (tmp_path / "c" / "notes.txt").write_text("mine")
    write_checkpoint(tmp_path / "c", model={}, trees={})
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "notes.txt",
        "state.json",
    ]
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_folders_are_made_and_links_are_followed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "deep" / "er" / "c", model=MODEL, trees={})
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "er" / "c")
    write_checkpoint(tmp_path / "link", model={}, trees={"state": 5})
    assert (tmp_path / "link").is_symlink()
    assert read_checkpoint(tmp_path / "deep" / "er" / "c").trees == {"state": 5}


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("thesis", "file"):
        with pytest.raises(CheckpointError, match=f"{name}: exists and is not a checkpoint"):
            write_checkpoint(tmp_path / name, model=MODEL, trees={})
    assert (tmp_path / "thesis" / "chapter1.tex").exists()
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", model=MODEL, trees={})


def damaged(folder: Path) -> dict[str, Any]:
    """Ways in which a checkpoint can be broken, and the file that the error must name."""
    model, state, manifest = (folder / n for n in ("model.safetensors", "state.json", "manifest.json"))

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def change(**fields: object) -> None:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))

    return {
        "a bit of the model": (lambda: flip(model), "model.safetensors"),
        "a bit of the state": (lambda: flip(state), "state.json"),
        "a short model": (lambda: os.truncate(model, model.stat().st_size - 1), "model.safetensors"),
        "no model": (model.unlink, "model.safetensors"),
        "no state": (state.unlink, "state.json"),
        "no manifest": (manifest.unlink, "manifest.json"),
        "half a manifest": (lambda: os.truncate(manifest, 20), "manifest.json"),
        "an empty manifest": (lambda: os.truncate(manifest, 0), "manifest.json"),
        "a manifest of something else": (lambda: manifest.write_text("[1]"), "manifest.json"),
        "a later format": (lambda: change(version=2), "manifest.json"),
        "a manifest without files": (lambda: change(files={}), "manifest.json"),
        "names outside the folder": (
            lambda: change(
                files=json.loads(manifest.read_text())["files"] | {"../x": {"bytes": 1, "crc32": 0}}
            ),
            "manifest.json",
        ),
    }


@pytest.mark.parametrize("damage", damaged(Path()))
def test_a_damaged_checkpoint_is_never_loaded(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, model=MODEL, trees={"state": {"text": "x" * 100}})
    break_it, named = damaged(path)[damage]
    break_it()
    with pytest.raises(CheckpointError, match=named) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing: there is no checkpoint here"):
        read_checkpoint(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: is a file; a checkpoint is the folder"):
        read_checkpoint(tmp_path / "file")


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", model=MODEL, trees={"state": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, limits[1])
    )  # a write beyond it fails, as on a full disk
    try:
        with pytest.raises(CheckpointError, match="c: cannot write the checkpoint: File too large"):
            write_checkpoint(tmp_path / "c", model={"big": torch.ones(100_000)}, trees={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_checkpoint(tmp_path / "c").trees == {"state": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CheckpointError, match=r"file/c: cannot write the checkpoint: (File exists|Not a directory)"
    ):
        write_checkpoint(tmp_path / "file" / "c", model=MODEL, trees={})


def test_between_the_two_renames_the_new_one_is_read_and_the_next_writer_finishes(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, model=MODEL, trees={"state": "old"})
    (path / "notes.txt").write_text("mine")
    path.rename(tmp_path / ".c.old")
    write_checkpoint(tmp_path / "other", model=MODEL, trees={"state": "new"})
    (tmp_path / "other").rename(tmp_path / ".c.writing")

    found: Checkpoint = read_checkpoint(path)
    assert found.trees == {"state": "new"}
    assert found.path == tmp_path / ".c.writing"
    os.truncate(tmp_path / ".c.writing" / "manifest.json", 3)
    assert read_checkpoint(path).trees == {"state": "old"}

    write_checkpoint(path, model=MODEL, trees={"state": "newest"})
    assert read_checkpoint(path).trees == {"state": "newest"}
    assert (path / "notes.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.check
def test_writing_holds_no_second_copy_of_the_model(tmp_path: Path) -> None:
    """64 MiB in 16 tensors: a copy of all would show in the peak of the process."""
    code = """
import resource, sys, torch
from atoll.tensors.checkpoint import write_checkpoint
model = {str(i): torch.ones(2**20) for i in range(16)}
write_checkpoint(sys.argv[1], model={"x": torch.ones(1)}, trees={})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_checkpoint(sys.argv[1], model=model, trees={})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 16 * 1024  # KiB


@pytest.mark.check
def test_a_writer_that_is_killed_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """kill -9 before every operation on files, and at random moments; see checkpoint_killer.py."""
    (tmp_path / "every").mkdir()
    killer = Path(__file__).with_name("checkpoint_killer.py")
    seed = 20
    done = subprocess.run(
        [sys.executable, str(killer), str(tmp_path), str(seed)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["operations", "first", "random"]
    _, deaths, _, old, _, new = lines[0]
    assert int(deaths) >= 10
    assert int(old) > 0
    assert int(new) > 0


def test_tensor_files_of_others_stay_in_the_folder(tmp_path: Path) -> None:
    place = tmp_path / "c"
    write_checkpoint(place, model=MODEL, trees={"optimizer": {"a": torch.ones(2)}})
    (place / "average.safetensors").write_bytes(b"another program's")
    write_checkpoint(place, model=MODEL, trees={})
    assert (place / "average.safetensors").read_bytes() == b"another program's"
    assert not (place / "optimizer.safetensors").exists()
