"""A loop over an epoch's data that ends with the others' loops, also on a worker that returns inside the
epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from atoll.train.checkpoint.resume import AnySampler
from atoll.train.data.leased_sampler import LeasedSampler
from atoll.train.data.owndata import OwnData


def epoch_of(
    loader: Iterable[Any],
    samplers: Sequence[AnySampler],
    catch_up: Callable[[], None],
    own_data: OwnData,
) -> Iterator[Any]:
    """Return the batches of an epoch of `loader`, in as many loops over it as the epoch takes.

    After each loop `catch_up()` brings this worker to the place of the others. A loader without one of these
    `samplers` has data of this worker's own.
    """
    batches: Any = loader.batch_sampler if isinstance(loader, DataLoader) else None
    dealing = (batches, getattr(batches, "sampler", None))  # as batch_sampler=, or as sampler=
    sampler = next((each for each in samplers if any(each is other for other in dealing)), None)
    return own_data.epoch(loader) if sampler is None else _loops(loader, sampler, catch_up)


def _loops(loader: Iterable[Any], sampler: AnySampler, catch_up: Callable[[], None]) -> Iterator[Any]:
    goes_on = True
    while goes_on:
        goes_on = False
        for batch in loader:
            goes_on = True
            yield batch
        catch_up()
        if isinstance(sampler, LeasedSampler) or sampler.ended:
            return
