"""One HTML page about a run, or about several beside each other: `nanoray report RUN [RUN ...]`."""
