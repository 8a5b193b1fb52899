"""The rate table: each row holds where docs/ltp-rates.md says, alone, and is missed when it is left out."""

from __future__ import annotations

import itertools

import pytest

from atoll.ltp.rates import QUIET_ROUNDS, TABLE, PathLoss, decide, deviation, surely_above

FILL, TARGET = 0.03, 0.01
# What the table says, row by row: packets lost of 10,000, rounds without loss before, and what follows.
ROWS = [
    ("no loss for several round trips in a row", 0, QUIET_ROUNDS, "up"),
    ("no loss, not yet for so long", 0, QUIET_ROUNDS - 1, "held"),
    ("loss, at or below the target", 100, 0, "up"),
    ("loss above the target, up to the fill threshold", 101, 0, "held"),
    ("loss above the target, up to the fill threshold", 300, 0, "held"),
    ("loss above the fill threshold", 400, 0, "halved"),
]


def seen(lost: int, quiet: int = 0, counted: int = 10_000, target: float = TARGET) -> PathLoss:
    return PathLoss(lost=lost, counted=counted, quiet_rounds=quiet, target=target, fill_above=FILL)


def test_the_table_has_the_rows_of_the_specification_in_order():
    assert [(row.seen, row.action) for row in TABLE] == list(
        dict.fromkeys((text, action) for text, _, _, action in ROWS)
    )


@pytest.mark.parametrize(("text", "lost", "quiet", "action"), ROWS)
def test_each_row_holds_and_nothing_takes_its_place(text, lost, quiet, action):
    row = decide(seen(lost, quiet))
    assert (row.seen, row.action) == (text, action)
    assert row.reason
    with pytest.raises(LookupError, match="no row"):
        decide(seen(lost, quiet), [each for each in TABLE if each is not row])


def test_exactly_one_row_holds_for_whatever_is_seen():
    for lost, counted, quiet, target in itertools.product(
        [0, 1, 2, 3, 10, 100, 301, 1000], [1, 10, 100, 1000, 10_000], [0, 3, 4, 9], [0.0, 0.01, 0.03]
    ):
        if lost <= counted:
            what = seen(lost, quiet, counted, target)
            assert sum(row.holds(what) for row in TABLE) == 1, what


def test_nothing_counted_is_no_loss():
    assert decide(seen(0, 0, 0)).action == "held"


def test_chance_is_not_above_the_threshold():
    assert not surely_above(300, 10_000, FILL)
    assert not surely_above(365, 10_000, FILL)  # 3.8 deviations
    assert surely_above(370, 10_000, FILL)  # 4.1
    assert not surely_above(2, 3, FILL)  # two packets are no rate
    assert surely_above(3, 10, FILL)


@pytest.mark.parametrize(("text", "lost", "quiet", "action"), ROWS[2:])
def test_the_path_s_own_loss_does_not_count(text, lost, quiet, action):
    """The same rows hold for the loss beyond it."""
    own = 0.1
    what = PathLoss(lost + 1000 + 100 * (action == "halved"), 10_000, quiet, TARGET, FILL, own)
    assert (decide(what).seen, decide(what).action) == (text, action)


def test_bursts_make_chance_greater():
    assert surely_above(370, 10_000, FILL)
    assert not surely_above(370, 10_000, FILL, burst=8.0)
    assert not surely_above(550, 10_000, FILL, burst=8.0)
    assert surely_above(600, 10_000, FILL, burst=8.0)
    assert deviation(0.1, 1000, 1.0) == pytest.approx(0.0095, rel=0.01), "the binomial's"
    assert deviation(0.1, 1000, 8.0) == pytest.approx(0.0095 * 13.4**0.5, rel=0.01)


def test_a_target_at_the_fill_threshold_leaves_no_room_for_held():
    assert decide(seen(300, target=FILL)).action == "up"
    assert decide(seen(320, target=FILL)).action == "held"
    assert decide(seen(400, target=FILL)).action == "halved"
