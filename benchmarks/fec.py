"""(m) Forward error correction: bytes a second that a group of datagrams is coded and restored with.

    python benchmarks/fec.py [--quick]

Groups of 32 datagrams of data, 1,336 bytes of each coded, and 1, 2 or 4 of parity, as a transfer has them:
rows of one array of frames, interleaved. Encoding makes the parity; restoring makes as many lost data as
there is parity, another pattern of losses for each group and each turn. Contestants take turns, all groups
each, on one core: Atoll's kernels, and pyeclib (ISA-L) and zfec where they are installed. A rival is given
the bytes in the form that it takes, and what it makes of them is not copied back: neither is counted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from atoll.ltp import fec, gf
from common import interleave, options, output_folder, write_results

Bytes = npt.NDArray[np.uint8]
DATA, LENGTH, FRAME = 32, 1336, 1400
START = FRAME - 16 - LENGTH  # of what is coded: the seal stands at a frame's end
PARITIES = (1, 2, 4)
GROUPS = 64
RIVALS = ("pyeclib", "zfec")


@dataclass
class Work:
    """The groups of a transfer, and of each group what is left of it in each turn."""

    frames: Bytes  # (GROUPS * (DATA + parity), FRAME); datagram p of group g is row p * GROUPS + g
    parity: int
    lost: npt.NDArray[np.int64]  # (turns, GROUPS, parity) places of data

    def group(self, number: int) -> Bytes:
        """What is coded of it, data and parity, (DATA + parity, LENGTH): a view."""
        return self.frames[number::GROUPS, START : START + LENGTH]

    def came(self, turn: int, group: int) -> npt.NDArray[np.int64]:
        """The places that are left, ascending."""
        return np.setdiff1d(np.arange(DATA + self.parity), self.lost[turn, group])


def make_work(parity: int, turns: int) -> Work:
    rng = np.random.default_rng(parity)
    frames = rng.integers(0, 256, (GROUPS * (DATA + parity), FRAME), dtype=np.uint8)
    lost = np.argsort(rng.random((turns, GROUPS, DATA)), axis=2)[:, :, :parity]
    work = Work(frames, parity, np.sort(lost, axis=2))
    for number in range(GROUPS):
        whole = work.group(number)
        fec.encode(whole[:DATA], parity, whole[DATA:])
    return work


class Contestant(Protocol):
    """Each call does all groups; the first turn of `check` shows that it is right."""

    def encode(self, turn: int, /) -> object: ...

    def restore(self, turn: int, /) -> object: ...

    def check(self) -> None: ...


class Atoll:
    """One of our kernels. What comes lies together, as a receiver keeps it."""

    def __init__(self, work: Work, kernel: str, turns: int) -> None:
        self._kernel, self._work = kernel, work
        self._groups = [work.group(number) for number in range(GROUPS)]
        self._out = np.empty((work.parity, LENGTH), np.uint8)
        self._came = [[work.came(turn, g).astype(np.uint8) for g in range(GROUPS)] for turn in range(turns)]
        self._rows = [[self._groups[g][came] for g, came in enumerate(groups)] for groups in self._came]

    def encode(self, _: int) -> None:
        gf.KERNEL = self._kernel
        for group in self._groups:
            fec.encode(group[:DATA], self._work.parity, self._out)

    def restore(self, turn: int) -> list[Bytes]:
        gf.KERNEL = self._kernel
        return [
            fec.restore(rows, came, DATA)
            for rows, came in zip(self._rows[turn], self._came[turn], strict=True)
        ]

    def check(self) -> None:
        for g, rows in enumerate(self.restore(0)):
            np.testing.assert_array_equal(rows, self._groups[g][self._work.lost[0, g]])


class Pyeclib:
    """ISA-L's Cauchy code through pyeclib. It restores a group whole, and takes and gives bytes."""

    def __init__(self, module: Any, work: Work, turns: int) -> None:
        self._driver = module.ECDriver(k=DATA, m=work.parity, ec_type="isa_l_rs_cauchy")
        self._data = [work.group(g)[:DATA].tobytes() for g in range(GROUPS)]
        fragments = [self._driver.encode(data) for data in self._data]
        self._came = [
            [[fragments[g][place] for place in work.came(turn, g)] for g in range(GROUPS)]
            for turn in range(turns)
        ]

    def encode(self, _: int) -> None:
        for data in self._data:
            self._driver.encode(data)

    def restore(self, turn: int) -> list[bytes]:
        return [self._driver.decode(fragments) for fragments in self._came[turn]]

    def check(self) -> None:
        assert self.restore(0) == self._data


class Zfec:
    """zfec: it takes and gives a list of bytes, those of data at their places."""

    def __init__(self, module: Any, work: Work, turns: int) -> None:
        total = DATA + work.parity
        self._encoder, self._decoder = module.Encoder(DATA, total), module.Decoder(DATA, total)
        self._parities = list(range(DATA, total))
        self._data = [[row.tobytes() for row in work.group(g)[:DATA]] for g in range(GROUPS)]
        whole = [[*rows, *self._encoder.encode(rows, self._parities)] for rows in self._data]
        self._came: list[list[tuple[list[bytes], list[int]]]] = []
        for turn in range(turns):
            self._came.append([])
            for g in range(GROUPS):
                places = list(range(DATA))
                for place, parity in zip(work.lost[turn, g], self._parities, strict=True):
                    places[place] = parity
                self._came[-1].append(([whole[g][place] for place in places], places))

    def encode(self, _: int) -> None:
        for rows in self._data:
            self._encoder.encode(rows, self._parities)

    def restore(self, turn: int) -> list[list[bytes]]:
        return [self._decoder.decode(rows, places) for rows, places in self._came[turn]]

    def check(self) -> None:
        assert self.restore(0) == self._data


@dataclass(frozen=True)
class Speed:
    """One contestant at one thing: bytes of data a second, of all turns."""

    what: str  # "encode" or "restore"
    parity: int
    contestant: str
    median: float
    p10: float
    p90: float
    microseconds: float  # a group, median
    against_best_rival: float | None  # how many times as fast, of Atoll's: median over the turns

    def line(self) -> str:
        times = (
            "" if self.against_best_rival is None else f", {self.against_best_rival:.2f}x of the best rival"
        )
        return (
            f"{self.what}, {DATA} + {self.parity}: {self.contestant} {self.median / 1e6:,.0f} MB/s of data "
            f"(p10 {self.p10 / 1e6:,.0f}, p90 {self.p90 / 1e6:,.0f}), "
            f"{self.microseconds:.1f} us a group{times}"
        )


def rivals() -> dict[str, Any]:
    """Those that are installed, by name."""
    found = {}
    for name, module in zip(RIVALS, ("pyeclib.ec_iface", "zfec"), strict=True):
        try:
            found[name] = importlib.import_module(module)
        except ImportError:
            print(f"{name} is not installed, and left out")
    return found


def measure(parity: int, modules: dict[str, Any], turns: int) -> list[Speed]:
    work = make_work(parity, turns)
    contestants: dict[str, Contestant] = {f"Atoll, {k}": Atoll(work, k, turns) for k in gf.KERNELS}
    makers: dict[str, Callable[..., Contestant]] = {"pyeclib": Pyeclib, "zfec": Zfec}
    contestants |= {name: makers[name](module, work, turns) for name, module in modules.items()}
    for contestant in contestants.values():
        contestant.check()
    speeds = []
    for what in ("encode", "restore"):
        timings = interleave({name: getattr(each, what) for name, each in contestants.items()}, turns, parity)
        seconds = {name: np.array(timing.seconds) for name, timing in timings.items()}
        best = np.min([seconds[name] for name in modules], axis=0) if modules else None
        for name, each in seconds.items():
            rates = GROUPS * DATA * LENGTH / each
            ours = best is not None and name not in modules
            speeds.append(
                Speed(
                    what,
                    parity,
                    name,
                    float(np.median(rates)),
                    *(float(q) for q in np.quantile(rates, (0.1, 0.9))),
                    microseconds=1e6 * float(np.median(each)) / GROUPS,
                    against_best_rival=float(np.median(best / each)) if ours else None,
                )
            )
    return speeds


def draw(speeds: Sequence[Speed], path: Path) -> None:
    """A picture of the speeds, a panel each for encoding and restoring."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharex=True, sharey=True)
    names = list(dict.fromkeys(speed.contestant for speed in speeds))
    shades = {1: "#b9d2e8", 2: "#6f9dc6", 4: "#2b6ca3"}
    for axes, what in zip(panels, ("encode", "restore"), strict=True):
        for at, parity in enumerate(PARITIES):
            shown = [speed for speed in speeds if (speed.what, speed.parity) == (what, parity)]
            rows = [names.index(speed.contestant) + 0.26 * (at - 1) for speed in shown]
            rates = [speed.median / 1e6 for speed in shown]
            axes.barh(rows, rates, height=0.24, color=shades[parity], label=f"{DATA} + {parity}")
        axes.set(title=what, xscale="log", xlabel="MB of data a second, one core")
        axes.set_yticks(range(len(names)), names)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"Reed-Solomon over groups of datagrams, {LENGTH} bytes each", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    args = options(__doc__).parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    modules = rivals()
    speeds = []
    for parity in PARITIES:
        more = measure(parity, modules, 5 if args.quick else 60)
        print("\n".join(speed.line() for speed in more), flush=True)
        speeds += more
    folder = output_folder(args)
    path = write_results("fec", folder, [asdict(speed) for speed in speeds], quick=args.quick)
    draw(speeds, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
