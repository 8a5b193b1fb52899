"""Eight bits a gradient: a codec of your own, in one file.

The rule. Of each block of 256 values the largest, by its absolute value, gives the scale: a 127th of it. The
block is written as the scale (float32) and 256 whole numbers of scales, a byte each: 260 bytes in place of
1,024. What rounding drops Atoll adds to the next gradient (error feedback). The idea is block-wise
quantization (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022), with even steps.

Atoll finds the codec by an entry point. In the pyproject.toml beside this file:

    [project.entry-points."atoll.codecs"]
    eight-bits = "own_codec:EightBits"

    pip install ./examples
    atoll run --workers 2 --strategy server --set sync.codec=eight-bits examples/gpt.py --minutes 1

docs/own-codec.md explains it line by line.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class EightBits:
    """Values as whole numbers of a scale, which each block has of its own."""

    name, lossless, block = "eight-bits", False, 256

    def size(self, elements: int) -> int:
        return elements + 4 * -(-elements // self.block)

    def encode(self, values: Tensor, into: memoryview, seed: int) -> None:  # noqa: ARG002
        rows = torch.nn.functional.pad(values, (0, -values.numel() % self.block)).view(-1, self.block)
        # NaN or infinity makes the block's scale such, and so all of the block: whoever steps refuses it.
        scale = rows.abs().amax(1, keepdim=True) / 127
        codes = (rows / scale).round().clamp(-127, 127).nan_to_num(0)  # a block of zeros has no scale
        parts = [scale.numpy().view(np.uint8), codes.to(torch.int8).numpy().view(np.uint8)]
        into[:] = np.concatenate(parts, axis=1).reshape(-1)[: len(into)]

    def decode(self, encoded: memoryview, into: Tensor) -> None:
        raw = np.zeros((-(-into.numel() // self.block), self.block + 4), np.uint8)
        raw.reshape(-1)[: len(encoded)] = encoded
        scale, codes = raw[:, :4].copy().view(np.float32), raw[:, 4:].view(np.int8)
        with np.errstate(invalid="ignore"):  # infinity times 0 is NaN
            into.copy_(torch.from_numpy((codes * scale).reshape(-1)[: into.numel()]))
