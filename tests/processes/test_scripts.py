"""Scripts of users at one strategy and store each: none ends worse than the table of scripts has it.

The whole table takes much longer: `make scripts`.
"""

from __future__ import annotations

import pytest

from support.pool import WorkerPool
from support.table import Record, Table, scripts

RECORD = Record.read()
# Those that cost the least of each kind; every script takes its turn with the next one that the table has.
TRIED = ("ring", "server bsp", "hierarchical", "ring, tiers", "peers", "ps-hra", "alone, tiers")
CELLS = [
    (name, known[place % len(known)])
    for place, name in enumerate(scripts())
    if (known := [each for each in TRIED if RECORD.cell(name, each) is not None])
]
BETTER = ("pass", "refused", "hang", "crash", "wrong", "not installed")  # the best first


@pytest.fixture(scope="module")
def table(pool: WorkerPool) -> Table:
    return Table(pool)


@pytest.mark.parametrize(("name", "column"), CELLS)
def test_a_script_ends_no_worse_than_the_table_has_it(table: Table, name: str, column: str) -> None:
    known = RECORD.cell(name, column)
    assert known is not None
    found, expected = table.try_out(name, column), known.kind
    if found.kind == "not installed":
        pytest.skip(found.line)
    assert BETTER.index(found.kind) <= BETTER.index(expected), f"{found.kind}, not {expected}: {found.line}"
