"""The exchanges of groups, or of workers without one: with a server's shards, with peers, and between
replicas."""
