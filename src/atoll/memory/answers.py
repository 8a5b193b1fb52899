"""A member's answers to other members that fetch its parts of chunks. Source: docs/memory.md, "Members"."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.memory.foreign import described
from atoll.memory.payloads import GRADIENT, VALUES, Key
from atoll.memory.sharedgradients import SharedGradients
from atoll.memory.sharing import Sharing
from atoll.memory.states import ChunkStates
from atoll.memory.stepqueue import StepQueue


class Answers:
    """Answers fetches from what this member holds, after the steps that concern it.

    Args:
        sharing: the payloads.
        steps: the steps to wait for.
        gradients: the gradients.
        states: the optimizer's states, by chunk.
    """

    def __init__(
        self,
        sharing: Sharing,
        steps: StepQueue,
        gradients: SharedGradients,
        states: Mapping[int, ChunkStates],
    ) -> None:
        self._sharing, self._steps, self._gradients, self._states = sharing, steps, gradients, states
        # With a disk a pinned payload takes room that a step may wait for, so only one is pinned at a time.
        self._reading = nullcontext() if sharing.store.disk is None else threading.Lock()

    @contextmanager
    def read(self, key: Key, count: int) -> Iterator[Tensor]:
        """Lend this member's part of a payload, flat, as it is after `count` sync points.

        It runs on a service thread of `Members`, and waits there for the sync points and for the chunk's
        step. Raises UserError for a payload that is not here, RunError if this member has left, and
        DeadlineError.
        """
        sharing, (chunk, kind) = self._sharing, key
        if not sharing.may_be_asked(chunk):
            raise UserError(
                f"worker {sharing.rank} was asked for the {kind} of chunk {chunk}, of which it holds nothing"
            )
        sharing.points.wait_until(count, chunk, sharing.words(chunk))
        if kind == GRADIENT:
            yield self._gradients.for_others(chunk)
            return
        try:
            self._steps.wait_stepped(chunk, tells=False)  # this member's script is still to be told
        except DeadlineError:
            raise
        except RunError as error:
            # No step is made here any more. The queue's own words would point the asker at its own script.
            raise RunError(
                f"worker {sharing.rank} has gone: it holds its part of the model no more"
            ) from error
        if kind in ("described", "described.size"):
            word = described(self._states[chunk]) if chunk in self._states else b""
            yield torch.tensor([len(word)]) if kind != "described" else _bytes(word)
            return
        if not sharing.store.has(key):
            raise UserError(
                f"worker {sharing.rank} was asked for the {kind} of {sharing.words(chunk)}, and has none"
            )
        kept = sharing.original(chunk) if kind == VALUES else nullcontext()
        with self._reading, kept as original:  # who waits for `_reading` keeps no writer waiting
            if original is not None:
                yield original
                return
            with sharing.store.pin(key) as payload:
                yield payload


def _bytes(word: bytes) -> Tensor:
    return torch.frombuffer(bytearray(word), dtype=torch.uint8)
