"""A device under a budget whose values a CPU side lends: what it reads, what it leaves, what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import peer_side
import pytest
import torch
from peer_side import FakeSide, fake_session
from torch import Tensor, nn

from atoll.chunks import lay_out
from atoll.core.config import Config, Run, Sync
from atoll.core.errors import ConfigError, UserError
from atoll.core.memory import Memory, MemoryFigures
from atoll.exchange.globalparameters import Contribution, GlobalParameters
from atoll.exchange.hostmemory import host_bytes, plan_memory, slots_for
from atoll.memory import copies, planning
from atoll.memory.bandwidth import measure
from atoll.memory.bringing import Bringing
from atoll.memory.lent import LentModel, Turns
from atoll.memory.parameters import ChunkParameter
from atoll.memory.payloads import GRADIENT
from atoll.memory.stays import Stay
from atoll.peers.settings import NodeSettings
from atoll.tensors.binding import specs_of
from atoll.tensors.lazy import LazyTensor
from atoll.tensors.shardoptimizer import full_name
from atoll.train.sync.peersintiers import least_host_bytes
from atoll.wire.device import Contribute, DeviceMessage, Freed, Published, Release, SetUp
from atoll.wire.messages import plain_hyperparameters

CHUNK, WIDTH, LAYERS, RATE = 4096, 32, 6, 0.5
RATES = measure(torch.device("cpu"), None, "")


class SteppingSide(FakeSide):
    """Steps by plain SGD as contributions come, publishes at once, and makes NaN of what it gets back."""

    def send(self, message: DeviceMessage, descriptors: Sequence[int] = ()) -> None:
        super().send(message, descriptors)
        if isinstance(message, SetUp):
            self.newest = 0
        elif isinstance(message, Release):
            for buffer in message.buffers:
                for flat in self._memory.buffer(buffer).values():
                    flat.fill_(torch.nan)
        elif isinstance(message, Contribute):
            self._step(message)

    @property
    def _memory(self) -> Any:
        assert self.memory is not None
        return self.memory

    def _step(self, message: Contribute) -> None:
        before, buffer = self._memory.buffer(self.newest), self.free.pop(0)
        after, gradients = self._memory.buffer(buffer), self._memory.gradients(message.iteration)
        for chunk, flat in before.items():
            after[chunk].copy_(flat).add_(gradients[chunk], alpha=-RATE)
        self.newest, count = buffer, message.iteration + 1
        self.say(Published(buffer=buffer, taken=count, through=count), Freed(before=count))


def build() -> nn.Sequential:
    """Each weight fills a chunk of one block; the biases share another."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def config(stale_max: int = 0, **more: Any) -> Config:
    return Config(run=Run(strategy="peers"), sync=Sync(stale_max=stale_max, timeout="10s", **more))


class Lent:
    """A session with a model of seven chunks, of which `blocks` fit on the device; and the same in plain
    PyTorch beside it."""

    made: ClassVar[list[Lent]] = []

    def __init__(self, blocks: int = 3, settings: Config | None = None, momentum: float = 0.0) -> None:
        self.session, self.side = fake_session(settings or config())
        Lent.made.append(self)
        self.model, self.plain = build(), build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=momentum)
        self.reference = torch.optim.SGD(self.plain.parameters(), lr=RATE)
        memory = Memory(device=str(blocks * CHUNK), chunk=str(CHUNK))
        self.session.prepare(self.model, self.optimizer, memory=memory)
        tiers = self.session._state.prepared[0].tiers
        assert tiers is not None
        self.fitted = tiers.fitted
        self.count = 0

    def backward(self) -> None:
        self.count += 1
        for model in (self.model, self.plain):
            model(batch(self.count)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.reference.step()
        self.optimizer.zero_grad()
        self.reference.zero_grad()

    def is_plain(self) -> bool:
        return all(
            torch.equal(a, b) for a, b in zip(self.model.parameters(), self.plain.parameters(), strict=True)
        )

    def stats(self) -> MemoryFigures:
        assert isinstance(self.fitted, LentModel)
        return self.fitted.stats()


@pytest.fixture(autouse=True)
def _parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ATOLL_POISON", "1")
    monkeypatch.setattr(peer_side, "FakeSide", SteppingSide)
    monkeypatch.setattr(planning, "measure", lambda *_: RATES)
    yield
    while Lent.made:
        Lent.made.pop().session._leaving.leave()


@pytest.fixture
def lent() -> Lent:
    return Lent()


def test_steps_are_those_of_plain_pytorch_at_the_least_moves(lent: Lent) -> None:
    for step in range(6):
        lent.step()
        stats = lent.stats()
        if step:  # the first one records the order
            assert stats.step_blocks == stats.optimum_blocks == stats.optimum
            assert stats.unforeseen == 0
    assert lent.is_plain()
    assert 0 < stats.device_peak <= stats.device_budget == 3 * CHUNK
    assert lent.side.memory is not None
    assert stats.host_peak == lent.side.memory.plan.nbytes
    assert stats.steps == 6
    assert stats.moves["to_host"] == 6  # gradients, which the CPU side has in one chunk; no values
    assert stats.nbytes["to_host"] == 6 * sum(p.nbytes for p in lent.plain.parameters())
    assert stats.written_back == 0
    lent.backward()
    norm = lent.session.clip_grad_norm_(1.0)
    plain = torch.nn.utils.get_total_norm([p.grad for p in lent.plain.parameters() if p.grad is not None])
    assert lent.stats().gradient_norm == float(norm) == float(plain)


def test_where_all_fits_nothing_is_in_chunks_of_the_device() -> None:
    fits = Lent(blocks=20)
    assert fits.fitted is None
    assert not any(isinstance(p, ChunkParameter) for p in fits.model.parameters())
    fits.step()
    assert fits.is_plain()


def test_nothing_is_taken_where_nothing_new_was_published() -> None:
    ahead = Lent(settings=config(stale_max=1, overlay="none"))
    ahead.side._step = lambda _message: None  # type: ignore[attr-defined]
    before = [p.detach().clone() for p in ahead.model.parameters()]
    ahead.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ahead.model.parameters(), strict=True))
    assert ahead.side.of(Release) == []


def test_an_optimizers_state_that_is_loaded_is_not_read_before_it_is_brought() -> None:
    lent = Lent(momentum=0.9)
    plain = torch.optim.SGD(lent.plain.parameters(), lr=0.25, momentum=0.9)
    lent.backward()
    plain.step()
    saved = plain.state_dict()
    reads: list[int] = []

    def lazily(number: int, value: Tensor) -> LazyTensor:
        def read() -> Tensor:
            reads.append(number)
            return value.clone()

        return LazyTensor(read, value.shape, value.dtype)

    for number, state in saved["state"].items():
        state["momentum_buffer"] = lazily(number, state["momentum_buffer"])
    with lent.session._state.prepared[0].stepper.loading():
        lent.optimizer.load_state_dict(saved)
    assert reads == []
    assert lent.optimizer.param_groups[0]["lr"] == 0.25
    lent.session._runtime.strategy.loaded()
    assert sorted(reads) == list(range(2 * LAYERS))
    set_up = lent.side.of(SetUp)[-1]
    assert set_up.packed > 0
    assert set_up.hyperparameters[0]["lr"] == 0.25


@pytest.mark.parametrize("blocks", [3, 20])
def test_a_script_s_load_state_dict_sets_the_cpu_side_up_anew(blocks: int) -> None:
    lent = Lent(blocks=blocks, momentum=0.9)
    lent.step()
    set_ups = len(lent.side.of(SetUp))
    saved = torch.optim.SGD(lent.plain.parameters(), lr=0.125, momentum=0.5).state_dict()
    lent.optimizer.load_state_dict(saved)
    assert lent.optimizer.param_groups[0]["lr"] == 0.125
    assert len(lent.side.of(SetUp)) == set_ups + 1
    lent.session._leaving.leave()
    lent.optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "lr": 0.25}]})
    assert lent.optimizer.param_groups[0]["lr"] == 0.25
    assert len(lent.side.of(SetUp)) == set_ups + 1


def test_what_is_not_cleared_stays_and_is_added_to_in_the_next_slot(lent: Lent) -> None:
    for clears in (False, None, True):
        lent.backward()
        lent.optimizer.step()
        lent.reference.step()
        handed = lent.side.slot(lent.count - 1)
        if clears is False:
            lent.optimizer.zero_grad(set_to_none=False)  # and what was handed over is as it was
            lent.reference.zero_grad(set_to_none=False)
            assert torch.equal(lent.side.slot(lent.count - 1), handed)
        for mine, plain in zip(lent.model.parameters(), lent.plain.parameters(), strict=True):
            assert mine.grad is not None
            assert plain.grad is not None
            assert torch.equal(mine.grad, plain.grad)
    assert lent.is_plain()


def test_a_contribution_without_weight_is_all_zeros(lent: Lent) -> None:
    lent.session.weight(0.0)
    lent.backward()
    lent.optimizer.step()
    assert not lent.side.slot(0).any()
    assert not any(byte for each in lent.side.of(Contribute)[-1].present for byte in each)
    assert all(p.grad is None for p in lent.model.parameters())


def test_gradients_that_are_not_finite_are_left_out() -> None:
    lent = Lent(settings=config(nonfinite="skip"))
    lent.model(batch(0) * torch.inf).mean().backward()
    lent.side._step = lambda _: lent.side.publish(1, 1, values=1.0)  # type: ignore[attr-defined]
    lent.optimizer.step()
    assert lent.side.of(Contribute)[-1].weight == 0
    lent.optimizer.zero_grad()
    assert {v for p in lent.model.parameters() for v in p.flatten().tolist()} == {1.0}
    lent.session._leaving.leave()


def test_an_average_may_be_looked_at_and_put_back_and_what_stays_is_named(lent: Lent) -> None:
    lent.step()
    kept = [p.detach().clone() for p in lent.model.parameters()]
    with torch.no_grad():
        for mine, plain in zip(lent.model.parameters(), lent.plain.parameters(), strict=True):
            mine.mul_(0.5)
            plain.mul_(0.5)
        for _ in range(2):  # by now each chunk has left the device once
            assert torch.equal(lent.model(batch(7)), lent.plain(batch(7)))
        for mine, plain, value in zip(lent.model.parameters(), lent.plain.parameters(), kept, strict=True):
            mine.copy_(value)
            plain.copy_(value)
    lent.step()
    assert lent.is_plain()
    with torch.no_grad():
        lent.model[2].weight.add_(1.0)
        lent.model(batch(8))
    lent.backward()
    with pytest.raises(
        UserError, match="parameter '2.weight' was changed by the script after session.prepare"
    ):
        lent.optimizer.step()


def test_a_copy_under_way_has_ended_before_the_buffer_is_given_back(
    lent: Lent, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent.step()
    armed, begun, waited_for = threading.Event(), threading.Event(), threading.Event()
    copy, wait, ended = copies.to_device, Bringing.settle, LentModel.step_ended

    def end(self: LentModel) -> None:
        armed.set()
        ended(self)

    def held_up(target: Tensor, source: Tensor) -> None:
        if armed.is_set() and threading.current_thread().name.startswith("atoll-bringing"):
            begun.set()
            assert waited_for.wait(10.0), "nobody waited for a copy from the buffer"
        copy(target, source)

    def told(self: Bringing, stay: Stay) -> None:
        if armed.is_set() and stay.coming is not None and not stay.coming.done():
            waited_for.set()
        wait(self, stay)

    monkeypatch.setattr(copies, "to_device", held_up)
    monkeypatch.setattr(Bringing, "settle", told)
    monkeypatch.setattr(LentModel, "step_ended", end)
    lent.step()  # at its end what the next one uses first is brought
    assert begun.wait(10.0)
    before = len(lent.side.of(Release))
    lent.side.publish(3, 3, values=2.0)
    exchange = lent.session._runtime.strategy.exchange  # type: ignore[union-attr]
    assert exchange is not None
    exchange._coming.take(3, 3)
    assert waited_for.is_set()
    assert len(lent.side.of(Release)) == before + 1
    assert {v for p in lent.model.parameters() for v in p.flatten().tolist()} == {2.0}


def test_views_are_kept_and_show_what_is_taken(lent: Lent) -> None:
    weight = lent.model[1].weight.detach()
    lent.step()
    assert torch.equal(weight, lent.plain[1].weight)
    state = lent.model.state_dict()
    lent.step()
    assert torch.equal(weight, lent.plain[1].weight)
    assert torch.equal(state["3.weight"].clone(), lent.plain[3].weight)


def test_a_model_is_plain_after_the_session(lent: Lent) -> None:
    lent.step()
    lent.session._leaving.leave()
    assert not any(isinstance(p, ChunkParameter) for p in lent.model.parameters())
    assert lent.is_plain()


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (
            Memory(device="12KiB", disk="/tmp:1GiB"),
            "memory.disk: strategy 'peers' has none: the CPU side keeps",
        ),
        (Memory(device="12KiB", master=True), "memory.master: strategy 'peers' has none: the CPU side steps"),
        (Memory(device="12KiB", step="device"), "memory.step: strategy 'peers' has none: the CPU side makes"),
        (Memory(device="12KiB", step="0.3"), "memory.step: strategy 'peers' has none: the CPU side makes"),
        (
            Memory(device="12KiB", sharding="symmetric"),
            "memory.sharding: strategy 'peers' has none: a node's",
        ),
    ],
)
def test_what_cannot_be_kept_to_is_refused_before_the_model_is_touched(memory: Memory, said: str) -> None:
    session, side = fake_session(config())
    model = build()
    with pytest.raises(ConfigError) as caught:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE), memory=memory)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert side.of(SetUp) == []
    session._leaving.leave()


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_states_of_whole_tensors_count_with_the_bytes_that_a_step_makes(
    kind: type[torch.optim.Optimizer],
) -> None:
    weights = {str(n): p for n, p in enumerate(build().parameters()) if p.ndim == 2}
    optimizer = kind(weights.values())  # type: ignore[call-arg]
    layout = lay_out(specs_of(weights, dict.fromkeys(weights.values(), "0")))
    settings = plain_hyperparameters(optimizer.param_groups)
    held = GlobalParameters(layout, full_name(kind), settings, by_tensor=True)
    gradients = {chunk.id: torch.ones(chunk.extent) for chunk in layout.trainable}
    present = {chunk.id: b"\1" * len(chunk.slots) for chunk in layout.trainable}
    held.apply(0, [Contribution(0, 0, 1.0, 1.0, gradients, present, settings)])
    kept = host_bytes(
        plan_memory(layout, slots_for(0)), held.nbytes(), NodeSettings(stale_max=0).most_held(3)
    )
    assert least_host_bytes(layout, optimizer, 0, 3, 1) == kept.total
    each = 2 * WIDTH if kind is torch.optim.Adafactor else WIDTH**2
    assert held.nbytes()["optimizer"] == LAYERS * 4 * each


def test_the_host_budget_is_held_against_what_a_node_keeps() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    layout = lay_out(specs_of(dict(model.named_parameters()), dict.fromkeys(model.parameters(), "0")))
    least = least_host_bytes(layout, optimizer, 0, 3, 1)
    held = GlobalParameters(layout, full_name(type(optimizer)), plain_hyperparameters(optimizer.param_groups))
    kept = host_bytes(
        plan_memory(layout, slots_for(0)), held.nbytes(), NodeSettings(stale_max=0).most_held(3)
    )
    assert least == kept.total
    gradients = sum(run.nbytes for run in plan_memory(layout, 1).trained)
    assert least_host_bytes(layout, optimizer, 0, 3, 4) == least + 3 * gradients
    values = sum(p.nbytes for p in model.parameters())
    assert least > (5 + 1 + 2 + 3 + 3 * 6) * values  # shared, global, state, twin, contributions of 3 nodes
    for budget, fits in ((least - 1, False), (least, True)):
        session, side = fake_session(config())
        memory = Memory(device="12KiB", chunk="4KiB", host=str(budget))
        if fits:
            session.prepare(model, optimizer, memory=memory)
            assert len(side.of(SetUp)) == 1
        else:
            with pytest.raises(UserError, match=rf"the budget of the host is too small: .* {least} bytes"):
                session.prepare(model, optimizer, memory=memory)
        session._leaving.leave()


def test_a_device_budget_that_is_too_small_is_told_with_the_least(tmp_path: Path) -> None:
    session, _ = fake_session(config())
    model = build()
    with pytest.raises(UserError, match=r"the budget of the device is too small: .* 8192 bytes .* would do"):
        session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=RATE), memory=Memory(device="4KiB", chunk="4KiB")
        )
    session._leaving.leave()


def test_a_slot_is_left_alone_after_its_turn() -> None:
    first, second = {0: torch.zeros(4)}, {0: torch.zeros(4)}
    turns, key = Turns(first), (0, GRADIENT)
    with turns.pin(key, overwrites=True) as flat:
        flat.fill_(1.0)
    turns.turn(second)
    with turns.pin(key) as flat:
        flat.add_(1.0)  # as who reads p.grad may
    assert (first[0].tolist(), second[0].tolist()) == ([1.0] * 4, [2.0] * 4)
    turns.drop(key)
    turns.turn(first)
    with turns.pin(key, overwrites=True) as flat:
        assert flat.data_ptr() == first[0].data_ptr()
