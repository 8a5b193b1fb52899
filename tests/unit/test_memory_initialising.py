"""`atoll.memory.init`: the values of a plain construction, under budgets that do not hold them."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from atoll.core.errors import RunError, UserError
from atoll.core.memory import Memory
from atoll.memory import home, initialising
from atoll.memory.fit import fit
from atoll.memory.initialising import init, resident_bytes, take
from atoll.memory.spillfile import SpillFile

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Initialises its parts' weights once more when they stand, and ties its head to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.position = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, 0.0, 0.02 / 6**0.5)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Scaled(nn.Module):
    """Computes with its parameters while it is made, keeps parameters that others made, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(96, WIDTH))
        nn.init.orthogonal_(self.weight, gain=1.4)
        with torch.no_grad():
            self.weight[3:7] *= 0.5
            self.weight[:, 0] = torch.arange(96.0)
        self.register_buffer("norms", self.weight.detach().norm(dim=1))
        self.parts = nn.ParameterList(nn.Parameter(self.weight.detach()[i::3].t().clone()) for i in range(3))
        self.frozen = nn.Parameter(torch.randn(7, 9).to(torch.bfloat16), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_parameter("absent", None)


def mixed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, 96)),
        parametrizations.orthogonal(nn.Linear(48, 48)),
        parametrizations.spectral_norm(nn.Conv2d(8, 16, 3)),
        nn.utils.spectral_norm(nn.Linear(WIDTH, 96)),
        nn.BatchNorm2d(16),
        nn.LSTM(WIDTH, WIDTH, 2),
        Scaled(),
    )


def encoder() -> nn.Module:
    """Deep-copies a layer, and converts and changes layout afterwards."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()
    model.layers[0].linear1.weight.data = model.layers[0].linear1.weight.data.t().contiguous().t()
    return nn.Sequential(model, nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last))  # type: ignore[call-overload]


FAMILIES: dict[str, Callable[[], nn.Module]] = {"gpt": Gpt, "mixed": mixed, "encoder": encoder}


def plainly(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


def size_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def least_of(model: nn.Module) -> int:
    return max(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_values_are_those_of_a_plain_construction(family: str, share: float, tmp_path: Path) -> None:
    plain = plainly(FAMILIES[family])
    after = torch.rand(4)
    # Twice the largest parameter: modules compute with copies of it, and a double one's twice as large.
    host = max(int(share * size_of(plain)), 3 * least_of(plain))
    with init(Memory(device="1MiB", host=str(host), disk=f"{tmp_path}:64MiB")):
        model = plainly(FAMILIES[family])
    assert torch.equal(torch.rand(4), after)  # the random numbers were drawn alike
    expected = dict(plain.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    assert resident_bytes(list(found.values())) <= host
    if share < 1:
        assert resident_bytes(list(found.values())) < size_of(plain)
    for name, parameter in found.items():
        assert isinstance(parameter, nn.Parameter)
        theirs = expected[name]
        assert parameter.requires_grad == theirs.requires_grad
        assert (parameter.shape, parameter.dtype) == (theirs.shape, theirs.dtype)
        assert parameter.stride() == theirs.stride(), name
        assert torch.equal(parameter, theirs), name
    for (name, buffer), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, theirs), name
    assert resident_bytes(list(found.values())) <= host


def test_taking_leaves_plain_parameters_and_the_values_in_the_given_memory(tmp_path: Path) -> None:
    plain = plainly(encoder)
    with init(Memory(device="1MiB", host="256KiB", disk=f"{tmp_path}:64MiB")):
        model = plainly(encoder)
    assert resident_bytes(list(model.parameters())) <= 256 * 1024
    for parameter, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        stride = parameter.stride()
        flat = torch.empty(parameter.numel(), dtype=parameter.dtype)
        take(parameter, flat)
        assert type(parameter) is nn.Parameter
        assert parameter.isnan().all()
        parameter.data = flat.as_strided(theirs.shape, stride)
        assert torch.equal(parameter, theirs)


def test_taking_from_a_plain_model_too() -> None:
    layer = nn.Linear(4, 3)
    weight = layer.weight.detach().clone()
    flat = torch.empty(12)
    take(layer.weight, flat)
    assert torch.equal(flat.view(3, 4), weight)
    assert layer.weight.isnan().all()
    assert layer.weight.untyped_storage().nbytes() == 4  # its memory is free


def test_the_tied_stay_tied_and_names_and_objects_are_the_same(tmp_path: Path) -> None:
    with init(Memory(device="1MiB", host="64KiB", disk=f"{tmp_path}:64MiB")):
        model = Gpt()
    assert model.head.weight is model.embedding.weight
    assert len(torch.optim.AdamW(model.parameters()).param_groups[0]["params"]) == len(
        list(plainly(Gpt).parameters())
    )


def test_forward_and_backward_before_fit_are_right(tmp_path: Path) -> None:
    """What autograd saves stays whole though parameters are taken away between."""
    tokens = torch.arange(32).view(2, 16)
    plain = plainly(Gpt)
    plain(tokens).logsumexp(-1).sum().backward()
    with init(Memory(device="1MiB", host=f"{size_of(plain) + 4096}", disk=f"{tmp_path}:64MiB")):
        model = plainly(Gpt)
        loss = model(tokens).logsumexp(-1).sum()
        with pytest.raises(UserError, match="of which views are kept; raise it to at least"):
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(40))  # takes all the room that it can have
    loss.backward()
    for (name, parameter), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert theirs.grad is not None
        assert torch.equal(parameter.grad, theirs.grad), name


def test_a_view_that_somebody_keeps_is_not_pulled_away(tmp_path: Path) -> None:
    with init(Memory(device="1MiB", host="64KiB", disk=f"{tmp_path}:64MiB")):
        first = nn.Linear(64, 64)
        view = first.weight.data[3]
        others = [nn.Linear(64, 64) for _ in range(20)]
        view.fill_(5.0)
        assert torch.equal(first.weight[3], torch.full((64,), 5.0))
        assert resident_bytes([p for layer in others for p in layer.parameters()]) < 64 * 1024


def test_what_is_gone_gives_its_room_back(tmp_path: Path) -> None:
    with init(Memory(device="1MiB", host="40KiB", disk=f"{tmp_path}:40KiB")):
        for _ in range(50):  # with what is kept for those that are gone, neither budget would do
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))


def test_copies_and_pickles_are_whole(tmp_path: Path) -> None:
    with init(Memory(device="1MiB", host="40KiB", disk=f"{tmp_path}:1MiB")):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for a, b, c in zip(model.parameters(), copied.parameters(), loaded.parameters(), strict=True):
        assert a is not b
        assert type(c) is nn.Parameter
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_without_a_bound_on_the_host_nothing_moves() -> None:
    with init(Memory(device="1MiB")):
        model = plainly(Gpt)
    assert resident_bytes(list(model.parameters())) == size_of(model)


def test_what_leaves_a_device_goes_to_the_host_and_then_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU counts as a device here: each tier holds what its budget says, and values come back."""
    monkeypatch.setattr(initialising, "_tier", lambda device: "device")
    plain = plainly(Gpt)
    with init(Memory(device="200KiB", host="100KiB", disk=f"{tmp_path}:1MiB")):
        model = plainly(Gpt)
        room = model.position._atoll_place.room  # type: ignore[union-attr]
        for held, budget in ((room._held["device"], 200), (room._held["host"], 100), (room._file.end, 1024)):
            assert 0 < held <= budget * 1024
    for parameter, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, theirs)
    for parameter, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        flat = torch.empty(parameter.numel(), dtype=parameter.dtype)
        take(parameter, flat)
        assert torch.equal(flat, theirs.flatten())
    assert room._held == {"device": 0, "host": 0}


def test_after_it_parameters_are_plain_again() -> None:
    with init(Memory(device="1MiB")), pytest.raises(KeyError):
        nn.ModuleDict()["no such part"]
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_lazy_modules_and_the_meta_device_are_left_alone() -> None:
    with init(Memory(device="1MiB", host="1MiB")):
        lazy = nn.LazyLinear(3)
        meta = nn.Linear(4096, 4096, device="meta")
    assert type(lazy.weight) is nn.UninitializedParameter
    assert type(meta.weight) is nn.Parameter


@pytest.mark.parametrize(
    ("memory", "make", "message"),
    [
        (
            Memory(device="1MiB", host="40KiB", disk="{}:1MiB"),
            lambda: nn.Linear(200, 200),
            "memory.host: the budget of 40.0 KiB does not hold a parameter of 156.2 KiB; raise it to at "
            "least that",
        ),
        (
            Memory(device="1MiB", host="40KiB"),
            lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(9))),
            "memory.host: the budget of 40.0 KiB holds no more of the model, which needs 48.5 KiB by now; "
            "raise it, or add a disk",
        ),
        (
            Memory(device="1MiB", host="40KiB", disk="{}:50KiB"),
            lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(9))),
            "memory.disk: the budget of 50.0 KiB in {} does not hold the parameters; give at least 64.8 "
            "KiB, and what training adds",
        ),
    ],
)
def test_too_small_a_budget_says_what_would_do(
    memory: Memory, make: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    memory = msgspec.structs.replace(memory, disk=memory.disk.format(tmp_path) if memory.disk else "")
    with pytest.raises(UserError) as raised, init(memory):
        make()
    assert str(raised.value) == message.format(tmp_path)


def test_a_folder_that_is_not_there_is_named() -> None:
    with (
        pytest.raises(UserError, match="no file can be made in /no/such: No such file"),
        init(Memory(device="1", host="1", disk="/no/such:1MiB")),
    ):
        pass


def on_disk(folder: Path) -> int:
    """Bytes that this process's files there take, without names too.

    Where the disk's room is in pieces, ext4 keeps a file's list of them in a block of its own and counts it
    with the file's: none of what the files hold, so a file is not taken for longer than it is.
    """
    taken = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(folder):
                found = link.stat()
                whole = -(-found.st_size // found.st_blksize) * found.st_blksize
                taken += min(found.st_blocks * 512, whole)
    return taken


@pytest.mark.parametrize(
    ("layers", "trained", "budget"),
    [
        (12, 12, 3 * 2**20 + 2**16),  # of parameters 0.75 MiB; with gradients and AdamW's state 3
        (48, 1, 3 * 2**20 + 2**17 + 2**16),  # the least: 3 MiB of parameters, most of them frozen
    ],
)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it tells what files without names take")
def test_what_is_built_and_what_trains_together_stay_within_the_disk_s_budget(
    layers: int, trained: int, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(device="256KiB", host="512KiB", disk=f"{tmp_path}:{budget}", chunk="64KiB", step="host")
    with init(memory):
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(layers)))
    model[: layers - trained].requires_grad_(False)
    assert on_disk(tmp_path) > 2**17
    peaks = []

    def seen(parameter: nn.Parameter, into: torch.Tensor) -> None:
        take(parameter, into)
        peaks.append(on_disk(tmp_path))

    monkeypatch.setattr(home, "take", seen)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with fit(model, optimizer, memory=memory) as fitted:
        assert max(peaks) <= budget
        assert fitted.plan.disk_bytes <= on_disk(tmp_path) <= budget
        model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
    assert on_disk(tmp_path) == 0


def test_a_file_is_as_long_as_what_it_holds(tmp_path: Path) -> None:
    """Freed at its end, or up to there, it gives the room back; in between it is used again."""
    file = SpillFile(tmp_path, 2**20)
    tensors = [torch.rand(size) for size in (100, 200, 100, 300, 100)]
    pieces = [file.keep(tensor) for tensor in tensors]
    assert file.end == 4 * 800
    for number in (1, 3):
        file.free(pieces[number])
    assert file.end == 4 * 800
    file.free(pieces[4])
    assert file.end == os.fstat(file._file.fileno()).st_size == 4 * 400
    again = torch.rand(200)
    pieces[1] = file.keep(again)
    assert pieces[1].begin == 400
    pieces[3] = file.keep(tensors[3])
    assert (pieces[3].begin, file.end) == (4 * 400, 4 * 700)
    for tensor, number in ((tensors[0], 0), (again, 1), (tensors[2], 2), (tensors[3], 3)):
        read = torch.empty_like(tensor)
        file.copy_into(pieces[number], read)
        assert torch.equal(read, tensor)
    for number in range(4):
        file.free(pieces[number])
    assert file.end == os.fstat(file._file.fileno()).st_size == 0


def test_damage_on_disk_is_found_and_named(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, 2**20)
    written = torch.rand(1000)
    piece = file.keep(written)
    read = torch.empty(1000)
    file.copy_into(piece, read)
    assert torch.equal(read, written)
    file._file.seek(piece.begin + 77)
    file._file.write(b"?")
    with pytest.raises(RunError, match=f"4000 bytes at 0 of a file in {tmp_path} are damaged: its checksum"):
        file.copy_into(piece, read)
    file._file.truncate(100)
    with pytest.raises(RunError, match="are damaged"):
        file.copy_into(piece, read)


_BUILD = """
import pathlib, re, sys, torch
from torch import nn
from atoll.core.memory import Memory
from atoll.memory import home, initialising
from atoll.memory.initialising import init
def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
torch.set_num_threads(1)
def build(layers):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))  # 4 MiB each
    for module in model:
        nn.init.normal_(module.weight, std=0.02)
    return model
build(1)  # what the first use takes
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = resident("VmRSS")
with init(Memory(device="1GiB", host="32MiB", disk=sys.argv[1] + ":1GiB")):
    model = build(32)
print((resident("VmHWM") - before) * 1024)
assert 0.0199 < float(model[31].weight.std()) < 0.0201
"""


@pytest.mark.check
def test_the_peak_of_a_process_is_the_budget_and_not_the_model(tmp_path: Path) -> None:
    """128 MiB of parameters under 32 MiB: that, an eighth that is not given back yet, and a layer."""
    command = [sys.executable, "-c", _BUILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 30 * 2**20 < int(done.stdout) <= (32 + 4 + 2 * 4) * 2**20
