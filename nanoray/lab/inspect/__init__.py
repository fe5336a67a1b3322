"""A model as a table: its tree, costs and owners, and one batch of it: `nanoray inspect TARGET`."""
