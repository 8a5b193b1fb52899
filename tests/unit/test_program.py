"""The program that workers run: a script or a module, found without importing it."""

from __future__ import annotations

import py_compile
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from atoll.core.config import load_config
from atoll.core.errors import RunError, UserError
from atoll.launch import run, service
from atoll.launch.program import Program


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules that must not be imported by whoever looks for them."""
    boom = "raise AssertionError('imported')\n"
    for name in ("pkg/__init__.py", "pkg/train.py", "pkg/sub/__init__.py", "pkg/sub/__main__.py", "alone.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(boom)
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / "deep.py").write_text(boom)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("alone", "alone.py"),
        ("pkg.train", "pkg/train.py"),
        ("pkg.sub", "pkg/sub/__main__.py"),
        ("space.deep", "space/deep.py"),
    ],
)
def test_a_module_is_found(package: Path, name: str, file: str) -> None:
    program = Program(name, ["--lr", "-m"], is_module=True)
    program.check()
    assert program.file() == str(package / file)
    assert (program.title, program.stem) == (name, name)
    assert Program.parse(program.words()) == program


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nosuch", "-m nosuch: no such module, neither in this folder nor in Python's path"),
        ("pkg.nosuch", "-m pkg.nosuch: no such module"),
        ("alone.more", "-m alone.more: no such module"),
        ("pkg..train", "-m pkg..train: no such module"),
        ("", "-m : no such module"),
        ("pkg", "-m pkg: is a package without __main__.py; name the module in it that trains"),
        ("space", "-m space: is a package without __main__.py"),
        ("alone.py", "-m alone.py: is a file's name, not a module's; leave out -m"),
    ],
)
def test_a_module_that_cannot_be_run(package: Path, name: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        Program(name, is_module=True).check()
    assert said in str(refused.value)
    assert "imported" not in str(refused.value)


def test_a_script(package: Path) -> None:
    program = Program("pkg/train.py", ["-m", "x"])
    program.check()
    assert (program.title, program.stem, program.file()) == ("train.py", "train", "pkg/train.py")
    assert Program.parse(program.words()) == program
    for name, said in (("pkg", "is a directory"), ("no.py", "no such script")):
        with pytest.raises(UserError, match=said):
            Program(name).check()


def test_it_runs_as_python_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "job.py").write_text(
        "import sys; from . import word; print(__name__, sys.argv, sys.path[0], __spec__.name, word.IT)\n"
    )
    (tmp_path / "pack" / "word.py").write_text("IT = 'found'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path[1:]])
    monkeypatch.setattr(sys, "argv", [])
    Program("pack.job", ["--lr", "1"], is_module=True).run()
    job = tmp_path / "pack" / "job.py"
    assert capsys.readouterr().out == f"__main__ {[str(job), '--lr', '1']} {tmp_path} pack.job found\n"


SAYS = """
import pickle, sys
class Kind: pass
def annotated(x: print("evaluated")): pass
here = {name: value for name, value in globals().items() if name.startswith("__")}
print(sorted(here), __name__, __file__, __package__, __spec__, type(__loader__).__name__, type(__builtins__))
print(sys.argv, sys.path[0], type(pickle.loads(pickle.dumps(Kind()))), sys.modules["__main__"].Kind is Kind)
"""
RUNS = "import sys; from atoll.launch.program import Program; Program.parse(sys.argv[1:]).run()"


@pytest.mark.parametrize("name", ["job.py", "in/job", "in/job.pyc", "job.pyz"])
def test_a_script_sees_what_it_sees_under_python(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    for path in ("job.py", "in/job"):
        (tmp_path / path).write_text(SAYS)
    py_compile.compile(str(tmp_path / "job.py"), str(tmp_path / "in" / "job.pyc"), dfile="job.py")
    with zipfile.ZipFile(tmp_path / "job.pyz", "w") as archive:
        archive.writestr("__main__.py", SAYS)
    words = [name, "--lr", "1"]
    ways = [sys.executable, *words], [sys.executable, "-c", RUNS, *words]
    plain, own = (subprocess.run(way, cwd=tmp_path, capture_output=True, text=True) for way in ways)
    assert plain.stdout.startswith("evaluated\n"), plain.stderr
    if name in ("job.py", "in/job"):
        assert own.stdout == plain.stdout, own.stderr
    else:  # as `runpy` runs them
        assert own.stdout.startswith("evaluated\n"), own.stderr


def test_a_thread_that_cannot_be_started_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -u` binds threads too."""
    error = RuntimeError("can't start new thread")
    said = "cannot start a thread: there may be no more processes for this user or in this container "
    assert service._described(error).startswith(said)

    def start(*_: object) -> int:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_run_in", start)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(RunError, match=f"^the command {re.escape(said)}"):
        run.run("train.py", [], load_config(environment={}))
