"""Handlers of the messages from other nodes, and from the hub as their witness."""

from __future__ import annotations

import time

from atoll.core.points import reach
from atoll.core.stands import USE_OF
from atoll.cpuside.acting import Acting
from atoll.cpuside.comingin import ComingIn
from atoll.cpuside.giving import Giving
from atoll.cpuside.history import History
from atoll.cpuside.network import Arrived, Met
from atoll.cpuside.others import Others
from atoll.cpuside.parts import MeetingParts
from atoll.cpuside.stage import Stage
from atoll.cpuside.telling import Telling
from atoll.peers.node import Node
from atoll.wire import device as d
from atoll.wire import nodes as n
from atoll.wire.peers import WITNESS, AnswerRound, AskRound, EndRound, NodeReport, PeerMessage, RefuseRound
from atoll.wire.peerviews import Accept, Accepted, Prepare, Promised

_OF_ROUNDS = (AskRound, AnswerRound, RefuseRound, EndRound)
_VOTES = (Prepare, Promised, Accept, Accepted)


class Hearing:
    """Passes each received message to the part of the CPU side that handles it."""

    def __init__(
        self,
        stage: Stage,
        others: Others,
        acting: Acting,
        comingin: ComingIn,
        giving: Giving,
        meetings: MeetingParts,
        history: History,
        telling: Telling,
    ) -> None:
        self._stage, self._others, self._acting, self._comingin = stage, others, acting, comingin
        self._giving, self._meetings, self._history, self._telling = giving, meetings, history, telling

    def go_on(self) -> None:
        for arrived in self._others.network.take():
            if isinstance(arrived, Met):
                self._meet(arrived)
            else:
                self._hear(arrived)
        for message in self._others.hear_witness():
            if self._stage.node is not None:
                self._acting.do(self._stage.node.handle_message(time.monotonic(), WITNESS, message))

    def _meet(self, met: Met) -> None:
        if met.up:
            self._giving.up(met.node.node)
        else:  # a new life of the node
            self._others.finished.discard(met.node.node)

    def _hear(self, arrived: Arrived) -> None:
        sender, _, message, payload = arrived
        stage = self._stage
        if isinstance(message, (n.About, n.Piece)):
            if stage.trained is not None and stage.node is not None:
                self._hear_contribution(stage.node, sender, message, payload)
        elif isinstance(message, n.Word):
            if isinstance(message.body, NodeReport) and message.body.finished:
                self._others.finished.add(sender)
            if stage.node is not None:
                _reach_word(message.body, stage.node)
                self._acting.do(stage.node.handle_message(time.monotonic(), sender, message.body))
        elif isinstance(message, n.MeetingPart):
            self._hear_meeting_part(message, payload)
        elif isinstance(message, n.Stands) and sender in stage.lives:  # compare with members alone
            iteration, digest, own = message.iteration, message.digest, stage.begin.node
            self._history.compare(iteration, stage.shift, digest, node=sender, own=own)
        elif isinstance(message, n.Lacks):
            self._giving.handle_lacks(sender, message)
        elif isinstance(message, n.Takeover):
            self._comingin.hear_takeover(sender, message, payload)
        elif isinstance(message, n.Script):
            self._comingin.hear_script(sender, message, payload)

    def _hear_contribution(
        self, node: Node, sender: int, message: n.About | n.Piece, payload: memoryview | None
    ) -> None:
        now, stage = time.monotonic(), self._stage
        if (life := stage.lives.get(sender)) is not None:
            node.handle_heard(now, life)
        assembly, key = stage.model.assembly, message.key
        if assembly.add(message, payload):
            reach("node.held", key.number)
            self._giving.newcomers.contributed(key.life)
            self._acting.do(node.handle_part(now, key))
        elif assembly.has_some(key):
            self._acting.do(node.handle_arriving(now, key))

    def _hear_meeting_part(self, message: n.MeetingPart, payload: memoryview | None) -> None:
        key, size, stage = message.key, 0 if payload is None else payload.nbytes, self._stage
        wrong = ""
        if size > n.MOST_PART:
            wrong = f"{size} bytes for a meeting, where {n.MOST_PART} is the most"
        elif message.since > key.number:
            wrong = f"meeting {key.number}, and the first of its meetings is {message.since}"
        if wrong:
            self._telling.told("refused", f"node {key.life.node}", wrong)
        elif key.stream == "meetings" and key not in self._meetings and stage.wants(key):
            self._meetings.keep(key, message.what, bytes(payload or b""), message.since, message.stand)
            self._acting.do(stage.introduced.handle_part(time.monotonic(), key, message.since))
            if message.what.startswith(USE_OF):
                self._telling.send(d.Asked(number=key.number, what=message.what))


def _reach_word(word: PeerMessage, node: Node) -> None:
    if isinstance(word, _OF_ROUNDS):
        reach("node.round", node.iteration)
    elif isinstance(word, _VOTES):
        reach("node.vote", node.iteration)
