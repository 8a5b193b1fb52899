"""The private parts of torch that Atoll calls or reads, each behind one function or name.

`torch_parts.py` says what a docstring here tells of a part. GradScaler's parts are in `torch_scaling.py`, and
the functions of torch that Atoll replaces in `torch_patches.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils import stateless
from torch.optim.lr_scheduler import SequentialLR
from torch.utils.hooks import RemovableHandle

from atoll.tensors.torch_parts import TorchParts

F = TypeVar("F", bound=Callable[..., Any])
_parts = TorchParts(__name__)
_needs, _part = _parts.needs, _parts.part
if not TYPE_CHECKING:  # to a type checker it would say that the module has every name
    __getattr__ = _parts.refuse

# Autograd


# Returns the number of the backward that autograd runs on this thread; -1: it runs none. A hook must know
# whether a forward is recomputed for a backward (a checkpoint), and whether a callback for the end of the
# backward can be registered. Private: `torch._C._current_graph_task_id`, 2.8 to 2.13. Public way: none.
backward_under_way: Callable[[], int] = _part(
    "torch._C._current_graph_task_id", "backward_under_way", "is_within_backward"
)


def is_within_backward() -> bool:
    """Return whether autograd runs a backward on this thread."""
    return backward_under_way() != -1


# Returns whether the backward that runs will run this node of its graph. So `torch.autograd.grad`, which
# leaves no gradients in parameters, is told from `backward`. Raises RuntimeError for a leaf that
# `torch.autograd.grad` was asked about. Private: `torch._C._will_engine_execute_node`, 2.8 to 2.13. Public
# way: none.
will_run: Callable[[Node], bool] = _part("torch._C._will_engine_execute_node", "will_run")


@_needs("torch.autograd.Variable._execution_engine")
def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that runs has ended, on the thread that ends it.

    DistributedDataParallel does so too. Raises RuntimeError outside a backward. Private:
    `torch.autograd.Variable._execution_engine.queue_callback`, 2.8 to 2.13. Public way: none.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


@_needs("torch._C._autograd._get_sequence_nr")
def next_node() -> int:
    """Return a number that rises with each node of a graph that this thread makes; see `release_graphs`.

    Private: `torch._C._autograd._get_sequence_nr`, 2.8 to 2.13. Public way: none.
    """
    number: int = torch._C._autograd._get_sequence_nr()
    return number


@_needs("torch._C._autograd._get_sequence_nr")
def release_graphs(ends: Iterable[Node], since: int) -> None:
    """Free the tensors that graphs have saved for a backward, which will not be made: those of the nodes that
    lead to `ends` and were made when `next_node` had been `since`, or later.

    Private: `torch.autograd.graph.Node._sequence_nr`, the number of `next_node`, and a node's attributes
    `_raw_saved_*`, the tensors that it has saved; `register_hooks` packs these anew, as torch's notes on
    autograd say. 2.8 to 2.13. Public way: none to free a graph to which a variable still refers.
    """
    left: list[Node | None] = list(ends)
    seen: set[Node] = set()
    while left:
        node: Any = left.pop()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        left.extend(before for before, _ in node.next_functions)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                with contextlib.suppress(RuntimeError):  # freed already
                    saved = getattr(node, name)
                    for each in saved if isinstance(saved, (tuple, list)) else (saved,):
                        with contextlib.suppress(RuntimeError):  # no tensor, or one that hooks have packed
                            each.register_hooks(_free, _freed)


def _free(_saved: Tensor) -> None: ...


def _freed(_nothing: None) -> Tensor:
    raise RuntimeError("this graph was freed: memory had run out, and its batch was computed again")


@_needs("torch._C._autograd._top_saved_tensors_default_hooks")
def saved_tensors_hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the (pack, unpack) hooks that autograd runs for the next saved tensor, or None.

    Hooks of `torch.autograd.graph.saved_tensors_hooks` nest, and only the innermost pair runs: ours must not
    hide those of a checkpoint. Private: `torch._C._autograd._top_saved_tensors_default_hooks`, 2.8 to 2.13.
    Public way: none.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


# Returns False within a transform of torch.func that allows no saved-tensor hooks: `grad` and `vjp`. Private:
# `torch._C._autograd._saved_tensors_hooks_is_enabled`, 2.8 to 2.13. Public way: none.
saved_tensors_hooks_are_allowed: Callable[[], bool] = _part(
    "torch._C._autograd._saved_tensors_hooks_is_enabled", "saved_tensors_hooks_are_allowed"
)


@_needs(
    "torch._C._functorch.peek_interpreter_stack",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
)
def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context in which no transform of torch.func is active on this thread.

    Within one, new tensors are the transform's, and those around it may not be written to. Private:
    `torch._C._functorch.peek_interpreter_stack` and
    `torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack`, 2.8 to 2.13. Public way: none.
    """
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()


@_needs("torch._C._len_torch_dispatch_stack", "torch.utils._python_dispatch._disable_current_modes")
def outside_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode is active on this thread.

    `torch.export` traces under one that makes fake tensors of all that it sees, values on their way among
    them. Private: `torch._C._len_torch_dispatch_stack` and
    `torch.utils._python_dispatch._disable_current_modes`, 2.8 to 2.13. Public way: none.
    """
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    return torch.utils._python_dispatch._disable_current_modes()


@_needs("torch.Tensor._post_accumulate_grad_hooks")
def hook_first(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a post-accumulate hook that runs before those that the script has registered.

    The script's hooks must find the gradient in its final place. Private:
    `torch.Tensor._post_accumulate_grad_hooks`, a dictionary whose order is that of the calls, 2.8 to 2.13.
    Public way: none; `register_post_accumulate_grad_hook` appends.
    """
    with AsPlainTensors():
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        hooks: Any = parameter._post_accumulate_grad_hooks
    others = {key: other for key, other in hooks.items() if key != handle.id}
    hooks.clear()  # autograd goes by the order of insertion, which move_to_end leaves as it is
    hooks[handle.id] = hook
    hooks.update(others)
    return handle


# Tensors


# Returns the number of in-place writes into a tensor or a view of its memory: autograd's own check for
# changed tensors, by which Atoll detects a script's writes. Private: `torch.Tensor._version`, 2.8 to 2.13.
# Public way: none to read it; `torch.autograd.graph.increment_version` raises it.
version_of: Callable[[Tensor], int] = attrgetter("_version")
_versions: Any = _part("torch.Tensor._version", "version_of", "GET_VERSION")
GET_VERSION: Any = getattr(_versions, "__get__", None)  # as `__torch_function__` is told of a read


@_needs("torch.Tensor._indices", "torch.Tensor._values")
def parts_of_sparse(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor as they are, in which an index may come several times.

    Private: `torch.Tensor._indices` and `torch.Tensor._values`, 2.8 to 2.13. Public way: `indices` and
    `values`, which want a coalesced tensor: that takes a sort and a copy.
    """
    return tensor._indices(), tensor._values()


@_needs("torch.UntypedStorage._cdata")
def storage_handle(storage: torch.UntypedStorage) -> int:
    """Return the number by which `storage_uses` knows a storage, for as long as the storage lives.

    Private: `torch.UntypedStorage._cdata`, 2.8 to 2.13. Public way: none.
    """
    handle: int = storage._cdata
    return handle


@_needs("torch._C._storage_Use_Count")
def storage_uses(handle: int) -> int:
    """Return how many tensors and storage objects share the storage of this `storage_handle`.

    Memory that a script still has a view of must not be given to other values. Private:
    `torch._C._storage_Use_Count`, 2.8 to 2.13. Public way: none.
    """
    return torch._C._storage_Use_Count(handle)


# A context in which operations on a subclass of Tensor run as on plain tensors, without `__torch_function__`;
# torch's notes on extending torch use it. Private: `torch._C.DisableTorchFunctionSubclass`, 2.8 to 2.13.
# Public way: none.
AsPlainTensors: Any = _part("torch._C.DisableTorchFunctionSubclass", "AsPlainTensors")


@_needs("torch.Tensor._make_wrapper_subclass")
def wrapper_tensor(
    cls: type[Tensor],
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Return a tensor of a subclass that has a shape and no memory, for `__torch_dispatch__`.

    Private: `torch.Tensor._make_wrapper_subclass`, 2.8 to 2.13. Public way: none.
    """
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(cls, tuple(shape), strides, dtype=dtype, device=device)


@_needs("torch.ops.aten.detach.default._schema")
def arguments_of(operation: Any) -> Sequence[Any]:
    """Return the arguments of an operation that `__torch_dispatch__` is given, each with a name and an alias.

    `alias_info.is_write` says that the operation writes into the argument. Private:
    `torch._ops.OpOverload._schema`, 2.8 to 2.13. Public way: none.
    """
    arguments: Sequence[Any] = operation._schema.arguments
    return arguments


# Attributes of a tensor that belong to autograd, and tell nothing of the values. Private: the names, 2.8 to
# 2.13. Public way: none.
AUTOGRADS_ATTRIBUTES = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")

# Methods of a tensor that give out its memory. Private: the names, 2.8 to 2.13. Public way:
# `untyped_storage` and `__reduce_ex__`, which other libraries and torch itself do not always call.
TYPED_STORAGE = "_typed_storage"
REDUCE = "_reduce_ex_internal"

# Prefixes of functions on lists of tensors, and the function that overwrites all values. A script's
# `clip_grad_norm_` and optimizers call them. Private: the names, 2.8 to 2.13. Public way: none.
LIST_FUNCTIONS = ("_foreach_", "_amp_foreach_")
ZERO_LIST = "_foreach_zero_"


@_needs("torch._neg_view")
def marked(tensor: Tensor, *, conj: bool, neg: bool) -> Tensor:
    """Return `tensor`, or a view of it that stands for its conjugate, for its negative, or for both.

    `z.conj().imag` is such a view: the negative of what lies in memory. Private: `torch._neg_view`, 2.8 to
    2.13. Public way: none; `torch.neg` makes a copy.
    """
    view = tensor.conj() if conj else tensor
    negative: Callable[[Tensor], Tensor] = torch._neg_view
    return negative(view) if neg else view


# Compares two tensors' kinds of memory, and reads no value; `p.data = value` calls it. Private:
# `torch._has_compatible_shallow_copy_type`, 2.8 to 2.13. Public way: none.
compare_kinds: Any = _part("torch._has_compatible_shallow_copy_type", "compare_kinds")

# Copies each tensor of the second list into that of the first, in one call. Private: `torch._foreach_copy_`,
# 2.8 to 2.13. Public way: `copy_`, one by one.
copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _part("torch._foreach_copy_", "copy_all")

# Moves an RNN's parameters into one piece of memory, as `flatten_parameters()` does on CUDA. Private:
# `torch._cudnn_rnn_flatten_weight`, 2.8 to 2.13. Public way: none.
flatten_rnn: Any = _part("torch._cudnn_rnn_flatten_weight", "flatten_rnn")


# Functions on nested containers of tensors; they take the containers apart that `torch.func` does.
# Private: `torch.utils._pytree`, 2.8 to 2.13. Public way: none.
tree_flatten: Any = _part("torch.utils._pytree.tree_flatten", "tree_flatten")
tree_leaves: Any = _part("torch.utils._pytree.tree_leaves", "tree_leaves")
tree_map: Any = _part("torch.utils._pytree.tree_map", "tree_map")
tree_map_only: Any = _part("torch.utils._pytree.tree_map_only", "tree_map_only")
tree_unflatten: Any = _part("torch.utils._pytree.tree_unflatten", "tree_unflatten")


# Modules


@_needs("torch.nn.Module._parameters")
def own_parameters(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """Return a live view of the module's own parameters, without submodules', by attribute.

    A parameter that a script replaces is seen by one look-up, at each step. Private:
    `torch.nn.Module._parameters`, 2.8 to 2.13. Public way: `named_parameters(recurse=False)`, which is not
    live and leaves out tied parameters.
    """
    return module._parameters


@_needs("torch.nn.Module._buffers")
def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers, live and without submodules', by attribute.

    Private: `torch.nn.Module._buffers`, 2.8 to 2.13. Public way: `named_buffers(recurse=False)`, which is not
    live and leaves out tied buffers.
    """
    return module._buffers


@_needs("torch.nn.Module._non_persistent_buffers_set")
def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether a state_dict holds the module's buffer `name`.

    Private: `torch.nn.Module._non_persistent_buffers_set`, 2.8 to 2.13. Public way: the keys of a
    state_dict, which copies values that lie elsewhere and calls the script's hooks.
    """
    return name not in module._non_persistent_buffers_set


@_needs("torch.nn.Module._modules")
def own_modules(holder: object) -> Mapping[str, nn.Module | None]:
    """Return the direct submodules of `holder`, by attribute; none if it is not a module.

    Private: `torch.nn.Module._modules`, 2.8 to 2.13. Public way: `named_children`, which leaves out a module
    at its second attribute.
    """
    found = getattr(holder, "_modules", None)
    return found if isinstance(found, dict) else {}


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the script's module inside a result of `torch.compile`, or `model` itself if not compiled.

    Private: `_orig_mod` of the module that `torch.compile` returns, 2.8 to 2.13. Public way: none.
    """
    module: nn.Module = getattr(model, "_orig_mod", model)
    return module


@_needs("torch.nn.Module._compiled_call_impl")
def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled, by `torch.compile(module)` or by `module.compile()`.

    Private: `_orig_mod` and `torch.nn.Module._compiled_call_impl`, 2.8 to 2.13. Public way: none.
    """
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def has_compiled() -> bool:
    """Return whether `torch.compile` has compiled anything in this process.

    While it compiles again, `torch.compiler.is_compiling()` is True for all threads, and an optimizer that
    steps on another one computes otherwise: AdamW its bias corrections in float32.

    Private: `torch._dynamo.utils.counters`, 2.8 to 2.13. Public way: none. Without it nothing was compiled.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters is not None and counters["frames"]["total"] > 0


def is_within_functional_call() -> bool:
    """Return whether `torch.func.functional_call` has replaced a module's parameters for its duration.

    Private: the file in which torch does so, that of `torch.nn.utils.stateless`, 2.8 to 2.13. Public way:
    none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == stateless.__file__:
            return True
        frame = frame.f_back
    return False


def makes_parameter(frame: FrameType | None) -> bool:
    """Return whether the call of this frame is `nn.Parameter(tensor)`, which calls `tensor.detach()`.

    Private: the call stands in `nn.Parameter.__new__`, 2.8 to 2.13. Public way: none.
    """
    return frame is not None and frame.f_code is nn.Parameter.__new__.__code__


def is_loaded_itself(module: nn.Module, frame: FrameType | None) -> bool:
    """Return whether `load_state_dict` was called on this module itself, not on one that contains it.

    `frame` is the frame of a hook on the module's load. Private: `nn.Module.load_state_dict` calls the hooks
    of all submodules, and names its module `self`, 2.8 to 2.13. Public way: none.
    """
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("self") is module


# torch.compile


@_needs(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction",
)
def untraced(function: F) -> F:
    """Mark `function`, and everything it calls, as code that torch.compile must not compile; returns it.

    A script may compile a model after `memory.fit`. torch.compile would compile Atoll's code too, through
    `__torch_function__` and hooks, and would run it with parameters that are on the move. A frame that is
    compiled may still inline the function. Private: the strategy of a code object in
    `torch._C._dynamo.eval_frame`, 2.8 to 2.13. Public way: `torch.compiler.disable`, which imports the
    compiler, for seconds, and costs more at each call.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


# A module that a process's first optimizer imports, which takes as long as importing torch. A fork server
# imports it beforehand. Private: the module's name, 2.8 to 2.13. Public way: none.
SLOW_IMPORT = "torch._dynamo"


# Optimizers


@_needs("torch.optim.Optimizer._optimizer_step_pre_hooks", "torch.optim.Optimizer._optimizer_step_post_hooks")
def step_hooks(
    optimizer: torch.optim.Optimizer,
) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """Return the hooks before and after an optimizer's step, by id of their handles, in the order of calls.

    Private: `_optimizer_step_pre_hooks` and `_optimizer_step_post_hooks` of `torch.optim.Optimizer`, 2.8 to
    2.13. Public way: none to change the order; `register_step_pre_hook` and `register_step_post_hook` append.
    """
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    return before, after


@_needs("torch.optim.Optimizer._optimizer_step_pre_hooks", "torch.optim.Optimizer._optimizer_step_post_hooks")
def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer empty dictionaries of step hooks.

    The former dictionaries are not changed, since a copy shares them with its original. Private: as in
    `step_hooks`.
    """
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(optimizer, hooks, OrderedDict())


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the `step` of an optimizer's class without torch's wrapper, which runs hooks.

    Private: the wrapper marks itself as `hooked`, 2.8 to 2.13; the function inside is `__wrapped__`. Public
    way: none.
    """
    step: Any = kind.step
    bare: Callable[[torch.optim.Optimizer], Any] = (
        step.__wrapped__ if getattr(step, "hooked", False) else step
    )
    return bare


@_needs("torch.optim.Optimizer._patch_step_function")
def hook_step(optimizer: torch.optim.Optimizer) -> None:
    """Put torch's wrapper, which runs hooks, around the `step` of the optimizer's class, unless it is there.

    Private: `_patch_step_function`, 2.8 to 2.13. Public way: none; torch calls it as an optimizer is made.
    """
    optimizer._patch_step_function()


# Learning-rate schedulers


@_needs(
    "torch.optim.lr_scheduler.SequentialLR._schedulers",
    "torch.optim.lr_scheduler.ChainedScheduler._schedulers",
)
def schedulers_in(scheduler: object) -> list[Any]:
    """Return the schedulers that a SequentialLR or ChainedScheduler drives; none for other schedulers.

    Private: `_schedulers`, 2.8 to 2.13. Public way: none; a state_dict holds their states alone.
    """
    return list(getattr(scheduler, "_schedulers", ()))


@_needs("torch.optim.lr_scheduler.SequentialLR._milestones")
def milestones_of(scheduler: SequentialLR) -> list[int]:
    """Return the steps at which a SequentialLR goes on to its next scheduler.

    Private: `_milestones`, 2.8 to 2.13. Public way: `state_dict()["_milestones"]`, which asks all its
    schedulers for their states.
    """
    milestones: list[int] = scheduler._milestones
    return milestones


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell the optimizer's schedulers that the script has called its step, which is made later.

    They warn otherwise. Private: `Optimizer._opt_called`, 2.8 to 2.13. Public way: none.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


# torch.distributed


@_needs("torch.distributed.distributed_c10d._get_default_store")
def default_store() -> Any:
    """Return the store of the script's own process group, which `init_process_group` has made.

    Private: `torch.distributed.distributed_c10d._get_default_store`, 2.8 to 2.13. Public way: none.
    """
    return torch.distributed.distributed_c10d._get_default_store()


@_needs("torch.distributed.ProcessGroupGloo._Options")
def gloo_options(timeout: timedelta, **where: str) -> Any:
    """Return the options of a Gloo group that listens at one `hostname=` or `interface=`.

    Private: `_Options` of `torch.distributed.ProcessGroupGloo`, with `_timeout` and `_devices`, 2.8 to 2.13.
    Public way: the variable GLOO_SOCKET_IFNAME, which knows interfaces alone and holds for all groups.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(**where)]
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Return the options of an NCCL group whose collectives wait for `timeout`.

    Private: `_timeout` of `torch.distributed.ProcessGroupNCCL.Options`, 2.8 to 2.13. Public way: the argument
    of `init_process_group`, which makes the one default group of a process.
    """
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return options


_parts.hide(globals())
