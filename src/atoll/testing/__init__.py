"""Tiny models, a plain-PyTorch reference, and a pool of worker processes: what Atoll's own tests stand on.

Public, so that a project that trains with Atoll can hold its own models to the same proofs.
Nothing in Atoll imports this package.
"""
