"""The scripts of the pages "Come from ..." train as the pages say: the one before and the one after."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "coming_from"
BUDGET = ["--set", "memory.device=128KiB", "--set", "memory.chunk=16KiB"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ATOLL_RUN = [sys.executable, "-c", "from atoll.cli.app import main; main()", "run", "--workers", "2"]


def losses_of(launcher: list[str], script: str, folder: Path, **variables: str) -> list[float]:
    """Run a script in a folder of its own inside `folder`; return the losses that it prints.

    Unless it ends well the test fails, with all output.
    """
    own = folder / Path(script).stem
    own.mkdir()
    done = subprocess.run(
        [*launcher, str(FOLDER / script)],
        cwd=own,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"epoch \d: loss ([0-9.]+)", done.stdout)]


def in_order(script: str, shuffled: str, folder: Path) -> str:
    """Write a script whose data come in order into the folder; return its path."""
    text = (FOLDER / script).read_text(encoding="utf-8")
    assert text.count(shuffled) == 1
    path = folder / script
    path.write_text(text.replace(shuffled, "shuffle=False"), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("before", "after", "options"), [("ddp.py", "from_ddp.py", []), ("fsdp.py", "from_fsdp.py", BUDGET)]
)
def test_both_scripts_of_a_page_print_the_same_losses(
    tmp_path: Path, before: str, after: str, options: list[str]
) -> None:
    expected = losses_of(TORCHRUN, before, tmp_path)
    assert len(expected) == 3
    assert losses_of([*ATOLL_RUN, *options], after, tmp_path) == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif(
    find_spec("accelerate") is None, reason="Accelerate is installed by `make scripts-rivals`"
)
def test_the_script_for_accelerate_trains(tmp_path: Path) -> None:
    assert len(losses_of(TORCHRUN, "with_accelerate.py", tmp_path, ACCELERATE_USE_CPU="true")) == 3


@pytest.mark.skipif(
    find_spec("accelerate") is None, reason="Accelerate is installed by `make scripts-rivals`"
)
def test_without_shuffling_the_scripts_for_accelerate_print_the_same_losses(tmp_path: Path) -> None:
    before = in_order("with_accelerate.py", "shuffle=True", tmp_path)
    after = in_order("from_ddp.py", "seed=0", tmp_path)
    expected = losses_of(TORCHRUN, before, tmp_path, ACCELERATE_USE_CPU="true")
    assert len(expected) == 3
    assert losses_of(ATOLL_RUN, after, tmp_path) == pytest.approx(expected, abs=1e-4)


def test_no_script_is_named_like_a_module_that_another_imports() -> None:
    # Python finds modules beside the script first. DeepSpeed tries to import a module named "accelerator".
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert not names & {"accelerator", "accelerate", "deepspeed", "torch", "atoll"}
    assert not names & set(sys.stdlib_module_names)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is installed by `make scripts-rivals`")
def test_the_scripts_for_deepspeed_print_the_same_losses(tmp_path: Path) -> None:
    expected = losses_of(TORCHRUN, "zero3.py", tmp_path, DS_ACCELERATOR="cpu")
    after = losses_of([*ATOLL_RUN, *BUDGET], "from_fsdp.py", tmp_path)
    assert after == pytest.approx(expected, abs=1e-3)
