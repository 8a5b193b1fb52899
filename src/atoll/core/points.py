"""Named points of the code at which a test may strike: kill the process, stop it, or see that it got there.

`reach` costs a comparison where nobody has installed a handler, and nobody but a test does
(`atoll.testing.faults`). A point's name is `part.moment`; `POINTS` lists them all, so that a test can try
each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Handler: TypeAlias = Callable[[str, int], None]  # the point's name, and the iteration (-1: of none)

POINTS: dict[str, str] = {
    # name: what has just happened, or is about to
    "shard.hello": "a worker has come to the shard, and is not welcomed yet",
    "faults.start": "`python -m atoll.testing.faults` is about to run the program",
    # The hub's have no iteration: the number is of this process's writes into the journal, from 1.
    "hub.record": "the hub is about to write what a turn of its loop has changed",
    "hub.recorded": "it is written, and nobody was answered yet",
    "hub.answered": "the answers are sent, and no fence to a log",
    "hub.compacted": "a compact state is written beside the journal, and not in its place yet",
    "shard.setup": "a chunk's first values, or a state of its optimizer, are at the shard",
    "shard.met": "a meeting of the workers has ended at the log, and nobody knows yet",
    "shard.staged": "all chunks of a contribution are at the shard; the log does not know yet",
    "shard.journalled": "the same, and they are in its journal",
    "shard.logged": "a line of the log is at the shard, and not applied yet",
    "shard.combined": "a chunk's mean is made, and sent to nobody",
    "shard.stepped": "a chunk is stepped, and sent to nobody",
    "shard.answered": "a chunk is on its way to a worker",
    "shard.snapshot": "a snapshot has got its name; what it replaces is still there",
    "site.passes": "a site's part of an iteration is in its shard's journal, and about to go up",
    "site.passed": "it has been sent to the global shards, and what comes of it is asked for",
    "site.answered": "a chunk of the answer is there, and was passed on to nobody",
    "site.met": "a meeting of sites has ended, and the site's workers do not know yet",
    "shard.copied": "a chunk is about to be copied to a standby that has just come",
    "shard.held": "a standby holds what its primary was told, and has not said so",
    "shard.promoted": "a standby holds all, and is about to serve in its primary's place",
    "ring.sent": "a message of an iteration has left for the ring",
    "ring.all_sent": "all messages of an iteration have left",
    "ring.agreed": "this worker holds all messages of an iteration, and what the workers say about it",
    "ring.held": "this worker holds a collective's result, and has not yet said so to the others",
    "ring.confirmed": "all members hold a collective's result",
    "ring.published": "the iteration's mean is in p.grad",
    "ring.stepped": "the iteration's step is made",
    "ring.broken": "this worker is about to tell the hub that the ring broke, or admits newcomers",
    "ring.formed": "this worker's channels of a ring that goes on stand",
    # Those of a hierarchy have no iteration:
    "hierarchy.inside": "this worker holds a message's sum over its group, and the leaders' is to come",
    "hierarchy.between": "this leader holds the sum over all groups, and its group does not",
    "exchange.launched": "under another package's strategy: this worker is about to collect an exchange",
    "exchange.collected": "it has what the others sent, and has not yet said so to them",
    "exchange.committed": "and its values follow the exchange",
    "enter.arrived": "a worker that comes late has told the log that it takes part",
    "enter.member": "it is a member of the next iteration and has the parameters, and asks for the rest",
    "enter.giving": "a living worker is about to give it the rest",
    "enter.given": "it has given that",
    "enter.restored": "the newcomer goes on from there",
    "group.pushed": "who speaks for a group has sent its contribution, and not committed it",
    "group.committed": "and has committed it",
    "group.handed": "bsp, under budgets: a chunk of the mean over all groups is in this member's tiers",
    "group.answered": "this member has what the shards answered, or waits for who has",
    "group.stepped": "bsp: who speaks for a group has said how to step",
    "group.leaving": "a worker is about to ask for another group; the number is of iterations made",
    "group.formed": "it knows its group",
    "group.ring": "the group's ring stands, and the first member's state is taken over",
    "group.arrived": "the shards know the group, and the hub does not know that yet",
    "group.joined": "the group's parameters are there: its first iteration begins",
    # A node's CPU side, under strategy peers.
    "node.contributed": "the node's own contribution is in host memory, and nobody else knows",
    "node.sending": "a contribution has left for one node, and may not have for the others",
    "node.held": "another's contribution is whole here, which nobody has been told",
    "node.applied": "an iteration is in the global parameters, which nobody has been told",
    "node.round": "a message of a synchronisation round has come, and is not answered",
    "node.vote": "a message of a vote on the next view has come, and is not answered",
    "node.view": "a view holds, and nothing was done about it",
    "node.gives": "another node is about to be given the state",
    "node.took": "a node that comes in has the state, and has not said so",
    "members.meet": "members have changed; this one is about to meet the others",
    "members.dealt": "what is left of their data is dealt anew",
}

_handler: Handler | None = None


def install(handler: Handler | None) -> None:
    """Call `handler` at every point from now on; None: nobody."""
    global _handler
    _handler = handler


def reach(name: str, iteration: int = -1) -> None:
    """The code is at this point, in this iteration; a handler may not let it return."""
    if _handler is not None:
        _handler(name, iteration)
