"""The number of times that workers that step together compare the epochs of their batches."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.stands import UNKNOWN, Epoch

_LOOKS = 16  # each costs a collective, and workers may rightly train on different loaders


class ComparedEpochs:
    """The epochs of the workers' batches, as far as scripts show them: compared until one warning is given.

    All members keep equal `looks`: they look together.

    Args:
        mixed: called with the warning.
    """

    def __init__(self, mixed: Callable[[str], None]) -> None:
        self._mixed = mixed
        self.looks = _LOOKS  # remaining comparisons of all members' epochs

    def compared(self, epoch: Epoch) -> Epoch:
        """Return the epoch to tell the other workers; a dealt epoch is always told."""
        return epoch if epoch.is_dealt or self.looks > 0 else UNKNOWN

    def looked(self, line: str) -> None:
        """Record that all members have looked at each other's epochs; `line` is the warning, or ""."""
        self.looks = 0 if line else self.looks - 1
        if line:
            self._mixed(line)
