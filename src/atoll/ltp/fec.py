"""Forward error correction of high-priority datagrams: systematic Reed-Solomon over interleaved groups.

A group's data go as they are, its parity after them; any losses up to the number of parity datagrams are
restored exactly. The code is a Cauchy matrix over GF(256), its columns scaled so that the first parity is the
XOR of the data: with `data` datagrams of data, parity p's coefficient of data d is data^d / ((data + p)^d),
where ^ is XOR. Source: docs/ltp.md, "Forward error correction".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from atoll.ltp import gf
from atoll.ltp.gf import KERNEL, Bytes, kernel_line

__all__ = ["KERNEL", "Groups", "encode", "kernel_line", "lost_places", "plan_borne"]
__all__ += ["plan_groups", "restore"]

Floats = npt.NDArray[np.float64]

MOST_DATA = 32  # datagrams of data in a group
MOST_PARITY = 16  # datagrams of parity in a group
RESTORED = 0.999  # wanted probability that all groups of a transfer's high blocks can be restored
SURE = 3.0  # standard deviations by which the lost low blocks must stay within their bound
MOST_GROUPS = 0xFFFF  # of a transfer: the numbers of SLICE.group but NO_GROUP


# -- planning ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """A transfer's groups: protected datagram i is number i // count in group i % count."""

    protected: int
    count: int  # 0 only without protected datagrams
    data: int  # data datagrams of the largest group; the others have one less
    parity: int  # parity datagrams of each group; 0: no code
    reason: str

    def data_of(self, group: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the number of data datagrams in each of these groups."""
        return (self.protected - np.asarray(group, np.int64) + self.count - 1) // max(self.count, 1)


def plan_groups(highs: int, loss: float, burst: float, *, apart: float = 1.0) -> Groups:
    """Plan the groups of `highs` high-priority datagrams.

    Parity is the least that restores all groups with probability RESTORED, at most MOST_PARITY, and at most
    one more than the group's data.

    Args:
        loss: recent loss rate of the path.
        burst: mean number of datagrams lost in a row.
        apart: datagrams on the wire for each protected one.
    """
    count = -(-highs // MOST_DATA)
    wanted = 1.0 - (1.0 - RESTORED) / max(count, 1)
    return _plan(highs, loss, burst, apart, lambda chances, _: chances >= wanted)


def plan_borne(lows: int, loss: float, burst: float, borne: float, *, apart: float = 1.0) -> Groups:
    """Plan the groups of `lows` low-priority datagrams, of which `borne` may stay lost.

    Parity is the least that keeps the lost ones within `borne` by SURE standard deviations. The other
    arguments are those of `plan_groups`.
    """
    count = -(-lows // MOST_DATA)

    def enough(chances: Floats, data: int) -> npt.NDArray[np.bool_]:
        parity = np.arange(len(chances))
        # A group that cannot be restored has lost at least the mean, and more than its parity.
        gone = np.clip((parity + 1.5) / (data + parity), loss, 1.0) * data
        fails = np.maximum(1.0 - chances, 0.0)
        failing = count * fails + SURE * np.sqrt(count * chances * fails)
        return np.asarray(failing * gone <= borne)

    return _plan(lows, loss, burst, apart, enough)


def _plan(
    protected: int,
    loss: float,
    burst: float,
    apart: float,
    enough: Callable[[Floats, int], npt.NDArray[np.bool_]],
) -> Groups:
    """Plan groups with the least parity that is `enough`.

    Args:
            enough: for each number of parity datagrams, given the probability that a group is restored, True
            if it will do.
    """
    count = -(-protected // MOST_DATA)
    data = -(-protected // max(count, 1))
    parity, reason = 0, ""
    if protected == 0:
        reason = "nothing to protect"
    elif loss <= 0.0:
        reason = "no loss was measured lately"
    elif count > MOST_GROUPS:
        reason = f"{count} groups: a header names at most {MOST_GROUPS}"
    else:
        # More than one parity datagram for each of data would cost as much as a resend.
        chances = restore_chances(data, loss, burst, count * apart)[: data + 2]
        good = np.flatnonzero(enough(chances, data))
        parity = int(good[0]) if len(good) else len(chances) - 1
        reason = f"loss {loss:.2g} in bursts of {max(burst, 1.0):.3g}, {count} interleaved groups of {data}: "
        reason += f"{parity} parity restore a group with {chances[parity]:.3%}"
        reason += "" if len(good) else " only, the most there is"
    return Groups(protected, count, data, parity, reason)


def restore_chances(data: int, loss: float, burst: float, distance: float) -> npt.NDArray[np.float64]:
    """Return the probability that a group is restored with 0, 1, .. MOST_PARITY of parity, (MOST_PARITY +
    1,).

    Losses are a Gilbert chain with this loss rate and mean burst; a group sees every `distance`-th step. With
    memory m = 1 - 1 / (burst (1 - loss)), a datagram is lost with probability loss + (1 - loss) m^distance
    after a lost one, and loss (1 - m^distance) after one that arrived. Where interleaving spreads the bursts,
    m^distance is 0, and the result is the binomial tail.
    """
    loss = min(max(loss, 0.0), 0.999)
    memory = max(0.0, 1.0 - 1.0 / (max(burst, 1.0) * (1.0 - loss))) ** max(distance, 1.0)
    after_lost, after_come = loss + (1.0 - loss) * memory, loss * (1.0 - memory)
    # Probabilities by number of losses so far, split by whether the last datagram was lost or arrived.
    lost, come = np.zeros(MOST_PARITY + 1), np.zeros(MOST_PARITY + 1)
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
    """Return the parity of a group, (parity, L), from its data in the order of their places, (data, L).

    Rows may lie apart (`frames[group::count]`). If `out`, (parity, L), is given, the parity is written there.
    Raises ValueError for more than 256 datagrams in all.
    """
    data = len(coded)
    if parity < 0 or data < 1 or data + parity > 256:
        raise ValueError(f"a group of {data} + {parity} datagrams: 1 of data or more, and at most 256 in all")
    out = np.empty((parity, coded.shape[1]), np.uint8) if out is None else out
    gf.matmul(_code(data)[:parity, :data], coded, out)
    return out


def lost_places(places: npt.ArrayLike, data: int) -> npt.NDArray[np.int64]:
    """Return the data places of a group that are not in `places`, ascending."""
    there = set(np.asarray(places).tolist())
    return np.array([place for place in range(data) if place not in there], np.int64)


def restore(coded: Bytes, places: npt.ArrayLike, data: int) -> Bytes:
    """Return the lost data of a group, exactly: one row for each of `lost_places`, in that order.

    Args:
        coded: datagrams that arrived, (n, L), in any order, data and parity; surplus ones are ignored.
        places: their places, (n,).
        data: data datagrams of the group.

    Raises:
        ValueError: too few arrived, one is given twice, or a place is impossible.
    """
    at = np.asarray(places)
    came: list[int] = at.tolist()
    if at.shape != (len(coded),):
        raise ValueError(f"{len(coded)} datagrams at places of shape {at.shape}")
    if data < 1 or len(came) < data:
        raise ValueError(f"{len(came)} datagrams cannot restore a group of {data}")
    if min(came) < 0 or max(came) > 255:
        raise ValueError("a group's places are from 0 to 255")
    if len(set(came)) != len(came):
        raise ValueError("a group's datagram is given twice")
    lost = lost_places(at, data).tolist()
    parities = [place for place in came if place >= data][: len(lost)]
    if not lost:
        return np.empty((0, coded.shape[1]), np.uint8)
    # The lost data's part of each parity: the parity plus the part of the data that arrived.
    sums = np.empty((len(lost), coded.shape[1]), np.uint8)
    gf.matmul(_code(data)[np.array(parities)[:, None] - data, at], coded, sums)
    inverse = _inverse(parities, lost, data)
    if len(lost) == 1 and inverse[0, 0] == 1:
        return sums
    rows = np.empty_like(sums)
    gf.matmul(inverse, sums, rows)
    return rows


@lru_cache(maxsize=MOST_DATA)
def _code(data: int) -> Bytes:
    """Return the coefficients of all parities, (256 - data, 256).

    Columns below `data` belong to the data; the columns from there on are an identity, one for each parity.
    """
    d, p = np.arange(data, dtype=np.uint8), np.arange(data, 256).astype(np.uint8)
    code = np.eye(256, dtype=np.uint8)[data:]
    code[:, :data] = gf.divide(np.bitwise_xor(np.uint8(data), d)[None, :], np.bitwise_xor.outer(p, d))
    code.flags.writeable = False
    return code


_LOG: list[int] = gf.LOG.tolist()
_EXP: list[int] = gf.EXP.tolist()


def _inverse(parities: list[int], lost: list[int], data: int) -> Bytes:
    """Invert the code's square part of these parities and lost data, by Cauchy's formula in logarithms.

    Row i belongs to data lost[i], column j to parity parities[j]. Plain Python is faster than NumPy for so
    few numbers.
    """
    logs = [[_LOG[x ^ y] for x in parities] for y in lost]
    of_row = [sum(logs[i]) - _logs_among(y, lost) - _LOG[y ^ data] for i, y in enumerate(lost)]
    of_column = [sum(row[j] for row in logs) - _logs_among(x, parities) for j, x in enumerate(parities)]
    places = range(len(lost))
    return np.array(
        [[_EXP[(of_row[i] + of_column[j] - logs[i][j]) % 255] for j in places] for i in places], np.uint8
    )


def _logs_among(one: int, all_of_them: list[int]) -> int:
    return sum(_LOG[one ^ other] for other in all_of_them if other != one)
