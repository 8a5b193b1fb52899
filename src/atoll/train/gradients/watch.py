"""The watch on a script that drops, zeroes or edits gradients besides backward and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.memory.proxies import GradientProxy, edits_of
from atoll.tensors.binding import BoundChunk
from atoll.tensors.torch_patches import forget_clipping

_READABLE = frozenset({"cpu"})  # types of device whose memory may be read without a wait


class GradientWatch:
    """The watch on the gradients of the chunks' parameters.

    `dropped()` is called when the script's hooks have left no gradient of a backward. `edited()` is called
    when the script has changed all gradients between two backwards that come before one reduction.
    """

    def __init__(
        self, chunks: Sequence[BoundChunk], dropped: Callable[[], None], edited: Callable[[], None]
    ) -> None:
        self._parameters = [parameter for bound in chunks for parameter in bound.parameters]
        self._dropped, self._edited = dropped, edited
        # The first parameter with a gradient, and the gradient's version:
        self._first_reduced: tuple[nn.Parameter, int] | None = None
        # By the parameter's id: a gradient to which `zero_grad` has written zeros, and its version then.
        self._zeros: dict[int, tuple[Tensor, int]] = {}
        # Each gradient's version at the end of a backward under no_sync:
        self._edits_seen: list[int | None] = []

    def close(self) -> None:
        """Let go of the model."""
        self._zeros.clear()
        self._parameters.clear()

    def has_gradients(self) -> bool:
        """True if a parameter has a gradient: nearly always the first one."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def has_values(self) -> bool:
        """True if any gradient is not all zeros. On a GPU this waits for the device."""
        return any(bool(p.grad.any()) for p in self._parameters if p.grad is not None)

    def look(self) -> None:
        """Report, at the end of a backward that has left gradients, if hooks have dropped all of them."""
        if not self.has_gradients():
            self._dropped()

    def note_edits(self) -> None:
        """Remember the gradients' versions at the end of a backward under no_sync."""
        self._edits_seen = self._edits()
        forget_clipping()

    def look_for_edits(self) -> None:
        """Report edits before more gradients come or the reduction begins.

        There is an edit if the script has changed all gradients since `note_edits`, as
        torch.nn.utils.clip_grad_norm_ does. Zeros do not count: `zero_grad` writes them.
        """
        seen, self._edits_seen = self._edits_seen, []
        if not seen:
            return
        pairs = [(now, then) for now, then in zip(self._edits(), seen, strict=True) if then is not None]
        changed = bool(pairs) and all(now is not None and now > then for now, then in pairs)
        if changed and self.has_values():
            self._edited()

    def _edits(self) -> list[int | None]:
        """Return how often each gradient was written into; None for a parameter without a gradient."""
        return [None if p.grad is None else edits_of(p.grad) for p in self._parameters]

    def reduced(self) -> None:
        """Remember the first gradient's version: the gradients are reduced."""
        self._zeros.clear()
        self._first_reduced = None
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._first_reduced = parameter, edits_of(parameter.grad)
                break

    def stepped(self) -> None:
        """Forget zeros: the step is made."""
        self._zeros.clear()

    def is_left_out(self) -> bool:
        """True if the script has zeroed the latest gradients without a step, as after a GradScaler's skip.

        Then the coming step belongs to a later iteration, in which this worker has no batch. On a GPU a look
        at the gradients waits for the device, so only zeros of `zero_grad` are seen there.
        """
        if self._first_reduced is None:
            return False
        first, edits = self._first_reduced
        gradient = first.grad
        if gradient is None:
            return not self.has_gradients()
        if edits_of(gradient) == edits:
            return False
        return not self.has_values() if gradient.device.type in _READABLE else self._are_zeroed()

    def note_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note a `zero_grad` of `parameters` between a reduction and its step, which leaves the step out.

        Gradients of these parameters that are still there are zeros.
        """
        given = {id(parameter) for parameter in parameters}
        for parameter in self._parameters:
            gradient = parameter.grad if id(parameter) in given else None
            if gradient is not None:
                self._zeros[id(parameter)] = gradient, edits_of(gradient)

    def _are_zeroed(self) -> bool:
        """True if nothing was written to any gradient since `zero_grad` wrote zeros."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            zeroed, edits = self._zeros.get(id(parameter), (None, 0))
            if gradient is not zeroed or edits_of(gradient) != edits:
                return False
        return True


class EditWatch:
    """Finds what the script does between a backward and the step with gradients that are not the mean."""

    def __init__(self, chunks: Sequence[BoundChunk]) -> None:
        self._named = [each for bound in chunks for each in zip(bound.names, bound.parameters, strict=True)]
        self._seen: list[tuple[int, int]] = []  # each gradient's identity, and how often it was written into

    def note(self) -> None:
        """Note the gradients as backward has left them."""
        self._seen = [_identity(parameter.grad) for _, parameter in self._named]
        forget_clipping()

    def first_edited(self, unscaled: bool) -> str:
        """Return the first parameter whose gradient was changed since `note`; "" for none. `unscaled`: a
        GradScaler has written into each once."""
        for (name, parameter), (before, edits) in zip(self._named, self._seen, strict=False):
            now, written = _identity(parameter.grad)
            if now and (now != before or written > edits + unscaled):
                return name
        return ""


def _identity(gradient: Tensor | None) -> tuple[int, int]:
    if gradient is None:
        return 0, 0
    return id(gradient.source if isinstance(gradient, GradientProxy) else gradient), edits_of(gradient)


class SharedGradientWatch(GradientWatch):
    """The watch on gradients of which other members may hold parts."""

    def has_values(self) -> bool:
        try:
            return super().has_values()
        except UserError:  # the mean was stepped and not zeroed; other members hold parts of it
            return True
