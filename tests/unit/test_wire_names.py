"""`wire/messages.py` gives the names of other modules without a list of them."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

from atoll.wire import messages


def test_no_module_hides_a_message_of_another_one() -> None:
    assert messages.__file__
    imports = [
        n for n in ast.parse(Path(messages.__file__).read_text()).body if isinstance(n, ast.ImportFrom)
    ]
    whole = [each.module for each in imports if each.names[0].name == "*" and each.module]
    assert whole
    for name in whole:
        module = importlib.import_module(name)
        for each, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == name:
                assert getattr(messages, each) is kind, f"{each} of {name} is hidden"
