"""`atoll lab show` and the commands' own part of `atoll lab run`: what is drawn, and what is handed on."""

from __future__ import annotations

import io
import subprocess
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from atoll.cli.app import main
from atoll.lab import drawing, words
from atoll.lab.topology import Topology, load_topology, parse_topology

EXAMPLES = Path(__file__).parents[2] / "examples" / "lab"


def drawn(topology: Topology, width: int = 120) -> list[str]:
    """The lines that a terminal of that width shows."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    drawing.show(topology, "name", console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def bars(lines: list[str]) -> dict[str, str]:
    """The timeline's bars by the names of their links."""
    found = [line.strip().rsplit("  ", 1) for line in lines if line.strip().endswith(("━", "▒", "╳"))]
    return {name.strip(): bar for name, bar in found}


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_terminal_shows_sites_links_and_changes() -> None:
    lines = drawn(load_topology(EXAMPLES / "bad-link.toml"), width=200)
    assert lines[0] == "name: 2 sites, 2 workers, 1 link, seed 1"
    assert "  ship   10.77.1.1  1 worker" in lines
    assert (
        "  ship  ◀──▶  shore       100 Mbit/s · 150 ms ± 5 ms (normal) · queue 1.2 MiB (100 ms) · "
        "3 % lost in bursts of 8 · 0.5 % overtake by 10 ms · 0.05 % twice · 0.01 % corrupted"
    ) in lines
    changes = [line.split(maxsplit=2) for line in lines if line.startswith("                    ")]
    assert ["30", "s", "nothing gets through"] in changes
    assert ["32", "s", "open again"] in changes
    assert "              1 min 30 s  100 Mbit/s · 3 % lost in bursts of 8" in lines


def test_the_timeline_shows_the_worst_of_each_cell() -> None:
    text = '[[site]]\nname = "a"\n[[site]]\nname = "b"\n[[link]]\nbetween = ["a", "b"]\nrate = "1Mbit/s"\n'
    change = '[[link.change]]\nat = "50s"\nloss = 0.1\n'
    outage = '[[link.outage]]\nat = "10s"\nfor = "10ms"\n'  # far shorter than a cell
    bar = bars(drawn(parse_topology(text + change + outage)))["a - b"]
    assert len(bar) == 48
    assert bar.count("╳") == 1
    assert bar.index("╳") == int(10 / 57.5 * 48)
    assert bar.index("▒") == int(50 / 57.5 * 48)
    assert bar.endswith("▒")
    assert bars(drawn(parse_topology(text))) == {}


def test_sites_with_their_workers_and_services() -> None:
    lines = drawn(load_topology(EXAMPLES / "three-continents.toml"))
    assert "  virginia   10.77.1.1  2 workers · hub, 2 shards" in lines
    assert "  frankfurt  10.77.2.1  2 workers at speeds 1, 0.5" in lines
    assert "  tokyo      10.77.3.1  1 worker at speed 0.25" in lines
    arrows = [line.split()[:3] for line in lines if "─▶" in line]
    assert ["virginia", "◀──▶", "tokyo"] in arrows
    assert ["frankfurt", "───▶", "tokyo"] in arrows
    assert ["tokyo", "───▶", "frankfurt"] in arrows
    assert len(arrows) == 4


def test_what_is_easily_a_mistake_is_said() -> None:
    sites = "".join(f'[[site]]\nname = "{name}"\n' for name in ("a", "b", "c"))
    lines = drawn(parse_topology(sites + '[[link]]\nfrom = "a"\nto = "b"\nrate = "1Mbit/s"\n'))
    assert "  c has no link; nothing reaches it" in lines
    assert "  a -> b has no way back; TCP cannot use it, ping gets no answer" in lines
    assert not any("no link" in line for line in drawn(parse_topology('[[site]]\nname = "a"\n')))


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_no_terminal_is_too_narrow(width: int) -> None:
    lines = drawn(load_topology(EXAMPLES / "three-continents.toml"), width)
    assert max(map(len, lines)) <= width


def test_a_change_says_only_what_is_different() -> None:
    text = (
        '[[site]]\nname = "a"\n[[site]]\nname = "b"\n[[link]]\nfrom = "a"\nto = "b"\nrate = "8Mbit/s"\n'
        'delay = "1s"\nloss = 0.1\nqueue = "1MB"\n'
        '[[link.change]]\nat = 1\nloss = 0\n[[link.change]]\nat = 2\nrate = "4Mbit/s"\n'
        '[[link.change]]\nat = 3\nqueue = "2MB"\n[[link.change]]\nat = 4\nqueue = "3MB"\n'
        "[[link.change]]\nat = 5\nloss = 1e-9\n[[link.change]]\nat = 6\nloss = 1.00001e-9\n"
    )
    (way,) = words.ways(parse_topology(text))
    assert list(words.changes(way)) == [
        (1.0, "no loss"),
        (2.0, "4 Mbit/s"),  # the queue holds the same bytes
        (3.0, "queue 1.9 MiB (4 s)"),
        (4.0, "queue 2.9 MiB (6 s)"),
        (5.0, "1e-07 % lost"),
        (6.0, "a little different"),
    ]


@pytest.mark.parametrize(
    ("name", "begins"),
    [("a.png", b"\x89PNG\r\n"), ("a.PNG", b"\x89PNG\r\n"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")],
)
def test_the_picture(
    name: str,
    begins: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    assert atoll(monkeypatch, "lab", "show", str(EXAMPLES / "bad-link.toml"), "--picture", str(path)) == 0
    assert path.read_bytes().startswith(begins)
    assert capfd.readouterr().out.endswith(f"{path}: the picture\n")


def test_the_picture_shows_every_site_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    from atoll.lab.picture import draw

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # texts as text, so that they can be read
        draw(load_topology(EXAMPLES / "three-continents.toml"), "continents", tmp_path / "a.svg")
    tree = ElementTree.parse(tmp_path / "a.svg")
    texts = " ".join("".join(text.itertext()) for text in tree.iter("{http://www.w3.org/2000/svg}text"))
    sites = ["virginia", "frankfurt", "tokyo", "hub, 2 shards", "1 worker at speed 0.25"]
    links = [
        "1 Gbit/s",
        "110 ms ± 2 ms (pareto)",
        "200 Mbit/s",
        "0.2 % lost in bursts of 4",
        "virginia - tokyo",
    ]
    assert [said for said in sites + links if said not in texts] == []


def test_a_large_lab_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from atoll.lab.picture import draw

    names = [f"s{index}" for index in range(12)]
    links = "".join(
        f'[[link]]\nbetween = ["{a}", "{b}"]\nrate = "1Mbit/s"\n' for a in names for b in names if a < b
    )
    topology = parse_topology("".join(f'[[site]]\nname = "{name}"\n' for name in names) + links)
    draw(topology, "large", tmp_path / "a.svg")
    assert "too many to label" in (tmp_path / "a.svg").read_text()  # matplotlib writes each text in a comment
    assert len(drawn(topology)) > 66


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    arguments = ["lab", "show", str(EXAMPLES / "two-sites.toml"), "--picture", str(tmp_path / "a.png")]
    assert atoll(monkeypatch, *arguments) == 2
    err = capfd.readouterr().err
    assert err.endswith("the picture needs the extra: pip install 'atoll[report]'\n")
    assert err.count("\n") == 1


def test_a_terminal_without_these_letters_gets_others() -> None:
    code = "from atoll.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "lab", "show", str(EXAMPLES / "bad-link.toml")],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "ship  ????  shore" in done.stdout


def test_showing_a_lab_imports_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys\nfrom atoll.cli.app import main\ntry:\n    main()\nfinally:\n"
        "    print([name for name in ('torch', 'matplotlib', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "lab", "show", str(EXAMPLES / "two-sites.toml")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("arguments", "command", "directory"),
    [
        (
            ["--", "torchrun", "--nproc-per-node", "1", "t.py"],
            ["torchrun", "--nproc-per-node", "1", "t.py"],
            None,
        ),
        (
            ["--directory", "d", "--", "ls", "--directory", "{site}"],
            ["ls", "--directory", "{site}"],
            Path("d"),
        ),
        (["ping", "{first}"], ["ping", "{first}"], None),
    ],
)
def test_run_hands_topology_command_and_directory_on(
    arguments: list[str], command: list[str], directory: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def run_lab(
        topology: Topology, command: list[str], *, folder: Path | None = None, **_kept: object
    ) -> int:
        given.extend([topology, command, folder])
        return 7

    runner = types.ModuleType("atoll.lab.runner")
    runner.run_lab = run_lab  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "atoll.lab.runner", runner)
    path = EXAMPLES / "two-sites.toml"
    assert atoll(monkeypatch, "lab", "run", str(path), *arguments) == 7
    assert given == [load_topology(path), command, directory]
