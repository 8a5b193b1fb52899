"""Admission of peers to a shard, and refusals."""

from __future__ import annotations

from atoll.core.points import reach
from atoll.server.common import Common
from atoll.store.entries import Fenced
from atoll.wire import messages
from atoll.wire.messages import Hello, Refused

_WARNED = 4096  # workers with a reported refusal
_REFUSED_STRANGERS = 1000  # beyond, peers that sent no Hello get no answer


class Door:
    """Admits workers, other shards and the hub, and sends refusals and announcements to them."""

    def __init__(self, common: Common) -> None:
        self._index, self._run, self._site = common.index, common.run, common.site
        self._server, self._peers, self._kept = common.server, common.peers, common.kept
        self._log, self._training, self._tell = common.log, common.training, common.tell
        self._comes_back = self._kept.comes_back  # as announced
        self._strangers = 0
        self._warned: set[tuple[int, int]] = set()  # workers whose first refusal was reported
        self._port_told: set[str] = set()  # kinds of reports on the port
        self.refused = 0  # messages

    def greet(self, peer: bytes, hello: Hello) -> str:
        """Handle a peer's Hello; returns why the peer is refused, or an empty string."""
        reason = self._peers.greet(peer, hello)
        if reason:
            return reason
        late = False
        if hello.role == "worker" and hello.site != self._site:
            self._peers.forget(peer)  # it expects another shard, whose old port this shard has
        elif hello.role == "worker":
            reach("shard.hello")
            if self._log is not None:
                late = self._log.is_late(hello.worker, hello.incarnation)
                self._kept.note(hello, messages.encode(hello))
                reason = self._log.handle_join(hello.worker, hello.incarnation)
            elif self._training.model is not None:
                reason = self._training.model.state.refusal(hello.worker, hello.incarnation)
        elif self._log is None:
            reason = f"shard {self._index} keeps no log; shard 0 does"
        elif hello.role == "shard":
            self._log.followers.greet(hello.shard)
        if reason:
            self._peers.forget(peer)
            return reason
        self._welcome(peer, hello, late)
        if hello.role == "hub" and self._log is not None:
            self._log.greet_hub()
        return ""

    def _welcome(self, peer: bytes, hello: Hello, late: bool) -> None:
        """Announce this shard's identity. A peer that wanted another shard then goes on searching."""
        welcome = messages.Welcome(
            run=self._run,
            worker=hello.worker,
            incarnation=hello.incarnation,
            shard=self._index,
            sites=[self._site] if self._site else [],
            comes_back=self._kept.comes_back,
            late=late,
        )
        self._peers.send(peer, welcome)

    def refuse(self, peer: bytes, reason: str, request: str) -> None:
        """Send a peer the reason why its message of kind `request` is refused."""
        if self._kept.replaying:
            return
        self.refused += 1
        hello = self._peers.who(peer)
        if hello is not None and request in ("Push", "Commit"):
            self._warn_refused(hello, reason)
        if hello is None:
            self._strangers += 1
            if self._strangers > _REFUSED_STRANGERS and request != "Hello":
                return
        self._peers.send(peer, Refused(reason=reason[:4000], request=request))

    def _warn_refused(self, hello: Hello, reason: str) -> None:
        """Warn once per incarnation of a worker about its first refusal, since the worker's process may log
        nothing."""
        who = hello.worker, hello.incarnation
        if who not in self._warned and len(self._warned) < _WARNED:
            self._warned.add(who)
            self._tell.warn(f"{self._tell.name} refuses what worker {hello.worker} contributes: {reason}")

    def refuse_fenced(self, entry: Fenced) -> None:
        """Notify a fenced worker's processes that all their messages are refused from now on."""
        reason = (
            f"worker {entry.worker} of incarnation {entry.incarnation} was given up, or has left: nothing of "
            "it is taken any more"
        )
        for peer in self._peers.members(entry.worker, entry.incarnation):
            self.refuse(peer, reason, "")

    def tell_of_port(self) -> None:
        """Report trouble on the port: the first report of each kind to people, later ones as warning events
        only."""
        report = self._server.take_report()
        if not report:
            return
        line, kind = f"{self._tell.name}'s port {self._server.address}: {report}", report.partition(" ")[0]
        if kind in self._port_told:
            self._tell.warn(line)
        else:
            self._port_told.add(kind)
            self._tell.people(line)

    # -- whether the shard comes back ---------------------------------------------------------------------

    def tell_comes_back(self) -> None:
        """Tell people of the journal's trouble, and announce to workers and shards whether this shard may
        come back after a loss, if that has changed."""
        for line in self._kept.take_news():
            self._tell.people(line)
        comes_back = self._kept.comes_back
        if comes_back != self._comes_back:
            self._comes_back = comes_back
            welcome = messages.Welcome(run=self._run, shard=self._index, comes_back=comes_back)
            for peer in [*self._peers.workers(), *self._peers.shards()]:
                self._peers.send(peer, welcome)
