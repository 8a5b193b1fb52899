"""Several models of equal shapes over several workers: which of them gets whose values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.core.errors import CheckpointError, PrepareError
from support.pool import JobFailedError, WorkerPool
from support.runs import run_at


def values_after(
    session: atoll.Session, names: tuple[str, str], turned: bool, load: str, save: str
) -> list[float]:
    models = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}
    for index, model in enumerate(models.values()):
        nn.init.constant_(model.weight, index + 1.0 + 9 * turned)
        nn.init.constant_(model.bias, index + 1.0 + 9 * turned)
    given = dict(zip(models, names, strict=True))
    for key in reversed(models) if turned else models:
        model = models[key]
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), name=given[key])
    if load:
        session.load(load)
    if save:
        session.save(save)
    return [float(model.bias.detach()[0]) for model in models.values()]


@pytest.mark.parametrize("where", ["ring", "hierarchical", "tiers", "server"])
def test_models_of_equal_shapes_never_get_each_others_values(
    pool: WorkerPool, tmp_path: Path, where: str
) -> None:
    """Wherever a session may have several models."""
    for names in (("", ""), ("one", "two")):
        folder = str(tmp_path / "-".join(names))
        saved = run_at(pool, where, values_after, names, False, "", folder)
        loaded = run_at(pool, where, values_after, names, False, folder, "")
        assert saved == loaded == [[1.0, 2.0]] * 2
        if names[0]:
            assert run_at(pool, where, values_after, names, True, folder, "") == [[1.0, 2.0]] * 2
            continue
        with pytest.raises(JobFailedError) as raised:
            run_at(pool, where, values_after, names, True, folder, "")
        for failure in raised.value.failures.values():
            assert failure.kind == CheckpointError.__name__
            assert "two models of equal shapes were prepared in another order" in failure.message


def prepare_named(session: atoll.Session) -> None:
    model = nn.Linear(3, 2)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), name="ab"[session.rank])


def test_workers_that_name_a_model_differently_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, "ring", prepare_named)
    for failure in raised.value.failures.values():
        assert failure.kind == PrepareError.__name__
        assert "session.prepare(name=)' is 'a' on worker 0 and 'b' on worker 1" in failure.message
