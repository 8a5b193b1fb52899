"""Copies of chunks to the device: at once, or ahead of their use on a thread. Source: docs/memory.md,
"Moves"."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from atoll.core.errors import DeadlineError
from atoll.memory.home import Home
from atoll.memory.stays import Stay
from atoll.tensors.torch_compat import outside_dispatch_modes

_DEADLINE = 600.0  # seconds; even with the slowest disk a chunk comes in less


class Bringing:
    """Brings chunks from their home, at once or ahead of their use."""

    def __init__(self, home: Home, device: torch.device) -> None:
        self._home, self._device = home, device
        # One thread is enough: all copies to the device share one direction of the link.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-bringing")
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def bring(self, stay: Stay) -> None:
        """Copy the chunk's values to its place on the device, on the caller's thread."""
        self._copy(stay, tells=True)

    def begin(self, stay: Stay) -> None:
        """Begin to copy a chunk's values ahead of their use; `settle` ends it."""
        if self._stream is not None:
            # Kernels that still read the block's former values were queued before this.
            computing = torch.accelerator.current_stream(self._device)
            self._stream.wait_event(computing.record_event())
        stay.coming = self._thread.submit(self._ahead, stay)

    def _ahead(self, stay: Stay) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        self._copy(stay, tells=False)

    def _copy(self, stay: Stay, *, tells: bool) -> None:
        with outside_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            self._home.bring(stay, tells=tells)

    def settle(self, stay: Stay) -> None:
        """Wait until no thread copies into the stay, whether the values came or not. Raises DeadlineError."""
        if stay.coming is not None:
            self._wait_for(stay.coming, stay.each.words)

    def settle_all(self) -> None:
        """Wait until no copy is under way, whether a stay has noted it or not. Raises DeadlineError."""
        self._wait_for(self._thread.submit(lambda: None), "what is on its way")

    @staticmethod
    def _wait_for(coming: Future[None], what: str) -> None:
        if not coming.done() and not wait([coming], timeout=_DEADLINE).done:
            raise DeadlineError(
                f"waited {_DEADLINE:.0f} s for {what} to come to the device: the disk of memory.disk, or a "
                "worker that holds it, is too slow or stands still"
            )

    def close(self) -> None:
        """End the thread, after the copies that it has begun."""
        self._thread.shutdown()

    def abandon(self) -> None:
        """End the thread without waiting."""
        self._thread.shutdown(wait=False, cancel_futures=True)
