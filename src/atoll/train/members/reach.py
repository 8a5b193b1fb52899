"""The address at which workers on other machines reach a worker that torchrun started.

Gloo listens at the address of the machine's own name. On many systems that address is 127.0.1.1, which only
this machine can reach. Workers on other machines would try it until the deadline.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from torch.distributed.distributed_c10d import PrefixStore, Store

from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.net.route import own_address

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # with which a user chooses the interface
_Short = Annotated[str, Meta(max_length=256)]


class Whereabouts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A worker's machine, by id and by name, and the address at which the worker would listen."""

    machine: _Short
    name: _Short
    address: _Short

    @property
    def is_hidden(self) -> bool:
        """True if no other machine can reach the address."""
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:  # no address is known, or an interface was chosen
            return False


def whereabouts() -> Whereabouts:
    """Return this process's machine, and the address that c10d would choose."""
    name = socket.gethostname()
    return Whereabouts(machine(), name, "" if os.environ.get(INTERFACE_VARIABLE) else _default(name))


def host_among(
    store: Store,
    rank: int,
    world: int,
    own: Whereabouts,
    timeout: float,
    route: Callable[[str], str] = lambda address: own_address(f"tcp://{address}:1"),
) -> str:
    """Return the address at which this worker must listen; empty if c10d's own choice will do. A collective
    of all workers.

    Raises DeadlineError if a worker does not come within `timeout` seconds, and UserError if workers on
    another machine cannot reach a worker.

    Args:
        store: the store in which the workers meet.
        rank: this worker's rank.
        world: the number of workers.
        own: this worker's machine and address.
        timeout: seconds to wait for the others.
        route: returns this machine's own address on the way to another address.
    """
    store = PrefixStore("reach", store)
    seen = _exchange(store, "first", rank, world, own, timeout)
    if len({each.machine for each in seen}) == 1 or not any(each.is_hidden for each in seen):
        return ""
    if own.is_hidden:
        others = [each for each in seen if each.machine != own.machine and not each.is_hidden]
        found = next(filter(None, (route(each.address) for each in others if each.address)), "")
        own = msgspec.structs.replace(own, address=found or own.address)
    final = _exchange(store, "final", rank, world, own, timeout)
    for other, each in enumerate(final):
        if each.is_hidden:
            raise UserError(
                f"worker {other} would listen at {each.address}, to which the name of its machine "
                f"({each.name}) leads, and workers on other machines cannot reach it there; set "
                f"{INTERFACE_VARIABLE} on that machine to the interface that leads to the others (`ip addr` "
                "lists them)"
            )
    return own.address if own != seen[rank] else ""


_decoder = msgspec.msgpack.Decoder(Whereabouts)


def _exchange(
    store: Store, what: str, rank: int, world: int, own: Whereabouts, timeout: float
) -> list[Whereabouts]:
    """Exchange `own` with all workers; return every worker's entry, by rank."""
    keys = [f"{what}/{each}" for each in range(world)]
    store.set(keys[rank], msgspec.msgpack.encode(own))  # type: ignore[arg-type]
    try:
        store.wait(keys, timedelta(seconds=timeout))
        return [_decoder.decode(store.get(key)) for key in keys]
    except msgspec.DecodeError as error:
        raise RunError(f"worker {rank} cannot read where another worker is: {error}") from None
    except RuntimeError as error:
        raise DeadlineError(
            f"worker {rank} waited {timeout:g} s for {_missing(store, keys)} to come (deadline sync.timeout)"
        ) from error


def _missing(store: Store, keys: Sequence[str]) -> str:
    try:
        late = [f"worker {rank}" for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:  # the store is gone, too
        late = []
    return " and ".join(late) or "the other workers"


def machine() -> str:
    """Return an id of the network namespace in which processes share a loopback interface.

    It is the machine's name if the system does not give the namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _default(name: str) -> str:
    """Return the first address of this name at which this machine can listen, which is c10d's choice too."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"  # c10d's choice for an unknown name
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0]).partition("%")[0]
        except OSError:
            continue
    return "127.0.0.1"


def hidden_address(name: str) -> str:
    """Return, in words, the address of a host `name` that only this machine reaches; "" for another host."""
    try:
        addresses = [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return ""
    if name in addresses or not all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses):
        return ""
    return (
        f" ({name} is {addresses[0]} on this machine, which no other machine reaches; give MASTER_ADDR an "
        "address of worker 0's machine)"
    )
