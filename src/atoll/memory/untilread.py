"""Gradients that become a mean when the script first uses one of them.

Where the mean costs an exchange of its own, most scripts never need it: they call backward and step. So
whoever shows `p.grad` asks an `UntilRead` before the script reads or changes a gradient. Source:
docs/peers.md, "What a step does".
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.axes.choices import Choices
from atoll.axes.needs import error_of
from atoll.core.errors import UserError
from atoll.tensors.torch_compat import is_within_backward
from atoll.tensors.torch_scaling import is_unscaling


class UntilRead:
    """One reduction's gradients, until the script uses one of them or makes another backward.

    `read()` makes them the mean, and calls `end`. None: the mean cannot be had any more.
    """

    def __init__(self, read: Callable[[], None] | None) -> None:
        self._read = read
        self._is_gone = read is None

    @property
    def waits(self) -> bool:
        """True if no gradient was used yet, and the mean may still be had."""
        return self._read is not None

    @property
    def is_over(self) -> bool:
        """True if gradients may be used as they are."""
        return self._read is None and not self._is_gone

    def use(self) -> None:
        """Let the gradients become the mean, unless they are by now.

        Hooks within a backward see what that backward has added up so far, and a GradScaler divides each
        node's own gradients. Raises UserError if another backward has come meanwhile.
        """
        if self._is_gone:
            raise gone()
        if self._read is not None and not is_within_backward() and not is_unscaling():
            self._read()

    def end(self) -> None:
        """Note that the gradients are the mean now."""
        self._read = None

    def forget(self) -> None:
        """Note that new gradients come: those that the script still holds never become the mean."""
        self._is_gone, self._read = self.waits, None


def gone() -> UserError:
    """Return the error of a script that uses an earlier backward's gradient, which never became the mean."""
    return error_of("call", Choices({"call": "p.grad", "gradients": "gone"}))


class Hiding:
    """The reduction whose gradients a model in tiers hides from the script, if there is one."""

    def __init__(self) -> None:
        self._until: UntilRead | None = None
        self._is_hiding = False
        self._overwritten: set[tuple[int, int]] = set()  # (chunk, slot) of gradients overwritten unread

    def begin(self, until: UntilRead) -> None:
        """Hide the gradients of a reduction."""
        self._until = until
        self._overwritten.clear()
        self._is_hiding = True

    def hide(self) -> None:
        """Hide gradients again after `put_back`."""
        self._is_hiding = True

    def put_back(self) -> None:
        """Show gradients as they are."""
        self._is_hiding = False

    def hides(self, chunk: int, slot: int) -> bool:
        """True if a gradient becomes the mean before the script uses it."""
        waits = self._is_hiding and self._until is not None and self._until.waits
        return waits and self.may_become(chunk, slot)

    def may_become(self, chunk: int, slot: int) -> bool:
        """False if the script has overwritten a gradient that it had not used."""
        return (chunk, slot) not in self._overwritten

    def use(self, chunk: int, slot: int, *, overwrites: bool = False) -> None:
        """Let gradients become the mean before the script uses one of them; `overwrites`: it does not read
        it."""
        hidden = self._is_hiding and self._until is not None and not self._until.is_over
        if hidden and self.may_become(chunk, slot):
            assert self._until is not None
            if overwrites:
                self._overwritten.add((chunk, slot))
            else:
                self._until.use()
