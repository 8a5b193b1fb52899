"""Which chunks lie on the device: brings them before they are used, and takes them away for others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from atoll.memory.chunk import MemoryChunk


class Engine:
    """Keeps the chunks of a model in the device's arena, by the decisions of `moves`."""

    chunks: Sequence[MemoryChunk]

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make these parameters' chunks resident together; raises UserError when the budget cannot."""

    def write_back(self) -> None:
        """Hand what the script has written on the device to the masters: before a step, before reading them."""

    def out_of_date(self, chunks: Sequence[int]) -> None:
        """The masters of these chunks have changed: what lies on the device is dropped, or, where somebody
        holds a view of it, refreshed in place."""

    def step_ended(self) -> None:
        """An optimizer step is over: the order of use begins anew."""

    def value(self, parameter: nn.Parameter) -> Tensor:
        """A copy of a parameter's present value in ordinary host memory; nothing becomes resident."""
        raise NotImplementedError
