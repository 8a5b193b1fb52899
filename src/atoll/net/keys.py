"""The key file, which lets a process join a run from another machine.

All processes of a run share one file: hub, shards and workers hold two equal pairs of CURVE keys. Any process
with the file can join, and read and change the training; so the file is private to its owner.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from atoll.core.decoding import from_json
from atoll.core.errors import UserError

_VERSION = 1  # of the file
_FILE_BYTES = 4096  # the largest file that is looked at
_KEY_CHARACTERS = 40  # of a key of 32 bytes in Z85


@dataclass(frozen=True)
class Keys:
    """CURVE keys in Z85 (ZeroMQ RFC 32), 40 characters each."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str = ""
    client_secret: str = field(repr=False, default="")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The key file, as JSON."""

    atoll_keys: int
    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def make_keys() -> Keys:
    """Return new keys, from the operating system's random numbers."""
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    return Keys(*(key.decode("ascii") for key in (*server, *client)))


def write_keys(path: str | os.PathLike[str], keys: Keys) -> None:
    """Write the keys to a new file that only its owner may read. Raises UserError if there is a file
    already."""
    path = Path(path)
    content = _File(_VERSION, keys.server_public, keys.server_secret, keys.client_public, keys.client_secret)
    text = msgspec.json.format(msgspec.json.encode(content)) + b"\n"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path}: there is a file already; name another one, or remove it first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot write the keys: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
    except OSError as error:
        path.unlink(missing_ok=True)  # half a key file is none
        raise UserError(f"{path}: cannot write the keys: {error.strerror}") from None


def read_keys(path: str | os.PathLike[str]) -> Keys:
    """Return the keys in a file of `write_keys`. Raises UserError, one line, for any other file."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot read the keys: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UserError(f"{path}: others than its owner may read or write it; run: chmod 600 {path}")
    try:
        content = from_json(text, _File) if len(text) <= _FILE_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        content = None
    if content is None:
        raise UserError(f"{path}: not a key file; make one with: atoll keys FILE")
    if content.atoll_keys != _VERSION:
        raise UserError(f"{path}: a key file of version {content.atoll_keys}; this Atoll reads {_VERSION}")
    keys = Keys(content.server_public, content.server_secret, content.client_public, content.client_secret)
    if not (
        _is_pair(keys.server_public, keys.server_secret) and _is_pair(keys.client_public, keys.client_secret)
    ):
        raise UserError(f"{path}: the key file is damaged; make a new one with: atoll keys FILE")
    return keys


def _is_pair(public: str, secret: str) -> bool:
    try:
        if not len(public) == len(secret) == _KEY_CHARACTERS:
            return False
        z85.decode(public), z85.decode(secret)
        return zmq.curve_public(secret.encode("ascii")).decode("ascii") == public
    except (ValueError, KeyError, UnicodeError, zmq.ZMQError):
        return False
