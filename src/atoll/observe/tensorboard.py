"""TensorBoard's event files, written with its own writer and without torch."""

from __future__ import annotations

import threading
from pathlib import Path

from atoll.observe.metrics import Line

MISSING = "no TensorBoard events and no picture without the extra: pip install 'atoll[report]'"


class TensorBoard:
    """Writes each merged line's values as scalars; the step is the iteration.

    Raises ModuleNotFoundError if the package `tensorboard` is missing.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory), flush_secs=5)
        self._hook = threading.excepthook
        threading.excepthook = self._note_end

    def write(self, line: Line) -> None:
        """Write a line's values and rates; a value that was not finite leaves a gap in the plot."""
        scalars = {name: value for name, value in line.values.items() if value is not None}
        if line.seconds > 0:
            scalars["run/samples per second"] = line.samples / line.seconds
            scalars["run/share of time waiting"] = line.waiting / line.seconds
            scalars["run/bytes sent per step"] = float(line.bytes_sent)
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(
            self._event(wall_time=line.time, step=line.iteration, summary=self._summary(value=values))
        )

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._hook

    def _note_end(self, ended: threading.ExceptHookArgs) -> None:
        """Hide the stack trace of the writer's thread; other threads' errors go to the former hook.

        `write` and `close` raise the error too, and the recorder then warns about the missing records.
        """
        if not type(ended.thread).__module__.startswith("tensorboard."):
            self._hook(ended)
