"""A virtual clock and network, for tests and for the planner: an hour of a bad link runs in a second."""
