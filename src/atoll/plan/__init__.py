"""The planner: costs of ways to synchronise, and the best one for given machines."""
