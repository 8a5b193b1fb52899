"""Lines of the log that do not come to a shard: it asks for them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from shard_cluster import Peer, Run

from atoll.server.followers import sequence_of
from atoll.server.journal import Folder, Journal
from atoll.server.shard import Shard
from atoll.wire import messages as m

pytestmark = pytest.mark.quick


def test_a_shard_that_comes_anew_gets_no_line_before_it_says_where_it_follows(
    start: Callable[..., Run],
) -> None:
    run = start(1, 1)
    hello = msgspec.structs.replace(run.workers[0].hello(), role="shard", worker=-1, incarnation=0, shard=1)
    first = sequence_of(1, 0)
    for life in range(2):  # the second takes the place of the first, which followed
        follower = Peer(run.cluster.addresses)
        run.peers.append(follower)
        follower.send(0, hello)
        follower.expect(0, m.Welcome)
        run.iterate(2 * life)
        run.iterate(2 * life + 1)
        follower.heard(0)
        assert not follower.come[0][m.Entry]
        follower.send(0, m.Follow(shard=1, after=first))
        # A Joined, and a Combine and a Step of each iteration.
        wanted = range(first, first + 1 + 4 * (life + 1))
        assert [follower.expect(0, m.Entry)[0].sequence for _ in wanted] == list(wanted)


@pytest.mark.parametrize("journal", [False, True])
def test_a_shard_asks_again_for_lines_that_did_not_come(
    start: Callable[..., Run], journal: bool, tmp_path: Path
) -> None:
    lost: list[int] = []

    def lose_some(shard: Shard) -> None:
        log = shard._log
        if log is None:
            return
        send_line = log.followers._send_line

        def send_some(to: int, index: int, entry: Any) -> None:
            if index == 1 and not lost:  # a Joined, which others come after
                lost.append(index)
            else:
                send_line(to, index, entry)

        log.followers._send_line = send_some  # type: ignore[method-assign]

    journals = [Journal(Folder(tmp_path / str(i), "test", i), 0) for i in range(2)] if journal else [None] * 2
    for each in journals:
        if each is not None:
            each.begin_segment(fresh=True)
    run = start(2, 3, prepare=lose_some, journal=journals.__getitem__)
    for iteration in range(4):
        run.iterate(iteration)
    assert lost == [1]
