"""A virtual clock and network, for tests and for the planner: an hour of a bad link runs in a second."""

from atoll.sim.clock import VirtualClock
from atoll.sim.links import Counters, LinkModel
from atoll.sim.network import Delivery, Network

__all__ = ["Counters", "Delivery", "LinkModel", "Network", "VirtualClock"]
