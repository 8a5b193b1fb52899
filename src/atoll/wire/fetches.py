"""Requests between members of a group that share one model: a payload of a chunk, after a number of optimizer
steps.

A connection begins with the server's challenge; the client answers with one of its own and a proof that it
knows the server's secret, and the server proves that it knows the secret too. Then the client sends any
number of requests, each a head and the payload's kind; each answer is a head and the bytes, or the reason why
there are none.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from atoll.wire.base import WireError

SECRET_BYTES = 32
CHALLENGE_BYTES = 16
PROOF_BYTES = 32
MOST_REASON = 2**12  # bytes of a refusal

_OPENING = struct.Struct(f"<I{CHALLENGE_BYTES}s{PROOF_BYTES}s")  # the client's rank, challenge and proof
_FETCH = struct.Struct("<IqQB")  # chunk, version, bytes, and the length of the kind, which follows
_ANSWER = struct.Struct("<BQ")  # 1 for a refusal, and the number of bytes that follow

OPENING_BYTES, FETCH_BYTES, ANSWER_BYTES = _OPENING.size, _FETCH.size, _ANSWER.size


@dataclass(frozen=True)
class Fetch:
    """A request for the first `nbytes` of a chunk's payload `kind`, after `version` optimizer steps."""

    chunk: int
    kind: str
    version: int
    nbytes: int


def opening(rank: int, own: bytes, theirs: bytes, secret: bytes) -> bytes:
    """Return the answer of the client of `rank` to the server's challenge, `theirs`; `own` is its own
    challenge."""
    return _OPENING.pack(rank, own, _proof(secret, b"asks", rank, theirs, own))


def opening_untrusted(said: bytes, challenge: bytes, secret: bytes) -> tuple[int, bytes]:
    """Return the client's rank and challenge. Raises WireError unless the client knows the secret."""
    if len(said) != OPENING_BYTES:
        raise WireError(f"an opening of {len(said)} bytes")
    rank, theirs, proof = _OPENING.unpack(said)
    if not hmac.compare_digest(proof, _proof(secret, b"asks", rank, challenge, theirs)):
        raise WireError("an opening without the secret")
    return rank, theirs


def server_proof(rank: int, challenge: bytes, secret: bytes) -> bytes:
    """Return the server's answer to the challenge of the client of `rank`."""
    return _proof(secret, b"answers", rank, challenge, b"")


def _proof(secret: bytes, side: bytes, rank: int, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, side + rank.to_bytes(4, "little") + first + second, "sha256")


def encode_fetch(fetch: Fetch) -> bytes:
    kind = fetch.kind.encode()
    return _FETCH.pack(fetch.chunk, fetch.version, fetch.nbytes, len(kind)) + kind


def kind_bytes(head: bytes) -> int:
    """Return the number of bytes of the kind, which follow a fetch's head."""
    return int(_FETCH.unpack(head)[3])


def fetch_untrusted(head: bytes, kind: bytes) -> Fetch:
    """Return the fetch. Raises WireError for anything else."""
    chunk, version, nbytes, length = _FETCH.unpack(head)
    if len(kind) != length or not kind or not nbytes:
        raise WireError(f"a fetch of {nbytes} bytes, whose kind has {len(kind)} bytes")
    try:
        return Fetch(chunk, kind.decode(), version, nbytes)
    except UnicodeDecodeError:
        raise WireError("a fetch whose kind is no text") from None


def encode_answer(refused: bool, nbytes: int) -> bytes:
    return _ANSWER.pack(refused, nbytes)


def answer_untrusted(head: bytes, asked: int) -> int:
    """Return the number of bytes of a refusal that follow; 0: the `asked` bytes do. Raises WireError for
    any other answer."""
    refused, nbytes = _ANSWER.unpack(head)
    if refused == 1 and 0 < nbytes <= MOST_REASON:
        return int(nbytes)
    if refused == 0 and nbytes == asked:
        return 0
    raise WireError(f"an answer of kind {refused} and {nbytes} bytes, where {asked} were asked for")
