"""Properties of a lab's file: right ones come to what they say at every moment, wrong ones to one line."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import tempfile
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from atoll.cli.app import main
from atoll.core.errors import ConfigError
from atoll.lab.topology import Phase, Topology, parse_topology

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,6}[a-z0-9])?", fullmatch=True)
SHARES = st.floats(0, 0.5)
TIMES = st.integers(1, 200)  # in half seconds: so that moments often meet
# Drawn so that every combination is right: no jitter above a delay, no loss above what a burst allows.
QUALITIES: dict[str, st.SearchStrategy[Any]] = {
    "rate": st.sampled_from(["1Mbit/s", "56 kbit/s", "2.5Gbit/s", "100mbit"]),
    "delay": st.sampled_from(["10ms", "0.2", "150ms", "1s"]),
    "jitter": st.sampled_from(["0s", "1ms", "10ms"]),
    "distribution": st.sampled_from(["normal", "uniform", "pareto"]),
    "queue": st.sampled_from(["64KiB", 1500, "1MB", "1s"]),
    "loss": SHARES,
    "burst": st.floats(1, 100),
    "reorder": SHARES,
    "reorder_by": st.sampled_from(["1us", "1ms", "10ms"]),
    "duplicate": SHARES,
    "corrupt": SHARES,
}


@st.composite
def links(draw: st.DrawFn, sites: list[str]) -> list[dict[str, Any]]:
    pairs = [(a, b) for a in sites for b in sites if a < b]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=4)) if pairs else []
    found: list[dict[str, Any]] = []
    for source, target in chosen:
        shape = draw(st.sampled_from(["both", "forth", "back", "two"]))
        ways: list[dict[str, Any]] = [{"between": [source, target]}] if shape == "both" else []
        ways += [{"from": source, "to": target}] if shape in ("forth", "two") else []
        ways += [{"from": target, "to": source}] if shape in ("back", "two") else []
        found += [way | draw(link_qualities()) for way in ways]
    return found


@st.composite
def link_qualities(draw: st.DrawFn) -> dict[str, Any]:
    required = {name: QUALITIES[name] for name in ("rate", "delay")}
    others = {name: values for name, values in QUALITIES.items() if name not in required}
    values = draw(st.fixed_dictionaries(required, optional=others))
    moments = sorted(draw(st.sets(TIMES, max_size=4)))
    some = st.fixed_dictionaries({}, optional=QUALITIES).filter(bool)
    values["change"] = [{"at": moment / 2} | draw(some) for moment in moments]
    edges = sorted(draw(st.sets(TIMES, max_size=4)))
    spans = list(pairwise(edges))[:: draw(st.sampled_from([1, 2]))]  # with 1 they touch one another
    values["outage"] = [{"at": f"{start * 500}ms", "for": (end - start) / 2} for start, end in spans]
    return values


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """What a right file holds, as a table."""
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    sites: list[dict[str, Any]] = []
    for name in names:
        workers = draw(st.integers(1, 3))
        speed = st.floats(0.001, 1)
        speeds = draw(st.one_of(speed, st.lists(speed, min_size=workers, max_size=workers)))
        sites.append({"name": name, "workers": workers, "speed": speeds})
    document: dict[str, Any] = {"seed": draw(st.integers(0, 2**63 - 1)), "site": sites}
    document["link"] = draw(links(names))
    if draw(st.booleans()):
        document["hub"] = {"site": draw(st.sampled_from(names)), "shards": draw(st.integers(0, 64))}
    return document


def toml(document: dict[str, Any]) -> str:
    return "".join(f"{key(name)} = {inline(value)}\n" for name, value in document.items())


def key(name: str) -> str:
    return f'"{escaped(name)}"'


def escaped(text: str) -> str:
    return "".join(f"\\U{ord(letter):08x}" for letter in text)


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key(name)} = {inline(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, str):
        return f'"{escaped(value)}"'
    return (
        str(value).lower()
        if isinstance(value, bool)
        else repr(value)
        if isinstance(value, float)
        else str(value)
    )


def at_moment(values: dict[str, Any], moment: float) -> Phase:
    """How a link with these values behaves at `moment`: read as a file in which it is so from the start."""
    now = {name: value for name, value in values.items() if name not in ("change", "outage")}
    for change in values["change"]:
        if change["at"] <= moment:
            now |= {name: value for name, value in change.items() if name != "at"}
    for outage in values["outage"]:
        start = float(outage["at"].removesuffix("ms")) / 1000
        if start <= moment < start + outage["for"]:
            now["outage"] = [{"at": 0, "for": 1}]
    ends = now.get("between") or [now["from"], now["to"]]
    link = parse_topology(toml({"site": [{"name": end} for end in ends], "link": [now]})).links[0]
    return link.phases[0]


@pytest.mark.check
@settings(max_examples=40)
@given(documents())
def test_a_right_file_comes_to_what_it_says_at_every_moment(document: dict[str, Any]) -> None:
    topology = parse_topology(toml(document))
    assert [(site.name, site.workers) for site in topology.sites] == [
        (site["name"], site["workers"]) for site in document["site"]
    ]
    assert all(len(site.speeds) == site.workers for site in topology.sites)
    rest = list(topology.links)
    for values in document["link"]:
        for link in [rest.pop(0) for _ in range(2 if "between" in values else 1)]:
            times = [phase.at for phase in link.phases]
            assert times[0] == 0
            assert all(before < after for before, after in pairwise(times))
            for moment in [0.0, 0.25, *(half / 2 for half in range(1, 202)), 1e6]:
                current = [phase for phase in link.phases if phase.at <= moment][-1]
                assert current == replace(at_moment(values, moment), at=current.at)
    assert rest == []


@pytest.mark.check
@given(documents())
def test_a_topology_comes_back_from_json(document: dict[str, Any]) -> None:
    topology = parse_topology(toml(document))
    assert msgspec.json.decode(msgspec.json.encode(topology), type=Topology) == topology


GARBAGE = st.one_of(
    st.none().map(lambda _: date(2020, 2, 29)),
    st.booleans(),
    st.integers(),
    st.integers(10**400, 10**401),
    st.floats(),
    st.text(),
    st.text(alphabet="0123456789.eE+-_ kMGbits/BKmsdh\n", max_size=12),
    st.lists(st.integers() | st.text(), max_size=3),
    st.dictionaries(st.text(), st.integers(), max_size=2),
    st.just([{}]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for name, part in inner for place in places(part, (*path, name))]


@pytest.mark.check
@given(documents(), GARBAGE, st.data())
def test_garbage_in_any_place_is_right_or_one_line(
    document: dict[str, Any], garbage: Any, data: st.DataObject
) -> None:
    document = copy.deepcopy(document)
    *way, last = data.draw(st.sampled_from(places(document)))
    table: Any = document
    for step in way:
        table = table[step]
    if isinstance(table, dict) and data.draw(st.booleans()):
        table[data.draw(st.text())] = garbage
    else:
        table[last] = garbage
    text = toml(document)
    with contextlib.suppress(ConfigError):
        parse_topology(text)
        return
    assert show(text.encode()) == 2


@pytest.mark.check
@settings(max_examples=40)
@given(st.one_of(st.binary(), st.text().map(str.encode)))
@example(b"")
@example(b"[[" * 3000)
@example(b"a" + b".a" * 3000 + b" = 1")  # deeper than Python's stack; the parser's time grows with its square
def test_random_bytes_are_one_line_and_status_2(data: bytes) -> None:
    with contextlib.suppress(ConfigError, UnicodeDecodeError):
        parse_topology(data.decode())
        assume(False)
    assert show(data) == 2


def show(data: bytes) -> int:
    """The exit status of `atoll lab show` on a file of these bytes, which must say one line."""
    with tempfile.TemporaryDirectory() as folder, mock.patch("sys.stderr", io.StringIO()) as said:
        path = Path(folder) / "lab.toml"
        path.write_bytes(data)
        status: Any = None
        with mock.patch.object(sys, "argv", ["atoll", "lab", "show", str(path)]):
            try:
                main()
            except SystemExit as ended:
                status = ended.code
        assert said.getvalue().startswith(f"atoll: {path}: ")
        assert said.getvalue().count("\n") == 1
        assert len(said.getvalue()) < 500
    assert isinstance(status, int)
    return status
