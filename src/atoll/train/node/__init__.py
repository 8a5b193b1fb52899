"""A node of strategy `peers`: its CPU side, a process of its own, and what its workers have of it."""
