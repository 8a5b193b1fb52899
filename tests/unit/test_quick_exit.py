"""Services end without a last collection of garbage, but with their exit handlers and their status."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys
from atoll.core.stopping import exit_quickly

class Ends:
    def __del__(self):
        print("collected")

ends = Ends()
ends.itself = ends
del ends
atexit.register(print, "handled")
exit_quickly(7)
"""


def test_a_service_ends_with_its_status_and_its_exit_handlers_and_collects_no_garbage() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (7, "handled\n"), run.stderr
