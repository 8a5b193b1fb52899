"""Print the results in benchmarks/results as the tables of docs/benchmarks.md.

python benchmarks/tables.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import MIB, RESULTS, milliseconds

Record = Mapping[str, Any]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first to the right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def where(record: Record) -> str:
    """What ran it, in a sentence."""
    it = record["machine"]
    return (
        f"{record['date']}: {it['processor']}, {it['cores']} cores, {it['memory_gib']} GiB, "
        f"{it['system']} {it['kernel']}, Python {it['python']}, torch {it['torch']}."
    )


def ratios(record: Record) -> str:
    heads = [
        "case",
        "workers",
        "rival",
        "median ratio",
        "95 % bound",
        "p10",
        "p90",
        "step",
        "CPU time",
        "target",
    ]
    return table(heads, [_ratio_row(case) for case in record["cases"]])


def _ratio_row(case: Record) -> list[str]:
    numbers = [case["ratio"][key] for key in ("median", "bound95", "p10", "p90")]
    verdict = {None: "none", True: "met", False: "missed"}[case["met"]]
    step = f"{milliseconds(case['seconds'])} / {milliseconds(case['rival_seconds'])}"
    own = [case["name"], str(case["workers"]), case["rival"]]
    return [*own, *(f"{number:.3f}" for number in numbers), step, f"{case['cpu_ratio']:.3f}", verdict]


def memory(record: Record) -> str:
    heads = ["model", "optimizer", "workers", "peak, MiB", "formula, MiB", "off by", "rivals, MiB", "target"]
    return table(heads, [_memory_row(case) for case in record["cases"]])


def _memory_row(case: Record) -> list[str]:
    rivals = ", ".join(f"{name} {peak / MIB:.0f}" for name, peak in case["rivals"].items())
    own = [case["model"], case["optimizer"], str(case["workers"])]
    peaks = [f"{case['peak'] / MIB:.0f}", f"{case['formula'] / MIB:.0f}", f"{case['off']:+.1%}"]
    return [*own, *peaks, rivals, "met" if case["met"] else "missed"]


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    for name, show in (("overhead", ratios), ("ring", ratios), ("memory", memory)):
        path = folder / f"{name}.json"
        if not path.exists():
            print(f"{path.name}: no results yet; run benchmarks/{name}.py\n")
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        print(f"{where(record)}\n\n{show(record)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
