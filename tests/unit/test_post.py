"""The post between a worker and its node's CPU side."""

from __future__ import annotations

import os
import socket

import pytest

from atoll.net.post import Post, PostClosedError


def test_a_closed_post_is_over_at_the_other_end_although_a_forked_process_has_a_copy_of_its_socket() -> None:
    """Else a CPU side waits for the processes of a DataLoader, and is killed after 5 s."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    of_loader = os.dup(here.fileno())
    mine, other = Post(here), Post(there)
    try:
        mine.close()
        with pytest.raises(PostClosedError):
            other.receive()
    finally:
        os.close(of_loader)
        other.close()


def test_a_post_whose_other_end_is_gone_closes() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Post(there).close()
    Post(here).close()
