"""`atoll memory layout`: what it prints, that it needs no torch, and each mistake's one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.chunks import ParameterSpec, lay_out_memory, sizes_worth_trying
from atoll.cli.app import main
from support.shapes import PUBLISHED

ENTRY: dict[str, Any] = {"name": "a.weight", "shape": [3, 4], "dtype": "float32"}


def write(path: Path, model: list[ParameterSpec]) -> Path:
    file = path / "shapes.json"
    file.write_bytes(msgspec.json.encode(model))
    return file


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int | str | None, str, str]:
    """The exit status, stdout and stderr of `atoll memory ...`, in this process."""
    monkeypatch.setattr(sys, "argv", ["atoll", "memory", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_it_prints_sizes_groups_and_waste_without_torch(tmp_path: Path) -> None:
    file = write(tmp_path, PUBLISHED["Mixtral-8x7B"]())
    code = (
        "import atexit, sys; from atoll.cli.app import main\n"
        "atexit.register(lambda: print([name for name in ('torch', 'matplotlib') if name in sys.modules]))\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "memory", "layout", str(file), "--members", "4"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "995 parameters, 87.0 GiB, in 899 chunks in blocks of 4.0 MiB (4194304 bytes)",
        "  bfloat16, trainable: 227 parameters in 131 chunks, 3.0 GiB, 767 blocks; 130 of the chunks hold an "
        "oversize parameter",
        "  bfloat16, trainable, feature 'experts': 768 parameters in 768 chunks, 84.0 GiB, 21504 blocks; "
        "768 of the chunks hold an oversize parameter",
        "waste: 0.006% of 22271 blocks on the device, if all lie there; 0.000% of what is stored at home",
        "the largest parameter takes 63 blocks in a row, 252.0 MiB of the device",
        "each of 4 members stores 21.7 GiB of it",
        "[]",
    ]
    assert done.returncode == 0


@pytest.mark.parametrize("model", PUBLISHED)
def test_as_json_it_gives_what_the_layout_gives(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = PUBLISHED[model]()
    status, out, err = run(
        monkeypatch, capsys, "layout", str(write(tmp_path, specs)), "--json", "--smallest", "16MiB"
    )
    assert (status, err) == (0, "")
    printed = json.loads(out)
    layout = lay_out_memory(specs, smallest=2**24)
    assert printed["chunk_bytes"] == layout.chunk_bytes
    assert printed["waste"] == layout.waste <= 0.001
    assert printed["block_waste"] == layout.block_waste
    assert printed["used_bytes"] == sum(spec.nbytes for spec in specs)
    groups = printed["groups"]
    for key, total in (
        ("parameters", len(specs)),
        ("chunks", len(layout.chunks)),
        ("blocks", layout.blocks),
        ("stored_bytes", layout.nbytes),
    ):
        assert printed[key] == total == sum(group[key] for group in groups)
    assert [(group["dtype"], group["trainable"], group["feature"]) for group in groups] == [
        (group.dtype, group.trainable, group.feature) for group in layout.groups
    ]
    assert printed["longest_run"] == max(map(layout.blocks_of, layout.chunks))
    assert printed["member_bytes"] == layout.nbytes  # of one member


@pytest.mark.parametrize("members", [2, 3, 64])
@pytest.mark.parametrize("model", PUBLISHED)
def test_members_store_even_parts(
    model: str,
    members: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(write(tmp_path, PUBLISHED[model]()))
    _, out, _ = run(monkeypatch, capsys, "layout", file, "--json", "--members", str(members))
    printed = json.loads(out)
    even = printed["stored_bytes"] / members
    assert even <= printed["member_bytes"] <= even + printed["chunks"] * 4096 < 1.03 * even


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_chunk_size_that_is_given_is_taken(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = PUBLISHED[model]()
    size = sizes_worth_trying(specs)[-1]
    file = str(write(tmp_path, specs))
    status, out, err = run(monkeypatch, capsys, "layout", file, "--json", "--chunk", str(size))
    assert (status, err) == (0, "")
    assert json.loads(out)["chunk_bytes"] == size
    assert json.loads(out)["block_waste"] == lay_out_memory(specs, chunk_bytes=size).block_waste


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "FILE: cannot be read: No such file or directory"),
        (b"", "FILE is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[1,", "FILE is not JSON: Expecting value: line 1 column 4 (char 3)"),
        (b"\xff\xfe", "FILE is not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start"),
        ({"name": "a"}, "FILE: must be a list of parameters, with name, shape and dtype each"),
        ([], "FILE: the list is empty; give at least one parameter"),
        ([ENTRY, 7], "FILE: entry 2: must be an object with name, shape and dtype"),
        ([{"name": "a", "dtype": "float32"}], "FILE: entry 1 ('a'): 'shape' is missing"),
        ([{**ENTRY, "dtype": "f32"}], "FILE: entry 1 ('a.weight'): no chunk can hold dtype 'f32'; use one"),
        ([{**ENTRY, "strides": [1, 2, 3, 4]}], "FILE: entry 1 ('a.weight'): strides has 4 values, and shape"),
        ([{**ENTRY, "feture": "x"}], "FILE: entry 1 ('a.weight'): 'feture' is unknown; known are name,"),
        ([{**ENTRY, "name": ""}], "FILE: entry 1 (''): name is empty"),
        ([{**ENTRY, "name": 3}], "FILE: entry 1: name must be a text"),
        ([{**ENTRY, "shape": 3}], "FILE: entry 1 ('a.weight'): shape must be a list of whole numbers"),
        ([{**ENTRY, "trainable": 1}], "FILE: entry 1 ('a.weight'): trainable must be true or false"),
        ([{**ENTRY, "shape": [3, -4]}], "FILE: entry 1 ('a.weight'): shape holds -4; sizes are 0 or more"),
        ([{**ENTRY, "shape": [3.0]}], "FILE: entry 1 ('a.weight'): shape holds 3.0; sizes are whole numbers"),
        ([{**ENTRY, "shape": [True]}], "FILE: entry 1 ('a.weight'): shape holds true; sizes are whole num"),
        ([{**ENTRY, "shape": ["3"]}], "FILE: entry 1 ('a.weight'): shape holds \"3\"; sizes are whole num"),
        (
            [{**ENTRY, "shape": [10**60]}],
            f"FILE: entry 1 ('a.weight'): shape holds 1{'0' * 39}...; sizes are",
        ),
        ([{**ENTRY, "shape": [2**48] * 9}], "FILE: parameter 'a.weight': with it the model exceeds"),
        ([{**ENTRY, "shape": [1] * 65}], "FILE: entry 1 ('a.weight'): shape has 65 dimensions; at most 64"),
        (
            b'[{"name": "a", "shape": [1], "dtype": "float32", "shape": [2]}]',
            "FILE: 'shape' is given twice in one object, of name 'a'; give it once",
        ),
        ([ENTRY, ENTRY], "FILE: entry 2 ('a.weight'): the name is that of entry 1 too; give a tied"),
    ],
)
def test_a_wrong_file_is_one_line(
    content: Any,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "shapes.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    status, out, err = run(monkeypatch, capsys, "layout", str(file))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("atoll: " + message.replace("FILE", str(file)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--members", "0"], "--members 0: a whole number, 1 or more"),
        (["--members", "-2"], "--members -2: a whole number, 1 or more"),
        (["--members", "1.5"], "--members 1.5: a whole number, 1 or more"),
        (["--members", "9" * 5000], "--members 9999"),
        (["--members", "5000"], "--members 5000: from 1 to 4096 share a chunk"),
        (["--smallest", "0"], "--smallest 0: at least 1 byte; 4MiB is usual"),
        (["--smallest", "4 MoB"], "--smallest: '4 MoB' is not a size"),
        (["--smallest", "2TiB"], "chunk sizes from 2199023255552 to"),
        (["--chunk", "0"], "--chunk 0: at least 1 byte; 4MiB is usual"),
        (["--chunk", "much"], "--chunk: 'much' is not a size"),
        (["--chunk", "4MiB", "--smallest", "5MiB"], "--chunk names the size, and --smallest is for a search"),
        (["--colour"], "No such option"),
    ],
)
def test_a_wrong_option_is_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(tmp_path, PUBLISHED["GPT-2 XL"]())
    status, out, err = run(monkeypatch, capsys, "layout", str(file), *options)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_name_that_no_terminal_can_show_is_shown_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps([{**ENTRY, "name": "a\n\ud800", "feature": "\x1b[31m"}]), encoding="utf-8")
    status, out, err = run(monkeypatch, capsys, "layout", str(file))
    assert (status, err) == (0, "")
    assert r"feature '\x1b[31m'" in out
    file.write_text(json.dumps([{**ENTRY, "name": "a\n\ud800", "shape": [-1]}]), encoding="utf-8")
    status, out, err = run(monkeypatch, capsys, "layout", str(file))
    assert status == 2
    assert r"entry 1 ('a\n\ud800')" in err
