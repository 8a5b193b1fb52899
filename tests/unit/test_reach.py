"""At which address workers on several machines listen, where a machine's name leads to the loopback."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from atoll.core.errors import DeadlineError, UserError
from atoll.train.members.reach import Whereabouts, host_among, whereabouts

HIDDEN = "127.0.1.1"
SECONDS = 30.0


def found(*places: tuple[str, str], routes: dict[str, str] | None = None) -> list[str]:
    """Where the workers listen that are on these machines, at these addresses; each machine's own address
    towards others is in `routes`."""
    store = HashStore()

    def host(rank: int) -> str:
        machine, address = places[rank]
        own = Whereabouts(f"id of {machine}", machine, address)
        return host_among(
            store, rank, len(places), own, SECONDS, lambda _other: (routes or {}).get(machine, "")
        )

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(host, range(len(places))))


def test_on_one_machine_all_listen_where_its_name_leads() -> None:
    assert found(("a", HIDDEN), ("a", HIDDEN), ("a", "127.0.0.1")) == ["", "", ""]


def test_names_that_lead_to_addresses_of_the_network_are_left_alone() -> None:
    assert found(("a", "10.0.0.1"), ("b", "10.0.0.2")) == ["", ""]


def test_an_interface_that_was_chosen_is_left_alone() -> None:
    assert found(("a", "10.0.0.1"), ("b", "")) == ["", ""]


def test_a_name_that_leads_to_the_loopback_is_replaced_by_the_address_on_the_way_to_the_others() -> None:
    assert found(("a", "10.0.0.1"), ("b", HIDDEN), routes={"b": "10.0.0.2"}) == ["", "10.0.0.2"]


def test_a_worker_that_could_not_be_reached_is_named_with_the_way_out() -> None:
    with pytest.raises(UserError) as raised:
        found(("a", HIDDEN), ("b", HIDDEN))
    said = str(raised.value)
    assert said.startswith(
        "worker 0 would listen at 127.0.1.1, to which the name of its machine (a) leads, and "
    )
    assert "set GLOO_SOCKET_IFNAME on that machine" in said
    assert "\n" not in said


def test_a_worker_that_does_not_come_is_named_within_the_deadline() -> None:
    own = Whereabouts("a", "a", "10.0.0.1")
    with pytest.raises(DeadlineError, match=r"^worker 0 waited 0\.05 s for worker 1 and worker 2 to come"):
        host_among(HashStore(), 0, 3, own, 0.05)


def test_what_this_machine_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert whereabouts() == whereabouts()
    assert whereabouts().address
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert not whereabouts().address
