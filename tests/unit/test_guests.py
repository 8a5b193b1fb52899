"""Which nodes a CPU side lets in by how they write gradients."""

from __future__ import annotations

from atoll.cpuside.guests import Guests, Places
from atoll.wire.base import VERSION
from atoll.wire.nodes import Greet


def test_nodes_with_unlike_codecs_refuse_each_other_in_one_line() -> None:
    guests = Guests("run", 0, "tcp://127.0.0.1:1", Places(2, None, "tcp://127.0.0.1:1"), "bfloat16")

    def refusal(codec: str) -> str:
        given = Greet(
            version=VERSION, run="run", node=1, incarnation=0, to=0, address="tcp://127.0.0.1:2", life="a",
            codec=codec,
        )  # fmt: skip
        return guests.refusal(given, "")

    assert refusal("bfloat16") == ""
    assert refusal("float32") == (
        "node 1 has sync.codec 'float32', and node 0 has 'bfloat16': a run's gradients are written by one "
        "codec; set sync.codec to the same on all"
    )
