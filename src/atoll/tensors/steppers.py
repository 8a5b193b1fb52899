"""The steppers of a model that several optimizers step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from atoll.tensors.lazy import read_whole
from atoll.tensors.optimizer import ChunkOptimizer, ParameterOptimizer


class Steppers:
    """One stepper for each optimizer, each with parameters of its own."""

    def __init__(self, steppers: Sequence[ChunkOptimizer | ParameterOptimizer]) -> None:
        self._steppers = steppers

    def close(self) -> None:
        """Leave the optimizers to the user as plain ones."""
        for each in self._steppers:
            each.close()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context in which the session puts state back."""
        with ExitStack() as loads:
            for each in self._steppers:
                loads.enter_context(each.loading())
            yield

    def give_back(
        self,
        lacks_room: Callable[[int], str] = lambda _nbytes: "",
        read: Callable[[Any], Any] = read_whole,
        *,
        comes_later: bool = False,
    ) -> None:
        """Bring the optimizers' state here, as far as it has left (`RemoteOptimizer.give_back`)."""
        for each in self._steppers:
            each.give_back(lacks_room, read, comes_later=comes_later)

    def bring_changes(self) -> None:
        """Bring what the script has changed in the optimizers' `state` to where the steps are made."""
        for each in self._steppers:
            each.bring_changes()

    def restore(self) -> None:
        """Undo what failing steps left behind."""
        for each in self._steppers:
            each.restore()
