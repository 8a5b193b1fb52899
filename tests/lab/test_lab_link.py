"""`atoll link` over an emulated link, whose rate, delay and loss are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.net.keys import make_keys, write_keys
from conftest import obstacle
from support.sites import Sites, pair, phase

DEADLINE = 120.0
RATE, DELAY, SIZE, COUNT = 1e8, 0.02, 1_000_000, 4

pytestmark = [
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "possible"),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="makes network namespaces in this process, which takes root"
    ),
]


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.terminate()
    return process.communicate(timeout=DEADLINE)


def test_what_is_measured_is_what_the_link_is(tmp_path: Path) -> None:
    """No transfer is faster than light, also by the clocks that are compared; what is lost is seen, and no
    block of high priority is missing."""
    write_keys(tmp_path / "keys", make_keys())
    command = [sys.executable, "-m", "atoll.cli.app", "link"]
    keys = ["--key-file", str(tmp_path / "keys")]
    with Sites(pair([phase(RATE, delay=DELAY, queue=2**20, loss=0.02)])) as sites:
        server = sites.start(1, [*command, "serve", "--listen", f"{sites.address(1)}:47710", *keys])
        assert server.stdout is not None
        assert server.stdout.readline().startswith("measures links at tcp://10.77.2.1:47710, with keys")
        asked = ["--transport", "ltp,ltp:reliable,tcp", "--bytes", str(SIZE), "--count", str(COUNT), "--json"]
        client = sites.start(0, [*command, "test", f"{sites.address(1)}:47710", *keys, *asked])
        out, err = client.communicate(timeout=DEADLINE)
        said = end(server)
    assert (client.returncode, err) == (0, ""), said
    made = json.loads(out)
    assert 2 * DELAY <= made["round_trip"] < 2 * DELAY + 0.05
    for each in made["transports"]:
        assert (each["transfers"], each["stopped"]) == (COUNT, "")
        assert min(each["seconds"]) > 8 * SIZE / RATE + DELAY - 0.005
        assert each["highs_missing"] == 0
        assert 0 < each["loss"] < 0.2
    ours, reliable, tcp = made["transports"]
    assert ours["borne"] + ours["filled"] > 0  # 2 % of some 2,300 blocks
    assert reliable["borne"] == reliable["filled"] == 0
    assert reliable["again"] + reliable["repaired"] > 0
    assert tcp["again"] > 0
