"""Atoll trains one PyTorch model on the machines that people really have.

`atoll.join()` gives a training script its session; see docs/from-ddp.md.
Importing the package does not import torch: the command line starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.train.session import Session, join

__version__ = "0.1.0"
__all__ = ["Session", "join"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from atoll.train import session

        return getattr(session, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
