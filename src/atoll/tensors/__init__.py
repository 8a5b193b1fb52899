"""Chunks on torch: binding parameters and gradients to them, optimizers that step them, checkpoints."""
