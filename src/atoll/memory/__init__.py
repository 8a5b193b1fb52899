"""Training what does not fit: parameters, gradients and optimizer state in chunks over tiers of memory."""
