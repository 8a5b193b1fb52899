"""Parts of each client of the shards, at a worker and at a site: the link to them, and error feedback.

Nothing here knows the script, its gradients' hooks, or what a shard does with what it is sent.
"""
