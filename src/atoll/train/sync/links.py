"""A worker's end of its links to other workers, which the hub lets the workers measure (`hub/links.py`)."""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from atoll.core.errors import AtollError
from atoll.net.linkprobe import LinkServer, measure
from atoll.wire.messages import LinkMeasured, LinkPlace, MeasureLink


class LinkEnd:
    """A worker's end of its links, at `host`.

    While the hub wants it, others measure their links to this worker here. This worker measures the links for
    which the hub asks, one after the other, on a thread. All calls come from one thread, and none of them
    waits for a link.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._server: LinkServer | None = None
        self._trouble = ""  # the reason why there is no server
        self._words: deque[LinkMeasured] = deque()
        self._measuring: threading.Thread | None = None

    def want(self, wanted: bool) -> bool:
        """Note whether the hub wants links measured. Return True if links can be measured here now, and could
        not before."""
        if not wanted:
            self.close()
        elif self._server is None and not self._trouble:
            try:
                self._server = LinkServer(self._host)
            except OSError as error:  # the hub goes on without this worker's links
                self._trouble = str(error.strerror or error)
            return self._server is not None
        return False

    def place(self, incarnation: int) -> LinkPlace | None:
        """Return the address at which this worker's links are measured; None while they are not."""
        server = self._server
        if server is None:
            return None
        return LinkPlace(incarnation=incarnation, host=self._host, port=server.port, token=server.token)

    def measure(self, ask: MeasureLink) -> None:
        """Begin to measure a link; `measured` returns the result.

        If another link is still being measured, the hub has given up waiting for it; this request is then
        ignored.
        """
        if self._measuring is not None and self._measuring.is_alive():
            return
        self._measuring = threading.Thread(target=self._measure, args=(ask,), name="atoll-link", daemon=True)
        self._measuring.start()

    def measured(self, incarnation: int) -> list[LinkMeasured]:
        """Return the measurements since the last call."""
        words = [self._words.popleft() for _ in range(len(self._words))]
        return [msgspec.structs.replace(word, incarnation=incarnation) for word in words]

    def close(self) -> None:
        """Let no one measure here any more; closing twice does no harm."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _measure(self, ask: MeasureLink) -> None:
        address = (ask.host, ask.port)
        try:
            bandwidth, latency = measure(f"worker {ask.worker}", address, ask.token, ask.seconds)
            word = LinkMeasured(incarnation=0, worker=ask.worker, bandwidth=bandwidth, latency=latency)
        except AtollError as error:
            word = LinkMeasured(incarnation=0, worker=ask.worker, reason=str(error)[:4096])
        self._words.append(word)
