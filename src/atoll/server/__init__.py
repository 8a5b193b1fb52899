"""A shard of the parameter server: some of the chunks, their optimizer state, their versions."""
