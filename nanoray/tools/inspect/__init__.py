"""The dump of a model: its tree, costs and owners, checked by one batch: `nanoray inspect RUN|CHECKPOINT|CONFIG`."""
