"""A node's CPU side under strategy `peers`, a process: it holds the global parameters, hears the other nodes
and makes their steps. The worker's part is in `train`."""
