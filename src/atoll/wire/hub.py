"""Messages with the hub: of workers and shards, and of the hub to them and to the log."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from atoll.wire.base import Count, Message, Name, Seconds, StoreKey, Text, Used, Value, Weight

Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
Ranks: TypeAlias = Annotated[list[Count], Meta(max_length=2**17)]  # of workers: as many as a run may have
LinkToken: TypeAlias = Annotated[bytes, Meta(max_length=64)]
MOST_BEATS = 4096  # in a message: no machine has as many workers


class Heartbeat(Message, frozen=True):
    """A sign of life of a worker or a shard. It may come over a connection without a Hello, so it bears the
    run's name: each run counts incarnations from 1, and an earlier run's members may still try the port that
    this hub has got.

    `iteration` is the number of iterations that the worker has committed. `pace`, in a run with groups, is
    the worker's compute time of a sample, in seconds, over its latest batches; 0: not known yet. In such a
    run too, `size` is its gradients' size in bytes, and `batch` the number of samples of its latest
    iteration.
    """

    run: Name
    incarnation: Count
    iteration: Count = 0
    pace: Seconds = 0.0
    size: Count = 0
    batch: Weight = 0.0


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A worker's heartbeat as its launcher passes it on: the fields of Heartbeat, and `age`, the seconds
    that it spent at the launcher's machine."""

    incarnation: Count
    iteration: Count = 0
    pace: Seconds = 0.0
    size: Count = 0
    batch: Weight = 0.0
    age: Seconds = 0.0


class Heartbeats(Message, frozen=True):
    """The launcher of some workers to the hub: those that it has heard since its last message. Answered by
    Heard with the `number`.

    `launcher` is the name that the launcher made up for itself, at random, and that its workers named in
    their Hello: a launcher speaks for these workers and for no others. `run` is as in Heartbeat."""

    run: Name
    launcher: Name
    number: Count
    beats: Annotated[list[Beat], Meta(max_length=MOST_BEATS)]


class Heard(Message, frozen=True):
    """The hub has taken the Heartbeats of this number, but for these incarnations: they are not there, or
    came from another launcher."""

    number: Count
    unknown: Annotated[list[Count], Meta(max_length=MOST_BEATS)] = []


class ToLauncher(msgspec.Struct, frozen=True, array_like=True):
    """A heartbeat of a worker to its launcher, over a socket of their machine: the `number`-th, sent at
    `at` by the machine's monotonic clock. The launcher answers with the number, once the hub has heard it."""

    run: Name
    number: Count
    at: Seconds
    beat: Beat


class Echo(Message, frozen=True):
    """A message of the hub to itself, over a connection to its own port: `token` identifies the hub,
    `number` the Echo. Once it comes back, all messages that members had sent until then have been read."""

    token: Name
    number: Count


class Goodbye(Message, frozen=True):
    """A worker leaves in good order: it commits nothing any more, and its leases are free.

    From a shard: it ends, since Over was sent. From a site's shard: all its workers have left, or it cannot
    go on. To a site's shard, from its worker: it leaves, and nobody is to come back in its place. `finished`:
    its session ended together with the other members' of its ring. Else `reason` says why the worker leaves,
    for people.
    """

    incarnation: Count
    finished: bool = False
    reason: Text = ""


class Over(Message, frozen=True):
    """From the hub to a shard, in answer to a Heartbeat: all workers have left, and the run is over."""


class WhereAreShards(Message, frozen=True):
    """A request for the shards' addresses. Answered by Shards, once all are there; a worker of a site gets
    the site's shard alone."""


class Shards(Message, frozen=True):
    """The shards' addresses, by index; shard 0 keeps the log. How workers agree, for those who come later."""

    addresses: Annotated[list[Name], Meta(max_length=4096)]


MOST_CUT = 2**31  # samples in a batch that is cut: products of two such numbers have 62 bits


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """The parts in which the members of a group take its batches: each member's samples of a whole batch, by
    its number; together fewer than MOST_CUT, and 1 at least. A batch with fewer samples is cut in proportion,
    and a member that gets any of it gets at least `least`."""

    parts: Annotated[dict[Count, Annotated[int, Meta(ge=0, lt=MOST_CUT)]], Meta(max_length=4096)]
    least: Annotated[int, Meta(ge=0, lt=MOST_CUT)] = 0


class Lease(Message, frozen=True):
    """A worker asks for up to `count` positions of an epoch's order of a data set of `length` samples.

    `sampler` numbers the worker's samplers. Answered by Leased. `number` counts this worker's requests, from
    1: one sent twice is answered twice and counted once; 0 counts for itself.

    In a group of several, `contributor` is the group, and `block` numbers what its members ask of this
    sampler and epoch (`store/blocks.py`): each member asks for each block, and is given its part. `count` is
    for one member. Who is not `patient` and finds nothing free does not ask again: then none of the members
    does.

    With `cut`, members take these parts of the block's batches, and `count` is the number of batches. The
    member that asks first decides for all.

    `returned` are positions that were leased to the worker, and that it gives back unused: its script has
    left their epoch. They are free before this request is answered.

    `idle`: the worker is in a loop without steps, such as an evaluation. Nobody waits for what it holds of
    the epoch.
    """

    incarnation: Count
    sampler: Count
    epoch: Count
    length: Count
    count: Annotated[int, Meta(ge=1, lt=2**53)]
    number: Count = 0
    contributor: Count = 0
    block: Count = 0
    patient: bool = False
    cut: Cut | None = None
    returned: list[Used] = []
    idle: bool = False


class Leased(Message, frozen=True):
    """Positions `start` to `stop` (exclusive) of `epoch` are the worker's until its commit that used them.

    `over`: the epoch has none left, nor will a dead worker's come back; then start equals stop. Neither: wait
    and ask again, others may yet fail to use theirs.

    Of a group's block, start to stop is the member's part, and `length` what each member takes in all: who
    has fewer positions fills up with samples that weigh nothing, so that all make equally many batches.
    `block` is the block's number, whatever it holds: all members are answered so. 0: ask for it again.

    With `cut`, start to stop is the whole block, and each member finds its own positions by the parts, which
    are those of the members that the block is for (`train/data/groupshares.py`).

    `held`: others hold positions of the epoch, which may come back, although it is `over`. `workers`: those
    of the run that live, before its start those with which it begins; 0: not told.
    """

    sampler: Count
    epoch: Count
    start: Count
    stop: Count
    over: bool = False
    number: Count = 0
    length: Count = 0
    block: Count = 0
    cut: Cut | None = None
    held: bool = False
    workers: Count = 0


class Fence(Message, frozen=True):
    """The hub to the log: take nothing from this worker's incarnation any more. Answered by Fenced."""

    worker: Count
    incarnation: Count


class Fenced(Message, frozen=True):
    """The answer to Fence; `used` is all that the incarnation's commits have used, which decides on its
    leases. With `news` it answers no Fence, and `used` is new since the last one."""

    worker: Count
    incarnation: Count
    iteration: Count  # iterations that it had committed
    used: list[Used]
    news: bool = False


class Look(Message, frozen=True):
    """From the hub to the log: this worker's connection to the hub has broken; does its connection to the
    log stand? Answered by Looked."""

    worker: Count
    incarnation: Count


class Looked(Message, frozen=True):
    """`lost`: the worker was connected, and is not any more."""

    worker: Count
    incarnation: Count
    lost: bool


class Gather(Message, frozen=True):
    """A worker's wish to form the run's ring. Answered by Gathered once every rank wishes it, or after
    `seconds`. `number` counts this worker's wishes: one sent twice is answered twice and counted once."""

    incarnation: Count
    number: Count
    seconds: Seconds


class Gathered(Message, frozen=True):
    """The ring is formed: `group` is its number, and names its keys. 0: only `there` workers came; `missing`
    are the first ranks that did not.

    `late`: that ring is under way without this worker, which may enter it (Enter). `number` is the Gather's.
    """

    group: Count
    missing: Annotated[list[Count], Meta(max_length=4096)] = []
    there: Count = 0
    late: bool = False
    number: Count = 0


class Reform(Message, frozen=True):
    """A wish of a member of ring `group`, in which it has rank `rank`, for the next ring: it has lost touch
    with another member, or (`admits`) newcomers are to enter. Answered by Reformed, once every living member
    wishes it; `number` counts this worker's wishes, as in Gather.

    `round` is the member's present collective, and `holds` is true if it holds that one's whole result.
    `fresh`: the member has entered, and does not have the training's state yet.
    """

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
    """The next ring: `workers` are its members' ranks at the hub, in order of their ranks in the ring; the
    last `newcomers` of them have no state yet, and take the first's.

    `round` is the collective that the ring makes next: a member of an earlier one takes its held result, a
    member of this one begins it anew. `lost` are the former ring's members that died, `left` those that said
    goodbye. With `group` 0 there is no next ring, for this `reason`. `number` is the wish's.
    """

    group: Count
    workers: Ranks = []
    newcomers: Count = 0
    round: Count = 0
    lost: Ranks = []
    left: Ranks = []
    reason: Text = ""
    number: Count = 0


class RingNews(Message, frozen=True):
    """From the hub to a ring's member, at once and in answer to each Heartbeat: `broken` is true if a
    member of ring `group` is gone, or was reported gone; `waiting` is the number of newcomers that are to
    enter. In a run with groups, `grouping` counts the hub's decisions on the groups: 0 before the first.
    `links`: the worker's links to others are to be measured; until they are, each of its heartbeats comes
    with a LinkPlace."""

    group: Count
    broken: bool = False
    waiting: Count = 0
    grouping: Count = 0
    links: bool = False


class LinkPlace(Message, frozen=True):
    """A worker's host, port and token at which others measure their links to it; sent to the hub."""

    incarnation: Count
    host: Name
    port: Port
    token: LinkToken


class MeasureLink(Message, frozen=True):
    """From the hub to a worker, over its heartbeats' connection: measure the link to worker `worker`, in
    at most `seconds`. Answered by LinkMeasured."""

    worker: Count
    host: Name
    port: Port
    token: LinkToken
    seconds: Seconds


class LinkMeasured(Message, frozen=True):
    """The link to `worker`: bytes per second, and seconds one way. With `reason` there was no measurement,
    for this reason."""

    incarnation: Count
    worker: Count
    bandwidth: Weight = 0.0
    latency: Seconds = 0.0
    reason: Text = ""


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
    the first's state: it is the furthest; `grouping` and `reason` are those of the decision. With `group` 0
    the worker stays where it is, for this `reason`. `number` is the wish's, and `grouping` too then."""

    number: Count
    grouping: Count
    group: Count
    contributor: Count = 0
    life: Count = 0
    workers: Ranks = []
    newcomers: Count = 0
    reason: Text = ""


class InGroup(Message, frozen=True):
    """A worker has moved: the shards know it as `contributor`, for which alone it speaks."""

    incarnation: Count
    contributor: Count


class StoreCall(Message, frozen=True):
    """One call of c10d's Store on a ring's keys, answered by StoreAnswer. It bears the run's name, as a
    Heartbeat does. store/rendezvous.py says what each operation wants; `seconds` is for how long "get" and
    "wait" wait for keys. `number` counts this worker's calls: what is sent twice counts once."""

    run: Name
    incarnation: Count
    group: Count
    number: Count
    operation: Literal["set", "get", "wait", "check", "add", "append", "compare_set", "delete", "num_keys"]
    keys: Annotated[list[StoreKey], Meta(max_length=4096)] = []
    values: Annotated[list[Value], Meta(max_length=2)] = []
    amount: Annotated[int, Meta(ge=-(2**62), le=2**62)] = 0
    seconds: Seconds = 0.0


class StoreAnswer(Message, frozen=True):
    """`value` or `count` is what the call gives; `missing` are the keys that had not come in its time.
    `number` is the call's: one that was sent twice has two answers."""

    value: Value = b""
    count: int = 0
    missing: Annotated[list[StoreKey], Meta(max_length=4096)] = []
    number: Count = 0


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
    """From a shard to the hub: the shard knows that it is the primary, and serves. Repeated until Duty
    confirms it."""

    incarnation: Count


class InSync(Message, frozen=True):
    """From a primary to the hub: its standby holds all that was acknowledged, and from now on nothing is
    acknowledged before the standby holds it too. Repeated until Duty confirms it."""

    incarnation: Count
    standby: Count


class LostTouch(Message, frozen=True):
    """From a shard to the hub: the connection to its primary or standby is lost. Repeated until there is
    another."""

    incarnation: Count
    partner: Count
