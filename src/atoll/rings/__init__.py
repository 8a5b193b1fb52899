"""Order of a ring's members, chosen from the links between their machines.

Pure: from bandwidth and latency. `train/group/ordering.py` measures these and tries an order.
"""
