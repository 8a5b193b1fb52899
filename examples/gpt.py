"""A byte-level GPT learns to write Python, from the source text of Python's own standard library.

    python examples/gpt.py                                    # alone
    torchrun --nproc-per-node 2 examples/gpt.py               # two workers, by torch's launcher
    atoll run --workers 2 examples/gpt.py --minutes 3         # two workers, one display, a report
    atoll run --workers 4 --strategy ps-hra examples/gpt.py --windows 20000  # workers of any speed, in groups

Nothing is downloaded: the text is that of the Python that runs this. It ends with the loss on files
that training never saw, in bits per byte, what `xz` makes of the same bytes, and a sample.
"""

from __future__ import annotations

import argparse
import itertools
import lzma
import math
import sysconfig
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import atoll

VOCABULARY = 256  # one token for each byte
HELD_OUT = 20  # one file in so many is held out
NOT_IN_THE_TEXT = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),  # some systems install them, some do not
    *("encodings", "pydoc_data"),  # tables, many nearly equal: what is held out would be known
}


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of features by an angle that grows with the position; x is (..., time, features)."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.before_attention(x), rotation)
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Tokens (batch, time) to logits (batch, time, 256). The embedding and the head are one matrix."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        angles = torch.outer(torch.arange(context), 10000.0 ** -torch.linspace(0, 1, width // heads // 2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("out.weight", "mlp.2.weight"))  # what adds to the residual stream
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        rotation = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


class Windows(Dataset[Tensor]):
    """A text as windows of `context` + 1 bytes; each window's last byte is the next one's first."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * self.context : (index + 1) * self.context + 1].long()


class Numbered(Dataset[tuple[int, Tensor]]):
    """A text's windows, or `count` of them drawn from `seed`; each comes with its place among these."""

    def __init__(self, windows: Windows, count: int | None, seed: int) -> None:
        self.windows = windows
        draw = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(len(windows), generator=draw)[:count] if count else range(len(windows))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> tuple[int, Tensor]:
        return place, self.windows[int(self.order[place])]


def read_text(most: int | None) -> tuple[bytes, bytes]:
    """The standard library's source: what to train on, and what is held out (every HELD_OUT-th file).

    With `most`, no more than so many bytes to train on, and as small a part of what is held out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in root.rglob("*.py") if not NOT_IN_THE_TEXT & set(f.relative_to(root).parts))
    texts = [file.read_bytes() for file in files]
    held_out = texts[::HELD_OUT]
    del texts[::HELD_OUT]
    return b"".join(texts)[:most], b"".join(held_out)[: most and most // HELD_OUT]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean loss of each byte given those before it in its window, in nats."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def in_step(session: atoll.Session) -> bool:
    """Whether all workers make the same steps at the same time."""
    config = session.config
    return config.run.strategy in ("ring", "hierarchical") or config.sync.consistency == "bsp"


@torch.no_grad()
def evaluate(
    session: atoll.Session,
    model: nn.Module,
    held_out: Windows,
    batch: int,
    most: int | None = None,
    alone: bool = False,
) -> float:
    """Bits per byte on the held-out windows, or on about `most` of them; the workers share them out, unless
    one does it `alone`."""
    model.eval()
    stride = max(1, len(held_out) // most) if most else 1
    indices = range(0, len(held_out), stride)
    if not alone:
        indices = indices[session.rank :: session.world]
    total, count = 0.0, 0
    for start in range(0, len(indices), batch):
        windows = torch.stack([held_out[i] for i in indices[start : start + batch]]).to(session.device)
        total += loss_of(model, windows).item() * len(windows)
        count += len(windows)
    model.train()
    mean = total / max(count, 1)
    return (mean if alone else session.reduce(mean, weight=count)) / math.log(2)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, device: torch.device) -> bytes:
    """`length` more bytes, each drawn from what the model expects (sharpened: temperature 0.7)."""
    generator = torch.Generator().manual_seed(0)
    model.eval()
    text = list(prompt)
    for _ in range(length):
        window = torch.tensor([text[-model.context :]], device=device)
        probabilities = (model(window)[0, -1].float() / 0.7).softmax(0).cpu()
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)


def xz_bits_per_byte(train: bytes, held_out: bytes) -> tuple[float, float]:
    """What `xz -9e` needs for the held-out text: alone, and as the continuation of the training text."""

    def size(text: bytes) -> int:
        return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))

    with ThreadPoolExecutor(3) as threads:  # lzma lets other threads run
        alone, before, both = threads.map(size, (held_out, train, train + held_out))
    return 8 * alone / len(held_out), 8 * (both - before) / len(held_out)


class Progress:
    """How far the run is, from 0 to 1: by windows or steps if they were given, else by the slowest worker's
    clock."""

    def __init__(self, session: atoll.Session, args: argparse.Namespace) -> None:
        self.session, self.steps, self.seconds = session, args.steps, args.minutes * 60
        self.windows, self.batch = args.windows, args.batch
        self.begin = time.monotonic()
        self.part = 0.0
        if self.steps:
            session.expect(self.steps)

    def after(self, step: int, places: Tensor) -> float:
        """Every worker calls it after every step, with the places of that step's windows. Where all make the
        same steps they get the same answer: their learning rates must be the same."""
        if self.windows:
            # Windows are given out in order: where workers go on by themselves, the latest says how far.
            used = step * self.batch * self.session.world if in_step(self.session) else int(places.max()) + 1
            self.part = max(self.part, used / self.windows)
            if step % 10 == 0:
                self.session.expect(max(step, round(step / self.part)))
        elif self.steps:
            self.part = step / self.steps
        elif step % 10 == 0:
            self.part = self.session.reduce((time.monotonic() - self.begin) / self.seconds, op="max")
            self.session.expect(max(step, round(step / self.part)))
        return self.part

    def state_dict(self) -> dict[str, float]:
        """For a worker that enters the run: its learning rate is then the others'."""
        return {"part": self.part}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.part = state["part"]


def rate(step: int, part: float, warm_up: int) -> float:
    """The share of the full learning rate: a linear warm-up, then a cosine down to a twentieth."""
    return min(1.0, (step + 1) / warm_up) * (0.05 + 0.95 * (1 + math.cos(math.pi * min(part, 1.0))) / 2)


def make_scheduler(
    args: argparse.Namespace,
    session: atoll.Session,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> tuple[LambdaLR, bool]:
    """The scheduler, and whether Atoll steps it.

    Atoll does by the samples that all workers have trained on, where the run's length is a number of windows.
    Else it is a time or a number of steps, which `progress` knows.
    """
    if not args.windows:
        return LambdaLR(optimizer, lambda step: rate(step, progress.part, args.warm_up)), False
    steps = math.ceil(args.windows / (args.batch * session.world))
    scheduler = LambdaLR(optimizer, lambda step: rate(step, step / steps, args.warm_up))
    session.schedule(scheduler, total=args.windows, steps=steps)
    return scheduler, True


def train(
    args: argparse.Namespace, session: atoll.Session, model: GPT, text: Windows, held_out: Windows
) -> float:
    """Train until the steps or the minutes are over; returns the held-out bits per byte."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    session.prepare(model, optimizer)
    torch.manual_seed(args.seed + session.rank)  # random layers: each worker's own
    progress = Progress(session, args)
    scheduler, by_samples = make_scheduler(args, session, optimizer, progress)
    data = Numbered(text, args.windows, args.seed)
    sampler = session.sampler(data, seed=args.seed, shuffle=not args.windows)
    loader = DataLoader(data, args.batch, sampler=sampler, drop_last=not args.windows)
    session.register(progress=progress)
    session.resume(args.resume or None)  # of a run under way, or else of the checkpoint
    epochs = [loader] if args.windows else itertools.repeat(loader)
    for places, windows in itertools.chain.from_iterable(epochs):
        loss = loss_of(model, windows.to(session.device))
        loss.backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss, learning_rate=scheduler.get_last_lr()[0])
        done = progress.after(session.iteration, places) >= 1 and not args.windows
        if not by_samples:
            scheduler.step()
        if done:
            break
        alone = not in_step(session)  # then nobody else is at this step
        if session.iteration % args.eval_every == 0 and (session.is_main or not alone):
            session.log(held_out=evaluate(session, model, held_out, args.batch, most=128, alone=alone))
    session.barrier()  # where workers went on by themselves, all have the newest parameters now
    bits = evaluate(session, model, held_out, args.batch)
    session.log(held_out=bits)
    return bits


def report(model: GPT, bits: float, text: bytes, held_out: bytes, device: torch.device) -> None:
    """What the run has come to, for people."""
    alone, after = xz_bits_per_byte(text, held_out)
    sample = generate(model, b"class ", 400, device).decode("utf-8", "backslashreplace")
    print(f"\nA sample:\n{textwrap.indent(sample, '    ')}\n")
    print(f"Held-out text: {len(held_out):,} bytes of files that training never saw, in bits per byte:")
    print(f"  {bits:.3f}  this model, each byte given at most the {model.context} before it in its window")
    print(f"  {alone:.3f}  xz (preset 9e) on the held-out text alone")
    print(f"  {after:.3f}  xz (preset 9e) going on from the {len(text):,} bytes of training text")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=5)
    add("--width", type=int, default=160)
    add("--context", type=int, default=128, help="bytes that the model sees at once")
    add("--batch", type=int, default=4, help="windows in a worker's step")
    add("--minutes", type=float, default=3.0, help="how long to train")
    add("--steps", type=int, help="how many steps to train, in place of --minutes")
    add("--windows", type=int, help="train on so many windows over all workers, in place of --minutes")
    add("--lr", type=float, default=3e-3)
    add("--warm-up", type=int, default=100, help="steps until the learning rate is full")
    add("--eval-every", type=int, default=200, help="steps between two looks at the held-out text")
    add("--seed", type=int, default=0)
    add("--bytes", type=int, help="use no more of the text than this, for a quick try")
    add("--save", default="", help="where to save a checkpoint at the end")
    add("--resume", default="", help="a checkpoint to go on from, if there is one")
    args = parser.parse_args()
    if args.width % (2 * args.heads):
        parser.error(f"--width {args.width} is no multiple of 2 x --heads {args.heads}")
    return args


def main() -> None:
    args = arguments()
    text, held_out = read_text(args.bytes)
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.heads, args.width, args.context)
    with atoll.join() as session:
        if session.is_main:
            size = sum(p.numel() for p in model.parameters())
            print(f"{size:,} parameters; {len(text):,} bytes to train on, {len(held_out):,} held out")
        model.to(session.device)
        bits = train(args, session, model, Windows(text, args.context), Windows(held_out, args.context))
        if args.save:
            session.save(args.save)
    if session.is_main:
        report(model, bits, text, held_out, session.device)
        if args.save:
            print(f"The checkpoint is in {args.save}; its model.safetensors opens in plain PyTorch.")


if __name__ == "__main__":
    main()
