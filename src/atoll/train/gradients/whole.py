"""A prepared model that lies on the device as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from atoll.chunks import ChunkMap, ParameterSpec, lay_out
from atoll.memory.agreeing import BatchEpochs
from atoll.tensors.binding import BoundChunk, bind_model
from atoll.train.gradients.clipping import GradientNorm, Norms, ResidentNorms
from atoll.train.members.workers import Workers


class Whole:
    """The place of a model that lies on the device as a whole: one piece of memory for each chunk.

    `Tiers` (train/gradients/memory.py) is the place of a model in tiers.
    """

    def bind(
        self, specs: Sequence[ParameterSpec], parameters: Mapping[str, nn.Parameter], chunk_bytes: int | None
    ) -> tuple[ChunkMap, list[BoundChunk]]:
        """Lay the parameters out in chunks, and make them views into the chunks."""
        chunk_map = lay_out(specs, chunk_bytes=chunk_bytes)
        return chunk_map, bind_model(chunk_map, parameters)

    def take_values(self, workers: Workers, _module: nn.Module, chunks: Sequence[BoundChunk]) -> None:
        """Give the chunks worker 0's values. A collective."""
        workers.take_from_first([chunk.flat for chunk in chunks], "worker 0's parameters")

    def fit(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], epochs: BatchEpochs) -> None:
        """Do nothing: the model trains where it lies."""

    def norms(self, norm: GradientNorm) -> Norms:
        """Return the norms of gradients that lie on the device."""
        return ResidentNorms(norm)
