"""A worker's place: its rank, the number of workers, and the store in which they first meet."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from atoll.core.errors import ConfigError, DeadlineError
from atoll.tensors.torch_compat import default_store
from atoll.train.group.standing import Standing
from atoll.train.members.reach import hidden_address, host_among, whereabouts

_joins = itertools.count()
# The number of this process's sessions in each store, by rank: tests have several ranks in a process.
_sessions: WeakKeyDictionary[Store, dict[int, int]] = WeakKeyDictionary()
_sessions_lock = threading.Lock()


@dataclass(frozen=True)
class Group:
    """The group to which a worker belongs.

    Attributes:
        index: the group's index.
        count: the number of groups.
        rank: the worker's rank in the group.
        size: the number of workers in the group.
    """

    index: int
    count: int
    rank: int
    size: int


@dataclass(frozen=True)
class Place:
    """A worker's place in its group.

    Attributes:
        rank: the worker's rank in the group.
        world: the number of workers in the group.
        local_rank: the worker's number on its machine, which selects the device.
        store: the store in which the group meets; None for a worker that is alone, without a group.
        host: the IP address by which the others reach this worker; empty: c10d finds one.
        watch: raises an error if this group is known to be broken; None: the group ends with its first loss.
        names: the numbers that messages give the members, by rank, if groups survive losses; these are the
            members' first ranks.
        standing: compares the members' places in their scripts, in a group with a Ring.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    store: Store | None = None
    host: str = ""
    watch: Callable[[], None] | None = None
    names: tuple[int, ...] = ()
    standing: Standing | None = None

    def name_of(self, rank: int) -> int:
        """Return the number that messages give the member of this rank."""
        return self.names[rank] if self.names else rank

    @property
    def name(self) -> int:
        """The number of this worker in messages. Unlike the rank, it never changes."""
        return self.name_of(self.rank)

    def for_session(self) -> Place:
        """Return this place for one more session of this process. The second session in a store, and each
        later one, has keys of its own there.

        Each worker makes equally many sessions in a store, so all find the same keys.
        """
        if self.store is None:
            return self
        with _sessions_lock:
            of_ranks = _sessions.setdefault(self.store, {})
            earlier = of_ranks.get(self.rank, 0)
            of_ranks[self.rank] = earlier + 1
        if not earlier:
            return self
        return replace(self, store=PrefixStore(f"atoll/session/{earlier}", self.store))

    @staticmethod
    def from_environment(timeout: float, environment: Mapping[str, str] | None = None) -> Place:
        """Return the place that torchrun's variables describe; a place alone without such variables.

        `timeout` is in seconds. Raises ConfigError for incomplete or contradictory variables, DeadlineError
        if the other workers do not come, and UserError if they could not reach each other.
        """
        environment = os.environ if environment is None else environment
        if "WORLD_SIZE" not in environment and "RANK" not in environment:
            return Place()
        world, rank = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
        if not 0 <= rank < world:
            raise ConfigError(
                f"RANK={rank} must be at least 0 and below WORLD_SIZE={world}; start workers with torchrun"
            )
        if world == 1:
            return Place()
        local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
        store = _meet(environment, timeout)
        host = host_among(store, rank, world, whereabouts(), timeout)
        return Place(rank, world, local_rank, store, host)


class WorkerRoster(Protocol):
    """The participants in the calls of all workers, as one worker knows them."""

    @property
    def place(self) -> Place:
        """Current place of this worker."""

    @property
    def late(self) -> bool:
        """True for a worker that came while the run was under way and has yet to enter."""

    @property
    def ranks(self) -> list[int]:
        """Ranks of the participants in the latest call, in order."""


class Seat:
    """Current place of a worker among the members of its group (a WorkerRoster)."""

    def __init__(self, place: Place, *, late: bool = False) -> None:
        self.place, self.late = place, late

    @property
    def ranks(self) -> list[int]:
        return list(range(self.place.world))


def is_first(roster: WorkerRoster) -> bool:
    """True if this worker writes, and describes, for all workers."""
    return roster.place.rank == roster.ranks[0] and not roster.late


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        given = environment.get(name)
        said = "is not set" if given is None else f"is {given!r}"
        raise ConfigError(f"{name} {said}; it must be a whole number: start workers with torchrun") from None


def _meet(environment: Mapping[str, str], timeout: float) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, or that of a default group which the script has made.

    Raises DeadlineError if no store answers within `timeout` seconds.
    """
    if dist.is_initialized():
        found = default_store()
    else:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environment:
                raise ConfigError(f"{name} is not set, though WORLD_SIZE is; start workers with torchrun")
        address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        try:
            found, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        except (RuntimeError, ValueError, OSError) as error:
            raise DeadlineError(
                f"no store answered at MASTER_ADDR:MASTER_PORT {address} within {timeout:g} s"
                f"{hidden_address(environment['MASTER_ADDR'])}: {str(error).splitlines()[0]}"
            ) from error
    # A restarted launch meets in the store of the launch before, and a second session of this process in the
    # store of the first. Neither may find the other's keys.
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"atoll/{restart}/{next(_joins)}", found)
