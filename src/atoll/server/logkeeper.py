"""Shard 0's second part: it keeps the log, and the meetings of the workers.

Each Setup begins a new generation of the log (`session.load` brings another state). Sequence numbers tell the
generations apart, so that shards that are set up a moment sooner or later never mix their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import msgspec

from atoll.core.points import reach
from atoll.server.entrance import Entrance, Wanted
from atoll.server.peers import Peers
from atoll.store.entries import Entry, encode_entry
from atoll.store.log import CommitLog, LogState
from atoll.store.outcomes import Meeting, Outcome
from atoll.store.waits import deadlock
from atoll.wire import messages
from atoll.wire.messages import Count, Setup

Outgoing: TypeAlias = Callable[[int, Entry], None]  # (sequence, entry): for this shard itself
IN_FLIGHT = 2  # iterations of one worker that are pushed and not in the log
_GENERATION = 2**32  # sequence numbers of one generation
_LONGEST_LINE = 4000  # characters of a mismatch's
_KEPT = 10_000  # lines that a follower who lost its connection may still ask for


def sequence_of(generation: int, index: int) -> int:
    return generation * _GENERATION + index


class LastMeeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The meeting that ended last: who has lost the answer asks again."""

    met: messages.Met
    incarnations: list[Count]


class KeeperState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a LogKeeper remembers. Of the payloads only which there are: by handle, and whether some."""

    meetings: LogState
    log: LogState | None
    loose: bool
    generation: Count
    joined: dict[int, Count]
    fenced: dict[int, Count]
    used_before: dict[tuple[int, int], list[messages.Used]]
    parts: dict[int, bool]
    handles: Count
    follows: dict[int, Count]
    ahead: list[tuple[Count, messages.AnyMessage]]
    last: LastMeeting | None
    wants: list[Wanted]
    mismatch: str = ""


class LogKeeper:
    """`apply(sequence, entry)` takes each new line for this shard; the run begins with `workers` workers."""

    def __init__(self, workers: int, peers: Peers, apply: Outgoing) -> None:
        self._peers, self._apply = peers, apply
        # Workers meet before they say what they train. Asynchronous: who comes takes part at once.
        self._meetings = CommitLog("asp", 0, workers, 1)
        self._log: CommitLog | None = None
        self.loose = False  # the next set_up's log: as in CommitLog
        self._generation = 0
        self._joined: dict[int, int] = {}  # worker -> its latest incarnation
        self._fenced: dict[int, int] = {}
        self._used_before: dict[tuple[int, int], list[messages.Used]] = {}  # by earlier generations' commits
        self._parts: dict[int, memoryview | None] = {}  # what was brought to meetings, by handle
        self._handles = 0
        self._follows: dict[int, int] = {}  # shard -> the generation that it follows
        self.takes_latecomers = True
        self._entrance = Entrance(peers)
        self._ahead: list[tuple[int, messages.AnyMessage]] = []  # by shards that are set up before this one
        self._last: LastMeeting | None = None
        self._last_payload: bytes | None = None
        self._mismatch = ""  # who stands where, since the workers' scripts were found to differ: the run ends

    def state(self) -> tuple[KeeperState, dict[int, memoryview], bytes | None]:
        """For a journal: what it remembers, the payloads of meetings under way by handle, and of the last."""
        state = KeeperState(
            meetings=self._meetings.state(),
            log=self._log.state() if self._log is not None else None,
            loose=self.loose,
            generation=self._generation,
            joined=dict(self._joined),
            fenced=dict(self._fenced),
            used_before={key: list(used) for key, used in self._used_before.items()},
            parts={handle: part is not None for handle, part in self._parts.items()},
            handles=self._handles,
            follows=dict(self._follows),
            ahead=list(self._ahead),
            last=self._last,
            wants=self._entrance.state(),
            mismatch=self._mismatch,
        )
        parts = {handle: part for handle, part in self._parts.items() if part is not None}
        return state, parts, self._last_payload

    def restore(self, state: KeeperState, parts: dict[int, memoryview], last_payload: bytes | None) -> None:
        """Be what `state` gave."""
        self._meetings = CommitLog.restored(state.meetings)
        self._log = CommitLog.restored(state.log) if state.log is not None else None
        self.loose, self._generation, self._handles = state.loose, state.generation, state.handles
        self._joined, self._fenced = dict(state.joined), dict(state.fenced)
        self._used_before = {key: list(used) for key, used in state.used_before.items()}
        self._parts = {handle: parts[handle] if some else None for handle, some in state.parts.items()}
        self._follows, self._ahead = dict(state.follows), list(state.ahead)
        self._last, self._last_payload, self._mismatch = state.last, last_payload, state.mismatch
        self._entrance.restore(state.wants)

    def greet_hub(self) -> None:
        """The hub is there, perhaps anew: what it was told may have got lost."""
        if self._log is not None:
            self._log.tell_all_used()
        for (worker, incarnation), used in self._used_before.items():
            if used and self._joined.get(worker) == incarnation:
                news = messages.Fenced(
                    worker=worker, incarnation=incarnation, iteration=0, used=used, news=True
                )
                self._peers.send(self._peers.hub, news)

    def greet_shard(self, shard: int) -> None:
        """A shard is there, perhaps anew: it says from which line on it follows. A line that was written
        before that would come ahead of those that it lacks."""
        self._follows.pop(shard, None)

    def set_up(self, setup: Setup, holders: Collection[int]) -> None:
        """Begin the log anew; `holders` are the shards that hold trainable chunks."""
        if self._log is not None:
            for worker, incarnation in {**self._joined, **self._fenced}.items():
                self._used_before[worker, incarnation] = self._log.fenced(worker, incarnation).used + (
                    self._used_before.get((worker, incarnation), [])
                )
        self._generation += 1
        # Where the run has begun, as the meetings tell it, the dead are not waited for: those who live go on.
        workers = len(self._meetings.live()) or setup.workers
        self._log = CommitLog(
            setup.consistency,
            setup.slack,
            workers,
            setup.shards,
            setup.steps,
            holders,
            IN_FLIGHT,
            self.loose,
            setup.staleness,
        )
        for worker, incarnation in sorted(self._fenced.items()):
            self._act(self._log.handle_fence(worker, incarnation))
        for worker, incarnation in sorted(self._joined.items()):
            if not self._log.refusal(worker, incarnation):
                self._act(self._log.handle_join(worker, incarnation))
        ahead, self._ahead = self._ahead, []
        for shard, message in ahead:
            self.handle_shard(shard, message)

    def handle_join(self, worker: int, incarnation: int) -> str:
        """A worker has said Hello; returns why it may not take part. One that comes late does when it has
        arrived: until then it sets itself up, and nobody waits for it."""
        self._entrance.ask_again(worker, incarnation)
        self._see_to_entrance()
        if self.is_late(worker, incarnation):
            return self._meetings.refusal(worker, incarnation)
        return self.handle_arrive(worker, incarnation)

    def is_late(self, worker: int, incarnation: int) -> bool:
        """Whether the run has begun without this worker, which has yet to arrive."""
        return self.takes_latecomers and self._meetings.comes_late(worker, incarnation)

    def handle_arrive(self, worker: int, incarnation: int, meeting: int = -1) -> str:
        """A worker takes part from now on; returns why it may not. A new group's members know the number of
        their next `meeting`, which waits for them."""
        outcome = self._meetings.handle_join(worker, incarnation)
        if outcome.refused:
            return outcome.refused
        self._joined[worker] = incarnation
        self._act(outcome, entries=False)
        if meeting >= 0:
            self._meetings.handle_entered(worker, incarnation, meeting)
        if self._log is None:
            return ""
        return self._act(self._log.handle_join(worker, incarnation, moves=meeting >= 0))

    def handle_speaker(self, worker: int, incarnation: int) -> None:
        """Another member speaks for this group than before."""
        self._entrance.remind(worker, incarnation)

    def handle_fence(self, fence: messages.Fence) -> None:
        """The hub gives a worker up, or it has left."""
        worker, incarnation = fence.worker, fence.incarnation
        self._fenced[worker] = max(incarnation, self._fenced.get(worker, 0))
        self._act(self._meetings.handle_fence(worker, incarnation), entries=False)
        answer = messages.Fenced(worker=worker, incarnation=incarnation, iteration=0, used=[])
        if self._log is not None:
            self._act(self._log.handle_fence(worker, incarnation))
            answer = self._log.fenced(worker, incarnation)
        self._see_to_entrance()
        self._look_for_deadlock()
        before = self._used_before.get((worker, incarnation), [])
        self._peers.send(self._peers.hub, msgspec.structs.replace(answer, used=before + answer.used))

    def handle_want(self, worker: int, incarnation: int, want: messages.WantState) -> None:
        """A worker that comes late asks for what is not at the shards."""
        self._entrance.want(worker, incarnation, want.iteration)
        self._see_to_entrance()

    def handle_give(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """A living worker gives its state to one that comes late."""
        wanted = self._entrance.give(give, payload)
        if not give.refused:
            self._meetings.handle_entered(give.worker, give.life, give.meeting, wanted)

    def _see_to_entrance(self) -> None:
        """Have somebody who lives give what is wanted."""
        live = self._log.live() if self._log is not None else {}
        self._entrance.look(live, self._meetings.next_meeting)

    def handle_worker(self, worker: int, message: messages.Commit | messages.Step) -> str:
        """A worker's word on its contribution; returns why it is refused."""
        if self._log is None:
            return "this shard is not set up yet"
        if self._has_ended(worker, message.incarnation):
            return ""
        if isinstance(message, messages.Commit):
            refused = self._act(self._log.handle_commit(worker, message))
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
        if not self._mismatch:
            self._end_all(line)

    def _look_for_deadlock(self) -> None:
        """End the run if some workers wait in a meeting and all others in an iteration."""
        if self._log is not None and not self._mismatch:
            meeting = self._meetings.meeting_waits()
            if meeting.stands and (line := deadlock(meeting, self._log.iteration_waits())):
                self._end_all(line)

    def _end_all(self, line: str, *, of_contributors: bool = False) -> None:
        """Send all workers the line that names inconsistent places. Disconnected workers get it when they
        return.
        """
        self._mismatch = line[:_LONGEST_LINE]
        for peer in self._peers.workers():
            self._peers.send(peer, messages.Mismatch(line=self._mismatch, of_contributors=of_contributors))

    def _has_ended(self, worker: int, incarnation: int) -> bool:
        """True where the run has ended for all; also sends the worker the final line, perhaps again."""
        if self._mismatch:
            peer = self._peers.worker(worker, incarnation)
            self._peers.send(peer, messages.Mismatch(line=self._mismatch))
        return bool(self._mismatch)

    def handle_meet(self, worker: int, meet: messages.Meet, payload: memoryview | None) -> str:
        """A worker comes to a meeting; returns why it is refused."""
        if self._has_ended(worker, meet.incarnation):
            return ""
        if self._met_before(worker, meet):
            assert self._last is not None
            peer = self._peers.worker(worker, meet.incarnation)
            self._peers.send(peer, self._last.met, self._last_payload)
            return ""
        self._handles += 1
        self._parts[self._handles] = payload
        self._set_idle(worker, meet.incarnation, True)  # before the meeting, which may end at once
        refused = self._act(
            self._meetings.handle_meet(
                worker, meet.incarnation, meet.number, meet.what, self._handles, meet.stand
            ),
            entries=False,
        )
        self._look_for_deadlock()
        if refused:
            self._set_idle(worker, meet.incarnation, False)
        return refused

    def _met_before(self, worker: int, meet: messages.Meet) -> bool:
        """Whether it was at this meeting, which is over: the answer has not reached it. A group that is new
        was there as its members were, by themselves or in other groups."""
        last = self._last
        if last is None or last.met.number != meet.number or self._meetings.refusal(worker, meet.incarnation):
            return False
        there = (worker, meet.incarnation) in zip(last.met.workers, last.incarnations, strict=True)
        return there or worker not in last.met.workers

    def _set_idle(self, worker: int, incarnation: int, idle: bool) -> None:
        if self._log is not None:
            self._act(self._log.handle_idle(worker, incarnation, idle))

    def handle_shard(self, shard: int, message: messages.AnyMessage) -> str:
        """Another shard follows the log, or has staged a contribution."""
        if isinstance(message, messages.Follow):
            generation, after = divmod(message.after, _GENERATION)
            if generation > self._generation:
                self._hold(shard, message)
                return ""
            self._follows[shard] = generation
            return self._send_from(shard, after) if generation == self._generation else ""
        assert isinstance(message, messages.Staged)
        if any(held == shard for held, _ in self._ahead):
            self._hold(shard, message)
            return ""
        if self._follows.get(shard) != self._generation:
            return ""  # of what was there before the latest Setup
        return self.handle_staged(shard, message.worker, message.incarnation, message.iteration)

    def _hold(self, shard: int, message: messages.AnyMessage) -> None:
        if len(self._ahead) < _KEPT:
            self._ahead.append((shard, message))

    def handle_staged(self, shard: int, worker: int, incarnation: int, iteration: int) -> str:
        """A shard, this one too, has a whole contribution."""
        assert self._log is not None
        return self._act(self._log.handle_staged(shard, worker, incarnation, iteration))

    def poll(self) -> None:
        """Tell the hub what has been used; drop lines that nobody will ask for."""
        if self._log is None:
            return
        if self._peers.takes(self._peers.hub):  # else the log keeps them together
            for news in self._log.poll_used():
                self._peers.send(self._peers.hub, news)
        self._forget_old_lines()

    def _forget_old_lines(self) -> None:
        if self._log is not None and len(self._log.entries) >= 2 * _KEPT:
            self._log.forget(self._log.next_sequence - _KEPT)

    def waiting_for(self) -> list[str]:
        """Who is waited for and on what, in words."""
        return self._meetings.met_by() or (self._log.waiting_for() if self._log is not None else [])

    def _send_from(self, shard: int, after: int) -> str:
        assert self._log is not None
        try:
            lines = self._log.entries_from(after)
        except ValueError as error:
            return str(error)
        for index, entry in lines:
            self._send_line(shard, index, entry)
        return ""

    def _send_line(self, shard: int, index: int, entry: Entry) -> None:
        line = messages.Entry(
            sequence=sequence_of(self._generation, index), entry=msgspec.Raw(encode_entry(entry))
        )
        self._peers.send(self._peers.shard(shard), line)

    def _act(self, outcome: Outcome, *, entries: bool = True) -> str:
        """Do what the log's answer says; returns why it refused."""
        for reply in outcome.replies:
            self._peers.send(self._peers.worker(reply.worker, reply.incarnation), reply.message)
        if entries and outcome.entries:
            assert self._log is not None
            first = self._log.next_sequence - len(outcome.entries)
            for index, entry in enumerate(outcome.entries, start=first):
                for shard, generation in self._follows.items():
                    if generation == self._generation:
                        self._send_line(shard, index, entry)
                self._apply(sequence_of(self._generation, index), entry)
        for meeting in outcome.met:
            self._end_meeting(meeting)
        for handle in outcome.released:
            del self._parts[handle]
        if outcome.mismatch:
            self._end_all(outcome.mismatch, of_contributors=entries)
        return outcome.refused

    def _end_meeting(self, meeting: Meeting) -> None:
        parts = [self._parts.pop(handle) for handle in meeting.handles]
        sizes = [0 if part is None else part.nbytes for part in parts]
        whole = b"".join(part for part in parts if part is not None)
        met = messages.Met(number=meeting.number, workers=meeting.workers, sizes=sizes)
        self._last, self._last_payload = LastMeeting(met, meeting.incarnations), whole or None
        reach("shard.met")
        for worker, incarnation in zip(meeting.workers, meeting.incarnations, strict=True):
            self._set_idle(worker, incarnation, False)
            self._peers.send(self._peers.worker(worker, incarnation), met, whole or None)
