"""What a measured link comes to: compared clocks, figures, words, and which transport to take."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.net.linkoptions import LinkTestOptions
from atoll.net.linkreport import (
    Clocks,
    LinkReport,
    Packets,
    TransportResult,
    Turn,
    advise,
    nearest_rank,
    window_note,
)

SIZE = 20_000_000


def outcome(name: str, *seconds: float, size: int = SIZE) -> TransportResult:
    return TransportResult(name, "", size, [Turn(each, size) for each in seconds])


# -- clocks


@given(
    ahead=st.floats(-1e6, 1e6),
    ways=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20),
)
def test_the_clocks_differ_by_no_more_than_the_shortest_ways_do(
    ahead: float, ways: list[tuple[float, float]]
) -> None:
    clocks, now = Clocks(), 0.0
    for there, back in ways:
        clocks.add(now, now + there + ahead, now + there + back)
        now += 2.0
    assert clocks.round_trip == pytest.approx(min(there + back for there, back in ways), abs=1e-9)
    assert abs(clocks.ahead - ahead) <= clocks.round_trip / 2 + 1e-6


def test_a_reading_of_more_than_a_minute_ago_counts_no_more() -> None:
    clocks = Clocks()
    clocks.add(0.0, 5.0, 0.001)
    clocks.add(70.0, 75.2, 70.1)  # the other clock has drifted, or jumped
    assert clocks.ahead == pytest.approx(5.15)
    assert clocks.round_trip == pytest.approx(0.1)


# -- figures


def test_the_99th_percentile_of_twenty_is_the_worst() -> None:
    assert nearest_rank([float(each) for each in range(20, 0, -1)], 0.99) == 20.0
    assert nearest_rank([float(each) for each in range(200)], 0.99) == 197.0
    assert nearest_rank([3.0], 0.5) == 3.0


def test_what_was_lost_is_borne_or_filled_and_never_both() -> None:
    measured = outcome("ltp")
    measured.turns += [
        Turn(0.2, 990, "enough", 20, 20, 80, 79, "borne", 3),
        Turn(0.3, 900, "deadline", 20, 20, 80, 70, "zero", 1),
        Turn(0.1, 1000, "complete", 20, 20, 80, 80, "none"),
    ]
    measured.packets = Packets(sent=400, lost=20, again=5)
    made = measured.to_json()
    assert (made["borne"], made["filled"], made["blocks"]) == (1, 10, 300)
    assert (made["short"], made["highs_missing"]) == (1, 0)  # 70 of 80 are less than 97 %
    assert (made["median"], made["p99"], made["worst"]) == (0.2, 0.3, 0.3)
    assert made["goodput"] == pytest.approx(8 * 2890 / 0.6)  # what was not there is no goodput
    assert (made["loss"], made["repaired"], made["again"]) == (0.05, 4, 5)


def test_packets_of_the_warm_up_do_not_count() -> None:
    assert Packets(100, 9, 8).since(Packets(90, 8, 8)) == Packets(10, 1, 0)


def test_a_report_is_one_json_document_and_a_table_of_words() -> None:
    report = LinkReport("tcp://h:1", SIZE, 0.2, 0.0402, [outcome("ltp", 0.21), outcome("tcp", 0.5, 13.0)])
    report.outcomes[1].stopped = "2 of 20 transfers: they took more than 10 s (--budget)"
    report.outcomes.append(TransportResult("tcp:cubic", "cubic", SIZE, stopped="a transfer was not usable"))
    made = json.loads(json.dumps(report.to_json()))
    assert (made["take"], made["bytes"], made["round_trip"]) == ("ltp", SIZE, 0.0402)
    assert [each["transfers"] for each in made["transports"]] == [1, 2, 0]
    assert made["transports"][2]["median"] is None
    lines = report.lines()
    assert lines[0] == "tcp://h:1: round trip 40.2 ms; transfers of 20 MB; until usable:"
    assert lines[2].split()[:3] == ["ltp", "210.0", "ms"]
    assert "tcp: 2 of 20 transfers: they took more than 10 s (--budget)" in lines
    report.outcomes[0].turns[0] = Turn(0.21, SIZE, "deadline", 1, 1, 100, 96, "zero")
    assert any(
        line.startswith("ltp: 1 of 1 transfers were handed on with less than 97%") for line in report.lines()
    )
    assert lines[-1].startswith("take ltp: a transfer is usable 32.1x sooner")


# -- the advice


@pytest.mark.parametrize(
    ("ltp", "tcp", "take", "words"),
    [
        ([0.2, 0.2, 0.2], [0.4, 0.4, 0.4], "ltp", "2.0x sooner than with tcp"),
        ([0.2, 0.2, 0.2], [0.2, 0.2, 0.8], "ltp", "4.0x sooner at the 99th percentile"),
        ([0.2, 0.2, 0.2], [0.21, 0.21, 0.21], "tcp", "about as fast as ltp, and every byte arrives"),
        ([0.2, 0.2, 0.2], [0.1, 0.1, 0.9], "tcp", "2.0x sooner than ltp, and every byte arrives"),
    ],
)
def test_the_advice(ltp: list[float], tcp: list[float], take: str, words: str) -> None:
    chosen, reason = advise([outcome("ltp", *ltp), outcome("tcp", *tcp)])
    assert chosen == take
    assert words in reason


def test_the_advice_compares_the_best_of_each_kind() -> None:
    chosen, reason = advise([outcome("tcp:cubic", 9.0), outcome("ltp", 0.22), outcome("tcp:bbr", 0.21)])
    assert (chosen, reason) == ("tcp:bbr", "about as fast as ltp, and every byte arrives")


def test_the_advice_says_who_ties() -> None:
    equal = [outcome("tcp:bbr", 0.2, 0.3), outcome("tcp:cubic", 0.21, 0.31), outcome("tcp:reno", 0.2, 0.5)]
    assert advise(equal) == ("tcp:bbr", "the shortest median; tcp:cubic is about as fast")
    assert advise([*equal, outcome("ltp", 0.4)])[1].endswith("; tcp:cubic is about as fast")
    equal[2] = outcome("tcp:reno", 0.2, 0.3)
    assert advise(equal)[1] == "the shortest median; tcp:cubic and tcp:reno are about as fast"


@pytest.mark.parametrize(
    ("ltp", "reliable", "take", "words"),
    [
        (0.2, 0.21, "ltp", "; ltp:reliable is about as fast, and by it every byte arrives"),
        (0.2, 0.3, "ltp", "; ltp:reliable, by which every byte arrives, takes 1.5x as long"),
        (0.3, 0.2, "ltp:reliable", "; every byte arrives"),
    ],
)
def test_the_advice_has_a_word_on_full_reliability(
    ltp: float, reliable: float, take: str, words: str
) -> None:
    chosen, reason = advise([outcome("ltp", ltp), outcome("ltp:reliable", reliable), outcome("tcp", 9.0)])
    assert chosen == take
    assert reason.endswith(words)


@pytest.mark.parametrize(
    ("size", "shown"), [(4, "4 B"), (2500, "2.5 kB"), (10**5, "0.1 MB"), (SIZE, "20 MB")]
)
def test_small_transfers_are_small_in_words(size: int, shown: str) -> None:
    report = LinkReport("tcp://h:1", size, 0.2, 0.0402, [outcome("ltp", 0.21)])
    assert f"; transfers of {shown}; until usable:" in report.lines()[0]


def test_the_advice_names_transfers_that_were_handed_on_with_too_little() -> None:
    short = Turn(1.0, SIZE, lows=100, lows_there=96)
    whole = Turn(1.0, SIZE, lows=100, lows_there=97)
    for tcp in ([outcome("tcp", 2.0, 2.0)], [outcome("tcp", 1.0, 2.0)], []):
        for turns, words in (([short, whole], "; but 1 of its 2 transfers"), ([whole, whole], "")):
            other = TransportResult("ltp:reliable", "", SIZE, [Turn(3.0, SIZE)])
            take, reason = advise([TransportResult("ltp", "", SIZE, turns), other, *tcp])
            assert take == "ltp"
            assert ("; but" in reason, words in reason) == (bool(words), True)


def test_without_two_there_is_nothing_to_advise() -> None:
    assert advise([]) == ("", "nothing was measured")
    assert advise([outcome("tcp", 1.0), outcome("ltp")])[0] == ""
    assert advise([outcome("tcp:bbr", 1.0), outcome("tcp:cubic", 2.0)]) == ("tcp:bbr", "the shortest median")


def test_a_word_where_the_kernel_s_buffers_hold_tcp_back() -> None:
    fast, slow = outcome("tcp", 0.32), outcome("tcp", 13.0)  # 62.5 MB/s; a buffer of 4 MiB and 40 ms: 52
    assert "net.ipv4.tcp_wmem" in window_note(2**22, 0.04, [fast])
    assert "419.4 Mbit/s" in window_note(2**22, 0.04, [fast])
    assert window_note(2**22, 0.04, [slow]) == ""  # the link was it
    assert window_note(2**26, 0.04, [fast]) == ""
    assert window_note(None, 0.04, [fast]) == ""
    assert window_note(2**22, 0.04, [outcome("ltp", 0.32)]) == ""


# -- what can be asked for


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"high": 1.5}, "--high 1.5: a share is between 0 and 1"),
        ({"high": -0.1}, "--high -0.1: a share"),
        ({"high": float("nan")}, "--high nan: a share"),
        ({"size": 0}, "--bytes 0: from 1 to"),
        ({"size": 2**31}, "--bytes 2147483648: from 1 to 1073741824"),
        ({"count": 0}, "--count 0: from 1"),
        ({"warm": -1}, "--warm -1: from 0"),
        ({"timeout": 0.0}, "--timeout 0: must be more than 0 seconds"),
        ({"deadline": 0.0}, "--deadline 0"),
        ({"budget": 0.0}, "--budget 0"),
        ({"transports": ["quic"]}, "--transport quic: no such transport; there are ltp"),
        ({"transports": ["tcp:"]}, "--transport tcp:: no such transport"),
        ({"transports": ["tcp", "tcp"]}, "--transport tcp,tcp: name each transport once"),
        ({"transports": []}, "name each transport once"),
    ],
)
def test_what_cannot_be_asked_for(wrong: dict[str, object], line: str) -> None:
    with pytest.raises(UserError) as caught:
        LinkTestOptions(**wrong)  # type: ignore[arg-type]
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
