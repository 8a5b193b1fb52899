"""Clipping by the global norm, and the test for NaN and infinities that the norm gives."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.memory.exchanged import Exchanged
from atoll.memory.sharded import Sharded
from atoll.tensors.finite import is_finite
from atoll.tensors.sparse import values_in
from atoll.tensors.torch_compat import version_of
from atoll.tensors.torch_scaling import seem_finite

_SMALL = 2**16  # elements of gradients up to which it is quicker to write them than to make a tensor


class GradientNorm:
    """The global norm of `parameters`' gradients: per-parameter norms, combined in the order of registration.

    A finite norm shows that every gradient is finite. This is remembered until a gradient changes, so that
    the policy on NaN and infinities need not read the gradients again.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self.culprit = ""  # the first parameter whose gradient made the norm infinite or NaN
        self.coefficient = torch.ones(())  # the factor of the latest clipping
        self._finite: list[tuple[Tensor, int]] = []  # gradients found finite, at these versions

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip as torch.nn.utils.clip_grad_norm_ does, to the bit; return the norm before."""
        norm = self.measure(norm_type, error_if_nonfinite)
        # Torch multiplies by 1 too, so as not to wait for a GPU. On a CPU that pass over memory is needless.
        self.coefficient = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        if norm.device.type != "cpu" or float(self.coefficient) != 1.0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
            self._remember_finite(norm, norm_type)
        return norm

    def measure(self, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Return the norm, and leave the gradients unchanged."""
        values = list(map(values_in, self._gradients()))
        norm = torch.nn.utils.get_total_norm(values, norm_type, error_if_nonfinite)
        if norm.device.type == "cpu" and not math.isfinite(norm):
            self.culprit = self._first_nonfinite()  # once clipped, every gradient is NaN
        self._remember_finite(norm, norm_type)
        return norm

    def _remember_finite(self, norm: Tensor, norm_type: float) -> None:
        # Norm types below 1 do not read every value: 0 counts non-zeros, and negative ones take the smallest.
        self._finite = []
        if float(norm_type) >= 1 and norm.device.type == "cpu" and math.isfinite(norm):
            self._finite = [(gradient, version_of(gradient)) for gradient in self._gradients()]

    def says_finite(self) -> bool:
        """True if the latest norm was finite and no gradient has changed since."""
        if not self._finite:
            return False
        gradients = self._gradients()
        return len(gradients) == len(self._finite) and all(
            gradient is seen and version_of(gradient) == version
            for gradient, (seen, version) in zip(gradients, self._finite, strict=True)
        )

    def forget(self) -> None:
        """Let go of the gradients."""
        self._finite, self.culprit = [], ""

    def _first_nonfinite(self) -> str:
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is not None and not is_finite(parameter.grad):
                return name
        return ""

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


class Norms(Protocol):
    """The norm of the gradients that the script sees, and the test whether they are finite, for one kind of
    store."""

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> tuple[Tensor, float]:
        """Multiply all gradients by one factor so that their norm is at most `max_norm`.

        Returns the norm before, and the factor. The factor is given as 1 where members of a ring hold parts
        of the gradients.
        """

    def are_finite(self, gradients: Sequence[Tensor], parameters: Collection[nn.Parameter]) -> bool:
        """True if no gradient of `parameters` holds NaN or infinity; `gradients` are those that they show
        on this worker."""


class ResidentNorms:
    """Norms of gradients that lie whole on the device."""

    def __init__(self, norm: GradientNorm) -> None:
        self._norm = norm

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> tuple[Tensor, float]:
        norm = self._norm.clip(max_norm, norm_type, error_if_nonfinite)
        return norm, float(self._norm.coefficient)

    def are_finite(
        self,
        gradients: Sequence[Tensor],
        parameters: Collection[nn.Parameter],  # noqa: ARG002
    ) -> bool:
        return self._norm.says_finite() or all_finite(gradients)


class ExchangedNorms:
    """Norms of gradients that lie in tiers, on their way to shards."""

    def __init__(self, exchanged: Exchanged) -> None:
        self._exchanged = exchanged

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> tuple[Tensor, float]:
        return self._exchanged.clip(max_norm, norm_type, error_if_nonfinite)

    def are_finite(
        self,
        gradients: Sequence[Tensor],
        parameters: Collection[nn.Parameter],  # noqa: ARG002
    ) -> bool:
        return bool(self._exchanged.are_finite()) or all_finite(gradients)


class SharedNorms:
    """Norms of gradients of which each member of a ring holds a part. Each member measures its own part."""

    def __init__(self, shared: Sharded) -> None:
        self._shared = shared

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> tuple[Tensor, float]:
        return self._shared.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite), 1.0

    def are_finite(
        self,
        gradients: Sequence[Tensor],  # noqa: ARG002
        parameters: Collection[nn.Parameter],
    ) -> bool:
        return self._shared.all_finite(parameters)


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """True if no gradient holds NaN or infinity.

    One pass gives one number for all gradients. Only a number that is not finite, which an overflow may
    cause, needs a test of each gradient.
    """
    if not gradients:
        return True
    elements = 0
    for gradient in gradients:
        elements += gradient.numel() if type(gradient) is Tensor and gradient.is_cpu else _SMALL
    if elements < _SMALL and seem_finite(gradients):
        return True
    gradients = list(map(values_in, gradients))
    if all(gradient.element_size() >= 4 for gradient in gradients):
        number = torch.nn.utils.get_total_norm(gradients)
    else:  # half precision would overflow
        number = torch.stack([gradient.sum(dtype=torch.float32) for gradient in gradients]).sum()
    if math.isfinite(number):
        return True
    return all(map(is_finite, gradients))
