"""Names of torch's dtypes."""

from __future__ import annotations

import torch

_WITH_SCALES = ("qint", "quint", "bits")  # tensors of these have more than their values


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return torch's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of this name. Raises ValueError if there is none, or if its tensors have more than
    their values."""
    found = None if name.startswith(_WITH_SCALES) else vars(torch).get(name)  # getattr might import a module
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:40]!r}, which is no dtype")
    return found
