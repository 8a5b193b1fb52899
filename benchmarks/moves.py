"""Which chunks move, by Belady's rule, LRU and FIFO, against the least that any schedule moves.

    python benchmarks/moves.py [--quick]

Real models train for some steps; each use of a parameter is recorded where it happens: in forward, by the
call that has it among its arguments, and in backward, where what was saved of it is fetched. Their chunks
then go through a cache (`atoll.moves`) of a part of the blocks that all chunks take. Nothing is moved, so
nothing is timed but the decisions.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from atoll.chunks import ChunkMap, lay_out
from atoll.moves import Cache, Policy, UseOrder, optimum
from atoll.tensors.binding import specs_of
from common import options, output_folder, write_results

BUDGETS = (0.25, 0.4, 0.6, 0.8)  # parts of the blocks that all chunks take
CHUNKS = 24  # in a model, at least; twice as many at most
STEPS = 9  # the first of which is the warm-up
WIDTH, DEPTH, LENGTH, BATCH = 32, 12, 16, 4
POLICIES: tuple[Policy, ...] = get_args(Policy)


# -- the families ------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer of experts, one for each token: who gets none is not used."""

    def __init__(self, width: int, count: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(mlp(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                out[mine] = expert(x[mine]) * weights[mine, None]
        return out


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    def __init__(self, width: int, feed: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out, self.feed = nn.Linear(width, 3 * width), nn.Linear(width, width), feed(width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.feed(self.norms[1](x))


class Transformer(nn.Module):
    """Tokens (batch, length) to logits (batch, length, 64); the layers are gone through `rounds` times."""

    def __init__(self, depth: int = DEPTH, rounds: int = 1, feed: Callable[[int], nn.Module] = mlp) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, feed) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 64)
        self.rounds = rounds

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in itertools.chain.from_iterable([self.layers] * self.rounds):
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Convolutions(nn.Module):
    """A residual network with BatchNorm, from images (batch, 3, 8, 8) that the tokens are made into."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())
            for _ in range(4 * DEPTH)
        )
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(torch.linspace(-1, 1, 192).view(3, 8, 8) * tokens[:, :1, None, None])
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Distillation(nn.Module):
    """A frozen teacher, of which there is only forward, and a student half as deep."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = Transformer().requires_grad_(False), Transformer(DEPTH // 2)


Loss = Callable[[Any, Tensor], Tensor]


def plain(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens)
    return logits.logsumexp(-1).mean()


def three_forwards(model: nn.Module, tokens: Tensor) -> Tensor:
    """As a contrastive loss has them."""
    one, other, third = (model(tokens.roll(shift, 0)).mean((0, 1)) for shift in range(3))
    return ((one - other) ** 2 - (one - third) ** 2).sum()


def two_batches(model: nn.Module, tokens: Tensor) -> Tensor:
    """Gradients are accumulated."""
    plain(model, tokens.flip(0)).backward()  # type: ignore[no-untyped-call]
    return plain(model, tokens)


def distil(model: Distillation, tokens: Tensor) -> Tensor:
    return F.mse_loss(model.student(tokens), model.teacher(tokens))


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], nn.Module]
    loss: Loss = plain
    is_plain: bool = False  # each weight is used once in forward, and its use in backward is in reverse order


FAMILIES = (
    Family("transformer", Transformer, is_plain=True),
    Family("convolutions, BatchNorm", Convolutions, is_plain=True),
    Family("three forwards before a backward", Transformer, three_forwards),
    Family("weights used three times", lambda: Transformer(DEPTH, rounds=3)),
    Family("experts, top-1, two batches", lambda: Transformer(DEPTH // 3, feed=Experts), two_batches),
    Family("frozen teacher, student", Distillation, distil),
)


# -- what is used ------------------------------------------------------------------------------------------


class Uses(TorchFunctionMode):
    """Every use of a parameter of `model`, by its index: within it, and within `saved()`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.uses: list[int] = []
        parameters = list(model.parameters())
        self._index = {each.untyped_storage().data_ptr(): index for index, each in enumerate(parameters)}

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> object:
        for each in tree_leaves((args, kwargs or {})):
            if isinstance(each, nn.Parameter):
                self.uses.append(self._index[each.untyped_storage().data_ptr()])
        return func(*args, **(kwargs or {}))

    def saved(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, self._unpack)

    def _unpack(self, tensor: Tensor) -> Tensor:
        index = self._index.get(tensor.untyped_storage().data_ptr())
        if index is not None:
            self.uses.append(index)
        return tensor


def recorded_steps(family: Family, steps: int) -> tuple[ChunkMap, list[list[int]]]:
    """The layout of the model in chunks, and the chunks that each of its first steps uses, in order."""
    torch.manual_seed(0)
    model = family.build()
    parameters = dict(model.named_parameters())
    specs = specs_of(parameters, dict.fromkeys(parameters.values(), "0"))
    total = sum(spec.nbytes for spec in specs)
    chunk_map = lay_out(specs, smallest=total // (2 * CHUNKS), largest=total // CHUNKS, alignment=64)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    found = []
    for _ in range(steps):
        uses = Uses(model)
        with uses, uses.saved():
            loss = family.loss(model, torch.randint(64, (BATCH, LENGTH)))
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append([chunk_map.chunk_of(index).id for index in uses.uses])
    return chunk_map, found


# -- what moves --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MovesCase:
    """Blocks brought a step, on average from the second step on, with one budget."""

    family: str
    plain: bool
    chunks: int
    largest: int  # blocks of the largest chunk
    budget: float
    blocks: int
    uses: float  # a step
    least: float  # of a schedule that knows all steps beforehand
    moved: dict[str, float]  # by policy, all at their uses
    ahead: float  # under Belady with prefetching
    unforeseen: float  # uses a step that the recorded order did not have, or not yet
    waits: float  # uses a step under Belady whose chunk was not there in spite of prefetching
    seconds: float  # a decision, under Belady, prefetching included

    @property
    def equal(self) -> bool:
        return len(set(self.moved.values())) == 1

    def line(self) -> str:
        moved = ", ".join(f"{policy} {blocks:.1f}" for policy, blocks in self.moved.items())
        return (
            f"{self.family}, {self.budget:.0%} ({self.blocks} blocks): {moved} blocks a step, least "
            f"{self.least:.1f}{' (policies equal)' * self.equal}; {self.uses:.0f} uses, "
            f"{self.unforeseen:.1f} unforeseen; with prefetching {self.ahead:.1f} blocks, "
            f"{self.waits:.1f} waits, {self.seconds * 1e6:.0f} us a use"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.equal}


def measure(family: Family, steps: int) -> Iterator[MovesCase]:
    chunk_map, uses = recorded_steps(family, steps)
    sizes = {chunk.id: -(-chunk.nbytes // chunk_map.chunk_bytes) for chunk in chunk_map.chunks}
    trained = [chunk.id for chunk in chunk_map.trainable]
    for budget in BUDGETS:
        blocks = max(round(budget * sum(sizes.values())), 2 * max(sizes.values()))
        moved = {policy: run(Cache(blocks, sizes, policy=policy), uses, trained)[0] for policy in POLICIES}
        ahead: Cache[int] = Cache(blocks, sizes)
        start = time.perf_counter()
        blocks_ahead, waits, unforeseen = run(ahead, uses, trained, prefetch=True)
        seconds = time.perf_counter() - start
        if blocks_ahead != moved["belady"] and not unforeseen:
            raise SystemExit(f"{family.name}: prefetching moves {blocks_ahead}, not {moved['belady']} blocks")
        later = uses[1:]
        ends = itertools.accumulate(len(step) for step in later)
        voids = {(chunk, end) for end in ends for chunk in trained}
        order = UseOrder([chunk for step in later for chunk in step], voids=voids)
        resident = set(first_resident(blocks, sizes, uses[0], trained))
        least = optimum(order, blocks, sizes, resident=resident)[0]
        yield MovesCase(
            family=family.name,
            plain=family.is_plain,
            chunks=len(sizes),
            largest=max(sizes.values()),
            budget=budget,
            blocks=blocks,
            uses=len(order) / len(later),
            least=least / len(later),
            moved={policy: total / len(later) for policy, total in moved.items()},
            ahead=blocks_ahead / len(later),
            unforeseen=unforeseen / len(later),
            waits=waits / len(later),
            seconds=seconds / sum(map(len, uses)),
        )


def run(
    cache: Cache[int], uses: Sequence[Sequence[int]], trained: Sequence[int], prefetch: bool = False
) -> tuple[int, int, int]:
    """Blocks brought, uses that waited for that, and unforeseen ones, from the second step on."""
    blocks = waits = unforeseen = 0
    for number, step in enumerate(uses):
        for chunk in step:
            cache.handle_use(chunk)
            while prefetch and cache.poll_prefetch() is not None:
                pass
        for chunk in trained:  # stepped elsewhere
            cache.forget(chunk)
        ended = cache.handle_step_ended()
        if number:
            blocks, waits = blocks + ended.blocks_in, waits + ended.misses
            unforeseen += ended.unforeseen + ended.skipped
    return blocks, waits, unforeseen


def first_resident(
    blocks: int, sizes: dict[int, int], uses: Sequence[int], trained: Sequence[int]
) -> list[int]:
    """What is there after the warm-up."""
    cache: Cache[int] = Cache(blocks, sizes)
    run(cache, [uses], trained)
    return cache.resident


# -- showing -----------------------------------------------------------------------------------------------

COLOURS = {"belady": "#2b6ca3", "lru": "#d08c2f", "fifo": "#7a9a57"}
AHEAD = "Belady with prefetching, where it moves more"
NAMES = {"belady": "Belady", "lru": "LRU", "fifo": "FIFO"}


def draw(cases: Sequence[MovesCase], path: Path) -> None:
    """A panel for each family: blocks brought a step over the budget, by policy, and the least."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
    by_family = [list(each) for _, each in itertools.groupby(cases, key=lambda case: case.family)]
    for axes, shown in zip(panels.flat, by_family, strict=True):
        places = range(len(shown))
        for number, policy in enumerate(POLICIES):
            heights = [case.moved[policy] for case in shown]
            at = [place + 0.26 * (number - 1) for place in places]
            axes.bar(at, heights, 0.24, color=COLOURS[policy], label=NAMES[policy])
        for place, case in zip(places, shown, strict=True):
            if case.ahead != case.moved["belady"]:
                axes.plot(place - 0.26, case.ahead, "_", color="black", markersize=12, label=AHEAD)
            axes.hlines(case.least, place - 0.42, place + 0.42, color="#c23b22", linewidth=1.8, label="least")
        note = " (the three are equal)" if all(case.equal for case in shown) else ""
        axes.set_title(shown[0].family + note, fontsize=10)
        axes.set_xticks(places, [f"{case.budget:.0%}" for case in shown])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("blocks brought a step")
    panels[1][0].set_ylabel("blocks brought a step")
    for axes in panels[1]:
        axes.set_xlabel("cache, of all chunks' blocks")
    shown_in = [axes.get_legend_handles_labels() for axes in panels.flat]
    named = {
        label: handle for handles, labels in shown_in for handle, label in zip(handles, labels, strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle("What moves, by who leaves first", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    args = options(__doc__).parse_args()
    torch.set_num_threads(1)
    cases = []
    for family in FAMILIES:
        for case in measure(family, 3 if args.quick else STEPS):
            print(case.line(), flush=True)
            cases.append(case)
    for name, of_family in itertools.groupby(cases, key=lambda case: case.family):
        if all(case.equal for case in of_family):
            print(f"equal under all three policies, with every budget: {name}")
    wrong = [case.line() for case in cases if not case.unforeseen and case.moved["belady"] > case.least]
    folder = output_folder(args)
    write_results("moves", folder, [case.to_json() for case in cases], quick=args.quick)
    draw(cases, folder / "moves.png")
    if wrong:
        print("more than the least, with the order known:", *wrong, sep="\n")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
