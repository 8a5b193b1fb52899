"""The user's script as a module that other processes import."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")


def script_module() -> str:
    """Return the name by which other processes can import the running script; empty if they cannot.

    Importing a script runs all that is not under `if __name__ == "__main__":`, so a script without such a
    block counts as one that cannot be imported.
    """
    main = sys.modules["__main__"]
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    name = spec.name if spec is not None else Path(path or "").stem  # with a spec: python -m name
    can_be_named = all(part.isidentifier() and part != "__main__" for part in name.split("."))
    return name if path and can_be_named and _is_guarded(Path(path)) else ""


def module_of(class_: type) -> str:
    """Return the name by which other processes import the module of a class; "__main__" for a script that
    they cannot import."""
    is_script = class_.__module__ == "__main__"
    return (is_script and script_module()) or class_.__module__


@functools.cache
def _is_guarded(path: Path) -> bool:
    """True if a script has a block that runs only if the script is not imported."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    blocks = (each for each in tree.body if isinstance(each, ast.If))
    return any(ast.unparse(each.test) in _GUARDS for each in blocks)
