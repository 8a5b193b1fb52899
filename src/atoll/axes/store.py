"""The protocol of a store: where values, gradients and their means lie, and who may write there when.

A store keeps memory of several kinds for each chunk. Callers name a kind by its text: `VALUES`, `LOCAL`,
`REDUCED`, `MEAN`, or one that a synchronizer adds (`Needs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from atoll.axes.values import Members, Run, Wait
from atoll.chunks import ChunkMap

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VALUES = "values"  # the parameters
LOCAL = "local"  # this member's gradients
REDUCED = "reduced"  # the group's sum of gradients
MEAN = "mean"  # over all contributors

Unit: TypeAlias = Literal["element", "tensor"]  # what an optimizer may step by itself


@dataclass(frozen=True)
class Kind:
    """Memory that one choice adds for each element of the trained chunks.

    Args:
        name: of the kind.
        element_bytes: None: those of the chunk's own dtype.
        tier: where the memory lies.
        lasts: for how long: through the run, or from a contribution's sum to its commit.
    """

    name: str
    element_bytes: int | None
    tier: Literal["device", "host", "shard"]
    lasts: Literal["run", "exchange"]


@dataclass(frozen=True)
class Needs:
    """The needs of one choice: the kinds that it adds, and the unit in which it can be stepped.

    The memory planner computes each formula of docs/memory.md from the kinds of all choices of a run.
    """

    kinds: tuple[Kind, ...] = ()
    unit: Unit = "element"


@dataclass(frozen=True)
class Edits:
    """The script's edits of the gradients that it was shown.

    Args:
        factor: by which all of them were multiplied (clipping, unscaling); 1.0: by nothing.
        chunks: those with writes that `factor` does not explain.
    """

    factor: float
    chunks: frozenset[int]


class Lease(Protocol):
    """Memory of one run, within a `with` of the store's."""

    tensor: Tensor  # (stop - start,), contiguous, on the device that was asked for

    def ready(self, stream: torch.Stream | None, wait: Wait) -> None:
        """Have `stream` wait until the tensor holds what was asked for; None: the host waits."""

    def used(self, event: torch.Event | None) -> None:
        """The tensor is in use until `event`; None: the use is over."""


class Hold(Protocol):
    """A promise that one kind stays as it is: senders read the kind through the hold, again and again."""

    def read(self, run: Run, on: torch.device) -> AbstractContextManager[Lease]:
        """The run's elements on a device. May wait for a tier. Raises ResourceError where the device has no
        room."""

    def release(self) -> None:
        """The kind may be written from now on."""


class Update(Protocol):
    """A rewriting of all values, which counts only once every run was written."""

    def write(self, run: Run, values: Tensor) -> None:
        """Put `values`, (stop - start,), into the run."""


class ValueSource(Protocol):
    """Another holder of a member's values, for when the member has died."""

    def fetch(self, kind: str, run: Run, into: Tensor, wait: Wait) -> None:
        """Fill `into`, (stop - start,). Raises RunError where nobody has the elements any more."""


class LazyEntry(Protocol):
    """One parameter's values, which are read when a checkpoint is written."""

    name: str

    def read(self) -> Tensor:
        """The values, in the parameter's shape."""


class ChunkStore(Protocol):
    """Where one step set's chunks lie. Each method says what must hold before, and what holds after.

    `layout` is the same on every worker. A store may cut its own memory in other ways, which nobody sees.
    """

    layout: ChunkMap
    device: torch.device
    unit: Unit  # a Stepper of unit "tensor" needs a store of unit "tensor", whose runs are whole tensors

    def owned(self, chunk: int, rank: int) -> tuple[Run, ...]:
        """The runs of a chunk that a member steps: all of the chunk, where members do not share the model."""

    def present(self, kind: str) -> frozenset[int]:
        """The parameters that have a gradient of this kind, by their number in the layout."""

    def read(self, kind: str, run: Run, on: torch.device) -> AbstractContextManager[Lease]:
        """The run's elements, unchanged within the `with`. No second lease may be taken across a collective.
        May wait for a tier. Raises ResourceError where a tier has no room."""

    def write(self, kind: str, run: Run, on: torch.device) -> AbstractContextManager[Lease]:
        """Memory for the run's elements, which are the store's at the end of the `with`. Raises StoreError,
        which is Atoll's own fault, if the kind is held."""

    def hold(self, kind: str) -> Hold:
        """Keep the kind as it is until the hold is released. Never waits."""

    def renew(self, kind: str) -> None:
        """Give the kind other memory: a ring that broke may still write into the former. Never waits."""

    def scale(self, kind: str, factor: float) -> None:
        """Multiply all elements of a kind that is not held."""

    def show(self, kind: str, present: frozenset[int]) -> None:
        """Let `p.grad` be this kind for the parameters in `present`, and None for the others. A swap of
        memory; the round that made the kind must be confirmed."""

    def edits(self) -> Edits:
        """All writes to the shown gradients since `show`: a GradScaler's, and those through kept views."""

    def norms(self, kind: str, p: float) -> Tensor:
        """The p-norms of the runs that this member owns, by parameter, (parameters,), float64, on the
        host."""

    def update(self, stepped: bool) -> AbstractContextManager[Update]:
        """Rewrite the values. At the end of the `with` all runs count as written and versions are raised, or,
        after an error, none does. `stepped`: an optimizer's step; else a jump to another iteration."""

    def reshard(self, members: Members, source: ValueSource | None, wait: Wait) -> None:
        """Be a store of these members; `source` gives what lost members held. Raises RunError where the only
        copy of a part is gone."""

    def snapshot(self) -> Iterator[LazyEntry]:
        """The values, parameter by parameter, in the order of the model."""

    def close(self) -> None:
        """Let all memory go."""


class Trial(Protocol):
    """A step that can still be taken back."""

    def keep(self) -> None:
        """The step counts: values and state are swapped in."""

    def drop(self) -> None:
        """The step never was."""


@dataclass(frozen=True)
class StateEntry:
    """One piece of an optimizer's state: of a parameter, under a key, a number or a tensor of any shape."""

    parameter: str
    key: str
    value: Tensor | float


@dataclass(frozen=True)
class StepDecision:
    """The arguments of one `optimizer.step()`.

    Args:
        accepted: False: the step is left out (a GradScaler, or `sync.nonfinite`).
        settings: the optimizer's param groups, as plain values.
    """

    accepted: bool
    settings: tuple[dict[str, object], ...]


class Stepper(Protocol):
    """Steps one step set with the user's optimizer, wherever its values lie: at a worker, a shard, a CPU
    side."""

    unit: Unit

    def step(self, store: ChunkStore, kind: str, decision: StepDecision) -> None:
        """Step the owned runs of `store` with the gradients of `kind`. The gradients must be there; where the
        unit is "tensor", whole tensors. May wait for a tier. Raises what the optimizer raises."""

    def trial(self, store: ChunkStore, unit: Run | str, gradient: Lease) -> Trial:
        """Step one run, or the parameter of that name, on copies."""

    def state(self) -> Iterator[StateEntry]:
        """The optimizer's state, piece by piece."""

    def load(self, entries: Iterable[StateEntry]) -> None:
        """Take a state over. Raises UserError where the state is another optimizer's."""
