"""The documentation names files, functions and keys: each of them exists."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from atoll.core.config import Config
from atoll.lab import topology
from atoll.ltp.settings import LtpSettings
from atoll.wire import datagrams
from atoll.wire.base import VERSION
from generate import HOW, page_of_keys

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"`((?:\w+/)+\w+\.py)`:\s+`([\w.]+)`")
# A row of a table of constants: | `ltp/acks.py`: `ACK_EVERY` | 64 | reason |
CONSTANT = re.compile(r"^\| `(\w+/\w+)\.py`: `(\w+)` \| ([^ |]+)", re.MULTILINE)
# What a docstring gives as its source: docs/ltp.md, "Grants" and "The tunnel".
PAGE = re.compile(r'\b([\w/-]+\.md)\b((?:(?:,| and) "[^"]+")*)')
SHORTHAND = re.compile(r"\bS\d\b")  # for a text that is not in the repository
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")


def docstrings_of(source: str) -> list[str]:
    """The docstrings of a module, each as one line."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [" ".join(text.split()) for node in nodes if (text := ast.get_docstring(node)) is not None]


def headings_of(page: Path) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE))


def unknown_sources(docstring: str) -> list[str]:
    """What a docstring cites that is not in the repository: pages, their headings, and shorthands."""
    found = SHORTHAND.findall(docstring)
    for name, headings in PAGE.findall(docstring):
        page = next((each for each in (ROOT / name, ROOT / "docs" / name) if each.exists()), None)
        known = headings_of(page) if page is not None else set()
        cited = re.findall(r'"([^"]+)"', headings)
        found += [name] if page is None else [f"{name}, {each!r}" for each in cited if each not in known]
    return found


@pytest.mark.check
def test_every_source_that_a_docstring_cites_is_there() -> None:
    """A page of the documentation with its heading; a paper is cited by its authors and where it is found."""
    pages, wrong = 0, []
    for path in sorted((ROOT / "src" / "atoll").rglob("*.py")):
        for docstring in docstrings_of(path.read_text(encoding="utf-8")):
            pages += len(PAGE.findall(docstring))
            wrong += [f"{path.relative_to(ROOT)}: {each}" for each in unknown_sources(docstring)]
    assert pages >= 80
    assert wrong == []


@pytest.mark.parametrize(
    ("docstring", "unknown"),
    [
        ('Source: docs/ltp.md, "Grants".', []),
        ("Source: docs/notes/peers.md; Zheng et al., ICML 2017.", []),
        ('Source: docs/memory.md, "How a parameter is reached" and "Moves".', []),
        ('Source: S3, "The sender", 4.', ["S3"]),
        ("Source: S0.", ["S0"]),
        ('Source: design.md, "The way of a gradient".', ["design.md"]),
        ('Source: docs/ltp.md, "No such heading".', ["docs/ltp.md, 'No such heading'"]),
        ('Source: docs/ltp.md, "Grants" and "Gone".', ["docs/ltp.md, 'Gone'"]),
    ],
)
def test_a_source_that_is_not_there_is_found(docstring: str, unknown: list[str]) -> None:
    assert unknown_sources(docstring) == unknown


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_no_page_cites_by_a_shorthand(page: Path) -> None:
    assert SHORTHAND.findall(page.read_text(encoding="utf-8")) == []


def names_in(path: Path) -> set[str]:
    """Every function, class and method that a file defines, methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(
    ("page", "at_least"),
    [
        ("architecture.md", 40),
        ("peers.md", 2),
        ("lab.md", 4),
        ("link.md", 6),
        ("ltp.md", 20),
        ("ltp-rates.md", 5),
        ("ltp-training.md", 3),
    ],
)
def test_every_function_that_a_page_names_exists(page: str, at_least: int) -> None:
    places = PLACE.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    places = [(file, name) for file, name in places if not name.isupper()]  # a constant: see below
    assert len(places) >= at_least
    missing = [
        f"{file}: {name}" for file, name in places if name not in names_in(ROOT / "src" / "atoll" / file)
    ]
    assert missing == []


def test_every_bound_that_the_page_on_failures_gives_is_the_code_s() -> None:
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    given = re.findall(r"`(\w+/\w+\.py)`: `(\w+)` = (\d+)|, `(\w+)` = (\d+)", text)
    assert len(given) >= 15
    file = ""
    for named, name, number, name_there_too, its_number in given:
        file = named or file
        tree = ast.parse((ROOT / "src" / "atoll" / file).read_text(encoding="utf-8"))
        values = {
            node.targets[0].id: ast.unparse(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        value = values[name or name_there_too].replace("_", "")
        assert eval(value) == int(number or its_number), f"{file}: {name or name_there_too}"


@pytest.mark.parametrize(("page", "at_least"), [("ltp.md", 80), ("ltp-rates.md", 50)])
def test_every_constant_of_the_transport_s_pages_is_the_code_s(page: str, at_least: int) -> None:
    rows = CONSTANT.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(rows) >= at_least
    wrong = []
    for file, name, given in rows:
        value = getattr(import_module(f"atoll.{file.replace('/', '.')}"), name, None)
        if value is None or value != pytest.approx(eval(given.replace("^", "**")), rel=1e-9):
            wrong.append(f"{file}.py: {name} = {value}, where the page has {given}")
    assert wrong == []


def test_the_datagrams_of_the_page_are_the_code_s() -> None:
    text = (ROOT / "docs" / "ltp.md").read_text(encoding="utf-8")
    given = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", text, re.MULTILINE)
    fields = [
        (str(layout.fields[name][1]), str(layout.fields[name][0].itemsize), name)
        for layout in (datagrams.HEADER, datagrams.SLICE, datagrams.ACK)
        for name in layout.names or ()
        if layout.fields is not None
    ]
    assert given == fields


def test_every_setting_of_the_transport_is_documented() -> None:
    text = (ROOT / "docs" / "ltp.md").read_text(encoding="utf-8")
    given = dict(re.findall(r"^\| `(\w+)` \| ([^ |]+) \|", text, re.MULTILINE))
    for name, value in vars(LtpSettings()).items():
        if isinstance(value, (str, bool)):
            assert given[name] == ("on" if value is True else f"`{value}`"), name
        else:
            assert float(given[name]) == value, name


def test_every_configuration_key_is_documented() -> None:
    text = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    assert text == page_of_keys(), f"run `{HOW}`"
    keys = [f"{section}.{key}" for section, values in msgspec.to_builtins(Config()).items() for key in values]
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_every_key_of_a_lab_is_documented() -> None:
    text = (ROOT / "docs/lab.md").read_text(encoding="utf-8")
    link = {*topology._LINK} - {"change", "outage"}
    keys = ["seed", *(f"site.{key}" for key in topology._SITE), *(f"hub.{key}" for key in topology._HUB)]
    keys += [f"link.{key}" for key in link]
    keys += ["link.change.at", *(f"link.outage.{key}" for key in topology._OUTAGE)]
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_the_lab_file_in_the_documentation_is_right() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/lab.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(topology.parse_topology(text).links) == 2


def defined_in(path: Path) -> set[str]:
    """`names_in`, and constants, and methods of test classes as pytest names them."""
    found = names_in(path)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            found |= {part.id for part in parts if isinstance(part, ast.Name)}
    return found | {name.replace(".", "::") for name in found}


@pytest.mark.check
def test_the_census_names_places_pages_and_tests_that_exist() -> None:
    text = (ROOT / "docs/notes/silence.md").read_text(encoding="utf-8")
    rows = [line.strip("|\n ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    wrong = []
    for row in rows:
        place, decided, told, shown = row if len(row) == 4 else ["", "", "", ""]
        file, _, name = place.strip("`").partition("::")
        source = ROOT / "src/atoll" / file
        if not file or not decided or not source.is_file() or name not in defined_in(source):
            wrong.append(f"no such place, or not four cells: {' | '.join(row)[:120]}")
        wrong += [
            f"{place}: no page {page}"
            for page in re.findall(r"`([\w/-]+\.md)`", told)
            if not (ROOT / "docs" / page).is_file()
        ]
        tests = re.findall(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`", shown)
        if not tests and not shown.startswith("none yet: "):
            wrong.append(f"{place}: neither a test nor a reason")
        for path, test in tests:
            if not (ROOT / path).is_file() or (test and test not in defined_in(ROOT / path)):
                wrong.append(f"{place}: no test {path}::{test}")
    assert wrong == []


def anchors_of(page: Path) -> set[str]:
    """The places in a page to which links may lead: headings, as GitHub names them, and `<a id="...">`."""
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings_of(page)}
    return slugs | set(re.findall(r'<a id="([^"]+)">', page.read_text(encoding="utf-8")))


def test_the_changelog_names_the_present_version_of_the_protocol() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"protocol\S* (?:has |is )?version (\d+)", text) == [str(VERSION)]


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for name, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            target = page.parent / name if name else page
            leads = target.exists() and (not anchor or anchor in anchors_of(target))
            broken += [] if leads else [f"{page.name} -> {name}#{anchor}"]
    assert broken == []
