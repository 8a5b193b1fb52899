"""The table of needs: every combination of choices that Atoll refuses, each with its reason and a way out.

A row's cell says when the row applies; its reason is what the user reads, in one sentence. Whoever learns of
a choice checks the rows of that moment. docs/reference/combinations.md is made from this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from atoll.axes.choices import Choices, choices_of
from atoll.axes.conditions import Above, Changed, Condition, Given, Is, IsNot, Missing, NoDivisor
from atoll.core.config import GROUPED, PLAIN_CODEC, SERVED, STRATEGIES, Config
from atoll.core.errors import ConfigError, PrepareError, UserError

# Moment of a row's check: as a configuration is read; before `atoll run` starts anything; as `atoll hub`
# starts; as a worker joins its run; in `session.prepare`; in a later call of the script.
Moment: TypeAlias = Literal["configuration", "launch", "hub", "join", "prepare", "call"]


@dataclass(frozen=True)
class Need:
    """One row: choices that cannot be had together.

    Args:
        name: of the row, for tests and links.
        moments: at which the row is checked.
        cell: by the choice's name, the condition on it. The row applies where all conditions hold.
        reason: what is wrong, and what to do; `{name}` stands for what was chosen.
        error: what is raised.
    """

    name: str
    moments: tuple[Moment, ...]
    cell: Mapping[str, Condition]
    reason: str
    error: type[UserError] = ConfigError

    def applies(self, choices: Choices) -> bool:
        """True where the run's choices are those of the cell."""
        return all(condition.holds(name, choices) for name, condition in self.cell.items())


# Keys of [sync] for the exchange of workers at shards, or of nodes without shards.
_OF_SERVED = ("consistency", "slack", "lazy", "uplink", "staleness", "compensation", "pipeline")
_OF_PEERS = ("stale_max", "overlay", "round_timeout", "backoff")
LOSSY_DTYPES = ("bfloat16", "float16", "float32", "float64")  # ltp may lose parts of these
_IN_TIERS = "under strategy {run.strategy!r} with budgets of memory: "


def _rows() -> Iterator[Need]:
    configuration: tuple[Moment, ...] = ("configuration",)
    for key in _OF_SERVED:
        yield Need(
            f"peers-{key}",
            configuration,
            {"run.strategy": Is("peers"), f"sync.{key}": Changed()},
            f"sync.{key} is for workers of a parameter server, and strategy 'peers' has none: leave it "
            "out; sync.stale_max says how far nodes may be ahead",
        )
    for key in _OF_PEERS:
        yield Need(
            f"only-peers-{key.replace('_', '-')}",
            configuration,
            {"run.strategy": IsNot("peers"), f"sync.{key}": Changed()},
            f"sync.{key} is of strategy 'peers', and run.strategy is {{run.strategy!r}}: leave it out, or "
            "set run.strategy to peers",
        )
    yield Need(
        "pipeline-bsp",
        configuration,
        {"sync.pipeline": Given(), "sync.consistency": Is("bsp")},
        "sync.pipeline = 1 has a step begin before the one before it is made, which sync.consistency bsp "
        "forbids: set it to asp or ssp, or sync.pipeline to 0",
    )
    yield Need(
        "pipeline-sites",
        configuration,
        {"sync.pipeline": Given(), "run.sites": Given()},
        "sync.pipeline = 1 is not for run.sites: a site's workers make each step together; set sync.pipeline "
        "to 0, or leave out run.sites",
    )
    yield Need(
        "pipeline-lazy",
        configuration,
        {"sync.pipeline": Given(), "sync.lazy": Is(True)},
        "sync.pipeline = 1 and sync.lazy are two ways not to wait in step(): set one of them alone",
    )
    yield Need(
        "compensation-bsp",
        configuration,
        {"sync.compensation": Given(), "sync.consistency": Is("bsp")},
        "sync.compensation makes up for delay, of which sync.consistency bsp has none: set it to asp or ssp, "
        "or sync.compensation to 0",
    )
    yield from _of_links()
    yield from _of_launches()
    yield from _of_hubs()
    yield from _of_joining()
    yield from _of_budgets()
    yield from _of_models()
    yield from _of_calls()


def _of_links() -> Iterator[Need]:
    configuration: tuple[Moment, ...] = ("configuration",)
    yield Need(
        "peers-lossy",
        configuration,
        {"run.strategy": Is("peers"), "link.lossy": Is(True)},
        "strategy 'peers' keeps nodes equal to the bit, so nothing may be lost between them: set "
        "link.reliable to true with link.transport 'ltp', or link.transport to tcp",
    )
    yield Need(
        "ltp-ring",
        configuration,
        {"link.transport": Is("ltp"), "run.strategy": IsNot(*SERVED, "peers")},
        "link.transport 'ltp' is the way to the shards of a parameter server, which strategy "
        f"{{run.strategy!r}} has not: set run.strategy to {' or '.join(SERVED)}, or link.transport to tcp",
    )
    yield Need(
        "codec-ring",
        configuration,
        {"sync.codec": IsNot(PLAIN_CODEC), "run.strategy": Is("ring", "hierarchical")},
        "sync.codec {sync.codec!r} is how gradients are written for shards and other nodes, and strategy "
        "{run.strategy!r} has none: a ring sums gradients on their way, in their own dtype; set run.strategy "
        f"to server, ps-hra or peers, or sync.codec to {PLAIN_CODEC}",
    )
    yield Need(
        "codec-fill",
        configuration,
        {"sync.codec": IsNot(PLAIN_CODEC), "link.lossy": Is(True), "link.fill": IsNot("zero")},
        "link.fill {link.fill!r} puts other numbers where some are lost, and sync.codec {sync.codec!r} "
        f"writes none that the link knows: set link.fill to zero, or sync.codec to {PLAIN_CODEC}",
    )
    yield Need(
        "target-above-fill",
        configuration,
        {"link.target_loss": Above("link.fill_above")},
        "link.target_loss = {link.target_loss:g} is above link.fill_above = {link.fill_above:g}: what is "
        "aimed at must be borne; set link.target_loss lower, or link.fill_above higher",
    )
    yield Need(
        "rescale-feedback",
        configuration,
        {"link.fill": Is("rescale"), "link.feedback": Is(True), "link.reliable": Is(False)},
        "link.fill 'rescale' makes up for what was lost, and so does link.feedback: both together count it "
        "twice; set link.fill to zero, or link.feedback to false",
    )
    yield Need(
        "last-feedback",
        configuration,
        {"link.fill": Is("last"), "link.feedback": Is(True), "link.reliable": Is(False)},
        "link.fill 'last' puts an old value where one is lost, and link.feedback would have to know which, "
        "through every restart: set link.fill to zero, or link.feedback to false",
    )


def _of_launches() -> Iterator[Need]:
    launch: tuple[Moment, ...] = ("launch",)
    yield Need(
        "restarts-ring",
        launch,
        {"run.restarts": Given(), "run.strategy": IsNot(*SERVED, "peers"), "run.elastic": Is(False)},
        "run.restarts: {run.restarts} restarts of a worker go with run.elastic = true (or strategy "
        "'server'), where each worker is a launch of its own",
        UserError,
    )
    yield Need(
        "replicas-unserved",
        launch,
        {"server.replicas": Is(2), "run.strategy": IsNot(*SERVED)},
        "server.replicas (--replicas): {server.replicas} processes for each shard go with run.strategy "
        "'server' or 'ps-hra', not {run.strategy!r}",
        UserError,
    )
    yield Need(
        "sites-unserved",
        launch,
        {"run.sites": Given(), "run.strategy": IsNot("server")},
        "run.sites: {run.sites} sites go with run.strategy 'server', not {run.strategy!r}",
        UserError,
    )
    yield Need(
        "replicas-sites",
        launch,
        {"server.replicas": Is(2), "run.sites": Given()},
        "server.replicas (--replicas): {server.replicas} processes for each shard do not go with run.sites: "
        "sites' shards have no standby yet; set server.replicas to 1, or leave out run.sites",
        UserError,
    )
    yield Need(
        "sites-workers",
        launch,
        {"run.sites": Above("run.workers")},
        "run.sites: {run.sites} sites for {run.workers} workers: each has at least one, so give at most "
        "{run.workers}",
        UserError,
    )
    yield Need(
        "groups-ungrouped",
        launch,
        {"groups.count": Given(), "run.strategy": Is("ring", "server")},
        "groups.count (--groups): {groups.count} groups go with run.strategy "
        f"{', '.join(map(repr, GROUPED))} or 'peers', not {{run.strategy!r}}",
        UserError,
    )
    yield Need(
        "groups-workers",
        launch,
        {"run.strategy": IsNot("peers"), "groups.count": Above("run.workers")},
        "groups.count (--groups): {groups.count} groups for {workers}: each has at least one, so give 1 to "
        "{run.workers}, or leave it out for as many as are best",
    )
    yield Need(
        "nodes-workers",
        launch,
        {"run.strategy": Is("peers"), "groups.count": NoDivisor("run.workers")},
        "groups.count (--groups): {workers} cannot be {groups.count} nodes with as many devices each: under "
        "strategy 'peers' give a number that divides {run.workers}, or leave it out for nodes of one device",
    )


def _of_hubs() -> Iterator[Need]:
    hub: tuple[Moment, ...] = ("hub",)
    yield Need(
        "hub-sites-ring",
        hub,
        {"--site": Given(), "--shards": Missing()},
        "--site: what the sites send goes to shards, and --shards is 0; give --shards M, from 1, or leave "
        "out --site",
        UserError,
    )
    yield Need(
        "hub-replicas-sites",
        hub,
        {"--replicas": Is(2), "--site": Given()},
        "--replicas {--replicas} does not go with --site: sites' shards have no standby yet; leave out one "
        "of the two",
        UserError,
    )
    yield Need(
        "hub-replicas-ring",
        hub,
        {"--replicas": Is(2), "--shards": Missing()},
        "--replicas {--replicas}: a ring has no shards; give --shards M, from 1",
        UserError,
    )
    yield Need(
        "hub-groups-ring",
        hub,
        {"--groups": IsNot(None), "--shards": Missing()},
        "--groups: groups meet at a parameter server; give --shards M, from 1",
        UserError,
    )
    yield Need(
        "hub-groups-sites",
        hub,
        {"--groups": IsNot(None), "--site": Given()},
        "--groups does not go with --site: a site's workers are a group already; leave out one of the two",
        UserError,
    )


def _of_joining() -> Iterator[Need]:
    join: tuple[Moment, ...] = ("join",)
    yield Need(
        "served-no-hub",
        join,
        {"run.strategy": Is(*SERVED), "hub": Is("")},
        "strategy {run.strategy!r} needs a hub, and ATOLL_HUB is not set; start the run with `atoll run "
        "--strategy {run.strategy}`, or set ATOLL_HUB=tcp://HOST:PORT (docs/several-machines.md)",
    )
    yield Need(
        "second-session",
        join,
        {"run.strategy": Is(*SERVED), "second session": Is(True)},
        "{line}: a second session in one run, and under strategy {run.strategy!r} the shards keep the model, "
        "the optimizer and the data of the first; start one `atoll run` for each training "
        "(docs/how-to/cross-validation.md), or set run.strategy to ring or peers",
    )
    yield Need(
        "hierarchical-shards",
        join,
        {"run.strategy": Is("hierarchical"), "shards": Given()},
        "strategy 'hierarchical' is a ring's, and the run at {hub} has shards: set run.strategy to server, "
        "or start the hub with --shards 0",
    )
    yield Need(
        "served-no-shards",
        join,
        {"run.strategy": Is(*SERVED), "shards": Is(0)},
        "strategy {run.strategy!r} needs shards, and the run at {hub} has none: its workers are a ring; set "
        "run.strategy to ring, or start the hub with --shards 1 or more",
    )
    yield Need(
        "peers-shards",
        join,
        {"run.strategy": Is("peers"), "shards": Given()},
        "strategy 'peers' has no server, and the run at {hub} has shards: set run.strategy to server, or "
        "start the hub with --shards 0",
    )
    yield Need(
        "outside-shards",
        join,
        {"run.strategy": IsNot(*STRATEGIES), "shards": Given()},
        "strategy {run.strategy!r} is another package's, and has no server; the run at {hub} has shards: "
        "start the hub with --shards 0, or set run.strategy to server",
    )
    yield Need(
        "peers-groups-hub",
        join,
        {"run.strategy": Is("peers"), "groups.count": Given(), "nodes differ": Is(True)},
        "groups.count is {groups.count}, and the hub at {hub} introduces {nodes} nodes: by a hub each launch "
        "is a node, so leave it out",
    )
    yield Need(
        "peers-machines",
        join,
        {"run.strategy": Is("peers"), "several machines": Is(True)},
        "a {what} of {devices} devices, of {world} workers in all, {local} of which are on this machine "
        "(LOCAL_WORLD_SIZE): strategy 'peers' has a node's devices share one machine's memory; {way out}",
    )
    yield Need(
        "groups-sites",
        join,
        {"run.strategy": Is("ps-hra"), "sites": Given()},
        "strategy 'ps-hra' makes groups of its own, and the run has sites ({sites}); use strategy 'server', "
        "or start the hub without --site",
    )
    yield Need(
        "groups-lazy",
        join,
        {"run.strategy": Is("ps-hra"), "shards": Given(), "sync.lazy": Is(True)},
        "sync.lazy is of strategy 'server': a group of 'ps-hra' takes its parameters together; set it to "
        "false",
    )


def _of_budgets() -> Iterator[Need]:
    """`store` is `resident`, `tiered`, `sharded` or `lent`; see `cells.py`."""
    prepare: tuple[Moment, ...] = ("prepare",)
    for group in ("", " in its group"):
        yield Need(
            "sharded-elastic" + "-grouped" * bool(group),
            prepare,
            {
                "store": Is("sharded"),
                "run.elastic": Is(True),
                "run.strategy": Is("hierarchical") if group else IsNot("hierarchical"),
            },
            "run.elastic lets a run go on without a worker that has died, and under budgets of memory each "
            f"holds the only copy of its part of the model{group}; leave out run.elastic, or the budgets",
            UserError,
        )
    yield Need(
        "sharded-late",
        prepare,
        {"store": Is("sharded"), "late": Is(True)},
        "this worker comes late, and under budgets of memory those who were here at first hold the model "
        "between them, with no copy for it; start the run again with all, from its last checkpoint",
        UserError,
    )
    for key, condition, why in (
        ("sync.lazy", Is(True), "sync.lazy stages a second copy of the parameters; leave it false"),
        (
            "sync.pipeline",
            Given(),
            "sync.pipeline keeps a second copy of the gradients in flight; leave it 0",
        ),
        (
            "link.transport",
            IsNot("tcp"),
            "link.transport {link.transport!r} holds back what is lost; leave it 'tcp'",
        ),
        (
            "sync.codec",
            IsNot(PLAIN_CODEC),
            "sync.codec {sync.codec!r} holds back what it drops, which takes as much memory as the gradient; "
            f"leave it {PLAIN_CODEC!r}",
        ),
        (
            "site",
            Given(),
            "sites with shards of their own (run.sites) are not for workers with budgets; leave them out",
        ),
    ):
        yield Need(
            f"tiered-{key.rpartition('.')[2]}",
            prepare,
            {"store": Is("tiered"), "sync": Is("bsp", "ssp", "asp"), key: condition},
            f"{_IN_TIERS}{why}, or leave out [memory]",
            UserError,
        )
    for key, condition in (("master", Is(True)), ("step", IsNot("auto", "host"))):
        yield Need(
            f"tiered-{key}",
            prepare,
            {"store": Is("tiered"), "sync": Is("bsp", "ssp", "asp"), f"memory.{key}": condition},
            f"memory.{key}: under strategy {{run.strategy!r}} the shards make the steps; leave memory.{key} "
            "out",
            UserError,
        )
    yield Need(
        "sharded-served",
        ("configuration", "prepare"),
        {"run.strategy": Is("ps-hra"), "memory.sharding": IsNot("auto", None)},
        "memory.sharding = {memory.sharding!r} has a group's workers hold one model between them, and under "
        "strategy 'ps-hra' each must be able to hold all of it: it trains alone until its group comes "
        "together, and again when the others are lost; leave memory.sharding out",
    )
    for key, condition, why in (
        ("disk", Given(), "the CPU side keeps all in host memory, and has no disk below it"),
        ("master", Is(True), "the CPU side steps parameters in their own precision"),
        ("step", IsNot("auto", "host"), "the CPU side makes the optimizer's steps"),
        ("sharding", IsNot("auto"), "a node's devices read whole chunks from its CPU side"),
    ):
        yield Need(
            f"lent-{key}",
            prepare,
            {"store": Is("lent"), f"memory.{key}": condition},
            f"memory.{key}: strategy 'peers' has none: {why}; leave it out",
        )
    yield Need(
        "sharded-share",
        prepare,
        {"store": Is("sharded"), "step share": Is(True)},
        "memory.step: a share is for one worker; members step in host memory what they own",
        UserError,
    )
    yield Need(
        "over-step",
        prepare,
        {"store": Is("sharded"), "over": Given(), "memory.step": Is("device")},
        "memory.step: with atoll.memory.over chunks are stepped in host memory; leave it at auto, or write "
        "host",
    )


def _of_models() -> Iterator[Need]:
    """Facts of the model and the optimizer: names of parameters and modules, dtypes, classes."""
    prepare: tuple[Moment, ...] = ("prepare",)
    way_out = "give session.prepare one optimizer with a param group for each"
    yield Need(
        "several-optimizers",
        prepare,
        {"sync": Is("peers", "replicas"), "several optimizers": Is(True)},
        f"strategy {{run.strategy!r}} steps a model by one optimizer: {way_out}, or set run.strategy to "
        "ring, hierarchical or server",
        PrepareError,
    )
    served = {"several optimizers": Is(True), "sync": Is("bsp", "ssp", "asp")}
    more: tuple[tuple[str, dict[str, Condition], str, str], ...] = (
        (
            "groups",
            {"run.strategy": Is("ps-hra"), "sync.consistency": IsNot("bsp")},
            "under strategy 'ps-hra' with sync.consistency {sync.consistency!r} a member that waits for "
            "others cannot tell which optimizer they step",
            "set sync.consistency to bsp, or run.strategy to server",
        ),
        ("sites", {"site": Given()}, "a site's shard steps a model by one optimizer", "leave out run.sites"),
        (
            "lazy",
            {"sync.lazy": Is(True)},
            "with sync.lazy new parameters come at the next forward, after all of several optimizers' steps",
            "set sync.lazy to false",
        ),
        (
            "pipeline",
            {"sync.pipeline": Given()},
            "with sync.pipeline a step is in flight when the next of several optimizers steps",
            "set sync.pipeline to 0",
        ),
    )
    for name, cell, why, instead in more:
        yield Need(
            f"several-optimizers-{name}",
            prepare,
            {**served, **cell},
            f"{why}: {way_out}, or {instead}",
            PrepareError,
        )
    before = "make the change before session.prepare, or prepare the changed model in another run"
    yield Need(
        "prepared-again",
        prepare,
        {"sync": Is("peers", "replicas"), "again": Is(True)},
        "strategy {run.strategy!r} takes a model as it is when session.prepare first sees it, and not once "
        f"more after it has changed: {before}, or set run.strategy to ring, hierarchical, server or ps-hra",
        PrepareError,
    )
    yield Need(
        "prepared-again-sites",
        prepare,
        {"site": Given(), "again": Is(True)},
        "a site's shard takes a model as it is when session.prepare first sees it, and not once more after "
        f"it has changed: {before}, or leave out run.sites",
        PrepareError,
    )
    for name, held, condition, instead in (
        ("lossy", "the link", {"link.lossy": Is(True)}, "set link.transport to tcp"),
        ("codec", "sync.codec", {"sync.codec": IsNot(PLAIN_CODEC)}, f"set sync.codec to {PLAIN_CODEC}"),
    ):
        chosen: dict[str, Condition] = {"sync": Is("bsp", "ssp", "asp"), "again": Is(True), **condition}
        why = f"what {held} has held back of gradients does not fit a changed model"
        yield Need(f"prepared-again-{name}", prepare, chosen, f"{why}: {before}, or {instead}", PrepareError)
    yield Need(
        "memory-cap-tiers",
        prepare,
        {"sync.memory_cap": Is("auto"), "store": IsNot("resident", None)},
        "sync.memory_cap auto computes a batch again that did not fit, and under budgets of memory a forward "
        "moves what it uses: give sync.memory_cap a number, or leave the budgets out",
    )
    yield Need(
        "shares-sites",
        prepare,
        {"sync.shares": Is("auto"), "sync": Is("bsp"), "site": Given()},
        "sync.shares auto needs the speeds of all workers, and a site's shard hears of its own alone: give "
        "each worker's part in its place, or set sync.shares to even",
    )
    yield Need(
        "second-model",
        prepare,
        {"sync": Is("peers", "replicas"), "models": Given(), "again": IsNot(True)},
        "strategy {run.strategy!r} trains one model in a session; put both into one nn.ModuleList and "
        "prepare that, with one optimizer, or set run.strategy to ring, hierarchical or server",
        PrepareError,
    )
    for name, held, condition, instead in (
        ("lossy", "the link", {"link.lossy": Is(True)}, "set link.transport to tcp"),
        ("codec", "sync.codec", {"sync.codec": IsNot(PLAIN_CODEC)}, f"set sync.codec to {PLAIN_CODEC}"),
    ):
        several: dict[str, Condition] = {"sync": Is("bsp", "ssp", "asp"), "several models": Is(True)}
        yield Need(
            f"models-{name}",
            prepare,
            {**several, **condition},
            f"what {held} has held back of gradients goes by one weight of a worker, and several models have "
            "one each: put them into one nn.ModuleList and prepare that, with a list of their optimizers, or "
            f"{instead}",
            PrepareError,
        )
    as_one = "under strategy {run.strategy!r} all models of a session train as one, "
    yield Need(
        "models-budgets",
        prepare,
        {"sync": Is("bsp", "ssp", "asp"), "several budgets": Is(True)},
        f"session.prepare(memory=...): {as_one}under one set of budgets: give each call the same, or the "
        "first alone",
        PrepareError,
    )
    yield Need(
        "models-schedule",
        ("prepare", "call"),
        {"sync": Is("bsp", "ssp", "asp"), "scheduled": Is(True), "several models": Is(True)},
        f"session.schedule: {as_one}and samples are counted of all together: step each scheduler in the "
        "script, or set run.strategy to ring or hierarchical",
        UserError,
    )
    over = "atoll.memory.over has given {over!r} the workers {ranks}, "
    yield Need(
        "over-alone",
        prepare,
        {"over": Given(), "fit": Is("alone")},
        over + "and there are no others here: fit it with members, in a session of strategy ring",
        PrepareError,
    )
    yield Need(
        "over-replicas",
        prepare,
        {"over": Given(), "fit": Is("replicas")},
        over + "and here each group of workers holds a replica of the whole model; leave it out, or choose "
        "strategy 'ring'",
        PrepareError,
    )
    yield Need(
        "over-unsharded",
        prepare,
        {"over": Given(), "store": IsNot("sharded", None)},
        over + "and takes a ring's workers under budgets of memory: strategy 'ring', [memory]",
        PrepareError,
    )
    what = "module {module!r} is an nn.SyncBatchNorm, "
    yield Need(
        "sync-norm-cpu",
        prepare,
        {"module": Given(), "device": Is("cpu"), "joint": IsNot(True)},
        what + "which on a CPU takes strategy 'ring' or 'hierarchical' without run.elastic: use these, or "
        "nn.BatchNorm, whose statistics are those of each worker's own batch, or a norm that needs none of "
        "the batch (nn.GroupNorm, nn.LayerNorm)",
        PrepareError,
    )
    yield Need(
        "sync-norm-group",
        prepare,
        {"module": Given(), "process group": IsNot("whole"), "joint": IsNot(True)},
        what + "which works over a torch.distributed process group, and {process group}; call "
        'torch.distributed.init_process_group("nccl") after atoll.join and before session.prepare, or use '
        "nn.BatchNorm",
        PrepareError,
    )
    yield Need(
        "ltp-dtype",
        prepare,
        {"link.lossy": Is(True), "dtype": IsNot(*LOSSY_DTYPES, None)},
        "{parameter} is {dtype}, and link.transport 'ltp' may lose parts of "
        f"{', '.join(sorted(LOSSY_DTYPES))} alone: set link.reliable to true, or link.transport to tcp",
        PrepareError,
    )
    yield Need(
        "ltp-rescale-dtype",
        prepare,
        {"link.lossy": Is(True), "link.fill": Is("rescale"), "dtype": Is("bfloat16")},
        "{parameter} is bfloat16, which link.fill 'rescale' cannot multiply on its way: set link.fill to "
        "zero",
        PrepareError,
    )
    yield Need(
        "optimizer-closure",
        prepare,
        {"closure": Is("needed"), "sync": Is("bsp", "ssp", "asp", "peers", "replicas")},
        "optimizer {optimizer} calls the script's closure several times in a step, and strategy "
        "{run.strategy!r} has no mean within a step; use strategy ring or hierarchical, or an optimizer "
        "whose step() needs no closure, such as torch.optim.AdamW or SGD",
        PrepareError,
    )
    yield Need(
        "optimizer-closure-in-tiers",
        prepare,
        {"closure": Is("needed"), "store": Is("tiered", "sharded", "lent")},
        "optimizer {optimizer} calls the script's closure several times in a step, and with budgets of "
        "memory a step is made chunk by chunk; leave out the budgets, or use an optimizer whose step() needs "
        "no closure, such as torch.optim.AdamW or SGD",
        PrepareError,
    )
    yield Need(
        "optimizer-closure-skip",
        prepare,
        {"closure": Is("needed"), "sync.nonfinite": Is("skip")},
        "optimizer {optimizer} calls the script's closure several times in a step, and sync.nonfinite 'skip' "
        "cannot leave out a part of it; set sync.nonfinite to stop or allow",
        PrepareError,
    )
    coupled = "optimizer {optimizer} looks at the gradients of all parameters in a step, as clipping by their"
    coupled += " norm does, and "
    own = "or take that out of it (max_grad_norm=0, say) and call session.clip_grad_norm_ before the step"
    yield Need(
        "optimizer-coupled",
        prepare,
        {"coupled": Is(True), "sync": Is("bsp", "ssp", "asp", "peers")},
        coupled + "strategy {run.strategy!r} steps them apart; use strategy ring or hierarchical, " + own,
        PrepareError,
    )
    yield Need(
        "optimizer-coupled-in-tiers",
        prepare,
        {"coupled": Is(True), "store": Is("tiered", "sharded", "lent")},
        coupled + "with budgets of memory a step is made chunk by chunk; leave out the budgets, " + own,
        PrepareError,
    )
    yield Need(
        "optimizer-data",
        prepare,
        {"moves": Is(True)},
        "optimizer {optimizer} cannot step parameters that lie in chunks: {why}",
        PrepareError,
    )
    yield Need(
        "optimizer-by-tensor",
        prepare,
        {"unit": Is("tensor"), "store": Is("sharded"), "memory.sharding": Is("symmetric")},
        "optimizer {optimizer} is not element-wise ({why}), and memory.sharding 'symmetric' cuts tensors "
        "into parts; leave memory.sharding out, or set it to 'asymmetric'",
        PrepareError,
    )
    yield Need(
        "optimizer-complex-elsewhere",
        prepare,
        {"unit": Is("tensor"), "complex": Is(True), "sync": Is("bsp", "ssp", "asp", "peers")},
        "optimizer {optimizer} is not element-wise ({why}), and strategy {run.strategy!r} steps complex "
        "parameters by their real views; use strategy ring or hierarchical, or torch.optim.AdamW or SGD",
        PrepareError,
    )
    moved = (
        "optimizer {optimizer} moves parameters by its state in train() and eval(), and strategy "
        "{run.strategy!r} "
    )
    yield Need(
        "optimizer-modes",
        prepare,
        {"modes": Is(True), "sync": Is("ssp", "asp")},
        moved + "takes parameters that a script has written only where all workers make each step together: "
        "set sync.consistency to bsp, or use strategy ring or hierarchical",
        PrepareError,
    )
    yield Need(
        "optimizer-modes-peers",
        prepare,
        {"modes": Is(True), "sync": Is("peers")},
        moved + "takes no parameters that a script has written; use strategy ring or hierarchical, server "
        "with sync.consistency bsp, or an optimizer without them, such as torch.optim.AdamW or SGD",
        PrepareError,
    )
    yield Need(
        "optimizer-modes-lazy",
        prepare,
        {"modes": Is(True), "sync": Is("bsp"), "sync.lazy": Is(True)},
        moved + "takes no parameters that a script has written with sync.lazy: set it to false",
        PrepareError,
    )
    yield Need(
        "optimizer-modes-sites",
        prepare,
        {"modes": Is(True), "sync": Is("bsp"), "site": Given()},
        moved + "takes no parameters that a script has written where sites have shards of their own: leave "
        "out run.sites",
        PrepareError,
    )
    yield Need(
        "step-budgets",
        prepare,
        {"step": Given(), "store": IsNot("resident")},
        "session.prepare(step={step!r}): with budgets of memory a trial decides the unit of steps; leave out "
        "step, or the budgets",
        UserError,
    )
    yield from _of_bf16()
    yield Need(
        "optimizer-sparse-elsewhere",
        prepare,
        {"sync": Is("bsp", "ssp", "asp", "peers"), "sparse": Given()},
        "optimizer {optimizer} cannot step the dense sums of sparse gradients ({sparse}), which strategy "
        "{run.strategy!r} makes; use strategy ring or hierarchical, or torch.optim.SGD or Adagrad",
        PrepareError,
    )
    yield Need(
        "optimizer-sparse-in-tiers",
        prepare,
        {"sync": Is("local", "replicas"), "store": Is("tiered", "sharded"), "sparse": Given()},
        "optimizer {optimizer} cannot step the dense form of sparse gradients ({sparse}), which budgets of "
        "memory give it; leave out the budgets, or use torch.optim.SGD or Adagrad",
        PrepareError,
    )
    yield Need(
        "optimizer-unknown-elsewhere",
        prepare,
        {"steps": Is("home"), "defined": Given()},
        "strategy {run.strategy!r} steps the optimizer in a process of its own, which cannot import "
        "{optimizer}: it is defined {defined}; put it into a module of its own, beside the script, or into "
        'the script with all training under `if __name__ == "__main__":`',
        PrepareError,
    )
    yield Need(
        "average-elsewhere",
        prepare,
        {"average": Is(True), "sync": Is("bsp", "ssp", "asp", "peers")},
        "session.average: strategy {run.strategy!r} steps the optimizer in a process of its own, which keeps "
        "no average; use torch.optim.swa_utils.AveragedModel(model) and session.register(average=...)",
        PrepareError,
    )
    yield Need(
        "attribute-elsewhere",
        ("prepare", "call"),
        {"steps": Is("home"), "attribute": Given()},
        "optimizer.{attribute} is {value!r} here, and {former!r} in the process that makes the optimizer's "
        "steps, which knows its class, its arguments and its param groups; keep it in the param groups, and "
        "let step() read it there, or use strategy ring or hierarchical",
        UserError,
    )
    yield Need(
        "settings-elsewhere",
        ("prepare", "call"),
        {"steps": Is("home"), "setting": Given()},
        "{setting} of the optimizer is a {kind}, and cannot be sent to the process that makes the "
        "optimizer's steps; give numbers, text, None, or lists of these, or keep it outside of the param "
        "groups",
        UserError,
    )


def _of_bf16() -> Iterator[Need]:
    """Steps of bfloat16 parameters in float32."""
    what = "session.prepare(bf16={bf16!r}): "
    rows: tuple[tuple[str, dict[str, Condition], str], ...] = (
        (
            "elsewhere",
            {"sync": Is("bsp", "ssp", "asp", "peers")},
            "strategy {run.strategy!r} steps the optimizer in a process of its own, in the parameters' own "
            "precision; use strategy ring or hierarchical, or leave bf16 out",
        ),
        (
            "replicas",
            {"sync": Is("replicas")},
            "strategy {run.strategy!r} exchanges values in the parameters' own precision; use strategy ring "
            "or hierarchical, or leave bf16 out",
        ),
        (
            "in-tiers",
            {"store": IsNot("resident", None)},
            "budgets of memory have an option of their own; set memory.master to true for float32 copies, or "
            "leave the budgets out",
        ),
        (
            "closure",
            {"closure": Is("needed")},
            "optimizer {optimizer} calls the script's closure within a step, when the float32 values are not "
            "rounded yet; leave bf16 out, or use an optimizer whose step() needs no closure, such as "
            "torch.optim.AdamW or SGD",
        ),
        (
            "coupled",
            {"coupled": Is(True)},
            "optimizer {optimizer} looks at the gradients of all parameters in a step, and these step one by "
            "one; leave bf16 out, or use an optimizer that steps each parameter by its own gradient, such as "
            "torch.optim.AdamW or SGD",
        ),
        (
            "modes",
            {"modes": Is(True)},
            "optimizer {optimizer} changes parameters by its state in train() and eval(), and its state is "
            "float32; leave bf16 out, or use an optimizer without them, such as torch.optim.AdamW or SGD",
        ),
    )
    for name, cell, why in rows:
        yield Need(f"bf16-{name}", ("prepare",), {"bf16": Given(), **cell}, what + why, PrepareError)


# By which a script puts an optimizer's state in the place of the one that lies elsewhere:
_LOADS = ("optimizer.load_state_dict", "a change of optimizer.state")


def _of_calls() -> Iterator[Need]:
    yield Need(
        "load-in-iteration",
        ("call",),
        {"call": Is(*_LOADS), "steps": Is("home"), "waits": Is(True)},
        "{call} between a backward and optimizer.step(): under strategy {run.strategy!r} another process "
        "makes the step, with the state as it was at the backward; put it before the forward, or after the "
        "step",
        UserError,
    )
    yield Need(
        "load-in-groups",
        ("call",),
        {"call": Is(*_LOADS, "session.load"), "grouped": Is(True)},
        "{call}: the workers are in groups already; put it before the loop, after session.prepare",
        UserError,
    )
    yield Need(
        "leased-drop-last",
        ("call",),
        {"call": Is("session.sampler"), "data": Is("leased"), "drop_last": Is(True)},
        "session.sampler: with leased data every sample counts; leave drop_last out",
        UserError,
    )
    rows: tuple[tuple[str, str], ...] = (
        (
            "gone",
            "a gradient of an earlier backward is used, and the nodes' mean of it was not asked for in time; "
            "use p.grad, or clone it, before the next backward and inside the session",
        ),
        (
            "sparse",
            "{name}.grad is used, and is sparse: strategy 'peers' shows a mean of dense gradients alone; set "
            "run.strategy to ring or hierarchical, or give the layer sparse=False",
        ),
        (
            "written",
            "{name}.grad was changed after its backward through another tensor over its memory (a view of "
            "p.grad or a flat buffer that was kept, say), and under strategy 'peers' that is this node's own "
            "gradient, not the mean; change p.grad itself, or take views of it anew after each backward; or "
            "set run.strategy to ring",
        ),
        (
            "missing",
            "p.grad is used after the backward of step {step}, and node {other} has no gradient of {name!r}, "
            "which another node has: strategy 'peers' shows a mean where all nodes have gradients of the "
            "same parameters; set run.strategy to ring, or use the parameter on every node",
        ),
        (
            "unlike",
            "p.grad is used, and the nodes' gradients are of unlike backwards: node {node} {one}; node "
            "{other} {its}; use p.grad after the same backward on every node, or on none",
        ),
        (
            "alone",
            "p.grad is used only after optimizer.step(), and not on every node: node {node} {one}; node "
            "{other} {its}; use it before optimizer.step(), or on every node",
        ),
        (
            "scaled",
            "p.grad was used before a GradScaler divided the gradients, and the mean was made for a scale of "
            "{used} in them, where the scaler divides by {divided}; call scaler.unscale_(optimizer) before "
            "p.grad is used, or begin the backward at scaler.scale(loss)",
        ),
        (
            "late",
            "a backward of step {step} ends after another node's script has used the mean of its gradients, "
            "from which this node's are missing; make the backward before the call (session.reduce, say) in "
            "which the others' gradients came, as they do",
        ),
        (
            "weightless",
            "the gradients of a batch of weight 0 were added to those of an earlier backward of the same "
            "step, and count with them; call optimizer.step() and optimizer.zero_grad() between the two, or "
            "leave out the backward of a batch that is to count nothing",
        ),
    )
    for name, why in rows:
        yield Need(
            f"gradients-{name}", ("call",), {"call": Is("p.grad"), "gradients": Is(name)}, why, UserError
        )
    own = {"call": Is("session.epoch_of"), "data": Is("own")}
    deal = "let session.sampler(dataset) deal the data"
    yield Need(
        "own-data-groups",
        ("call",),
        {**own, "group": Is("ring"), "sync": Is("ssp", "asp")},
        "session.epoch_of: under sync.consistency {sync.consistency} groups move between epochs of their "
        f"workers' own data; set sync.consistency to bsp, or {deal}",
        UserError,
    )
    yield Need(
        "own-data-sites",
        ("call",),
        {**own, "site": Given()},
        f"session.epoch_of: sites do not tell one another where their workers' own data ends; {deal}",
        UserError,
    )

    yield Need(
        "costs-not-together",
        ("call",),
        {"call": Is("session.batches"), "data": Is("leased", "nodes"), "cost": Is(True)},
        "session.batches: batches are dealt by cost where all workers make each step together (ring, "
        "hierarchical, or bsp at a server); leave cost out",
        UserError,
    )


TABLE: tuple[Need, ...] = tuple(_rows())


def refusal(moment: Moment, choices: Choices) -> Need | None:
    """Return the first row of this moment that applies to the run; None: the run may go on."""
    return next((row for row in TABLE if moment in row.moments and row.applies(choices)), None)


def check(moment: Moment, choices: Choices) -> None:
    """Raise the first row's error that applies at this moment, with its sentence."""
    if refusal(moment, choices) is not None:
        raise error_of(moment, choices)


def error_of(moment: Moment, choices: Choices) -> UserError:
    """Return the error of the row that refuses the run at this moment. Raises LookupError if none does."""
    row = refusal(moment, choices)
    if row is None:
        raise LookupError(f"no row of the table of needs refuses this at the moment {moment!r}")
    return row.error(choices.fill(row.reason))


def check_configuration(config: Config) -> None:
    """Raise ConfigError for keys that do not fit together, and for budgets without `device`."""
    check("configuration", choices_of(config))


def check_groups(count: int, workers: int) -> None:
    """Raise ConfigError if the workers cannot be put into `count` groups (0: as many as are best)."""
    check("launch", choices_of(_grouped("hierarchical", count, workers)))


def check_nodes(count: int, workers: int) -> None:
    """Raise ConfigError if the workers cannot be `count` nodes of equally many devices (0: each worker is
    a node)."""
    check("launch", choices_of(_grouped("peers", count, workers)))


def _grouped(strategy: Literal["hierarchical", "peers"], count: int, workers: int) -> Config:
    return Config().having(run={"strategy": strategy, "workers": workers}, groups={"count": count})
