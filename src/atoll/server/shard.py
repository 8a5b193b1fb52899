"""A shard's main loop: one thread that takes messages and carries out the store's decisions.

Components do the work. `inbox` queues messages; `door` admits and refuses peers; `setups` and `contributions`
take what workers send, and `logdesk` messages to the log. `loglines` has the log's entries in order, and
`stepper` carries them out. `durability` records changes of the shard, and `revival` restores its state in
another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from atoll.core.errors import GivenUpError
from atoll.core.events import AnyEvent
from atoll.net.endpoint import Endpoint, Server, poll
from atoll.net.keys import Keys
from atoll.server.applier import Applier
from atoll.server.common import Common
from atoll.server.contributions import Contributions
from atoll.server.door import Door
from atoll.server.durability import Durability
from atoll.server.heard import Handler, Heard
from atoll.server.inbox import IN_BOX, Inbox
from atoll.server.journal import Journal, JournalError
from atoll.server.links import HubLink, earliest
from atoll.server.logdesk import LogDesk, elsewhere
from atoll.server.logexecutor import LogExecutor
from atoll.server.logkeeper import LogKeeper
from atoll.server.loglines import LogLines
from atoll.server.mirror import Mirror
from atoll.server.model import Model
from atoll.server.peers import Peers
from atoll.server.revival import Revival
from atoll.server.setups import SetUps
from atoll.server.snapshot import Snapshots
from atoll.server.telling import Teller
from atoll.server.training import Training
from atoll.wire import messages
from atoll.wire.messages import Refused, Setup

_LONGEST_WAIT = 0.5  # seconds, for timers that no message announces
_RETRY = 0.01  # seconds between retries of full connections and held entries
_AT_ONCE = 64  # messages handled before timers and links are served
_LAST_WORDS = 0.3  # seconds for the last messages to leave


class Shard:
    """Shard `index` of `run`, which begins with `workers` workers; shard 0 keeps the log.

    `server` accepts connections. `hub` is the link to the hub; without one, `log_address` is shard 0's
    address. `configured` is the operator's own optimizer ("package.module:Class"), `codec` the one codec that
    may be loaded beside Atoll's own, and `fused` as in ShardOptimizer. `emit` takes core's events, of worker
    -1. With a `journal` no message leaves before the records that it depends on are written, and `revival`
    continues from a killed shard's state. With a `mirror` the standby must have them too. `server/standby.py`
    drives a standby's own shard until it `serves`; the shard calls `meanwhile` then between two chunks of a
    step. With `site`, the shard is that site's.
    """

    in_box = IN_BOX
    at_once: tuple[type, ...] = (messages.WhoIsMissing,)  # handled while chunks are stepped, too

    def __init__(
        self,
        index: int,
        server: Server,
        *,
        run: str,
        workers: int,
        keys: Keys | None = None,
        hub: HubLink | None = None,
        log_address: str = "",
        configured: str = "",
        codec: str = "",
        fused: bool = False,
        snapshots: Snapshots | None = None,
        journal: Journal | None = None,
        mirror: Mirror | None = None,
        site: str = "",
        emit: Callable[[AnyEvent], None] = lambda _event: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.index, self._server, self._hub = index, server, hub
        self._configured, self._codec, self._fused = configured, codec, fused
        self.kept = Durability(journal, mirror, snapshots)
        self._tell = Teller(f"the shard of site {site!r}" if site else f"shard {index}", emit)
        self._training = Training()
        self._peers = Peers(server, run, self.kept.when_kept)
        if hub is not None:
            self._peers.heard_of(hub.welcome.incarnation)
        self._lines = LogLines(index, run, keys, hub, self.kept, self._training)
        self._log = self._make_log(workers)
        parts = self._peers, self.kept, self._lines, self._log, self._training, self._tell
        common = self._common = Common(index, run, site, server, *parts)
        self.door = Door(common)
        stepper, setups = LogExecutor(common), self._make_setups()
        desk = elsewhere(index)
        if self._log is not None:
            desk = LogDesk(self._log, self._peers, self._training, setups).handlers
        handlers = {
            **desk,
            **setups.handlers,
            **Contributions(common, stepper.handle_pull).handlers,
            **stepper.handlers,
            messages.WhoIsMissing: Handler(self._handle_who_is_missing, role=""),
            **self._more_handlers(),
        }
        self._inbox = Inbox(common, self.door, handlers, self.in_box, self.at_once)
        self.applier = Applier(common, stepper, self.door, self._inbox, meanwhile)
        self.revival = Revival(common, setups, self._again(handlers), self.applier.apply)
        if index and log_address:
            self._lines.follow_at(log_address)

    def _make_log(self, workers: int) -> LogKeeper | None:
        return None if self.index else LogKeeper(workers, self._peers, self._lines.queue)

    def _make_setups(self) -> SetUps:
        return SetUps(self._common, self.door, self._make_model)

    def _make_model(self, setup: Setup, _generation: int) -> Model:
        return Model(setup, self.index, configured=self._configured, fused=self._fused, codec=self._codec)

    def _more_handlers(self) -> dict[type, Handler]:
        return {}

    def _again(self, handlers: Mapping[type, Handler]) -> Mapping[type, Handler]:
        """Handlers of replayed messages."""
        return handlers

    @property
    def name(self) -> str:
        """The shard's name, as its workers know it."""
        return self._tell.name

    @property
    def dropped(self) -> int:
        """Number of undecodable messages."""
        return self._server.dropped

    @property
    def model(self) -> Model | None:
        """The model, once a Setup describes it."""
        return self._training.model

    def waiting_for(self) -> list[str]:
        """Describe what the log waits for, and from whom; empty on shards without a log."""
        return self._log.waiting_for() if self._log is not None else []

    def _handle_who_is_missing(self, heard: Heard) -> str:
        lines = [line[:4000] for line in self.waiting_for()][:8192]
        self._peers.send(heard.peer, messages.Missing(lines=lines))
        return ""

    # -- the loop -----------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until `until()` is true, which is checked at least twice a second. When the shard cannot go
        on, it sends all workers the reason and raises the error."""
        try:
            while not until():
                self._turn()
        except (JournalError, GivenUpError):
            raise  # workers wait: for a restart, or for the process that has taken over
        except Exception as error:
            if self.kept.is_gated:
                raise  # its standby takes its place
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            told = Refused(reason=f"{self.name} cannot go on: {reason}"[:4000])
            for peer in self._peers.workers():
                self._peers.send(peer, told)
            time.sleep(_LAST_WORDS)
            raise

    def close(self) -> None:
        """Drop this shard's outgoing connections and the snapshot in progress; write the rest of the
        journal."""
        self.kept.close()
        self._lines.close()

    def _turn(self) -> None:
        """Wait for an event and handle what is due."""
        kept, now = self.kept, time.monotonic()
        retry = now + _RETRY if self._peers.busy or self._lines.is_held else None
        busy, full = bool(self._inbox) or kept.busy, kept.is_full
        timeout = 0.0 if busy and not full else earliest([kept.next_deadline, retry], _LONGEST_WAIT)
        poll(self._links() if full else [self._server, *self._links()], timeout, kept.fileno)
        kept.release()
        for _ in range(0 if full else _AT_ONCE):
            if not self._inbox.handle_one():
                break
            self.applier.apply()
        self._see_to_links()
        self.applier.apply()
        kept.release()
        self.door.tell_comes_back()
        self._peers.flush()
        self.rest()

    def rest(self) -> None:
        """Work due between two messages, on a standby too."""
        if self._log is not None:
            self._log.poll()
        self._poll_snapshots()

    def _poll_snapshots(self) -> None:
        self.kept.poll_snapshots(self.revival)

    def _links(self) -> list[Endpoint]:
        """Outgoing connections of this shard."""
        links = (self._hub, self._lines, self.kept.mirror)
        return [link.client for link in links if link is not None and link.client is not None]

    def _see_to_links(self) -> None:
        self.door.tell_of_port()
        if self._hub is not None:
            self._hub.steps = self._training.iterations
            self._hub.take()
        if self.kept.mirror is not None:
            self.kept.mirror.poll(self.revival)
        self._lines.see_to_link()

    # -- as a standby -------------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """Handle only records from the primary, and answer no peer, until `serves`."""
        self.kept.replaying = True

    def serves(self) -> None:
        """Become the primary, and announce that at once."""
        self.kept.replaying = False
        self._see_to_links()

    def takes_over(self) -> str:
        """Record that this standby is now the primary; returns a line for people."""
        line = f"{self.name} takes its primary's place: iteration {self._training.iterations}"
        self._tell.decide("shard", "takes its primary's place", line)
        return line
