"""The buffers of a model, such as BatchNorm's running statistics, kept equal on all workers.

A ring broadcasts buffers after each iteration that changed any, like DistributedDataParallel with
broadcast_buffers. Other strategies broadcast them at barriers, at saves and at the session's end. The rule is
in docs/from-ddp.md, "What differs, and may surprise".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.tensors.torch_compat import own_buffers, version_of

# Values are compared, because BatchNorm and `buffer.data` write past the version counter. A buffer of
# more than _COMPARED elements is compared by a sample of _SAMPLED.
_COMPARED, _SAMPLED = 2**16, 2**12
_ODD = 4096.0  # stands for a buffer whose shape or dtype has changed; no ring has as many workers


class ModelBuffers:
    """The buffers that `module` has at construction, to be kept equal on all workers. Later buffers are
    ignored.

    A buffer whose shape or dtype has changed on a worker stays that worker's own. A recurrent model, for
    example, keeps the state of its batch in one.

    Attributes:
        names: the buffers' names.
        changed: the name of the first buffer that was found to change in training; "" for none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = []
        self.names: list[str] = []
        known: set[int] = set()
        for prefix, part in module.named_modules():
            for key, buffer in own_buffers(part).items():
                if buffer is not None and id(buffer) not in known:
                    known.add(id(buffer))
                    self._places.append((own_buffers(part), key))
                    self.names.append(f"{prefix}.{key}" if prefix else key)
        self._kinds = [(each.shape, each.dtype) for each in self._now() if each is not None]
        self._seen: list[tuple[Tensor | None, int, Tensor | None]] = []
        self.changed = ""
        self.settle()

    def __len__(self) -> int:
        return len(self._places)

    def _now(self) -> list[Tensor | None]:
        return [held.get(key) for held, key in self._places]

    def settle(self) -> None:
        """Remember the present buffers. All workers hold equal buffers at this point."""
        self._seen = [(now, -1 if now is None else version_of(now), _copy_of(now)) for now in self._now()]

    def said(self) -> list[float]:
        """Return one value for each buffer: 1 if this worker has changed it since `settle`, else 0, or _ODD
        for a changed shape or dtype.

        `to_take` reads the sums of these values over the workers.
        """
        now = self._now()
        differ = [_differs(each, seen) for each, seen in zip(now, self._seen, strict=True)]
        if not self.changed and any(differ):
            self.changed = self.names[differ.index(True)]
        pairs = enumerate(zip(now, differ, strict=True))
        return [float(changed) if self._is_usual(index, each) else _ODD for index, (each, changed) in pairs]

    def copies(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """Return the buffers as they are now, each with a copy if it is not large, for `put_back`."""
        return [(each, _whole_copy(each)) for each in self._now()]

    @torch.no_grad()
    def put_back(self, copies: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """Let the buffers be those of `copies`, and have the values that were copied."""
        for (held, key), (buffer, values) in zip(self._places, copies, strict=True):
            if held.get(key) is not buffer:
                held[key] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)

    def named(self) -> dict[str, Tensor]:
        """Return the buffers that exist now, by name."""
        return {n: each for n, each in zip(self.names, self._now(), strict=True) if each is not None}

    def _is_usual(self, index: int, now: Tensor | None) -> bool:
        return now is not None and (now.shape, now.dtype) == self._kinds[index]

    @staticmethod
    def to_take(summed: Sequence[float]) -> list[int]:
        """Return the indices of buffers that some worker has changed, and whose shape and dtype all workers
        have kept."""
        return [index for index, value in enumerate(summed) if 0 < value < _ODD]

    def packed(self, indices: Sequence[int]) -> Tensor:
        """Return the bytes of these buffers one after another, 1-D, on the CPU."""
        now = self._now()
        parts = [_bytes_of(tensor) for index in indices if (tensor := now[index]) is not None]
        return torch.cat([part.to("cpu") for part in parts]) if parts else torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, indices: Sequence[int], packed: Tensor) -> None:
        """Copy another worker's `packed` buffers into these.

        A buffer that is equal already is not written, so a graph that saved it stays usable.
        """
        now, start = self._now(), 0
        for index in indices:
            tensor = now[index]
            assert tensor is not None
            part = packed[start : start + tensor.nbytes]
            start += tensor.nbytes
            if not torch.equal(part, _bytes_of(tensor).to("cpu")):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _differs(now: Tensor | None, seen: tuple[Tensor | None, int, Tensor | None]) -> bool:
    before, version, copy = seen
    if now is None or now is not before:
        return now is not before
    return version_of(now) != version or (copy is not None and not torch.equal(_compared(now), copy))


def _copy_of(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else _compared(buffer).clone()


def _whole_copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None or buffer.numel() > _COMPARED else buffer.clone()


def _compared(buffer: Tensor) -> Tensor:
    """Return the elements of a buffer that are compared: all of a small buffer, a fixed random sample of a
    large one."""
    buffer = buffer.detach()
    if buffer.numel() <= _COMPARED:
        return buffer
    drawn = _drawn(buffer.numel(), buffer.device)
    return buffer.view(-1)[drawn] if buffer.is_contiguous() else torch.take(buffer, drawn)


@functools.cache
def _drawn(elements: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(elements, (_SAMPLED,), generator=generator).to(device)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
