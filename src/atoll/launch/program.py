"""The user's program: a script's file, or a module as of `python -m`."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import ModuleType

from atoll.core.errors import UserError

_MODULE = "-m"


@dataclass(frozen=True)
class Program:
    """Each worker's program: the path of a script, or with `is_module` a module's name, and its arguments."""

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    @staticmethod
    def parse(words: Sequence[str]) -> Program:
        """Return the program that the words of a command line give."""
        if words[0] == _MODULE:
            return Program(words[1], words[2:], is_module=True)
        return Program(words[0], words[1:])

    def words(self) -> list[str]:
        """Return the program as a command line that `parse` reads."""
        return [*([_MODULE] if self.is_module else []), self.name, *self.arguments]

    @property
    def title(self) -> str:
        """The name to show."""
        return self.name if self.is_module else Path(self.name).name

    @property
    def stem(self) -> str:
        """The name for a folder."""
        return self.name if self.is_module else Path(self.name).stem

    @property
    def asks_for_help(self) -> bool:
        """True if the program is started for its help or version, and not to train."""
        return any(word in ("-h", "--help", "--version") for word in self.arguments)

    def file(self) -> str:
        """Return the path of the code that runs as `__main__`; empty if it has none."""
        if not self.is_module:
            return self.name
        spec = _find_runnable(self.name)
        return (spec.origin or "") if spec is not None else ""

    def check(self) -> None:
        """Raise UserError for a program that cannot be started. Nothing is imported."""
        if self.is_module:
            if _find_runnable(self.name) is None:
                raise UserError(self._why_no_module())
            return
        path = Path(self.name)
        if path.is_dir():
            raise UserError(f"{self.name}: is a directory; give the training script in it")
        if not path.is_file():
            raise UserError(f"{self.name}: no such script")
        if not os.access(path, os.R_OK):
            raise UserError(f"{self.name}: cannot be read by this user")

    def run(self) -> None:
        """Run the program in this process as Python would, with its `__main__`, `sys.argv` and `sys.path`."""
        if self.is_module:
            sys.argv = [self.name, *self.arguments]
            if not getattr(sys.flags, "safe_path", False):  # with -P there is no entry of the kind to replace
                sys.path[0] = str(Path.cwd())
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        sys.argv = [self.name, *self.arguments]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = str(Path(self.name).resolve().parent)
        path = str(Path(self.name).absolute())  # under python `__file__` is so, wherever the script goes
        if pkgutil.get_importer(path) is not None:  # an archive
            runpy.run_path(path, run_name="__main__")
            return
        _run_file(path)

    def _why_no_module(self) -> str:
        if self.name.endswith(".py") or os.sep in self.name:
            return f"-m {self.name}: is a file's name, not a module's; leave out -m"
        if _find(self.name) is not None:
            return f"-m {self.name}: is a package without __main__.py; name the module in it that trains"
        return f"-m {self.name}: no such module, neither in this folder nor in Python's path"


def _run_file(path: str) -> None:
    """Run a file as `__main__`. `runpy.run_path` would change `sys.argv[0]`."""
    with io.open_code(path) as file:
        data = file.read()
    if data[: len(MAGIC_NUMBER)] == MAGIC_NUMBER:  # compiled
        runpy.run_path(path, run_name="__main__")
        return
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    vars(main).update(__annotations__={}, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    exec(compile(data, path, "exec", dont_inherit=True), vars(main))


def _find_runnable(name: str) -> ModuleSpec | None:
    """Find what `python -m` would run: the module, or a package's `__main__`."""
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return _find(f"{name}.__main__")
    return spec


def _find(name: str) -> ModuleSpec | None:
    """Find a module without importing anything. `importlib.util.find_spec` imports the packages around it."""
    parts, found = name.split("."), None
    if not all(parts):
        return None
    locations: list[str] | None = None
    for count in range(1, len(parts) + 1):
        found = _look_for(".".join(parts[:count]), locations)
        if found is None or (count < len(parts) and found.submodule_search_locations is None):
            return None
        locations = list(found.submodule_search_locations or [])
    return found


def _look_for(name: str, locations: list[str] | None) -> ModuleSpec | None:
    here = [str(Path.cwd()), *sys.path] if locations is None else locations
    found = PathFinder.find_spec(name, here)
    for finder in sys.meta_path:  # of a package that is installed in place, for example
        if found is None and finder is not PathFinder:
            found = finder.find_spec(name, locations)
    return found
