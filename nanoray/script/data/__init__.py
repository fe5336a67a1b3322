"""A script's own data: its datasets and loaders."""
