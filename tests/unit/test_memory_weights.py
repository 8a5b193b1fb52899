"""Weights by streams: files of tensors that other programs read and wrote, and damage that is found before
anything is loaded."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from atoll.core.errors import CheckpointError, UserError
from atoll.core.memory import Memory
from atoll.memory.initialising import init, resident_bytes
from atoll.memory.statedicts import StateDicts
from atoll.memory.weights import _replaced, load, save
from atoll.tensors.lazy import LazyTensor
from atoll.tensors.tensorfile import CHECKSUM
from atoll.tensors.tensorreader import TensorFile


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.inner = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Conv1d(24, 8, 3))
        self.half = nn.Linear(8, 5, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.rand(()))
        self.phase = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(7))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def made(seed: int, make: Callable[[], nn.Module] = Tied) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def without_complex() -> nn.Module:
    model = Tied()
    del model.phase  # the library's reader knows no complex tensors
    return model


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def spilled(tmp_path: Path, seed: int, make: Callable[[], nn.Module] = without_complex) -> nn.Module:
    """A model most of whose parameters lie in a file."""
    with init(Memory(device="1MiB", host="6KiB", disk=f"{tmp_path}:1MiB")):
        model = made(seed, make)
    assert resident_bytes(list(model.parameters())) <= 6 * 1024 < 8000
    return model


def test_what_is_saved_loads_in_plain_torch_and_what_plain_torch_saved_loads(tmp_path: Path) -> None:
    model, other = made(1, without_complex), made(2, without_complex)
    save(model, tmp_path / "ours.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    other.load_state_dict(loaded)
    assert_same(values_of(other), values_of(model))
    theirs = {name: value.clone() for name, value in made(3, without_complex).state_dict().items()}
    safetensors.torch.save_file(theirs, tmp_path / "theirs.safetensors")
    load(other, tmp_path / "theirs.safetensors")
    assert_same(values_of(other), theirs)


def test_a_model_that_lies_in_a_file_saves_and_loads_like_a_plain_one(tmp_path: Path) -> None:
    model = spilled(tmp_path, 1)
    save(model, tmp_path / "a.safetensors")
    plain = made(2, without_complex)
    load(plain, tmp_path / "a.safetensors")
    expected = values_of(made(1, without_complex))
    assert_same(values_of(plain), expected)
    other = spilled(tmp_path, 5)
    load(other, tmp_path / "a.safetensors")
    assert resident_bytes(list(other.parameters())) <= 6 * 1024
    save(other, tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_tied_weights_may_be_stored_once(tmp_path: Path) -> None:
    model = made(1, without_complex)
    safetensors.torch.save_model(model, tmp_path / "once.safetensors")
    with TensorFile(tmp_path / "once.safetensors") as file:
        assert len({"head.weight", "embedding.weight"} & file.entries.keys()) == 1
    other = made(2, without_complex)
    load(other, tmp_path / "once.safetensors")
    assert_same(values_of(other), values_of(model))
    assert other.head.weight is other.embedding.weight  # type: ignore[union-attr]


def test_an_index_of_several_files(tmp_path: Path) -> None:
    values = values_of(made(1, without_complex))
    weight_map = {}
    for part in range(3):
        names = list(values)[part::3]
        safetensors.torch.save_file({n: values[n] for n in names}, tmp_path / f"part-{part}.safetensors")
        weight_map |= dict.fromkeys(names, f"part-{part}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model = made(2, without_complex)
    load(model, index)
    assert_same(values_of(model), values)
    weight_map["scale"] = (
        "part-2.safetensors" if weight_map["scale"] != "part-2.safetensors" else "part-0.safetensors"
    )
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=f"{weight_map['scale']}: holds no 'scale', of which"):
        load(model, index)
    index.write_text(json.dumps({"weight_map": {"scale": "../elsewhere"}}))
    with pytest.raises(CheckpointError, match="is not a file of this folder"):
        load(model, index)


def _without(values: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda v: _without(v, "scale", "half.weight"),
            "holds no 'scale', 'half.weight', which the model has",
        ),
        (lambda v: {**v, "extra": torch.ones(1)}, "holds 'extra', which the model lacks"),
        (
            lambda v: {**v, "half.weight": v["half.weight"].t().contiguous()},
            "'half.weight' is (8, 5) there and (5, 8) in the model",
        ),
        (
            lambda v: {**v, "half.weight": v["half.weight"].float(), "steps": v["steps"].int()},
            "'steps' is int32 there and int64 in the model, 'half.weight' is float32 there and bfloat16 in "
            "the model (cast=True converts)",
        ),
        (
            lambda v: {f"x.{name}": value for name, value in v.items()},
            "holds no 'scale', 'empty', 'steps' and 12 more, which the model has; holds "
            "'x.inner.1.num_batches_tracked', 'x.steps', 'x.embedding.weight' and 12 more, which the "
            "model lacks",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    model = made(1, without_complex)
    before = values_of(model)
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file(change(values_of(made(2, without_complex))), path)
    with pytest.raises(CheckpointError) as raised:
        load(model, path)
    assert str(raised.value) == f"{path}: {message}"
    assert_same(values_of(model), before)


def test_cast_converts(tmp_path: Path) -> None:
    model = made(1, without_complex)
    values = {n: v.double() if v.is_floating_point() else v for n, v in values_of(model).items()}
    safetensors.torch.save_file(values, tmp_path / "wide.safetensors")
    other = made(2, without_complex)
    load(other, tmp_path / "wide.safetensors", cast=True)
    assert_same(values_of(other), values_of(model))


def test_any_damage_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    """One bit of each byte in turn, and every tenth length."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))

    path = tmp_path / "weights.safetensors"
    save(made(1, make), path)
    saved, whole = values_of(made(1, make)), path.read_bytes()
    model = made(2, make)
    before = values_of(model)
    for length in [*range(0, len(whole), 10), len(whole) + 1]:
        path.write_bytes((whole + b"x")[:length])
        with pytest.raises(CheckpointError, match=f"^{path}: damaged: "):
            load(model, path)
    assert_same(values_of(model), before)
    key = range(whole.index(CHECKSUM.encode()), whole.index(CHECKSUM.encode()) + len(CHECKSUM))
    for place in range(len(whole)):
        raw = bytearray(whole)
        raw[place] ^= 1 << place % 7
        path.write_bytes(raw)
        if place in key:  # a file of somebody else's, without a checksum: what is loaded is whole
            other = made(2, make)
            load(other, path)
            assert_same(values_of(other), saved)
            continue
        with pytest.raises(CheckpointError, match=f"^{path}: "):
            load(model, path)
    assert_same(values_of(model), before)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}, "in 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, "whole numbers"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "'a' begins at"),
        (
            {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"},
            "'b' begins at",
        ),
        (
            {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}},
            "its header is not one of tensors: 'F4'",
        ),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, "whole numbers"),
        ({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, "whole numbers"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "its header speaks of"),
        ({"a": 3}, "its header is not one of tensors"),
        ([], "its header is not one of tensors"),
    ],
)
def test_a_header_that_lies_allocates_nothing(header: Any, message: str, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(CheckpointError) as raised:
        TensorFile(path)
    assert message in str(raised.value)


def test_lengths_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="a header of 9223372036854775808 bytes in a file of 10"):
        TensorFile(path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        TensorFile(tmp_path / "none")


def test_a_save_that_fails_leaves_the_older_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.safetensors"
    save(made(1), path)
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
            save(made(2), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.safetensors"]
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        save(made(1), tmp_path / "none" / "weights.safetensors")


def test_a_model_with_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

    with pytest.raises(
        CheckpointError, match="'_extra_state' is a dict, and a file of weights holds tensors"
    ):
        save(Extra(2, 2), tmp_path / "x.safetensors")


def test_a_state_dict_is_read_as_it_is_used(tmp_path: Path) -> None:
    model = spilled(tmp_path, 1)
    served = StateDicts(model)
    state = model.state_dict()
    assert type(state["embedding.weight"]) is LazyTensor
    assert type(state["steps"]) is Tensor
    assert resident_bytes(list(model.parameters())) <= 6 * 1024
    expected = made(1, without_complex).state_dict()
    assert_same({name: value.clone() for name, value in state.items()}, values_of(made(1, without_complex)))
    # As a plain one's, its tensors are those of the model at any time, and a deep copy is of now.
    before = copy.deepcopy(state)
    with torch.no_grad():
        model.embedding.weight.mul_(2)  # type: ignore[union-attr,operator]
    assert torch.equal(state["embedding.weight"], 2 * expected["embedding.weight"])
    assert torch.equal(before["embedding.weight"], expected["embedding.weight"])
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert type(loaded["embedding.weight"]) is Tensor
    other = made(2, without_complex)
    other.load_state_dict(loaded)
    other.load_state_dict(state)
    assert torch.equal(other.head.weight, 2 * expected["head.weight"])  # type: ignore[union-attr,arg-type]
    # Whoever detaches a parameter otherwise gets a view of it.
    assert type(model.scale.detach()) is Tensor  # type: ignore[union-attr,operator]
    assert type(model.state_dict(keep_vars=True)["scale"]) is type(model.scale)
    assert type(model.inner.state_dict()["0.weight"]) is LazyTensor  # type: ignore[union-attr]
    served.close()
    assert type(model.inner.state_dict()["0.weight"]) is Tensor  # type: ignore[union-attr]


def test_what_a_state_dict_gives_cannot_be_written_into(tmp_path: Path) -> None:
    """A write into a copy would be lost without a word."""
    model = spilled(tmp_path, 1)
    served = StateDicts(model)
    lazy: Any = model.state_dict()["embedding.weight"]
    expected = lazy.clone()
    whole = torch.ones(50, 24)

    def write_item() -> None:
        lazy[0, 1] = 5.0

    def write_where() -> None:
        lazy[lazy > 0] = 5.0

    for write in (
        lambda: lazy.mul_(2),
        write_item,
        write_where,
        lambda: lazy.t().mul_(2),
        lambda: lazy.split(10)[1][2:4].view(-1).zero_(),
        lambda: torch.add(whole, 1, out=lazy),
        lambda: torch._foreach_mul_([lazy], 2.0),
        lambda: lazy[1].copy_(whole[0]),
    ):
        with pytest.raises(UserError, match="can only be read"):
            write()
    with pytest.raises(ValueError, match="read-only"):
        lazy.numpy()[0] = 3
    # Views read what their base does, and lie as it does.
    assert torch.equal(lazy.t()[3:5], expected.t()[3:5])
    assert lazy.t().stride() == expected.t().stride()
    assert torch.equal(lazy.t().reshape(-1), expected.t().reshape(-1))
    assert torch.equal(lazy.t() @ whole, expected.t() @ whole)
    assert [part.sum() for part in lazy.split(30)] == [part.sum() for part in expected.split(30)]
    assert lazy[4, 5].item() == expected[4, 5].item()
    assert type(copy.deepcopy(lazy[3])) is Tensor
    served.close()


def test_a_file_may_list_an_empty_tensor_behind_its_neighbour(tmp_path: Path) -> None:
    of = {"dtype": "F32"}
    head = json.dumps(
        {
            "b": of | {"shape": [1], "data_offsets": [0, 4]},
            "a": of | {"shape": [0], "data_offsets": [0, 0]},
        }
    ).encode()
    (tmp_path / "f").write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    assert safetensors.torch.load_file(tmp_path / "f").keys() == {"a", "b"}
    with TensorFile(tmp_path / "f") as file:
        assert file.tensor("a").shape == (0,)
        assert file.tensor("b").tolist() == [0.0]


def test_two_that_save_to_one_place_write_into_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "w"
    with _replaced(path) as one, _replaced(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"  # the one that ended last
    assert list(tmp_path.iterdir()) == [path]


_STREAM = """
import pathlib, re, sys, torch
from torch import nn
from atoll.core.memory import Memory
from atoll.memory.initialising import init
from atoll.memory.weights import load, save
def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
torch.set_num_threads(1)
def build(layers):
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))  # 4 MiB each
folder = sys.argv[1]
save(build(1), folder + "/one")
load(build(1), folder + "/one")  # what the first use takes
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = resident("VmRSS")
with init(Memory(device="1GiB", host="16MiB", disk=folder + ":1GiB")):
    model, other = build(16), build(16)
save(model, folder + "/all")
load(other, folder + "/all")
print((resident("VmHWM") - before) * 1024)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
"""


@pytest.mark.check
def test_saving_and_loading_hold_one_tensor_beside_the_budget(tmp_path: Path) -> None:
    """Two models of 64 MiB under budgets of 16 MiB together: that, an eighth, and a layer twice.

    What is held is meant. glibc keeps up to three layers more of what was freed, as its threads come, until
    `fit` tells it what is to come from the system one by one; here it is told from without.
    """
    command = [sys.executable, "-c", _STREAM, str(tmp_path)]
    told = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=told)
    assert done.returncode == 0, done.stderr
    assert 14 * 2**20 < int(done.stdout) <= (16 + 2 + 2 * 4) * 2**20
