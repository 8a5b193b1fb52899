"""The layout's description of a parameter, and the sizes of dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from atoll.core.errors import PrepareError

SPARSE = "sparse"  # the feature of a parameter of which a layer announces sparse gradients

_ITEMSIZES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
}  # fmt: skip


class ParameterSpec(msgspec.Struct, frozen=True):
    """A parameter as the layout sees it; a parameter's index is its place in the order of registration.

    `dtype` is torch's name without `torch.`, and `settings` the key of the parameter's param group. `feature`
    is the process group that shards or replicates it, or SPARSE. `strides`, in elements, are those of a
    parameter that is dense but not contiguous (channels_last); empty for a contiguous one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    settings: str = ""
    feature: str = ""
    strides: tuple[int, ...] = ()

    @property
    def is_dense(self) -> bool:
        """True if the strides fill the parameter's memory without gaps or overlaps."""
        if not self.strides:
            return True
        if len(self.strides) != len(self.shape):
            return False
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= max(1, size)
        return True

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, whose shape is ()."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of `dtype`; raises PrepareError for a dtype that no chunk can hold."""
    try:
        return _ITEMSIZES[dtype]
    except KeyError:
        raise PrepareError(f"no chunk can hold dtype {dtype!r}; use one of {', '.join(_ITEMSIZES)}") from None


def check_specs(specs: Sequence[ParameterSpec]) -> None:
    """Raise PrepareError, naming the parameter, for the first spec that cannot be laid out."""
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise PrepareError(
                f"parameter {spec.name!r} is given twice; give a tied parameter once, by one name"
            )
        seen.add(spec.name)
        if spec.dtype not in _ITEMSIZES:
            known = ", ".join(_ITEMSIZES)
            raise PrepareError(
                f"parameter {spec.name!r}: no chunk can hold dtype {spec.dtype!r}; use one of {known}"
            )
        if any(size < 0 for size in spec.shape):
            raise PrepareError(
                f"parameter {spec.name!r}: shape {spec.shape} has a negative size; sizes are 0 or more"
            )
