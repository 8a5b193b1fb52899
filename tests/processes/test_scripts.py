"""Scripts of users at one strategy and store each: what came is what the table of scripts has.

The whole table takes much longer: `make scripts`.
"""

from __future__ import annotations

import pytest

from support.pool import WorkerPool
from support.table import COLUMNS, Record, Table, scripts

# Those that cost the least of each kind; every script takes its turn with the next one.
TRIED = ("ring", "server bsp", "hierarchical", "ring, tiers", "peers", "ps-hra", "alone, tiers")
CELLS = [(name, TRIED[place % len(TRIED)]) for place, name in enumerate(scripts())]


@pytest.fixture(scope="module")
def table(pool: WorkerPool) -> Table:
    return Table(pool)


@pytest.mark.parametrize(("name", "column"), CELLS)
def test_a_script_ends_as_the_table_has_it(table: Table, name: str, column: str) -> None:
    known = Record.read().cell(name, column)
    assert column in COLUMNS
    found = table.try_out(name, column)
    expected = known.kind if known is not None else "pass"
    assert found.kind == expected, (
        f"{found.line}\nif this is right: python tests/scripts_table.py --scripts {name}"
    )
