"""The log of commits and the workers' meetings, kept by shard 0.

Each Setup begins a new generation of the log (`session.load` brings another state). Sequence numbers contain
the generation, so shards that are set up at slightly different times never mix entries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import msgspec

from atoll.core.points import reach
from atoll.server.entrance import Above, Entrance, Life, Want
from atoll.server.followers import KEPT, Followers, sequence_of
from atoll.server.peers import Peers
from atoll.server.records import StatePayload
from atoll.store.entries import AnyEntry
from atoll.store.log import CommitLog
from atoll.store.outcomes import Meeting, Outcome
from atoll.store.waits import deadlock
from atoll.wire import messages
from atoll.wire.messages import Count, Setup

Outgoing: TypeAlias = Callable[[int, AnyEntry], None]  # (sequence, entry): for this shard itself
IN_FLIGHT = 2  # iterations of one worker that may be pushed and not yet in the log
_LONGEST_LINE = 4000  # characters of a mismatch's line
MEETING, LAST_MEETING = (
    "meeting",
    "last meeting",
)  # kinds of an image's parts; MEETING's key is a handle


class LastMeeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The latest finished meeting. A worker that lost its answer asks again."""

    met: messages.Met
    incarnations: list[Count]


class KeeperState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The full state of a LogKeeper, except payloads. `joined` maps each worker to its latest incarnation,
    `used_before` has what commits of earlier generations used, and `handles` counts payloads brought to
    meetings. `loose` is the next CommitLog's. `follows` has the generation that each shard follows, and
    `ahead` messages from shards that were set up before this one. `mismatch` is the line that ends the run
    when workers' scripts differ."""

    meetings: CommitLog
    log: CommitLog | None = None
    loose: bool = False
    generation: Count = 0
    joined: dict[int, Count] = {}
    fenced: dict[int, Count] = {}
    used_before: dict[Life, list[messages.Used]] = {}
    handles: Count = 0
    follows: dict[int, Count] = {}
    ahead: list[tuple[Count, messages.AnyMessage]] = []
    last: LastMeeting | None = None
    wants: dict[Life, Want] = {}
    mismatch: str = ""
    met: Count = 0  # at a site: number of finished meetings of sites


class LogKeeper:
    """Keeps the log and the meetings for a run that begins with `workers` workers.

    `apply(sequence, entry)` takes each new entry for this shard. `payloads` has those of open meetings by
    handle, and `last_payload` that of the latest finished one. `above` is the global log if this is a site's.
    """

    def __init__(self, workers: int, peers: Peers, apply: Outgoing, above: Above | None = None) -> None:
        self._peers, self._apply, self._above = peers, apply, above
        self.takes_latecomers = True
        # Workers meet before any Setup. Asynchronous: a worker takes part as soon as it joins.
        self.restore(KeeperState(meetings=CommitLog.begin("asp", 0, workers, 1)), {}, None)

    def restore(self, state: KeeperState, payloads: dict[int, memoryview], last: bytes | None) -> None:
        """Continue from another LogKeeper's state."""
        self.state, self.payloads, self.last_payload = state, payloads, last
        self._entrance = Entrance(self._peers, state.wants, self._above)
        self.followers = Followers(state, self._peers)

    def parts(self) -> list[tuple[StatePayload, memoryview | bytes]]:
        """Return the payloads that belong to the state."""
        parts: list[tuple[StatePayload, memoryview | bytes]] = [
            (StatePayload(MEETING, handle), payload) for handle, payload in self.payloads.items()
        ]
        return parts + (
            [(StatePayload(LAST_MEETING, 0), self.last_payload)] if self.last_payload is not None else []
        )

    @property
    def _meetings(self) -> CommitLog:
        return self.state.meetings

    @property
    def _log(self) -> CommitLog | None:
        return self.state.log

    def greet_hub(self) -> None:
        """Repeat to a newly connected hub which samples were used, since earlier messages may be lost."""
        if self._log is not None:
            self._log.used.tell_all(self._log.live)
        for (worker, incarnation), used in self.state.used_before.items():
            if used and self.state.joined.get(worker) == incarnation:
                news = messages.Fenced(
                    worker=worker, incarnation=incarnation, iteration=0, used=used, news=True
                )
                self._peers.send(self._peers.hub, news)

    def set_up(self, setup: Setup, holders: Collection[int]) -> None:
        """Begin a new generation of the log; `holders` are the shards that hold trainable chunks."""
        grouping = 0
        if self._log is not None:
            grouping = self._log.grouping
            for worker, incarnation in {**self.state.joined, **self.state.fenced}.items():
                self.state.used_before[worker, incarnation] = self._log.used.of(worker, incarnation).used + (
                    self.state.used_before.get((worker, incarnation), [])
                )
        self.state.generation += 1
        # Once the run has begun, as its meetings show, only live workers are waited for.
        workers = len(self._meetings.live) or setup.workers
        log = self.state.log = CommitLog.begin(
            setup.consistency,
            setup.slack,
            workers,
            setup.shards,
            setup.steps,
            holders,
            IN_FLIGHT,
            self.state.loose,
            setup.staleness,
            len(setup.optimizers),
        )
        log.grouping = grouping  # groups that know of it have moved already
        for worker, incarnation in sorted(self.state.fenced.items()):
            self._act(log.handle_fence(worker, incarnation))
        for worker, incarnation in sorted(self.state.joined.items()):
            if not log.refusal(worker, incarnation):
                self._act(log.handle_join(worker, incarnation))
        for shard, message in self.followers.take_ahead():
            self.handle_shard(shard, message)

    def handle_join(self, worker: int, incarnation: int) -> str:
        """Handle a worker's Hello; returns why it is refused. A late worker takes part only after its Arrive;
        until then it sets itself up, and nobody waits for it."""
        self._entrance.ask_again(worker, incarnation)
        self._see_to_entrance()
        if self.is_late(worker, incarnation):
            return self._meetings.refusal(worker, incarnation)
        return self.handle_arrive(worker, incarnation)

    def is_late(self, worker: int, incarnation: int) -> bool:
        """True if the run began without this worker, and the worker has not arrived yet."""
        return self.takes_latecomers and self._meetings.comes_late(worker, incarnation)

    def handle_arrive(self, worker: int, incarnation: int, meeting: int = -1) -> str:
        """Let a worker take part from now on; returns why it is refused. Members of a new group give the
        number of their next `meeting`, which waits for them."""
        outcome = self._meetings.handle_join(worker, incarnation)
        if outcome.refused:
            return outcome.refused
        self.state.joined[worker] = incarnation
        self._act(outcome, entries=False)
        if meeting >= 0:
            self._meetings.handle_entered(worker, incarnation, meeting)
        if self._log is None:
            return ""
        return self._act(self._log.handle_join(worker, incarnation, moves=meeting >= 0))

    def handle_speaker(self, worker: int, incarnation: int) -> None:
        """Handle a change of the member that speaks for a group."""
        self._entrance.remind(worker, incarnation)

    def handle_fence(self, fence: messages.Fence) -> None:
        """Fence a worker that the hub gave up, or that has left, and report its used samples to the hub."""
        worker, incarnation = fence.worker, fence.incarnation
        self.state.fenced[worker] = max(incarnation, self.state.fenced.get(worker, 0))
        self._act(self._meetings.handle_fence(worker, incarnation), entries=False)
        answer = messages.Fenced(worker=worker, incarnation=incarnation, iteration=0, used=[])
        if self._log is not None:
            self._act(self._log.handle_fence(worker, incarnation))
            answer = self._log.used.of(worker, incarnation)
        self._see_to_entrance()
        self._look_for_deadlock()
        before = self.state.used_before.get((worker, incarnation), [])
        self._peers.send(self._peers.hub, msgspec.structs.replace(answer, used=before + answer.used))

    def handle_want(self, worker: int, incarnation: int, want: messages.WantState) -> None:
        """Handle a late worker's request for a live worker's state."""
        self._entrance.want(worker, incarnation, want.iteration)
        self._see_to_entrance()

    def handle_give(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """Handle the state that a live worker gives to a late one."""
        wanted = self._entrance.give(give, payload)
        if not give.refused:
            self._meetings.handle_entered(give.worker, give.life, give.meeting, wanted)

    def _see_to_entrance(self) -> None:
        """Look for givers of the state that newcomers wait for."""
        live = self._log.live if self._log is not None else {}
        self._entrance.look(live, self._meetings.meetings.next)

    def handle_worker(self, worker: int, message: messages.Commit | messages.Step) -> str:
        """Handle a worker's Commit or Step; returns why it is refused."""
        if self._log is None:
            return "this shard is not set up yet"
        if self._has_ended(worker, message.incarnation):
            return ""
        if isinstance(message, messages.Commit):
            meets = self._meetings.meetings.waits_in(worker, message.incarnation)
            refused = self._act(self._log.handle_commit(worker, message, meets=meets))
        else:
            refused = self._act(self._log.handle_step(worker, message))
        self._look_for_deadlock()
        return refused

    def handle_end(self, worker: int, ends: messages.Ends) -> None:
        """Handle a worker whose script has left its session."""
        if not self._has_ended(worker, ends.incarnation):
            self._act(self._meetings.handle_end(worker, ends.incarnation, ends.stand), entries=False)

    def handle_mismatch(self, line: str) -> None:
        """Handle a report, from a site or a group, that its workers' scripts differ."""
        if not self.state.mismatch:
            self._end_all(line)

    def _look_for_deadlock(self) -> None:
        """End the run if some workers wait in a meeting and all others in an iteration."""
        if self._log is not None and not self.state.mismatch:
            meeting = self._meetings.meeting_waits()
            if meeting.stands and (line := deadlock(meeting, self._log.iteration_waits())):
                self._end_all(line)

    def _end_all(self, line: str, *, of_contributors: bool = False) -> None:
        """Send all workers the line that names inconsistent places. Disconnected workers get it when they
        return.
        """
        self.state.mismatch = line[:_LONGEST_LINE]
        for peer in self._peers.workers():
            self._peers.send(
                peer, messages.Mismatch(line=self.state.mismatch, of_contributors=of_contributors)
            )

    def _has_ended(self, worker: int, incarnation: int) -> bool:
        """True where the run has ended for all; also sends the worker the final line, perhaps again."""
        if self.state.mismatch:
            peer = self._peers.worker(worker, incarnation)
            self._peers.send(peer, messages.Mismatch(line=self.state.mismatch))
        return bool(self.state.mismatch)

    def handle_meet(self, worker: int, meet: messages.Meet, payload: memoryview | None) -> str:
        """Handle a worker's arrival at a meeting; returns why it is refused."""
        if self._has_ended(worker, meet.incarnation):
            return ""
        if self._met_before(worker, meet):
            assert self.state.last is not None
            met = self.state.last.met
            self._peers.answer(worker, meet.incarnation, ("Meet", met.number), met, self.last_payload)
            return ""
        self.state.handles += 1
        if payload is not None:
            self.payloads[self.state.handles] = payload
        self._set_idle(worker, meet.incarnation, True)  # first, since the meeting may end at once
        refused = self._act(
            self._meetings.handle_meet(
                worker, meet.incarnation, meet.number, meet.what, self.state.handles, meet.stand
            ),
            entries=False,
        )
        self._look_for_deadlock()
        if refused:
            self._set_idle(worker, meet.incarnation, False)
        return refused

    def _met_before(self, worker: int, meet: messages.Meet) -> bool:
        """True if the worker took part in this meeting, which is over, and lacks the answer. A new group
        counts as present if it is not listed, since its members were there by themselves or in other groups.
        """
        last = self.state.last
        if last is None or last.met.number != meet.number or self._meetings.refusal(worker, meet.incarnation):
            return False
        there = (worker, meet.incarnation) in zip(last.met.workers, last.incarnations, strict=True)
        return there or worker not in last.met.workers

    def _set_idle(self, worker: int, incarnation: int, idle: bool) -> None:
        if self._log is not None:
            self._act(self._log.handle_idle(worker, incarnation, idle))

    def handle_shard(self, shard: int, message: messages.AnyMessage) -> str:
        """Handle another shard's Follow or Staged; returns why it is refused."""
        if isinstance(message, messages.Follow):
            return self.followers.follow(shard, message)
        assert isinstance(message, messages.Staged)
        if not self.followers.counts(shard, message):
            return ""
        return self.handle_staged(shard, message.worker, message.incarnation, message.iteration)

    def handle_staged(self, shard: int, worker: int, incarnation: int, iteration: int) -> str:
        """Note that a shard, possibly this one, has a whole contribution."""
        assert self._log is not None
        return self._act(self._log.handle_staged(shard, worker, incarnation, iteration))

    def poll(self) -> None:
        """Report used samples to the hub, and drop entries that no follower will request."""
        if self._log is None:
            return
        if self._peers.takes(self._peers.hub):  # else the log accumulates them
            for news in self._log.used.take_news():
                self._peers.send(self._peers.hub, news)
        self._log.lines.keep(KEPT)

    def waiting_for(self) -> list[str]:
        """Describe, in lines for people, the missing messages and their senders."""
        return self._meetings.met_by() or (self._log.waiting_for() if self._log is not None else [])

    def _act(self, outcome: Outcome, *, entries: bool = True) -> str:
        """Carry out an outcome of the log; returns its refusal."""
        for reply in outcome.replies:
            self._peers.answer(reply.worker, reply.incarnation, reply.request, reply.message)
        if entries and outcome.entries:
            assert self._log is not None
            first = self._log.lines.next_sequence - len(outcome.entries)
            for index, entry in enumerate(outcome.entries, start=first):
                self.followers.send(index, entry)
                self._apply(sequence_of(self.state.generation, index), entry)
        for meeting in outcome.met:
            self._end_meeting(meeting)
        for handle in outcome.released:
            self.payloads.pop(handle, None)
        if outcome.mismatch:
            self._end_all(outcome.mismatch, of_contributors=entries)
        return outcome.refused

    def _end_meeting(self, meeting: Meeting) -> None:
        parts = [self.payloads.pop(handle, None) for handle in meeting.handles]
        sizes = [0 if part is None else part.nbytes for part in parts]
        whole = b"".join(part for part in parts if part is not None)
        met = messages.Met(number=meeting.number, workers=meeting.workers, sizes=sizes)
        self.state.last, self.last_payload = LastMeeting(met, meeting.incarnations), whole or None
        reach("shard.met")
        for worker, incarnation in zip(meeting.workers, meeting.incarnations, strict=True):
            self._set_idle(worker, incarnation, False)
            self._peers.answer(worker, incarnation, ("Meet", met.number), met, whole or None)
