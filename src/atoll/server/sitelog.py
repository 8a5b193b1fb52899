"""The log of a site's own workers, whose meetings are part of meetings of all sites."""

from __future__ import annotations

from typing import Protocol

from atoll.core.points import reach
from atoll.server.entrance import Above
from atoll.server.followers import KEPT
from atoll.server.gathered import merge_untrusted, pack
from atoll.server.logkeeper import LastMeeting, LogKeeper, Outgoing
from atoll.server.peers import Peers
from atoll.store.outcomes import Meeting
from atoll.wire import messages
from atoll.wire.messages import WorkerStand


class GlobalLog(Above, Protocol):
    """The global log, as a site's log uses it."""

    def meet(self, number: int, what: str, part: bytes, stand: WorkerStand | None) -> None:
        """Send up the site's part of a meeting of sites, with one worker's place."""

    def differ(self, line: str) -> None:
        """Report to all sites the `line` that says how this site's scripts differ."""


class SiteLog(LogKeeper):
    """A site's log. `above` is the global log. `end` is called once all sites have come to a meeting."""

    def __init__(self, workers: int, peers: Peers, apply: Outgoing, above: GlobalLog) -> None:
        super().__init__(workers, peers, apply, above)
        self._global = above
        self.last: WorkerStand | None = None  # place of the worker that ended last
        self._complete: dict[int, Meeting] = {}  # meetings complete in this site, which wait for other sites
        self._left: set[tuple[int, int]] = set()  # (worker, incarnation) of those that said goodbye
        self._last_gone = (-1, 0)

    def handle_goodbye(self, worker: int, incarnation: int) -> None:
        """Note that a worker leaves for good; the hub fences it too."""
        self._left.add((worker, incarnation))

    def handle_fence(self, fence: messages.Fence) -> None:
        self._last_gone = (fence.worker, fence.incarnation)
        super().handle_fence(fence)

    def handle_want_from_above(self, want: messages.WantState) -> None:
        """Handle another site's request for the state of a live worker."""
        self._entrance.want(want.worker, want.life, want.iteration, outside=True)
        self._see_to_entrance()

    def handle_given_from_above(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """Forward another site's state to this site's newcomers."""
        for given in self._entrance.given_from_above(give, payload, self._meetings.meetings.next):
            if given.members and not given.refused:
                self._meetings.meetings.skip_to(given.meeting)
                self._meetings.handle_entered(given.worker, given.life, given.meeting, True)

    @property
    def has_left(self) -> bool:
        """True if no worker is left, and the last one said goodbye: none comes back."""
        return self.is_over and self._last_gone in self._left

    @property
    def is_over(self) -> bool:
        """True if all of the site's workers were here, and none is left."""
        return self._meetings.is_over

    def incarnation(self, worker: int) -> int:
        """The incarnation of a live worker of this site; 0 for any other."""
        return self._meetings.live.get(worker, 0)

    def used(self) -> list[messages.Used]:
        """Take the samples that contributions used since the last call."""
        news = self._log.used.take_news() if self._log is not None else []
        return [used for each in news for used in each.used]

    def poll(self) -> None:
        """Drop entries that no follower will request. Used samples go up with contributions, not to the
        hub."""
        if self._log is not None:
            self._log.lines.keep(KEPT)

    def _end_meeting(self, meeting: Meeting) -> None:
        parts = [self.payloads.pop(handle, None) for handle in meeting.handles]
        self._complete[meeting.number] = meeting
        self._global.meet(meeting.number, meeting.what, pack(meeting.workers, parts), meeting.stand)

    @property
    def stand(self) -> WorkerStand | None:
        """Return the place of a worker that has committed the site's iteration under way."""
        return self._log.stand if self._log is not None else None

    def handle_end(self, worker: int, ends: messages.Ends) -> None:
        self.last = ends.stand
        super().handle_end(worker, ends)

    def handle_mismatch_from_above(self, line: str) -> None:
        """End this site's workers: scripts differ between the sites."""
        if not self.state.mismatch:
            super()._end_all(line)

    def _end_all(self, line: str, *, of_contributors: bool = False) -> None:  # noqa: ARG002
        super()._end_all(line)
        self._global.differ(line)

    def end(self, message: messages.Met, payload: memoryview | None) -> None:
        """Answer this site's workers once all sites have come to a meeting."""
        meeting = self._complete.pop(message.number, None)
        if meeting is None:
            return
        merged = merge_untrusted(payload, message.sizes)
        self.state.met += 1
        for worker, incarnation in zip(meeting.workers, meeting.incarnations, strict=True):
            self._set_idle(worker, incarnation, False)
        reach("site.met")
        met = messages.Met(
            number=message.number,
            workers=[worker for worker, _ in merged],
            sizes=[part.nbytes for _, part in merged],
            clock=self._log.next_iteration if self._log is not None else 0,
        )
        whole = b"".join(part for _, part in merged)
        own = dict(zip(meeting.workers, meeting.incarnations, strict=True))
        self.state.last = LastMeeting(met, [own.get(worker, 0) for worker in met.workers])
        self.last_payload = whole or None
        for worker, incarnation in zip(meeting.workers, meeting.incarnations, strict=True):
            self._peers.answer(worker, incarnation, ("Meet", met.number), met, whole or None)
