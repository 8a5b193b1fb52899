"""A model whose parameters come and go trains as the plain one does, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atoll.core.memory import Memory
from atoll.memory.fit import fit
from atoll.memory.fitted import Fitted
from support.cases import kept_for
from support.families import FAMILIES, batch, build, loss_of
from support.models import TinyGPT
from support.tight import adamw, memory, same

BUDGETS = (0.25, 0.5, 0.75)  # of the need
Scenario = Callable[["Run"], list[Any]]


pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.sampled]


class Run:
    """One training: plain where `share` is None, else under a budget of that share of the need."""

    def __init__(
        self,
        family: str,
        share: float | None,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw,
        change: Callable[[Memory], Memory] = lambda given: given,
    ) -> None:
        self.family = family
        self.model: Any = build(family)
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.fitted: Fitted | None = None
        if share is not None:
            self.fitted = fit(
                self.model, self.optimizer, memory=change(memory(self.model, share, host="1GiB"))
            )

    def close(self) -> list[Tensor]:
        """The parameters and buffers at the end."""
        if self.fitted is not None:
            figures = self.fitted.stats()
            assert figures.device_peak <= figures.device_budget
            self.fitted.close()
        assert all(type(p) is nn.Parameter for p in self.model.parameters())
        return [value.detach().clone() for value in (*self.model.parameters(), *self.model.buffers())]

    def losses(self, steps: int = 10) -> list[float]:
        """Train as plainly as can be."""
        found = []
        for step in range(steps):
            inputs, targets = batch(self.family, step)
            loss = loss_of(self.model(inputs), targets)
            self.step(loss)
            found.append(loss.item())
        return found

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def compare(family: str, scenario: Scenario, shares: tuple[float, ...] = BUDGETS, **options: Any) -> None:
    results = []
    for share in (None, *shares):
        run = Run(family, share, **options)
        if share is not None:
            assert run.fitted is not None
            assert not run.fitted.plan.fits
        seen = scenario(run)
        results.append((seen, run.close()))
    for share, (seen, values) in zip(shares, results[1:], strict=True):
        assert same(seen, results[0][0]), f"{family} at {share}: {seen} and not {results[0][0]}"
        assert same(values, results[0][1]), f"{family} at {share}: other values"


@pytest.mark.parametrize("family", kept_for(pytest.mark.check, FAMILIES, ("gpt", "assorted")))
def test_a_family_trains_as_the_plain_model_does(family: str) -> None:
    compare(family, lambda run: run.losses())


def gpt(run: Run) -> TinyGPT:
    assert isinstance(run.model, TinyGPT)
    return run.model


def each_step(body: Callable[[Run, Tensor, Tensor], Any], steps: int = 4) -> Scenario:
    """A scenario that calls `body(run, inputs, targets)` in each step, and sees what it gives."""

    def scenario(run: Run) -> list[Any]:
        return [body(run, *batch(run.family, step)) for step in range(steps)]

    return scenario


def outside_forward(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """Parameters in the loss, and views of them, outside of any module."""
    model = gpt(run)
    penalty = (model.tokens.weight**2).sum() + (model.blocks[0].qkv.weight @ model.positions.t()).abs().sum()
    loss = loss_of(model(inputs), targets) + 1e-3 * penalty
    run.step(loss)
    return loss.item()


def by_hand(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """The model's forward is never called: its parts are, by a function of the script."""
    model = gpt(run)
    x = model.tokens(inputs) + model.positions
    for block in model.blocks:
        x = x + torch.einsum("bti,oi->bto", block.norm1(x), block.out.weight)
        x = block.mlp(block.norm2(x)) + x
    weight = model.head.weight
    loss = loss_of(model.norm(x) @ weight.t(), targets)
    run.step(loss)
    return loss.item()


def parent_after_children(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """The parent's own parameter once more, when all of its children have run."""
    model = gpt(run)
    x = model.norm(model.blocks(model.tokens(inputs) + model.positions)) * model.positions.sum(
        1, keepdim=True
    )
    loss = loss_of(model.head(x), targets)
    run.step(loss)
    return loss.item()


def checkpointed(reentrant: bool, from_outside: bool) -> Callable[[Run, Tensor, Tensor], Any]:
    """Each block is a checkpoint; inside of a module's forward or in the script's own loop."""

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            done: Tensor = checkpoint(self.block, x, use_reentrant=reentrant)
            return done

    def body(run: Run, inputs: Tensor, targets: Tensor) -> Any:
        model = gpt(run)
        x = model.tokens(inputs) + model.positions
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant) if from_outside else Checkpointed(block)(x)
        loss = loss_of(model.head(model.norm(x)), targets)
        run.step(loss)
        return loss.item()

    return body


class Custom(torch.autograd.Function):
    """x @ w.t() + b, with w saved, b and a view of w kept as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.b, ctx.turned = b, w.t()
        return x @ ctx.turned + b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, w = ctx.saved_tensors
        assert torch.equal(ctx.turned, w.t())
        flat = gradient.flatten(0, -2)
        return gradient @ w, flat.t() @ x.flatten(0, -2), flat.sum(0) + 0 * ctx.b


def custom_function(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    model = gpt(run)
    x = model.norm(model.tokens(inputs) + model.positions)
    for block in model.blocks:
        x = x + Custom.apply(x, block.out.weight, block.out.bias)
    loss = loss_of(model.head(x), targets)
    run.step(loss)
    return loss.item()


def several_forwards(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """Three forwards and one backward of them all; then two forwards and a backward of each."""
    model = gpt(run)
    run.optimizer.zero_grad()
    losses = [loss_of(model(inputs.roll(k, 1)), targets) for k in range(3)]
    (losses[0] + losses[1] * losses[2]).backward()
    losses = [loss_of(model(inputs.roll(k, 0)), targets) for k in range(2)]
    losses[0].backward()
    losses[1].backward()
    run.optimizer.step()
    return [loss.item() for loss in losses]


def evaluated(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """Evaluation before and after the step, and with inference mode."""
    model = gpt(run)
    model.eval()
    with torch.no_grad():
        before = loss_of(model(inputs), targets).item()
    model.train()
    run.step(loss_of(model(inputs), targets))
    model.eval()
    with torch.inference_mode():
        after = loss_of(model(inputs), targets).item()
    model.train()
    return before, after


def accumulated_and_clipped(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    run.optimizer.zero_grad()
    for micro in range(3):
        (loss_of(run.model(inputs.roll(micro, 1)), targets) / 3).backward()
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.optimizer.step()
    return norm.item()


def gradients_read_and_written(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """The script reads, scales, replaces and removes gradients."""
    model = gpt(run)
    run.optimizer.zero_grad()
    loss_of(model(inputs), targets).backward()
    seen = [(p.grad * 2).sum().item() for p in model.parameters() if p.grad is not None]
    model.head.weight.grad.mul_(0.5)
    model.positions.grad = torch.ones_like(model.positions) * 0.01
    model.tokens.weight.grad = None
    run.optimizer.step()
    return seen


def branching(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """Which blocks run, and in which order, depends on the data."""
    model = gpt(run)
    order = inputs.sum(1).remainder(4).tolist()
    x = model.tokens(inputs) + model.positions
    for index in order:
        x = model.blocks[index](x)
    loss = loss_of(model.head(model.norm(x)), targets)
    run.step(loss)
    return loss.item()


def penalised(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """Double backward: a penalty on the gradient of the loss by the embedded tokens, and by a weight."""
    model = gpt(run)
    x = model.tokens(inputs) + model.positions
    hidden = torch.tanh(model.blocks[0].mlp(model.norm(x)) + model.blocks[1].mlp(x))
    loss = loss_of(model.head(hidden), targets)
    by_x, by_weight = torch.autograd.grad(loss, [x, model.head.weight], create_graph=True)
    loss = loss + (by_x**2).sum() + by_weight.abs().sum()
    run.step(loss)
    return loss.item()


def views_kept(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """A view that the script keeps shows each step's new values, and what is written through it counts."""
    model = gpt(run)
    view, data = model.blocks[0].qkv.weight[:3].detach(), model.blocks[1].out.bias.data
    run.step(loss_of(model(inputs), targets))
    seen = view.clone(), data.clone()
    assert torch.equal(view, model.blocks[0].qkv.weight[:3])
    data.mul_(0.9)
    with torch.no_grad():
        view.add_(0.01)
    run.step(loss_of(model(inputs), targets))
    return *seen, view.clone(), data.clone()


def data_exchanged(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """`p.data = other` while the script has the former data: that stays as it was."""
    model = gpt(run)
    run.step(loss_of(model(inputs), targets))
    weights = [model.blocks[0].out.weight, model.blocks[1].out.weight, model.norm.weight]
    before = [weight.data for weight in weights]  # as averages of weights are put in and out again
    for weight in weights:
        weight.data = weight.detach() * 0.5
    with torch.no_grad():
        seen = [loss_of(model(inputs), targets).item()]
    run.step(loss_of(model(inputs), targets))  # on the halves
    seen += [*(each.clone() for each in before), *(weight.detach().clone() for weight in weights)]
    for weight, data in zip(weights, before, strict=True):
        weight.data = data
    first, second, other = weights[0], weights[1], torch.full_like(weights[0], 0.25).detach()
    first.data, second.data = second.data, first.data
    model.norm.weight.data = model.norm.weight.data.flip(0)
    second.data, other.data = other.data, second.data
    square = model.blocks[2].out.weight
    square.data = square.data.t()
    seen.append(square.detach().clone())
    square.data = square.data.t()
    before.clear()
    del data
    run.step(loss_of(model(inputs), targets))
    return [*seen, other.clone()]


def written_by_the_script(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """Weights are clamped, overwritten and initialised anew between steps."""
    model = gpt(run)
    run.step(loss_of(model(inputs), targets))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.5, 0.5)
        model.positions[0] = 0.25
        nn.init.constant_(model.blocks[3].norm1.weight, 0.75)
    model.blocks[2].norm1.bias.data = torch.full_like(model.blocks[2].norm1.bias, 0.125)
    model.blocks[2].norm2.bias.data.fill_(0.0625)
    loss = loss_of(model(inputs), targets)
    run.step(loss)
    return loss.item()


def state_and_copies(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """state_dict, load_state_dict, a deep copy that works by itself, and repr."""
    model = gpt(run)
    run.step(loss_of(model(inputs), targets))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    double = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in double.parameters())
    run.step(loss_of(model(inputs), targets))
    of_copy = loss_of(double(inputs), targets)
    of_copy.backward()
    model.load_state_dict(state)
    seen = [loss_of(model(inputs), targets).item(), of_copy.item(), double.head.weight.grad.sum().item()]
    return (
        seen,
        list(state.values()),
        repr(model.positions),
        model.positions.stride(),
        model.positions.is_contiguous(),
    )


def hooks_of_the_script(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """Hooks on parameters see gradients, and may change them."""
    model = gpt(run)
    seen: list[float] = []
    first = model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    second = model.positions.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    run.step(loss_of(model(inputs), targets))
    first.remove()
    second.remove()
    return seen


def frozen_for_a_while(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    """requires_grad is turned off and on again."""
    model = gpt(run)
    model.blocks[1].requires_grad_(False)
    run.step(loss_of(model(inputs), targets))
    model.blocks[1].requires_grad_(True)
    loss = loss_of(model(inputs), targets)
    run.step(loss)
    return loss.item()


def mixed_precision(run: Run, inputs: Tensor, targets: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(run.model(inputs), targets)
    run.step(loss)
    return loss.item()


USES: dict[str, Callable[[Run, Tensor, Tensor], Any]] = {
    "outside forward": outside_forward,
    "forward never called": by_hand,
    "parent after its children": parent_after_children,
    "checkpoint": checkpointed(reentrant=False, from_outside=False),
    "checkpoint, reentrant": checkpointed(reentrant=True, from_outside=False),
    "checkpoint in the script": checkpointed(reentrant=False, from_outside=True),
    "checkpoint in the script, reentrant": checkpointed(reentrant=True, from_outside=True),
    "custom function": custom_function,
    "several forwards": several_forwards,
    "evaluation": evaluated,
    "accumulation and clipping": accumulated_and_clipped,
    "gradients read and written": gradients_read_and_written,
    "dynamic control flow": branching,
    "double backward": penalised,
    "views kept": views_kept,
    "data exchanged": data_exchanged,
    "written by the script": written_by_the_script,
    "state and copies": state_and_copies,
    "hooks of the script": hooks_of_the_script,
    "frozen for a while": frozen_for_a_while,
    "mixed precision": mixed_precision,
}
FEW = ("checkpoint, reentrant", "several forwards", "views kept", "hooks of the script")


def test_inference_with_attention_in_one_call() -> None:
    """PyTorch's fast path for it takes plain parameters alone; without it, what comes out is the same."""

    def scenario(run: Run) -> list[Any]:
        run.model.eval()
        with torch.no_grad():
            return [run.model(batch("assorted", step)[0]) for step in range(2)]

    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        compare("assorted", scenario)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def test_with_a_disk_below_and_other_optimizers(tmp_path: Path) -> None:
    """Device, host and disk each a part of the need."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        half = len(parameters) // 2
        groups = [
            {"params": parameters[:half], "lr": 0.05},
            {"params": parameters[half:], "weight_decay": 0.1},
        ]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)

    def disk(memory: Memory) -> Memory:
        host = int(memory.device) * 2
        return msgspec.structs.replace(memory, host=str(host), disk=f"{tmp_path}:16MiB")

    compare("gpt", lambda run: run.losses(4), shares=(0.25,), make=make, change=disk)
    compare("lstm", lambda run: run.losses(4), shares=(0.4,), change=disk)


@pytest.mark.parametrize("use", kept_for(pytest.mark.check, USES, FEW))
def test_a_use_is_reached(use: str) -> None:
    compare("gpt", each_step(USES[use]), shares=(0.25, 0.5) if "checkpoint" not in use else (0.4,))


@pytest.mark.check
def test_a_use_is_reached_where_some_chunks_step_on_the_device() -> None:
    for body in USES.values():
        compare("gpt", each_step(body, steps=2), shares=(2.0,), change=_partly_stepped_there)


def _partly_stepped_there(given: Memory) -> Memory:
    return msgspec.structs.replace(given, step="0.4")


@pytest.mark.check
def test_a_model_that_is_compiled_after_fit_goes_on() -> None:
    def scenario(run: Run) -> list[Any]:
        compiled: Any = torch.compile(run.model, backend="eager")
        return each_step(lambda run, inputs, targets: run.step(loss_of(compiled(inputs), targets)))(run)

    compare("gpt", scenario, shares=(0.3,))


def test_step_hooks_of_the_script() -> None:
    """Registered before `fit` and after it: what they change before a step counts for it; they see what it
    made, and may write over that."""

    def add_hooks(optimizer: torch.optim.Optimizer, seen: list[float]) -> None:
        def before(*_: Any) -> None:
            (group,) = optimizer.param_groups
            group["lr"] *= 0.9
            parameters = group["params"]
            parameters[0].grad = None
            parameters[3].grad = torch.ones_like(parameters[3])
            parameters[5].grad.mul_(0.5)
            optimizer.state[parameters[7]].clear()
            with torch.no_grad():
                parameters[9].mul_(0.5)

        def after(*_: Any) -> None:
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.clamp_(-0.1, 0.1)
                    seen.append(parameter.sum().item())

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
        add_hooks(optimizer, [])
        return optimizer

    def scenario(run: Run) -> list[Any]:
        seen: list[float] = []
        add_hooks(run.optimizer, seen)
        return [*run.losses(4), seen]

    compare("gpt", scenario, shares=(0.4,), make=make)
