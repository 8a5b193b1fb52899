"""Which gradients can be sent from where autograd left them, and exchanges in flight while the next iteration
computes."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
from torch import Tensor, nn

from atoll.chunks import lay_out
from atoll.core.errors import UserError
from atoll.exchange.coding import bytes_of
from atoll.exchange.link import Handler
from atoll.net.tunnel import Lossy
from atoll.tensors.binding import BoundChunk, bind_model, specs_of
from atoll.train.gradients.reducer import Calls
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.sync.answers import NewParameters
from atoll.train.sync.connection import Connection
from atoll.train.sync.serving import serve_alone
from atoll.train.sync.stores import Resident, gradient_as_it_lies
from atoll.wire.messages import AnyMessage, Commit, Committed, LostBlocks, Parameters, Pull, Push, Used


def chunk_of(*tensors: Tensor) -> BoundChunk:
    parameters = {f"p{index}": nn.Parameter(tensor) for index, tensor in enumerate(tensors)}
    (bound,) = bind_model(lay_out(specs_of(parameters, {}), chunk_bytes=2**20), parameters)
    return bound


def test_one_parameters_gradient_is_taken_where_it_lies() -> None:
    for values in (torch.randn(4, 6), torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)):
        bound = chunk_of(values)
        (parameter,) = bound.parameters
        parameter.grad = torch.randn_like(parameter)  # of the same strides
        flat = gradient_as_it_lies(bound, [True])
        assert flat is not None
        assert flat.data_ptr() == parameter.grad.data_ptr()
        step = nn.Parameter(bound.flat[: bound.chunk.extent].clone())
        step.grad = flat
        torch.optim.SGD([step], lr=1.0).step()
        torch.optim.SGD([parameter], lr=1.0).step()
        assert torch.equal(step, bound.flat[: bound.chunk.extent])


def test_what_lies_otherwise_is_not() -> None:
    bound = chunk_of(torch.randn(4, 6))
    (parameter,) = bound.parameters
    assert gradient_as_it_lies(bound, [True]) is None  # there is none
    parameter.grad = torch.randn(6, 4).t()
    assert gradient_as_it_lies(bound, [True]) is None
    parameter.grad = torch.randn(1, 6).expand(4, 6)
    assert gradient_as_it_lies(bound, [True]) is None
    parameter.grad = torch.randn(4, 6)
    assert gradient_as_it_lies(bound, [False]) is None  # it has no weight
    two = chunk_of(torch.randn(3), torch.randn(4))
    for parameter in two.parameters:
        parameter.grad = torch.randn_like(parameter)
    assert gradient_as_it_lies(two, [True, True]) is None


# -- exchanges in flight while the next iteration computes -------------------------------------------------


class FakeShards:
    """One shard, as an exchange sees it: it keeps what was sent, and answers when the test says so."""

    incarnation = 3

    def __init__(self) -> None:
        self.sent: list[tuple[AnyMessage, memoryview | None, Hashable]] = []
        self.unanswered: set[Hashable] = set()
        self.answers: list[tuple[AnyMessage, memoryview | None]] = []  # given when the exchange next looks
        self.in_wait: list[tuple[AnyMessage, memoryview | None]] = []  # given when it waits for more
        self.handlers: dict[type, Handler] = {}
        self.waits = 0

    def on(self, kind: type, handler: Handler) -> None:
        self.handlers[kind] = handler

    def send(
        self,
        _shard: int,
        message: AnyMessage,
        payload: memoryview | None = None,
        until: Hashable = None,
        lossy: Lossy | None = None,
    ) -> None:
        assert lossy is None
        self.sent.append((message, payload, until))
        self.unanswered.add(until)

    def answered(self, until: Hashable) -> None:
        self.unanswered.discard(until)

    def take(self) -> None:
        answers, self.answers = self.answers, []
        for message, payload in answers:
            self.handlers[type(message)](0, message, payload)

    def wait(self, done: Callable[[], bool], _missing: object, what: object) -> None:
        self.take()
        if not done():
            self.waits += 1
            self.answers, self.in_wait = self.in_wait, []
            self.take()
        assert done(), what() if callable(what) else what


class Alone:
    """Nobody else takes part."""

    def boundary(self, iteration: int, *, begins: bool) -> None: ...

    def over(self) -> None: ...

    def told(self, committed: Committed) -> None: ...


class Pipelined:
    """A model of two chunks, its exchange with `sync.pipeline` = 1, and a shard that the test plays."""

    def __init__(self) -> None:
        self.weights = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(12))
        named = dict(zip("ab", self.weights, strict=True))
        bound = bind_model(lay_out(specs_of(named, dict.fromkeys(self.weights, "0")), chunk_bytes=64), named)
        self.shards, self.used = FakeShards(), 0
        self.staleness: list[float] = []
        connection = Connection(
            self.shards,  # type: ignore[arg-type]
            {chunk.chunk.id: 0 for chunk in bound},
            self._use,
            self.staleness.append,
            Alone(),
            worker=0,
        )
        calls = Calls(
            lambda: None, lambda _: ContributionWeight(2.0, 2.0), lambda _own, _samples: None, lambda: None
        )
        self.exchange = serve_alone("asp", bound, connection, calls, pipeline=1)
        self.bound, self.connection = bound, connection

    def _use(self) -> list[Used]:
        self.used += 1
        return [Used(sampler=0, epoch=0, start=self.used - 1, stop=self.used)]

    def backward(self, value: float) -> None:
        for weight in self.weights:
            weight.grad = torch.full_like(weight, value)
        self.exchange.phase.unsent = True

    def step(self) -> None:
        self.exchange.before_step()
        self.exchange.step(accepted=True, hyperparameters=[])
        self.exchange.after_step()

    def answer(self, clock: int, value: float) -> list[tuple[AnyMessage, memoryview | None]]:
        return [
            (
                Parameters(
                    clock=clock, asked=clock, chunk=each.chunk.id, version=clock, staleness=float(clock)
                ),
                bytes_of(torch.full((each.chunk.extent,), value)),
            )
            for each in self.bound
        ]

    def values(self) -> list[float]:
        return [float(weight.detach()[0]) for weight in self.weights]

    def pushed(self) -> list[float]:
        """The first gradient of each push, as its memory is now."""
        payloads = [payload for message, payload, _ in self.shards.sent if isinstance(message, Push)]
        return [torch.frombuffer(payload, dtype=torch.float32)[0].item() for payload in payloads if payload]

    def asks(self) -> list[tuple[int, bool]]:
        """Of each push its iteration, and whether it asks for parameters."""
        return [(each.iteration, each.pull) for each, _, _ in self.shards.sent if isinstance(each, Push)]

    def commits(self) -> list[tuple[int, int, int]]:
        return [
            (each.iteration, each.behind, each.used[0].start)
            for each, _, _ in self.shards.sent
            if isinstance(each, Commit)
        ]


def test_a_step_returns_and_the_next_one_publishes_what_came_meanwhile() -> None:
    one = Pipelined()
    one.backward(1.0)
    one.step()
    assert (one.shards.waits, one.values()) == (0, [0.0, 0.0])
    one.shards.answers = one.answer(1, 10.0)  # while the next iteration computes
    one.backward(2.0)
    assert one.values() == [0.0, 0.0]
    assert one.pushed() == [1.0, 1.0]  # the gradients' own memory has other values by now
    one.step()
    assert (one.shards.waits, one.values()) == (0, [10.0, 10.0])
    assert one.commits() == [(0, 0, 0), (1, 1, 1)]
    assert one.asks() == [(0, False), (0, True), (1, False), (1, True)]
    assert one.staleness == [1.0, 1.0]
    assert not any(isinstance(message, Pull) for message, _, _ in one.shards.sent)


def test_an_answer_that_is_late_is_waited_for_and_only_then_is_the_next_one_asked_for() -> None:
    one = Pipelined()
    for value in (1.0, 2.0):
        one.shards.in_wait = one.answer(1, 10.0)
        one.backward(value)
        one.step()
    assert (one.shards.waits, one.values()) == (1, [10.0, 10.0])
    assert one.asks() == [(0, False), (0, True), (1, False), (1, False)]
    last, _, _ = one.shards.sent[-1]
    assert (type(last), last.clock) == (Pull, 2)  # type: ignore[union-attr]
    # What was answered needs not be sent again, and what was not must be.
    assert {until for until in one.shards.unanswered if isinstance(until, tuple)} == {("contribution", 1)}
    one.shards.answers = one.answer(2, 20.0)
    one.backward(3.0)
    assert one.pushed()[2:] == [2.0, 2.0]
    one.step()
    assert one.pushed()[2:] == [2.0, 2.0, 3.0, 3.0]
    assert one.values() == [20.0, 20.0]
    assert one.commits()[2] == (2, 1, 2)


def test_settling_waits_and_changes_no_parameter_and_closing_publishes() -> None:
    one = Pipelined()
    one.backward(1.0)
    one.step()
    one.shards.in_wait = one.answer(1, 10.0)
    one.exchange.settle()
    assert (one.shards.waits, one.values()) == (1, [0.0, 0.0])
    one.exchange.settle()
    one.shards.answers = []
    one.exchange.before_use()
    assert (one.shards.waits, one.values()) == (1, [10.0, 10.0])
    one.backward(2.0)
    one.step()
    assert one.commits()[-1] == (1, 0, 1)  # computed with its own contribution in the parameters
    one.shards.in_wait = one.answer(2, 20.0)
    one.exchange.close()
    assert one.values() == [20.0, 20.0]


def test_a_parameter_that_the_script_changes_is_noticed_before_anything_leaves() -> None:
    one = Pipelined()
    one.backward(1.0)
    one.step()
    with torch.no_grad():
        one.weights[0].add_(1.0)
    one.shards.answers = one.answer(1, 10.0)
    one.backward(2.0)
    sent = len(one.shards.sent)
    with pytest.raises(UserError, match="parameter 'a' was changed by the script"):
        one.step()
    assert len(one.shards.sent) == sent


def test_an_answer_to_the_pull_before_is_not_taken_for_this_one_s() -> None:
    """A shard that came back answers once more, with a later clock; what was lost of the contribution stands
    in the answer to this pull alone."""
    run = Pipelined()
    told: list[tuple[int, int, bool]] = []
    parameters = NewParameters(
        run.bound,
        run.connection,
        Resident(run.bound),
        lost=lambda iteration, chunk, lost: told.append((iteration, chunk, lost is not None)),
    )

    def answer(asked: int, clock: int, lost: LostBlocks | None, chunks: slice) -> None:
        for each in run.bound[chunks]:
            flat = torch.full((each.chunk.extent,), float(clock))
            message = Parameters(clock=clock, asked=asked, chunk=each.chunk.id, version=clock, lost=lost)
            run.shards.handlers[Parameters](0, message, bytes_of(flat))

    parameters.pull(5)
    answer(5, 5, None, slice(None))
    parameters.publish()
    parameters.pull(6)
    answer(5, 6, None, slice(1))
    answer(6, 6, LostBlocks(4, b"\1", "borne"), slice(1, None))
    assert not parameters.have_arrived
    answer(6, 6, LostBlocks(4, b"\1", "borne"), slice(1))
    assert parameters.have_arrived
    assert sorted(told) == [(4, 0, False), (4, 1, False), (5, 0, True), (5, 1, True)]
