"""Strategies of other packages: how they are found and refused, and the parts that they are given."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.axes.values import ElementRange
from atoll.chunks import lay_out
from atoll.core.config import Config
from atoll.core.config import Run as RunTable
from atoll.core.errors import CheckpointError, RunError, UserError
from atoll.exchange.codecs import codec_named
from atoll.exchange.synchronizer import Contributors
from atoll.memory.planning import specs_for
from atoll.tensors.binding import bind_model
from atoll.train.api.place import Place
from atoll.train.sync.outside import Coded, synchronizer_named
from atoll.train.sync.replicas import Values, check_payload
from own_strategy import partner_of
from support.pool import ring_of_one


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that are installed for this test."""
    info = tmp_path / "broken-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[atoll.synchronizers]\nno-module = gone_away:Strategy\nraises = broken_strategy:Raises\n"
        "lacks = broken_strategy:Lacks\n"
    )
    (tmp_path / "broken_strategy.py").write_text(
        "class Raises:\n    def __init__(self):\n        raise RuntimeError('no\\nluck')\n"
        "class Lacks:\n    def open(self, parts): ...\n    def close(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("broken_strategy", None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "no installed package has a strategy 'nowhere' (entry points of the group "),
        ("no-module", "strategy 'no-module' (gone_away:Strategy) cannot be made: ModuleNotFoundError: No"),
        ("raises", "strategy 'raises' (broken_strategy:Raises) cannot be made: RuntimeError: no"),
        ("lacks", "strategy 'lacks' (broken_strategy:Lacks) is no Synchronizer: it lacks after_step, "
         "capture, change, restore (docs/reference/synchronizer.md)"),
    ],
)  # fmt: skip
def test_what_is_no_strategy_is_refused_in_one_line(packages: Path, name: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        synchronizer_named(name)
    assert str(refused.value).startswith(f"run.strategy: {said}")
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="run.strategy"):
        atoll.join(Config(run=RunTable(strategy=name)), place=Place())


def test_a_worker_by_itself_trains_as_without_a_strategy() -> None:
    def trained(strategy: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with atoll.join(Config(run=RunTable(strategy=strategy)), place=Place()) as session:
            session.prepare(model, optimizer)
            for _ in range(3):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert session.group.size == 1
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, trained("pairs"), trained("ring")))


@pytest.mark.parametrize("count", range(1, 10))
def test_pairs_are_the_same_for_both_and_leave_out_one_at_the_most(count: int) -> None:
    names = tuple(range(0, 2 * count, 2))  # as after losses
    seen = set()
    for step in range(20):
        partners = {name: partner_of(Contributors(name, names), 3, step) for name in names}
        assert all(partners[other] == name for name, other in partners.items() if other is not None)
        assert name_count(partners) == count % 2
        seen.add(tuple(partners.items()))
    assert count < 3 or len(seen) > 1  # others at other steps


def name_count(partners: dict[int, int | None]) -> int:
    return sum(other is None for other in partners.values())


def values_of(model: nn.Module, written: list[int]) -> Values:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chunk_map = lay_out(specs_for(model, [optimizer]), chunk_bytes=256)
    chunks = bind_model(chunk_map, dict(model.named_parameters()))
    return Values(chunks, lambda: written.append(1))


def test_values_are_read_and_written_run_by_run() -> None:
    written: list[int] = []
    model = nn.Sequential(nn.Linear(5, 7), nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    values = values_of(model, written)
    assert len(values.runs) > 1
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for run in values.runs:
        read = values.read(run)
        assert read.shape == (run.stop,)
        with values.update() as update:
            update.write(run, read + 1)
    assert len(written) == len(values.runs)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old + 1)
        assert parameter.stride() == old.stride()


def test_what_is_no_run_or_has_another_shape_is_refused() -> None:
    values = values_of(nn.Linear(5, 7), [])
    run = values.runs[0]
    with pytest.raises(UserError, match="is no run of this replica"):
        values.read(ElementRange(run.chunk, 0, run.stop - 1))
    for wrong in (torch.zeros(run.stop - 1), torch.zeros(run.stop, dtype=torch.float64)):
        with pytest.raises(UserError, match=r"^update\.write\(.*: got "):
            values.write(run, wrong)


def test_a_payload_is_bytes_for_another_contributor() -> None:
    contributors = Contributors(1, (0, 1, 4))
    check_payload(4, torch.zeros(3, dtype=torch.uint8), contributors)
    for name in (1, 2):
        with pytest.raises(UserError, match="is none of the other contributors"):
            check_payload(name, torch.zeros(3, dtype=torch.uint8), contributors)
    for payload in (torch.zeros(3), torch.zeros((1, 3), dtype=torch.uint8)):
        with pytest.raises(UserError, match="a payload is a tensor of uint8"):
            check_payload(0, payload, contributors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_values_come_back_as_the_codec_writes_them(dtype: torch.dtype, codec: str, count: int) -> None:
    coder = Coded(codec_named(codec))
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    payload = coder.encode(values, 3)
    assert payload.dtype == torch.uint8
    assert payload.numel() == count * (
        2 if codec == "bfloat16" and dtype == torch.float32 else dtype.itemsize
    )
    back = coder.decode(payload, values)
    expected = (
        values.to(torch.bfloat16).to(dtype) if (codec, dtype) == ("bfloat16", torch.float32) else values
    )
    assert back.dtype == dtype
    assert torch.equal(back, expected)
    with pytest.raises(RunError, match="a contributor sent"):
        coder.decode(torch.zeros(payload.numel() + 1, dtype=torch.uint8), values)


@pytest.mark.parametrize(
    "state",
    [
        {"captured": 3, "seed": 1},
        {"captured": "not base64!", "seed": 1},
        {"captured": "", "seed": "one"},
        {"captured": ""},
        {"captured": "AAAA", "seed": 1},  # three bytes, and the example keeps none
    ],
)
def test_a_state_that_is_none_is_refused(state: dict[str, object]) -> None:
    with atoll.join(Config(run=RunTable(strategy="pairs")), place=ring_of_one()) as session:
        model = nn.Linear(3, 2)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        reducer = session._state.prepared[0].reducer
        kept = reducer.state_dict()
        with pytest.raises(CheckpointError, match="^the state of the strategy cannot be taken over: "):
            reducer.load_state_dict({"steps": 0, **state})
        reducer.load_state_dict({"steps": 4})  # of another strategy
        assert reducer.state_dict() == kept | {"steps": 4}
