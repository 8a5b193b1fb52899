"""The table of scripts tells a pass from what is no pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.core.config import Sync
from support.pool import Failure, JobFailedError
from support.table import (
    COLUMNS,
    PAGE,
    SCRIPTS,
    Outcome,
    Record,
    Shown,
    compare,
    compare_nearly,
    outcome_of,
    outcome_of_rival,
    scripts,
)
from support.ways import Way


def shown(losses: list[float], value: float) -> Shown:
    return Shown(losses, {"model.weight": torch.tensor([1.0, value])})


PLAIN = shown([4.0, 2.0], 3.0)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ([shown([5.0, 2.0], 3.0), shown([3.0, 2.0], 3.0)], "pass"),  # of the halves of a batch
        ([shown([4.0, 2.0], 3.0 + 5e-10)], "pass"),
        ([shown([4.0, 2.0], 3.0), shown([4.0, 2.0], 3.1)], "wrong"),
        ([shown([4.0, 2.0], float("nan"))], "wrong"),
        ([shown([4.0, 2.1], 3.0)], "wrong"),
        ([shown([4.0], 3.0)], "wrong"),
        ([Shown([4.0, 2.0], {"model.weight": torch.ones(3)})], "wrong"),
        ([Shown([4.0, 2.0], {})], "wrong"),
    ],
)
def test_losses_and_every_worker_s_values_are_compared(found: list[Shown], kind: str) -> None:
    assert compare(PLAIN, found, 1e-9).kind == kind


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ([shown([4.0, 2.5], 3.5)], "pass"),  # plain torch goes from 2 to 3
        ([shown([4.0, 2.5], 2.5)], "pass"),
        ([shown([4.0, 2.5], 3.0), shown([4.0, 2.5], 2.0)], "wrong"),  # one that has not moved
        ([shown([4.0, 2.5], 4.0)], "wrong"),  # twice the rate
        ([shown([4.0, 2.5], 1.0)], "wrong"),  # the wrong way
        ([shown([4.0, float("inf")], 3.0)], "wrong"),
        ([shown([4.0], 3.0)], "wrong"),
        ([shown([4.0, 3.0, 2.5], 3.0), shown([], 3.0)], "pass"),  # one was dealt all batches
        ([shown([], 3.0), shown([], 3.0)], "wrong"),
        ([Shown([4.0, 2.0], {})], "wrong"),
    ],
)
def test_workers_at_their_own_pace_end_near_plain_torch(found: list[Shown], kind: str) -> None:
    plain = Shown(PLAIN.losses, PLAIN.values, {"model.weight": torch.tensor([1.0, 2.0])})
    assert compare_nearly(plain, found, 0.8).kind == kind


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        (["PeerLostError", "PrepareError"], "refused"),  # the refusal came first, and the other lost touch
        (["RefusedError", "PrepareError"], "refused"),  # the other asked for a part that was there no more
        (["PrepareError", "PrepareError"], "refused"),
        (["PeerLostError", "RuntimeError"], "crash"),
        (["DeadlineError", "DeadlineError"], "hang"),
        (["PeerLostError"], "crash"),
    ],
)
def test_the_first_cause_says_how_a_script_failed(kinds: list[str], kind: str) -> None:
    failures = {rank: Failure(rank, name, f"{name} of it\nmore", "") for rank, name in enumerate(kinds)}
    assert outcome_of(JobFailedError(failures)).kind == kind


RAISED = '  File "/site-packages/torch/nn/parallel/distributed.py", line 9, in f\n    raise RuntimeError('
FAILED = '  File "/site-packages/torch/nn/parallel/distributed.py", line 9, in f\n    self.module(*inputs)'
SCRIPT = '  File "/home/user/train.py", line 9, in f\n    raise RuntimeError('
GLOO = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("failures", "kind"),
    [
        ([("a sentence of its own", RAISED), (GLOO, FAILED)], "refused"),
        ([(GLOO, FAILED), ("mat1 and mat2 cannot be multiplied", FAILED)], "crash"),
        ([("what the script raises", SCRIPT)], "crash"),
        ([("Expected to mark a variable ready only once. This", FAILED)], "refused"),
        ([(LATE, FAILED), (GLOO, FAILED)], "hang"),
        ([(GLOO, FAILED)], "crash"),
    ],
)
def test_a_rival_refuses_what_its_own_code_raises_on_purpose(
    failures: list[tuple[str, str]], kind: str
) -> None:
    given = {rank: Failure(rank, "RuntimeError", *each) for rank, each in enumerate(failures)}
    assert outcome_of_rival(JobFailedError(given)).kind == kind


SHARD = (
    "shard 0: cannot run the optimizer 'own.lion.Lion' outside the script: it is none; take one of these, or "
    "with a parameter server set server.optimizer to its 'package.module:Class' on every shard"
)


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("the device's budget is too small: ...; 40961 bytes (40.0 KiB) would do", Way(budget="41KiB")),
        ("keep no views, or raise memory.device from 28.0 KiB to 32768 bytes (32.0", Way(budget="32KiB")),
        ("raise memory.device from 44.0 KiB to at least 57344 bytes (56.0 KiB); 61", Way(budget="56KiB")),
        (SHARD, Way(optimizer="own.lion:Lion")),
        ("set sync.consistency to bsp and leave out sync.lazy", Way(pace="bsp")),
        ("give one optimizer, or set run.strategy to ring, hierarchical or server", Way(strategy="ring")),
        ("use strategy ring or hierarchical, or SGD", Way(strategy="ring")),
        ("give one optimizer, or leave the budgets out", Way(no_budgets=True)),
        ("parameter '0.weight' is odd", None),
    ],
)
def test_the_way_out_of_a_refusal_is_what_its_line_names(line: str, way: Way | None) -> None:
    script, run = scripts()["sgd"].path, COLUMNS["peers"].config.run
    found = Way().after(line, script, run)
    assert found == way
    assert found is None or found.after(line, script, run) is None


def test_a_script_is_rewritten_where_the_line_asks_for_it() -> None:
    script, run = scripts()["state_loaded"].path, COLUMNS["peers"].config.run
    line = "worker 1 brings another state; go on from a checkpoint (session.load)"
    way = Way().after(line, script, run)
    assert way == Way(rewritten=True)
    assert way.path(script) == SCRIPTS / "followed" / "state_loaded.py"
    assert Way().after("the model is too large", script, run) is None
    assert Way().path(script) == script


def test_each_rewritten_script_names_the_line_that_asks_for_it() -> None:
    rewritten = {path.stem: path.read_text(encoding="utf-8") for path in (SCRIPTS / "followed").glob("*.py")}
    assert rewritten.keys() <= scripts().keys()
    assert all("\n# asked: " in text for text in rewritten.values())


def test_a_way_changes_the_configuration() -> None:
    column = COLUMNS["peers, tiers"].config
    assert Way(budget="41KiB").config(column).memory.device == "41KiB"
    assert not Way(no_budgets=True).config(column).memory.is_given
    ring = Way(strategy="ring").config(column)
    assert (ring.run.strategy, ring.sync.stale_max) == ("ring", Sync().stale_max)
    assert ring.memory == column.memory
    assert Way(pace="bsp").config(COLUMNS["server asp"].config).sync.consistency == "bsp"
    assert [Way(budget="1KiB", optimizer="a:B").stays, Way(strategy="ring").stays] == [True, False]


def test_a_refusal_whose_way_out_passes_is_still_a_refusal() -> None:
    record = Record("2", {"sgd": {"ring": Outcome("refused", "no; set run.strategy to ring", then="pass")}})
    assert "| refused 1, then pass |" in record.page()


def test_there_are_enough_scripts_and_each_says_what_it_does() -> None:
    found = scripts()
    assert len(found) >= 80
    assert sum(bool(script.sources) for script in found.values()) >= 20
    for script in found.values():
        assert script.title.endswith("."), script.path
        assert len(script.path.read_text(encoding="utf-8").splitlines()) <= 70, script.path


def test_a_script_whose_package_is_missing_is_shown_as_such() -> None:
    script = scripts()["schedule_free"]
    assert script.needs == ("schedulefree",)
    absent = replace(script, needs=("sys", "no_such_package"))
    assert absent.missing == "no_such_package"
    assert not replace(script, needs=("sys",)).missing


def test_the_page_is_made_from_what_was_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == Record.read().page(), "python tests/scripts_table.py --page"
