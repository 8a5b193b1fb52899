"""What groups, or workers without one, exchange with each other: the ways to the shards of a server."""
