"""A node's CPU side does what the decisions say, in their order."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest

from atoll.core.errors import MismatchError
from atoll.cpuside.acting import Acting
from atoll.cpuside.parts import MeetingParts
from atoll.cpuside.stage import Stage
from atoll.cpuside.telling import Telling
from atoll.net.post import Post
from atoll.peers.outputs import Meet, Send
from atoll.wire import device as d
from atoll.wire.peers import WITNESS, Key
from atoll.wire.peerviews import Life

ONE, OTHER = Key("meetings", 3, Life(0, 0)), Key("meetings", 3, Life(1, 0))
MEET = Meet(3, (ONE, OTHER), "all are here")


class Heard:
    """The other nodes, and the hub, which hear what this node says after the meeting."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def say(self, to: int, message: object) -> None:
        assert to == WITNESS
        self.said.append(message)


@pytest.mark.parametrize("what", ["session.sampler", "session.batches"])
def test_where_scripts_meet_on_different_things_the_others_still_hear_what_this_node_holds(what: str) -> None:
    """Without that they have no majority for the meeting, wait for it and do not learn why."""
    here, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    telling, meetings, heard = Telling(Post(here), 0), MeetingParts(), Heard()
    stage = Stage(d.Begin(run="a run", node=0, incarnation=0, stale_max=0, timeout=60.0))
    unused: Any = None
    acting = Acting(stage, cast(Any, heard), meetings, unused, unused, unused, unused, telling)
    meetings.keep(ONE, "session.sampler", b"mine", 0)
    meetings.keep(OTHER, what, b"its", 0)
    report = Send(WITNESS, "a report")  # type: ignore[arg-type]
    if what == "session.sampler":
        acting.do([MEET, report])
        got = Post(worker).receive()
        assert got is not None
        assert got[0] == d.Met(number=3, nodes=[0, 1], payloads=[b"mine", b"its"])
    else:
        with pytest.raises(MismatchError, match=r"^meeting 3: node 0 meets on session.sampler, and node 1"):
            acting.do([MEET, report])
    assert heard.said == ["a report"]
    here.close()
    worker.close()
