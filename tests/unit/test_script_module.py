"""A script that can be imported gives its optimizer's class a name that other processes can use."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch

from atoll.core.errors import PrepareError, UserError
from atoll.core.scriptmodule import script_module
from atoll.tensors.shardoptimizer import full_name, optimizer_class, own_path

GUARDED = "def main(): ...\n\nif __name__ == '__main__':\n    main()\n"


def runs(monkeypatch: pytest.MonkeyPatch, path: Path | None, text: str, spec: str = "") -> None:
    """Let the script at `path`, with this text, be the one that runs; `spec` is its name under python -m."""
    script = types.ModuleType("__main__")
    if path is not None:
        path.write_text(text, encoding="utf-8")
        script.__file__ = str(path)
    script.__spec__ = importlib.machinery.ModuleSpec(spec, None) if spec else None
    monkeypatch.setitem(sys.modules, "__main__", script)


@pytest.mark.parametrize(
    ("file", "text", "spec", "name"),
    [
        ("train.py", GUARDED, "", "train"),
        ("train.py", "if '__main__' == __name__:\n    pass\n", "", "train"),
        ("train.py", GUARDED, "jobs.train", "jobs.train"),
        ("__main__.py", GUARDED, "jobs.__main__", ""),
        ("train.py", "def main(): ...\n\nmain()\n", "", ""),  # importing it trains
        ("train.py", "if True:\n    pass\n", "", ""),
        ("train.py", "no Python", "", ""),
        ("train-it.py", GUARDED, "", ""),  # no name of a module
        (None, "", "", ""),  # typed in
    ],
)
def test_the_name_by_which_others_import_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str | None, text: str, spec: str, name: str
) -> None:
    runs(monkeypatch, None if file is None else tmp_path / file, text, spec)
    assert script_module() == name


def lion() -> type[torch.optim.Optimizer]:
    """Return a class of the script's own."""
    return type("Lion", (torch.optim.SGD,), {"__module__": "__main__"})


def test_a_class_of_a_script_that_can_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs(monkeypatch, tmp_path / "train.py", GUARDED)
    assert (full_name(lion()), own_path(lion(), "server")) == ("train.Lion", "train:Lion")


def test_a_class_of_a_script_that_trains_when_it_is_imported_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs(monkeypatch, tmp_path / "train.py", "print()")
    with pytest.raises(PrepareError, match="which cannot import Lion: it is defined in the script itself"):
        own_path(lion(), "server")


@pytest.mark.parametrize("text", ["raise SystemExit(2)", "open('no such file')", "Lion = None"])
def test_a_script_that_cannot_be_imported_here_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "unready_script.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unready_script", raising=False)
    with pytest.raises(UserError, match="the optimizer 'unready_script:Lion'"):
        optimizer_class("unready_script.Lion", "unready_script:Lion")
    sys.modules.pop("unready_script", None)
