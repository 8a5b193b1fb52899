"""Forward error correction of high-priority datagrams: systematic Reed-Solomon over interleaved groups.

A group's data go as they are, its parity after them; any losses up to the number of parity datagrams are
restored exactly. The code is a Cauchy matrix over GF(256), its columns scaled so that the first parity is the
XOR of the data: with `data` datagrams of data, parity p's coefficient of data d is data^d / ((data + p)^d),
where ^ is XOR. Source: S3, "The sender", 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.ltp import gf
from atoll.ltp.gf import KERNEL, Bytes, kernel_line

__all__ = ["KERNEL", "Groups", "encode", "kernel_line", "lost_places", "plan_groups", "restore"]

MOST_DATA = 32  # datagrams of data in a group
MOST_PARITY = 16  # and of parity
RESTORED = 0.999  # the chance with which a group is to be restored
CLEAN_LOSS = 0.001  # below it a long transfer has no parity
SMALL = 256  # high-priority datagrams: up to so many a transfer is small, unless the caller knows better
MOST_GROUPS = 0xFFFF  # of a transfer: what SLICE.group can name; NO_GROUP is not one of them


# -- planning ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """A transfer's groups: high-priority datagram i is number i // count in group i % count."""

    highs: int
    count: int  # 0 only where there is no high-priority datagram
    data: int  # of the largest group; the others have one less
    parity: int  # of each group; 0: no code
    reason: str

    def data_of(self, group: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Datagrams of data in each of these groups."""
        return (self.highs - np.asarray(group, np.int64) + self.count - 1) // max(self.count, 1)


def plan_groups(highs: int, loss: float, burst: float, *, apart: float = 1.0, small: int = SMALL) -> Groups:
    """The groups of a transfer with so many high-priority datagrams.

    `loss` is the path's rate of loss lately, `burst` the mean number of datagrams lost in a row, `apart` how
    many datagrams are sent for each high-priority one, and `small` how many high-priority ones a round trip
    carries, where that is known. Parity is the least with which a group is restored with RESTORED, at most
    MOST_PARITY, and at most one more than its data.
    """
    count = -(-highs // MOST_DATA)
    data = -(-highs // max(count, 1))
    parity, reason = _parity(highs, count, data, loss, burst, apart, small)
    return Groups(highs, count, data, parity, reason)


def _parity(
    highs: int, count: int, data: int, loss: float, burst: float, apart: float, small: int
) -> tuple[int, str]:
    if highs == 0:
        return 0, "nothing to protect"
    if loss <= 0.0:
        return 0, "no loss was measured lately"
    if highs > small and loss < CLEAN_LOSS:
        return (
            0,
            f"loss {loss:.2g} is below {CLEAN_LOSS:g}: all but a long transfer's end is repaired in passing",
        )
    if count > MOST_GROUPS:
        return 0, f"{count} groups: a header names at most {MOST_GROUPS}"
    chances = restore_chances(data, loss, burst, count * apart)[: data + 2]  # more than one each is a resend
    enough = np.flatnonzero(chances >= RESTORED)
    said = f"loss {loss:.2g} in bursts of {max(burst, 1.0):.3g}, {count} interleaved groups of {data}"
    if len(enough):
        parity = int(enough[0])
        return parity, f"{said}: {parity} parity restore a group with {chances[parity]:.2%}"
    parity = len(chances) - 1
    return parity, f"{said}: {parity} parity, the most there is, restore a group with {chances[-1]:.2%} only"


def restore_chances(data: int, loss: float, burst: float, distance: float) -> npt.NDArray[np.float64]:
    """The chance that a group of so much data is restored with 0, 1, .. MOST_PARITY of parity,
    (MOST_PARITY + 1,).

    Losses are a Gilbert chain with this rate and this mean burst, of which a group sees every `distance`-th
    step: with memory m = 1 - 1 / (burst (1 - loss)), a datagram is lost with loss + (1 - loss) m^distance
    after one that was, and with loss (1 - m^distance) after one that was not. Where interleaving has spread
    the bursts, m^distance is 0, and this the binomial tail.
    """
    loss = min(max(loss, 0.0), 0.999)
    memory = max(0.0, 1.0 - 1.0 / (max(burst, 1.0) * (1.0 - loss))) ** max(distance, 1.0)
    after_lost, after_come = loss + (1.0 - loss) * memory, loss * (1.0 - memory)
    lost, come = (
        np.zeros(MOST_PARITY + 1),
        np.zeros(MOST_PARITY + 1),
    )  # by losses so far, as the last one fared
    come[0], lost[1] = 1.0 - loss, loss
    chances = np.zeros(MOST_PARITY + 1)
    for sent in range(1, data + MOST_PARITY + 1):
        if sent >= data:
            parity = sent - data
            chances[parity] = lost[: parity + 1].sum() + come[: parity + 1].sum()
        losing = lost * after_lost + come * after_come
        come = lost * (1.0 - after_lost) + come * (1.0 - after_come)
        lost = np.concatenate([[0.0], losing[:-1]])
    return chances


# -- the code ----------------------------------------------------------------------------------------------


def encode(coded: Bytes, parity: int, out: Bytes | None = None) -> Bytes:
    """The parity of a group, (parity, L), from its data in the order of their places, (data, L).

    Rows may lie apart (`frames[group::count]`). `out` may be given, (parity, L): it is written and returned.
    Raises ValueError for more than 256 datagrams in all.
    """
    data = len(coded)
    if parity < 0 or data < 1 or data + parity > 256:
        raise ValueError(f"a group of {data} + {parity} datagrams: 1 of data or more, and at most 256 in all")
    out = np.empty((parity, coded.shape[1]), np.uint8) if out is None else out
    gf.matmul(_code(data, parity), coded, out)
    return out


def lost_places(places: npt.ArrayLike, data: int) -> npt.NDArray[np.int64]:
    """Which places of a group's data are not among those that came, ascending."""
    there = np.zeros(256, bool)
    there[np.asarray(places, np.int64)] = True
    return np.flatnonzero(~there[:data])


def restore(coded: Bytes, places: npt.ArrayLike, data: int) -> Bytes:
    """What a group has lost of its data, exactly: one row for each of `lost_places`, in their order.

    `coded` is what came, (n, L), in any order, data and parity; `places` are their places, (n,). What came
    beyond need is not used. Raises ValueError if too few came, if one came twice, or at an impossible place.
    """
    at = np.asarray(places)
    if at.shape != (len(coded),):
        raise ValueError(f"{len(coded)} datagrams at places of shape {at.shape}")
    if at.dtype != np.uint8:
        if not len(at) or not 0 <= at.min() <= at.max() <= 255:
            raise ValueError("a group's places are from 0 to 255")
        at = at.astype(np.uint8)
    decoder = _decoder(at.tobytes(), data)
    rows = np.empty((len(decoder), coded.shape[1]), np.uint8)
    if len(rows):
        gf.matmul(decoder, coded, rows)
    return rows


@lru_cache(maxsize=256)
def _code(data: int, parity: int) -> Bytes:
    """The coefficients of the parity, (parity, data)."""
    d, p = np.arange(data, dtype=np.uint8), np.arange(data, data + parity).astype(np.uint8)
    code: Bytes = gf.divide(np.bitwise_xor(np.uint8(data), d)[None, :], np.bitwise_xor.outer(p, d))
    code.flags.writeable = False
    return code


@lru_cache(maxsize=4096)
def _decoder(came: bytes, data: int) -> Bytes:
    """The lost data's coefficients of what came at these places, (lost, came). Losses repeat: one lost place
    is by far the most common case."""
    places = np.frombuffer(came, np.uint8)
    if data < 1 or len(places) < data:
        raise ValueError(f"{len(places)} datagrams cannot restore a group of {data}")
    if len(set(came)) != len(came):
        raise ValueError("a group's datagram is given twice")
    lost = lost_places(places, data)
    parities = np.flatnonzero(places >= data)[: len(lost)]  # those that are used
    decoder = np.zeros((len(lost), len(places)), np.uint8)
    if len(lost):
        code = _code(data, int(places[parities].max()) - data + 1)[places[parities].astype(np.int64) - data]
        inverse = _inverse_of_cauchy(places[parities], lost.astype(np.uint8), data)
        known = np.flatnonzero(places < data)
        products = gf.multiply(inverse[:, :, None], code[None, :, places[known].astype(np.int64)])
        decoder[:, known] = np.bitwise_xor.reduce(products, axis=1)
        decoder[:, parities] = inverse
    decoder.flags.writeable = False
    return decoder


def _inverse_of_cauchy(x: Bytes, y: Bytes, data: int) -> Bytes:
    """The inverse of the code's square part with the parities at places `x` and the data at `y`, by Cauchy's
    formula in logarithms: row i is data y_i's, column j parity x_j's."""
    count = len(x)
    across = gf.LOG[np.bitwise_xor.outer(x, y)]  # (parity, data)
    among: list[Any] = []
    for each in (x, y):
        logs = gf.LOG[np.bitwise_xor.outer(each, each)]
        logs[np.arange(count), np.arange(count)] = 0
        among.append(logs.sum(axis=1))
    log = (
        across.sum(axis=1)[None, :]
        + across.sum(axis=0)[:, None]
        - across.T
        - among[0][None, :]
        - among[1][:, None]
    )
    log -= gf.LOG[np.bitwise_xor(y, np.uint8(data))][:, None]  # the columns' scale
    inverse: Bytes = gf.EXP[log % 255]
    return inverse
