"""Pure decisions about chunks in a device's memory: which moves, when, and what leaves for it."""

from atoll.moves.cache import Cache, CachePlacement, Eviction, Full, Policy, StepStatistics
from atoll.moves.optimum import optimum
from atoll.moves.order import UseOrder

__all__ = ["Cache", "CachePlacement", "Eviction", "Full", "Policy", "StepStatistics", "UseOrder", "optimum"]
