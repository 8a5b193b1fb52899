"""Bytes that are no message, record or state become one line of the right error, whatever msgspec raises."""

from __future__ import annotations

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
