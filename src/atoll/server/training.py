"""What is trained at a shard now."""

from __future__ import annotations

from atoll.server.model import Model


class Training:
    """`model` is what the latest Setup describes; None before the first."""

    def __init__(self) -> None:
        self.model: Model | None = None

    @property
    def there(self) -> Model:
        """The model, where a Setup has come."""
        assert self.model is not None
        return self.model

    @property
    def iterations(self) -> int:
        """How many iterations are made; 0 before the first Setup."""
        return self.model.iterations if self.model is not None else 0
