"""What a worker reports of the samples of all workers."""

from __future__ import annotations

from atoll.train.api.counting import SampleReport


class State:
    """The part of a session's state that a load changes."""

    def __init__(self, loaded: float = 0.0, counted_from: float = 0.0) -> None:
        self.loaded, self.counted_from = loaded, counted_from


def fields(
    loaded: float,
    begin: float,
    end: float,
    *,
    whole_at: float = 0.0,
    partial: bool = False,
    ends: bool = False,
) -> object:
    return {
        "loaded": loaded,
        "begin": begin,
        "end": end,
        "whole_at": whole_at,
        "partial": partial,
        "ends": ends,
    }


def test_each_report_goes_on_where_the_one_before_ended() -> None:
    report = SampleReport(State())
    assert report.news() is None
    for count in (24.0, 48.0):
        report.know(count)
    assert report.news() == fields(0.0, 0.0, 48.0)
    assert report.news() is None
    report.know(72.0)
    assert report.news() == fields(0.0, 48.0, 72.0)
    assert report.news(whole_at=3.0) == fields(0.0, 72.0, 72.0, whole_at=3.0)
    assert report.news(ends=True) == fields(0.0, 72.0, 72.0, ends=True)


def test_a_count_that_goes_back_without_a_load_is_reported_once() -> None:
    """A worker takes the state of a group's first member, which knows less."""
    report = SampleReport(State())
    report.know(48.0)
    assert report.news() == fields(0.0, 0.0, 48.0)
    report.know(40.0)
    assert report.news() is None
    report.know(64.0)
    assert report.news() == fields(0.0, 48.0, 64.0)


def test_a_load_begins_at_the_checkpoint_s_count() -> None:
    state = State()
    report = SampleReport(state)
    report.know(48.0)
    assert report.news() == fields(0.0, 0.0, 48.0)
    state.loaded, state.counted_from = 7.5, 24.0
    assert report.news() is None
    report.know(36.0)
    assert report.news() == fields(7.5, 24.0, 36.0)


def test_a_worker_that_enters_begins_at_the_count_that_it_was_given() -> None:
    report = SampleReport(State(loaded=7.5, counted_from=240.0))
    report.know(264.0)
    assert report.news() == fields(7.5, 240.0, 264.0)


def test_a_count_that_is_not_known_is_not_whole() -> None:
    report = SampleReport(State())
    report.know(None)
    assert report.news(whole_at=3.0) == fields(0.0, 0.0, 0.0, partial=True)
    assert report.news() is None
    assert report.news(ends=True) == fields(0.0, 0.0, 0.0, partial=True, ends=True)


def test_a_count_that_a_further_model_hides_is_partial_until_a_load() -> None:
    state = State()
    report = SampleReport(state)
    report.know(48.0)
    assert report.news() == fields(0.0, 0.0, 48.0)
    report.know(None)
    assert report.news() == fields(0.0, 48.0, 48.0, partial=True)
    report.know(None)
    assert report.news() is None
    state.loaded, state.counted_from = 7.5, 24.0
    report.know(None)
    assert report.news() == fields(7.5, 24.0, 24.0, partial=True)


def test_a_worker_that_has_reported_before_it_enters_begins_at_its_entry() -> None:
    """The shards' count may be that of a run with a load before."""
    state = State()
    report = SampleReport(state)
    assert report.news() is None
    state.counted_from = 72.0
    report.know(96.0)
    assert report.news() == fields(0.0, 72.0, 96.0)


def test_a_worker_that_moves_to_another_group_goes_on_with_its_own_reports() -> None:
    state = State()
    report = SampleReport(state)
    report.know(48.0)
    assert report.news() == fields(0.0, 0.0, 48.0)
    state.counted_from = 60.0
    report.know(72.0)
    assert report.news() == fields(0.0, 48.0, 72.0)
