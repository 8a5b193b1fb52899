"""Runs the tests that are marked `check`. A test that fails runs once more alone, and is named at the end.

Arguments are handed on to pytest: `python tests/check.py -n 3 --dist worksteal`. The exit status is 0 if each
test passed at least once. A test that needed its second run is a defect all the same: it is to be mended.
Where more than `MOST` have failed, none runs again: something is broken that they share.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MARKED = ("-m", "check and not soak")
MOST = 20


class Failures:
    """A plugin of pytest that notes which tests have failed, in the order in which they did."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.tests:
            self.tests.append(report.nodeid)


def passes_alone(test: str) -> bool:
    """Whether a test passes in a run of its own."""
    return subprocess.run([sys.executable, "-m", "pytest", *MARKED, test], check=False).returncode == 0


def main() -> int:
    failures = Failures()
    status = pytest.main([*MARKED, *sys.argv[1:]], plugins=[failures])
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failures.tests) <= MOST:
        return int(status)
    twice, never = [], []
    for test in failures.tests:
        (twice if passes_alone(test) else never).append(test)
    for what, tests in (("passed only in a second run, alone", twice), ("failed twice", never)):
        for test in tests:
            print(f"{test}: {what}")
    return 1 if never else 0


if __name__ == "__main__":
    sys.exit(main())
