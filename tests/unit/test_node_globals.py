"""A node's global parameters against plain torch, to the bit: means in order of node, clipping, schedules,
several param groups, frozen parameters and missing gradients; and that every node computes the same."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from peer_model import SHAPES, WEIGHTS, PeerModel
from torch import nn

from atoll.chunks import ParameterSpec, lay_out
from atoll.core.errors import RunError, UserError
from atoll.exchange.fingerprint import fingerprint
from atoll.exchange.globalparameters import Contribution, GlobalParameters, sum_of_bits
from atoll.exchange.globalstate import pack_globals
from atoll.wire.device import Clip
from atoll.wire.messages import plain_hyperparameters

TWO = [{"lr": 0.05}, {"lr": 0.02, "weight_decay": 0.1}]
KINDS: list[tuple[type[torch.optim.Optimizer], list[dict[str, Any]], bool]] = [
    (torch.optim.SGD, [{"momentum": 0.9, "nesterov": True, **TWO[0]}, TWO[1]], False),
    (torch.optim.Adam, TWO, False),
    (torch.optim.AdamW, TWO, False),
    (torch.optim.AdamW, [{**group, "fused": True} for group in TWO], True),
    (torch.optim.Adagrad, TWO, False),
]  # fmt: skip
MISSING = [(), (1,), (1, 3), (), (0, 6), (2,)]  # of each iteration, at every node
NAMES = [f"{kind.__name__}{'-fused' if fused else ''}" for kind, _, fused in KINDS]


@pytest.mark.parametrize(("kind", "settings", "fused"), KINDS, ids=NAMES)
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("clip", [None, Clip(1.5), Clip(0.3, math.inf), Clip(1e6, 1.0)], ids=str)
def test_a_step_is_plain_torchs(
    kind: type[torch.optim.Optimizer],
    settings: list[dict[str, Any]],
    fused: bool,
    nodes: int,
    clip: Clip | None,
) -> None:
    model = PeerModel(kind, settings)
    parameters = model.globals(fused=fused)
    schedule = torch.optim.lr_scheduler.ExponentialLR(model.plain, 0.8)
    for iteration, missing in enumerate(MISSING):
        absent = [missing, (*missing, 3), ()][:nodes]  # what one lacks, another may have
        given = [
            model.contribution(iteration, node, missing=absent[node], clip=clip) for node in range(nodes)
        ]
        gradients = [(WEIGHTS[n], model.gradients(iteration, n, absent[n])) for n in range(nodes)]
        norm = model.step_plain(model.mean(gradients), clip)
        outcome = parameters.apply(iteration, given)
        assert outcome.stepped
        assert outcome.unlike == {}
        assert outcome.norm == (None if norm is None else float(norm))
        model.assert_equal(parameters)
        schedule.step()
    assert parameters.iteration == len(MISSING)


def test_the_mean_is_the_weighted_one() -> None:
    """Against the definition, in float64, and not only against the same operations."""
    model = PeerModel(torch.optim.SGD, [{"lr": 1.0}], torch.float64)
    parameters = model.globals()
    before = {chunk: parameters.values(chunk).clone() for chunk in parameters.chunks}
    given = [model.contribution(0, node) for node in range(3)]
    parameters.apply(0, given)
    for chunk in parameters.chunks:
        mean = sum(each.gradients[chunk] * each.weight for each in given) / sum(WEIGHTS)
        mean = mean if parameters.optimizer.trains(chunk) else torch.zeros_like(mean)
        torch.testing.assert_close(before[chunk] - parameters.values(chunk), mean, rtol=1e-13, atol=1e-14)


def large(threads: int) -> tuple[GlobalParameters, list[Contribution]]:
    """Global parameters large enough for torch to divide work between threads, and two contributions."""
    model = PeerModel(torch.optim.AdamW, [{"lr": 0.1}])
    shapes = (300_007,), (700, 301)
    specs = [ParameterSpec(str(shape), shape, "float32", settings="0") for shape in shapes]
    layout = lay_out(specs, chunk_bytes=2**20)
    parameters = GlobalParameters(layout, "torch.optim.AdamW", model.hyperparameters(), threads=threads)
    generator = torch.Generator().manual_seed(5)
    for chunk in parameters.chunks:
        parameters.set_values(chunk, torch.randn(layout.chunks[chunk].extent, generator=generator))
    drawn = [
        {chunk: torch.randn(layout.chunks[chunk].extent, generator=generator) for chunk in parameters.chunks}
        for _ in range(2)
    ]
    every = {chunk: bytes([1]) * len(layout.chunks[chunk].slots) for chunk in parameters.chunks}
    hyperparameters = model.hyperparameters()
    return parameters, [
        Contribution(node, 0, 7.0, 7.0, gradients, every, hyperparameters, Clip(1.0, norm_type=1.0))
        for node, gradients in enumerate(drawn)
    ]


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    """Torch's sums of many values do; a node with more cores must not come to other parameters."""
    before, found = torch.get_num_threads(), set()
    try:
        for torchs, own in ((1, 1), (2, 1), (7, 1), (1, 2), (5, 3)):
            torch.set_num_threads(torchs)
            parameters, given = large(own)
            outcomes = [parameters.apply(iteration, given) for iteration in range(2)]
            found.add((outcomes[-1].digest, outcomes[-1].norm))
            assert torch.get_num_threads() == torchs or own > 1
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_the_bits_do_not_depend_on_where_a_gradient_lies() -> None:
    """What came in a message begins at any address that its dtype allows."""
    model = PeerModel(torch.optim.AdamW, TWO)
    digests = set()
    for offset in (0, 1, 3):
        given = [model.contribution(0, node, clip=Clip(1.0)) for node in range(3)]
        moved = [
            dataclasses.replace(
                each,
                gradients={
                    chunk: torch.cat([torch.zeros(offset), flat])[offset:]
                    for chunk, flat in each.gradients.items()
                },
            )
            for each in given
        ]
        assert {flat.data_ptr() % 64 for flat in moved[0].gradients.values()} == {4 * offset}
        digests.add(model.globals().apply(0, moved).digest)
    assert len(digests) == 1


def test_what_is_left_out_counts_for_nothing() -> None:
    model, other = (PeerModel(torch.optim.AdamW, TWO) for _ in range(2))
    parameters, without = model.globals(), other.globals()
    bad = model.contribution(0, 1, weight=0.0)
    for gradients in bad.gradients.values():
        gradients.fill_(math.nan)
    parameters.apply(0, [model.contribution(0, 0), bad, model.contribution(0, 2)])
    without.apply(0, [other.contribution(0, 0), other.contribution(0, 2)])
    assert parameters.digest == without.digest


def test_where_all_are_left_out_the_iteration_counts_alone() -> None:
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = model.globals()
    parameters.apply(0, [model.contribution(0, 0)])
    values = {chunk: parameters.values(chunk).clone() for chunk in parameters.chunks}
    states = {chunk: parameters.optimizer.state(chunk) for chunk in parameters.chunks}
    left_out = [model.contribution(1, node, weight=0.0, clip=Clip(1.0)) for node in (0, 1)]
    outcome = parameters.apply(1, left_out)
    assert (outcome.stepped, outcome.norm, parameters.iteration) == (False, None, 2)
    for chunk in parameters.chunks:
        assert torch.equal(parameters.values(chunk), values[chunk])
        elements, slots = parameters.optimizer.state(chunk)
        assert slots == states[chunk][1]
        assert all(torch.equal(elements[key], states[chunk][0][key]) for key in elements)


def test_the_first_nodes_hyperparameters_count_and_others_are_named() -> None:
    model = PeerModel(torch.optim.SGD, [{"lr": 0.5}])
    parameters, twin = model.globals(), PeerModel(torch.optim.SGD, [{"lr": 0.5}]).globals()
    given = [model.contribution(0, node) for node in range(3)]
    model.plain.param_groups[0]["lr"] = 0.25
    given[1] = model.contribution(0, 1)
    given[2] = dataclasses.replace(given[2], clip=Clip(1.0))
    outcome = parameters.apply(0, given)
    assert outcome.unlike == {1: "other hyperparameters", 2: "another wish to clip"}
    model.plain.param_groups[0]["lr"] = 0.5
    twin.apply(0, [model.contribution(0, node) for node in range(3)])
    assert outcome.digest == twin.digest


def test_who_weighs_nothing_has_no_say_in_clipping_and_hyperparameters() -> None:
    """A worker that has no batch only calls step(): the others' wish to clip counts, and nobody is blamed."""
    model, plain = (PeerModel(torch.optim.SGD, [{"lr": 0.5}]) for _ in range(2))
    parameters = model.globals()
    clip = Clip(1e-3)
    idle = model.contribution(0, 0, weight=0.0)
    given = [idle, *(model.contribution(0, node, clip=clip) for node in (1, 2))]
    prepared = parameters.prepare(0, given)
    assert prepared is not None
    assert prepared.coefficient is not None
    outcome = parameters.apply(0, given)
    parts = [(WEIGHTS[node], plain.gradients(0, node)) for node in (1, 2)]
    norm = plain.step_plain(plain.mean(parts), clip)
    plain.assert_equal(parameters)
    assert norm is not None
    assert (outcome.norm, outcome.first, outcome.unlike) == (float(norm), 1, {})
    groups = [{**group, "lr": 0.25} for group in idle.hyperparameters]
    outcome = parameters.apply(1, [dataclasses.replace(idle, hyperparameters=groups), *given[1:]])
    assert outcome.unlike == {0: "other hyperparameters"}
    plain.step_plain(plain.mean(parts), clip)
    plain.assert_equal(parameters)


def test_an_iteration_is_applied_once_and_in_order() -> None:
    model = PeerModel(torch.optim.SGD, [{"lr": 0.5}])
    parameters = model.globals()
    parameters.apply(0, [model.contribution(0, 0)])
    for iteration in (0, 2):
        with pytest.raises(RunError, match=f"iteration {iteration} cannot be applied .* which are at 1"):
            parameters.apply(iteration, [model.contribution(iteration, 0)])


@pytest.mark.parametrize("node", [0, 2], ids=["the first", "another"])
def test_what_no_step_takes_is_left_out_and_named(node: int) -> None:
    """Of the first node too, whose hyperparameters count otherwise."""
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters, other = model.globals(), model.globals()
    every = [model.contribution(0, each) for each in range(3)]
    good = [each for each in every if each.node != node]
    bad = [{**group, "lr": "much"} for group in every[node].hyperparameters]
    every[node] = dataclasses.replace(every[node], hyperparameters=bad)
    outcome, expected = parameters.apply(0, every), other.apply(0, good)
    assert outcome.digest == expected.digest
    assert outcome.stepped
    assert outcome.first == good[0].node
    assert list(outcome.wrong) == [node]
    assert outcome.wrong[node].startswith(f"node {node}'s contribution: hyperparameter 'lr' was ")
    alone = parameters.apply(1, [dataclasses.replace(every[node], node=node)])
    assert not alone.stepped
    assert parameters.iteration == 2


def test_what_comes_from_outside_is_checked() -> None:
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = model.globals()
    good = model.contribution(0, 2)
    parameters.check(good)
    chunk = parameters.chunks[0]
    one_less = {**good.gradients, chunk: good.gradients[chunk][1:]}
    wide = {**good.gradients, chunk: good.gradients[chunk].double()}
    fewer = {key: value for key, value in good.gradients.items() if key != chunk}
    for changed, line in (
        ({"weight": math.inf}, "node 2's contribution has weight inf"),
        ({"samples": math.nan}, "and nan samples"),
        ({"gradients": one_less}, f"chunk {chunk} is not"),
        ({"gradients": wide}, f"chunk {chunk} is not"),
        ({"gradients": fewer}, "not of the"),
        ({"present": {**good.present, chunk: b"\1" * 99}}, f"chunk {chunk} has"),
        ({"hyperparameters": good.hyperparameters[:1]}, "the optimizer has 1 param groups"),
        ({"hyperparameters": [{**g, "lr": "much"} for g in good.hyperparameters]}, "'lr' was"),
    ):
        with pytest.raises(UserError, match=line):
            parameters.check(dataclasses.replace(good, **changed))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="none of torch.optim's that need no closure"):
        GlobalParameters(model.layout, "torch.optim.LBFGS", model.hyperparameters())


def test_the_sum_sees_each_bit_and_each_exchange() -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in (1, 7, 2048, 5000, 8192):
        values = torch.randn(numel, generator=generator)
        whole = sum_of_bits(values)
        assert whole == sum_of_bits(values.clone())
        seen = {whole}
        for place in {0, numel // 3, numel // 2, numel - 1}:
            changed = values.clone()
            changed.view(torch.int32)[place] ^= 1
            seen.add(sum_of_bits(changed))
        assert len(seen) == 1 + len({0, numel // 3, numel // 2, numel - 1})
        if numel > 1:
            changed = values.clone()
            changed[[0, numel - 1]] = values[[numel - 1, 0]]
            assert sum_of_bits(changed) != whole
    assert sum_of_bits(torch.tensor([0.0])) != sum_of_bits(torch.tensor([-0.0]))


def test_the_digest_tells_nodes_apart_whose_parameters_differ() -> None:
    model = PeerModel(torch.optim.SGD, [{"lr": 0.5}])
    one, other = model.globals(), model.globals()
    assert one.digest == other.digest != b""
    chunk = other.chunks[-1]
    changed = other.values(chunk).clone()
    changed.view(torch.int32)[3] ^= 1
    other.set_values(chunk, changed)
    assert one.digest != other.digest
    given = [model.contribution(0, 0)]
    assert one.apply(0, given).digest != other.apply(0, given).digest


def test_the_fingerprint_is_of_the_run_that_is_made() -> None:
    model = PeerModel(torch.optim.AdamW, TWO)
    given = "torch.optim.AdamW", model.hyperparameters()
    found = fingerprint(*given)
    assert found == fingerprint(*given)
    assert found.startswith(f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} ")
    assert found != fingerprint(*given, fused=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 2)
        assert found == fingerprint(*given)
    finally:
        torch.set_num_threads(before)


def test_memory_is_as_told() -> None:
    """The bytes that the formula is made of are those of the tensors that are kept."""
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = model.globals()
    parameters.apply(0, [model.contribution(0, node, clip=Clip(1.0)) for node in range(3)])
    told = parameters.nbytes()
    assert told["parameters"] == model.layout.nbytes
    kept = [parameters.optimizer.state(chunk)[0] for chunk in parameters.chunks]
    assert told["optimizer"] == sum(flat.nbytes for elements in kept for flat in elements.values())
    assert len(pack_globals(parameters)) >= told["optimizer"]
    assert sum(math.prod(shape) for shape in SHAPES) * 4 <= told["parameters"]


def test_packed_states_count_with_their_own_bytes() -> None:
    """An optimizer that steps whole tensors keeps other states than one of each element's size."""
    layout = lay_out([ParameterSpec("w", (16, 24), "float32", settings="0")])
    settings = plain_hyperparameters(torch.optim.Adafactor([nn.Parameter(torch.zeros(16, 24))]).param_groups)
    parameters = GlobalParameters(layout, "torch.optim.Adafactor", settings, by_tensor=True)
    assert parameters.nbytes()["optimizer"] == 0  # before the first step
    gradients = {0: torch.ones(layout.chunks[0].extent)}
    given = Contribution(0, 0, 1.0, 1.0, gradients, {0: b"\1"}, settings)
    parameters.apply(0, [given])
    told = parameters.nbytes()
    assert told["optimizer"] == 4 * (16 + 24)  # row and column factors
    assert told["twin"] == 2 * 4 * 16 * 24 + told["optimizer"]


@pytest.mark.parametrize("what", ["weight", "samples", "alike"])
@pytest.mark.parametrize("clip", [None, Clip(1.5)], ids=str)
def test_a_contribution_that_weighs_far_too_much_is_left_out_by_every_node_and_named(
    what: str, clip: Clip | None
) -> None:
    model = PeerModel(torch.optim.SGD, [{"lr": 0.1}])
    given = [model.contribution(0, node, clip=clip) for node in range(3)]
    honest, believed = [given[0], given[2]], [model.globals(), model.globals()]
    lied = [given[0], dataclasses.replace(given[1], **{what: 1e300}), given[2]]
    without, outcome = believed[0].apply(0, honest), believed[1].apply(0, lied)
    assert outcome.stepped
    assert outcome.digest == without.digest
    (line,) = outcome.wrong.values()
    assert list(outcome.wrong) == [1]
    kind = {"weight": "weight", "samples": "number of samples", "alike": "number of workers"}[what]
    assert line.startswith(
        f"node 1's contribution has a {kind} of 1e+300, more than 1,000,000 times the median"
    )
    assert "\n" not in line


def test_an_iteration_steps_with_what_scripts_have_made_of_the_mean() -> None:
    """Node 0's script has used the mean, and node 1's, which waited, contributes its own gradients."""
    model = PeerModel(torch.optim.SGD, TWO)
    parameters = model.globals()
    mean = model.mean([(WEIGHTS[node], model.gradients(0, node)) for node in (0, 1)])
    used, own = (model.contribution(0, node) for node in (0, 1))
    parameters.apply(0, [dataclasses.replace(used, gradients=_flats(model, mean, 1.0), mean=True), own])
    model.step_plain(mean)
    model.assert_equal(parameters)


def test_an_iteration_steps_with_the_mean_of_what_scripts_have_made_of_the_mean_by_weight() -> None:
    model = PeerModel(torch.optim.SGD, TWO)
    parameters = model.globals()
    mean = model.mean([(WEIGHTS[node], model.gradients(0, node)) for node in (0, 1)])
    given = [
        dataclasses.replace(
            model.contribution(0, node), gradients=_flats(model, mean, 2.0 + 2 * node), mean=True
        )
        for node in (0, 1)
    ]
    parameters.apply(0, given)
    factor = (2.0 * WEIGHTS[0] + 4.0 * WEIGHTS[1]) / (WEIGHTS[0] + WEIGHTS[1])
    model.step_plain([None if each is None else each * factor for each in mean])
    for chunk in model.layout.chunks:
        right = model.flat(chunk.id, [each.detach() for each in model.every])
        assert torch.allclose(parameters.values(chunk.id), right, rtol=1e-5, atol=1e-7), chunk.id


@pytest.mark.parametrize("clipped", [False, True])
def test_a_mean_that_a_script_has_clipped_is_not_clipped_again(clipped: bool) -> None:
    """Node 1 asks to clip as well, and contributes its own gradients."""
    model = PeerModel(torch.optim.SGD, TWO)
    mean = model.mean([(WEIGHTS[node], model.gradients(0, node)) for node in (0, 1)])
    used, own = (dataclasses.replace(model.contribution(0, node), clip=Clip(1e-3)) for node in (0, 1))
    used = dataclasses.replace(used, gradients=_flats(model, mean, 1.0), mean=True, clipped=clipped)
    step = model.globals().prepare(0, [used, own])
    assert step is not None
    assert step.counted == [used]
    assert (step.coefficient is None) == clipped


def _flats(model: PeerModel, mean: list[torch.Tensor | None], factor: float) -> dict[int, torch.Tensor]:
    filled = [
        torch.zeros(shape) if each is None else each * factor
        for each, shape in zip(mean, SHAPES, strict=True)
    ]
    return {chunk.id: model.flat(chunk.id, filled) for chunk in model.layout.trainable}
