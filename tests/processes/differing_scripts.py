"""Scripts of two workers that stand at places which do not go together, in every way there is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from atoll.train.api.session import Session

STEPS, AT = 5, 2  # how many a worker makes, and before which one of them stands elsewhere
SOON = 15.0  # seconds: of a deadline of 120
HERE = Path(__file__).name
ASKED = r"(\([^()]*\))?"  # what a call asks for


def in_save(session: Session, folder: str) -> None:
    session.save(folder)


def in_load(session: Session, folder: str) -> None:
    session.load(folder)


def in_barrier(session: Session, _folder: str) -> None:
    session.barrier()


def in_gather(session: Session, _folder: str) -> None:
    session.gather(1)


def in_reduce(session: Session, _folder: str) -> None:
    session.reduce(0.5)


def reduce_elsewhere(session: Session, _folder: str) -> None:
    session.reduce(0.25)


def reduce_other_op(session: Session, op: str) -> None:
    session.reduce(0.25, op=op)  # type: ignore[arg-type]


def reduce_other_shape(session: Session, size: str) -> None:
    session.reduce(torch.zeros(int(size)))


def reduce_other_dtype(session: Session, dtype: str) -> None:
    session.reduce(torch.zeros(2, dtype=getattr(torch, dtype)))


CALLS: dict[str, Callable[[Session, str], None]] = {
    "save": in_save,
    "load": in_load,
    "barrier": in_barrier,
    "gather": in_gather,
    "reduce": in_reduce,
}
# What workers 0 and 1 call between the same two steps, each with its argument.
PAIRS: dict[str, tuple[tuple[Callable[[Session, str], None], str], ...]] = {
    "line": ((in_reduce, ""), (reduce_elsewhere, "")),
    "op": ((reduce_other_op, "mean"), (reduce_other_op, "max")),
    "shape": ((reduce_other_shape, "2"), (reduce_other_shape, "3")),
    "dtype": ((reduce_other_dtype, "float32"), (reduce_other_dtype, "float64")),
    "name": ((in_gather, ""), (in_barrier, "")),
    "save and reduce": ((in_save, "checkpoint"), (in_reduce, "")),
}


def run_script(
    session: Session,
    kind: str,
    which: str,
    folder: str,
    before: Callable[[Session, int], None] = lambda _session, _step: None,
    at: int = AT,
) -> None:
    """One worker's script; worker 1 does at step `at` what `kind` says. Fails where that does not end soon.
    `before` is called before each step."""
    torch.manual_seed(0)
    odd, since = session.rank == 1, 0.0
    try:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(max(STEPS, at + 3)):
            before(session, step)
            if step == at:
                since = time.monotonic()
                if kind == "pair":
                    call, argument = PAIRS[which][session.rank]
                    call(session, argument or folder)
                elif kind == "call" and odd:
                    CALLS[which](session, folder)
                elif kind == "skip" and odd:
                    continue
                elif kind == "leave" and odd:
                    break
            model(torch.ones(4, 8)).square().mean().backward()
            if step == at and kind == "call before step" and odd:
                CALLS[which](session, folder)
            if step == at and kind == "call for step" and odd:
                CALLS[which](session, folder)
            else:
                optimizer.step()
            optimizer.zero_grad()
        if which == "reduce after" or (which == "reduce after, of worker 0" and not odd):
            in_reduce(session, folder)
        session.close()
    finally:
        assert time.monotonic() - since < SOON


def line_of(name: str) -> str:
    """The line of this file on which a function above makes its call."""
    lines = Path(__file__).read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if line.startswith(f"def {name}("))
    return f"{HERE}:{at + 1}"
