"""Bytes that are no message, record or state become one line of the right error, whatever msgspec raises."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.core.decoding import decoded
from atoll.core.errors import UserError
from atoll.lab import report
from atoll.observe.summary import read_summary


class Word(msgspec.Struct, forbid_unknown_fields=True):
    text: str = ""
    more: Any = None


SOURCE = Path(__file__).parents[2] / "src" / "atoll"
DEEP = 100_000
NONSENSE = {
    "msgpack": [b"", b"\xc1", b"\x81\xa4text\xa1\xff", b"\x81\xa4more" + b"\x91" * DEEP, b"\x81\xa1\n\x01"],
    "json": [b"", b"{", b'{"text":"\xff"}', b'{"more":' + b"[" * DEEP, b'{"a\\nb":1}'],
}


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("kind", NONSENSE)
def test_what_cannot_be_decoded_is_one_line(kind: str, number: int) -> None:
    decoder = {"msgpack": msgspec.msgpack.Decoder(Word), "json": msgspec.json.Decoder(Word)}[kind]
    with pytest.raises(UserError, match=r"\Ano word: [^\n]{1,300}\Z"):
        decoded(decoder, NONSENSE[kind][number], UserError, "no word")


@pytest.mark.parametrize(
    "raw", [b"[", b'{"x":' + b"[" * DEEP, b'{"strategy":"\xff"}'], ids=["cut", "deep", "no text"]
)
def test_a_summary_and_a_labs_record_that_are_none_are_refused_in_a_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "summary.json").write_bytes(raw)
    with pytest.raises(UserError, match="not the summary of a run"):
        read_summary(tmp_path / "summary.json")
    (tmp_path / report.RECORD).write_bytes(raw)
    with pytest.raises(UserError, match="is not a lab's record"):
        report.read(tmp_path)


AT_ONCE = """
import sys, threading, msgspec
from atoll.core.decoding import converted, from_json, from_msgpack
sys.setswitchinterval(1e-6)
ways = {
    "from_msgpack": (from_msgpack, msgspec.msgpack.encode),
    "from_json": (from_json, msgspec.json.encode),
    "converted": (converted, lambda value: value),
}
decode, encode = ways[sys.argv[1]]
fields = {f"f{number}": {"a": [1, 2]} for number in range(8)}
raw = encode({f"f{number}": fields for number in range(6)})
for turn in range(100):
    inner = [msgspec.defstruct(f"I{turn}_{number}", [(name, "dict[str, list[int]]") for name in fields])
             for number in range(6)]
    kind = msgspec.defstruct(f"S{turn}", [(f"f{number}", each) for number, each in enumerate(inner)])
    begin = threading.Barrier(4)
    def go():
        begin.wait()
        decode(raw, kind)
    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print("alive")
"""


@pytest.mark.parametrize("way", ["from_msgpack", "from_json", "converted"])
def test_threads_decode_a_type_for_the_first_time_at_once(way: str) -> None:
    """msgspec by itself crashes: it shows a type's fields to other threads before they are complete."""
    ended = subprocess.run([sys.executable, "-c", AT_ONCE, way], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


@pytest.mark.check
def test_types_are_looked_into_where_modules_are_imported_or_by_one_thread_at_a_time() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path == SOURCE / "core" / "decoding.py":
            continue
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
        calls = {
            id(each): each for node in functions for each in ast.walk(node) if isinstance(each, ast.Call)
        }
        for call in calls.values():
            name = ast.unparse(call.func)
            typed = any(keyword.arg == "type" for keyword in call.keywords)
            if name == "msgspec.convert" or (name.startswith("msgspec.") and name.endswith("Decoder")):
                found.append(f"{path}:{call.lineno}")
            if name in ("msgspec.json.decode", "msgspec.msgpack.decode") and typed:
                found.append(f"{path}:{call.lineno}")
    assert not found
