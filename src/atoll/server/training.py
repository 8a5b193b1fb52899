"""The model that a shard trains at present."""

from __future__ import annotations

from atoll.server.model import Model


class Training:
    """Holds the present model: `model` is described by the latest Setup, and None before the first."""

    def __init__(self) -> None:
        self.model: Model | None = None

    @property
    def there(self) -> Model:
        """The model, after the first Setup."""
        assert self.model is not None
        return self.model

    @property
    def iterations(self) -> int:
        """Number of finished iterations; 0 before the first Setup."""
        return self.model.iterations if self.model is not None else 0
