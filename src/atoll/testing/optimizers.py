"""Torch's element-wise optimizers, with settings that show what each keeps: for tests of parity."""

from __future__ import annotations

from typing import Any

FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.05}, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}],
    "Adam": [{"lr": 1e-2}, {"lr": 1e-2, "amsgrad": True, "maximize": True}],
    "AdamW": [{"lr": 1e-2, "weight_decay": 0.1}],
    "Adamax": [{"lr": 1e-2}],
    "NAdam": [{"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"lr": 1e-2}],
    "Adagrad": [{"lr": 1e-2, "initial_accumulator_value": 0.1, "lr_decay": 0.01}],
    "Adadelta": [{"lr": 1.0}],
    "RMSprop": [{"lr": 1e-2, "momentum": 0.9, "centered": True}],
    "ASGD": [{"lr": 1e-2, "t0": 3}],
    "Rprop": [{"lr": 1e-2}],
}
