"""A node's CPU side under strategy `peers`: a process that exchanges contributions with other nodes and steps
the global parameters. The worker's part is in `train`."""
