"""The parts of a node's CPU side, and their turn of work."""

from __future__ import annotations

import select
import time

from atoll.cpuside.acting import Acting
from atoll.cpuside.calculating import Work
from atoll.cpuside.comingin import ComingIn
from atoll.cpuside.desk import Desk
from atoll.cpuside.giving import Giving
from atoll.cpuside.hearing import Hearing
from atoll.cpuside.history import History
from atoll.cpuside.optimizerstates import OptimizerStates
from atoll.cpuside.others import Others
from atoll.cpuside.parts import MeetingParts
from atoll.cpuside.publishing import Publishing
from atoll.cpuside.settingup import SettingUp
from atoll.cpuside.stage import Stage
from atoll.cpuside.telling import Telling
from atoll.net.post import Post
from atoll.wire import device as d

_LONGEST_WAIT = 0.25  # seconds: some conditions change without a message
_TURN_SECONDS = 0.5  # the longest normal turn; the time beyond counts as absence


class Service:
    """A CPU side after the worker's first message.

    Args:
        begin: the worker's first message.
        post: the connection to the worker.
        work: the thread that computes.
        epoll: watches the descriptors of the process.
    """

    def __init__(self, begin: d.Begin, post: Post, work: Work, epoll: select.epoll) -> None:
        self._work = work
        self._turned = time.monotonic()  # time of the latest turn
        self._telling = telling = Telling(post, begin.stale_max)
        self.stage = stage = Stage(begin)
        self.others = others = Others(begin, telling)
        history = History(telling.send, telling.told, begin.stale_max)
        meetings = MeetingParts()
        self._publishing = publishing = Publishing(stage, work, telling)
        giving = Giving(stage, others.network, history, work)
        acting = Acting(stage, others, meetings, work, publishing, giving, history, telling)
        self._states = states = OptimizerStates(stage, acting, work, epoll)
        self._settingup = settingup = SettingUp(
            stage, others, acting, work, publishing, states, history, telling
        )
        self._comingin = comingin = ComingIn(
            stage, others, acting, settingup, meetings, work, publishing, history, telling
        )
        self._acting = acting
        self.desk = Desk(stage, acting, settingup, publishing, states, giving, meetings, telling)
        self._hearing = Hearing(stage, others, acting, comingin, giving, meetings, history, telling)
        telling.send(d.Listening(address=others.network.address))

    def idle(self, wake: int) -> None:
        """Wait for a message of a node, the next deadline, or until `wake` becomes readable."""
        timeout, node = _LONGEST_WAIT, self.stage.node
        if node is not None:
            timeout = min(timeout, max(0.0, node.deadline - time.monotonic()))
        self.others.network.wait(timeout, wake, self.others.clients)

    def go_on(self) -> None:
        """Handle all events except the worker's messages, and everything that is due."""
        self._note_absence()
        self._states.take()
        self._hearing.go_on()
        self._work.collect()
        self._see_to_time()
        self._states.go_on()
        self._publishing.go_on()
        self._free_slots()

    def _note_absence(self) -> None:
        """Tell the decisions of time in which this process did not run: no node was silent then."""
        now = time.monotonic()
        absent, self._turned = now - self._turned - _TURN_SECONDS, now
        if absent > 0 and self.stage.node is not None:
            self.stage.node.watch.handle_absence(now, absent)

    def _see_to_time(self) -> None:
        now, stage = time.monotonic(), self.stage
        if stage.node is not None and stage.node.deadline <= now:
            self._acting.do(stage.node.poll(now))
        if stage.entering is not None:
            self._comingin.poll(stage.entering)
        else:
            self._settingup.go_on()
        if self._telling.is_time(now) and stage.node is not None:
            # Without a majority every wait of the worker is in vain, so the reason is repeated.
            waits = stage.node.waits
            lost = bool(waits.lost_majority())
            wants = self._publishing.wanted is not None or bool(self._states.asked)
            if wants or waits.is_meeting:
                self.others.check_not_finished(stage.node.life.node, waits.without())
            if wants or lost:
                lines = [*waits.lines(), *(["the optimizer's step"] if self._work.is_at_it else [])]
                self._telling.waiting(lines, self._states.asked, again=lost)
        self._telling.figures(self.others.network.counts, stage.trained, now=False)

    def _free_slots(self) -> None:
        stage = self.stage
        if stage.trained is None or stage.node is None or stage.entering is not None:
            return
        before = stage.trained.freed(stage.node.iteration)
        if before is not None:
            self._telling.send(d.Freed(before=before))

    def close(self) -> None:
        self.others.close()
        self._work.close()
        self._states.close()
        if self.stage.trained is not None:
            self.stage.trained.close()
