"""The devices of a node, two processes with a real ring between them, of which the leader has a CPU side that
says what the test says: what each of them takes, waits for and is told."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from peer_side import FakeSide, fake_session
from torch import nn
from torch.utils.data import DataLoader

from atoll.core.config import Config, Run, Sync
from atoll.core.errors import AtollError, ConfigError, GivenUpError, RunError
from atoll.core.memory import Memory
from atoll.train.api.place import Group, Place, Seat
from atoll.train.group.rounds import Ring
from atoll.train.sync.peersdevices import Devices, places_of
from atoll.train.sync.peersexchange import said_in
from atoll.wire.device import (
    Awake,
    CaptureAt,
    Captured,
    Contribute,
    Freed,
    LeftOut,
    Published,
    Release,
    Resumed,
    Returned,
    Want,
)
from support.pool import WorkerPool

pytestmark = pytest.mark.sampled

SAMPLES = (4, 2)  # of the two devices' batches


def config(stale_max: int = 1, timeout: str = "20s") -> Config:
    return Config(run=Run(strategy="peers"), sync=Sync(stale_max=stale_max, timeout=timeout))


def ring_of(place: Place, timeout: float) -> Ring:
    return Ring(Seat(replace(place, names=(0, 1))), torch.device("cpu"), timeout)


class Device:
    """One device's session with a small model."""

    def __init__(
        self, place: Place, settings: Config, late: bool = False, lent: bool = False, **side: Any
    ) -> None:
        self.rank = place.rank
        self.session, self.side = fake_session(settings, late, Devices(ring_of(place, 20.0)))
        for name, value in side.items():
            setattr(self.side, name, value)
        torch.manual_seed(place.rank)  # the leader's values count
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        memory = Memory(device="4KiB", chunk="4KiB", step="host") if lent else None
        self.session.prepare(self.model, self.optimizer, memory=memory)

    def lead(self, act: Callable[[FakeSide], None]) -> None:
        """What the CPU side is to say or do."""
        if self.rank == 0:
            act(self.side)

    def backward(self, scale: float = 1.0) -> None:
        self.model(scale * (1.0 + self.rank) * torch.ones(SAMPLES[self.rank], 2)).mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def values(self) -> set[float]:
        return {value for p in self.model.parameters() for value in p.flatten().tolist()}


@contextmanager
def device(
    place: Place, settings: Config, late: bool = False, lent: bool = False, **side: Any
) -> Iterator[Device]:
    made = Device(place, settings, late, lent, **side)
    try:
        yield made
    finally:
        made.session._leaving.leave()


def said_by(act: Callable[[], object]) -> str:
    """The error that `act` raises, as one line."""
    try:
        act()
    except AtollError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def steps(place: Place, lent: bool) -> dict[str, Any]:
    with device(place, config(), lent=lent) as node:
        session = node.session
        found: dict[str, Any] = {"who": (session.rank, session.world, session.is_main, session.group)}
        begun = [p.detach().clone() for p in node.model.parameters()]
        node.session._runtime.pace._seconds.extend(
            [0.25 * (1 + place.rank)] * 4
        )  # each device's, for a sample
        node.backward()
        found["mean"] = [p.grad.clone() for p in node.model.parameters() if p.grad is not None]
        node.lead(lambda side: side.publish(0, 1, values=3.0))
        node.optimizer.step()
        found["values"] = [node.values]
        # The buffer of the beginning is the CPU side's again when both are known to have copied the next.
        found["released"] = [[each.buffers for each in node.side.of(Release)]]
        node.lead(lambda side: side.publish(1, 2, values=5.0))
        node.step()
        found["values"].append(node.values)
        found["released"].append([each.buffers for each in node.side.of(Release)])
        found["handed"] = node.side.slot(0) if place.rank == 0 else None
        for iteration in (2, 3):  # the second one waits for room in the first one's slot
            node.lead(lambda side, at=iteration: side.publish(at, at, values=5.0))
            node.lead(lambda side, before=iteration - 1: side.later.append(Freed(before=before)))
            node.step()
        found["contributed"] = node.side.of(Contribute)
        alone = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        torch.nn.utils.vector_to_parameters(torch.cat([p.flatten() for p in begun]), alone.parameters())
        x = torch.cat([(1.0 + rank) * torch.ones(SAMPLES[rank], 2) for rank in range(2)])
        alone(x).mean().backward()  # six samples, each of the same weight
        found["alone"] = [p.grad for p in alone.parameters()]
    return found


@pytest.mark.check
@pytest.mark.parametrize("lent", [False, True], ids=["whole", "lent"])
def test_the_devices_mean_is_handed_over_once_and_all_take_the_same_parameters(
    pool: WorkerPool, lent: bool
) -> None:
    leader, other = pool.run(steps, lent, world=2)
    assert leader["who"] == (0, 4, True, Group(0, 3, 0, 2))
    assert other["who"] == (1, 4, False, Group(0, 3, 1, 2))
    for one, same, alone in zip(leader["mean"], other["mean"], leader["alone"], strict=True):
        assert torch.equal(one, same)
        assert torch.allclose(one, alone, atol=1e-6)
    said = leader["contributed"]
    assert [(each.iteration, each.samples, each.weight) for each in said] == [(k, 6.0, 6.0) for k in range(4)]
    assert other["contributed"] == []
    # The leader needs 1 s for its four samples and the other one 1 s for its two: 1 s for six.
    assert said_in(said[0].note).pace == pytest.approx(1.0 / 6)
    assert said_in(said[3].note).pace > 0
    handed = sorted(leader["handed"][leader["handed"] != 0].tolist())
    assert handed == sorted(v for g in leader["mean"] for v in g.flatten().tolist() if v)
    assert leader["values"] == other["values"] == [{3.0}, {5.0}]
    assert leader["released"] == [[], [[0]]]
    assert other["released"] == [[], []]


def waits(place: Place) -> list[str]:
    with device(place, config(stale_max=0, timeout="300ms")) as node:
        node.lead(lambda side: setattr(side, "holds_up", "node 2's contribution of iteration 0"))
        found = [said_by(node.step)]
        node.lead(lambda side: found.append(str([(each.iteration, each.least) for each in side.of(Want)])))
    return found


def test_all_wait_with_the_leader_and_get_its_error(pool: WorkerPool) -> None:
    (line, wanted), (same,) = pool.run(waits, world=2)
    assert line == same
    waited = r"DeadlineError: node 0 waited \d+\.\d s for the global iteration to be 1, before"
    assert re.match(waited, line), line
    assert line.endswith("; it waits for node 2's contribution of iteration 0 (deadline sync.timeout, 0.3 s)")
    assert wanted == "[(1, 1)]"


def loses_its_side(place: Place, ends_at: type) -> str:
    with device(place, config(), ends_at=ends_at) as node:

        def go_on() -> None:
            for iteration in range(4):
                node.lead(lambda side, at=iteration: side.publish(at, at + 1))
                node.step()

        return said_by(go_on)


@pytest.mark.parametrize("ends_at", [Contribute, Release])
def test_all_devices_say_how_their_cpu_side_ended(pool: WorkerPool, ends_at: type) -> None:
    """Whatever the leader was sending then: it does not leave before it has told the others."""
    assert pool.run(loses_its_side, ends_at, world=2) == ["GivenUpError: it was killed"] * 2


def returns(place: Place, lent: bool) -> dict[str, Any]:
    """The others go on without the node, with the state that another one's script has at iteration 41."""
    with device(place, config(), lent=lent) as giver:
        giver.session._state.iteration = 41
        script = giver.session._state.capture(fixed=True)
    place = replace(place, store=torch.distributed.PrefixStore("again", place.store))
    with device(place, config(), lent=lent) as node:
        node.backward()

        def leave_out(side: FakeSide) -> None:
            side.say(Returned(incarnation=2, iteration=41, meeting=9, script=script))
            side.publish(40, 40, values=7.0)

        node.lead(leave_out)
        node.optimizer.step()  # what was computed counts nowhere
        found: dict[str, Any] = {"lost": len(node.side.of(Contribute))}
        if place.rank == 0:  # looks at the model alone, meanwhile, and the other one goes on to a meeting
            with torch.no_grad():
                node.model(torch.ones(1, 2))
            node.model.state_dict()
        node.session.barrier()
        node.lead(lambda side: side.publish(41, 41, values=7.0))
        node.step()
        found |= {
            "values": node.values,
            "at": node.session.iteration,
            "resumed": len(node.side.of(Resumed)),
            "iterations": [each.iteration for each in node.side.of(Contribute)],
            "meeting": node.session._runtime.member.next_meeting if node.session._runtime.member else -1,
        }
    return found


@pytest.mark.parametrize("lent", [False, True], ids=["whole", "lent"])
def test_a_node_that_was_left_out_goes_on_with_all_its_devices(pool: WorkerPool, lent: bool) -> None:
    leader, other = pool.run(returns, lent, world=2)
    assert (leader["lost"], leader["resumed"], leader["iterations"]) == (0, 1, [41])
    assert (other["lost"], other["resumed"], other["iterations"]) == (0, 0, [])
    for each in (leader, other):
        assert (each["values"], each["at"], each["meeting"]) == ({7.0}, 42, 10)


def returns_at_an_end(place: Place) -> list[int]:
    """The iterations of an epoch of three, at whose end the node hears that it is left out, and later that
    it is where the others begin an epoch with iteration 41."""
    sync, data = Sync(stale_max=8, timeout="20s", global_batch=6), torch.ones(18, 2)
    settings, made = Config(run=Run(strategy="peers"), sync=sync), list[int]()
    with device(place, settings) as giver:
        giver.session.batches(data)  # type: ignore[arg-type]
        giver.session._state.iteration = 41
        script = giver.session._state.capture(fixed=True)
    place = replace(place, store=torch.distributed.PrefixStore("again", place.store))
    with device(place, settings) as node:

        def leave_out(side: FakeSide) -> None:
            side.say(LeftOut())
            side.later = [
                Returned(incarnation=2, iteration=41, meeting=9, script=script),
                Published(buffer=side.free.pop(0), taken=41, through=41),
            ]

        batches: Any = node.session.batches(data)  # type: ignore[arg-type]
        for batch in node.session.epoch_of(DataLoader(data, batch_sampler=batches)):  # type: ignore[arg-type]
            made.append(at := node.session.iteration)
            if at in (2, 43):  # what is waited for at a loop's end
                node.lead(lambda side, at=at: side.publish(at + 1, at + 1))
            node.model(batch).mean().backward()
            node.optimizer.step()
            node.optimizer.zero_grad()
            if at == 2:
                node.lead(leave_out)
        node.session.barrier()
    return made


def test_all_devices_of_a_node_that_comes_back_at_an_epochs_end_go_on_with_the_others(
    pool: WorkerPool,
) -> None:
    assert pool.run(returns_at_an_end, world=2) == [[0, 1, 2, 41, 42, 43]] * 2


def is_left_out(place: Place) -> tuple[int, str, int]:
    """Before an iteration, and then in a meeting: how often the CPU side heard that the script is awake."""
    with device(place, config()) as node:
        node.lead(lambda side: side.say(LeftOut()))
        node.backward()
        awake = len(node.side.of(Awake))
        node.lead(lambda side: (setattr(side, "meets", False), side.say(LeftOut())))  # type: ignore[func-returns-value]
        line = said_by(node.session.barrier)
        return awake, line, len(node.side.of(Awake))


def test_devices_say_together_that_they_are_awake_and_not_in_a_meeting(pool: WorkerPool) -> None:
    leader, other = pool.run(is_left_out, world=2)
    assert (leader[0], leader[2], other[2]) == (1, 1, 0)
    for _, line, _ in (leader, other):
        assert line.startswith(
            "GivenUpError: node 0: the others went on without this node while it was in the"
        )


class Chatty(threading.Thread):
    """A CPU side that publishes all the time, whenever there is a buffer for it, while the script runs."""

    def __init__(self, side: FakeSide) -> None:
        super().__init__(daemon=True)
        self._side, self._over = side, threading.Event()

    def run(self) -> None:
        value = 10.0
        while not self._over.wait(0.0005):
            contributed = len(self._side.of(Contribute))
            if self._side.free:
                value += 1.0
                self._side.publish(contributed, contributed, values=value)
            self._side.say(Freed(before=contributed))

    def end(self) -> None:
        self._over.set()
        self.join(20.0)


def trains_beside_a_chatty_side(place: Place) -> list[list[float]]:
    with device(place, config(stale_max=3)) as node:
        draw, own = random.Random(7), random.Random(place.rank)
        chatty = Chatty(node.side) if place.rank == 0 else None
        if chatty is not None:
            chatty.start()
        seen = []
        try:
            for step in range(60):
                if step != node.session.iteration:
                    raise RunError(f"step {step} is iteration {node.session.iteration}")
                seen.append([step, *sorted(node.values)])
                time.sleep(own.choice((0.0, 0.0, 0.004)))
                node.step()
                match draw.randrange(6):
                    case 0:
                        node.session.barrier()
                    case 1:
                        node.session.gather(step)
                    case 2:
                        node.session._runtime.strategy.refresh()  # type: ignore[union-attr]
                    case 3 if own.random() < 0.5:
                        node.model.state_dict()
                seen.append([step, *sorted(node.values)])
        finally:
            if chatty is not None:
                chatty.end()
        return seen


def test_devices_never_train_on_other_parameters_than_one_another(pool: WorkerPool) -> None:
    """Whatever the CPU side publishes in whichever moment, and whatever the scripts do besides."""
    leader, other = pool.run(trains_beside_a_chatty_side, world=2)
    assert leader == other
    assert len({tuple(values) for _, *values in leader}) > 30  # they did take what was published


def comes_late(place: Place) -> dict[str, Any]:
    with device(place, config()) as member:
        member.lead(lambda side: side.say(CaptureAt(iteration=0)))
        member.backward()
        scripts = [each.script for each in member.side.of(Captured)]
        member.optimizer.step()
    place = replace(place, store=torch.distributed.PrefixStore("late", place.store))
    script = scripts[0] if scripts else b""
    with device(place, config(), late=True, first=5, script=script, frozen=2.0) as node:
        refused = said_by(node.backward)
        resumed = node.session.resume()
        node.optimizer.zero_grad()
        node.lead(lambda side: side.publish(5, 6, values=4.0))
        node.step()
        return {"captured": len(scripts), "refused": refused, "resumed": resumed, "values": node.values}


def test_a_node_of_several_devices_enters_a_run_under_way(pool: WorkerPool) -> None:
    leader, other = pool.run(comes_late, world=2)
    assert (leader["captured"], other["captured"]) == (1, 0)
    for each in (leader, other):
        assert each["refused"].startswith(
            "UserError: this node comes late: the run is under way; call session"
        )
        assert (each["resumed"], each["values"]) == (0, {4.0})


def mistakes(place: Place) -> dict[str, str]:
    found = {}
    with device(place, config(stale_max=2)) as node:
        node.step()
        node.backward(scale=float("nan") if place.rank == 1 else 1.0)
        found["nan"] = said_by(node.optimizer.step)
    place = replace(place, store=torch.distributed.PrefixStore("again", place.store))
    with device(place, config()) as node:
        found["calls"] = said_by(node.session.barrier if place.rank else node.step)
    return found


def test_what_a_device_may_not_do_is_said_in_a_line(pool: WorkerPool) -> None:
    leader, other = pool.run(mistakes, world=2)
    for each in (leader, other):
        assert each["nan"].startswith(
            "NonFiniteGradientError: iteration 1: the gradient of '1.weight' on worker 1"
        )
        assert "of its node, in" in each["calls"]
        assert each["calls"].endswith("all of a node's devices make the same calls in the same order")
    assert (
        "worker 0 is in the end of iteration 0's backward, and worker 1, of its node, in the barrier"
        in leader["calls"]
    )


def led(place: Place) -> list[Any]:
    devices = Devices(ring_of(place, 1.0))
    try:
        found: list[Any] = [devices.led(lambda: b"told", "a word", said=b"%d" % place.rank), devices.said]

        long = devices.led(lambda: bytes(300_000), "a long word")
        found.append(long == bytes(300_000))

        def fail() -> bytes:
            raise GivenUpError("the leader's own line")

        found.append(said_by(lambda: devices.led(fail, "another word")))
        if place.rank == 0:
            time.sleep(3.0)  # the leader is late
        found.append(said_by(lambda: devices.led(lambda: b"", "a third one")))
    finally:
        devices.close()
    return found


@pytest.mark.check
def test_a_leader_tells_all_or_is_waited_for_no_longer_than_its_time(pool: WorkerPool) -> None:
    leader, other = pool.run(led, world=2)
    for each in (leader, other):
        assert each[:4] == [b"told", [b"0", b"1"], True, "GivenUpError: the leader's own line"]
    assert other[4].startswith("GivenUpError: worker 1 waited 1.")
    assert " for worker 0 on a third one (deadline sync.timeout, 1 s" in other[4]


def launched(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("ATOLL_HUB", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_who_is_whose_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    store = torch.distributed.HashStore()
    settings = config()
    places = [Place(rank, 6, rank, store) for rank in range(6)]
    for place in places:
        assert places_of(settings, place) == (Place(), place)  # each is a node
    settings = settings.having(groups={"count": 2})
    inside, of_nodes = zip(*(places_of(settings, place) for place in places), strict=True)
    assert [(place.rank, place.world) for place in inside] == [(0, 3), (1, 3), (2, 3)] * 2
    assert [(place.rank, place.world) for place in of_nodes if place] == [(0, 2)] * 3 + [(1, 2)] * 3
    assert len({id(place.store) for place in inside}) == 6
    settings = settings.having(groups={"count": 4})
    with pytest.raises(ConfigError, match="6 workers cannot be 4 nodes with as many devices each"):
        places_of(settings, places[0])
    assert places_of(settings, Place())[0] == Place()  # alone
    launched(
        monkeypatch, ATOLL_HUB="tcp://127.0.0.1:1", RANK="3", WORLD_SIZE="4"
    )  # as `atoll run` starts one
    assert places_of(config(), None) == (Place(), None)


def test_a_nodes_devices_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(Place, "from_environment", lambda _timeout: Place(1, 4, 1, store))
    launched(monkeypatch, ATOLL_HUB="tcp://127.0.0.1:1", TORCHELASTIC_RUN_ID="job", LOCAL_WORLD_SIZE="2")
    with pytest.raises(ConfigError, match="a launch of 4 devices.* start torchrun with --nnodes 1 on each"):
        places_of(config(), None)
    launched(monkeypatch, TORCHELASTIC_RUN_ID="job", LOCAL_WORLD_SIZE="2")
    settings = config()
    settings = settings.having(groups={"count": 1})
    with pytest.raises(ConfigError, match="a node of 4 devices, of 4 workers in all, 2 of which are on this"):
        places_of(settings, None)
    settings = settings.having(groups={"count": 2})
    assert places_of(settings, None)[0].world == 2
