"""What the links did to a run, and what that cost it: lab.json and the closing lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.lab.emulation import Carried
from atoll.lab.spec import Spec

RECORD = "lab.json"  # in the folder of records
SPEED_VARIABLE = "ATOLL_SPEED"
JOURNALS_VARIABLE = "ATOLL_LAB_JOURNALS"

def make(spec, carried, *, dropped_before, seconds, status):
    return dict(status=status, seconds=seconds, dropped=dropped_before, carried=msgspec.to_builtins(carried))
def write(whole, records):
    (records / RECORD).write_bytes(msgspec.json.encode(whole))
def shown(whole):
    return str(whole)
