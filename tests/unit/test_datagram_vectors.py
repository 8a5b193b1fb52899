"""Datagrams kept in vectors/datagrams.json: a second implementation must read and write the same bytes.

Each has its fields, the bytes before the seal ("opened": header and body) and those on the wire ("sealed").
`python tests/unit/test_datagram_vectors.py` writes the file anew, for a new version of the protocol.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.net.seals import Opener, Sealer, derive_key
from atoll.wire import linkcontrol
from atoll.wire.datagrams import (
    HEADER,
    HIGH,
    NO_GROUP,
    NOT_SAID,
    RELIABLE,
    SEAL_BYTES,
    SLICE,
    Acknowledgement,
    Bytes,
    Datagrams,
    Kind,
    ack_datagram,
    control_datagram,
    headers_untrusted,
    new_frames,
    read_ack,
    records_of,
    split_untrusted,
    write_headers,
)

FILE = Path(__file__).parent / "vectors" / "datagrams.json"


def built(vector: dict[str, Any]) -> Bytes:
    """The datagram as the writers make it of the vector's fields, (1, size)."""
    kind, fields = Kind[vector["kind"]], vector["fields"]
    if kind is Kind.CONTROL:
        message = msgspec.convert(fields, linkcontrol.AnyControl)
        frames = control_datagram(linkcontrol.encode(message))
    elif kind is Kind.ACK:
        received = np.array([bit == "1" for bit in fields["received"]], dtype=bool)
        frames = ack_datagram(Acknowledgement(**(fields | {"received": received})))
    else:
        payload = bytes.fromhex(fields["payload"])
        frames = new_frames(1, SLICE.itemsize + len(payload))
        for name in SLICE.names or ():
            records_of(frames, SLICE, HEADER.itemsize)[name] = fields[name]
        frames[0, HEADER.itemsize + SLICE.itemsize : -SEAL_BYTES] = np.frombuffer(payload, np.uint8)
    write_headers(frames, kind, vector["phase"], vector["stripe"], vector["session"], vector["number"])
    return frames


def plain(message: linkcontrol.AnyControl) -> dict[str, Any]:
    """As JSON has it, bytes in base64."""
    return json.loads(msgspec.json.encode(message))  # type: ignore[no-any-return]


def fields_of(batch: Datagrams) -> dict[str, Any]:
    """What the parsers read in a datagram, as the vector says it."""
    if batch.kind is Kind.CONTROL:
        return plain(linkcontrol.decode_untrusted(batch.bodies[0]))
    if batch.kind is Kind.ACK:
        told = dict(vars(read_ack(batch.frames[0])))
        told["received"] = "".join("01"[bit] for bit in told["received"].astype(int))
        return told
    fields = {name: batch.slices[name][0].item() for name in SLICE.names or ()}
    return fields | {"payload": batch.elements[0].tobytes().hex()}


def seal_of(vector: dict[str, Any], secret: bytes, opener: bool) -> Any:
    client = (vector["sender"] == "client") != opener
    return (Opener if opener else Sealer)(secret, client=client, stripe=vector["stripe"], seal=vector["seal"])


KEPT = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"datagrams": [], "keys": []}
EACH = pytest.mark.parametrize("vector", KEPT["datagrams"], ids=lambda vector: vector["name"])


def test_each_kind_and_message_is_kept() -> None:
    assert {vector["kind"] for vector in KEPT["datagrams"]} == {kind.name for kind in Kind}
    said = {vector["fields"].get("m") for vector in KEPT["datagrams"]} - {None}
    assert said == {message.__name__ for message in linkcontrol.Control.__subclasses__()}
    assert {(vector["sender"], vector["phase"] % 2) for vector in KEPT["datagrams"]} == {
        (sender, phase) for sender in ("client", "server") for phase in (0, 1)
    }


@EACH
def test_the_writers_give_the_same_bytes(vector: dict[str, Any]) -> None:
    frames = built(vector)
    assert frames[0, :-SEAL_BYTES].tobytes().hex() == vector["opened"]
    seal_of(vector, bytes.fromhex(KEPT["secret"]), opener=False).seal(frames)
    assert frames[0].tobytes().hex() == vector["sealed"]


@EACH
def test_the_parsers_read_the_same_fields(vector: dict[str, Any]) -> None:
    frames = np.frombuffer(bytes.fromhex(vector["sealed"]), np.uint8)[None].copy()
    drops: Counter[str] = Counter()
    (flow,) = headers_untrusted(frames, np.array([frames.shape[1]]), drops)
    assert (flow.session, flow.stripe, flow.phase) == (vector["session"], vector["stripe"], vector["phase"])
    assert flow.numbers.tolist() == [vector["number"]]
    assert seal_of(vector, bytes.fromhex(KEPT["secret"]), opener=True).open(flow.frames, flow.sizes).all()
    (batch,) = split_untrusted(flow.frames, flow.sizes, drops)
    assert batch.kind.name == vector["kind"]
    assert batch.frames[0].tobytes().hex() == vector["opened"]
    assert fields_of(batch) == vector["fields"]
    assert not drops


@pytest.mark.parametrize("key", KEPT["keys"], ids=str)
def test_the_keys_are_the_same(key: dict[str, Any]) -> None:
    secret = bytes.fromhex(KEPT["secret"])
    found = derive_key(secret, client=key["sender"] == "client", stripe=key["stripe"], phase=key["phase"])
    assert found.hex() == key["key"]


# -- writing the file ----------------------------------------------------------------------------------------


def write_file() -> None:
    secret = bytes(range(32))
    elements = np.array([1.0, -2.5, 0.0, 3.25], np.float32).tobytes().hex()
    low: dict[str, Any] = {
        "transfer": 7, "chunk": 3, "iteration": 41, "blocks": 20, "highs": 5, "group": NO_GROUP, "place": 0,
        "data": 0, "parity": 0, "element": 1, "flags": 0, "reserved": 0, "offset": 12, "index": 3,
        "scale": 1.0, "count": 4, "nonzero": NOT_SAID, "payload": elements,
    }  # fmt: skip
    high = low | {"flags": HIGH, "nonzero": 3, "index": 2, "offset": 8}
    grouped = high | {"group": 1, "place": 2, "data": 4, "parity": 2}
    parity = grouped | {"place": 5, "index": 0xDEADBEEF, "offset": 0, "count": 9, "nonzero": 77, "scale": 0.0}
    whole = {"highs": 20, "flags": HIGH | RELIABLE, "element": 4, "scale": 0.5, "nonzero": 8, "count": 8}
    token = list(bytes(range(8)))
    told = {
        "of": 1, "largest": 2**33, "arrived": 12.345678, "delay": 0.000125, "base": 2**33 - 10,
        "received": "11011110101", "delivered": 20_000_000,
    }  # fmt: skip
    closed = linkcontrol.closed_of(6, 7, np.arange(20) % 7 == 3, "zero", "enough", 1400)[0]
    messages: list[linkcontrol.AnyControl] = [
        linkcontrol.padded(linkcontrol.Hello(sequence=0), 256),
        linkcontrol.Challenge(sequence=1, token=bytes(token)),
        linkcontrol.Answer(sequence=2, token=bytes(token)),
        linkcontrol.Ping(sequence=3),
        linkcontrol.Early(sequence=4, transfer=7),
        linkcontrol.Need(sequence=5, transfer=7, ranges=[(0, 1), (3, 9)]),
        closed,
        linkcontrol.Ask(sequence=7, size=20_000_000),
        linkcontrol.Grant(sequence=8, rate=1.25e8, seconds=0.5),
        linkcontrol.Bye(sequence=9, reason="the run is over"),
    ]
    parts: list[tuple[str, Kind, dict[str, Any]]] = [
        ("a low block", Kind.DATA, low),
        ("a high block", Kind.DATA, high),
        ("a high block in a group", Kind.DATA, grouped),
        ("a block of a reliable transfer, bfloat16", Kind.DATA, low | whole),
        ("parity", Kind.PARITY, parity),
        ("an acknowledgement", Kind.ACK, told),
        ("an acknowledgement of none", Kind.ACK, told | {"received": "", "base": 2**33}),
        *((f"{type(each).__name__}", Kind.CONTROL, plain(each)) for each in messages),
        ("a low block, not sealed", Kind.DATA, low),
    ]
    vectors = []
    for place, (name, kind, fields) in enumerate(parts):
        vector: dict[str, Any] = {
            "name": name, "sender": ("client", "server")[place % 2], "seal": "not sealed" not in name,
            "kind": kind.name, "phase": place // 2 % 2, "stripe": place % 8, "session": 0xA7011 + place,
            "number": 2**40 + place, "fields": fields,
        }  # fmt: skip
        frames = built(vector)
        vector["opened"] = frames[0, :-SEAL_BYTES].tobytes().hex()
        seal_of(vector, secret, opener=False).seal(frames)
        vectors.append(vector | {"sealed": frames[0].tobytes().hex()})
    keys = [
        {
            "sender": sender,
            "stripe": stripe,
            "phase": phase,
            "key": derive_key(secret, client=sender == "client", stripe=stripe, phase=phase).hex(),
        }
        for sender, stripe, phase in (
            ("client", 0, 0),
            ("server", 0, 0),
            ("client", 7, 1),
            ("server", 1, 300),
        )
    ]
    text = json.dumps({"version": 1, "secret": secret.hex(), "keys": keys, "datagrams": vectors}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_file()
