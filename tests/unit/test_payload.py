"""What came in a message as a tensor: in place, and nobody is warned of memory that torch cannot guard."""

from __future__ import annotations

import gc
import mmap
import tempfile
import warnings
from collections.abc import Iterator

import numpy
import pytest
import torch

from atoll.tensors.payload import bytes_in, tensor_of

SIZE = 4096


@pytest.fixture(autouse=True)
def warned_always() -> Iterator[None]:
    """Torch warns once in a process unless it is told to warn always."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(before)


def test_what_is_only_read_is_taken_in_place_without_a_warning() -> None:
    payload = memoryview(numpy.arange(SIZE, dtype=numpy.float32).tobytes())
    with pytest.raises(UserWarning, match="not writable"):
        torch.frombuffer(payload, dtype=torch.uint8)
    made = tensor_of(payload, torch.float32)
    assert made.data_ptr() == numpy.frombuffer(payload, dtype=numpy.uint8).ctypes.data
    assert torch.equal(made, torch.arange(SIZE, dtype=torch.float32))


def test_it_keeps_what_it_lies_in() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes([7]) * SIZE)
        file.flush()
        made = bytes_in(mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ))
    gc.collect()
    assert torch.equal(made, torch.full((SIZE,), 7, dtype=torch.uint8))


def test_no_bytes_and_those_at_an_odd_address() -> None:
    assert tensor_of(b"", torch.float64).shape == (0,)
    values = torch.arange(5, dtype=torch.float64)
    odd = memoryview(b"x" + values.numpy().tobytes())[1:]
    assert torch.equal(tensor_of(odd, torch.float64), values)
