"""The comparison that members of one group make before each step: which gradients are present, which of them
scripts changed, the hyperparameters, and the epochs of batches.

All members sum one vector of checksums and flags (`SyncPoints.agree`). Only if the checksums of two members
differ do all members gather the compared values themselves, to name the difference. Source: docs/memory.md,
"Members".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atoll.core.epochs import ComparedEpochs
from atoll.core.errors import MismatchError, UserError
from atoll.core.hyperparameters import difference_line, first_difference
from atoll.core.scriptline import waiting_line
from atoll.core.stands import (
    UNKNOWN,
    Epoch,
    are_in_one_epoch,
    decode_stand,
    describe_mismatch,
    encode_stand,
    gradients_in,
    mixed_epochs,
)
from atoll.memory.gradients import TrainedChunk
from atoll.memory.members import told
from atoll.memory.sharedgradients import SharedGradients
from atoll.memory.sharing import Sharing
from atoll.memory.syncpoints import CODES, code_of
from atoll.tensors.settings import SettingsCode, settings_of

_ALIKE = "what a script does to p.grad, it must do on all workers alike"


@dataclass(frozen=True)
class BatchEpochs:
    """The epochs of the batches on which members train.

    Args:
        epoch: returns the epoch of this member's present batch.
        mixed: called with a warning when members train on batches of unlike epochs.
    """

    epoch: Callable[[], Epoch] = lambda: UNKNOWN
    mixed: Callable[[str], None] = lambda _line: None


NO_EPOCHS = BatchEpochs()  # for scripts whose batches have no known epoch


class StepAgreement:
    """The comparison that all members make before each step of one optimizer.

    Args:
        sharing: this member's view of the group.
        gradients: the gradients after their mean was taken.
        trained: the chunks that the optimizer steps.
        optimizer: the optimizer, whose hyperparameters are compared.
        name: what messages call it; another name for each of a model's optimizers.
        epochs: the epochs of the batches.
    """

    def __init__(
        self,
        sharing: Sharing,
        gradients: SharedGradients,
        trained: Sequence[TrainedChunk],
        optimizer: torch.optim.Optimizer,
        name: str,
        epochs: BatchEpochs,
    ) -> None:
        self._sharing, self._gradients, self._trained = sharing, gradients, trained
        self._optimizer, self._name, self._settings = optimizer, name, SettingsCode()
        self._epoch, self._epochs = epochs.epoch, ComparedEpochs(epochs.mixed)

    def agree(self) -> None:
        """Compare all of it with the other members: a collective.

        Raises UserError, on all members, for gradients, edits or hyperparameters that differ, and
        MismatchError for batches of different dealt epochs.
        """
        sharing, gradients = self._sharing, self._gradients
        grouping, trained = sharing.grouping, [each.chunk.id for each in self._trained]
        present = [[float(here) for here in gradients.present(chunk)] for chunk in trained]
        kinds = [grouping.kind(chunk) for chunk in trained]
        edited = "\n".join(gradients.edited)
        epoch = self._epochs.compared(self._epoch())
        settings = self._settings.see(settings_of(self._optimizer))
        codes = [float(code_of(edited)), float(settings % CODES), float(code_of(str(epoch)))]
        said = [each for code in codes for each in (code, code**2)]
        said += [place for each in zip(kinds, present, strict=True) for place in grouping.spread(*each)]
        heard = iter(sharing.points.agree(said, f"{self._name}.step() {sharing.points.steps}"))
        if next(heard) ** 2 != sharing.members.count * next(heard):
            raise UserError(self._unlike_edits(edited))
        if next(heard) ** 2 != sharing.members.count * next(heard):
            raise UserError(self._unlike_settings())
        if next(heard) ** 2 != sharing.members.count * next(heard):
            self._compare_epochs(epoch)
        for kind, each in zip(kinds, self._trained, strict=True):
            counts = grouping.heard(kind, heard, len(each.names))
            for group, members in zip(counts, grouping.groups(kind), strict=True):
                for name, count in zip(each.names, group, strict=True):
                    if 0 < count < len(members):
                        raise UserError(
                            f"{count:g} of {len(members)} workers have a gradient of {name!r} after their "
                            f"mean was taken: {_ALIKE}"
                        )

    def _compare_epochs(self, epoch: Epoch) -> None:
        """Gather all members' epochs. Raise MismatchError if the epochs were dealt differently; warn of other
        differences."""
        own = encode_stand(gradients_in(self._sharing.points.steps, waiting_line(), epoch))
        words = self._sharing.members.gather(own, "the epochs of all members")
        stands = {member: decode_stand(word) for member, word in enumerate(words)}
        if not are_in_one_epoch(stands.values()):
            raise MismatchError(describe_mismatch(stands))
        self._epochs.looked(mixed_epochs(stands))

    def _unlike_settings(self) -> str:
        """Name the first member whose hyperparameters differ from member 0's, with the difference, in one
        line.
        """
        own = self._settings.settings
        words = told(self._sharing.members, own, Any, "the members' hyperparameters")
        found = ((member, first_difference(words[0], other)) for member, other in enumerate(words))
        member, difference = next((who, what) for who, what in found if what is not None)
        return difference_line("worker 0", f"worker {member}", self._sharing.points.steps, difference)

    def _unlike_edits(self, edited: str) -> str:
        """Say in one line which member has changed a gradient that another has not."""
        own = set(edited.split("\n")) - {""}
        words = told(self._sharing.members, own, set[str], "whose gradients scripts have changed")
        other = next(member for member, each in enumerate(words) if each != words[0])
        name = min(words[0] ^ words[other])
        who, others = (0, other) if name in words[0] else (other, 0)
        return (
            f"worker {who} has changed the gradient of {name!r} after the mean was taken, and worker "
            f"{others} has not: {_ALIKE}, also on one that has no batch"
        )
