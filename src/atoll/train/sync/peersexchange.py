"""The way of a gradient to its node's CPU side, and of new parameters back: through memory that both share.

`step()` writes this node's own gradients into their slot, hands them over, and goes on with the newest local
parameters that the CPU side has published, which is one copy. It gives the CPU side the time to put that
contribution, and what has come meanwhile, over the global parameters, where this is short beside an
iteration: one step later they would be worth much less (docs/notes/peers.md). It waits for other nodes only
where the next iteration would begin with parameters that are staler than `sync.stale_max` allows. Of a node's
several devices (train/sync/peersring.py) the leader does so, and all take the same parameters. Source:
docs/peers.md, "What a step does".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.scriptline import waiting_line
from atoll.core.stands import Stand, StandError, decode_stand, encode_stand, gradients, gradients_in
from atoll.exchange.hostmemory import HostMemory
from atoll.tensors.binding import BoundChunk, Buffer
from atoll.tensors.changed import ChangedParameters
from atoll.tensors.torch_compat import version_of
from atoll.train.gradients.reducer import Clipping, Reducer
from atoll.train.gradients.samples import Contribution
from atoll.train.sync.peersworker import NodeWorker
from atoll.wire.device import (
    NO_MORE,
    Captured,
    Clip,
    Contribute,
    Freed,
    Note,
    Published,
    Release,
    Resumed,
    Want,
)
from atoll.wire.messages import Hyperparameters
from atoll.wire.workerstand import WorkerStand

FRESH_SHARE = 0.5  # of an iteration's computing, that may go into the wait for its own contribution's effect


class Said(msgspec.Struct):
    """A node's note on its contribution, sent to all nodes.

    It has the seconds to compute a sample (0: unknown), by which data is dealt, and the script's place.
    """

    pace: float = 0.0
    stand: Stand | None = None


def said_in(note: Note) -> Said:
    """What stands in a contribution's note; nothing where it is none of ours."""
    try:
        said = msgspec.msgpack.decode(note, type=Said)
        if said.stand is not None:
            decode_stand(encode_stand(said.stand))  # its texts are of another node
        return said
    except (msgspec.DecodeError, StandError):
        return Said()


@dataclass(frozen=True)
class NodeParts:
    """What an exchange needs of its node. `capture()` gives the script's state for a node that comes late;
    `returned(script)` takes it, where the others went on without this node. `overlaid`: parameters have the
    node's own contributions over them before those are applied."""

    worker: NodeWorker
    stale_max: int
    overlaid: bool
    capture: Callable[[], bytes]
    returned: Callable[[bytes], None]


class PeerExchange(Reducer):
    """Gradients are this node's own, as edits of them are; the mean over nodes is the CPU side's."""

    acts_before_forward = acts_before_state_dict = True
    sums_samples = False  # the CPU side says what all nodes have contributed

    def use(self, parts: NodeParts) -> None:
        """Exchange through this node's CPU side; called once, before all else."""
        worker = self._worker = parts.worker
        self._stale_max, self._overlaid = parts.stale_max, parts.overlaid
        self._capture, self._returned = parts.capture, parts.returned
        self._memory: HostMemory | None = None
        self._slots: list[dict[int, Buffer]] = []  # by slot and chunk: where gradients go
        self.taken = 0  # the global iteration that the parameters stand at
        self._is_set_up = False  # the CPU side has this memory
        self._newest: Published | None = None  # announced, and not copied
        self._held: int | None = None  # the buffer that was copied last
        self._through = 0  # what was announced has this node's contributions before this one over it
        self._overlaying = 0.0  # seconds that it took to write
        self._computing, self._left = 0.0, 0.0  # seconds between two steps, smoothed; when the last one ended
        self._freed = 0  # slots of earlier iterations may be written again
        self._clip: Clip | None = None  # what the script asked of the mean in this iteration
        self._weighed = Contribution(0.0, 0.0)  # this iteration's
        self._refused = False  # no node is to make this iteration's step
        self._stale = (
            False  # its gradients are of parameters from before the others went on without this node
        )
        self._versions = self._seen()
        self._comparing = [ChangedParameters(bound) for bound in self._chunks]
        self.seconds = 0.0  # in exchange and not waiting, of the latest step
        self.staleness = 0  # of the latest step's iteration, at its start
        self.pace: Callable[[], float] = lambda: 0.0  # seconds a sample at this device, as the session has it
        worker.left_behind = self._left_behind
        worker.on(Published, self._handle_published)
        worker.on(Freed, self._handle_freed)

    # Set up

    def attach(self, memory: HostMemory, iteration: int) -> None:
        """Exchange through this memory from `iteration` on; parameters are published there next."""
        self.detach()
        self._is_set_up = False
        self._worker.forget_copied()
        self._memory, self.steps, self._freed = memory, iteration, iteration
        if not self._worker.leads:
            return
        self._slots = [
            {
                bound.chunk.id: Buffer(bound.chunk, bound.parameters, flats[bound.chunk.id])
                for bound in self._chunks
            }
            for flats in (memory.gradients(slot) for slot in range(memory.plan.slots))
        ]

    def detach(self) -> None:
        """Let the memory go."""
        self._slots, self._newest, self._held = [], None, None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def begin_at(self, iteration: int) -> None:
        """Take the parameters with which `iteration` begins."""
        self.steps = self._freed = iteration
        self._worker.at = min(self._worker.at, max(0, iteration - 1))  # it may be an earlier checkpoint's
        self._through, self._left = 0, 0.0
        self._worker.wait(lambda: self._newest is not None, f"the parameters of iteration {iteration}")
        self.taken = 0  # of what the CPU side had before
        self.go_on(iteration, iteration - self._stale_max)

    def set_up(self) -> None:
        """The CPU side has taken the model over: what it publishes from now on is of this memory."""
        self._is_set_up = True
        self._newest = self._held = None
        self._through = 0

    def close(self) -> None:
        super().close()
        self.detach()

    # An iteration

    def before_use(self, *_: object) -> None:
        """A forward comes: where the others went on without this node, take up where they are."""
        returned, self._worker.returned = self._worker.returned, None
        if returned is None:
            return
        self._clip = None
        self._stale = self._stale or self._reduced  # an earlier backward's gradients are in the sum
        self._worker.send(Resumed(incarnation=returned.incarnation))
        self.begin_at(returned.iteration)
        self._returned(returned.script)
        if self._worker.leads:
            self._worker.tell(
                f"node {self._worker.node} was left out and came back: it goes on with iteration "
                f"{returned.iteration}{': ' if returned.reason else ''}{returned.reason}"
            )

    def between(self) -> None:
        """The script asks for data: between two iterations that is as good as a forward, and the loop over
        the data hears in time that it is to go on."""
        if not self._reduced:
            self.before_use()

    def reduce(self) -> None:
        """A backward has ended: nothing leaves the node before `step`."""
        self._come()
        self._weigh(self.contribute())
        if self._weighed.weight <= 0:  # no number, perhaps: as on a ring, it is shown nowhere
            for bound in self._chunks:
                for parameter in bound.parameters:
                    parameter.grad = None
        super().reduce()

    def _come(self) -> None:
        """Be at the end of an iteration's backward, where others may come in."""
        if self._worker.late:
            raise UserError(
                "this node comes late: the run is under way; call session.resume() before the loop, after "
                "session.prepare and all that it puts back (schedulers, samplers, session.register)"
            )
        if self._worker.returned is not None:  # no forward of the whole model came before, or none at all
            self._stale = any(p.grad is not None for bound in self._chunks for p in bound.parameters)
            PeerExchange.before_use(self)
        self._worker.take(f"the end of iteration {self.steps}'s backward")
        self._worker.at = max(self._worker.at, self.steps)
        self.give_state(self.steps)

    def _weigh(self, own: Contribution) -> None:
        """What this iteration's contribution weighs: what is of parameters too old, nothing."""
        self._weighed = Contribution(0.0, own.samples) if self._stale else own

    def before_step(self) -> None:
        self.check_unchanged()
        super().before_step()

    def refuse(self) -> None:
        self._refused = self._stale_max == 0  # else others may have computed with it already

    def clip(self, by: Clipping) -> Tensor:
        """The CPU side clips the mean, whose norm this node does not know; returns this node's own norm."""
        self._clip = Clip(max_norm=float(by.max_norm), norm_type=float(by.norm_type))
        return by.measure()

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        """The script's `optimizer.step()`: hand the contribution over, and go on."""
        self._calls.leaving()
        began, waited = time.perf_counter(), self._worker.seconds_waited
        self.staleness = max(0, self.steps - self.taken)
        self._worker.take(f"optimizer.step() of iteration {self.steps}", self._say())
        note = Said(self._node_pace(), gradients_in(self.steps, waiting_line(), self._calls.epoch()))
        if self._worker.returned is None:  # else what was computed counts nowhere
            self._hand_over(accepted, hyperparameters, note)
        self._clip, self._stale, self._refused = None, False, False
        if self._left:
            computing = began - self._left
            self._computing += 0.2 * (computing - self._computing) if self._computing else computing
        least = self.steps + 1 - self._stale_max
        if self._overlaid and self.at >= least:
            self._await_own()
        self.go_on(self.steps + 1, least)
        self._left = time.perf_counter()
        self.seconds = self._left - began - (self._worker.seconds_waited - waited)

    def _await_own(self) -> None:
        """Wait for parameters with this iteration's own contribution over them, where that is short."""
        limit, own = FRESH_SHARE * self._computing, self.steps + 1
        self._worker.give_time(
            limit if self._overlaying <= limit else 0.0,
            lambda: self._through >= own or self._worker.returned is not None,
        )

    def settle(self) -> None:
        """Wait until all that this node has contributed is applied, and take those parameters."""
        if self._memory is not None:
            self.go_on(self.steps, self.steps, "all that was contributed to be applied: ")

    def catch_up(self) -> None:
        """Return when all that this node has contributed is applied: so it is one of the members. Where they
        went on without it, when it is where they are."""
        self.settle()
        self._worker.wait(
            lambda: not self._worker.is_out or self._worker.returned is not None,
            "the others to let this node in again",
        )
        self.between()

    def go_on(self, iteration: int, least: int, why: str = "") -> None:
        """Take the newest parameters; wait for them where `iteration` must not begin before the global
        iteration is `least`; `why` that is stands before what is waited for."""
        if self.at < least and self._worker.returned is None:
            stand = WorkerStand(self._worker.introduction.place.rank, self._stand(iteration))
            self._worker.send(Want(iteration=iteration, least=least, stand=stand))
            self._worker.wait(
                lambda: self.at >= least or self._worker.returned is not None,
                lambda: (
                    f"{why}the global iteration to be {least}, before iteration {iteration}; it is {self.at}"
                ),
            )
        if self._worker.returned is None:
            self._take_newest()

    def epochs_mixed(self, line: str) -> None:
        """Pass on a warning about batches of different epochs."""
        self._calls.epochs_mixed(line)

    def _stand(self, iteration: int) -> Stand:
        """Return this worker's place in its script while it waits before `iteration`."""
        return self._worker.call or gradients(max(0, iteration - 1), waiting_line())

    @property
    def at(self) -> int:
        """The global iteration of the newest parameters that are there."""
        return self.taken if self._newest is None else self._newest.taken

    def give_state(self, boundary: int) -> None:
        """Give the script's state to the nodes that come in at this boundary between two iterations, or at
        one before."""
        due = [each for each in self._worker.wanted if each <= boundary]
        if due:
            self._worker.wanted = [each for each in self._worker.wanted if each > boundary]
            script = self._capture() if self._worker.leads else b""
            for iteration in due:
                meeting = self._worker.coming_meeting
                self._worker.send(Captured(iteration=iteration, script=script, meeting=meeting))

    def end(self, where: str) -> None:
        """All iterations are made, as `where` says: return when they are applied. From now on any time is a
        boundary."""
        self._worker.take(where)
        self.settle()
        self._worker.at = NO_MORE
        self._worker.asked = lambda: self.give_state(NO_MORE)
        self._worker.asked()

    def check_unchanged(self) -> None:
        """Raise UserError if the script has written to a parameter: the CPU side would not know.

        What was changed and changed back (to evaluate with an average of the weights, say) is unchanged.
        """
        for name in self._changed():
            raise UserError(
                f"parameter {name!r} was changed by the script after session.prepare; under strategy "
                "'peers' the node's CPU side makes the parameters: change it before session.prepare, or "
                "save and session.load it"
            )

    # Inside

    def _hand_over(self, accepted: bool, hyperparameters: Hyperparameters, note: Said) -> None:
        """Write the gradients into their slot, and say so."""
        own, memory = self._weighed, self._memory
        assert memory is not None
        self._await_slot(self.steps, memory.plan.slots)
        if self._worker.returned is not None or not self._worker.leads:
            return
        buffers = self._slots[self.steps % memory.plan.slots]
        present = [self._write(bound, buffers[bound.chunk.id]) for bound in self._chunks]
        self._worker.send(
            Contribute(
                iteration=self.steps,
                taken=self.taken,
                samples=own.samples,
                weight=own.weight if accepted else 0.0,
                basis=own.basis,
                alike=own.alike,
                present=present,
                hyperparameters=hyperparameters,
                clip=self._clip,
                note=msgspec.msgpack.encode(note),
                refused=self._refused,
            )
        )
        sent_to = max(0, len(self._worker.members) - 1)
        self.bytes_sent += sent_to * sum(run.nbytes for run in memory.plan.trained)

    def _await_slot(self, iteration: int, slots: int) -> None:
        """Wait until the iteration's slot may be written."""
        if self._freed <= iteration - slots:
            self._worker.wait(
                lambda: self._freed > iteration - slots or self._worker.returned is not None,
                f"room for iteration {iteration}, in the slot of iteration {iteration - slots}, which "
                "others have yet to get",
            )

    def _say(self) -> bytes:
        """What the leader is to hear of this device before the node contributes."""
        return b""

    def _node_pace(self) -> float:
        """Seconds that this node takes for a sample, by what its devices have just said."""
        return self.pace()

    def _write(self, bound: BoundChunk, into: Buffer) -> bytes:
        """A chunk's gradients, zeros where there are none; which there are, a byte each."""
        present = []
        for parameter, view in zip(bound.parameters, into.views, strict=True):
            gradient = parameter.grad if self._weighed.weight > 0 else None
            view.zero_() if gradient is None else view.copy_(gradient)
            present.append(gradient is not None)
        return bytes(present)

    @torch.no_grad()
    def _take_newest(self) -> None:
        """Copy the newest parameters that were announced, if there are any."""
        newest, self._newest = self._newest, None
        if newest is None:
            return
        assert self._memory is not None
        self._adopt(self._memory.buffer(newest.buffer))
        # The one that was copied last is kept: `check_unchanged` compares with it.
        if self._held is not None and self._held != newest.buffer:
            self._worker.release(self._held)
        self._held, self.taken = newest.buffer, newest.taken
        self._versions = self._seen()

    def _adopt(self, values: Mapping[int, Tensor]) -> None:
        """Let the parameters have these values, by chunk; nobody reads those taken before when it returns."""
        assert self._memory is not None
        former = {} if self._held is None else self._memory.buffer(self._held)
        for bound, comparing in zip(self._chunks, self._comparing, strict=True):
            new = values[bound.chunk.id]
            changed = comparing.between(former.get(bound.chunk.id), new)
            bound.flat[: bound.chunk.extent].copy_(new)
            if changed:
                torch.autograd.graph.increment_version(changed)

    def _changed(self) -> list[str]:
        """The parameters whose values are not those that were taken."""
        seen = zip(self._versions, self._seen(), strict=True)
        return [name for (name, before), (_, now) in seen if before != now and self._differs(name)]

    def _seen(self) -> list[tuple[str, int]]:
        return [
            (name, version_of(parameter))
            for bound in self._chunks
            for name, parameter in zip(bound.names, bound.parameters, strict=True)
        ]

    def _differs(self, name: str) -> bool:
        bound = next(bound for bound in self._chunks if name in bound.names)
        if self._memory is None or self._held is None:
            return False
        values = self._memory.buffer(self._held)[bound.chunk.id]
        return not torch.equal(bound.flat[: bound.chunk.extent].cpu(), values)

    def _left_behind(self) -> None:
        if self._newest is not None:
            self._worker.send(Release(buffers=[self._newest.buffer]))
            self._newest = None

    def _handle_published(self, message: Published, _descriptors: list[int]) -> None:
        if not self._is_set_up:
            return  # of the set-up before: the CPU side has let go of those buffers
        if self._newest is not None and self._newest.buffer != message.buffer:
            self._worker.send(Release(buffers=[self._newest.buffer]))
        self._newest = message
        if message.through > self._through:
            self._through, self._overlaying = message.through, message.seconds

    def _handle_freed(self, message: Freed, _descriptors: list[int]) -> None:
        self._freed = max(self._freed, message.before)

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        """Which iteration this node makes next is the CPU side's to say."""
