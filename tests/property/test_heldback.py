"""Error feedback over any sequence of losses, runs, weights and steps that are left out: nothing is lost,
only late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from atoll.chunks import Chunk
from atoll.chunks.maps import Slot
from atoll.core.config import LinkOptions
from atoll.exchange.codecs import BFloat16, Float32
from atoll.exchange.coding import PLAIN, Coding
from atoll.exchange.feedback import Feedback
from atoll.wire.messages import LostBlocks

Missing: TypeAlias = npt.NDArray[np.bool_]  # (blocks,)

DTYPES = ("float32", "float64", "float16", "bfloat16")


def chunk_of(sizes: Sequence[int], dtype: str = "float32", gap: int = 0) -> Chunk:
    """Slots of these sizes, `gap` elements between two of them."""
    offsets = [sum(sizes[:index]) + gap * index for index in range(len(sizes))]
    slots = tuple(Slot(index, *each) for index, each in enumerate(zip(offsets, sizes, strict=True)))
    return Chunk(id=0, group=0, dtype=dtype, numel=offsets[-1] + sizes[-1], slots=slots, oversize=False)


class Rounding(Float32):
    """Whole multiples of `step`, which may be another one for each contribution, rounded towards 0."""

    name, lossless, step = "rounding", False, 1.0

    def encode(self, values: Tensor, into: memoryview, seed: int) -> None:
        super().encode((values / self.step).trunc() * self.step, into, seed)


class Held:
    """Feedback of one chunk."""

    def __init__(self, chunk: Chunk, coding: Coding = PLAIN) -> None:
        self.chunk = chunk
        self.feedback = Feedback(
            [chunk], {chunk.id: 0}, LinkOptions(transport="ltp"), coding, block_elements=lambda _dtype: 4
        )

    @property
    def held(self) -> Tensor | None:
        """(extent,), what is held and claimed by no contribution."""
        found = self.feedback.state().get(self.chunk.id)
        return None if found is None else found[0]

    def send(
        self,
        exchange: int,
        gradient: Tensor,
        present: Sequence[bool],
        weight: float,
        start: int = 0,
        along: Tensor | None = None,
        *,
        again: bool = False,
    ) -> Tensor:
        """`again`: others may have sent it before, and `along` goes with it."""
        others = {} if along is None else {self.chunk.id: along}
        written = self.feedback.write(
            exchange, self.chunk.id, gradient, present, weight, start=start, along=others if again else None
        )
        return written.values

    def answered(self, exchange: int, missing: Missing, block: int) -> None:
        bits = np.packbits(missing, bitorder="little").tobytes()
        self.feedback.answered(exchange, self.chunk.id, LostBlocks(block, bits, "borne"))

    def settle(self, exchange: int, counted: bool = True) -> None:
        self.feedback.settle(exchange, counted=counted)


def losses(rng: np.random.Generator, elements: int, block: int, share: float) -> Missing:
    return rng.random(-(-elements // block)) < share


def applied(sent: Tensor, missing: Missing, block: int) -> Tensor:
    """What a shard makes of it: zeros in the blocks that are lost."""
    there = torch.from_numpy(np.repeat(~missing, block)[: sent.numel()])
    return torch.where(there, sent, 0)


class Books:
    """What a chunk's gradients amount to, and where all of it is: in exact whole numbers."""

    def __init__(self, held: Held, chunk: Chunk) -> None:
        self.held, self.chunk = held, chunk
        self.given = torch.zeros(chunk.extent, dtype=torch.float64)
        self.applied = torch.zeros(chunk.extent, dtype=torch.float64)

    def check(self, weight: float = 1.0) -> None:
        held = self.held.held
        kept = torch.zeros_like(self.given) if held is None else held.double() * weight
        assert torch.equal(self.given, self.applied + kept)

    def answer(
        self, exchange: int, gradient: Tensor, sent: Tensor, missing: Missing, block: int, *, counts: bool
    ) -> None:
        """What was sent has come but for what is missing."""
        self.held.answered(exchange, missing, block)
        self.held.settle(exchange, counts)
        if counts:
            self.applied += applied(sent, missing, block).double()
        else:
            self.given -= gradient.double()  # nobody steps with it, as without losses


@given(
    st.data(),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 7),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
)
def test_what_is_sent_is_applied_or_held(
    data: st.DataObject, sizes: list[int], block: int, dtype: str, gap: int
) -> None:
    """Up to two contributions on their way at once, of some of the slots; some of them do not count."""
    chunk = chunk_of(sizes, dtype, gap)
    held = Held(chunk)
    books = Books(held, chunk)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    flying: list[tuple[int, Tensor, Tensor]] = []
    for turn in range(data.draw(st.integers(1, 12))):
        if len(flying) < 2 and data.draw(st.booleans()):
            present = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
            gradient = torch.zeros(chunk.extent, dtype=getattr(torch, dtype))
            for slot, here in zip(chunk.slots, present, strict=True):
                if here:
                    whole = torch.from_numpy(rng.integers(-3, 4, slot.numel))
                    gradient[slot.offset : slot.offset + slot.numel] = whole.to(gradient.dtype)
            books.given += gradient.double()
            sent = held.send(turn, gradient, present, 2.0)
            assert not (sent != gradient)[[not each for each in covered(chunk, present)]].any()
            flying.append((turn, gradient, sent))
        elif flying:
            missing = losses(rng, chunk.extent, block, data.draw(st.sampled_from([0.0, 0.4, 1.0])))
            books.answer(*flying.pop(0), missing, block, counts=data.draw(st.booleans()))
        if not flying:
            books.check()
    assert held.feedback.dropped == 0


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 7))
def test_with_a_code_what_it_leaves_out_is_held_too(
    data: st.DataObject, sizes: list[int], block: int
) -> None:
    """A code that rounds to multiples of 2 or 3; up to two contributions on their way; some do not count."""
    chunk, code = chunk_of(sizes), Rounding()
    held = Held(chunk, Coding(code))
    books = Books(held, chunk)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    flying: list[tuple[int, Tensor, Tensor]] = []
    for turn in range(data.draw(st.integers(1, 12))):
        if len(flying) < 2 and data.draw(st.booleans()):
            gradient = torch.from_numpy(rng.integers(-9, 10, chunk.extent)).float()
            books.given += gradient.double()
            code.step = data.draw(st.sampled_from([2.0, 3.0]))
            sent = held.send(turn, gradient, [True] * len(sizes), 1.0)
            assert not (sent % code.step).any()
            flying.append((turn, gradient, sent))
        elif flying:
            missing = losses(rng, chunk.extent, block, data.draw(st.sampled_from([0.0, 0.4, 1.0])))
            books.answer(*flying.pop(0), missing, block, counts=data.draw(st.booleans()))
        if not flying:
            books.check()


@given(
    st.data(), st.sampled_from(DTYPES), st.floats(0.1, 50), st.floats(0.1, 50), st.booleans(), st.booleans()
)
def test_before_it_is_settled_a_contribution_changes_nothing(
    data: st.DataObject, dtype: str, before: float, weight: float, first: bool, counted: bool
) -> None:
    """Added again it is the same, to the bit; and one that does not count leaves what was held, to the bit,
    whatever the weights. One that counts takes along what it took, however often it was added."""
    chunk = chunk_of([3, 4], dtype)
    one, other = Held(chunk), Held(chunk)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = [torch.from_numpy(rng.standard_normal(7)).to(getattr(torch, dtype)) for _ in range(2)]
    for each in (one, other):
        each.send(0, values[0], [True, True], before)
        each.answered(0, np.array([True, False, True]), 3)
        each.settle(0)
    was = held_of(one)
    present = [first, True]
    sent = [one.send(1, values[1], present, weight) for _ in range(3)]
    other.send(1, values[1], present, weight)
    assert torch.equal(sent[0], sent[1])
    assert torch.equal(sent[0], sent[2])
    for each in (one, other):
        each.answered(1, np.array([False, True, False]), 3)
        each.answered(1, np.array([True, True, True]), 3)  # told once more: the first word counts
        each.settle(1, counted)
    assert torch.equal(held_of(one), held_of(other))
    if not counted:
        assert torch.equal(held_of(one), was)
        assert one.feedback.state()[0][1] == before


def covered(chunk: Chunk, present: Sequence[bool]) -> list[bool]:
    """By element: whether it lies in a slot that is present."""
    there = [False] * chunk.extent
    for slot, here in zip(chunk.slots, present, strict=True):
        there[slot.offset : slot.offset + slot.numel] = [here] * slot.numel
    return there


@given(st.data(), st.integers(2, 20), st.integers(1, 5))
def test_runs_of_a_chunk_that_change_from_one_exchange_to_the_next(
    data: st.DataObject, extent: int, block: int
) -> None:
    chunk = chunk_of([extent])
    held = Held(chunk)
    books = Books(held, chunk)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for turn in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, extent - 1))
        stop = data.draw(st.integers(start + 1, extent))
        gradient = torch.from_numpy(rng.integers(-3, 4, stop - start)).float()
        books.given[start:stop] += gradient
        sent = held.send(turn, gradient, [True], 1.0, start)
        missing = losses(rng, stop - start, block, 0.5)
        held.answered(turn, missing, block)
        held.settle(turn)
        books.applied[start:stop] += applied(sent, missing, block)
        books.check()


@given(st.lists(st.sampled_from([1.0, 2.0, 4.0, 8.0]), min_size=1, max_size=8), st.integers(0, 2**32))
def test_by_their_weights_nothing_is_lost_and_none_counts_for_more_than_it_did(
    weights: list[float], seed: int
) -> None:
    """Weight times values: sent = applied + held; and no value is sent in more than its own size, ever."""
    chunk = chunk_of([12], "float64")
    held, rng = Held(chunk), np.random.default_rng(seed)
    given_, done = torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    for turn, weight in enumerate([*weights, 8.0]):
        before = torch.zeros(12, dtype=torch.float64) if held.held is None else held.held.clone()
        gradient = torch.from_numpy(rng.integers(-3, 4, 12)).double()
        given_ += weight * gradient
        sent = held.send(turn, gradient, [True], weight)
        assert ((sent - gradient).abs() <= before.abs()).all()
        missing = losses(rng, 12, 5, 0.5 if turn < len(weights) else 0.0)
        held.answered(turn, missing, 5)
        held.settle(turn)
        done += weight * applied(sent, missing, 5)
    assert held.held is None  # the last one weighs as much as any before, and came whole
    assert torch.equal(given_, done)


@st.composite
def members_who_send(draw: st.DrawFn) -> list[list[int]]:
    """Who lives at each attempt to send a contribution, of three at first; the ring only gets smaller."""
    attempts = [[0, 1, 2]]
    for _ in range(draw(st.integers(0, 2))):
        gone = draw(st.sampled_from([*attempts[-1], None]))
        left = [each for each in attempts[-1] if each != gone]
        attempts.append(left or attempts[-1])
    return attempts


def runs_of(members: list[int], leader: int | None, extent: int) -> list[tuple[int, int, int]]:
    """(member, start, stop) of what each sends: the leader all of it, or else each its own share."""
    if leader is not None:
        return [(members[leader % len(members)], 0, extent)]
    size = -(-extent // len(members))
    cut = [(place * size, min(extent, (place + 1) * size)) for place in range(len(members))]
    return [(member, *each) for member, each in zip(members, cut, strict=True)]


@given(st.data(), st.booleans())
def test_a_contribution_that_a_group_sends_again_is_owed_by_nobody_who_lives(
    data: st.DataObject, by_leader: bool
) -> None:
    """Rings that break while a contribution is sent, and a leader that changes: whichever copy counts, what
    the living gave, and what they held, is applied or held."""
    extent = 12
    chunk = chunk_of([extent])
    held = [Held(chunk) for _ in range(3)]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    living = [0, 1, 2]
    for exchange in range(data.draw(st.integers(1, 4))):
        before = {member: held_of(held[member]) for member in living}
        gradient = torch.from_numpy(rng.integers(-3, 4, extent)).float()
        attempts, here = [], living
        for alive in data.draw(members_who_send()):  # who is lost in an exchange stays away from it
            here = [each for each in alive if each in here] or here
            attempts.append(here)
        copies: list[Tensor] = []
        sent: dict[int, tuple[int, Tensor]] = {}
        for attempt, alive in enumerate(attempts):
            leader = data.draw(st.integers(0, 2)) if by_leader else None
            taken = [held[member].feedback.again(exchange) for member in alive] if attempt else []
            there = [each[chunk.id] for each in taken if each]
            along = torch.stack(there).sum(0) if there else None
            sent, copy = {}, torch.zeros(extent)
            for member, start, stop in runs_of(alive, leader, extent):
                run = gradient[start:stop]
                values = held[member].send(exchange, run, [True], 1.0, start, along, again=attempt > 0)
                sent[member] = start, values
                copy[start:stop] = values
            copies.append(copy)
        counts = copies[data.draw(st.integers(0, len(copies) - 1))]
        missing = losses(rng, extent, 1, 0.4)
        for member, (start, values) in sent.items():
            held[member].answered(exchange, missing[start : start + len(values)], 1)
        living = attempts[-1]
        accepted = data.draw(st.booleans())
        for member in living:
            held[member].settle(exchange, accepted)
        after = sum((held_of(held[member]) for member in living), torch.zeros(extent))
        gone = [member for member in before if member not in living]
        if not accepted:
            assert torch.equal(after, sum((before[member] for member in living), torch.zeros(extent)))
        elif not gone:
            owed = gradient + sum(before.values(), torch.zeros(extent))
            assert torch.equal(owed, applied(counts, missing, 1) + after)
        else:  # who is gone may have taken along what it held, or not
            least = gradient + sum((before[member] for member in living), torch.zeros(extent))
            theirs = least - applied(counts, missing, 1) - after
            assert (
                (theirs == 0)
                | sum((theirs == -before[member] for member in gone), torch.zeros(extent)).bool()
            ).all()


def held_of(held: Held) -> Tensor:
    like = torch.zeros(held.chunk.extent, dtype=getattr(torch, held.chunk.dtype))
    return like if held.held is None else held.held.clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_dropped_and_counted(dtype: str) -> None:
    chunk = chunk_of([5], dtype)
    held = Held(chunk)
    gradient = torch.tensor([1.0, np.nan, 2.0, -np.inf, np.inf], dtype=getattr(torch, dtype))
    held.send(0, gradient, [True], 1.0)
    held.answered(0, np.array([True, True, True]), 2)
    held.settle(0)
    assert held.held is not None
    assert held.held.tolist() == [1, 0, 2, 0, 0]
    assert held.feedback.dropped == 3


def test_what_overflows_once_it_is_added_up_is_dropped_too() -> None:
    held = Held(chunk_of([2], "float16"))
    for exchange in (0, 1):
        held.send(exchange, torch.full((2,), 6e4, dtype=torch.float16), [True], 1.0)
    for exchange in (0, 1):
        held.answered(exchange, np.array([True]), 2)
        held.settle(exchange)
    assert held.held is not None
    assert held.held.tolist() == [0, 0]


def test_an_exchange_that_nobody_has_made_is_passed_over() -> None:
    held = Held(chunk_of([2]))
    held.answered(7, np.array([True]), 2)
    held.settle(7)
    assert held.held is None


class ByTurns(BFloat16):
    """Of each pair one element, by turns, as it is; and which one."""

    name, block = "by turns", 2

    def size(self, elements: int) -> int:
        return 5 * -(-elements // 2)

    def encode(self, values: Tensor, into: memoryview, seed: int) -> None:
        pairs = torch.nn.functional.pad(values, (0, values.numel() % 2)).view(-1, 2).numpy()
        raw = np.frombuffer(into, np.uint8).reshape(-1, 5)
        raw[:, :4] = pairs[:, seed % 2, None].copy().view(np.uint8)
        raw[:, 4] = seed % 2

    def decode(self, encoded: memoryview, into: Tensor) -> None:
        raw = np.frombuffer(encoded, np.uint8).reshape(-1, 5)
        pairs = np.zeros((len(raw), 2), np.float32)
        pairs[np.arange(len(raw)), raw[:, 4] % 2] = raw[:, :4].copy().view(np.float32)[:, 0]
        into.copy_(torch.from_numpy(pairs.reshape(-1)[: into.numel()]))


@given(
    st.data(),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 3),
    st.sampled_from([BFloat16, ByTurns]),
    st.booleans(),
)
def test_what_a_codec_drops_and_what_a_link_loses_of_it_is_applied_or_held(
    data: st.DataObject, sizes: list[int], gap: int, kind: type[BFloat16], lossy: bool
) -> None:
    """In whole numbers of sixteen bits, so that a bfloat16 drops some and every sum is exact. The link's
    blocks of five bytes end where a codec's do, or within."""
    chunk = chunk_of(sizes, "float32", gap)
    link, coding = LinkOptions(transport="ltp") if lossy else LinkOptions(), Coding(kind())
    feedback = Feedback([chunk], {chunk.id: 0}, link, coding, block_elements=lambda _dtype: 5)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    given_, applied_ = (torch.zeros(chunk.extent, dtype=torch.float64) for _ in range(2))
    dropped = False
    for turn in range(data.draw(st.integers(1, 8))):
        present = [bool(rng.integers(0, 4)) for _ in sizes]
        gradient = torch.zeros(chunk.extent)
        for slot, here in zip(chunk.slots, present, strict=True):
            if here:
                values = rng.integers(-(2**15), 2**15, slot.numel)
                gradient[slot.offset : slot.offset + slot.numel] = torch.from_numpy(values).float()
        counted = bool(rng.integers(0, 4))
        written = feedback.write(turn, chunk.id, gradient, present, 1.0)
        again = feedback.write(turn, chunk.id, gradient, present, 1.0)
        assert bytes(written.payload) == bytes(again.payload), "what is sent again is the same"
        read = coding.decode(written.payload, chunk.extent)
        lost = None
        if lossy and written.lossy is not None:
            missing = losses(rng, written.payload.nbytes, 5, 0.3)
            raw = np.frombuffer(written.payload, np.uint8) * ~np.repeat(missing, 5)[: written.payload.nbytes]
            bits = LostBlocks(5, np.packbits(missing, bitorder="little").tobytes(), "zero")
            read, lost = coding.decode_lossy(memoryview(raw), chunk.extent, bits)
        feedback.answered(turn, chunk.id, lost)
        feedback.settle(turn, counted=counted)
        if counted:
            given_ += gradient
            applied_ += read
        held = feedback.state().get(chunk.id, (torch.zeros(chunk.extent), 1.0))[0].double()
        dropped = dropped or bool(held.any())
        assert torch.equal(given_, applied_ + held)
    event(f"{kind.name} dropped: {dropped}")


def test_float32_holds_nothing_back_and_sends_from_where_the_gradient_lies() -> None:
    chunk = chunk_of([5])
    feedback = Feedback([chunk], {chunk.id: 0}, LinkOptions())
    gradient = torch.ones(5)
    written = feedback.write(0, chunk.id, gradient, [True], 1.0)
    gradient[0] = 7
    assert torch.frombuffer(written.payload, dtype=torch.float32)[0] == 7
    assert not feedback.keeps
