"""Atoll trains one PyTorch model on the machines that people really have.

`atoll.join()` gives a training script its session; see docs/from-ddp.md. `atoll.memory.fit` trains what does
not fit on the device, within an `atoll.Memory`; see docs/memory.md.
Importing the package does not import torch: the command line starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll import memory as memory
    from atoll.core.memory import Memory
    from atoll.train.api.joining import join
    from atoll.train.api.session import Session

__version__ = "0.1.0"
__all__ = ["Memory", "Session", "join"]


def __getattr__(name: str) -> object:
    if name == "memory":  # which imports torch
        return import_module("atoll.memory")
    if name == "Memory":
        from atoll.core.memory import Memory

        return Memory
    if name in __all__:
        from atoll.train.api.uncaught import show_errors_as_one_line

        show_errors_as_one_line()  # of the import too: the installed torch may lack what Atoll needs
        from atoll.train.api import joining

        return getattr(joining, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
