"""The models that one worker trains at the shards: there are none until the script prepares them."""

from __future__ import annotations

from typing import Protocol

from atoll.train.sync.server import Server


class AtShards(Protocol):
    """One of them (`train/sync/strategies.py`: ServedModel)."""

    exchange: Server

    def set_up(self) -> None: ...

    def arrive(self, what: str) -> None: ...

    def fetch_parameters(self) -> None: ...


class ServedModels:
    """They are added as they are made; a call concerns all of them."""

    def __init__(self) -> None:
        self._models: list[AtShards] = []

    def add(self, model: AtShards) -> None:
        self._models.append(model)

    @property
    def exchange(self) -> Server:
        """That of a group's one model."""
        return self._models[0].exchange

    @property
    def contributors(self) -> list[int]:
        """Those that live, as the log last said; empty while unknown."""
        return self._models[0].exchange.contributors if self._models else []

    def set_up(self) -> None:
        """Bring models and optimizers to the shards, as they are here."""
        for model in self._models:
            model.set_up()

    def entered(self) -> int:
        """This worker takes part in the run that is under way: it gets the newest parameters; returns the
        shards' iteration that it makes next."""
        for model in self._models:
            model.fetch_parameters()
        return self._models[0].exchange.steps

    def refresh(self) -> None:
        """Fetch the parameters as the shards have them now."""
        for model in self._models:
            model.exchange.refresh()

    def catch_up(self, clock: int) -> None:
        """The workers have met, and the next iteration is `clock`."""
        for model in self._models:
            model.exchange.catch_up(clock)

    def arrive(self, what: str) -> None:
        """This worker speaks for another contributor; `what` is waited for (`ServedModel.arrive`)."""
        self._models[0].arrive(what)

    def gather_members(self) -> None:
        """Return when all members of this worker's group have come to a meeting."""
        for model in self._models:
            model.exchange.gather_members()
