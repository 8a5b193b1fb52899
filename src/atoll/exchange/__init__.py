"""Code that a worker shares with the process that steps its parameters: the link to shards, error feedback
and codecs, and the memory, parameters and state that a node's worker and its CPU side have in common.

Nothing here knows the script, the hooks on its gradients, or what a shard does with a message.
"""
