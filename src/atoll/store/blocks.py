"""Leases of a group of workers: one lease for all members, cut in a part for each (`wire/hub.py`: `Lease`).

Members number their requests from 1, for each epoch of a sampler. The member that first asks for a block has
it leased for all members that live at that time. The others get their part of it. A block is kept until each
living member has asked for a later one, since an answer may be lost.

A script may give up an epoch of which some members have asked for blocks that others have not. When it goes
back to an earlier epoch for the nth time, members number their requests from n * BLOCKS_A_REWIND + 1 on, for
all epochs. So all ask for equally many blocks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from atoll.core.errors import UserError
from atoll.store.leases import Key, Leases
from atoll.wire.messages import MOST_CUT, Cut, Lease, Leased

MOST_BATCHES = 64  # in a block that is cut
MOST_BLOCKS = 1024  # of an epoch: how far a group's fastest member may be ahead of its slowest
MOST_EPOCHS = 256  # of a sampler: so far a group's fastest member may be ahead where epochs are short
BLOCKS_A_REWIND = 2**26  # numbers of an epoch's blocks until the script goes back to an earlier epoch


@dataclass
class BlockState:
    """A leased block: positions `start` to `stop` of an epoch's order.

    It is empty if the epoch was over, or if nothing was free and the asker did not wait (not `patient`).

    Attributes:
        members: the ranks of the members that it is for, ascending.
        over: True if the epoch has no more positions.
        cut: the members' parts of each batch; None: each takes one run of the block, and all are alike.
        held: True if other contributors held positions of the epoch that may come back.
    """

    start: int
    stop: int
    members: list[int]
    over: bool = False
    cut: Cut | None = None
    held: bool = False


@dataclass
class EpochBlocks:
    """The blocks of an epoch.

    Attributes:
        blocks: blocks by number.
        asked: the latest number that each member has asked for.
    """

    blocks: dict[int, BlockState] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)


class Blocks:
    """The blocks of all contributors, leased from `leases`.

    Attributes:
        epochs: the blocks by contributor, sampler and epoch: all that a restart needs.
        changes: grows with each part that is given for the first time, which a journal has to know.
        cuts: grows with each block that is cut: later requests for the block need no cut.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.epochs: dict[Key, dict[tuple[int, int], EpochBlocks]] = {}
        self.changes = self.cuts = 0

    def handle_lease(
        self, key: Key, worker: int, members: Sequence[int], lease: Lease, may_wait: bool = True
    ) -> Leased:
        """Return the part of `worker` in a block. If nothing can be leased now, the answer is empty and not
        kept.

        Args:
            key: the contributor (the group) and its incarnation.
            members: the group's living members.
            may_wait: False: a new block is empty if nothing is free (store/leases.py: `patient`).

        Raises UserError for a worker that the block is not for, for one that is too far ahead, for a cut that
        `_flaw` refuses, and where `Leases.handle_lease` does. Nothing is leased then.
        """
        epoch = self.epochs.get(key, {}).get((lease.sampler, lease.epoch)) or EpochBlocks()
        block = epoch.blocks.get(lease.block)
        if block is None:
            self._check(epoch, worker, members, lease)
            if lease.cut is not None and (flaw := _flaw(lease.cut, worker)):
                raise UserError(
                    f"worker {worker} asks for block {lease.block} of epoch {lease.epoch} of contributor "
                    f"{key[0]}, cut in parts {flaw}"
                )
            block = self._new_block(key, members, lease, may_wait)
        if block is None:
            return _none(lease)
        if worker not in block.members:
            raise UserError(
                f"worker {worker} asks for block {lease.block} of epoch {lease.epoch} of contributor "
                f"{key[0]}, which was leased for workers {', '.join(map(str, block.members))}"
            )
        if lease.block > epoch.asked.get(worker, 0):
            self.changes += 1
            epoch.asked[worker], epoch.blocks[lease.block] = lease.block, block
            epochs = self.epochs.setdefault(key, {})
            epochs.pop((lease.sampler, lease.epoch), None)  # the epoch that is asked for last stands last
            epochs[lease.sampler, lease.epoch] = epoch
            _forget(epochs, lease, members)
        return _part(lease, block, worker)

    def _check(self, epoch: EpochBlocks, worker: int, members: Sequence[int], lease: Lease) -> None:
        """Raise UserError for a block that is not kept any more, or is too far ahead."""
        which = f"worker {worker} asks for block {lease.block} of epoch {lease.epoch}"
        if lease.block <= epoch.asked.get(worker, 0):
            raise UserError(f"{which}, and has asked for {epoch.asked[worker]} since: it is not kept")
        if len(epoch.blocks) >= MOST_BLOCKS:
            slowest = min(members, key=lambda member: epoch.asked.get(member, 0))
            raise UserError(
                f"{which}, while worker {slowest} of its group has asked for {epoch.asked.get(slowest, 0)}: "
                f"at most {MOST_BLOCKS} are kept"
            )

    def handle_fenced(self, key: Key) -> None:
        """Forget a contributor that is fenced: it commits nothing any more."""
        self.epochs.pop(key, None)

    def _new_block(self, key: Key, members: Sequence[int], lease: Lease, may_wait: bool) -> BlockState | None:
        """Lease a block for all members; None if nothing is free now, but may be later."""
        cut, count = None, lease.count * len(members)
        if lease.cut is not None:  # without the parts of members that were lost
            members = [member for member in members if member in lease.cut.parts]
            cut = Cut({member: lease.cut.parts[member] for member in sorted(members)}, lease.cut.least)
            count = min(lease.count, MOST_BATCHES) * (sum(cut.parts.values()) or len(members))
        whole = msgspec.structs.replace(lease, count=count, number=0)
        leased = self._leases.handle_lease(*key, whole, may_wait)
        if leased.start == leased.stop and not leased.over and lease.patient:
            return None
        self.cuts += cut is not None
        return BlockState(leased.start, leased.stop, sorted(members), leased.over, cut, leased.held)


def _flaw(cut: Cut, worker: int) -> str:
    """Return what is wrong with the parts for which `worker` asks, in words; empty if nothing is."""
    if worker not in cut.parts:
        return "of which none is its own"
    whole = sum(cut.parts.values())
    return "" if 1 <= whole < MOST_CUT else f"of {whole} samples, where 1 to {MOST_CUT - 1} can be cut"


def _forget(epochs: dict[tuple[int, int], EpochBlocks], lease: Lease, members: Sequence[int]) -> None:
    """Drop the blocks that all members have passed, and the epochs that were asked for the longest time ago
    where there are too many: of those that a script gives up no member asks for the rest."""
    epoch = epochs[lease.sampler, lease.epoch]
    least = min(epoch.asked.get(member, 0) for member in members)
    for number in [number for number in epoch.blocks if number < least]:
        del epoch.blocks[number]
    for (sampler, earlier), old in list(epochs.items()):
        behind = sampler == lease.sampler and earlier < lease.epoch and least  # all are in this epoch
        if behind and all(old.asked.get(member, 0) >= max(old.blocks) for member in members):
            del epochs[sampler, earlier]
    kept = [earlier for sampler, earlier in epochs if sampler == lease.sampler]
    for earlier in kept[:-MOST_EPOCHS]:
        del epochs[lease.sampler, earlier]


def _part(lease: Lease, block: BlockState, worker: int) -> Leased:
    """Return a worker's part of a block: contiguous parts in order of rank, the first ones longer by one.

    Of a block that is cut, return the whole block with the parts.
    """
    if block.cut is not None:
        return msgspec.structs.replace(
            _none(lease),
            start=block.start,
            stop=block.stop,
            over=block.over,
            block=lease.block,
            cut=block.cut,
            held=block.held,
        )
    size, more = divmod(block.stop - block.start, len(block.members))
    place = block.members.index(worker)
    start = block.start + place * size + min(place, more)
    leased = _none(lease)
    return msgspec.structs.replace(
        leased,
        start=start,
        stop=start + size + (place < more),
        over=block.over,
        length=size + (more > 0),
        block=lease.block,
    )


def _none(lease: Lease) -> Leased:
    return Leased(sampler=lease.sampler, epoch=lease.epoch, start=0, stop=0, number=lease.number)
