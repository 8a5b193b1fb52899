"""The hub, which keeps membership, shard addresses, dealt samples and the reasons of decisions. No tensor
passes through it."""
