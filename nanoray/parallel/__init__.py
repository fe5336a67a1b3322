"""Process groups, collectives, and every way to share the work among ranks."""
