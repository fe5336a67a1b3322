"""What needs nothing of nanoray: files, output, metrics, storage."""
