"""Messages between a node's training process and its CPU side, over one Unix socket of packets.

Both are of one installation and one machine, and trust each other; tensors lie in shared memory
(exchange/hostmemory.py), so messages are small. `Post` (net/post.py) cuts a larger one into packets, and
carries file descriptors with it.

The order: Begin, Listening, Introduce; then meetings; SetUp, Ready; then iterations, until Leave and Left.
Source: docs/peers.md, "What a step does".
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, Union

import msgspec
from msgspec import Meta

from atoll.core.config import PLAIN_CODEC
from atoll.core.weighing import KNOWN
from atoll.wire.base import (
    Count,
    Hyperparameters,
    Message,
    Name,
    Seconds,
    Text,
    Weight,
    decode_with,
)
from atoll.wire.workerstand import WorkerStand

NO_STATE = "a node that comes late gets no state of the script"  # why follows
NO_MORE = 2**52  # in place of an iteration: the script has made all of its own
Note: TypeAlias = Annotated[bytes, Meta(max_length=2**16)]  # the session's own data on a contribution
Buffer: TypeAlias = Annotated[int, Meta(ge=0, lt=16)]
Processes: TypeAlias = Annotated[list[Name], Meta(max_length=1024)]  # core/liveness.py: own_origin


class NodeAt(msgspec.Struct, frozen=True):
    """A node of the run, and the address at which its CPU side listens."""

    node: Count
    incarnation: Count
    address: Name


class Clip(msgspec.Struct, frozen=True):
    """The script's request to clip the mean's global norm: clip_grad_norm_'s arguments."""

    max_norm: float
    norm_type: float = 2.0


class Begin(Message, frozen=True):
    """The worker's first message: this is node `node` of `run`, alive for the `incarnation`-th time. Answered
    by Listening.

    It listens at `listen`, as what others reach at `address` (empty: where it listens). `keys` are the four
    of net/keys.py: Keys, in its order; none where all nodes are of one machine. With `transport` "ltp" nodes
    reach one another through tunnels that lose nothing, to UDP ports from `udp_port` on (0: any free ones).

    Times are in seconds; -1 for `round_timeout` and `backoff`: adapted to what is measured. `timeout` is the
    deadline of each wait for other nodes, and `patience` is `hub.patience`. `hub` is the witness's address,
    where there is one. The run has `nodes` nodes, from 0 on (0: as many as there can be). `codec` is
    `sync.codec`.
    """

    run: Name
    node: Count
    incarnation: Count
    stale_max: Count
    overlay: Name = "all"  # "own", "none"
    listen: Name = "tcp://127.0.0.1:0"
    address: Name = ""
    keys: list[Name] = []
    transport: Name = "tcp"
    udp_port: Count = 0
    round_timeout: float = -1.0
    backoff: float = -1.0
    timeout: Seconds = 600.0
    patience: Seconds = 10.0
    hub: Name = ""
    nodes: Count = 0
    codec: Name = PLAIN_CODEC


class Listening(Message, frozen=True):
    """The CPU side is ready: other nodes reach it at `address`."""

    address: Name


class Introduce(Message, frozen=True):
    """The nodes that the run begins with, this one included; if the run is under way (`late`), nodes that may
    know of it.

    Meetings work from here on; a late node takes part from Ready on. `founding` counts the run's beginnings
    under one hub, so that none is mistaken for an earlier one. `known_from` is the folder where an earlier
    incarnation of this node left the addresses; empty: this node was introduced.
    """

    nodes: list[NodeAt]
    late: bool = False
    founding: Count = 0
    known_from: str = ""


class SetUp(Message, frozen=True):
    """The description of the training. The file descriptor of the shared memory comes with it.

    Buffer 0 of the shared memory holds the initial parameters. Where these come from a checkpoint (`packed`),
    another file holds its optimizer's state (exchange/globalstate.py says how it is packed). When a
    checkpoint is loaded into a running training, SetUp comes again, with the next `number` and all nodes
    between the same two iterations. The worker counts its own SetUps: the CPU side of a late worker adds
    those that the members made before.

    `layout` is a chunks.ChunkMap as MessagePack, `optimizer` the class's full name. `digest` names the model,
    the optimizer, the configuration and the processor's instruction set: nodes with another digest are
    refused. `iteration` is the number of iterations that the checkpoint had made, of `consumed` samples. A
    late worker's initial parameters are ignored. `slots` and `buffers` are the shared memory's. `by_tensor`:
    the optimizer steps whole tensors. `devices` are the places of the processes of the node's devices
    (core/liveness.py), the leader's first; where there are more, the others may ask for the state themselves.
    """

    number: Count
    digest: Name
    layout: msgspec.Raw
    optimizer: Text
    hyperparameters: Hyperparameters
    slots: Count
    buffers: Count
    iteration: Count = 0
    packed: Count = 0  # bytes of optimizer state in the second descriptor
    threads: Count = 1  # for the optimizer
    consumed: Weight = 0.0
    devices: Processes = []
    own_optimizer: Text = ""  # the script's own class as "package.module:Class"; empty: one of torch.optim's
    path: list[Text] = []  # where the worker's modules are
    by_tensor: bool = False


class Ready(Message, frozen=True):
    """Set up; iteration `iteration` is the first that this node makes, its next meeting is `meeting`.
    Parameters to begin with follow as Published. `script`: for a late node, the state in a member's
    Captured for that iteration. `door`: the address where the node's other devices may ask
    (cpuside/door.py)."""

    iteration: Count
    incarnation: Count
    meeting: Count = 0
    script: bytes = b""
    door: Name = ""


class Contribute(Message, frozen=True):
    """The gradients of `iteration` lie complete in slot `iteration` % slots. The slot stays unchanged until
    Freed.

    `taken` is the global iteration of the parameters with which the gradients were computed. `present` has,
    for each trainable chunk in order, one byte a slot: whether the slot has a gradient. Missing gradients are
    zeros. `weight` is 0 for gradients to leave out (NaN, policy "skip"). `refused`: also, no node makes the
    iteration's step, whatever others contribute. `basis` says how certain the weight is (core/weighing.py),
    and `alike` is the node's weight where all devices count alike. `mean`: the gradients are what the script
    has made of the nodes' mean; `clipped`: they are clipped by `clip` already. `note` (the time to compute,
    say) goes unchanged to all nodes, and comes back with Applied.
    """

    iteration: Count
    taken: Count
    samples: Weight
    weight: Weight
    present: list[bytes]
    hyperparameters: Hyperparameters
    clip: Clip | None = None
    note: Note = b""
    refused: bool = False
    basis: Name = KNOWN
    alike: Weight = 1.0
    mean: bool = False
    clipped: bool = False


class Freed(Message, frozen=True):
    """The slots of all iterations before `before` may be written again."""

    before: Count


class Applied(Message, frozen=True):
    """`iteration` is in the global parameters, made of `parts` in order of node. Precedes any Published that
    has it.

    `skipped` is the reason why the step was left out. `unlike` names hyperparameters that must be equal and
    differ between nodes. `consumed` counts the samples of all iterations up to this one.
    """

    iteration: Count
    parts: list[AppliedContribution]
    digest: Name = ""  # of the global parameters after it, where it was made
    skipped: Text = ""
    unlike: Text = ""
    consumed: Weight = 0.0


class AppliedContribution(msgspec.Struct, frozen=True):
    """An applied contribution: its node, and the values that the node gave with it."""

    node: Count
    incarnation: Count
    samples: float
    weight: float
    note: Note = b""


class Published(Message, frozen=True):
    """Buffer `buffer` holds local parameters: the global ones at iteration `taken`, and over them pending
    contributions, of which this node's own are those before `through`. The buffer is unchanged until
    Release. Writing it took `seconds`."""

    buffer: Buffer
    taken: Count
    through: Count
    seconds: float = 0.0


class Release(Message, frozen=True):
    """The worker has copied these buffers, or will not read them."""

    buffers: list[Buffer]


class Want(Message, frozen=True):
    """The worker waits: it may not begin `iteration` before the global iteration is `least`, or it needs
    all contributions applied (a checkpoint, the end). Answered by Published, and by Waiting until then."""

    iteration: Count
    least: Count
    stand: WorkerStand | None = None  # the place in its script


class Meet(Message, frozen=True):
    """A node's part in the members' `number`-th meeting on `what`. Answered by Met.

    `at` is the last iteration whose boundary (the end of its backward) the script has come to; `NO_MORE` once
    it has made all of them. A node that comes in takes part from its first iteration's boundary on.
    """

    number: Count
    what: Text
    payload: bytes
    at: Count = 0
    stand: WorkerStand | None = None  # the place in its script


class Met(Message, frozen=True):
    """All members' parts, in order of node: a value counts everywhere or nowhere.

    `uses` are the nodes that came for a mean of gradients (core/stands.py: USE). Where these are not all, the
    parts are void: all nodes meet for the mean next, and those that came for something else come again.
    """

    number: Count
    nodes: list[Count]
    payloads: list[bytes]
    uses: list[Count] = []


class Asked(Message, frozen=True):
    """Another node's script is in the `number`-th meeting for `what`, a mean of gradients: a worker that
    waits for an iteration brings its own gradients there."""

    number: Count
    what: Text


class WantState(Message, frozen=True):
    """Pack the optimizer's state into the memory whose file descriptor comes with this message, once the
    global iteration is `least`, the number of iterations that this node has contributed: no later one
    comes before the answer. Answered by State, and by Waiting until then. The worker asks, or another
    device of its node at the CPU side's door."""

    least: Count = 0


class State(Message, frozen=True):
    """The wanted state lies in the memory given: `packed` bytes, at global iteration `iteration`."""

    iteration: Count
    packed: Count


class CaptureAt(Message, frozen=True):
    """A node comes in with `iteration`: answer exactly at that boundary with Captured."""

    iteration: Count


class Captured(Message, frozen=True):
    """The script's state (samplers, random numbers) before `iteration`, for a late node, and the first
    meeting that this node takes part in."""

    iteration: Count
    script: bytes
    meeting: Count = 0


class Waiting(Message, frozen=True):
    """The reason why the global iteration stands ("node 2's contribution of iteration 41") while the
    worker waits; for its deadline's error."""

    what: Text


class Members(Message, frozen=True):
    """The members have changed, from view `view` on. `known` are all nodes that this one knows, with
    addresses, for a node that wants to come back later. `reason` is the decision's."""

    view: Count
    members: list[NodeAt]
    known: list[NodeAt] = []
    reason: Text = ""


class LeftOut(Message, frozen=True):
    """The others went on without this node. It asks to be let in again only once the worker says Awake:
    the others would wait for its next contribution, in vain if the worker or another device of the node
    stands still."""


class Awake(Message, frozen=True):
    """After LeftOut: the script, on all of the node's devices, has come to a call of the session."""


class Returned(Message, frozen=True):
    """The others went on without this node, and it is a member again, with another `incarnation`; its next
    iteration is `iteration`, its next meeting `meeting`. Its contributions beyond those that the others
    hold count nowhere. Published follows. `script` as in Ready."""

    incarnation: Count
    iteration: Count
    meeting: Count
    script: bytes = b""
    reason: Text = ""


class Resumed(Message, frozen=True):
    """The worker has taken Returned. Its messages from here on are of that incarnation; earlier ones are
    dropped."""

    incarnation: Count


class Notice(Message, frozen=True, tag="Told"):
    """A decision with its reason (core.events.Decided), or with `choice` empty a warning: `reason` alone."""

    what: Name
    choice: Text
    reason: Text


class Figures(Message, frozen=True):
    """Counts of the CPU side since it began, sent about once a second while they change.

    `staleness` counts applied contributions by how far their iteration was past the one whose parameters they
    used; the last count is for all above. Seconds and bytes are sums.
    """

    applied: Count = 0
    rounds: Count = 0  # synchronisation rounds that this node started
    joined: Count = 0  # rounds that this node took part in
    refusals: Count = 0
    fetched: Count = 0  # contributions that this node requested
    waits: Count = 0  # of the worker's, for the global iteration
    waited: Seconds = 0.0
    no_room: Count = 0  # contributions that had to wait for room
    bytes_in: Count = 0
    bytes_out: Count = 0
    applying: Seconds = 0.0
    overlaying: Seconds = 0.0
    staleness: list[Count] = []


class Leave(Message, frozen=True):
    """The worker is done, after `iteration` iterations: the others go on without this node. Answered by
    Left."""

    iteration: Count


class Left(Message, frozen=True):
    """The node has left, and no other waits for it."""


class Failed(Message, frozen=True):
    """The CPU side cannot go on, and ends: the error's class (core/errors.py) and its line."""

    error: Name
    reason: Text


DeviceMessage: TypeAlias = Union[
    Begin, Listening, Introduce, SetUp, Ready, Contribute, Freed, Applied, Published, Release, Want, Waiting,
    Meet, Met, Asked, WantState, State, CaptureAt, Captured, Members, LeftOut, Awake, Returned, Resumed,
    Notice, Figures, Leave, Left, Failed,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[DeviceMessage] = msgspec.msgpack.Decoder(DeviceMessage)


def encode(message: DeviceMessage) -> bytes:
    return _encoder.encode(message)


def decode(packet: bytes | bytearray | memoryview) -> DeviceMessage:
    """Return the message in `packet`. Raises WireError, with one line, for anything else."""
    return decode_with(_decoder, packet, "message")
