"""A model as a table: its modules, their costs, and one batch of it: `nanoray inspect TARGET`."""
