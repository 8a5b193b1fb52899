"""The way of a gradient to its node's CPU side, and of new parameters back, through shared memory.

`step()` writes this node's own gradients into their slot, hands the slot over, and goes on with the newest
local parameters that the CPU side has published, which is one copy. It first gives the CPU side time to
overlay the parameters with that contribution and with others that have come meanwhile, if this takes little
time beside an iteration: one step later the overlay would be worth much less (docs/notes/peers.md). It waits
for other nodes only if the next iteration would begin with parameters staler than `sync.stale_max` allows. Of
several devices of a node (train/sync/peersring.py) the leader does this, and all take equal parameters.
Source: docs/peers.md, "What a step does".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from atoll.core.decoding import from_msgpack
from atoll.core.errors import GivenUpError, UserError
from atoll.core.scriptline import at_script_line, waiting_line
from atoll.core.stands import Stand, StandError, decode_stand, encode_stand, gradients, gradients_in
from atoll.exchange.coding import Coding
from atoll.exchange.hostmemory import HostMemory
from atoll.tensors.binding import BoundChunk
from atoll.tensors.torch_patches import clipped_at
from atoll.train.gradients.reducer import Calls, Clipping, Reducer
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.sums import MakeSum, OwnAtEnd
from atoll.train.gradients.watch import EditWatch
from atoll.train.sync.peersmean import NodesMean, ReadMean
from atoll.train.sync.peersparameters import DeviceParameters, LocalParameters, Slots
from atoll.train.sync.peersscale import GradientScale
from atoll.train.sync.peersworker import NodeWorker
from atoll.wire.device import (
    NO_MORE,
    CaptureAt,
    Captured,
    Clip,
    Contribute,
    Note,
    Resumed,
    Want,
)
from atoll.wire.messages import Hyperparameters
from atoll.wire.workerstand import WorkerStand

FRESH_SHARE = 0.5  # the most of an iteration's computing time to wait for its own contribution's effect


class Said(msgspec.Struct):
    """A node's note on its contribution, sent to all nodes.

    Attributes:
        pace: the seconds in which the node computes a sample, by which data is dealt; 0: unknown.
        stand: the script's place.
    """

    pace: float = 0.0
    stand: Stand | None = None


def said_in(note: Note) -> Said:
    """Return the content of a contribution's note; an empty one if the note cannot be read."""
    try:
        said = from_msgpack(note, Said)
        if said.stand is not None:
            decode_stand(encode_stand(said.stand))  # raises StandError for bad texts of another node
        return said
    except (msgspec.DecodeError, StandError):
        return Said()


@dataclass(frozen=True)
class NodeParts:
    """The parts of a node that its exchange needs.

    Attributes:
        worker: the node.
        coding: writes gradients for the way.
        place: where parameters and gradients lie.
        stale_max: the most iterations that this node may be ahead.
        overlaid: True if local parameters include the node's own contributions before these are applied.
        capture: returns the script's state for a node that comes late.
        returned: takes the script's state, after the others went on without this node.
        pace: returns the seconds in which this device computes a sample; 0: not known.
        tell: prints a line for people.
        scale: the scale of a GradScaler in this iteration's gradients.
        mean: makes the mean over the nodes, for a script that uses gradients.
    """

    worker: NodeWorker
    coding: Coding
    place: DeviceParameters
    stale_max: int
    overlaid: bool
    capture: Callable[[], bytes]
    returned: Callable[[bytes], None]
    pace: Callable[[], float]
    tell: Callable[[str], None]
    scale: GradientScale
    mean: NodesMean


class ScriptState:
    """The giving of the script's state to nodes that come in, at a boundary between two iterations."""

    def __init__(self, worker: NodeWorker, capture: Callable[[], bytes]) -> None:
        self._worker, self._capture = worker, capture
        self._is_at_end = False  # True: any time is a boundary
        worker.on(CaptureAt, lambda _: self._asked())

    def give(self, boundary: int) -> None:
        """Give the state to nodes that come in at this boundary or at an earlier one."""
        due = [each for each in self._worker.wanted if each <= boundary]
        if due:
            self._worker.wanted = [each for each in self._worker.wanted if each > boundary]
            script = self._capture() if self._worker.leads else b""
            for iteration in due:
                meeting = self._worker.coming_meeting
                self._worker.send(Captured(iteration=iteration, script=script, meeting=meeting))

    def end(self) -> None:
        """Note that the script makes no more iterations: from now on any time is a boundary."""
        self._is_at_end = True
        self._asked()

    def _asked(self) -> None:
        if self._is_at_end:
            self.give(NO_MORE)


class OwnGradientNotices:
    """Tells people once, by the first node, where what a script sees or changes is a node's own gradient."""

    def __init__(
        self,
        edits: EditWatch,
        worker: NodeWorker,
        tell: Callable[[str], None],
        scale: GradientScale,
    ) -> None:
        self._edits, self._worker, self._tell, self._scale = edits, worker, tell, scale
        self._is_noted = self._told_of_edits = self._told_of_sparse = False

    def note(self) -> None:
        """Note the gradients as backward has left them, where nodes are at unlike iterations."""
        self._is_noted = not self._told_of_edits
        if self._is_noted:
            self._edits.note()

    def look(self) -> None:
        """Tell of the first change since `note`: the script steps."""
        if not self._is_noted:
            return
        self._is_noted, name = False, self._edits.first_edited(self._scale.is_out)
        if name:
            self._told_of_edits = True
            line = clipped_at()
            how = at_script_line("torch.nn.utils.clip_grad_norm_", line) if line else "optimizer.step"
            self._tell_all(
                f"{how}: {name}.grad was changed after its backward, and with sync.stale_max above 0 it is "
                "this node's own: a step is of the mean of what the nodes make of theirs; set "
                "sync.stale_max to 0 for the mean in p.grad, or call session.clip_grad_norm_, which clips "
                "the mean"
            )

    def tell_of_sparse(self, name: str) -> None:
        """Tell that the gradient of the parameter `name` is sparse; "" for none."""
        if name and not self._told_of_sparse:
            self._told_of_sparse = True
            self._tell_all(
                f"{name}.grad is sparse, and under strategy 'peers' it stays this node's own after "
                "backward: the step is of the mean, and what the script reads or changes of it is not; "
                "give the layer sparse=False, or set run.strategy to ring, where it uses p.grad"
            )

    def _tell_all(self, line: str) -> None:
        if self._worker.leads and self._worker.node == min(self._worker.members):
            self._tell(line)


class NextParameters:
    """The parameters with which a node's next iteration begins, and the wait for them.

    A node waits only if those that it has would be staler than allowed. Meanwhile it brings its gradients to
    means that other nodes' scripts want.
    """

    def __init__(
        self,
        worker: NodeWorker,
        parameters: LocalParameters,
        is_asked: Callable[[], bool],
        answer: Callable[[], object],
    ) -> None:
        """`is_asked()` is True while another node's script waits for this node's gradients, and `answer`
        brings them."""
        self._worker, self._parameters = worker, parameters
        self._is_asked, self._answer = is_asked, answer

    def take(self, iteration: int, least: int, why: str = "", *, takes: bool = True) -> None:
        """Take the newest parameters; wait if the global iteration is below `least`.

        Args:
            iteration: this node's next iteration, for errors.
            least: the least global iteration with which `iteration` may begin.
            why: the reason, which stands before the wait's description in errors.
            takes: False to leave the parameters as they are.
        """
        worker, parameters = self._worker, self._parameters

        def is_over() -> bool:
            return parameters.at >= least or worker.returned is not None

        if not is_over():
            at = worker.call or gradients(max(0, iteration - 1), waiting_line())
            stand = WorkerStand(worker.introduction.place.rank, at)
            while not is_over():
                worker.send(Want(iteration=iteration, least=least, stand=stand))
                worker.wait(
                    lambda: is_over() or self._is_asked(),
                    lambda: (
                        f"{why}the global iteration to be {least}, before iteration {iteration}; "
                        f"it is {parameters.at}"
                    ),
                )
                if not is_over():
                    self._bring()
        if takes and worker.returned is None:
            parameters.take_newest()

    def _bring(self) -> None:
        """Bring this node's gradients to another one's script, unless this node is left out."""
        try:
            self._answer()
        except GivenUpError:
            if self._worker.returned is None and not self._worker.is_out:
                raise


class PeerExchange(Reducer):
    """The exchange of a node's gradients.

    The CPU side computes the mean over nodes. Where nodes make each iteration together
    (`sync.stale_max = 0`), `p.grad` becomes the mean when the script uses it; else it is this node's own
    gradient, and edits act on that.

    Attributes:
        parameters: this device's copy of the CPU side's parameters.
        seconds: the seconds of the latest step's exchange, without waits.
        staleness: the staleness, in iterations, at the start of the latest step's iteration.
    """

    acts_before_forward = acts_before_state_dict = True
    leaves_at_step = True
    sums_samples = False  # the CPU side reports the samples of all nodes

    def __init__(
        self, chunks: Sequence[BoundChunk], calls: Calls, parts: NodeParts, make_sum: MakeSum = OwnAtEnd
    ) -> None:
        super().__init__(chunks, calls, make_sum)
        worker = self._worker = parts.worker
        self._coding, self._scale = parts.coding, parts.scale
        self._stale_max, self._overlaid = parts.stale_max, parts.overlaid
        self._returned, self._pace, self._tell = parts.returned, parts.pace, parts.tell
        self._place = parts.place
        self._own_gradients = OwnGradientNotices(EditWatch(chunks), worker, parts.tell, parts.scale)
        self.parameters = LocalParameters(parts.place, worker)
        self._slots = Slots(worker)
        self._mean = ReadMean(
            parts.mean, parts.place, self.parameters, self._slots, worker.leads, parts.scale
        )

        def answer() -> bool:
            return self._mean.answer(self.steps)

        worker.uses.on(answer)
        self._coming = NextParameters(worker, self.parameters, self._mean.is_asked, answer)
        self._script = ScriptState(worker, parts.capture)
        self._computing, self._left = 0.0, 0.0  # smoothed seconds between two steps; the end of the last step
        self._clip: Clip | None = None  # the clipping that the script asked of this iteration's mean
        self._weighed = ContributionWeight(0.0, 0.0)  # this iteration's contribution
        self._refused = False  # True if no node may make this iteration's step
        # True if the gradients' parameters are from before the others went on without this node:
        self._stale = False
        self.seconds = 0.0
        self.staleness = 0

    # Set up

    def attach(self, memory: HostMemory, iteration: int) -> None:
        """Exchange through `memory` from `iteration` on; parameters are published there next."""
        self.parameters.attach(memory)
        self.steps = self._slots.freed = iteration
        self._place.attach(memory, iteration)

    def begin_at(self, iteration: int) -> None:
        """Take the parameters with which `iteration` begins."""
        parameters = self.parameters
        self._mean.restart()
        self.steps = self._slots.freed = iteration
        # A load of an earlier checkpoint goes back:
        self._worker.at = min(self._worker.at, max(0, iteration - 1))
        parameters.through, self._left = 0, 0.0
        self._worker.wait(lambda: parameters.is_newer, f"the parameters of iteration {iteration}")
        parameters.taken = 0  # forget the former parameters
        self._coming.take(iteration, iteration - self._stale_max)
        self._place.begin(iteration)

    def close(self) -> None:
        self._mean.close()
        super().close()
        self.parameters.detach()
        self._place.detach()

    # An iteration

    def before_use(self, of: Collection[int] | None = None, *_: object) -> None:  # noqa: ARG002
        self._come_back()

    def _come_back(self) -> None:
        """Go on at the others' iteration, if they went on without this node and it is back."""
        returned, self._worker.returned = self._worker.returned, None
        if returned is None:
            return
        self._clip = None
        self._mean.leave()
        self._stale = self._stale or self.phase.reduced  # an earlier backward's gradients are in the sum
        self._worker.send(Resumed(incarnation=returned.incarnation))
        self.begin_at(returned.iteration)
        self._returned(returned.script)
        if self._worker.leads:
            self._tell(
                f"node {self._worker.node} was left out and came back: it goes on with iteration "
                f"{returned.iteration}{': ' if returned.reason else ''}{returned.reason}"
            )

    def between(self) -> None:
        """Act as before a forward, since the script asks for data between two iterations.

        So the loop over the data learns in time that it goes on.
        """
        if not self.phase.reduced:
            self.before_use()

    def reduce(self) -> None:
        """Finish the iteration's gradients after backward. Nothing leaves the node before `step`."""
        self._come()
        self._weigh(self.contribute(), adds=self.phase.unsent)
        if self._weighed.weight <= 0:  # gradients of weight 0 may be NaN: show none, like a ring
            for bound in self._chunks:
                for parameter in bound.parameters:
                    parameter.grad = None
        self._sum_up()
        self._show()

    def _show(self) -> None:
        """Let the script have the gradients of a reduction: the mean, once it uses one, if nodes are at one
        iteration."""
        several = len(self._worker.members) > 1
        if self._stale_max == 0:
            if self._mean.is_here:
                self._clip = None  # what was clipped was the mean of earlier backwards
            if several:
                self._own_gradients.tell_of_sparse(self._place.first_sparse)
            self._mean.begin(self.steps, self._weighed, shows=several)
        elif several:
            self._own_gradients.note()

    def begins_backward(self) -> None:
        self._mean.begins_backward()
        super().begins_backward()

    def _sum_up(self) -> None:
        """Sum the gradients over the node's devices."""
        super().reduce()

    def _come(self) -> None:
        """Mark the end of an iteration's backward, where other nodes may come in.

        Raises UserError if this node comes late and has not entered.
        """
        if self._worker.late:
            raise UserError(
                "this node comes late: the run is under way; call session.resume() before the loop, after "
                "session.prepare and all that it puts back (schedulers, samplers, session.register)"
            )
        if self._worker.returned is not None:  # no forward of the model has acted on the return
            self._stale = any(p.grad is not None for bound in self._chunks for p in bound.parameters)
            self._come_back()
        self._worker.take(f"the end of iteration {self.steps}'s backward")
        self._worker.at = max(self._worker.at, self.steps)
        self._script.give(self.steps)

    def _weigh(self, own: ContributionWeight, *, adds: bool = False) -> None:
        """Add a reduction's part to this iteration's contribution; it weighs 0 if its gradients are of
        parameters that are too old. `adds` as in SinceStep.

        Where the mean of the backwards before is in `p.grad`, on every node alike, the latest one's weights
        alone make the mean of all.
        """
        if self._mean.is_here:
            self.since_step.drop_weights()
        self.since_step.add(own, adds=adds)
        so_far = self.since_step.so_far
        self._weighed = ContributionWeight(0.0, so_far.samples) if self._stale else so_far

    def before_step(self, follows: bool = False) -> None:
        self.parameters.check_unchanged()
        self._mean.check_unwritten()
        with self._mean.plain():
            super().before_step(follows)
        self._own_gradients.look()

    def count_before(self) -> None:
        with self._mean.plain():
            super().count_before()

    def contribute(self) -> ContributionWeight:
        with self._mean.plain():
            return super().contribute()

    def note_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        with self._mean.plain():
            super().note_zeros(parameters)

    def begins_step(self) -> None:
        self._mean.put_back()

    def after_step(self) -> None:
        super().after_step()
        self._mean.hide()

    def refuse(self) -> None:
        self._refused = self._stale_max == 0  # else other nodes may have used it already

    def clip(self, by: Clipping) -> Tensor:
        """Clip the mean if it is here. Else let the CPU side do so, and return this node's own norm."""
        self._clip = Clip(max_norm=float(by.max_norm), norm_type=float(by.norm_type))
        if self._mean.is_here:
            return super().clip(by)
        self._mean.clips(self._clip)
        with self._mean.plain():
            return by.measure()

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        """Make the script's `optimizer.step()`: hand the contribution over, and go on with new parameters."""
        self._scale.step()
        self._calls.leaving()
        began, waited = time.perf_counter(), self._worker.seconds_waited
        self.staleness = max(0, self.steps - self.parameters.taken)
        self._worker.take(f"optimizer.step() of iteration {self.steps}", self._say())
        note = Said(self._node_pace(), gradients_in(self.steps, waiting_line(), self._calls.epoch()))
        if self._worker.returned is None:  # otherwise the contribution counts nowhere
            self._hand_over(accepted, hyperparameters, note)
        self.since_step.take(accepted=accepted)
        self._clip, self._stale, self._refused = None, False, False
        if self._left:
            computing = began - self._left
            self._computing += 0.2 * (computing - self._computing) if self._computing else computing
        least = self.steps + 1 - self._stale_max
        if self._overlaid and self.parameters.at >= least:
            self.parameters.give_time(FRESH_SHARE * self._computing, self.steps + 1)
        self._coming.take(self.steps + 1, least)
        self._left = time.perf_counter()
        self.seconds = self._left - began - (self._worker.seconds_waited - waited)
        self._end_step()

    def settle(self, *, takes: bool = True) -> None:
        """Wait until all contributions of this node are applied, and take those parameters.

        Values that the script has written stay as they are, as an average of the weights for an evaluation
        does; so do all with `takes` False.
        """
        parameters = self.parameters
        if parameters.memory is None:
            return
        self._coming.take(self.steps, self.steps, "all that was contributed to be applied: ", takes=False)
        is_here = takes and parameters.is_newer and self._worker.returned is None
        if is_here and not parameters.changed():
            parameters.take_newest()

    def catch_up(self) -> None:
        """Return when all contributions of this node are applied, so that it is a member.

        If the others went on without it, return when it is at their iteration.
        """
        self.settle()
        self._worker.wait(
            lambda: not self._worker.is_out or self._worker.returned is not None,
            "the others to let this node in again",
        )
        self.between()

    def end(self, where: str) -> None:
        """Return when all iterations are applied, as the session ends at `where`. From now on any time is a
        boundary."""
        self._worker.take(where)
        self.settle()
        self._worker.at = NO_MORE
        self._script.end()

    # Inside

    def _hand_over(self, accepted: bool, hyperparameters: Hyperparameters, note: Said) -> None:
        """Write the gradients into their slot, and announce them to the CPU side."""
        own, memory = self._weighed, self.parameters.memory
        assert memory is not None
        self._slots.await_free(self.steps, memory.plan.slots)
        if self._worker.returned is not None or not self._worker.leads:
            self._mean.contributed([], accepted=accepted)
            self._place.begin(self.steps + 1)
            return
        present = self._place.write(self.steps, own.weight > 0)
        self._worker.send(
            Contribute(
                iteration=self.steps,
                taken=self.parameters.taken,
                samples=own.samples,
                weight=own.weight if accepted else 0.0,
                basis=own.basis,
                alike=own.alike,
                present=present,
                hyperparameters=hyperparameters,
                clip=self._clip,
                mean=self._mean.is_here,
                clipped=self._mean.is_here and self._clip is not None,
                note=msgspec.msgpack.encode(note),
                refused=self._refused,
            )
        )
        self._mean.contributed(present, accepted=accepted)
        sent_to = max(0, len(self._worker.members) - 1)
        coding = self._coding
        self.bytes_sent += sent_to * sum(coding.size(run.numel, run.dtype) for run in memory.plan.trained)
        self._place.begin(self.steps + 1)

    def _say(self) -> bytes:
        """Return the bytes for the leader to hear of this device before the node contributes."""
        return b""

    def _node_pace(self) -> float:
        """Return the seconds in which this node computes a sample, by the reports of its devices."""
        return self._pace()

    def _end_step(self) -> None:
        """End the step: its parameters are taken."""
        memory = self.parameters.memory
        assert memory is not None
        if self._place.waits_for_next and self._worker.returned is None:
            self._slots.await_free(self.steps + 1, memory.plan.slots)
        self._place.stepped()

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the CPU side decides which iteration this node makes next."""
