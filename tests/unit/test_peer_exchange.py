"""What a node's worker hands to its CPU side and takes from it, step by step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from peer_side import fake_session
from torch import nn
from torch.utils.data import DataLoader

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.core.errors import DeadlineError, GivenUpError, NonFiniteGradientError, PrepareError, UserError
from atoll.core.memory import Memory
from atoll.memory import planning
from atoll.memory.bandwidth import measure
from atoll.train.members import nodesmeeting as meetings
from atoll.train.sync import peersexchange as exchange
from atoll.train.sync.peersexchange import said_in
from atoll.wire.device import (
    NO_MORE,
    Awake,
    CaptureAt,
    Captured,
    Clip,
    Contribute,
    Freed,
    LeftOut,
    Meet,
    Members,
    NodeAt,
    Published,
    Release,
    Resumed,
    Returned,
    SetUp,
    Want,
    decode,
    encode,
)


def config(stale_max: int = 1, timeout: str = "200ms", nonfinite: str = "stop") -> Config:
    sync = Sync(stale_max=stale_max, timeout=timeout, nonfinite=nonfinite)  # type: ignore[arg-type]
    return Config(run=Run(strategy="peers"), sync=sync)


class Node:
    """A session with one small model."""

    memory: Memory | None = None  # each test runs without budgets and with them
    made: ClassVar[list[Node]] = []

    def __init__(
        self,
        settings: Config,
        late: bool = False,
        first: int = 0,
        script: bytes = b"",
        incarnation: int = 1,
    ) -> None:
        self.session, self.side = fake_session(settings, late)
        Node.made.append(self)
        self.side.first, self.side.script, self.side.incarnation = first, script, incarnation
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.before = [p.detach().clone() for p in self.model.parameters()]
        self.session.prepare(self.model, self.optimizer, memory=Node.memory)

    def backward(self, samples: int = 4, scale: float = 1.0) -> None:
        self.model(scale * torch.ones(samples, 2)).mean().backward()

    def backward_on(self, batch: torch.Tensor) -> None:
        self.model(batch).mean().backward()

    def train(self, batch: torch.Tensor) -> None:
        self.backward_on(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, samples: int = 4) -> Contribute:
        self.backward(samples)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.last()

    def last(self) -> Contribute:
        contribution: Contribute = self.side.of(Contribute)[-1]
        return contribution


RATES = measure(torch.device("cpu"), None, "")


@pytest.fixture(params=[None, "4KiB"], autouse=True, ids=["whole", "lent"])
def _budgets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ATOLL_POISON", "1")
    monkeypatch.setattr(planning, "measure", lambda *_: RATES)
    device = request.param
    memory = None if device is None else Memory(device=device, chunk=device, step="host")
    monkeypatch.setattr(Node, "memory", memory)
    yield
    while Node.made:
        Node.made.pop().session._leaving.leave()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(config())
    yield made
    made.session._leaving.leave()


def test_the_model_is_brought_with_its_values(node: Node) -> None:
    assert node.side.memory is not None
    (set_up,) = node.side.of(SetUp)
    assert (set_up.optimizer, set_up.iteration, set_up.slots) == ("torch.optim.sgd.SGD", 0, 3)
    assert set_up.hyperparameters[0]["momentum"] == 0.9
    brought = torch.cat(list(node.side.memory.buffer(0).values()))
    assert sorted(brought[brought != 0].tolist()) == sorted(
        torch.cat([p.flatten() for p in node.before]).tolist()
    )
    assert all(torch.equal(a, b) for a, b in zip(node.before, node.model.parameters(), strict=True))


def test_a_step_hands_the_nodes_own_gradients_over(node: Node) -> None:
    node.backward(samples=4)
    own = [p.grad.clone() for p in node.model.parameters() if p.grad is not None]
    node.optimizer.step()
    said = node.last()
    assert (said.iteration, said.taken, said.samples, said.weight, said.clip) == (0, 0, 4.0, 4.0, None)
    assert said.hyperparameters[0]["lr"] == 0.5
    assert [set(each) for each in said.present] == [{1}] * len(said.present)
    handed = node.side.slot(0)
    assert sorted(handed[handed != 0].tolist()) == sorted(v for g in own for v in g.flatten().tolist() if v)
    assert all(
        torch.equal(g, p.grad)
        for g, p in zip(own, node.model.parameters(), strict=True)
        if p.grad is not None
    )


def test_what_was_published_before_the_model_was_set_up_anew_is_of_no_use(node: Node) -> None:
    """Its buffers are of other memory: to give them back would let the CPU side write what is being read."""
    node.step()
    for value in (7.0, 8.0):  # both are on their way when the model is brought anew
        node.side.publish(1, 1, values=value)
    held = [p.detach().clone() for p in node.model.parameters()]
    (group,) = node.optimizer.param_groups
    settings = {key: value for key, value in group.items() if key != "params"}
    places = list(range(len(group["params"])))
    (prepared,) = node.session._state.prepared
    with prepared.stepper.loading():  # as for a checkpoint without a momentum
        node.optimizer.load_state_dict({"state": {}, "param_groups": [{**settings, "params": places}]})
    node.session._runtime.strategy.loaded()
    assert node.side.of(Release) == []
    assert all(torch.equal(a, b) for a, b in zip(held, node.model.parameters(), strict=True))


def test_what_has_no_gradient_is_zero_and_said_so(node: Node) -> None:
    node.step()
    node.side.publish(1, 1)
    node.model[0].requires_grad_(False)
    said = node.step()
    assert sorted(b for each in said.present for b in each) == [0, 0, 1, 1]
    named = dict(node.model.named_parameters())
    trained = {v for name in ("1.weight", "1.bias") for v in (named[name].grad or torch.zeros(0)).tolist()}
    assert node.side.slot(1).count_nonzero() <= 4
    assert trained == set()


def test_the_newest_parameters_are_taken_and_older_ones_given_back(node: Node) -> None:
    node.side.publish(0, 1, values=3.0)
    node.side.publish(1, 1, values=5.0)
    node.step()
    assert {v for p in node.model.parameters() for v in p.flatten().tolist()} == {5.0}
    assert sorted(b for release in node.side.of(Release) for b in release.buffers) == [0, 1]
    node.side.publish(2, 2, values=7.0)
    said = node.step()
    assert (said.iteration, said.taken) == (1, 1)
    assert {v for p in node.model.parameters() for v in p.flatten().tolist()} == {7.0}
    assert node.side.of(Want) == []


def test_it_waits_where_the_next_iteration_would_be_too_stale_and_says_for_what(node: Node) -> None:
    node.step()  # iteration 1 may begin at W = 0
    node.side.holds_up = "node 2's contribution of iteration 0"
    node.backward()
    with pytest.raises(DeadlineError) as caught:
        node.optimizer.step()
    waited = r"node 0 waited \d+\.\d s for the global iteration to be 1, before iteration 2; it is"
    assert re.match(waited, str(caught.value)), caught.value
    assert "it waits for node 2's contribution of iteration 0 (deadline sync.timeout, 0.2 s)" in str(
        caught.value
    )
    (want,) = node.side.of(Want)
    assert (want.iteration, want.least) == (2, 1)
    assert want.stand is not None
    assert str(want.stand.stand).startswith("at the gradients of step 1 (")


def test_it_gives_its_cpu_side_the_time_to_put_its_own_contribution_over_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "FRESH_SHARE", 1000.0)  # of a test's short iterations
    node = Node(config(stale_max=4))
    node.side.publish(0, 1)
    node.step()  # the first: how long an iteration takes is not known yet
    side, receive, came = node.side, node.side.receive, []

    def computed_after_a_while(timeout: float = 0.0) -> Any:
        if timeout > 0 and not came:
            came.append(timeout)
            side.publish(0, 2, values=7.0)
        return receive(timeout)

    monkeypatch.setattr(side, "receive", computed_after_a_while)
    node.step()
    assert came
    assert {v for p in node.model.parameters() for v in p.flatten().tolist()} == {7.0}
    assert side.of(Want) == []


def test_it_does_not_wait_for_an_overlay_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(config(stale_max=4))
    node.step()
    node.side.publish(0, 1, seconds=5.0)
    waited: list[float] = []
    receive = node.side.receive

    def noted(timeout: float = 0.0) -> Any:
        waited.append(timeout)
        return receive(timeout)

    monkeypatch.setattr(node.side, "receive", noted)
    node.step()
    assert waited
    assert not any(waited)


def test_without_staleness_each_step_waits_for_its_own_iteration() -> None:
    node = Node(config(stale_max=0))
    node.side.publish(1, 1, values=2.0)
    node.step()
    assert {v for p in node.model.parameters() for v in p.flatten().tolist()} == {2.0}
    node.session._leaving.leave()


def test_a_slot_is_written_again_when_it_is_free() -> None:
    node = Node(config(stale_max=1))
    for iteration in range(2):  # of three slots
        node.side.publish(iteration + 1, iteration + 1)
        node.step()
    node.side.publish(3, 3)
    if Node.memory is None:
        node.step()
    node.backward()
    with pytest.raises(DeadlineError, match="room for iteration 3, in the slot of iteration 0"):
        node.optimizer.step()  # gradients in chunks lie in their slot from the backward on
    if Node.memory is not None:
        assert node.last().iteration == 2
        return
    node.side.say(Freed(before=1))
    node.side.publish(4, 4)
    node.optimizer.step()
    assert node.last().iteration == 3
    node.session._leaving.leave()


def test_clipping_is_the_means_and_the_gradients_stay(node: Node) -> None:
    node.backward()
    own = [p.grad.clone() for p in node.model.parameters() if p.grad is not None]
    norm = node.session.clip_grad_norm_(1e-3)
    assert float(norm) == pytest.approx(float(torch.nn.utils.get_total_norm(own)))
    node.optimizer.step()
    assert node.last().clip == Clip(max_norm=1e-3, norm_type=2.0)
    grads = [p.grad for p in node.model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(own, grads, strict=True))
    node.side.publish(2, 2)
    assert node.step().clip is None


@pytest.mark.parametrize("norm", [(torch.tensor(0.5), "inf"), (0.5, torch.tensor(math.inf))])
def test_a_wish_to_clip_is_told_in_numbers(node: Node, norm: tuple[Any, Any]) -> None:
    """Torch's own function takes tensors, and the norm's type as a word."""
    node.backward()
    node.session.clip_grad_norm_(*norm)
    node.optimizer.step()
    assert decode(encode(node.last())).clip == Clip(max_norm=0.5, norm_type=math.inf)  # type: ignore[union-attr]


def test_accumulated_gradients_are_one_contribution(node: Node) -> None:
    with node.session.no_sync():
        node.backward(samples=3)
    node.backward(samples=2)
    node.optimizer.step()
    assert [(said.iteration, said.samples) for said in node.side.of(Contribute)] == [(0, 5.0)]


def test_nan_ends_the_run_or_weighs_nothing() -> None:
    node = Node(config())
    node.backward(scale=float("nan"))
    with pytest.raises(NonFiniteGradientError, match=r"the gradient of .* on worker 0 holds NaN or infinity"):
        node.optimizer.step()
    node.session._leaving.leave()
    node = Node(config(nonfinite="skip"))
    node.backward(scale=float("nan"))
    node.optimizer.step()
    assert (node.last().weight, node.last().samples) == (0.0, 4.0)
    node.session._leaving.leave()


def test_a_parameter_that_the_script_changes_is_found(node: Node) -> None:
    node.side.publish(1, 1)
    node.step()
    weight = node.model[0].weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
        weight.copy_(before)
    node.side.publish(2, 2)
    node.step()  # changed back
    with torch.no_grad():
        weight.add_(1.0)
    node.backward()
    with pytest.raises(
        UserError, match=r"parameter '0.weight' was changed by the script after session.prepare"
    ):
        node.optimizer.step()


def test_the_state_for_a_newcomer_is_that_of_its_first_iterations_boundary(node: Node) -> None:
    node.side.say(CaptureAt(iteration=1))
    node.side.publish(1, 1)
    node.step()
    assert node.side.of(Captured) == []
    node.backward()
    (captured,) = node.side.of(Captured)
    assert captured.iteration == 1
    node.optimizer.step()

    late = Node(config(), late=True, first=1, script=captured.script)
    assert late.side.of(Meet) == []  # whoever is late takes part in no meeting
    assert late.session.resume() == 1
    late.side.publish(2, 2)
    assert late.step().iteration == 1
    late.session._leaving.leave()


def script_at(iteration: int) -> bytes:
    """A member's script, as it is before that iteration."""
    giver = Node(config())
    giver.session._state.iteration = iteration
    script = giver.session._state.capture(fixed=True)
    giver.session._leaving.leave()
    return script


def test_who_was_left_out_before_it_was_set_up_enters_as_one_that_comes_late() -> None:
    node = Node(config(), first=41, script=script_at(41), incarnation=2)
    assert node.session.resume() == 41
    node.side.publish(42, 42)
    assert node.step().iteration == 41
    node.session._leaving.leave()


def test_who_was_left_out_as_a_checkpoint_was_loaded_goes_on_where_the_others_are(node: Node) -> None:
    node.side.first, node.side.script, node.side.incarnation = 41, script_at(41), 2
    node.session._runtime.strategy.loaded()
    assert node.session.iteration == 41
    node.side.publish(42, 42)
    assert node.step().iteration == 41


def test_after_an_earlier_checkpoint_it_has_not_come_to_later_iterations(node: Node) -> None:
    """Members' meetings would wait for a newcomer, which begins with one of those."""
    for made in range(1, 6):
        node.side.publish(made, made)
        node.side.say(Freed(before=made))
        node.step()
    node.session._runtime.strategy.exchange.steps = 2  # type: ignore[union-attr]
    node.session._runtime.strategy.loaded()
    node.session.reduce(1.0)
    assert node.side.of(Meet)[-1].at == 1
    node.side.publish(3, 3)
    node.step()
    node.session.reduce(1.0)
    assert node.side.of(Meet)[-1].at == 2


def test_frozen_parameters_come_from_the_members_too() -> None:
    session, side = fake_session(config(), late=True)
    side.first, side.frozen = 7, 3.0
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    session.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert {value for p in model[0].parameters() for value in p.flatten().tolist()} == {3.0}
    assert "0.weight" not in str(session._state.capture(fixed=True))
    session._leaving.leave()


def test_one_that_comes_late_must_resume() -> None:
    late = Node(config(), late=True, first=7)
    with pytest.raises(UserError, match=r"call session.resume\(\) before the loop"):
        late.backward()
    late.session._leaving.leave()


def test_a_node_that_was_left_out_goes_on_where_the_others_are() -> None:
    script = script_at(41)
    node = Node(config())
    node.backward()
    node.side.publish(0, 0, values=1.0)  # of before
    node.side.say(Returned(incarnation=2, iteration=41, meeting=3, script=script, reason="it was silent"))
    node.side.publish(40, 40, values=9.0)
    node.optimizer.step()  # counts nowhere
    assert node.side.of(Contribute) == []
    node.backward()
    node.side.publish(42, 42, values=11.0)
    node.optimizer.step()
    said = node.last()
    assert node.side.of(Resumed) == [Resumed(incarnation=2)]
    assert (said.iteration, said.taken) == (41, 40)
    assert node.session.iteration == 42
    node.session._leaving.leave()


@pytest.mark.parametrize("by", ["sampler", "batches"])
def test_a_node_that_comes_back_within_its_loop_makes_as_many_iterations_of_it_as_the_others(by: str) -> None:
    """What its loader has in hand is the first that it trains on there."""
    sync = Sync(stale_max=8, timeout="200ms", global_batch=12)
    nodes = [Node(Config(run=Run(strategy="peers"), sync=sync)) for _ in range(2)]
    loops = []
    for node in nodes:
        data: Any = torch.ones(3 * 20, 2)
        node.side.met = [0, 1, 2]
        sampler: Any = getattr(node.session, by)(data)
        options = {"batch_sampler": sampler} if by == "batches" else {"batch_size": 4, "sampler": sampler}
        loops.append(iter(DataLoader(data, **options)))
    (member, node), (others, own) = nodes, loops
    for made in (1, 2):
        member.side.publish(made, made)
        member.train(next(others))
    node.backward_on(next(own))
    script = member.session._state.capture(fixed=True)
    node.side.say(Returned(incarnation=2, iteration=2, meeting=3, script=script, reason="it was silent"))
    node.side.publish(2, 2)
    node.optimizer.step()  # counts nowhere
    for made, batch in enumerate(own, start=3):
        node.side.publish(made, made)
        node.train(batch)
    assert (node.last().iteration, node.session.iteration) == (4, 5)  # 5 are an epoch


@pytest.mark.parametrize("by", ["sampler", "batches"])
@pytest.mark.parametrize("heard", ["in its last step", "after that"])
def test_where_a_node_comes_back_at_its_epochs_end_the_epoch_goes_on_where_the_others_are(
    by: str, heard: str
) -> None:
    """Whoever loops by session.epoch_of has come in again before it meets the others."""
    sync = Sync(stale_max=8, timeout="5s", global_batch=12)
    member, node = (Node(Config(run=Run(strategy="peers"), sync=sync)) for _ in range(2))
    loaders = []
    for each in (member, node):
        data: Any = torch.ones(3 * 20, 2)
        each.side.met = [0, 1, 2]
        sampler: Any = getattr(each.session, by)(data)
        options = {"batch_sampler": sampler} if by == "batches" else {"batch_size": 4, "sampler": sampler}
        loaders.append(DataLoader(data, **options))
    for _ in range(2):  # its first epoch, and two iterations of the second one
        for batch in member.session.epoch_of(loaders[0]):
            member.side.publish(member.session.iteration + 1, member.session.iteration + 1)
            member.train(batch)
            if member.session.iteration == 7:
                break
    script = member.session._state.capture(fixed=True)
    returned = Returned(incarnation=2, iteration=7, meeting=3, script=script, reason="it was silent")
    iterations = []
    for batch in node.session.epoch_of(loaders[1]):
        iteration = node.session.iteration
        iterations.append(iteration)
        if iteration == 4 and heard == "in its last step":
            node.side.say(LeftOut(), returned)
            node.side.publish(7, 7)
        elif iteration in (3, 9):  # what the end of the epoch waits for
            node.side.publish(iteration + 1, iteration + 1)
        node.train(batch)
        if iteration == 4 and heard == "after that":
            node.side.say(LeftOut())
            node.side.later = [returned, Published(buffer=node.side.free.pop(0), taken=7, through=7)]
    assert iterations == [0, 1, 2, 3, 4, 7, 8, 9]
    assert node.side.of(Resumed) == [Resumed(incarnation=2)]
    assert (node.last().iteration, node.session.iteration) == (9, 10)
    node.session.barrier()  # which the others have come to as well


def test_a_loader_that_asks_takes_a_return_up_between_two_iterations_alone() -> None:
    """And not between a backward and its step, as where a script fetches the next batch early."""
    sync = Sync(stale_max=8, timeout="5s", global_batch=12)
    member, node = (Node(Config(run=Run(strategy="peers"), sync=sync)) for _ in range(2))
    data: Any = torch.ones(60, 2)
    _, loop = (iter(each.session.batches(data)) for each in (member, node))
    member.session._state.iteration = 7
    script = member.session._state.capture(fixed=True)
    next(loop)
    node.side.say(LeftOut(), Returned(incarnation=2, iteration=7, meeting=3, script=script))
    node.side.publish(7, 7)
    node.backward()
    next(loop)
    assert node.side.of(Resumed) == []
    node.optimizer.step()
    next(loop)
    assert node.side.of(Resumed) == [Resumed(incarnation=2)]
    assert node.session.iteration == 7


def test_a_model_whose_parts_are_called_comes_back_too() -> None:
    """No forward of the whole takes the return up: the end of a backward does. What was computed before is
    too old, and weighs nothing."""
    script = script_at(41)
    node = Node(config())

    def step() -> None:
        node.model[1](node.model[0](torch.ones(4, 2))).mean().backward()
        node.optimizer.step()
        node.optimizer.zero_grad()

    node.model[0](torch.ones(4, 2)).mean().backward()
    node.side.say(Returned(incarnation=2, iteration=41, meeting=3, script=script, reason="it was silent"))
    node.side.publish(40, 40, values=9.0)
    node.optimizer.step()  # counts nowhere
    node.side.publish(42, 42, values=11.0)
    step()
    assert node.side.of(Resumed) == [Resumed(incarnation=2)]
    assert (node.last().iteration, node.last().weight) == (41, 0.0)
    assert not any(byte for each in node.last().present for byte in each)
    node.side.publish(43, 43, values=12.0)
    step()
    assert (node.last().iteration, node.last().weight, node.session.iteration) == (42, 1.0, 43)
    node.session._leaving.leave()


def test_of_several_backwards_those_before_a_return_weigh_nothing() -> None:
    """Their gradients are in the sum that the iteration would contribute, and of parameters too old."""
    node = Node(config())
    script = script_at(41)
    node.side.say(Returned(incarnation=2, iteration=41, meeting=3, script=script, reason="it was silent"))
    node.side.publish(40, 40, values=9.0)
    node.backward()
    node.backward()  # its forward goes on where the others are
    node.side.publish(42, 42, values=11.0)
    node.optimizer.step()
    node.optimizer.zero_grad()
    assert (node.last().iteration, node.last().weight) == (41, 0.0)
    node.side.publish(43, 43, values=12.0)
    assert (node.step().iteration, node.last().weight) == (42, 4.0)


def test_one_that_is_left_out_in_a_meeting_does_not_come_in_again_by_itself(node: Node) -> None:
    """Its script could not go on with the others; before an iteration it could."""
    node.side.meets = False
    node.side.say(LeftOut())
    with pytest.raises(GivenUpError, match="went on without this node while it was in the barrier; start it"):
        node.session.barrier()
    assert node.side.of(Awake) == []


def test_one_that_is_left_out_says_that_it_is_awake(node: Node) -> None:
    node.side.say(LeftOut())
    node.backward()
    assert node.side.of(Awake) == [Awake()]


def test_at_the_end_whoever_comes_is_let_in_at_once(node: Node) -> None:
    node.side.publish(1, 1)
    node.step()
    node.side.say(CaptureAt(iteration=9))
    node.session.close()
    (captured,) = node.side.of(Captured)
    met = [meet for meet in node.side.of(Meet) if meet.at == NO_MORE]
    assert [meet.number for meet in met] == [captured.meeting]
    assert node.side.closed


def test_members_that_go_and_come_are_told(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    members = [NodeAt(node=0, incarnation=1, address="a"), NodeAt(node=2, incarnation=1, address="c")]
    node.side.say(Members(view=2, members=members, reason="it was silent for 3.1 s"))
    node.side.publish(1, 1)
    node.step()
    said = capsys.readouterr().err
    assert "atoll: node 1 was left out: it was silent for 3.1 s; 2 of 3 nodes go on" in said


def test_two_models_are_refused(node: Node) -> None:
    other = nn.Linear(1, 1)
    with pytest.raises(
        PrepareError, match="strategy 'peers' trains one model in a session; put both into one"
    ):
        node.session.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))


def test_what_a_note_says() -> None:
    assert said_in(msgspec.msgpack.encode({"pace": 0.25})).pace == 0.25
    assert said_in(b"\x00").pace == 0.0


def test_alone_there_is_no_cpu_side(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "ATOLL_HUB"):
        monkeypatch.delenv(name, raising=False)
    with atoll.join(config()) as session:
        model = nn.Linear(2, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert session.world == 1


def test_what_is_gathered_goes_in_pieces(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "_PIECE", 50)
    before = len(node.side.of(Meet))
    value = torch.arange(100.0)
    (gathered,) = node.session.gather(value)
    assert torch.equal(gathered, value)
    pieces = [len(meet.payload) for meet in node.side.of(Meet)[before:]]
    assert len(pieces) > 8
    assert max(pieces) <= 50 + 8


def test_one_that_comes_late_and_gets_no_state_of_the_script_ends() -> None:
    """The others go on; it ends, with a status by which it may be started again."""
    late = Node(config(), late=True, first=1, script=b"")
    with pytest.raises(GivenUpError, match="node 0 cannot come in: the others could not give it the script"):
        late.session.resume()
    late.session._leaving.leave()
