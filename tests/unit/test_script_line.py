"""Where in the user's script a call stands."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.scriptline import at_script_line, line_of_error, script_line, script_number, waiting_line


def run_script(path: Path, text: str) -> dict[str, Any]:
    """Execute `text` as a user's script of this path, which may call `script_line`."""
    names: dict[str, Any] = {"script_line": script_line, "script_number": script_number, "torch": torch}
    exec(compile(text, str(path), "exec"), names)
    return names


def test_the_innermost_line_of_the_script_is_named(tmp_path: Path) -> None:
    names = run_script(tmp_path / "train.py", "def step():\n    return script_line()\n\nline = step()\n")
    assert names["line"] == "train.py:2"


def test_frames_of_torch_and_the_standard_library_are_passed_over(tmp_path: Path) -> None:
    text = (
        "lines = []\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "x.register_hook(lambda _: lines.append(script_line()))\n"
        "import contextlib, functools\n"
        "functools.reduce(lambda a, b: a, [1, 2])\n"
        "x.sum().backward()\n"
    )
    assert run_script(tmp_path / "train.py", text)["lines"] == ["train.py:3"]


@pytest.mark.parametrize(
    "text",
    [
        "import numpy\n\ndef fail(): numpy.random.default_rng(0).integers(5, 2)\n",
        "import numpy\n\ndef fail(): numpy.random.RandomState(0).choice(0, 3)\n",
        "import zmq\n\ndef fail(): zmq.Context().socket(zmq.REQ).setsockopt(zmq.LINGER, 'long')\n",
        "from collections import namedtuple\n\ndef fail(): namedtuple('Pair', 'a b')(1)\n",
        "from zmq.utils.jsonapi import loads\n\ndef fail(): loads('{')\n",
    ],
    ids=["generator", "random state", "zmq", "named tuple", "plain Python"],
)
def test_an_error_inside_a_package_is_at_the_line_of_the_script(tmp_path: Path, text: str) -> None:
    """Compiled code of a package stands in a traceback with a relative file name, such as _generator.pyx."""
    names = run_script(tmp_path / "train.py", text)
    with pytest.raises((ValueError, TypeError)) as caught:
        names["fail"]()
    assert line_of_error(caught.value) == "train.py:3"


def test_a_thread_without_a_script_has_no_line() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(script_line).result() == ""


def test_a_line_is_shown_behind_the_call_as_far_as_it_is_known() -> None:
    assert at_script_line("session.save", "") == "session.save"
    assert at_script_line("session.save", "train.py:31") == "session.save (train.py:31)"


def test_on_another_thread_the_line_is_that_of_the_main_thread() -> None:
    """As on a GPU, where a backward ends on a thread of autograd's while the main thread waits for it."""
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(script_line).result(30.0) == ""
        line = threads.submit(waiting_line).result(30.0)
    assert line.startswith(f"{Path(__file__).name}:")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("epoch = 3\nfound = script_number(('epoch',))\n", 3),
        ("epoch = 3\ndef f():\n  return script_number(('epoch',))\nfound = f()\n", 3),
        ("epoch = 3\ndef f(epoch):\n  return script_number(('epoch',))\nfound = f(4)\n", 4),
        ("def f(epoch):\n  def g():\n    return script_number(('epoch',))\n  return g()\nfound = f(4)\n", 4),
        (
            "def f(epoch):\n  g = lambda: (epoch, script_number(('epoch',)))\n"
            "  return g()[1]\nfound = f(4)\n",
            4,
        ),
        ("def f():\n  if False:\n    epoch = 2\n  return script_number(('epoch',))\nfound = f()\n", None),
        ("epoch = 1.0\nfound = script_number(('epoch',))\n", None),
        ("epoch = True\nfound = script_number(('epoch',))\n", None),
        ("epoch = -1\nfound = script_number(('epoch',))\n", None),
        ("epoch = 1.0\nstep = 2\nfound = script_number(['epoch', 'step'])\n", 2),
        ("found = script_number(('epoch',))\n", None),
    ],
)
def test_a_number_of_the_script(tmp_path: Path, text: str, right: int | None) -> None:
    assert run_script(tmp_path / "train.py", text)["found"] == right


def test_who_looks_at_a_number_keeps_nothing_alive(tmp_path: Path) -> None:
    text = (
        "import weakref\n"
        "def f(epoch):\n"
        "  large = torch.ones(2)\n"
        "  seen = weakref.ref(large)\n"
        "  number = script_number(('epoch',))\n"
        "  large = None\n"
        "  return number, seen()\n"
        "found = f(4)\n"
    )
    assert run_script(tmp_path / "train.py", text)["found"] == (4, None)
