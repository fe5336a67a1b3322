"""Benchmarks of a machine and of nanoray on it. Nothing imports them."""
