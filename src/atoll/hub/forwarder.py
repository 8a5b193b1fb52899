"""The launcher's relay for heartbeats: one message to the hub for all its workers.

The relay is a thread of the launcher. If the launcher hangs or dies, its workers get no confirmation and send
their heartbeats to the hub themselves (`store/heartbeats.py`).
"""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.net.endpoint import SOON, Client, poll
from atoll.net.heartbeats import SOCKET, HeartbeatDoor, Launcher
from atoll.net.keys import Keys
from atoll.store.heartbeats import Batches
from atoll.wire.messages import Heard, WireError, decode_untrusted, encode

_LIMIT = 2**20  # bytes of a message
_LISTEN_SECONDS = 0.1  # seconds between checks of the connection and of the end
_CLOSE_SECONDS = 2.0  # seconds for the thread to end


class Forwarder:
    """Relays heartbeats of workers of `run` to the hub at `address` until closed.

    Workers use a socket in `folder`, the run's folder of sockets. Raises OSError if the socket cannot be
    made. `trouble` says why the relay has stopped; empty while it runs.
    """

    def __init__(self, folder: Path, address: str, keys: Keys | None, run: str) -> None:
        self.launcher = Launcher(secrets.token_hex(16), str(folder / SOCKET))
        self.trouble = ""
        self._door = HeartbeatDoor(folder / SOCKET)
        self._batches: Batches[int] = Batches(run, self.launcher.name)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(address, keys), name="atoll-forwarder", daemon=True
        )
        self._thread.start()

    def _serve(self, address: str, keys: Keys | None) -> None:
        try:
            with Client(address, keys, limit=_LIMIT, name="hub", reconnect=SOON) as link:
                self._forward(link)
        except AtollError as error:
            self.trouble = str(error)
        except Exception as error:  # the run goes on: each worker then sends its own heartbeats
            self.trouble = f"{type(error).__name__}: {error}"
        finally:
            self._door.close()

    def _forward(self, link: Client) -> None:
        losses = link.losses
        while not self._stop.is_set():
            left = self._batches.next_deadline() - time.monotonic() if link.connected else _LISTEN_SECONDS
            poll([link], max(0.0, min(left, _LISTEN_SECONDS)), self._door.fileno())
            for source, said in self._door.take():
                self._batches.take(time.monotonic(), source, said)
            if link.losses != losses:
                losses = link.losses
                self._batches.forget()
            self._answer(link)
            if link.connected and (message := self._batches.poll(time.monotonic())) is not None:
                link.send(encode(message))

    def _answer(self, link: Client) -> None:
        """Confirm to workers the heartbeats that the hub has received."""
        while not self._stop.is_set() and (received := link.receive(0)) is not None:
            try:
                message = decode_untrusted(received[0])
            except WireError:
                continue
            if isinstance(message, Heard):
                for source, number in self._batches.confirm(message.number, message.unknown):
                    self._door.confirm(source, number)

    def close(self) -> None:
        """Stop the thread; closing twice does no harm."""
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)
