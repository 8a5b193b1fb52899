"""A node: what it has made, what it holds, what may be applied, and what it waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from atoll.peers import views
from atoll.peers.fetching import Fetching
from atoll.peers.ledger import MOST_MISSING, Ledger
from atoll.peers.outputs import (
    Apply,
    Differ,
    Drop,
    FetchState,
    Finished,
    Grant,
    Meet,
    Note,
    Output,
    Removed,
    Send,
    SendPart,
    ViewChanged,
)
from atoll.peers.pace import Limit
from atoll.peers.rounds import Rounds
from atoll.peers.scripts import Script, mismatch
from atoll.peers.settings import Settings
from atoll.peers.synchronise import Synchronisation
from atoll.peers.watch import Watch
from atoll.wire.base import MOST_AHEAD
from atoll.wire.messages import Message
from atoll.wire.peers import (
    WITNESS,
    AbortRound,
    AnswerRound,
    AskJoin,
    AskRound,
    EndRound,
    FetchParts,
    JoinOver,
    Key,
    NodeReport,
    PeerMessage,
    RefuseRound,
    ScriptsDiffer,
    ScriptWaits,
)
from atoll.wire.peerviews import (
    Accept,
    Accepted,
    Held,
    Life,
    Outbid,
    Prepare,
    Promised,
    Report,
    View,
    ViewDecided,
    ViewMessage,
)
from atoll.wire.workerstand import WorkerStand

_OF_VIEWS = (Prepare, Promised, Accept, Accepted, Outbid, ViewDecided)
_NOBODY = View(0, 0, ())
MOST_MEETINGS = 256  # ahead of this node whose parts are taken; the others wait for it in the next


@dataclass(frozen=True)
class _Asking:
    """What a joiner says of itself, and to whom."""

    token: str
    address: str
    contacts: tuple[int, ...]


class Node:
    """A node of a run under strategy `peers`. Each call takes `now` (seconds of a clock that only rises) and
    gives what is to be done, in order; `deadline` says when `poll` is due at the latest.

    Payloads are the runtime's, under their keys. Iterations are numbered without ever going back: where a
    script loads an earlier checkpoint the runtime keeps the difference. Source: docs/peers.md.

    `view` is the newest that it is in; `life` its own (of a joiner incarnation 0, until it is in a view);
    `iteration` k, that it makes next; `met` the meetings that have taken place here; `is_member`: False for a
    joiner that is in no view yet, and for one that was removed.
    """

    def __init__(
        self,
        life: Life,
        view: View,
        settings: Settings,
        rng: np.random.Generator,
        now: float,
        asking: _Asking | None = None,
        known: View | None = None,
    ) -> None:
        """A founding member of `view`; `poll` makes it begin. Its first iteration is its `first` in the view,
        and so is its W. Raises ValueError where it is not in `view`. (`asking` and `known` are `joining`'s
        own.)"""
        self.life, self.view, self.settings = life, _NOBODY, settings
        self._known = known
        self.iteration = 0
        self.is_member = False
        self._rng, self._asking = rng, asking
        self._iterations, self._meetings = Ledger("iterations"), Ledger("meetings")
        self._watch = Watch(settings)
        self._sync = Synchronisation(
            life.node, settings, rng, lambda each: self._out.append(each), self._report, self._others
        )
        self._fetching = Fetching(Limit("a contribution's way", *settings.fetch, start=settings.heartbeat))
        self._change: views.Change | None = None
        self._frozen: dict[Life, Held] | None = None  # what it acknowledges, since it has promised
        self._wish = views.Wish()
        self._overtaken: set[Life] = set()  # newcomers whose state is of before a checkpoint was loaded
        self._joiners: dict[int, tuple[views.Joiner, float]] = {}  # by node, and when it last asked
        self._known_tokens: set[str] = set()
        self._wanted: tuple[int, int] | None = None  # an iteration, and the least W for it
        self._wanted_since = math.inf
        self._stand: WorkerStand | None = None  # where its script waits, as far as it has said
        self._scripts: dict[Life, Script | None] = {}  # of others, as they last said; None: it computes
        self._risen = now  # when W last rose
        self._ordered_at = now  # when the one before the next to be applied was handed out
        self._own_meeting: tuple[int, int] | None = None  # number, at
        self._met_since = math.inf  # when it came to that
        self._has_met = False  # it has been in a meeting of its own
        self._source: Life | None = None  # a joiner: whose state it waits for
        self._refused_state: set[Life] = set()
        self._impossible: set[Life] = set()  # members whose reports cannot be true
        self._finished_at = math.inf
        self._is_over = False
        self._withheld: dict[Life, list[Key]] = {}  # of its own, for which a member has no room yet
        self._dropped: tuple[float, float] = (-1, -1)  # below which iterations and meetings
        self._arriving: set[Key] = set()  # some of whose payload is here
        self._watch_at = -math.inf  # when somebody may be suspected; minus infinity: look now
        self._whole = -1  # what was last acknowledged by a report of its own
        self._tell = True  # a report is due
        self._lacks_more = True  # others may hold what it lacks, since it last looked
        self._moved = True  # it holds more than when the change of the view was last polled
        self._heartbeat_at = now
        self._ask_at = now
        self._newest_told: dict[int, float] = {}  # by node, when it was last told of the view
        self._out: list[Output] = []
        if asking is None:
            entry = next((member for member in view.members if member.life == life), None)
            if entry is None:
                raise ValueError(f"{_name(life)} is not in view {view.number}")
            self.iteration = entry.first
            self._iterations = Ledger("iterations", entry.first)
            self._install(now, view, None)

    @classmethod
    def joining(
        cls,
        node: int,
        token: str,
        address: str,
        contacts: list[int],
        settings: Settings,
        rng: np.random.Generator,
        now: float,
        known: View | None = None,
    ) -> Node:
        """One that asks to be in the next view, at any of `contacts` (node ids), until it is: then it hands
        out ViewChanged, and FetchState. `token` is a name that no other process has. `known` is the newest
        view that this process knows, of Removed: others may have not heard of it, and its members be gone."""
        asking = _Asking(token, address, tuple(contact for contact in contacts if contact != node))
        return cls(Life(node, 0), _NOBODY, settings, rng, now, asking, known)

    @property
    def applied(self) -> int:
        """W_i: iterations whose Apply is done."""
        return self._iterations.done

    @property
    def rounds(self) -> Rounds:
        """Its own round, and its flag V_i."""
        return self._sync.rounds

    @property
    def is_whole(self) -> bool:
        """Whether it is a member that has its state: a joiner has none at first."""
        return self.is_member and self._source is None

    @property
    def is_ready(self) -> bool:
        """Whether it holds all that its view began with, and so votes on the next. A majority that is not
        ready cannot go on without the others."""
        return self.is_whole and self._change is not None and self._change.ready

    @property
    def met(self) -> int:
        return self._meetings.done

    # -- the devices --------------------------------------------------------------------------------------

    def handle_contributed(self, now: float, iteration: int) -> list[Output]:
        """The node's own contribution is in M_i, whole; k becomes `iteration` + 1. Raises ValueError where it
        is not this node's next."""
        if not self.is_whole:
            return self._flush()  # what it computed counts nowhere
        if iteration != self.iteration:
            raise ValueError(
                f"{_name(self.life)} contributes iteration {iteration}; its next is {self.iteration}"
            )
        self.iteration += 1
        self._give(Key("iterations", iteration, self.life))
        return self._advance(now)

    def handle_wanted(
        self, now: float, iteration: int, least: int, stand: WorkerStand | None = None
    ) -> list[Output]:
        """Record that devices wait for parameters of global iteration `least` or later to compute
        `iteration`.

        `least` is `iteration` - stale_max, or more where the script wants all iterations applied. A Grant
        answers, now or later. Until then synchronisation rounds start by the rules. A repeated call replaces
        the former one. `stand` is the script's place. Raises ValueError for a `least` above `iteration`.
        """
        if least > iteration:
            raise ValueError(f"iteration {iteration} cannot need global iteration {least}")
        if self._wanted is None:
            self._wanted_since = now
        self._wanted = (iteration, least)
        if self._own_meeting is None:  # else it is another device of the node that asks
            self._stand = stand
        self._watch_at = -math.inf
        return self._advance(now)

    def handle_applied(self, now: float, iteration: int) -> list[Output]:
        """An Apply is done: W_i is `iteration` + 1."""
        if iteration != self.applied or iteration >= self._iterations.ordered:
            raise ValueError(
                f"iteration {iteration} is applied at {_name(self.life)}, whose W is {self.applied}"
            )
        self._iterations.done = iteration + 1
        self._sync.rest.note(now - self._risen)
        self._risen, self._watch_at, self._lacks_more = now, -math.inf, True
        return self._advance(now)

    def handle_met(self, now: float, number: int, at: int, stand: WorkerStand | None = None) -> list[Output]:
        """Record that the node's own part of its `number`-th meeting is in M_i.

        `at` is the iteration at whose beginning the script last was. Members that joined later take part if
        their first iteration is `at` or before. A joiner's first `number` is the number that the others'
        scripts had when they came to the joiner's first iteration. `stand` is the script's place. Raises
        ValueError where `number` is not the node's next meeting.
        """
        if not self.is_member:
            return self._flush()
        if self._own_meeting is not None or (self._has_met and number != self.met) or number < self.met:
            raise ValueError(f"{_name(self.life)} comes to meeting {number}; its next is {self.met}")
        if not self._has_met:
            self._meetings.done = self._meetings.ordered = number
            self._meetings.settle(self.life, number)  # others' are held by who holds them: votes hang on that
        self._has_met, self._own_meeting, self._stand = True, (number, at), stand
        self._watch_at, self._met_since = -math.inf, now
        self._give(Key("meetings", number, self.life))
        self._tell = True
        return self._advance(now)

    def handle_finished(self, now: float) -> list[Output]:
        """The script has ended: no other iteration and no other meeting. Finished is handed out when every
        member has all that this one has made (or has gone), or `linger` seconds have passed."""
        if self._finished_at == math.inf:
            self._finished_at = now
            self._wanted, self._tell = None, True
        return self._advance(now)

    def handle_replaced(self, now: float) -> list[Output]:
        """What is trained was replaced, as the scripts of all members load a checkpoint: a newcomer that has
        not begun is to come in once more, for its state may be of before."""
        new = {each.life for each in self.view.members if each.token and each.first >= self.iteration}
        if self.is_member and not self._overtaken >= new:
            self._overtaken |= new
            self._watch_at = -math.inf
        return self._advance(now)

    def _give(self, key: Key) -> None:
        """A contribution of its own goes to everybody."""
        self._ledger(key).hold(key)
        self._moved = True
        for life in self._others():
            if key.stream == "iterations" and key.number >= self._applied_by(life) + self.settings.slots:
                self._withheld.setdefault(life, []).append(key)
            else:
                self._out.append(SendPart(life.node, key))

    def _applied_by(self, life: Life) -> int:
        """At least so many iterations another member has applied: it has said so, or has made what takes
        them."""
        made, told = self._iterations.prefix[life], self._iterations.floors[life]
        has_made = made > self._iterations.firsts[life]
        return max(told, made - 1 - self.settings.stale_max) if has_made else told

    def _release(self) -> None:
        """Send what there was no room for at the receiver, where there is now."""
        for life, keys in list(self._withheld.items()):
            room = self._applied_by(life) + self.settings.slots
            while keys and keys[0].number < room:
                key = keys.pop(0)
                if self._iterations.acks[life].get(self.life, 0) <= key.number:
                    self._out.append(SendPart(life.node, key))
            if not keys:
                del self._withheld[life]

    # -- the network --------------------------------------------------------------------------------------

    def handle_message(self, now: float, sender: int, message: PeerMessage) -> list[Output]:
        """A message from a node, by its id (WITNESS: the hub). One of an old view changes nothing, and is
        answered by the newest; one of another incarnation than the view's is dropped."""
        if isinstance(message, AskJoin):
            self._handle_join(now, sender, message)
        elif isinstance(message, JoinOver):
            if self._asking is not None and not self.is_member and message.token == self._asking.token:
                self._leave("it was let in and removed again before it knew")
        elif isinstance(message, ViewDecided):
            if self._may_tell(sender, message.view):
                self._learn(now, message.view)
        elif not self.is_member:
            self._tell_known(sender, message)
        elif isinstance(message, _OF_VIEWS):
            if self._change is not None and self._may_say(sender, message):
                self._watch.handle_heard(now, sender)
                report = self._report(live=True)
                self._after_change(now, report, self._change.handle_message(now, sender, message, report))
        elif self._is_current(now, sender, message.report):
            self._watch.handle_heard(now, sender)
            self._absorb(now, message.report)
            self._dispatch(now, sender, message)
        return self._advance(now)

    def _may_say(self, sender: int, message: ViewMessage) -> bool:
        """Whether a voter can say this of views: of a later one than this node's only its members can ask."""
        if isinstance(message, Promised):
            return message.report is None or self._is_possible(message.report)
        if isinstance(message, (Prepare, Accept)) and message.view.number > self.view.number:
            is_voter = any(each.life.node == sender for each in message.view.members)
            return is_voter and self._descends(message.view)
        return True

    def _may_tell(self, sender: int, view: View) -> bool:
        """Whether a node can know of a decided view: it has been a member before it; of another beginning of
        the run it is one."""
        if sender == WITNESS or view.founding == self.view.founding:
            return sender == WITNESS or sender in view.last
        return any(each.life.node == sender for each in view.members)

    def _descends(self, view: View) -> bool:
        """Whether a view can come after this node's own: each remembers all incarnations that were before."""
        if view.founding != self.view.founding:
            return view.founding > self.view.founding
        known = self.view.last.items()
        return all(view.last.get(node, -1) >= incarnation for node, incarnation in known)

    def _tell_known(self, sender: int, message: PeerMessage) -> None:
        """To a joiner somebody speaks of a view, which may be older than one that it knows."""
        number = math.inf
        if isinstance(message, (Prepare, Accept)):
            number = message.view.number
        elif isinstance(message, NodeReport):
            number = message.report.view
        if self._known is not None and number < self._known.number:
            self._out.append(Send(sender, ViewDecided(view=self._known)))

    def _dispatch(self, now: float, sender: int, message: PeerMessage) -> None:
        if isinstance(message, NodeReport):
            if message.whole:
                self._watch.handle_whole(message.report.life)
            if message.finished:
                self._watch.handle_finished(message.report.life)
                self._watch_at = -math.inf
            self._note_script(message)
        elif isinstance(message, ScriptsDiffer):
            self._differ(message.line)
        elif isinstance(message, FetchParts):
            for key in dict.fromkeys(message.keys):  # each once
                if self._ledger(key).has(key):
                    self._out.append(SendPart(sender, key))
        elif isinstance(message, AskRound):
            self._sync.handle_ask(now, sender, message.round)
        elif isinstance(message, AnswerRound):
            self._sync.handle_answer(now, message)
        elif isinstance(message, RefuseRound):
            self._sync.handle_refusal(now, sender, message.round)
        elif isinstance(message, (EndRound, AbortRound)) and message.round.node != sender:
            pass  # a round is its starter's to end
        elif isinstance(message, EndRound):
            for report in message.reports:
                is_other = report.view == self.view.number and report.life in self._iterations.acks
                if is_other and self._is_possible(report):
                    self._absorb(now, report)
            self._sync.handle_over(message.round, f"ended: the least iteration is {message.iteration}")
        elif isinstance(message, AbortRound):
            self._sync.handle_over(message.round, "given up by its starter")

    def refusal(self, key: Key) -> str:
        """Why the payload of `key` is not taken now, in one line; empty where it is: ask before anything is
        allocated. What is refused for want of room is asked for again in time; iteration W_i never is."""
        if (useless := self._useless(key)) or key.number < self._room(key.life, self._ledger(key)):
            return useless
        return f"no room for iteration {key.number} of {_name(key.life)} while {self.applied} is not applied"

    def _useless(self, key: Key) -> str:
        """Why the payload of `key` will never be taken; empty where it may be."""
        ledger = self._ledger(key)
        if key.life not in ledger.cuts or not self.is_member:
            return f"{_name(key.life)} is in no view that is known here"
        if key.number >= ledger.cuts[key.life]:
            return f"of {_name(key.life)} only what is below {ledger.cuts[key.life]} counts"
        if ledger.is_settled(key) or (key.stream == "iterations" and key.number < ledger.firsts[key.life]):
            return f"{key.stream} {key.number} of {_name(key.life)} is not needed"
        return ""

    def _room(self, life: Life, ledger: Ledger) -> float:
        """Below which a contributor's numbers are taken."""
        if ledger is self._meetings:
            return MOST_MEETINGS + (self.met if self._has_met else ledger.prefix[life])
        wanted = self._change.wanted if self._change is not None else ()
        asked = max((each.held.iterations for each in wanted if each.held.life == life), default=0)
        return max(self.applied + self.settings.slots, asked)

    def handle_heard(self, now: float, life: Life) -> None:
        """Anything has come from a node in this life: a chunk, say."""
        if life in self._iterations.acks:
            self._watch.handle_heard(now, life.node)

    def handle_arriving(self, now: float, key: Key) -> list[Output]:
        """Some of the payload of `key` has come, and the rest is on its way: it need not be asked for yet.
        Where that will never be of use, what is here comes back in a Drop."""
        self._arriving.add(key)
        self._fetching.handle_arriving(now, key)
        return self._flush()

    def handle_part(self, now: float, key: Key, since: int = 0) -> list[Output]:
        """The payload of `key` is here, whole, from whomever. `since`, of a part in a meeting: the first
        number of its node's meetings (0, but for joiners). What nobody needs comes back in a Drop."""
        ledger = self._ledger(key)
        self._arriving.discard(key)
        if self.refusal(key):
            if not ledger.has(key):
                self._out.append(Drop((key,)))
            return self._advance(now)
        if key.stream == "meetings":
            ledger.settle(key.life, since)
            self._tell = True
        ledger.hold(key)
        self._moved = self._lacks_more = True
        self._fetching.handle_arrived(now, key)
        if key.stream == "iterations":
            self._watch.handle_iteration(now, key.life, key.number + 1)
        return self._advance(now)

    # -- time ---------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Output]:
        """What is due by `now`."""
        return self._advance(now)

    @property
    def deadline(self) -> float:
        """When to call `poll`; infinity: no need to."""
        return min(self.timers().values(), default=math.inf)

    def timers(self) -> dict[str, float]:
        """Each timer that runs, by name, and when it is due."""
        if self._is_over:
            return {}
        if not self.is_member:
            return {"ask to join": self._ask_at} if self._asking is not None else {}
        timers = {
            "heartbeat": self._heartbeat_at,
            "a member's silence or standstill": self._watch_at,
            "own round": self.rounds.until,
            "another's round": self.rounds.flag_until,
            "fetch": self._fetching.deadline,
            "linger": self._finished_at + self.settings.linger,
        }
        if self._change is not None:
            timers["change of the view"] = self._change.deadline
        return {name: when for name, when in timers.items() if when < math.inf}

    def waiting_for(self) -> list[str]:
        """Whom and what this node waits for, a line each; empty where it waits for nobody."""
        if not self.is_member:
            return [] if self._asking is None else ["a view that has this node in it"]
        if self._source is not None:
            return [f"the state, of {_name(self._source)}"]
        lines = []
        if self._wanted is not None:
            number = self._iterations.ordered
            lacking = [life for life in self._iterations.contributors(number) if self._lacks(life, number)]
            lines += [f"{_name(life)}, for its contribution of iteration {number}" for life in lacking]
            if not lacking and number == self.applied:
                lines.append(f"a majority of view {self.view.number}, to hold iteration {number}")
            elif not lacking:
                lines.append(f"iteration {self.applied}, which is being applied")
        lines += [f"{_name(life)}, to come to meeting {self.met}" for life in self._absent()]
        if self._own_meeting is not None and not lines:
            lines.append(f"a majority of view {self.view.number}, to hold the parts of meeting {self.met}")
        return [self.lost_majority(), *lines] if self.lost_majority() else lines

    def without(self) -> list[int]:
        """The nodes without which there is no majority of the view; none: as far as is known there is one."""
        nodes = [each.life.node for each in self.view.members]
        gone = [node for node in nodes if node in self._wish.remove]
        return [] if len(nodes) == 2 or 2 * (len(nodes) - len(gone)) > len(nodes) else gone

    @property
    def is_meeting(self) -> bool:
        """Whether the script has come to a meeting that has not taken place."""
        return self._own_meeting is not None

    def lost_majority(self) -> str:
        """Who must answer before anything more can be decided, where too few others are left for that, in
        words; else empty. (In a view of two the witness may be the other voter.)"""
        gone = self.without()
        if not gone:
            return ""
        nodes = self.view.members
        names = " and ".join(f"node {node}" for node in gone)
        return (
            f"a majority of the {len(nodes)} nodes of view {self.view.number}: there is none without {names}"
            "; if they are lost, go on from a checkpoint"
        )

    def held(self) -> list[Key]:
        """The keys whose payloads must be kept, own ones too."""
        return self._iterations.held() + self._meetings.held()

    # -- what a call leads to -----------------------------------------------------------------------------

    def _flush(self) -> list[Output]:
        out, self._out = self._out, []
        return out

    def _advance(self, now: float) -> list[Output]:
        """All that may be done now is done."""
        if self._is_over:
            return self._flush()
        if not self.is_member:
            self._ask_to_join(now)
            return self._flush()
        self._poll_change(now)
        if self.is_member:
            self._wish_for(now)
        if self.is_member:
            self._apply(now)
            self._meet()
            self._release()
            self._drop()
            self._grant()
            self._sync.poll(now, self._wanted is not None)
            self._fetch(now)
            self._acknowledge(now)
            self._compare_scripts()
            self._end(now)
        return self._flush()

    def _apply(self, now: float) -> None:
        """Iterations of which a majority is known to hold every contribution, and this node all of them."""
        ledger = self._iterations
        while self.is_whole:
            number = ledger.ordered
            lives = ledger.contributors(number)
            if not lives and all(ledger.firsts[life] <= number for life in ledger.members):
                return  # nobody: only before the first iteration of all
            keys = tuple(Key("iterations", number, life) for life in lives)
            if not all(ledger.has(key) and self._shared(ledger, key.life) > number for key in keys):
                return
            ledger.ordered, self._ordered_at = ledger.ordered + 1, now
            majority = len(ledger.members) // 2 + 1
            members = f"{len(ledger.members)} members of view {self.view.number}"
            reason = f"at least {majority} of the {members} hold each of {len(keys)}"
            self._out.append(Apply(number, keys, reason))

    def _meet(self) -> None:
        ledger = self._meetings
        if self._own_meeting is None:
            return
        number, at = self._own_meeting
        keys = tuple(Key("meetings", number, life) for life in ledger.parties(number, at))
        if all(ledger.has(key) and self._shared(ledger, key.life) > number for key in keys):
            ledger.done = ledger.ordered = number + 1
            self._own_meeting, self._stand, self._tell = None, None, True
            self._out.append(
                Meet(number, keys, f"a majority of view {self.view.number} holds each of {len(keys)}")
            )

    def _shared(self, ledger: Ledger, life: Life) -> int:
        """What a majority is known to hold; of its own holding only what it may acknowledge counts."""
        own = ledger.prefix[life]
        if self._frozen is not None:
            held = self._frozen[life]
            own = held.iterations if ledger is self._iterations else held.meetings
        return ledger.shared(life, own)

    def _drop(self) -> None:
        """What every member has applied is kept no longer, nor what has come in part and is of no use."""
        if useless := sorted(key for key in self._arriving if self._useless(key)):
            self._arriving.difference_update(useless)
            self._out.append(Drop(tuple(useless)))
        applied = min([self.applied, *self._floors(self._iterations)])
        met = min([self.met if self._has_met else math.inf, *self._floors(self._meetings)])
        if (applied, met) == self._dropped:
            return
        self._dropped = (applied, met)
        if met < math.inf:  # what all have met needs no other holder
            for life in self._meetings.prefix:
                self._meetings.settle(life, int(met))
        keys = self._iterations.unneeded(applied) + self._meetings.unneeded(met)
        if keys:
            self._out.append(Drop(tuple(keys)))

    def _floors(self, ledger: Ledger) -> list[float]:
        """What each other member has done. A newcomer that has not begun with meetings needs none of those
        that are under way."""
        floors: list[float] = []
        for member in self.view.members:
            if member.life != self.life:
                told = ledger.floors[member.life]
                if ledger is self._iterations:
                    floors.append(self._applied_by(member.life))
                else:
                    is_new = told == 0 and bool(member.token)
                    floors.append(self._begun(member.life) if is_new else told)
        return floors

    def _begun(self, life: Life) -> float:
        """The number of the first part of a newcomer that is here; infinity while there is none."""
        here = self._meetings.here.get(life)
        return min(here) if here else math.inf

    def _grant(self) -> None:
        if self._wanted is not None and self.applied >= self._wanted[1] and self.is_whole:
            iteration, least = self._wanted
            self._wanted, self._wanted_since, self._stand = None, math.inf, None
            reason = f"M_i is at {self.applied}, and iteration {iteration} needs {least}"
            self._out.append(Grant(iteration, self.applied, reason))

    # -- reports, and what they say -----------------------------------------------------------------------

    def _report(self, live: bool = False) -> Report:
        """Where it is. Not `live`: what it has promised not to acknowledge is not in it."""
        if self._frozen is not None and not live:
            held = tuple(self._frozen.values())
        else:
            meetings = self._meetings.prefix
            held = tuple(
                Held(life, prefix, meetings[life]) for life, prefix in self._iterations.prefix.items()
            )
        met = self.met if self._has_met else 0
        return Report(self.life, self.view.number, self.iteration, self.applied, met, held)

    def _node_report(self) -> NodeReport:
        is_finished = self._finished_at < math.inf
        return NodeReport(
            report=self._report(), finished=is_finished, whole=self.is_whole, waits=self._script_waits()
        )

    def _script_waits(self) -> ScriptWaits | None:
        """Return the meeting or iteration for which this node's script waits, or None."""
        if self._stand is None:
            return None
        if self._own_meeting is not None:
            number, at = self._own_meeting
            return ScriptWaits(self._stand, meeting=number, at=at)
        return ScriptWaits(self._stand, least=self._wanted[1]) if self._wanted is not None else None

    def _script_of(self, life: Life, iteration: int, met: int, waits: ScriptWaits | None) -> Script | None:
        return None if waits is None else Script(iteration, met, waits, self._iterations.firsts[life])

    def _note_script(self, message: NodeReport) -> None:
        """Store a member's report on whether its script waits."""
        report = message.report
        before, waits = self._scripts.get(report.life), message.waits
        self._scripts[report.life] = self._script_of(report.life, report.iteration, report.met, waits)
        if (before is None) != (waits is None):
            self._watch_at = -math.inf

    def _compare_scripts(self) -> None:
        """End all scripts where the members' scripts wait for each other in vain."""
        waits, others = self._script_waits(), self._others()
        if waits is None or not others:
            return
        met = self.met if self._has_met else 0
        scripts = {life: self._scripts.get(life) for life in others}
        scripts[self.life] = self._script_of(self.life, self.iteration, met, waits)
        if line := mismatch(scripts, self._newcomers()):
            self._tell_differ(line)

    def _newcomers(self) -> set[Life]:
        return {member.life for member in self.view.members if member.token}

    def handle_differ(self, line: str) -> list[Output]:
        """End the run: a meeting shows that scripts stand at inconsistent places. `line` describes them."""
        self._tell_differ(line)
        return self._flush()

    def _tell_differ(self, line: str) -> None:
        if not self._is_over:
            self._to_all(ScriptsDiffer(report=self._report(), line=line))
            self._differ(line)

    def _differ(self, line: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._out.append(Differ(line))

    def _acknowledge(self, now: float) -> None:
        """Say what is held, when an iteration has become whole, and at least each heartbeat."""
        ledger = self._iterations
        needed = [prefix for life, prefix in ledger.prefix.items() if prefix < ledger.cuts[life]]
        whole = min(needed, default=self._whole)
        if whole > self._whole and self._frozen is None:
            self._whole, self._tell = whole, True
        if self._tell or now >= self._heartbeat_at:
            self._tell = False
            self._heartbeat_at = now + self.settings.heartbeat
            self._to_all(self._node_report())

    def _is_current(self, now: float, sender: int, report: Report) -> bool:
        """Whether a report is of a member of this view, in this view."""
        if not self.is_member or report.life.node != sender:
            return False
        if report.view == self.view.number and report.life in self._iterations.acks:
            return self._is_possible(report)
        if now >= self._newest_told.get(sender, -math.inf) + self.settings.heartbeat / 2:
            self._newest_told[sender] = now
            if report.view > self.view.number:  # whoever is asked in an old view answers with the newest
                self._out.append(Send(sender, self._node_report()))
            else:
                self._out.append(Send(sender, ViewDecided(view=self.view)))
        return False

    def _is_possible(self, report: Report) -> bool:
        """Whether a member of this view can be there. Nothing is applied without this node's contribution, so
        nobody is far ahead of it; MOST_AHEAD leaves room for all that is honest. What is not possible is told
        of once, and not taken: it would move what this node waits for out of reach."""
        most = self.iteration + MOST_AHEAD
        counts = [report.iteration, report.applied, *(held.iterations for held in report.held)]
        met = [report.met, *(held.meetings for held in report.held)] if self._has_met else [0]
        if max(counts) <= most and max(met) <= self.met + MOST_AHEAD:
            return True
        if report.life not in self._impossible:
            self._impossible.add(report.life)
            self._note(
                "refused",
                _name(report.life),
                f"it reports iteration {max(counts)} and meeting {max(met)}, where this node is at iteration "
                f"{self.iteration} and meeting {self.met}: that cannot be, and is not taken",
            )
        return False

    def _absorb(self, now: float, report: Report) -> None:
        """What a member holds and has done."""
        life = report.life
        if life not in self._iterations.acks:
            return
        for held in report.held:
            more = self._iterations.acknowledge(life, held.life, held.iterations)
            more |= self._meetings.acknowledge(life, held.life, held.meetings)
            self._lacks_more |= more
            if held.life == self.life:
                self._pass_meetings(held.meetings)
        for ledger, done in ((self._iterations, report.applied), (self._meetings, report.met)):
            ledger.floors[life] = max(ledger.floors[life], done)
        self._watch.handle_iteration(now, life, report.iteration, report.applied)

    def _fetch(self, now: float) -> None:
        """Ask for what others hold and this node lacks."""
        if not self._lacks_more and now < self._fetching.deadline:
            return
        self._lacks_more = False
        keys = []
        for ledger in (self._iterations, self._meetings):
            for life in ledger.prefix:
                if life != self.life:
                    numbers = ledger.missing(life, self._room(life, ledger))
                    keys += [Key(ledger.stream, number, life) for number in numbers]
        keys += [key for key in self._wanted_keys() if key not in keys]
        # What was made before the others knew a newcomer was never sent to it.
        is_new = self._asking is not None and not self._iterations.here.get(self.life)
        self._fetching.update(now, keys, hurry=is_new)
        if now >= self._fetching.deadline:
            for node, asked in self._fetching.poll(now, self._sources).items():
                self._note(
                    "fetched",
                    _name(asked[0].life),
                    f"{len(asked)} contributions from node {node} did not come",
                )
                self._out.append(Send(node, FetchParts(report=self._report(), keys=asked)))

    def _wanted_keys(self) -> list[Key]:
        """What the change of the view waits for."""
        keys = []
        for each in self._change.wanted if self._change is not None else ():
            for ledger, stop in (
                (self._iterations, each.held.iterations),
                (self._meetings, each.held.meetings),
            ):
                start = ledger.prefix.get(each.held.life, stop)
                stop = min(stop, start + MOST_MISSING)  # the rest in its turn
                numbers = (Key(ledger.stream, number, each.held.life) for number in range(start, stop))
                keys += [key for key in numbers if not ledger.has(key)]
        return keys

    def _sources(self, key: Key) -> list[int]:
        """Who has it: who has said so, then all others."""
        holding = [life.node for life in self._ledger(key).holders(key)]
        return holding + [life.node for life in self._others() if life.node not in holding]

    # -- members come and go ------------------------------------------------------------------------------

    def _wish_for(self, now: float) -> None:
        """Whom this node would have removed, and who wants to join."""
        if now < self._watch_at and not (self._joiners or self._wish.remove or self._wish.join):
            return
        awaited, absent = self._awaited(), dict.fromkeys(self._absent(), self._met_since)
        why = "it came in while a checkpoint was loaded"
        meeting = {
            life for life, script in self._scripts.items() if script and script.waits.meeting is not None
        }
        suspects = self._watch.suspects(now, awaited, absent, meeting - self._newcomers())
        remove = {life.node: why for life in self._overtaken} | suspects
        self._watch_at = self._watch.deadline(awaited, absent)
        late = now - self.settings.silence[1]
        self._joiners = {node: pair for node, pair in self._joiners.items() if pair[1] > late}
        joiners = tuple(joiner for joiner, _ in self._joiners.values())
        if self._watch.without_state() - remove.keys() - self._joiners.keys():
            joiners = ()  # one newcomer after the other: or a majority might be left that has no state
        wish = views.Wish(remove, joiners)
        old = self._wish
        if (wish.remove.keys(), wish.join) == (old.remove.keys(), old.join) or self._change is None:
            return
        for node in wish.remove.keys() - old.remove.keys():
            self._note("suspected", f"node {node}", wish.remove[node])
        self._wish = wish
        report = self._report(live=True)
        self._after_change(now, report, self._change.handle_wish(now, wish, report))

    def _poll_change(self, now: float) -> None:
        change = self._change
        if change is None:
            return
        due = now >= change.deadline or (self._moved and (change.promised or not change.ready))
        if due:
            self._moved = False
            change.settings.answer, change.settings.backoff = (
                self._sync.answer.seconds,
                self._sync.backoff.seconds,
            )
            report = self._report(live=True)
            self._after_change(now, report, change.poll(now, report))

    def _after_change(self, now: float, report: Report, step: views.Step) -> None:
        assert self._change is not None
        if self._change.promised and self._frozen is None:
            self._frozen = {held.life: held for held in report.held}
        self._lacks_more |= bool(self._change.wanted)
        for each in self._change.wanted:
            if each.held.life == self.life:
                self._pass_meetings(each.held.meetings)
        self._out += [Send(to, message) for to, message in step.sends]
        for reason in step.reasons:
            self._note("view", f"after {self.view.number}", reason)
        if step.decided is not None:
            self._learn(now, step.decided)

    def _pass_meetings(self, below: int) -> None:
        """Somebody counts this newcomer's parts below as held, and its script has come to no meeting yet: so
        those meetings are over for all who were in them (`_drop`), and nobody keeps anything of them. The
        next view may begin with them all the same."""
        if self._has_met or below <= self._meetings.prefix[self.life]:
            return
        for life in self._meetings.prefix:
            self._meetings.settle(life, below)
        self._moved = self._lacks_more = True

    def _learn(self, now: float, view: View) -> None:
        """A view was decided."""
        if self._is_over or (view.founding, view.number) <= (self.view.founding, self.view.number):
            return
        if not self._descends(view):
            return
        asking = self._asking
        if asking is not None and not self.is_member:
            mine = (self.life.node, asking.token)
            entry = next((each for each in view.members if (each.life.node, each.token) == mine), None)
            if entry is not None:
                self.life, self.iteration = entry.life, entry.first
                self._iterations.done = self._iterations.ordered = entry.base
                self._install(now, view, entry.base)
                self._ask_for_state()
        elif any(member.life == self.life for member in view.members):
            self._install(now, view, None)
            if self._source is not None and self._source not in self._others():
                self._ask_for_state()
        else:
            self.view = view
            self._leave(f"view {view.number} was decided without it")

    def _leave(self, reason: str) -> None:
        self.is_member, self._is_over = False, True
        self._out.append(Removed(self.view, f"{_name(self.life)}: {reason}"))

    def _install(self, now: float, view: View, base: int | None) -> None:
        self.view, self.is_member = view, True
        dropped = self._iterations.install(view, self.life, base)
        dropped += self._meetings.install(view, self.life, base)
        if dropped:
            self._out.append(Drop(tuple(dropped)))
        waits = views.Settings(
            self._sync.answer.seconds, self._sync.backoff.seconds, self.settings.stale_max + 1
        )
        self._change = views.Change(self.life.node, view, waits, self._rng)
        self._change.has_state = self._source is None
        self._frozen, self._wish = None, views.Wish()
        self._overtaken &= set(self._others())
        self._scripts = {life: script for life, script in self._scripts.items() if life in self._others()}
        self._dropped, self._watch_at = (-1, -1), -math.inf
        self._sync.reset()
        self._watch.install(now, self._others())
        self._withheld = {life: keys for life, keys in self._withheld.items() if life in self._others()}
        self._known_tokens |= {member.token for member in view.members if member.token}
        self._joiners = {
            n: pair for n, pair in self._joiners.items() if pair[0].token not in self._known_tokens
        }
        self._refused_state.clear()
        self._impossible.clear()
        self._tell = self._moved = self._lacks_more = True
        self._out.append(ViewChanged(view, f"view {view.number} is decided"))

    def _handle_join(self, now: float, sender: int, message: AskJoin) -> None:
        if not self.is_member or message.node != sender or not message.token:
            return
        if any(member.token == message.token for member in self.view.members):
            self._out.append(Send(sender, ViewDecided(view=self.view)))
        elif message.token in self._known_tokens:
            self._out.append(Send(sender, JoinOver(token=message.token)))
        else:
            joiner = views.Joiner(message.node, message.token, message.address)
            old = self._joiners.get(message.node)
            self._joiners[message.node] = (old[0] if old is not None and old[0] == joiner else joiner, now)

    def _ask_to_join(self, now: float) -> None:
        if self._asking is None or now < self._ask_at:
            return
        self._ask_at = now + self.settings.heartbeat
        asking = self._asking
        for contact in asking.contacts:
            message = AskJoin(node=self.life.node, token=asking.token, address=asking.address)
            self._out.append(Send(contact, message))

    def _ask_for_state(self) -> None:
        """The state comes from any member; newcomers may not have one either, and are asked last. Until it is
        here, this node has no vote: with the witness alone it could decide that the run has no state."""
        assert self._change is not None
        self._change.has_state = False
        members = sorted(
            self.view.members, key=lambda each: (each.life in self._refused_state, bool(each.token))
        )
        others = [member for member in members if member.life != self.life]
        if others:
            self._source = source = others[0].life
            base = self._iterations.done
            reason = f"it joins with view {self.view.number}, in which {base} iterations are settled"
            self._out.append(FetchState(source.node, base, reason))

    def handle_state(self, now: float, iteration: int) -> list[Output]:
        """A joiner: the state is here, and stands at global iteration `iteration`, which is W_i now. Raises
        ValueError for one that is older than was asked for."""
        if self._source is None or not self.is_member:
            return self._flush()
        ledger = self._iterations
        if iteration < ledger.done:
            raise ValueError(f"a state at {iteration}, where {ledger.done} is settled")
        self._source, self._tell, self._moved, self._lacks_more = None, True, True, True
        assert self._change is not None
        self._change.has_state = True
        ledger.done = ledger.ordered = iteration
        for life in ledger.prefix:
            ledger.settle(life, iteration)
        return self._advance(now)

    def handle_state_failed(self, now: float, source: int, reason: str) -> list[Output]:
        """A joiner: `source` does not give its state (in time)."""
        if self._source is not None and self.is_member:
            self._note("no state", f"node {source}", reason)
            lives = {member.life for member in self.view.members if member.life.node == source}
            self._refused_state |= lives
            if self._refused_state >= set(self._others()):
                self._refused_state = lives
            self._ask_for_state()
        return self._advance(now)

    def _end(self, now: float) -> None:
        """All have what this node has made, or are gone."""
        if self._finished_at == math.inf:
            return
        missing = [life for life in self._others() if not self._has_all(now, life)]
        if missing and now < self._finished_at + self.settings.linger:
            return
        names = ", ".join(_name(life) for life in missing)
        # To those who were left out as well: who waits to come in again is to know that the run is over.
        ever = {*self.view.last, *(life.node for life in self._others())} - {self.life.node}
        self._out += [Send(node, self._node_report()) for node in sorted(ever)]
        self._out.append(Finished(f"{names} did not take all in time" if missing else "all have taken all"))
        self._is_over = True

    def _has_all(self, now: float, life: Life) -> bool:
        floors = self._iterations.floors[life], self._meetings.floors[life]
        return floors >= (self.iteration, self.met) or self._watch.is_gone(now, life)

    # -- small things -------------------------------------------------------------------------------------

    def _ledger(self, key: Key) -> Ledger:
        return self._iterations if key.stream == "iterations" else self._meetings

    def _others(self) -> list[Life]:
        return [life for life in self._iterations.members if life != self.life]

    def _to_all(self, message: Message) -> None:
        self._out += [Send(life.node, message) for life in self._others()]

    def _note(self, what: str, about: str, reason: str) -> None:
        self._out.append(Note(what, about, reason))

    def _lacks(self, life: Life, number: int) -> bool:
        return self._iterations.prefix[life] <= number

    def _awaited(self) -> dict[Life, float]:
        """Whose next iteration this node's devices or its script wait for, and since when."""
        awaited: dict[Life, float] = {}
        if self._wanted is not None:
            # Not since W rose: behind one that was left out many are handed out at once, and applied later.
            number, since = self._iterations.ordered, max(self._wanted_since, self._ordered_at, self._risen)
            for life in self._others():  # who has made it is not awaited: it is on its way, or fetched
                has_made = self._watch.iteration(life) > number or not self._lacks(life, number)
                if self._iterations.firsts[life] <= number and not has_made:
                    awaited[life] = since
        if self._own_meeting is not None:  # before they come to it, they have iterations to make
            for life in self._absent():
                if self._watch.iteration(life) < self._own_meeting[1]:
                    awaited[life] = self._met_since
        return awaited

    def _absent(self) -> list[Life]:
        """Who has not come to the meeting that this node is in."""
        if self._own_meeting is None:
            return []
        number, at = self._own_meeting
        lives = [life for life in self._meetings.parties(number, at) if life in self._meetings.acks]
        return [life for life in lives if self._meetings.prefix[life] <= number]


def _name(life: Life) -> str:
    return f"node {life.node} ({life.incarnation})"
