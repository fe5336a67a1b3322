"""Faults that are injected for a test, hangs, and the cause of a failure."""
