"""What a client with the run's key may send to a shard, and what becomes of it: lies are refused by name."""

import math
import time
from collections import deque
from contextlib import closing

import pytest
import torch
from shard_cluster import DEADLINE, Peer, Run, Worker, gradients
from torch import nn

from atoll.core.events import AnyEvent, Warned
from atoll.net.endpoint import Server
from atoll.observe.lastwords import LAST_WORDS_VARIABLE, LastWords
from atoll.wire import messages as m
from atoll.wire.base import MOST_AHEAD


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def spoilt(value: float, parameter: int) -> list[torch.Tensor]:
    tensors = gradients(1)
    tensors[parameter].view(-1)[-1] = value
    return tensors


@pytest.mark.parametrize("consistency", ["asp", "ssp"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_its_sender_named(
    consistency: str, value: float
) -> None:
    told: list[AnyEvent] = []
    with closing(
        Run(2, 2, sgd, consistency, slack=4, setup={"finite": True}, emit=lambda _shard: told.append)
    ) as run:
        one, liar = run.workers
        liar.push(0, spoilt(value, 2))
        chunk = run.model.layout.places[2][0]
        shard = run.model.shard_of[chunk]
        line = "worker 1 pushed a gradient of 'p2' with NaN or infinity, in iteration 0: it is not taken"
        assert liar.refused(shard).startswith(line)
        liar.commit(0, hyperparameters=run.model.hyperparameters())
        for iteration in range(2):  # the others go on as if nothing had come
            one.push(iteration, gradients(iteration))
            one.commit(iteration, hyperparameters=run.model.hyperparameters())
            one.ask(iteration + 1)
            values = one.parameters()
            assert all(bool(each.isfinite().all()) for each in values.values())
        liar.push_chunk(shard, chunk, 0, gradients(1))  # what is right is taken
        liar.expect(0, m.Committed)
    warned = [event.message for event in told if isinstance(event, Warned)]
    assert [line in each for each in warned] == [True]


def test_where_workers_do_not_look_a_shard_does_not_either() -> None:
    with closing(Run(1, 1, sgd, "asp")) as run:
        run.workers[0].push(0, spoilt(math.nan, 0))
        run.workers[0].commit(0, hyperparameters=run.model.hyperparameters())
        run.workers[0].expect(0, m.Committed)


def test_a_part_of_a_chunk_is_looked_at_too() -> None:
    with closing(Run(1, 1, sgd, "asp", setup={"finite": True})) as run:
        worker, (chunk, _) = run.workers[0], run.model.layout.places[6]
        for share in range(2):
            worker.push_chunk(0, chunk, 0, spoilt(math.nan, 6), share=share, shares=2)
        worker.heard()
        refused = [each.reason for each, _ in worker.come[0][m.Refused]]
        assert len(refused) == 1
        assert "'p6'" in refused[0]


def test_an_incarnation_that_nobody_has_given_takes_no_place() -> None:
    with closing(Run(1, 2, sgd, "asp")) as run:
        thief = Peer(run.cluster.addresses)
        run.peers.append(thief)
        for incarnation in (2**53 - 1, 2 + MOST_AHEAD + 1):
            thief.send(0, run.workers[0].hello(incarnation=incarnation))
            reason = thief.refused()
            assert reason.startswith(f"worker 0 says that it is incarnation {incarnation}, and the highest")
            assert "\n" not in reason
        run.workers[0].push(0, gradients(0))
        run.workers[0].commit(0, hyperparameters=run.model.hyperparameters())
        run.workers[0].expect(0, m.Committed)


def test_a_full_port_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To `atoll run`; the records have each line."""
    told: list[AnyEvent] = []
    reports = deque(f"{kind} {count} connections" for count in range(3) for kind in ("full:", "closed"))
    words = LastWords()
    monkeypatch.setenv(LAST_WORDS_VARIABLE, words.where)
    monkeypatch.setattr(Server, "take_report", lambda _server: reports.popleft() if reports else "")
    with closing(Run(1, 1, sgd, "asp", emit=lambda _shard: told.append)) as run:
        address = run.cluster.addresses[0]
        until = time.monotonic() + DEADLINE
        while reports:
            assert time.monotonic() < until, "the shard looks at its port no more"
            time.sleep(0.01)
    messages = [event.message for event in words.take() if isinstance(event, Warned)]
    words.close()
    assert messages == [f"shard 0's port {address}: {kind} 0 connections" for kind in ("full:", "closed")]
    assert len([event for event in told if isinstance(event, Warned) and "'s port" in event.message]) == 6


def test_whose_place_is_taken_is_told_so() -> None:
    with closing(Run(1, 2, sgd, "asp")) as run:
        other = Worker(run.cluster.addresses, 0, run.model, incarnation=7)
        run.peers.append(other)
        reason = run.workers[0].refused()
        assert reason.startswith(
            "worker 0 has come anew, as incarnation 7, and this process is incarnation 1"
        )
        assert "somebody else with the run's key" in reason


@pytest.mark.parametrize("consistency", ["bsp", "asp", "ssp"])
def test_a_weight_far_beyond_the_others_moves_nothing(consistency: str) -> None:
    with closing(Run(1, 3, sgd, consistency, slack=4)) as run:
        more = {} if consistency == "bsp" else {"hyperparameters": run.model.hyperparameters()}
        for worker in run.workers:
            worker.push(0, gradients(worker.rank))
        for worker in run.workers[:2]:
            worker.commit(0, 16.0, **more)
        if consistency != "bsp":
            for worker in run.workers[:2]:
                worker.expect(0, m.Committed)
        run.workers[2].commit(0, 1e300, **more)
        assert "a weight of 1e+300, more than 1,000,000 times the median of 16" in run.workers[2].refused()
        run.workers[2].commit(0, 16.0, **more)
        for worker in run.workers[2:] if consistency != "bsp" else run.workers:
            worker.expect(0, m.Committed)
