"""Where workers stand in their scripts: which places go together, and the line for those that do not."""

from __future__ import annotations

import msgspec
import pytest

from atoll.core.stands import (
    LOOP,
    MOST_BYTES,
    SAMPLER,
    UNKNOWN,
    Epoch,
    Stand,
    StandError,
    are_consistent,
    call,
    decode_stand,
    describe_mismatch,
    encode_stand,
    end,
    gradients,
    gradients_in,
    mixed_epochs,
)

AT_5 = gradients(5, "train.py:28")
SAVE = call("session.save", "train.py:31")
REDUCE = call("session.reduce", "train.py:40", asks="mean of a number")
SAME_ORDER = "ll workers must make the same calls in the same order, also one without a batch"
EQUAL_STEPS = (
    "Every worker must make equally many steps (session.sampler deals equal shares; a worker without a batch "
    "still calls optimizer.step())"
)


@pytest.mark.parametrize(
    ("stands", "places", "advice"),
    [
        (
            [AT_5, SAVE],
            ["at the gradients of step 5 (train.py:28)", "in session.save (train.py:31)"],
            "Every worker calls session.save: take it out of `if session.is_main`",
        ),
        (
            [call("session.load", "a.py:1"), AT_5],
            ["in session.load (a.py:1)", "at the gradients of step 5 (train.py:28)"],
            "Every worker calls session.load: take it out of `if session.is_main`",
        ),
        (
            [SAVE, end(6, "train.py:9")],
            ["in session.save (train.py:31)", "at the end of its session after 6 steps (train.py:9)"],
            "Every worker calls session.save: take it out of `if session.is_main`",
        ),
        (
            [SAVE, call("session.barrier", "train.py:50")],
            ["in session.save (train.py:31)", "in session.barrier (train.py:50)"],
            "Every worker calls session.save: take it out of `if session.is_main`",
        ),
        (
            [AT_5, end(1, "")],
            ["at the gradients of step 5 (train.py:28)", "at the end of its session after 1 step"],
            EQUAL_STEPS,
        ),
        (
            [AT_5, gradients(4, "train.py:28")],
            ["at the gradients of step 5 (train.py:28)", "at the gradients of step 4 (train.py:28)"],
            EQUAL_STEPS,
        ),
        (
            [gradients(5, "a.py:1", model="model 1"), gradients(5, "a.py:2", model="model 2")],
            [
                "at the gradients of step 5 of model 1 (a.py:1)",
                "at the gradients of step 5 of model 2 (a.py:2)",
            ],
            "Every worker must train the same models in the same order",
        ),
        (
            [AT_5, REDUCE],
            ["at the gradients of step 5 (train.py:28)", "in session.reduce(mean of a number) (train.py:40)"],
            "Every worker calls session.reduce, and calls it after equally many steps: take it out of "
            "`if session.is_main`, or deal equal shares with session.sampler",
        ),
        (
            [REDUCE, call("session.reduce", "train.py:40", asks="sum of a number")],
            [
                "in session.reduce(mean of a number) (train.py:40)",
                "in session.reduce(sum of a number) (train.py:40)",
            ],
            "All calls of session.reduce that meet must be of the same operation, shape and dtype",
        ),
        (
            [call("session.gather", "train.py:1"), call("session.gather", "train.py:2")],
            ["in session.gather (train.py:1)", "in session.gather (train.py:2)"],
            f"Calls of session.gather meet only from one line of the script: a{SAME_ORDER}",
        ),
        (
            [call("session.gather", "train.py:1"), call("session.barrier", "train.py:2")],
            ["in session.gather (train.py:1)", "in session.barrier (train.py:2)"],
            f"A{SAME_ORDER}",
        ),
        (
            [gradients(1, ""), call("optimizer.step", "")],
            ["at the gradients of step 1", "in optimizer.step"],
            f"A{SAME_ORDER}",
        ),
        (
            [call("clip_grad_norm_", "", asks="0.1"), call("clip_grad_norm_", "", asks="0.2")],
            ["in clip_grad_norm_(0.1)", "in clip_grad_norm_(0.2)"],
            "All calls of clip_grad_norm_ that meet must ask for the same",
        ),
    ],
)
def test_a_mismatch_is_one_line_with_the_advice_that_fits(
    stands: list[Stand], places: list[str], advice: str
) -> None:
    assert not are_consistent(stands)
    assert len({stand.digest() for stand in stands}) == len(stands)
    line = f"worker 0 is {places[0]}; worker 1 is {places[1]}. {advice}"
    assert describe_mismatch(dict(enumerate(stands))) == line


@pytest.mark.parametrize(
    "stands",
    [
        [],
        [AT_5],
        [AT_5, gradients(5, "train.py:29")],  # a backward may stand in a branch
        [SAVE, call("session.save", "train.py:33")],
        [REDUCE, call("session.reduce", "train.py:40", asks="mean of a number", step=9)],
        [end(3, "a.py:1"), end(3, "a.py:2")],
    ],
)
def test_places_that_go_together(stands: list[Stand]) -> None:
    assert are_consistent(stands)
    assert len({stand.digest() for stand in stands}) <= 1


def test_lines_are_not_compared_with_a_worker_that_knows_none() -> None:
    here, unknown = call("session.gather", "train.py:1"), call("session.gather", "")
    assert are_consistent([here, unknown])
    assert not are_consistent([here, unknown, call("session.gather", "train.py:2")])


def test_barriers_of_two_lines_meet() -> None:
    """Worker 0 prepares data and then comes to its barrier, while the others wait at theirs."""
    stands = [call("session.barrier", "train.py:9"), call("session.barrier", "train.py:5")]
    assert are_consistent(stands)
    assert stands[0].digest() == stands[1].digest()


def test_workers_at_one_place_are_named_together() -> None:
    few = describe_mismatch({0: AT_5, 1: SAVE, 2: AT_5, 3: AT_5})
    assert few.startswith("workers 0, 2 and 3 are at the gradients of step 5 (train.py:28); worker 1 is in ")
    many = describe_mismatch({rank: AT_5 if rank else SAVE for rank in range(64)})
    assert "; workers 1, 2, 3, 4, 5 and 58 others are at the gradients of step 5 (train.py:28). " in many


def test_peers_are_called_nodes() -> None:
    line = describe_mismatch({"a": AT_5, "b": SAVE}, noun="node")
    assert line.startswith("node a is at the gradients")
    assert "Every node calls session.save" in line
    assert "worker" not in line


@pytest.mark.parametrize(
    "stand", [AT_5, SAVE, REDUCE, end(7, ""), call("x" * 999, "y" * 999, asks="z" * 999)]
)
def test_a_stand_survives_its_encoding(stand: Stand) -> None:
    raw = encode_stand(stand)
    assert len(raw) <= MOST_BYTES
    assert decode_stand(raw) == stand


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 10,
        msgspec.msgpack.encode({"kind": "dance"}),
        msgspec.msgpack.encode({"kind": "end", "step": -1}),
        msgspec.msgpack.encode({"kind": "end", "more": 1}),
        msgspec.msgpack.encode({"kind": "call", "name": "a" * 257}),
        msgspec.msgpack.encode({"kind": "call", "name": "\x1b[2J"}),
        b"\x00" * (MOST_BYTES + 1),
    ],
)
def test_bytes_that_are_no_stand_are_refused(raw: bytes) -> None:
    with pytest.raises(StandError):
        decode_stand(raw)


def test_epochs_that_scripts_show_are_compared_if_they_are_of_one_kind() -> None:
    def line(*epochs: Epoch) -> str:
        return mixed_epochs({n: gradients_in(7, "train.py:9", each) for n, each in enumerate(epochs)})

    assert line() == line(UNKNOWN, UNKNOWN) == line(Epoch(0, LOOP), Epoch(0, LOOP), UNKNOWN) == ""
    assert line(Epoch(0, LOOP), Epoch(1, SAMPLER)) == ""
    assert line(Epoch(1, "train.py:4"), Epoch(2, "train.py:5")) == ""  # loops of several loaders
    assert line(Epoch(1, "train.py:4"), Epoch(2, "train.py:4")).startswith(
        "worker 0 is at the gradients of step 7 of pass 1 over the DataLoader of train.py:4 (train.py:9); "
        "worker 1 is at the gradients of step 7 of pass 2 over the DataLoader of train.py:4 (train.py:9). "
        "These batches are trained together"
    )
    many = line(*(Epoch(n, LOOP) for n in range(4000)))
    assert "worker 3 is" in many
    assert "worker 4 is" not in many
    assert len(many) < 1024
