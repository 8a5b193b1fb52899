"""What a worker shares with whoever steps its parameters: the link to shards and error feedback, and the
memory, the parameters and the state that a node's worker and its CPU side have in common.

Nothing here knows the script, its gradients' hooks, or what a shard does with what it is sent.
"""
