"""The order in which a ring's sums pass its members, chosen from the links between their machines.

Pure: from figures of bandwidth and latency. Who measures them, and who tries an order, is
`train/group/ordering.py`.
"""
