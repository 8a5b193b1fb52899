"""What is asked over a connection: the answer, a refusal, or a deadline that names who and on what."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from net_parts import ANY, HELLO, KEYS, LIMIT, OTHERS, SOON, must_receive, pair, until

from atoll.core.errors import DeadlineError, PeerLostError, RunError, UserError
from atoll.net.endpoint import Client, Server, poll
from atoll.net.keys import Keys
from atoll.net.requests import RefusedError, ask, wait_for
from atoll.wire.messages import (
    Heartbeat,
    Message,
    Reform,
    Reformed,
    Refused,
    Welcome,
    decode_untrusted,
    encode,
)

BEAT = Heartbeat(run="r", incarnation=1)


@pytest.fixture(params=["plain", "keys"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return KEYS if request.param == "keys" else None


@contextmanager
def answering(server: Server, *answers: Message) -> Iterator[list[Message]]:
    """Answer the next message with all of `answers`; yields what came."""
    came: list[Message] = []

    def run() -> None:
        received = must_receive(server)
        came.append(decode_untrusted(received.header))
        for answer in answers:
            server.send(received.peer, encode(answer), b"payload")  # type: ignore[arg-type]

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield came
    finally:
        thread.join(SOON)


def test_ask_returns_the_answer_and_puts_others_aside(keys: Keys | None) -> None:
    aside: list[Message] = []
    with (
        pair(keys) as (server, client),
        answering(server, BEAT, Welcome(run="r")) as came,
    ):
        answer, payload = ask(
            client, HELLO, Welcome, SOON, "being let in", aside=lambda m, _: aside.append(m)
        )
    assert (answer.run, payload, aside, came) == ("r", b"payload", [BEAT], [HELLO])


def test_a_refusal_is_the_reason() -> None:
    with (
        pair() as (server, client),
        answering(server, Refused(reason="this is run b")),
        pytest.raises(RefusedError, match=rf"hub at {server.address} refused: this is run b"),
    ):
        ask(client, HELLO, (Welcome,), SOON, "being let in")
    assert issubclass(RefusedError, UserError)


@pytest.mark.parametrize("older", [("Reform", 6), ("Lease", 7)])
def test_a_refusal_of_an_older_request_is_not_one_of_this(older: tuple[str, int]) -> None:
    request, number = older
    wish = Reform(incarnation=1, number=7, group=1, rank=0, round=3)
    with (
        pair() as (server, client),
        answering(
            server, Refused(reason="late", request=request, number=number), Reformed(group=2, number=7)
        ),
    ):
        assert ask(client, wish, Reformed, SOON, "the next ring", number=7)[0].group == 2
    with (
        pair() as (server, client),
        answering(server, Refused(reason="no such ring", request="Reform", number=7)),
        pytest.raises(RefusedError, match="no such ring"),
    ):
        ask(client, wish, Reformed, SOON, "the next ring", number=7)


def test_a_deadline_names_who_and_on_what() -> None:
    with pair() as (server, client):
        until(lambda: client.connected)
        start = time.monotonic()
        with pytest.raises(
            DeadlineError,
            match=rf"^waited 0.3 s for hub at {server.address} on being let in \(deadline sync.timeout, 0",
        ):
            ask(client, HELLO, Welcome, 0.3, "being let in")
        assert 0.29 < time.monotonic() - start < SOON
    with Client("tcp://127.0.0.1:1", None, limit=LIMIT, name="hub") as client:
        until(lambda: client.trouble == "nothing listens there")
        with pytest.raises(DeadlineError, match=r"\(deadline sync.timeout, 0.3 s; nothing listens there\)"):
            ask(client, HELLO, Welcome, 0.3, "being let in")


def test_ask_with_a_wrong_key_does_not_wait_for_the_deadline() -> None:
    with (
        Server(ANY, KEYS, limit=LIMIT, name="hub") as server,
        Client(server.address, OTHERS, limit=LIMIT, name="hub") as client,
        pytest.raises(UserError, match="refuses this key"),
    ):
        ask(client, HELLO, Welcome, 600, "being let in")


def test_ask_of_a_server_that_dies_does_not_wait_for_the_deadline() -> None:
    with pair() as (server, client):

        def die() -> None:
            must_receive(server)
            server.close()

        thread = threading.Thread(target=die)
        thread.start()
        start = time.monotonic()
        with pytest.raises(
            PeerLostError, match="the connection to hub at .* lost while waiting for being let"
        ):
            ask(client, HELLO, Welcome, 600, "being let in")
        assert time.monotonic() - start < SOON
        thread.join(SOON)


def test_an_answer_sent_before_the_end_is_still_taken() -> None:
    """The connection is lost while the answer waits to be taken."""
    for _ in range(20):
        with pair() as (server, client):
            until(lambda: client.connected)
            losses = client.losses
            client.send(encode(HELLO))
            received = must_receive(server)
            server.send(received.peer, encode(Welcome(run="r")))
            assert poll([client], SOON) == [client]
            server.close()
            until(lambda client=client, losses=losses: client.losses > losses)  # type: ignore[misc]
            assert wait_for(client, Welcome, SOON, "being let in", losses)[0].run == "r"


def test_nonsense_for_an_answer() -> None:
    with pair() as (server, client):

        def babble() -> None:
            server.send(must_receive(server).peer, b"\xc1nonsense")

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(RunError, match="hub at .* sent no message of this protocol"):
            ask(client, HELLO, Welcome, SOON, "being let in")
        thread.join(SOON)
