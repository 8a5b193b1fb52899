"""Local parameters: what is pending, over the global ones. With all contributions they are what applying will
give, bit for bit; the global parameters and the optimizer's state are left as they were."""

from __future__ import annotations

import copy
import random
import weakref
from typing import Any

import pytest
import torch
from peer_model import WEIGHTS, PeerModel
from torch import Tensor

from atoll.cpuside.overlay import Overlay, Pending
from atoll.exchange.globalparameters import Contribution, GlobalParameters, PreparedStep
from atoll.exchange.globalstate import pack_globals
from atoll.wire.device import Clip

pytestmark = pytest.mark.sampled

TWO = [{"lr": 0.05}, {"lr": 0.02, "weight_decay": 0.1}]
KINDS: list[tuple[type[torch.optim.Optimizer], list[dict[str, Any]]]] = [
    (torch.optim.SGD, [{"momentum": 0.9, "nesterov": True, **TWO[0]}, TWO[1]]),
    (torch.optim.Adam, TWO),
    (torch.optim.AdamW, TWO),
    (torch.optim.Adagrad, TWO),
    (torch.optim.NAdam, TWO),
]


def local(parameters: GlobalParameters, waiting: list[Pending]) -> dict[int, Tensor]:
    """The local parameters, and that nothing else has changed."""
    before = bytes(pack_globals(parameters))
    into = {chunk: torch.full_like(parameters.values(chunk), 7.0) for chunk in parameters.chunks}
    Overlay(parameters).write(into, waiting)
    assert bytes(pack_globals(parameters)) == before
    return into


def assert_are(parameters: GlobalParameters, expected: dict[int, Tensor]) -> None:
    for chunk in parameters.chunks:
        assert torch.equal(parameters.values(chunk), expected[chunk]), chunk


def drawn(model: PeerModel, iterations: int, seed: int) -> list[list[Contribution]]:
    """All contributions of some iterations: gradients that are missing here and there, clipping and learning
    rates that change, now and then one that is left out."""
    generator = random.Random(seed)
    found = []
    for iteration in range(iterations):
        for group in model.plain.param_groups:
            group["lr"] = generator.uniform(0.01, 0.1)
        clip = generator.choice([None, Clip(generator.uniform(0.3, 3.0))])
        found.append(
            [
                model.contribution(
                    iteration,
                    node,
                    missing=generator.sample(range(7), generator.choice([0, 0, 1, 3])),
                    weight=generator.choice([None, None, None, 0.0]),
                    clip=clip,
                )
                for node in range(3)
            ]
        )
    return found


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=["SGD", "Adam", "AdamW", "Adagrad", "NAdam"])
@pytest.mark.parametrize("fused", [True, False])
def test_with_all_contributions_it_is_what_applying_will_give(
    kind: type[torch.optim.Optimizer], settings: list[dict[str, Any]], fused: bool
) -> None:
    for seed in range(2):
        model = PeerModel(kind, settings)
        parameters = model.globals(fused=fused)
        given = drawn(model, 5, seed)
        for iteration in range(len(given)):
            ahead = min(len(given), iteration + 3)
            expected = [
                local(parameters, [Pending(t, given[t]) for t in range(iteration, until)])
                for until in range(iteration, ahead + 1)
            ]
            assert_are(parameters, expected[0])
            twin = PeerModel(kind, settings).globals(fused=fused)
            for t in range(ahead):
                twin.apply(t, given[t])
                if t >= iteration:
                    assert_are(twin, expected[t + 1 - iteration])
            parameters.apply(iteration, given[iteration])
            assert_are(parameters, expected[1])


def test_what_is_there_of_an_iteration_makes_a_whole_step() -> None:
    """Against plain torch: the optimizer's step with the mean of what is there."""
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = model.globals(fused=False)
    for t in range(2):
        parameters.apply(t, [model.contribution(t, node) for node in range(3)])
        model.step_plain(model.mean([(WEIGHTS[n], model.gradients(t, n)) for n in range(3)]))
    state = copy.deepcopy(model.plain.state_dict())
    held = [p.detach().clone() for p in model.every]
    waiting, missing = [], [(0, 2), (1,)]  # which nodes' are there
    for t, nodes in zip((2, 3), missing, strict=True):
        waiting.append(Pending(t, [model.contribution(t, n) for n in nodes]))
        model.step_plain(model.mean([(WEIGHTS[n], model.gradients(t, n)) for n in nodes]))
    found = local(parameters, waiting)
    for chunk in parameters.chunks:
        assert torch.equal(found[chunk], model.flat(chunk, [p.detach() for p in model.every]))
    # The global parameters go on from where they were, state included.
    model.plain.load_state_dict(state)
    for parameter, old in zip(model.every, held, strict=True):
        parameter.detach().copy_(old)
    parameters.apply(2, [model.contribution(2, node) for node in range(3)])
    model.step_plain(model.mean([(WEIGHTS[n], model.gradients(2, n)) for n in range(3)]))
    model.assert_equal(parameters)


def test_with_nothing_that_counts_it_is_the_global_parameters() -> None:
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = model.globals()
    parameters.apply(0, [model.contribution(0, 0)])
    for waiting in ([], [Pending(1, [])], [Pending(1, [model.contribution(1, 0, weight=0.0)])]):
        found = local(parameters, waiting)
        assert_are(parameters, found)


def test_a_norm_is_found_anew_when_another_contribution_has_come() -> None:
    """It is kept by whose contributions it is of: the same ones, and no others."""
    model = PeerModel(torch.optim.SGD, [{"lr": 0.1}])
    given = [[model.contribution(t, node, clip=Clip(0.5)) for node in range(3)] for t in range(3)]
    parameters, fresh = model.globals(), model.globals()
    for count in (1, 2, 3, 2):
        some = [Pending(t, given[t][:count]) for t in range(2)]
        found = local(parameters, some)
        again = local(PeerModel(torch.optim.SGD, [{"lr": 0.1}]).globals(), some)
        assert all(torch.equal(found[chunk], again[chunk]) for chunk in found)
    for t in range(3):
        assert parameters.apply(t, given[t]) == fresh.apply(t, given[t])


def trained_chunk(parameters: GlobalParameters) -> int:
    return next(chunk for chunk in parameters.chunks if parameters.optimizer.trains(chunk))


def steps_of(parameters: GlobalParameters, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The iterations whose steps are made from now on, of one chunk."""
    made: list[int] = []
    plain = parameters.step_chunk
    one = trained_chunk(parameters)

    def step_chunk(chunk: int, step: PreparedStep, *rest: Any) -> None:
        made.extend([step.iteration] if chunk == one else [])
        plain(chunk, step, *rest)

    monkeypatch.setattr(parameters, "step_chunk", step_chunk)
    return made


@pytest.mark.check
@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=["SGD", "Adam", "AdamW", "Adagrad", "NAdam"])
def test_what_is_kept_of_one_writing_changes_nothing_in_the_next(
    kind: type[torch.optim.Optimizer], settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contributions in any order, some nodes far behind, members that go, values that come from elsewhere:
    each writing is what one makes that has kept nothing, where what comes late is shown at once."""
    saved = 0
    monkeypatch.setattr("atoll.cpuside.overlay._STAYS", 0.0)
    for seed in range(2):
        generator = random.Random(seed)
        model = PeerModel(kind, settings)
        parameters, iterations = model.globals(), 12
        given = drawn(model, iterations, seed)
        overlay, made = Overlay(parameters), steps_of(parameters, monkeypatch)
        one = trained_chunk(parameters)
        nodes = [0] * 3  # the next iteration of each
        while parameters.iteration < iterations:
            node = generator.choices(range(3), [4, 4, 1])[0]
            now = parameters.iteration
            if generator.random() < 0.05:
                parameters.set_values(one, parameters.values(one) + 0.25)
            elif generator.random() < 0.05:
                states, slots = parameters.optimizer.state(one)
                parameters.set_state(one, {key: 2 * state for key, state in states.items()}, slots)
            elif nodes[node] < iterations:
                nodes[node] += 1
            here = [[given[t][node] for node in range(3) if t < nodes[node]] for t in range(iterations)]
            if len(here[now]) == 3 or (here[now] and generator.random() < 0.02):  # or one is left out
                parameters.apply(now, here[now])
                nodes = [max(each, now + 1) for each in nodes]
            waiting = [Pending(t, here[t]) for t in range(parameters.iteration, iterations) if here[t]]
            before = bytes(pack_globals(parameters))
            found = {chunk: torch.full_like(parameters.values(chunk), 7.0) for chunk in parameters.chunks}
            made.clear()
            overlay.write(found, waiting)
            assert bytes(pack_globals(parameters)) == before
            saved += len(waiting) - len(made)
            with monkeypatch.context() as patch:
                patch.setattr("atoll.cpuside.overlay._WORTH_KEEPING", 1000)
                expected = local(parameters, waiting)
            assert all(torch.equal(found[chunk], expected[chunk]) for chunk in expected)
    assert saved > 50


def test_behind_a_slow_node_the_newest_iteration_alone_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = model.globals()
    given = [[model.contribution(t, node) for node in range(3)] for t in range(12)]
    overlay, made = Overlay(parameters), steps_of(parameters, monkeypatch)
    into = {chunk: torch.empty_like(parameters.values(chunk)) for chunk in parameters.chunks}

    def stepped(*nodes: int) -> list[int]:
        """What is stepped where so many nodes' contributions are here of each iteration that is pending."""
        made.clear()
        here = enumerate(nodes, start=parameters.iteration)
        overlay.write(into, [Pending(t, given[t][:count]) for t, count in here])
        return list(made)

    assert stepped(*[2] * 10) == list(range(10))
    assert stepped(*[2] * 10, 1) == [10]
    assert stepped(*[2] * 11) == [10]
    assert stepped(*[2] * 11, 1) == [11]
    assert stepped(3, *[2] * 11) == list(range(12))  # the slow one's contribution is under all others
    parameters.apply(0, given[0])
    assert stepped(*[2] * 11) == []  # what was stepped before
    parameters.apply(1, given[1])
    assert stepped(*[2] * 10) == list(range(2, 12))


@pytest.mark.parametrize("pending", [2, 6])
def test_contributions_are_held_no_longer_than_they_are_looked_at(pending: int) -> None:
    """They lie in slots of shared memory, which the worker is to write again."""
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = model.globals()
    overlay = Overlay(parameters)
    into = {chunk: torch.empty_like(parameters.values(chunk)) for chunk in parameters.chunks}
    waiting = [Pending(t, [model.contribution(t, 0)]) for t in range(pending)]
    held = [weakref.ref(flat) for each in waiting for flat in each.contributions[0].gradients.values()]
    overlay.write(into, waiting)
    parameters.apply(0, waiting[0].contributions)
    overlay.write(into, waiting[1:])
    waiting.clear()
    assert [each() for each in held] == [None] * len(held)


class SlowNode:
    """An overlay behind a node that is `behind` iterations late, of three; it writes when the fast ones have
    contributed, and when the slow one has and its iteration is applied."""

    def __init__(self, behind: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model = PeerModel(kind, [{"lr": 0.01}])
        self.parameters = self.model.globals()
        self.overlay, self.behind, self.iteration = Overlay(self.parameters), behind, 0
        self.given: list[list[Contribution]] = []

    def fast(self) -> None:
        """The fast ones contribute to one iteration more."""
        self.given.append([self.model.contribution(self.iteration, node) for node in range(3)])
        self.iteration += 1

    def slow(self) -> None:
        """The slow one contributes to the first that is pending."""
        now = self.parameters.iteration
        self.parameters.apply(now, self.given[now])

    def waiting(self) -> list[Pending]:
        now = self.parameters.iteration
        return [Pending(t, self.given[t][:2]) for t in range(now, self.iteration)]

    def shown(self) -> dict[int, Tensor]:
        """What the overlay writes; global parameters and state stay what they are."""
        before = bytes(pack_globals(self.parameters))
        into = {
            chunk: torch.full_like(self.parameters.values(chunk), 7.0) for chunk in self.parameters.chunks
        }
        self.overlay.write(into, self.waiting())
        assert bytes(pack_globals(self.parameters)) == before
        return into

    def hidden(self) -> Tensor:
        """What would be written all at once, less what is."""
        shown, whole = self.shown(), local(self.parameters, self.waiting())
        return torch.cat([(whole[chunk] - shown[chunk]).double() for chunk in self.parameters.chunks])


def test_what_comes_late_is_shown_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth at once, and a tenth of the rest with each iteration; in the end all of it, to the bit."""
    monkeypatch.setattr("atoll.cpuside.overlay._SHOWN", 20)
    node = SlowNode(8)
    for _ in range(8):
        node.fast()
        assert not node.hidden().any()  # nothing was late
    before = torch.cat([node.shown()[chunk].double() for chunk in node.parameters.chunks])
    node.slow()
    hidden = node.hidden()
    whole = local(node.parameters, node.waiting())
    moved = torch.cat([whole[chunk].double() for chunk in node.parameters.chunks]) - before
    torch.testing.assert_close(hidden, 0.9 * moved, rtol=0, atol=1e-6)
    assert moved.abs().max() > 1e-3
    for count in range(1, 20):
        torch.testing.assert_close(node.hidden(), hidden)  # a writing alone shows nothing more
        node.given[node.parameters.iteration].pop()  # from now on the slow one is none of them
        node.slow()
        node.fast()
        hidden = node.hidden()
        torch.testing.assert_close(hidden, 0.9 ** (count + 1) * moved, rtol=0, atol=1e-6)
    assert hidden.any()
    node.fast()
    assert not node.hidden().any()


def test_what_is_late_again_and_again_adds_up() -> None:
    """Each one's part is a tenth, and a tenth of the rest with each iteration that follows."""
    node, expected = SlowNode(8), torch.zeros(1, dtype=torch.float64)
    for _ in range(8):
        node.fast()
    node.shown()
    for _ in range(12):
        old = local(node.parameters, node.waiting())
        node.slow()
        new = local(node.parameters, node.waiting())
        late = torch.cat([(new[chunk] - old[chunk]).double() for chunk in node.parameters.chunks])
        expected = expected + 0.9 * late
        torch.testing.assert_close(node.hidden(), expected, rtol=0, atol=1e-5)
        node.fast()
        expected = 0.9 * expected
        torch.testing.assert_close(node.hidden(), expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 1e-3


def test_where_nothing_is_pending_the_global_parameters_are_shown() -> None:
    node = SlowNode(8)
    for _ in range(8):
        node.fast()
    node.shown()
    node.slow()
    assert node.hidden().any()
    while node.parameters.iteration < node.iteration:
        node.slow()
    assert_are(node.parameters, node.shown())
    for _ in range(6):  # and nothing of it comes again
        node.fast()
        assert not node.hidden().any()


@pytest.mark.parametrize("behind", [1, 3])
def test_behind_a_node_that_is_hardly_late_all_is_shown_at_once(behind: int) -> None:
    node = SlowNode(behind)
    for _ in range(behind):
        node.fast()
    for _ in range(12):
        assert not node.hidden().any()
        node.slow()
        assert not node.hidden().any()
        node.fast()


def test_where_most_contributions_come_late_all_are_shown_at_once() -> None:
    """On a slow network a node has its own alone, and then all the others'."""
    model = PeerModel(torch.optim.AdamW, [{"lr": 0.01}])
    parameters = model.globals()
    overlay = Overlay(parameters)
    given = [[model.contribution(t, node) for node in range(3)] for t in range(20)]
    into = {chunk: torch.empty_like(parameters.values(chunk)) for chunk in parameters.chunks}
    for now in range(12):
        for here in (1, 3):
            waiting = [Pending(now, given[now][:here])]
            waiting += [Pending(t, given[t][:1]) for t in range(now + 1, now + 6)]
            overlay.write(into, waiting)
            whole = local(parameters, waiting)
            assert all(torch.equal(into[chunk], whole[chunk]) for chunk in whole)
        parameters.apply(now, given[now])


def test_values_from_elsewhere_are_shown_at_once() -> None:
    node = SlowNode(8)
    for _ in range(8):
        node.fast()
    node.shown()
    node.slow()
    assert node.hidden().any()
    one = trained_chunk(node.parameters)
    node.parameters.set_values(one, node.parameters.values(one) + 0.25)
    assert not node.hidden().any()
