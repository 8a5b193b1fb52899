"""Checkpoints of a session, and the state that all replicas have in common."""
