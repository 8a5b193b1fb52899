"""Parameters and gradients as views into chunks.

`BoundChunk.bind(storage)` puts parameters into a chunk's memory. Each view is made through DLPack, so its
storage has exactly its own size although it lies inside the chunk: `state_dict`, `torch.save`,
`copy.deepcopy` and safetensors see the tensors of plain PyTorch, and each view has a version counter of its
own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from atoll.chunks import SPARSE, Chunk, ChunkMap, ParameterSpec
from atoll.core.errors import BindingError, PrepareError
from atoll.tensors.sparse import LEAST
from atoll.tensors.torch_compat import storage_handle, storage_uses


def carve(storage: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a view with the shape and strides of `like`, at element `offset` of `storage` (1-D, contiguous).

    The view has a storage object of its own, which spans its elements alone. The memory lives as long as
    either of the two tensors. A complex `like` takes two elements for each of its own.
    """
    shape, strides = real_form(like)
    view = torch.as_strided(storage.detach(), shape, strides, storage.storage_offset() + offset)
    carved: Tensor = from_dlpack(to_dlpack(view))
    return torch.view_as_complex(carved) if like.is_complex() else carved


def real_form(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a tensor; of a complex one, those of its real view (torch.view_as_real)."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not tensor.is_complex():
        return shape, strides
    return (*shape, 2), (*(2 * stride for stride in strides), 1)


def real_of(tensor: Tensor) -> Tensor:
    """Return a tensor; in place of a complex one its real view."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def run_of(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor, 1-D, in the order of memory; of a complex one those of its real
    view."""
    real = real_of(tensor.resolve_conj())
    return real.as_strided((real.numel(),), (1,), real.storage_offset())


def laid(run: Tensor, like: Tensor) -> Tensor:
    """Return the view of `run` with the shape and strides of `like`, complex if `like` is. Undoes
    `run_of`."""
    shape, strides = real_form(like)
    view = run.as_strided(shape, strides, run.storage_offset())
    return torch.view_as_complex(view) if like.is_complex() else view


def numbers_in(run: Tensor, like: Tensor) -> Tensor:
    """Return `run`, a 1-D part of `run_of(like)`, as complex numbers if `like` is complex."""
    return torch.view_as_complex(run.view(-1, 2)) if like.is_complex() else run


def dtype_as(dtype: torch.dtype, like: Tensor) -> torch.dtype:
    """Return a real dtype; for a complex `like` the complex dtype with such parts."""
    return dtype.to_complex() if like.is_complex() else dtype


class Buffer:
    """Memory for one chunk's worth of values, and a view into it for each slot.

    `flat` is 1-D with at least `chunk.extent` elements; `views[i]` has the shape and strides of slot i's
    parameter.
    """

    def __init__(self, chunk: Chunk, parameters: Sequence[Tensor], flat: Tensor) -> None:
        self.flat = flat
        self.views = [
            carve(flat, slot.offset, parameter)
            for slot, parameter in zip(chunk.slots, parameters, strict=True)
        ]


class BoundChunk:
    """One chunk of a model on torch: its memory and the parameters that live there.

    `names[i]` and `parameters[i]` belong to `chunk.slots[i]`. `data` is None until the first `bind`.
    `is_sparse`: layers announce sparse gradients of its parameters, and it is large.
    """

    def __init__(
        self,
        chunk: Chunk,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        *,
        is_sparse: bool = False,
    ) -> None:
        self.chunk, self.is_sparse = chunk, is_sparse
        self.names = list(names)
        self.parameters = list(parameters)
        self.data: Buffer | None = None
        self._addresses: list[int] = []

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the chunk's values; the real one if parameters are complex."""
        return self.parameters[0].dtype.to_real()

    @property
    def flat(self) -> Tensor:
        """The chunk's memory, 1-D; raises BindingError before the first `bind`."""
        if self.data is None:
            raise BindingError(f"chunk {self.chunk.id} is not bound to memory yet")
        return self.data.flat

    def bind(self, storage: Tensor) -> None:
        """Copy the parameters' values into `storage` and make the parameters views of it.

        `storage` is 1-D, has `chunk.numel` elements and the chunk's dtype. The Parameter objects stay, so
        optimizers, hooks and the user's own references keep working.
        """
        buffer = Buffer(self.chunk, self.parameters, storage)
        with torch.no_grad():
            for parameter, view in zip(self.parameters, buffer.views, strict=True):
                view.copy_(parameter)
        self._lie_in(buffer)

    def move(self) -> None:
        """Move the chunk to a copy of its memory, so that readers of the old memory see no later change."""
        self._lie_in(Buffer(self.chunk, self.parameters, self.flat.clone()))

    def _lie_in(self, buffer: Buffer) -> None:
        for parameter, view in zip(self.parameters, buffer.views, strict=True):
            parameter.data = view
        self.data = buffer
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]

    def check(self) -> None:
        """Take over the values of parameters to which the script has given other memory (`p.data = tensor`).

        Raises BindingError, naming the parameter, if its dtype, device or shape has changed, or if its former
        memory is still in use: new values would appear in tensors that the script has kept.
        """
        if [parameter.data_ptr() for parameter in self.parameters] == self._addresses:
            return
        self.check_kinds()
        assert self.data is not None
        moved = zip(self.names, self.parameters, self.data.views, self._addresses, strict=True)
        for name, parameter, view, address in moved:
            if parameter.data_ptr() == address:
                continue
            # Two references are expected: the view's own, and the one made by this call.
            if storage_uses(storage_handle(view.untyped_storage())) > 2:
                raise BindingError(
                    f"parameter {name!r} was given other memory after session.prepare, and its former memory "
                    "is still in use (a kept p.data, or a graph); write values with p.data.copy_(...)"
                )
            with torch.no_grad():
                if not torch.equal(view, parameter):
                    torch.autograd.graph.increment_version(parameter)
                    view.copy_(parameter)
            parameter.data = view

    def check_kinds(self) -> None:
        """Raise BindingError, naming the parameter, if its dtype, device or size no longer fits the chunk."""
        for name, parameter, slot in zip(self.names, self.parameters, self.chunk.slots, strict=True):
            fits = parameter.dtype.to_real() == self.flat.dtype and parameter.device == self.flat.device
            if not fits or math.prod(real_form(parameter)[0]) != slot.numel:
                raise BindingError(_why_unbound(name, parameter, self.flat))

    @property
    def has_moved(self) -> bool:
        """True if the first parameter has left the chunk's memory: a quick sign that a whole model moved."""
        return self.parameters[0].data_ptr() != self._addresses[0]


def _why_unbound(name: str, parameter: Tensor, flat: Tensor) -> str:
    what = f"its shape became {tuple(parameter.shape)}"
    if parameter.dtype != flat.dtype:
        what = f"its dtype went from {_short(flat.dtype)} to {_short(parameter.dtype)}"
    elif parameter.device != flat.device:
        what = f"it went from {flat.device} to {parameter.device}"
    return (
        f"parameter {name!r} no longer lies in its chunk: {what} after session.prepare; "
        "convert, move or reshape the model's parameters before session.prepare, and write values with "
        "p.data.copy_(...)"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def specs_of(
    parameters: Mapping[str, nn.Parameter],
    settings: Mapping[nn.Parameter, str],
    sparse: Collection[Tensor] = (),
) -> list[ParameterSpec]:
    """Return the layout's description of each parameter, in registration order.

    `settings` maps a parameter to the key of its optimizer settings. A parameter without a key is trained by
    no optimizer. Those of which layers announce `sparse` gradients get chunks of their own.
    """
    return [
        ParameterSpec(
            name=name,
            shape=real_form(parameter)[0],
            dtype=_short(parameter.dtype.to_real()),
            trainable=parameter.requires_grad,
            settings=settings.get(parameter, ""),
            feature=SPARSE if parameter in sparse else "",
            strides=() if parameter.is_contiguous() else real_form(parameter)[1],
        )
        for name, parameter in parameters.items()
    ]


def bind_model(chunk_map: ChunkMap, parameters: Mapping[str, nn.Parameter]) -> list[BoundChunk]:
    """Allocate each chunk on its parameters' device and bind the parameters, chunk by chunk.

    At most one chunk's values are in memory twice at any time.
    """
    names = list(parameters)
    chunks = []
    for chunk in chunk_map.chunks:
        inside = [names[slot.parameter] for slot in chunk.slots]
        first = parameters[inside[0]]
        is_sparse = chunk_map.groups[chunk.group].feature == SPARSE and chunk.nbytes >= LEAST
        bound = BoundChunk(chunk, inside, [parameters[name] for name in inside], is_sparse=is_sparse)
        bound.bind(torch.zeros(chunk.numel, dtype=first.dtype.to_real(), device=first.device))
        chunks.append(bound)
    return chunks


def check_bindable(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise PrepareError, with a remedy, for the first parameter that cannot lie in a chunk."""
    spans: list[tuple[int, int, str]] = []
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise PrepareError(
                f"parameter {name!r} is lazy and has no shape yet; run one batch through the model "
                "before session.prepare"
            )
        if parameter.is_meta:
            raise PrepareError(
                f"parameter {name!r} is on the meta device; give it values (model.to_empty and your "
                "initialisation) before session.prepare"
            )
        if hasattr(parameter, "device_mesh"):
            raise PrepareError(
                f"parameter {name!r} is a DTensor, sharded by another library; give session.prepare "
                "the unsharded model"
            )
        if parameter.is_sparse or parameter.layout != torch.strided:
            raise PrepareError(
                f"parameter {name!r} is sparse; chunks hold dense parameters only, call to_dense()"
            )
        if not is_dense(parameter):
            raise PrepareError(
                f"parameter {name!r} has overlapping or gapped memory (strides {tuple(parameter.stride())}); "
                "assign parameter.data = parameter.data.contiguous() before session.prepare"
            )
        # A parameter with `stored_value` lies in tiers: it has no fixed address.
        if parameter.numel() and not hasattr(parameter, "stored_value"):
            start = parameter.data_ptr()
            spans.append((start, start + parameter.numel() * parameter.element_size(), name))
    spans.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise PrepareError(
                f"parameters {first!r} and {second!r} are two Parameters that share memory; "
                "tie them by assigning the same Parameter object to both"
            )


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one run of memory without gaps or overlap, in any order."""
    expected = 1
    for stride, size in sorted(
        (st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1
    ):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True
