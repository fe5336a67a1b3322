"""What is seen of a run: instruments, traces, where the time went, trackers, the report."""
