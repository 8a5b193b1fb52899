"""Records a step of a model: which parameters are used in which order, and for how long.

The model is not changed. A `TorchFunctionMode` sees forward's uses. Hooks on saved tensors see backward's; if
the model's chunks move, the tensors that the engine derives for backward show them.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from atoll.memory.bandwidth import settle
from atoll.memory.engine import Engine
from atoll.memory.parameters import place_of
from atoll.memory.saved import ParameterSlot, watched
from atoll.moves.search import Use
from atoll.tensors.torch_compat import is_within_backward, own_parameters

# Calls that need no value of their arguments.
_CHEAP = {"__get__", "__set__", "__len__", "size", "dim", "numel", "stride", "is_floating_point", "zero_"}


class Recorder(TorchFunctionMode):
    """Records from `start` to `stop`, on the thread that calls both and in the backward that it runs.

    A composite function, such as multi-head attention, is one use of all its parameters. On an accelerator
    times are those of events, and include what kernels wait for.

    Args:
        engine: the engine that moves the model's chunks, if one does. Its waits for moves and steps are not
            counted on a CPU.
    """

    def __init__(self, model: nn.Module, engine: Engine | None = None) -> None:
        super().__init__()
        parameters = list(model.parameters())
        self._parameters = parameters
        self._indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._starts: list[int] = []  # first addresses of the parameters that do not move, ascending
        self._ends: list[int] = []  # and, for each, the end
        self._at: list[int] = []  # and the parameter's number
        self._engine = engine
        self._device = parameters[0].device
        self._marks: list[tuple[tuple[int, ...], bool]] = []
        self._times: list[Any] = []
        self._saved: Any = None
        self._running = False

    def start(self) -> None:
        """Begin to record, with no uses."""
        self._marks, self._times, self._running = [], [], True
        self._find_addresses()
        if self._engine is None:
            self._saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        else:
            self._saved = watched(self._unpacked)
        self._saved.__enter__()
        self._handle = register_module_forward_pre_hook(self._again)
        self._mark(())  # time before the first use counts too
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> tuple[Use, ...]:
        """End the recording; return the uses since `start`, in order."""
        self._mark(())
        self._running = False
        self._handle.remove()
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._saved.__exit__(None, None, None)
        times = self._seconds()
        return tuple(
            Use(parameters, max(0.0, after - at), backward)
            for (parameters, backward), at, after in zip(self._marks, times, times[1:], strict=False)
        )

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._running and getattr(func, "__name__", "") not in _CHEAP:
            used = self._found((*args, *kwargs.values()))
            if used:
                self._mark(used)
        return func(*args, **kwargs)

    def _again(self, module: nn.Module, _args: Any) -> None:
        """Record a module's parameters when a checkpoint computes it again: modes are off during backward."""
        if self._running and is_within_backward():
            used = self._found(own_parameters(module).values())
            if used:
                self._mark(used)

    def _found(self, values: Iterable[Any]) -> tuple[int, ...]:
        """Return the numbers of the parameters among arguments, in lists too."""
        used: dict[int, None] = {}
        for value in values:
            if isinstance(value, Tensor):
                index = self._indices.get(id(value))
                if index is not None:
                    used[index] = None
            elif isinstance(value, list | tuple):
                used.update(dict.fromkeys(self._found(value)))
        return tuple(used)

    def _find_addresses(self) -> None:
        """Note where the parameters lie that do not move."""
        held = [
            (p.data_ptr(), p.nbytes, index)
            for index, p in enumerate(self._parameters)
            if p.nbytes and place_of(p) is None
        ]
        held.sort()
        self._starts = [start for start, _, _ in held]
        self._ends = [start + nbytes for start, nbytes, _ in held]
        self._at = [index for _, _, index in held]

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        return tensor, self._parameter_at(tensor)

    def _parameter_at(self, tensor: Tensor) -> int | None:
        """Return the number of the parameter whose memory a tensor lies in, by its address; None for none.

        The address is compared because a transposed weight is saved as a view.
        """
        address = tensor.data_ptr()
        place = bisect.bisect_right(self._starts, address) - 1
        return self._at[place] if place >= 0 and address < self._ends[place] else None

    def _unpacked(self, used: Tensor | ParameterSlot) -> None:
        """Record a tensor that backward has unpacked, in a model whose chunks move."""
        if isinstance(used, Tensor):
            index = self._parameter_at(used)
        elif self._engine is not None and used.owner is self._engine:
            index = self._indices.get(id(self._engine.chunks[used.chunk].parameters[used.slot]))
        else:
            index = None
        if index is not None and self._running:
            self._mark((index,), backward=True)

    def _unpack(self, packed: tuple[Tensor, int | None]) -> Tensor:
        tensor, index = packed
        if index is not None and self._running:
            self._mark((index,), backward=True)
        return tensor

    def _mark(self, used: tuple[int, ...], *, backward: bool | None = None) -> None:
        if backward is None:
            backward = is_within_backward()
        self._marks.append((used, backward))
        if self._device.type == "cpu":
            engine = self._engine
            waited = 0.0 if engine is None else engine.waited + engine.gradients.waited
            self._times.append(time.perf_counter() - waited)
        else:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._times.append(event)

    def _seconds(self) -> list[float]:
        """Return the seconds from the first mark to each mark."""
        first = self._times[0]
        if self._device.type == "cpu":
            return [at - first for at in self._times]
        settle(self._device)
        return [first.elapsed_time(event) / 1e3 for event in self._times]
