"""Shards at work, over loopback: real servers and sockets in threads, and workers that speak the messages."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from shard_cluster import DEADLINE, Cluster, Model, Peer, Run, Worker, gradients, mean_of
from torch import Tensor

from atoll.core.errors import CheckpointError, UserError
from atoll.core.optimizerkind import OptimizerKind
from atoll.net.endpoint import Server
from atoll.server import snapshot as snapshot_module
from atoll.server.main import serve
from atoll.server.options import ServerOptions
from atoll.server.payloads import payload_of
from atoll.server.snapshot import Snapshots, latest, read_contents, restore
from atoll.tensors.payload import tensor_of
from atoll.tensors.shardoptimizer import ShardOptimizer
from atoll.wire import messages as m
from atoll.wire.messages import decode_untrusted, encode

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("shards", "workers"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_bsp_equals_plain_torch(start: Callable[..., Run], shards: int, workers: int) -> None:
    run = start(shards, workers)
    for iteration in range(4):
        if iteration == 2:
            run.model.plain.param_groups[0]["lr"] = 0.5
        run.iterate(iteration, scale=1.0 if iteration % 2 else 0.25)


def test_the_mean_says_what_it_is_of(start: Callable[..., Run]) -> None:
    run = start(2, 2)
    one, two = run.workers
    one.push(0, gradients(1), missing=(0, 2))
    two.push(0, gradients(2), missing=(0, 3))
    one.commit(0, 1.0)
    two.commit(0, 3.0)
    zero = torch.zeros(())
    sent = [
        [g * (i not in gone) for i, g in enumerate(gradients(seed))]
        for seed, gone in ((1, (0, 2)), (2, (0, 3)))
    ]
    expected = mean_of(sent, [1.0, 3.0])
    for worker in (two, one):
        means = worker.means(0)
        for chunk, (values, present) in means.items():
            assert torch.equal(values, run.model.flat(chunk, expected) + zero)
            slots = run.model.layout.chunks[chunk].slots
            assert present == bytes(slot.parameter != 0 for slot in slots)
        worker.say_step(0)
        worker.ask(1)
    run.model.step_plain(expected, missing=(0,))
    for worker in run.workers:
        worker.assert_has(worker.parameters(1))


def test_a_step_that_is_not_accepted_changes_nothing(start: Callable[..., Run]) -> None:
    run = start(1, 1)
    (worker,) = run.workers
    worker.push(0, gradients(1))
    worker.commit(0)
    worker.means(0)
    worker.say_step(0, accepted=False)
    worker.ask(1)
    worker.assert_has(worker.parameters(1))
    run.iterate(1)


@pytest.mark.parametrize("late", [False, True])
def test_edited_gradients_take_the_means_place(start: Callable[..., Run], late: bool) -> None:
    """Also when the log's word to step reaches a shard before them."""
    run = start(2, 2)
    for worker in run.workers:
        worker.push(0, gradients(worker.rank))
        worker.commit(0)
    for worker in run.workers:
        worker.means(0)
    edited = [g.sign() for g in gradients(5)]

    def replace() -> None:
        for worker in run.workers:
            for chunk, shard in run.model.shard_of.items():
                message = m.Replace(
                    incarnation=worker.incarnation,
                    iteration=0,
                    chunk=chunk,
                    present=bytes([1] * run.model.slots(chunk)),
                )
                worker.send(shard, message, payload_of(run.model.flat(chunk, edited)))

    if not late:
        replace()
    for worker in run.workers:
        worker.say_step(0, 0.5, edited=run.model.chunks)
        worker.ask(1)
    if late:
        assert run.workers[0].silent(0, m.Parameters)
        replace()
    run.model.step_plain(edited)
    for worker in run.workers:
        worker.assert_has(worker.parameters(1))
    run.iterate(1)


def test_the_open_step_is_made_anew_with_each_contribution(start: Callable[..., Run]) -> None:
    run = start(2, 2, consistency="asp")
    one, two = run.workers
    for worker in run.workers:
        worker.ask(0)
        worker.assert_has(worker.parameters(0))
    for iteration in range(3):
        one.push(iteration, gradients(iteration))
        one.commit(iteration, 1.0, hyperparameters=run.model.hyperparameters())
        one.ask(iteration + 1)
        found = one.parameters(iteration + 1)
        assert one.expect(0, m.Committed)[0].iteration == iteration
        if iteration % 2 == 0:  # it opens a step
            before = copy.deepcopy((run.model.every, run.model.plain.state_dict()))
            run.model.step_plain(gradients(iteration))
        else:
            run.model.go_back(*before)
            means = zip(gradients(iteration - 1), gradients(iteration), strict=True)
            run.model.step_plain([earlier.lerp(later, 0.5) for earlier, later in means])
        one.assert_has(found)
    two.push(0, gradients(9))
    two.commit(0, 3.0, hyperparameters=run.model.hyperparameters())
    two.ask(1)
    message, _ = two.expect(0, m.Parameters)
    assert message.staleness == 2.0  # three of one other worker since: two global iterations too late


def test_a_push_may_be_a_pull(start: Callable[..., Run]) -> None:
    asynchronous = start(2, 1, consistency="asp")
    (worker,) = asynchronous.workers
    for iteration in range(2):
        worker.push(iteration, gradients(iteration), pull=True)
        worker.commit(iteration, hyperparameters=asynchronous.model.hyperparameters())
        found = worker.parameters(iteration + 1)
        asynchronous.model.step_plain(gradients(iteration))
        worker.assert_has(found)
    synchronous = start(2, 2)
    for rank, worker in enumerate(synchronous.workers):
        worker.push(0, gradients(rank), pull=True)
        worker.commit(0)
    mean = mean_of([gradients(0), gradients(1)], [1.0, 1.0])
    for worker in synchronous.workers:
        for chunk, (values, _) in worker.means(0, ask=False).items():
            assert torch.equal(values, worker.model.flat(chunk, mean))


def test_parameters_on_their_way_do_not_change(start: Callable[..., Run]) -> None:
    run = start(1, 1, consistency="asp")
    (worker,), model = run.workers, run.cluster.shards[0].model
    assert model is not None
    lent = {chunk: model.lend(chunk) for chunk in model.chunks}  # as by a message that is not sent yet
    before = {chunk: bytes(payload) for chunk, payload in lent.items()}
    addresses = {chunk: model.optimizer.values(chunk).data_ptr() for chunk in model.chunks}
    for iteration in range(3):
        worker.push(iteration, gradients(iteration), pull=True)
        worker.commit(iteration, hyperparameters=run.model.hyperparameters())
        found = worker.parameters(iteration + 1)
        run.model.step_plain(gradients(iteration))
        worker.assert_has(found)
        assert {chunk: bytes(payload) for chunk, payload in lent.items()} == before
    assert all(model.optimizer.values(chunk).data_ptr() != addresses[chunk] for chunk in model.chunks)


def test_ssp_lets_nobody_run_ahead(start: Callable[..., Run]) -> None:
    run = start(2, 2, consistency="ssp", slack=2)
    fast, slow = run.workers
    for iteration in range(2):
        fast.push(iteration, gradients(iteration))
        fast.commit(iteration, hyperparameters=run.model.hyperparameters())
        fast.ask(iteration + 1)
        fast.parameters(iteration + 1)
    fast.push(2, gradients(2))
    fast.commit(2, hyperparameters=run.model.hyperparameters())
    fast.ask(3)
    assert fast.silent(0, m.Parameters)
    assert fast.silent(1, m.Parameters, 0.05)
    slow.push(0, gradients(9))
    slow.commit(0, hyperparameters=run.model.hyperparameters())
    fast.parameters(3)


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
def test_many_at_once(start: Callable[..., Run], tmp_path: Path, consistency: str) -> None:
    """Workers in threads, at their own pace, while snapshots are taken: all comes to its end, once."""
    count, iterations, slack = 3, 40, 2
    run = start(2, count, consistency=consistency, slack=slack, snapshots=_snapshots(tmp_path, 0.01))
    errors: list[BaseException] = []
    clocks = [0] * count

    def work(worker: Worker) -> None:
        chance = random.Random(worker.rank)
        hyperparameters = run.model.hyperparameters()
        for iteration in range(iterations):
            worker.push(iteration, gradients(worker.rank))
            worker.commit(iteration, hyperparameters=[] if consistency == "bsp" else hyperparameters)
            if consistency == "bsp":
                worker.means(iteration)
                worker.say_step(iteration)
            worker.ask(iteration + 1)
            worker.parameters(iteration + 1)
            clocks[worker.rank] = iteration + 1
            if consistency == "ssp":
                # A worker's own count is raised after the shards': one more than the slack may be seen.
                assert iteration + 1 - min(clocks) <= slack + 1
            time.sleep(chance.random() * 0.002)

    def guard(worker: Worker) -> None:
        try:
            work(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(worker,), daemon=True) for worker in run.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
        assert not thread.is_alive()
    assert not errors, errors
    _, numbers, _ = state_of(run.workers[0])
    # As many contributions as there are workers make one step, whoever they are of.
    assert all(slot == {"step": float(iterations)} for slots in numbers.values() for slot in slots)


def test_the_dead_are_left_out(start: Callable[..., Run]) -> None:
    run = start(2, 3)
    hub, (one, two, three) = run.hub(), run.workers
    run.iterate(0)
    assert hub.silent(0, m.Fenced, 0.05)  # nothing was leased, so nothing is told
    used = m.Used(sampler=0, epoch=0, start=0, stop=8)
    for worker in (one, two):
        worker.push(1, gradients(worker.rank))
        worker.commit(1, used=[used] if worker is one else [])
    three.push_chunk(0, run.model.held(0)[0], 1, gradients(2))  # it dies in the middle
    hub.send(0, m.Fence(worker=2, incarnation=3))
    answer, _ = hub.expect(0, m.Fenced)
    assert (answer.worker, answer.iteration, answer.used) == (2, 1, [])
    for worker in (one, two):
        worker.means(1)
        worker.say_step(1)
        worker.ask(2)
    run.model.step_plain(mean_of([gradients(0), gradients(1)], [1.0, 1.0]))
    for worker in (one, two):
        worker.assert_has(worker.parameters(2))
    news, _ = hub.expect(0, m.Fenced)  # what those who live have used
    assert (news.worker, news.used) == (0, [used])
    for shard in range(2):
        assert "given up" in three.refused(shard)
    three.send(0, m.Commit(incarnation=3, iteration=1, weight=1.0))
    assert "fenced" in three.refused()
    three.push(1, gradients(2))
    assert "fenced" in three.refused(1)
    # It comes back, anew, and takes part in the next iteration that begins.
    back = run.again(2, 9)
    back.ready()
    back.send(0, m.Arrive(incarnation=9))
    run.workers = [one, two]
    run.iterate(2)
    back.ask(0)
    back.assert_has(back.parameters(3))
    run.workers = [one, two, back]
    run.iterate(3)


def test_who_dies_before_the_run_begins_is_waited_for_to_come_anew() -> None:
    model, cluster = Model(lambda p: torch.optim.SGD(p, lr=0.1), 1), Cluster(1, 2)
    hub, one = Peer(cluster.addresses), Worker(cluster.addresses, 0, model)
    peers = [hub, one]
    try:
        hub.send(0, m.Hello(version=m.VERSION, run="test", role="hub"))
        hub.expect(0, m.Welcome)
        hub.send(0, m.Fence(worker=0, incarnation=1))
        hub.expect(0, m.Fenced)
        two = Worker(cluster.addresses, 1, model)
        peers.append(two)
        two.send(0, m.Meet(incarnation=2, number=0, what="start"), b"two")
        two.send(0, m.WhoIsMissing())
        (line,) = two.expect(0, m.Missing)[0].lines
        there = "1 of 2 workers are there; worker 0 died or left before the run began"
        assert line == f"worker 0 to join ({there})"
        assert not two.come[0][m.Met]
        anew = Worker(cluster.addresses, 0, model, 3)
        peers.append(anew)
        anew.send(0, m.Meet(incarnation=3, number=0, what="start"), b"one")
        for worker in (anew, two):
            assert worker.expect(0, m.Met)[0].workers == [0, 1]
    finally:
        for peer in peers:
            peer.close()
        cluster.close()
    assert not cluster.errors


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_checkpoint_is_loaded_by_those_who_are_left(start: Callable[..., Run], consistency: str) -> None:
    """A Setup begins the log anew, and the dead are not waited for again."""
    run = start(2, 3, consistency=consistency)
    hub, (one, two, _three) = run.hub(), run.workers
    hub.send(0, m.Fence(worker=2, incarnation=3))
    hub.expect(0, m.Fenced)
    two.ready("loaded", wait=False)
    one.set_up(3, digest="loaded", consistency=consistency)
    one.ready("loaded")
    for shard in range(2):
        two.expect(shard, m.Ready)
    run.workers = [one, two]
    if consistency == "bsp":
        run.iterate(0)
    else:
        one.push(0, gradients(1))
        one.commit(0, hyperparameters=run.model.hyperparameters())
        one.ask(1)
        one.parameters(1)


def changed(run: Run, by: Worker, iteration: int, **setup: Any) -> None:
    """The workers of a run set up a changed model, which worker `by` brings."""
    for worker in run.workers:
        if worker is not by:
            worker.ready("changed", wait=False)
    by.set_up(len(run.workers), digest="changed", steps=iteration, **setup)
    by.ready("changed")
    for worker in run.workers:
        for shard in range(run.model.shards if worker is not by else 0):
            worker.expect(shard, m.Ready)


def test_a_changed_model_is_brought_by_whoever_is_first_then(start: Callable[..., Run]) -> None:
    """The worker that has described the model first may be gone, or be in a group by now."""
    run = start(2, 3)
    hub, (_one, two, three) = run.hub(), run.workers
    run.iterate(0)
    hub.send(0, m.Fence(worker=0, incarnation=1))
    hub.expect(0, m.Fenced)
    run.workers = [two, three]
    changed(run, two, 1)
    run.model.plain.state.clear()  # nobody brought a state
    run.iterate(1)
    run.iterate(2)


@pytest.mark.parametrize("same_group", [False, True])
def test_another_worker_brings_a_changed_model_whose_bringer_was_lost(
    start: Callable[..., Run], same_group: bool
) -> None:
    """The first shard has a part of it, and the second one nothing."""
    run = start(2, 2)
    hub, (one, two) = run.hub(), run.workers
    for worker in run.workers:
        for shard in range(2):
            worker.send(shard, m.Ready(digest="d", number=1))
            worker.expect(shard, m.Ready)
    run.iterate(0)
    one.send(0, run.model.setup(0, workers=2, digest="changed", steps=1, number=2))
    chunk = run.model.held(0)[0]
    one.send(0, m.SetChunk(chunk=chunk, number=2), payload_of(run.model.flat(chunk) + 1.0))
    one.heard(0)
    one.close()
    if same_group:
        two = run.again(0, 1, member=1)
        run.workers[1].close()
    else:
        hub.send(0, m.Fence(worker=0, incarnation=1))
        hub.expect(0, m.Fenced)
    for shard in range(2):
        two.send(shard, run.model.setup(shard, workers=2, digest="changed", steps=1, number=2))
        for chunk in run.model.held(shard):
            two.send(shard, m.SetChunk(chunk=chunk, number=2), payload_of(run.model.flat(chunk)))
        two.send(shard, m.Ready(digest="changed", number=2))
        two.expect(shard, m.Ready)
    if same_group:
        hub.send(0, m.Fence(worker=1, incarnation=2))
        hub.expect(0, m.Fenced)
    run.workers = [two]
    run.model.plain.state.clear()
    run.iterate(1)
    for shard in range(2):  # the next set-up is the next one
        two.send(shard, run.model.setup(shard, workers=2, digest="more", steps=2, number=3))
        for chunk in run.model.held(shard):
            two.send(shard, m.SetChunk(chunk=chunk, number=3), payload_of(run.model.flat(chunk)))
        two.send(shard, m.Ready(digest="more", number=3))
        two.expect(shard, m.Ready)
    run.model.plain.state.clear()
    run.iterate(2)


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_newcomer_that_prepared_the_model_as_it_was_is_refused(
    start: Callable[..., Run], consistency: str
) -> None:
    run = start(2, 2, consistency=consistency)
    late = run.again(2, 9)
    late.ready()
    changed(run, run.workers[0], 0, consistency=consistency)
    late.send(0, m.Arrive(incarnation=9))
    assert "have changed their model" in late.refused()
    if consistency == "bsp":
        run.iterate(0)  # nobody waits for it


def test_a_newcomer_that_waits_to_enter_as_the_model_changes_is_refused(start: Callable[..., Run]) -> None:
    run = start(2, 2)
    hub, (one, _two) = run.hub(), run.workers
    run.iterate(0)
    late = run.again(2, 9)
    late.ready()
    late.send(0, m.Arrive(incarnation=9))
    late.heard(0)
    late.ask(0)  # it enters with the next iteration but one
    for shard in range(2):
        late.heard(shard)
        assert not late.come[shard][m.Parameters]
    changed(run, one, 1)
    run.model.plain.state.clear()
    for shard in range(2):
        assert "have changed their model" in late.refused(shard)
    late.push(1, gradients(2))
    late.commit(1)
    assert "have changed their model" in late.refused()
    hub.send(0, m.Fence(worker=2, incarnation=9))
    hub.expect(0, m.Fenced)
    run.iterate(1)


def test_what_is_sent_twice_counts_once(start: Callable[..., Run]) -> None:
    run = start(1, 1)
    (worker,) = run.workers
    for _ in range(2):
        worker.push(0, gradients(0))
        worker.commit(0, 1.0)
    worker.means(0)
    for _ in range(2):
        worker.say_step(0)
    run.model.step_plain(gradients(0))
    for _ in range(2):
        worker.ask(1)
        worker.assert_has(worker.parameters(1))
    worker.push(0, gradients(7))
    worker.commit(0, 1.0)
    for _ in range(2):
        assert worker.expect(0, m.Committed)[0].iteration == 0
    run.iterate(1)


def test_workers_meet_before_and_after_the_setup() -> None:
    model, cluster = Model(lambda p: torch.optim.SGD(p, lr=0.1), 1), Cluster(1, 2)
    one = Worker(cluster.addresses, 0, model)
    try:
        one.send(0, m.Meet(incarnation=1, number=0, what="hello"), b"one")
        assert one.silent(0, m.Met, 0.1)
        assert cluster.shards[0].waiting_for()
        two = Worker(cluster.addresses, 1, model)
        two.send(0, m.Meet(incarnation=2, number=0, what="hello"), b"")
        for worker in (one, two):
            met, payload = worker.expect(0, m.Met)
            assert (met.workers, met.sizes) == ([0, 1], [3, 0])
            assert payload is not None
            assert bytes(payload) == b"one"
        one.send(0, m.Meet(incarnation=1, number=1, what="b"), b"1")
        one.set_up(2)  # a meeting is under way: it stands
        one.ready()
        two.send(0, m.Meet(incarnation=2, number=1, what="b"), b"22")
        assert one.expect(0, m.Met)[0].sizes == [1, 2]
        two.send(0, m.Meet(incarnation=2, number=2, what="x"), b"22")
        two.heard()
        one.send(0, m.Meet(incarnation=1, number=2, what="y"), b"22")
        assert "same calls in the same order" in one.refused()
        two.close()
    finally:
        one.close()
        cluster.close()
    assert not cluster.errors


def state_of(worker: Worker) -> tuple[dict[int, dict[str, Tensor]], dict[int, list[dict[str, Any]]], int]:
    elements: dict[int, dict[str, Tensor]] = defaultdict(dict)
    numbers: dict[int, list[dict[str, Any]]] = {}
    steps = set()
    for shard in range(worker.model.shards):
        worker.send(shard, m.PullState(incarnation=worker.incarnation))
    for shard in range(worker.model.shards):
        steps.add(worker.expect(shard, m.StateEnd)[0].steps)
        come = worker.come[shard][m.State]
        while come:
            state, payload = come.popleft()
            if state.key:
                elements[state.chunk][state.key] = tensor_of(payload, torch.float32)
            else:
                numbers[state.chunk] = state.values
    (only,) = steps
    return elements, numbers, only


def test_a_checkpoint_goes_out_and_comes_back(start: Callable[..., Run]) -> None:
    run = start(2, 2)
    one, two = run.workers
    run.iterate(0)
    run.iterate(1)
    saved = {chunk: run.model.flat(chunk) for chunk in run.model.chunks}
    plain = copy.deepcopy(run.model.plain.state_dict())
    weights = [p.detach().clone() for p in run.model.every]
    elements, numbers, steps = state_of(two)
    assert steps == 2
    assert all(slot == {"step": 2.0} for slots in numbers.values() for slot in slots)
    for chunk in run.model.chunks:
        expected = [run.model.plain.state[p]["exp_avg"] for p in run.model.every]
        assert torch.equal(elements[chunk]["exp_avg"], run.model.flat(chunk, expected))
    run.iterate(2)
    # session.load: the second is sooner there than the first, who brings the values.
    two.ready("loaded", wait=False)
    for shard in range(2):
        two.heard(shard)
        assert not two.come[shard][m.Ready]
    for shard in range(2):
        one.send(shard, run.model.setup(shard, workers=2, digest="loaded", steps=2))
        for chunk in run.model.held(shard):
            one.send(shard, m.SetChunk(chunk=chunk, values=numbers[chunk]), payload_of(saved[chunk]))
            for key, flat in elements[chunk].items():
                one.send(shard, m.SetChunk(chunk=chunk, key=key), payload_of(flat))
    one.ready("loaded")
    for shard in range(2):
        two.expect(shard, m.Ready)
    run.model.plain.load_state_dict(plain)
    with torch.no_grad():
        for parameter, weight in zip(run.model.every, weights, strict=True):
            parameter.copy_(weight)
    for worker in run.workers:
        worker.ask(2)
        worker.assert_has(worker.parameters(2))
    run.iterate(2)
    run.iterate(3)


def test_the_first_worker_comes_back_and_finds_what_was_trained(start: Callable[..., Run]) -> None:
    run = start(1, 2, consistency="asp")
    hub, (_, two) = run.hub(), run.workers
    two.push(0, gradients(0))
    two.commit(0, hyperparameters=run.model.hyperparameters())
    two.ask(1)
    trained = two.parameters(1)
    hub.send(0, m.Fence(worker=0, incarnation=1))
    hub.expect(0, m.Fenced)
    back = run.again(0, 7)
    back.send(0, m.Arrive(incarnation=7))
    back.set_up(2, consistency="asp")  # with values of its own, which nobody wants any more
    back.ready()
    back.ask(0)
    for chunk, values in back.parameters(1).items():  # and it begins where the slowest is
        assert torch.equal(values, trained[chunk])


def test_who_may_speak(start: Callable[..., Run]) -> None:
    run = start(2, 1)
    (worker,) = run.workers
    stranger = Peer(run.cluster.addresses)
    run.peers.append(stranger)
    hello = worker.hello()
    replace = msgspec.structs.replace
    for bad, said in [
        (m.Pull(incarnation=1, clock=0), "say Hello first"),
        (replace(hello, version=99), "same version of Atoll"),
        (replace(hello, run="other"), "of run 'test', and not of run 'other'"),
        (replace(hello, role="boss"), "knows no role"),
        (replace(hello, worker=-1), "rank and incarnation"),
        (m.Welcome(run="test"), "say Hello first"),
    ]:
        stranger.send(1, bad)
        assert said in stranger.refused(1)
    stranger.send(1, replace(hello, role="hub"))
    assert "keeps no log" in stranger.refused(1)
    stranger.send(0, replace(hello, role="shard", shard=1))
    stranger.expect(0, m.Welcome)
    for bad, said in [
        (m.Follow(shard=0, after=0), "for themselves"),
        (m.Fence(worker=0, incarnation=1), "the hub fences"),
        (m.Welcome(run="test"), "takes no Welcome"),
        (m.Ready(digest="d"), "workers ask"),
    ]:
        stranger.send(0, bad)
        assert said in stranger.refused(0)
    worker.send(1, m.Commit(incarnation=1, iteration=0, weight=1.0))
    assert "keeps no log" in worker.refused(1)
    worker.send(0, m.Pull(incarnation=2, clock=0))
    assert "of incarnation 1" in worker.refused(0)


def test_what_makes_no_sense_is_refused_and_disturbs_nothing(start: Callable[..., Run]) -> None:
    run = start(1, 1)
    (worker,) = run.workers
    chunk, model = 0, run.model
    size = model.flat(chunk).numel() * 4
    present, slots = bytes([1] * model.slots(chunk)), model.slots(chunk)
    push = m.Push(incarnation=1, iteration=0, chunk=chunk, chunks_in_all=len(model.chunks), present=present)
    replace = msgspec.structs.replace
    for bad, payload, said in [
        (push, b"", f"takes {size} bytes"),
        (push, None, f"takes {size} bytes"),
        (push, bytes(size + 1), f"takes {size} bytes"),
        (replace(push, chunk=10**6), bytes(size), "does not hold"),
        (replace(push, present=b""), bytes(size), f"has {slots} parameters"),
        (replace(push, chunks_in_all=1), bytes(size), "announced"),
        (replace(push, iteration=10**6), bytes(size), "in flight"),
        (m.Commit(incarnation=1, iteration=10**6, weight=1.0), None, "commits iteration"),
        (m.Commit(incarnation=1, iteration=0, weight=float("inf")), None, "no number"),
        (m.Step(incarnation=1, iteration=0, scale=1.0, hyperparameters=[]), None, "param groups"),
        (
            m.Step(incarnation=1, iteration=0, scale=1.0, hyperparameters=[{"lr": "x"}]),
            None,
            "hyperparameter",
        ),
        (
            m.Step(incarnation=1, iteration=0, scale=1.0, hyperparameters=model.hyperparameters()),
            None,
            "no mean",
        ),
        (m.Replace(incarnation=1, iteration=0, chunk=0, present=present), bytes(size), "has no mean"),
        (m.SetChunk(chunk=0), bytes(size), "comes after"),
        (m.Ready(digest="other"), None, ""),
    ]:
        worker.send(0, bad, payload)
        if said:
            assert said in worker.refused(), said
    other = run.again(5, 50)
    other.send(0, m.Ready(digest="other"))
    assert "another model" in other.refused()
    other.send(0, model.setup(0, workers=1, digest="other"))
    assert "another model" in other.refused()
    hub = run.hub()
    hub.send(0, m.Fence(worker=5, incarnation=50))
    hub.expect(0, m.Fenced)
    run.iterate(0)


def test_who_began_again_with_another_model_is_told_to_start_the_run_again(start: Callable[..., Run]) -> None:
    """So it is where the first worker leaves between two calls of session.prepare, and comes again."""
    run = start(1, 1)
    (worker,) = run.workers
    again = run.again(worker.rank, 50)
    again.send(0, m.Ready(digest="other"))
    line = (
        "worker 0 began again, and has another model, layout or optimizer than it had described before: if "
        "that was while session.prepare was called for several models, start the run again; else start"
    )
    assert line in again.refused()
    other = run.again(5, 51)
    other.send(0, run.model.setup(0, workers=1, digest="other"))
    line = (
        "brought by worker 0, which is not connected any more: if it left while session.prepare was called "
        "for several models, start the run again"
    )
    assert line in other.refused()


def test_a_worker_that_deals_data_by_other_settings_is_refused_in_one_line(start: Callable[..., Run]) -> None:
    """One that comes when the run is under way, say. Workers that prepare together compare all settings."""
    dealing = {"sync.shares": "even", "sync.global_batch": "24"}
    run = start(1, 2, setup={"dealing": dealing})
    other, line = run.again(1, 3), "worker 1 has sync.shares auto, and worker 0 has even: all workers deal a "
    line += "run's data by one configuration; give every worker the same"
    digest = run.model.setup(0, workers=2).digest
    other.send(0, m.Ready(digest=digest, dealing={**dealing, "sync.shares": "auto"}))
    assert other.refused() == line
    other.send(0, m.Ready(digest=digest, dealing=dealing))
    other.expect(0, m.Ready)


def test_garbage_is_dropped_and_counted(start: Callable[..., Run]) -> None:
    run = start(1, 1)
    (worker,) = run.workers
    stranger = Peer(run.cluster.addresses)
    run.peers.append(stranger)
    chance = random.Random(0)
    good = [
        encode(message) for message in (worker.hello(), run.model.setup(0, workers=1), m.Ready(digest="d"))
    ]
    for peer in (stranger, worker):
        for _ in range(300):
            header = bytearray(chance.choice(good))
            for _ in range(chance.randrange(1, 8)):
                header[chance.randrange(len(header))] = chance.randrange(256)
            cut = bytes(header[: chance.randrange(len(header))])
            peer.clients[0].send(cut, chance.choice([None, b"x" * 100]))
    for peer in (stranger, worker):
        peer.heard()
        assert peer.come[0][m.Refused]
    worker.come[0].clear()
    assert run.cluster.shards[0].dropped > 300
    run.iterate(0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizers": [OptimizerKind("os.system", 1)]}, "cannot run the optimizer"),
        ({"optimizers": [OptimizerKind("torch.optim.lbfgs.LBFGS", 1)]}, "cannot run the optimizer"),
        ({"optimizers": [OptimizerKind("torch.optim.sgd.SGD", 2**50)]}, "param group"),
        ({"layout": msgspec.Raw(b"\xc0")}, "layout cannot be read"),
        ({"consistency": "maybe"}, "no such consistency"),
        ({"shards": 0}, "shard 0 of a run of 0"),
        ({"chunks": [0]}, "balancing gives it"),
        ({"hyperparameters": [{"lr": -1.0}]}, "cannot be made"),
        ({"hyperparameters": []}, "param group"),
    ],
)
def test_a_setup_that_makes_no_sense(changes: dict[str, Any], said: str) -> None:
    """All who wait for it hear why at once, before and after; and a good one is taken then."""
    model, cluster = Model(lambda p: torch.optim.SGD(p, lr=0.1), 1), Cluster(1, 3)
    workers = worker, early, late = [Worker(cluster.addresses, rank, model) for rank in range(3)]
    try:
        early.send(0, m.Ready(digest="d"))
        worker.send(0, model.setup(0, workers=3, **changes))
        assert said in worker.refused()
        assert said in early.refused()
        late.send(0, m.Ready(digest="d"))
        assert said in late.refused()
        worker.set_up(3)
        for each in workers:
            each.ready()
        worker.ask(0)
        worker.assert_has(worker.parameters(0))
    finally:
        for each in workers:
            each.close()


def test_a_setup_whose_values_do_not_all_come() -> None:
    model, cluster = Model(lambda p: torch.optim.SGD(p, lr=0.1), 1), Cluster(1, 1)
    worker = Worker(cluster.addresses, 0, model)
    try:
        worker.send(0, model.setup(0, workers=1))
        worker.send(0, m.SetChunk(chunk=0), payload_of(model.flat(0)))
        worker.send(0, m.SetChunk(chunk=1, key="exp_avg"), payload_of(model.flat(1)))
        assert "keeps no state called 'exp_avg'" in worker.refused()
        worker.send(0, m.SetChunk(chunk=1, values=[{}] * 99), payload_of(model.flat(1)))
        assert "parameters, not 99" in worker.refused()
        worker.ready(wait=False)
        assert "have not come" in worker.refused()
    finally:
        worker.close()
        cluster.close()


def _snapshots(folder: Path, seconds: float = 0.05) -> Callable[[int], Snapshots]:
    return lambda index: Snapshots(
        folder / f"shard-{index}", run="test", shard=index, seconds=seconds, failed=print
    )


def test_snapshots_are_of_one_moment(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(2, 1, snapshots=_snapshots(tmp_path, 0.01))
    moments: dict[int, dict[int, Tensor]] = {}

    def look(shard: int) -> None:
        """The shard's latest snapshot is whole, and of one moment."""
        folder = latest(tmp_path / f"shard-{shard}")
        if folder is None:
            raise FileNotFoundError(
                f"shard {shard}: the snapshot that was there is gone, and no other is there"
            )
        held = run.model.held(shard)
        fresh = ShardOptimizer(run.model.layout, held, run.model.optimizers(), run.model.hyperparameters())
        steps = restore(folder, fresh).heading.steps
        for chunk in held if steps else ():
            assert torch.equal(fresh.values(chunk), moments[steps][chunk]), (steps, chunk)
            assert fresh.state(chunk)[1][0] == {"step": float(steps)}

    for iteration in range(25):
        run.iterate(iteration)
        moments[iteration + 1] = {chunk: run.model.flat(chunk) for chunk in run.model.chunks}
        for shard in range(2):
            with contextlib.suppress(CheckpointError, FileNotFoundError):  # a newer one came
                look(shard)
    end = time.monotonic() + DEADLINE
    while any(latest(tmp_path / f"shard-{shard}") is None for shard in range(2)):
        assert time.monotonic() < end
        time.sleep(0.02)
    run.close()  # nothing takes the place of what is there any more
    for shard in range(2):
        look(shard)


def test_a_folder_of_another_run_is_refused(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(1, 1, snapshots=_snapshots(tmp_path))
    end = time.monotonic() + DEADLINE
    folder = tmp_path / "shard-0"
    while latest(folder) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    run.close()
    Snapshots(folder, run="test", shard=0, seconds=1.0, failed=print)
    for other, shard in (("other", 0), ("test", 1)):
        with pytest.raises(UserError, match="holds a snapshot of run 'test', shard 0"):
            Snapshots(folder, run=other, shard=shard, seconds=1.0, failed=print)
    snapshot = latest(folder)
    assert snapshot is not None
    fresh = ShardOptimizer(
        run.model.layout, run.model.chunks, run.model.optimizers(), run.model.hyperparameters()
    )
    with (snapshot / "chunk-0.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="damaged"):
        restore(snapshot, fresh)
    (snapshot / "snapshot.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match="not a shard's snapshot"):
        read_contents(snapshot)


def test_the_latest_snapshot_is_found_while_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, there = tmp_path / "snapshot-1", tmp_path / "snapshot-2"
    there.mkdir()
    monkeypatch.setattr(snapshot_module, "_wholes", lambda _folder: [gone, there])
    assert latest(tmp_path) == there
    monkeypatch.setattr(snapshot_module, "_wholes", lambda _folder: [gone])
    assert latest(tmp_path) is None


class Hub:
    """As much of a hub as shards need."""

    def __init__(self, shards: int, workers: int) -> None:
        self.server = Server("tcp://127.0.0.1:0", None, limit=2**20, name="hub")
        self.shards, self.workers = shards, workers
        self.addresses: dict[int, str] = {}
        self.beats = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asking = []
        while not self.stop.is_set():
            received = self.server.receive(0.05)
            if received is None:
                continue
            message = decode_untrusted(received.header)
            if isinstance(message, m.Hello):
                self.addresses[message.shard] = message.address
                welcome = m.Welcome(
                    run="test", incarnation=100 + message.shard, workers=self.workers, heartbeat=0.05
                )
                self.server.send(received.peer, encode(welcome))
            elif isinstance(message, m.WhereAreShards):
                asking.append(received.peer)
            elif isinstance(message, m.Heartbeat):
                self.beats += 1
            if len(self.addresses) == self.shards:
                every = m.Shards(addresses=[self.addresses[i] for i in range(self.shards)])
                for peer in asking:
                    self.server.send(peer, encode(every))
                asking.clear()

    def close(self) -> None:
        self.stop.set()
        self.thread.join(DEADLINE)
        self.server.close()


def test_serving_with_a_hub(tmp_path: Path) -> None:
    hub, stop, up = Hub(2, 1), threading.Event(), threading.Barrier(3)

    def be(index: int) -> None:
        serve(
            ServerOptions(
                hub=hub.server.address,
                shard=index,
                run="test",
                directory=str(tmp_path / str(index)),
                snapshot_seconds=0.1,
                timeout=DEADLINE,
            ),
            ready=lambda _address: up.wait(DEADLINE) and None,
            stop=stop,
        )

    threads = [threading.Thread(target=be, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    up.wait(DEADLINE)
    model = Model(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 2)
    worker = Worker([hub.addresses[i] for i in range(2)], 0, model)
    worker.set_up(1)
    worker.ready()
    for iteration in range(3):
        worker.push(iteration, gradients(iteration))
        worker.commit(iteration)
        worker.means(iteration)
        worker.say_step(iteration)
        worker.ask(iteration + 1)
        model.step_plain(gradients(iteration))
        worker.assert_has(worker.parameters(iteration + 1))
    end = time.monotonic() + DEADLINE
    while hub.beats < 4 or any(latest(tmp_path / str(i)) is None for i in range(2)):
        assert time.monotonic() < end
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    worker.close()
    hub.close()
    assert "SGD" in (tmp_path / "0" / "journal.jsonl").read_text()


@pytest.mark.check
def test_a_shards_process_ends_when_it_is_told_to() -> None:
    hub = Hub(1, 1)
    code = (
        "import sys\nfrom atoll.server.main import serve\nfrom atoll.server.options import ServerOptions\n"
        f"options = ServerOptions(hub={hub.server.address!r}, shard=0, run='test')\n"
        "serve(options, ready=lambda a: print(a, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        worker = Worker([address], 0, Model(lambda p: torch.optim.SGD(p, lr=0.1), 1))
        worker.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait(DEADLINE)
        hub.close()
