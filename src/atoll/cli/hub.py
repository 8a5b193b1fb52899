"""The hub's process as `atoll run` starts it: `launch/service.py`, with the planner's cost model.

Only commands know the planner, so that this one is named to the launcher, which imports nothing of it.
"""

from __future__ import annotations

import sys

from atoll.cli.scores import score_for
from atoll.launch.service import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], score_for))
