"""Messages between workers and shards; shard 0 keeps the log."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from atoll.core.config import PLAIN_CODEC
from atoll.core.optimizerkind import OptimizerKind
from atoll.core.weighing import KNOWN
from atoll.wire.base import Count, Hyperparameters, Message, Name, Text, Used, Weight
from atoll.wire.lost import LostBlocks
from atoll.wire.workerstand import WorkerStand

# Workers' reports on their speed (train/data/sharereports.py), by worker.
Speeds: TypeAlias = Annotated[
    dict[Count, Annotated[list[float], Meta(min_length=5, max_length=4101)]], Meta(max_length=4096)
]


Dealing: TypeAlias = Annotated[dict[Name, Name], Meta(max_length=16)]


class Setup(Message, frozen=True):
    """The first worker describes the model to train, once for each shard. The values of the chunks follow as
    SetChunk.

    `layout` is a chunks.ChunkMap as MessagePack, `chunks` the ids that this shard holds, `optimizers` those
    of the param groups, in their order. `digest` names layout and optimizers: a worker with another digest is
    refused. At a site every worker sends a Setup, and `first` is the worker that brings the values, of this
    site or another. `number` counts this worker's set-ups, from 1: messages sent again belong to that set-up
    (0: to the next). `consumed` counts the samples of all workers that are in the values. `finite`: workers
    look for NaN and infinity before they push (`sync.nonfinite` is not "allow"), so that the shard refuses
    them. `codec`: how the payloads of Push are written (`sync.codec`). `dealing`: the settings by which data
    is dealt, by key, which are equal on all workers.
    """

    digest: Name
    layout: msgspec.Raw
    chunks: list[Count]
    optimizers: Annotated[list[OptimizerKind], Meta(max_length=4096)]
    hyperparameters: Hyperparameters
    consistency: Name  # "bsp", "ssp", "asp"
    slack: Count
    workers: Count
    shards: Count
    steps: Count = 0  # iterations made before, by the checkpoint that the values come from
    first: Count = 0
    number: Count = 0
    staleness: Name = "weight"  # asynchronous modes: what to scale of a stale contribution; "rate", "none"
    compensation: Annotated[float, Meta(ge=0)] = 0.0  # of its delay: the factor of g * g * (w_now - w_then)
    pipeline: Count = 0  # the most iterations of a worker's own that are in flight while it computes the next
    consumed: Weight = 0.0
    finite: bool = False
    codec: Name = PLAIN_CODEC
    dealing: Dealing = {}


class SetChunk(Message, frozen=True):
    """The payload is a chunk's values (`key` empty), or one element-wise state of its optimizer, such as
    "exp_avg". `values` are, per slot, the states that are single numbers, such as "step". Of an optimizer
    that steps whole tensors, "packed" has all tensors, and `values` the rest (tensors/packing.py)."""

    chunk: Count
    key: Name = ""
    values: list[dict[str, Any]] = []
    number: Count = 0  # as in Setup


class Ready(Message, frozen=True):
    """A worker asks a shard whether it is set up as `digest` says. Answered by Ready, when it is. `number`,
    `codec` and `dealing` as the Setup's."""

    digest: Name
    number: Count = 0
    codec: Name = PLAIN_CODEC
    dealing: Dealing = {}


class Push(Message, frozen=True):
    """A chunk of this worker's contribution to `iteration`. Payload: gradients, by the run's codec, applied
    by the commit alone.

    `present[i]` says whether slot i has a gradient; missing ones are zeros. `chunks_in_all` is the number of
    chunks of this iteration that the worker sends to this shard. `pull`: also answer with the result of the
    iteration, as to a PullMean of it under bsp, else to a Pull at the clock after it.

    A group's members may each send a part: the payload is then the `share`-th of `shares` runs of the chunk,
    as `run_of` cuts it, and the answer is that run alone.

    `late`: parts of the payload that the link loses come with a later one, so they count as zeros now, not as
    absent. `lost` is set by the shard, from the link's report, for its journal and standby; a worker does not
    set it.

    `shortened`: the payload goes without its runs of zeros (exchange/zeros.py), as of sparse gradients. Then
    all of it must arrive. The shard puts the zeros back before it handles the Push, and records it without
    them.
    """

    incarnation: Count
    iteration: Count
    chunk: Count
    chunks_in_all: Count
    present: bytes  # one byte a slot
    pull: bool = False
    share: Count = 0
    shares: Annotated[int, Meta(ge=1, le=4096)] = 1
    late: bool = False
    lost: LostBlocks | None = None
    shortened: bool = False


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
    behind: Count = 0  # iterations of its own missing from the parameters it was computed with: in flight
    stand: WorkerStand | None = None  # BSP: where the worker waits for the mean
    basis: Name = KNOWN  # how certain the weight is (core/weighing.py)
    alike: Weight = 1.0  # its weight where all workers count equally: the number of workers in it
    members: Annotated[list[Count], Meta(max_length=4096)] = []  # of a group: whose gradients it has
    more: bool = False  # BSP: the contributor has a further batch of its own data in this epoch
    speeds: Speeds = {}  # BSP, with `sync.shares` or `sync.memory_cap` auto: the reports of its workers
    optimizer: Count = 0  # asynchronous modes: the model's optimizer that steps, by its place in Setup
    # BSP: for each optimizer the weight of its gradients, where several models train as one; else empty
    weights: Annotated[list[Weight], Meta(max_length=4096)] = []
    ends: bool = (
        True  # BSP: newcomers may enter with the next iteration: no pass of the script's loop is broken
    )


class Committed(Message, frozen=True):
    """The contribution is in the log.

    `workers`, in order, are the workers and groups whose contributions the iteration has (BSP), or else those
    that live. BSP: `members`, in order, are the workers whose gradients it has; empty where no group
    contributes, so that `workers` says it. `entering` are newcomers from the next iteration on; all workers
    that made this iteration hear of the same ones. `grouping`: the contributor knows of this grouping, under
    BSP every contributor does, and they move to it. `unlike` is a warning: another live contributor steps
    with other hyperparameters, and no schedule explains them. `alike`: all workers count alike in the mean.
    `counts` is a warning about this where their counts differ. `epochs` is a warning: contributors train
    batches of different epochs together. `more`: a contributor has a further batch of its own data.
    `speeds`: what the commits of this iteration have of them, together.
    """

    iteration: Count
    workers: Annotated[list[Count], Meta(max_length=4096)] = []
    members: Annotated[list[Count], Meta(max_length=4096)] = []
    entering: Annotated[list[Count], Meta(max_length=4096)] = []
    grouping: Count = 0
    alike: bool = False
    counts: Text = ""
    unlike: Text = ""
    epochs: Text = ""
    more: bool = False
    speeds: Speeds = {}


class Step(Message, frozen=True):
    """BSP, to the log: step with the mean of `iteration` times `scale`. All members must send equal values.

    `edited` are chunks whose gradients the script changed otherwise; the live member of the lowest rank has
    sent them as Replace before. `unscaled` is the factor by which a GradScaler has divided the gradients.

    `optimizer` steps alone, by its place in Setup. `stays`: others of the model's optimizers may follow, with
    the same mean: their Steps are of the next iterations, which nobody commits.
    """

    incarnation: Count
    iteration: Count
    scale: float
    hyperparameters: Hyperparameters
    edited: list[Count] = []
    edits: Name = ""  # a digest of the edited chunks: equal from all
    accepted: bool = True  # False: leave this step out (NaN, policy "skip")
    follows: bool = False  # from a site whose workers are gone: whatever the others say
    stand: WorkerStand | None = None  # of a worker that waits for the step; None: it goes on computing
    unscaled: float = 1.0
    optimizer: Count = 0
    stays: bool = False
    written: list[Count] = []  # chunks whose values the script has changed: they come as Replace before
    writes: Name = ""  # a digest of these values: equal from all


class Replace(Message, frozen=True):
    """BSP: the payload is the gradient that the script made of a chunk's mean; with `values`, the values that
    it has written into the chunk's parameters."""

    incarnation: Count
    iteration: Count
    chunk: Count
    present: bytes
    values: bool = False


class PullMean(Message, frozen=True):
    """BSP: answered by a Mean for each of the shard's chunks, once `iteration` is combined. `share` as
    Push's: of that run alone. `chunks`: for these alone; empty: for all."""

    incarnation: Count
    iteration: Count
    share: Count = 0
    shares: Annotated[int, Meta(ge=1, le=4096)] = 1
    chunks: list[Count] = []


class Mean(Message, frozen=True):
    """Payload: a chunk's mean gradient; `present`: where any worker had one; `weight`, `samples`: sums.
    `lost`: what was lost of the asker's own contribution to it, of this run; None: nothing. `shortened`: the
    payload goes without its runs of zeros, as a Push's may."""

    iteration: Count
    chunk: Count
    present: bytes
    weight: float
    samples: float
    share: Count = 0  # and `shares`: the run that this is of the chunk, as Push's
    shares: Annotated[int, Meta(ge=1, le=4096)] = 1
    lost: LostBlocks | None = None
    shortened: bool = False


class Pull(Message, frozen=True):
    """Answered by Parameters for each of the shard's chunks, once a worker that has committed `clock`
    iterations may begin the next by the rules of the run's consistency. `newest`: at a site, those that the
    global shards have after the latest meeting. `share` as Push's: of that run alone. `chunks`: for these
    alone; empty: for all."""

    incarnation: Count
    clock: Count
    newest: bool = False
    share: Count = 0
    shares: Annotated[int, Meta(ge=1, le=4096)] = 1
    chunks: list[Count] = []


class Parameters(Message, frozen=True):
    """The payload is a chunk's parameters; `version` counts the chunk's updates.

    `staleness` is the number of global iterations by which the worker's own contribution was late when
    applied (asynchronous modes). `asked` is the clock that the pull named; `clock` may be later. In these
    modes `lost` is the lost part of the asker's own contribution to iteration `asked` - 1, of this run; None:
    nothing. `consumed` counts the samples of all workers that the log had counted by then, in this run and
    before it.
    """

    clock: Count
    chunk: Count
    version: Count
    staleness: float = 0.0
    share: Count = 0  # and `shares`: the run that this is of the chunk, as Push's
    shares: Annotated[int, Meta(ge=1, le=4096)] = 1
    asked: Count = 0
    lost: LostBlocks | None = None
    consumed: Weight = 0.0


class PullState(Message, frozen=True):
    """A request for a checkpoint: answered by State for each chunk and key, then StateEnd. With `words`
    only by messages without payload; with `chunk`, for that chunk alone."""

    incarnation: Count
    words: bool = False
    chunk: Annotated[int, Meta(ge=-1, lt=2**53)] = -1


class State(Message, frozen=True):
    """Payload: one element-wise state of a chunk's optimizer. With key "": no payload, only `values`, and
    the dtypes of what there is for each element, by key."""

    chunk: Count
    key: Name
    values: list[dict[str, Any]] = []
    kept: dict[Name, Name] = {}


class StateEnd(Message, frozen=True):
    """All State messages have been sent. `consumed` as in Parameters."""

    steps: Count
    consumed: Weight = 0.0


class Meet(Message, frozen=True):
    """To the log: a gathering of all live workers, the `number`-th. The payload is this worker's part."""

    incarnation: Count
    number: Count
    what: Text
    stand: WorkerStand | None = None


class Met(Message, frozen=True):
    """Everyone's parts, in order of `workers`: one payload, of which `sizes` are the parts'. `clock`: at a
    site, the iteration that its workers make next."""

    number: Count
    workers: list[Count]
    sizes: list[Count]
    clock: Count = 0


class Ends(Message, frozen=True):
    """To the log: this worker's script has left its session and comes to no further meeting.

    The answer is Ended, or Mismatch where another worker waits for this one in a call.
    """

    incarnation: Count
    stand: WorkerStand


class Ended(Message, frozen=True):
    """Answer to Ends: no worker waits for the sender."""


class Mismatch(Message, frozen=True):
    """From the log, to all workers: their scripts stand at inconsistent places, and the run ends.

    `line` names the places. `of_contributors`: the line names contributors of this log, which between sites
    are sites, by index.
    """

    line: Text
    of_contributors: bool = False


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
    """To the log or the hub, after a deadline has passed: a request for the members that it waits for.
    Answered by Missing."""


class Missing(Message, frozen=True):
    """The members that the log or the hub waits for, and on what, a line each; empty if it waits for none."""

    lines: Annotated[list[Text], Meta(max_length=8192)]


def run_of(extent: int, share: int, shares: int) -> tuple[int, int]:
    """Return the begin and end of the `share`-th of `shares` runs of `extent` elements. Runs are equal,
    and as long as needed; the last may be shorter, or empty."""
    size = -(-extent // shares)
    return min(extent, share * size), min(extent, (share + 1) * size)
