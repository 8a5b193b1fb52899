"""A node's CPU side at work: one loop that hears worker and nodes and does what the decisions say, beside one
thread that computes.

The decisions (`peers.node`) know contributions by their keys; here are the payloads, the sockets and the
clock. What the worker says is its own count of iterations, which is the decisions' shifted by what a
checkpoint had made before. Source: docs/peers.md.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from atoll.core.errors import DeadlineError, GivenUpError, MismatchError, RunError, UserError
from atoll.core.points import reach
from atoll.core.units import format_bytes
from atoll.cpuside.calculating import Calculating
from atoll.cpuside.door import Asked, Door
from atoll.cpuside.entering import Entering, Newcomers, Scripted, most_script
from atoll.cpuside.figures import Counting
from atoll.cpuside.history import History
from atoll.cpuside.network import Arrived, Met, Network
from atoll.cpuside.parts import MeetingParts
from atoll.cpuside.takeover import Giver, Taker, give
from atoll.cpuside.trained import Trained
from atoll.cpuside.witnesslink import WitnessLink
from atoll.exchange.globalparameters import Outcome
from atoll.exchange.globalstate import most_bytes, pack_globals, pack_globals_into
from atoll.net.endpoint import NOTHING_LISTENS
from atoll.net.post import Post, PostClosedError
from atoll.peers import outputs as out
from atoll.peers.node import Node
from atoll.peers.settings import Settings
from atoll.wire import device as d
from atoll.wire import nodes as n
from atoll.wire.peers import (
    WITNESS,
    AnswerRound,
    AskRound,
    EndRound,
    Key,
    NodeReport,
    PeerMessage,
    RefuseRound,
)
from atoll.wire.peerviews import (
    Accept,
    Accepted,
    Life,
    Member,
    Outbid,
    Prepare,
    Promised,
    View,
    ViewDecided,
)

_LONGEST_WAIT = 0.25  # seconds, for what no message announces
_WAITING_EACH = 0.5  # seconds between two words on what the worker waits for
_ROUNDS_EACH = 1.0  # seconds between two rounds that are told of: they are counted, and there may be many
_PROGRESS = (0.1, 0.5)  # of sync.timeout: the least and the most for an iteration that all others wait for
_OF_VIEWS = (Promised, Accepted, Outbid, ViewDecided)  # what a witness says
_OF_ROUNDS = (AskRound, AnswerRound, RefuseRound, EndRound)
_VOTES = (Prepare, Promised, Accept, Accepted)
_NOBODY_SECONDS = 20.0  # at most, for one of those to listen who were known before
_ENDED = "the worker has closed its socket"


class CpuSideProcess:
    """Serves the worker at the other end of `post`, until that is done or gone (PostClosedError). `watch` can
    be read from once its process has ended (-1: nothing tells)."""

    def __init__(self, post: Post, watch: int) -> None:
        self._post, self._watch = post, watch
        self._epoll = select.epoll()
        self._calculating = Calculating()
        for each in (post.fileno(), self._calculating.fileno(), watch):
            if each >= 0:
                self._epoll.register(each, select.EPOLLIN)
        self._post_full = False
        # To compute: what the worker asked for, and what is of the life that this node has.
        self._asked: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self._jobs: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self._begin: d.Begin | None = None
        self._network_: Network | None = None
        self._witness: WitnessLink | None = None
        self._node_: Node | None = None
        self._newest: View | None = None  # that a node of this process was removed by
        self._nodes: list[d.NodeAt] = []
        self._known_from = ""  # the folder that has told where they are, where nobody has introduced them
        self._finished: set[int] = set()  # nodes that have come to the end of their scripts
        self._view: View | None = None
        self._lives: dict[int, Life] = {}  # the members of the view, by node
        self._trained: Trained | None = None
        self._meetings = MeetingParts()
        self._door: Door | None = None  # the node has several devices
        self._wants_state: list[Asked] = []  # who waits for the optimizer's state
        self._wants_applied = 0  # the global iteration that the decisions were told of for that
        self._entering: Entering | None = None
        self._newcomers, self._giver = Newcomers(), Giver()
        self._counting = Counting(0)
        self._setup_since: float | None = None  # a set-up that is not agreed on yet
        self._number = self._uncounted = 0  # of set-ups, as all count them; those that the worker was not in
        self._is_ready = False  # the worker has had Ready
        self._resuming: int | None = None  # the incarnation that the worker is to say Resumed to
        self._dirty = False  # there is something newer to publish than what was
        self._wanted: d.Want | None = None
        self._waiting_told, self._waiting_at = "", 0.0
        self._round_told_at = 0.0
        self._history = History(post.send, self._tell, 0)
        self._handlers: dict[type, Callable[[Any, list[int]], None]] = {
            d.Begin: self._handle_begin,
            d.Introduce: self._handle_introduce,
            d.SetUp: self._handle_set_up,
            d.Contribute: self._handle_contribute,
            d.Want: self._handle_want,
            d.Release: self._handle_release,
            d.Meet: self._handle_meet,
            d.WantState: self._handle_want_state,
            d.Captured: self._handle_captured,
            d.Awake: self._handle_awake,
            d.Resumed: self._handle_resumed,
            d.Leave: self._handle_leave,
        }
        self._doers: dict[type, Callable[[Any], None]] = {
            out.Send: self._do_send,
            out.SendPart: self._do_send_part,
            out.Apply: self._do_apply,
            out.Meet: self._do_meet,
            out.Drop: self._do_drop,
            out.Grant: self._do_grant,
            out.FetchState: self._do_fetch_state,
            out.ViewChanged: self._do_view_changed,
            out.Removed: self._do_removed,
            out.Finished: self._do_finished,
            out.Note: self._do_note,
            out.Differ: self._do_differ,
        }

    def __enter__(self) -> CpuSideProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._network_ is not None:
            self._network_.close()
        if self._witness is not None:
            self._witness.close()
        self._calculating.close()
        if self._door is not None:
            self._door.close()
        if self._trained is not None:
            self._trained.close()

    # -- the loop -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the worker is gone: PostClosedError. Raises, too, what the run cannot go on with."""
        while True:
            self._turn()

    def _turn(self) -> None:
        """Wait for something to happen, and see to it."""
        self._wait()
        if self._watch >= 0 and select.select([self._watch], [], [], 0)[0]:
            raise PostClosedError(_ENDED)
        self._post.flush()
        while (got := self._post.receive()) is not None:
            self._handlers[type(got[0])](*got)
        if self._door is not None:
            self._wants_state += self._door.take()
        if self._network_ is not None:
            for arrived in self._network.take():
                self._hear(arrived)
        if self._witness is not None:
            self._hear_witness(self._witness)
        self._calculating.collect()
        self._see_to_time()
        self._give_optimizer_state()
        self._start_job()
        self._free_slots()

    def _wait(self) -> None:
        if self._post.is_full != self._post_full:
            self._post_full = self._post.is_full
            events = select.EPOLLIN | (select.EPOLLOUT if self._post_full else 0)
            self._epoll.modify(self._post.fileno(), events)
        timeout = _LONGEST_WAIT
        if self._node_ is not None:
            timeout = min(timeout, max(0.0, self._node_.deadline - time.monotonic()))
        if self._network_ is not None:
            others = [self._witness.client] if self._witness is not None else []
            self._network_.wait(timeout, self._epoll.fileno(), others)
        else:
            select.select([self._epoll], [], [], timeout)

    def _see_to_time(self) -> None:
        now = time.monotonic()
        if self._node_ is not None and self._node_.deadline <= now:
            self._do(self._node_.poll(now))
        if self._entering is not None:
            self._see_to_entering(self._entering)
        elif self._setup_since is not None:
            self._see_to_set_up(self._setup_since)
        if now > self._waiting_at + _WAITING_EACH and self._node_ is not None:
            # Whatever the worker waits for then, that is why it waits in vain: it is told again and again.
            lost = bool(self._node_.waits.lost_majority())
            if lost:
                self._see_whether_all_have_finished(self._node_)
            if self._wanted is not None or self._wants_state or lost:
                self._tell_waiting(again=lost)
        self._tell_figures(now=False)

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def _network(self) -> Network:
        assert self._network_ is not None
        return self._network_

    @property
    def _node(self) -> Node:
        if self._node_ is None:
            raise RunError("the worker says Introduce before it speaks of iterations or meetings")
        return self._node_

    @property
    def _model(self) -> Trained:
        if self._trained is None:
            raise RunError("the worker says SetUp before it speaks of iterations")
        return self._trained

    @property
    def _shift(self) -> int:
        return self._trained.shift if self._trained is not None else 0

    def _tell(self, what: str, choice: str, reason: str) -> None:
        self._post.send(d.Told(what=what[:256], choice=choice[:4000], reason=reason[:4000]))

    # -- the worker ---------------------------------------------------------------------------------------

    def _handle_begin(self, message: d.Begin, _: list[int]) -> None:
        self._begin = message
        self._counting = Counting(message.stale_max)
        self._history = History(self._post.send, self._tell, message.stale_max)
        self._network_ = Network(message, self._tell)
        if message.hub:
            self._witness = WitnessLink(
                message.hub,
                self._network_.keys,
                run=message.run,
                node=message.node,
                incarnation=message.incarnation,
                token=self._network_.life,
            )
        self._post.send(d.Listening(address=self._network_.address))

    def _handle_introduce(self, message: d.Introduce, _: list[int]) -> None:
        begin = self._begin
        assert begin is not None
        self._nodes = [each for each in message.nodes if each.node != begin.node]
        self._known_from = message.known_from
        for each in self._nodes:
            self._network.link_to(each)
        if message.late:
            self._entering = Entering(begin.timeout, returned=False)
            return
        members = tuple(
            Member(Life(each.node, each.incarnation), address=each.address)
            for each in sorted(message.nodes, key=lambda each: each.node)
        )
        last = {each.life.node: each.life.incarnation for each in members}
        view = View(message.founding, 0, members, last=last)
        mine = [each.life for each in members if each.life.node == begin.node]
        if not mine:
            raise UserError(f"node {begin.node} is none of those that it was introduced to")
        self._view = view
        self._lives = {each.life.node: each.life for each in view.members}
        self._node_ = Node(mine[0], view, self._settings(), np.random.default_rng(), time.monotonic())
        self._do(self._node_.poll(time.monotonic()))

    def _settings(self) -> Settings:
        begin = self._begin
        assert begin is not None
        # A node may evaluate alone, or compile, for as long as a script may: it answers meanwhile.
        fixed: dict[str, Any] = {"progress": (begin.timeout * _PROGRESS[0], begin.timeout * _PROGRESS[1])}
        if begin.round_timeout > 0:
            fixed["round"] = (begin.round_timeout, begin.round_timeout)
        if begin.backoff > 0:
            fixed["backoff"] = (begin.backoff, begin.backoff)
        return Settings(stale_max=begin.stale_max, **fixed)

    def _handle_set_up(self, message: d.SetUp, descriptors: list[int]) -> None:
        iteration = self._node_.applied if self._node_ is not None else 0
        if self._node_ is not None and self._node_.iteration != iteration:
            raise RunError(f"set up at iteration {self._node_.iteration}, where {iteration} are applied")
        if self._trained is not None:
            self._trained.close()
        self._trained, self._is_ready, self._dirty, self._wanted = None, False, False, None
        self._history.clear()  # the script may count anew
        self._history.consumed = message.consumed
        if message.devices > 1 and self._door is None:
            self._door = Door()
            self._epoll.register(self._door.fileno(), select.EPOLLIN)
        self._number = number = message.number + self._uncounted

        def is_set_up(made: Trained) -> None:
            self._trained = made
            self._network.set_up(message.digest, number)
            self._setup_since = time.monotonic()

        # Making the optimizer takes seconds, the first time: torch imports what it needs for it.
        self._asked.append((lambda: Trained(message, descriptors, iteration, self._wants), is_set_up))

    def _see_to_set_up(self, since: float) -> None:
        """Go on once all members train the same."""
        begin, setup = self._begin, self._model.setup
        assert begin is not None
        assert self._view is not None
        missing = []
        for each in self._view.members:
            node = each.life.node
            if node == begin.node:
                continue
            digest, number = self._network.trains(node)
            if digest and digest != setup.digest:
                raise UserError(
                    f"node {begin.node} and node {node} train different models, or with different "
                    "optimizers, configurations or kinds of processor: give every node the same"
                )
            if number < self._number:
                trouble = self._network.trouble(node)
                missing.append(f"node {node} at {each.address}{f' ({trouble})' if trouble else ''}")
        self._check_refused()
        if missing and self._number > 1:
            self._do(self._node.handle_replaced(time.monotonic()))
        if not missing:
            self._setup_since = None
            self._ready(self._node.iteration, self._node.life.incarnation, 0, b"")
        elif time.monotonic() > since + begin.timeout:
            raise DeadlineError(
                f"node {begin.node} waited {begin.timeout:.1f} s for {' and '.join(missing)} to be set up "
                f"(deadline sync.timeout, {begin.timeout:g} s)"
            )

    def _check_refused(self) -> None:
        """Raise why another node does not take this one, before it was ever among them."""
        assert self._begin is not None
        refusals = self._network.refusals([each.node for each in self._nodes])
        late = self._entering is not None
        if refusals and not self._is_ready and (not late or len(refusals) == len(self._nodes)):
            raise UserError(f"node {self._begin.node}: {refusals[0]}")

    def _ready(self, iteration: int, incarnation: int, meeting: int, script: bytes) -> None:
        """The worker may begin, with what is in buffer 0."""
        model = self._model
        self._is_ready = True
        self._tell_ready(iteration + model.shift, incarnation, meeting, script)
        model.buffers.announce(0)
        taken = self._node.applied + model.shift
        self._post.send(d.Published(buffer=0, taken=taken, through=taken))

    def _tell_ready(self, first: int, incarnation: int, meeting: int, script: bytes) -> None:
        door = self._door.name if self._door is not None else ""
        ready = d.Ready(iteration=first, incarnation=incarnation, meeting=meeting, script=script, door=door)
        self._post.send(ready)

    @property
    def _is_over(self) -> bool:
        """Whether what the worker says is of a life that is over, which it may not know yet."""
        return self._entering is not None or self._resuming is not None

    def _handle_contribute(self, message: d.Contribute, _: list[int]) -> None:
        if self._is_over:
            return
        node = self._node
        self._model.keep_own(node.life, message)
        if self._publishes_own:
            self._dirty = True
        self._counting.waits(False)
        self._wanted = None
        reach("node.contributed", message.iteration - self._shift)
        outputs = node.handle_contributed(time.monotonic(), message.iteration - self._shift)
        self._start_job()  # the worker waits for what is published, and for nothing that is sent
        self._do(outputs)

    @property
    def _publishes_own(self) -> bool:
        """Whether parameters with an own contribution over them are of use before it is applied."""
        assert self._begin is not None
        return self._begin.overlay != "none" and self._begin.stale_max > 0

    def _handle_want(self, message: d.Want, _: list[int]) -> None:
        if self._is_over:
            return
        self._wanted, self._waiting_at = message, time.monotonic()
        self._waiting_told = ""
        self._counting.waits(True)
        self._dirty = True
        wanted = message.iteration - self._shift, message.least - self._shift
        self._do(self._node.handle_wanted(time.monotonic(), *wanted, message.stand))

    def _handle_release(self, message: d.Release, _: list[int]) -> None:
        for each in message.buffers:
            self._model.buffers.release(each)

    def _handle_meet(self, message: d.Meet, _: list[int]) -> None:
        if self._is_over:
            return
        node = self._node
        at = message.at if message.at >= d.NO_MORE else max(0, message.at - self._shift)
        key = Key("meetings", message.number, node.life)
        self._meetings.keep(key, message.what, message.payload, self._meetings.since, message.stand)
        self._do(node.handle_met(time.monotonic(), message.number, at, message.stand))

    def _handle_want_state(self, message: d.WantState, descriptors: list[int]) -> None:
        self._wants_state.append(Asked(message.least, descriptors[0], self._post.send))

    def _give_optimizer_state(self) -> None:
        """Have the optimizer's state packed for those who wait for an iteration that is applied; for all
        where the others went on without this node: it comes back once its script goes on, which waits."""
        model = self._trained
        if not self._wants_state or model is None:
            return
        applied = model.globals.iteration + model.shift
        due = [each for each in self._wants_state if each.least <= applied or self._is_over]
        for asked in due:
            self._wants_state.remove(asked)
            self._asked.append(self._packing(model, asked))
        least = max((each.least for each in self._wants_state), default=0) - model.shift
        if self._node_ is None or self._is_over or not self._wants_applied < least <= self._node_.iteration:
            return
        self._wants_applied = least
        self._do(self._node_.handle_wanted(time.monotonic(), least, least))

    def _packing(self, model: Trained, asked: Asked) -> tuple[Callable[[], int], Callable[[int], None]]:
        def pack() -> int:
            try:
                return pack_globals_into(model.globals, asked.file)
            finally:
                os.close(asked.file)

        def tell(packed: int) -> None:
            asked.answer(d.State(iteration=model.globals.iteration + model.shift, packed=packed))

        return pack, tell

    def _handle_captured(self, message: d.Captured, _: list[int]) -> None:
        if self._is_over:
            return
        state, most = message.script, self._most_script
        if len(state) > most:
            reason = f"it takes {format_bytes(len(state))}, and {format_bytes(most)} is the most here"
            self._tell("state", "", f"{d.NO_STATE}: {reason}; register less, or go on from a checkpoint")
            state = b""
        iteration = message.iteration - self._shift
        self._newcomers.captured(Scripted(iteration, message.meeting, self._number, state), self._network)

    @property
    def _most_script(self) -> int:
        return most_script(most_bytes(self._model.globals))

    def _handle_awake(self, _: d.Awake, __: list[int]) -> None:
        if self._entering is not None:
            self._entering.wake()

    def _handle_resumed(self, message: d.Resumed, _: list[int]) -> None:
        if message.incarnation == self._resuming:
            self._resuming = None

    def _handle_leave(self, _: d.Leave, __: list[int]) -> None:
        if self._node_ is None or self._entering is not None:
            self._post.send(d.Left())
            return
        self._do(self._node_.handle_finished(time.monotonic()))

    # -- coming in ----------------------------------------------------------------------------------------

    def _see_to_entering(self, entering: Entering) -> None:
        begin, model = self._begin, self._trained
        assert begin is not None
        if model is None or not entering.awake:
            return  # the worker is to say what it trains; or that it would go on
        self._check_refused()
        now = time.monotonic()
        if self._node_ is None:
            contacts = [each.node for each in self._nodes]
            self._node_ = Node.joining(
                begin.node,
                entering.token,
                self._network.address,
                contacts,
                self._settings(),
                np.random.default_rng(),
                now,
                self._newest,
            )
            self._do(self._node_.poll(now))
        if entering.taker is not None and (why := entering.taker.stalled()):
            source, entering.taker = entering.taker.source, None
            self._do(self._node.handle_state_failed(now, source, why))
        if not entering.lacks():
            self._enter(entering)
        else:
            self._see_whether_anybody_is_there(entering)

    def _see_whether_anybody_is_there(self, entering: Entering) -> None:
        """Raise where nobody lets this node in any more, or has not in its time."""
        begin, network = self._begin, self._network
        assert begin is not None
        others = [each.node for each in self._nodes]
        if entering.first is None and others and self._finished.issuperset(others):
            raise GivenUpError(f"node {begin.node} cannot come in: {_have_finished(others)}")
        waited = f"node {begin.node} waited {entering.waited:.1f} s for {entering.lacks()}"
        limit, timeout = "", f"deadline sync.timeout, {entering.timeout:g} s"
        nobody = self._known_from and not network.has_answered
        if entering.waited > entering.timeout:
            limit = timeout
        elif nobody and entering.waited > _NOBODY_SECONDS and all(map(network.is_deaf, others)):
            limit = f"{NOTHING_LISTENS}; {timeout}"
        if not limit:
            return
        where = f"none of the nodes known from {self._known_from} answers; if the run is over, start in a "
        where += "new run.directory, and go on with session.resume(folder)"
        why = "; ".join([waited, *([where] if nobody else []), *network.refusals(others)])
        raise DeadlineError(f"{why} ({limit})")

    def _see_whether_all_have_finished(self, node: Node) -> None:
        """Raise where the worker waits for what only those could give who have come to the run's end."""
        waits = self._wanted is not None or self._wants_state or node.waits.is_meeting
        if waits and (gone := node.waits.without()) and self._finished.issuperset(gone):
            raise GivenUpError(f"node {node.life.node} is behind: {_have_finished(gone)}")

    def _enter(self, entering: Entering) -> None:
        """All is here that this node begins with."""
        script, model, node = entering.script, self._model, self._node
        assert script is not None
        self._entering, self._setup_since, self._dirty = None, None, True
        self._meetings.since = script.meeting
        self._uncounted += script.number - self._number
        self._number = script.number
        self._network.set_up(model.setup.digest, script.number)
        first, incarnation = script.iteration + model.shift, node.life.incarnation
        self._is_ready = True
        if entering.returned:
            self._resuming = incarnation
            self._post.send(
                d.Returned(
                    incarnation=incarnation,
                    iteration=first,
                    meeting=script.meeting,
                    script=bytes(script.state),
                    reason=entering.reason[:4000],
                )
            )
        else:
            self._tell_ready(first, incarnation, script.meeting, bytes(script.state))

    def _hear_takeover(self, sender: int, message: n.Takeover, payload: memoryview | None) -> None:
        entering = self._entering
        if entering is None or entering.taker is None or entering.unpacking:
            return
        taker, model = entering.taker, self._model
        raw = taker.handle(sender, message, payload)
        if raw is None:
            return
        entering.unpacking = True

        def unpack() -> str:
            try:
                model.take_over(raw)
            except UserError as error:
                return str(error)
            return ""

        def unpacked(wrong: str) -> None:
            entering.unpacking, entering.taker = False, None
            if self._entering is not entering:
                return
            now = time.monotonic()
            if wrong:
                self._tell("refused", f"node {sender}'s state", wrong)
                self._do(self._node.handle_state_failed(now, sender, wrong))
                return
            entering.has_state, model.shift = True, taker.shift
            # The script that it begins with may be of a member that has not heard of all of these.
            for each in taker.applied:
                self._history.take_over(each)
            self._history.consumed = taker.consumed
            reach("node.took", model.globals.iteration)
            self._do(self._node.handle_state(now, model.globals.iteration))

        self._jobs.append((unpack, unpacked))

    def _hear_script(self, sender: int, message: n.Script, payload: memoryview | None) -> None:
        if self._entering is None or self._trained is None:
            return
        if wrong := self._entering.take_script(sender, message, payload, self._most_script):
            self._tell("refused", f"node {sender}", wrong)

    def _give_state(self) -> None:
        """Have the state packed for those who may have it now."""
        node, model = self._node_, self._trained
        if node is None or model is None or self._entering is not None or self._view is None:
            return
        lives = {each.life for each in self._view.members}
        for life in self._giver.due(node.applied, lives.__contains__):

            def send(raw: memoryview, to: int = life.node) -> None:
                reach("node.gives", model.globals.iteration)
                give(
                    self._network,
                    to,
                    raw,
                    model.globals.iteration,
                    model.shift,
                    self._history.latest,
                    self._history.consumed,
                )

            self._jobs.append((lambda: pack_globals(model.globals), send))

    # -- the network --------------------------------------------------------------------------------------

    def _wants(self, key: Key) -> bool:
        return self._node_ is not None and not self._node_.refusal(key)

    def _hear(self, arrived: Arrived | Met) -> None:
        if isinstance(arrived, Met):
            if not arrived.up:  # another process of that name
                self._finished.discard(arrived.node.node)
            else:
                self._newcomers.up(arrived.node.node, self._network)
            return
        sender, _, message, payload = arrived
        now = time.monotonic()
        if isinstance(message, (n.About, n.Piece)):
            if self._trained is not None and self._node_ is not None:
                if (life := self._lives.get(sender)) is not None:
                    self._node_.handle_heard(now, life)
                assembly, key = self._trained.assembly, message.key
                if assembly.add(message, payload):
                    reach("node.held", key.number)
                    self._newcomers.contributed(key.life)
                    self._do(self._node_.handle_part(now, key))
                elif assembly.has_some(key):
                    self._do(self._node_.handle_arriving(now, key))
        elif isinstance(message, n.Word):
            if isinstance(message.body, NodeReport) and message.body.finished:
                self._finished.add(sender)
            if self._node_ is not None:
                self._reach_word(message.body, self._node_)
                self._do(self._node_.handle_message(now, sender, message.body))
        elif isinstance(message, n.MeetingPart):
            self._hear_meeting_part(message, payload)
        elif isinstance(message, n.Stands) and sender in self._lives:  # others' parameters are not compared
            iteration, digest = message.iteration, message.digest
            self._history.compare(iteration, self._shift, digest, node=sender, own=self._network.node)
        elif isinstance(message, n.Lacks):
            self._giver.handle(sender, message)
            self._give_state()
        elif isinstance(message, n.Takeover):
            self._hear_takeover(sender, message, payload)
        elif isinstance(message, n.Script):
            self._hear_script(sender, message, payload)

    def _reach_word(self, word: PeerMessage, node: Node) -> None:
        if isinstance(word, _OF_ROUNDS):
            reach("node.round", node.iteration)
        elif isinstance(word, _VOTES):
            reach("node.vote", node.iteration)

    def _hear_witness(self, witness: WitnessLink) -> None:
        for message in witness.take():
            if self._node_ is not None and isinstance(message, _OF_VIEWS):
                self._do(self._node_.handle_message(time.monotonic(), WITNESS, message))
        if witness.refusal:
            self._tell("witness", "", f"{witness.refusal}: it is no witness of views of two nodes")
            witness.close()
            self._witness = None

    def _hear_meeting_part(self, message: n.MeetingPart, payload: memoryview | None) -> None:
        key, size = message.key, 0 if payload is None else payload.nbytes
        if size > n.MOST_PART:
            about = f"node {key.life.node}"
            self._tell("refused", about, f"{size} bytes for a meeting, where {n.MOST_PART} is the most")
        elif message.since > key.number:
            about = f"node {key.life.node}"
            self._tell(
                "refused", about, f"meeting {key.number}, and the first of its meetings is {message.since}"
            )
        elif key.stream == "meetings" and key not in self._meetings and self._wants(key):
            self._meetings.keep(key, message.what, bytes(payload or b""), message.since, message.stand)
            self._do(self._node.handle_part(time.monotonic(), key, message.since))

    # -- what the decisions say ---------------------------------------------------------------------------

    def _do(self, outputs: Sequence[out.Output]) -> None:
        """Carry out outputs. Raises MismatchError for inconsistent scripts, after all outputs are done.

        The remaining outputs must go out first: without them the other nodes would wait for a majority until
        they give up, and not learn the cause.
        """
        unlike: MismatchError | None = None
        for output in outputs:
            try:
                self._doers[type(output)](output)
            except MismatchError as error:
                if isinstance(output, out.Meet):
                    self._tell_differ(error)
                unlike = error
        if unlike is not None:
            raise unlike

    def _tell_differ(self, error: MismatchError) -> None:
        """Send the mismatch to the other nodes, which may lack parts of the meeting that shows it."""
        for output in self._node_.handle_differ(str(error)) if self._node_ is not None else []:
            if isinstance(output, out.Send):
                self._do_send(output)

    def _do_send(self, output: out.Send) -> None:
        if output.to == WITNESS:
            if self._witness is not None:
                self._witness.say(output.message)
            return
        self._network.say(output.to, output.message)  # type: ignore[arg-type]  # a PeerMessage

    def _do_send_part(self, output: out.SendPart) -> None:
        key, to = output.key, output.to
        if key.stream == "meetings":
            if key in self._meetings:
                self._network.send_chunk(to, *self._meetings.message(key))
        elif self._trained is not None and key in self._trained.assembly:
            self._trained.assembly.send(
                key, lambda message, payload: self._network.send_chunk(to, message, payload)
            )
            reach("node.sending", key.number)

    def _do_apply(self, output: out.Apply) -> None:
        model, node, keys = self._model, self._node, output.keys
        abouts = [model.assembly[key].about for key in keys]
        contributions = model.contributions(keys)

        def applied(outcome: Outcome) -> None:
            if self._node_ is not node:
                return  # of a life that is over
            reach("node.applied", output.iteration)
            self._note_applied(output.iteration, outcome, [each for each in abouts if each is not None])
            self._do(node.handle_applied(time.monotonic(), output.iteration))
            self._dirty = True
            self._give_state()

        self._jobs.append((lambda: model.apply(output.iteration, contributions), applied))

    def _note_applied(self, iteration: int, outcome: Outcome, abouts: Sequence[n.About]) -> None:
        self._history.note(iteration, self._shift, outcome, abouts)
        self._counting.applied([iteration - each.taken for each in abouts])
        assert self._view is not None
        for each in self._view.members:
            if each.life.node != self._network.node:
                self._network.send(each.life.node, n.Stands(iteration=iteration, digest=outcome.digest))

    def _do_meet(self, output: out.Meet) -> None:
        self._post.send(self._meetings.meet(output.number, output.keys))

    def _do_drop(self, output: out.Drop) -> None:
        for key in output.keys:
            if key.stream == "meetings":
                self._meetings.drop(key)
            elif self._trained is not None:
                self._trained.assembly.drop(key)

    def _do_grant(self, _: out.Grant) -> None:
        self._dirty = True  # the worker waits for parameters that are here now

    def _do_fetch_state(self, output: out.FetchState) -> None:
        entering = self._entering
        if entering is None:
            return
        most = most_bytes(self._model.globals)
        entering.taker = Taker(self._network, self._node.life, output.source, output.base, most)
        self._tell("state", f"from node {output.source}", output.reason)

    def _do_view_changed(self, output: out.ViewChanged) -> None:
        reach("node.view", self._node.iteration)
        old, self._view = self._view, output.view
        self._lives = {each.life.node: each.life for each in output.view.members}
        life, members = self._node.life, output.view.members
        for each in members:
            if each.life.node != life.node:
                self._network.link_to(d.NodeAt(each.life.node, self._process_of(each), each.address))
            elif self._entering is not None:
                self._entering.first = each.first
        here = {each.life.node for each in members}
        for gone in [] if old is None else [each.life.node for each in old.members]:
            if gone not in here:
                self._network.drop_unsent(gone)
        if self._entering is None:
            for first in self._newcomers.view(old, output.view, life):
                self._post.send(d.CaptureAt(iteration=first + self._shift))
        self._post.send(
            d.Members(
                view=output.view.number,
                members=[d.NodeAt(*each.life, each.address) for each in members],
                known=[*self._network.nodes, self._own_place],
                reason=output.reason[:4000],
            )
        )
        self._give_state()

    def _process_of(self, member: Member) -> int:
        """Which of a node's processes the connections to it are to, where there are any: an incarnation that
        a view gave to the same process is none of another."""
        known = {each.node: each for each in self._network.nodes}.get(member.life.node)
        return known.incarnation if known is not None and known.address == member.address else 0

    @property
    def _own_place(self) -> d.NodeAt:
        return d.NodeAt(self._network.node, self._network.incarnation, self._network.address)

    def _do_removed(self, output: out.Removed) -> None:
        """Come back as another incarnation: all that is of this one goes."""
        begin = self._begin
        assert begin is not None
        self._tell("membership", "come back", output.reason)
        self._newest = output.view
        members = [
            d.NodeAt(each.life.node, 0, each.address)
            for each in output.view.members
            if each.life.node != begin.node
        ]
        self._nodes = members or self._nodes
        for each in self._network.nodes:
            self._network.drop_unsent(each.node)
        self._node_, self._view, self._wanted, self._lives = None, None, None, {}
        self._wants_applied = 0
        self._newcomers, self._giver = Newcomers(), Giver()
        self._jobs.clear()
        self._meetings.clear()
        self._history.clear()
        if self._trained is not None:
            self._trained.assembly.clear()
        self._counting.waits(False)
        self._entering = Entering(begin.timeout, returned=self._is_ready, reason=output.reason)
        # Also before it is set up: its script may be in a meeting, which nobody else is in any more.
        self._post.send(d.LeftOut())

    def _do_finished(self, _: out.Finished) -> None:
        self._tell_figures(now=True)
        self._post.send(d.Left())

    def _do_differ(self, output: out.Differ) -> None:
        raise MismatchError(output.line)

    def _do_note(self, output: out.Note) -> None:
        self._counting.note(output)
        now = time.monotonic()
        if not output.what.startswith("round") or now > self._round_told_at + _ROUNDS_EACH:
            self._round_told_at = now if output.what.startswith("round") else self._round_told_at
            self._tell(output.what, output.about or output.what, output.reason)

    # -- computing, and telling the worker ----------------------------------------------------------------

    def _start_job(self) -> None:
        """Have the next thing computed: first what the worker asked for and what the decisions say, then what
        it may take."""
        if self._calculating.busy:
            return
        if self._asked:
            self._calculating.start(*self._asked.popleft())
        elif self._jobs:
            self._calculating.start(*self._jobs.popleft())
        elif self._dirty and self._is_ready and self._entering is None and self._trained is not None:
            self._publish(self._trained)

    def _publish(self, model: Trained) -> None:
        node, buffer = self._node, model.buffers.free()
        least = self._wanted.least - model.shift if self._wanted is not None else 0
        if buffer is None or node.applied < least:
            return  # a Release, or an Apply, comes
        self._dirty, began = False, time.monotonic()
        taken, through = node.applied, node.iteration if self._publishes_own else node.applied
        waiting = self._pending(model, taken) if self._publishes_own else []

        def published(_: None) -> None:
            if self._node_ is not node:
                return
            model.buffers.announce(buffer)
            shift, seconds = model.shift, time.monotonic() - began
            told = d.Published(
                buffer=buffer, taken=taken + shift, through=max(taken, through) + shift, seconds=seconds
            )
            self._post.send(told)
            if self._wanted is not None and told.taken >= self._wanted.least:
                self._wanted = None
                self._counting.waits(False)

        self._calculating.start(lambda: model.publish(buffer, waiting), published)

    def _pending(self, model: Trained, applied: int) -> list[Any]:
        """What is here of each iteration that is not applied yet, in order."""
        assert self._begin is not None
        assert self._view is not None
        own = self._node.life
        by_iteration: dict[int, list[Key]] = {}
        for key in model.assembly:
            if key.number >= applied and (self._begin.overlay == "all" or key.life == own):
                by_iteration.setdefault(key.number, []).append(key)
        return [
            model.pending(iteration, sorted(keys, key=lambda key: key.life))
            for iteration, keys in sorted(by_iteration.items())
        ]

    def _free_slots(self) -> None:
        if self._trained is None or self._node_ is None or self._entering is not None:
            return
        before = self._trained.freed(self._node_.iteration)
        if before is not None:
            self._post.send(d.Freed(before=before))

    def _tell_waiting(self, *, again: bool) -> None:
        self._waiting_at = time.monotonic()
        lines = self._node.waits.lines()
        if self._calculating.busy or self._jobs:
            lines = [*lines, "the optimizer's step"]
        told = "; ".join(lines[:4])[:4000]
        if told and (again or told != self._waiting_told):
            self._waiting_told = told
            self._post.send(d.Waiting(what=told))
            for each in self._wants_state:
                each.answer(d.Waiting(what=told))

    def _tell_figures(self, *, now: bool) -> None:
        if self._network_ is None:
            return
        counts, model = self._network_.counts, self._trained
        figures = self._counting.due(
            counts.bytes_in,
            counts.bytes_out,
            model.assembly.no_room if model is not None else 0,
            model.seconds_applying if model is not None else 0.0,
            model.seconds_overlaying if model is not None else 0.0,
            now=now,
        )
        if figures is not None:
            self._post.send(figures)


def _have_finished(nodes: Sequence[int]) -> str:
    names = " and ".join(f"node {node}" for node in nodes)
    return f"the others have finished ({names}), so what it waits for does not come any more"
