"""Pure decisions about chunks in a device's memory: which moves, when, and what leaves for it."""

from atoll.moves.cache import Cache, Decision, Eviction, Full, Policy, StepStatistics
from atoll.moves.optimum import optimum
from atoll.moves.order import Order

__all__ = ["Cache", "Decision", "Eviction", "Full", "Order", "Policy", "StepStatistics", "optimum"]
