"""Every wait has a deadline: all of src/atoll is parsed for calls that may block, and for loops that wait in
slices and look at no clock.

The parser suspects by name. What it finds is either in `NO_WAITS` (calls that have a wait's name and block
for nobody), or in `REVIEWED`: waits that need no deadline of their own, each with the reason. Neither table
may have an entry that finds nothing. That a wait's error says who was waited for, on what and how long, the
tests of each part show.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "atoll"

# Methods that wait, and which positional argument (from 0) or keyword is their deadline. None: none is.
TIMED: dict[str, tuple[int | None, set[str]]] = {
    "wait": (0, {"timeout"}),
    "wait_for": (1, {"timeout"}),
    "result": (0, {"timeout"}),
    "exception": (0, {"timeout"}),
    "communicate": (1, {"timeout"}),
    "acquire": (1, {"timeout", "blocking"}),
    "poll": (0, {"timeout"}),
    "select": (0, {"timeout"}),
    "synchronize": (None, set()),
    "barrier": (None, {"timeout"}),
    "monitored_barrier": (1, {"timeout"}),
    "accept": (None, set()),
    "recv": (None, set()),
    "recv_bytes": (None, set()),
    "recv_into": (None, set()),
    "recv_json": (None, set()),
    "recv_multipart": (None, set()),
    "recv_string": (None, set()),
    "recvfrom": (None, set()),
    "recvmsg": (None, set()),
    "send_multipart": (None, set()),
    "sendall": (None, set()),
    "connect": (None, set()),
    "readline": (None, set()),
    "term": (None, set()),
    "serve_forever": (None, set()),
    "shutdown": (None, set()),
    "receive": (0, {"timeout"}),  # of an Endpoint
}
# Functions that wait, by their full name.
FUNCTIONS: dict[str, tuple[int | None, set[str]]] = {
    "select.select": (3, set()),
    "subprocess.run": (None, {"timeout"}),
    "subprocess.call": (None, {"timeout"}),
    "subprocess.check_call": (None, {"timeout"}),
    "subprocess.check_output": (None, {"timeout"}),
    "os.system": (None, set()),
    "os.read": (None, set()),
    "os.wait": (None, set()),
    "os.waitpid": (None, set()),
    "os.waitid": (None, set()),
    "signal.pause": (None, set()),
    "signal.sigwait": (None, set()),
    "input": (None, set()),
    "wait": (1, {"timeout"}),  # of multiprocessing.connection, and of concurrent.futures
    "poll": (1, {"timeout"}),  # of Endpoints
    "ThreadPoolExecutor": (None, set()),  # whose end waits for its threads
}
# Flags of calls that do not wait.
NOT_NOW = re.compile(r"\b(NOBLOCK|(MSG_)?DONTWAIT|LOCK_NB|WNOHANG|LOCK_UN)\b")
A_CLOCK = re.compile(r"monotonic|\buntil\b|deadline|perf_counter")

# (what is called, on what): the last part of each, and why that is no wait.
NO_WAITS: dict[tuple[str, str], str] = {
    **{
        ("poll", name): "subprocess.Popen.poll: looks, and returns"
        for name in ("process", "_process", "launcher", "processes")
    },
    **{
        ("poll", name): "takes in what there is, of files or without waiting for a socket"
        for name in (
            *("recorder", "self", "_rings", "_log", "snapshots", "_rendezvous", "_pairs"),
            *("_groups", "_planner", "_formation", "_departures", "_door", "_places"),
        )
    },
    ("poll", "select"): "makes a poll object",
    **{
        ("connect", name): "a ZeroMQ socket connects in the background"
        for name in ("_logs", "logs", "_links")
    },
    ("connect", "probe"): "of a datagram socket: it only chooses the route",
    ("read", "_store"): "a worker's gradients, in memory",
    ("read", "file"): "a regular file",
    ("read", "Spec"): "a regular file",
    ("read", "report"): "a regular file",
    ("read", "_hearing"): "it notes what was read",
    ("read", "traffic"): "a regular file",
    ("read", "journal"): "a regular file, as far as it is written",
    ("read", "reader"): "a regular file, as far as it is written",
    ("read", "_decisions"): "a regular file, as far as it is written",
    ("read", "decision_reader"): "a regular file, as far as it is written",
    ("read", "_tail"): "a regular file, as far as it is written",
    ("read", "stream"): "a pipe that the selector has found ready",
    ("put", "_copies"): "queue.SimpleQueue has no bound, and at most one copy of each chunk is put",
    ("put", "_items"): "queue.SimpleQueue has no bound; `Journal.is_full` says when the shard takes no more",
    ("put", "_dropped"): "queue.SimpleQueue has no bound; a flow is dropped once",
    ("put", "_results"): "queue.SimpleQueue has no bound; a client has a few transfers under way",
    ("put", "sums"): "queue.SimpleQueue has no bound; an iteration has a sum for each message, and waits",
    ("put", "_jobs"): "queue.SimpleQueue has no bound; a transfer for each block of memory, about",
    ("read", "disk"): "DiskFile.read begins a transfer; Transfer.wait has the deadline",
    ("put", "optimizer"): "ShardOptimizer.put: values into a chunk",
    ("put", "_outbox"): "ltp.outbox.Outbox: a list of messages",
    ("put", "_models"): "train.api.models: a list of prepared models",
    ("send", "_session"): "ltp.session.LtpSession, which knows no socket",
    ("send", "session"): "LinkSession.send never waits",
    ("send", "port"): "UdpPort.send: what finds no room is left to the caller",
    ("receive", "port"): "UdpPort.receive: takes what has come",
    **{("receive", name): "Post.receive: a socket that does not block" for name in ("post", "_post")},
    ("accept", "_hooks"): "what to do with NaN; no socket",
    ("barrier", "_collectives"): "Collectives.barrier: of Workers.barrier",
    ("barrier", "_workers"): "Workers.barrier: its waits are Channel.wait's or Link.wait's (sync.timeout)",
}

_POLLED = "the file is read when poll or select has found it ready, or does not block"
_OWN_DEVICE = "this process's own device, of whose work each collective has come already (Channel.wait)"
_SLICES = "the socket has a timeout, and who waits in slices looks at a clock between them"
_PROBE = "the socket has a deadline: create_connection's, or settimeout's"
_NEVER = "Client.send never waits"
_CALLED_OFF = "at least each 50 ms it calls `look`, which looks at the transfer's deadline (--deadline)"
_RELEASES = "a condition lets go of its lock while it waits"

# file: function: the call, and why it has no deadline of its own.
REVIEWED: dict[str, str] = {
    "launch/ends.py: EndWatch._wait: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)": (
        "a thread whose task is to wait for a child's end"
    ),
    "train/sync/peersexchange.py: NextParameters.take: worker.wait(lambda: is_over() or "
    "self._is_asked(), lambda: f'{why}the global iteration to be {least}, before iteration {iteration}; "
    "it is {parameters.at}'"
    "), again and again": (
        "each wait has a deadline; it begins again once this node has come to another's use of the mean"
    ),
    "train/api/records.py: Records._write_in_pauses: self._over.wait(FLUSH_SECONDS), again and again": (
        "the thread that writes records while the script pauses, until `close`"
    ),
    "observe/lastwords.py: LastWords.take: os.read(self._read, _READ_BYTES)": "a pipe that does not block",
    "lab/emulation.py: Emulation.carries: os.read(self._ready, 1)": _POLLED,
    "lab/emulation.py: _Sampler._sample: self._over.wait(_BEGIN_SECONDS), again and again": (
        "a thread that looks whether the emulator has begun, until `finish`"
    ),
    "lab/inside.py: Inside._take: os.read(handle, 64)": _POLLED,
    "lab/inside.py: _end_with_runner: poll.poll()": "a thread whose task is to wait for the runner's end",
    "lab/output.py: Output._serve: self._selector.select(_DRAIN_SECONDS if self._ending else None), "
    "again and again": "the thread that passes output on, until `close`",
    "lab/output.py: Output._take_added: os.read(self._wake, _READ)": _POLLED,
    "lab/output.py: _Stream.read: os.read(self.pipe, _READ)": _POLLED,
    "core/pipes.py: read_start: os.read(descriptor, most - len(data))": "opened so that it never waits",
    "core/outlet.py: Outlet._work: self._changed.wait()": "the thread that writes, until `close`",
    "core/outlet.py: Outlet._write_piece: select.select([], [self._descriptor], [], 1.0), again and again": (
        "the thread that writes: the reader sets its pace, and nobody waits for the thread"
    ),
    "lab/runner.py: _Start._read: os.read(self._result, 65536)": _POLLED,
    "memory/disk.py: _serve: jobs.get()": (
        "a thread of the disk tier waits for the next transfer; `close` ends it"
    ),
    "net/context.py: _keep_doors: requests.send_multipart(_answer(requests.recv_multipart()))": (
        "a thread whose task is to answer libzmq, within this process; it ends with the context"
    ),
    "net/context.py: _keep_doors: requests.recv_multipart()": "the same",
    "net/context.py: finish: _context.term()": "all sockets are closed, with a linger of at most 1 s",
    "net/endpoint.py: Client._open: link.connect(self.address)": "ZeroMQ connects in the background",
    "net/endpoint.py: _monitor_of: watch.connect(place)": "within the process: it is there at once",
    "net/endpoint.py: _greeting_of: link.connect(address.removeprefix('ipc://'))": _PROBE,
    "net/endpoint.py: _greeting_of: link.recv(10)": _PROBE,
    "net/endpoint.py: _greeting_of: link.sendall(b'\\r\\n\\r\\n')": _PROBE,
    "net/endpoint.py: _greeting_of: link.sendall(_SIGNATURE)": _PROBE,
    "net/endpoint.py: _rest_of_greeting: link.sendall(b'\\x03')": _PROBE,
    "net/strangers.py: Strangers._judge: link.shutdown(socket.SHUT_RDWR)": "it does not wait",
    "core/descriptors.py: opened: time.sleep(_PAUSE_SECONDS), holding _lock": (
        "who holds it tries for a few seconds, and others would only take its descriptors"
    ),
    "train/members/peersintroduction.py: StoreMeeting.socket_folder: store.get(_SOCKETS)": (
        "store.wait, with its deadline, has seen the key"
    ),
    "net/endpoint.py: _rest_of_greeting: link.recv(left)": _PROBE,
    "net/fetches.py: FetchService.close: link.shutdown(socket.SHUT_RDWR)": "it does not wait",
    "net/fetches.py: FetchService._send_away: stranger.shutdown(socket.SHUT_RDWR)": "it does not wait",
    "net/post.py: Post.close: self._link.shutdown(socket.SHUT_RDWR)": "it does not wait",
    "net/fetches.py: FetchService._accept: self._listener.accept()": _SLICES,
    "net/fetches.py: FetchService._accept: self._over.wait(_SLICE_SECONDS), again and again": _SLICES,
    "net/fetches.py: FetchService._next_head: link.recv(FETCH_BYTES)": (
        "a thread that waits in slices for a member's next fetch, until that or `close` ends it"
    ),
    "net/fetches.py: _fill: link.recv_into(into, 0, socket.MSG_WAITALL)": _SLICES,
    "net/fetches.py: _say: link.send(left)": _SLICES,
    "net/heartbeats.py: HeartbeatLine.open: link.connect(self._path)": "a socket that does not block",
    "net/heartbeats.py: HeartbeatDoor._accept: self._listener.accept()": "a socket that does not block",
    "net/hubconnection.py: HubConnection.greet: self.client.send(encode(hello))": _NEVER,
    "net/hubconnection.py: HubConnection.say: self.client.send(encode(message))": _NEVER,
    "net/linkprobe.py: LinkServer._serve: self._listener.accept()": _SLICES,
    "net/linkprobe.py: _Link.say: self._link.sendall(data)": _PROBE,
    "net/linkprobe.py: _Link._some: self._link.recv_into(self._thrown, min(most, len(self._thrown)))": (
        _SLICES
    ),
    "net/linkserver.py: LinkServer._tell_results: os.read(self._woken, 4096)": "a pipe that does not block",
    "net/linktester.py: LinkTester.__exit__: self._client.send(encode(Goodbye(incarnation=0)))": _NEVER,
    "net/linktester.py: LinkTester._greet: self._client.send(encode(Hello(version=VERSION, run='', "
    "role=LINK_ROLE, pid=os.getpid())))": _NEVER,
    "net/linktester.py: LinkTester._ask: self._client.send(encode(message))": _NEVER,
    "net/linktester.py: TcpTransport.send: self._link.send(self._data, look)": _CALLED_OFF,
    "net/linktester.py: _Turns._transfer: sender.send(transfer, partial(self._look, until, 'usable'))": (
        _CALLED_OFF
    ),
    "net/requests.py: ask: client.send(encode(message), payload)": _NEVER,
    "net/linksession.py: LinkSession.events: self._condition.wait(left), holding self._condition": _RELEASES,
    "net/linksession.py: LinkSession.close: self._condition.wait(left), holding self._condition": _RELEASES,
    "net/ltplink.py: LtpLink._sleep: os.read(self._woken, 4096)": "the pipe does not block",
    "net/returning.py: ReturningLinks._connect: client.send(encode(self._hello))": "the same",
    "net/returning.py: ReturningLinks._greet_again: link.client.send(encode(self._hello))": "the same",
    "net/returning.py: _transmit: client.send(encode(message), payload)": "the same",
    "net/returning.py: _transmit: client.send(encode(message), payload, lossy)": "the same",
    "net/tcpflows.py: TcpFlows._accept: self._listener.accept()": "a socket that does not block",
    "net/tcpflows.py: TcpFlows._drop_asked: os.read(self._woken, 4096)": "a pipe that does not block",
    "net/tcpflows.py: TcpSender.__init__: self._socket.connect(where)": _PROBE,
    "net/tcpflows.py: TcpSender.__init__: self._socket.sendall(token)": _PROBE,
    "net/tunnel.py: TunnelClient.__init__: super().send(encode(opening))": _NEVER,
    "net/tunnelend.py: Mailbox.take: os.read(self._woken, 1)": "the pipe does not block",
    "net/tunnelend.py: TunnelEnd.wait_sent: self._condition.wait(left), holding self._condition": _RELEASES,
    "server/journal.py: Journal.release: os.read(self._woken, 4096)": _POLLED,
    "server/journal.py: Journal._work: self._items.get()": (
        "the thread that writes a journal waits for the shard's next record; `close` ends it"
    ),
    "server/snapshot.py: _Taking._write: self._copies.get()": (
        "the thread that writes a snapshot waits for the shard's next copy; `abandon` ends it"
    ),
    "train/members/peersintroduction.py: _InStore._record: store.get(_key(node))": (
        "it is there: `wait` has returned"
    ),
    "train/members/peersintroduction.py: _hear_leader: inside.store.get(_INTRODUCED)": (
        "it is there, as above"
    ),
    "train/group/channel.py: Channel.wait: work.wait()": "NCCL's work has been polled until its end",
    "train/members/reach.py: _exchange: store.get(key)": "it is there: `wait` has returned",
    "train/group/standing.py: _Inquiry._read: self._store.get(key)": "it is there: `check` has found it",
    "train/group/memberlinks.py: MemberLinks.close: link.shutdown(socket.SHUT_RDWR)": "it does not wait",
    "train/group/shortsums.py: _Partner.receive: self.link.recv_into(into)": "a socket that does not block",
    "train/group/confirmation.py: Confirmations._hear: link.recv(1)": _SLICES,
    "cpuside/door.py: Door._admit: self._listening.accept()": "a socket that does not block",
    "train/sync/peersdoor.py: ask_at: link.connect(f'\\x00{door}')": _PROBE,
    ("train/group/memberlinks.py: MemberLinks._connect: link.sendall(_GREETING.pack(theirs, rank))"): _SLICES,
    "train/group/memberlinks.py: MemberLinks._accept: listener.accept()": _SLICES,
    ("train/group/memberlinks.py: MemberLinks._accept: link.recv(_GREETING.size - len(greeting))"): _SLICES,
    "train/group/channel.py: Channel._watch: work.wait()": (
        "the work is over; this gives its error, if it has one"
    ),
    "train/group/hierarchy.py: _Lane._serve: self.sums.get()": (
        "the thread that makes a lane's sums waits for the next; `close` and `abandon` end it"
    ),
    "train/group/channel.py: Channel.close: self._group.shutdown()": "NCCL gives up what is under way",
    "train/group/sockets.py: shut: link.shutdown(socket.SHUT_RDWR)": "the system call does not wait",
    "cpuside/calculating.py: Calculating.collect: os.read(self._read, 64)": "a pipe that does not block",
    "cpuside/calculating.py: Calculating._run: self._given.wait()": (
        "the thread that computes waits for the next job; `close` ends it"
    ),
    "memory/bringing.py: Bringing.__init__: ThreadPoolExecutor(1, thread_name_prefix='atoll-bringing')": (
        "its thread copies chunks, and what it waits for, a chunk's step or its read, has a deadline"
    ),
    "memory/bringing.py: Bringing.close: self._thread.shutdown()": "the same: at most the copies begun",
    "memory/bringing.py: Bringing.abandon: self._thread.shutdown(wait=False, cancel_futures=True)": (
        "it does not wait"
    ),
    "memory/sharedgradients.py: SharedGradients._sum.end_first: work.wait()": (
        "Members.exchange gives what waits with the group's deadline"
    ),
    "memory/sharing.py: Sharing.__init__: ThreadPoolExecutor(min(STAGES * (most - 1), FETCHING), "
    "'atoll-fetching')": "fetches have a deadline each (Members.fetch)",
    "memory/sharing.py: Sharing.close: self._fetching.shutdown(wait=False, cancel_futures=True)": (
        "it does not wait"
    ),
    "memory/sharedplan.py: _measured: members.exchange(sent, splits, into, splits, what).wait()": (
        "its waits are Channel.wait's (sync.timeout)"
    ),
    "memory/sums.py: Sum._end_inside: self._inside.wait()": "its waits are Channel.wait's (sync.timeout)",
    "memory/sums.py: Sum._end_between: each.wait()": "its waits are Channel.wait's (sync.timeout)",
    "memory/stages.py: Stages.take: self._condition.wait_for(lambda: self._free, _DEADLINE), "
    "holding self._condition": _RELEASES,
    "memory/syncpoints.py: SyncPoints.wait_until: self._condition.wait_for(lambda: self.count >= count or "
    "self._is_closed, _DEADLINE), holding self._condition": _RELEASES,
    "memory/leaving.py: Leaving.__init__: ThreadPoolExecutor(1, thread_name_prefix='atoll-leaving')": (
        "its thread copies gradients, and what it waits for, room in a tier, has a deadline"
    ),
    "memory/leaving.py: Leaving.close: self._thread.shutdown()": "the same: at most what is on its way",
    "memory/modelsteps.py: ModelSteps._work: steps.condition.wait()": (
        "the thread that steps chunks waits for the next step; `close` ends it"
    ),
    "exchange/globalparameters.py: _Crew.__init__: "
    "ThreadPoolExecutor(self.size, 'atoll-chunks', initializer=_stay_alone)": (
        "its threads step chunks, and wait for nobody"
    ),
    "train/gradients/ring.py: RingBuckets._wait: "
    "torch.accelerator.current_stream(messages[0].memory.device).synchronize()": _OWN_DEVICE,
    "memory/bandwidth.py: settle: torch.accelerator.synchronize(device)": _OWN_DEVICE,
    "train/api/meter.py: Meter._seconds_on_device: torch.accelerator.synchronize(self._device)": _OWN_DEVICE,
    "train/api/compose.py: _shares: torch.accelerator.current_stream(device).synchronize()": _OWN_DEVICE,
}


@dataclass(frozen=True)
class Wait:
    """A call that may block, or a loop that waits without looking at a clock."""

    file: str
    function: str
    text: str
    line: int

    @property
    def key(self) -> str:
        return f"{self.file}: {self.function}: {self.text}"


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Wait] = []
        self.passed: set[tuple[str, str]] = set()  # of NO_WAITS
        self._scope: list[str] = []
        self._loops: list[ast.While] = []
        self._locks: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        raise AssertionError(f"{self.file}:{node.lineno}: nothing here is asynchronous")

    def _inside(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._scope.append(node.name)
        loops, self._loops = self._loops, []
        locks, self._locks = self._locks, []
        self.generic_visit(node)
        self._loops, self._locks = loops, locks
        self._scope.pop()

    def visit_While(self, node: ast.While) -> None:
        self._loops.append(node)
        self.generic_visit(node)
        self._loops.pop()

    def visit_With(self, node: ast.With) -> None:
        names = [ast.unparse(item.context_expr) for item in node.items]
        locks = [name for name in names if re.search(r"lock$|condition$", name)]
        for item in node.items:
            self.visit(item)
        self._locks += locks
        for statement in node.body:
            self.visit(statement)
        del self._locks[len(self._locks) - len(locks) :]

    def visit_Call(self, node: ast.Call) -> None:
        text = ast.unparse(node)
        how = self._waits(node)
        if how:
            self._note(node, text)
        elif how is False:  # with a deadline; it may be a slice of a longer wait
            if self._locks:
                self._note(node, f"{text}, holding {self._locks[-1]}")
            if self._loops and not A_CLOCK.search(ast.unparse(self._loops[-1])):
                self._note(node, f"{text}, again and again")
        self.generic_visit(node)

    def _note(self, node: ast.Call, text: str) -> None:
        self.found.append(Wait(self.file, ".".join(self._scope) or "the module", text, node.lineno))

    def _waits(self, node: ast.Call) -> bool | None:
        """True: for ever; False: for a time; None: it is no wait."""
        name, receiver = _called(node)
        if (name, receiver) in NO_WAITS:
            self.passed.add((name, receiver))
            return None
        full = f"{receiver}.{name}" if receiver else name
        if full == "time.sleep" or full == "sleep":
            return False
        if full in ("fcntl.flock", "fcntl.lockf"):
            return not NOT_NOW.search(ast.unparse(node))
        if full == "connection.wait":  # multiprocessing's
            full = "wait"
        if full in FUNCTIONS:
            return _without_deadline(node, *FUNCTIONS[full])
        if name in ("get", "join", "put", "read", "send"):
            return _of_many_kinds(self.file, node, name, receiver)
        return _without_deadline(node, *TIMED[name]) if receiver and name in TIMED else None


def _called(node: ast.Call) -> tuple[str, str]:
    """The last names of what is called, and of what it is called on: `self._client.send`: send, _client."""
    if isinstance(node.func, ast.Name):
        return node.func.id, ""
    if not isinstance(node.func, ast.Attribute):
        return "", ""
    value: ast.expr = node.func.value
    if isinstance(value, ast.Constant):
        return node.func.attr, repr(value.value)
    while isinstance(value, (ast.Subscript, ast.Call)):
        value = value.value if isinstance(value, ast.Subscript) else value.func
    return node.func.attr, ast.unparse(value).rsplit(".", 1)[-1]


def _of_many_kinds(file: str, node: ast.Call, name: str, receiver: str) -> bool | None:
    """Names that dictionaries, texts and paths have too: whether this one waits, by its arguments."""
    if not receiver:  # a function of ours
        return None
    given = len(node.args) + len(node.keywords)
    timed = any(keyword.arg == "timeout" for keyword in node.keywords)
    if name == "get":  # a queue's takes no key; a store's waits for one
        return not timed if not node.args else (True if "store" in receiver.lower() else None)
    if name == "join":  # a thread's takes seconds; a text's, what it joins
        if receiver.startswith(("'", '"', "b'")) or receiver in ("path", "parse"):
            return None
        return not given
    if name == "put":
        return not timed
    if name == "read":  # of a pipe
        return True
    return None if not file.startswith("net/") else not NOT_NOW.search(ast.unparse(node))  # send


def _without_deadline(node: ast.Call, place: int | None, keywords: set[str]) -> bool | None:
    """Whether the call waits for ever: True; for a time: False; not at all: None."""
    if NOT_NOW.search(ast.unparse(node)):
        return None
    given = [keyword.value for keyword in node.keywords if keyword.arg in keywords]
    if place is not None and len(node.args) > place:
        given.append(node.args[place])
    if not given:
        return True
    text = ast.unparse(given[0])
    if text in ("0", "0.0", "False"):
        return None
    return text in ("None", "math.inf", "inf", "-1", "float('inf')")


def waits(source: str, file: str) -> tuple[list[Wait], set[tuple[str, str]]]:
    """The suspects of a module, and which entries of NO_WAITS it has."""
    finder = _Finder(file)
    finder.visit(ast.parse(source))
    return finder.found, finder.passed


def everywhere() -> Iterator[tuple[list[Wait], set[tuple[str, str]]]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield waits(path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix())


@pytest.mark.check
def test_each_wait_has_a_deadline() -> None:
    found = [wait for each, _ in everywhere() for wait in each if wait.key not in REVIEWED]
    assert not found, "\n".join(f"{wait.line}: {wait.key}" for wait in found)


@pytest.mark.check
def test_the_tables_are_of_this_code() -> None:
    everything = list(everywhere())
    keys = {wait.key for found, _ in everything for wait in found}
    passed = {each for _, passed in everything for each in passed}
    assert not set(REVIEWED) - keys
    assert not set(NO_WAITS) - passed
    assert all(REVIEWED.values())
    assert all(NO_WAITS.values())


@pytest.mark.parametrize(
    "source",
    [
        "def f(q): q.get()",
        "def f(q): q.get(block=True)",
        "def f(q): q.put(1)",
        "def f(thread): thread.join()",
        "def f(self): self._stop.wait()",
        "def f(self): self._stop.wait(None)",
        "def f(self): self._stop.wait(timeout=math.inf)",
        "def f(condition): condition.wait_for(lambda: True)",
        "def f(future): future.result()",
        "def f(lock): lock.acquire()",
        "def f(process): process.communicate(b'')",
        "def f(process): process.wait()",
        "def f(command): subprocess.run(command)",
        "def f(socket): socket.poll()",
        "def f(socket): socket.poll(-1)",
        "def f(socket): socket.recv()",
        "def f(socket): socket.recv(zmq.SNDMORE)",
        "def f(endpoint): endpoint.receive(math.inf)",
        "def f(ends): multiprocessing.connection.wait(ends)",
        "def f(ends): wait(ends)",
        "def f(listener): listener.accept()",
        "def f(file): fcntl.flock(file, fcntl.LOCK_EX)",
        "def f(pid): os.waitpid(pid, 0)",
        "def f(pipe): select.select([pipe], [], [])",
        "def f(group): group.monitored_barrier()",
        "def f(self): self._store.get('key')",
        "def f(stream): stream.synchronize()",
        "def f(pipe): pipe.readline()",
        "def f():\n    while not done():\n        time.sleep(0.1)",
        "def f(endpoint):\n    while True:\n        endpoint.receive(0.1)",
        "def f(self, event):\n    with self._lock:\n        event.wait(5)",
        "with ThreadPoolExecutor(2) as threads: pass",
    ],
)
def test_the_finder_finds_a_planted_wait(source: str) -> None:
    assert len(waits(source, "train/planted.py")[0]) == 1


def test_the_finder_finds_zeromq_sends_in_net() -> None:
    assert waits("def f(link): link.send(b'')", "net/planted.py")[0]
    assert not waits("def f(link): link.send(b'', zmq.NOBLOCK)", "net/planted.py")[0]
    assert not waits("def f(link): link.send(b'')", "train/planted.py")[0]  # Client.send never waits


@pytest.mark.parametrize(
    "source",
    [
        "def f(d): d.get('key')",
        "def f(q): q.get(timeout=3)",
        "def f(parts): ', '.join(parts)",
        "def f(parts): os.path.join(*parts)",
        "def f(thread): thread.join(5.0)",
        "def f(self): self._stop.wait(5.0)",
        "def f(process): process.wait(timeout=5)",
        "def f(command): subprocess.run(command, timeout=5)",
        "def f(socket): socket.poll(0)",
        "def f(socket): socket.recv(zmq.NOBLOCK)",
        "def f(file): fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "def f(pid): os.waitpid(pid, os.WNOHANG)",
        "def f(lock): lock.acquire(blocking=False)",
        "def f(endpoint): endpoint.receive(0)",
        "def f(until):\n    while time.monotonic() < until:\n        time.sleep(0.1)",
        "def f():\n    for _ in range(3):\n        time.sleep(0.1)",
        "def f(self):\n    with self._lock:\n        self.x = 1",
    ],
)
def test_the_finder_lets_pass_what_has_a_deadline(source: str) -> None:
    assert not waits(source, "train/planted.py")[0]
