"""Processes of a run that stand still (SIGSTOP): they are killed once the hub has given them up."""

from __future__ import annotations

import time

from atoll.launch.parts import called, part_of
from atoll.launch.processes import Standstill, is_stopped
from atoll.launch.restarts import Process
from atoll.launch.services import Services
from atoll.launch.words import Words
from atoll.launch.workers import WorkerLaunches

_LOOK_SECONDS = 0.5  # between looks
_GIVEN_UP_SECONDS = 1.0  # beyond the hub's patience, so that the hub gives a process up first


class ProcessWatch:
    """Watches the processes of `workers` and `services`. `patience`: the hub's, in seconds.

    If the hub does not judge (`hub_judges`), a node that stands still may go on and come back: it is killed
    only once others have ended.
    """

    def __init__(
        self, workers: WorkerLaunches, services: Services, words: Words, patience: float, hub_judges: bool
    ) -> None:
        self._workers, self._services, self._words = workers, services, words
        self._hub_judges = hub_judges
        self._standstill = Standstill(patience + _GIVEN_UP_SECONDS)
        self._next_look = 0.0  # monotonic

    def give_up(self, who: str) -> list[int]:
        """Kill the process of a part that the hub has given up, if it stands still. Return the ranks of
        workers that run on."""
        going: list[int] = []
        for name, (rank, process) in self._by_name().items():
            if process.poll() is not None or part_of(name) != who:
                continue
            if is_stopped(process.pid):
                self._kill(name, "stands still (SIGSTOP), and the hub has given it up")
            elif name == who:  # a worker
                going.append(rank)
        return going

    def look(self) -> None:
        """Kill processes that have stood still for too long: the hub has given them up, and others may
        wait for them."""
        now = time.monotonic()
        if not self._hub_judges and set(self._workers.codes()) <= {None}:
            return
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        there = self._by_name()
        living = {pid: name for name, (_, each) in there.items() for pid in self._workers.pids(each)}
        for pid, seconds in self._standstill.look(living).items():
            self._kill(living[pid], f"has stood still for {seconds:.0f} s (SIGSTOP)")

    def _kill(self, name: str, why: str) -> None:
        rank, process = self._by_name()[name]
        self._words.warn(self._workers.lead(rank), f"{called(name)} {why}; it is killed")
        process.kill()

    def _by_name(self) -> dict[str, tuple[int, Process]]:
        """Return workers and services by name, each with the launch whose journal reports on it."""
        workers = self._workers
        there: dict[str, tuple[int, Process]] = {
            workers.name_of(rank): (rank, process) for rank, process in enumerate(workers.processes)
        }
        return there | {name: (0, service) for name, service in self._services.processes.items()}
