"""A loop over an epoch's data that ends with the others' loops, also on a worker that returns inside the
epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from atoll.core.errors import UserError
from atoll.train.checkpoint.resume import AnySampler
from atoll.train.data.leased_sampler import LeasedSampler


def epoch_of(
    loader: DataLoader[Any], samplers: Sequence[AnySampler], catch_up: Callable[[], None]
) -> Iterator[Any]:
    """Return the batches of an epoch of `loader`, in as many loops over it as the epoch takes.

    After each loop `catch_up()` brings this worker to the place of the others. Raises UserError for a loader
    without one of these `samplers`.
    """
    batches: Any = loader.batch_sampler if isinstance(loader, DataLoader) else None
    dealing = (batches, getattr(batches, "sampler", None))  # as batch_sampler=, or as sampler=
    sampler = next((each for each in samplers if any(each is other for other in dealing)), None)
    if sampler is None:
        raise UserError(
            "session.epoch_of takes a DataLoader with a sampler of this session's: "
            "DataLoader(dataset, batch_sampler=session.batches(dataset)), or sampler=session.sampler(dataset)"
        )
    return _loops(loader, sampler, catch_up)


def _loops(loader: DataLoader[Any], sampler: AnySampler, catch_up: Callable[[], None]) -> Iterator[Any]:
    goes_on = True
    while goes_on:
        goes_on = False
        for batch in loader:
            goes_on = True
            yield batch
        catch_up()
        if isinstance(sampler, LeasedSampler) or sampler.ended:
            return
