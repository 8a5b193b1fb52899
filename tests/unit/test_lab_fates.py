"""What a link does to packets: the live emulator's own decisions, over sequences that are made up here."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from atoll.core.errors import ConfigError
from atoll.lab.emulator import Emulator, available, fates, fates_array
from atoll.lab.topology import LabLink, Phase, Site, Topology

pytestmark = pytest.mark.skipif(bool(available()), reason=available() or "built")

MTU = 1500
SLOT = 12e-6  # seconds: an MTU at 1 Gbit/s
CLEAN = Phase(
    at=0.0, rate=125e6, delay=0.02, jitter=0.0, distribution="normal", queue=5_000_000, loss=0.0, burst=1.0,
    reorder=0.0, reorder_by=0.001, duplicate=0.0, corrupt=0.0, down=False,
)  # fmt: skip

Floats = npt.NDArray[np.float64]


def link(*phases: Phase, **qualities: object) -> LabLink:
    """A link of `phases`, or of one that is CLEAN but for `qualities`."""
    return LabLink(0, 1, phases or (replace(CLEAN, **qualities),))  # type: ignore[arg-type]


def decide(made: LabLink, times: Floats, size: int = MTU, seed: int = 1, index: int = 0) -> npt.NDArray[Any]:
    return fates_array(made, seed, index, times, np.full(len(times), size))


def steady(count: int, gap: float = SLOT) -> Floats:
    return np.arange(count) * gap


def delays(made: LabLink, times: Floats, size: int = MTU, seed: int = 1) -> Floats:
    """Seconds from when each packet has left to when it arrives, less the link's delay."""
    fate = decide(made, times, size, seed)
    assert not fate["verdict"].any()
    phase = made.phases[0]
    found: Floats = fate["delivered"] / 1e9 - times - size / phase.rate - phase.delay
    return found


def within_binomial(happened: int, of: int, probability: float, correlation: float = 1.0) -> bool:
    """Whether a count lies within four standard deviations; `correlation` widens the variance."""
    deviation = math.sqrt(of * probability * (1 - probability) * correlation)
    return abs(happened - of * probability) < 4 * deviation


def runs_of(lost: npt.NDArray[np.bool_]) -> float:
    """The mean length of runs of lost packets."""
    starts = np.count_nonzero(lost[1:] & ~lost[:-1]) + int(lost[0])
    return float(lost.sum() / starts)


# -- loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [0.001, 0.03, 0.5])
def test_independent_loss_is_as_asked(loss: float) -> None:
    count = 1_000_000
    lost = decide(link(loss=loss), steady(count))["verdict"] == 2
    assert within_binomial(int(lost.sum()), count, loss)
    pairs = int((lost[1:] & lost[:-1]).sum())
    assert within_binomial(pairs, count - 1, loss**2, correlation=3)  # neighbouring pairs share a packet


@pytest.mark.parametrize(("loss", "burst"), [(0.03, 8.0), (0.01, 3.0), (0.3, 20.0), (0.55, 1.5)])
def test_bursts_are_as_long_as_asked(loss: float, burst: float) -> None:
    count = 1_000_000
    lost = decide(link(loss=loss, burst=burst), steady(count))["verdict"] == 2
    memory = 1 - 1 / burst - loss / (1 - loss) / burst
    assert within_binomial(int(lost.sum()), count, loss, (1 + memory) / (1 - memory))
    assert runs_of(lost) == pytest.approx(burst, rel=0.05)


@pytest.mark.parametrize("slots", [2, 5, 40])
def test_bursts_go_on_while_the_link_is_idle(slots: int) -> None:
    """A chain that counted packets would give bursts of 16 whatever the gaps."""
    loss, burst, count = 0.1, 16.0, 400_000
    memory = 1 - 1 / burst - loss / (1 - loss) / burst
    lost = decide(link(loss=loss, burst=burst), steady(count, slots * SLOT))["verdict"] == 2
    assert runs_of(lost) == pytest.approx(1 / (1 - (loss + (1 - loss) * memory**slots)), rel=0.05)
    assert lost.mean() == pytest.approx(loss, rel=0.05)


def test_small_packets_take_a_slot_each() -> None:
    lost = decide(link(loss=0.1, burst=10.0), steady(1_000_000, SLOT / 10), size=150)["verdict"] == 2
    assert runs_of(lost) == pytest.approx(10, rel=0.05)


def test_no_loss_and_nothing_but_loss() -> None:
    assert not decide(link(loss=0.0, burst=8.0), steady(10_000))["verdict"].any()
    assert (decide(link(loss=1.0, burst=8.0), steady(10_000))["verdict"] == 2).all()
    changed = link(replace(CLEAN, loss=1.0), replace(CLEAN, at=0.06))
    lost = decide(changed, steady(10_000))["verdict"] == 2
    assert lost[:4999].all()
    assert not lost[5000:].any()


# -- delay and jitter --------------------------------------------------------------------------------------


def test_a_packet_takes_its_sending_and_the_delay() -> None:
    fate = fates(link(), 1, 0, [(0.0, 1500), (0.0, 1000), (1.0, 125)])
    assert [one.delivered for one in fate] == pytest.approx([0.020012, 0.020020, 1.020001], abs=1e-9)
    assert [(one.lost_by, one.copies, one.corrupted, one.overtook) for one in fate] == [
        ("", 1, False, False)
    ] * 3


QUANTILES = {
    "normal": lambda u: NormalDist().inv_cdf(u),
    "uniform": lambda u: math.sqrt(3) * (2 * u - 1),
    # Shape 3, cut where one in 2000 lies beyond; mean 0 and variance 1 of what is left.
    "pareto": lambda u: ((1 - u) ** (-1 / 3) - 1.4969) / 0.775,
}


@pytest.mark.parametrize("distribution", list(QUANTILES))
def test_jitter_has_the_distribution_that_was_asked(distribution: str) -> None:
    jitter = 0.002
    made = link(jitter=jitter, distribution=distribution, delay=0.1)
    found = np.sort(delays(made, steady(100_000, 20.5 * jitter))) / jitter
    assert found.mean() == pytest.approx(0, abs=0.02)
    assert found.std() == pytest.approx(1, abs=0.03)
    for u in (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98):
        asked = QUANTILES[distribution](u)
        assert found[round(u * len(found))] == pytest.approx(asked, abs=0.06), u


@pytest.mark.parametrize("distribution", list(QUANTILES))
@pytest.mark.parametrize("gap", [1e-4, 1e-3])
def test_jitter_is_the_same_for_dense_packets_and_reorders_none(distribution: str, gap: float) -> None:
    """Independent jitter that must not reorder is the maximum of many: at 100 Mbit/s, 3 ms too late."""
    jitter, times = 0.002, steady(1_000_000, gap)
    arrivals = decide(link(jitter=jitter, distribution=distribution, delay=0.1), times)["delivered"]
    assert (np.diff(arrivals) >= 0).all()
    found = arrivals / 1e9 - times - SLOT - 0.1
    assert found.mean() == pytest.approx(0, abs=0.08 * jitter)
    # The rare falls of the heavy tail are steeper than packets that keep their order can follow.
    assert found.std() == pytest.approx(jitter, rel=0.25 if distribution == "pareto" else 0.05)


def test_no_packet_arrives_before_it_has_left() -> None:
    fate = decide(link(jitter=0.02), steady(100_000, 1e-3))
    assert (fate["delivered"] >= np.rint((steady(100_000, 1e-3) + SLOT) * 1e9) - 1).all()


# -- the other faults --------------------------------------------------------------------------------------


def test_reordered_packets_overtake() -> None:
    count, share = 1_000_000, 0.01
    fate = decide(link(reorder=share, reorder_by=0.001), steady(count))
    early = fate["overtook"] == 1
    assert within_binomial(int(early.sum()), count, share)
    late = 0.02 + steady(count) + SLOT - fate["delivered"] / 1e9
    assert late[early] == pytest.approx(0.001, abs=1e-8)
    assert late[~early] == pytest.approx(0, abs=1e-8)


def test_a_packet_that_has_none_to_overtake_keeps_its_time() -> None:
    fate = decide(link(reorder=1.0, reorder_by=0.001), steady(1000, 0.002))
    assert not fate["overtook"].any()
    assert fate["delivered"] / 1e9 == pytest.approx(steady(1000, 0.002) + SLOT + 0.02, abs=1e-8)


@pytest.mark.parametrize("fault", ["duplicate", "corrupt"])
def test_duplicates_and_damage_are_as_many_as_asked(fault: str) -> None:
    count, share = 1_000_000, 0.002
    fate = decide(link(**{fault: share}), steady(count))
    happened = {"duplicate": fate["copies"] == 2, "corrupt": fate["corrupted"] == 1}
    assert within_binomial(int(happened.pop(fault).sum()), count, share)
    assert not next(iter(happened.values())).any()


def test_faults_do_not_depend_on_each_other() -> None:
    """Each has random numbers of its own: another loss leaves the duplicates where they were."""
    both = decide(link(duplicate=0.01, loss=0.2), steady(50_000))
    alone = decide(link(duplicate=0.01), steady(50_000))
    assert (both["copies"] == alone["copies"]).all()
    assert (both["verdict"] == 2).any()


# -- the queue and the rate --------------------------------------------------------------------------------


def verdicts(made: LabLink, packets: Sequence[tuple[float, int]]) -> list[str]:
    return [fate.lost_by for fate in fates(made, 1, 0, packets)]


def test_the_queue_is_full_at_the_byte() -> None:
    burst = [(0.0, 1000)] * 10
    assert verdicts(link(queue=10_000), [*burst, (0.0, 1)]) == [""] * 10 + ["queue"]
    assert verdicts(link(queue=9_999), burst) == [""] * 9 + ["queue"]
    assert verdicts(link(queue=9_999), [*burst[:9], (0.0, 999), (0.0, 1)]) == [""] * 10 + ["queue"]


@pytest.mark.parametrize("rate", [125e6, 1.25e5, 333_333.0, 7e6 / 3])
def test_the_queue_empties_at_the_rate(rate: float) -> None:
    """A thousand packets fill it; then a packet fits when as many bytes have left, to the byte."""
    many = [(0.0, 1000)] * 1000
    for size in (1, 1000, 60_000):
        too_soon, in_time = ((size + part) / round(rate) for part in (-0.7, -0.3))
        made = link(rate=rate, queue=1_000_000)
        assert verdicts(made, [*many, (too_soon, size)])[-1] == "queue", size
        assert verdicts(made, [*many, (in_time, size)])[-1] == "", size


def test_packets_leave_at_the_rate() -> None:
    fate = decide(link(rate=1.25e6, queue=10**8), np.zeros(10_000))
    assert fate["delivered"] / 1e9 - 0.02 == pytest.approx((np.arange(10_000) + 1) * 0.0012, abs=2e-9)


def test_what_waits_goes_on_at_the_new_rate() -> None:
    """1000 bytes/s for 2 s, then 4000 bytes/s: half of the second packet goes faster."""
    slow = replace(CLEAN, rate=1000.0, delay=0.0, queue=10_000)
    phases = [slow, replace(slow, at=2.0, rate=4000.0)]
    packets = [(0.0, 1000), (0.25, 2000), (1.0, 1000)]
    fate = fates(link(*phases), 1, 0, [*packets, (2.5, 1000)])
    assert [one.delivered for one in fate] == pytest.approx([1.0, 2.25, 2.5, 2.75], abs=1e-8)
    # At 1 s, 2000 bytes wait; at 2.25 s it is 1000, and the queue is another one.
    tight = [replace(phase, queue=size) for phase, size in zip(phases, (3000, 1500), strict=True)]
    assert verdicts(link(*tight), [*packets, (1.0, 1), (2.25, 501), (2.25, 500)]) == [
        "",
        "",
        "",
        *["queue"] * 2,
        "",
    ]


# -- changes over time -------------------------------------------------------------------------------------


def test_an_outage_takes_what_leaves_within_it() -> None:
    down = [CLEAN, replace(CLEAN, at=1.0, down=True), replace(CLEAN, at=3.0)]
    edge = 1.0 - SLOT  # a packet that comes then has left when the outage begins
    packets = [
        (0.5, MTU),
        (edge - 1e-7, MTU),
        (edge + 2e-7, MTU),
        (2.0, MTU),
        (3.0 - SLOT - 1e-7, MTU),
        (3.0, MTU),
    ]
    assert verdicts(link(*down), packets) == ["", "", "outage", "outage", "outage", ""]


def test_delay_and_loss_change_when_they_should() -> None:
    made = link(CLEAN, replace(CLEAN, at=1.0, delay=0.1, duplicate=1.0), replace(CLEAN, at=2.0, delay=0.01))
    fate = fates(made, 1, 0, [(0.5, MTU), (1.0, MTU), (1.9999, MTU), (2.0, MTU), (3.0, MTU)])
    arrivals = [0.52, 1.1, 2.0999, 2.0999, 3.01]  # the fourth waits for the third, whose delay was longer
    assert [one.delivered for one in fate] == pytest.approx([at + SLOT for at in arrivals], abs=1e-8)
    assert [one.copies for one in fate] == [1, 2, 2, 1, 1]


# -- seeds -------------------------------------------------------------------------------------------------

BAD = {
    "jitter": 0.002, "distribution": "pareto", "loss": 0.03, "burst": 8.0, "reorder": 0.01, "duplicate": 0.01,
    "corrupt": 0.01, "queue": 30_000,
}  # fmt: skip


def recorded() -> Floats:
    """Arrivals with bursts, gaps and pauses."""
    generator = np.random.default_rng(7)
    gaps = np.rint(generator.exponential(20e-6, 50_000) * 1e9) / 1e9
    gaps[::1000] += 0.01
    return np.cumsum(gaps)


def test_a_seed_decides_everything() -> None:
    times = recorded()
    first, again = (decide(link(**BAD), times, seed=5, index=3) for _ in range(2))
    assert (first == again).all()
    for seed, index in ((6, 3), (5, 4)):
        other = decide(link(**BAD), times, seed=seed, index=index)
        for field in ("verdict", "delivered", "copies", "corrupted", "overtook"):
            assert (first[field] != other[field]).any(), field


def test_the_fates_are_the_same_on_every_machine() -> None:
    """What one machine made. Another digest means other fates for the same seed: say so in the changelog."""
    times = np.array([i * 37e-6 + (i // 100) * 5e-3 for i in range(20_000)])
    digest = hashlib.sha256()
    whole = decide(link(**BAD), times, seed=2**63 - 1, index=2)
    for field in whole.dtype.names or ():
        digest.update(whole[field].astype("<i8").tobytes())
    assert digest.hexdigest() == "8968f8d186d1666a3a05389c4a0a8a59309546d0788fc4935df04a9e7e82205b"


# -- what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packets", "told"),
    [
        ([(1.0, 100), (0.5, 100)], "rise"),
        ([(-1.0, 100)], "rise"),
        ([(float("nan"), 100)], "rise"),
        ([(1e9, 100)], "30 days"),
        ([(0.0, 0)], "bytes"),
        ([(0.0, 70_000)], "bytes"),
    ],
)
def test_sequences_that_cannot_be_are_refused(packets: list[tuple[float, int]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fates(link(), 1, 0, packets)


def test_no_packets_have_no_fates() -> None:
    assert fates(link(), 1, 0, []) == []


def test_too_much_on_the_way_is_refused_before_it_starts() -> None:
    sites = tuple(Site(name, i, 1, (1.0,), f"10.77.{i}.1") for i, name in enumerate(("x", "y"), start=1))
    made = Topology(1, sites, (link(), link(rate=12.5e9, delay=0.08)))
    with pytest.raises(ConfigError, match=r"2\.\d GiB of memory, and 1\.0 GiB can be had.*x -> y"):
        Emulator(made, [0, 0], memory=2**30)
    with pytest.raises(ValueError, match="1 TUN devices for 2 sites"):
        Emulator(made, [0])
