"""The private parts of torch that Atoll relies on, each behind one function or name.

No other module of Atoll may use them; `tests/unit/test_torch_compat.py` checks that. A function's docstring
gives the purpose of the private part, the versions of torch in which it was checked, and the public way, if
there is one. "2.8 to 2.13" means: the part has this name and these arguments in 2.8.0, the oldest torch that
Atoll allows, and the tests ran with 2.13.0.

A torch without one of the parts must not stop a script that does not need the part. So an import of a
function that needs it raises a UserError that names both. Nothing here fails later, in a step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from operator import attrgetter
from types import FrameType
from typing import Any, Protocol, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.autograd.graph import Node
from torch.nn.utils import clip_grad, stateless
from torch.optim.lr_scheduler import SequentialLR
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from atoll.core.errors import UserError
from atoll.core.scriptline import script_line

F = TypeVar("F", bound=Callable[..., Any])

_absent: dict[str, str] = {}  # function of this module -> the part of torch that it needs and that is absent


def _holds(holder: Any, name: str) -> bool:
    """Return whether `holder` has an attribute, or is a class whose instances have it.

    A class declares such an attribute, or its `__init__` sets it.
    """
    if hasattr(holder, name):
        return True
    if not inspect.isclass(holder):
        return False
    stored = inspect.unwrap(holder.__init__).__code__.co_names if "__init__" in vars(holder) else ()
    return name in stored or any(name in inspect.get_annotations(each) for each in inspect.getmro(holder))


def missing_part(path: str) -> str:
    """Return the first part of a dotted path ("torch.Tensor._version") that the installed torch lacks.

    Returns "" where torch has all of them. The last part may be an attribute of a class's instances.
    """
    holder: Any = torch
    names = path.split(".")
    for index, name in enumerate(names[1:], 2):
        if not _holds(holder, name):
            return ".".join(names[:index])
        holder = getattr(holder, name, None)
    return ""


def _needs(*paths: str) -> Callable[[F], F]:
    """Declare the private parts that a function uses; without them nobody can import the function."""

    def declare(function: F) -> F:
        missing = next(filter(None, map(missing_part, paths)), "")
        if missing:
            _absent[function.__name__] = missing
        return function

    return declare


def _part(path: str, *names: str) -> Any:
    """Return torch's private object at `path`.

    Returns None if torch has none; then nobody can import these `names` of this module.
    """
    missing = missing_part(path)
    if missing:
        _absent.update(dict.fromkeys(names, missing))
        return None
    return functools.reduce(getattr, path.split(".")[1:], torch)


def __getattr__(name: str) -> Any:
    """Raise UserError, naming the part that torch lacks, when someone imports a name that needs the part."""
    if name in _absent:
        raise UserError(
            f"torch {torch.__version__} has no {_absent[name]}, which {__name__}.{name} needs; install "
            "a torch from 2.8 to 2.13, with which Atoll was checked"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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


_WRAPS = (
    "torch._functorch.eager_transforms._wrap_tensor_for_grad",
    "torch._functorch.vmap._add_batch_dim",
    "torch._functorch.eager_transforms._wrap_functional_tensor",
)
_wraps: dict[str, Callable[..., Any]] = {path: _part(path, "stand_in_for_transforms") for path in _WRAPS}
_STAND_INS: dict[tuple[str, type], Callable[[Any], Tensor]] = {}  # by name in `_WRAPS` and class of tensors


@_needs("torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack")
def stand_in_for_transforms(
    kind: type[Tensor], stand_in: Callable[[Any], Tensor], functional: Callable[[Any], Tensor]
) -> None:
    """Patch torch so that transforms of torch.func take `stand_in(tensor)` in place of a tensor of class
    `kind`, and `functionalize`, which writes back what it has changed, `functional(tensor)`.

    A transform reads a tensor's memory past `__torch_function__`. The stand-in is made outside of the
    transform that takes it, so derivatives of transforms and graphs around it reach the tensor. Private: the
    functions of `_WRAPS`, by which `grad`, `vjp`, `jvp`, `vmap` and `functionalize` wrap their arguments, and
    `torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack`, 2.8 to 2.13. Public way: none.
    """
    for path, original in _wraps.items():
        is_functional = path == _WRAPS[-1]
        _STAND_INS[path, kind] = functional if is_functional else stand_in
        module, name = sys.modules[path.rpartition(".")[0]], path.rpartition(".")[2]
        if getattr(module, name) is original:
            setattr(module, name, _of_stand_ins(path, original))


def _of_stand_ins(path: str, wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function `wrap` of a tensor and more, with a stand-in for a tensor that has one."""

    @functools.wraps(wrap)
    def wrapped(tensor: Any, *more: Any, **named: Any) -> Any:
        stand_in = _STAND_INS.get((path, type(tensor)))
        if stand_in is not None:
            with torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack():
                tensor = stand_in(tensor)
        return wrap(tensor, *more, **named)

    return wrapped


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


@_needs("torch.UntypedStorage._cdata")
def parts_of_sparse(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor as they are, in which an index may come several times.

    The public `indices` and `values` want a coalesced tensor, which takes a sort and a copy. 2.8 to 2.13.
    """
    return tensor._indices(), tensor._values()


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


# GradScaler

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_torchs: Any = _part(f"torch.{_UNSCALE}", "count_unscaling", "unscale", "counted", "seem_finite")
_UNSCALE_OF = "_unscale_grads_"
_scalers: Any = _part(f"torch.amp.GradScaler.{_UNSCALE_OF}", "count_unscaling", "before_unscaling")

# An optimizer with this attribute has kernels that divide gradients by `optimizer.grad_scale` and skip a step
# where `optimizer.found_inf` is set. A GradScaler then sets these two and always calls `step`. torch sets the
# attribute for fused optimizers. Private: the three names, 2.8 to 2.13. Public way: none.
SCALES = "_step_supports_amp_scaling"
_LEFT = ("grad_scale", "found_inf")

# The factor by which each optimizer's gradients were multiplied, until `forget_scale`.
_INVERSES: WeakKeyDictionary[torch.optim.Optimizer, Tensor] = WeakKeyDictionary()
_any_scale = False  # an inverse was noted at least once
_FIRST: WeakKeyDictionary[torch.optim.Optimizer, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()
_HAS_BATCH: WeakKeyDictionary[torch.optim.Optimizer, WeakMethod[Callable[[], bool]]] = WeakKeyDictionary()
_unscale_gradients: Any = torch.amp.GradScaler.unscale_
_make_step: Any = torch.amp.GradScaler.step
_scale_outputs: Any = torch.amp.GradScaler.scale


def leave_scaling_to(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Let every GradScaler leave the division and the skip to `optimizer`, until the returned function is
    called.

    Private: `SCALES`.
    """
    own = vars(optimizer).get(SCALES)  # as torch or the script has set it; None: not set
    setattr(optimizer, SCALES, True)

    def take_back() -> None:
        if own is None:
            vars(optimizer).pop(SCALES, None)
        else:
            setattr(optimizer, SCALES, own)

    return take_back


def scale_left_to(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return the scale by which an optimizer's step must divide for a GradScaler, or None.

    Private: as in `SCALES`.
    """
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return scale


def infinity_left_to(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler has found an infinity and leaves the skip to an optimizer's step.

    On a GPU this waits. Private: as in `SCALES`.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def forget_scaling_left_to(optimizer: torch.optim.Optimizer) -> None:
    """Tell an optimizer's own step that gradients are divided already and hold no infinity.

    Private: as in `SCALES`.
    """
    for name in _LEFT:
        if hasattr(optimizer, name):
            setattr(optimizer, name, None)


def count_unscaling() -> None:
    """Patch torch so that a GradScaler's unscaling raises version counters and is recorded for `scale_of`.

    Atoll detects by version counters which gradients a script has changed since they were reduced or lent
    out. Private: `torch._amp_foreach_non_finite_check_and_unscale_`, which does not raise the counters,
    unlike other functions that write into their arguments, and `torch.amp.GradScaler._unscale_grads_`, 2.8
    to 2.13. Public way: none to hear of an unscaling. The first half can go once torch raises the counters.
    """
    if getattr(torch, _UNSCALE) is _torchs:
        setattr(torch, _UNSCALE, unscale)
    if getattr(torch.amp.GradScaler, _UNSCALE_OF) is _scalers:
        setattr(torch.amp.GradScaler, _UNSCALE_OF, _unscale_of)
    for name, original, replaced in (
        ("unscale_", _unscale_gradients, _unscale_with_scale),
        ("step", _make_step, _step_with_scale),
        ("scale", _scale_outputs, _scale_noted),
    ):
        if getattr(torch.amp.GradScaler, name) is original:
            setattr(torch.amp.GradScaler, name, replaced)


def _begin_scale(scaler: torch.amp.GradScaler, optimizer: object) -> None:
    """Have a scaler create its scale on a worker that has no batch for `optimizer`.

    A scaler creates its scale when it first scales a loss, and raises in `unscale_` and `step` before that.
    """
    known = _HAS_BATCH.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    has_batch = None if known is None else known()
    if has_batch is None or has_batch():
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])  # type: ignore[attr-defined]
    first = next(parameters, None)
    if first is not None:
        scaler.scale(torch.zeros((), device=first.device))


@functools.wraps(_unscale_gradients)
def _unscale_with_scale(scaler: torch.amp.GradScaler, optimizer: Any, *more: Any, **named: Any) -> Any:
    _begin_scale(scaler, optimizer)
    return _unscale_gradients(scaler, optimizer, *more, **named)


@functools.wraps(_make_step)
def _step_with_scale(scaler: torch.amp.GradScaler, optimizer: Any, *more: Any, **named: Any) -> Any:
    _begin_scale(scaler, optimizer)
    return _make_step(scaler, optimizer, *more, **named)


class _ScaledBackward:
    """A backward of a loss that `scaler` has scaled. It lives as long as autograd runs it."""

    def __init__(self, scaler: ReferenceType[torch.amp.GradScaler]) -> None:
        self.scaler = scaler

    def __call__(self) -> None:
        """Do nothing at the end of the backward: autograd keeps alive until then what it calls."""


_scaled_backward: ReferenceType[_ScaledBackward] | None = None  # the latest one, while it runs


@functools.wraps(_scale_outputs)
def _scale_noted(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
    scaled = _scale_outputs(scaler, outputs)
    if scaler.is_enabled():
        of = ref(scaler)
        for each in tree_leaves(scaled):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: _note_backward(of))  # type: ignore[no-untyped-call]
    return scaled


def _note_backward(scaler: ReferenceType[torch.amp.GradScaler]) -> None:
    global _scaled_backward
    backward = _ScaledBackward(scaler)
    at_end_of_backward(backward)
    _scaled_backward = ref(backward)


def scale_of_backward() -> Callable[[], float] | None:
    """Return a function that reads the scale of the GradScaler that has scaled the loss of the backward under
    way, or of one around it; None if none has. Heard by a patch of the public `GradScaler.scale`
    (`count_unscaling`)."""
    backward = None if _scaled_backward is None else _scaled_backward()
    return None if backward is None else functools.partial(_scale_now, backward.scaler)


def _scale_now(held: ReferenceType[torch.amp.GradScaler]) -> float:
    scaler = held()
    return 1.0 if scaler is None else float(scaler.get_scale()) or 1.0


_unscaling = set[object]()  # optimizers whose gradients a GradScaler divides now


def is_unscaling() -> bool:
    """True while a GradScaler looks for infinities in gradients and divides them."""
    return bool(_unscaling)


@functools.wraps(_scalers or count_unscaling)
def _unscale_of(
    scaler: object, optimizer: torch.optim.Optimizer, inverse_scale: Tensor, *more: Any, **named: Any
) -> Any:
    """Unscale an optimizer's gradients by the original method of GradScaler, and record the scale.

    The function given to `before_unscaling` runs first. An optimizer with such a function may have no
    gradients on this worker: then no infinity was found, and GradScaler makes the step.
    """
    first = _FIRST.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    reduce = None if first is None else first()
    if reduce is not None:
        reduce()
    _unscaling.add(optimizer)
    try:
        found = _scalers(scaler, optimizer, inverse_scale, *more, **named)
    finally:
        _unscaling.discard(optimizer)
    if reduce is not None and not found:
        found = {inverse_scale.device: torch.zeros((), device=inverse_scale.device)}
    if isinstance(optimizer, torch.optim.Optimizer):  # not a script's wrapper, which is another object
        note_scale(optimizer, inverse_scale)
    return found


def before_unscaling(
    optimizer: torch.optim.Optimizer, function: Callable[[], None], has_batch: Callable[[], bool]
) -> None:
    """Call `function` before a GradScaler unscales or checks an optimizer's gradients.

    `has_batch()` is False on a worker without a batch in this iteration: there the scaler needs no scaled
    loss. Both are bound methods, are held weakly, and are called once `count_unscaling` has run. Private:
    `torch.amp.GradScaler._unscale_grads_`, 2.8 to 2.13, is where a scaler first looks at the gradients of a
    step. It returns a tensor for each device with gradients, and `step` raises if there is none. Public
    way: none to reduce gradients before, or to let a worker without a batch step.
    """
    _FIRST[optimizer] = WeakMethod(function)
    _HAS_BATCH[optimizer] = WeakMethod(has_batch)


def note_scale(optimizer: torch.optim.Optimizer, inverse_scale: Tensor) -> None:
    """Record that an optimizer's gradients were multiplied by `inverse_scale`."""
    global _any_scale
    _any_scale = True
    _INVERSES[optimizer] = inverse_scale


def was_unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """True if a GradScaler has divided the optimizer's gradients since its last step (`note_scale`)."""
    return optimizer in _INVERSES


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """Forget the recorded scale: the optimizer has new gradients."""
    if _any_scale:
        _INVERSES.pop(optimizer, None)


def scale_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor by which a GradScaler divides an optimizer's gradients; 1 without a GradScaler.

    The gradients are divided already, or the scaler leaves the division to the step. Private: as in `SCALES`
    and `before_unscaling`. Public way: none; a scaler's `get_scale` does not say which optimizer's gradients
    were divided, or when.
    """
    scale = scale_left_to(optimizer)
    if isinstance(scale, Tensor):
        return _readable(inverse_of(scale))
    inverse = _INVERSES.get(optimizer) if _any_scale else None
    return 1.0 if inverse is None else _readable(inverse)


def inverse_of(scale: Tensor) -> Tensor:
    """Return the factor that undoes `scale`, rounded as GradScaler.unscale_ rounds it."""
    return scale.double().reciprocal().float()


def _readable(inverse_scale: Tensor) -> float:
    """Return the scale of a rounded inverse, without the digits that the rounding added."""
    inverse = float(inverse_scale)
    return float(f"{1 / inverse:.7g}") if inverse else 0.0


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by which `count_unscaling` replaces a torch function, or the function itself.

    torch always passes its original function to `__torch_function__`.
    """
    return unscale if function is _torchs else function


@functools.wraps(_torchs or count_unscaling)
def unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients of one device and dtype by `inverse_scale`, in place; raises their version counters.

    Sets `found_inf` to 1 where any gradient is not finite.
    """
    _torchs(gradients, found_inf, inverse_scale)
    # A factor of 1 only searches for infinities. On a GPU the factor is not read, because reading waits.
    if inverse_scale.device.type != "cpu" or inverse_scale.item() != 1.0:
        torch.autograd.graph.increment_version(gradients)


_ONE = torch.ones(())
_found = torch.zeros(())


def seem_finite(gradients: Sequence[Tensor]) -> bool:
    """Return True if a quick look at plain tensors on the CPU finds neither NaN nor infinity.

    False is no proof of either: the look may not accept the tensors, or another thread's look has found one.
    The look takes a fifth of the time of `torch.nn.utils.get_total_norm` on a small model. It writes each
    value back where it was read, so on large tensors it takes longer. Private:
    `torch._amp_foreach_non_finite_check_and_unscale_`, 2.8 to 2.13, with a scale of 1, which changes no bit
    and no version counter. Public way: none that makes no tensor and one number of them.
    """
    global _found
    found = _found
    try:
        _torchs(gradients, found, _ONE)
    except RuntimeError:  # several dtypes or devices, sparse or complex tensors
        return False
    if found.item():
        _found = torch.zeros(())
        return False
    return True


_NEAREST = 8  # frames between the read of `p.grad` and the function that reads it


def reader_of_all_gradients(frame: FrameType | None) -> str:
    """Return the name of the torch function that reads a gradient for a computation over all gradients.

    `frame` belongs to the code that hands out the gradient. Returns "" for other readers. Private: the files
    of `torch.amp.GradScaler` and `torch.nn.utils.clip_grad_norm_`, which read `p.grad` within few calls, 2.8
    to 2.13. Public way: none to know the reader.
    """
    for _ in range(_NEAREST):
        if frame is None:
            break
        code = frame.f_code
        if code.co_filename == clip_grad.__file__ and code.co_name == "clip_grad_norm_":
            return "torch.nn.utils.clip_grad_norm_"
        if code.co_filename == grad_scaler.__file__:
            return "torch.amp.GradScaler"
        frame = frame.f_back
    return ""


# Clipping

_ZERO_GRAD = "zero_grad"
_zero_of_optimizer: Any = torch.optim.Optimizer.zero_grad
_zero_of_module: Any = nn.Module.zero_grad
_told_of_zeros: list[WeakMethod[Callable[[Iterable[nn.Parameter]], None]]] = []


def watch_zeroing(tell: Callable[[Iterable[nn.Parameter]], None]) -> Callable[[], None]:
    """Call `tell` with the parameters of each `zero_grad`, until the returned function is called.

    `tell` is a bound method, and is held weakly. With `set_to_none=False`, `zero_grad` writes zeros, and to
    find them in the gradients would make a GPU wait. Private: nothing; `zero_grad` of
    `torch.optim.Optimizer` and of `nn.Module` are replaced. Public way: none, `zero_grad` has no hooks.
    """
    told = WeakMethod(tell)

    def unwatch() -> None:
        if told in _told_of_zeros:
            _told_of_zeros.remove(told)

    _told_of_zeros.append(told)
    for of, original, watched in (
        (torch.optim.Optimizer, _zero_of_optimizer, _watched_zero_of_optimizer),
        (nn.Module, _zero_of_module, _watched_zero_of_module),
    ):
        if of.zero_grad is original:
            setattr(of, _ZERO_GRAD, watched)
    return unwatch


@functools.wraps(_zero_of_optimizer)
def _watched_zero_of_optimizer(optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> None:
    _zero_of_optimizer(optimizer, *arguments, **named)
    if not torch.compiler.is_compiling():
        _tell_of_zeros([parameter for group in optimizer.param_groups for parameter in group["params"]])


@functools.wraps(_zero_of_module)
def _watched_zero_of_module(module: nn.Module, *arguments: Any, **named: Any) -> None:
    _zero_of_module(module, *arguments, **named)
    if not torch.compiler.is_compiling():
        _tell_of_zeros(list(module.parameters()))


def _tell_of_zeros(parameters: Sequence[nn.Parameter]) -> None:
    for told in list(_told_of_zeros):
        tell = told()
        if tell is not None:
            tell(parameters)
        else:
            _told_of_zeros.remove(told)


_WRITES = "_clip_grads_with_norm_"
_write: Any = _part(f"torch.nn.utils.clip_grad.{_WRITES}", "watch_clipping")
_latest_clip = ""


def watch_clipping() -> None:
    """Patch torch so that `clipped_at` knows the latest `clip_grad_norm_`.

    Private: `torch.nn.utils.clip_grad._clip_grads_with_norm_`, through which `clip_grad_norm_` writes, even
    if a script has imported the latter by name, 2.8 to 2.13. Public way: none to hear of a clipping.
    """
    if getattr(clip_grad, _WRITES) is _write:
        setattr(clip_grad, _WRITES, _watched_write)


def clipped_at() -> str:
    """Return the script's line of the latest `clip_grad_norm_` since `forget_clipping`; "" for none."""
    return _latest_clip


def forget_clipping() -> None:
    """Forget the latest `clip_grad_norm_`."""
    global _latest_clip
    _latest_clip = ""


@functools.wraps(_write or watch_clipping)
def _watched_write(*arguments: Any, **named: Any) -> Any:
    global _latest_clip
    _latest_clip = script_line()
    return _write(*arguments, **named)


# DataLoader


class LoaderWatcher(Protocol):
    """A listener to loops over DataLoaders, each known by its iterator.

    A DataLoader with persistent workers uses one iterator for all its loops.
    """

    def began(self, iterator: object, loader: DataLoader[Any]) -> None: ...

    def gave(self, iterator: object) -> None: ...

    def ended(self, iterator: object) -> None: ...


_watchers: list[LoaderWatcher] = []
_ITERATOR: Any = _part("torch.utils.data.dataloader._BaseDataLoaderIter", "watch_loaders")
_begin: Any = DataLoader.__iter__
_give: Any = getattr(_ITERATOR, "__next__", None)


def watch_loaders(watcher: LoaderWatcher) -> Callable[[], None]:
    """Tell `watcher` of all loops over DataLoaders in this process, until the returned function is called.

    Private: `torch.utils.data.dataloader._BaseDataLoaderIter`, whose `__next__` gives the batches, 2.8 to
    2.13; `DataLoader.__iter__` begins each loop, also with persistent workers. Public way: none to hear of
    a DataLoader's batches.
    """

    def unwatch() -> None:
        if watcher in _watchers:
            _watchers.remove(watcher)
        if not _watchers:
            if DataLoader.__iter__ is _watched_begin:
                DataLoader.__iter__ = _begin  # type: ignore[method-assign]
            if _ITERATOR.__next__ is _watched_give:
                _ITERATOR.__next__ = _give

    _watchers.append(watcher)
    if DataLoader.__iter__ is _begin:
        DataLoader.__iter__ = _watched_begin  # type: ignore[method-assign]
    if _ITERATOR.__next__ is _give:
        _ITERATOR.__next__ = _watched_give
    return unwatch


@functools.wraps(_begin)
def _watched_begin(loader: Any) -> Any:
    iterator = _begin(loader)
    for watcher in _watchers:
        watcher.began(iterator, loader)
    return iterator


@functools.wraps(_give or watch_loaders)
def _watched_give(iterator: Any) -> Any:
    try:
        batch = _give(iterator)
    except StopIteration:
        for watcher in _watchers:
            watcher.ended(iterator)
        raise
    for watcher in _watchers:
        watcher.gave(iterator)
    return batch


for _name in _absent:
    globals().pop(_name, None)
