"""The loop, its guards, the optimizers, recovery of a group of ranks."""
