"""The hub: who takes part, where the shards are, which samples are whose, and why. No tensor passes through
it."""
