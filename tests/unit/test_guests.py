"""Which nodes a CPU side lets in by how they write gradients; which of their processes it knows."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.cpuside.guests import CHUNKS, WORDS, Guests, Places
from atoll.wire.base import VERSION
from atoll.wire.nodes import Greet, Trains


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


def test_the_processes_of_a_nodes_devices_are_known_once_it_is_set_up() -> None:
    """Whichever connection says so, and whichever was made first or anew."""
    guests = Guests("run", 0, "tcp://127.0.0.1:1", Places(2, None, "tcp://127.0.0.1:1"), "float32")

    def greet(way: int, number: int = 0, devices: Sequence[str] = ()) -> None:
        given = Greet(
            version=VERSION, run="run", node=1, incarnation=3, to=0, address="tcp://127.0.0.1:2", life="a",
            way=way, origin="cpu", number=number, devices=list(devices),
        )  # fmt: skip
        guests.admit(b"way %d" % way, given)

    assert guests.origins(1, 3) == ("", [])
    greet(CHUNKS)
    greet(WORDS)
    assert guests.origins(1, 3) == ("cpu", [])
    guests.note_trains(b"way 0", Trains(digest="d", number=1, devices=["one", "other"]))
    assert guests.origins(1, 3) == ("cpu", ["one", "other"])
    greet(CHUNKS, 1, ["one", "other"])
    greet(WORDS)  # its answer is not back yet: Trains follows
    assert guests.origins(1, 3) == ("cpu", ["one", "other"])
    assert guests.origins(1, 4) == guests.origins(0, 3) == ("", [])
