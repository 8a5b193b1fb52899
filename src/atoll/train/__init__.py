"""The session: where a training script, its tensors and the other workers meet."""
