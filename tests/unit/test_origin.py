"""Two models of equal shapes, prepared in another order after a restart: refused, or told apart by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.core.errors import CheckpointError, UserError
from atoll.tensors.checkpoint import read_checkpoint, write_checkpoint


class Other(nn.Linear):
    """As nn.Linear, by another name."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def filled(value: float, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    model = kind(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def run(prepare: Callable[[atoll.Session], Sequence[nn.Module]], save: Path, load: Path | None = None) -> Any:
    """The values of the models that `prepare` gives, after a load."""
    with atoll.join() as session:
        models = prepare(session)
        if load is not None:
            session.load(load)
        session.save(save)
        return [float(next(model.parameters()).detach().flatten()[0]) for model in models]


def by_variables(session: atoll.Session, turned: bool) -> list[nn.Module]:
    generator, critic = filled(1.0 + 9 * turned), filled(2.0 + 9 * turned)
    for model in (critic, generator) if turned else (generator, critic):
        session.prepare(model, sgd(model))
    return [generator, critic]


def by_keys(session: atoll.Session, turned: bool) -> list[nn.Module]:
    models = {"a": filled(1.0 + 9 * turned), "b": filled(2.0 + 9 * turned)}
    for key in ("b", "a") if turned else ("a", "b"):
        session.prepare(models[key], sgd(models[key]))
    return list(models.values())


class Trainer:
    """A script that keeps its models as attributes."""

    def __init__(self, session: atoll.Session, turned: bool) -> None:
        self.one, self.two = filled(1.0 + 9 * turned), filled(2.0 + 9 * turned)
        for model in (self.two, self.one) if turned else (self.one, self.two):
            session.prepare(model, sgd(model))


def by_attributes(session: atoll.Session, turned: bool) -> list[nn.Module]:
    trainer = Trainer(session, turned)
    return [trainer.one, trainer.two]


def by_class(session: atoll.Session, turned: bool) -> list[nn.Module]:
    made = [filled(1.0 + 9 * turned), filled(2.0 + 9 * turned, Other)]
    for model in reversed(made) if turned else made:
        session.prepare(model, sgd(model))
    return made


def by_values(session: atoll.Session, turned: bool) -> list[nn.Module]:
    made = [filled(1.0), filled(2.0)]
    for model in reversed(made) if turned else made:
        session.prepare(model, sgd(model))
    return made


def by_lines(session: atoll.Session, turned: bool) -> list[nn.Module]:
    def first() -> nn.Module:
        model = filled(1.0 + 9 * turned)
        session.prepare(model, sgd(model))
        return model

    def second() -> nn.Module:
        model = filled(2.0 + 9 * turned)
        session.prepare(model, sgd(model))
        return model

    made = {make: make() for make in ((second, first) if turned else (first, second))}
    return [made[first], made[second]]


SIGNS = {
    by_variables: "variables: then critic",
    by_keys: "variables",
    by_attributes: "variables",
    by_class: "classes",
    by_values: "initial values",
    by_lines: "lines",
}


@pytest.mark.parametrize("prepare", SIGNS, ids=lambda prepare: prepare.__name__)
def test_equal_models_in_another_order_are_refused(tmp_path: Path, prepare: Any) -> None:
    run(lambda session: prepare(session, False), tmp_path / "first")
    expected = run(lambda session: prepare(session, False), tmp_path / "again", tmp_path / "first")
    assert expected == [1.0, 2.0]
    with pytest.raises(CheckpointError, match="were prepared in another order when it was saved") as refused:
        run(lambda session: prepare(session, True), tmp_path / "again", tmp_path / "first")
    assert SIGNS[prepare].partition(":")[0] in str(refused.value)
    assert "session.prepare(model, optimizer, name=...)" in str(refused.value)


def edited(session: atoll.Session) -> list[nn.Module]:
    """As `by_variables`, with the models made and held in other places of the script."""
    other = filled(12.0)
    generator = filled(11.0)
    session.prepare(generator, sgd(generator))
    critic = other
    session.prepare(critic, sgd(critic))
    return [generator, critic]


def test_a_script_that_was_edited_loads_by_order(tmp_path: Path) -> None:
    run(lambda session: by_variables(session, False), tmp_path / "first")
    assert run(edited, tmp_path / "again", tmp_path / "first") == [1.0, 2.0]
    assert run(lambda session: by_variables(session, False), tmp_path / "x", tmp_path / "again") == [1.0, 2.0]


def named(names: Sequence[str], turned: bool) -> Callable[[atoll.Session], Sequence[nn.Module]]:
    def prepare(session: atoll.Session) -> list[nn.Module]:
        models = {name: filled(1.0 + index + 9 * turned) for index, name in enumerate(names)}
        for name in reversed(names) if turned else names:
            optimizer = sgd(models[name])
            session.prepare(models[name], optimizer, name=name)
            if not turned:
                optimizer.param_groups[0]["lr"] = float(len(name))
            models[name].optimizer = optimizer  # type: ignore[assignment]
        return list(models.values())

    return prepare


def test_models_with_names_load_in_any_order(tmp_path: Path) -> None:
    """With their optimizers."""
    names = ("generator", "critic", "x")
    run(named(names, False), tmp_path / "first")
    with atoll.join() as session:
        models = named(names, True)(session)
        session.load(tmp_path / "first")
        assert [float(model.bias.detach()[0]) for model in models] == [1.0, 2.0, 3.0]  # type: ignore[operator]
        rates = [model.optimizer.param_groups[0]["lr"] for model in models]  # type: ignore[union-attr, index]
        assert rates == [9.0, 6.0, 1.0]


def test_other_names_are_refused(tmp_path: Path) -> None:
    run(named(("generator", "critic"), False), tmp_path / "first")
    with pytest.raises(CheckpointError, match="the models 'critic' and 'generator', and .* 'critic' and 'g'"):
        run(named(("g", "critic"), False), tmp_path / "again", tmp_path / "first")


def test_two_models_of_one_name_are_refused() -> None:
    with atoll.join() as session:
        model, other = filled(1.0), filled(2.0)
        session.prepare(model, sgd(model), name="x")
        with pytest.raises(UserError, match="another model has that name"):
            session.prepare(other, sgd(other), name="x")


def test_a_checkpoint_that_says_nothing_of_its_models_loads_by_order(tmp_path: Path) -> None:
    """As those of before."""
    run(lambda session: by_variables(session, False), tmp_path / "first")
    assert "models" in json.loads((tmp_path / "first" / "state.json").read_text())["trees"]["state"]
    old = read_checkpoint(tmp_path / "first")
    del old.trees["state"]["models"]
    write_checkpoint(tmp_path / "old", model=old.model, trees=old.trees)
    assert run(lambda session: by_variables(session, True), tmp_path / "x", tmp_path / "old") == [2.0, 1.0]


def scheduled(turned: bool, save: Path, load: Path | None) -> dict[str, tuple[float, float]]:
    """Train "slow" for one step and "fast" for three, each by a schedule of its own over 8 steps of a sample;
    gives each model's samples, and its rate after one more step of each."""
    with atoll.join() as session:
        made = {}
        for name in ("fast", "slow") if turned else ("slow", "fast"):
            model = filled(1.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer, name=name)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
            session.schedule(scheduler, total=8)
            made[name] = (model, optimizer)

        def train(name: str) -> None:
            model, optimizer = made[name]
            session.weight(1, model)
            model(torch.ones(1, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        if load is not None:
            session.load(load)
        else:
            for name, steps in (("slow", 1), ("fast", 3)):
                for _ in range(steps):
                    train(name)
        session.save(save)
        samples = {p.models[0].origin.name: p.reducer.consumed for p in session._state.prepared}
        for name in made:
            train(name)
        session.save(save.with_name(save.name + "-after"))
        return {name: (samples[name], made[name][1].param_groups[0]["lr"]) for name in made}


def test_named_models_in_another_order_go_on_with_their_own_samples_and_schedules(tmp_path: Path) -> None:
    first = scheduled(False, tmp_path / "first", None)
    assert {name: samples for name, (samples, _) in first.items()} == {"slow": 1.0, "fast": 3.0}
    assert first["slow"][1] > first["fast"][1]
    for turned in (False, True):
        assert scheduled(turned, tmp_path / f"again{turned}", tmp_path / "first") == first
