"""Sites: a shard of their own in front of the global ones. Scripts that differ, deaths, and mistakes.

Hub and shards run in this process, on threads, workers in the pool's. Ranks 0 and 2 are at one site, 1 and 3
at the other.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from run_command import wait_for
from test_served_session import (
    Edit,
    State,
    assert_alike,
    assert_same_state,
    config,
    edits_one_chunk,
    loss_of,
    make,
    no_edit,
    one_line,
    plain,
    plain_steps,
    replaces_and_removes,
    share,
    values,
)
from torch import Tensor

import atoll
from atoll.core.errors import AtollError, UserError
from atoll.net.keys import make_keys, write_keys
from atoll.server.main import serve_site
from atoll.server.options import ServerOptions
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.served import RUN, ServedRun, served_worker

NAMES = ("paris", "berlin")
QUICK = {"patience": 1.5, "heartbeat": 0.2}
SAMPLES = 47


def site_of(rank: int) -> str:
    return NAMES[rank % 2]


def served(workers: int, **options: Any) -> ServedRun:
    return ServedRun(workers, sites=Counter(site_of(rank) for rank in range(workers)), **options)


def joined(address: str, rank: int, consistency: str = "bsp", keys: Path | None = None, **sync: Any) -> Any:
    with served_worker(address, rank, keys, site_of(rank)):
        return atoll.join(config(consistency, **sync))


def decisions(folder: Path, what: str) -> list[dict[str, Any]]:
    lines = (folder / "decisions.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["what"] == what]


# -- bsp between sites -------------------------------------------------------------------------------------


def trains(place: Place, address: str, edit: Edit, sync: dict[str, Any], keys: Path | None) -> list[Tensor]:
    model, optimizer = make()
    with joined(address, place.rank, keys=keys, **sync) as session:
        session.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, share(session.rank, step)).backward()
            edit(model, step)
            optimizer.step()
    return values(model)


@pytest.mark.parametrize(
    ("edit", "sync"),
    [(edits_one_chunk, {}), (replaces_and_removes, {"lazy": True}), (replaces_and_removes, {})],
)
def test_gradients_as_the_script_leaves_them(pool: WorkerPool, edit: Edit, sync: dict[str, Any]) -> None:
    with served(3, shards=2) as run:
        pool.submit(trains, run.address, edit, sync, None, world=3)
        expected = plain(3, 4, edit)
        assert_alike(pool.collect(), expected)
    assert not run.failures


def test_the_same_keys_serve_both_levels(pool: WorkerPool, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", make_keys())
    with served(2, keys=tmp_path / "keys") as run:
        results = pool.run(trains, run.address, no_edit, {}, tmp_path / "keys", world=2)
    assert_alike(results, plain(2, 4))
    assert not run.failures


def test_a_hub_that_ends_with_the_run_ends_both_levels(pool: WorkerPool, tmp_path: Path) -> None:
    with served(3, shards=2, folder=tmp_path, until_done=True, **QUICK) as run:
        pool.run(trains, run.address, no_edit, {}, None, world=3)
        assert run.ended()
    assert not run.failures
    assert [each["choice"] for each in decisions(tmp_path, "run")] == ["over"]
    fenced = [each["choice"] for each in decisions(tmp_path, "fenced")]
    assert {"site 'paris'", "site 'berlin'"} <= set(fenced)


def skips(place: Place, address: str, world: int) -> list[Tensor]:
    """Every third mean is looked at and left out, as a GradScaler does; another has a NaN at one worker."""
    model, optimizer = make()
    with joined(address, place.rank, nonfinite="skip") as session:
        session.prepare(model, optimizer)
        for step in range(6):
            loss = loss_of(model, share(session.rank, step))
            (loss * float("nan") if step == 4 and place.rank == world - 1 else loss).backward()
            if step % 3 != 1:
                optimizer.step()
            optimizer.zero_grad()
    return values(model)


def test_steps_that_are_left_out_are_left_out_everywhere(pool: WorkerPool) -> None:
    with served(3) as run:
        pool.submit(skips, run.address, 3, world=3)
        model, optimizer = make()
        for step in (0, 2, 3, 5):
            plain_steps(model, optimizer, [0, 1, 2], range(step, step + 1))
        assert_alike(pool.collect(), values(model))
    assert not run.failures


def goes_back(place: Place, address: str, folder: str, sync: dict[str, Any]) -> tuple[list[Tensor], State]:
    """Save after two steps, make two more, load, and make the same two again."""
    model, optimizer = make("adam")
    for parameter in model.parameters() if place.rank else ():
        parameter.data.add_(0.1)  # worker 0's values count
    with joined(address, place.rank, **sync) as session:
        session.prepare(model, optimizer)
        for part, steps in enumerate([range(2), range(2, 4), range(2, 4)]):
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, share(session.rank, step)).backward()
                optimizer.step()
            if part == 0:
                session.save(folder)
            elif part == 1:
                session.load(folder)
                assert session.iteration == 2
        state = optimizer.state_dict()
    return values(model), state


@pytest.mark.parametrize(("world", "lazy"), [(3, False), (2, True)])
def test_a_load_in_mid_run_sets_both_levels_up_again(
    pool: WorkerPool, tmp_path: Path, world: int, lazy: bool
) -> None:
    with served(world, shards=2) as run:
        results = pool.run(goes_back, run.address, str(tmp_path / "saved"), {"lazy": lazy}, world=world)
    assert not run.failures
    model, optimizer = make("adam")
    plain_steps(model, optimizer, list(range(world)), range(4))
    for parameters, state in results:
        assert_alike([parameters], values(model), 1e-9)
        assert_same_state(state, optimizer.state_dict())


def loads_without_the_first(place: Place, address: str, folder: str, site: str) -> list[Tensor]:
    """Worker 0 leaves; the others go back to what all have saved, and make two steps of their own."""
    model, optimizer = make("adam")
    with served_worker(address, place.rank, site=site_of(place.rank) if site else ""):
        session = atoll.join(config())
    with session:
        session.prepare(model, optimizer)
        for step in range(4):
            if step == 2:
                session.save(folder)
            optimizer.zero_grad()
            loss_of(model, share(place.rank, step)).backward()
            optimizer.step()
        if session.rank == 0:
            session._leaving.leave()
            return []
        session.barrier()
        session.load(folder)
        for step in range(2, 4):
            optimizer.zero_grad()
            loss_of(model, share(place.rank, step)).backward()
            optimizer.step()
    return values(model)


@pytest.mark.parametrize("sites", ["sites", ""])
def test_the_next_worker_sets_up_again_when_the_first_has_gone(
    pool: WorkerPool, tmp_path: Path, sites: str
) -> None:
    with served(3) if sites else ServedRun(3, shards=2) as run:
        pool.submit(loads_without_the_first, run.address, str(tmp_path / "saved"), sites, world=3)
        model, optimizer = make("adam")
        plain_steps(model, optimizer, [0, 1, 2], range(2))
        plain_steps(model, optimizer, [1, 2], range(2, 4))
        results = pool.collect()
    assert not run.failures
    assert_alike(results[1:], values(model), 1e-9)


# -- meetings ----------------------------------------------------------------------------------------------


def meets(place: Place, address: str) -> tuple[list[Any], float, list[int], bool]:
    with joined(address, place.rank) as session:  # before anything is prepared
        everyone = session.gather({"rank": session.rank, "text": "x" * session.rank})
        mean = session.reduce(float(session.rank), weight=1.0 + session.rank)
        tensors = session.gather(torch.arange(session.rank))
        return everyone, mean, [len(each) for each in tensors], session.is_main


def test_meetings_gather_all_sites_in_order_of_rank(pool: WorkerPool) -> None:
    with served(4) as run:
        results = pool.run(meets, run.address, world=4)
    assert not run.failures
    for rank, (everyone, mean, lengths, is_main) in enumerate(results):
        assert everyone == [{"rank": each, "text": "x" * each} for each in range(4)]
        assert mean == pytest.approx(sum(each * (1 + each) for each in range(4)) / 10)
        assert lengths == [0, 1, 2, 3]
        assert is_main == (rank == 0)


# -- asp and ssp between sites -----------------------------------------------------------------------------


def batches(session: Any, batch_size: int) -> tuple[Any, Any]:
    """A sampler, and its loader's (indices, inputs)."""
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs)
    sampler = session.sampler(data, seed=3)
    return sampler, torch.utils.data.DataLoader(data, batch_size=batch_size, sampler=sampler)


def consumes(
    place: Place, address: str, consistency: str, lazy: bool, epochs: int
) -> tuple[list[int], list[int]]:
    """The indices that this worker trained on, and after each epoch how many all did."""
    model, optimizer = make()
    seen: list[int] = []
    counts = []
    with joined(address, place.rank, consistency, lazy=lazy) as session:
        session.prepare(model, optimizer)
        sampler, loader = batches(session, 3)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            before = len(seen)
            for indices, x in loader:
                optimizer.zero_grad()
                loss_of(model, x).backward()
                seen += indices.tolist()
                optimizer.step()
            counts.append(int(session.reduce(float(len(seen) - before), "sum")))
    return seen, counts


@pytest.mark.parametrize(("consistency", "lazy"), [("asp", False), ("ssp", True)])
def test_each_sample_of_an_epoch_counts_once(
    pool: WorkerPool, tmp_path: Path, consistency: str, lazy: bool
) -> None:
    """A site's workers have unlike numbers of batches, and meet after each epoch."""
    with served(4, shards=2, folder=tmp_path) as run:
        results = pool.run(consumes, run.address, consistency, lazy, 3, world=4)
        wait_for(lambda: len(epochs(tmp_path, "over")) == 3, "the hub to say that the epochs are over", 10)
    assert not run.failures
    assert Counter(i for seen, _ in results for i in seen) == Counter(dict.fromkeys(range(SAMPLES), 3))
    assert len({tuple(counts) for _, counts in results}) == 1
    assert sum(results[0][1]) == 3 * SAMPLES


def epochs(folder: Path, choice: str) -> list[str]:
    """The epochs that have begun, or are over."""
    lines = (folder / "decisions.jsonl").read_text().splitlines()
    return [each["what"] for each in map(json.loads, lines) if each["choice"] == choice]


def outlives(place: Place, address: str, folder: str, dies_after: int) -> str:
    """Epochs until the test has had enough; each batch is noted before it is committed. Rank 2 dies, without
    a word, after some iterations where `dies_after` is not 0. The line of the error that ends it."""
    model, optimizer = make()
    made = 0
    session = joined(address, place.rank, "asp")
    try:
        session.prepare(model, optimizer)
        sampler, loader = batches(session, 2)
        with (Path(folder) / str(place.rank)).open("w", buffering=1) as notes:
            for epoch in range(1000):
                sampler.set_epoch(epoch)
                for indices, x in loader:
                    if place.rank == 2 and made == dies_after > 0:
                        session._runtime.member.hub.close()
                        return "it dies"
                    time.sleep(0.02)
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    print(json.dumps(indices.tolist()), file=notes)
                    optimizer.step()
                    made += 1
                if (Path(folder) / "enough").exists():
                    session.close()
                    return ""
    except AtollError as error:
        session._leaving.leave()  # else its heartbeats would go on for as long as the pool
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nobody has had enough")


def noted(folder: Path, rank: int) -> list[list[int]]:
    path = folder / str(rank)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_the_fence(tmp_path: Path, choice: str) -> str:
    """Let the others go on for some epochs after it, and then end; the hub's reason."""
    folder = tmp_path / "served"

    def fenced() -> list[str]:
        return [each["reason"] for each in decisions(folder, "fenced") if each["choice"].startswith(choice)]

    wait_for(fenced, f"{choice} to be fenced", 20)
    enough = len(epochs(folder, "begun")) + 1
    wait_for(lambda: len(epochs(folder, "over")) >= enough, "the epochs to be over", 20)
    (tmp_path / "enough").touch()
    return fenced()[0]


def assert_each_counts_once(tmp_path: Path, counted: dict[int, int]) -> None:
    """Of all epochs that were begun. `counted` has how many iterations count of each rank that has ended."""
    folder = tmp_path / "served"
    wait_for(lambda: set(epochs(folder, "begun")) == set(epochs(folder, "over")), "all epochs to be over", 10)
    found = Counter(
        i for rank in range(3) for batch in noted(tmp_path, rank)[: counted.get(rank)] for i in batch
    )
    assert found == Counter(dict.fromkeys(range(SAMPLES), len(epochs(folder, "begun"))))


def test_a_worker_that_dies_is_left_out_by_its_site_and_its_lease_returns(
    pool: WorkerPool, tmp_path: Path
) -> None:
    with served(3, folder=tmp_path / "served", **QUICK) as run:
        pool.submit(outlives, run.address, str(tmp_path), 2, world=3)
        reason = wait_for_the_fence(tmp_path, "worker 2,")
        assert pool.collect() == ["", "", "it dies"]
        assert_each_counts_once(tmp_path, {2: 2})
    assert not run.failures
    assert reason.startswith("2 iterations of it count; ")
    assert "; 0 samples" not in reason


SLACK = 2


def races(place: Place, address: str, folder: str, steps: int) -> tuple[list[int], list[float]]:
    """By how many iterations this site was ahead of the other whenever it began one; worker 0's is slow. And
    the staleness that the shards measured."""
    notes = [Path(folder) / str(rank) for rank in range(place.world)]
    model, optimizer = make()
    ahead, staleness = [], []
    with joined(address, place.rank, "ssp", slack=SLACK) as session:
        session.prepare(model, optimizer)
        for step in range(steps):
            ahead.append(step - min(int(note.read_text()) for note in notes))
            optimizer.zero_grad()
            loss_of(model, share(place.rank, step)).backward()
            if place.rank == 0:
                time.sleep(0.04)
            note = notes[place.rank].with_suffix(".new")
            note.write_text(str(step + 1))
            note.replace(notes[place.rank])
            optimizer.step()
            staleness.append(session._runtime.member.staleness)
    return ahead, staleness


def test_ssp_keeps_sites_within_the_slack(pool: WorkerPool, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).write_text("0")
    with served(3, shards=2) as run:
        slow, fast, beside = pool.run(races, run.address, str(tmp_path), 15, world=3)
    assert not run.failures
    assert max(fast[0]) == SLACK
    assert max(slow[0]) <= 1  # the workers of a site go together, and each notes before it commits
    assert max(beside[0]) <= 1
    assert slow[1] == beside[1]  # a site's contribution is one
    assert max(slow[1]) > 0


def meets_with_the_newest(place: Place, address: str, path: str) -> tuple[float, float, float]:
    """The sites make unlike numbers of steps; the loss before they meet, then, and as saved."""
    model, optimizer = make()
    with joined(address, place.rank, "asp") as session:
        session.prepare(model, optimizer)
        for step in range(12 if place.rank % 2 else 3):
            loss_of(model, share(place.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = loss_of(model, share(0, 99)).item()
        session.barrier()
        after = loss_of(model, share(0, 99)).item()
        session.save(path)
        for step in range(2):
            loss_of(model, share(place.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.load(path)
        return before, after, loss_of(model, share(0, 99)).item()


def test_after_meeting_all_sites_have_the_newest_parameters(pool: WorkerPool, tmp_path: Path) -> None:
    with served(4, shards=2) as run:
        seen = pool.run(meets_with_the_newest, run.address, str(tmp_path / "saved"), world=4)
    assert not run.failures
    assert seen[0][0] == seen[2][0] != seen[1][0] == seen[3][0]
    assert len({each[1:] for each in seen}) == 1
    assert seen[0][1] == seen[0][2]


# -- deaths ------------------------------------------------------------------------------------------------


def dies(place: Place, address: str, steps: int, dying: int) -> list[Tensor]:
    """Under bsp; one worker is gone, without a word, before it contributes to iteration 2."""
    model, optimizer = make()
    session = joined(address, place.rank)
    session.prepare(model, optimizer)
    for step in range(steps):
        if place.rank == dying and step == 2:
            session._runtime.member.hub.close()
            return values(model)
        optimizer.zero_grad()
        loss_of(model, share(place.rank, step)).backward()
        optimizer.step()
    session.close()
    return values(model)


@pytest.mark.parametrize("dying", [0, 1])  # of two at its site; alone at its site
def test_bsp_goes_on_without_a_worker_and_without_a_site_that_has_none_left(
    pool: WorkerPool, dying: int
) -> None:
    left = [rank for rank in range(3) if rank != dying]
    model, optimizer = make()
    with served(3, **QUICK) as run:
        pool.submit(dies, run.address, 4, dying, world=3)
        plain_steps(model, optimizer, [0, 1, 2], range(2))
        plain_steps(model, optimizer, left, range(2, 4))
        results = pool.collect()
    assert not run.failures
    assert_alike([results[rank] for rank in left], values(model))


def test_a_site_that_dies_ends_its_workers_and_the_other_finishes_the_epoch(
    pool: WorkerPool, tmp_path: Path
) -> None:
    folder = tmp_path / "served"
    with served(3, folder=folder, **QUICK) as run:
        pool.submit(outlives, run.address, str(tmp_path), 0, world=3)
        wait_for(lambda: len(noted(tmp_path, 1)) >= 3, "some iterations", 20)
        run.stop_site("berlin")
        reason = wait_for_the_fence(tmp_path, "site 'berlin'")
        first, lost, third = pool.collect()
        assert_each_counts_once(tmp_path, {1: int(reason.split()[0])})
    assert not run.failures
    assert (first, third) == ("", "")
    assert one_line(lost).startswith("PeerLostError: worker 1 lost the shard of site 'berlin' at tcp://")
    assert "refused: site 'berlin' has ended, and does not come back; the others go on" in lost
    (died,) = decisions(folder, "site died")
    assert "silent" in died["reason"]


# -- mistakes and deadlines --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("rome", "there is no site 'rome'; set ATOLL_SITE to one of: paris, berlin"),
        ("", "this worker names no site; set ATOLL_SITE to one of: paris, berlin"),
    ],
)
def test_a_worker_of_no_known_site_is_refused_with_one_line(site: str, said: str) -> None:
    with served(2) as run, served_worker(run.address, 0, site=site):
        with pytest.raises(UserError) as caught:
            atoll.join(config())
        assert one_line(str(caught.value)) == f"hub at {run.address} refused: {said}"


def test_a_worker_of_a_site_in_a_run_without_is_refused() -> None:
    with ServedRun(1) as run, served_worker(run.address, 0, site="paris"):
        with pytest.raises(
            UserError, match="the run has no sites, and this worker is of site 'paris'"
        ) as caught:
            atoll.join(config())
        one_line(str(caught.value))


def test_shards_of_wrong_sites_are_refused_with_one_line(tmp_path: Path) -> None:
    with served(2, folder=tmp_path) as run:
        wait_for(lambda: len(decisions(tmp_path, "site joined")) == 2, "the sites", 20)
        for site, said in (
            ("paris", "site 'paris' has a shard already, at tcp://127.0.0.1:"),
            ("rome", "there is no site 'rome': the run has paris, berlin"),
        ):
            with pytest.raises(UserError) as caught:
                serve_site(ServerOptions(hub=run.address, site=site, run=RUN, timeout=10.0))
            assert f"hub at {run.address} refused: {said}" in one_line(str(caught.value))
    with ServedRun(1) as alone, pytest.raises(UserError, match="the run has no sites") as caught:
        serve_site(ServerOptions(hub=alone.address, site="paris", run=RUN, timeout=10.0))
    one_line(str(caught.value))


def stays_away(place: Place, address: str, timeout: float) -> str:
    """Worker 1 goes on only when worker 0 has given up."""
    assert place.store is not None
    model, optimizer = make()
    try:
        with joined(address, place.rank) as session:
            session.prepare(model, optimizer)
            session._runtime.member.shards.timeout = timeout  # joining on a busy machine may take longer
            if place.rank == 1:
                place.store.wait(["given up"])
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, share(place.rank, step)).backward()
                optimizer.step()
    except AtollError as error:
        place.store.set("given up", "1")
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_worker_s_deadline_names_the_site_that_is_waited_for(pool: WorkerPool) -> None:
    with served(2) as run:
        first, second = pool.run(stays_away, run.address, 3.0, world=2)
    assert one_line(first).startswith("DeadlineError: worker 0 waited ")
    for part in (
        ": the shard of site 'paris' at tcp://127.0.0.1:",
        " waits for global shard 0 at tcp://127.0.0.1:",
        "which waits for site 'berlin', to commit iteration 0, on the mean of iteration 0 (for ",
        "deadline sync.timeout, 3 s",
    ):
        assert part in first
    assert second == ""  # the other one goes on


def test_a_site_s_own_deadline_names_the_global_shard(pool: WorkerPool) -> None:
    with served(2, site_timeout=2.0) as run:
        first, second = pool.run(stays_away, run.address, 20.0, world=2)
    said = one_line(first)
    assert said.startswith("UserError: the shard of site 'paris' at tcp://127.0.0.1:")
    for part in (
        ": the shard of site 'paris' cannot go on: site 'paris' waited ",
        " s for the mean of iteration 0: global shard 0 at tcp://127.0.0.1:",
        " waits for site 'berlin', to commit iteration 0 (deadline --timeout, 2 s",
    ):
        assert part in said
    assert [str(failure) for failure in run.failures] == [said.partition("cannot go on: ")[2]]
    assert second == ""


def edits_unlike(place: Place, address: str) -> str:
    model, optimizer = make()
    try:
        with joined(address, place.rank) as session:
            session.prepare(model, optimizer)
            loss_of(model, share(place.rank, 0)).backward()
            assert model.first.weight.grad is not None
            model.first.weight.grad.mul_(2.0 + place.rank)
            optimizer.step()
    except AtollError as error:
        return str(error)
    return ""


def steps_unlike(place: Place, address: str) -> str:
    model, optimizer = make()
    try:
        with joined(address, place.rank) as session:
            session.prepare(model, optimizer)
            optimizer.param_groups[0]["lr"] = 0.25 * (1 + place.rank)
            for step in range(3):
                loss_of(model, share(place.rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except AtollError as error:
        return str(error)
    return ""


def test_sites_that_step_with_other_hyperparameters_end_by_name(pool: WorkerPool) -> None:
    with served(2) as run:
        said = pool.run(steps_unlike, run.address, world=2)
    for line in said:
        assert re.search(r"site '\w+' steps with lr 0.25, site '\w+' with lr 0.5 at step 0", one_line(line))


def test_sites_that_would_step_unlike_are_named(pool: WorkerPool) -> None:
    with served(2) as run:
        said = pool.run(edits_unlike, run.address, world=2)
    (refused,) = [each for each in said if each]  # the other site goes on alone
    assert re.search(r": global shard 0 at \S+: site '", one_line(refused))
    assert (
        "would step iteration 0 differently: they have made different gradients of the same mean" in refused
    )
