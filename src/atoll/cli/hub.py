"""The hub's process under `atoll run`: `launch/service.py` with the planner's cost model.

Only `cli` may import the planner. So `atoll run` gives the launcher the name of this module.
"""

from __future__ import annotations

import sys

from atoll.cli.scores import score_for
from atoll.core.stopping import exit_quickly
from atoll.launch.service import main

if __name__ == "__main__":
    exit_quickly(main(sys.argv[1:], score_for))
