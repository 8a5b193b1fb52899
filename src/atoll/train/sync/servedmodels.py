"""The models that one worker trains at the shards. There are none until the script prepares them."""

from __future__ import annotations

from typing import Protocol

from atoll.train.sync.server import Server


class AtShards(Protocol):
    """One model at the shards (`train/sync/strategies.py`: ServedModel)."""

    exchange: Server
    set_ups: int  # the number of set-ups so far

    def set_up(self) -> None: ...

    def arrive(self, what: str) -> None: ...

    def compare(self) -> None: ...

    def fetch_parameters(self) -> None: ...


class ServedModels:
    """The models at the shards, added as they are prepared. A call concerns all of them unless its docstring
    says otherwise."""

    def __init__(self) -> None:
        self._models: list[AtShards] = []

    def put(self, number: int, model: AtShards) -> None:
        """Add a model, or put it in the place of the one that had its number before."""
        if number < len(self._models):
            model.set_ups = self._models[number].set_ups
        self._models[number : number + 1] = [model]

    @property
    def exchange(self) -> Server:
        """The exchange of the first model; a group has only one model."""
        return self._models[0].exchange

    @property
    def contributors(self) -> list[int]:
        """The living contributors, by the log's latest answer; empty while unknown."""
        return self._models[0].exchange.contributors if self._models else []

    def before_load(self) -> bool:
        """Wait until what this worker has sent counts; return True if the script has written to
        parameters."""
        for model in self._models:
            model.exchange.settle()
        return any(model.exchange.parameters.changed() for model in self._models)

    def set_up(self) -> None:
        """Bring the present models and optimizers to the shards."""
        for model in self._models:
            model.set_up()

    def compare(self) -> None:
        """Compare the models with those at the shards, before this worker enters a run under way."""
        for model in self._models:
            model.compare()

    def entered(self) -> int:
        """Take the newest parameters, as this worker enters the run; return the iteration that it makes
        next."""
        for model in self._models:
            model.fetch_parameters()
        return self._models[0].exchange.steps

    def refresh(self) -> None:
        """Fetch the shards' present parameters."""
        for model in self._models:
            model.exchange.refresh()

    def catch_up(self, clock: int) -> None:
        """Go on at iteration `clock`, after a meeting of the workers."""
        for model in self._models:
            model.exchange.catch_up(clock)

    def arrive(self, what: str) -> None:
        """Let the first model's shards know that this worker talks for another contributor (see
        `ServedModel.arrive`)."""
        self._models[0].arrive(what)

    def gather_members(self) -> None:
        """Return when all members of this worker's group have come to a meeting."""
        for model in self._models:
            model.exchange.gather_members()
