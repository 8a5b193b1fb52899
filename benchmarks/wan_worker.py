"""The two ends of benchmarks/wan.py, which starts them in two sites of a lab.

    python benchmarks/wan_worker.py client PLAN    in the site that sends; prints its results as JSON
    python benchmarks/wan_worker.py gloo ADDRESS BYTES    in the other one: takes Gloo's transfers

PLAN is JSON (`Plan`). `atoll link serve` takes all other transfers. The contestants take turns; the machine's
monotonic clock, which both ends have, times them.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from atoll.core.errors import PeerLostError
from atoll.net.keys import read_keys
from atoll.net.linkoptions import LinkTestOptions
from atoll.net.linkreport import Packets
from atoll.net.linktester import LinkTester, Sender

GLOO, STREAMS = "gloo", "tcp:bbr x8"
STREAM, COUNT = "tcp:bbr", 8  # what the streams are, and how many
SECONDS = 30.0  # for an end to answer, and for a session to say that it is over


@dataclass(frozen=True)
class Plan:
    """What is to be measured. Times in seconds; `outages`: when they begin, by the monotonic clock."""

    address: str
    keys: str
    size: int  # bytes of a transfer
    counts: dict[str, int]  # contestant: transfers
    stops: dict[str, float]  # contestant: after which a transfer is given up, and no other one made
    warm: int
    slow: list[str]  # contestants that take so long that they take their turns after the others
    gloo: str  # HOST:PORT of Gloo's rendezvous, at the client
    outages: list[float] = field(default_factory=list)
    lead: float = 0.0  # from a transfer's begin to its outage
    seed: int = 0


@dataclass
class Made:
    """What a contestant did."""

    detail: str = ""
    seconds: list[float] = field(default_factory=list)
    short: int = 0  # transfers that were handed on with less than makes one usable
    borne: int = 0  # blocks
    filled: int = 0
    repaired: int = 0
    packets: Packets = field(default_factory=Packets)
    stopped: str = ""


class LateError(Exception):
    """A transfer took longer than its contestant has."""


class Contestant(Protocol):
    """One of them: its way is open, and stays warm."""

    detail: str

    def transfer(self, number: int, seconds: float, made: Made | None) -> float:
        """Make one; returns how long it took until the receiver could use it. What else is to be told goes
        into `made`. Raises LateError where it takes longer than `seconds`."""

    def packets(self) -> Packets: ...

    def close(self) -> None: ...


class Linked:
    """A transport that `atoll link serve` takes, by several connections at once where `senders` are more."""

    def __init__(self, tester: LinkTester, senders: Sequence[Sender]) -> None:
        self._tester, self._senders = tester, senders
        self.detail = senders[0].detail
        self._threads = ThreadPoolExecutor(len(senders))

    def transfer(self, number: int, seconds: float, made: Made | None) -> float:
        tester, start = self._tester, time.monotonic()
        until = start + seconds
        # Only a sender that is alone may look at the channel, for that is no thread's own.
        look = partial(self._look, until, quiet=len(self._senders) > 1)
        for _ in self._threads.map(lambda sender: sender.send(number, look), self._senders):
            pass
        last = start
        for sender in self._senders:
            taken = tester.wait_taken(sender, number, until)
            if taken is None:
                raise LateError
            last = max(last, taken.at)
            if made is not None:
                missing = taken.highs - taken.highs_there + taken.lows - taken.lows_there
                made.short += taken.lows_there < 0.97 * taken.lows
                made.borne += missing if taken.fill == "borne" else 0
                made.filled += missing if taken.fill not in ("none", "borne") else 0
                made.repaired += taken.repaired
        for sender in self._senders:
            sender.settle(partial(self._look, time.monotonic() + SECONDS, quiet=False))
        return last - start

    def _look(self, until: float, *, quiet: bool) -> None:
        if not quiet:
            self._tester.look()
        if time.monotonic() > until:
            raise LateError

    def packets(self) -> Packets:
        each = [sender.packets() for sender in self._senders]
        return Packets(*(sum(counts) for counts in zip(*(asdict(one).values() for one in each), strict=True)))

    def close(self) -> None:
        self._threads.shutdown()
        for sender in self._senders:
            sender.close()


class Gloo:
    """torch.distributed's send and recv. The receiver answers with the time at which it had it all."""

    detail = "torch.distributed send and recv; its connection has the kernel's default, which is set to BBR"

    def __init__(self, place: str, size: int) -> None:
        join_gloo(place, 0)
        self._values = torch.randn(size // 4)

    def transfer(self, number: int, seconds: float, made: Made | None) -> float:  # noqa: ARG002
        start, came = time.monotonic(), torch.zeros(1, dtype=torch.float64)
        dist.send(self._values, 1)
        dist.recv(came, 1)
        return float(came) - start

    def packets(self) -> Packets:
        return Packets()

    def close(self) -> None:
        dist.destroy_process_group()


def join_gloo(place: str, rank: int) -> None:
    seconds = datetime.timedelta(seconds=10 * SECONDS)
    dist.init_process_group("gloo", f"tcp://{place}", timeout=seconds, world_size=2, rank=rank)


def take_gloo(place: str, size: int) -> None:
    """Gloo's receiver, until it is ended."""
    join_gloo(place, 1)
    print("ready", flush=True)
    values = torch.zeros(size // 4)
    while True:
        dist.recv(values, 0)
        dist.send(torch.tensor([time.monotonic()], dtype=torch.float64), 0)


def run(plan: Plan) -> dict[str, Made]:
    """Open all contestants' ways, and let them take turns in an order drawn anew for each round."""
    keys = read_keys(Path(plan.keys))
    made = {name: Made() for name in plan.counts}
    wish = LinkTestOptions(size=plan.size, timeout=SECONDS, seed=plan.seed)
    with (
        LinkTester(plan.address, keys, wish) as tester,
        LinkTester(plan.address, keys, LinkTestOptions(size=plan.size // COUNT, timeout=SECONDS)) as parts,
    ):
        contestants: dict[str, Contestant] = {}
        for name in plan.counts:
            if name == GLOO:
                contestants[name] = Gloo(plan.gloo, plan.size)
            elif name == STREAMS:
                contestants[name] = Linked(parts, [parts.open(STREAM) for _ in range(COUNT)])
            else:
                contestants[name] = Linked(tester, [tester.open(name)])
            made[name].detail = contestants[name].detail
        turns = Turns(plan, contestants, made, lambda: (tester.look(), parts.look()))
        try:
            turns.take_all()
        finally:
            for name in contestants:
                if not made[name].stopped:
                    contestants[name].close()
    return made


class Turns:
    """Of the contestants: first those that warm up, then those that count."""

    def __init__(
        self,
        plan: Plan,
        contestants: dict[str, Contestant],
        made: dict[str, Made],
        look: Callable[[], object],
    ) -> None:
        self._plan, self._contestants, self._made, self._look = plan, contestants, made, look
        self._numbers = dict.fromkeys(contestants, 0)
        self._outages = list(plan.outages)

    def take_all(self) -> None:
        quick = [name for name in self._contestants if name not in self._plan.slow]
        self._take_turns(quick, self._plan.warm)
        for name in self._plan.slow:  # on the others' connections, nothing would be warm any more
            self._take_turns([name], 1)

    def _take_turns(self, names: Sequence[str], warm: int) -> None:
        for _ in range(warm):
            for name in self._left(names):
                self._take(name, counts=False)
        before = {name: self._contestants[name].packets() for name in self._left(names)}
        order = np.random.default_rng(self._plan.seed)
        most = max(self._plan.counts[name] for name in names)
        for turn in range(most):
            left = [name for name in self._left(names) if self._due(name, turn, most)]
            for place in order.permutation(len(left)):
                if self._plan.outages and not self._await_outage():
                    return
                self._take(left[place], counts=True)
        for name in self._left(names):
            self._made[name].packets = self._contestants[name].packets().since(before[name])

    def _left(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if not self._made[name].stopped]

    def _due(self, name: str, turn: int, most: int) -> bool:
        """Whether it takes part in this round: fewer transfers are spread over all rounds."""
        count = self._plan.counts[name]
        return (turn + 1) * count // most > turn * count // most

    def _await_outage(self) -> bool:
        """Wait until the next outage is a lead ahead; False where there is none."""
        while self._outages:
            begin = self._outages.pop(0) - self._plan.lead
            if begin > time.monotonic():
                time.sleep(begin - time.monotonic())
                return True
        return False

    def _take(self, name: str, *, counts: bool) -> None:
        made, number = self._made[name], self._numbers[name]
        self._numbers[name] += 1
        self._look()
        seconds = self._plan.stops[name]
        try:
            took = self._contestants[name].transfer(number, seconds, made if counts else None)
        except LateError:
            made.stopped = f"one took more than {seconds:g} s"
        except PeerLostError as error:
            made.stopped = str(error)
        else:
            if counts:
                made.seconds.append(took)
        if made.stopped:
            self._contestants[name].close()  # what it has left to send is not to disturb the others


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "gloo":
        with suppress(RuntimeError):  # the other end has gone, and with it the group
            take_gloo(sys.argv[2], int(sys.argv[3]))
        return
    made = run(Plan(**json.loads(sys.argv[2])))
    print(json.dumps({name: asdict(each) for name, each in made.items()}))


if __name__ == "__main__":
    main()
