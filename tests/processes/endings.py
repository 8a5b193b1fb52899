"""How a worker may end: the script that ends so, and what `atoll run` is to say of it.

The script's one argument is the name of an ending, which happens to worker 1, at its third step as a rule.
The other worker would make 30 steps.
"""

from __future__ import annotations

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
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        if bad and ending == "loader" and index % 50 == 17: raise KeyError(f"broken sample {index}")
        if bad and ending == "loader killed" and index % 50 == 17: os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4), torch.ones(1)
def deep(): deep()
def end():
    if ending == "raise": raise ValueError("the first cause")
    if ending == "chain":
        try: {}["key"]
        except KeyError as error: raise RuntimeError("the outer one") from error
    if ending == "lost peer by hand": raise RuntimeError("my own: connection closed by peer")
    if ending == "surrogate": raise ValueError("no such file: \udc80.png")
    if ending == "control": raise ValueError("red \x1b[31m\x00 bell \x07\nsecond line\nthird line")
    if ending == "huge": raise ValueError("z" * (4 << 20))
    if ending == "mute": raise Mute
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

RING = ("ring", "hierarchical")
ELASTIC = ("elastic ring", "elastic hierarchical")
SERVED = ("server", "asp", "ps-hra")
ALONE = (*ELASTIC, *SERVED, "peers")  # where a worker may die alone
STRATEGIES: dict[str, tuple[str, ...]] = {
    "ring": ("run.strategy=ring",),
    "hierarchical": ("run.strategy=hierarchical",),
    "elastic ring": ("run.strategy=ring", "run.elastic=true"),
    "elastic hierarchical": ("run.strategy=hierarchical", "run.elastic=true"),
    "server": ("run.strategy=server", "sync.consistency=bsp"),
    "asp": ("run.strategy=server", "sync.consistency=asp"),
    "ps-hra": ("run.strategy=ps-hra", "groups.links=0"),
    "peers": ("run.strategy=peers",),
}
