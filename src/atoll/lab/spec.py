"""Files between the runner and a lab's first process: the spec, and the result."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.core.decoding import from_json
from atoll.core.errors import UserError
from atoll.lab.topology import Site, Topology

_PLACEHOLDER = re.compile(r"\{(site|index|worker|workers|sites|address|first)\}")


class Spec(msgspec.Struct, frozen=True):
    """A lab: topology, command of each worker, the lab's own folder, and the folder of records."""

    topology: Topology
    command: list[str]
    folder: str
    records: str
    run: str

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @staticmethod
    def read(path: Path) -> Spec:
        return from_json(path.read_bytes(), Spec)


class Result(msgspec.Struct, frozen=True):
    """Result of a lab.

    `status` is the command's; `line` is the error, and `user` is True if the user's input caused it; `report`
    is the closing report.
    """

    status: int
    line: str = ""
    user: bool = False
    report: str = ""


@dataclass(frozen=True)
class Worker:
    """One start of the command: its number over all sites, from 0, its site, and its speed."""

    number: int
    site: Site
    speed: float

    @property
    def name(self) -> str:
        return f"{self.site.name} {self.number}"


def workers_of(topology: Topology) -> list[Worker]:
    """Return all workers, in the order of sites."""
    placed = [(site, speed) for site in topology.sites for speed in site.speeds]
    return [Worker(number, site, speed) for number, (site, speed) in enumerate(placed)]


def command_of(worker: Worker, command: Sequence[str], topology: Topology) -> list[str]:
    """Return the worker's command, with placeholders filled in.

    Placeholders are `{site}`, `{index}` (of the site, from 0), `{worker}`, `{workers}`, `{sites}`,
    `{address}` and `{first}` (the first site's address); other braces stay.
    """
    values = {
        "site": worker.site.name,
        "index": worker.site.index - 1,
        "worker": worker.number,
        "workers": len(workers_of(topology)),
        "sites": len(topology.sites),
        "address": worker.site.address,
        "first": topology.sites[0].address,
    }
    return [_PLACEHOLDER.sub(lambda found: str(values[found[1]]), word) for word in command]


def check_command(command: Sequence[str], topology: Topology, environment: Mapping[str, str]) -> None:
    """Raise UserError if a worker's command does not exist or cannot be executed."""
    if not command:
        raise UserError("a lab runs a command: give one after --, such as -- python train.py")
    for worker in workers_of(topology):
        program = command_of(worker, command, topology)[0]
        if shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
            raise UserError(f"{program}: {_problem_with(program)}")


def _problem_with(program: str) -> str:
    if "/" not in program:
        return "no such command; it is looked for in the directories of PATH"
    path = Path(program)
    if not path.exists():
        return "no such file"
    return "is a directory; give a command" if path.is_dir() else "may not be executed (chmod +x)"
