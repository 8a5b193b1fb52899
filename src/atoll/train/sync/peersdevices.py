"""The devices of a node: the workers of one launch, which reduce their gradients on a ring of their own.

The first device leads: it alone is connected to the node's CPU side. The leader passes the CPU side's
messages on to the other devices, at the same lines of their scripts. So all devices of a node decide alike,
and make equal calls. A launch is one failure domain: if a device is lost, so is the node. Source:
docs/peers.md, "Several devices a node".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
from torch.distributed.distributed_c10d import PrefixStore

from atoll.axes.choices import Choices
from atoll.axes.needs import check, check_nodes
from atoll.core.config import HUB_VARIABLE, Config
from atoll.core.decoding import from_msgpack
from atoll.core.errors import (
    AtollError,
    DeadlineError,
    GivenUpError,
    UserError,
    error_named,
)
from atoll.core.stands import USE
from atoll.train.api.place import Place
from atoll.train.group.ringbytes import broadcast_bytes, gather_bytes
from atoll.train.group.rounds import Ring

# Added to sync.timeout for a wait for the leader: the leader's own wait ends first, with an error that says
# what it waited for.
LEADER_SECONDS = 10.0
_LONG = 2**16  # the most bytes of each device in a gathering


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """A device's part in a call that all devices of its node make.

    Attributes:
        call: the call, in words.
        payload: the device's bytes; of the leader, its answer to all and its own bytes.
        failed: the class and the line of the leader's error; None if it has none.
        more: True if the leader's answer is long, and follows in a broadcast.
    """

    call: str
    payload: bytes = b""
    failed: tuple[str, str] | None = None
    more: bool = False


@contextlib.contextmanager
def one_node_in_trouble() -> Iterator[None]:
    """Return a context for waits of a node's devices for one another.

    It turns DeadlineError into GivenUpError: a missing device is the trouble of this node alone, which may be
    started again, and does not end the run.
    """
    try:
        yield
    except DeadlineError as error:
        raise GivenUpError(str(error)) from error


class Devices:
    """The node's devices, of which this worker is number `rank` of `count`.

    Attributes:
        ring: the devices' ring; None if there is one device.
        rank: this worker's number among the devices.
        count: the number of devices.
        said: the devices' bytes in the latest `led`, in order.
    """

    def __init__(self, ring: Ring | None = None) -> None:
        self.ring = ring
        self.rank = 0 if ring is None else ring.rank
        self.count = 1 if ring is None else ring.world
        self.said: list[bytes] = [b""]

    @property
    def seconds_waited(self) -> float:
        """The seconds that this device has waited for the others so far."""
        return 0.0 if self.ring is None else self.ring.seconds_waited

    def gather(self, payload: bytes, call: str) -> list[bytes]:
        """Return each device's bytes, in order. Raises UserError if the devices are in different calls."""
        return [word.payload for word in self._meet(_Word(call, payload))]

    def led(self, act: Callable[[], bytes], call: str, said: bytes = b"") -> bytes:
        """Return, on all devices, the result of `act` on the leader. An AtollError of `act` is raised on all
        devices.

        All devices have come once the leader has the bytes that each has `said`.
        """
        if self.ring is None:
            self.said = [said]
            return act()
        word, failure, told = _Word(call, said), None, b""
        if self.rank == 0:
            try:
                told = act()
                more = len(told) > _LONG
                word = _Word(call, msgspec.msgpack.encode((b"" if more else told, said)), more=more)
            except AtollError as error:
                word, failure = _Word(call, failed=(type(error).__name__, str(error))), error
        words = self._meet(word)
        if failure is not None:
            raise failure
        if words[0].failed is not None:
            raise error_named(*words[0].failed)
        short, first = from_msgpack(words[0].payload, tuple[bytes, bytes])
        self.said = [first, *(each.payload for each in words[1:])]
        if words[0].more:
            assert self.ring.session is not None
            with one_node_in_trouble():
                return broadcast_bytes(self.ring.session, told if self.rank == 0 else None, call)
        return short

    def _meet(self, word: _Word) -> list[_Word]:
        if self.ring is None:
            return [word]
        channel = self.ring.session
        assert channel is not None
        with one_node_in_trouble():
            parts = gather_bytes(channel, msgspec.msgpack.encode(word), word.call)
        words = [from_msgpack(part, _Word) for part in parts]
        for rank, other in enumerate(words):
            if other.call != word.call:
                name = self.ring.place.name_of
                use = any(each.call.startswith(USE) for each in (word, other))
                way = (
                    "; use p.grad on all of a node's workers, or on none; a worker without a batch has no "
                    "p.grad to use: give it one, or clip by session.clip_grad_norm_"
                )
                way = way if use else ""
                raise UserError(
                    f"worker {name(self.rank)} is in {word.call}, and worker {name(rank)}, of its node, in "
                    f"{other.call}: all of a node's devices make the same calls in the same order{way}"
                )
        return words

    def close(self) -> None:
        """End the ring."""
        if self.ring is not None:
            self.ring.close()


def by_torchrun() -> bool:
    """True if torchrun's agent started this worker."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def places_of(config: Config, place: Place | None) -> tuple[Place, Place | None]:
    """Return this worker's place among its node's devices, and the node's place among the nodes.

    The first is a place alone if the node has one device. The second is None if the hub, or the environment,
    gives it later. With a hub, each launch of torchrun is a node. In a launch without a hub the workers are
    `groups.count` nodes, in the order of ranks; without that setting each worker is a node. Raises
    ConfigError.
    """
    if place is None and os.environ.get(HUB_VARIABLE):
        launch = Place.from_environment(config.timeout_seconds) if by_torchrun() else Place()
        if launch.world > 1:
            _check_on_one_machine(launch.world, "launch", launch.world)
        return launch, None
    count = config.groups.count
    if not count:
        return Place(), place
    whole = Place.from_environment(config.timeout_seconds) if place is None else place
    if whole.store is None:
        return Place(), whole
    check_nodes(count, whole.world)
    each = whole.world // count
    node, device = divmod(whole.rank, each)
    of_nodes = replace(whole, rank=node, world=count)
    if each == 1:
        return Place(), of_nodes
    if place is None:
        _check_on_one_machine(each, "node", whole.world)
    return replace(whole, rank=device, world=each, store=PrefixStore(f"node/{node}", whole.store)), of_nodes


def _check_on_one_machine(each: int, what: str, world: int) -> None:
    """Raise ConfigError unless the devices of each node, `each` of them, are on one machine, by torchrun's
    variables."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdecimal() or int(local) % each == 0:
        return
    way = (
        "start torchrun with --nnodes 1 on each machine, and ATOLL_HUB"
        if what == "launch"
        else "give a groups.count that divides each machine's workers, or leave it out"
    )
    facts = {"what": what, "devices": each, "world": world, "local": local, "way out": way}
    check("join", Choices({**facts, "run.strategy": "peers", "several machines": True}))
