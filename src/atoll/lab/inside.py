"""The first process inside a lab: makes the sites, starts everything in them, and ends it again.

It is process 1 of the lab's pid namespace: when it ends, the kernel kills all processes inside. It ends after
its workers, on request, and when the runner's end of the control pipe closes, even by a kill. `runner` starts
this module with the lab's spec and file descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from atoll.core.config import (
    HUB_VARIABLE,
    KEYS_VARIABLE,
    LAB_JOURNALS_VARIABLE,
    LAB_SITE_VARIABLE,
    LAB_WORKER_VARIABLE,
    RANK_VARIABLE,
    RUN_VARIABLE,
    SITE_VARIABLE,
    SPEED_VARIABLE,
)
from atoll.core.errors import AtollError, RunError, UserError
from atoll.lab import namespaces, report, services
from atoll.lab.emulation import START_SECONDS, Emulation
from atoll.lab.output import Output, write_all
from atoll.lab.services import Services
from atoll.lab.spec import Result, Spec, Worker, command_of, workers_of
from atoll.lab.topology import HubPlace

STOP_SECONDS = 5.0  # from a signal to the forced end of the workers
GRACE_SECONDS = 30.0  # from SIGTERM, which a script may handle, to the forced end; the default of `run.grace`
_SERVICE_SECONDS = 5.0  # for hub, shards and emulator to end by themselves
_KILLED_SECONDS = 5.0  # for killed processes to be gone
_DRAIN_SECONDS = 5.0  # for the workers' last lines
_LOOK_SECONDS = 0.05  # between checks of a condition that no signal announces
_IDLE_SECONDS = 0.5  # between checks of hub, shards and emulator while workers work

_NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Stopped(Exception):  # noqa: N818 (it is no error)
    """The lab was told to end before its workers had begun."""


class Inside:
    """One lab, from its first process's start to its end.

    `control` is the pipe from the runner: each byte is a signal's number, and end of file means that the
    runner is gone.
    """

    def __init__(self, spec: Spec, control: int) -> None:
        self._spec, self._control = spec, control
        self._folder, self._records = Path(spec.folder), Path(spec.records)
        self._workers: list[tuple[Worker, subprocess.Popen[bytes]]] = []
        self._services: Services | None = None
        self._emulation: Emulation | None = None
        self._output = Output()
        self._sites: list[namespaces.SiteSpace] = []
        self._signals: list[int] = []  # requests to end
        self._ends: dict[int, int] = {}  # workers' statuses, or minus the signal, in the order of their ends
        self._began = self._over = time.monotonic()  # start of the first worker, end of the last
        self._listen()

    def run(self) -> Result:
        """Run the lab to its end; return its result. Raises AtollError for a part that cannot be set up."""
        line = ""
        try:
            self._make()
            self._began = time.monotonic()
            self._start_workers()
            self._wait(self._is_over, None, _IDLE_SECONDS)
        except Stopped:
            pass
        except RunError as error:
            if not self._workers:
                raise
            line = str(error)
        finally:
            self._over = time.monotonic()
            self._end()
        status, reason = self._outcome()
        line = line or reason
        status = status or (1 if line else 0)
        return Result(status, line, report=self._report(status))

    # Setting up

    def _make(self) -> None:
        topology = self._spec.topology
        namespaces.bring_up_loopback()
        namespaces.fresh_shared_memory()
        self._name_sites()
        self._output.start()
        with namespaces.returning():
            control = topology.congestion_control
            self._sites = [namespaces.make_site(site.name, site.address, control) for site in topology.sites]
        if topology.hub is not None:
            self._serve(topology.hub)
        tuns = [site.tun for site in self._sites]
        emulation = self._emulation = Emulation(self._folder / "spec.json", self._folder, tuns)
        if not self._wait(emulation.carries, START_SECONDS, _LOOK_SECONDS):
            raise RunError(f"the emulator did not begin within {START_SECONDS:g} s")

    def _name_sites(self) -> None:
        """Make sites known by name inside the lab, whatever names the machine has."""
        sites = "".join(f"{site.address} {site.name}\n" for site in self._spec.topology.sites)
        hosts = Path("/etc/hosts")
        if hosts.exists():
            own = self._folder / "hosts"
            own.write_text(f"127.0.0.1 localhost\n::1 localhost\n{sites}" + hosts.read_text(errors="replace"))
            namespaces.cover_file(own, str(hosts))

    def _serve(self, place: HubPlace) -> None:
        """Start hub and shards, and wait until they serve."""
        with namespaces.within(self._sites[place.site]):
            self._services = Services(
                self._spec.topology.sites[place.site].address,
                place,
                workers=len(workers_of(self._spec.topology)),
                run=self._spec.run,
                folder=self._folder,
                logs=self._records / "logs",
            )
        if not self._wait(self._services.are_up, services.START_SECONDS, _LOOK_SECONDS):
            raise RunError(
                f"waited {services.START_SECONDS:g} s for {self._services.missing()} to serve workers"
            )

    def _start_workers(self) -> None:
        topology = self._spec.topology
        for worker in workers_of(topology):
            command = command_of(worker, self._spec.command, topology)
            environment = {**self._environment(), **self._environment_of(worker)}
            with namespaces.within(self._sites[worker.site.index - 1]):
                try:
                    process = subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        start_new_session=True,  # a signal to the worker also reaches its children
                    )
                except OSError as error:
                    raise UserError(f"{command[0]}: cannot be started: {error.strerror}") from None
            self._workers.append((worker, process))
            assert process.stdout is not None
            assert process.stderr is not None
            pipes = process.stdout, process.stderr
            log = self._records / "logs" / f"worker-{worker.number}.log"
            self._output.add(worker.name, [os.dup(pipe.fileno()) for pipe in pipes], log)
            for pipe in pipes:
                pipe.close()

    def _environment(self) -> dict[str, str]:
        """Return the environment common to all workers."""
        foreign = (HUB_VARIABLE, KEYS_VARIABLE, RUN_VARIABLE, RANK_VARIABLE, SITE_VARIABLE, SPEED_VARIABLE)
        environment = {name: value for name, value in os.environ.items() if name not in foreign}
        # c10d would else use the host name's address, or the loopback.
        for library in ("GLOO", "NCCL", "TP"):
            environment[f"{library}_SOCKET_IFNAME"] = namespaces.DEVICE
        workers = len(workers_of(self._spec.topology))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
        environment.setdefault("PYTHONUNBUFFERED", "1")
        environment["TMPDIR"] = str(self._folder / "tmp")  # removed with the lab
        environment[LAB_JOURNALS_VARIABLE] = str(self._records / "journals")
        return environment

    def _environment_of(self, worker: Worker) -> dict[str, str]:
        environment = {
            LAB_SITE_VARIABLE: worker.site.name,
            "ATOLL_LAB_ADDRESS": worker.site.address,
            LAB_WORKER_VARIABLE: str(worker.number),
        }
        if worker.speed != 1.0:
            environment[SPEED_VARIABLE] = f"{worker.speed:g}"
        return environment | (
            self._services.environment(worker.number, worker.site.name) if self._services else {}
        )

    # Watching

    def _is_over(self) -> bool:
        """Return True if there is nothing left to wait for. Raises RunError if hub, shard or emulator has
        ended."""
        for worker, process in self._workers:
            code = process.poll()
            if code is not None and worker.number not in self._ends:
                self._take_end(worker, code)
        if self._signals or self._any_failed() or len(self._ends) == len(self._workers):
            return True
        for part in (self._emulation, self._services):
            if part is not None:
                part.check()
        return False

    def _take_end(self, worker: Worker, code: int) -> None:
        """Record a worker's end. After a kill the others may go on."""
        self._ends[worker.number] = code
        if code < 0 and len(self._ends) < len(self._workers):
            self._output.say(f"atoll: worker {worker.name} {_end_of(code)}; the others go on")

    def _any_failed(self) -> bool:
        """Return True if a worker ended with an error: the others will likely fail too, and are ended."""
        return any(code > 0 for code in self._ends.values())

    def _outcome(self) -> tuple[int, str]:
        """Return the exit status and its reason: a request to end, or else the first worker that failed."""
        if self._signals:
            first = self._signals[0]
            return 128 + first, f"stopped by {_NAMES[first]}"
        for number, code in self._ends.items():
            if code:
                worker, _ = self._workers[number]
                return code if code > 0 else 128 - code, f"worker {worker.name} {_end_of(code)}"
        return 0, ""

    # Ending

    def _end(self) -> None:
        """End workers, then the services, then the emulator, each by force after a time."""
        asked = signal.SIGINT if self._signals[:1] == [signal.SIGINT] else signal.SIGTERM
        self._end_workers(asked)
        if self._services is not None:
            self._services.stop()
            if not self._wait(self._services.have_ended, _SERVICE_SECONDS, _LOOK_SECONDS, patient=True):
                self._services.stop(signal.SIGKILL)
        if self._emulation is not None:
            self._emulation.stop()
            if not self._wait(self._emulation.has_ended, _SERVICE_SECONDS, _LOOK_SECONDS, patient=True):
                self._emulation.kill()
        self._output.close(_DRAIN_SECONDS)

    def _end_workers(self, signum: int) -> None:
        """Pass the signal on; after some seconds, or at a second signal, kill.

        Scripts get time to handle a SIGTERM from the user, but not one that follows another worker's error.
        """
        is_asked = self._signals[:1] == [signal.SIGTERM]
        alive = [process for _, process in self._workers if process.poll() is None]
        for process in alive:
            _signal_group(process.pid, signum)

        def have_ended() -> bool:
            return all(process.poll() is not None for process in alive) or len(self._signals) > 1

        self._wait(have_ended, GRACE_SECONDS if is_asked else STOP_SECONDS, _LOOK_SECONDS, patient=True)
        self._kill_rest()
        self._wait(
            lambda: all(process.poll() is not None for process in alive),
            _KILLED_SECONDS,
            _LOOK_SECONDS,
            patient=True,
        )

    def _kill_rest(self) -> None:
        """Kill the workers and their children: all processes but this one, the services and the emulator."""
        for entry in Path("/proc").glob("[0-9]*"):
            pid = int(entry.name)
            if pid != os.getpid() and not self._owned(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _report(self, status: int) -> str:
        """Write lab.json; return the closing report."""
        carried = self._emulation.carried() if self._emulation is not None else None
        links_began = carried.emulator.started if carried is not None else self._began
        record = report.make(
            self._spec.topology,
            self._spec.command,
            status=status,
            began=time.time() - (time.monotonic() - links_began),
            seconds=self._over - self._began,
            links=carried.links if carried is not None else [],
            emulator=carried.emulator if carried is not None else None,
            dropped_before={site.name: namespaces.dropped_before_emulator(site) for site in self._sites},
            journals=self._records / "journals",
        )
        report.write(record, self._records)
        return report.shown(record)

    # Waiting

    def _listen(self) -> None:
        self._wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in _NAMES:
            signal.signal(signum, lambda signum, _frame: self._signals.append(signum))
        self._poll = select.poll()
        for handle in (self._wake, self._control):
            self._poll.register(handle, select.POLLIN)

    def _wait(
        self, done: Callable[[], bool], seconds: float | None, look: float, patient: bool = False
    ) -> bool:
        """Wait for `done()`, at most `seconds`, checked every `look` seconds; return True if it came true.

        Unless `patient`, raises Stopped when the lab is told to end.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while not done():
            left = look if until is None else min(look, until - time.monotonic())
            if left <= 0:
                return False
            self._take(self._poll.poll(1000 * left))
            self._reap()
            if self._signals and not patient and seconds is not None:
                raise Stopped
        return True

    def _take(self, ready: Sequence[tuple[int, int]]) -> None:
        for handle, _ in ready:
            data = b""
            with contextlib.suppress(BlockingIOError):
                data = os.read(handle, 64)
            if handle == self._control:
                self._signals += list(data)

    def _reap(self) -> None:
        """Reap orphans, which are this process's children; Popen reaps its own."""
        known = {process.pid for _, process in self._workers}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in known or self._owned(found.si_pid):
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(found.si_pid, os.WNOHANG)

    def _owned(self, pid: int) -> bool:
        parts = (self._services, self._emulation)
        return any(part is not None and part.owns(pid) for part in parts)


def _end_with_runner(control: int) -> None:
    """End this process, and so the whole lab, when the other end of `control` closes.

    Runs in its own thread, so that no other wait can delay it.
    """
    poll = select.poll()
    poll.register(control, 0)  # a hang-up is always reported
    poll.poll()
    os._exit(1)


def _end_of(code: int) -> str:
    return f"ended with status {code}" if code > 0 else f"was killed by signal {-code}"


def _signal_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


def main(arguments: Sequence[str]) -> int:
    """Run as a lab's first process, with arguments `spec control result out err`: a path and file
    descriptors."""
    control, result, out, err = map(int, arguments[1:])
    for ours, theirs in ((out, 1), (err, 2)):
        os.dup2(ours, theirs)
        os.close(ours)
    for handle in (control, result):
        os.set_inheritable(handle, False)
    threading.Thread(target=_end_with_runner, args=(control,), name="atoll-lab-leash", daemon=True).start()
    spec = Spec.read(Path(arguments[0]))
    write_all(result, b"+\n")
    try:
        ended = Inside(spec, control).run()
    except AtollError as error:
        ended = Result(error.exit_status, str(error), user=isinstance(error, UserError))
    except OSError as error:  # a full disk, say
        ended = Result(1, f"the lab failed: {error}")
    write_all(result, msgspec.json.encode(ended) + b"\n")
    return ended.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
