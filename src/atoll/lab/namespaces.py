"""Namespaces of a lab, and each site's network in it.

A lab is one pid, mount and network namespace, made by util-linux's `unshare`. When its first process ends,
the kernel kills all others, and the interfaces go with the last of them: nothing is left behind outside. Each
site has its own network and hostname inside. Its only way out is `wan0`, a TUN device whose other end the
emulator holds. Sources: namespaces(7), pid_namespaces(7), Documentation/networking/tuntap.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import RunError, UserError

DEVICE = "wan0"  # each site's interface
MTU = 1500
NETWORK = "10.77.0.0/16"  # all sites' addresses

_TUN = "/dev/net/tun"
_COMMAND_SECONDS = 30.0  # timeout of `ip` and `unshare`, which take milliseconds
_QUEUED = 10_000  # packets that a TUN device holds for the emulator; the kernel's 500 is a burst of 6 ms

# sched.h, mount.h, if_tun.h and prctl.h of Linux
_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_MS_BIND, _MS_NOSUID, _MS_NODEV = 0x1000, 0x2, 0x4
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO_ECN, _TUN_F_USO4, _TUN_F_USO6 = 0x01, 0x02, 0x08, 0x20, 0x40
_OFFLOADS = _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO_ECN
_VNET_HEADER = 10  # bytes: struct virtio_net_hdr
_PR_SET_CHILD_SUBREAPER = 36

_FORBIDDEN = (
    "this user may not make namespaces here: run it as root, or let an administrator allow user namespaces "
    "(sysctl user.max_user_namespaces=10000, and where there are such keys "
    "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0); in a container, "
    "start that with --privileged"
)


@dataclass(frozen=True)
class SiteSpace:
    """A site's namespaces, as open files, and the emulator's end of its `wan0`."""

    name: str
    network: int
    hostname: int
    tun: int


# Before setting up


def find_way() -> list[str]:
    """Return the command prefix that starts a lab's first process; it is tried once.

    Root makes the namespaces directly, other users (and root in a container) in a user namespace. Raises
    UserError if this machine or user cannot have a lab.
    """
    if not sys.platform.startswith("linux"):
        raise UserError("a lab needs Linux: it is made of network namespaces")
    for command, package in (("unshare", "util-linux"), ("ip", "iproute2")):
        if shutil.which(command, path=_search_path()) is None:
            raise UserError(f"a lab needs the command {command!r}: install the package {package}")
    _check_tun()
    kinds = ["--pid", "--mount", "--mount-proc", "--net", "--uts"]  # of hostnames too, to come back to
    plain = ["unshare", "--fork", *kinds, "--kill-child=KILL"]
    as_user = [*plain, "--user", "--map-root-user"]
    refusal = ""
    for way in [plain, as_user] if os.geteuid() == 0 else [as_user]:
        done = _run([*way, "true"], "unshare")
        if done.returncode == 0:
            return way
        refusal = _last_line(done.stderr) or f"unshare: status {done.returncode}"
    raise UserError(f"{_FORBIDDEN} ({refusal})")


def _check_tun() -> None:
    try:
        os.close(os.open(_TUN, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            hint = f"run it as root, or let an administrator open it to all (chmod 666 {_TUN})"
        elif error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            hint = "as root: modprobe tun; in a container, start that with --device /dev/net/tun"
        else:
            hint = "a lab's links are TUN devices"
        raise UserError(f"{_TUN}: {error.strerror}: {hint}") from None


def _search_path() -> str:
    """Return PATH and the directories of administrators' commands, which ordinary users often lack."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _run(command: Sequence[str], name: str, given: str = "") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            command,
            input=given.encode(),
            capture_output=True,
            timeout=_COMMAND_SECONDS,
            check=False,
            env={**os.environ, "PATH": _search_path(), "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{name} did not end within {_COMMAND_SECONDS:g} s") from None
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _call("prctl", "prctl", _PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


# Within a lab's own namespaces


def bring_up_loopback() -> None:
    """Bring up the loopback of this thread's network namespace."""
    _ip("link set lo up", "the lab's loopback")


def cover_file(path: Path, target: str) -> None:
    """Mount the file `path` over `target` in this mount namespace."""
    _mount(str(path), target, None, _MS_BIND)


def fresh_shared_memory() -> None:
    """Mount an empty /dev/shm, so that killed processes leave no segments on the machine."""
    if Path("/dev/shm").is_dir():
        _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV)


def make_site(name: str, address: str, congestion_control: str = "") -> SiteSpace:
    """Move this thread into a site's new network and hostname namespaces, and set them up.

    Raises UserError, one line with the refused operation.
    """
    _call(f"site {name}: unshare", "unshare", _CLONE_NEWNET | _CLONE_NEWUTS)
    socket.sethostname(name)
    # The links carry IPv4; a device with IPv6 would announce itself over them. Loopback keeps it.
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    if congestion_control:
        _check_congestion_control(congestion_control)
    tun = _open_tun(name)
    lines = [
        "link set lo up",
        f"link set {DEVICE} mtu {MTU} txqueuelen {_QUEUED} up",
        f"address add {address}/32 dev {DEVICE}",
        # Set on the route: for the namespace the kernel allows only algorithms open to all users.
        f"route add {NETWORK} dev {DEVICE} src {address}"
        + (f" congctl {congestion_control}" if congestion_control else ""),
    ]
    _ip("\n".join(lines), f"site {name}")
    network, hostname = (
        os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts")
    )
    return SiteSpace(name, network, hostname, tun)


def _check_congestion_control(name: str) -> None:
    """Raise UserError if the kernel lacks this algorithm."""
    there = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if name not in there:
        raise UserError(f"congestion_control: this kernel has no {name!r}; it has {', '.join(there)}")


@contextlib.contextmanager
def returning() -> Iterator[None]:
    """Return this thread to its present network and hostname namespaces at the end of the context."""
    homes = [os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts")]
    try:
        yield
    finally:
        _enter(*homes)
        for home in homes:
            os.close(home)


@contextlib.contextmanager
def within(site: SiteSpace) -> Iterator[None]:
    """Move this thread, and processes that it starts, into `site` for the context."""
    with returning():
        _enter(site.network, site.hostname)
        yield


def dropped_before_emulator(site: SiteSpace) -> int:
    """Return the packets that the site's TUN device dropped because they were not read in time."""
    with within(site):
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            device, _, counts = line.partition(":")
            if device.strip() == DEVICE:
                return int(counts.split()[11])  # transmit: bytes, packets, errs, drop
    return 0


def _enter(network: int, hostname: int) -> None:
    _call("setns", "setns", network, _CLONE_NEWNET)
    _call("setns", "setns", hostname, _CLONE_NEWUTS)


def _open_tun(site: str) -> int:
    """Open a TUN device with virtio headers and offloads: runs of segments pass as one packet."""
    tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
        fcntl.ioctl(tun, _TUNSETVNETHDRSZ, struct.pack("i", _VNET_HEADER))
        try:
            fcntl.ioctl(tun, _TUNSETOFFLOAD, _OFFLOADS | _TUN_F_USO4 | _TUN_F_USO6)
        except OSError:  # Linux before 6.2 has no segmentation offload for UDP on TUN
            fcntl.ioctl(tun, _TUNSETOFFLOAD, _OFFLOADS)
    except OSError as error:
        os.close(tun)
        raise UserError(f"site {site}: cannot make the TUN device {DEVICE}: {error.strerror}") from None
    return tun


def _ip(batch: str, what: str) -> None:
    done = _run(["ip", "-batch", "-"], "ip", batch + "\n")
    if done.returncode:
        reason = _last_line(done.stderr) or f"status {done.returncode}"
        raise UserError(f"{what}: ip: {reason}")


def _last_line(said: bytes) -> str:
    return (said.decode(errors="replace").strip().splitlines() or [""])[-1]


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    given = [None if text is None else text.encode() for text in (source, target, kind)]
    _call(f"mount {target}", "mount", *given, ctypes.c_ulong(flags), None)


def _call(what: str, function: str, *arguments: object) -> None:
    """Call the C library's `function`; raise UserError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc[function](*arguments) != 0:
        number = ctypes.get_errno()
        hint = f": {_FORBIDDEN}" if number == errno.EPERM else ""
        raise UserError(f"{what}: {os.strerror(number)}{hint}")
