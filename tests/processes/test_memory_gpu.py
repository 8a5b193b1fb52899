"""The benchmark for a GPU, without one: it says so, its tiny model trains in all systems, traces are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("memory_gpu_worker")


def start(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "memory_gpu.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_a_trace_tells(worker: ModuleType) -> None:
    seen = [
        {"cat": "kernel", "name": "gemm", "ts": 10.0, "dur": 5.0},
        {"cat": "kernel", "name": "inside the first", "ts": 11.0, "dur": 2.0},
        {"cat": "kernel", "name": "on another stream", "ts": 14.0, "dur": 3.0},
        {"cat": "kernel", "name": "later", "ts": 30.0, "dur": 1.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 7}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 2}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 99}},
        {"name": "process_name", "ph": "M"},
    ]
    assert worker.busy(seen) == pytest.approx(8e-6)
    assert worker.copied(seen) == {"to_device": 7, "to_host": 2}


def test_the_count_of_parameters_is_the_model_s(worker: ModuleType) -> None:
    plan = worker.Plan(layers=3, width=256, context=8, batch=1, warm=0, steps=1, profiled=0)
    model = plan.model(torch.device("cpu"))
    assert plan.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.soak
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    said = start("--output", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert said.startswith("there is no GPU here")
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_the_tiny_model_trains_alike_in_all_systems(tmp_path: Path) -> None:
    start("--tiny", "--output", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    cases = {case["system"]: case for case in json.loads((tmp_path / "memory_gpu.json").read_text())["cases"]}
    assert [reason for case in cases.values() for reason in case["failed"]] == []
    assert len(cases) == 5
    assert all(case["alike"] for name, case in cases.items() if name != "no offload")
    quarter = cases["Atoll, 25%"]["figures"]
    assert 0 < quarter["device_arena"] <= quarter["device_budget"]
    assert quarter["step_nbytes"]["to_device"] > 0
