"""What several test modules share."""

from __future__ import annotations

import gc
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from support.pool import WorkerPool

# Without Hypothesis's deadline, which on a loaded machine tells nothing of the code.
settings.register_profile("atoll", deadline=None)
settings.load_profile("atoll")

# Workers get this path: there the strategies of examples/ and their entry points are found, as if installed.
PACKAGES = [str(Path(__file__).parent / "packages"), str(Path(__file__).parents[1] / "examples")]
sys.path += [*PACKAGES, str(Path(__file__).parents[1] / "docs")]

# A shell that starts the tests in the background has Ctrl-C ignored, and so would every process of theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
# So has nohup the end of the terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


CHECKED = ("processes", "lab")  # the folders whose tests `make check` runs
SAMPLED = 6  # of the tests of a module that is marked as sampled, `make test` runs one in so many


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make check` runs the tests of these folders, but for those that are marked as quick, and those of
    sampled modules that `make test` leaves out."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    checked = folder in CHECKED and item.get_closest_marker("quick") is None
    sampled = item.get_closest_marker("sampled") is not None
    if checked or (sampled and zlib.crc32(item.name.encode()) % SAMPLED):
        item.add_marker(pytest.mark.check)


def pytest_collection_finish() -> None:
    """Half a million objects are there for the tests, to the end: no collection is to look through them. And
    what tests compute here is as in the workers, which have one thread: the order of a sum depends on it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """The test that leaves gradients switched off fails, and not every one after it."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("this test left gradients switched off")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """A test begins as in a process that has compiled nothing: then steps overlap (`has_compiled`)."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Device memory that is given back is NaN until it is used again; bandwidths are measured once."""
    from support import tight

    with tight.poisoned():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """One set of worker processes for the whole test run: importing torch costs seconds, a job does not."""
    from support.pool import WorkerPool

    with WorkerPool() as workers:
        yield workers


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Nothing is collected meanwhile: to look through what thousands of tests have left takes a second, which
    is not the time of what is measured."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
