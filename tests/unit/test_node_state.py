"""Packed parameters and optimizer state: what goes to a node that comes late, or into a checkpoint, and that
nothing damaged is taken."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch
from peer_model import PeerModel

from atoll.core.errors import UserError
from atoll.exchange.globalparameters import GlobalParameters, sum_of_bits
from atoll.exchange.globalstate import (
    Head,
    most_bytes,
    pack_globals,
    pack_globals_into,
    pack_optimizer,
    unpack_globals,
    unpack_optimizer,
)
from atoll.exchange.hostmemory import make_file, map_bytes
from atoll.tensors.stepunit import unit_of

TWO = [{"lr": 0.05}, {"lr": 0.02, "weight_decay": 0.1}]
KINDS: list[tuple[type[torch.optim.Optimizer], list[dict[str, Any]]]] = [
    (torch.optim.SGD, [{"momentum": 0.9, **TWO[0]}, {"lr": 0.02}]),
    (torch.optim.AdamW, TWO),
    (torch.optim.NAdam, TWO),
    (torch.optim.ASGD, TWO),
]
OF_KINDS = pytest.mark.parametrize(("kind", "settings"), KINDS, ids=["SGD", "AdamW", "NAdam", "ASGD"])


def stepped(model: PeerModel, iterations: int) -> GlobalParameters:
    """Global parameters after some iterations, in which now and then a gradient is missing."""
    parameters = model.globals()
    for t in range(iterations):
        for group in model.plain.param_groups:
            group["lr"] *= 0.9
        parameters.apply(t, [model.contribution(t, node, missing=[1, 3][: t % 3]) for node in range(3)])
    return parameters


@OF_KINDS
@pytest.mark.parametrize("iterations", [0, 4])
def test_one_that_comes_late_goes_on_with_the_same_bits(
    kind: type[torch.optim.Optimizer], settings: list[dict[str, Any]], iterations: int
) -> None:
    model = PeerModel(kind, settings)
    parameters = stepped(model, iterations)
    raw = pack_globals(parameters)
    assert raw.nbytes <= most_bytes(parameters)
    late = PeerModel(kind, settings)
    with torch.no_grad():
        for parameter in late.every:  # what it begins with counts for nothing, what is frozen included
            parameter.zero_()
    other = late.globals()
    head = unpack_globals(memoryview(bytearray(b"x" + raw))[1:], other)  # at any address, as from a message
    assert (head.iteration, head.digest) == (other.iteration, other.digest) == (iterations, parameters.digest)
    assert bytes(pack_globals(other)) == bytes(raw)
    for t in range(iterations, iterations + 2):
        given = [model.contribution(t, node, missing=[2]) for node in range(3)]
        assert parameters.apply(t, given) == other.apply(t, given)
    assert bytes(pack_globals(other)) == bytes(pack_globals(parameters)) != bytes(raw)


@OF_KINDS
def test_a_checkpoint_has_the_state_that_plain_torch_would_have(
    kind: type[torch.optim.Optimizer], settings: list[dict[str, Any]]
) -> None:
    """From the CPU side to the worker and, after loading, back."""
    model = PeerModel(kind, [{**group, "foreach": False} for group in settings])
    bound, parameters = model.bound(), model.globals(fused=False)
    for t in range(3):
        missing = [4, 6] if t == 1 else [4]
        model.step_plain(model.gradients(t, 0, missing))
        parameters.apply(t, [model.contribution(t, 0, missing=missing)])
    file = make_file(0, "a test")
    packed = pack_globals_into(parameters, file)
    raw = map_bytes(file, packed).numpy().data
    states = unpack_optimizer(raw, model.plain, bound)
    assert list(states) == [
        p for g in model.plain.param_groups for p in g["params"] if p in model.plain.state
    ]
    for parameter, state in states.items():
        expected = {k: v for k, v in model.plain.state[parameter].items() if v is not None}
        assert state.keys() == expected.keys()
        for key, value in state.items():
            assert type(value) is type(expected[key]), key
            if isinstance(value, torch.Tensor):
                assert value.dtype == expected[key].dtype
                assert value.shape == expected[key].shape
                assert torch.equal(value, expected[key]), key
            else:
                assert value == expected[key], key
    again = model.globals(fused=False)
    unpack_globals(pack_optimizer(model.plain, bound, unit_of(model.plain), 3), again)
    again.iteration = 3
    given = [model.contribution(3, node) for node in range(3)]
    assert again.apply(3, given) == parameters.apply(3, given)


def test_what_was_packed_does_not_change_with_the_next_step() -> None:
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = stepped(model, 2)
    raw = pack_globals(parameters)
    before = bytes(raw)
    parameters.apply(2, [model.contribution(2, 0)])
    assert bytes(raw) == before


def refused(raw: bytes, parameters: GlobalParameters, line: str) -> None:
    """It is, in one line, and nothing has changed."""
    before = bytes(pack_globals(parameters))
    with pytest.raises(UserError, match=line) as caught:
        unpack_globals(memoryview(bytearray(raw)), parameters)
    assert "\n" not in str(caught.value)
    assert bytes(pack_globals(parameters)) == before


def test_what_is_of_another_model_or_optimizer_is_refused() -> None:
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = stepped(model, 1)
    raw = bytes(pack_globals(stepped(model, 2)))
    adam = bytes(pack_globals(stepped(PeerModel(torch.optim.Adam, TWO), 2)))
    refused(adam, parameters, "is of torch.optim.adam.Adam, and here is")
    wide = bytes(pack_globals(stepped(PeerModel(torch.optim.AdamW, TWO, torch.float64), 2)))
    refused(wide, parameters, "the state given")
    one = bytes(pack_globals(stepped(PeerModel(torch.optim.AdamW, TWO[:1]), 2)))
    refused(one, parameters, "the state given")
    refused(b"", parameters, "0 bytes, which are no packed state")
    for length in [*range(1, 40), *range(40, len(raw), 997)]:
        refused(raw[:length], parameters, "the state given")
    refused(raw + b"\0", parameters, "not as it was packed")


def test_heads_that_lie_are_refused() -> None:
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = stepped(model, 1)
    raw = bytes(pack_globals(stepped(model, 2)))
    length = int.from_bytes(raw[:8], "little")
    head = msgspec.msgpack.decode(raw[16 : 16 + length], type=Head)
    first = head.parts[0]

    def lying(**changes: Any) -> bytes:
        parts = [msgspec.structs.replace(first, **changes), *head.parts[1:]]
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(head, parts=parts))
        body = encoded + raw[16 + length :]
        whole = sum_of_bits(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        return len(encoded).to_bytes(8, "little") + whole + body

    refused(lying(chunk=99), parameters, "a chunk 99")
    refused(lying(chunk=head.parts[1].chunk), parameters, "the state given")
    refused(lying(values=False), parameters, "the state given")
    refused(lying(states={"exp_avg": "float32", "evil": "float32"}), parameters, "the state given")
    refused(lying(states={"exp_avg": "object", "exp_avg_sq": "float32"}), parameters, "dtype 'object'")
    refused(lying(slots=first.slots[:-1]), parameters, "parameters in chunk")
    refused(lying(slots=[{"step": "many"} for _ in first.slots]), parameters, "what is no number")


def test_a_byte_that_was_changed_on_the_way_is_noticed() -> None:
    model = PeerModel(torch.optim.AdamW, TWO)
    parameters = stepped(model, 1)
    raw = bytes(pack_globals(stepped(model, 2)))
    generator = random.Random(0)
    for place in [*range(24), *(generator.randrange(len(raw)) for _ in range(100))]:
        damaged = bytearray(raw)
        damaged[place] ^= generator.randrange(1, 256)
        refused(bytes(damaged), parameters, "the state given")
