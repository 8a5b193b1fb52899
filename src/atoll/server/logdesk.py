"""Handlers of shard 0 for messages to the log. They validate; the log decides. Other shards refuse such
messages."""

from __future__ import annotations

from atoll.core.errors import UserError
from atoll.server.heard import NOT_SET_UP, Handler, Heard
from atoll.server.logkeeper import LogKeeper
from atoll.server.peers import Peers
from atoll.server.setups import SetUps
from atoll.server.training import Training
from atoll.wire import messages


class LogDesk:
    """Handlers that pass valid messages to `log`; `training` has the model that they are checked against, and
    `setups` the workers that have prepared it."""

    def __init__(self, log: LogKeeper, peers: Peers, training: Training, setups: SetUps) -> None:
        self._log, self._peers, self._training, self._setups = log, peers, training, setups
        contribution = Handler(self._handle_contribution)
        entering = Handler(self._handle_entering, "workers enter at shard 0")
        shard = Handler(self._handle_shard, "shards speak for themselves, to shard 0", "shard")
        looks = "the hub asks for workers' connections, at shard 0"
        differ = "sites and groups tell shard 0 that their scripts differ"
        self.handlers: dict[type, Handler] = {
            messages.Commit: contribution,
            messages.Step: contribution,
            messages.Meet: Handler(self._handle_meet, "workers meet at shard 0"),
            messages.Ends: Handler(self._handle_ends, "workers end at shard 0"),
            messages.Mismatch: Handler(self._handle_mismatch, differ),
            messages.Arrive: entering,
            messages.WantState: entering,
            messages.GiveState: entering,
            messages.Fence: Handler(self._handle_fence, "the hub fences workers, at shard 0", "hub"),
            messages.Look: Handler(self._handle_look, looks, "hub"),
            messages.Follow: shard,
            messages.Staged: shard,
        }

    def _hear(self, heard: Heard, number: int | None = None) -> None:
        """Note that this connection speaks for its worker. If the message has a `number`, its iteration or
        meeting, the log's answer goes to this connection too."""
        request = None if number is None else (type(heard.message).__name__, number)
        if self._peers.speaks(heard.peer, request):
            self._log.handle_speaker(*heard.life)

    def _handle_contribution(self, heard: Heard) -> str:
        message: messages.Commit | messages.Step = heard.message
        model = self._training.model
        if model is None or not model.complete:
            return NOT_SET_UP
        if reason := messages.unreadable(message.stand) or self._setups.refusal(heard.life):
            return reason
        asynchronous = isinstance(message, messages.Commit) and model.setup.consistency != "bsp"
        if asynchronous or (isinstance(message, messages.Step) and message.accepted):
            # Every shard carries out what the log has, so settings are checked before they enter it.
            try:
                model.optimizer.param_groups.check(message.hyperparameters)
            except UserError as error:
                return str(error)
        self._hear(heard, message.iteration if isinstance(message, messages.Commit) else None)
        return self._log.handle_worker(heard.worker, message)

    def _handle_meet(self, heard: Heard) -> str:
        if reason := messages.unreadable(heard.message.stand):
            return reason
        self._hear(heard, heard.message.number)
        return self._log.handle_meet(heard.worker, heard.message, heard.payload)

    def _handle_ends(self, heard: Heard) -> str:
        if reason := messages.unreadable(heard.message.stand):
            return reason
        self._hear(heard, 0)
        self._log.handle_end(heard.worker, heard.message)
        return ""

    def _handle_mismatch(self, heard: Heard) -> str:
        line = heard.message.line
        if not (line.strip() and line.isprintable()):
            return "a line that is empty or cannot be printed"
        self._log.handle_mismatch(line)
        return ""

    def _handle_entering(self, heard: Heard) -> str:
        """Handle a newcomer's message, or the state that a live worker gives to one."""
        self._hear(heard)
        message = heard.message
        if isinstance(message, messages.Arrive):
            if reason := self._setups.refusal(heard.life):
                return reason
            return self._log.handle_arrive(*heard.life, message.meeting)
        if isinstance(message, messages.WantState):
            self._log.handle_want(*heard.life, message)
        else:
            self._log.handle_give(message, heard.payload)
        return ""

    def _handle_fence(self, heard: Heard) -> str:
        self._peers.heard_of(heard.message.incarnation)
        self._log.handle_fence(heard.message)
        return ""

    def _handle_look(self, heard: Heard) -> str:
        look: messages.Look = heard.message
        lost = self._peers.has_lost(look.worker, look.incarnation)
        looked = messages.Looked(worker=look.worker, incarnation=look.incarnation, lost=lost)
        self._peers.send(heard.peer, looked)
        return ""

    def _handle_shard(self, heard: Heard) -> str:
        shard = heard.hello.shard
        if heard.message.shard != shard or shard == 0:
            return "shards speak for themselves, to shard 0"
        return self._log.handle_shard(shard, heard.message)


def elsewhere(index: int) -> dict[type, Handler]:
    """Handlers of shard `index`, which keeps no log: they refuse all messages to the log."""
    told = Handler(lambda _heard: f"shard {index} keeps no log; shard 0 does", role="")
    kinds = (messages.Commit, messages.Step, messages.Meet, messages.Ends, messages.Mismatch, messages.Arrive)
    more = (messages.WantState, messages.GiveState, messages.Fence, messages.Look, messages.Follow)
    return dict.fromkeys((*kinds, *more, messages.Staged), told)
