"""Arithmetic in GF(256) on whole arrays: the field of the forward error correction.

The field's polynomial is x^8 + x^4 + x^3 + x^2 + 1 (0x11D), its generator 2, as in ISA-L and RFC 5510. Matrix
products, which handle nearly all bytes, have two kernels: C (`csrc/gf.c`), and NumPy where that was not
built. Both return the same bytes.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

POLYNOMIAL = 0x11D

_native: ModuleType | None = None
MISSING = ""  # why the C kernels cannot be imported
try:
    _native = importlib.import_module("atoll.ltp._gf")
except ImportError as error:
    MISSING = str(error)
# Kernels of this machine, fastest first: "avx2", "ssse3" and "plain" are C.
KERNELS: tuple[str, ...] = ("numpy",) if _native is None else (*_native.KERNELS, "numpy")
KERNEL = KERNELS[0]  # the default


def kernel_line() -> str:
    """Return the line for users that names the kernel, and how to get a faster one."""
    if KERNEL != "numpy":
        return f"forward error correction runs in C ({KERNEL})"
    return (
        f"forward error correction runs in NumPy, tens of times slower: its C is not built ({MISSING}). "
        "Install a C compiler and Python's headers (Debian: apt-get install gcc libc6-dev python3-dev), "
        "then Atoll again (in its checkout: pip install --editable .)"
    )


def _tables() -> tuple[npt.NDArray[np.int64], Bytes]:
    exp, value = [], 1
    for _ in range(255):
        exp.append(value)
        value = value << 1 ^ (POLYNOMIAL if value & 0x80 else 0)
    log = np.zeros(256, np.int64)
    log[exp] = np.arange(255)
    return log, np.array(exp, np.uint8)


LOG, EXP = _tables()  # LOG of 1 to 255 (LOG[0] is unused), EXP of 0 to 254


def divide(numerator: Bytes, denominator: Bytes) -> Bytes:
    """Divide element by element; neither operand has a 0."""
    quotient: Bytes = EXP[(LOG[numerator] - LOG[denominator]) % 255]
    return quotient


def matmul(coefficients: Bytes, inputs: Bytes, output: Bytes, kernel: str | None = None) -> None:
    """Write coefficients (m, k) times inputs (k, L) into output (m, L), all uint8.

    Rows of `inputs` and `output` may lie apart, but each row's bytes are contiguous; `output` shares no
    memory with `inputs`. `kernel` is one of KERNELS, by default the fastest. Raises ValueError if the shapes
    do not fit.
    """
    kernel = kernel or KERNEL
    if kernel == "numpy":
        _check(coefficients, inputs, output)
        _matmul_numpy(coefficients, inputs, output)
    elif _native is None:
        raise ValueError(f"no kernel {kernel}: {kernel_line()}")
    else:
        _native.matmul(coefficients, inputs, output, kernel)  # checks as _check does


def _check(coefficients: Bytes, inputs: Bytes, output: Bytes) -> None:
    for array in (coefficients, inputs, output):
        if array.dtype != np.uint8 or array.ndim != 2:
            raise ValueError("coefficients, inputs or output: not a matrix of uint8")
    if inputs.shape[0] != coefficients.shape[1] or output.shape != (len(coefficients), inputs.shape[1]):
        raise ValueError(
            f"coefficients {coefficients.shape} times inputs {inputs.shape} is not {output.shape}"
        )


def _matmul_numpy(coefficients: Bytes, inputs: Bytes, output: Bytes) -> None:
    """Multiply by Horner's rule over the coefficients' bits, eight bytes at a time.

    A row of ones, the first parity, costs no more than an XOR of the inputs.
    """
    rows, length = inputs.shape
    words = np.zeros((rows, -(-length // 8)), np.uint64)
    words.view(np.uint8)[:, :length] = inputs
    sums = np.zeros((len(coefficients), words.shape[1]), np.uint64)
    for bit in range(int(coefficients.max(initial=0)).bit_length() - 1, -1, -1):
        _double(sums)
        chosen = (coefficients >> np.uint8(bit) & np.uint8(1)).astype(bool)
        for total, row in zip(sums, chosen, strict=True):
            if row.any():
                picked = words if row.all() else words[row]
                total ^= np.bitwise_xor.reduce(picked, axis=0)
    output[:] = sums.view(np.uint8)[:, :length]


_LOW_BITS, _TOP_BITS = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x0101010101010101)
_ONE, _SEVEN, _REST = np.uint64(1), np.uint64(7), np.uint64(POLYNOMIAL & 0xFF)


def _double(words: npt.NDArray[np.uint64]) -> None:
    """Multiply each byte by 2, in place."""
    overflow = words >> _SEVEN
    overflow &= _TOP_BITS
    overflow *= _REST
    words &= _LOW_BITS
    words <<= _ONE
    words ^= overflow
