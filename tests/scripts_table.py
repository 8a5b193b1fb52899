"""Try every script of tests/scripts at every strategy and store, and write docs/reference/any-script.md.

    python tests/scripts_table.py                              # the whole table: `make scripts`
    python tests/scripts_table.py --columns ring "server bsp" --scripts sgd muon
    python tests/scripts_table.py --missing                    # only the cells that have not been tried yet
    python tests/scripts_table.py --page                       # only the page, from what was found before

Each cell is written to docs/reference/any-script.json as it is found, so that a run can be stopped and go on.
"""

from __future__ import annotations

import argparse
import time

from support.pool import WorkerPool
from support.rivals import RIVALS
from support.table import COLUMNS, PAGE, Record, Table, scripts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=[*COLUMNS, *RIVALS])
    parser.add_argument("--scripts", nargs="*", default=list(scripts()), choices=list(scripts()))
    parser.add_argument("--missing", action="store_true", help="only cells that have not been tried yet")
    parser.add_argument("--failing", action="store_true", help="only cells that did not pass")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    record = Record.read()
    with WorkerPool() as pool:
        table = Table(pool)
        for column in given.columns if not given.page else []:
            for name in given.scripts:
                before = record.cell(name, column)
                if before is not None and (given.missing or (given.failing and before.kind == "pass")):
                    continue
                begin = time.monotonic()
                try:
                    outcome = table.try_out(name, column)
                except AssertionError as error:
                    print(f"{name:24} {error}", flush=True)
                    continue
                took = time.monotonic() - begin
                print(f"{name:24} {column:22} {took:5.1f} s {outcome.kind} {outcome.line}", flush=True)
                if before is not None and outcome.kind == "not installed":
                    continue  # what was found with the package stands
                Record.note(name, column, outcome)
    record = Record.read()
    PAGE.write_text(record.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
