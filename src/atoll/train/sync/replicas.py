"""Replicas that train by themselves, and the exchanges between their steps that a strategy of another package
makes.

A synchronizer (`exchange/synchronizer.py`) returns, after each step, the exchanges that are due. Each
exchange is one round of the ring of all workers: a round counts on all of them, and is made again without a
worker that has died.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.axes.values import ElementRange
from atoll.core import points
from atoll.core.errors import CheckpointError, MismatchError, RunError, UserError
from atoll.core.scriptline import waiting_line
from atoll.core.stands import Stand, call
from atoll.exchange.synchronizer import Coder, Contributors, Exchange, Parts, Synchronizer
from atoll.tensors.binding import BoundChunk, real_form, real_of
from atoll.tensors.stephooks import AroundStep
from atoll.train.api.place import Place
from atoll.train.gradients.reducer import Reducer
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.group.channel import Channel
from atoll.train.group.inner import Replicas
from atoll.train.group.rounds import Ring
from atoll.train.members.workers import Workers
from atoll.train.sync.strategies import Stepper, Strategy, Training

_MOST_CAPTURED = 2**20  # the most bytes of a synchronizer's captured state
_MOST_GROWTH = 4  # the most bytes that others may send in one exchange, as a multiple of the model's
_SPARE = 2**20  # bytes that they may send in addition


class Values:
    """The values of one replica (`exchange/synchronizer.py`: Replica).

    They are read and written as a script would, parameter by parameter. So they may lie in tiers of memory,
    or be shared by a group's members.
    """

    def __init__(self, chunks: Sequence[BoundChunk], written: Callable[[], None]) -> None:
        """Take the chunks, while their parameters have memory. `written()` is called after each update."""
        self._chunks = {bound.chunk.id: bound for bound in chunks}
        self._written = written
        self.runs = tuple(ElementRange(bound.chunk.id, 0, bound.chunk.extent) for bound in chunks)
        self._likes = {bound.chunk.id: [real_form(each) for each in bound.parameters] for bound in chunks}

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        return sum(bound.chunk.nbytes for bound in self._chunks.values())

    def read(self, run: ElementRange) -> Tensor:
        bound = self._chunk_of(run)
        values = torch.zeros(run.stop, dtype=bound.dtype)
        with torch.no_grad():
            for parameter, part in zip(bound.parameters, self._parts(run, values), strict=True):
                part.copy_(real_of(parameter))
        return values

    @contextmanager
    def update(self) -> Iterator[Values]:
        yield self
        self._written()

    def write(self, run: ElementRange, values: Tensor) -> None:
        bound = self._chunk_of(run)
        if values.shape != (run.stop,) or values.dtype != bound.dtype:
            raise UserError(
                f"update.write({run}): got {tuple(values.shape)} values of {values.dtype}, and the run has "
                f"({run.stop},) of {bound.dtype}"
            )
        with torch.no_grad():
            for parameter, part in zip(bound.parameters, self._parts(run, values), strict=True):
                real_of(parameter).copy_(part)

    def _chunk_of(self, run: ElementRange) -> BoundChunk:
        if run not in self.runs:
            raise UserError(f"{run} is no run of this replica: take one of `replica.runs`")
        return self._chunks[run.chunk]

    def _parts(self, run: ElementRange, values: Tensor) -> Iterator[Tensor]:
        """Yield each parameter's part of a run, with the parameter's shape and strides."""
        offset = values.storage_offset()
        for slot, (shape, stride) in zip(
            self._chunks[run.chunk].chunk.slots, self._likes[run.chunk], strict=True
        ):
            yield values.as_strided(shape, stride, offset + slot.offset)


class Mail:
    """The way to other contributors (`exchange/synchronizer.py`: Link).

    Each contributor's first worker sends and receives, and passes received payloads on to its group. `sent`
    counts the bytes that this worker has sent.
    """

    def __init__(self, ring: Ring, replicas: Replicas, most: int) -> None:
        """Swap over `ring`. `most` is the largest number of bytes that may come at once."""
        self._ring, self._replicas, self._most = ring, replicas, most
        self.sent = 0
        self._at = [0, 0, 0]  # the step, the exchange's number after it, the swap's number in the exchange

    def begin(self, step: int, number: int) -> None:
        """Begin an exchange: the `number`-th after this step."""
        self._at = [step, number, 0]

    def swap(self, payloads: Mapping[int, Tensor]) -> dict[int, Tensor]:
        contributors, what = self._replicas.contributors, f"the exchange after step {self._at[0]}"
        self._at[2] += 1
        for name, payload in payloads.items():
            check_payload(name, payload, contributors)
        channel = self._ring.session
        assert channel is not None
        came = self._swap(channel, payloads if self._replicas.leads else {}, what)
        if self._replicas.grouped and self._replicas.place.world > 1:
            came = self._spread(self._replicas.words, contributors.names, came, what)
        return came

    def _swap(self, channel: Channel, payloads: Mapping[int, Tensor], what: str) -> dict[int, Tensor]:
        """Swap payloads between the contributors' first workers, all workers taking part."""
        world = channel.place.world
        sends = [0] * world
        ranked = sorted((self._replicas.leader_of(name), payload) for name, payload in payloads.items())
        for rank, payload in ranked:
            sends[rank] = payload.numel()
        heads, each = torch.zeros((world, 1 + len(self._at)), dtype=torch.int64), [1 + len(self._at)] * world
        own = torch.tensor([[size, *self._at] for size in sends])
        channel.wait(channel.exchange(own.flatten(), each, heads.view(-1), each), what)
        self._check_alike(channel.place, heads[:, 1:].tolist())
        takes: list[int] = heads[:, 0].tolist()
        if min(takes) < 0 or sum(takes) > self._most:
            raise RunError(f"{what}: the others would send {sum(takes)} bytes, and {self._most} are the most")
        out = torch.cat([payload for _, payload in ranked]) if ranked else torch.empty(0, dtype=torch.uint8)
        into = torch.empty(sum(takes), dtype=torch.uint8)
        channel.wait(channel.exchange(out, sends, into, takes), what)
        self.sent += out.numel()
        parts = torch.split(into, takes)
        leaders = {self._replicas.leader_of(name): name for name in self._replicas.contributors.names}
        return {leaders[rank]: part for rank, part in enumerate(parts) if takes[rank] and rank in leaders}

    def _check_alike(self, place: Place, places: list[list[int]]) -> None:
        """Raise MismatchError on all workers unless all are at one swap of one exchange."""
        other = next((rank for rank, at in enumerate(places) if at != places[0]), None)
        if other is not None:
            said = [
                f"worker {place.name_of(rank)} is at swap {swap} of exchange {number} after step {step}"
                for rank in (0, other)
                for step, number, swap in [places[rank]]
            ]
            raise MismatchError(
                f"{'; '.join(said)}: the strategy must make the same exchanges on all contributors, by the "
                "step and the seed alone (docs/reference/synchronizer.md)"
            )

    @staticmethod
    def _spread(
        words: Channel, names: Sequence[int], came: Mapping[int, Tensor], what: str
    ) -> dict[int, Tensor]:
        """Pass the payloads that the group's first worker has received on to the group; return them on all
        members."""
        sizes = torch.tensor([came[name].numel() if name in came else 0 for name in names])
        words.wait(words.broadcast(sizes), what)
        takes: list[int] = sizes.tolist()
        flat = torch.empty(sum(takes), dtype=torch.uint8)
        if words.place.rank == 0 and came:
            flat = torch.cat([came[name] for name in names if name in came])
        if flat.numel():
            words.wait(words.broadcast(flat), what)
        parts = zip(names, torch.split(flat, takes), strict=True)
        return {name: part for name, part in parts if part.numel()}


def check_payload(name: int, payload: Tensor, contributors: Contributors) -> None:
    """Raise UserError for a payload that is no 1-D tensor of bytes on the CPU, or that is not for another
    contributor."""
    if name == contributors.own or name not in contributors.names:
        raise UserError(f"link.swap: {name} is none of the other contributors, {contributors}")
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.device.type != "cpu":
        raise UserError(
            f"link.swap: a payload is a tensor of uint8, (bytes,), on the CPU, and this one is "
            f"{payload.dtype}, {tuple(payload.shape)}, on {payload.device}"
        )


class Driver:
    """The making of the exchanges of one model's synchronizer, and the admission of newcomers between two
    steps.

    A newcomer enters when the first gradient after an exchange comes: until then the script's scheduler may
    have yet to step.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        ring: Ring,
        replicas: Replicas,
        values: Values,
        coder: Coder,
        seed: int,
        training: Training,
    ) -> None:
        self._optimizer, self._contribution = training.optimizer, training.calls.contribution
        self._handle: AroundStep | None = None
        self._synchronizer, self._ring, self._replicas = synchronizer, ring, replicas
        self._values, self._coder, self._seed = values, coder, seed
        self._mail = Mail(ring, replicas, _MOST_GROWTH * values.nbytes + _SPARE)
        self._is_open = False
        # The contributors at the latest exchange, with the ring's generation:
        self._known: tuple[int, Contributors] | None = None
        self._awaited = False  # True if newcomers wait, as all workers know
        self._agreed = 0.0  # samples of all contributors by the latest exchange

    def ready(self, reducer: Reducer) -> None:
        """Register the hook on the step. It runs after the hooks registered before: tiers step in theirs."""
        self._handle = AroundStep(self._optimizer, _nothing, partial(self._after_step, reducer))

    def contribution(self, has_gradient: bool) -> ContributionWeight:
        """Return this worker's contribution; before, let newcomers in, if any wait.

        This is called when an iteration's first gradient comes, or before its step.
        """
        if self._awaited:
            self._awaited = False
            self._ring.admit()
        return self._contribution(has_gradient)

    def _after_step(self, reducer: Reducer, *_: object) -> None:
        """Make the exchanges that are due after a step."""
        self._open()
        step, number = reducer.steps, 0
        for number, exchange in enumerate(self._synchronizer.after_step(step), start=1):
            what, where = f"the exchange after step {step}", partial(self._where, step)
            self._ring.round(what, partial(self._attempt, exchange, step, number), step, where)
            exchange.commit()
            points.reach("exchange.committed", step)
        if number:
            self._agree(reducer, step)

    def _attempt(self, exchange: Exchange, step: int, number: int) -> None:
        """Make one attempt at an exchange, with the contributors of the present ring."""
        _ = self._ring.agreement  # raises UserError on a late worker that has not entered
        contributors = self._replicas.contributors
        known, self._known = self._known, (self._ring.generation, contributors)
        if known is not None and known[0] != self._ring.generation:
            self._synchronizer.change(known[1], contributors)
        exchange.launch(contributors)
        points.reach("exchange.launched", step)
        self._mail.begin(step, number)
        exchange.collect()
        points.reach("exchange.collected", step)

    def _agree(self, reducer: Reducer, step: int) -> None:
        """Learn whether newcomers wait, and how many samples all contributors have trained on."""
        own = reducer.consumed - self._agreed if self._replicas.leads else 0.0
        said = [float(self._ring.is_awaited), own]
        awaited, samples = self._ring.sum(
            said, f"the samples of all at step {step}", partial(self._where, step)
        )
        self._awaited = awaited > 0
        self._agreed += samples
        reducer.consumed = self._agreed
        reducer.bytes_sent += self._mail.sent
        self._mail.sent = 0

    @staticmethod
    def _where(step: int) -> Stand:
        """Return this worker's place in its script during an exchange."""
        return call("optimizer.step", waiting_line(), asks=f"the exchange after step {step}", step=step)

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._synchronizer.open(Parts(self._values, self._mail, self._coder, self._seed))

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints, and for a worker that enters."""
        self._open()
        captured = self._synchronizer.capture()
        if len(captured) > _MOST_CAPTURED:
            raise CheckpointError(
                f"the strategy's capture() gave {len(captured)} bytes, and {_MOST_CAPTURED} are the most"
            )
        return {"seed": self._seed, "captured": base64.b64encode(captured).decode()}

    def load(self, state: Mapping[str, Any], consumed: float) -> None:
        """Take another worker's `state`, or a checkpoint's. `consumed` is the number of samples by then.

        Raises CheckpointError if the synchronizer cannot take it.
        """
        self._agreed, self._awaited = consumed, False
        if "captured" not in state:
            return  # the state of a run with another strategy
        try:
            captured, seed = base64.b64decode(state["captured"], validate=True), int(state["seed"])
            self._synchronizer.restore(captured)
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise CheckpointError(f"the state of the strategy cannot be taken over: {error}") from None
        if not self._is_open:  # an open synchronizer keeps its seed
            self._seed = seed

    def close(self) -> None:
        """Remove the hook, and close the synchronizer: the session is over."""
        if self._handle is not None:
            self._handle.remove()
        if self._is_open:
            self._synchronizer.close()


def _nothing(*_: object) -> None:
    """Do nothing before a step."""


class Replicated:
    """A strategy whose contributors each train a replica.

    `inner` is the strategy by which one contributor trains by itself: alone, or over its group's ring.
    """

    collective = skips_together = shares_buffers = False
    brings_parameters = brings_frozen = trains_as_one = False
    counts_all = False  # a replica learns of the others' samples at exchanges

    def __init__(
        self,
        inner: Strategy,
        make: Callable[[], Synchronizer],
        ring: Ring,
        replicas: Replicas,
        workers: Workers,
        coder: Coder,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """Train replicas. `make()` returns a synchronizer for a model; `written()` is called after each
        update of values."""
        self._inner, self._make, self._ring, self._replicas = inner, make, ring, replicas
        self._workers, self._coder, self._written = workers, coder, written

    def around(self, inner: Strategy, written: Callable[[], None]) -> Replicated:
        """Return this strategy for a model in tiers, of which one contributor trains by `inner`."""
        return Replicated(inner, self._make, self._ring, self._replicas, self._workers, self._coder, written)

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        seed = self._workers.gather(torch.initial_seed() % 2**31, "worker 0's seed")[0]
        values = Values(training.chunks, self._written)
        driver = Driver(self._make(), self._ring, self._replicas, values, self._coder, seed, training)
        calls = replace(training.calls, contribution=driver.contribution, beside=driver)
        return self._inner.build(replace(training, calls=calls))

    def before_load(self) -> bool:
        return False

    def loaded(self) -> None:
        """Do nothing: every worker has loaded equal values, with which all replicas go on."""

    def refresh(self) -> None:
        """Do nothing: each replica has values of its own."""
