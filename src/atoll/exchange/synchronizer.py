"""The protocol of a strategy from another package: what the contributors of a run exchange, and when.

A contributor is a worker by itself, or a group of workers that sum their gradients in each step. Each trains
a replica of the model with an optimizer of its own. After each step a synchronizer says which exchanges are
due. The driver (`train/sync/replicas.py`) makes them with all contributors, as rounds that a death does not
undo. docs/own-strategy.md shows an example; docs/reference/synchronizer.md lists what either side may rely
on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atoll.axes.values import ElementRange

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Contributors:
    """The contributors of an exchange. In one exchange all contributors know the same names.

    Args:
        own: the name of this worker's contributor.
        names: the names of all living contributors, in ascending order. A name never changes: it is the
            worker's number, or the group's if workers are in groups.
    """

    own: int
    names: tuple[int, ...]


class Update(Protocol):
    """An open change of a replica's values."""

    def write(self, run: ElementRange, values: Tensor) -> None:
        """Write `values`, (stop - start,), into the run."""


class Replica(Protocol):
    """The values of this contributor's replica, on the device or in tiers of memory."""

    @property
    def runs(self) -> tuple[ElementRange, ...]:
        """The trained parameters in pieces that are equal on every worker: one for each chunk."""

    def read(self, run: ElementRange) -> Tensor:
        """Return a copy of a run's values, (stop - start,), in host memory, in the parameters' own dtype."""

    def update(self) -> AbstractContextManager[Update]:
        """Return a context in which `write(run, values)` gives runs new values. The optimizer's state
        stays."""


class Link(Protocol):
    """The link to the other contributors."""

    def swap(self, payloads: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Send payloads to contributors, by name; return the payloads that they sent to this one, by name.

        A payload is a tensor of uint8, (bytes,), in host memory. Every contributor makes the call, with no
        payloads if it has none to send. The call waits for all. In a group, each member gets the payloads
        that came for the group.
        """


class Coder(Protocol):
    """Encodes values by the run's codec (`sync.codec`), and decodes them."""

    def encode(self, values: Tensor, seed: int) -> Tensor:
        """Return the payload of `values`, (elements,), in host memory: uint8, (bytes,).

        Equal values and seeds give equal bytes. Any number that differs from exchange to exchange will do as
        a seed, for instance the step: the codec's own seed is drawn from it.
        """

    def decode(self, payload: Tensor, like: Tensor) -> Tensor:
        """Return the values in a payload, with the shape and dtype of `like`. What a codec rounds off is
        lost.

        Raises RunError for bytes that are no such values.
        """


@dataclass(frozen=True)
class Parts:
    """The objects that a synchronizer works with.

    Args:
        replica: the values of one model.
        link: to the other contributors; to be used only in `Exchange.collect`.
        coder: encodes values.
        seed: equal on every worker, for random choices that all make alike.
    """

    replica: Replica
    link: Link
    coder: Coder
    seed: int


class Exchange(Protocol):
    """One exchange, which counts on all contributors or on none.

    The driver calls `launch` and `collect`. If a worker dies before all have collected, the driver calls
    both again, with the contributors that live. Then it calls `commit`, once.
    """

    def launch(self, contributors: Contributors) -> None:
        """Prepare what is to be sent. Must not wait for others, nor change values."""

    def collect(self) -> None:
        """Swap payloads, and keep those that came. Must not change values, as it may be called again."""

    def commit(self) -> None:
        """Give the replica its new values. Must not wait for others, and must not fail."""


class Synchronizer(Protocol):
    """A strategy between contributors. An entry point names its class, which is made without arguments for
    each prepared model.

    All members of a group make one contributor, so each makes the same calls and must choose alike.
    """

    def open(self, parts: Parts) -> None:
        """Take the parts. Called once, before every other method but `restore`, which may come first."""

    def after_step(self, step: int) -> Iterable[Exchange]:
        """Return the exchanges that are due after the `step`-th optimizer step, from 1. They are made in
        order.

        The choice may depend on the step and the seed only: all contributors must make the same number of
        exchanges after the same steps.
        """

    def change(self, before: Contributors, now: Contributors) -> None:
        """Take notice of contributors that were lost or came, before the next `launch`.

        A contributor that came has the values and the `capture` of a living one.
        """

    def capture(self) -> bytes:
        """Return the state that a new contributor, or a run that goes on from a checkpoint, needs: at most 1
        MiB.

        It is called between two steps.
        """

    def restore(self, captured: bytes) -> None:
        """Take over a state that another contributor's `capture` returned. Raises ValueError for other
        bytes."""

    def close(self) -> None:
        """Release everything at the end of the session."""
