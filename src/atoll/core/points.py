"""Named points of the code at which a test may kill or stop the process, or see that it got there.

Only tests install a handler (`atoll.testing.faults`). Without one, `reach` costs a comparison. A point's name
is `part.moment`. `POINTS` lists all points, so that a test can try each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Handler: TypeAlias = Callable[[str, int], None]  # called with the point's name and the iteration (-1: none)

POINTS: dict[str, str] = {
    # name: the event that has just happened, or is about to
    "shard.hello": "a worker has come to the shard, and is not welcomed yet",
    "faults.start": "`python -m atoll.testing.faults` is about to run the program",
    # At the hub, the number counts this process's writes into the journal, from 1, in place of iterations.
    "hub.record": "the hub is about to write the changes of a turn of its loop",
    "hub.recorded": "the changes are written, and no answer is sent",
    "hub.answered": "the answers are sent, and no fence to a log",
    "hub.compacted": "a compact state is written beside the journal, and not in its place yet",
    "shard.setup": "a chunk's first values, or a state of its optimizer, are at the shard",
    "shard.met": "a meeting of the workers has ended at the log, and nobody knows yet",
    "shard.staged": "all chunks of a contribution are at the shard; the log does not know yet",
    "shard.journalled": "the chunks are also in the shard's journal",
    "shard.logged": "a line of the log is at the shard, and not applied yet",
    "shard.combined": "a chunk's mean is computed, and sent to nobody",
    "shard.stepped": "a chunk is stepped, and sent to nobody",
    "shard.answered": "a chunk is on its way to a worker",
    "shard.snapshot": "a snapshot has got its name; the replaced one is still there",
    "site.passes": "a site's part of an iteration is in its shard's journal, and about to go up",
    "site.passed": "the part has been sent to the global shards, and their answer is requested",
    "site.answered": "a chunk of the answer is there, and was passed on to nobody",
    "site.met": "a meeting of sites has ended, and the site's workers do not know yet",
    "shard.copied": "a chunk is about to be copied to a standby that has just come",
    "shard.held": "a standby holds a message of its primary, and has not acknowledged it",
    "shard.promoted": "a standby holds all, and is about to serve in its primary's place",
    "ring.sent": "a message of an iteration has left for the ring",
    "ring.all_sent": "all messages of an iteration have left",
    "ring.agreed": "this worker holds all messages of an iteration, and the workers' votes on it",
    "ring.held": "this worker holds a collective's result, and has not yet told the others",
    "ring.confirmed": "all members hold a collective's result",
    "ring.published": "the iteration's mean is in p.grad",
    "ring.stepped": "the iteration's step is made",
    "ring.broken": "this worker is about to tell the hub that the ring broke, or admits newcomers",
    "ring.formed": "this worker has opened its channels of a ring that goes on",
    # In a hierarchy, no iteration is given.
    "hierarchy.inside": "this worker holds a message's sum over its group, and the leaders' is to come",
    "hierarchy.between": "this leader holds the sum over all groups, and its group does not",
    "exchange.launched": "under another package's strategy: this worker is about to collect an exchange",
    "exchange.collected": "this worker has the others' values, and has not yet told them",
    "exchange.committed": "this worker's values follow the exchange",
    "enter.arrived": "a worker that comes late has told the log that it takes part",
    "enter.member": "the newcomer is a member of the next iteration, has the values, and asks for more",
    "enter.giving": "a living worker is about to give the newcomer the rest",
    "enter.given": "the living worker has given the rest",
    "enter.restored": "the newcomer continues from the restored state",
    "group.pushed": "a group's speaker has sent the group's contribution, and not committed it",
    "group.committed": "the group's speaker has committed the contribution",
    "group.handed": "bsp, under budgets: a chunk of the mean over all groups is in this member's tiers",
    "group.answered": "this member has the shards' answer, or waits for the member that has",
    "group.stepped": "bsp: a group's speaker has told the others how to step",
    "group.leaving": "a worker is about to ask for another group; the number counts iterations made",
    "group.formed": "the worker knows its group",
    "group.ring": "the group's ring stands, and the first member's state is taken over",
    "group.arrived": "the shards know the group, and the hub does not know that yet",
    "group.joined": "the group's parameters are there: its first iteration begins",
    "change.left": "a model that has changed is let go, and not prepared again yet",
    "setup.sent": "the first worker has described a model to the shards, and sent its values",
    "setup.ready": "the shards have the model, and this worker does not have their parameters yet",
    # A node's CPU side, under strategy peers.
    "node.contributed": "the node's own contribution is in host memory, and nobody else knows",
    "node.sending": "a contribution has left for one node, and may not have for the others",
    "node.held": "another node's contribution is complete here, and nobody has been told",
    "node.applied": "an iteration is in the global parameters, and nobody has been told",
    "node.round": "a message of a synchronisation round has come, and is not answered",
    "node.vote": "a message of a vote on the next view has come, and is not answered",
    "node.view": "a view holds, and nothing was done about it",
    "node.gives": "another node is about to be given the state",
    "node.took": "a node that comes in has the state, and has told nobody",
    "members.meet": "members have changed; this one is about to meet the others",
    "members.dealt": "the rest of the members' data is dealt again",
}

_handler: Handler | None = None


def install(handler: Handler | None) -> None:
    """Call `handler` at every point from now on; None removes the handler."""
    global _handler
    _handler = handler


def reach(name: str, iteration: int = -1) -> None:
    """Call the handler at point `name` in `iteration`; a handler may never return."""
    if _handler is not None:
        _handler(name, iteration)
