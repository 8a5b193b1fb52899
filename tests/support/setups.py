"""A Setup as a worker brings it to a shard, for tests in which nothing is trained."""

from __future__ import annotations

import msgspec

from atoll.core.optimizerkind import OptimizerKind
from atoll.wire.messages import Setup

SETUP = Setup(
    digest="d",
    layout=msgspec.Raw(msgspec.msgpack.encode({})),
    chunks=[0],
    optimizers=[OptimizerKind("torch.optim.sgd.SGD", 1)],
    hyperparameters=[{"lr": 0.1}],
    consistency="asp",
    slack=0,
    workers=2,
    shards=1,
)
