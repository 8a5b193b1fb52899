"""A virtual clock and network: an hour of a bad link runs in a second."""

from support.sim.clock import VirtualClock
from support.sim.links import Counters, LinkModel
from support.sim.network import Delivery, Network

__all__ = ["Counters", "Delivery", "LinkModel", "Network", "VirtualClock"]
