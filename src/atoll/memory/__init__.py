"""Chunked memory: training what does not fit on the device, nor on the host."""

from atoll.memory.fit import Fitted, fit
from atoll.memory.initialising import init
from atoll.memory.over import over
from atoll.memory.weights import load, save

__all__ = ["Fitted", "fit", "init", "load", "over", "save"]
