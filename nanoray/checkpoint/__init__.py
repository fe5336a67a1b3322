"""The state of a run as parts, its files, and a copy of them elsewhere."""
