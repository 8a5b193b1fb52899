"""The log of a site's own workers, whose meetings are parts of meetings of all sites."""

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
    """The global log, to a site's."""

    def meet(self, number: int, what: str, part: bytes, stand: WorkerStand | None) -> None:
        """Take the site's part of a meeting of sites, with one worker's place."""

    def differ(self, line: str) -> None:
        """Scripts differ in this site: all sites are to hear that `line`."""


class SiteLog(LogKeeper):
    """`above` is the global log. `end` is called when all sites have come to a meeting."""

    def __init__(self, workers: int, peers: Peers, apply: Outgoing, above: GlobalLog) -> None:
        super().__init__(workers, peers, apply, above)
        self._global = above
        self.last: WorkerStand | None = None  # where the worker stood that was the last to end
        self._complete: dict[int, Meeting] = {}  # meetings that the other sites are waited for in
        self._left: set[tuple[int, int]] = set()  # who has said goodbye: worker, incarnation
        self._last_gone = (-1, 0)

    def handle_goodbye(self, worker: int, incarnation: int) -> None:
        """A worker leaves; the hub fences it, too."""
        self._left.add((worker, incarnation))

    def handle_fence(self, fence: messages.Fence) -> None:
        self._last_gone = (fence.worker, fence.incarnation)
        super().handle_fence(fence)

    def handle_want_from_above(self, want: messages.WantState) -> None:
        """Another site asks for the state of a living worker."""
        self._entrance.want(want.worker, want.life, want.iteration, outside=True)
        self._see_to_entrance()

    def handle_given_from_above(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """Another site's worker gives its state to those who come late here."""
        for given in self._entrance.given_from_above(give, payload, self._meetings.meetings.next):
            if given.members and not given.refused:
                self._meetings.meetings.skip_to(given.meeting)
                self._meetings.handle_entered(given.worker, given.life, given.meeting, True)

    @property
    def has_left(self) -> bool:
        """Whether nobody is left, and who was the last has said goodbye: nobody comes back."""
        return self.is_over and self._last_gone in self._left

    @property
    def is_over(self) -> bool:
        """Whether all of the site's workers have been here, and none is left."""
        return self._meetings.is_over

    def incarnation(self, worker: int) -> int:
        """The incarnation of a worker of this site that takes part; 0 for any other."""
        return self._meetings.live.get(worker, 0)

    def used(self) -> list[messages.Used]:
        """The samples that contributions have used since this was asked last."""
        news = self._log.used.take_news() if self._log is not None else []
        return [used for each in news for used in each.used]

    def poll(self) -> None:
        """What has been used goes up with the contributions: the global log tells the hub."""
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
        """All sites have come to a meeting: answer this site's workers."""
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
            self._peers.send(self._peers.worker(worker, incarnation), met, whole or None)
