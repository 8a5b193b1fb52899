"""A worker that finds no store says which address it has tried."""

from __future__ import annotations

import socket

import pytest

from atoll.core.errors import DeadlineError
from atoll.launch.ports import free_port
from atoll.train.api.place import Place
from atoll.train.members.reach import hidden_address


@pytest.mark.parametrize(
    ("name", "addresses", "said"),
    [
        (
            "localhost",
            ["127.0.0.1", "::1"],
            " (localhost is 127.0.0.1 on this machine, which no other machine",
        ),
        ("box", ["127.0.1.1"], " (box is 127.0.1.1 on this machine, which no other machine reaches; give"),
        ("box", ["127.0.1.1", "10.0.0.2"], ""),
        ("127.0.0.1", ["127.0.0.1"], ""),
    ],
)
def test_a_name_of_a_loopback_address_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, addresses: list[str], said: str
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert hidden_address(name).startswith(said) if said else hidden_address(name) == ""


def test_an_unknown_name_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert hidden_address("nowhere") == ""


@pytest.mark.check
def test_a_worker_without_a_store_names_the_address_after_one_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeadlineError) as raised:
        Place.from_environment(1.0)
    begins = (
        f"no store answered at MASTER_ADDR:MASTER_PORT localhost:{given['MASTER_PORT']} within 1 s (localhost"
    )
    assert str(raised.value).startswith(begins)
