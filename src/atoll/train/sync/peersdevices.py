"""The devices of a node: the workers of one launch, which reduce their gradients on a ring of their own.

The first one leads: it alone has the node's CPU side. What that says the leader tells the others at the same
lines of their scripts, so that all devices of a node know the same wherever they decide anything, and make
the same calls. A launch is one failure domain: where a device is lost, so is the node. Source:
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
from atoll.train.api.place import Place
from atoll.train.group.ringbytes import broadcast_bytes, gather_bytes
from atoll.train.group.rounds import Ring

# Beyond sync.timeout: devices wait for their leader, whose own wait has that deadline, and whose error says
# what it waited for.
LEADER_SECONDS = 10.0
_LONG = 2**16  # bytes: a gathering has room for as many of each device


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What a device brings to a call that all of its node make: what it has said. The leader's is that and
    what it tells, or `failed`: its error's class and line."""

    call: str
    payload: bytes = b""
    failed: tuple[str, str] | None = None
    more: bool = False  # what the leader tells is long, and follows


@contextlib.contextmanager
def one_node_in_trouble() -> Iterator[None]:
    """Within it a node's devices wait for one another: one that does not come is the trouble of this node
    alone, which may be started again, and no end of the run."""
    try:
        yield
    except DeadlineError as error:
        raise GivenUpError(str(error)) from error


class Devices:
    """The node's devices, of which this worker is number `rank` of `count`. `ring` is theirs; None: there is
    one."""

    def __init__(self, ring: Ring | None = None) -> None:
        self.ring = ring
        self.rank = 0 if ring is None else ring.rank
        self.count = 1 if ring is None else ring.world
        self.said: list[bytes] = [b""]  # by the devices, in order, in the latest `led`

    @property
    def seconds_waited(self) -> float:
        """For one another, in all."""
        return 0.0 if self.ring is None else self.ring.seconds_waited

    def gather(self, payload: bytes, call: str) -> list[bytes]:
        """What each device brings, in order. All make the same calls: raises UserError where they do not."""
        return [word.payload for word in self._meet(_Word(call, payload))]

    def led(self, act: Callable[[], bytes], call: str, said: bytes = b"") -> bytes:
        """What `act` gives at the leader, at all devices; where it raises an error of ours, all raise that.
        All are here when the leader hears what they have `said`."""
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
                raise UserError(
                    f"worker {name(self.rank)} is in {word.call}, and worker {name(rank)}, of its node, in "
                    f"{other.call}: all of a node's devices make the same calls in the same order"
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
    """This worker's place among the devices of its node (of a world of 1: it is the only one), and the node's
    among the nodes, as far as it is known by now: None where it is the hub's to say, or the environment's.

    By a hub, each launch of torchrun's is a node. In a launch without one the workers are `groups.count`
    nodes, in order of rank; each is a node of its own where that is not given. Raises ConfigError.
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
    """Raise ConfigError unless `each` devices of a node are on one machine, as torchrun's variables say."""
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
