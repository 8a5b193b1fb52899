"""A ring's members on one schedule: each runs the real `Ring` and `RingReducer` on a thread of its own, one
of which runs at a time; channels are doubles, and the hub's part is the real one, without sockets.

A member gives way at each call of a channel or of the hub. Who goes on, and with what (a collective's result,
where all have begun it; a broken ring, where somebody is gone), is the schedule's choice: so when a member
dies, each of the others may hold the result or not. Once the schedule's choices are used up, all take turns,
and nothing fails any more.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.chunks import lay_out
from atoll.core.errors import RunError
from atoll.hub.book import Book
from atoll.hub.decisions import Decisions
from atoll.hub.records import Came, Died, Knows, Left, decode_record, encode_record
from atoll.hub.rings import Rings
from atoll.hub.turn import Turn
from atoll.store.members import Membership
from atoll.tensors.binding import bind_model, specs_of
from atoll.train.api.place import Place, Seat
from atoll.train.gradients.reducer import Calls
from atoll.train.gradients.ring import RingReducer
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.group import channel, channels
from atoll.train.group.channel import BrokenRingError
from atoll.train.group.rounds import Regrouped, Ring
from atoll.train.members.ringmeeting import RingMeeting
from atoll.train.members.workers import Workers
from atoll.wire.messages import (
    AnyMessage,
    Enter,
    Gather,
    Reform,
    Reformed,
    Refused,
    RingNews,
    decode_untrusted,
    encode,
)

MOST = 16  # incarnations, each of which has a column of its own in what is summed
ITERATIONS = 4
STEPS = 6000  # of a schedule: more is a ring that does not come to its end
IDLE = 60  # moments that do not fit, after which a fault happens all the same

Moment = Literal["any", "open", "begin", "hold", "places", "places held", "state", "ask", "answer"]
Kind = Literal["dies", "tears", "leaves", "comes", "cut", "given up", "hub restarts", "asks again"]
Option = Callable[[], Any]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Fault:
    """Something happens at a member's moment of this kind, after `after` others since the fault before it: to
    that member (`who` 0), or to the one that many places on. `tears`: that other one dies, and this one gets
    nothing more from its ring, while the others may."""

    kind: Kind
    moment: Moment = "any"
    after: int = 0
    who: int = 0


@dataclass(frozen=True)
class Schedule:
    """`choices`: who goes on, and with what; 0 is the next member in turn, with what is best for it."""

    world: int
    faults: tuple[Fault, ...] = ()
    choices: bytes = b""
    at_least: int = 1
    rounds_between: bool = False  # the script talks between iterations, too
    own_agreement: bool = False  # the agreement has a channel of its own, as with NCCL
    connects: bool = False  # confirmations need no all-reduce
    compact_after: int = 0  # records, after which the hub's journal is made compact; 0: never


class Killed(BaseException):
    """A member is no more."""


class WrongError(AssertionError):
    """What must not happen."""


# -- channels -----------------------------------------------------------------------------------------------


@dataclass
class _Collective:
    """What each rank gave to one of a group's; `root` alone gives to a broadcast."""

    kind: str
    root: int | None = None
    given: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Work:
    """A rank's part in a collective; `tensor` is what it is given, and `take` puts the result into it."""

    collective: _Collective
    tensor: Tensor
    take: Callable[[], None]
    waited: bool = False


class Group:
    """What the channels of one purpose of one ring's members share."""

    def __init__(self, number: int, members: list[int]) -> None:
        self.number, self.members = number, members
        self.collectives: list[_Collective] = []


class Channel:
    """`train.channel.Channel`, as far as `Ring` and who uses it know."""

    def __init__(self, place: Place, purpose: str, timeout: float, device: torch.device) -> None:
        self._member: Member = place.store  # type: ignore[assignment]
        self.place, self.timeout, self.seconds_waited = place, timeout, 0.0
        world = self._member.world
        self.connects = world.schedule.connects
        self._group = world.groups.setdefault(
            (self._member.group, purpose), Group(self._member.group, self._member.members)
        )
        self._begun = 0
        self._works: list[Work] = []
        self._broke = ""
        try:
            nothing = torch.zeros(0)
            self.wait(self._begin("open", nothing, lambda _given: None), "open")
        except BrokenRingError:
            self.abandon()
            raise

    gather = channel.Channel.gather
    sends = channel.Channel.sends

    def sum(self, tensor: Tensor) -> Work:
        return self.reduce(tensor, dist.ReduceOp.SUM)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        assert op == dist.ReduceOp.SUM

        def take(given: list[Tensor]) -> None:
            tensor.copy_(torch.stack(given).sum(0))

        return self._begin(f"sum of {tuple(tensor.shape)} {tensor.dtype}", tensor, take)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        kind = f"broadcast by {root} of {tuple(tensor.shape)} {tensor.dtype}"
        return self._begin(kind, tensor, lambda given: tensor.copy_(given[root]), root)

    def all_gather(self, tensor: Tensor) -> tuple[list[Tensor], Work]:
        parts = [torch.empty_like(tensor) for _ in range(self.place.world)]

        def take(given: list[Tensor]) -> None:
            for part, each in zip(parts, given, strict=True):
                part.copy_(each)

        return parts, self._begin(f"all_gather of {tuple(tensor.shape)} {tensor.dtype}", tensor, take)

    def _begin(
        self, kind: str, tensor: Tensor, take: Callable[[list[Tensor]], object], root: int | None = None
    ) -> Work:
        self._member.switch("begin", lambda: [*self._goes_on(_nothing), *self._breaks()])
        if self._begun == len(self._group.collectives):
            self._group.collectives.append(_Collective(kind, root))
        collective = self._group.collectives[self._begun]
        if collective.kind != kind:
            raise WrongError(
                f"{self._member}: a {kind} meets a {collective.kind}, as number {self._begun} of ring "
                f"{self._group.number}"
            )
        self._begun += 1
        rank, kept = self.place.rank, tensor.detach().clone()
        collective.given[rank] = kept

        def apply() -> None:
            if not torch.equal(tensor, kept):
                raise WrongError(f"{self._member}: what is under way was changed")
            with torch.no_grad():
                take([collective.given.get(each, kept) for each in range(self.place.world)])

        work = Work(collective, tensor.detach(), apply)
        self._works.append(work)
        return work

    def wait(self, work: Work, what: str) -> float:
        def options() -> list[Option]:
            given = work.collective.given
            whole = len(given) == self.place.world or work.collective.root in given
            return [*(self._goes_on(work.take) if whole else []), *self._breaks()]

        self._member.switch(_moment(what), options, what)
        work.waited = True
        return 0.0

    def _goes_on(self, act: Option) -> list[Option]:
        """A channel that has failed does nothing more."""
        return [] if self._broke or self._member.torn == self._group.number else [act]

    def _breaks(self) -> list[Option]:
        """What ends a wait, besides its result."""
        why = self._broke or self._member.world.why_broken(self._member, self._group.number)
        if not why:
            return []

        def breaks() -> None:
            self._broke = why
            raise BrokenRingError(f"{self._member}: {why}")

        return [breaks]

    def close(self) -> None:
        self._member.world.gone_from[self._group.number].add(self._member.incarnation)

    def abandon(self) -> None:
        self._member.world.gone_from[self._group.number].add(self._member.incarnation)
        for work in self._works:
            if not work.waited:
                work.tensor.fill_(99)  # it may still be written into


class Confirmations:
    """A ring's confirmations, where they are not the agreement's all-reduces, or not always."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._connects = channel, channel.connects
        if self._connects:
            self._channel = Channel(channel.place, "confirmations", channel.timeout, torch.device("cpu"))

    def confirm(self, what: str) -> None:
        self._channel.wait(self._channel.sum(torch.zeros(1)), f"the others to hold {what}")

    def close(self) -> None:
        if self._connects:
            self._channel.abandon()


def _nothing() -> None:
    pass


def _moment(what: str) -> Moment:
    if what == "open":
        return "open"
    if what.startswith("the others to hold"):
        return "places held" if "places in their data" in what else "hold"
    if "places in their data" in what:
        return "places"
    return "state" if what.startswith("the state of") else "any"


# -- the hub ------------------------------------------------------------------------------------------------


class Hub:
    """`hub/book.py` and `hub/rings.py` with a journal in memory."""

    def __init__(self, world: World, workers: int, at_least: int) -> None:
        self._world, self._workers, self._at_least = world, workers, at_least
        self.now = 0.0
        self._journal: list[bytes] = []
        self._compact_after = world.schedule.compact_after
        self._begin()

    def _begin(self) -> None:
        members = Membership(self._workers, patience=10.0, shards=0)
        self._turn = Turn(lambda: self.now)
        self.rings = Rings(members, Decisions(), self._turn, at_least=self._at_least)
        self.book = Book(members, self.rings)

    def come(self) -> tuple[int, int]:
        """A worker says Hello; its rank and incarnation."""
        came = Came(at=self.now, role="worker", wish=-1, shard=-1, address="", site="", token="")
        admission = self.book.come(came)
        assert not admission.refused, admission
        self._turn.keep(came)
        self._commit()
        return admission.worker, admission.incarnation

    def take(self, incarnation: int, message: Gather | Reform | Enter) -> None:
        self.now += 0.001
        self.rings.handle(_peer(incarnation), message)
        self._end_turn()

    def beat(self, incarnation: int) -> None:
        if self.book.members.roll.hear(self.now, incarnation):
            self.rings.beat(_peer(incarnation), incarnation)
            self._commit()

    def knows(self, incarnation: int) -> bool:
        return self.book.members.workers.rank_of(incarnation) is not None

    def give_up(self, incarnation: int) -> None:
        died = Died(at=self.now, incarnation=incarnation)
        self._turn.keep(died)
        self.book.die(died)
        self._end_turn()

    def goodbye(self, incarnation: int, finished: bool) -> None:
        if self.knows(incarnation):
            left = Left(at=self.now, incarnation=incarnation, finished=finished)
            self._turn.keep(left)
            self.book.leave(left)
            self._end_turn()

    def _end_turn(self) -> None:
        """As the service does once it has read what came: tell members what has changed, and write."""
        self._poll()
        self.compact()

    def _poll(self) -> None:
        for incarnation, _ in self.rings.silent():
            died = Died(at=self.now, incarnation=incarnation)
            self._turn.keep(died)
            self.book.die(died)
        self.rings.poll()
        self._commit()

    def _commit(self) -> None:
        self._journal += map(encode_record, self._turn.records)
        answers = list(self._turn.answers)
        self._turn.clear()
        for peer, message in answers:
            if peer:
                self._world.members[int(peer)].receive(decode_untrusted(encode(message)))

    def hear(self, living: Sequence[int]) -> None:
        """A second and more in which only these are heard: whoever the ring waits for is dead."""
        self.now += 2.0
        for incarnation in living:
            self.beat(incarnation)
        self._poll()

    def compact(self) -> None:
        """As the service does between two turns."""
        if 0 < self._compact_after < len(self._journal):
            self._journal = [encode_record(Knows(at=self.now, state=self.book.state()))]

    def restart(self) -> None:
        self._begin()
        for record in [decode_record(raw) for raw in self._journal]:
            self.book.apply(record)
        self._turn.clear()
        self.book.members.roll.hear_all(self.now)


def _peer(incarnation: int) -> bytes:
    return b"%d" % incarnation


# -- a member -----------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Three parameters, each a chunk and a message of its own; the gradient of each says who gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.zeros(MOST)) for _ in range(3))

    def forward(self, own: Tensor) -> Tensor:
        return ((self.first + self.second + self.third) * own).sum()


class State:
    """A worker's training: what each iteration came to, and how data was dealt."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.iteration = 0
        self.results: list[list[int]] = []
        self.deals: list[Any] = []
        self.beginning = [float(member.incarnation)]  # as the first worker's, for all
        self.dealt_among = 0

    def capture(self) -> bytes:
        held = [self.iteration, self.results, self.deals, self.beginning]
        return json.dumps([held, self._member.reducer.member_state()]).encode()

    def restore(self, raw: bytes, rank: int) -> None:
        (self.iteration, self.results, self.deals, self.beginning), reducer = json.loads(raw)
        self._member.reducer.check_member_state(reducer)
        self._member.reducer.load_member_state(reducer)
        self._member.world.agree(("results", self.iteration), self.results)

    def places(self, *, entered: bool = False) -> bytes:
        return json.dumps(None if entered else [self._member.incarnation, self.iteration]).encode()

    def deal_anew(self, said: Sequence[bytes], rank: int, world: int) -> None:
        member, places = self._member, [json.loads(each) for each in said]
        round = member.ring._number
        assert len(places) == world, (places, world)
        assert places[rank] in (None, [member.incarnation, self.iteration]), (places, rank, str(member))
        comes = member.entering and not self.dealt_among
        assert (places[rank] is None) == comes, (places, str(member))
        assert {place[1] for place in places if place is not None} <= {self.iteration}, (places, str(member))
        member.world.agree(("deal", round), [list(places), self.iteration])
        self.deals.append([round, list(places)])
        self.dealt_among = world


class Member:
    """A worker: what `train/group/rendezvous.py` (HubRing) is to `Ring`, and a script on a thread."""

    def __init__(self, world: World, rank: int, incarnation: int, *, late: bool) -> None:
        self.world, self.name, self.incarnation, self.late = world, rank, incarnation, late
        self.group, self.members = 0, list[int]()
        self.dead = self.done = self.given_up = self.entering = False
        self.torn = 0  # the ring from which it gets nothing more
        self.finished = False  # it has come to its session's end, as all have
        self.took_part = not late  # it has had the training's state
        self.error: BaseException | None = None
        self.news: RingNews | None = None
        self.mail: list[AnyMessage] = []
        self._wishes, self._ask_again, self._asks = 0, False, False
        self.gate = threading.Lock()
        self.gate.acquire()
        self.options: Callable[[], list[Option]] = lambda: [_nothing]
        self.chosen: Option = _nothing
        self.doing = "start"
        self.thread = threading.Thread(target=self._run, name=f"member-{incarnation}", daemon=True)
        self.thread.start()

    def __str__(self) -> str:
        return f"worker {self.name} (incarnation {self.incarnation}, ring {self.group}, at {self.doing})"

    @property
    def has_all(self) -> bool:
        """Whether it could go on without the others: it has the state, and knows where they were."""
        return self.took_part or (self.entering and self.ring._met is not None)

    @property
    def lives(self) -> bool:
        return not self.dead and not self.done

    # Its turns

    def switch(self, moment: Moment, options: Callable[[], list[Option]], doing: str = "") -> Any:
        """Give way, and go on with one of the options."""
        if self.dead or self.world.over:  # its thread comes to its end
            raise Killed
        self.options, self.doing = options, doing or moment
        self.world.arrive(self, moment)
        self.world.hand_on()
        self.gate.acquire()
        if self.dead or self.world.over:
            raise Killed
        return self.chosen()

    def _run(self) -> None:
        self.gate.acquire()
        try:
            if self.dead or self.world.over:
                return
            self._script()
        except Killed:
            return
        except BaseException as error:
            self.error = error
        self.done = True
        for group in self.world.gone_from.values():
            group.add(self.incarnation)
        with suppress(Killed):
            if self.error is not None:
                self.world.judge(self, self.error)
            self.world.hand_on()

    # What Ring asks

    def reform(self, round: int, *, holds: bool, admits: bool, fresh: bool) -> Reformed:
        self._wishes += 1
        wish = Reform(
            incarnation=self.incarnation,
            number=self._wishes,
            group=self.group,
            rank=self.ring.place.rank,
            round=round,
            holds=holds,
            admits=admits,
            fresh=fresh,
        )
        return self._ask(wish)

    def enter(self) -> Reformed:
        self._wishes += 1
        return self._ask(Enter(incarnation=self.incarnation, number=self._wishes))

    def _ask(self, wish: Reform | Enter) -> Reformed:
        self.switch("ask", lambda: [_nothing], f"{wish}")
        self._ask_again, self._asks = True, True
        while True:
            if self._ask_again:
                self._ask_again = False
                self.world.hub.take(self.incarnation, wish)
            self.switch("answer", self._has_mail, f"the answer to {wish}")
            for answer in self.mail:
                if isinstance(answer, Reformed) and answer.number == wish.number:
                    self.mail.clear()
                    self._asks = False
                    if not answer.group:
                        raise RunError(f"the ring does not go on: {answer.reason}")
                    return answer
                if isinstance(answer, Refused) and answer.number == wish.number:
                    raise RunError(answer.reason)
            self.mail.clear()
            if self.given_up:
                raise RunError("given up")

    def _has_mail(self) -> list[Option]:
        return [_nothing] if self.mail or self._ask_again or self.given_up else []

    def place_in(self, ring: Reformed) -> Place:
        self.group = ring.group
        self.members = self.world.members_of(ring)
        return Place(
            ring.workers.index(self.name),
            len(ring.workers),
            store=self,  # type: ignore[arg-type]
            watch=_nothing,
            names=tuple(ring.workers),
        )

    def is_awaited(self) -> bool:
        news = self.news
        return news is not None and news.group == self.group and news.waiting > 0

    def receive(self, message: AnyMessage) -> None:
        if isinstance(message, RingNews):
            self.news = message
        else:
            if isinstance(message, Reformed) and not message.group:
                self.world.ended(message.reason)
            self.mail.append(message)

    def lose_connection(self, *, with_mail: bool) -> None:
        """To the hub; what it asks, it asks again."""
        if with_mail:
            self.mail.clear()
        self._ask_again = self._asks

    # The script

    def _script(self) -> None:
        device = torch.device("cuda" if self.world.schedule.own_agreement else "cpu")
        if self.late:
            place = Place(0, 1, names=(self.name,))
        else:
            names = list(range(self.world.schedule.world))
            place = self.place_in(Reformed(group=1, workers=names))
        self.state, seat = State(self), Seat(place, late=self.late)
        self.ring = _ring(self, seat, device)
        self.workers = Workers(RingMeeting(seat, self.ring))
        self._prepare()
        if self.late:
            self.entering = True
            self.ring.enter()
            self.entering, self.took_part = False, True
            self.world.agree(("results", self.state.iteration), self.state.results)
        while self.state.iteration < ITERATIONS:
            self._iterate()
        self.workers.barrier("the end of the session")
        self.finished = True
        self.ring.close()
        self.switch("any", lambda: [_nothing], "its goodbye")
        self.world.hub.goodbye(self.incarnation, finished=True)

    def told(self, ring: Ring, changed: Regrouped) -> None:
        assert ring.world == changed.world == len(self.members)

    def _prepare(self) -> None:
        beginning = torch.tensor(self.state.beginning)
        if not self.late:
            self.workers.take_from_first([beginning], "worker 0's parameters")
            self.state.beginning = beginning.tolist()
            self.world.agree("beginning", self.state.beginning)
        self.model = Model()
        parameters = dict(self.model.named_parameters())
        chunks = lay_out(
            specs_of(parameters, dict.fromkeys(parameters.values(), "sgd")), chunk_bytes=4 * MOST
        )
        calls = Calls(_nothing, lambda _has: ContributionWeight(1.0, 1.0), self._committed, _nothing)
        self.reducer = RingReducer(bind_model(chunks, parameters), self.ring, message_bytes=1, calls=calls)
        assert len(self.reducer.sum.carrier.ids) == 3
        self.own = torch.zeros(MOST)
        self.own[self.incarnation] = 1.0

    def _committed(self, _own: ContributionWeight, samples: float) -> float:
        self._samples = samples
        return samples

    def _iterate(self) -> None:
        state, iteration = self.state, self.state.iteration
        self.model(self.own).backward()
        self.reducer.reduce()
        means = [parameter.grad for parameter in self.model.parameters()]
        counts = [[round(value * self._samples, 3) for value in mean.tolist()] for mean in means]  # type: ignore[union-attr]
        assert counts[0] == counts[1] == counts[2], (str(self), counts)
        (taken, *_) = counts
        assert set(taken) <= {0, 1}, (str(self), taken)
        assert sum(taken) == self._samples, (str(self), taken, self._samples)
        assert taken[self.incarnation] == 1, (str(self), taken)
        if state.dealt_among:
            assert sum(taken) == state.dealt_among, (str(self), taken, state.dealt_among)
        who = [incarnation for incarnation, count in enumerate(taken) if count]
        self.world.agree(("iteration", iteration), who)
        state.results.append(who)
        state.iteration += 1
        self.reducer.after_step()
        self.reducer.sum.all_stepped()
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.world.schedule.rounds_between and iteration % 2 == 0:
            told = self.workers.gather([self.incarnation, iteration], "what the script tells")
            assert [self.incarnation, iteration] in told, told
            assert {each for _, each in told} == {iteration}, told
            self.world.agree(("told", iteration), told)


def _ring(member: Member, seat: Seat, device: torch.device) -> Ring:
    """`Ring` asks its member for the next ring even while it is made."""

    class Early(Ring):
        def __init__(self) -> None:
            member.ring = self
            super().__init__(seat, device, 600.0, member, state=member.state, told=member.told)

    return Early()


# -- all of it ----------------------------------------------------------------------------------------------


class World:
    """One run of a schedule; raises WrongError for whatever must not happen."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.over = False
        self.failure: BaseException | None = None
        self.truth: dict[Any, Any] = {}
        self.groups: dict[tuple[int, str], Group] = {}
        self.gone_from: Counter[int] | dict[int, set[int]] = _Sets()
        self.cut: set[frozenset[int]] = set()
        self.fired: list[Fault] = []
        self.steps = 0
        self.ends: list[str] = []  # rings that do not go on, by the hub
        self._faults = list(schedule.faults)
        self._counted = self._idle = 0
        self._choices = iter(schedule.choices)
        self._last = 0
        self._ended = False
        self._main = threading.Lock()
        self._main.acquire()
        self.members: dict[int, Member] = {}
        self.hub = Hub(self, schedule.world, schedule.at_least)

    def run(self) -> None:
        for _ in range(self.schedule.world):
            rank, incarnation = self.hub.come()
            self.members[incarnation] = Member(self, rank, incarnation, late=False)
        for incarnation in self.members:
            self.hub.beat(incarnation)
            self.hub.take(incarnation, Gather(incarnation=incarnation, number=1, seconds=600.0))
        for member in self.members.values():
            member.mail.clear()
        self.hand_on()
        if not self._main.acquire(timeout=60.0):
            self.failure = WrongError("a member does not give way")
        self.over = True
        for member in self.members.values():
            with suppress(RuntimeError):
                member.gate.release()
        for member in self.members.values():
            member.thread.join(10.0)
            assert not member.thread.is_alive(), str(member)
        if self.failure is not None:
            raise self.failure
        self._judge_end()

    def members_of(self, ring: Reformed) -> list[int]:
        """The members' incarnations, in order of rank."""
        ranks = self.hub.book.members.workers.live() | {m.name: m.incarnation for m in self.members.values()}
        found = self.truth.setdefault(
            ("ring", ring.group), [self._incarnation(rank, ranks) for rank in ring.workers]
        )
        return list(found)

    def _incarnation(self, rank: int, ranks: dict[int, int]) -> int:
        return ranks[rank]

    # -- turns --------------------------------------------------------------------------------------------

    def hand_on(self) -> None:
        """Let the one go on who is chosen; what happens at the hub meanwhile, happens here."""
        try:
            while True:
                self.steps += 1
                if self.steps > STEPS:
                    raise WrongError(f"no end after {STEPS} steps: {self._where()}")
                candidates = self._candidates()
                if not candidates:
                    waiting = [member for member in self.members.values() if member.lives]
                    if waiting:
                        raise WrongError(f"nobody can go on: {self._where()}")
                    self._end()
                    return
                member, option = candidates[next(self._choices, 0) % len(candidates)]
                if member is None:
                    option()
                    continue
                self._last = member.incarnation
                member.chosen = option
                member.gate.release()
                return
        except Killed:
            raise
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._end()
        raise Killed

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._main.release()

    def _candidates(self) -> list[tuple[Member | None, Option]]:
        living = [member for member in self.members.values() if member.lives]
        living.sort(key=lambda member: (member.incarnation <= self._last, member.incarnation))
        options = [(member, member.options()) for member in living]
        found: list[tuple[Member | None, Option]] = [(m, each[0]) for m, each in options if each]
        found += [(m, another) for m, each in options for another in each[1:]]
        for member in self.members.values():
            if member.dead and self.hub.knows(member.incarnation):
                found.append((None, lambda dead=member: self.hub.give_up(dead.incarnation)))  # type: ignore[misc]
                found.append((None, self._hear))
        return found

    def _hear(self) -> None:
        living = [member.incarnation for member in self.members.values() if member.lives]
        self.hub.hear(living)

    def _where(self) -> str:
        return "; ".join(map(str, (m for m in self.members.values() if m.lives)))

    # -- faults -------------------------------------------------------------------------------------------

    def arrive(self, member: Member, moment: Moment) -> None:
        """A member is where it gives way: the time for the next faults, perhaps."""
        while self._faults:
            fault = self._faults[0]
            self._idle += 1
            if fault.moment in ("any", moment):
                self._counted += 1
            if self._counted <= fault.after and self._idle <= IDLE:
                return
            self._counted = self._idle = 0
            del self._faults[0]
            self.fired.append(fault)
            self._happen(fault, member)

    def _happen(self, fault: Fault, member: Member) -> None:
        living = [each for each in self.members.values() if each.lives]
        there = living.index(member) if member in living else 0
        target = living[(there + fault.who) % len(living)] if living else member
        if fault.kind == "comes":
            self._come()
        elif fault.kind == "hub restarts":
            self.hub.restart()
            for each in living:
                each.lose_connection(with_mail=True)
                self.hub.beat(each.incarnation)
        elif fault.kind == "asks again":
            target.lose_connection(with_mail=False)
        elif fault.kind == "cut":
            self.cut.add(frozenset((member.incarnation, target.incarnation)))
        elif len(living) > 1:
            if fault.kind == "given up":
                target.given_up = True
                self.hub.give_up(target.incarnation)
            else:
                target.dead = True
                if fault.kind == "tears" and target is not member:
                    member.torn = member.group
                if fault.kind == "leaves":
                    self.hub.goodbye(target.incarnation, finished=False)

    def _come(self) -> None:
        if not self.hub.rings._regroup.under_way or len(self.members) >= MOST - 1:
            return
        rank, incarnation = self.hub.come()
        self.members[incarnation] = Member(self, rank, incarnation, late=True)
        self.hub.beat(incarnation)

    def why_broken(self, member: Member, group: int) -> str:
        """Why a member may find its ring broken; empty where it may not."""
        if member.given_up:
            return "the hub has given it up"
        if member.torn == group:
            return "it gets nothing more from its ring"
        if member.news is not None and member.news.group == group and member.news.broken:
            return "the hub says so"
        for other in member.members:
            if other == member.incarnation:
                continue
            if self.members[other].dead or other in self.gone_from[group]:
                return f"incarnation {other} is gone"
            if frozenset((member.incarnation, other)) in self.cut:
                return f"its connection to incarnation {other} is cut"
        return ""

    # -- what must hold -----------------------------------------------------------------------------------

    def agree(self, what: Any, value: Any) -> None:
        """All who say something about this say the same."""
        value = json.loads(json.dumps(value))
        if self.truth.setdefault(what, value) != value:
            raise WrongError(f"{what}: {value}, where somebody had {self.truth[what]}")

    def ended(self, reason: str) -> None:
        """The hub says that the ring does not go on."""
        able = [m for m in self.members.values() if m.lives and not m.given_up and m.has_all]
        few = len(able) < self.schedule.at_least
        right = few if "at least" in reason else all(m.finished for m in able)
        if not right:
            self.ends.append(f"{reason}, though {', '.join(map(str, able))} live")
        else:
            self.ends.append("")

    def judge(self, member: Member, error: BaseException) -> None:
        """A member has ended with an error: by whose fault?"""
        line = str(error)
        right = isinstance(error, RunError) and (
            member.given_up
            or (line.startswith("the ring does not go on") and bool(self.ends) and not any(self.ends))
            or (member.late and "it has ended" in line and not self.hub.rings._regroup.under_way)
        )
        if not right:
            wrong = WrongError(f"{member} ended: {error!r}; {self.ends}")
            wrong.__cause__ = error
            self._fail(wrong)

    def _judge_end(self) -> None:
        for member in [m for m in self.members.values() if m.finished]:
            self.agree("all deals", member.state.deals)
            assert len(member.state.results) == ITERATIONS
            for iteration, result in enumerate(member.state.results):
                assert self.truth["iteration", iteration] == result, (str(member), iteration, result)


class _Sets(dict[int, set[int]]):
    def __missing__(self, key: int) -> set[int]:
        return self.setdefault(key, set())


@contextmanager
def doubles() -> Iterator[None]:
    """`Ring` makes the channels of this module."""
    with (
        patch.object(channels, "Channel", Channel),
        patch.object(channels, "Confirmations", Confirmations),
        patch.object(channels, "MEMBERS", 1),  # each sum goes over a Channel
    ):
        yield


def run(schedule: Schedule) -> World:
    """Run a schedule to its end; raises what was wrong."""
    with doubles():
        world = World(schedule)
        world.run()
        return world
