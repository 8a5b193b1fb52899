"""A node's part in synchronisation rounds, its own and other nodes'. `rounds.py` has the rules."""

from __future__ import annotations

import numpy as np

from atoll.peers.contributions import Contributions
from atoll.peers.outbox import Outbox
from atoll.peers.pace import Limit
from atoll.peers.rounds import Event, Rounds
from atoll.peers.settings import NodeSettings
from atoll.wire.messages import Message
from atoll.wire.peers import AbortRound, AnswerRound, AskRound, EndRound, RefuseRound, RoundId


class Synchronisation:
    """Runs synchronisation rounds. `rounds` has the node's own round and its flag V_i; `answer`, `backoff`
    and `rest` are measured limits, which other parts use too."""

    def __init__(
        self,
        node: int,
        settings: NodeSettings,
        rng: np.random.Generator,
        contributions: Contributions,
        out: Outbox,
    ) -> None:
        start = settings.heartbeat
        self.answer = Limit("a round's answers", *settings.round, start=start)
        self.backoff = Limit("back-off", *settings.backoff, start=start)
        self.rest = Limit("W's rise", *settings.rest, start=start)
        self.rounds = Rounds(node)
        self._node, self._rng = node, rng
        self._contributions, self._out = contributions, out

    def install(self, _now: float, /) -> None:
        """Begin a view: all rounds end."""
        self.rounds.go("reset")
        self.rounds.stop()
        self.rounds.clear(None)

    def poll(self, now: float, is_wanted: bool) -> None:
        """Do what is due. `is_wanted`: the devices wait for a newer W than M_i has."""
        rounds = self.rounds
        flag = rounds.flag
        if flag is not None and now >= rounds.flag_until and rounds.clear(None):
            self._note("round given up", flag, "a1: its starter has not ended it in time")
            rounds.go("freed")
        if not is_wanted:
            self._abort()
            rounds.go("eased")
            return
        if now >= rounds.until:
            if rounds.state == "asking":
                self.answer.note(self.answer.seconds, self._node)
                missing = [
                    life.node for life in self._contributions.others() if life.node not in rounds.answers
                ]
                self._give_up(now, "late", f"no answer from nodes {missing}")
            else:
                rounds.go("due")
        if rounds.state == "idle":
            rounds.go("wanted", now + self.rest.seconds)
        if rounds.state == "looking":
            self._seek(now)

    def _seek(self, now: float) -> None:
        """Start a round, or wait for the end of another node's (a2)."""
        rounds, report = self.rounds, self._contributions.report()
        if rounds.flag is not None:
            rounds.go("taken")
            return
        began = rounds.start(now, report.iteration, now + self.answer.seconds)
        why = f"a2: W_i is {report.applied}, too old for iteration {report.iteration}"
        self._note("round started", began, why)
        self._to_all(AskRound(report=report, round=began))
        self._look_at_answers(now)

    def handle_ask(self, now: float, sender: int, asked: RoundId) -> None:
        """Handle another node's request to take part (a1, a4)."""
        rounds, report = self.rounds, self._contributions.report()
        if asked.node != sender:
            return
        if rounds.state == "asking" and rounds.round is not None:
            if rounds.round < asked:
                self._out.send(sender, RefuseRound(report=report, round=asked))
                return
            own = rounds.round
            self._abort()
            self._note("round given up", own, rounds.go("lower"))
        if rounds.take_part(asked, now + 2 * self.answer.seconds):
            self._out.send(sender, AnswerRound(report=report, round=asked))
        elif rounds.flag is not None:
            self._out.send(sender, RefuseRound(report=report, round=asked))

    def handle_answer(self, now: float, message: AnswerRound) -> None:
        if self.rounds.state == "asking" and message.round == self.rounds.round:
            self.rounds.answers[message.report.life.node] = message.report
            self._look_at_answers(now)

    def handle_refusal(self, now: float, sender: int, refused: RoundId) -> None:
        if self.rounds.state == "asking" and refused == self.rounds.round:
            self._give_up(now, "refused", f"node {sender} takes part in another's")

    def handle_over(self, ended: RoundId, why: str) -> None:
        """Handle the END or ABORT of another node's round."""
        if self.rounds.clear(ended):
            self._note("round over", ended, why)
            self.rounds.go("freed")

    def _look_at_answers(self, now: float) -> None:
        """End the node's round once all answers are in (a6): the least iteration among them is the new
        global one."""
        rounds = self.rounds
        if any(life.node not in rounds.answers for life in self._contributions.others()):
            return
        own, reports, ended = self._contributions.report(), list(rounds.answers.values()), rounds.stop()
        assert ended is not None
        least = min(report.iteration for report in [own, *reports])
        self.answer.note(now - rounds.began, self._node)
        self.backoff.note(now - rounds.began, self._node)
        rounds.go("answered", now + self.rest.seconds)
        self._note("round ended", ended, f"a6: the least iteration is {least}")
        self._to_all(EndRound(report=own, round=ended, iteration=least, reports=reports))

    def _give_up(self, now: float, event: Event, why: str) -> None:
        """Give the node's own round up (a3, a5); another follows after T, with jitter."""
        own = self.rounds.round
        assert own is not None
        self._abort()
        rule = self.rounds.go(event, now + self.backoff.seconds * (0.5 + float(self._rng.random())))
        self._note("round refused" if event == "refused" else "round late", own, f"{rule}: {why}")

    def _abort(self) -> None:
        stopped = self.rounds.stop()
        if stopped is not None:
            self._to_all(AbortRound(report=self._contributions.report(), round=stopped))

    def _to_all(self, message: Message) -> None:
        self._out.send_all([life.node for life in self._contributions.others()], message)

    def _note(self, what: str, round: RoundId, why: str) -> None:
        about = f"round {round.number} of node {round.node} at iteration {round.iteration}"
        self._out.note(what, about, why)
