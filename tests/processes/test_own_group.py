"""A script's own process group, beside the session, where workers are started one by one."""

from __future__ import annotations

import pytest
from run_command import Command

SCRIPT = """
import atoll, torch, torch.distributed as dist
with atoll.join() as session:
    dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    print("own group", int(one), session.world)
    dist.destroy_process_group()
"""
OPTIONS = {
    "elastic": ["--set", "run.elastic=true"],
    "server": ["--strategy", "server"],
    "peers": ["--strategy", "peers"],
}


@pytest.mark.soak
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_script_meets_for_a_group_of_its_own(command: Command, kind: str) -> None:
    status, out, err = command.run(SCRIPT, options=OPTIONS[kind])
    assert (status, out.strip()) == (0, "own group 2 2"), err
