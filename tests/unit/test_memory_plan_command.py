"""`atoll memory plan` on scripts, in this process: what it prints, and what it says of mistakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atoll.cli.app import app
from atoll.core.errors import RunError, UserError

SCRIPT = """
import sys
import torch
from torch import nn
import atoll

assert __name__ == "__main__"
torch.manual_seed(0)
layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
steps = int(sys.argv[2])
with atoll.memory.fit(model, optimizer, memory=atoll.Memory(device=sys.argv[1], host="1GiB")):
    for step in range(steps):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)
print("the script has come to its end")
"""
SESSION = """
import torch
from torch import nn
import atoll

model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.join() as session:
    session.prepare(model, optimizer, memory=atoll.Memory(device="24KiB"))
    for _ in range(100):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
Plan = Callable[..., str]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs the command on a script's text; gives what it has printed."""

    def run(text: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
        script = tmp_path / "train.py"
        script.write_text(text)
        app(["memory", "plan", *options, str(script), *arguments], standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_the_plan_of_a_script_that_does_not_fit(plan: Plan) -> None:
    argv, path = list(sys.argv), list(sys.path)
    said = plan(SCRIPT, "48KiB", "100")
    assert (sys.argv, sys.path) == (argv, path)
    assert "train.py: device 48.0 KiB, host 1.0 GiB" in said
    for name in (
        "device",
        "optimizer",
        "sharding",
        "peaks",
        "a step",
        "time",
        "as run",
        "reason",
        "to pin it",
    ):
        assert f"\n  {name} " in said, name
    assert "to the device (" in said
    assert " predicted, " in said
    assert "the script has come to its end" not in said
    assert "step 0" not in said  # the script's own words go to standard error


def test_the_plan_as_an_object_keeps_within_the_budgets(plan: Plan) -> None:
    told = json.loads(plan(SCRIPT, "48KiB", "100", options=("--json",)))
    assert told["measured"]
    assert told["budgets"]["device"] == 48 * 1024
    predicted = told["plan"]["predicted"]
    assert predicted["device_peak"] <= 48 * 1024
    assert predicted["host_peak"] <= 2**30
    assert 0 < predicted["computing"] <= predicted["seconds"]
    assert predicted["nbytes"]["to_device"] >= 6 * 64 * 65 * 4
    assert told["as_run"]["measured_seconds"] > 0
    assert told["as_run"]["predicted_seconds"] > 0


def test_the_plan_of_a_script_that_fits_and_of_one_that_ends_early(plan: Plan) -> None:
    assert "everything fits, nothing moves" in plan(SCRIPT, "1GiB", "100")
    early = plan(SCRIPT, "48KiB", "2")
    assert "not predicted: the script ended before its third step" in early
    assert "compute is not measured yet" in early
    assert torch.overrides._get_current_function_mode() is None  # nothing goes on recording


def test_the_plan_of_a_session(plan: Plan) -> None:
    assert "device 24.0 KiB, host without a bound" in plan(SESSION)


@pytest.mark.parametrize(
    ("script", "arguments", "error", "said"),
    [
        ("print(1)", (), UserError, "ended without a call of atoll.memory.fit"),
        (SCRIPT, ("1KiB", "3"), UserError, "the budget of the device is too small"),
        (SCRIPT, ("many", "3"), UserError, "device: 'many' is not a size"),
        ("1 / 0", (), RunError, "train.py failed before its plan was known: ZeroDivisionError"),
        ("raise SystemExit(3)", (), UserError, "train.py ended by itself with status 3"),
    ],
)
def test_what_ends_without_a_plan_is_one_line(
    plan: Plan, script: str, arguments: tuple[str, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        plan(script, *arguments)


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"^nowhere\.py: there is no such script"):
        app(["memory", "plan", "nowhere.py"], standalone_mode=False)


def test_a_script_that_takes_its_end_for_an_error_is_ended_at_each_step(plan: Plan, tmp_path: Path) -> None:
    """A bare `except:` in its loop takes the end too; it must not train on."""
    loop = """
try:
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            print(step, file=open(sys.argv[3], "a"), flush=True)
        except:
            pass
        optimizer.zero_grad()
"""
    begin, end = SCRIPT.index("model(torch.randn"), SCRIPT.index('        print("step"')
    said = plan(SCRIPT[:begin] + loop.strip() + "\n" + SCRIPT[end:], "48KiB", "6", str(tmp_path / "ended"))
    assert (tmp_path / "ended").read_text().split() == ["0", "1"]
    assert " measured" in said


def test_what_is_pinned_is_said_with_the_rest(plan: Plan) -> None:
    text = SCRIPT.replace('host="1GiB"', 'host="1GiB", resident="0.2"')
    (line,) = (line for line in plan(text, "48KiB", "1").splitlines() if "to pin it" in line)
    assert line.endswith(', memory.step = "host", memory.resident = "0.2"')


def test_the_plan_of_one_of_several_workers(plan: Plan) -> None:
    found = {}
    for link in ("10kbit/s", "100Gbit/s"):  # far apart: a prediction contains measured compute
        text = plan(SCRIPT, "48KiB", "100", options=("--json", "--workers", "3", "--link", link))
        found[link] = json.loads(text)["plan"]
    slow, fast = (found[link]["predicted"] for link in found)
    assert found["10kbit/s"]["sharding"] == "symmetric"
    assert slow["seconds"] > slow["nbytes"]["from_members"] / 1.25e3
    assert fast["seconds"] < slow["seconds"] / 10
    said = plan(SCRIPT, "48KiB", "100", options=("--workers", "3", "--link", "1Mbit/s"))
    assert "from other members" in said
    assert "  sharding    symmetric: one of 3 workers" in said
    assert "traffic from other members is not counted" in plan(
        SCRIPT, "48KiB", "100", options=("--workers", "3")
    )
    in_groups = ("--workers", "4", "--groups", "2", "--link", "100Gbit/s", "--between", "1Mbit/s")
    said = plan(SCRIPT, "48KiB", "100", options=in_groups)
    assert "  sharding    symmetric: one of 4 workers, in 2 groups" in said
    assert "the longest part of a step is traffic from other groups" in said
    assert said.count(" from other groups") == 2  # and how much it is
    for options, wrong in (
        (("--workers", "2", "--between", "1Gbit/s"), "--between is the rate between several groups"),
        (("--workers", "2", "--groups", "3"), "3 groups for 2 workers"),
        (("--link", "1Gbit/s"), "--link is the rate between several workers"),
        (("--workers", "2", "--link", "fast"), "--link: 'fast' is not a rate"),
    ):
        with pytest.raises(UserError, match=wrong):
            plan(SCRIPT, "48KiB", "100", options=options)
