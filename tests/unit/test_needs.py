"""The table of needs: every refusal of a combination has its sentence, is reached, and stands on its page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from atoll.axes.cells import CELLS, Cell, cell_of, choices_in, config_of, refusal_of
from atoll.axes.choices import Choices, choices_of, defaults
from atoll.axes.needs import LOSSY_DTYPES, TABLE, Moment, Need, check, refusal
from atoll.core.config import Config, load_config
from atoll.core.memory import Memory
from atoll.ltp.blocks import FLOATS
from generate import FACTS, HOW, page_of_cells

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "combinations.md"
SERVED = ["run.strategy=server"]
LTP = [*SERVED, "link.transport=ltp"]


def chosen(settings: list[str], memory: Memory | None = None, **facts: Any) -> Choices:
    """The choices of these settings; the facts' names have "_" for a space."""
    config = load_config(settings=settings, environment={})
    return choices_of(config, {name.replace("_", " "): value for name, value in facts.items()}, memory)


def under_budgets(strategy: str, settings: list[str] = [], late: bool = False, **given: Any) -> Choices:  # noqa: B006
    """The choices of a model that `session.prepare` is given with budgets."""
    config = load_config(settings=[f"run.strategy={strategy}", *settings], environment={})
    others: Any = {"ring": "local", "hierarchical": "local", "peers": "peers"}.get(strategy, "shards")
    facts = {"late": late, "site": given.pop("site", ""), "models": 0}
    memory = Memory(device="1GiB", **given)
    cell = cell_of(config, others, "solo" if strategy == "server" else "ring", memory)
    return choices_in(cell, config, facts, memory)


OVER = {"over": "expert.weight", "ranks": [0, 1]}
NORM = {"module": "1.norm"}
AT_HOME = {"steps": "home"}
OWN_DATA = {"call": "session.epoch_of", "data": "own"}
TIERED = {"store": "tiered", "link.transport": "tcp", "sync.codec": "float32", "memory.step": "auto"}
AGAIN = {"sync": "bsp", "run.strategy": "server", "again": True}
MODELS = {"sync": "asp", "run.strategy": "server", "several models": True}
SEVERAL = {"sync": "bsp", "run.strategy": "server", "several optimizers": True}
BY_TENSOR = {"unit": "tensor", "optimizer": "Muon", "why": "it came out different"}
# For each row: a run that the row refuses, and how its sentence begins and ends.
USE = {"call": "p.grad"}
PAIR = {
    "node": 0,
    "one": "uses it after 1 backward of step 3",
    "other": 1,
    "its": "does not use it, and is after 2 backwards of step 3",
}
EXAMPLES: dict[str, tuple[Choices, str, str]] = {
    "peers-consistency": (
        chosen(["run.strategy=peers", "sync.consistency=asp"]),
        "sync.consistency is for workers of a parameter server, and strategy 'peers' has none",
        "sync.stale_max says how far nodes may be ahead",
    ),
    "pipeline-bsp": (
        chosen([*SERVED, "sync.pipeline=1"]),
        "sync.pipeline = 1 has a step begin before the one before it is made, which sync.consistency bsp",
        "set it to asp or ssp, or sync.pipeline to 0",
    ),
    "pipeline-sites": (
        chosen([*SERVED, "sync.pipeline=1", "sync.consistency=asp", "run.sites=2"]),
        "sync.pipeline = 1 is not for run.sites: a site's workers make each step together",
        "set sync.pipeline to 0, or leave out run.sites",
    ),
    "pipeline-lazy": (
        chosen([*SERVED, "sync.pipeline=1", "sync.consistency=asp", "sync.lazy=true"]),
        "sync.pipeline = 1 and sync.lazy are two ways not to wait in step()",
        "set one of them alone",
    ),
    "compensation-bsp": (
        chosen([*SERVED, "sync.compensation=0.1"]),
        "sync.compensation makes up for delay, of which sync.consistency bsp has none",
        "set it to asp or ssp, or sync.compensation to 0",
    ),
    "peers-lossy": (
        chosen(["run.strategy=peers", "link.transport=ltp"]),
        "strategy 'peers' keeps nodes equal to the bit",
        "set link.reliable to true with link.transport 'ltp', or link.transport to tcp",
    ),
    "ltp-ring": (
        chosen(["link.transport=ltp"]),
        "link.transport 'ltp' is the way to the shards of a parameter server, which strategy 'ring' has not",
        "set run.strategy to server or ps-hra, or link.transport to tcp",
    ),
    "target-above-fill": (
        chosen([*LTP, "link.target_loss=0.2"]),
        "link.target_loss = 0.2 is above link.fill_above = 0.03",
        "set link.target_loss lower, or link.fill_above higher",
    ),
    "rescale-feedback": (
        chosen([*LTP, "link.fill=rescale"]),
        "link.fill 'rescale' makes up for what was lost, and so does link.feedback",
        "set link.fill to zero, or link.feedback to false",
    ),
    "last-feedback": (
        chosen([*LTP, "link.fill=last"]),
        "link.fill 'last' puts an old value where one is lost",
        "set link.fill to zero, or link.feedback to false",
    ),
    "codec-ring": (
        chosen(["sync.codec=bfloat16"]),
        "sync.codec 'bfloat16' is how gradients are written for shards and other nodes, and strategy 'ring' "
        "has none",
        "set run.strategy to server, ps-hra or peers, or sync.codec to float32",
    ),
    "codec-fill": (
        chosen([*LTP, "sync.codec=bfloat16", "link.fill=rescale", "link.feedback=false"]),
        "link.fill 'rescale' puts other numbers where some are lost, and sync.codec 'bfloat16' writes none",
        "set link.fill to zero, or sync.codec to float32",
    ),
    "restarts-ring": (
        chosen(["run.restarts=2"]),
        "run.restarts: 2 restarts of a worker go with run.elastic = true",
        "where each worker is a launch of its own",
    ),
    "replicas-unserved": (
        chosen(["server.replicas=2"]),
        "server.replicas (--replicas): 2 processes for each shard go with",
        "'server' or 'ps-hra', not 'ring'",
    ),
    "sites-unserved": (
        chosen(["run.sites=2", "run.workers=2"]),
        "run.sites: 2 sites go with run.strategy 'server'",
        "not 'ring'",
    ),
    "replicas-sites": (
        chosen([*SERVED, "run.workers=2", "run.sites=2", "server.replicas=2"]),
        "server.replicas (--replicas): 2 processes for each shard do not go with run.sites: sites' shards",
        "set server.replicas to 1, or leave out run.sites",
    ),
    "sites-workers": (
        chosen([*SERVED, "run.workers=2", "run.sites=3"]),
        "run.sites: 3 sites for 2 workers: each has at least one",
        "give at most 2",
    ),
    "groups-ungrouped": (
        chosen(["groups.count=2", "run.workers=2"]),
        "groups.count (--groups): 2 groups go with run.strategy 'hierarchical', 'ps-hra' or 'peers'",
        "not 'ring'",
    ),
    "groups-workers": (
        chosen(["run.strategy=ps-hra", "groups.count=3", "run.workers=1"]),
        "groups.count (--groups): 3 groups for 1 worker: each has at least one, so give 1 to 1",
        "leave it out for as many as are best",
    ),
    "nodes-workers": (
        chosen(["run.strategy=peers", "groups.count=2", "run.workers=3"]),
        "groups.count (--groups): 3 workers cannot be 2 nodes with as many devices each",
        "give a number that divides 3, or leave it out for nodes of one device",
    ),
    "hub-sites-ring": (
        Choices({"--site": ["paris"], "--shards": 0, "--replicas": 1}),
        "--site: what the sites send goes to shards, and --shards is 0",
        "give --shards M, from 1, or leave out --site",
    ),
    "hub-replicas-sites": (
        Choices({"--site": ["paris"], "--shards": 1, "--replicas": 2}),
        "--replicas 2 does not go with --site: sites' shards have no standby yet",
        "leave out one of the two",
    ),
    "hub-replicas-ring": (
        Choices({"--site": [], "--shards": 0, "--replicas": 2}),
        "--replicas 2: a ring has no shards",
        "give --shards M, from 1",
    ),
    "hub-groups-ring": (
        Choices({"--site": [], "--shards": 0, "--replicas": 1, "--groups": 0}),
        "--groups: groups meet at a parameter server",
        "give --shards M, from 1",
    ),
    "hub-groups-sites": (
        Choices({"--site": ["paris"], "--shards": 1, "--replicas": 1, "--groups": 2}),
        "--groups does not go with --site: a site's workers are a group already",
        "leave out one of the two",
    ),
    "served-no-hub": (
        chosen(SERVED, hub=""),
        "strategy 'server' needs a hub, and ATOLL_HUB is not set; start the run with `atoll run --strategy "
        "server`",
        "or set ATOLL_HUB=tcp://HOST:PORT (docs/several-machines.md)",
    ),
    "second-session": (
        chosen(SERVED, second_session=True, line="atoll.join (train.py:9)"),
        "atoll.join (train.py:9): a second session in one run, and under strategy 'server' the shards keep",
        "start one `atoll run` for each training (docs/how-to/cross-validation.md), or set run.strategy to "
        "ring or peers",
    ),
    "hierarchical-shards": (
        chosen(["run.strategy=hierarchical"], hub="tcp://h:1", shards=2),
        "strategy 'hierarchical' is a ring's, and the run at tcp://h:1 has shards",
        "set run.strategy to server, or start the hub with --shards 0",
    ),
    "served-no-shards": (
        chosen(SERVED, hub="tcp://h:1", shards=0),
        "strategy 'server' needs shards, and the run at tcp://h:1 has none",
        "set run.strategy to ring, or start the hub with --shards 1 or more",
    ),
    "peers-shards": (
        chosen(["run.strategy=peers"], hub="tcp://h:1", shards=1),
        "strategy 'peers' has no server, and the run at tcp://h:1 has shards",
        "set run.strategy to server, or start the hub with --shards 0",
    ),
    "outside-shards": (
        chosen(["run.strategy=pairs"], hub="tcp://h:1", shards=1),
        "strategy 'pairs' is another package's, and has no server; the run at tcp://h:1 has shards",
        "start the hub with --shards 0, or set run.strategy to server",
    ),
    "peers-groups-hub": (
        chosen(
            ["run.strategy=peers", "groups.count=2"], hub="tcp://h:1", shards=0, nodes=3, nodes_differ=True
        ),
        "groups.count is 2, and the hub at tcp://h:1 introduces 3 nodes",
        "by a hub each launch is a node, so leave it out",
    ),
    "peers-machines": (
        chosen(
            ["run.strategy=peers"],
            several_machines=True,
            what="node",
            devices=4,
            world=8,
            local=2,
            way_out="leave it out",
        ),
        "a node of 4 devices, of 8 workers in all, 2 of which are on this machine (LOCAL_WORLD_SIZE)",
        "strategy 'peers' has a node's devices share one machine's memory; leave it out",
    ),
    "groups-sites": (
        chosen(["run.strategy=ps-hra"], hub="tcp://h:1", shards=1, sites="paris, rome"),
        "strategy 'ps-hra' makes groups of its own, and the run has sites (paris, rome)",
        "use strategy 'server', or start the hub without --site",
    ),
    "groups-lazy": (
        chosen(["run.strategy=ps-hra", "sync.lazy=true"], hub="tcp://h:1", shards=1),
        "sync.lazy is of strategy 'server': a group of 'ps-hra' takes its parameters together",
        "set it to false",
    ),
    "sharded-elastic": (
        under_budgets("ring", ["run.elastic=true"]),
        "run.elastic lets a run go on without a worker that has died, and under budgets of memory each holds "
        "the only copy of its part of the model;",
        "leave out run.elastic, or the budgets",
    ),
    "sharded-elastic-grouped": (
        under_budgets("hierarchical", ["run.elastic=true"]),
        "run.elastic lets a run go on without a worker that has died, and under budgets of memory each holds "
        "the only copy of its part of the model in its group;",
        "leave out run.elastic, or the budgets",
    ),
    "sharded-late": (
        under_budgets("ring", late=True),
        "this worker comes late, and under budgets of memory those who were here at first hold the model",
        "start the run again with all, from its last checkpoint",
    ),
    "tiered-lazy": (
        under_budgets("server", ["sync.lazy=true"]),
        "under strategy 'server' with budgets of memory: sync.lazy stages a second copy of the parameters",
        "leave it false, or leave out [memory]",
    ),
    "tiered-pipeline": (
        under_budgets("ps-hra", ["sync.consistency=asp", "sync.pipeline=1"]),
        "under strategy 'ps-hra' with budgets of memory: sync.pipeline keeps a second copy",
        "leave it 0, or leave out [memory]",
    ),
    "tiered-transport": (
        under_budgets("server", ["link.transport=ltp"]),
        "under strategy 'server' with budgets of memory: link.transport 'ltp' holds back what is lost",
        "leave it 'tcp', or leave out [memory]",
    ),
    "tiered-codec": (
        under_budgets("server", ["sync.codec=bfloat16"]),
        "under strategy 'server' with budgets of memory: sync.codec 'bfloat16' holds back what it drops",
        "leave it 'float32', or leave out [memory]",
    ),
    "tiered-site": (
        under_budgets("server", site="paris"),
        "under strategy 'server' with budgets of memory: sites with shards of their own (run.sites) are not",
        "leave them out, or leave out [memory]",
    ),
    "tiered-master": (
        under_budgets("server", master=True),
        "memory.master: under strategy 'server' the shards make the steps",
        "leave memory.master out",
    ),
    "tiered-step": (
        under_budgets("ps-hra", step="0.3"),
        "memory.step: under strategy 'ps-hra' the shards make the steps",
        "leave memory.step out",
    ),
    "lent-disk": (
        under_budgets("peers", disk="/scratch:1GiB"),
        "memory.disk: strategy 'peers' has none: the CPU side keeps all in host memory",
        "has no disk below it; leave it out",
    ),
    "lent-master": (
        under_budgets("peers", master=True),
        "memory.master: strategy 'peers' has none: the CPU side steps parameters in their own precision",
        "leave it out",
    ),
    "lent-step": (
        under_budgets("peers", step="device"),
        "memory.step: strategy 'peers' has none: the CPU side makes the optimizer's steps",
        "leave it out",
    ),
    "lent-sharding": (
        under_budgets("peers", sharding="symmetric"),
        "memory.sharding: strategy 'peers' has none: a node's devices read whole chunks",
        "leave it out",
    ),
    "sharded-served": (
        under_budgets("ps-hra", sharding="symmetric"),
        "memory.sharding = 'symmetric' has a group's workers hold one model between them, and under strategy "
        "'ps-hra' each must be able to hold all of it",
        "leave memory.sharding out",
    ),
    "sharded-share": (
        Choices({"store": "sharded", "step share": True}),
        "memory.step: a share is for one worker",
        "members step in host memory what they own",
    ),
    "over-step": (
        Choices({"store": "sharded", "over": True, "memory.step": "device"}),
        "memory.step: with atoll.memory.over chunks are stepped in host memory",
        "leave it at auto, or write host",
    ),
    "memory-cap-tiers": (
        Choices({"sync.memory_cap": "auto", "store": "tiered"}),
        "sync.memory_cap auto computes a batch again that did not fit, and under budgets of memory a forward",
        "give sync.memory_cap a number, or leave the budgets out",
    ),
    "shares-sites": (
        Choices({"sync.shares": "auto", "sync": "bsp", "site": "paris"}),
        "sync.shares auto needs the speeds of all workers, and a site's shard hears of its own alone",
        "or set sync.shares to even",
    ),
    "second-model": (
        Choices({"sync": "peers", "models": 1, "run.strategy": "peers"}),
        "strategy 'peers' trains one model in a session",
        "prepare that, with one optimizer, or set run.strategy to ring, hierarchical or server",
    ),
    "models-lossy": (
        Choices({**MODELS, "link.lossy": True}),
        "what the link has held back of gradients goes by one weight of a worker",
        "with a list of their optimizers, or set link.transport to tcp",
    ),
    "models-codec": (
        Choices({**MODELS, "sync.codec": "int8"}),
        "what sync.codec has held back of gradients goes by one weight of a worker",
        "with a list of their optimizers, or set sync.codec to float32",
    ),
    "models-budgets": (
        Choices({"sync": "bsp", "several budgets": True, "run.strategy": "server"}),
        "session.prepare(memory=...): under strategy 'server' all models of a session train as one",
        "under one set of budgets: give each call the same, or the first alone",
    ),
    "models-schedule": (
        Choices({**MODELS, "scheduled": True, "sync.codec": "float32"}),
        "session.schedule: under strategy 'server' all models of a session train as one",
        "step each scheduler in the script, or set run.strategy to ring or hierarchical",
    ),
    "several-optimizers": (
        Choices({"sync": "peers", "several optimizers": True, "run.strategy": "peers"}),
        "strategy 'peers' steps a model by one optimizer",
        "one optimizer with a param group for each, or set run.strategy to ring, hierarchical or server",
    ),
    "several-optimizers-groups": (
        Choices({**SEVERAL, "sync": "asp", "run.strategy": "ps-hra", "sync.consistency": "asp"}),
        "under strategy 'ps-hra' with sync.consistency 'asp' a member that waits for others cannot tell",
        "with a param group for each, or set sync.consistency to bsp, or run.strategy to server",
    ),
    "several-optimizers-sites": (
        Choices({**SEVERAL, "site": "paris"}),
        "a site's shard steps a model by one optimizer",
        "one optimizer with a param group for each, or leave out run.sites",
    ),
    "several-optimizers-lazy": (
        Choices({**SEVERAL, "sync.lazy": True}),
        "with sync.lazy new parameters come at the next forward, after all of several optimizers' steps",
        "one optimizer with a param group for each, or set sync.lazy to false",
    ),
    "several-optimizers-pipeline": (
        Choices({**SEVERAL, "sync": "asp", "sync.pipeline": 1}),
        "with sync.pipeline a step is in flight when the next of several optimizers steps",
        "one optimizer with a param group for each, or set sync.pipeline to 0",
    ),
    "prepared-again": (
        Choices({"sync": "peers", "again": True, "run.strategy": "peers"}),
        "strategy 'peers' takes a model as it is when session.prepare first sees it, and not once more",
        "in another run, or set run.strategy to ring, hierarchical, server or ps-hra",
    ),
    "prepared-again-sites": (
        Choices({**AGAIN, "site": "paris"}),
        "a site's shard takes a model as it is when session.prepare first sees it",
        "prepare the changed model in another run, or leave out run.sites",
    ),
    "prepared-again-lossy": (
        Choices({**AGAIN, "link.lossy": True}),
        "what the link has held back of gradients does not fit a changed model",
        "prepare the changed model in another run, or set link.transport to tcp",
    ),
    "prepared-again-codec": (
        Choices({**AGAIN, "sync.codec": "bfloat16"}),
        "what sync.codec has held back of gradients does not fit a changed model",
        "prepare the changed model in another run, or set sync.codec to float32",
    ),
    "over-alone": (
        Choices({**OVER, "fit": "alone"}),
        "atoll.memory.over has given 'expert.weight' the workers [0, 1], and there are no others here",
        "fit it with members, in a session of strategy ring",
    ),
    "over-replicas": (
        Choices({**OVER, "fit": "replicas"}),
        "atoll.memory.over has given 'expert.weight' the workers [0, 1], and here each group of workers",
        "leave it out, or choose strategy 'ring'",
    ),
    "over-unsharded": (
        Choices({**OVER, "store": "resident"}),
        "atoll.memory.over has given 'expert.weight' the workers [0, 1], and takes a ring's workers",
        "strategy 'ring', [memory]",
    ),
    "sync-norm-cpu": (
        Choices({**NORM, "device": "cpu", "process group": "there is none"}),
        "module '1.norm' is an nn.SyncBatchNorm, which on a CPU takes strategy 'ring' or 'hierarchical'",
        "a norm that needs none of the batch (nn.GroupNorm, nn.LayerNorm)",
    ),
    "sync-norm-group": (
        Choices({**NORM, "device": "cuda", "process group": "there is none"}),
        "module '1.norm' is an nn.SyncBatchNorm, which works over a torch.distributed process group, and "
        "there is none; call",
        "or use nn.BatchNorm",
    ),
    "ltp-dtype": (
        Choices({"link.lossy": True, "link.fill": "zero", "dtype": "int8", "parameter": "parameter 'w'"}),
        "parameter 'w' is int8, and link.transport 'ltp' may lose parts of bfloat16, float16, float32, float",
        "set link.reliable to true, or link.transport to tcp",
    ),
    "ltp-rescale-dtype": (
        Choices(
            {"link.lossy": True, "link.fill": "rescale", "dtype": "bfloat16", "parameter": "parameter 'w'"}
        ),
        "parameter 'w' is bfloat16, which link.fill 'rescale' cannot multiply on its way",
        "set link.fill to zero",
    ),
    "optimizer-closure": (
        Choices({"closure": "needed", "optimizer": "LBFGS", "sync": "asp", "run.strategy": "server"}),
        "optimizer LBFGS calls the script's closure several times in a step, and strategy 'server' has no",
        "or an optimizer whose step() needs no closure, such as torch.optim.AdamW or SGD",
    ),
    "optimizer-closure-in-tiers": (
        Choices({"closure": "needed", "optimizer": "LBFGS", "sync": "local", "store": "tiered"}),
        "optimizer LBFGS calls the script's closure several times in a step, and with budgets of",
        "leave out the budgets, or use an optimizer whose step() needs no closure, such as torch.optim.AdamW "
        "or SGD",
    ),
    "optimizer-closure-skip": (
        Choices({"closure": "needed", "optimizer": "LBFGS", "sync": "local", "sync.nonfinite": "skip"}),
        "optimizer LBFGS calls the script's closure several times in a step, and sync.nonfinite 'skip'",
        "set sync.nonfinite to stop or allow",
    ),
    "optimizer-coupled": (
        Choices({"coupled": True, "optimizer": "Prodigy", "sync": "bsp", "run.strategy": "server"}),
        "optimizer Prodigy looks at the gradients of all parameters in a step, as clipping by their norm "
        "does, and strategy 'server' steps them apart",
        "use strategy ring or hierarchical, or take that out of it (max_grad_norm=0, say) and call "
        "session.clip_grad_norm_ before the step",
    ),
    "optimizer-coupled-in-tiers": (
        Choices({"coupled": True, "optimizer": "Prodigy", "sync": "local", "store": "tiered"}),
        "optimizer Prodigy looks at the gradients of all parameters in a step, as clipping by their norm "
        "does, and with budgets of memory a step is made chunk by chunk",
        "leave out the budgets, or take that out of it (max_grad_norm=0, say) and call "
        "session.clip_grad_norm_ before the step",
    ),
    "optimizer-by-tensor": (
        Choices({**BY_TENSOR, "store": "sharded", "memory.sharding": "symmetric"}),
        "optimizer Muon is not element-wise (it came out different), and memory.sharding 'symmetric' cuts",
        "leave memory.sharding out, or set it to 'asymmetric'",
    ),
    "optimizer-data": (
        Choices({"optimizer": "Own", "moves": True, "why": "it sets p.data; let it write into p"}),
        "optimizer Own cannot step parameters that lie in chunks: it sets p.data",
        "let it write into p",
    ),
    "optimizer-sparse-elsewhere": (
        Choices(
            {"sync": "bsp", "optimizer": "SparseAdam", "sparse": "no dense ones", "run.strategy": "server"}
        ),
        "optimizer SparseAdam cannot step the dense sums of sparse gradients (no dense ones), which strategy",
        "use strategy ring or hierarchical, or torch.optim.SGD or Adagrad",
    ),
    "optimizer-sparse-in-tiers": (
        Choices({"sync": "local", "store": "sharded", "optimizer": "SparseAdam", "sparse": "no dense ones"}),
        "optimizer SparseAdam cannot step the dense form of sparse gradients (no dense ones), which budgets",
        "leave out the budgets, or use torch.optim.SGD or Adagrad",
    ),
    "optimizer-complex-elsewhere": (
        Choices({**BY_TENSOR, "complex": True, "sync": "peers", "run.strategy": "peers"}),
        "optimizer Muon is not element-wise (it came out different), and strategy 'peers' steps complex",
        "use strategy ring or hierarchical, or torch.optim.AdamW or SGD",
    ),
    "optimizer-modes": (
        Choices({"modes": True, "optimizer": "ScheduleFree", "sync": "asp", "run.strategy": "server"}),
        "optimizer ScheduleFree moves parameters by its state in train() and eval(), and strategy 'server'",
        "set sync.consistency to bsp, or use strategy ring or hierarchical",
    ),
    "optimizer-modes-peers": (
        Choices({"modes": True, "optimizer": "ScheduleFree", "sync": "peers", "run.strategy": "peers"}),
        "optimizer ScheduleFree moves parameters by its state in train() and eval(), and strategy 'peers'",
        "or an optimizer without them, such as torch.optim.AdamW or SGD",
    ),
    "optimizer-modes-lazy": (
        Choices(
            {
                "modes": True,
                "optimizer": "ScheduleFree",
                "sync": "bsp",
                "sync.lazy": True,
                "run.strategy": "server",
            }
        ),
        "optimizer ScheduleFree moves parameters by its state in train() and eval(), and strategy 'server'",
        "set it to false",
    ),
    "optimizer-modes-sites": (
        Choices(
            {
                "modes": True,
                "optimizer": "ScheduleFree",
                "sync": "bsp",
                "site": "a",
                "run.strategy": "server",
            }
        ),
        "optimizer ScheduleFree moves parameters by its state in train() and eval(), and strategy 'server'",
        "leave out run.sites",
    ),
    "step-budgets": (
        Choices({"step": "tensor", "store": "tiered"}),
        "session.prepare(step='tensor'): with budgets of memory a trial decides the unit of steps",
        "leave out step, or the budgets",
    ),
    "optimizer-unknown-elsewhere": (
        Choices({**AT_HOME, "run.strategy": "peers", "optimizer": "Own", "defined": "in the script itself"}),
        "strategy 'peers' steps the optimizer in a process of its own, which cannot import Own: it is "
        "defined in the script itself",
        "put it into a module of its own, beside the script, or into the script with all training under "
        '`if __name__ == "__main__":`',
    ),
    "average-elsewhere": (
        Choices({"average": True, "sync": "asp", "run.strategy": "server"}),
        "session.average: strategy 'server' steps the optimizer in a process of its own",
        "use torch.optim.swa_utils.AveragedModel(model) and session.register(average=...)",
    ),
    "bf16-elsewhere": (
        Choices({"bf16": "masters", "sync": "bsp", "run.strategy": "server"}),
        "session.prepare(bf16='masters'): strategy 'server' steps the optimizer in a process of its own",
        "use strategy ring or hierarchical, or leave bf16 out",
    ),
    "bf16-replicas": (
        Choices({"bf16": "stochastic", "sync": "replicas", "run.strategy": "own"}),
        "session.prepare(bf16='stochastic'): strategy 'own' exchanges values in the parameters' own",
        "use strategy ring or hierarchical, or leave bf16 out",
    ),
    "bf16-in-tiers": (
        Choices({"bf16": "masters", "sync": "local", "store": "tiered"}),
        "session.prepare(bf16='masters'): budgets of memory have an option of their own",
        "set memory.master to true for float32 copies, or leave the budgets out",
    ),
    "bf16-closure": (
        Choices({"bf16": "masters", "closure": "needed", "optimizer": "LBFGS"}),
        "session.prepare(bf16='masters'): optimizer LBFGS calls the script's closure within a step",
        "or use an optimizer whose step() needs no closure, such as torch.optim.AdamW or SGD",
    ),
    "bf16-coupled": (
        Choices({"bf16": "masters", "coupled": True, "optimizer": "Prodigy"}),
        "session.prepare(bf16='masters'): optimizer Prodigy looks at the gradients of all parameters in a",
        "or use an optimizer that steps each parameter by its own gradient, such as torch.optim.AdamW or SGD",
    ),
    "bf16-modes": (
        Choices({"bf16": "masters", "modes": True, "optimizer": "AdamWScheduleFree"}),
        "session.prepare(bf16='masters'): optimizer AdamWScheduleFree changes parameters by its state in",
        "or use an optimizer without them, such as torch.optim.AdamW or SGD",
    ),
    "attribute-elsewhere": (
        Choices({**AT_HOME, "attribute": "damping", "value": 2.0, "former": 1.0}),
        "optimizer.damping is 2.0 here, and 1.0 in the process that makes the optimizer's steps, which knows",
        "and let step() read it there, or use strategy ring or hierarchical",
    ),
    "settings-elsewhere": (
        Choices({**AT_HOME, "setting": "param_groups[0]['x']", "kind": "set"}),
        "param_groups[0]['x'] of the optimizer is a set, and cannot be sent to the process that makes",
        "or keep it outside of the param groups",
    ),
    "load-in-iteration": (
        Choices({**AT_HOME, "call": "optimizer.load_state_dict", "waits": True, "run.strategy": "peers"}),
        "optimizer.load_state_dict between a backward and optimizer.step(): under strategy 'peers' another",
        "put it before the forward, or after the step",
    ),
    "load-in-groups": (
        Choices({"call": "session.load", "grouped": True}),
        "session.load: the workers are in groups already",
        "put it before the loop, after session.prepare",
    ),
    "leased-drop-last": (
        Choices({"call": "session.sampler", "data": "leased", "drop_last": True}),
        "session.sampler: with leased data every sample counts",
        "leave drop_last out",
    ),
    "gradients-gone": (
        Choices({**USE, "gradients": "gone"}),
        "a gradient of an earlier backward is used",
        "before the next backward and inside the session",
    ),
    "gradients-sparse": (
        Choices({**USE, "gradients": "sparse", "name": "words.weight"}),
        "words.weight.grad is used, and is sparse",
        "or give the layer sparse=False",
    ),
    "gradients-written": (
        Choices({**USE, "gradients": "written", "name": "0.weight"}),
        "0.weight.grad was changed after its backward through another tensor over its memory",
        "or set run.strategy to ring",
    ),
    "gradients-missing": (
        Choices({**USE, "gradients": "missing", "name": "0.weight", "step": 3, "other": 1}),
        "p.grad is used after the backward of step 3, and node 1 has no gradient of '0.weight'",
        "or use the parameter on every node",
    ),
    "gradients-unlike": (
        Choices({**USE, "gradients": "unlike", **PAIR}),
        "p.grad is used, and the nodes' gradients are of unlike backwards: node 0 uses it after 1 backward",
        "use p.grad after the same backward on every node, or on none",
    ),
    "gradients-alone": (
        Choices({**USE, "gradients": "alone", **PAIR}),
        "p.grad is used only after optimizer.step(), and not on every node",
        "use it before optimizer.step(), or on every node",
    ),
    "gradients-scaled": (
        Choices({**USE, "gradients": "scaled", "used": "1", "divided": "1024"}),
        "p.grad was used before a GradScaler divided the gradients, and the mean was made for a scale of 1",
        "call scaler.unscale_(optimizer) before p.grad is used, or begin the backward at scaler.scale(loss)",
    ),
    "gradients-late": (
        Choices({**USE, "gradients": "late", "step": 3}),
        "a backward of step 3 ends after another node's script has used the mean",
        "in which the others' gradients came, as they do",
    ),
    "gradients-weightless": (
        Choices({**USE, "gradients": "weightless"}),
        "the gradients of a batch of weight 0 were added to those of an earlier backward of the same step",
        "or leave out the backward of a batch that is to count nothing",
    ),
    "own-data-groups": (
        Choices({**OWN_DATA, "group": "ring", "sync": "asp", "sync.consistency": "asp"}),
        "session.epoch_of: under sync.consistency asp groups move between epochs of their workers' own data",
        "set sync.consistency to bsp, or let session.sampler(dataset) deal the data",
    ),
    "own-data-sites": (
        Choices({**OWN_DATA, "site": "a"}),
        "session.epoch_of: sites do not tell one another where their workers' own data ends",
        "let session.sampler(dataset) deal the data",
    ),
    "costs-not-together": (
        Choices({"call": "session.batches", "data": "leased", "cost": True}),
        "session.batches: batches are dealt by cost where all workers make each step together",
        "leave cost out",
    ),
}
_OTHER_VALUES = {
    "slack": "2", "lazy": "true", "uplink": "leader", "staleness": "rate", "compensation": "0.1",
    "pipeline": "1", "stale_max": "2", "overlay": "own", "round_timeout": "1s", "backoff": "1s",
}  # fmt: skip
for _key, _value in _OTHER_VALUES.items():
    _name = f"only-peers-{_key.replace('_', '-')}"
    if _name in {need.name for need in TABLE}:
        EXAMPLES[_name] = (
            chosen([f"sync.{_key}={_value}"]),
            f"sync.{_key} is of strategy 'peers', and run.strategy is 'ring'",
            "leave it out, or set run.strategy to peers",
        )
    else:
        EXAMPLES[f"peers-{_key}"] = (
            chosen(["run.strategy=peers", f"sync.{_key}={_value}"]),
            f"sync.{_key} is for workers of a parameter server, and strategy 'peers' has none",
            "sync.stale_max says how far nodes may be ahead",
        )


def test_every_row_has_an_example() -> None:
    names = [need.name for need in TABLE]
    assert len(names) == len(set(names))
    assert set(EXAMPLES) == set(names)


@pytest.mark.parametrize("need", TABLE, ids=lambda need: need.name)
def test_a_cell_says_its_words_in_one_sentence(need: Need) -> None:
    choices, begins, ends = EXAMPLES[need.name]
    for moment in need.moments:
        assert refusal(moment, choices) is need  # and no row before
        with pytest.raises(need.error) as refused:
            check(moment, choices)
        assert type(refused.value) is need.error
        said = str(refused.value)
        assert said.startswith(begins)
        assert said.endswith(ends)
        assert "\n" not in said
        assert not re.search(r"[{}]|\bNone\b", said.replace("None, or lists", "")), said
        assert refused.value.exit_status == 2


@pytest.mark.parametrize("need", TABLE, ids=lambda need: need.name)
def test_each_condition_of_a_cell_counts(need: Need) -> None:
    """A run that differs from the example in one choice, and so leaves the cell, is not in the row."""
    choices, _, _ = EXAMPLES[need.name]
    plain: Mapping[str, Any] = {**defaults(), "link.lossy": False}
    for name in need.cell:
        others = {"--site": [], "--shards": 1, "--replicas": 1, "process group": "whole"}
        other = others.get(name, plain.get(name))
        if name == "run.strategy":
            other = next(each for each in ("ring", "peers", "server", "hierarchical") if not
                         need.cell[name].holds(name, Choices({name: each})))  # fmt: skip
        changed = Choices({**choices.values, name: other})
        if not need.cell[name].holds(name, changed):
            assert not need.applies(changed), name
    assert need.applies(choices)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_trains_or_is_refused_in_one_sentence(cell: Cell) -> None:
    need = refusal_of(cell)
    lossy = cell.link == "ltp"
    own = cell.link != "tcp" or cell.codec != "float32"  # something of its own on the way
    refused = (cell.sync == "local" or (cell.served and cell.budgets)) and own
    refused |= cell.sync == "peers" and lossy
    refused |= cell.sync == "replicas" and cell.link != "tcp"
    refused |= cell.store == "sharded" and cell.served
    assert (need is not None) == refused
    if need is not None:
        sentence = choices_in(cell, config_of(cell)).fill(need.reason)
        assert "\n" not in sentence
        assert ": " in sentence or "; " in sentence  # what is wrong, then what to do


def test_a_configuration_of_defaults_is_refused_at_no_moment() -> None:
    for moment in get_args(Moment):
        assert refusal(moment, choices_of(Config())) is None


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_of_cells(), f"run `{HOW}`"


def test_every_word_of_a_row_is_a_key_an_option_or_explained() -> None:
    named = {name for need in TABLE for name in need.cell}
    facts = {name for name in named if name not in defaults() and not name.startswith("--")}
    assert facts == set(FACTS)


def test_what_ltp_may_lose_is_what_it_can_cut_into_blocks() -> None:
    assert {str(dtype) for dtype in FLOATS} | {"bfloat16"} == set(LOSSY_DTYPES)
