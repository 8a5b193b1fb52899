"""Models in tiers under torch.func, whose transforms take parameters as plain PyTorch's, and under
torch.compile before `prepare`, where they train as without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import atoll
from atoll.core.errors import UserError
from support.pool import WorkerPool
from support.runs import IN_TIERS, alone, model, run_at

Values = Mapping[str, Tensor]


def loss_of(net: nn.Module, values: Values, x: Tensor) -> Tensor:
    found: Tensor = functional_call(net, dict(values), (x,)).square().mean()
    return found


def of_copies(net: nn.Module) -> Values:
    return {name: p.clone() for name, p in net.named_parameters()}


def of_themselves(net: nn.Module) -> Values:
    return dict(net.named_parameters())


def slopes_of(net: nn.Module, values: Values, x: Tensor) -> Values:
    return grad(partial(loss_of, net))(values, x)


def mean_of_slopes(net: nn.Module, values: Values, x: Tensor) -> Values:
    """The mean of each sample's gradient."""
    each = vmap(grad(lambda given, one: loss_of(net, given, one[None])), in_dims=(None, 0))(values, x)
    return {name: found.mean(0) for name, found in each.items()}


def adapt(
    session: atoll.Session | None, take: Callable[..., Values], slope: Callable[..., Values]
) -> list[Tensor]:
    """Train through an inner step of `torch.func.grad`, as MAML does."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 4 * 32, dtype=torch.float64).view(4, 32)
    if session is not None:
        session.prepare(net, optimizer)
        x = x[session.rank :: session.world]
    half, seen = len(x) // 2, []
    for _ in range(3):
        values = take(net)
        slopes = slope(net, values, x[:half])
        loss = loss_of(net, {name: value - 0.1 * slopes[name] for name, value in values.items()}, x[half:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [parameter.detach().clone() for parameter in net.parameters()]
    return seen


TAKES = pytest.mark.parametrize("take", [of_copies, of_themselves])
SLOPES = pytest.mark.parametrize("slope", [slopes_of, mean_of_slopes])


@TAKES
@SLOPES
def test_alone_an_inner_step_is_followed(take: Callable[..., Values], slope: Callable[..., Values]) -> None:
    check_equal(alone(adapt, take, slope, tiers=True), adapt(None, take, slope))


@pytest.mark.parametrize("kind", sorted(IN_TIERS))
def test_workers_follow_an_inner_step(pool: WorkerPool, kind: str) -> None:
    """Each worker's inner step is on its own samples, as that of each task in one process."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 4 * 32, dtype=torch.float64).view(4, 32)
    right = []
    for _ in range(3):
        for rank in range(2):
            mine, values = x[rank::2], of_themselves(net)
            slopes = slopes_of(net, values, mine[:1])
            adapted = {name: value - 0.1 * slopes[name] for name, value in values.items()}
            (loss_of(net, adapted, mine[1:]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        right += [parameter.detach().clone() for parameter in net.parameters()]
    for found in run_at(pool, kind, adapt, of_themselves, slopes_of):
        check_equal(found, right)


ONES = torch.ones(32, 32, dtype=torch.float64)
FEW = torch.linspace(0, 1, 4 * 32, dtype=torch.float64).view(4, 32)
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": lambda w: grad(lambda v: v.pow(3).sum())(w),
    "grad of grad": lambda w: grad(lambda v: grad(lambda u: u.pow(3).sum())(v).sum())(w),
    "grad by name": lambda w: grad(lambda y, v: (v @ y).square().sum())(FEW[0], v=w),
    "grad within another's": lambda w: grad(lambda y: grad(lambda v: (v**2 * y).sum())(w).sum())(ONES[0, 0]),
    "grad without gradients": lambda w: torch.no_grad()(grad(lambda v: v.square().sum()))(w),
    "grad in inference": lambda w: torch.inference_mode()(grad(lambda v: v.square().sum()))(w).clone(),
    "what grad has beside": lambda w: grad(lambda v: (v.square().sum(), v), has_aux=True)(w)[1],
    "vjp": lambda w: vjp(lambda v: v.square().sum(0), w)[1](FEW[1])[0],
    "jvp": lambda w: jvp(lambda v: v.square().sum(), (w,), (ONES,))[1],
    "jacrev": lambda w: jacrev(lambda v: v.square().sum(0))(w),
    "jacfwd": lambda w: jacfwd(lambda v: v[0].square())(w),
    "hessian": lambda w: hessian(lambda v: v[0].square().sum())(w),
    "vmap": lambda w: vmap(lambda row: row.sin().sum())(w),
    "vmap of columns": lambda w: vmap(lambda column: column.sin().sum(), in_dims=1)(w),
    "vmap of vmap": lambda w: vmap(vmap(torch.sin))(w),
    "vmap within another's": lambda w: vmap(lambda y: vmap(lambda row: row @ y)(w))(FEW),
    "vmap of grad": lambda w: vmap(grad(lambda v, y: (v @ y).square().sum()), in_dims=(None, 0))(w, FEW),
    "captured by grad": lambda w: grad(lambda y: (w @ y).square().sum())(FEW[2]),
    "captured by vmap": lambda w: vmap(lambda y: (w @ y).square().sum())(FEW),
    "a tangent": lambda w: jvp(lambda y: y.square().sum(), (ONES,), (w,))[1],
    "jacobian": lambda w: torch.autograd.functional.jacobian(lambda v: v[0].square(), w, vectorize=True),
}


def transformed(session: atoll.Session | None, name: str) -> tuple[Tensor, bool, Tensor | None]:
    """Return what a transform of the first weight gives, whether that has a graph, and the gradient that it
    leaves. In tiers the weight is away before."""
    net = model()
    if session is not None:
        session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for parameter in list(net.parameters())[4:]:
        parameter.detach().sum()
    weight: Tensor = net[0].weight  # type: ignore[assignment]
    found = TRANSFORMS[name](weight)
    if found.requires_grad:
        found.square().sum().backward()
    gradient = None if weight.grad is None else weight.grad.clone()
    return found.detach().clone(), found.requires_grad, gradient


@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_transform_takes_a_parameter_as_plain_torch_does(name: str) -> None:
    found, right = alone(transformed, name, tiers=True), transformed(None, name)
    assert found[1] == right[1]
    assert (found[2] is None) == (right[2] is None)
    check_equal([found[0]], [right[0]])
    if found[2] is not None and right[2] is not None:
        check_equal([found[2]], [right[2]])


def refused(session: atoll.Session) -> None:
    net = model()
    session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(2, 32, dtype=torch.float64)
    with pytest.raises(UserError, match=r"functionalize\(\) of parameter '0\.weight'.*p\.clone"):
        functionalize(lambda given: loss_of(net, given, x))(of_themselves(net))
    with torch.no_grad():
        vmap(lambda row: row.mul_(2))(net[0].weight)
    with pytest.raises(UserError, match=r"a transform of torch\.func has written into parameter '0\.weight'"):
        net(x)
    check_equal([net(x).detach()], [model()(x).detach()])


def test_what_a_transform_would_write_is_told() -> None:
    alone(refused, tiers=True)


def compiled(session: atoll.Session | None, ran: bool) -> list[Tensor]:
    """Train a model that was compiled before `prepare`, and, if it `ran`, was called before."""
    torch._dynamo.reset()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 4 * 32, dtype=torch.float64).view(4, 32)
    if session is not None:
        called: nn.Module = torch.compile(net, backend="aot_eager")  # type: ignore[assignment]
        if ran:
            called(x)
        session.prepare(called, optimizer)
        mine = x[session.rank :: session.world]
    else:
        called, mine = net, x
    for _ in range(3):
        called(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.barrier()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("ran", [False, True])
def test_a_model_that_was_compiled_before(ran: bool) -> None:
    assert all(map(torch.equal, alone(compiled, ran, tiers=True), compiled(None, ran)))


@pytest.mark.parametrize("kind", sorted(IN_TIERS))
def test_workers_with_a_model_that_was_compiled_before(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, compiled, True):
        check_equal(found, compiled(None, True))
