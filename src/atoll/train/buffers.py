"""A model's buffers, as BatchNorm's running statistics: which of them training has changed, and how all
workers come to have those of one.

The rule is in docs/from-ddp.md, "Evaluation": in a ring all take them after each iteration that has changed
any, as under DistributedDataParallel with broadcast_buffers; elsewhere at barriers, saves and the session's
end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Values are compared, since BatchNorm and `buffer.data` write past the version counter: all of a buffer up to
# so many elements, and of a larger one a sample, whatever its size.
_COMPARED, _SAMPLED = 2**16, 2**12
_ODD = 4096.0  # what is said of a buffer that is not of its first shape; no ring has as many workers


class ModelBuffers:
    """The buffers that `module` has now, the same on all workers; those that it gets later are not among
    them.

    A buffer of which a worker has changed shape or dtype since is its own, as the state of a recurrent model
    for its batch.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = []
        self.names: list[str] = []
        known: set[int] = set()
        for prefix, part in module.named_modules():
            for key, buffer in part._buffers.items():
                if buffer is not None and id(buffer) not in known:
                    known.add(id(buffer))
                    self._places.append((part._buffers, key))
                    self.names.append(f"{prefix}.{key}" if prefix else key)
        self._kinds = [(each.shape, each.dtype) for each in self._now() if each is not None]
        self._seen: list[tuple[Tensor | None, int, Tensor | None]] = []
        self.changed = ""  # the first that was found to have changed in training
        self.settle()

    def __len__(self) -> int:
        return len(self._places)

    def _now(self) -> list[Tensor | None]:
        return [held.get(key) for held, key in self._places]

    def settle(self) -> None:
        """All workers have the same now."""
        self._seen = [(now, -1 if now is None else now._version, _copy_of(now)) for now in self._now()]

    def said(self) -> list[float]:
        """One value for each buffer, whose sums over the workers `to_take` reads: whether this worker has
        changed it since `settle`."""
        now = self._now()
        differ = [_differs(each, seen) for each, seen in zip(now, self._seen, strict=True)]
        if not self.changed and any(differ):
            self.changed = self.names[differ.index(True)]
        pairs = enumerate(zip(now, differ, strict=True))
        return [float(changed) if self._is_usual(index, each) else _ODD for index, (each, changed) in pairs]

    def named(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        return {n: each for n, each in zip(self.names, self._now(), strict=True) if each is not None}

    def _is_usual(self, index: int, now: Tensor | None) -> bool:
        return now is not None and (now.shape, now.dtype) == self._kinds[index]

    @staticmethod
    def to_take(summed: Sequence[float]) -> list[int]:
        """The buffers, by index, that any worker has changed and that are of one shape on all."""
        return [index for index, value in enumerate(summed) if 0 < value < _ODD]

    def packed(self, indices: Sequence[int]) -> Tensor:
        """These buffers' bytes, (bytes,), on the CPU: a copy."""
        now = self._now()
        parts = [_bytes_of(tensor) for index in indices if (tensor := now[index]) is not None]
        return torch.cat([part.to("cpu") for part in parts]) if parts else torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, indices: Sequence[int], packed: Tensor) -> None:
        """Let these be as another worker's `packed` has them. One that is equal already is not written to, so
        that a graph that holds it stays usable."""
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
    return now._version != version or (copy is not None and not torch.equal(_compared(now), copy))


def _copy_of(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else _compared(buffer).clone()


def _compared(buffer: Tensor) -> Tensor:
    """What of a buffer is compared: all of it, or elements drawn at random, always the same ones."""
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
