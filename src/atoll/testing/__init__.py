"""Plans of faults: `python -m atoll.testing.faults` lets a planned fault happen to a process of a run.

Nothing else in Atoll imports this package. What only Atoll's own tests and benchmarks stand on is in
`tests/support`.
"""
