"""The group to which a worker belongs (`Session.group`), by the kind of its run. It changes with the members,
like the rank."""

from __future__ import annotations

from atoll.train.api.place import Group
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.inner import Replicas
from atoll.train.group.rounds import Ring
from atoll.train.members.regrouping import Regrouping
from atoll.train.members.workers import Workers
from atoll.train.sync.peersworker import NodeWorker


def among_all(state: TrainingState) -> Group:
    """Return the one group of all workers."""
    return Group(0, 1, state.rank, state.world)


def in_hierarchy(hierarchy: Hierarchy, workers: Workers, state: TrainingState) -> Group:
    """Return the group by the present arrangement of the ring's members; before there is one, all workers."""
    arranged = hierarchy.arranged
    return among_all(state) if arranged is None else Group(*arranged.place_of(workers.place.rank))


def of_replica(replicas: Replicas) -> Group:
    """Return the group of workers that train one replica with this one."""
    rank, size = (replicas.place.rank, replicas.place.world) if replicas.grouped else (0, 1)
    return Group(replicas.index, len(replicas), rank, size)


def at_shards(regrouping: Regrouping, ring: Ring) -> Group:
    """Return the group of workers that contribute to the shards as one with this one."""
    groups, own = regrouping.contributors, regrouping.contributor
    index = groups.index(own) if own in groups else 0
    return Group(index, max(1, len(groups)), ring.rank, ring.world)


def of_node(node: NodeWorker, state: TrainingState) -> Group:
    """Return the group of the node's devices; all workers if every node has one device."""
    devices = node.devices
    return Group(node.node, node.world, devices.rank, devices.count) if node.has_groups else among_all(state)
