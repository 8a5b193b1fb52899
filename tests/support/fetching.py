"""Batches that are fetched before they are trained on, as a script's own loader may do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


def fetched(loader: DataLoader[Any], fetches: int) -> Iterator[Any]:
    """The batches of a loader, each fetched so many batches before it is trained on."""
    queue: deque[Any] = deque()
    for batch in loader:
        queue.append(batch)
        if len(queue) > fetches:
            yield queue.popleft()
    yield from queue
