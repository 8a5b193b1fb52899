"""What a shard does before the hub, and so any worker, hears of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import CheckpointError, UserError
from atoll.server import main
from atoll.server.journal import Folder
from atoll.server.options import ServerOptions
from atoll.server.snapshot import read_contents


class StopHereError(Exception):
    """The shard has come to the hub."""


@pytest.mark.parametrize("kind", ["shard", "site"])
def test_torch_is_warm_before_the_hub_hears_of_a_shard(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the model's set-up takes seconds, in which the shard answers nobody, and all workers wait."""
    done: list[str] = []

    def hub(*_: Any, **__: Any) -> None:
        done.append("hub")
        raise StopHereError

    monkeypatch.setattr(main, "warm_up", lambda: done.append("warm"))
    monkeypatch.setattr(main, "HubLink", hub)
    serve: Any = {"shard": main.serve, "site": main.serve_site}[kind]
    which: Any = {"shard": 0} if kind == "shard" else {"site": "paris"}
    with pytest.raises(StopHereError):
        serve(ServerOptions(hub="tcp://127.0.0.1:1", **which))
    assert done == ["warm", "hub"]


def test_what_is_wrong_is_told_before_torch_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "warm_up", lambda: pytest.fail("who started it waits for the line"))
    with pytest.raises(UserError, match="no address"):
        main.serve(ServerOptions(hub="tcp://127.0.0.1:1", shard=0, listen="rubbish"))


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    """A later Atoll's: the fields may mean something else."""
    Folder(tmp_path, "run", 0).close()
    (path,) = tmp_path.glob("*.json")
    identity = json.loads(path.read_bytes())
    assert identity["format"] == 1
    path.write_text(json.dumps({**identity, "format": 2}))
    with pytest.raises(CheckpointError, match=r"not a shard's: Invalid enum value 2 - at `\$\.format`"):
        Folder(tmp_path, "run", 0)
    (tmp_path / "snapshot.json").write_text(json.dumps({"format": 2, "heading": {}, "chunks": []}))
    with pytest.raises(
        CheckpointError, match=r"not a shard's snapshot: Invalid enum value 2 - at `\$\.format`"
    ):
        read_contents(tmp_path)
