"""Finds uses of torch's private parts in source code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR
from torch.utils.data import dataloader

# Names that begin with one underscore and are no part of torch, and that Python documents.
_DOCUMENTED = {"os._exit", "sys._current_frames"}
_DOTTED = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")


def is_private(name: str) -> bool:
    """True for a name with one underscore before it."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def names_of_torch() -> set[str]:
    """Return the private names of torch's objects that Atoll meets."""
    holders: list[Any] = [
        torch,
        torch.Tensor,
        torch.UntypedStorage,
        torch.autograd.Variable,
        torch.amp.GradScaler,
        torch.distributed,
        torch.distributed.distributed_c10d,
        torch.distributed.ProcessGroupGloo,
        torch.nn.Module(),
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.utils.data.DataLoader,
        clip_grad,
        dataloader,
        dataloader._BaseDataLoaderIter,
    ]
    found = {name for holder in holders for name in dir(holder)}
    for kind in (nn.Module, torch.optim.Optimizer, torch.UntypedStorage):
        found |= {name for each in kind.__mro__ for name in inspect.get_annotations(each)}
    # What a class's `__init__` sets is in no list of the class.
    for kind in (torch.amp.GradScaler, torch.utils.data.DataLoader, SequentialLR, ChainedScheduler):
        found |= set(inspect.unwrap(kind.__init__).__code__.co_names)  # type: ignore[misc]
    found |= {"_orig_mod", "_step_supports_amp_scaling", "_schema", "_devices", "_timeout"}
    return {name for name in found if is_private(name)}


def names_defined(trees: Iterable[ast.Module]) -> set[str]:
    """Return the private names that these modules define: functions, classes, variables and attributes."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_ours(node):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def private_uses(tree: ast.Module, ours: set[str], torchs: set[str]) -> list[str]:
    """Return the uses of private parts of torch in a module, as "line: what".

    `ours` are the private names that Atoll defines, `torchs` those of torch. A private attribute of another
    object than `self` is torch's unless Atoll defines it. Frames are private parts of Python.
    """
    aliases = _aliases(tree)
    docstrings = {id(text) for text in _docstrings(tree)}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
        found += [(node.lineno, name) for name in names if _DOTTED.fullmatch(name)]  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_torchs = _root(node) in aliases or node.attr not in ours or node.attr in torchs
            if is_torchs and not _is_own(node.value) and (said := ast.unparse(node)) not in _DOCUMENTED:
                found.append((node.lineno, said))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            said = node.value
            if _names_a_part(said, ours, torchs) or _DOTTED.fullmatch(said):
                found.append((node.lineno, repr(said)))
    return [f"{line}: {what}" for line, what in sorted(set(found))]


def _names_a_part(text: str, ours: set[str], torchs: set[str]) -> bool:
    """True for a private name of torch, or for the beginning of several ("_foreach_")."""
    if not is_private(text) or text in ours:
        return False
    return text in torchs or (text.endswith("_") and any(name.startswith(text) for name in torchs))


def _is_ours(attribute: ast.Attribute) -> bool:
    return _is_own(attribute.value) or "atoll" in attribute.attr


def _is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return _is_super(value.func)
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _is_super(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "super"


def _root(value: ast.expr) -> str:
    """Return the name that a chain of attributes begins with; "" where it begins with another expression."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _aliases(tree: ast.Module) -> set[str]:
    """Return the names by which a module knows torch and its parts."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(each.asname or each.name).split(".")[0] for each in node.names if _is_torch(each.name)}
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            found |= {each.asname or each.name for each in node.names}
    return found


def _is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
