"""How a worker may end: the script that ends so, and what `atoll run` is to say of it.

The script's one argument is the name of an ending, which happens to worker 1, at its third step as a rule.
The other worker would make 30 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

SCRIPT = r"""
import ctypes, os, signal, sys, threading, time
ending = sys.argv[1]
bad = (os.environ.get("ATOLL_RANK") or os.environ.get("RANK")) == "1"
if bad and ending == "killed at import": os.kill(os.getpid(), signal.SIGKILL)
if bad and ending == "no join": sys.exit(0)
if bad and ending == "no join, status 3": sys.exit(3)
if bad and ending == "import": import torchh
if bad and ending == "syntax": exec("def broken(:")
import torch, atoll
from torch import nn
from torch.utils.data import DataLoader

class Base(BaseException):
    pass
class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")
class Slow(Exception):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGTERM)  # from torchrun, which another worker's error has reached first
        return "the first cause"
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        if bad and ending == "loader" and index % 50 == 17: raise KeyError(f"broken sample {index}")
        if bad and ending == "loader exit" and index % 50 == 17: sys.exit("no more samples")
        if bad and ending == "loader killed" and index % 50 == 17: os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4), torch.ones(1)
def deep(): deep()
def fill_disk():
    with open(os.environ["ATOLL_RUN_DIRECTORY"] + "/filler", "ab", buffering=0) as file:
        for piece in (bytes(4096), b"0"):
            try:
                while True: file.write(piece)
            except OSError:
                pass
def end():
    if "full" in sys.argv: fill_disk()
    if ending == "raise": raise ValueError("the first cause")
    if ending == "chain":
        try: {}["key"]
        except KeyError as error: raise RuntimeError("the outer one") from error
    if ending == "lost peer by hand": raise RuntimeError("my own: connection closed by peer")
    if ending == "surrogate": raise ValueError("no such file: \udc80.png")
    if ending == "control": raise ValueError("red \x1b[31m\x00 bell \x07\nsecond line\nthird line")
    if ending == "huge": raise ValueError("z" * (4 << 20))
    if ending == "mute": raise Mute
    if ending == "slow": raise Slow
    if ending == "base": raise Base("a BaseException")
    if ending == "stop": next(iter([]))
    if ending == "deep": deep()
    if ending == "memory": bytearray(1 << 60)
    if ending == "torch memory": torch.ones(1 << 50)
    if ending == "text": sys.exit("the last word")
    if ending == "status 0": sys.exit(0)
    if ending == "status 3": sys.exit(3)
    if ending == "at once 0": os._exit(0)
    if ending == "at once 5": os._exit(5)
    if ending == "interrupt": raise KeyboardInterrupt
    if ending == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if ending == "terminated": os.kill(os.getpid(), signal.SIGTERM)
    if ending == "stopped": os.kill(os.getpid(), signal.SIGSTOP)
    if ending == "segfault": ctypes.string_at(0)
    if ending == "abort": os.abort()
    if ending == "no file": open("/no/such/file")
    if ending == "thread":
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()

with atoll.join() as session:
    if bad and ending == "raise in join": raise ValueError("the first cause")
    model = nn.Linear(5 if bad and ending == "width" else 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if bad and ending == "forward":
        model.register_forward_hook(lambda *_: 1 / 0)
    session.prepare(model, optimizer)
    def step(inputs):
        loss = model(inputs).square().mean()
        if bad and ending == "nan" and session.iteration == 2: loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if ending.startswith("loader"):
        dataset = Data()
        sampler = session.sampler(dataset, seed=0)
        for inputs, _ in DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1):
            step(inputs)
    for i in range(30):
        if bad and i == 2: end()
        if ending == "logged key": session.log(**{"\udc80" if bad else "key": 1.0})
        step(torch.ones(4, 4))
        time.sleep(0.02)
    if ending == "save path": session.save("folder-\udc80")
if bad and ending == "after": raise ValueError("the first cause")
print("end", os.environ.get("RANK"), flush=True)
"""

STRATEGIES: dict[str, tuple[str, ...]] = {
    "ring": ("run.strategy=ring",),
    "hierarchical": ("run.strategy=hierarchical",),
    "elastic ring": ("run.strategy=ring", "run.elastic=true"),
    "elastic hierarchical": ("run.strategy=hierarchical", "run.elastic=true"),
    "server": ("run.strategy=server", "sync.consistency=bsp"),
    "asp": ("run.strategy=server", "sync.consistency=asp"),
    "ps-hra": ("run.strategy=ps-hra", "groups.links=0"),
    "peers": ("run.strategy=peers",),  # elastic as each of the servers: a worker may die alone
}
TOGETHER = ("ring", "hierarchical")  # where no worker may die alone
_AT = r"at train\.py:\d+"
_AFTER = r", after [\d.]+ s"
_LOG = r"; its log is run/logs/worker-1\.log"


@dataclass(frozen=True)
class Ending:
    """What the command says of one way to end.

    `says` is a pattern for the line on the first cause, without "atoll: ", and `status` the exit status.
    Where `says` is empty and the status 0, the run ends well. Where a worker may die alone, `alone` is a
    pattern for a warning instead, and the status is 0.
    """

    family: str
    says: str
    status: int = 1
    alone: str = ""


def _error(kind: str, text: str = "") -> Ending:
    said = f": {text}" if text else ""
    return Ending("error", f"worker 1 ended with {kind} {_AT}{_AFTER}{said}{_LOG}")


def _exit(status: int, call: str, more: str = "", code: int = 0) -> Ending:
    return Ending("exit", f"worker 1 ended with status {status}{call}{_AFTER}{more}{_LOG}", code or status)


def _signal(name: str, why: str = "", status: int = 1) -> Ending:
    alone = rf"worker 1 was killed by {name}; the others go on without it"
    return Ending("signal", f"worker 1 was killed by {name}{why}{_AFTER}{_LOG}", status, alone)


def _early(call: str) -> Ending:
    line = f"worker 1 ended with status 0{call}{_AFTER}, before its session was over{_LOG}"
    return Ending("exit", line, 1, f"{line}; the others go on without it")


_SYS_EXIT = rf" \(sys\.exit {_AT}\)"
_MEMORY = r" \(the system does that when memory runs out\)"
_UNJOINED = f"worker 1 ended with status 0{_SYS_EXIT}{_AFTER}, without calling atoll\\.join{_LOG}"
ENDINGS: dict[str, Ending] = {
    "raise": _error("ValueError", "the first cause"),
    "raise in join": _error("ValueError", "the first cause"),
    "import": _error("ModuleNotFoundError", "No module named 'torchh'"),
    "syntax": _error("SyntaxError", r"invalid syntax \(<string>, line 1\)"),
    "forward": _error("ZeroDivisionError", "division by zero"),
    "after": _error("ValueError", "the first cause"),
    "chain": _error("RuntimeError", "the outer one"),
    "no file": _error("FileNotFoundError", r"\[Errno 2\] No such file or directory: '/no/such/file'"),
    "lost peer by hand": _error("RuntimeError", "my own: connection closed by peer"),
    "loader": _error("KeyError", r"Caught KeyError in DataLoader .* KeyError: 'broken sample \d+'"),
    "loader killed": _error(r"\w+Error", r"DataLoader worker \(pid.*\) (is killed by|exited unex).*"),
    "loader exit": _error(
        r"\w+Error", rf"a process of its DataLoader ended with status 1{_SYS_EXIT}: no more samples"
    ),
    "surrogate": _error("ValueError", r"no such file: \\udc80\.png"),
    "control": _error("ValueError", r"red \\x1b\[31m\\x00 bell \\x07 \.\.\. third line"),
    "huge": _error("ValueError", "z{190,} .{0,20}z{90,}"),
    "mute": _error("Mute", r"<its text cannot be shown: str\(\) raised RuntimeError>"),
    "slow": _error("Slow", "the first cause"),
    "base": _error("Base", "a BaseException"),
    "stop": _error("StopIteration"),
    "deep": _error("RecursionError", "maximum recursion depth exceeded.*"),
    "memory": _error("MemoryError"),
    "torch memory": _error("RuntimeError", ".*can't allocate memory.*"),
    "width": Ending("error", r"the workers differ: .* on worker 0 and .* on worker 1; .*", 2),
    "nan": Ending("error", r"iteration 2: the gradient of 'bias' on worker 1 holds NaN or infinity; .*", 2),
    "text": _exit(1, _SYS_EXIT, ": the last word"),
    "status 3": _exit(3, _SYS_EXIT),
    "no join, status 3": _exit(3, _SYS_EXIT),
    "no join": Ending("exit", _UNJOINED),
    "status 0": _early(_SYS_EXIT),
    "at once 0": _early(""),
    "at once 5": _exit(5, ""),
    "interrupt": Ending("exit", rf"worker 1 was interrupted \(KeyboardInterrupt {_AT}\){_AFTER}{_LOG}", 130),
    "killed": _signal("SIGKILL", _MEMORY),
    "terminated": _signal("SIGTERM", status=143),
    "stopped": Ending(
        "signal",
        "worker 0 waited .* s for worker 1 .*",
        1,
        r"worker 1 (stands still|has stood still) .*; it is killed",
    ),
    "segfault": _signal("SIGSEGV"),
    "abort": _signal("SIGABRT"),
    "killed at import": Ending(
        "signal", f"worker 1 was killed by SIGKILL before the run began{_MEMORY}{_AFTER}{_LOG}"
    ),
    "thread": Ending("well", "", 0),
    "logged key": Ending("well", "", 0),
    "save path": Ending("well", "", 0),
}
