"""Shards in threads, and workers that speak the messages to them, over loopback: for the tests of shards."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from losing import Loses, LosingServer
from torch import Tensor, nn

from atoll.chunks import ChunkMap, lay_out
from atoll.core.optimizerkind import OptimizerKind
from atoll.net.endpoint import Client, Server
from atoll.server.payloads import payload_of
from atoll.server.shard import Shard
from atoll.store.balance import balance
from atoll.tensors.binding import specs_of
from atoll.tensors.payload import tensor_of
from atoll.tensors.shardoptimizer import full_name
from atoll.wire import messages as m
from atoll.wire.messages import AnyMessage, decode_untrusted, encode, plain_hyperparameters

DEADLINE = 60.0
SHAPES = [(33, 5), (33,), (65, 7), (7,), (40, 16), (), (300,)]
M = TypeVar("M", bound=m.Message)
torch.set_num_threads(1)  # the order of a sum depends on it


class Cluster:
    """Shards in threads, without a hub."""

    def __init__(
        self,
        shards: int,
        workers: int,
        prepare: Callable[[Shard], None] = lambda _: None,
        loses: Loses | None = None,
        **options: Any,
    ) -> None:
        """`prepare` is called for each before it serves; `loses` says what their links lose."""
        self.stop = threading.Event()
        make_server = Server if loses is None else partial(LosingServer, loses)
        self.servers = [
            make_server("tcp://127.0.0.1:0", keys=None, limit=2**24, name=f"shard {i}") for i in range(shards)
        ]
        log = self.servers[0].address
        self.shards = [
            Shard(
                i,
                server,
                run="test",
                workers=workers,
                log_address=log,
                **{key: value(i) if callable(value) else value for key, value in options.items()},
            )
            for i, server in enumerate(self.servers)
        ]
        for shard in self.shards:
            prepare(shard)
        self.errors: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._run, args=(shard,), daemon=True) for shard in self.shards
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, shard: Shard) -> None:
        try:
            shard.run(self.stop.is_set)
        except BaseException as error:
            self.errors.append(error)
        finally:
            shard.close()

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def close(self) -> None:
        self.stop.set()
        knocks = [Client(address, None, limit=2**10, name="a shard") for address in self.addresses]
        for knock in knocks:
            knock.send(encode(m.Ping()))  # it need not sleep to its end
        for thread in self.threads:
            thread.join(DEADLINE)
        for knock in knocks:
            knock.close()
        for server in self.servers:
            server.close()


class Peer:
    """Connections to all shards, and what has come from each, by type."""

    def __init__(self, addresses: list[str]) -> None:
        self.clients = [
            Client(address, None, limit=2**24, name=f"shard {i}") for i, address in enumerate(addresses)
        ]
        self.come: list[dict[type, deque[tuple[Any, memoryview | None]]]] = [
            defaultdict(deque) for _ in addresses
        ]

    def send(self, shard: int, message: AnyMessage, payload: Any = None) -> None:
        self.clients[shard].send(encode(message), payload)

    def expect(self, shard: int, kind: type[M], deadline: float = DEADLINE) -> tuple[M, memoryview | None]:
        end = time.monotonic() + deadline
        come = self.come[shard]
        while not come[kind]:
            if come[m.Refused] and kind is not m.Refused:
                raise AssertionError(f"refused: {come[m.Refused].popleft()[0].reason}")
            received = self.clients[shard].receive(max(0.0, end - time.monotonic()))
            assert received is not None, f"no {kind.__name__} from shard {shard} in {deadline} s"
            message = decode_untrusted(received[0])
            come[type(message)].append((message, received[1]))
        found: tuple[M, memoryview | None] = come[kind].popleft()
        return found

    def heard(self, shard: int = 0) -> None:
        """Return when the shard has handled all that was sent to it; what it has answered is in `come`."""
        self.send(shard, m.WhoIsMissing())
        end = time.monotonic() + DEADLINE
        while True:
            received = self.clients[shard].receive(max(0.0, end - time.monotonic()))
            assert received is not None, f"shard {shard} has not handled what was sent in {DEADLINE} s"
            message = decode_untrusted(received[0])
            # Who has not said Hello is refused, which is an answer too.
            if isinstance(message, m.Missing) or getattr(message, "request", "") == m.WhoIsMissing.__name__:
                return
            self.come[shard][type(message)].append((message, received[1]))

    def refused(self, shard: int = 0) -> str:
        return self.expect(shard, m.Refused)[0].reason

    def silent(self, shard: int, kind: type, seconds: float = 0.2) -> bool:
        try:
            self.expect(shard, kind, seconds)
        except AssertionError as error:
            return str(error).startswith("no ")
        return False

    def close(self) -> None:
        for client in self.clients:
            client.close()


class Model:
    """A few parameters, plain torch's optimizer of them, and their layout in chunks."""

    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shards: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            f"p{i}": nn.Parameter(torch.randn(s, generator=generator)) for i, s in enumerate(SHAPES)
        }
        self.every = list(self.parameters.values())
        self.plain = make(self.every)
        self.layout: ChunkMap = lay_out(
            specs_of(self.parameters, dict.fromkeys(self.every, "0")), chunk_bytes=1024
        )
        self.chunks = [chunk.id for chunk in self.layout.chunks]
        places = balance([chunk.nbytes for chunk in self.layout.chunks], shards)
        self.shard_of = dict(zip(self.chunks, places, strict=True))
        self.shards = shards

    def held(self, shard: int) -> list[int]:
        return [chunk for chunk, place in self.shard_of.items() if place == shard]

    def flat(self, chunk: int, tensors: list[Tensor] | None = None) -> Tensor:
        tensors = [p.detach() for p in self.every] if tensors is None else tensors
        laid = self.layout.chunks[chunk]
        flat = torch.zeros(laid.extent)
        for slot in laid.slots:
            flat[slot.offset : slot.offset + slot.numel] = tensors[slot.parameter].reshape(-1)
        return flat

    def slots(self, chunk: int) -> int:
        return len(self.layout.chunks[chunk].slots)

    def hyperparameters(self) -> list[dict[str, Any]]:
        return plain_hyperparameters(list(self.plain.param_groups))

    def optimizers(self) -> list[OptimizerKind]:
        return [OptimizerKind(full_name(type(self.plain)), len(self.plain.param_groups))]

    def setup(self, shard: int, *, workers: int, digest: str = "d", **changes: Any) -> m.Setup:
        given: dict[str, Any] = {
            "digest": digest,
            "layout": msgspec.Raw(msgspec.msgpack.encode(self.layout)),
            "chunks": self.held(shard),
            "optimizers": self.optimizers(),
            "hyperparameters": self.hyperparameters(),
            "consistency": "bsp",
            "slack": 0,
            "workers": workers,
            "shards": self.shards,
        }
        return m.Setup(**{**given, **changes})

    def go_back(self, values: list[nn.Parameter], state: dict[str, Any]) -> None:
        """Be again what these were copied from."""
        for parameter, value in zip(self.every, values, strict=True):
            parameter.detach().copy_(value.detach())
        self.plain.load_state_dict(state)

    def step_plain(self, gradients: list[Tensor], missing: tuple[int, ...] = ()) -> None:
        for i, (parameter, gradient) in enumerate(zip(self.every, gradients, strict=True)):
            parameter.grad = None if i in missing else gradient.clone()
        self.plain.step()


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Worker(Peer):
    """A worker that has said Hello, or a member of a group."""

    def __init__(
        self, addresses: list[str], rank: int, model: Model, incarnation: int = 0, member: int = 0
    ) -> None:
        super().__init__(addresses)
        self.rank, self.model, self.incarnation = rank, model, incarnation or rank + 1
        self.member = member
        for shard in range(len(addresses)):
            self.send(shard, self.hello())
            assert self.expect(shard, m.Welcome)[0].run == "test"

    def hello(self, **changes: Any) -> m.Hello:
        given = {"version": m.VERSION, "run": "test", "role": "worker", "worker": self.rank}
        return m.Hello(**{**given, "incarnation": self.incarnation, "member": self.member, **changes})

    def set_up(self, workers: int, **changes: Any) -> None:
        for shard in range(self.model.shards):
            self.send(shard, self.model.setup(shard, workers=workers, **changes))
            for chunk in self.model.held(shard):
                self.send(shard, m.SetChunk(chunk=chunk), payload_of(self.model.flat(chunk)))

    def ready(self, digest: str = "d", wait: bool = True) -> None:
        for shard in range(self.model.shards):
            self.send(shard, m.Ready(digest=digest))
        for shard in range(self.model.shards if wait else 0):
            self.expect(shard, m.Ready)

    def push(
        self,
        iteration: int,
        tensors: list[Tensor],
        missing: tuple[int, ...] = (),
        pull: bool = False,
        share: int = 0,
        shares: int = 1,
        late: bool = False,
    ) -> None:
        """All chunks, or a share of each; with `pull`, each shard's last one asks for what comes of them."""
        for chunk, shard in self.model.shard_of.items():
            last = chunk == self.model.held(shard)[-1]
            self.push_chunk(shard, chunk, iteration, tensors, missing, pull and last, share, shares, late)

    def push_chunk(
        self,
        shard: int,
        chunk: int,
        iteration: int,
        tensors: list[Tensor],
        missing: tuple[int, ...] = (),
        pull: bool = False,
        share: int = 0,
        shares: int = 1,
        late: bool = False,
    ) -> None:
        zeroed = [torch.zeros_like(t) if i in missing else t for i, t in enumerate(tensors)]
        present = bytes(slot.parameter not in missing for slot in self.model.layout.chunks[chunk].slots)
        message = m.Push(
            incarnation=self.incarnation,
            iteration=iteration,
            chunk=chunk,
            chunks_in_all=len(self.model.held(shard)),
            present=present,
            pull=pull,
            share=share,
            shares=shares,
            late=late,
        )
        flat = self.model.flat(chunk, zeroed)
        start, stop = m.run_of(flat.numel(), share, shares)
        self.send(shard, message, payload_of(flat[start:stop]))

    def commit(self, iteration: int, weight: float = 1.0, **more: Any) -> None:
        self.send(
            0,
            m.Commit(
                incarnation=self.incarnation, iteration=iteration, weight=weight, samples=2 * weight, **more
            ),
        )

    def means(self, iteration: int, ask: bool = True, share: int = 0) -> dict[int, tuple[Tensor, bytes]]:
        found = {}
        for shard in range(self.model.shards if ask else 0):
            self.send(shard, m.PullMean(incarnation=self.incarnation, iteration=iteration))
        for shard in range(self.model.shards):
            for _ in self.model.held(shard):
                mean, payload = self.expect(shard, m.Mean)
                assert (mean.iteration, mean.share) == (iteration, share)
                assert payload is not None
                found[mean.chunk] = tensor_of(payload, torch.float32), mean.present
        return found

    def say_step(self, iteration: int, scale: float = 1.0, **more: Any) -> None:
        given = {"hyperparameters": self.model.hyperparameters(), "scale": scale, **more}
        self.send(0, m.Step(incarnation=self.incarnation, iteration=iteration, **given))

    def ask(self, clock: int, **share: int) -> None:
        for shard in range(self.model.shards):
            self.send(shard, m.Pull(incarnation=self.incarnation, clock=clock, **share))

    def parameters(self, clock: int | None = None, share: int = 0) -> dict[int, Tensor]:
        """The answer to `ask`, bit by bit."""
        found = {}
        for shard in range(self.model.shards):
            for _ in self.model.held(shard):
                message, payload = self.expect(shard, m.Parameters)
                assert clock is None or message.clock == clock
                assert message.share == share
                assert payload is not None
                found[message.chunk] = tensor_of(payload, torch.float32)
        return found

    def assert_has(self, found: dict[int, Tensor]) -> None:
        assert sorted(found) == self.model.chunks
        for chunk, values in found.items():
            assert torch.equal(values, self.model.flat(chunk)), chunk


class Run:
    """A cluster, its workers and the model, ready to train."""

    def __init__(
        self,
        shards: int,
        workers: int,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.01),
        consistency: str = "bsp",
        slack: int = 0,
        setup: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`setup` has what the Setup says beside the rest."""
        self.model = Model(make, shards)
        self.cluster = Cluster(shards, workers, **options)
        self.workers = [Worker(self.cluster.addresses, rank, self.model) for rank in range(workers)]
        for worker in self.workers[1:]:
            worker.ready(wait=False)  # before anything is set up
        self.workers[0].set_up(workers, consistency=consistency, slack=slack, **(setup or {}))
        self.workers[0].ready()
        for worker in self.workers[1:]:
            for shard in range(shards):
                worker.expect(shard, m.Ready)
        self.peers: list[Peer] = list(self.workers)

    def hub(self) -> Peer:
        hub = Peer(self.cluster.addresses[:1])
        self.peers.append(hub)
        hub.send(0, m.Hello(version=m.VERSION, run="test", role="hub"))
        hub.expect(0, m.Welcome)
        return hub

    def again(self, rank: int, incarnation: int, member: int = 0) -> Worker:
        worker = Worker(self.cluster.addresses, rank, self.model, incarnation, member)
        self.peers.append(worker)
        return worker

    def iterate(self, iteration: int, **step: Any) -> None:
        """One iteration of bsp by all workers, each with gradients of its own, and by plain torch."""
        weights = [1.0 + worker.rank for worker in self.workers]
        for worker, weight in zip(self.workers, weights, strict=True):
            worker.push(iteration, gradients(100 * iteration + worker.rank))
            worker.commit(iteration, weight)
        for worker in self.workers:
            worker.means(iteration)
            worker.say_step(iteration, **step)
            worker.ask(iteration + 1)
        mean = mean_of([gradients(100 * iteration + worker.rank) for worker in self.workers], weights)
        self.model.step_plain([each * step.get("scale", 1.0) for each in mean])
        for worker in self.workers:
            worker.assert_has(worker.parameters(iteration + 1))

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.cluster.close()


def mean_of(contributions: list[list[Tensor]], weights: list[float]) -> list[Tensor]:
    total = sum(weights)
    mean = [each * (weights[0] / total) for each in contributions[0]]
    for weight, contribution in zip(weights[1:], contributions[1:], strict=True):
        for sum_, each in zip(mean, contribution, strict=True):
            sum_.add_(each, alpha=weight / total)
    return contributions[0] if len(weights) == 1 else mean
