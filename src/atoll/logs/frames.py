"""Frames: the on-disk format of journal records; pure.

A frame is a header (a record, as MessagePack) and an optional payload (a chunk). On disk, little-endian:

    4 bytes   kind of journal and version of this format
    4 bytes   length of the header, in bytes
    8 bytes   length of the payload, in bytes; all ones: no payload
    8 bytes   sum of the payload's 64-bit words and of its remaining bytes; all ones: no sum
    8 bytes   the file's stamp
    4 bytes   CRC-32 of the 32 bytes above and the header
    the header, the payload
    8 bytes   the stamp again: everything before it was written

All frames of a file have one stamp, which no earlier file had. So a file can be overwritten in place:
leftovers of an earlier use, behind the last frame or inside an incomplete one, have another stamp. Writes go
from front to back, so after a kill of the process all frames but the last are whole. The sum detects a crash
of the machine, which may lose pages in between; a CRC of the payload would take five times as long.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy

Buffer: TypeAlias = Any  # any object with the buffer protocol

_PREFIX = struct.Struct("<4sIQQQ")
_CHECK = struct.Struct("<I")
_SEAL = struct.Struct("<Q")
_NONE = 2**64 - 1  # in place of a payload's length or sum
PREFIX_BYTES = _PREFIX.size + _CHECK.size
FRAME_BYTES = PREFIX_BYTES + _SEAL.size  # of a frame, without its header and payload


class Frame(NamedTuple):
    """A whole frame, in place. `end` is the offset behind it; `summed` is True if it has a sum, which a crash
    of the machine cannot fake."""

    header: memoryview
    payload: memoryview | None
    stamp: int
    end: int
    summed: bool


class Kind(NamedTuple):
    """A kind of journal: the first four bytes of its frames, the largest header in bytes, and the name of its
    files for people."""

    magic: bytes
    most: int
    name: str


def encode_frame(
    kind: Kind, stamp: int, header: bytes, payload: Buffer | None = None, summed: bool = True
) -> list[Buffer]:
    """Encode a frame in pieces, without copying the payload. With `summed` the frame has the payload's
    sum."""
    if payload is None:
        return [_front(kind, stamp, header, _NONE, 0 if summed else _NONE) + _SEAL.pack(stamp)]
    view = memoryview(payload)
    body = view.cast("B") if view.nbytes else memoryview(b"")
    total = _sum(body) if summed else _NONE
    return [_front(kind, stamp, header, body.nbytes, total), body, _SEAL.pack(stamp)]


def _front(kind: Kind, stamp: int, header: bytes, size: int, total: int) -> bytes:
    prefix = _PREFIX.pack(kind.magic, len(header), size, total, stamp)
    return prefix + _CHECK.pack(zlib.crc32(header, zlib.crc32(prefix))) + header


def frames(raw: memoryview, kind: Kind) -> Iterator[Frame]:
    """Yield each whole frame of a file, up to the first that is incomplete, damaged or of another stamp.
    Allocates nothing by stored lengths."""
    frame = _read(raw, 0, kind)
    stamp = frame.stamp if frame is not None else 0
    while frame is not None and frame.stamp == stamp:
        yield frame
        frame = _read(raw, frame.end, kind)


def is_other_kind(raw: memoryview, kind: Kind) -> bool:
    """True if a file does not begin like one of this kind. An incomplete beginning is accepted."""
    begin = bytes(raw[: len(kind.magic)])
    return begin != kind.magic[: len(begin)] and any(begin)


def is_damaged(raw: memoryview, end: int, kind: Kind, own: Callable[[int], bool] | None = None) -> bool:
    """True if frames of this file follow `end`, where `frames` stopped. A crash of the process cannot cause
    that, since it writes from front to back. If `frames` found none, `own` decides which stamps belong to the
    file.

    A crash of the machine may leave holes, so frames with sums prove nothing here.
    """
    first = next(frames(raw, kind), None) if end else None
    for found in re.finditer(re.escape(kind.magic), raw[end:]):
        frame = _read(raw, end + found.start(), kind)
        if frame is None or frame.summed:
            continue
        if frame.stamp == first.stamp if first is not None else own is None or own(frame.stamp):
            return True
    return False


def _read(raw: memoryview, offset: int, kind: Kind) -> Frame | None:
    start = offset + PREFIX_BYTES
    if start > raw.nbytes:
        return None
    magic, length, size, total, stamp = _PREFIX.unpack_from(raw, offset)
    (check,) = _CHECK.unpack_from(raw, offset + _PREFIX.size)
    stop = start + length + (0 if size == _NONE else size)
    if magic != kind.magic or length > kind.most or stop + _SEAL.size > raw.nbytes:
        return None
    header = raw[start : start + length]
    if zlib.crc32(header, zlib.crc32(raw[offset : offset + _PREFIX.size])) != check:
        return None
    if _SEAL.unpack_from(raw, stop) != (stamp,):
        return None
    payload = None if size == _NONE else raw[start + length : stop]
    if payload is not None and total not in (_NONE, _sum(payload)):
        return None
    return Frame(header, payload, stamp, stop + _SEAL.size, total != _NONE)


def _sum(payload: memoryview) -> int:
    whole = payload.nbytes // 8 * 8
    words = numpy.frombuffer(payload[:whole], "<u8") if whole else numpy.zeros(0, "<u8")
    rest = int.from_bytes(payload[whole:], "little")
    return (int(numpy.add.reduce(words, dtype=numpy.uint64)) + rest) % _NONE
