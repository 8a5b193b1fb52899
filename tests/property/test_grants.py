"""A link's shares: alike among sites, max-min by weights within one, and never more in force than the link,
whatever comes when."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atoll.core.errors import UserError
from atoll.ltp.grants import (
    ASK_SECONDS,
    EXPECTED_SECONDS,
    GRANT_SECONDS,
    MOST_SENDERS,
    RENEWED,
    RESERVE,
    Grants,
    max_min,
)

LINK = 125e6
rates = st.one_of(st.just(math.inf), st.floats(1e3, 1e9))
weights = st.floats(0.1, 10)
SITES = ("paris", "paris", "paris", "paris", "paris", "oslo", "oslo", "rome", "rome")  # of sessions 0 to 8


@given(st.dictionaries(st.integers(0, 50), st.tuples(rates, weights), min_size=1, max_size=20))
def test_shares_are_max_min_by_weight(asks):
    wanted = {key: want for key, (want, _) in asks.items()}
    weight = {key: each for key, (_, each) in asks.items()}
    shares = max_min(LINK, wanted, weight)
    assert sum(shares.values()) <= LINK * (1 + 1e-9)
    assert sum(shares.values()) == pytest.approx(min(LINK, sum(wanted.values())))
    # Who gets less than wanted gets as much per weight as anyone: nobody could get more without one who has
    # no more getting less.
    most = max(shares[key] / weight[key] for key in asks)
    for key in asks:
        assert shares[key] <= wanted[key] * (1 + 1e-9)
        if shares[key] < wanted[key] * (1 - 1e-9):
            assert shares[key] / weight[key] == pytest.approx(most)


class Link(RuleBasedStateMachine):
    """Senders that hear only some of their grants, and send by the greatest that they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.grants = Grants(LINK)
        self.held: list[tuple[float, int, float]] = []  # (until, session, rate)
        self.asked: dict[int, float] = {}  # session: until

    @rule(session=st.integers(0, 8), weight=weights, wanted=rates)
    def ask(self, session, weight, wanted):
        assert self.grants.handle_ask(self.now, session, weight, wanted, SITES[session])
        self.asked[session] = self.now + ASK_SECONDS

    @rule(session=st.integers(0, 8))
    def done(self, session):
        self.grants.handle_done(self.now, session)
        self.asked.pop(session, None)

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.04, 0.1, 0.3, 1.2]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def poll(self):
        self.held += [(self.now + g.seconds, g.session, g.rate) for g in self.grants.poll_grants(self.now)]

    @precondition(lambda self: any(until > self.now for until in self.asked.values()))
    @rule()
    def settle(self):
        """With nobody new, every site has the same after three lives of a grant, however many send there."""
        now_asking = [session for session, until in self.asked.items() if until > self.now]
        for session in now_asking:
            self.grants.handle_ask(self.now, session, site=SITES[session])
            self.asked[session] = self.now + ASK_SECONDS
        last: dict[int, float] = {}
        for _ in range(60):
            self.now += GRANT_SECONDS / 20
            for grant in self.grants.poll_grants(self.now):
                last[grant.session] = grant.rate
                self.held.append((self.now + grant.seconds, grant.session, grant.rate))
            self.never_above_the_link()
        sites = [SITES[session] for session in now_asking]
        for session in now_asking:
            fair = (1 - RESERVE) * LINK / len(set(sites)) / sites.count(SITES[session])
            assert last[session] == pytest.approx(fair, rel=0.06)

    @invariant()
    def never_above_the_link(self):
        self.held = [each for each in self.held if each[0] > self.now]
        most: dict[int, float] = {}
        for _, session, rate in self.held:
            most[session] = max(most.get(session, 0.0), rate)
        assert sum(most.values()) <= LINK * (1 + 1e-9)
        assert self.grants.committed(self.now) <= LINK * (1 + 1e-9)


TestLink = Link.TestCase


def test_a_lone_sender_gets_the_link_but_for_the_reserve_and_again_before_it_expires():
    grants = Grants(LINK)
    assert grants.poll_deadline() == math.inf
    assert grants.handle_ask(0.0, 7)
    (grant,) = grants.poll_grants(0.0)
    assert (grant.session, grant.rate, grant.seconds) == (7, pytest.approx(0.95 * LINK), GRANT_SECONDS)
    assert grants.poll_grants(0.01) == []
    assert grants.poll_deadline() == pytest.approx(RENEWED * GRANT_SECONDS)
    assert [each.session for each in grants.poll_grants(grants.poll_deadline())] == [7]


def test_a_newcomer_waits_on_the_reserve_until_others_grants_expire():
    grants = Grants(LINK)
    grants.handle_ask(0.0, 1)
    grants.poll_grants(0.0)
    grants.handle_ask(0.01, 2)
    first, second = sorted(grants.poll_grants(0.01), key=lambda grant: grant.session)
    assert first.rate == pytest.approx(0.475 * LINK)
    assert second.rate < 0.05 * LINK
    assert "expire" in second.reason
    (again,) = [grant for grant in grants.poll_grants(0.111) if grant.session == 2]
    assert again.rate == pytest.approx(0.475 * LINK)
    assert again.reason == "its share of the link"


def test_a_sender_that_falls_silent_gives_its_share_back():
    grants = Grants(LINK)
    grants.handle_ask(0.0, 1)
    grants.handle_ask(0.9, 2)
    grants.poll_grants(0.9)
    for tick in range(30):
        given_now = grants.poll_grants(1.0 + tick * 0.01)
    assert all(grant.session == 2 for grant in given_now)
    assert grants.committed(1.29) == pytest.approx(0.95 * LINK)
    assert grants.poll_grants(5.0) == []
    assert grants.committed(5.0) == 0.0


def test_the_table_is_bounded_by_those_gone_too():
    grants = Grants(LINK)
    for session in range(MOST_SENDERS):
        assert grants.handle_ask(0.0, session)
    assert not grants.handle_ask(0.0, MOST_SENDERS)
    assert grants.handle_ask(0.0, 5), "one that is known may ask again"
    assert len(grants.poll_grants(0.0)) == MOST_SENDERS
    for session in range(MOST_SENDERS):
        grants.handle_done(0.0, session)
    assert not grants.handle_ask(0.05, 1), "promised is promised"
    assert grants.committed(0.05) <= LINK
    assert grants.handle_ask(0.2, 1)


@pytest.mark.parametrize("link", [0.0, -1.0, math.inf, math.nan])
def test_a_link_has_a_rate(link):
    with pytest.raises(UserError, match="link_rate"):
        Grants(link)


@pytest.mark.parametrize(
    ("weight", "wanted"), [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)]
)
def test_an_ask_has_a_weight_and_a_rate(weight, wanted):
    with pytest.raises(UserError, match="session 3 asks"):
        Grants(LINK).handle_ask(0.0, 3, weight, wanted)


def test_those_who_answer_one_word_share_the_link_from_the_first_on():
    """They ask within milliseconds; what the first is given must leave the others theirs."""
    grants, now = Grants(LINK), 0.0
    for at, gap in ((0.0, 0.0), (5.0, 0.003)):
        now = at
        given: dict[int, float] = {}
        for session in range(8):
            assert grants.handle_ask(now, session)
            given |= {grant.session: grant.rate for grant in grants.poll_grants(now)}
            now += gap
        if gap:  # the second time: it is known who comes
            assert list(given.values()) == pytest.approx([(1 - RESERVE) * LINK / 8] * 8)
        for session in range(8):
            grants.handle_done(now, session)
    # One that comes alone, though others came lately, has all of it when they have had their time.
    grants.handle_ask(10.0, 3)
    (grant,) = grants.poll_grants(10.0)
    assert grant.rate == pytest.approx((1 - RESERVE) * LINK / 8)
    (grant,) = grants.poll_grants(10.0 + EXPECTED_SECONDS)
    assert grant.rate == pytest.approx((1 - RESERVE) * LINK)
    grants.handle_done(10.2, 3)
    grants.handle_ask(30.0, 3)
    (grant,) = grants.poll_grants(30.0)
    assert grant.rate == pytest.approx((1 - RESERVE) * LINK), "nobody came for long"
