"""Weights in files: safetensors read and written one tensor at a time."""

from __future__ import annotations

import os

from torch import nn


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's state_dict to the file `path` (safetensors), in place of an older one there, at once
    or not at all; never more than one tensor is in memory beside the model's own.

    `model.load_state_dict(safetensors.torch.load_file(path))` loads it in plain torch.
    Raises CheckpointError.
    """
    raise NotImplementedError


def load(model: nn.Module, path: str | os.PathLike[str], *, cast: bool = False) -> None:
    """Copy the tensors of a safetensors file into the model, one at a time.

    All is checked before the first value is changed: the file's length and, where `save` wrote it, its
    checksum; names, shapes and dtypes (unless `cast`). Raises CheckpointError, one line that names what is
    missing, unexpected, or of another shape or dtype.
    """
    raise NotImplementedError
