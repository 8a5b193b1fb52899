"""The messages between workers, hub and shards: a header, MessagePack by msgspec, and for some a payload of
raw little-endian values behind it (a chunk).

Sizes, counts and names are bounded here, before anything is allocated for them. Source: S4, "The store".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, Union

import msgspec
from msgspec import Meta

from atoll.core.errors import AtollError

VERSION = 5  # of the protocol; both sides must have the same
HEADER_BYTES = 2**26  # the largest header: a layout of a hundred thousand parameters

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
Weight: TypeAlias = Annotated[float, Meta(ge=0)]
Key: TypeAlias = Annotated[str, Meta(max_length=1024)]  # of the rings' store
Value: TypeAlias = Annotated[bytes, Meta(max_length=2**20)]
Hyperparameters: TypeAlias = list[dict[str, Any]]  # for each param group of the optimizer: numbers, booleans


class WireError(AtollError):
    """Bytes from outside that are no message of ours; the line says why."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="m", tag=True):
    """What every message is."""


# -- at the door, of hub and shards ------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message of a connection. `run` is the run's name: a shard of another run refuses it.

    From a shard to the hub, `address` is where workers reach it, `shard` its index, and `incarnation` what
    the hub gave it before it was started again (0: it begins). From a worker to the hub, `incarnation` is 0,
    and `worker` the rank it wishes for, or -1 for any; to a shard, both are what the hub gave. `token` is a
    name that the sender has made up for itself: said twice, it is one who comes once; a shard's, a site's
    shard's too, is its directory's. Where shards are held twice, a shard's `life` is a name of its process
    alone, and `since` the incarnation that this process has been given already (0: none).
    From the hub to shard 0, `role` is "hub"; from a shard's primary to its standby, "primary". Where the run
    has sites, a worker names its own, also to its shard, which knows by it who has come to an old port; a
    site's shard is a "site" to the hub, and to the global shards a worker, whose rank is the site's index.
    A group of several says Hello to shards as one worker, with what the hub gave the group; `member` tells
    its connections apart: the rank in the run of the member whose connection it is.
    """

    version: int
    run: Name
    role: Name  # "worker", "shard", "site", "hub", "primary"
    worker: int = -1
    incarnation: Count = 0
    shard: int = -1
    address: Name = ""
    pid: Count = 0
    site: Name = ""
    token: Name = ""
    life: Name = ""
    since: Count = 0
    member: Count = 0


class Welcome(Message, frozen=True):
    """The answer to a Hello. From the hub: rank and incarnation, how many workers the run starts with, how
    many shards it has (0: its workers are a ring), how often to send a Heartbeat, and for how long silence is
    borne (seconds). `replicas` is how many processes hold each shard; with 2, a Duty follows.

    With sites, `sites` are their names in order; a site's shard is told its site's workers, and a global
    shard how many sites there are, for those are its workers.

    From a shard: `shard` is its index, and `comes_back` says that it keeps a journal, so that it may be
    started again when it dies, or has a standby; it is said again when that changes. A site's shard names its
    site in `sites`.
    From the log, `late`: the run has begun without this worker, which takes part when it says Arrive.
    """

    run: Name
    worker: int = -1
    incarnation: Count = 0
    workers: Count = 0
    shards: Count = 0
    heartbeat: Seconds = 0.0
    patience: Seconds = 0.0
    sites: list[Name] = []
    shard: int = -1
    comes_back: bool = False
    late: bool = False
    replicas: Count = 1


class Refused(Message, frozen=True):
    """No, and why: one line. What was asked has changed nothing. `request` is the refused message's name, and
    `number` its number; 0: it has none, or it is none."""

    reason: Text
    request: Name = ""
    number: Count = 0


# -- the hub ----------------------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True):
    """A worker or a shard is alive. `iteration` is how many iterations the worker has committed. `pace` is how
    long a worker of a run with groups computes a sample, in seconds, over its latest batches; 0: not known
    yet."""

    incarnation: Count
    iteration: Count = 0
    pace: Seconds = 0.0


class Goodbye(Message, frozen=True):
    """A worker leaves in good order: it commits nothing any more, and what it had leased is free. From a
    shard: it ends, as Over has told it to. From a site's: all its workers have left, or it cannot go on.
    To a site's shard, from its worker: it leaves, so that nobody is to come back in its place.
    `finished`: its session came to its end together with the other members' of its ring."""

    incarnation: Count
    finished: bool = False


class Over(Message, frozen=True):
    """The hub to a shard, in answer to a Heartbeat: all workers have left, and the run is over."""


class WhereAreShards(Message, frozen=True):
    """Answered by Shards, once all are there: to a worker of a site, that site's alone."""


class Shards(Message, frozen=True):
    """The shards' addresses, by index; shard 0 keeps the log. How workers agree, for those who come later."""

    addresses: Annotated[list[Name], Meta(max_length=4096)]


class Lease(Message, frozen=True):
    """A worker asks for up to `count` positions of an epoch's order of a data set of `length` samples.

    `sampler` numbers the worker's samplers. Answered by Leased. `number` counts this worker's requests, from
    1: one sent twice is answered twice and counted once; 0 counts for itself.

    In a group of several, `contributor` is the group, and `block` counts what its members have asked of this
    sampler and epoch, from 1: each member asks for each block, and is given its part. `count` is for one
    member.
    """

    incarnation: Count
    sampler: Count
    epoch: Count
    length: Count
    count: Annotated[int, Meta(ge=1, lt=2**53)]
    number: Count = 0
    contributor: Count = 0
    block: Count = 0


class Leased(Message, frozen=True):
    """Positions `start` to `stop` (exclusive) of `epoch` are the worker's until its commit that used them.

    `over`: the epoch has none left, nor will a dead worker's come back; then start equals stop. Neither: wait
    and ask again, others may yet fail to use theirs.

    Of a group's block, start to stop is the member's part, and `length` what each member takes in all: who
    has fewer positions fills up with samples that weigh nothing, so that all make equally many batches.
    """

    sampler: Count
    epoch: Count
    start: Count
    stop: Count
    over: bool = False
    number: Count = 0
    length: Count = 0


class Used(Message, frozen=True):
    """Positions of an epoch that a commit has used up."""

    sampler: Count
    epoch: Count
    start: Count
    stop: Count


class Fence(Message, frozen=True):
    """The hub to the log: take nothing from this worker's incarnation any more. Answered by Fenced."""

    worker: Count
    incarnation: Count


class Fenced(Message, frozen=True):
    """Done; `used` is all that the incarnation's commits have used, which is the truth about its leases.
    With `news`: nobody has asked, and `used` is what has come since the last."""

    worker: Count
    incarnation: Count
    iteration: Count  # how many it had committed
    used: list[Used]
    news: bool = False


class Look(Message, frozen=True):
    """The hub to the log: this worker's connection to the hub has broken; what of the one to you? Answered by
    Looked."""

    worker: Count
    incarnation: Count


class Looked(Message, frozen=True):
    """`lost`: the worker was connected, and is not any more."""

    worker: Count
    incarnation: Count
    lost: bool


class Ping(Message, frozen=True):
    """Whoever sends it wants to know whether the connection stands, and the system tells: nothing is to be
    done."""


class Gather(Message, frozen=True):
    """A worker wants to form the run's ring. Answered by Gathered once every rank wants it, or after
    `seconds`. `number` counts this worker's wishes: one sent twice is answered twice and counted once."""

    incarnation: Count
    number: Count
    seconds: Seconds


class Gathered(Message, frozen=True):
    """The ring is formed: `group` is its number, and names its keys. 0: the `missing` ranks did not come.
    `late`: that ring is under way without this worker, which may enter it (Enter).
    `number` is the Gather's."""

    group: Count
    missing: Annotated[list[Count], Meta(max_length=4096)] = []
    late: bool = False
    number: Count = 0


class Reform(Message, frozen=True):
    """A member of ring `group`, in which it has rank `rank`, wants the next one: it has lost touch with
    another member, or (`admits`) newcomers are to enter. Answered by Reformed, once every living member has
    said so; `number` counts this worker's wishes, as Gather's.

    `round` is the collective that it is in, and `holds` whether it holds all of that one's result. `fresh`:
    it has entered, and has not got the training's state yet."""

    incarnation: Count
    number: Count
    group: Count
    rank: Count
    round: Count
    holds: bool = False
    admits: bool = False
    fresh: bool = False


class Enter(Message, frozen=True):
    """A late worker is ready to take part in the ring that is under way. Answered by Reformed, once the
    members admit it."""

    incarnation: Count
    number: Count


class Reformed(Message, frozen=True):
    """The next ring: `workers` are the ranks that the hub knows its members by, in order of their ranks in
    it; the last `newcomers` of them have no state yet, and take the first's.

    `round` is the collective that the ring makes next: who was in an earlier one takes what it holds, who was
    in this one begins it anew. `lost` are those of the ring before who died, `left` those who said goodbye.
    With `group` 0 there is no next ring: `reason`. `number` is the wish's."""

    group: Count
    workers: Annotated[list[Count], Meta(max_length=4096)] = []
    newcomers: Count = 0
    round: Count = 0
    lost: Annotated[list[Count], Meta(max_length=4096)] = []
    left: Annotated[list[Count], Meta(max_length=4096)] = []
    reason: Text = ""
    number: Count = 0


class RingNews(Message, frozen=True):
    """The hub to a ring's member, at once and in answer to each Heartbeat: ring `group` is `broken` (a member
    is gone, or has said so of another), and how many newcomers are `waiting` to enter. In a run with groups,
    `grouping` counts the hub's decisions on who is in which: 0 before the first."""

    group: Count
    broken: bool = False
    waiting: Count = 0
    grouping: Count = 0


class JoinGroup(Message, frozen=True):
    """A worker that has come to the end of an iteration asks for its group in `grouping`, the hub's latest
    that it knows of. Answered by Grouped, once all living members of its new group have asked.

    `iteration` is the session's count, and `held` what the worker was given of its leases and has not used.
    `number` counts this worker's wishes, as Gather's."""

    incarnation: Count
    number: Count
    grouping: Count
    iteration: Count
    held: list[Used] = []


class Grouped(Message, frozen=True):
    """The worker's new group: `contributor` and `life` are what it is to the shards (a number that no other
    group of the run has, and an incarnation), `group` is its ring, of `workers`, whose last `newcomers` take
    the first's state: it is the furthest. With `group` 0 the worker stays where it is: `reason`.
    `number` and `grouping` are the wish's."""

    number: Count
    grouping: Count
    group: Count
    contributor: Count = 0
    life: Count = 0
    workers: Annotated[list[Count], Meta(max_length=4096)] = []
    newcomers: Count = 0
    reason: Text = ""


class InGroup(Message, frozen=True):
    """A worker has moved: the shards know `contributor`, and it speaks for that and for nobody else."""

    incarnation: Count
    contributor: Count


class StoreCall(Message, frozen=True):
    """One call of c10d's Store on a ring's keys, answered by StoreAnswer. store/rendezvous.py says what each
    operation wants; `seconds` is for how long "get" and "wait" wait for keys. `number` counts this worker's
    calls: what is sent twice counts once."""

    incarnation: Count
    group: Count
    number: Count
    operation: Literal["set", "get", "wait", "check", "add", "append", "compare_set", "delete", "num_keys"]
    keys: Annotated[list[Key], Meta(max_length=4096)] = []
    values: Annotated[list[Value], Meta(max_length=2)] = []
    amount: Annotated[int, Meta(ge=-(2**62), le=2**62)] = 0
    seconds: Seconds = 0.0


class StoreAnswer(Message, frozen=True):
    """`value` or `count` is what the call gives; `missing` are the keys that had not come in its time.
    `number` is the call's: one that was sent twice has two answers."""

    value: Value = b""
    count: int = 0
    missing: Annotated[list[Key], Meta(max_length=4096)] = []
    number: Count = 0


# -- a shard ----------------------------------------------------------------------------------------------


class Setup(Message, frozen=True):
    """The first worker describes what to train: one for each shard. Its chunks' values follow as SetChunk.

    `layout` is a chunks.ChunkMap as MessagePack, `chunks` the ids that this shard holds, `optimizer` the
    class's full name.
    `digest` names layout and optimizer: a worker with another one is refused. At a site every worker sends
    it, and `first` is the worker that brings the values, of this site or another. `number` counts this
    worker's set-ups, from 1: what it sends again is of the same one (0: of its next).
    """

    digest: Name
    layout: msgspec.Raw
    chunks: list[Count]
    optimizer: Text
    hyperparameters: Hyperparameters
    consistency: Name  # "bsp", "ssp", "asp"
    slack: Count
    workers: Count
    shards: Count
    steps: Count = 0  # iterations made before, by the checkpoint that the values come from
    first: Count = 0
    number: Count = 0
    staleness: Name = "weight"  # asynchronous modes: what of a stale contribution is scaled; "rate", "none"
    compensation: Annotated[float, Meta(ge=0)] = 0.0  # of its delay: the factor of g * g * (w_now - w_then)
    pipeline: Count = 0  # the most iterations of a worker's own that are in flight while it computes the next


class SetChunk(Message, frozen=True):
    """The payload is a chunk's values (`key` empty), or one element-wise state of its optimizer, such as
    "exp_avg". `values` are the states of each slot that are one number, such as "step"."""

    chunk: Count
    key: Name = ""
    values: list[dict[str, Any]] = []
    number: Count = 0  # as the Setup's


class Ready(Message, frozen=True):
    """A worker asks a shard whether it is set up as `digest` says. Answered by Ready, when it is. `number` as
    the Setup's."""

    digest: Name
    number: Count = 0


class Push(Message, frozen=True):
    """A chunk of this worker's contribution to `iteration`. Payload: gradients, applied by the commit alone.

    `present[i]` says whether slot i has a gradient; zeros stand where not. `chunks_in_all` is how many chunks
    of this iteration the worker sends to this shard. `pull`: answer, too, with what comes of the iteration,
    as to a PullMean of it under bsp, else to a Pull at the clock after it.

    A group's members may each send a part: the payload is then the `share`-th of `shares` runs of the chunk,
    as `run_of` cuts it, and the answer that is pulled is that run alone.
    """

    incarnation: Count
    iteration: Count
    chunk: Count
    chunks_in_all: Count
    present: bytes  # one byte a slot
    pull: bool = False
    share: Count = 0
    shares: Annotated[int, Meta(ge=1, le=4096)] = 1


class Commit(Message, frozen=True):
    """To the log (shard 0): all chunks of the contribution are pushed; apply it, everywhere or nowhere. A
    commit of what is committed already is answered as the first one was. Answered by Committed."""

    incarnation: Count
    iteration: Count
    weight: Weight
    samples: Weight = 0.0
    hyperparameters: Hyperparameters = []  # asynchronous modes: this worker's
    used: list[Used] = []
    grouping: Count = 0  # the hub's latest that the worker, or its group, knows of
    behind: Count = 0  # iterations of its own that the parameters it was computed at lacked: in flight


class Committed(Message, frozen=True):
    """The contribution is in the log. `workers`, in order: BSP, whose contributions the iteration has; else,
    who lives. BSP: `entering` are those who come new with the next iteration; all who have made this one are
    told the same. `grouping`: the contributor, under BSP each of them, knows of that one: they move to it."""

    iteration: Count
    workers: Annotated[list[Count], Meta(max_length=4096)] = []
    entering: Annotated[list[Count], Meta(max_length=4096)] = []
    grouping: Count = 0


class Step(Message, frozen=True):
    """BSP, to the log: step with the mean of `iteration` times `scale`. All members must say the same.

    `edited` are chunks whose gradients the script changed otherwise; the live member of the lowest rank has
    sent them as Replace before."""

    incarnation: Count
    iteration: Count
    scale: float
    hyperparameters: Hyperparameters
    edited: list[Count] = []
    edits: Name = ""  # a digest of what was made of the edited chunks: the same from all
    accepted: bool = True  # False: leave this step out (NaN, policy "skip")
    follows: bool = False  # from a site whose workers are gone: whatever the others say


class Replace(Message, frozen=True):
    """BSP: the payload is the gradient that the script made of a chunk's mean."""

    incarnation: Count
    iteration: Count
    chunk: Count
    present: bytes


class PullMean(Message, frozen=True):
    """BSP: answered by a Mean for each of the shard's chunks, once `iteration` is combined. `share` as Push's:
    of that run alone."""

    incarnation: Count
    iteration: Count
    share: Count = 0
    shares: Annotated[int, Meta(ge=1, le=4096)] = 1


class Mean(Message, frozen=True):
    """Payload: a chunk's mean gradient; `present`: where any worker had one; `weight`, `samples`: sums."""

    iteration: Count
    chunk: Count
    present: bytes
    weight: float
    samples: float
    share: Count = 0


class Pull(Message, frozen=True):
    """Answered by Parameters for each of the shard's chunks, once a worker that has committed `clock`
    iterations may begin the next by the rules of the run's consistency. `newest`: at a site, those that the
    global shards have after the latest meeting. `share` as Push's: of that run alone."""

    incarnation: Count
    clock: Count
    newest: bool = False
    share: Count = 0
    shares: Annotated[int, Meta(ge=1, le=4096)] = 1


class Parameters(Message, frozen=True):
    """The payload is a chunk's parameters; `version` counts its updates, `staleness` is how many global
    iterations the worker's own contribution was behind when it was applied (asynchronous modes)."""

    clock: Count
    chunk: Count
    version: Count
    staleness: float = 0.0
    share: Count = 0


class PullState(Message, frozen=True):
    """For a checkpoint: answered by State for each chunk and key, then StateEnd."""

    incarnation: Count


class State(Message, frozen=True):
    """Payload: one element-wise state of a chunk's optimizer. With key "": no payload, only `values`."""

    chunk: Count
    key: Name
    values: list[dict[str, Any]] = []


class StateEnd(Message, frozen=True):
    """All State messages have been sent."""

    steps: Count


class Meet(Message, frozen=True):
    """To the log: a gathering of all live workers, the `number`-th. The payload is this worker's part."""

    incarnation: Count
    number: Count
    what: Text


class Met(Message, frozen=True):
    """Everyone's parts, in order of `workers`: one payload, of which `sizes` are the parts'. `clock`: at a
    site, the iteration that its workers make next."""

    number: Count
    workers: list[Count]
    sizes: list[Count]
    clock: Count = 0


class Arrive(Message, frozen=True):
    """To the log, from a worker that it has welcomed as late: it takes part from now on, under BSP from an
    iteration on that the others are told of in Committed. From a group that is new: `meeting`, the number of
    its members' next, which waits for it; -1: a living worker's GiveState says."""

    incarnation: Count
    meeting: Annotated[int, Meta(ge=-1, lt=2**53)] = -1


class WantState(Message, frozen=True):
    """A worker that comes late asks the log for what is not at the shards, as it is before `iteration`; the
    log asks a living one, saying for whom: `worker`, and `life`, its incarnation. Answered by GiveState."""

    iteration: Count
    worker: Count = 0
    life: Count = 0


class GiveState(Message, frozen=True):
    """Payload: a living worker's state, for `worker` of incarnation `life`, by way of the log. `members` are
    those of the next iteration in order, and `meeting` is their next one's number. `refused`: why it cannot
    be given. Without members and payload, from the log: nobody lives who could give it."""

    worker: Count
    life: Count
    meeting: Count
    members: Annotated[list[Count], Meta(max_length=4096)] = []
    refused: Text = ""


class WhoIsMissing(Message, frozen=True):
    """To the log, when a deadline has passed: who is waited for? Answered by Missing."""


class Missing(Message, frozen=True):
    """Who is waited for and on what, a line each; empty where the log waits for nobody."""

    lines: Annotated[list[Text], Meta(max_length=8192)]


# -- between shards ---------------------------------------------------------------------------------------


class Follow(Message, frozen=True):
    """A shard asks the log for its entries from `after` on, as they come."""

    shard: Count
    after: Count


class Staged(Message, frozen=True):
    """A shard tells the log that a contribution's chunks are all there."""

    shard: Count
    worker: Count
    incarnation: Count
    iteration: Count


class Entry(Message, frozen=True):
    """A line of the log. `entry` is a store.entries.Entry, as MessagePack."""

    sequence: Count
    entry: msgspec.Raw


# -- a shard that is held twice ---------------------------------------------------------------------------


class Duty(Message, frozen=True):
    """The hub to a shard that is held twice, at once and in answer to each Heartbeat: which of the two it is.

    To the primary, `partner` is the standby without which it acknowledges nothing once that has caught up (0:
    it goes on alone), and `address` where that listens; to the standby, the same of its primary. `synced`:
    the hub knows that the standby has caught up; `serves`: that the primary knows its duty. `term` grows with
    each of the hub's decisions on this shard: an earlier one that comes late is nothing."""

    term: Count
    primary: bool
    partner: Count = 0
    address: Name = ""
    synced: bool = False
    serves: bool = False


class Serves(Message, frozen=True):
    """A shard to the hub: it knows that it is the primary, and serves. Said until Duty says so."""

    incarnation: Count


class InSync(Message, frozen=True):
    """A primary to the hub: its standby holds all that was acknowledged, and from now on nothing is before it
    holds that too. Said until Duty says so."""

    incarnation: Count
    standby: Count


class LostTouch(Message, frozen=True):
    """A shard to the hub: the connection to its primary or standby is lost. Said until there is another."""

    incarnation: Count
    partner: Count


class Standing(Message, frozen=True):
    """A standby to its primary: it holds the first `count` messages of `stream` (empty: of none)."""

    stream: Name
    count: Count


class Begin(Message, frozen=True):
    """The first message of a stream. The payload is the primary's state (server/recovery.py: ShardImage),
    whose `parts` follow as CopyPart, and its chunks as CopyChunk, while messages go on; none: it has not been
    set up, and all that it was told follows."""

    stream: Name
    parts: Count = 0
    hyperparameters: Hyperparameters = []


class CopyPart(Message, frozen=True):
    """The payload of a part of the state: `kind` and `key` as in store/records.py: Part."""

    kind: Name
    key: Count


class CopyChunk(Message, frozen=True):
    """A chunk as it is at this place of the stream: the payload is its values (`key` empty), or else one
    tensor of its optimizer's. That with the values comes last, and brings the slots' numbers; `present` and
    `open_slots` are of a step that is open, if one is."""

    chunk: Count
    key: Name = ""
    slots: list[dict[str, Any]] = []
    is_open: bool = False
    present: list[bool] = []
    open_slots: list[dict[str, Any]] = []


class Copy(Message, frozen=True):
    """What the primary was told (store/records.py: Told), with its payload."""

    role: Name
    index: int
    incarnation: Count
    message: msgspec.Raw


class Probe(Message, frozen=True):
    """A primary that has long said nothing asks its standby whether it still is one: a message of the stream
    that means nothing else."""


AnyMessage: TypeAlias = Union[
    Hello, Welcome, Refused, Heartbeat, Goodbye, Over, WhereAreShards, Shards, Lease, Leased, Fence, Fenced,
    Look, Looked, Ping, Gather, Gathered, Reform, Enter, Reformed, RingNews, JoinGroup, Grouped, InGroup, StoreCall, StoreAnswer,
    Setup, SetChunk, Ready, Push, Commit, Committed, Step, Replace, PullMean, Mean, Pull, Parameters,
    PullState, State, StateEnd, Meet, Met, Arrive, WantState, GiveState, WhoIsMissing, Missing,
    Follow, Staged, Entry,
    Duty, Serves, InSync, LostTouch, Standing, Begin, CopyPart, CopyChunk, Copy, Probe,
]  # fmt: skip


def run_of(extent: int, share: int, shares: int) -> tuple[int, int]:
    """Where the `share`-th of `shares` runs of `extent` elements begins and ends: equal runs of as many as
    needed, so that the last may be shorter, or empty."""
    size = -(-extent // shares)
    return min(extent, share * size), min(extent, (share + 1) * size)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The header's bytes."""
    return _encoder.encode(message)


def decode_untrusted(header: bytes | memoryview) -> AnyMessage:
    """The message in `header`; raises WireError, with one line, for anything that is none."""
    if len(header) > HEADER_BYTES:
        raise WireError(f"a header of {len(header)} bytes, where {HEADER_BYTES} is the most")
    try:
        return _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no message of this protocol: {str(error)[:200]}") from None


def plain_hyperparameters(groups: Sequence[Mapping[str, Any]]) -> Hyperparameters:
    """A torch optimizer's param groups as they can be sent: without parameters; tensors of one element as
    numbers."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value
