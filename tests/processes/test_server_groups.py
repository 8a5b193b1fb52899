"""Contributors with several members at real shards: whoever speaks for a group is answered, what its members
send twice counts once, and each may send and fetch its share of every chunk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from shard_cluster import DEADLINE, Peer, Run, Worker, gradients, mean_of
from torch import Tensor

from atoll.net.endpoint import Server
from atoll.server import peers as peers_module
from atoll.server.journal import Folder, Journal
from atoll.server.model import CONTRIBUTION
from atoll.server.recovery import encode_image, find
from atoll.server.shard import Shard
from atoll.wire import messages as m

pytestmark = pytest.mark.quick


def settings(run: Run, consistency: str) -> dict[str, Any]:
    return {} if consistency == "bsp" else {"hyperparameters": run.model.hyperparameters()}


def heard_everywhere(*workers: Worker) -> None:
    for worker in workers:
        for shard in range(worker.model.shards):
            worker.heard(shard)


def at_rest(worker: Worker) -> None:
    """Return when no shard steps anything that this worker knows of."""
    for shard in range(worker.model.shards):
        worker.send(
            shard, m.PullState(incarnation=worker.incarnation)
        )  # answered between two lines of the log
        worker.expect(shard, m.StateEnd)


def fence(hub: Peer, *workers: Worker) -> None:
    for worker in workers:
        hub.send(0, m.Fence(worker=worker.rank, incarnation=worker.incarnation))
        hub.expect(0, m.Fenced)


def whole(runs: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    """Chunks from their runs, by share."""
    return {chunk: torch.cat([run[chunk] for run in runs]) for chunk in runs[0]}


# -- who speaks for a group --------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["part of its push", "its push", "its commit", "its commit counts"])
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_leader_dies_after_and_the_next_says_it_again(
    start: Callable[..., Run], consistency: str, moment: str
) -> None:
    run = start(2, 2, consistency=consistency)
    (leader, other), more = run.workers, settings(run, consistency)
    following = run.again(0, 1, member=3)

    def other_contributes() -> None:
        if consistency == "bsp":
            other.push(0, gradients(1))
            other.commit(0, 3.0, grouping=7)

    if moment == "part of its push":
        leader.push_chunk(1, run.model.held(1)[0], 0, gradients(0))
    else:
        leader.push(0, gradients(0))
    if "commit" in moment:
        leader.commit(0, 1.0, grouping=5, **more)
    if "counts" in moment:
        other_contributes()
        leader.expect(0, m.Committed)
    heard_everywhere(leader)
    leader.close()
    following.push(0, gradients(0))
    following.commit(0, 1.0, grouping=5, **more)
    if "counts" not in moment:
        other_contributes()
    told = m.Committed(iteration=0, workers=[0, 1], grouping=5)
    assert following.expect(0, m.Committed)[0] == told
    run.workers = [following, other]
    if consistency == "bsp":
        for worker in run.workers:
            worker.means(0)
            worker.say_step(0)
        run.model.step_plain(mean_of([gradients(0), gradients(1)], [1.0, 3.0]))
    else:
        run.model.step_plain(gradients(0))
    following.ask(1)
    following.assert_has(following.parameters(1))
    following.commit(0, 1.0, **more)  # once more, after the step
    assert following.expect(0, m.Committed)[0] == told
    if consistency == "bsp":
        other.ask(1)
        other.parameters(1)
        run.iterate(1)


def test_the_logs_words_go_to_who_spoke_last(start: Callable[..., Run]) -> None:
    run = start(1, 2)
    (first, other), second = run.workers, run.again(0, 1, member=1)
    first.push(0, gradients(0))
    first.commit(0)
    second.push(0, gradients(0))  # speaks to the shard, not to the log
    second.heard()
    other.push(0, gradients(1))
    other.commit(0)
    first.expect(0, m.Committed)
    second.heard()
    assert not second.come[0][m.Committed]
    second.say_step(0)
    second.send(0, m.Meet(incarnation=1, number=0, what="x"), b"part")
    other.send(0, m.Meet(incarnation=2, number=0, what="x"), b"")
    second.expect(0, m.Met)
    first.send(0, m.Meet(incarnation=1, number=0, what="x"), b"part")  # it takes over, and asks again
    assert first.expect(0, m.Met)[0].workers == [0, 1]


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
def test_an_answer_goes_to_the_member_that_asked_whoever_spoke_since(
    start: Callable[..., Run], consistency: str
) -> None:
    """A group meets while its contribution is on its way from another member, on a connection of its own."""
    run = start(1, 2, consistency=consistency)
    (meets, other), commits = run.workers, run.again(0, 1, member=1)
    more = settings(run, consistency)
    meets.send(0, m.Meet(incarnation=1, number=0, what="x"), b"part")
    meets.heard()
    commits.commit(0, **more)  # it is not staged yet, so that nothing is answered
    commits.heard()
    other.send(0, m.Meet(incarnation=2, number=0, what="x"), b"")
    assert meets.expect(0, m.Met)[0].workers == [0, 1]
    meets.send(0, m.Meet(incarnation=1, number=1, what="y"), b"part")  # the next call, and it spoke last
    meets.heard()
    commits.push(0, gradients(0))
    if consistency == "bsp":
        other.push(0, gradients(0))
        other.commit(0)
    assert commits.expect(0, m.Committed)[0].iteration == 0
    other.send(0, m.Meet(incarnation=2, number=1, what="y"), b"")
    assert meets.expect(0, m.Met)[0].number == 1
    heard_everywhere(meets, commits)
    assert not meets.come[0][m.Committed]
    assert not commits.come[0][m.Met]


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("last", [0, 1])
def test_all_members_that_ask_one_thing_are_answered(
    start: Callable[..., Run], consistency: str, last: int
) -> None:
    """The group's ring broke, another member commits, and what the one before it had sent comes too."""
    run = start(1, 2, consistency=consistency)
    (first, other), second = run.workers, run.again(0, 1, member=1)
    members, more = [first, second], settings(run, consistency)
    for member in (members[1 - last], members[last]):
        member.commit(0, **more)
        member.heard()
    second.push(0, gradients(0))
    if consistency == "bsp":
        other.push(0, gradients(0))
        other.commit(0)
    for member in members:
        assert member.expect(0, m.Committed)[0].iteration == 0
    for member in (members[1 - last], members[last]):
        member.send(0, m.Meet(incarnation=1, number=0, what="x"), b"part")
        member.heard()
    other.send(0, m.Meet(incarnation=2, number=0, what="x"), b"")
    for member in members:
        assert member.expect(0, m.Met)[0].workers == [0, 1]
    first.commit(0, **more)  # late, once all is answered
    assert first.expect(0, m.Committed)[0].iteration == 0
    heard_everywhere(second)
    assert not second.come[0][m.Committed]


def test_under_ssp_nobody_waits_for_a_group_in_a_meeting_whose_contribution_comes_after(
    start: Callable[..., Run],
) -> None:
    run = start(1, 2, consistency="ssp", slack=0)
    (meets, other), commits = run.workers, run.again(0, 1, member=1)
    more = settings(run, "ssp")
    meets.send(0, m.Meet(incarnation=1, number=0, what="x"), b"part")
    meets.heard()
    commits.push(0, gradients(0))
    commits.commit(0, **more)
    commits.expect(0, m.Committed)
    for iteration in range(4):
        other.push(iteration, gradients(iteration))
        other.commit(iteration, **more)
        other.ask(iteration + 1)
        other.parameters()
    other.send(0, m.Meet(incarnation=2, number=0, what="x"), b"")
    meets.expect(0, m.Met)
    for iteration in (4, 5):  # now the group is waited for
        other.push(iteration, gradients(iteration))
        other.commit(iteration, **more)
        other.ask(iteration + 1)
    other.heard()
    assert not other.come[0][m.Parameters]


def test_a_state_that_a_dead_speaker_was_asked_for_is_asked_of_the_next(start: Callable[..., Run]) -> None:
    run = start(1, 1, consistency="asp")
    (leader,), following = run.workers, run.again(0, 1, member=1)
    late = run.again(7, 20)
    late.send(0, m.Arrive(incarnation=20))
    late.send(0, m.WantState(iteration=0))
    assert leader.expect(0, m.WantState)[0].worker == 7
    leader.close()
    following.push(0, gradients(0))
    following.commit(0, hyperparameters=run.model.hyperparameters())
    wanted, _ = following.expect(0, m.WantState)
    give = m.GiveState(worker=wanted.worker, life=wanted.life, meeting=3, members=[0, 7])
    following.send(0, give, b"state")
    found, payload = late.expect(0, m.GiveState)
    assert found == give
    assert payload is not None
    assert bytes(payload) == b"state"


def test_a_group_is_lost_when_all_its_members_are(start: Callable[..., Run]) -> None:
    run = start(1, 1)
    hub, (first,) = run.hub(), run.workers
    second = run.again(0, 1, member=1)

    def lost() -> bool:
        hub.send(0, m.Look(worker=0, incarnation=1))
        return hub.expect(0, m.Looked)[0].lost

    def look_until(done: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < until
            assert not lost()

    assert not lost()
    first.close()
    third = run.again(0, 1, member=2)
    third.close()
    known = run.cluster.shards[0]._peers
    look_until(lambda: len(known.members(0, 1)) == 1)
    assert not lost()
    second.close()
    until = time.monotonic() + DEADLINE
    while not lost():
        assert time.monotonic() < until


def test_connections_of_groups_that_are_no_more_make_room(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_MOST", 4)
    run = start(1, 1)

    def come(number: int) -> Worker:
        """As soon as there is room: the shard's side of a connection ends a little later than this one."""
        until = time.monotonic() + DEADLINE
        while True:
            try:
                return run.again(number, number + 100, member=number)
            except AssertionError:
                assert time.monotonic() < until, "there is no room"

    for number in range(1, 12):
        come(number).close()
    standing = [come(number) for number in range(20, 23)]
    with pytest.raises(AssertionError, match="4 peers are known, which is the most"):
        run.again(30, 200)
    assert len(standing) == 3


# -- shares ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("count", [2, 5])
def test_each_member_sends_and_fetches_its_share(
    start: Callable[..., Run], consistency: str, count: int
) -> None:
    """Also where a chunk has fewer elements than the group has members."""
    run = start(2, 1, consistency=consistency)
    members = [run.workers[0], *(run.again(0, 1, member) for member in range(1, count))]
    for iteration in range(2):
        for share, member in enumerate(members):
            member.push(iteration, gradients(iteration), pull=True, share=share, shares=count)
        speaker = members[iteration]
        heard_everywhere(*members)
        speaker.commit(iteration, **settings(run, consistency))
        assert speaker.expect(0, m.Committed)[0].iteration == iteration
        run.model.step_plain(gradients(iteration))
        if consistency == "bsp":
            found = [
                {
                    chunk: values
                    for chunk, (values, _) in member.means(iteration, ask=False, share=share).items()
                }
                for share, member in enumerate(members)
            ]
            for chunk, values in whole(found).items():
                assert torch.equal(values, run.model.flat(chunk, gradients(iteration)))
            speaker.say_step(iteration)
            for share, member in enumerate(members):
                member.ask(iteration + 1, share=share, shares=count)
        speaker.assert_has(whole([member.parameters(iteration + 1, i) for i, member in enumerate(members)]))


def test_shares_are_counted_anew_when_a_member_dies(start: Callable[..., Run]) -> None:
    run = start(2, 1, consistency="asp")
    first, second, third = members = [run.workers[0], run.again(0, 1, 1), run.again(0, 1, 2)]
    junk = gradients(99)
    first.push(0, junk, share=0, shares=3)
    second.push(0, junk, share=1, shares=3)
    heard_everywhere(first, second)
    first.push(0, gradients(0), share=0, shares=2)
    heard_everywhere(first)
    third.push(0, junk, share=2, shares=3)  # from before its death
    heard_everywhere(third)
    third.close()
    first.push(0, gradients(0), share=0, shares=2)  # again
    for shard in run.cluster.shards:
        assert shard.model is not None
        assert not shard.model.state.whole()
        assert len(shard.model._payloads) == len(shard.model.chunks)
    second.push(0, gradients(0), share=1, shares=2)
    for late in (junk, gradients(0)):
        second.push(0, late, share=1, shares=2)
        second.push(0, late, share=2, shares=3)
        second.push(0, late)
    heard_everywhere(second)
    for shard in run.cluster.shards:
        assert shard.model is not None
        assert shard.model.state.whole() == [(0, 1, 0)]
        assert len(shard.model._payloads) == len(shard.model.chunks)
    second.commit(0, hyperparameters=run.model.hyperparameters())
    run.model.step_plain(gradients(0))
    second.ask(1)
    second.assert_has(second.parameters(1))
    at_rest(second)
    assert all(shard.model is not None and not shard.model._payloads for shard in run.cluster.shards)
    assert len(members) == 3


def test_several_members_wait_for_their_answers_at_once(start: Callable[..., Run]) -> None:
    run = start(2, 2)
    (first, other), second = run.workers, run.again(0, 1, member=1)
    first.push(0, gradients(0))
    first.commit(0)
    for share, member in enumerate((first, second)):
        for shard in range(2):
            member.send(shard, m.PullMean(incarnation=1, iteration=0, share=share, shares=2))
        member.ask(1, share=share, shares=2)
    heard_everywhere(first, second)
    other.push(0, gradients(1))
    other.commit(0)
    other.means(0)
    mean = mean_of([gradients(0), gradients(1)], [1.0, 1.0])
    means = [first.means(0, ask=False, share=0), second.means(0, ask=False, share=1)]
    for chunk in run.model.chunks:
        assert torch.equal(torch.cat([each[chunk][0] for each in means]), run.model.flat(chunk, mean))
    other.say_step(0)
    second.say_step(0)
    run.model.step_plain(mean)
    first.assert_has(whole([first.parameters(1, 0), second.parameters(1, 1)]))
    for member in (first, second):
        for shard in range(2):
            member.send(shard, m.Ready(digest="d", number=1))
            member.send(shard, m.PullState(incarnation=1))
    for member in (first, second):
        for shard in range(2):
            member.expect(shard, m.Ready)
            member.expect(shard, m.StateEnd)


def test_shares_that_make_no_sense_are_refused(start: Callable[..., Run]) -> None:
    run = start(1, 1)
    (worker,), model = run.workers, run.model
    chunk, slots = 0, run.model.slots(0)
    extent = model.flat(chunk).numel()
    start_, stop = m.run_of(extent, 1, 3)
    size = 4 * (stop - start_)
    push = m.Push(
        incarnation=1,
        iteration=0,
        chunk=chunk,
        chunks_in_all=len(model.chunks),
        present=bytes([1] * slots),
        share=1,
        shares=3,
    )
    replace = msgspec.structs.replace
    for bad, payload, said in [
        (replace(push, share=3), bytes(size), "share 3 of 3: shares are counted from 0 to 2"),
        (replace(push, shares=1), bytes(4 * extent), "share 1 of 1"),
        (replace(push, shares=4097), bytes(4), "4096"),
        (push, bytes(size + 4), f"chunk 0's share 1 of 3 takes {size} bytes, and {size + 4} came"),
        (push, bytes(4 * extent), f"takes {size} bytes"),
        (push, None, f"takes {size} bytes, and 0 came"),
        (m.Pull(incarnation=1, clock=0, share=2, shares=2), None, "share 2 of 2"),
        (m.PullMean(incarnation=1, iteration=0, share=1), None, "share 1 of 1"),
        (m.Pull(incarnation=1, clock=0, share=2, shares=5000), None, "4096"),
    ]:
        worker.send(0, bad, payload)
        assert said in worker.refused(), said
    worker.send(0, push, bytes(size))
    first, last = m.run_of(extent, 0, 3)
    worker.send(0, replace(push, share=0, present=bytes(slots)), bytes(4 * (last - first)))
    assert "gradients for other parameters" in worker.refused()
    run.iterate(0)


# -- groups take one another's place -----------------------------------------------------------------------


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("backwards", [False, True])
def test_groups_with_numbers_above_the_runs_workers_go_on(
    start: Callable[..., Run], consistency: str, backwards: bool
) -> None:
    run = start(2, 2, consistency=consistency)
    hub, old, more = run.hub(), list(run.workers), settings(run, consistency)
    for worker in old:
        worker.send(0, m.Meet(incarnation=worker.incarnation, number=0, what="x"))
    for worker in old:
        worker.expect(0, m.Met)
    if consistency == "bsp":
        run.iterate(0)
    else:
        for worker in old:
            worker.push(0, gradients(worker.rank))
            worker.commit(0, **more)
            worker.expect(0, m.Committed)
    groups = [[run.again(number, number + 50, member) for member in (0, 1)] for number in (2, 70_000)]
    for group in reversed(groups) if backwards else groups:
        for member in group:
            member.send(0, m.Arrive(incarnation=member.incarnation, meeting=1))
            member.send(0, m.Ready(digest="d", number=1))
            member.expect(0, m.Ready)  # the log has taken it in: the hub may fence the old ones
            member.ask(0)
    fence(hub, *(reversed(old) if backwards else old))
    for group in groups:
        values = [member.parameters(1 if consistency == "bsp" else None) for member in group]
        assert all(torch.equal(values[0][chunk], values[1][chunk]) for chunk in run.model.chunks)
    one, two = run.workers = [groups[0][1], groups[1][0]]
    # The next meeting waits for both.
    one.send(0, m.Meet(incarnation=one.incarnation, number=1, what="y"), b"1")
    one.heard()
    assert not one.come[0][m.Met]
    two.send(0, m.Meet(incarnation=two.incarnation, number=1, what="y"), b"2")
    assert one.expect(0, m.Met)[0].workers == [2, 70_000]
    if consistency == "bsp":
        for worker in run.workers:
            worker.push(1, gradients(worker.rank))
            worker.commit(1)
        for worker in run.workers:
            assert worker.expect(0, m.Committed)[0].workers == [2, 70_000]
            worker.means(1)
            worker.say_step(1)
            worker.ask(2)
        run.model.step_plain(mean_of([gradients(2), gradients(70_000)], [1.0, 1.0]))
        for worker in run.workers:
            worker.assert_has(worker.parameters(2))


# -- a shard's life after death ----------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_shard_that_is_started_again_has_the_shares_that_it_had(
    start: Callable[..., Run], tmp_path: Path, consistency: str
) -> None:
    folders = [Folder(tmp_path / str(shard), "test", shard) for shard in range(2)]
    journals = [Journal(folder, 0) for folder in folders]
    for journal in journals:
        journal.begin_segment(fresh=True)
    run = start(2, 1, consistency=consistency, journal=journals.__getitem__)
    (first,), second = run.workers, run.again(0, 1, member=1)
    first.push(0, gradients(0))
    first.commit(0, grouping=2, **settings(run, consistency))
    if consistency == "bsp":
        first.means(0)
    else:
        first.ask(1)
        first.parameters(1)
    at_rest(first)
    first.push(1, gradients(8), share=0, shares=3)
    heard_everywhere(first)
    second.push(1, gradients(1), share=1, shares=2)
    chunk = run.model.held(0)[0]
    first.push_chunk(0, chunk, 1, gradients(1), share=0, shares=2)  # whole; all others lack it
    heard_everywhere(first, second)
    run.close()
    for index, folder in enumerate(folders):
        folder.close()
        before, parts = run.cluster.shards[index].revival.image()
        found = find(Folder(tmp_path / str(index), "test", index))
        assert found is not None
        server = Server("tcp://127.0.0.1:0", None, limit=2**24, name="shard")
        again = Shard(index, server, run="test", workers=1)
        again.revival.recover(found)
        image, kept = again.revival.image()
        assert encode_image(image) == encode_image(before)
        assert [(part, bytes(payload)) for part, payload in kept] == [
            (part, bytes(payload)) for part, payload in parts
        ]
        contributions = [part for part, _ in kept if part.kind == CONTRIBUTION]
        assert len(contributions) == len(run.model.held(index))  # a run of each, or the whole
        server.close()
