"""A worker's end of its links: where others measure theirs to it, and what it measures itself."""

from __future__ import annotations

import time

from atoll.train.sync.links import LinkEnd
from atoll.wire.messages import LinkMeasured, LinkPlace, MeasureLink

DEADLINE = 20.0


def word_of(end: LinkEnd) -> LinkMeasured:
    until = time.monotonic() + DEADLINE
    while not (words := end.measured(7)):
        assert time.monotonic() < until, "waited for what was measured"
        time.sleep(0.01)
    (word,) = words
    assert word.incarnation == 7
    return word


def ask(place: LinkPlace, seconds: float) -> MeasureLink:
    return MeasureLink(worker=3, host=place.host, port=place.port, token=place.token, seconds=seconds)


def test_it_is_there_while_it_is_wanted_and_measures_when_asked() -> None:
    one, other = LinkEnd("127.0.0.1"), LinkEnd("127.0.0.1")
    assert other.place(5) is None
    assert other.want(True)
    assert not other.want(True)  # nothing new
    place = other.place(5)
    assert place is not None
    assert (place.incarnation, place.host) == (5, "127.0.0.1")
    one.measure(ask(place, 2.0))
    word = word_of(one)
    assert (word.worker, word.reason) == (3, "")
    assert word.bandwidth > 1e6
    assert 0 < word.latency < 1
    assert not other.want(False)
    assert other.place(5) is None
    one.measure(ask(place, 2.0))
    assert "worker 3 at 127.0.0.1:" in word_of(one).reason
    assert other.want(True)
    other.close()
    other.close()


def test_who_cannot_listen_has_no_place() -> None:
    end = LinkEnd("203.0.113.7")  # of nobody's, and so not of this machine
    assert not end.want(True)
    assert end.place(1) is None
    assert not end.want(True)


def test_one_link_at_a_time() -> None:
    one, other = LinkEnd("127.0.0.1"), LinkEnd("127.0.0.1")
    other.want(True)
    place = other.place(5)
    assert place is not None
    one.measure(ask(place, 1.0))
    one.measure(ask(place, 1.0))  # the hub has given the first one up, or asks twice
    assert one._measuring is not None
    one._measuring.join(DEADLINE)
    assert len(one.measured(7)) == 1
    other.close()
