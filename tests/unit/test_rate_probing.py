"""Probes for more: when they begin, how great they are, and what is learnt of the sender's share."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.ltp.probing import ANSWER_ROUNDS, LEAST_SHARE, MOST_PROBE, PAY_BACK, PROBE, PROBE_ROUNDS, Probing


def probing(seed: int = 1) -> Probing:
    return Probing(np.random.default_rng(seed))


def probe(probes: Probing, now: int, share: float, greatest: bool = False) -> float:
    """One at round `now`, of a sender with that share of a full path; its step."""
    step = probes.begin(now, 100.0, greatest) - 1.0
    probes.end_round(now + 1, 100.0, False)
    assert probes.asked, "its packets have not come yet"
    probes.end_round(now + ANSWER_ROUNDS, 100.0 * (1 + step * (1 - share)), False)
    assert not probes.asked
    return step


def test_a_sender_alone_probes_a_little_pays_back_and_waits():
    probes = probing()
    assert not probes.may_begin(PROBE_ROUNDS - 1)
    assert probes.may_begin(PROBE_ROUNDS)
    for now in (100, 200, 300):
        assert probe(probes, now, 1.0) == pytest.approx(PROBE)
        assert probes.pay_back == PROBE_ROUNDS
        assert probes.gain_to_pay_back == pytest.approx(1 - PAY_BACK)
        assert not probes.may_begin(now + PROBE_ROUNDS - 1)
        assert probes.may_begin(now + 2 * PROBE_ROUNDS)


def test_what_grows_is_followed_at_once_by_the_greatest_step_and_stays_up_meanwhile():
    probes = probing()
    probe(probes, 100, 0.0)
    assert probes.may_begin(100 + ANSWER_ROUNDS)
    assert probes.pay_back == 0
    assert probe(probes, 102, 0.0) == pytest.approx(MOST_PROBE)
    probes.begin(104, 100.0, False)
    assert probes.gain_meanwhile == pytest.approx(1 + MOST_PROBE)
    probes.stop()
    assert (probes.asked, probes.gain_meanwhile) == (False, 1.0)


@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
def test_a_small_share_takes_greater_steps_that_leave_the_same_queue_and_pays_back_less(share):
    probes = probing()
    for now in range(100, 500, 20):
        step = probe(probes, now, share)
        probes.stop()
    assert probes.share == pytest.approx(share, abs=0.02)
    assert step == pytest.approx(min(MOST_PROBE, PROBE / share), rel=0.05)
    assert 1 - probes.gain_to_pay_back == pytest.approx(PAY_BACK * share, rel=0.1)


def test_the_share_is_bounded_whatever_is_measured():
    probes = probing()
    for now, share in enumerate([-5.0, -5.0, -5.0, -5.0, 9.0, 9.0, -5.0], start=10):
        assert 0 < probe(probes, 10 * now, share) <= MOST_PROBE
        assert LEAST_SHARE <= probes.share <= 1.0
        probes.stop()


def test_beside_another_s_queue_the_step_is_the_greatest():
    assert probe(probing(), 100, 1.0, greatest=True) == pytest.approx(MOST_PROBE)


def test_flows_that_probed_together_do_not_again():
    waits = set()
    for seed in range(20):
        probes = probing(seed)
        probe(probes, 100, 1.0)
        waits.add(next(now for now in range(100, 200) if probes.may_begin(now)) - 100)
    assert len(waits) >= 5
    assert min(waits) >= PROBE_ROUNDS
    assert max(waits) <= 2 * PROBE_ROUNDS


def test_what_the_application_limited_is_not_judged():
    probes = probing()
    probes.begin(100, 100.0, False)
    probes.end_round(102, 10.0, True)
    assert (probes.asked, probes.share, probes.pay_back) == (False, 1.0, 0)
