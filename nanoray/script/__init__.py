"""A user's own model, optimizer, data and callbacks in the loop."""
