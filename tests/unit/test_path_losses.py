"""What a path loses: of late, at any rate, in which bursts, and whether half of the rate lessens it."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.ltp.losses import (
    BASE_PACKETS,
    LOSS_ROUNDS,
    MOST_BASE,
    SURE_SPANS,
    TRIAL_PACKETS,
    Losses,
)


def test_loss_is_that_of_the_last_rounds_and_of_the_one_that_runs():
    losses = Losses()
    losses.take(90, 10)
    assert losses.share == 0.1
    losses.end_round()
    for _ in range(LOSS_ROUNDS - 1):
        losses.take(100, 0)
        losses.end_round()
    assert losses.share == pytest.approx(10 / 400)
    assert losses.quiet_rounds == LOSS_ROUNDS - 1
    losses.take(100, 0)
    losses.end_round()
    assert losses.share == 0.0
    losses.take(99, 1)
    assert losses.quiet_rounds == 0


def test_the_path_s_own_loss_is_the_least_of_several_spans():
    losses = Losses()
    for lost in (30, 20, 50, 400, 25, 40, 60, 22, 23):
        losses.take(BASE_PACKETS - lost, lost)
        losses.end_round()
    # The least span is below the mean by chance, so that the base is two of its deviations above.
    assert losses.base == pytest.approx(0.020 + 2 * (0.02 * 0.98 / BASE_PACKETS) ** 0.5)
    assert losses.own == 0.0, "nothing has shown that it is the path's"
    losses = Losses()
    for _ in range(20):
        losses.take(BASE_PACKETS // 2, BASE_PACKETS // 2)
        losses.end_round()
    assert losses.base == MOST_BASE


@pytest.mark.parametrize("burst", [1.0, 8.0])
def test_the_base_of_a_path_is_its_loss_though_it_is_the_least_of_many(burst):
    """10 % in bursts of 8 differ by 3.7 % from a thousand packets to the next: the least of 32 is a third."""
    random, losses = np.random.default_rng(5), Losses()
    for _ in range(40):
        lost, runs = lose(random, BASE_PACKETS, 0.1, burst)
        losses.take(BASE_PACKETS - lost, lost, runs)
        losses.end_round()
    assert losses.burst == pytest.approx(burst, rel=0.15)
    assert losses.base == pytest.approx(0.1, abs=0.02)


def lose(random: np.random.Generator, packets: int, share: float, burst: float) -> tuple[int, int]:
    """Packets lost, and in how many runs: of a chain that has forgotten where it was."""
    runs = int(random.binomial(int(packets / burst), share))
    return (runs, runs) if burst == 1.0 else (int(random.geometric(1 / burst, runs).sum()), runs)


def test_bursts_beside_a_queue_are_its_overflow_and_not_the_path_s():
    losses = Losses()
    losses.take(900, 100, 5)
    losses.end_round(free=False)
    assert losses.burst == 1.0
    losses.take(900, 100, 20)
    losses.end_round()
    assert losses.burst == 5.0


def halved(before: float = 0.1) -> Losses:
    losses = Losses()
    losses.take(10_000 - round(10_000 * before), round(10_000 * before))
    losses.begin_trial()
    losses.forget()
    return losses


def rounds_until(losses: Losses, share: float, packets: int = 500) -> tuple[str, int]:
    for rounds in range(1, 100):
        verdict = losses.try_round(packets - round(packets * share), round(packets * share), 0.03)
        if verdict:
            return verdict, rounds * packets
    return "", 0


def test_what_half_of_the_rate_does_not_lessen_is_the_path_s_own():
    losses = halved()
    assert rounds_until(losses, 0.1) == ("own", 500)
    assert losses.own == losses.base == pytest.approx(0.1)
    seen = losses.seen(target=0.01, fill_above=0.03)
    assert seen.own == losses.own
    assert losses.try_round(450, 50, 0.03) == "", "it is told once"


@pytest.mark.parametrize(("before", "after"), [(0.1, 0.0), (0.1, 0.06), (0.5, 0.25), (0.3, 0.29)])
def test_what_it_lessens_or_is_too_much_is_not(before, after):
    losses = halved(before)
    verdict, packets = rounds_until(losses, after)
    assert verdict == "lessened"
    assert packets <= TRIAL_PACKETS
    assert losses.own == 0.0


def test_a_loss_too_small_to_be_told_from_chance_is_tried_for_longer():
    assert rounds_until(halved(0.04), 0.04) == ("own", TRIAL_PACKETS)


def test_no_trial_no_verdict():
    losses = halved()
    losses.stop_trial()
    assert rounds_until(losses, 0.1) == ("", 0)
    assert Losses().try_round(0, 0, 0.03) == ""


def test_the_own_loss_sinks_with_the_path_s_and_rises_only_by_another_trial():
    losses = halved()
    rounds_until(losses, 0.1)
    for _ in range(3 * SURE_SPANS):
        losses.take(860, 140)
        losses.end_round()
    assert losses.own == pytest.approx(0.1)
    losses.take(BASE_PACKETS, 0)
    losses.end_round()
    assert losses.own == 0.0


def test_a_round_loses_beyond_what_is_the_path_s_own():
    losses = Losses()
    assert losses.beyond_own(1, 1000)
    assert not losses.beyond_own(0, 1000)
    losses = halved()
    rounds_until(losses, 0.1)
    assert not losses.beyond_own(110, 1000)
    assert losses.beyond_own(200, 1000)
