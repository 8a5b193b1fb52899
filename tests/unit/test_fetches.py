"""What members of a group ask of one another: real sockets, and whatever a stranger may say there."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import AtollError, DeadlineError, PeerLostError, UserError
from atoll.net import fetches
from atoll.net.fetches import FetchLink, FetchService, RefusedError
from atoll.wire.base import WireError
from atoll.wire.fetches import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    FETCH_BYTES,
    OPENING_BYTES,
    Fetch,
    answer_untrusted,
    encode_answer,
    encode_fetch,
    fetch_untrusted,
    kind_bytes,
    opening,
    opening_untrusted,
)
from support.leaks import still_open

PAYLOAD = secrets.token_bytes(3 * 2**20 + 7)
SECONDS = 20.0  # more than anything here takes


@contextmanager
def payload_of(fetch: Fetch) -> Iterator[memoryview]:
    if fetch.kind == "nothing":
        raise UserError("chunk 7 has no 'nothing'\nand more")
    if fetch.kind == "slow":
        raise DeadlineError(f"waited 3 s for the step of chunk {fetch.chunk}, which has not ended")
    yield memoryview(PAYLOAD)


@pytest.fixture
def service() -> Iterator[FetchService]:
    made = FetchService("127.0.0.1", 4, SECONDS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def lasting() -> Iterator[FetchService]:
    made = FetchService("127.0.0.1", 4, SECONDS)
    made.serve(payload_of)
    yield made
    made.close()


def connect(service: FetchService, secret: bytes | None = None, rank: int = 1) -> FetchLink:
    address = (service.host, service.port)
    return FetchLink("member 2", address, secret or service.secret, rank, time.monotonic() + SECONDS)


def fetch(
    link: FetchLink, kind: str = "values", nbytes: int = len(PAYLOAD), seconds: float = SECONDS
) -> bytes:
    into = bytearray(nbytes)
    wanted = Fetch(7, kind, 41, nbytes)
    link.fetch(wanted, memoryview(into), time.monotonic() + seconds, lambda: None)
    return bytes(into)


def everything(link: socket.socket) -> bytes:
    """What is said on a connection up to its end."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):  # there was more than it cared to read
        while more := link.recv(4096):
            heard += more
    return heard


def until(condition: object) -> None:
    end = time.monotonic() + SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_payload_comes_whole_or_its_beginning(service: FetchService) -> None:
    link = connect(service)
    service.serve(payload_of)
    assert fetch(link) == PAYLOAD
    assert fetch(link, nbytes=5) == PAYLOAD[:5]
    until(lambda: service.sent == len(PAYLOAD) + 5)
    link.close()


def test_several_threads_fetch_at_once_each_on_a_link(service: FetchService) -> None:
    service.serve(payload_of)
    got: list[bool] = []

    def ask() -> None:
        link = connect(service)
        got.extend(fetch(link) == PAYLOAD for _ in range(5))
        link.close()

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert got == [True] * 30


def test_who_asks_before_the_owner_serves_waits_for_it(service: FetchService) -> None:
    link, got = connect(service), list[bytes]()
    asking = threading.Thread(target=lambda: got.append(fetch(link)))
    asking.start()
    service.serve(payload_of)
    asking.join(SECONDS)
    assert got == [PAYLOAD]
    link.close()


def test_a_refusal_is_told_in_its_line_and_the_link_goes_on(service: FetchService) -> None:
    service.serve(payload_of)
    link = connect(service)
    with pytest.raises(RefusedError, match=r"^member 2: chunk 7 has no 'nothing'$"):
        fetch(link, "nothing")
    with pytest.raises(RefusedError, match=r"^member 2: waited 3 s for the step of chunk 7"):
        fetch(link, "slow")
    more = len(PAYLOAD) + 1
    with pytest.raises(RefusedError, match=f"'values' of chunk 7 has {len(PAYLOAD)} bytes, not {more}"):
        fetch(link, nbytes=more)
    assert fetch(link) == PAYLOAD
    link.close()


def test_a_service_without_chunks_refuses_after_its_patience() -> None:
    service = FetchService("127.0.0.1", 2, 0.05)
    link = connect(service)
    with pytest.raises(RefusedError, match=r"member 2: it has waited 0\.05 s to hold any chunks"):
        fetch(link)
    link.close()
    service.close()


def test_an_owner_that_does_not_answer_passes_the_deadline(service: FetchService) -> None:
    over = threading.Event()

    @contextmanager
    def never(_: Fetch) -> Iterator[memoryview]:
        over.wait(SECONDS)
        yield memoryview(PAYLOAD)

    service.serve(never)
    link = connect(service)
    with pytest.raises(DeadlineError):
        fetch(link, seconds=0.3)
    link.close()
    over.set()


def test_a_client_that_takes_nothing_is_given_up() -> None:
    """A member that is stopped in the middle of a payload holds its owner's memory for as long as that."""
    given = threading.Event()
    payload = memoryview(bytes(64 * 2**20))  # more than the kernel takes for it

    @contextmanager
    def pinned(_: Fetch) -> Iterator[memoryview]:
        yield payload
        given.set()  # only after a whole answer

    let_go = threading.Event()

    @contextmanager
    def watched(wanted: Fetch) -> Iterator[memoryview]:
        try:
            with pinned(wanted) as memory:
                yield memory
        finally:
            let_go.set()

    service = FetchService("127.0.0.1", 2, 0.5)
    service.serve(watched)
    link = connect(service)
    link._link.sendall(encode_fetch(Fetch(7, "values", 0, len(payload))))
    assert let_go.wait(SECONDS)
    assert not given.is_set()
    link.close()
    service.close()


@pytest.mark.parametrize("moment", ["before the answer", "in the middle of the payload"])
def test_an_owner_that_ends_is_lost_at_once(moment: str) -> None:
    """By a server that is ours up to that moment."""
    listener = socket.create_server(("127.0.0.1", 0))
    secret = secrets.token_bytes(32)

    def serve() -> None:
        accepted, _ = listener.accept()
        with accepted:
            challenge = secrets.token_bytes(CHALLENGE_BYTES)
            accepted.sendall(challenge)
            said = accepted.recv(OPENING_BYTES, socket.MSG_WAITALL)
            rank, theirs = opening_untrusted(said, challenge, secret)
            accepted.sendall(fetches.server_proof(rank, theirs, secret))
            head = accepted.recv(FETCH_BYTES, socket.MSG_WAITALL)
            accepted.recv(kind_bytes(head), socket.MSG_WAITALL)
            if moment != "before the answer":
                accepted.sendall(encode_answer(False, 1000) + bytes(999))

    thread = threading.Thread(target=serve)
    thread.start()
    link = FetchLink("member 2", listener.getsockname(), secret, 1, time.monotonic() + SECONDS)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="member 2: "):
        fetch(link, nbytes=1000)
    assert time.monotonic() - began < SECONDS / 2
    thread.join(SECONDS)
    link.close()
    listener.close()


def test_who_does_not_know_the_secret_gets_nothing(service: FetchService) -> None:
    service.serve(payload_of)
    with pytest.raises(PeerLostError, match="member 2 did not let this member in"):
        connect(service, secret=bytes(32))
    with pytest.raises(PeerLostError, match="member 2 did not let this member in"):
        connect(service, rank=4)  # of a group of four
    link = connect(service)
    assert fetch(link) == PAYLOAD
    link.close()


def test_who_listens_in_a_members_place_is_found_out() -> None:
    """It has the port, and not the secret."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(bytes(CHALLENGE_BYTES))
            accepted.recv(OPENING_BYTES, socket.MSG_WAITALL)
            accepted.sendall(bytes(32))

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(PeerLostError, match="does not know the group's secret"):
        FetchLink("member 2", listener.getsockname(), bytes(32), 1, time.monotonic() + SECONDS)
    thread.join(SECONDS)
    listener.close()


def test_strangers_take_no_more_than_their_places(
    service: FetchService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many that connect and are silent: the next member waits at most until they are given up."""
    monkeypatch.setattr(fetches, "OPENING_SECONDS", 0.3)
    service.serve(payload_of)
    address = (service.host, service.port)
    strangers = [socket.create_connection(address, SECONDS) for _ in range(3 * fetches.MOST_STRANGERS)]
    heard = [len(everything(each)) for each in strangers]  # until each is sent away
    assert sum(count > 0 for count in heard) > 0
    assert set(heard) <= {0, CHALLENGE_BYTES}
    link = connect(service)
    assert fetch(link, nbytes=9) == PAYLOAD[:9]
    for each in (*strangers, link):
        each.close()


def test_silent_strangers_shut_no_member_out(service: FetchService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member comes in at once, however many hold a place: the one that came first goes."""
    monkeypatch.setattr(fetches, "OPENING_SECONDS", 100 * SECONDS)
    service.serve(payload_of)
    address = (service.host, service.port)
    strangers = [socket.create_connection(address, SECONDS) for _ in range(fetches.MOST_STRANGERS)]
    for each in strangers:  # it has a thread, and a place
        assert len(each.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
    link = connect(service)
    assert fetch(link, nbytes=9) == PAYLOAD[:9]
    assert everything(strangers[0]) == b""
    for each in strangers[1:]:
        each.setblocking(False)
        with pytest.raises(BlockingIOError):
            each.recv(1)
    for each in (*strangers, link):
        each.close()


def test_a_member_that_a_flood_has_pushed_out_comes_again(
    service: FetchService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers that come fast enough take its place before it has said who it is."""
    service.serve(payload_of)
    pushed, meet = list[int](), service._meet

    def late(link: socket.socket) -> None:
        if len(pushed) < 3:
            pushed.append(1)
            raise ConnectionError("its place went to another one")
        meet(link)

    monkeypatch.setattr(service, "_meet", late)
    link = connect(service)
    assert len(pushed) == 3
    assert fetch(link, nbytes=9) == PAYLOAD[:9]
    link.close()


ANSWERS = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda head, rest: encode_answer(False, head) + rest, st.integers(0, 40), st.binary(max_size=60)
    ),
    st.builds(lambda text: encode_answer(True, len(text)) + text, st.binary(max_size=60)),
)


@settings(max_examples=30, deadline=None)
@given(answer=ANSWERS)
def test_whatever_an_owner_answers_is_the_payload_or_an_error_in_one_line(answer: bytes) -> None:
    """An owner that knows the secret, and answers nonsense."""
    ours, its = socket.socketpair()
    link = FetchLink.__new__(FetchLink)
    link._name, link._link = "member 2", ours
    its.sendall(answer)
    its.shutdown(socket.SHUT_WR)
    into, raised = bytearray(9), None
    try:
        link.fetch(Fetch(7, "values", 1, 9), memoryview(into), time.monotonic() + SECONDS, lambda: None)
    except AtollError as error:
        raised = error
    assert raised is None or str(raised).isprintable()
    assert raised is not None or answer[ANSWER_BYTES : ANSWER_BYTES + 9] == into
    ours.close()
    its.close()


@given(st.binary(max_size=120))
def test_whatever_a_stranger_says_ends_its_connection_alone(lasting: FetchService, said: bytes) -> None:
    with socket.create_connection((lasting.host, lasting.port), SECONDS) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        heard = everything(stranger)
    assert len(heard) == CHALLENGE_BYTES
    link = connect(lasting)
    assert fetch(link, nbytes=3) == PAYLOAD[:3]
    link.close()


@given(st.binary(min_size=ANSWER_BYTES, max_size=ANSWER_BYTES), st.integers(1, 2**40))
def test_an_answer_is_what_was_asked_for_or_a_short_refusal(head: bytes, asked: int) -> None:
    try:
        refused = answer_untrusted(head, asked)
    except WireError:
        return
    assert refused <= 4096
    assert head == encode_answer(bool(refused), refused or asked)


@given(st.binary(min_size=FETCH_BYTES, max_size=FETCH_BYTES), st.binary(max_size=255))
def test_a_fetch_is_read_as_it_was_written_or_not_at_all(head: bytes, kind: bytes) -> None:
    try:
        read = fetch_untrusted(head, kind)
    except WireError:
        return
    assert encode_fetch(read) == head + kind


@given(st.binary(min_size=OPENING_BYTES, max_size=OPENING_BYTES), st.binary(min_size=32, max_size=32))
def test_no_opening_is_believed_without_its_proof(said: bytes, secret: bytes) -> None:
    challenge = bytes(CHALLENGE_BYTES)
    with pytest.raises(WireError, match="without the secret"):
        opening_untrusted(said, challenge, secret)
    own = opening(3, bytes(CHALLENGE_BYTES), challenge, secret)
    assert opening_untrusted(own, challenge, secret) == (3, bytes(CHALLENGE_BYTES))
    with pytest.raises(WireError, match="without the secret"):
        opening_untrusted(own, b"x" * CHALLENGE_BYTES, secret)  # said to another service


def test_a_closed_service_leaves_nothing_behind() -> None:
    before = still_open()
    service = FetchService("127.0.0.1", 2, SECONDS)
    service.serve(payload_of)
    link, silent = connect(service), connect(service)
    assert fetch(link, nbytes=9) == PAYLOAD[:9]
    service.close()
    service.close()
    with pytest.raises(PeerLostError):
        fetch(link, nbytes=9)
    link.close()
    silent.close()
    assert not still_open() - before
