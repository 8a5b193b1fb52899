"""Meetings of the nodes of a run outside the iterations, through the members' meetings (`peers`).

A value counts on every node or on none, and no node waits for one that is left out. Source: docs/peers.md,
"When an iteration may be applied".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor

from atoll.core.decoding import from_msgpack
from atoll.core.errors import GivenUpError
from atoll.core.scriptline import waiting_line
from atoll.core.stands import USE, Stand, call
from atoll.train.api.place import Place, is_first
from atoll.train.members.meetings import BytesMeeting, bytes_of, put_bytes
from atoll.train.sync.peersworker import NodeWorker
from atoll.wire.device import Meet, Met
from atoll.wire.workerstand import WorkerStand

_PIECE = 4 * 2**20  # the most bytes that a node brings to one meeting: members hold them until all have them
_MET = 32 * 2**20  # the most bytes of one meeting, of all members together
_LENGTH = 8  # bytes before the first piece, for the whole length


class NodesRoster:
    """The devices of the nodes that took part in the latest call. A worker's rank never changes."""

    def __init__(self, worker: NodeWorker) -> None:
        self._worker, self.nodes = worker, list(worker.members)

    @property
    def place(self) -> Place:
        return self._worker.introduction.place

    @property
    def late(self) -> bool:
        return self._worker.late

    @property
    def ranks(self) -> list[int]:
        if self.late:
            return [self.place.rank]
        return [rank for node in self.nodes for rank in self._worker.introduction.workers_of(node)]


class NodesMeeting(BytesMeeting):
    """A meeting of the nodes. A node's devices meet first, and come to the members' meeting as one."""

    def __init__(self, worker: NodeWorker, roster: NodesRoster) -> None:
        self._worker, self.roster, self._nodes = worker, roster, roster
        self._met: dict[int, Met] = {}
        worker.on(Met, self._handle_met)

    @property
    def seconds_waited(self) -> float:
        return self._worker.seconds_waited

    def stand_at(self, stand: Stand | None) -> None:
        self.stand = self._worker.call = stand

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        if self._worker.late:
            return [payload]
        own = msgspec.msgpack.encode(self._worker.devices.gather(payload, what))
        return [part for node in self._gather_nodes(own, what) for part in from_msgpack(node, list[bytes])]

    def _gather_nodes(self, payload: bytes, what: str) -> list[bytes]:
        """Return each member's bytes, in the order of nodes; in several meetings if a member's are too many
        for one.

        No node enters between these meetings, since all are at one iteration. A lost node is left out.
        """
        most = min(_PIECE, _MET // self._worker.world)
        met = self._meet(len(payload).to_bytes(_LENGTH, "little") + payload[:most], what)
        sizes = [int.from_bytes(each[:_LENGTH], "little") for each in met.payloads]
        whole = {node: bytearray(each[_LENGTH:]) for node, each in zip(met.nodes, met.payloads, strict=True)}
        for start in range(most, max(sizes), most):
            met = self._meet(payload[start : start + most], what)
            for node, each in zip(met.nodes, met.payloads, strict=True):
                whole[node] += each
        self._nodes.nodes = list(met.nodes)
        return [bytes(whole[node]) for node in met.nodes]

    def _meet(self, payload: bytes, what: str) -> Met:
        """Return all members' parts. If others have come for the mean of gradients, all meet for that first.

        All members have the same parts, and so come to the same meetings.
        """
        is_use = what.startswith(USE)
        met = self._meet_once(payload, what)
        while met.uses and len(met.uses) < len(met.nodes):
            if not is_use:
                self._worker.uses.answer()
            met = self._meet_once(payload, what)
        return met

    def standing_for(self, what: str) -> WorkerStand:
        if what.startswith(USE):  # also inside another call
            return WorkerStand(self.roster.place.rank, call(what, waiting_line()))
        return super().standing_for(what)

    def _meet_once(self, payload: bytes, what: str) -> Met:
        worker = self._worker
        number = worker.coming_meeting = worker.next_meeting
        worker.next_meeting += 1
        stand = self.standing_for(what)
        worker.send(Meet(number=number, at=worker.at, what=what[:256], payload=payload, stand=stand))
        worker.meets = True
        worker.wait(
            lambda: number in self._met or worker.left_out or worker.returned is not None,
            f"every node's part in {what}",
        )
        worker.meets = False
        worker.coming_meeting = worker.next_meeting
        met = self._met.pop(number, None)
        if met is None:
            raise GivenUpError(
                f"node {worker.node}: the others went on without this node while it was in {what}; start it "
                "again, and it enters where they are (atoll run does so with run.restarts)"
            )
        return met

    def take_from_first(self, tensors: Iterable[Tensor], what: str) -> None:
        """Overwrite `tensors` by those of the first node, if the nodes' tensors differ.

        If the first node is left out meanwhile, the tensor under way begins anew with the next node's values.
        """
        held = [tensor for tensor in tensors if tensor.numel()]
        if not held or self.roster.late:
            return
        digest = hashlib.sha256()
        for tensor in held:
            digest.update(bytes_of(tensor))
        if len(set(self.gather_bytes(digest.digest(), what))) == 1:
            return
        for tensor in held:
            while (flat := self._from_first(tensor, what)) is None:
                pass  # at most once for each node that is left out
            tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))

    def _from_first(self, tensor: Tensor, what: str) -> Tensor | None:
        """Return the first node's values of `tensor`, as bytes in host memory, 1-D.

        Returns None on all nodes if the first node was left out meanwhile: the next one, not knowing, brought
        nothing.
        """
        flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _PIECE):
            piece = flat[start : start + _PIECE]
            first = self.gather_bytes(bytes_of(piece) if is_first(self.roster) else b"", what)[0]
            if not first:
                return None
            put_bytes([piece], memoryview(bytearray(first)))
        return flat

    def _handle_met(self, message: Met) -> None:
        self._met[message.number] = message
