"""Codecs: Atoll's own to the bit, and what is said of one from outside that does not keep its contract."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.core.config import load_config
from atoll.core.errors import ConfigError, RunError, UserError
from atoll.exchange.codeccheck import flaw_of
from atoll.exchange.codecs import OWN, BFloat16, codec_named
from atoll.exchange.coding import Coding
from atoll.exchange.seeds import seed_of
from atoll.wire.base import WireError
from atoll.wire.lost import LostBlocks, missing_of


class Halves(BFloat16):
    """A codec of one's own, which keeps the contract: bfloat16 in blocks of three."""

    name, block = "halves", 3


def broken(**members: Any) -> Any:
    """`Halves` with other members, called "halves"."""
    return type("Broken", (Halves,), members)()


# -- Atoll's own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_codec_of_atolls_own_keeps_the_contract(name: str) -> None:
    assert flaw_of(codec_named(name), name) == ""


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (0x3F808000, 0x3F800000),  # halfway between two: to the even one, down
        (0x3F818000, 0x3F820000),  # and up
        (0x3F808001, 0x3F810000),  # past halfway: up
        (0x3F807FFF, 0x3F800000),
        (0x80000000, 0x80000000),  # minus zero
        (0x00000001, 0x00000000),  # the smallest of all
        (0x7F7FFFFF, 0x7F800000),  # beyond the largest bfloat16: infinity
        (0xFF800000, 0xFF800000),
    ],
)
def test_a_bfloat16_is_the_nearest_one_and_of_two_the_even_one(given: int, read: int) -> None:
    coding = Coding(BFloat16())
    values = torch.tensor([struct.unpack("<f", struct.pack("<I", given))[0]])
    payload = coding.encode(values, 0)
    assert bytes(payload) == struct.pack("<H", read >> 16)  # the upper half, the lower byte first
    found = coding.decode(payload, 1)
    assert int(found.view(torch.int32)) & 0xFFFFFFFF == read


def test_nan_stays_nan_whatever_its_bits() -> None:
    coding = Coding(BFloat16())
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32)
    values = bits.view(torch.float32)
    assert coding.decode(coding.encode(values, 0), 5).isnan().all()


def test_only_float32_is_written_otherwise_than_it_lies() -> None:
    coding = Coding(BFloat16())
    assert coding.writes("float32")
    assert [coding.size(6, each) for each in ("float32", "float64", "float16", "bfloat16")] == [
        12,
        48,
        12,
        12,
    ]
    plain = Coding(codec_named("float32"))
    assert not plain.writes("float32")
    assert plain.size(6, "float32") == 24


# -- bytes from outside -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 5, 7, 12, 2**20])
def test_a_payload_of_another_size_is_refused_before_it_is_read(size: int) -> None:
    def decode(_self: Any, _encoded: memoryview, _into: Tensor) -> None:
        pytest.fail("it was read")

    coding = Coding(broken(decode=decode))
    with pytest.raises(WireError, match=rf"^{size} bytes, and 3 elements take 6 by sync.codec 'halves'$"):
        coding.decode(memoryview(bytes(size)), 3)


def test_what_a_codec_raises_of_bytes_from_outside_is_one_line() -> None:
    def decode(_self: Any, _encoded: memoryview, _into: Tensor) -> None:
        raise ValueError("no\nsuch\x1b run")

    with pytest.raises(WireError, match=r"no run by sync.codec 'halves': ValueError: no such\\x1b run"):
        Coding(broken(decode=decode)).decode(memoryview(bytes(6)), 3)


def test_what_a_codec_raises_of_a_gradient_names_the_codec() -> None:
    def encode(_self: Any, _values: Tensor, _into: memoryview, _seed: int) -> None:
        raise ValueError("too large")

    with pytest.raises(RunError, match="sync.codec 'halves' cannot write a gradient: ValueError: too large"):
        Coding(broken(encode=encode)).encode(torch.ones(3), 0)


# -- what a link loses of a coded payload -----------------------------------------------------------------


@pytest.mark.parametrize("block", [6, 12, 4, 5, 100])
@pytest.mark.parametrize("elements", [1, 3, 7, 20])
def test_zeros_stand_in_every_block_of_which_bytes_were_lost(block: int, elements: int) -> None:
    """Also where the link's blocks of bytes end within the codec's of six bytes."""
    coding = Coding(Halves())
    values = torch.arange(1.0, elements + 1)
    payload = coding.encode(values, 0)
    count = -(-payload.nbytes // block)
    for which in range(count):
        bits = np.packbits(np.arange(count) == which, bitorder="little").tobytes()
        raw = bytearray(payload)
        raw[which * block : (which + 1) * block] = bytes(len(raw[which * block : (which + 1) * block]))
        found, lost = coding.decode_lossy(memoryview(raw), elements, LostBlocks(block, bits, "zero"))
        touched = [
            any(which * block <= byte < (which + 1) * block for byte in range(at // 3 * 6, at // 3 * 6 + 6)
                if byte < payload.nbytes)
            for at in range(elements)
        ]  # fmt: skip
        assert found.tolist() == [
            0.0 if gone else value for value, gone in zip(values.tolist(), touched, strict=True)
        ]
        said = np.repeat(missing_of(lost, elements), lost.block)[:elements]
        assert said.tolist() == touched
        assert lost.how == "zero"


def test_a_lie_about_what_was_lost_is_refused() -> None:
    coding = Coding(Halves())
    with pytest.raises(WireError, match="a block beyond"):
        coding.decode_lossy(memoryview(bytes(6)), 3, LostBlocks(6, b"\x02", "zero"))


# -- codecs of other packages -----------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with entry points: `halves`, and others that are wrong. Its module is `own_halves`."""
    module = ModuleType("own_halves")
    module.Halves = Halves  # type: ignore[attr-defined]
    module.nothing = 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_halves", module)
    about = tmp_path / "own_halves-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-halves\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[atoll.codecs]\nhalves = own_halves:Halves\nothers = own_halves:Halves\nseven = own_halves:nothing\n"
        "gone = own_halves:Gone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return iter([module])


@pytest.mark.usefixtures("installed")
def test_a_codec_of_another_package_is_found_by_its_entry_point() -> None:
    assert codec_named("halves").block == 3
    assert codec_named("halves", allowed="halves").name == "halves"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "none",
            r"there is no codec 'none': Atoll has 'bfloat16', 'float32', and installed packages have .*'hal",
        ),
        ("others", r"the codec 'others' \(own_halves:Halves\) says that its name is 'halves': give it the"),
        ("seven", r"the codec 'seven' \(own_halves:nothing\) has no method 'size': it is no codec"),
        ("gone", r"the codec 'gone' \(own_halves:Gone\) cannot be loaded: AttributeError"),
    ],
)
def test_a_codec_that_cannot_be_had_is_told_in_one_line(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        codec_named(name)
    assert str(refused.value).startswith("sync.codec")
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("allowed", "may"), [("", "none"), ("others", "'others'")])
def test_a_process_imports_no_codec_that_its_operator_has_not_named(allowed: str, may: str) -> None:
    """A worker names the codec to a shard: that gives it no leave to have modules imported there."""
    with pytest.raises(UserError, match=f"of others this process may load {may}: its operator names"):
        codec_named("halves", allowed=allowed)
    assert codec_named("bfloat16", allowed=allowed).name == "bfloat16"


def zeros(_self: Any, _values: Tensor, into: memoryview, _seed: int) -> None:
    into[:] = bytes(len(into))


def counting(codec: Any, values: Tensor, into: memoryview, seed: int) -> None:
    BFloat16.encode(codec, values + len(codec.__dict__), into, seed)
    codec.__dict__[str(len(codec.__dict__))] = True


def part(codec: Any, values: Tensor, into: memoryview, seed: int) -> None:
    BFloat16.encode(codec, values[1:], into[2:], seed)


def clamped(codec: Any, values: Tensor, into: memoryview, seed: int) -> None:
    BFloat16.encode(codec, values.nan_to_num(0.0, 1e30, -1e30), into, seed)


def shifted(codec: Any, encoded: memoryview, into: Tensor) -> None:
    BFloat16.decode(codec, encoded, into)
    into += 1


def summed(codec: Any, encoded: memoryview, into: Tensor) -> None:
    BFloat16.decode(codec, encoded, into)
    into *= 1 + float(into[0])


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"name": "thirds"}, "says that its name is 'thirds'"),
        ({"lossless": None}, "must say by lossless, True or False"),
        ({"block": 0}, "has block = 0: the elements of a block are from 1 to 65536"),
        ({"block": True}, "has block = True"),
        ({"encode": None}, "has no method 'encode'"),
        ({"size": lambda _self, elements: 2.0 * elements}, "that is no int"),
        ({"size": lambda _self, elements: 2 * elements + 1}, "takes 1 bytes for 0 elements"),
        ({"size": lambda _self, elements: 100 * elements}, "takes 300 bytes for a block of 3 elements"),
        ({"size": lambda _self, _elements: 1 / 0}, "failed on a probe: ZeroDivisionError: division by zero"),
        ({"encode": counting}, "writes other bytes for the same"),
        ({"encode": part}, "writes other bytes for the same 1 elements and seed, or not all of them"),
        ({"lossless": True}, "says that it is lossless, and 1 elements come back with other bits"),
        ({"decode": shifted}, "reads a zero as another number"),
        ({"decode": summed}, "reads other blocks otherwise where block 0 is lost"),
        ({"encode": clamped}, "hides nan: a block that holds it, at element 0, is read as finite"),
        ({"encode": zeros}, "hides nan"),
    ],
)
def test_what_a_codec_does_not_keep_is_said(members: dict[str, Any], said: str) -> None:
    wrong = flaw_of(broken(**members), "halves")
    assert said in wrong
    assert "\n" not in wrong


class Evens:
    """Every second element: always the same ones, or by turns."""

    name, lossless, block = "evens", False, 2

    def __init__(self, turns: bool) -> None:
        self.turns = turns

    def size(self, elements: int) -> int:
        return 4 * -(-elements // 2)

    def encode(self, values: Tensor, into: memoryview, seed: int) -> None:
        pairs = torch.nn.functional.pad(values, (0, values.numel() % 2)).view(-1, 2)
        kept = pairs[:, seed % 2 if self.turns else 0].clone()
        kept[~pairs.isfinite().all(1)] = torch.nan
        turn = torch.tensor(seed % 2 if self.turns else 0, dtype=torch.int32)
        raw = (kept.view(torch.int32) & -2) | turn  # the lowest bit says which
        np.frombuffer(into, np.int32)[:] = raw.numpy()

    def decode(self, encoded: memoryview, into: Tensor) -> None:
        raw = torch.from_numpy(np.frombuffer(encoded, np.int32).copy())
        pairs = torch.zeros(len(raw), 2)
        pairs[torch.arange(len(raw)), (raw & 1).long()] = (raw & -2).view(torch.float32)
        into.copy_(pairs.view(-1)[: into.numel()])


def test_a_codec_that_never_writes_some_elements_is_found() -> None:
    assert flaw_of(Evens(turns=True), "evens") == ""
    assert "an element holds back 128 gradients; each must have its turn" in flaw_of(
        Evens(turns=False), "evens"
    )


@pytest.mark.parametrize("turns", [2, 3, 4, 8])
@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8])
def test_each_turn_comes_whenever_a_parameter_has_a_gradient(turns: int, stride: int) -> None:
    """Two parts of a GAN have gradients by turns: seeds that rose by one gave each part one turn alone."""
    seen = [seed_of(7 + stride * number) % turns for number in range(512)]
    last = [max(n for n, turn in enumerate(seen) if turn == each) for each in range(turns)]
    first = [seen.index(each) for each in range(turns)]
    assert max(first) < 64
    assert min(last) >= 512 - 64


def test_a_configuration_names_a_codec_that_there_is(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[sync]\ncodec = "bfloat61"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="sync.codec: no such choice 'bfloat61'; did you mean 'bfloat16'"):
        load_config(file)
