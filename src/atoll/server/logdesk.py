"""What shard 0 is told for the log: who says it is checked here, and the log decides.

Other shards refuse it all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from atoll.core.errors import UserError
from atoll.server.logkeeper import LogKeeper
from atoll.server.model import Model
from atoll.server.peers import Peers
from atoll.wire import messages
from atoll.wire.messages import Hello

# Takes (connection, who that is, message, payload); returns why the message is refused, or nothing.
Handler: TypeAlias = Callable[[bytes, Hello, Any, memoryview | None], str]


class LogDesk:
    """`log` is None at all shards but 0, of which this is `index`; `model` gives what is trained."""

    def __init__(
        self, index: int, log: LogKeeper | None, peers: Peers, model: Callable[[], Model | None]
    ) -> None:
        self._index, self._log, self._peers, self._model = index, log, peers, model
        self.handlers: dict[type, Handler] = {
            messages.Commit: self._handle_contribution,
            messages.Step: self._handle_contribution,
            messages.Meet: self._handle_meet,
            messages.Ends: self._handle_ends,
            messages.Mismatch: self._handle_mismatch,
            messages.Arrive: self._handle_entering,
            messages.WantState: self._handle_entering,
            messages.GiveState: self._handle_entering,
            messages.Fence: self._handle_fence,
            messages.Look: self._handle_look,
            messages.Follow: self._handle_shard,
            messages.Staged: self._handle_shard,
        }

    def _hear(self, log: LogKeeper, peer: bytes, hello: Hello) -> None:
        """A worker has a word for the log, which answers on this connection."""
        if self._peers.speaks(peer):
            log.handle_speaker(hello.worker, hello.incarnation)

    def _handle_contribution(
        self, peer: bytes, hello: Hello, message: messages.Commit | messages.Step, _: memoryview | None
    ) -> str:
        if self._log is None:
            return f"shard {self._index} keeps no log; shard 0 does"
        model = self._model()
        if model is None or not model.complete or hello.role != "worker":
            return "this shard is not set up yet"
        if reason := messages.unreadable(message.stand):
            return reason
        asynchronous = isinstance(message, messages.Commit) and model.setup.consistency != "bsp"
        if asynchronous or (isinstance(message, messages.Step) and message.accepted):
            # What is in the log is done on every shard; so it must be something that can be done.
            try:
                model.optimizer.check_hyperparameters(message.hyperparameters)
            except UserError as error:
                return str(error)
        self._hear(self._log, peer, hello)
        return self._log.handle_worker(hello.worker, message)

    def _handle_meet(self, peer: bytes, hello: Hello, meet: messages.Meet, payload: memoryview | None) -> str:
        if self._log is None or hello.role != "worker":
            return "workers meet at shard 0"
        if reason := messages.unreadable(meet.stand):
            return reason
        self._hear(self._log, peer, hello)
        return self._log.handle_meet(hello.worker, meet, payload)

    def _handle_ends(self, peer: bytes, hello: Hello, ends: messages.Ends, _: memoryview | None) -> str:
        if self._log is None or hello.role != "worker":
            return "workers end at shard 0"
        if reason := messages.unreadable(ends.stand):
            return reason
        self._hear(self._log, peer, hello)
        self._log.handle_end(hello.worker, ends)
        return ""

    def _handle_mismatch(
        self, _peer: bytes, hello: Hello, message: messages.Mismatch, _: memoryview | None
    ) -> str:
        if self._log is None or hello.role != "worker":
            return "sites and groups tell shard 0 that their scripts differ"
        if not (message.line.strip() and message.line.isprintable()):
            return "a line that is empty or cannot be printed"
        self._log.handle_mismatch(message.line)
        return ""

    def _handle_entering(
        self,
        peer: bytes,
        hello: Hello,
        message: messages.Arrive | messages.WantState | messages.GiveState,
        payload: memoryview | None,
    ) -> str:
        """A worker comes late, or a living one gives it its state."""
        if self._log is None or hello.role != "worker":
            return "workers enter at shard 0"
        self._hear(self._log, peer, hello)
        if isinstance(message, messages.Arrive):
            return self._log.handle_arrive(hello.worker, hello.incarnation, message.meeting)
        if isinstance(message, messages.WantState):
            self._log.handle_want(hello.worker, hello.incarnation, message)
        else:
            self._log.handle_give(message, payload)
        return ""

    def _handle_fence(self, _peer: bytes, hello: Hello, fence: messages.Fence, _: memoryview | None) -> str:
        if self._log is None or hello.role != "hub":
            return "the hub fences workers, at shard 0"
        self._peers.heard_of(fence.incarnation)
        self._log.handle_fence(fence)
        return ""

    def _handle_look(self, peer: bytes, hello: Hello, look: messages.Look, _: memoryview | None) -> str:
        if self._log is None or hello.role != "hub":
            return "the hub asks for workers' connections, at shard 0"
        lost = self._peers.has_lost(look.worker, look.incarnation)
        self._peers.send(peer, messages.Looked(worker=look.worker, incarnation=look.incarnation, lost=lost))
        return ""

    def _handle_shard(
        self, _peer: bytes, hello: Hello, message: messages.Follow | messages.Staged, _: memoryview | None
    ) -> str:
        if self._log is None or hello.role != "shard" or message.shard != hello.shard or hello.shard == 0:
            return "shards speak for themselves, to shard 0"
        return self._log.handle_shard(hello.shard, message)
