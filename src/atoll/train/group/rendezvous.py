"""The meeting of a ring at the hub: c10d's Store, kept by the hub, and a worker's place in the ring."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from atoll.core.config import Config
from atoll.core.errors import DeadlineError, PeerLostError, RunError
from atoll.net.endpoint import Client
from atoll.net.hubconnection import LIMIT
from atoll.net.keys import Keys
from atoll.net.requests import ask, wait_for
from atoll.net.route import own_address
from atoll.observe.rundir import DIRECTORY_VARIABLE
from atoll.train.api.place import Place
from atoll.train.group.channel import BrokenRingError
from atoll.train.members.hub_client import HubClient
from atoll.wire.messages import Reformed, StoreAnswer, StoreCall, Welcome

_LOOK_SECONDS = 0.01  # between looks at a new connection
_SLICE_SECONDS = 0.5  # length of a slice of a wait; after each slice a closed store ends it


class HubLostError(RunError, dist.DistNetworkError):
    """The hub is gone, or has given this worker up. To c10d it is a store that cannot be reached."""


class HubStore(Store):
    """The keys of ring `group`, kept by the hub at `address`. `welcome` is the hub's answer when this worker
    joined.

    The store works like torch's TCPStore, without queues and listings of keys, which no process group needs.
    `get` and `wait` wait for keys for `timeout` seconds (`set_timeout` changes it), and then raise
    torch.distributed.DistStoreError. A hub that does not answer may be started again, so calls wait for it as
    long, and at least for the hub's own patience. Then they raise HubLostError.

    c10d calls the store from threads of its own. Each call has a connection to itself, so no call waits for
    another's. Whoever gives the store to a process group must keep this object while the group lives: C++
    holds no reference.
    """

    def __init__(self, address: str, keys: Keys | None, welcome: Welcome, group: int, timeout: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout))
        self._address, self._keys, self._welcome, self._group = address, keys, welcome, group
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._idle: list[Client] = []
        self._closed = False

    # The calls that c10d makes. Its C++ side makes those in camelCase.

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` to `value`."""
        self._call("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Return the value of `key`, once it is set."""
        return self._wait("get", [key], self._seconds()).value

    def add(self, key: str, value: int) -> int:
        """Add `value` to the number at `key`, which begins at 0; return the sum."""
        return self._call("add", [key], amount=value).count

    def check(self, keys: list[str]) -> bool:
        """True if all `keys` are set."""
        return not keys or bool(self._call("check", keys).count)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set `key` if it holds `expected_value` ("": if it is not set); return its value afterwards."""
        values = [_bytes(expected_value), _bytes(desired_value)]
        return self._call("compare_set", [key], values).value

    def delete_key(self, key: str) -> bool:
        """Delete `key`; return True if it was set."""
        return bool(self._call("delete", [key]).count)

    def num_keys(self) -> int:
        """Return the number of the ring's keys."""
        return self._call("num_keys").count

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all `keys` are set."""
        if keys:
            self._wait("wait", keys, self._seconds() if timeout is None else timeout.total_seconds())

    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to the value of `key`."""
        self._call("append", [key], [_bytes(value)])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of `keys`, once they are set."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Set `keys` to `values`, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """True: append, multi_get and multi_set work."""
        return True

    def clone(self) -> HubStore:
        """Return this store: threads can share it."""
        return self

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def close(self) -> None:
        """Close the connections; later calls raise HubLostError. Closing twice does no harm."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    # The calls

    def _seconds(self) -> float:
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout.total_seconds()

    def _wait(self, operation: str, keys: list[str], seconds: float) -> StoreAnswer:
        answer = self._call(operation, keys, seconds=max(0.0, seconds))
        if answer.missing:
            missing = ", ".join(map(repr, answer.missing[:8]))
            more = f" and {len(answer.missing) - 8} more" if len(answer.missing) > 8 else ""
            raise dist.DistStoreError(
                f"timed out: worker {self._welcome.worker} waited {seconds:g} s for {missing}{more} in the "
                f"store of ring {self._group} at the hub at {self._address}"
            )
        return answer

    def _call(
        self,
        operation: str,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        amount: int = 0,
        seconds: float = 0.0,
    ) -> StoreAnswer:
        call = StoreCall(
            run=self._welcome.run,
            incarnation=self._welcome.incarnation,
            group=self._group,
            number=next(self._numbers),
            operation=operation,  # type: ignore[arg-type]
            keys=list(keys),
            values=list(values),
            amount=amount,
            seconds=seconds,
        )
        link = self._take()
        try:
            answer = self._ask(link, call)
        except BaseException:
            link.close()  # nobody takes an answer that still comes
            raise
        self._give_back(link)
        return answer

    def _ask(self, link: Client, call: StoreCall) -> StoreAnswer:
        """Ask until an answer comes, again after a lost connection. Raises HubLostError."""
        began = time.monotonic()
        until = began + self._borne(call)
        what = f"{call.operation} {', '.join(call.keys[:8])}".strip()
        while True:
            self._connect(link, until)
            left = max(0.0, began + call.seconds - time.monotonic())
            try:
                return self._answer(link, msgspec.structs.replace(call, seconds=left), what, until)
            except PeerLostError:
                if time.monotonic() > until:
                    raise self._lost("breaks every connection") from None
            except DeadlineError:
                waited = time.monotonic() - began
                raise self._lost(f"did not answer to {what} within {waited:.1f} s") from None

    def _borne(self, call: StoreCall) -> float:
        """Return the seconds for which to wait for a hub that does not answer: one that is gone may be
        started again."""
        patience = self._welcome.patience
        return max(call.seconds + patience, self._seconds(), patience)

    def _answer(self, link: Client, call: StoreCall, what: str, until: float) -> StoreAnswer:
        """Ask once. Raises DeadlineError after `until`, and PeerLostError if the connection is lost."""
        losses, left = link.losses, until - time.monotonic()
        try:
            return ask(link, call, StoreAnswer, min(left, _SLICE_SECONDS), what, number=call.number)[0]
        except DeadlineError:
            pass
        while True:
            left = until - time.monotonic()
            try:
                self._check_open()
                seconds = max(0.0, min(left, _SLICE_SECONDS))
                return wait_for(link, StoreAnswer, seconds, what, losses, number=call.number)[0]
            except DeadlineError:
                if left <= 0:
                    raise

    def _connect(self, link: Client, until: float) -> None:
        """Return when the connection stands. Raises HubLostError after `until`."""
        began = time.monotonic()
        while not link.connected:
            self._check_open()
            link.check()
            if time.monotonic() > until:
                waited = time.monotonic() - began
                raise self._lost(f"cannot be reached for {waited:.1f} s: {link.trouble}")
            link.receive(_LOOK_SECONDS)

    def _check_open(self) -> None:
        """Raise HubLostError if the store is closed, so that no call waits on for a hub that is away."""
        if self._closed:
            raise self._lost("was left: the session is closed")

    def _lost(self, how: str) -> HubLostError:
        return HubLostError(f"worker {self._welcome.worker}: the hub at {self._address} {how}")

    def _take(self) -> Client:
        with self._lock:
            self._check_open()
            if self._idle:
                return self._idle.pop()
        return Client(self._address, self._keys, limit=LIMIT, name="hub")

    def _give_back(self, link: Client) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        link.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class HubRing:
    """This worker's part in the rings of a run, which meet at a hub: its place, and its signs of life.

    The hub is needed for meeting, not for training: a ring that stands goes on without it. A ring that has
    lost a member forms the next ring through the hub (`train/group/rounds.py`: Ring).

    Attributes:
        hub: the connection to the hub.
        welcome: the hub's answer when this worker joined.
        place: this worker's place in the ring.
        late: True if this worker came when the run was under way.
        finished: True if the session came to its end.
    """

    def __init__(self, hub: HubClient, address: str, keys: Keys | None, timeout: float) -> None:
        """Wait up to `timeout` seconds for all other workers, unless the ring was formed before. `hub` must
        have joined.

        Raises DeadlineError with the missing workers.
        """
        assert hub.welcome is not None
        self.hub, self.welcome, self._address = hub, hub.welcome, address
        self._keys, self._timeout = keys, timeout
        self._group = hub.gather()
        self._store: HubStore | None = self._store_of(self._group)
        self.late = hub.late
        self.finished = False
        own, workers = self.welcome.worker, self.welcome.workers
        if self.late:
            self.place = Place(0, 1, _local_rank(), names=(own,))
        else:
            self.place = self._place(own, tuple(range(workers)))

    def as_joined(self, config: Config) -> Config:
        """Return the configuration of a ring's run, which is `config` unchanged."""
        return config

    def _store_of(self, group: int) -> HubStore:
        return HubStore(self._address, self._keys, self.welcome, group, self._timeout)

    def _place(self, rank: int, names: tuple[int, ...]) -> Place:
        """Return a place in the ring whose store this worker has. `names` are the workers' names, by rank."""
        return Place(
            rank=rank,
            world=len(names),
            local_rank=_local_rank(),
            store=self._store,
            host=own_address(self._address),
            watch=partial(self._watch, self._group),
            names=names,
        )

    def reform(self, round: int, *, holds: bool, admits: bool, fresh: bool) -> Reformed:
        """Form the next ring together with all living members of this one; return it. The present ring is
        over.

        Args:
            round: the number of the round that this worker makes now, or next.
            holds: True if this worker holds all of that round's result.
            admits: True to let newcomers in.
            fresh: True if this worker has no state of training yet.
        """
        if self._store is not None:
            self._store.close()
        rank = self.place.rank
        return self.hub.reform(self._group, rank, round, holds=holds, admits=admits, fresh=fresh)

    def enter(self) -> Reformed:
        """Wait until the members of the ring under way let newcomers in; return the ring."""
        return self.hub.enter()

    def place_in(self, ring: Reformed) -> Place:
        """Take this worker's place in a ring that the hub has formed, and return it."""
        if self._store is not None:
            self._store.close()
        self._group = ring.group
        self._store = self._store_of(ring.group)
        self.place = self._place(ring.workers.index(self.welcome.worker), tuple(ring.workers))
        return self.place

    def is_awaited(self) -> bool:
        """True if newcomers wait to enter, by the hub's latest news."""
        news = self.hub.news
        return news is not None and news.group == self._group and news.waiting > 0

    def _watch(self, group: int) -> None:
        """Raise BrokenRingError if the hub has reported that this ring has lost a member."""
        self.hub.check()
        news = self.hub.news
        if news is not None and news.group == group and news.broken:
            raise BrokenRingError(f"worker {self.welcome.worker}: ring {group} lost a member, says the hub")

    def describe(self) -> str:
        """Return, in a few words, why the hub gives the place."""
        # Started by torchrun, and not by `atoll run`:
        torchrun = "WORLD_SIZE" in os.environ and DIRECTORY_VARIABLE not in os.environ
        before = "; torchrun's RANK and WORLD_SIZE do not count" if torchrun else ""
        return f"ATOLL_HUB is {self._address}{before}"

    def prepared(self, _nbytes: int) -> None:
        """Do nothing: the hub of a ring does not ask for the size of models."""

    def stepped(self, iteration: int, _samples: float, _pace: object) -> None:
        """Note the iteration that this worker has reached, for its signs of life to the hub."""
        self.hub.iteration = iteration

    def finish(self, _iteration: int) -> None:
        """Note that the session came to its end."""
        self.finished = True

    def close(self) -> None:
        """Leave the run in good order."""
        if self._store is not None:
            self._store.close()
        self.hub.goodbye(self.finished)
        self.hub.close()


class GroupRing(HubRing):
    """This worker's part in the rings of groups: alone at first, then in the rings that the hub forms.

    Groups change by the hub's grouping (`train/members/regrouping.py`), so no worker enters a ring that is
    under way. The caller owns the connection to the hub.
    """

    def __init__(self, hub: HubClient, address: str, keys: Keys | None, timeout: float) -> None:
        assert hub.welcome is not None
        self.hub, self.welcome, self._address = hub, hub.welcome, address
        self._keys, self._timeout = keys, timeout
        self._group, self.late, self.finished = 0, False, False
        self._store: HubStore | None = None
        self.place = Place(0, 1, _local_rank(), names=(self.welcome.worker,))

    def is_awaited(self) -> bool:
        return False

    def check(self) -> None:
        """Raise BrokenRingError if the hub has reported that the ring has lost a member."""
        if self.place.watch is not None:
            self.place.watch()

    def _place(self, rank: int, names: tuple[int, ...]) -> Place:
        """Return a place as `HubRing` does; a worker that is alone needs no store and no watch."""
        if len(names) == 1:
            return Place(0, 1, _local_rank(), names=names)
        return super()._place(rank, names)

    def close(self) -> None:
        """Close the store. The worker says goodbye to the hub elsewhere."""
        if self._store is not None:
            self._store.close()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
