"""torch's private parts: used in three files, each as its file says, and missed with one clear line."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import re
import sys
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from private_parts import names_defined, names_of_torch, private_uses
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LinearLR, SequentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from atoll.core.errors import UserError
from atoll.tensors import torch_compat as compat
from atoll.tensors import torch_parts as parts
from atoll.tensors import torch_patches as patches
from atoll.tensors import torch_scaling as scaling

SOURCE = Path(__file__).parents[2] / "src" / "atoll"
THESE = [SOURCE / "tensors" / f"torch_{name}.py" for name in ("compat", "scaling", "patches")]


class Sources:
    """The source code of Atoll, but for these files."""

    def __init__(self) -> None:
        self.trees = {
            path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(SOURCE.rglob("*.py"))
            if path not in THESE
        }
        self.ours = names_defined(self.trees.values())
        self.torchs = names_of_torch()

    def uses(self, tree: ast.Module) -> list[str]:
        return private_uses(tree, self.ours, self.torchs)


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


@pytest.mark.check
def test_no_other_file_uses_a_private_part_of_torch(sources: Sources) -> None:
    assert len(sources.trees) > 300
    assert all(path.exists() for path in THESE)
    found = [f"{file}:{use}" for file, tree in sources.trees.items() for use in sources.uses(tree)]
    assert not found, "use one of atoll.tensors.torch_* in place of:\n" + "\n".join(found)


@pytest.mark.check
@pytest.mark.parametrize(
    "planted",
    [
        "import torch\nx = torch._C._current_graph_task_id()",
        "import torch\nx = torch.autograd.Variable._execution_engine.queue_callback(f)",
        "from torch._C import _storage_Use_Count",
        "from torch import _foreach_mul_",
        "import torch._dynamo",
        "import torch._dynamo as compiler",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._pytree import tree_map",
        "from torch.distributed.distributed_c10d import _get_default_store",
        "import torch.distributed as dist\nx = dist._some_future_name()",
        "def f(tensor):\n    return tensor._version",
        "def f(self):\n    return self.storage._cdata",
        "def f(part):\n    return part._buffers.items()",
        "def f(part):\n    return part._parameters",
        "def f(scaler, optimizer):\n    return scaler._per_optimizer_states[id(optimizer)]",
        "def f(scaler):\n    return scaler._scale",
        "def f(module):\n    return getattr(module, '_orig_mod', module)",
        "def f(optimizer):\n    setattr(optimizer, '_optimizer_step_pre_hooks', {})",
        "def f(func):\n    return func.__name__.startswith('_foreach_')",
        "preloaded = ['torch._dynamo']",
        "import sys\nframe = sys._getframe(1)",
        "def f(loader):\n    return loader._iterator",
        "def f(options):\n    options._timeout = 1",
        "if True:\n    def f(self):\n        class A:\n            x = [y._grad_fn for y in self.those]",
    ],
)
def test_the_check_finds_a_planted_use(sources: Sources, planted: str) -> None:
    assert sources.uses(ast.parse(planted))


@pytest.mark.check
@pytest.mark.parametrize(
    "allowed",
    [
        '"""A docstring may speak of `torch._C._current_graph_task_id`."""',
        "import torch\nx = torch.autograd.graph.increment_version(y)",
        "class A:\n    def f(self):\n        return self._buffers, super()._parameters",
        "import os\nos._exit(1)",
        "from atoll.tensors.torch_compat import version_of\nx = version_of(y)",
        "for _ in range(3):\n    pass",
        "import inspect\nframe = inspect.currentframe()",
    ],
)
def test_the_check_lets_pass_what_is_allowed(sources: Sources, allowed: str) -> None:
    assert sources.uses(ast.parse(allowed)) == []


# A torch without a part.


def compat_again(of: ModuleType) -> ModuleType:
    """A second copy of a module, which looks for the parts of torch as it is now."""
    spec = importlib.util.spec_from_file_location("compat_again", of.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paths_needed() -> list[str]:
    """The paths that the modules give to `_needs` and `_part`."""
    return sorted({needed for path in THESE for needed in paths_needed_in(path)})


def paths_needed_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("_needs", "_part")
        ):
            count = 1 if node.func.id == "_part" else len(node.args)
            for argument in node.args[:count]:
                text = ast.unparse(argument).strip("f").strip("'\"")
                found.append(re.sub(r"\{(\w+)\}", lambda match: str(names[match[1]]), text))
    return {each for each in found if each.startswith("torch.")}


def test_the_installed_torch_has_all_parts() -> None:
    assert len(paths_needed()) > 30
    assert [parts.missing_part(path) for path in paths_needed()] == [""] * len(paths_needed())
    assert parts.missing_part("torch._C._no_such_part.more") == "torch._C._no_such_part"


@pytest.mark.parametrize(
    ("of", "holder", "part", "public"),
    [
        (compat, "torch._C", "_storage_Use_Count", "storage_uses"),
        (compat, "torch._C", "_current_graph_task_id", "is_within_backward"),
        (compat, "torch._C", "DisableTorchFunctionSubclass", "AsPlainTensors"),
        (compat, "torch._C._autograd", "_top_saved_tensors_default_hooks", "saved_tensors_hooks_in_force"),
        (compat, "torch.utils._pytree", "tree_map_only", "tree_map_only"),
        (compat, "torch._C._dynamo.eval_frame", "set_code_exec_strategy", "untraced"),
        (scaling, "torch", "_amp_foreach_non_finite_check_and_unscale_", "count_unscaling"),
        (scaling, "torch", "_amp_foreach_non_finite_check_and_unscale_", "unscale"),
        (scaling, "torch.amp.GradScaler", "_unscale_grads_", "before_unscaling"),
        (patches, "torch.nn.utils.clip_grad", "_clip_grads_with_norm_", "watch_clipping"),
        (patches, "torch.utils.data.dataloader", "_BaseDataLoaderIter", "watch_loaders"),
        (compat, "torch.distributed.distributed_c10d", "_get_default_store", "default_store"),
    ],
)
def test_without_a_part_only_what_needs_it_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, of: ModuleType, holder: str, part: str, public: str
) -> None:
    """The line names the torch, the part and what needs it; the other functions are there."""
    place: Any = torch
    for name in holder.split(".")[1:]:
        place = getattr(place, name)
    monkeypatch.delattr(place, part)
    module = compat_again(of)
    monkeypatch.setitem(sys.modules, "compat_again", module)
    with pytest.raises(UserError) as caught:
        exec(f"from compat_again import {public}", {})
    line = str(caught.value)
    assert "\n" not in line
    assert torch.__version__ in line
    assert f"has no {holder}.{part}, which compat_again.{public} needs; install a torch from" in line
    missing = vars(of).keys() - vars(module).keys()
    assert public in missing
    assert len(missing) <= 4
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from compat_again import no_such_name", {})


# Autograd


def test_within_backward() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: seen.append(compat.is_within_backward()))  # type: ignore[no-untyped-call]
    assert not compat.is_within_backward()
    (leaf * 2).sum().backward()
    assert not compat.is_within_backward()
    assert seen == [True]


def test_a_node_of_a_leaf_runs_in_a_backward_alone() -> None:
    """`torch.autograd.grad` leaves no gradients: for its leaf the engine raises, for another it says no."""
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    nodes, seen = [get_gradient_edge(leaf).node for leaf in (first, second)], list[Any]()

    def look(_: Tensor) -> None:
        for node in nodes:
            try:
                seen.append(compat.will_run(node))
            except RuntimeError:
                seen.append("raised")

    def output() -> Tensor:
        product = first * second
        product.register_hook(look)  # type: ignore[no-untyped-call]
        return product.sum()

    output().backward()
    assert seen == [True, True]
    seen.clear()
    torch.autograd.grad(output(), [first])
    assert seen == ["raised", False]


def test_at_the_end_of_a_backward() -> None:
    order: list[str] = []
    leaf = torch.ones(2, requires_grad=True)

    def arm(_: Tensor) -> None:
        compat.at_end_of_backward(lambda: order.append("end"))
        order.append("hook")

    leaf.register_hook(arm)  # type: ignore[no-untyped-call]
    leaf.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))  # type: ignore[no-untyped-call]
    (leaf * 2).sum().backward()
    assert order == ["hook", "gradient", "end"]
    with pytest.raises(RuntimeError):
        compat.at_end_of_backward(lambda: None)


def test_the_innermost_saved_tensors_hooks() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    assert compat.saved_tensors_hooks_in_force() is None
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), saved_tensors_hooks(pack, unpack):
        assert compat.saved_tensors_hooks_in_force() == (pack, unpack)
    assert compat.saved_tensors_hooks_in_force() is None


def test_a_hook_that_comes_first() -> None:
    order: list[str] = []
    parameter = nn.Parameter(torch.ones(2))

    def noting(name: str) -> Any:
        return lambda _: order.append(name)

    parameter.register_post_accumulate_grad_hook(noting("script's first"))  # type: ignore[no-untyped-call]
    parameter.register_post_accumulate_grad_hook(noting("script's second"))  # type: ignore[no-untyped-call]
    handle = compat.hook_first(parameter, noting("ours"))
    (parameter * 2).sum().backward()
    assert order == ["ours", "script's first", "script's second"]
    handle.remove()
    order.clear()
    (parameter * 2).sum().backward()
    assert order == ["script's first", "script's second"]


# Tensors


def test_the_version_counts_writes_also_through_views() -> None:
    tensor = torch.zeros(4)
    assert compat.version_of(tensor) == 0
    tensor[1:].add_(1)
    tensor.mul_(2)
    assert compat.version_of(tensor) == 2
    tensor.data.add_(1)
    assert compat.version_of(tensor) == 2


def test_the_uses_of_a_storage() -> None:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    handle = compat.storage_handle(storage)
    alone = compat.storage_uses(handle)
    view = tensor[1:]
    assert compat.storage_uses(handle) == alone + 1
    del view
    assert compat.storage_uses(handle) == alone


def test_operations_on_plain_tensors() -> None:
    calls: list[str] = []

    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Noting)
    with compat.AsPlainTensors():
        assert type(tensor + 1) is Tensor
    assert calls == []
    tensor + 1
    assert calls == ["add"]


def test_a_wrapper_without_memory_and_the_arguments_of_operations() -> None:
    seen: list[tuple[str, list[tuple[str, bool]]]] = []

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            arguments = compat.arguments_of(func)
            written = [
                (each.name, each.alias_info is not None and each.alias_info.is_write) for each in arguments
            ]
            seen.append((str(func), written))
            return torch.zeros(3)

    wrapper = compat.wrapper_tensor(Wrapper, (3,), None, torch.float64, torch.device("cpu"))
    assert isinstance(wrapper, Wrapper)
    assert (wrapper.shape, wrapper.dtype, wrapper.device.type) == ((3,), torch.float64, "cpu")
    wrapper.neg()
    wrapper.zero_()
    assert seen == [("aten.neg.default", [("self", False)]), ("aten.zero_.default", [("self", True)])]


def test_names_of_tensors_parts() -> None:
    for name in (*compat.AUTOGRADS_ATTRIBUTES, compat.TYPED_STORAGE, compat.REDUCE):
        assert hasattr(Tensor, name)
    for beginning in compat.LIST_FUNCTIONS:
        assert any(name.startswith(beginning) for name in dir(torch))
    lists = [torch.ones(2), torch.ones(3)]
    getattr(torch, compat.ZERO_LIST)(lists)
    assert [each.sum() for each in lists] == [0, 0]
    assert compat.compare_kinds(torch.ones(1), torch.ones(2))
    assert "weight_stride0" in str(torch.ops.aten._cudnn_rnn_flatten_weight.default._schema)
    assert callable(compat.flatten_rnn)


def test_trees() -> None:
    tree = {"a": [1, torch.ones(1)], "b": (torch.zeros(1),)}
    leaves, structure = compat.tree_flatten(tree)
    assert leaves == compat.tree_leaves(tree)
    assert compat.tree_unflatten(leaves, structure) == tree
    assert compat.tree_map(type, tree) == {"a": [int, Tensor], "b": (Tensor,)}
    assert compat.tree_map_only(Tensor, float, tree) == {"a": [1, 1.0], "b": (0.0,)}


# Modules


def make_module() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    return module


def test_what_hangs_at_a_module_itself() -> None:
    module = make_module()
    layer = module.get_submodule("0")
    parameters, buffers = compat.own_parameters(layer), compat.own_buffers(module)
    assert list(parameters) == ["weight", "bias"]
    assert list(buffers) == ["kept", "passing"]
    layer.weight = nn.Parameter(torch.ones(2, 2))
    module.kept = torch.ones(1)
    assert parameters["weight"] is layer.weight
    assert buffers["kept"] is module.kept
    assert [compat.is_persistent(module, name) for name in buffers] == [True, False]
    assert list(compat.own_modules(module)) == ["0", "1"]
    assert compat.own_modules(object()) == {}


def test_compiled_modules() -> None:
    module, other = make_module(), make_module()
    assert compat.uncompiled(module) is module
    assert not compat.is_compiled(module)
    compiled: Any = torch.compile(module, backend="eager")
    other.compile(backend="eager")
    assert compat.uncompiled(compiled) is module
    assert compat.is_compiled(compiled)
    assert compat.is_compiled(other)


def test_within_a_functional_call() -> None:
    seen: list[bool] = []
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: seen.append(compat.is_within_functional_call()))
    module(torch.ones(1, 2))
    torch.func.functional_call(module, dict(module.named_parameters()), torch.ones(1, 2))
    assert seen == [False, True]


def test_a_new_parameter_asks_for_detach() -> None:
    seen: list[bool] = []

    class Looking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.detach:
                frame = inspect.currentframe()
                assert frame is not None
                seen.append(compat.makes_parameter(frame.f_back))
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Looking)
    tensor.detach()
    nn.Parameter(tensor)
    assert seen == [False, True]
    assert not compat.makes_parameter(None)


def test_whose_load_state_dict_was_called() -> None:
    seen: list[bool] = []

    def before(part: nn.Module, *_: Any) -> None:
        seen.append(compat.is_loaded_itself(part, inspect.currentframe()))

    module = nn.Sequential(nn.Linear(2, 2))
    part = module.get_submodule("0")
    part.register_load_state_dict_pre_hook(before)
    module.load_state_dict(module.state_dict())
    part.load_state_dict(part.state_dict())
    assert seen == [False, True]
    assert not compat.is_loaded_itself(part, inspect.currentframe())


def test_untraced_frames_are_not_compiled() -> None:
    """Nor are the frames of what they call."""
    traced: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        traced.extend(node.name for node in graph.graph.nodes)
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x.cos()

    def left_alone(x: Tensor) -> Tensor:
        return inner(x).sin()

    def taken(x: Tensor) -> Tensor:
        return x.tan()

    x = torch.ones(2)
    untraced = torch.compile(compat.untraced(left_alone), backend=backend)
    assert torch.equal(untraced(x), x.cos().sin())
    assert traced == []
    assert torch.equal(torch.compile(taken, backend=backend)(x), x.tan())
    assert "tan" in traced


def test_the_slow_import_is_a_module() -> None:
    assert importlib.util.find_spec(compat.SLOW_IMPORT) is not None


# Optimizers and schedulers


def make_optimizer(**settings: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.ones(2))
    return parameter, torch.optim.SGD([parameter], lr=0.1, **settings)


def test_hooks_around_a_step() -> None:
    order: list[str] = []

    def noting(name: str) -> Any:
        return lambda *_: order.append(name)

    parameter, optimizer = make_optimizer()
    first = optimizer.register_step_pre_hook(noting("first"))
    optimizer.register_step_pre_hook(noting("second"))
    optimizer.register_step_post_hook(noting("after"))
    before, after = compat.step_hooks(optimizer)
    assert (len(before), len(after)) == (2, 1)
    before.move_to_end(first.id)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert order == ["second", "first", "after"]
    shared = copy.copy(optimizer)
    shared.__dict__ = dict(vars(optimizer))
    compat.drop_step_hooks(shared)
    assert compat.step_hooks(shared) == (OrderedDict(), OrderedDict())
    assert len(compat.step_hooks(optimizer)[0]) == 2


def test_a_bare_step_runs_no_hooks() -> None:
    seen: list[object] = []
    parameter, optimizer = make_optimizer()
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(_))
    try:
        parameter.grad = torch.ones(2)
        compat.bare_step(type(optimizer))(optimizer)
        assert seen == []
        assert torch.equal(parameter.detach(), torch.full((2,), 0.9))
        optimizer.step()
        assert len(seen) == 1
    finally:
        handle.remove()


def test_schedulers_in_schedulers() -> None:
    _, optimizer = make_optimizer()
    parts = [ConstantLR(optimizer), LinearLR(optimizer)]
    sequence = SequentialLR(optimizer, list(parts), [5])
    assert compat.schedulers_in(sequence) == parts
    assert compat.milestones_of(sequence) == [5]
    assert compat.schedulers_in(ChainedScheduler(list(parts))) == parts
    assert compat.schedulers_in(parts[0]) == []


# torch.distributed


def test_the_scripts_own_store() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = compat.default_store()
        found.set("key", "value")
        assert found.get("key") == b"value"
        assert store.num_keys() > 0
    finally:
        torch.distributed.destroy_process_group()


def test_the_options_of_a_gloo_group() -> None:
    options = compat.gloo_options(timedelta(seconds=7), hostname="127.0.0.1")
    group = torch.distributed.ProcessGroupGloo(
        torch.distributed.HashStore(),  # type: ignore[attr-defined]
        0,
        1,
        options,
    )
    assert options._timeout == timedelta(seconds=7)
    assert len(options._devices) == 1
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.ones(2))


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_the_options_of_an_nccl_group() -> None:
    assert compat.nccl_options(timedelta(seconds=7))._timeout == timedelta(seconds=7)


# GradScaler


@pytest.fixture
def patched() -> None:
    scaling.count_unscaling()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("how", [{}, {"fused": True}])
def test_a_scale_is_known_until_it_is_forgotten(how: dict[str, Any]) -> None:
    parameter, optimizer = make_optimizer(**how)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale((parameter * 2).sum()).backward()
    seen: list[tuple[float, bool]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append((scaling.scale_of(optimizer), scaling.infinity_left_to(optimizer)))
    )
    before = compat.version_of(parameter.grad)  # type: ignore[arg-type]
    scaler.unscale_(optimizer)
    assert compat.version_of(parameter.grad) > before  # type: ignore[arg-type]
    assert scaling.scale_of(optimizer) == 256.0
    scaler.step(optimizer)
    assert seen == [(256.0, False)]
    scaling.forget_scale(optimizer)
    assert scaling.scale_of(optimizer) == 1.0


@pytest.mark.usefixtures("patched")
def test_the_scale_of_a_backward() -> None:
    """It is the scale of the backward under way or of one around it, and of no other."""
    parameter, scaler = nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu", init_scale=8.0)
    found: list[float | None] = []

    def look(*_: Any) -> None:
        read = scaling.scale_of_backward()
        kept.append(read)
        found.append(None if read is None else read())

    def fail(*_: Any) -> None:
        raise ValueError("planted")

    kept: list[Any] = []  # what reads a scale keeps no backward alive
    parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    scaler.scale(parameter.sum()).backward()
    parameter.sum().backward()  # not scaled
    scaled = scaler.scale(parameter.sum())
    parameter.sum().backward()  # while a scaled loss waits for its backward
    scaled.backward()
    x = torch.ones(2, requires_grad=True)
    within = checkpoint(lambda each: (each * parameter).sum(), x, use_reentrant=True)
    scaler.scale(within).backward()
    raising = parameter.sum()
    raising.register_hook(fail)
    with pytest.raises(ValueError, match="planted"):
        scaler.scale(raising).backward()
    parameter.sum().backward()
    torch.autograd.grad(scaler.scale(parameter.sum()), parameter)
    parameter.sum().backward()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(parameter.sum()).backward()
    assert found == [8.0, None, None, 8.0, 8.0, None, None, None]


@pytest.mark.usefixtures("patched")
def test_what_a_scaler_leaves_to_the_step() -> None:
    """By the plain loop it leaves nothing, until `leave_scaling_to`; then it always calls the step."""
    parameter, optimizer = make_optimizer()
    take_back = scaling.leave_scaling_to(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen: list[tuple[float | None, bool]] = []

    def before(*_: Any) -> None:
        scale = scaling.scale_left_to(optimizer)
        seen.append((None if scale is None else float(scale), scaling.infinity_left_to(optimizer)))
        scaling.forget_scaling_left_to(optimizer)
        assert scaling.scale_left_to(optimizer) is None
        assert not scaling.infinity_left_to(optimizer)

    optimizer.register_step_pre_hook(before)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen == [(256.0, False), (256.0, True)]
    take_back()
    optimizer.zero_grad()
    scaler.scale((parameter * float("inf")).sum()).backward()
    scaler.step(optimizer)
    assert len(seen) == 2
    assert scaling.SCALES not in vars(optimizer)


@pytest.mark.usefixtures("patched")
def test_before_a_scaler_looks_at_gradients() -> None:
    """What is called may leave no gradient at all: then there is no infinity, and the step is made."""
    _, optimizer = make_optimizer()
    order: list[str] = []

    class Reducing:
        def reduce(self) -> None:
            order.append("reduced")

        def has_batch(self) -> bool:
            return True

    reducing = Reducing()
    scaling.before_unscaling(optimizer, reducing.reduce, reducing.has_batch)
    optimizer.register_step_pre_hook(lambda *_: order.append("step"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)
    assert order == ["reduced", "step"]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("has_batch", [False, True])
def test_a_scaler_needs_no_scaled_loss_where_there_is_no_batch(has_batch: bool) -> None:
    _, optimizer = make_optimizer()
    steps: list[None] = []

    class Known:
        def reduce(self) -> None:
            pass

        def has_batch(self) -> bool:
            return has_batch

    known = Known()
    scaling.before_unscaling(optimizer, known.reduce, known.has_batch)
    optimizer.register_step_pre_hook(lambda *_: steps.append(None))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if has_batch:  # torch's own words on a script that forgets to scale
        with pytest.raises(AssertionError, match="scaler.scale"):
            scaler.unscale_(optimizer)
        return
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (len(steps), scaler.get_scale()) == (1, 8.0)


def test_who_zeroes_gradients_is_heard_until_it_is_enough() -> None:
    parameter, optimizer = make_optimizer()
    heard: list[list[nn.Parameter]] = []

    class Ear:
        def hear(self, parameters: Any) -> None:
            heard.append(list(parameters))

    ear = Ear()
    unwatch = patches.watch_zeroing(ear.hear)
    optimizer.zero_grad(set_to_none=False)
    module = nn.Linear(2, 1)
    module.zero_grad()
    assert [len(each) for each in heard] == [1, 2]
    assert heard[0][0] is parameter
    unwatch()
    unwatch()  # twice does no harm
    optimizer.zero_grad()
    patches.watch_zeroing(Ear().hear)  # which nobody holds
    optimizer.zero_grad()
    assert len(heard) == 2


@pytest.mark.usefixtures("patched")
def test_an_unscaling_counts_as_a_write() -> None:
    gradients, found = [torch.full((2,), 8.0)], torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.full((1,), 0.25))
    assert torch.equal(gradients[0], torch.full((2,), 2.0))
    assert compat.version_of(gradients[0]) == 1
    scaling.unscale([torch.full((2,), float("nan"))], found, torch.ones(1))
    assert found.item() == 1.0
    assert scaling.counted(scaling._torchs) is scaling.unscale
    assert scaling.counted(torch.add) is torch.add


def test_who_reads_all_gradients() -> None:
    readers: list[str] = []

    class Read(nn.Parameter):
        @property
        def grad(self) -> Tensor | None:
            frame: FrameType | None = inspect.currentframe()
            readers.append(scaling.reader_of_all_gradients(frame))
            return torch.ones(2)

    parameter = Read(torch.ones(2))
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    assert "torch.nn.utils.clip_grad_norm_" in readers
    readers.clear()
    scaler.unscale_(optimizer)
    assert set(readers) == {"torch.amp.GradScaler"}
    readers.clear()
    optimizer.step()
    assert set(readers) == {""}


# Clipping and DataLoaders


def test_the_line_of_the_latest_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "script_line", lambda: "train.py:7")
    patches.watch_clipping()
    patches.forget_clipping()
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert patches.clipped_at() == ""
    torch.nn.utils.clip_grad_norm_([parameter], 0.5)
    assert patches.clipped_at() == "train.py:7"
    patches.forget_clipping()
    assert patches.clipped_at() == ""


@pytest.mark.parametrize("workers", [0, 1])
def test_loops_over_a_loader(workers: int) -> None:
    heard: list[str] = []

    class Watcher:
        def began(self, iterator: object, _loader: object) -> None:
            heard.append("began")

        def gave(self, iterator: object) -> None:
            heard.append("gave")

        def ended(self, iterator: object) -> None:
            heard.append("ended")

    loader = DataLoader(
        TensorDataset(torch.arange(4)), batch_size=2, num_workers=workers, persistent_workers=workers > 0
    )
    unwatch = patches.watch_loaders(Watcher())
    for _ in range(2):
        for _batch in loader:
            pass
    unwatch()
    for _batch in loader:
        pass
    assert heard == ["began", "gave", "gave", "ended"] * 2
