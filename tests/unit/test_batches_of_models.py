"""Leased samples count once, with the first model of a session that trains on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

from atoll.store.leases import Leases
from atoll.train.data.batches import OtherBatches, SampledBatches
from atoll.train.data.leased_sampler import LeasedBatches, LeasedSampler
from atoll.train.data.passes import Passes
from atoll.train.gradients.samples import SeenSamples
from atoll.wire.messages import Cut, Lease, Leased, Used

SAMPLES, BATCH = 22, 4


class Worker:
    """A worker that leases its data, and trains several models on it."""

    def __init__(self, models: int, by: str, processes: int) -> None:
        self._leases, self.passes = Leases(), Passes()
        self.data = torch.arange(SAMPLES)
        self.used = Counter[int]()
        state = cast(Any, SimpleNamespace(restore_random_once=lambda: None))
        first = SampledBatches(state, self.passes, None)
        self.models: list[SampledBatches | OtherBatches] = [
            first,
            *(first.another() for _ in range(models - 1)),
        ]
        self.sampler = LeasedSampler(
            SAMPLES, lease=self._lease, shuffle=False, on_index=first.given_by, in_batches=by == "batches"
        )
        self._by, self._processes = by, processes

    def loop(self) -> Iterator[Any]:
        data, count = cast(Any, self.data), self._processes
        if self._by == "indices":
            batch: list[int] = []
            for index in self.sampler:
                batch.append(index)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
            if batch:
                yield batch
        elif self._by == "batches":
            batches = LeasedBatches(self.sampler, lambda: BATCH)
            yield from DataLoader(data, batch_sampler=batches, num_workers=count)
        else:
            yield from DataLoader(data, BATCH, sampler=self.sampler, num_workers=count)

    def trains(self, model: int, samples: int) -> float | None:
        self.models[model].forward()
        return self.models[model].count(SeenSamples(float(samples), True)).new

    def steps(self) -> int:
        """A step, which commits what is used; returns how many samples are used by now."""
        used = self.sampler.used()
        self._leases.handle_used(0, 1, used)
        for part in used:
            self.used.update(range(part.start, part.stop))
        assert not self.used or max(self.used.values()) == 1
        return len(self.used)

    def _lease(
        self,
        sampler: int,
        epoch: int,
        length: int,
        count: int,
        wait: float,
        cut: Cut | None = None,
        rewinds: int = 0,
        returned: Sequence[Used] = (),
        *,
        idle: bool = False,
    ) -> Leased:
        del wait, cut, rewinds, returned, idle
        lease = Lease(incarnation=1, sampler=sampler, epoch=epoch, length=length, count=count)
        return self._leases.handle_lease(0, 1, lease)


@pytest.fixture(params=[("sampler", 0), ("sampler", 2), ("batches", 0), ("batches", 2), ("indices", 0)])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    by, processes = request.param
    made = Worker(2, by, processes)
    yield made
    made.passes.close()


def test_a_model_that_is_called_twice_before_the_other_one_s_step(worker: Worker) -> None:
    """A GAN's critic, prepared second, sees the batch and a fake; then the generator makes another fake."""
    done = 0
    for batch in worker.loop():
        done += len(batch)
        for _ in range(2):
            assert worker.trains(1, len(batch)) is None
        assert worker.steps() == done
        worker.trains(0, len(batch))
        assert worker.steps() == done
    assert done == SAMPLES


def test_a_first_model_that_steps_seldom(worker: Worker) -> None:
    done = 0
    for number, batch in enumerate(worker.loop(), 1):
        done += len(batch)
        worker.trains(1, len(batch))
        assert worker.steps() == done
        if number % 3 == 0:
            worker.trains(0, len(batch))
            worker.trains(0, len(batch))
            assert worker.steps() == done


def test_a_second_model_that_steps_seldom(worker: Worker) -> None:
    done = 0
    for number, batch in enumerate(worker.loop(), 1):
        done += len(batch)
        new = worker.trains(0, len(batch))
        assert new in (None, len(batch))
        assert worker.steps() == done
        if number % 3 == 0:
            worker.trains(1, len(batch))
            worker.trains(1, len(batch))
            assert worker.steps() == done


def test_models_that_take_turns(worker: Worker) -> None:
    """Each batch is trained on by one of them."""
    done = 0
    for number, batch in enumerate(worker.loop()):
        done += len(batch)
        worker.trains(number % 2, len(batch))
        assert worker.steps() == done


def test_the_first_model_s_records_count_what_it_trains_on_itself(worker: Worker) -> None:
    """Though the other model has counted it before."""
    counted = 0.0
    for batch in worker.loop():
        worker.trains(1, len(batch))
        new = worker.trains(0, len(batch))
        counted += len(batch) if new is None else new
        worker.steps()
    assert counted == SAMPLES


def test_models_after_an_epoch_go_on_with_the_next(worker: Worker) -> None:
    for epoch in range(3):
        for batch in worker.loop():
            worker.trains(epoch % 2, len(batch))
            worker.steps()
        assert worker.used == Counter(range(SAMPLES))
        worker.used.clear()
