"""Programs that the kernel runs on each packet of a socket, before the process is woken.

What a program refuses costs the process nothing. The programs are classic BPF (linux/filter.h), which needs
no privilege. They see a packet from its TCP or UDP header on.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Collection, Sequence
from typing import TypeAlias

Instruction: TypeAlias = tuple[int, int, int, int]  # operation, steps to skip if true, if false, operand

MOST_STEPS = 4096  # of a program: the kernel's bound
SAMPLE = 64  # of a known session's datagrams from an unknown address, one in so many is let through

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_PROGRAM, _STEP = struct.Struct("@HP"), struct.Struct("@HBBI")
_LOAD_LENGTH, _LOAD_BYTE, _LOAD_SHORT, _LOAD_WORD, _LOAD_WORD_FROM_INDEX = 0x80, 0x30, 0x28, 0x20, 0x40
_AT_LEAST, _EQUALS, _ANY_BIT, _JUMP, _RETURN = 0x35, 0x15, 0x45, 0x05, 0x06
_SHIFT_RIGHT, _SHIFT_LEFT, _AND, _MINUS_INDEX, _TO_INDEX = 0x74, 0x64, 0x54, 0x1C, 0x07
_TAKE, _DROP = (_RETURN, 0, 0, 2**32 - 1), (_RETURN, 0, 0, 0)
_IP_HEADER, _RANDOM = 2**32 - 0x100000, 2**32 - 0x1000 + 56  # places that the kernel gives a meaning
_IPV4_SOURCE, _IPV6_SOURCE_END = _IP_HEADER + 12, _IP_HEADER + 20
_UDP_SOURCE_PORT, _UDP_BYTES = 0, 8
_TCP_LENGTH, _TCP_FLAGS, _SYN_OR_RST = 12, 13, 0x06
_SIGNATURE_BYTES, _SIGNATURE_BEGIN = 10, 0xFF000000


def attach(link: socket.socket, steps: Sequence[Instruction]) -> bool:
    """Have the kernel run a program in place of the one before; return False if it cannot."""
    if sys.platform != "linux" or len(steps) > MOST_STEPS:
        return False
    code = ctypes.create_string_buffer(b"".join(_STEP.pack(*step) for step in steps))
    try:
        link.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM.pack(len(steps), ctypes.addressof(code))
        )
    except OSError:  # a sandbox without filters
        return False
    return True


def detach(link: socket.socket) -> None:
    """Let everything through again. A socket without a program is unchanged."""
    try:
        link.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    except OSError:
        return


def only_greetings() -> list[Instruction]:
    """Return a program for a listening socket, with TCP_DEFER_ACCEPT: only clients that begin like libzmq are
    accepted.

    A client of libzmq sends the signature of a ZeroMQ (RFC 23: ten bytes), and nothing else until the server
    has answered. Everything but a SYN, an RST and such a signature is dropped. An acknowledgement without
    data is dropped too: if the kernel's table of half-open connections is full, it would be accepted.

    An accepted connection inherits the program. `detach` it there: the peer sends the dropped data again.
    """
    return [
        (_LOAD_BYTE, 0, 0, _TCP_FLAGS),
        (_ANY_BIT, 9, 0, _SYN_OR_RST),
        (_LOAD_BYTE, 0, 0, _TCP_LENGTH),  # in words, in the upper half
        (_SHIFT_RIGHT, 0, 0, 4),
        (_SHIFT_LEFT, 0, 0, 2),
        (_TO_INDEX, 0, 0, 0),
        (_LOAD_LENGTH, 0, 0, 0),
        (_MINUS_INDEX, 0, 0, 0),
        (_EQUALS, 0, 3, _SIGNATURE_BYTES),
        (_LOAD_WORD_FROM_INDEX, 0, 0, 0),
        (_EQUALS, 0, 1, _SIGNATURE_BEGIN),
        _TAKE,
        _DROP,
    ]


def only_sessions(
    first: int,
    least: int,
    at: int,
    new: Collection[bytes],
    known: Collection[bytes] = (),
    sources: Collection[tuple[str, int]] = (),
) -> list[Instruction]:
    """For a UDP socket: only datagrams of these sessions are taken.

    Args:
        first: the first byte of a datagram.
        least: bytes that a datagram has at least.
        at: where its session stands, 4 bytes.
        new: sessions that anybody may speak for.
        known: sessions that `sources` speak for (host and port). One in SAMPLE datagrams from elsewhere is
            taken: the other end may have moved.
    """
    checks = [step for source in sources for step in _from(*source)]
    steps = [
        (_LOAD_LENGTH, 0, 0, 0),
        (_AT_LEAST, 1, 0, _UDP_BYTES + least),
        _DROP,
        (_LOAD_BYTE, 0, 0, _UDP_BYTES),
        (_EQUALS, 1, 0, first),
        _DROP,
        (_LOAD_WORD, 0, 0, _UDP_BYTES + at),
    ]
    for word in new:
        steps += [(_EQUALS, 0, 1, int.from_bytes(word, "big")), _TAKE]
    for index, word in enumerate(known):
        rest = 2 * (len(known) - index - 1) + 1
        steps += [(_EQUALS, 0, 1, int.from_bytes(word, "big")), (_JUMP, 0, 0, rest)]
    steps += [_DROP, *checks]
    return [*steps, (_LOAD_WORD, 0, 0, _RANDOM), (_AND, 0, 0, SAMPLE - 1), (_EQUALS, 0, 1, 0), _TAKE, _DROP]


def _from(host: str, port: int) -> list[Instruction]:
    """Return steps that take packets from this host and port. For an IPv6 address only the last 4 bytes
    are checked."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    place = _IPV4_SOURCE if address.version == 4 else _IPV6_SOURCE_END
    return [
        (_LOAD_WORD, 0, 0, place),
        (_EQUALS, 0, 3, int.from_bytes(address.packed[-4:], "big")),
        (_LOAD_SHORT, 0, 0, _UDP_SOURCE_PORT),
        (_EQUALS, 0, 1, port),
        _TAKE,
    ]
