"""Execution of the decisions' outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from atoll.core.errors import MismatchError
from atoll.core.points import reach
from atoll.cpuside.calculating import Work
from atoll.cpuside.entering import Entering
from atoll.cpuside.giving import Giving
from atoll.cpuside.history import History
from atoll.cpuside.others import Others
from atoll.cpuside.parts import MeetingParts
from atoll.cpuside.publishing import Publishing
from atoll.cpuside.stage import Stage
from atoll.cpuside.takeover import Taker
from atoll.cpuside.telling import Telling
from atoll.exchange.globalparameters import IterationOutcome
from atoll.exchange.globalstate import most_bytes
from atoll.peers import outputs as out
from atoll.wire import device as d
from atoll.wire import nodes as n


class Acting:
    """Carries out the outputs of the decisions (`peers.outputs`), in order."""

    def __init__(
        self,
        stage: Stage,
        others: Others,
        meetings: MeetingParts,
        work: Work,
        publishing: Publishing,
        giving: Giving,
        history: History,
        telling: Telling,
    ) -> None:
        self._stage, self._others, self._meetings, self._work = stage, others, meetings, work
        self._publishing, self._giving, self._history, self._telling = publishing, giving, history, telling
        self._doers: dict[type, Callable[[Any], None]] = {
            out.Send: self._send,
            out.SendPart: self._send_part,
            out.Apply: self._apply,
            out.Meet: self._meet,
            out.Drop: self._drop,
            out.Grant: self._grant,
            out.FetchState: self._fetch_state,
            out.ViewChanged: self._change_view,
            out.Removed: self._come_back,
            out.Finished: self._finish,
            out.Note: telling.note,
            out.Differ: self._differ,
        }

    def do(self, outputs: Sequence[out.Output]) -> None:
        """Carry out outputs. Raises MismatchError for inconsistent scripts, after all outputs are done.

        The remaining outputs must go out first: without them the other nodes would wait for a majority until
        they give up, and not learn the cause.
        """
        mismatch: MismatchError | None = None
        for output in outputs:
            try:
                self._doers[type(output)](output)
            except MismatchError as error:
                if isinstance(output, out.Meet):
                    self._tell_differ(error)
                mismatch = error
        if mismatch is not None:
            raise mismatch

    def _tell_differ(self, error: MismatchError) -> None:
        """Send the mismatch to the other nodes, which may lack parts of the meeting that shows it."""
        node = self._stage.node
        for output in node.handle_differ(str(error)) if node is not None else []:
            if isinstance(output, out.Send):
                self._send(output)

    # -- contributions ------------------------------------------------------------------------------------

    def _send(self, output: out.Send) -> None:
        self._others.say(output.to, output.message)  # type: ignore[arg-type]  # a PeerMessage

    def _send_part(self, output: out.SendPart) -> None:
        key, network, trained = output.key, self._others.network, self._stage.trained
        if key.stream == "meetings":
            if key in self._meetings:
                network.send_chunk(output.to, *self._meetings.message(key))
        elif trained is not None and key in trained.assembly:
            trained.assembly.send(
                key, lambda message, payload: network.send_chunk(output.to, message, payload)
            )
            reach("node.sending", key.number)

    def _apply(self, output: out.Apply) -> None:
        stage, keys = self._stage, output.keys
        model, node = stage.model, stage.introduced
        abouts = [about for key in keys if (about := model.assembly[key].about) is not None]
        contributions = model.contributions(keys)

        def applied(outcome: IterationOutcome) -> None:
            if stage.node is not node:
                return  # that life is over
            reach("node.applied", output.iteration)
            own = node.life in {key.life for key in keys} and node.life.node not in outcome.wrong
            model.settle_own(output.iteration, counted=own and outcome.stepped)
            self._note_applied(output.iteration, outcome, abouts)
            self.do(node.handle_applied(time.monotonic(), output.iteration))
            self._publishing.due()
            self._giving.go_on()

        self._work.do(lambda: model.apply(output.iteration, contributions), applied)

    def _note_applied(self, iteration: int, outcome: IterationOutcome, abouts: Sequence[n.About]) -> None:
        self._history.note(iteration, self._stage.shift, outcome, abouts)
        self._telling.counting.applied([iteration - each.taken for each in abouts])
        assert self._stage.view is not None
        self._others.say_stands(self._stage.view, n.Stands(iteration=iteration, digest=outcome.digest))

    def _meet(self, output: out.Meet) -> None:
        self._telling.send(self._meetings.meet(output.number, output.keys))

    def _drop(self, output: out.Drop) -> None:
        for key in output.keys:
            if key.stream == "meetings":
                self._meetings.drop(key)
            elif self._stage.trained is not None:
                self._stage.trained.assembly.drop(key)

    def _grant(self, _: out.Grant) -> None:
        self._publishing.due()  # the worker waits for parameters that may now be published

    # -- views --------------------------------------------------------------------------------------------

    def _fetch_state(self, output: out.FetchState) -> None:
        stage = self._stage
        if stage.entering is None:
            return
        most, life = most_bytes(stage.model.globals), stage.introduced.life
        stage.entering.taker = Taker(self._others.network, life, output.source, output.base, most)
        self._telling.told("state", f"from node {output.source}", output.reason)

    def _change_view(self, output: out.ViewChanged) -> None:
        stage, view = self._stage, output.view
        reach("node.view", stage.introduced.iteration)
        old = stage.view
        stage.see(view)
        self._others.see(old, view)
        if stage.entering is not None:
            life = stage.introduced.life
            stage.entering.first = next(each.first for each in view.members if each.life.node == life.node)
        for iteration in self._giving.see(old, view):
            self._telling.send(d.CaptureAt(iteration=iteration))
        self._telling.send(
            d.Members(
                view=view.number,
                members=[d.NodeAt(*each.life, each.address) for each in view.members],
                known=self._others.known,
                reason=output.reason[:4000],
            )
        )
        self._giving.go_on()

    def _come_back(self, output: out.Removed) -> None:
        """Drop everything of this life, and begin to enter as another incarnation."""
        stage = self._stage
        self._telling.told("membership", "come back", output.reason)
        self._others.removed_by(output.view)
        entering = Entering(stage.begin.timeout, returned=stage.is_ready, reason=output.reason)
        stage.leave(entering, output.view)
        self._publishing.got()
        self._giving.clear()
        self._work.forget()
        self._meetings.clear()
        self._history.clear()
        if stage.trained is not None:
            stage.trained.forget()
        # Also before the set-up: the script may be in a meeting that everybody else has left.
        self._telling.send(d.LeftOut())

    # -- the end ------------------------------------------------------------------------------------------

    def _finish(self, _: out.Finished) -> None:
        self._telling.figures(self._others.network.counts, self._stage.trained, now=True)
        self._telling.send(d.Left())

    def _differ(self, output: out.Differ) -> None:
        raise MismatchError(output.line)
