"""The planner: what a way of synchronising costs, and which is the best for the machines at hand."""
