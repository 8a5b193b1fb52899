"""The introduction of the nodes of a run without a server to one another.

It happens once, through the hub's store or the store in which torchrun's workers meet. The leader of a node's
devices is introduced, and notifies the others. Afterwards neither store is needed: each node keeps its
knowledge in the run's directory, so that a restarted node finds the others even if the hub is dead. Source:
docs/peers.md, "When an iteration may be applied".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Protocol

import msgspec
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from atoll.axes.choices import choices_of
from atoll.axes.needs import check
from atoll.core.config import (
    FIRST_VARIABLE,
    HUB_VARIABLE,
    KEYS_VARIABLE,
    RANK_VARIABLE,
    RUN_VARIABLE,
    SOCKETS_VARIABLE,
    Config,
)
from atoll.core.decoding import from_json
from atoll.core.errors import AtollError, ConfigError, DeadlineError, RunError, UserError, error_named
from atoll.core.sharing import make_folder_like_parent, open_like_folder
from atoll.net.endpoint import host_and_port
from atoll.net.heartbeats import launcher_from_environment
from atoll.net.keys import Keys, read_keys
from atoll.net.route import own_address
from atoll.net.socketfolder import (
    check_socket_folder,
    hold_folder,
    make_socket_folder,
    remove_left_folders,
)
from atoll.observe.rundir import DIRECTORY_VARIABLE
from atoll.train.api.device import device_of
from atoll.train.api.place import Place, Seat
from atoll.train.group.rendezvous import HubStore
from atoll.train.group.rounds import Ring
from atoll.train.members.hub_client import HubClient
from atoll.train.sync.peersdevices import LEADER_SECONDS, Devices, by_torchrun, places_of
from atoll.train.sync.peersstart import CpuSide
from atoll.wire.device import Begin, Introduce, Listening, NodeAt

FOLDER = "nodes"  # in the run's directory: each node's knowledge of the others
_LOOPBACK = "127.0.0.1"
_SOCKETS = "peers/sockets"  # the key of the nodes' folder of sockets, in a launch's store
_START_SECONDS = 120.0  # for the CPU side to import torch and listen, on a busy machine
_INTRODUCED = "introduced"  # the key of a leader's word, in the store of its node's devices
_WITHOUT_HUB = "the nodes go on without it"


class NodeFile(msgspec.Struct, forbid_unknown_fields=True):
    """A node's file in the run's directory.

    Attributes:
        run: the run's name.
        node: the node's number.
        incarnation: the number of this node's starts.
        nodes: the nodes' addresses.
        hub: the hub's address; empty without a hub.
        founding: the number of this beginning of the run under one hub.
        devices: the number of devices of each node, in order.
    """

    run: str
    node: int
    incarnation: int
    nodes: list[NodeAt]
    hub: str = ""
    founding: int = 0
    devices: list[int] = []


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """A node's record in the store. `token` is a random name that its process has made up for itself."""

    incarnation: int
    address: str
    token: str
    devices: int = 1


class _Word(msgspec.Struct, forbid_unknown_fields=True):
    """A leader's word to its node's other devices.

    Attributes:
        known: the leader's introduction; None if it failed, or if the node has no others to meet.
        late: True if the other nodes had begun without this one.
        failed: the class and the line of the leader's error.
    """

    known: NodeFile | None = None
    late: bool = False
    failed: tuple[str, str] = ("", "")


class Met(Protocol):
    """A node's first meeting with the others.

    Attributes:
        run: the run's name.
        node: this node's number.
        incarnation: the number of this node's starts.
        late: True if the other nodes had begun without this one.
        hub: the hub's address; empty without a hub.
        founding: the number of this beginning of the run under one hub.
        devices: the number of devices of each node, in order, once all have met.
    """

    run: str
    node: int
    incarnation: int
    late: bool
    hub: str
    founding: int
    devices: list[int]

    def close(self) -> None:
        """Leave the meeting."""


class AddressMeeting(Met, Protocol):
    """A meeting at which nodes exchange their addresses."""

    world: int
    host: str

    def socket_folder(self) -> str:
        """Return a folder for sockets that all nodes share and only this user can reach; empty if there is
        none."""

    def exchange(self, address: str) -> list[NodeAt]:
        """Announce this node's address; return those of all nodes, in order.

        Raises DeadlineError, naming a node that did not come, or RunError if a node cannot come any more.
        """


class Introduction:
    """This node's knowledge of the others, and the file that keeps it.

    Attributes:
        run: the run's name.
        node: this node's number.
        late: True if the other nodes had begun without this one.
        incarnation: the number of this node's starts.
        nodes: the addresses of the nodes with which the run began.
        devices: the number of devices of each node, in order.
        device: this worker's number among its node's devices.
    """

    def __init__(self, meeting: Met, nodes: Sequence[NodeAt], kept: _Kept | None, device: int = 0) -> None:
        self.run, self.node, self.late = meeting.run, meeting.node, meeting.late
        self.incarnation, self.nodes = meeting.incarnation, list(nodes)
        self.devices, self.device = list(meeting.devices), device
        self._meeting, self._kept = meeting, kept
        self._known = {each.node: each for each in nodes}
        self._keep()

    @property
    def place(self) -> Place:
        """The place of this worker in the run, which never changes. Workers are numbered node by node."""
        local = int(os.environ.get("LOCAL_RANK", "0")) + int(os.environ.get(FIRST_VARIABLE, "0"))
        return Place(self.workers_of(self.node)[self.device], sum(self.devices), local)

    def workers_of(self, node: int) -> range:
        """Return the ranks of a node's devices."""
        first = sum(self.devices[:node])
        return range(first, first + self.devices[node])

    def node_of(self, rank: int) -> int:
        """Return the node to which the worker of this rank belongs."""
        return next(node for node in range(len(self.devices)) if rank in self.workers_of(node))

    def describe(self) -> str:
        """Return where the nodes met, in a few words."""
        return self._meeting.hub or "the store of the launch"

    def remember(self, nodes: Sequence[NodeAt]) -> None:
        """Record the present addresses of other nodes."""
        known = {**self._known, **{each.node: each for each in nodes}}
        if known != self._known:
            self._known = known
            self._keep()

    def lived(self, incarnation: int) -> None:
        """Record that this node has been started `incarnation` times."""
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self._keep()

    def _keep(self) -> None:
        if self._kept is not None:
            self._kept.write(self.known)

    @property
    def known(self) -> NodeFile:
        """The knowledge with which this node comes back when it is started again."""
        nodes = [self._known[node] for node in sorted(self._known)]
        met = self._meeting
        return NodeFile(self.run, self.node, self.incarnation, nodes, met.hub, met.founding, self.devices)

    def close(self, finished: bool = False) -> None:
        """Leave the hub; keep the file for this node's next life, unless the run has come to its end."""
        self._meeting.close()
        if self._kept is not None:
            self._kept.close(finished)


def introduce(config: Config, place: Place | None) -> tuple[Introduction, CpuSide | None, Devices] | None:
    """Start this node's CPU side, and introduce the node to the others; return None if there are no others.

    A device that does not lead its node is notified by the leader. Raises ConfigError for a wrong
    environment, UserError for a name that another node has or for unequal keys, and DeadlineError when the
    others do not come within `sync.timeout`.
    """
    inside, of_nodes = places_of(config, place)
    side: CpuSide | None = None
    if inside.rank == 0:
        told = _tell_devices(inside, lambda: _introduce_node(config, of_nodes, inside.world, place is None))
        if told is None:
            return None
        introduction, side = told
    else:
        introduction = _hear_leader(inside, config.timeout_seconds)
    try:
        return introduction, side, _devices(config, inside, introduction)
    except BaseException:
        if side is not None:
            side.close()
        introduction.close()
        raise


def _devices(config: Config, inside: Place, introduction: Introduction) -> Devices:
    """Return the node's devices, with a ring if there are several."""
    if inside.world == 1:
        return Devices()
    names = tuple(introduction.workers_of(introduction.node))
    device = device_of(introduction.place)
    return Devices(Ring(Seat(replace(inside, names=names)), device, config.timeout_seconds + LEADER_SECONDS))


_Introduced = tuple[Introduction, CpuSide]


def _tell_devices(inside: Place, act: Callable[[], _Introduced | None]) -> _Introduced | None:
    """Introduce the node, on its leader, and report the result or the failure in the store of the devices."""
    word = _Word()
    try:
        introduced = act()
        if introduced is not None:
            word = _Word(introduced[0].known, introduced[0].late)
        return introduced
    except AtollError as error:
        word = _Word(failed=(type(error).__name__, str(error)))
        raise
    except BaseException as error:
        ended = f"the node's first worker ended with {type(error).__name__}: {error}"
        word = _Word(failed=(RunError.__name__, ended))
        raise
    finally:
        if inside.store is not None:
            inside.store.set(_INTRODUCED, msgspec.json.encode(word).decode())


def _hear_leader(inside: Place, timeout: float) -> Introduction:
    """Return the leader's introduction, on another device, or raise the leader's error."""
    assert inside.store is not None
    # The leader waits for its CPU side, for the hub, for the others to come there, and for their addresses.
    seconds = _START_SECONDS + 3 * timeout + LEADER_SECONDS
    try:
        inside.store.wait([_INTRODUCED], timedelta(seconds=seconds))
        word = from_json(inside.store.get(_INTRODUCED), _Word)
    except (DistStoreError, RuntimeError) as error:
        raise DeadlineError(
            f"device {inside.rank} of a node waited up to {seconds:.0f} s for the node's first worker to be "
            f"introduced to the others (deadline: 3 times sync.timeout, {timeout:g} s, and what its CPU side "
            f"may take to start): {str(error).splitlines()[0]}"
        ) from None
    if word.known is None:
        raise error_named(*word.failed)
    return Introduction(_OfLeader(word.known, word.late), word.known.nodes, None, inside.rank)


def _introduce_node(
    config: Config, place: Place | None, devices: int, from_environment: bool
) -> _Introduced | None:
    keys = keys_from_environment()
    kept = None
    meeting: AddressMeeting | None = known_before(config, devices) if from_environment else None
    if meeting is None:
        meeting = _meet(config, place, keys, devices)
    if meeting is None:
        return None
    side = None
    try:
        folder = _folder(config) if from_environment else None
        kept = _Kept(folder, meeting.node) if folder is not None else None
        side = CpuSide(meeting.node)
        address = _open(side, meeting, config, keys)
        nodes = meeting.exchange(address)
        known_from = str(folder) if isinstance(meeting, KnownMeeting) else ""
        side.send(Introduce(nodes=nodes, late=meeting.late, founding=meeting.founding, known_from=known_from))
        return Introduction(meeting, nodes, kept), side
    except BaseException:
        if side is not None:
            side.close()
        if kept is not None:
            kept.close()
        meeting.close()
        raise


def _open(side: CpuSide, meeting: AddressMeeting, config: Config, keys: Keys | None) -> str:
    """Send the CPU side its settings; return the address at which it listens."""
    sync, link = config.sync, config.link
    side.send(
        Begin(
            run=meeting.run,
            node=meeting.node,
            incarnation=meeting.incarnation,
            stale_max=sync.stale_max,
            overlay=sync.overlay,
            listen=_listen(meeting, keys),
            keys=[keys.server_public, keys.server_secret, keys.client_public, keys.client_secret]
            if keys is not None
            else [],
            transport=link.transport,
            round_timeout=-1.0 if config.round_seconds is None else config.round_seconds,
            backoff=-1.0 if config.backoff_seconds is None else config.backoff_seconds,
            timeout=config.timeout_seconds,
            patience=config.patience_seconds,
            hub=meeting.hub,
            nodes=meeting.world,
            codec=sync.codec,
        )
    )
    answer, _ = side.await_message(_START_SECONDS, "its start")
    assert isinstance(answer, Listening)
    return answer.address


def _listen(meeting: AddressMeeting, keys: Keys | None) -> str:
    """Return the address at which this node is to listen.

    It is a socket that only this user can reach, if there is a folder for sockets: the launcher's, or that of
    nodes which met in a store on this machine and have no key. Else it is a TCP port.
    """
    folder = os.environ.get(SOCKETS_VARIABLE, "")
    if not folder and keys is None:
        folder = meeting.socket_folder()
    if folder:
        return f"ipc://{folder}/node-{meeting.node}-{secrets.token_hex(4)}"
    host = f"[{meeting.host}]" if ":" in meeting.host else meeting.host
    return f"tcp://{host}:0"


def _meet(config: Config, place: Place | None, keys: Keys | None, devices: int) -> AddressMeeting | None:
    address = os.environ.get(HUB_VARIABLE, "")
    if place is None and address:
        return HubMeeting(config, address, keys, devices)
    if place is None:
        place = Place.from_environment(config.timeout_seconds)
    return StoreMeeting(place, config.timeout_seconds, devices) if place.store is not None else None


class _OfLeader:
    """The leader's meeting, on a device that does not lead."""

    def __init__(self, known: NodeFile, late: bool) -> None:
        self.run, self.node, self.incarnation = known.run, known.node, known.incarnation
        self.hub, self.founding, self.devices = known.hub, known.founding, known.devices
        self.late = late

    def close(self) -> None:
        """Do nothing: the leader leaves the meeting."""


class _InStore:
    """The base of meetings in which nodes leave their records in a store."""

    def __init__(self, node: int, world: int, incarnation: int, timeout: float, devices: int) -> None:
        self.node, self.world, self.incarnation = node, world, incarnation
        self._timeout, self._own_devices = timeout, devices
        self.late, self.founding = False, 0
        self.devices: list[int] = []

    def _store(self) -> Store:
        raise NotImplementedError

    def socket_folder(self) -> str:
        return ""

    def exchange(self, address: str) -> list[NodeAt]:
        store, key = self._store(), _key(self.node)
        record = _Record(self.incarnation, address, secrets.token_hex(8), self._own_devices)
        own = msgspec.json.encode(record)
        if self.late:
            _check_devices(self.node, self._record(store, self.node)[1], self._own_devices)
            store.set(key, own.decode())
        elif (there := bytes(store.compare_set(key, "", own.decode()))) != own:
            other = from_json(there, _Record).address
            raise UserError(
                f"there are two nodes {self.node}: the other one listens at {other}; each needs a name of "
                f"its own ({RANK_VARIABLE}, or torchrun's RANK)"
            )
        records = [self._record(store, node) for node in range(self.world)]
        self.devices = [devices for _, devices in records]
        return [where for where, _ in records]

    def _record(self, store: Store, node: int) -> tuple[NodeAt, int]:
        """Return a node's address and its number of devices.

        Raises DeadlineError if the node does not come in time, and RunError if it was lost.
        """
        began = time.monotonic()
        try:
            store.wait([_key(node)], timedelta(seconds=self._timeout))
            record = from_json(store.get(_key(node)), _Record)
        except (DistStoreError, RuntimeError) as error:
            waited, which = time.monotonic() - began, f"node {node} of {self.world}"
            late = waited >= 0.9 * self._timeout  # clocks and milliseconds are rounded
            if isinstance(error, DistStoreError) and not late:  # a hub reports a lost node at once
                raise RunError(
                    f"{which} was lost before it had said where it listens (node {self.node} waited "
                    f"{waited:.1f} s for that): start the run again"
                ) from None
            raise (DeadlineError if late else RunError)(
                f"node {self.node} waited {waited:.1f} s for {which} to say where it listens (deadline "
                f"sync.timeout, {self._timeout:g} s): {str(error).splitlines()[0]}"
            ) from None
        return NodeAt(node=node, incarnation=record.incarnation, address=record.address), record.devices


class StoreMeeting(_InStore):
    """A meeting in the store of a launch, torchrun's or the caller's."""

    def __init__(self, place: Place, timeout: float, devices: int = 1) -> None:
        assert place.store is not None
        super().__init__(place.rank, place.world, incarnation=1, timeout=timeout, devices=devices)
        self._place = place
        self._folder_lock: int | None = None  # a lock on the folder of sockets, held while this node lives
        self.run, self.hub = os.environ.get("TORCHELASTIC_RUN_ID", "") or "run", ""
        master = f"tcp://{os.environ.get('MASTER_ADDR', _LOOPBACK)}:{os.environ.get('MASTER_PORT', '1')}"
        self.host = place.host or own_address(master) or _LOOPBACK

    def _store(self) -> Store:
        assert self._place.store is not None
        return self._place.store

    def socket_folder(self) -> str:
        if not (self.host.startswith("127.") or self.host == "::1"):
            return ""  # at a loopback address all nodes are on this machine
        store = self._store()
        if self.node == 0:
            made = make_socket_folder()  # the last node's CPU side removes it
            self._folder_lock = hold_folder(made)
            remove_left_folders(made.parent)
            store.set(_SOCKETS, str(made))
            return str(made)
        try:
            store.wait([_SOCKETS], timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise DeadlineError(
                f"node {self.node} waited {self._timeout:g} s for node 0 to begin (deadline sync.timeout): "
                f"{str(error).splitlines()[0]}"
            ) from None
        folder = bytes(store.get(_SOCKETS)).decode(errors="replace")
        check_socket_folder(folder)  # every user of this machine can write to the store
        self._folder_lock = hold_folder(Path(folder))
        return folder

    def close(self) -> None:
        """Let the folder of sockets go. The store belongs to the launch."""
        if self._folder_lock is not None:
            os.close(self._folder_lock)
            self._folder_lock = None


class HubMeeting(_InStore):
    """A meeting in the store of the hub at `address`, which gives this node its number."""

    def __init__(self, config: Config, address: str, keys: Keys | None, devices: int) -> None:
        timeout = config.timeout_seconds
        run, launcher = os.environ.get(RUN_VARIABLE, ""), launcher_from_environment()
        self._client = HubClient(
            address,
            keys,
            run=run,
            timeout=timeout,
            launcher=launcher,
            without=lambda _welcome: _WITHOUT_HUB,
        )
        try:
            welcome = self._client.join(wished_rank())
            facts = {"hub": address, "shards": welcome.shards, "nodes": welcome.workers}
            differ = {"nodes differ": config.groups.count != welcome.workers}
            check("join", choices_of(config, {**facts, **differ}))
            super().__init__(welcome.worker, welcome.workers, welcome.incarnation, timeout, devices)
            self.founding = self._client.gather()
            self._group = HubStore(address, keys, welcome, self.founding, timeout)
        except BaseException:
            self._client.goodbye()
            self._client.close()
            raise
        self.run, self.hub, self.late = welcome.run, address, self._client.late
        self.host = own_address(address) or _LOOPBACK

    def _store(self) -> Store:
        return self._group

    def close(self) -> None:
        self._group.close()
        self._client.goodbye(finished=True)
        self._client.close()


class KnownMeeting:
    """The knowledge of an earlier start, in place of a meeting: the others' addresses as this node knew
    them."""

    def __init__(self, known: NodeFile) -> None:
        self.run, self.node, self.world, self.hub = known.run, known.node, len(known.nodes), known.hub
        self.incarnation, self.late = known.incarnation + 1, True
        self.founding, self.devices = known.founding, known.devices or [1] * self.world
        self._nodes = known.nodes
        own = next((each.address for each in known.nodes if each.node == known.node), "")
        self.host = (host_and_port(own) or (_LOOPBACK,))[0]

    def socket_folder(self) -> str:
        return ""

    def exchange(self, address: str) -> list[NodeAt]:
        own = NodeAt(node=self.node, incarnation=self.incarnation, address=address)
        return [own if each.node == self.node else each for each in self._nodes]

    def close(self) -> None:
        """Do nothing: there is no meeting to leave."""


def _check_devices(node: int, before: int, now: int) -> None:
    """Raise ConfigError if a node comes back with another number of devices, on which the workers' ranks
    depend."""
    if before != now:
        raise ConfigError(
            f"node {node} had {before} device{'s' * (before > 1)} when the run began, and comes back with "
            f"{now}: start as many workers as then (torchrun --nproc-per-node {before})"
        )


def known_before(config: Config, devices: int = 1) -> KnownMeeting | None:
    """Return this node's knowledge of an earlier start in this run, if it is started again while the others
    go on.

    Returns None for a first start, and if torchrun without a hub starts again, since it then starts all
    workers. Raises ConfigError if the node had another number of devices than `devices`, and UserError for an
    unreadable file.
    """
    if by_torchrun() and HUB_VARIABLE not in os.environ:
        return None
    given = os.environ.get(RANK_VARIABLE, "")
    if not given and devices == 1:
        given = os.environ.get("RANK", "")
    folder = _folder(config)
    if folder is None or not given.isdecimal():
        return None
    path = folder / f"{int(given)}.json"
    try:
        known = from_json(path.read_bytes(), NodeFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: not what a node leaves there: {error}") from None
    run = os.environ.get(RUN_VARIABLE, "")
    if run not in ("", known.run):
        return None
    meeting = KnownMeeting(known)
    _check_devices(meeting.node, meeting.devices[meeting.node], devices)
    return meeting


class _Kept:
    """The file of node `node` in `folder`, and a lock that lasts as long as the node lives.

    The lock is the process's own: a child that it forks (a DataLoader's) does not hold it.
    """

    def __init__(self, folder: Path, node: int) -> None:
        make_folder_like_parent(folder)
        self._path = folder / f"{node}.json"
        self._lock: IO[str] = os.fdopen(open_like_folder(folder / f"{node}.lock", os.O_RDWR), "w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(
                f"node {node} of the run in {folder.parent} is alive already; each node needs a name of its "
                f"own ({RANK_VARIABLE}, or torchrun's RANK)"
            ) from None

    def write(self, known: NodeFile) -> None:
        """Replace the file at once or not at all. A file that cannot be written costs a restart, not the
        run."""
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            with os.fdopen(open_like_folder(new, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(known)) + b"\n")
            new.replace(self._path)

    def close(self, finished: bool = False) -> None:
        if finished:  # the next run in this directory begins anew
            self._path.unlink(missing_ok=True)
        self._lock.close()


def _folder(config: Config) -> Path | None:
    directory = os.environ.get(DIRECTORY_VARIABLE) or config.run.directory
    return Path(directory) / FOLDER if directory else None


def _key(node: int) -> str:
    return f"peers/{node}"


def keys_from_environment() -> Keys | None:
    """Return the keys in the file that $ATOLL_KEY_FILE names; None if it is not set."""
    path = os.environ.get(KEYS_VARIABLE, "")
    return read_keys(Path(path)) if path else None


def wished_rank() -> int:
    """Return the rank for which this worker asks; -1 for any. Raises ConfigError if it is no whole number."""
    given = os.environ.get(RANK_VARIABLE, "-1")
    try:
        return int(given)
    except ValueError:
        raise ConfigError(f"{RANK_VARIABLE} is {given!r}; it must be a whole number") from None
