"""Check that all members of a ring treat a mean alike before they step.

Every worker steps its own copy of the model. If one worker clips and another does not, or their learning
rates differ, the copies diverge in silence. So each worker reports how it treated the last mean: in the
agreement on each iteration, before a save, and before the run ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from operator import attrgetter, is_

import msgspec
from torch import Tensor, nn

from atoll.core.errors import MismatchError, UserError
from atoll.core.hyperparameters import GRADIENT_SCALE, difference_line, first_difference
from atoll.core.stands import UNKNOWN, Epoch, Stand, are_in_one_epoch, describe_mismatch, mixed_epochs
from atoll.tensors.settings import Settings, SettingsCode
from atoll.tensors.torch_compat import version_of

_BITS = 14  # of a treatment's checksum
SAID = 3 + _BITS  # number of values of `Treatments.said`
_GRADIENT = attrgetter("grad")


class Treatment(msgspec.Struct, frozen=True, array_like=True):
    """One worker's treatment of an iteration's mean before its step.

    Attributes:
        iteration: the iteration.
        clips: (max_norm, norm_type) of each clipping.
        edited: True if the script changed the mean in another way than by clipping.
        settings: the hyperparameters of the step.
        followed: the number of steps and clippings after it, by the model's other optimizers.
        by: the places of the optimizers that have stepped, in their order; empty if the model has one.
    """

    iteration: int
    clips: tuple[tuple[float, float], ...]
    edited: bool
    settings: Settings = []
    followed: int = 0
    by: tuple[int, ...] = ()

    def __str__(self) -> str:
        did = ["changed the gradients"] if self.edited else []
        for max_norm, norm_type in self.clips:
            kind = "" if norm_type == 2 else f" (norm_type {norm_type:g})"
            did.append(f"clipped the gradients to {max_norm:g}{kind}")
        if self.followed:
            did.append(f"stepped or clipped {self.followed} times after that")
        if self.by:
            places = " and ".join(str(place) for place in self.by)
            did.append(f"made the steps of optimizers {places} in session.prepare's list")
        return " and ".join(did) or "left the gradients as they were"


class Treatments:
    """The treatment of each iteration's mean by this worker's script.

    `latest` is the Treatment of the iteration before. It is None once all members know it, or if this worker
    was not there.
    """

    def __init__(
        self, settings: Callable[[], Settings] = list, parameters: Sequence[nn.Parameter] = ()
    ) -> None:
        """Begin without a treatment. `settings()` returns the optimizer's present hyperparameters.

        Edits of the gradients of `parameters` are noticed.
        """
        self._ask_settings, self._settings = settings, SettingsCode()
        self._parameters = parameters
        self._means: list[Tensor | None] = []  # `p.grad` of each parameter when the script was shown the mean
        self._versions: list[int] = []
        self._clips: list[tuple[float, float]] = []
        self._by: tuple[int, ...] = ()
        self.edited = False
        self.latest: Treatment | None = None

    def shown(self) -> None:
        """Remember the gradients: from now on the script sees the mean in them."""
        self._means = list(map(_GRADIENT, self._parameters))
        self._versions = _versions(self._means)

    def clipped(self, max_norm: float, norm_type: float) -> None:
        self._clips.append((float(max_norm), float(norm_type)))
        self.shown()  # a coefficient of 1 is written on some devices and left out on others: no edit

    def steps(self) -> None:
        """Record the hyperparameters of the coming step, and whether the script has changed the mean
        otherwise than by clipping."""
        self._settings.see(self._ask_settings())
        if self._means and not self.edited:
            now = list(map(_GRADIENT, self._parameters))
            self.edited = not (all(map(is_, now, self._means)) and _versions(now) == self._versions)

    def followed(self) -> None:
        """Note a step or a clipping of gradients that another of the model's optimizers has stepped
        already."""
        if self.latest is not None:
            self.latest = msgspec.structs.replace(self.latest, followed=self.latest.followed + 1)

    def steps_by(self, place: int, follows: bool) -> None:
        """Note the place of the one of several optimizers that is about to step. `follows`: it steps
        gradients that another one has stepped already."""
        if not follows:
            self._by = (place,)
        elif self.latest is not None:
            self.latest = msgspec.structs.replace(self.latest, by=(*self.latest.by, place))

    def stepped(self, iteration: int) -> None:
        """Make the treatment of `iteration`, which is over, the latest one."""
        clips, settings = tuple(self._clips), self._settings.settings
        self.latest = Treatment(iteration, clips, self.edited, settings, by=self._by)
        self._clips, self.edited, self._means, self._by = [], False, [], ()

    @property
    def told(self) -> tuple[object, ...] | None:
        """The content of `said` without the iteration's number; None if no treatment is known."""
        made = self.latest
        return (
            None if made is None else (made.clips, made.edited, self._settings.code, made.followed, made.by)
        )

    def said(self, epoch: Epoch = UNKNOWN, *, iteration: bool = True) -> list[float]:
        """Encode the latest treatment: SAID values of 0 and 1, whose sums are exact in any dtype. All are 0
        without one.

        Args:
            epoch: the epoch of the batch on which this worker trains now.
            iteration: True to include the number of the treatment's iteration.
        """
        if self.latest is None:
            return [0.0] * SAID
        number = self.latest.iteration if iteration else -1
        made = (number, *(self.told or ()), epoch.number, epoch.by)
        checksum = zlib.crc32(msgspec.msgpack.encode(made))
        bits = [float(checksum >> bit & 1) for bit in range(_BITS)]
        return [1.0, float(bool(self.latest.clips)), float(self.latest.edited), *bits]


def _versions(gradients: Sequence[Tensor | None]) -> list[int]:
    return [0 if each is None else version_of(each) for each in gradients]


def are_alike(summed: Sequence[float]) -> bool:
    """True if all workers that report a treatment report equal ones, judged by their summed bits.

    Each bit must be set on all of them or on none. Treatments that differ only in a norm or a hyperparameter
    pass with a probability of 2^-14 in each iteration. A worker that clips and one that does not never pass.
    """
    known, *counts = summed
    return {0.0, known}.issuperset(counts)


class TreatmentReport(msgspec.Struct, frozen=True, array_like=True):
    """One worker's treatment of the last mean, and its place in its script. Workers send it if their
    treatments differ.

    Attributes:
        made: the treatment; None if it is not known.
        stand: the place in the script; None if places are not compared.
    """

    made: Treatment | None
    stand: Stand | None = None


def refuse_unlike(words: Sequence[TreatmentReport], names: Sequence[int]) -> str:
    """Raise the error for workers whose treatments or dealt epochs differ.

    Returns the warning of `mixed_epochs`; "" for none. Raises MismatchError if workers train on batches of
    different dealt epochs, and UserError if a treatment differs from the first known one. An unknown epoch
    equals any epoch.
    """
    stands = {name: word.stand for name, word in zip(names, words, strict=True) if word.stand is not None}
    if not are_in_one_epoch(stands.values()):
        raise MismatchError(describe_mismatch(stands))
    known = [word.made for word in words if word.made is not None]
    if any(one != known[0] for one in known):
        raise UserError(difference([word.made for word in words], [str(name) for name in names]))
    return mixed_epochs(stands)


def difference(treatments: Sequence[Treatment | None], names: Sequence[str]) -> str:
    """Return a line that names the first worker with a known treatment, the first worker that differs from
    it, and what each did."""
    known = [(name, made) for name, made in zip(names, treatments, strict=True) if made is not None]
    who, first = known[0]
    other, made = next((name, made) for name, made in known if made != first)
    found = first_difference(first.settings, made.settings)
    is_scale = found is not None and found.key == GRADIENT_SCALE  # an unscaling is an edit too
    if found is not None and (is_scale or (made.clips, made.edited) == (first.clips, first.edited)):
        return difference_line(f"worker {who}", f"worker {other}", made.iteration, found)
    return (
        f"iteration {made.iteration}: worker {who} {first}, and worker {other} {made}, so that their models "
        "differ now; all must do the same in every iteration, also one that has no batch"
    )
