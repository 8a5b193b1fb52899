"""Shards that are killed while a group's members each send and fetch their share: nothing of it is lost, and
none of it counts twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mortal_shards import DEADLINE, Kill, MortalRun
from shard_cluster import Model, gradients
from torch import Tensor

from atoll.net.endpoint import poll
from atoll.net.returning import ReturningLinks
from atoll.server.payloads import payload_of
from atoll.tensors.payload import tensor_of
from atoll.train.members.hub_client import HubClient
from atoll.wire import messages as m
from atoll.wire.messages import AnyMessage, decode_untrusted
from support.served import RUN

SHARDS, MEMBERS = 2, 3


class Member:
    """One of a group that is contributor 0; what it is sent, the latest of each."""

    def __init__(self, hub: HubClient, number: int, model: Model) -> None:
        assert hub.welcome is not None
        self.number, self.model, self.incarnation = number, model, hub.welcome.incarnation
        self.runs: dict[int, Tensor] = {}
        self.means: dict[int, Tensor] = {}
        self.committed = -1
        self.ready: set[int] = set()
        self.comes_back: dict[int, bool] = {}  # by shard, as it said last
        self.clock = 0  # whose parameters are waited for
        self.links = ReturningLinks(
            hub.shards(),
            None,
            hello=m.Hello(
                version=m.VERSION,
                run=RUN,
                role="worker",
                incarnation=self.incarnation,
                worker=0,
                member=number,
            ),
            limit=2**24,
            name=lambda shard: f"shard {shard}",
            ends=lambda shard: f"shard {shard} has ended",
            where=hub.where_shards_are,
            is_it=lambda shard, welcome: welcome.shard in (-1, shard),
        )

    def take(self, shard: int, header: bytes, payload: memoryview | None) -> None:
        message = decode_untrusted(header)
        if isinstance(message, m.Welcome):
            self.comes_back[shard] = message.comes_back
            self.links.handle_welcome(shard, message)
        elif isinstance(message, m.Parameters):
            assert payload is not None
            if message.clock == self.clock:
                assert message.share == self.number
                self.runs[message.chunk] = tensor_of(payload, torch.float32)
        elif isinstance(message, m.Mean):
            assert payload is not None
            self.means[message.chunk] = tensor_of(payload, torch.float32)
        elif isinstance(message, m.Committed):
            self.committed = message.iteration
        elif isinstance(message, m.Ready):
            self.ready.add(shard)
        else:
            assert isinstance(message, m.Ping), message

    def push(self, iteration: int, until: str | None = "contribution") -> None:
        for chunk, shard in self.model.shard_of.items():
            held = self.model.held(shard)
            flat = self.model.flat(chunk, gradients(iteration))
            start, stop = m.run_of(flat.numel(), self.number, MEMBERS)
            push = m.Push(
                incarnation=self.incarnation,
                iteration=iteration,
                chunk=chunk,
                chunks_in_all=len(held),
                present=bytes([1] * self.model.slots(chunk)),
                share=self.number,
                shares=MEMBERS,
                pull=until is not None and chunk == held[-1],
            )
            self.links.send(shard, push, payload_of(flat[start:stop]), until)

    def say(self, message: AnyMessage, until: str) -> None:
        self.links.send(0, message, until=until)

    def say_all(self, message: AnyMessage, until: str) -> None:
        for shard in range(SHARDS):
            self.links.send(shard, message, until=until)


class Group:
    """All members, on one thread; `bsp` is the consistency, else `asp`."""

    def __init__(self, address: str, bsp: bool) -> None:
        self.bsp, self.model = bsp, Model(lambda p: torch.optim.AdamW(p, lr=0.01), SHARDS)
        self.hub = HubClient(address, None, RUN, DEADLINE)
        self.hub.join()
        self.members = [Member(self.hub, number, self.model) for number in range(MEMBERS)]
        self.set_up()

    def wait(self, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < until, what
            ready = poll([client for each in self.members for client in each.links.clients], 0.05)
            for member in self.members:
                member.links.take(ready, member.take)
                member.links.check()

    def answered(self, what: str) -> None:
        for member in self.members:
            member.links.answered(what)

    def set_up(self) -> None:
        first = self.members[0]
        for shard in range(SHARDS):
            setup = self.model.setup(shard, workers=1, consistency="bsp" if self.bsp else "asp", number=1)
            first.links.send(shard, setup, until="set-up")
            for chunk in self.model.held(shard):
                payload = payload_of(self.model.flat(chunk))
                first.links.send(shard, m.SetChunk(chunk=chunk, number=1), payload, "set-up")
        self.ready()

    def ready(self) -> None:
        """All that was said so far has been taken in, and is kept."""
        for member in self.members:
            member.ready.clear()
            member.say_all(m.Ready(digest="d", number=1), "set-up")
        self.wait(lambda: all(len(each.ready) == SHARDS for each in self.members), "a word from all shards")
        self.answered("set-up")

    def iterate(self, iteration: int, meanwhile: Callable[[], None] | None = None) -> None:
        """One iteration, whose speaker is drawn by its number. `meanwhile` is called when all but the last
        member's shares are known to be at the shards; they are not sent again."""
        model, members, speaker = self.model, self.members, self.members[iteration % MEMBERS]
        for member in members:
            member.runs, member.means, member.clock = {}, {}, iteration + 1
        for member in members[:-1] if meanwhile else members:
            member.push(iteration, None if meanwhile else "contribution")
        if meanwhile:
            self.ready()
            meanwhile()
            members[-1].push(iteration)
            for member in members[:-1]:
                self.pull(member, iteration)
        settings = [] if self.bsp else model.hyperparameters()
        commit = m.Commit(
            incarnation=speaker.incarnation, iteration=iteration, weight=1.0, hyperparameters=settings
        )
        speaker.say(commit, "contribution")
        if self.bsp:
            self.wait(lambda: all(len(each.means) == len(model.chunks) for each in members), "the mean")
            self.wait(lambda: speaker.committed == iteration, "the log's word")
            self.answered("contribution")
            for chunk in model.chunks:
                mean = torch.cat([each.means[chunk] for each in members])
                assert torch.equal(mean, model.flat(chunk, gradients(iteration)))
            step = m.Step(
                incarnation=speaker.incarnation,
                iteration=iteration,
                scale=1.0,
                hyperparameters=model.hyperparameters(),
            )
            speaker.say(step, "step")
            for member in members:
                pull = m.Pull(
                    incarnation=member.incarnation, clock=iteration + 1, share=member.number, shares=MEMBERS
                )
                member.say_all(pull, "step")
        self.wait(lambda: all(len(each.runs) == len(model.chunks) for each in members), "the parameters")
        self.wait(lambda: speaker.committed == iteration, "the log's word")
        self.answered("contribution")
        self.answered("step")
        model.step_plain(gradients(iteration))
        for chunk in model.chunks:
            found = torch.cat([each.runs[chunk] for each in members])
            assert torch.equal(found, model.flat(chunk)), (iteration, chunk)

    def pull(self, member: Member, iteration: int) -> None:
        kind = m.PullMean(
            incarnation=member.incarnation, iteration=iteration, share=member.number, shares=MEMBERS
        )
        pull = m.Pull(
            incarnation=member.incarnation, clock=iteration + 1, share=member.number, shares=MEMBERS
        )
        member.say_all(kind if self.bsp else pull, "contribution")

    def close(self) -> None:
        for member in self.members:
            member.links.close()
        self.hub.close()


FEW = [Kill(0, "shard.staged", 1), Kill(1, "shard.stepped", 2)]
MORE = [Kill(1, "shard.journalled", 3), Kill(0, "shard.logged", 4), Kill(0, "shard.answered", 5)]


@pytest.mark.parametrize(
    ("bsp", "replicas", "kills"),
    [
        (True, 2, FEW),
        pytest.param(True, 1, FEW + MORE, marks=pytest.mark.soak),
        pytest.param(False, 1, FEW + MORE, marks=pytest.mark.soak),
        pytest.param(False, 2, FEW, marks=pytest.mark.soak),
    ],
)
def test_shares_outlive_the_shards(tmp_path: Path, bsp: bool, replicas: int, kills: list[Kill]) -> None:
    """With `replicas` 2 it is the standbys that have them: the shards have no directories."""
    torch.set_num_threads(1)
    with MortalRun(
        tmp_path, 1, SHARDS, kills, replicas=replicas, keeps=replicas == 1, snapshot_seconds=0.1
    ) as run:
        group = Group(run.address, bsp)
        try:
            for iteration in range(6):
                group.iterate(iteration)
            assert run.fired == kills

            def kill_all() -> None:
                for shard in range(SHARDS):
                    if replicas == 2:  # it was killed before: the second process is the primary now
                        run.wait_for_decisions(f"shard {shard}", 2, "its standby is in sync")
                        group.wait(
                            lambda shard=shard: all(each.comes_back[shard] for each in group.members),
                            "word that the shard comes back",
                        )
                    run.kill(shard, replicas - 1)

            group.iterate(6, kill_all)
            group.iterate(7)
            assert all(each.links.come_back for each in group.members)
        finally:
            group.close()
        assert not run.failures
